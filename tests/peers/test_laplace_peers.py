"""Functional variance, evidence and predictions equal laplace-torch's, where it is right.

What differs, and is written down here as tests too:

- laplace-torch gives a bias a Kronecker block of its own and so drops the covariance of weight and bias; ours is exact for a
  linear model. Networks without biases agree.
- its predictive variance of a regression has no observation noise; ours has it in `total`.
- its temperature divides the likelihood, as ours does.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.likelihoods import Gaussian
from tests.laplace.problems import Data, classes, mlp, normal, regression, seeded

pytestmark = pytest.mark.peers

PRIOR, NOISE = 1.7, 0.4
CLOSE = {"rtol": 1e-6, "atol": 1e-8}
STRUCTURES = ["full", "diag", "kron"]
OURS = {"full": "full", "diag": "diagonal", "kron": "kron"}


class Loader(list[tuple[Tensor, Tensor]]):
    """A list of batches that knows the size of its data set, which laplace-torch asks for."""

    @property
    def dataset(self) -> range:
        return range(sum(len(y) for _, y in self))


def network(bias: bool, outputs: int = 4, inputs: int = 3) -> nn.Module:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 5, bias=bias), nn.Tanh(), nn.Linear(5, outputs, bias=bias))

    return seeded(build)


def theirs(model: nn.Module, likelihood: str, data: Data, structure: str, which: str, **options: Any) -> Any:
    from laplace import Laplace
    from laplace.curvature import CurvlinopsGGN

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Laplace(
            deepcopy(model),
            likelihood,
            subset_of_weights=which,
            hessian_structure=structure,
            prior_precision=torch.tensor(PRIOR, dtype=torch.float64),
            backend=CurvlinopsGGN,
            **options,
        )
        made.fit(Loader(data))
    return made


def variance(made: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mean, cov = made._glm_predictive_distribution(x)
    return mean.detach(), cov.detach()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", ["all", "last_layer"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_classification(structure: str, which: str) -> None:
    bias = structure != "kron"
    model, data = network(bias), classes()
    peer = theirs(model, "classification", data, structure, which)
    ours = am.Laplace(model, "classification", structure=OURS[structure], params=which, prior_precision=PRIOR)
    ours.fit(data, progress=False)
    x = normal(6, 3, seed=8)
    mean, cov = variance(peer, x)
    found = ours.predict(x, link="probit")
    torch.testing.assert_close(found.latent_mean, mean)
    torch.testing.assert_close(found.latent_cov, cov, **CLOSE)
    torch.testing.assert_close(ours.log_evidence(), peer.log_marginal_likelihood().detach(), **CLOSE)
    torch.testing.assert_close(found.mean, peer(x, pred_type="glm", link_approx="probit").detach(), **CLOSE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("which", ["all", "last_layer"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_regression(structure: str, which: str, temperature: float) -> None:
    bias = structure != "kron"
    model, data = network(bias, 2, 1), regression(outputs=2)
    peer = theirs(model, "regression", data, structure, which, sigma_noise=NOISE, temperature=temperature)
    ours = am.Laplace(
        model,
        Gaussian(NOISE),
        structure=OURS[structure],
        params=which,
        prior_precision=PRIOR,
        temperature=temperature,
    ).fit(data, progress=False)
    x = normal(6, 1, seed=8)
    mean, cov = variance(peer, x)
    found = ours.predict(x)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.latent_cov, cov, **CLOSE)
    torch.testing.assert_close(found.total, cov.diagonal(dim1=1, dim2=2) + NOISE**2, **CLOSE)
    if temperature == 1.0:
        torch.testing.assert_close(ours.log_evidence(), peer.log_marginal_likelihood().detach(), **CLOSE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_tuned_prior(structure: str) -> None:
    """100 steps of their gradient ascent come near the maximum that the fixed point finds."""
    model, data = network(structure != "kron"), classes()
    peer = theirs(model, "classification", data, structure, "all")
    peer.optimize_prior_precision(
        method="marglik", init_prior_prec=torch.tensor(PRIOR, dtype=torch.float64), n_steps=300
    )
    ours = am.Laplace(model, "classification", structure=OURS[structure]).fit(data, progress=False)
    ours.tune(per_layer=False)
    best = float(ours.log_evidence())
    assert best >= float(peer.log_marginal_likelihood().detach()) - 1e-6
    assert best == pytest.approx(float(peer.log_marginal_likelihood().detach()), abs=0.05)


@pytest.mark.filterwarnings("ignore")
def test_a_bias_of_its_own_loses_its_covariance_with_the_weight() -> None:
    """On a linear model ours equals the full posterior; theirs does not."""
    model = seeded(lambda: nn.Linear(3, 2))
    x = normal(12, 3, seed=1) + 1.5
    data = [(x, normal(12, 2, seed=2))]
    full = am.Laplace(model, Gaussian(NOISE), structure="full", prior_precision=PRIOR).fit(data, progress=False)
    ours = am.Laplace(model, Gaussian(NOISE), prior_precision=PRIOR).fit(data, progress=False)
    peer = theirs(nn.Sequential(model), "regression", data, "kron", "all", sigma_noise=NOISE)
    wanted = full.predict(x).latent_cov
    torch.testing.assert_close(ours.predict(x).latent_cov, wanted)
    cov = variance(peer, x)[1]
    assert float(((cov - wanted).norm() / wanted.norm()).detach()) > 0.05


@pytest.mark.filterwarnings("ignore")
def test_monte_carlo_probabilities() -> None:
    model, data = mlp(), classes()
    peer = theirs(model, "classification", data, "full", "all")
    ours = am.Laplace(model, "classification", structure="full", prior_precision=PRIOR).fit(data, progress=False)
    x = normal(6, 3, seed=8)
    found = ours.predict(x, link="mc", samples=4096, generator=torch.Generator().manual_seed(1)).mean
    torch.manual_seed(1)
    wanted = peer(x, pred_type="glm", link_approx="mc", n_samples=20_000).detach()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02)
