"""Noise with the covariance of the Gauss-Newton matrix, against Jacobians and roots written out."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature import reference
from aftermap.curvature.passes.products import GGNOperator
from aftermap.draws import normal_like
from aftermap.errors import DataError, InputError
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from tests.posteriors.matrix_free_cases import generator, randn


def network(seed: int = 7) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double().eval()
    g = generator(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=g))
    return model


def labels(*shape: int, classes: int = 4) -> Tensor:
    return torch.randint(classes, shape, generator=generator(3))


PROBLEMS: dict[str, tuple[Tensor, Tensor, Likelihood]] = {
    "softmax": (randn(7, 3), labels(7), Categorical()),
    "class weights": (randn(7, 3), labels(7), Categorical(weight=torch.tensor([1.0, 2.0, 0.5, 3.0]))),
    "gaussian": (randn(7, 3), randn(7, 4, seed=1), Gaussian(0.4)),
    "bernoulli": (randn(7, 3), labels(7, 4, classes=2), Bernoulli()),
    "positions": (randn(7, 2, 3), labels(7, 2).index_fill(0, torch.tensor([2]), -100), Categorical()),
}


@pytest.mark.parametrize("kind", list(PROBLEMS))
def test_noise_is_the_jacobian_times_the_root_times_normal_numbers(kind: str) -> None:
    x, y, likelihood = PROBLEMS[kind]
    model, w, count = network(), torch.linspace(0, 2, 7, dtype=torch.float64), 6
    found = GGNOperator(model, [(x, y, w)], likelihood).noise(count, generator(1))
    f = model(x).detach()
    columns = likelihood.columns(4)
    draws = normal_like(f.new_empty(()).expand(count, *f.shape[:-1], columns), generator(1))
    root = likelihood.hessian_root(f, y)
    vectors = torch.einsum("...ck,v...k->v...c", root, draws).reshape(count, 7, -1)
    J = reference.jacobian(model, x)
    assert_close(found, torch.einsum("ndp,vnd,n->pv", J, vectors, w.sqrt()), rtol=1e-10, atol=1e-12)


def test_noise_over_batches_has_the_covariance_of_the_matrix() -> None:
    x, y, likelihood = PROBLEMS["softmax"]
    model, count = network(), 4000
    operator = GGNOperator(model, [(x[:5], y[:5]), (x[5:], y[5:])], likelihood)
    noise = operator.noise(count, generator(0))
    truth = reference.ggn(model, x, likelihood, y)
    sd = truth.diagonal().sqrt()
    error = (noise @ noise.T / count - truth) / (sd[:, None] * sd)
    assert float(error.abs().max()) < 5 * math.sqrt(2 / count)
    assert float((noise.mean(1) / sd).abs().max()) < 4.5 / math.sqrt(count)


def test_parameters_without_use_bad_counts_and_an_untouched_model() -> None:
    x, y, likelihood = PROBLEMS["softmax"]
    model = network()
    model.register_parameter("idle", nn.Parameter(torch.ones(2).double()))
    before = copy.deepcopy(model.state_dict())
    operator = GGNOperator(model, [(x, y)], likelihood)
    noise = operator.noise(3, generator(0))
    assert_close(noise[:2], torch.zeros(2, 3).double())
    assert operator.names[0] == "idle"
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert_close(operator.params["0.bias"], model[0].bias.detach())
    for count in (0, -1, 2.0, True):
        with pytest.raises(InputError, match="number of draws.*at least 1"):
            operator.noise(count)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="empty"):
        GGNOperator(model, [], likelihood).noise(2)
