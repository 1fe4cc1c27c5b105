"""How hard to push: the step λ from a pilot, the curvature check, runaway detection, and what is reported.

For a minimum of L the pushed minimiser θ_λ = argmin L − λψ has dψ(θ_λ)/dλ = gᵀH⁻¹g at λ = 0, the variance of ψ. With
both signs the error of the difference quotient is of order λ². The move is λ√v posterior standard deviations.

Index legend: r pushes (rows), q functionals, p parameters.
"""

from __future__ import annotations

import warnings
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from aftermap.curvature.structures.base import join_flat
from aftermap.errors import NumericalError, NumericalWarning
from aftermap.hessian_free.minimise import FineTuned, FineTuner
from aftermap.hessian_free.objective import Objective, Push
from aftermap.hessian_free.settings import Settings
from aftermap.predictive.functionals import FunctionalSet, functional_gradients

__all__ = ["STATUS", "Perturbed", "PushReport", "pack", "perturb", "unpack_reports"]

STATUS = ("ok", "not converged", "curved", "runaway")
_OK, _LOOSE, _CURVED, _RUNAWAY = range(4)
# A move of less than this share of the wanted one, or of more than its inverse, is made again with a better λ.
_LEAST_MOVE = 0.3
_RESCALES = 6
# The first fine-tuning only finds the scale of λ: this residual is enough.
_PILOT_TOLERANCE = 1e-3
# Steps on batches: the variance may be too small by this share before it is flagged.
_MISSING = 0.25
# The loss must rise by λ²v/2; a fall of this share of it says that the start was no minimum.
_FALL = -0.5
# A sum of losses is right to about this many units in its last place.
_ROUNDING = 8
# At once λ becomes smaller by this factor at most: far outside the quadratic regime the estimate is no guide.
_LEAST_SHARE = 1 / 8


@dataclass(frozen=True)
class PushReport:
    """How the variance of one functional was found.

    Attributes:
        value: The value of ψ at the trained weights.
        control: The value of ψ after fine-tuning without a push (λ = 0). Its difference to ``value`` is the drift.
        plus: The value of ψ after the push by +λ.
        minus: The value of ψ after the push by −λ; NaN if there was none.
        step: The size λ of the last push.
        variance: The variance v that the last push gave.
        deviation: The distance λ√v that the push moved ψ, in posterior standard deviations.
        curvature: The ratio |ψ₊ + ψ₋ − 2ψ₀| / |ψ₊ − ψ₋|, which is 0 for a functional that is linear in λ.
        energy: The rise of L relative to λ²v/2. It is 1 at a converged minimum, and less if the fine-tuning stopped early.
        bias: The share by which the variance is too large (negative: too small) because the push was not infinitely small. Along
            the pushed minima dL = λ dψ, so that with ψ = ψ₀ + vλ + aλ² + bλ³ the mean rise of both sides is vλ²/2 + 3bλ⁴/4, and
            the difference quotient is v + bλ²: the excess of ``energy`` over 1 is half of the relative error (a third of it with
            one side). What an early stop does to the rise is known, too, and is taken out. The bias counts as 0 where the
            rounding of L hides it.
        residual: The gradient of the pushed objective relative to the push: half the difference between the two sides, since
            what they have in common, drift and the noise of batches, cancels.
        missing: The largest share of the variance that may be missing from it. A move d with the residual r that it left has
            v = v̂ + (rᵀH⁻¹r − dᵀr)/λ² (exact where L is quadratic), and rᵀH⁻¹r ≤ rᵀP₀⁻¹r where the curvature of the data is not
            negative. The residual alone does not tell: the slowest directions have little of the gradient and much of the variance.
        steps: The steps of the optimiser in the last attempt, on the side that needed more.
        attempts: How often the functional was pushed, each time with another λ.
        halvings: How often λ was made smaller, to half or less.
        status: The outcome: "ok", "not converged", "curved" (λ is too large for the curvature or the bias to the end)
            or "runaway".
    """

    value: float
    control: float
    plus: float
    minus: float
    step: float
    variance: float
    deviation: float
    curvature: float
    energy: float
    bias: float
    residual: float
    missing: float
    steps: float
    attempts: float
    halvings: float
    code: float

    @property
    def status(self) -> str:
        """The outcome in a word."""
        return STATUS[int(self.code)]

    @property
    def drift(self) -> float:
        """The drift ψ₀ − ψ(θ*): how far the trained weights are from the minimum, in units of ψ."""
        return self.control - self.value


@dataclass(frozen=True)
class Perturbed:
    """The weights after pushes in both directions.

    Attributes:
        plus: The weights after the push by +λ [R, P].
        minus: The weights after the push by −λ [R, P]; those of the control where only one side was pushed.
        width: The distance 2λ, or λ where only one side was pushed [R].
        reports: One report per row.
    """

    plus: Tensor
    minus: Tensor
    width: Tensor
    reports: tuple[PushReport, ...]


def pack(reports: tuple[PushReport, ...]) -> Tensor:
    """Returns reports as numbers [R, fields], to be sent between processes."""
    return torch.tensor([astuple(r) for r in reports], dtype=torch.float64)


def unpack_reports(numbers: Tensor) -> tuple[PushReport, ...]:
    """Makes reports from what `pack` returned."""
    return tuple(PushReport(*row) for row in numbers.tolist())


@dataclass
class _Rows:
    """The state of the pushes on their way."""

    step: Tensor
    plus: Tensor
    minus: Tensor
    numbers: Tensor  # [R, fields of PushReport]
    going: Tensor
    attempts: Tensor
    halvings: Tensor
    reached: Tensor  # This is the λ at which plus and minus were reached, or 0 if never.


def perturb(
    objective: Objective,
    fine_tuner: FineTuner,
    functionals: FunctionalSet,
    origin: Tensor,
    settings: Settings,
    *,
    combine: Tensor | None = None,
    allow_zero: bool = False,
) -> Perturbed:
    """Pushes each functional, or each given combination of them, and fine-tunes.

    Args:
        objective: The objective L.
        fine_tuner: The optimiser that fine-tunes.
        functionals: The Q functionals ψ.
        origin: The weights where fine-tuning starts [P]: the λ = 0 minimum, or the trained weights.
        settings: The settings with λ, tolerances and limits.
        combine: The combinations [R, Q]: row r pushes Σ_q combine_rq ψ_q. None pushes each functional by itself, R = Q.
        allow_zero: Whether a functional with a gradient of zero is no error, but has the variance 0.

    Raises:
        InputError: A functional is not scalar or does not depend on the parameters.
        NumericalError: A functional runs away, and the settings are strict.
    """
    mixing = torch.eye(functionals.count, dtype=objective.dtype, device=objective.device)
    mixing = mixing if combine is None else combine.to(mixing)
    net = objective.network(origin)
    _, gradients = functional_gradients(
        objective.model, objective.names, functionals, params=net.params, fixed=objective.fixed, allow_zero=allow_zero
    )
    slopes = mixing @ join_flat(gradients, objective.names, 1)  # [R, P]
    trained = mixing @ objective.values(objective.centre[None], functionals)[0]
    # With a positive semi-definite curvature of the data the prior's variance is the most there can be: a safe pilot.
    most = (slopes.square() / objective.precision).sum(1)
    step = (
        torch.full_like(most, settings.step) if settings.step is not None else settings.wanted_deviation / most.sqrt()
    )
    rows = _Rows(
        step,
        origin.expand(len(most), -1).clone(),
        origin.expand(len(most), -1).clone(),
        torch.zeros(len(most), len(fields(PushReport)), dtype=torch.float64),
        most > 0,
        torch.zeros(len(most), dtype=torch.long),
        torch.zeros(len(most), dtype=torch.long),
        torch.zeros_like(step),
    )
    rows.numbers[:, 0] = trained.double().cpu()
    for _ in range(settings.max_halvings + _RESCALES + 1):
        index = torch.nonzero(rows.going)[:, 0]
        if not len(index):
            break
        _attempt(objective, fine_tuner, functionals, origin, settings, mixing, slopes, rows, index)
    reports = unpack_reports(rows.numbers)
    _judge(reports, settings)
    one = rows.reached.clamp_min(torch.finfo(rows.reached.dtype).tiny)
    return Perturbed(rows.plus, rows.minus, 2 * one if settings.symmetric else one, reports)


def _attempt(
    objective: Objective,
    fine_tuner: FineTuner,
    functionals: FunctionalSet,
    origin: Tensor,
    settings: Settings,
    mixing: Tensor,
    slopes: Tensor,
    rows: _Rows,
    index: Tensor,
) -> None:
    """Fine-tunes the rows ``index`` once with their present λ, and decides for each whether it is done."""
    step, mix = rows.step[index], mixing[index]
    # What was reached with another λ is stretched, which is exact where the objective is quadratic.
    stretch = torch.where(rows.reached[index] > 0, step / rows.reached[index].clamp_min(1e-300), 0.0)[:, None]
    starts = [origin + stretch * (rows.plus[index] - origin)]
    weights, goal = [step[:, None] * mix], [step * slopes[index].norm(dim=1)]
    if settings.symmetric:
        starts.append(origin + stretch * (rows.minus[index] - origin))
        weights, goal = [*weights, -weights[0]], [*goal, goal[0]]
    tolerance = settings.relative_tolerance(objective.dtype)
    pilots = (rows.attempts[index] == 0).to(step.device) & (settings.step is None)
    wanted = torch.where(pilots, max(tolerance, _PILOT_TOLERANCE), tolerance).to(step).repeat(len(goal))
    fine_tuned = fine_tuner.run(torch.cat(starts), Push(functionals, torch.cat(weights)), wanted * torch.cat(goal))
    values = objective.values(torch.cat([fine_tuned.theta, fine_tuned.control[None]]), functionals)
    measured = _measure(fine_tuned, values, mix, step, goal[0], settings, objective.precision, objective.n_data)
    rows.plus[index] = fine_tuned.theta[: len(index)]
    rows.minus[index] = fine_tuned.theta[len(index) :] if settings.symmetric else fine_tuned.control
    rows.reached[index] = step
    rows.attempts[index] += 1
    for place, row in enumerate(index.tolist()):
        code, better = _decide(measured[place], settings, tolerance, int(rows.halvings[row]), int(rows.attempts[row]))
        numbers = [float(rows.numbers[row, 0]), *measured[place].tolist()]
        numbers += [float(rows.attempts[row]), float(rows.halvings[row]), float(code)]
        rows.numbers[row] = torch.tensor(numbers, dtype=torch.float64)
        rows.going[row] = better is not None
        if better is not None:
            rows.halvings[row] += int(better < float(rows.step[row]))
            if code == _RUNAWAY:  # What was reached is no guide to where the next one should begin.
                rows.reached[row] = 0.0
            rows.step[row] = better


def _measure(
    fine_tuned: FineTuned,
    values: Tensor,
    mix: Tensor,
    step: Tensor,
    push: Tensor,
    settings: Settings,
    precision: Tensor,
    n_data: float,
) -> Tensor:
    """Returns for each row the numbers of a PushReport from ``control`` to ``steps``: [r, 12], float64."""
    count = len(step)
    plus, control = (values[:count] * mix).sum(1), (values[-1] * mix).sum(1)
    taken = fine_tuned.steps[:count]
    rise = fine_tuned.loss[:count] - fine_tuned.control_loss
    if settings.symmetric:
        minus = (values[count : 2 * count] * mix).sum(1)
        difference, bend = plus - minus, (plus + minus - 2 * control).abs()
        rise = (rise + fine_tuned.loss[count:] - fine_tuned.control_loss) / 2
        left = (fine_tuned.gradient[:count] - fine_tuned.gradient[count:]) / 2
        move = (fine_tuned.theta[:count] - fine_tuned.theta[count:]) / 2
        taken = torch.maximum(taken, fine_tuned.steps[count:])
        variance = difference / (2 * step)
        curvature = bend / difference.abs()
    else:
        minus, variance = torch.full_like(plus, float("nan")), (plus - control) / step
        common = 0.0 if settings.on_all_data else fine_tuned.control_gradient
        left, move = fine_tuned.gradient[:count] - common, fine_tuned.theta[:count] - fine_tuned.control
        curvature = torch.zeros_like(plus)  # One side alone does not show it.
    deviation = step * variance.abs().sqrt()
    energy = rise / (0.5 * step.square() * variance)
    residual = left.norm(dim=1) / push
    scale = step.square() * variance.abs()
    missing = (left * (left / precision - move)).sum(1) / scale
    # Where L is quadratic the rise of one side is λ²v̂/2 + dᵀ(r + c)/2 with c the gradient at the control, converged or not.
    unfinished = (fine_tuned.theta - fine_tuned.control) * (fine_tuned.gradient + fine_tuned.control_gradient)
    excess = energy - 1 - unfinished.sum(1).reshape(-1, count).mean(0) / scale
    rounding = _ROUNDING * torch.finfo(step.dtype).eps * (fine_tuned.control_loss.abs() + n_data) / (0.5 * scale)
    bias = (2 if settings.symmetric else 3) * excess.sign() * (excess.abs() - rounding).clamp_min(0.0)
    parts = [
        control,
        plus,
        minus,
        step,
        variance,
        deviation,
        curvature,
        energy,
        bias,
        residual,
        missing,
        taken.to(step),
    ]
    return torch.stack([p.double() for p in parts], dim=1).cpu()


def _decide(
    numbers: Tensor, settings: Settings, tolerance: float, halvings: int, attempts: int
) -> tuple[int, float | None]:
    """Returns the status of an attempt, and the λ of the next one, or None if it is done."""
    _, plus, _, step, variance, deviation, curvature, energy, bias, residual, missing, _ = numbers.tolist()
    wanted = settings.wanted_deviation
    finite = all(x == x and abs(x) != float("inf") for x in (plus, variance, energy))
    lost = not finite or variance <= 0 or energy < _FALL
    # On batches the losses of both sides are noisy, and a smaller push would be lost in the noise: it is only flagged,
    # if it is gross.
    limit = settings.bias_limit if settings.on_all_data else max(settings.bias_limit, _MISSING)
    biased = not abs(bias) <= limit
    bent = not curvature <= settings.curvature_limit
    automatic = settings.step is None
    gentle = finite and deviation < _LEAST_MOVE * wanted
    if lost or bent or (biased and settings.on_all_data):
        code = _RUNAWAY if lost else _CURVED
        if automatic and gentle and attempts <= _RESCALES and not settings.on_all_data:
            return code, 10 * step  # It is lost in the noise of the batches: push harder.
        return code, _gentler(
            step, 0.0 if lost or bent else bias, settings
        ) if halvings < settings.max_halvings else None
    pilot = attempts == 1 and settings.on_all_data
    # A push that was made smaller for the sake of the quadratic regime is not made larger again.
    far = pilot or gentle or deviation > wanted / _LEAST_MOVE
    if automatic and attempts <= _RESCALES and far and (halvings == 0 or not settings.on_all_data):
        return _OK, wanted / variance**0.5
    if biased:
        return _CURVED, None
    loose = residual > 100 * tolerance if settings.on_all_data else residual > 0.5 or missing > _MISSING
    return (_LOOSE if loose else _OK), None


def _gentler(step: float, bias: float, settings: Settings) -> float:
    """Returns a smaller λ: half, or less where the bias, which falls with λ² (with one side: λ), tells how much is needed."""
    if not settings.bias_limit < abs(bias) < float("inf"):
        return step / 2
    share = 0.5 * settings.bias_limit / abs(bias)
    return step * min(0.5, max(_LEAST_SHARE, share**0.5 if settings.symmetric else share))


def _judge(reports: tuple[PushReport, ...], settings: Settings) -> None:
    """Raises an error or warns about what did not work."""
    for place, report in enumerate(reports):
        if report.status == "runaway":
            message = (
                f"functional {place} runs away: pushed by λ = {report.step:.3g} it gives a variance of {report.variance:.3g} and the "
                f"loss changes by {report.energy:.2g} of what it should (1 at a minimum). The trained weights are no minimum of "
                "the objective (an indefinite Hessian), or λ is far too large. Train longer or with this prior, fit with "
                "polish=True, or use a Gauss-Newton posterior: Laplace(structure='matrix_free')"
            )
            if settings.strict:
                raise NumericalError(message)
            warnings.warn(message, NumericalWarning, stacklevel=3)
        elif report.status == "curved":
            if abs(report.bias) <= settings.bias_limit:
                problem = (
                    f"functional {place} is curved even at λ = {report.step:.3g} (bend {report.curvature:.2g}, allowed "
                    f"{settings.curvature_limit:.2g}): its variance {report.variance:.3g} is uncertain"
                )
            else:
                problem = (
                    f"the push of functional {place} leaves the region where the loss is quadratic, even at λ = {report.step:.3g}: its "
                    f"variance {report.variance:.3g} is off by about {abs(report.bias):.2g} of it (allowed {settings.bias_limit:.2g})"
                )
            warnings.warn(
                f"{problem}. Pass a smaller deviation or step, or allow more max_halvings",
                NumericalWarning,
                stacklevel=3,
            )
        elif report.status == "not converged":
            warnings.warn(
                f"functional {place}: the fine-tuning has not converged (gradient {report.residual:.2g} of the push, loss "
                f"{report.energy:.2g} of its rise), so its variance {report.variance:.3g} is likely too small, by up to "
                f"{report.missing:.0%}. Allow more steps, or use a method on all data (lbfgs, newton_cg)",
                NumericalWarning,
                stacklevel=3,
            )
