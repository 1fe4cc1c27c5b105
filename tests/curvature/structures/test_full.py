"""Dense curvature in single precision: what can be computed in float64 is, and what cannot be known is said."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.errors import NumericalWarning
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from aftermap.posteriors import GaussianPosterior


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(x: Tensor, y: Tensor) -> nn.Module:
    """A network that fits a sine; the eigenvalues of its curvature span eight orders of magnitude."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
    for _ in range(300):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("precision", [1.0, 1e-3, 1e-5])
def test_single_precision_agrees_with_double_under_a_weak_prior(precision: float):
    x = normal(1000, 3).float()
    y = torch.sin(2 * x[:, :1]) + 0.1 * normal(1000, 1, seed=1).float()
    net = network(x, y)
    options = {"likelihood": Gaussian(noise=0.1), "structure": "full", "prior_precision": precision}
    exact = Laplace(copy.deepcopy(net).double(), **options).fit([(x.double(), y.double())]).predict(x[:200].double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # about half of the digits are left under the weakest prior
        single = Laplace(net, **options).fit([(x, y)]).predict(x[:200])
    assert single.epistemic.dtype == torch.float32
    assert_close(single.epistemic.double(), exact.epistemic, rtol=1e-3, atol=0)


def test_a_sum_of_two_precisions_is_trusted_as_far_as_the_lower_one():
    """Sums in float32, such as those of folders that earlier versions saved, may be updated with sums in float64."""
    x = normal(30, 3).float()
    laplace = Laplace(network(x, x[:, :1]), Gaussian(0.1), structure="full").fit([(x, x[:, :1])])
    (block,) = laplace.factors.blocks
    assert block.matrix.dtype == torch.float64
    old = block.with_tensors({"matrix": block.matrix.float()})
    for total in (old + block, block + old):
        assert total.matrix.dtype == torch.float32
        assert_close(total.matrix, 2 * old.matrix)
        mean = {n: p.detach() for n, p in laplace.model.named_parameters()}
        GaussianPosterior.from_factors(replace(laplace.factors, blocks=(total,)), mean, 1e-3)
    assert (block + block).matrix.dtype == torch.float64


def test_a_prior_that_single_precision_cannot_resolve_is_named():
    x = 100 * normal(30, 3).float()
    laplace = Laplace(network(x, x[:, :1]), Gaussian(1e-3), structure="full", prior_precision=1e-6)
    laplace.fit([(x, x[:, :1])])
    with pytest.warns(NumericalWarning, match=r"float32.*model\.double\(\)"):
        laplace.predict(x)
