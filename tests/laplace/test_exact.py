"""Bayesian linear regression through the facade: every number in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from tests.laplace.problems import linear_regression, normal

NOISE, PRIOR = 0.6, 1.4
EXACT = ["kron", "ekfac", "full", "low_rank", "hessian"]


def fitted(structure: str, **options: float) -> tuple[Laplace, Tensor, Tensor, Tensor]:
    net, data, features, y, precision = linear_regression(NOISE, PRIOR)
    laplace = Laplace(net, Gaussian(NOISE), structure=structure, prior_precision=PRIOR, **options)
    return laplace.fit(data, progress=False), features, y, precision


@pytest.mark.parametrize("structure", EXACT)
def test_posterior_and_predictive(structure: str) -> None:
    laplace, _, _, precision = fitted(structure)
    torch.testing.assert_close(laplace.posterior.to_dense(), precision, rtol=1e-9, atol=1e-9)
    x = normal(7, 4, seed=9)
    wide = torch.cat([x, torch.ones(7, 1, dtype=torch.float64)], 1)
    variance = (wide @ torch.linalg.inv(precision) * wide).sum(1, keepdim=True)
    found = laplace.predict(x)
    torch.testing.assert_close(found.epistemic, variance, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.aleatoric, torch.full((7, 1), NOISE**2, dtype=torch.float64))
    torch.testing.assert_close(found.total, variance + NOISE**2, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.mean, laplace.model(x).detach())


@pytest.mark.parametrize("structure", EXACT)
def test_evidence(structure: str) -> None:
    laplace, features, y, _ = fitted(structure)
    torch.testing.assert_close(laplace.log_evidence(), marginal(features, y, NOISE, PRIOR), rtol=1e-9, atol=1e-9)


def marginal(features: Tensor, y: Tensor, noise: float, prior: float) -> Tensor:
    covariance = noise**2 * torch.eye(len(y), dtype=torch.float64) + features @ features.T / prior
    return torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)


def fixed_point(features: Tensor, y: Tensor) -> tuple[float, float]:
    """MacKay's iteration with the mean refitted each time: the maximum of the true evidence in τ and σ."""
    tau, noise = 1.0, 1.0
    gram, width = features.T @ features, features.shape[1]
    for _ in range(2000):
        precision = gram / noise**2 + tau * torch.eye(width, dtype=torch.float64)
        mean = torch.linalg.solve(precision, features.T @ y / noise**2)
        gamma = width - tau * float(torch.linalg.inv(precision).trace())
        tau = gamma / float(mean.square().sum())
        noise = float(((y - features @ mean).square().sum() / (len(y) - gamma)).sqrt())
    return tau, noise


@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.parametrize("method", ["evidence", "lbfgs"])
def test_tuning_finds_the_maximum_of_the_true_evidence(structure: str, method: str) -> None:
    _, _, features, _, _ = linear_regression(count=40)
    y = features @ normal(5, seed=6) + 0.4 * normal(40, seed=7)
    tau, noise = fixed_point(features, y)
    net, _, _, _, _ = linear_regression(count=40)
    mean = torch.linalg.solve(
        features.T @ features / noise**2 + tau * torch.eye(5, dtype=torch.float64), features.T @ y / noise**2
    )
    with torch.no_grad():
        net.weight.copy_(mean[None, :4])
        net.bias.copy_(mean[4:])
    laplace = Laplace(net, "regression", structure=structure).fit([(features[:, :4], y[:, None])], progress=False)
    laplace.tune(method=method, per_layer=False)
    (found,) = {float(p) for p in laplace.prior_precision.values()}
    assert found == pytest.approx(tau, rel=3e-4)
    assert float(laplace.hyperparameters.noise) == pytest.approx(noise, rel=3e-4)
    # The Laplace evidence is exact here, so it is the marginal likelihood and nothing beats it.
    torch.testing.assert_close(laplace.log_evidence(), marginal(features, y, noise, tau), rtol=1e-7, atol=1e-6)
    for t, n in ((1.1, 1.0), (0.9, 1.0), (1.0, 1.1), (1.0, 0.9)):
        assert float(marginal(features, y, n * noise, t * tau)) < float(laplace.log_evidence())


def test_kron_with_an_absorbed_bias_over_several_outputs() -> None:
    net, data, features, _, precision = linear_regression(NOISE, PRIOR)
    wide = torch.nn.Linear(4, 3).double().eval()
    targets = [(x, normal(len(x), 3, seed=i)) for i, (x, _) in enumerate(data)]
    laplace = Laplace(wide, Gaussian(NOISE), prior_precision=PRIOR).fit(targets, progress=False)
    covariance = torch.linalg.inv(precision)
    variance = (features @ covariance * features).sum(1)
    found = laplace.predict(features[:, :4]).latent_cov
    wanted = variance[:, None, None] * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    assert len(list(net.parameters())) == 2


@pytest.mark.parametrize("kind", ["linearised", "sampling"])
def test_a_linear_model_needs_no_linearisation(kind: str) -> None:
    laplace, _, _, precision = fitted("kron")
    x = normal(5, 4, seed=9)
    wide = torch.cat([x, torch.ones(5, 1, dtype=torch.float64)], 1)
    variance = (wide @ torch.linalg.inv(precision) * wide).sum(1, keepdim=True)
    found = laplace.predict(x, kind=kind, samples=20_000, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found.epistemic, variance, rtol=0.05, atol=0)
    torch.testing.assert_close(found.mean, laplace.model(x).detach(), rtol=0, atol=0.02)


def test_prior_mean_and_its_evidence() -> None:
    net, data, features, y, _ = linear_regression(NOISE, PRIOR)
    centre = 0.3
    shift = features @ torch.full((5,), centre, dtype=torch.float64)
    precision = features.T @ features / NOISE**2 + PRIOR * torch.eye(5, dtype=torch.float64)
    mean = centre + torch.linalg.solve(precision, features.T @ (y - shift) / NOISE**2)
    with torch.no_grad():
        net.weight.copy_(mean[None, :4])
        net.bias.copy_(mean[4:])
    laplace = Laplace(net, Gaussian(NOISE), prior_precision=PRIOR, prior_mean=centre).fit(data, progress=False)
    torch.testing.assert_close(
        laplace.log_evidence(), marginal(features, y - shift, NOISE, PRIOR), rtol=1e-9, atol=1e-9
    )


def test_per_output_noise() -> None:
    x, y = normal(11, 4, seed=1), normal(11, 2, seed=2)
    net = torch.nn.Linear(4, 2).double().eval()
    noise = torch.tensor([0.5, 1.5], dtype=torch.float64)
    laplace = Laplace(net, Gaussian(noise), structure="full", prior_precision=PRIOR).fit([(x, y)], progress=False)
    wide = torch.cat([x, torch.ones(11, 1, dtype=torch.float64)], 1)
    found = laplace.predict(x)
    for k in range(2):
        precision = wide.T @ wide / noise[k] ** 2 + PRIOR * torch.eye(5, dtype=torch.float64)
        variance = (wide @ torch.linalg.inv(precision) * wide).sum(1)
        torch.testing.assert_close(found.epistemic[:, k], variance, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found.total[:, k], variance + noise[k] ** 2, rtol=1e-9, atol=1e-11)
    ratio = laplace.tune(method="evidence").likelihood.noise
    torch.testing.assert_close(ratio[1] / ratio[0], torch.tensor(3.0, dtype=torch.float64))
