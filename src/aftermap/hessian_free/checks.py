"""Whether the trained weights are a minimum, and whether all processes look at the same data."""

from __future__ import annotations

import warnings

import torch

from aftermap.distributed import all_reduce_, world_size
from aftermap.errors import DataError, InputError, NumericalError, NumericalWarning, StatisticalWarning
from aftermap.hessian_free.report import MapReport
from aftermap.hessian_free.settings import Settings

__all__ = ["check_common", "check_minimum"]


def check_common(n_data: float, loss: float) -> None:
    """In a group of processes all must have the same data: functionals are shared out, not data."""
    own = torch.tensor([n_data, loss], dtype=torch.float64)
    sums = torch.stack([own, own.square()])
    all_reduce_([sums])
    mean, square = sums / world_size()
    if bool((square - mean.square() > 1e-6 * (1 + square)).any()):
        raise DataError(
            f"the processes hold different data ({n_data:g} examples with loss {loss:.6g} here, {mean[0]:g} with {mean[1]:.6g} on "
            "average). A Hessian-free posterior shares out functionals, not data: give every process all data"
        )


def check_minimum(report: MapReport, rise: float, settings: Settings, polish: bool, force: bool) -> None:
    """Refuses weights that are no minimum, and an optimiser that leaves one, unless told to go on."""
    if not rise <= max(0.5 * settings.max_decrement**2, 1e-6 * abs(report.loss)) and not force:
        raise NumericalError(
            f"fine-tuning without a push made the loss larger, by {rise:.3g} from {report.loss:.6g}: {settings.method} does not settle. "
            "Lower lr, use larger batches or more steps, or a method on all data (lbfgs, newton_cg)"
        )
    if not report.converged and report.steps >= settings.max_steps:  # one that is stuck at rounding has converged
        warnings.warn(
            f"fine-tuning without a push stopped after {report.steps} steps at a gradient of {report.final_gradient_norm:.3g} (trained "
            f"weights: {report.gradient_norm:.3g}): the minimum is not reached, and the measured distance to it may be too small. "
            "Raise max_steps, or train further",
            NumericalWarning,
            stacklevel=4,
        )
    if polish or report.decrement <= settings.max_decrement:
        return
    message = (
        f"the trained weights are {report.decrement:.3g} posterior standard deviations away from the minimum of the objective "
        f"(allowed: {settings.max_decrement:g}; gradient norm {report.gradient_norm:.3g}, loss {report.loss:.6g}). A Laplace "
        "approximation needs a minimum of Σ −log p(y|f)/T + ½ θᵀP₀θ"
    )
    if not force:
        raise InputError(
            f"{message}. Train longer, with this prior_precision (weight decay · N); or fit(polish=True) to work with a "
            "fine-tuned copy; or fit(force=True) to go on as it is"
        )
    warnings.warn(f"{message}; forced to go on", StatisticalWarning, stacklevel=4)
