"""Variances that lost their digits are warned of, and others are not: against sums of squares in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from aftermap.curvature.structures.rounding import CurvatureSize, VarianceErrors, digits_tolerance
from aftermap.errors import NumericalWarning
from aftermap.laplace import Laplace
from tests.faults.digits import CASES, Problem, errors_and_warnings


@pytest.mark.parametrize(("task", "count"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("structure", ["full", "low_rank"])
def test_a_warning_comes_where_half_of_the_digits_are_gone(task: str, count: int, structure: str, dtype: torch.dtype):
    """The estimate is the size of random errors, so that it may be off by some factor, and a prior by two decades.

    What an estimate misses is below ten times the tolerance, and a warning is followed by a real loss.
    """
    found = errors_and_warnings(Problem.make(task, count), structure, dtype)
    tolerance = digits_tolerance(dtype)
    for place, (prior, error, warned) in enumerate(found):
        assert warned or error < 10 * tolerance, f"no warning under a prior of {prior:g}, but an error of {error:.1e}"
        later = max(e for _, e, _ in found[place : place + 2])
        assert not warned or later > tolerance / 30, (
            f"a warning under a prior of {prior:g}, but an error of {later:.1e}"
        )
    if structure == "full" or (task == "regression" and dtype == torch.float32):
        assert found[-1][2], "the weakest prior was meant to lose all digits"
    if structure == "low_rank" and dtype == torch.float64:
        # Lanczos needs no matrix AᵀA, and leaves to the prior what it cannot tell from zero: no digit is lost.
        assert max(error for _, error, _ in found) < tolerance
    assert not any(warned for prior, _, warned in found if prior >= 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_enough_data_need_no_prior(dtype: torch.dtype):
    """With many more data than weights every direction is informed, and no prior is too weak."""
    for structure in ("full", "low_rank"):
        found = errors_and_warnings(Problem.make("regression", 400), structure, dtype)
        assert max(error for _, error, _ in found) < digits_tolerance(dtype)
        assert not any(warned for _, _, warned in found)


def test_the_warning_says_how_many_digits_are_left_and_what_to_do():
    problem = Problem.make("regression", 12)
    for dtype, reason, advice in (
        (torch.float32, "rounded to float32", "model.double"),
        (torch.float64, "decomposition in float64 cannot tell", "Use a larger prior precision"),
    ):
        net = copy.deepcopy(problem.net).to(dtype)
        laplace = Laplace(net, problem.likelihood, structure="full", prior_precision=1e-11)
        laplace.fit([(problem.x.to(dtype), problem.y.to(dtype))])
        with pytest.warns(NumericalWarning, match=rf"of \d+ about \d are left.*{reason}.*{advice}") as caught:
            laplace.predict(problem.asked.to(dtype))
        assert caught[0].filename == __file__  # It points to the line of the caller.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_needs_no_look_is_told_by_bounds(dtype: torch.dtype):
    """One weight with the gradient 1 and the prior 1: √(prior variance / variance) is what the rounding of the gradient is multiplied by."""
    unit, tolerance = torch.finfo(dtype).eps / 2, digits_tolerance(dtype)

    def matters(variance: float, size: tuple[float, float, float] = (1.0, 1.0, 1.0), **more: float) -> bool:
        one = torch.ones(1, 1, 1, dtype=dtype)
        given = {"decomposition": 0.0, "residuals": 0.0, **more}
        return VarianceErrors.may_matter(
            CurvatureSize(*size), one, one[0, 0].double(), variance * one[0].double(), **given
        )

    assert not matters((2 * unit / (0.5 * tolerance)) ** 2)
    assert matters((2 * unit / (2 * tolerance)) ** 2)
    assert not matters(1.0)
    # The data's gradients are rounded, too, a decomposition is that of a matrix off by rounding, and eigenpairs leave residuals.
    trace = (tolerance / (2 * unit)) ** 2
    assert not matters(1.0, (0.2 * trace, 1.0, 1.0))
    assert matters(1.0, (2 * trace, 1.0, 1.0))
    for bound in ({"decomposition": tolerance}, {"residuals": tolerance / 2}):
        assert not matters(1.0, (1.0, 0.5, 1.0), **bound)
        assert matters(1.0, (1.0, 2.0, 1.0), **bound)


def weak_prior_problem() -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Three data of five weights whose gradients are ±1 in every entry, an asked gradient, the scale and the prior."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(2, (3, 5), generator=generator).double() * 2 - 1
    x[:, :3] = torch.tensor([[1.0, 1, 1], [1, -1, 1], [1, 1, -1]])  # of rank three
    return x, torch.randn(5, generator=generator, dtype=torch.float64), 1.7, 1e-4


def spread(change: torch.Tensor) -> float:
    return float(change.square().mean().sqrt())


@pytest.mark.parametrize("structure", ["full", "low_rank"])
def test_estimates_are_the_spread_of_variances_under_random_rounding(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry of a gradient is off by a relative error of its own; all rows are alike, so that nothing is approximated."""
    x, asked, scale, prior = weak_prior_problem()
    eye, draws, unit = torch.eye(5, dtype=torch.float64), 20_000, 1e-6
    net = torch.nn.Linear(5, 1, bias=False).double()
    laplace = Laplace(net, "regression", structure=structure, prior_precision=1.0, data_scale=scale)
    laplace.fit([(x, torch.zeros(3, 1, dtype=torch.float64))], progress=False).with_prior(prior)
    seen: list[VarianceErrors] = []
    monkeypatch.setattr(VarianceErrors, "may_matter", lambda *_: True)
    monkeypatch.setattr(VarianceErrors, "warn", lambda self, *_: seen.append(self))
    laplace.posterior.blocks[0].output_covariance(asked[None, None], True)
    (found,) = seen

    precision = scale * x.T @ x + prior * eye
    covariance = torch.linalg.inv(precision)
    w = covariance @ asked
    variance = asked @ w
    assert_close(found.variance.reshape(()), variance, rtol=1e-6, atol=0)

    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return unit * torch.randn(draws, *shape, generator=generator, dtype=torch.float64)

    rows = asked * (1 + noise(5))
    data = x * (1 + noise(3, 5))
    changed = torch.linalg.solve(scale * data.mT @ data + prior * eye, asked.expand(draws, 5)[..., None])[..., 0]
    expected = spread(((rows @ covariance) * rows).sum(1) - variance) + spread(changed @ asked - variance)
    estimate = float(found.errors["gradients"]) / (torch.finfo(torch.float64).eps / 2) * unit
    assert estimate == pytest.approx(expected, rel=0.03)

    values, vectors = torch.linalg.eigh(scale / prior * x.T @ x)
    if structure == "full":
        # A decomposition that is off by the unit roundoff of the largest whitened eigenvalue, in every direction.
        off = torch.finfo(torch.float64).eps / 2 * float(values[-1]) * prior * w @ w
        assert_close(found.errors["decomposition"].reshape(()), off, rtol=1e-6, atol=0)
        return
    # Eigenvectors with residuals in any of the two directions outside of their span.
    inside, outside, values = vectors[:, 2:], vectors[:, :2], values[2:]
    residuals = (
        noise(3, 2) * (3 * values * values[-1] / 2).sqrt()[:, None]
    )  # √n units, and each of the directions has its share
    white = asked / prior**0.5
    off = 2 * (residuals @ (white @ outside) * (white @ inside / (1 + values))).sum(1)
    estimate = float(found.errors["eigenpairs"]) / (torch.finfo(torch.float64).eps / 2) * unit
    assert estimate == pytest.approx(spread(off), rel=0.03)


def test_the_second_order_of_rounding_is_the_mean_of_what_it_adds() -> None:
    """A gradient along which all variances cancel to first order: what rounding adds is Σ_j (u J_j)² Σ_jj."""
    root = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1e-7, 2.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    covariance, rows = root.T @ root, torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    prior, none = 1e-9 * torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    size = CurvatureSize(1.0, 1.0, 1.0)
    found = VarianceErrors.of_gradients(
        size, torch.bfloat16, rows[None, None], (covariance @ rows)[None, None], prior, covariance.diagonal(), none
    )
    unit = torch.finfo(torch.bfloat16).eps / 2
    draws = rows * (1 + unit * torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    added = ((draws @ covariance) * draws).sum(1).mean() - rows @ covariance @ rows
    assert float(found.errors["gradients"]) == pytest.approx(float(added), rel=0.05)


def test_no_data_bound_is_below_an_error_that_data_make() -> None:
    """`data_rounding` holds for every direction: the worst of many is below it, and not far."""
    x, _, scale, prior = weak_prior_problem()
    curvature = scale * x.T @ x
    size = CurvatureSize.of(torch.linalg.eigvalsh(curvature / prior))
    assert (size.trace, size.largest) == pytest.approx(
        (15 * scale / prior, float(torch.linalg.eigvalsh(curvature / prior)[-1]))
    )
    assert size.effective == pytest.approx(3.0, rel=1e-3)  # as many as there are data
    assert CurvatureSize.of(torch.tensor([-3.0, 1.0])) == CurvatureSize(4.0, 3.0, 1.25)  # of a Hessian
    assert CurvatureSize.of(torch.tensor([0.25])).effective == 1.0
    assert CurvatureSize.of(torch.zeros(0)) == CurvatureSize(0.0, 0.0, 1.0)
    covariance = torch.linalg.inv(curvature + prior * torch.eye(5, dtype=torch.float64))
    rows = torch.randn(5000, 1, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    errors = VarianceErrors.of_gradients(
        size, torch.float32, rows, rows @ covariance, prior * torch.ones(5).double(), 0 * covariance.diagonal(),
        curvature.diagonal(), rows @ covariance,
    )  # fmt: skip
    gradients = VarianceErrors.of_gradients(
        size, torch.float32, rows, rows @ covariance, prior * torch.ones(5).double(), 0 * covariance.diagonal(),
        torch.zeros(5).double(), rows @ covariance,
    )  # fmt: skip
    data = (errors.errors["gradients"] - gradients.errors["gradients"]) / errors.variance
    bound = size.data_rounding(torch.float32)
    assert 0.05 * bound < float(data.max()) <= bound


def test_residuals_of_eigenpairs_are_estimated_where_layers_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In single precision, under a prior that leaves the data's rounding harmless and that of eigenpairs not."""
    x, asked, scale, prior = *weak_prior_problem()[:3], 1e-6
    net = torch.nn.Linear(5, 1, bias=False)
    laplace = Laplace(net, "regression", structure="low_rank", prior_precision=1.0, data_scale=scale)
    laplace.fit([(x.float(), torch.zeros(3, 1))], progress=False).with_prior(prior)
    seen: list[VarianceErrors] = []
    monkeypatch.setattr(VarianceErrors, "warn", lambda self, *_: seen.append(self))
    variance = laplace.predict(asked[None].float(), diagonal=True).latent_var
    assert variance is not None
    (found,) = seen
    white = asked.float().double() / prior**0.5
    values, vectors = torch.linalg.eigh(scale / prior * x.T @ x)
    inside, outside, values = vectors[:, 2:], vectors[:, :2], values[2:]
    exact = (white @ outside).square().sum() + ((white @ inside).square() / (1 + values)).sum()
    assert float(variance) == pytest.approx(float(exact), rel=1e-4)
    unit, generator = torch.finfo(torch.float32).eps / 2, torch.Generator().manual_seed(0)
    residuals = unit * torch.randn(20_000, 3, 2, generator=generator, dtype=torch.float64)
    residuals = residuals * (3 * values * values[-1] / 2).sqrt()[:, None]
    off = 2 * (residuals @ (white @ outside) * (white @ inside / (1 + values))).sum(1)
    assert float(found.errors["eigenpairs"] / found.variance) == pytest.approx(spread(off) / float(exact), rel=0.03)


def test_residuals_are_shared_out_over_the_directions_outside() -> None:
    size, eigenvalues = CurvatureSize(30.0, 20.0, 1.5), torch.tensor([20.0, 3.0])
    inside, outside = torch.tensor([[1.0, 2.0], [0.5, 0.0]]), torch.tensor([3.0, 4.0])

    def errors(directions: int) -> torch.Tensor:
        return size.residual_errors(torch.float32, eigenvalues, inside, outside, directions)

    length = eigenvalues * 20.0 * (inside / (1 + eigenvalues)).square()
    expected = 2 * size.product_noise(torch.float32) * (outside * length.sum(-1)).sqrt()
    for directions, share in ((0, 1.0), (1, 1.0), (4, 0.5)):
        assert_close(errors(directions), share * expected, rtol=1e-5, atol=0)


def test_the_digits_that_are_told_are_those_of_the_worst_variance() -> None:
    for error, digits in ((1e-2, 2), (0.5, 0), (30.0, 0)):
        errors = {"gradients": torch.tensor([1e-9, error, 1e-6])}
        with pytest.warns(NumericalWarning, match=f"variance of 1 of 3 outputs .* about {digits} are left"):
            VarianceErrors(torch.float32, torch.ones(3), errors).warn()
