"""What each of two processes does with its part of the data."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aftermap.batches import iterate
from aftermap.curvature.passes.products import GGNOperator
from aftermap.errors import StatisticalWarning
from aftermap.laplace import Laplace
from aftermap.laplace.dimension import DimensionResult, effective_dimension, match_dimension
from aftermap.likelihoods import Categorical
from tests.laplace.problems import Data, classes, generator, seeded, trained

__all__ = ["normalised", "results", "run"]


def normalised() -> nn.Module:
    """Knows its 60 data by heart; smooth, so that training ends at the same place on every processor."""
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 4)))
    return trained(net, classes(), nn.CrossEntropyLoss(reduction="sum"), decay=0.01, steps=60)


def results(data: Data) -> dict[str, Tensor]:
    """What tuning by the dimension gives, γ without an early end, and estimates from a sample of the data."""
    model = normalised()
    la = Laplace(model, "classification").fit(data, progress=False)
    evidence = la.tune(method="evidence").log_evidence().detach()
    group = dist.is_initialized()
    own = generator(dist.get_rank() if group else 0)  # the noise of the data differs between processes
    operator = GGNOperator(model, data, Categorical())
    prior = la.posterior.prior.vector(la.posterior.names)
    gamma, bounds, _ = effective_dimension(operator, prior, draws=400, steps=60, settled=1.001, generator=own)
    batches = iterate(data, device=torch.device("cpu"), dtype=torch.float64)
    some = match_dimension(model, batches, Categorical(), la.posterior, examples=30, draws=400, generator=own)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "matched to the effective dimension", StatisticalWarning)
        la.tune(method="dimension")
    found = la.tuning
    assert isinstance(found, DimensionResult)
    return {
        "evidence": evidence,
        "exact": torch.tensor([gamma.value, gamma.standard_error, *bounds], dtype=torch.float64),
        "some": torch.tensor([some.gamma.value, some.before.value], dtype=torch.float64),
        "counts": torch.tensor([some.n_examples, found.n_examples]),
        "before": torch.tensor(found.before.value, dtype=torch.float64),
        "gamma": torch.tensor(found.gamma.value, dtype=torch.float64),
        "data_scale": torch.tensor(la.data_scale, dtype=torch.float64),
        "precision": torch.stack([v.detach() for v in la.prior_precision.values()]),
        "posterior": la.posterior.to_dense(),
        "n_data": torch.tensor(la.n_data),
    }


def run(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.save(results([classes()[rank]]), os.path.join(folder, f"{rank}.pt"))
    dist.barrier()  # neither leaves while the other still speaks
    dist.destroy_process_group()
