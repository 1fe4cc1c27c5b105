"""Variances against exact ones, over many priors: how many digits are left, and whether a warning says so.

`python -m tests.faults.digits` writes benchmarks/results/digits.json, which `python -m tests.faults.page` puts on the page of reliability.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature.structures.rounding import digits_tolerance
from aftermap.errors import NumericalWarning
from aftermap.laplace import Laplace
from aftermap.likelihoods import Categorical, Gaussian, Likelihood

__all__ = ["CASES", "OUTPUT", "PRIORS", "Problem", "errors_and_warnings", "kron_errors_and_warnings", "main", "missed"]

OUTPUT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "digits.json"
CASES = (("classes", 12), ("classes", 100), ("regression", 12), ("regression", 30))
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


def kron_errors_and_warnings(problem: Problem) -> list[tuple[float, float, bool]]:
    """The same for Kronecker factors in single precision, against the same factors in double precision."""
    found = []
    for prior in PRIORS:
        variances, warned = [], False
        for dtype in (torch.float64, torch.float32):
            targets = problem.y.to(dtype) if problem.y.is_floating_point() else problem.y
            laplace = Laplace(copy.deepcopy(problem.net).to(dtype), problem.likelihood, prior_precision=prior)
            laplace.fit([(problem.x.to(dtype), targets)])
            options = {} if problem.y.is_floating_point() else {"link": "probit"}
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                covariance = laplace.predict(problem.asked.to(dtype), **options).latent_cov
            warned = any(w.category is NumericalWarning for w in caught)
            variances.append(covariance.diagonal(dim1=1, dim2=2).double())
        found.append((prior, float((variances[1] / variances[0] - 1).abs().max()), warned))
    return found


def main(output: Path = OUTPUT) -> dict[str, Any]:
    """Goes through all cases, and writes what was found."""
    torch.set_num_threads(1)
    rows = []
    for task, count in CASES:
        problem = Problem.make(task, count)
        for structure in ("full", "low_rank"):
            for dtype in (torch.float32, torch.float64):
                found = errors_and_warnings(problem, structure, dtype)
                rows.append({"task": task, "count": count, "structure": structure, "dtype": str(dtype), "found": found})
        found = kron_errors_and_warnings(problem)
        rows.append({"task": task, "count": count, "structure": "kron", "dtype": "torch.float32", "found": found})
    results = {"priors": PRIORS, "rows": rows}
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def missed(results: dict[str, Any]) -> list[str]:
    """Where a variance was off by more than ten times the tolerance, without a warning."""
    return [
        f"{row['structure']}, {row['dtype']}, {row['task']} of {row['count']}, prior {prior:g}: {error:.1e}"
        for row in results["rows"]
        for prior, error, warned in row["found"]
        if not warned and not error < 10 * digits_tolerance(getattr(torch, row["dtype"].removeprefix("torch.")))
    ]


if __name__ == "__main__":
    told = missed(main())
    sys.exit(f"no warning: {told}" if told else 0)
