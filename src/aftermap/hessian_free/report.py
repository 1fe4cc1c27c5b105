"""What a Hessian-free posterior says about itself: the trained weights, and every functional it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from aftermap.hessian_free.steps import StepReport

__all__ = ["MapReport", "VarianceReport"]


@dataclass(frozen=True)
class MapReport:
    """How well the trained weights minimise the objective.

    Attributes:
        n_data: examples (with weights: their sum).
        loss: L at the trained weights.
        gradient_norm: ‖∇L‖ there.
        decrement: √(2(L(θ*) − L(θ₀))) with θ₀ the fine-tuned weights: to leading order Newton's decrement √(∇LᵀH⁻¹∇L), the
            distance to the minimum in posterior standard deviations. No functional drifts by more than this many of its own.
        final_gradient_norm: after fine-tuning.
        steps: of the fine-tuning.
        converged: the fine-tuning reached its goal (methods on all data).
        polished: whether the fine-tuned copy, not the trained weights, is the centre of the posterior.
        method: the optimiser.
    """

    n_data: float
    loss: float
    gradient_norm: float
    decrement: float
    final_gradient_norm: float
    steps: int
    converged: bool
    polished: bool
    method: str


@dataclass(frozen=True)
class VarianceReport:
    """How variances were found.

    Attributes:
        functionals: one report each; for predictions in the order of the flattened outputs.
        asymmetry: the largest |C_ij − C_ji| relative to √(C_ii C_jj): zero for exact derivatives.
        projected: negative eigenvalues that were set to zero, relative to the trace.
    """

    functionals: tuple[StepReport, ...]
    asymmetry: float
    projected: float

    @property
    def ok(self) -> bool:
        """Whether nothing was flagged."""
        return all(r.status == "ok" for r in self.functionals)

    def summary(self) -> str:
        """A table, one line per functional."""
        head = (
            f"{'':>4}{'variance':>11}{'λ':>10}{'move/sd':>9}{'bend':>8}{'rise':>7}{'residual':>10}{'steps':>7}  status"
        )
        lines = [
            f"{i:4}{r.variance:11.4g}{r.step:10.3g}{r.deviation:9.2g}{r.curvature:8.1g}{r.energy:7.3f}{r.residual:10.1g}"
            f"{int(r.steps):7}  {r.status}"
            for i, r in enumerate(self.functionals)
        ]
        return "\n".join([head, *lines])
