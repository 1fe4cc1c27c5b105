"""Variances that lost their digits are warned of, and others are not: against sums of squares in float64."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from aftermap.curvature.structures.rounding import digits_tolerance
from aftermap.errors import NumericalWarning
from aftermap.laplace import Laplace
from aftermap.likelihoods import Categorical, Gaussian, Likelihood

PRIORS = [10.0**k for k in range(2, -15, -2)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Problem:
    """A network with its data, and inputs like them and far from them; all numbers are exact in single precision."""

    net: nn.Module
    x: Tensor
    y: Tensor
    likelihood: Likelihood
    asked: Tensor

    @staticmethod
    def make(task: str, count: int) -> Problem:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3 if task == "classes" else 1)).eval()
        x = normal(count, 3).float()
        asked = torch.cat([x[:6], 5 * normal(6, 3, seed=5).float()])
        if task == "classes":
            return Problem(net, x, torch.arange(count) % 3, Categorical(), asked)
        return Problem(net, x, x[:, :1].sin(), Gaussian(noise=0.1), asked)

    def jacobian(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradients of all outputs [b, c, p], as a network of this precision computes them."""
        net = copy.deepcopy(self.net).to(dtype)
        params = {n: p.detach() for n, p in net.named_parameters()}
        one = torch.func.jacrev(lambda p, x: torch.func.functional_call(net, p, (x[None],))[0])
        each = torch.func.vmap(one, in_dims=(None, 0))(params, inputs.to(dtype))
        return torch.cat([each[n].flatten(2) for n in params], 2)

    def rows(self) -> Tensor:
        """The gradients of the data through roots of the output Hessians [n, p]: their outer products sum to the curvature."""
        double = self.x.double()
        targets = self.y.double() if self.y.is_floating_point() else self.y
        roots = self.likelihood.hessian_root(copy.deepcopy(self.net).double()(double).detach(), targets)
        return torch.einsum("ncp,nck->nkp", self.jacobian(self.x, torch.float64), roots).flatten(0, 1)


def exact_variance(jacobian: Tensor, rows: Tensor, prior: float) -> Tensor:
    """J (AᵀA + τ I)⁻¹ Jᵀ by a QR decomposition of A and √τ I: the matrix AᵀA, which squares the condition, is never formed."""
    stacked = torch.cat([rows, math.sqrt(prior) * torch.eye(rows.shape[1], dtype=torch.float64)])
    root = torch.linalg.qr(stacked, mode="r")[1]
    solved = torch.linalg.solve_triangular(root.T, jacobian.flatten(0, 1).T, upper=False)
    return solved.square().sum(0).view(jacobian.shape[:2])


def leading(rows: Tensor, rank: int) -> Tensor:
    """The rows within their leading singular directions."""
    left, values, right = torch.linalg.svd(rows, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def errors_and_warnings(
    problem: Problem, structure: str, dtype: torch.dtype, seed: int = 0
) -> list[tuple[float, float, bool]]:
    """For each prior the largest relative error of a variance, and whether there was a warning."""
    rows = problem.rows()
    targets = problem.y.to(dtype) if problem.y.is_floating_point() else problem.y
    options = {"rank": rows.shape[1]} if structure == "low_rank" else {}
    laplace = Laplace(copy.deepcopy(problem.net).to(dtype), problem.likelihood, structure=structure, **options)
    laplace.fit([(problem.x.to(dtype), targets)], generator=torch.Generator().manual_seed(seed))
    rounded, exact = (problem.jacobian(problem.asked, d) for d in (dtype, torch.float64))
    found = []
    for prior in PRIORS:
        (block,) = laplace.posterior.with_prior(prior).blocks
        if structure == "low_rank":  # What Lanczos leaves out is left to the prior, which is no rounding.
            rows = leading(problem.rows(), block.values.shape[0])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            variance = block.output_covariance(rounded.transpose(0, 1), diagonal=True)
        truth = exact_variance(exact, rows, prior)
        error = float((variance.double() / truth - 1).abs().max())
        found.append((prior, error, any(w.category is NumericalWarning for w in caught)))
    return found


@pytest.mark.parametrize(("task", "count"), [("classes", 12), ("classes", 100), ("regression", 12), ("regression", 30)])
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
