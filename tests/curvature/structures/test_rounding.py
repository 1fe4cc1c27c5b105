"""Variances that lost their digits are warned of, and others are not: against sums of squares in float64."""

from __future__ import annotations

import copy

import pytest
import torch

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
