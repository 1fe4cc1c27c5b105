"""A sketch of an eigenbasis keeps squared norms: exactly where an octave has few directions, without bias where it has many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature.structures.sketch import DIRECTIONS, sketch_basis
from aftermap.laplace import Laplace
from aftermap.predictive.linearised import margin_gaussian
from tests.laplace.problems import normal


def orthonormal(n: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(n, n, seed=seed))[0]


def test_few_directions_stay_as_they_are() -> None:
    vectors, values = orthonormal(12, 0), torch.logspace(-3, 3, 12, dtype=torch.float64)
    directions, weights = sketch_basis(vectors, values, 1e-9)
    assert_close(directions, vectors)
    assert_close(weights, torch.eye(12, dtype=torch.float64))


def test_squared_norms_by_octave_have_no_bias_and_the_known_spread() -> None:
    """Over many inputs the estimate of ‖x‖² in an octave has the mean 1 and the standard deviation √(2 (n − r) / ((n + 2) r))."""
    n, few = 200, 5
    values = torch.cat([torch.full((few,), 64.0), torch.full((n,), 1.5)]).double()
    vectors = orthonormal(n + few, 1)
    directions, weights = sketch_basis(vectors, values, 1e-9)
    assert directions.shape == (n + few, DIRECTIONS + few)
    x = normal(4000, n + few, seed=2)
    wide = weights[:, few:].sum(1) > 0.5  # the directions of the octave with many
    found, true = (x @ directions[:, wide]).square().sum(1), (x @ vectors[:, few:]).square().sum(1)
    assert_close((x @ directions[:, ~wide]).square().sum(1), (x @ vectors[:, :few]).square().sum(1))
    ratio = found / true
    spread = (2 * (n - DIRECTIONS) / ((n + 2) * DIRECTIONS)) ** 0.5
    assert_close(ratio.mean().item(), 1.0, atol=4 * spread / 4000**0.5, rtol=0)
    assert_close(ratio.std().item(), spread, atol=0.03, rtol=0)


def test_eigenvalues_that_do_not_matter_share_one_group() -> None:
    values = torch.cat([torch.logspace(-30, -10, 60), torch.tensor([2.0, 8.0])]).double()
    directions, weights = sketch_basis(orthonormal(62, 3), values, 1e-5)
    assert directions.shape[1] == DIRECTIONS + 2
    assert_close(weights[:DIRECTIONS, :60], torch.full((DIRECTIONS, 60), 1 / 60, dtype=torch.float64))


def fitted(width: int, dtype: torch.dtype = torch.float64) -> Laplace:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
    x, y = normal(60, 6, seed=1).to(dtype), torch.arange(60) % 4
    return Laplace(model.to(dtype).eval(), "classification").fit([(x, y)], progress=False)


def margin_variances(laplace: Laplace, x: Tensor) -> tuple[Tensor, Tensor]:
    """The variances of the leading differences of `kind="margin"`, and by the whole covariance."""
    batch = laplace.predictor.inputs(x)
    found = 2 * margin_gaussian(laplace.predictor.plan(batch), laplace.posterior, batch).var[:, 0]
    exact = laplace.predict(x)
    assert exact.latent_mean is not None
    assert exact.latent_cov is not None
    a, b = exact.latent_mean.topk(2).indices.T
    at, cov = torch.arange(len(x)), exact.latent_cov
    return found, cov[at, a, a] + cov[at, b, b] - 2 * cov[at, a, b]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_leading_difference_of_a_wide_network_is_close(dtype: torch.dtype) -> None:
    found, exact = margin_variances(fitted(300, dtype), normal(400, 6, seed=5).to(dtype))
    error = (found / exact).log()
    assert not torch.allclose(found, exact, rtol=1e-4)  # it is a sketch
    assert error.mean().abs() < 0.1
    assert error.std() < 0.15


def test_a_sketch_is_the_same_in_every_call_and_for_every_batch() -> None:
    laplace, x = fitted(120), normal(30, 6, seed=5)
    whole, parts = laplace.predict(x, kind="margin"), [laplace.predict(p, kind="margin") for p in x.split(7)]
    assert_close(torch.cat([p.mean for p in parts]), whole.mean)
    again = fitted(120).predict(x, kind="margin")
    assert_close(again.mean, whole.mean)


def test_a_sketch_follows_the_prior() -> None:
    laplace, x = fitted(120), normal(30, 6, seed=5)
    laplace.predict(x, kind="margin")
    laplace.with_prior(20.0)
    found, exact = margin_variances(laplace, x)
    assert (found / exact).log().mean().abs() < 0.1


def fitted_groups(width: int, *, alike: bool) -> tuple[Laplace, Tensor]:
    """A network whose uncertain layer is a grouped convolution; the second group's inputs are a thousandth, or alike."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv1d(6, 2 * width, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * width, 4)]
        model = nn.Sequential(*layers).double().eval()
    x = normal(200, 6, 4, seed=1)
    x[:, 3:] *= 1.0 if alike else 1e-3
    laplace = Laplace(model, "classification", params=["0.weight", "0.bias"])
    return laplace.fit([(x, torch.arange(200) % 4)], progress=False), x


@pytest.mark.parametrize("alike", [False, True])
def test_every_group_has_directions_of_its_own(alike: bool) -> None:
    laplace, x = fitted_groups(100, alike=alike)
    (block,) = laplace.with_prior(0.1).posterior.blocks
    outer, inner, table = block._sketch  # type: ignore[attr-defined]
    assert outer.shape[2] < 100
    assert table.shape == (2, outer.shape[2], inner.shape[2])
    norms = outer.square().sum((1, 2)) * inner.square().sum((1, 2))
    assert_close(norms, torch.full((2,), 100.0 * block.layout.in_, dtype=torch.float64))
    found, exact = margin_variances(laplace, x)
    error = (found / exact).log()
    assert error.mean().abs() < 0.1
    assert error.std() < 0.15


def test_other_dampings_and_small_groups_are_exact() -> None:
    laplace, x = fitted_groups(DIRECTIONS, alike=False)
    assert_close(*margin_variances(laplace, x))
    y = torch.arange(30) % 3
    wide = nn.Sequential(nn.Linear(6, 90), nn.Tanh(), nn.Linear(90, 3)).double().eval()
    data = [(normal(30, 6, seed=3), y)]
    factored = Laplace(wide, "classification", damping="factored").fit(data, progress=False)
    assert_close(*margin_variances(factored, data[0][0]))


def sketched_widths(laplace: Laplace) -> list[tuple[int, int]]:
    found = [block._sketch for block in laplace.posterior.blocks]  # type: ignore[attr-defined]
    return [(sketch[0].shape[2], sketch[1].shape[2]) for sketch in found]


def test_what_the_prior_drowns_shares_one_group_of_directions() -> None:
    laplace = fitted(120)
    # A prior that the data hardly change has all eigenvalues in one octave, a weak one as many as there are.
    widths = sketched_widths(laplace.with_prior(1e9))
    assert widths == [(DIRECTIONS, 7), (DIRECTIONS, DIRECTIONS), (4, DIRECTIONS)]
    several = sketched_widths(laplace.with_prior(1e-3))
    assert all(o >= p and i >= j for (o, i), (p, j) in zip(several, widths, strict=True))
    assert several[1][0] > DIRECTIONS
    assert several[1][1] > DIRECTIONS


@pytest.mark.parametrize("prior", [0.02, 1.0, 50.0])
def test_prior_and_curvature_in_other_units_have_the_same_directions(prior: float) -> None:
    """Four times the data under four times the prior: a quarter of the covariance, by the same arithmetic."""
    one = Laplace(fitted(120).model, "classification", prior_precision=prior)
    four = Laplace(one.model, "classification", prior_precision=4 * prior, data_scale=4.0)
    x, y = normal(60, 6, seed=1), torch.arange(60) % 4
    for laplace in (one, four):
        laplace.fit([(x, y)], progress=False)
    assert sketched_widths(one) == sketched_widths(four)
    found, quarter = (margin_variances(laplace, normal(20, 6, seed=5))[0] for laplace in (one, four))
    assert_close(4 * quarter, found)
    blocks = zip(one.posterior.blocks, four.posterior.blocks, strict=True)
    for first, second in blocks:
        table = [b.precision.detach().rsqrt() for b in (first, second)]  # type: ignore[attr-defined]
        informed = [b._informed(t) for b, t in zip((first, second), table, strict=True)]  # type: ignore[attr-defined]
        assert (informed[0] is None) == (informed[1] is None)
        if informed[0] is not None:
            assert informed[0].change.shape == informed[1].change.shape
        drawn = [b.sample(2, torch.Generator().manual_seed(0)) for b in (first, second)]
        for name in drawn[0]:
            assert_close(2 * drawn[1][name], drawn[0][name])
