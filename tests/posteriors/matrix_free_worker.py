"""What each of two processes does with its part of the data."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from aftermap.curvature.fit import fit_curvature
from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.structures.base import join_flat, split_flat
from aftermap.posteriors import GaussianPosterior, MatrixFreePosterior, MatrixFreeSettings
from tests.posteriors.matrix_free_cases import CASES, generator, latent, randn

__all__ = ["SAMPLES", "results", "run"]

SAMPLES = 3000
PARTS = [(0, 3), (3, 9)]


def results(start: int, stop: int) -> dict[str, torch.Tensor]:
    """Solves, samples and a predictive with the data start ... stop - 1."""
    case = CASES["mlp softmax"]()
    data = [(case.x[start:stop], case.y[start:stop], case.weight[start:stop])]
    factors = fit_curvature(case.model, data, case.likelihood, structure="low_rank", progress=False, rank=30)
    helper = GaussianPosterior.from_factors(factors, dict(case.model.named_parameters()), 0.7, scale=1.3)
    operator = GGNOperator(case.model, data, case.likelihood, chunk_size=512)
    settings = MatrixFreeSettings(kind="samples", samples=7, tolerance=1e-9, dense_limit=0)
    posterior = MatrixFreePosterior.from_operator(operator, preconditioner=helper, settings=settings)
    solved = posterior.covariance_mv(split_flat(randn(3, posterior.n_params, seed=4), posterior.shapes))
    return {
        "solved": join_flat(solved, posterior.names, 1),
        "samples": join_flat(
            posterior.sample(SAMPLES, generator(dist.get_rank() if dist.is_initialized() else 0)), posterior.names, 1
        ),
        "fixed": posterior.fixed_samples(),
        "log_det": posterior.log_det_precision(),
        "variance": latent(case.model, posterior, case.asked[start:stop], diagonal=True).var,
    }


def run(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.save(results(*PARTS[rank]), os.path.join(folder, f"{rank}.pt"))
    dist.barrier()  # neither leaves while the other still speaks
    dist.destroy_process_group()
