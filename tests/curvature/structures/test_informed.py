"""Draws from blocks with fewer data than their width: the prior's directions are never rotated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aftermap as am
from aftermap.curvature.structures.kron import Informed, KronBlockPosterior, rotation_costs

# Eigenvalues that are zero but for rounding are far below what this prior lets count, on every processor.
STRONG_PRIOR = 1000.0


def few_data_block(into: int, out: int, count: int, prior: float = 2.0) -> KronBlockPosterior:
    generator = torch.Generator().manual_seed(0)
    net = nn.Linear(into, out, dtype=torch.float64)
    x = torch.randn(count, into, generator=generator, dtype=torch.float64)
    data = [(x, torch.randn(count, out, generator=generator, dtype=torch.float64))]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        laplace = am.Laplace(net, "regression", structure="kron", curvature="sampled", prior_precision=prior)
        laplace.fit(data, generator=generator, progress=False)
    (block,) = laplace.posterior.blocks
    assert isinstance(block, KronBlockPosterior)
    return block


def standard_deviations(block: KronBlockPosterior) -> torch.Tensor:
    return block.precision.detach().rsqrt()


@pytest.mark.parametrize(("into", "out", "count"), [(11, 4, 2), (4, 13, 3)], ids=["inner first", "outer first"])
def test_the_map_from_noise_to_draws_has_the_covariance_of_the_block(into: int, out: int, count: int) -> None:
    block = few_data_block(into, out, count, STRONG_PRIOR)
    informed = block._informed(standard_deviations(block))
    assert informed is not None
    assert informed.change.shape == (1, count, count)
    outer_first, inner_first = rotation_costs(count, count, out, into + 1)
    assert (outer_first < inner_first) == (out > into)
    size = out * (into + 1)
    units = torch.eye(size, dtype=torch.float64).view(size, 1, out, into + 1)
    drawn = [units.new_empty(size, 1, out, into), units.new_empty(size, 1, out, 1)]
    informed.draw(units, [(slice(0, into), drawn[0]), (slice(into, into + 1), drawn[1])])
    columns = torch.cat([drawn[0].reshape(size, -1), drawn[1].reshape(size, -1)], 1)  # weight, then bias
    expected = torch.linalg.inv(block.to_dense())
    torch.testing.assert_close(STRONG_PRIOR * columns.T @ columns, STRONG_PRIOR * expected, rtol=1e-8, atol=1e-10)


def test_many_data_leave_nothing_to_gain() -> None:
    block = few_data_block(3, 4, 50)
    assert block._informed(standard_deviations(block)) is None


def test_samples_of_a_block_with_few_data() -> None:
    block = few_data_block(11, 4, 2)
    drawn = block.sample(40_000, torch.Generator().manual_seed(2))
    values = torch.cat([drawn["weight"].flatten(1), drawn["bias"]], 1)
    expected = torch.linalg.inv(block.to_dense())
    # Standard error of a covariance of 40,000 draws: at most √2 · variance / 200.
    torch.testing.assert_close(values.T @ values / len(values), expected, rtol=0, atol=5 * 2**0.5 * 0.5 / 200)


def test_data_inform_as_many_directions_as_there_are() -> None:
    block = few_data_block(11, 4, 2, STRONG_PRIOR)
    informed = block._informed(standard_deviations(block))
    assert isinstance(informed, Informed)
    assert informed.change.shape == (1, 2, 2)  # two data, two directions on either side
    assert bool((informed.change < 0).all())
