"""Products with a posterior precision s·G + P₀ and solves with it, on rows of flat vectors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aftermap.curvature.ggn_operator import GGNOperator
from aftermap.errors import InputError, NumericalWarning
from aftermap.krylov import conjugate_gradient
from aftermap.params import Params
from aftermap.posteriors.preconditioner import Preconditioner

__all__ = ["SOLVE_NUMBERS", "LinearSystem", "SolveReport", "symmetric_product"]

SOLVE_NUMBERS = 1 << 24  # of one array of right-hand sides (128 MB); a solve holds about six


@dataclass(frozen=True)
class SolveReport:
    """What a solve reached.

    Attributes:
        iterations: passes over the data, of the slowest chunk.
        residual: ‖b − Px‖ / ‖b‖, computed anew, one per right-hand side.
        converged: every residual is at most the tolerance, or what the rounding of the network's products allows.
    """

    iterations: int
    residual: Tensor
    converged: bool


@dataclass(frozen=True, eq=False)
class LinearSystem:
    """P = s·G + P₀ as a function of rows [k, P] in float64.

    Attributes:
        operator: products with G.
        weights: where G must be taken; a model that was trained on is noticed.
        prior: P₀ [P], without gradient.
        scale: s, 0-d, without gradient.
        preconditioner: M, close to P.
        tolerance: of a solve; None: 1e-8 for a float64 network, 1e-4 for others.
        max_iterations: of a solve.
    """

    operator: GGNOperator
    weights: Params
    prior: Tensor
    scale: Tensor
    preconditioner: Preconditioner
    tolerance: float | None
    max_iterations: int

    def curvature(self, rows: Tensor) -> Tensor:
        """s·G v for each row: one pass over the data.

        Raises:
            InputError: the model has other weights by now.
        """
        changed = [n for n, p in self.operator.params.items() if not torch.equal(p, self.weights[n])]
        if changed:
            raise InputError(
                f"the model's weights have changed since the posterior was made ({', '.join(changed[:5])}), and products are "
                "taken at the weights; restore them, or fit again"
            )
        return self.scale * self.operator.mv(rows.T.contiguous()).T

    def precision(self, rows: Tensor) -> Tensor:
        """P v for each row."""
        return self.curvature(rows) + rows * self.prior

    def solve(self, rows: Tensor) -> tuple[Tensor, SolveReport]:
        """P⁻¹ v for each row by preconditioned conjugate gradients, all rows in the same passes over the data.

        Warns:
            NumericalWarning: the tolerance was not reached.
        """
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = 1e-8 if self.operator.dtype == torch.float64 else 1e-4
        solutions, residuals, iterations, converged = [], [], 0, True
        for part in rows.detach().to(torch.float64).split(max(1, SOLVE_NUMBERS // self.operator.size)):
            gains = [torch.zeros((), dtype=torch.float64, device=part.device)]

            def product(v: Tensor, gains: list[Tensor] = gains) -> Tensor:
                moved = self.precision(v.T).T
                gains.append((moved.norm(dim=0) / v.norm(dim=0).clamp_min(1e-300)).max())
                return moved

            result = conjugate_gradient(
                product,
                part.T.contiguous(),
                preconditioner=lambda v: self.preconditioner.solve(v.T).T,
                tolerance=tolerance,
                max_iterations=self.max_iterations,
            )
            solutions.append(result.solution.T)
            residuals.append(result.residual)
            # Backward error: no residual can be below the rounding of ‖P‖‖x‖, large for a single-precision network.
            ratio = result.solution.norm(dim=0) / part.norm(dim=1).clamp_min(1e-300)
            floor = 10 * torch.finfo(self.operator.dtype).eps * torch.stack(gains).max() * ratio
            iterations = max(iterations, result.iterations)
            converged = converged and bool((result.residual <= floor.clamp_min(2 * tolerance)).all())
        report = SolveReport(iterations, torch.cat(residuals), converged)
        if not converged:
            warnings.warn(
                f"conjugate gradients stopped after {iterations} iterations with a relative residual of up to "
                f"{float(report.residual.max()):.2g} (wanted {tolerance:.2g}). Raise max_iterations or the tolerance, "
                "give a Kronecker preconditioner, or raise the prior precision",
                NumericalWarning,
                stacklevel=3,
            )
        return torch.cat(solutions), report


class _Symmetric(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return function(rows.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.function(grad), None


def symmetric_product(rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A product with a symmetric matrix that autograd cannot look into: its derivative is the same product.

    >>> x = torch.ones(2, requires_grad=True)
    >>> symmetric_product(x, lambda v: 3 * v).sum().backward()
    >>> x.grad
    tensor([3., 3.])
    """
    found: Tensor = _Symmetric.apply(rows, function)
    return found
