"""Where checks draw the line: the first value that is allowed is taken, and the last one before it is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aftermap.batches import unpack_batch
from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.passes.vectors import make_vectors, resolve_kind
from aftermap.curvature.structures.hessian import full_hessian
from aftermap.errors import AftermapError
from aftermap.krylov import lanczos, lanczos_eigh
from aftermap.laplace import Laplace
from aftermap.laplace.fitted import check_numbers
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from aftermap.metrics import crps_samples, interval_calibration_from_pit
from aftermap.metrics.scoring import entropy_decomposition
from aftermap.optim import VOGN
from aftermap.optim.options import check_group
from aftermap.posteriors.base import check_scale
from aftermap.posteriors.dual import dual_covariance
from aftermap.posteriors.matrix_free import MatrixFreeSettings
from aftermap.predictive import samples_prediction
from aftermap.predictive.prediction import Prediction
from aftermap.prior import precision_from_weight_decay
from tests.laplace.problems import normal

TINY = 1e-12
DATA = [(normal(3, 2), normal(3, 1, seed=1))]


def net() -> nn.Module:
    return nn.Linear(2, 1).double().eval()


def dual(prior: float, scale: float) -> Any:
    return dual_covariance(normal(2, 1, 3), normal(4, 1, 3), torch.ones(4, 1, 1).double(), prior, scale=scale)


def probabilities(*shape: int) -> torch.Tensor:
    return torch.full(shape, 1 / shape[-1], dtype=torch.float64)


def group(prior: float, damping: float, deterministic: bool = False) -> None:
    optimiser = VOGN(net(), n_data=3)
    check_group(
        {**optimiser.param_groups[0], "prior_precision": prior, "damping": damping, "deterministic": deterministic}
    )


def set_prior(value: float) -> None:
    model = net()
    params = {n: p.detach() for n, p in model.named_parameters()}
    VOGN(model, n_data=3).set_prior(params, {n: torch.full_like(p, value) for n, p in params.items()})


def stuck(v: torch.Tensor) -> torch.Tensor:
    return 2 * v


LIMITS: dict[str, tuple[Callable[..., Any], list[Any], list[Any]]] = {
    "columns of products": (lambda n: GGNOperator(net(), DATA, Gaussian(), chunk_size=n).n_data, [1], [0]),
    "columns of a Hessian": (lambda n: full_hessian(net(), DATA, Gaussian(), chunk_size=n), [1], [0]),
    "draws of noise": (lambda n: GGNOperator(net(), DATA, Gaussian()).noise(n), [1], [0, True]),
    "vectors in a chunk": (
        lambda n: list(make_vectors("exact", Gaussian(), torch.zeros(2, 3), None).chunks(n)), [1, None], [0],
    ),
    "vectors at random": (
        lambda n: make_vectors("rademacher", Gaussian(), torch.zeros(2, 3), None, samples=n), [1], [0],
    ),
    "dimensions of outputs": (lambda shape: resolve_kind("auto", torch.zeros(shape)), [(2, 1)], [(2,)]),
    "steps of Lanczos": (lambda n: lanczos(stuck, torch.ones(3).double(), n), [1], [0]),
    "start of Lanczos": (lambda x: lanczos(stuck, torch.full((3,), x).double(), 1), [TINY], [0.0]),
    "products of Lanczos": (lambda n: lanczos_eigh(stuck, 3, 1, max_matvecs=n), [1], [0]),
    "scale of a curvature": (check_scale, [TINY, 1e12], [0.0, -TINY, math.inf, math.nan]),
    "prior of a dual": (lambda x: dual(x, 1.0), [TINY], [0.0, math.inf]),
    "scale of a dual": (lambda x: dual(1.0, x), [TINY], [0.0, math.inf]),
    "tolerance of solves": (lambda x: MatrixFreeSettings(tolerance=x), [TINY, 1 - TINY, None], [0.0, 1.0]),
    "samples of solves": (lambda n: MatrixFreeSettings(samples=n, probes=n, steps=n, max_iterations=n), [1], [0]),
    "precision of weights": (
        lambda x: Laplace(net(), "regression", prior_precision=x).fit(DATA, progress=False), [TINY], [0.0, math.inf],
    ),
    "numbers": (lambda x: check_numbers("it", x, positive=True), [TINY, [1.0, TINY]], [0.0, [1.0, 0.0], math.nan]),
    "weight decay": (lambda x: precision_from_weight_decay(x, 5), [0.0, TINY], [-TINY]),
    "data of a weight decay": (lambda n: precision_from_weight_decay(1.0, n), [1], [0]),
    "example weights": (lambda x: unpack_batch((*DATA[0], torch.tensor([1.0, x, 2.0]))), [0.0], [-TINY, math.inf]),
    "level of an interval": (
        lambda x: Prediction("regression", *(torch.ones(3, 2) for _ in range(4))).interval(x),
        [1e-3, 0.999], [0.0, 1.0],
    ),
    "dimensions of a mean": (
        lambda shape: Prediction("regression", *(torch.ones(shape) for _ in range(4))), [(3, 1)], [(3,)],
    ),
    "dimensions of samples": (
        lambda shape: samples_prediction(Gaussian(), torch.ones(shape)), [(1, 1, 1), (2, 3, 1)], [(2, 3), (0, 2, 3)],
    ),
    "weights of a mixture": (
        lambda w: samples_prediction(Gaussian(), torch.ones(2, 3, 1), weights=torch.tensor(w)),
        [[0.0, 1e-3]], [[0.0, 0.0], [-1e-3, 1.0]],
    ),
    "classes": (lambda n: Categorical().nll(torch.zeros(3, n), torch.zeros(3).long()), [2], [1]),
    "class weights": (lambda x: Categorical(weight=[1.0, x]), [0.0], [-TINY, math.inf]),
    "noise": (lambda x: Gaussian(x), [TINY, [1.0, TINY]], [0.0, [1.0, 0.0], math.inf]),
    "temperature": (lambda x: (Categorical(temperature=x), Bernoulli(temperature=x)), [TINY], [0.0, math.inf]),
    "outputs for means and variances": (
        lambda n: HeteroscedasticGaussian().variance(torch.zeros(3, n)), [2, 4], [0, 1, 3],
    ),
    "values between 0 and 1": (interval_calibration_from_pit, [[0.0, 1.0]], [[-TINY, 0.5], [0.5, 1 + 1e-9]]),
    "samples of a fair score": (lambda n: crps_samples(torch.ones(n, 3), torch.ones(3), fair=True), [2], [1]),
    "samples of probabilities": (lambda shape: entropy_decomposition(probabilities(*shape)), [(1, 1, 2)], [(3, 2)]),
    "precision and damping together": (
        lambda pair: group(*pair), [(TINY, 0.0), (0.0, TINY), (0.0, 0.0, True)], [(0.0, 0.0)],
    ),
    "prior of an optimiser": (set_prior, [TINY], [0.0, math.inf]),
    "damping that is kept": (
        lambda x: VOGN(net(), n_data=3, initial_curvature=1.0).posterior().as_prior(damping=x),
        [0.0, 1.0], [-TINY, 1 + 1e-9],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_a_check_draws_its_line_between_these_values(name: str) -> None:
    call, allowed, refused = LIMITS[name]
    for value in allowed:
        call(value)
    for value in refused:
        with pytest.raises(AftermapError):
            call(value)
