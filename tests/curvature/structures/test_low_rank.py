"""Low-rank curvature and its posterior where digits are scarce: single and half precision, and weak priors."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature import reference
from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.structures.low_rank import LowRankBlock, LowRankBlockPosterior, low_rank_ggn
from aftermap.errors import NumericalWarning
from aftermap.laplace import Laplace
from aftermap.likelihoods import Categorical, Gaussian
from aftermap.prior import Prior


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def trained_regression() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that fits a sine; the eigenvalues of its curvature span eight orders of magnitude."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    x = normal(1000, 3)
    y = torch.sin(2 * x[:, :1]) + 0.1 * normal(1000, 1, seed=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
    for _ in range(300):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net.float().double(), x.float().double(), y.float().double()


@pytest.mark.parametrize("precision", [1.0, 1e-1, 1e-3])
def test_single_precision_finds_the_small_eigenvalues_that_the_prior_makes_relevant(precision: float):
    net, x, y = trained_regression()
    options = {"likelihood": Gaussian(noise=0.1), "prior_precision": precision}
    exact = Laplace(net, structure="full", **options).fit([(x, y)]).predict(x[:100]).epistemic
    single = Laplace(copy.deepcopy(net).float(), structure="low_rank", rank=51, **options).fit([(x.float(), y.float())])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # about half of the digits are left under the weakest prior
        variance = single.predict(x[:100].float()).epistemic
    assert_close(variance.double(), exact, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_of_a_half_precision_network_are_made_in_single_precision(dtype: torch.dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        half = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).eval().to(dtype)
    x, y = normal(20, 5).to(dtype), torch.randint(3, (20,), generator=generator())
    wide = copy.deepcopy(half).double()
    truth = torch.linalg.eigvalsh(reference.ggn(wide, x.double(), Categorical(), y)).flip(0)
    vectors, values = low_rank_ggn(GGNOperator(half, [(x, y)], Categorical()), 30, generator=generator())
    assert_close(values, truth[:30], rtol=1e-3, atol=0)
    assert_close(vectors.T @ vectors, torch.eye(30).double(), atol=1e-9, rtol=0)
    assert all(p.dtype == dtype for p in half.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("precision", [1.0, 1e-4, 1e-8])
def test_a_weak_prior_leaves_the_variance_of_the_data(dtype: torch.dtype, precision: float):
    """With every eigenpair present the answer is (XᵀX + τ I)⁻¹, however weak the prior is."""
    x = (normal(200, 4) * torch.tensor([1.0, 10.0, 100.0, 1000.0])).to(dtype)
    net = nn.Linear(4, 1, bias=False).to(dtype)
    inputs = x.double()
    exact = torch.linalg.inv(inputs.T @ inputs + precision * torch.eye(4, dtype=torch.float64))
    laplace = Laplace(net, Gaussian(1.0), structure="low_rank", prior_precision=precision)
    laplace.fit([(x, torch.zeros(200, 1, dtype=dtype))])
    tolerance = 1e-3 if dtype == torch.float32 else 1e-9
    assert_close(laplace.posterior.marginal_variance()["weight"][0].double(), exact.diagonal(), rtol=tolerance, atol=0)
    eye = torch.eye(4, dtype=torch.float64)[:, None]
    columns = laplace.posterior.covariance_mv({"weight": eye})["weight"][:, 0]
    assert_close(columns.diagonal(), exact.diagonal(), rtol=tolerance, atol=0)
    variance = laplace.predict(x[:9]).epistemic[:, 0].double()
    assert_close(variance, (inputs[:9] @ exact * inputs[:9]).sum(1), rtol=tolerance, atol=0)
    drawn = laplace.posterior.sample(4000, generator(2))["weight"][:, 0].double() - net.weight.detach().double()
    assert_close(drawn.square().mean(0), exact.diagonal(), rtol=0.15, atol=0)


def test_the_variance_is_never_negative_whatever_the_prior():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = 10 * normal(30, 3)
    laplace = Laplace(net, Gaussian(1e-3), structure="low_rank", rank=26, prior_precision=1e-9).fit([(x, x[:, :1])])
    assert bool((laplace.predict(x).epistemic > 0).all())
    assert all(bool((v > 0).all()) for v in laplace.posterior.marginal_variance().values())


def test_a_prior_that_single_precision_cannot_resolve_is_named():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    x = 100 * normal(30, 3).float()
    laplace = Laplace(net, Gaussian(1e-3), structure="low_rank", rank=26, prior_precision=1e-6)
    laplace.fit([(x, x[:, :1])])
    with pytest.warns(NumericalWarning, match=r"float32.*model\.double\(\)"):
        laplace.predict(x)


def test_a_budget_that_is_too_small_warns_without_advising_what_nobody_can_set():
    net, x, y = trained_regression()
    operator = GGNOperator(net, [(x, y)], Gaussian(1.0))
    with pytest.warns(NumericalWarning, match="after 13 products") as caught:
        low_rank_ggn(operator, 9, max_matvecs=13, generator=generator())
    assert "method" not in str(caught[0].message)


def test_marginal_variances_keep_their_digits_where_data_inform_an_entry_almost_alone():
    """Of the third entry a share of 1e-10 is left to the prior, which is so weak that this share is nearly all of its variance."""
    direction = torch.zeros(6, dtype=torch.float64)
    direction[2], direction[4] = 1.0, 1e-5
    direction = direction / direction.norm()
    block = LowRankBlock("all", {"w": (2, 3)}, direction[:, None], torch.tensor([1e3], dtype=torch.float64))
    factors = [1e-8, 1e-2]
    for prior in factors:
        given = Prior.make(prior, 0.0, {"w": ("w",)}, {"w": (2, 3)})
        posterior = LowRankBlockPosterior.of(block, given, torch.tensor(2.0, dtype=torch.float64), torch.float64)
        found = posterior.marginal_variance()["w"].flatten()
        inside = direction.square() / (prior + 2e3)
        away = torch.tensor([1, 1, direction[4] ** 2, 1, direction[2] ** 2, 1], dtype=torch.float64)
        torch.testing.assert_close(found, away / prior + inside, rtol=1e-9, atol=0)
