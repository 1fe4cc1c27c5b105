"""Local reparametrisation: every example's output has the distribution that weight samples give it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from aftermap.curvature import reference
from aftermap.curvature.passes.record import outputs_replaced
from aftermap.errors import InputError, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from aftermap.predictive import sampled_outputs
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, dense_covariance, generator, mlp, normal, seeded

COPIES, DRAWS = 1000, 40  # copies of an input have noise of their own, too


def fitted(model: nn.Module, structure: str, outputs: int, **options: object) -> Laplace:
    x = normal(9, 3, seed=3)
    laplace = Laplace(model, Gaussian(0.4), structure=structure, prior_precision=1.3, **options)
    return laplace.fit([(x, normal(9, outputs, seed=4))], progress=False)


def many(laplace: Laplace, x: Tensor) -> Tensor:
    """Draws of the outputs of all inputs together: [draws, N, C]."""
    found = laplace.predict(x.repeat(COPIES, 1), kind="sampling", samples=DRAWS, local=True, generator=generator(1))
    assert found.samples is not None
    return found.samples.reshape(COPIES * DRAWS, len(x), -1)


def check_moments(drawn: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Sample mean and covariance [d, d] of draws [S, d], each within five standard errors."""
    count = len(drawn)
    variance = covariance.diagonal()
    error = ((variance[:, None] * variance + covariance.square()) / count).sqrt()
    assert bool(((drawn.T.cov() - covariance).abs() < 5 * error + 1e-12).all())
    assert bool(((drawn.mean(0) - mean).abs() < 5 * (variance / count).sqrt()).all())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal"])
def test_one_layer_has_the_dense_covariance(structure: str, bias: bool) -> None:
    model = seeded(lambda: nn.Linear(3, 4, bias=bias))
    laplace = fitted(model, structure, 4)
    x = normal(2, 3, seed=6)
    drawn = many(laplace, x)
    lines = reference.jacobian(model, x, laplace.posterior.names)
    own = dense_covariance(laplace, lines)
    # Examples have noise of their own: nothing between the two.
    covariance = torch.block_diag(own[0], own[1])
    check_moments(drawn.flatten(1), model(x).detach().flatten(), covariance)


@pytest.mark.parametrize("damping", ["factored", "pi"])
def test_one_layer_under_other_dampings(damping: str) -> None:
    model = seeded(lambda: nn.Linear(3, 4))
    laplace = fitted(model, "kron", 4, damping=damping)
    x = normal(1, 3, seed=6)
    drawn = many(laplace, x)
    own = dense_covariance(laplace, reference.jacobian(model, x, laplace.posterior.names))[0]
    check_moments(drawn.flatten(1), model(x).detach().flatten(), own)


class Mixed(nn.Module):
    """A convolution and a norm layer are drawn as weights, the Linear layers through their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(1, 2, 2), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x[:, None]).flatten(1))))


@pytest.mark.parametrize("build", [lambda: mlp(3, 5, 2), lambda: seeded(Mixed)])
def test_deeper_networks_have_the_distribution_of_weight_samples(build: object) -> None:
    model = build()  # type: ignore[operator]
    x = normal(1, 3, seed=6)
    laplace = fitted(model, "kron", model(x).shape[1])
    wanted = sampled_outputs(laplace.model, laplace.posterior, x, 2500, generator(2)).detach().flatten(1)
    before = ModelSnapshot.of(model)
    found = laplace.predict(x, kind="sampling", samples=2500, local=True, generator=generator(3)).samples
    check_unchanged(model, before)
    assert found is not None
    for power in (1, 2, 4):
        one, two = (v.flatten(1).pow(power) for v in (wanted, found))
        error = ((one.var(0) + two.var(0)) / 2500).sqrt()
        assert bool(((one.mean(0) - two.mean(0)).abs() < 5 * error).all())


def test_differentiable_and_reproducible() -> None:
    laplace = fitted(mlp(3, 5, 2), "kron", 2)
    x = normal(2, 3, seed=6).requires_grad_()
    options = {"kind": "sampling", "local": True, "samples": 3}
    found = laplace.predict(x, differentiable=True, generator=generator(1), **options)  # type: ignore[arg-type]
    again = laplace.predict(x.detach(), generator=generator(1), **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found.mean.detach(), again.mean, rtol=0, atol=0)
    assert bool((torch.autograd.grad(found.mean.sum(), x)[0] != 0).all())
    assert not again.mean.requires_grad


def test_classes_and_the_last_layer() -> None:
    laplace = Laplace(mlp(), "classification", params="last_layer").fit(classes(), progress=False)
    found = laplace.predict(classes()[0][0], kind="sampling", local=True, samples=5)
    torch.testing.assert_close(found.mean.sum(-1), torch.ones(20, dtype=torch.float64))


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="local=True draws the outputs of Linear layers .* this posterior has none"
    ):
        fitted(mlp(3, 5, 2), "full", 2).predict(normal(2, 3), kind="sampling", local=True)
    tokens = seeded(lambda: nn.Linear(3, 2))
    laplace = Laplace(tokens, Gaussian(0.4)).fit([(normal(5, 2, 3), normal(5, 2, 2))], progress=False)
    with pytest.raises(UnsupportedError, match="one row per example"):
        laplace.predict(normal(5, 2, 3), kind="sampling", local=True)
    laplace = fitted(mlp(3, 5, 2), "kron", 2)
    with pytest.raises(InputError, match="local=True draws layer outputs for kind='sampling'"):
        laplace.predict(normal(2, 3), local=True)
    with pytest.raises(InputError, match="no use for weights="):
        laplace.predict(normal(2, 3), kind="sampling", local=True, weights=laplace.ensemble(2))
    with pytest.raises(InputError, match="whole number of at least 1"):
        laplace.predict(normal(2, 3), kind="sampling", local=True, samples=0)


def test_hooks_are_gone_after_an_exception() -> None:
    net = seeded(lambda: nn.Linear(3, 2))
    before = ModelSnapshot.of(net)

    def fails(inputs: Tensor, output: Tensor) -> Tensor:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"), outputs_replaced({net: fails}):
        net(normal(2, 3))
    check_unchanged(net, before)
