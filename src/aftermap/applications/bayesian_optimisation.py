"""Bayesian optimisation: where to evaluate an expensive function next, with gradients in x and joint samples.

Everything here **minimises** unless ``maximise=True``; an acquisition is always to be made as large as possible.
Index legend: S samples, N inputs, d input dimensions, C outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aftermap import checks
from aftermap.batches import unpack_inputs
from aftermap.errors import DataError, InputError, NumericalError, ShapeError, UnsupportedError
from aftermap.evaluation.predictor import Predictor, check_predictor_object
from aftermap.predictive import Prediction
from aftermap.progress import progress

__all__ = [
    "STRATEGIES",
    "Maximum",
    "Optimisation",
    "ThompsonSample",
    "check_bounds",
    "expected_improvement",
    "log_expected_improvement",
    "maximise",
    "minimise",
    "spread",
    "thompson_sample",
    "upper_confidence_bound",
]

Score = Callable[[Prediction], Tensor]
_LOG_2PI = math.log(2 * math.pi)
_FAR = -1e3  # Beyond it 1 − |z| Φ/φ cancels, and its series z⁻² − 3 z⁻⁴ is exact to 1e-11.
STRATEGIES = ("expected_improvement", "upper_confidence_bound", "thompson", "random")
_CANDIDATES = 1000  # This is the number of candidates of Thompson sampling.
_CLOSE = 1e-6  # Points this close, as a share of the box, are the same: another evaluation would teach nothing.
Fit = Callable[[Tensor, Tensor, "torch.Generator | None"], Predictor]


# Acquisitions: functions of a Prediction, differentiable in x if the prediction is.


def _moments(prediction: Prediction, maximise: bool, output: int) -> tuple[Tensor, Tensor]:
    """Returns the mean of what shall be large, and the standard deviation of the function without noise, [N] each."""
    if prediction.kind != "regression" or prediction.mean.dim() != 2:
        raise UnsupportedError(
            f"Bayesian optimisation needs a regression with outputs [N, C], got {prediction.kind} {list(prediction.mean.shape)}"
        )
    width = prediction.mean.shape[-1]
    if not -width <= output < width:
        raise InputError(f"output={output}, but the prediction has {width} outputs")
    mean, variance = prediction.mean[:, output], prediction.epistemic[:, output]
    return (mean if maximise else -mean), variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


def expected_improvement(prediction: Prediction, best: float, *, maximise: bool = False, output: int = 0) -> Tensor:
    r"""Returns E max(best − f(x), 0) = s (φ(z) + z Φ(z)) with z = (best − m)/s, under f ~ N(m, s²) without the noise.

    Args:
        prediction: The prediction of a regression [N, C].
        best: The lowest value so far; with noise, the lowest predicted mean at the inputs so far.
        maximise: Whether improvement is upwards: E max(f(x) − best, 0).
        output: The index of the output to look at, of C.

    Returns:
        The expected improvement of each input [N].

    References:
        Jones, Schonlau, Welch 1998, Efficient global optimization of expensive black-box functions, eq. (15).

    >>> unit = Prediction("regression", torch.zeros(1, 1), *(torch.ones(1, 1) for _ in range(3)))
    >>> expected_improvement(unit, 0.0)
    tensor([0.3989])
    """
    mean, sd = _moments(prediction, maximise, output)
    z = (mean - (best if maximise else -best)) / sd
    density = (-0.5 * z.square() - 0.5 * _LOG_2PI).exp()
    return sd * (density + z * torch.special.ndtr(z))


def log_expected_improvement(prediction: Prediction, best: float, *, maximise: bool = False, output: int = 0) -> Tensor:
    r"""Returns the log of the expected improvement, finite and with useful gradients where the improvement underflows.

    With h(z) = φ(z) + z Φ(z), for z < −1

    .. math::
        \log h(z) = \log\phi(z) + \log\big(1 - |z|\, \Phi(z)/\phi(z)\big), \qquad
        \Phi(z)/\phi(z) = \sqrt{\pi/2}\; \mathrm{erfcx}(-z/\sqrt2),

    and log φ(z) + log(z⁻² − 3 z⁻⁴) in the far tail.

    Args:
        prediction: The prediction of a regression [N, C].
        best: The lowest value so far.
        maximise: Whether improvement is upwards.
        output: The index of the output to look at, of C.

    Returns:
        The log of the expected improvement of each input [N].

    References:
        Ament et al. 2023, Unexpected improvements to expected improvement for Bayesian optimization, eq. (9).

    >>> unit = Prediction("regression", torch.zeros(1, 1), *(torch.ones(1, 1) for _ in range(3)))
    >>> round(log_expected_improvement(unit, -50.0).item(), 2)
    -1258.74
    """
    mean, sd = _moments(prediction, maximise, output)
    z = (mean - (best if maximise else -best)) / sd
    return sd.log() + _log_h(z.double()).to(sd.dtype)


def _log_h(z: Tensor) -> Tensor:
    # Every branch sees only arguments of its own: a gradient through torch.where must not meet an infinite one.
    near, far = z > -1, z < _FAR
    a = torch.where(near, z, 0.0)
    direct = ((-0.5 * a.square() - 0.5 * _LOG_2PI).exp() + a * torch.special.ndtr(a)).log()
    b = torch.where(near | far, -1.0, z)
    middle = torch.log1p(math.sqrt(math.pi / 2) * torch.special.erfcx(-b / math.sqrt(2)) * b)
    c = torch.where(far, z, _FAR)
    series = torch.log1p(-3 / c.square()) - 2 * c.abs().log()
    density = -0.5 * z.square() - 0.5 * _LOG_2PI
    return torch.where(near, direct, density + torch.where(far, series, middle))


def upper_confidence_bound(
    prediction: Prediction, beta: float = 2.0, *, maximise: bool = False, output: int = 0
) -> Tensor:
    """Returns the optimist's value: −m + β s when minimising (the negative lower bound), m + β s when maximising.

    Args:
        prediction: The prediction of a regression [N, C].
        beta: The number of standard deviations of optimism, 0 or more.
        maximise: Whether f shall be large.
        output: The index of the output to look at, of C.

    Returns:
        The value of each input [N].

    References:
        Srinivas et al. 2010, Gaussian process optimization in the bandit setting, eq. (6), with β for their √β.

    >>> unit = Prediction("regression", torch.ones(1, 1), *(torch.ones(1, 1) for _ in range(3)))
    >>> upper_confidence_bound(unit), upper_confidence_bound(unit, maximise=True)
    (tensor([1.]), tensor([3.]))
    """
    beta = checks.number("beta", beta, least=0)
    mean, sd = _moments(prediction, maximise, output)
    return mean + beta * sd


# Thompson sampling.


@dataclass(frozen=True)
class ThompsonSample:
    """Functions drawn from the posterior, and where each of them is best.

    Attributes:
        indices: The chosen candidate of each function [S].
        values: The functions at all candidates [S, N].
    """

    indices: Tensor
    values: Tensor


def thompson_sample(
    predictor: Any,
    candidates: Any,
    n: int = 1,
    *,
    maximise: bool = False,
    output: int = 0,
    distinct: bool = False,
    generator: torch.Generator | None = None,
) -> ThompsonSample:
    """Draws functions from the posterior and takes the best candidate of each.

    The values are joint: one draw of the weights gives one function, with the true correlation between candidates. Independent
    draws per candidate would only pick the noisiest.

    Args:
        predictor: A predictor with ``function_samples(x, count, generator)``: Laplace, or a mixture.
        candidates: The N inputs to choose among.
        n: The number S of functions.
        maximise: Whether the best value is the largest.
        output: The index of the output to look at, of C.
        distinct: Whether each function takes the best candidate that no earlier one has taken.
        generator: The source of the random draws.

    Returns:
        The choices and the functions.

    Raises:
        UnsupportedError: The predictor has no joint samples.
        InputError: More distinct choices than candidates are asked for.

    References:
        Thompson 1933, On the likelihood that one unknown probability exceeds another.

    >>> from aftermap.laplace import Laplace
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> la = Laplace(torch.nn.Linear(1, 1), "regression").fit([(x, x)])
    >>> thompson_sample(la, x, 5).values.shape
    torch.Size([5, 20])
    """
    draw = getattr(predictor, "function_samples", None)
    if not callable(draw):
        raise UnsupportedError(
            f"Thompson sampling needs joint samples, function_samples(x, count), which {type(predictor).__name__} lacks"
        )
    n = checks.count("n", n)
    size = unpack_inputs(candidates).size
    if distinct and n > size:
        raise InputError(f"{n} distinct choices were asked for, but there are {size} candidates")
    drawn: Tensor = draw(candidates, n, generator)
    if drawn.dim() != 3 or not -drawn.shape[-1] <= output < drawn.shape[-1]:
        raise ShapeError(f"function samples have shape {list(drawn.shape)}; [S, N, C] with output {output} is needed")
    values = drawn[..., output]
    scores = values if maximise else -values
    if not distinct:
        return ThompsonSample(scores.argmax(1), values)
    free, chosen = torch.ones(size, dtype=torch.bool, device=values.device), []
    for line in scores:
        chosen.append(int(line.masked_fill(~free, -torch.inf).argmax()))
        free[chosen[-1]] = False
    return ThompsonSample(torch.tensor(chosen, device=values.device), values)


# Maximising an acquisition in x.


@dataclass(frozen=True)
class Maximum:
    """The best point of an acquisition.

    Attributes:
        x: The best point [d].
        value: The value of the acquisition at the best point.
        points: The points where the starts ended [starts, d].
        values: The values of the acquisition at those points [starts].
    """

    x: Tensor
    value: float
    points: Tensor
    values: Tensor


def check_bounds(bounds: object) -> Tensor:
    """Returns the bounds as a tensor [d, 2] of lower and upper ends.

    >>> check_bounds([[0.0, 1.0]]).shape
    torch.Size([1, 2])
    """
    try:
        box = torch.as_tensor(bounds)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"bounds must be [d, 2], a lower and an upper end for each input, got {bounds!r}") from None
    box = box if box.is_floating_point() else box.to(torch.get_default_dtype())
    if box.dim() != 2 or box.shape[1] != 2 or len(box) == 0:
        raise ShapeError(f"bounds must be [d, 2], a lower and an upper end for each input, got {list(box.shape)}")
    if not bool(box.isfinite().all()) or not bool((box[:, 0] < box[:, 1]).all()):
        raise InputError(f"bounds must be finite, each lower end below its upper end, got {box.tolist()}")
    return box


def spread(bounds: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns points [count, d] that fill the box evenly: a scrambled Sobol sequence.

    >>> spread(torch.tensor([[2.0, 3.0]]), 4).shape
    torch.Size([4, 1])
    """
    device = torch.device("cpu") if generator is None else generator.device
    seed = int(torch.randint(2**31, (1,), generator=generator, device=device))
    unit = torch.quasirandom.SobolEngine(len(bounds), scramble=True, seed=seed).draw(count, dtype=torch.float64)
    lower, upper = bounds.double().unbind(1)
    return (lower + (upper - lower) * unit.to(bounds.device)).to(bounds.dtype)


def maximise(
    acquisition: Score,
    predictor: Predictor,
    bounds: Any,
    *,
    starts: int = 8,
    raw: int = 256,
    iterations: int = 50,
    generator: torch.Generator | None = None,
) -> Maximum:
    """Maximises an acquisition over a box by L-BFGS from several starts, with exact gradients in x.

    The acquisition is looked at on ``raw`` evenly spread points; L-BFGS goes on from the best of them. The box is kept by
    x = centre + half-width · sin u, which reaches the bounds themselves.

    Args:
        acquisition: A function of a Prediction that returns [N], for instance ``lambda p: log_expected_improvement(p,
            best)``.
        predictor: A predictor with ``predict(x, differentiable=True)``, without randomness.
        bounds: The lower and upper ends [d, 2], in the dtype of the model.
        starts: The number of points that L-BFGS starts from.
        raw: The number of points that are looked at first.
        iterations: The number of iterations of each L-BFGS.
        generator: The source of the random points.

    Returns:
        The best point, which is never worse than the best of the raw points.

    Raises:
        InputError, ShapeError: The bounds are no box, or the acquisition does not return [N].
        NumericalError: The acquisition is finite nowhere.

    >>> from aftermap.laplace import Laplace
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> la = Laplace(torch.nn.Linear(1, 1), "regression").fit([(x, x)])
    >>> found = maximise(lambda p: upper_confidence_bound(p, 2.0), la, [[-1.0, 1.0]])
    >>> found.x.shape
    torch.Size([1])
    """
    check_predictor_object(predictor)
    box = check_bounds(bounds)
    for name, value in (("starts", starts), ("raw", raw), ("iterations", iterations)):
        checks.count(name, value)

    def score(x: Tensor, differentiable: bool) -> Tensor:
        options = {"differentiable": True} if differentiable else {}
        heights = acquisition(predictor.predict(x, **options))
        if not isinstance(heights, Tensor) or heights.shape != (len(x),):
            shape = list(heights.shape) if isinstance(heights, Tensor) else type(heights).__name__
            raise ShapeError(f"the acquisition must give one number per input, [{len(x)}], got {shape}")
        return heights

    points = spread(box, max(raw, starts), generator)
    with torch.no_grad():
        first = torch.cat([score(part, False) for part in points.split(256)])
    first = first.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
    if not bool(first.isfinite().any()):
        raise NumericalError("the acquisition is finite at none of the points that were looked at")
    best = first.argsort(descending=True, stable=True)[:starts]
    ends, values = [], []
    for index in best.tolist():
        end = _climb(lambda x: score(x, True), points[index], box, iterations)
        with torch.no_grad():
            reached, before = float(score(end[None], False)), float(first[index])
        better = reached >= before
        ends.append(end if better else points[index])
        values.append(reached if better else before)
    top = max(range(len(values)), key=values.__getitem__)
    return Maximum(ends[top], values[top], torch.stack(ends), torch.tensor(values, dtype=torch.float64))


def _climb(score: Callable[[Tensor], Tensor], start: Tensor, box: Tensor, iterations: int) -> Tensor:
    """Returns where L-BFGS ends from one start [d]."""
    lower, upper = box.unbind(1)
    centre, half = (lower + upper) / 2, (upper - lower) / 2
    u = ((start - centre) / half).clamp(-1 + 1e-6, 1 - 1e-6).arcsin().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [u], max_iter=iterations, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimiser.zero_grad()
        loss = -score((centre + half * u.sin())[None]).sum()
        (u.grad,) = torch.autograd.grad(loss, u)  # backward() would write into the model's own .grad.
        return loss.item()

    with torch.enable_grad():
        optimiser.step(closure)
    end = (centre + half * u.detach().sin()).clamp(lower, upper)
    return end if bool(end.isfinite().all()) else start


@dataclass(frozen=True)
class Optimisation:
    """What was evaluated in an optimisation, in order.

    Attributes:
        x: The points [n, d], in order.
        y: The values of the function [n].
        strategy: The way in which the points after the initial ones were chosen.
        initial: The number of points that were spread over the box first.
    """

    x: Tensor
    y: Tensor
    strategy: str
    initial: int

    @property
    def best(self) -> tuple[Tensor, float]:
        """The point with the lowest value, and that value."""
        place = int(self.y.argmin())
        return self.x[place], float(self.y[place])

    @property
    def best_so_far(self) -> Tensor:
        """The lowest value after each evaluation [n]."""
        return self.y.cummin(0).values


def minimise(
    function: Callable[[Tensor], float | Tensor],
    bounds: Any,
    fit: Fit,
    *,
    strategy: str = "expected_improvement",
    evaluations: int,
    initial: int = 5,
    beta: float = 2.0,
    generator: torch.Generator | None = None,
    show: bool | None = None,
) -> Optimisation:
    """Minimises an expensive function with as few evaluations as possible.

    Args:
        function: A function of a point [d] that returns a number.
        bounds: The lower and upper ends [d, 2], in the dtype of the model.
        fit: A function of (x [n, d], y [n, 1], generator) that returns a regression predictor.
        strategy: How points are chosen. "expected_improvement" and "upper_confidence_bound" are maximised by gradients
            in x; "thompson" takes the lowest of 1,000 evenly spread points under one function drawn from the posterior;
            "random" is there to compare with.
        evaluations: The number of evaluations of the function in all.
        initial: The number of these that are spread evenly over the box first.
        beta: The number of standard deviations of optimism in the upper confidence bound.
        generator: The source of every random choice, which is also handed to ``fit``.
        show: Whether to show a progress bar. None shows it on a terminal.

    Returns:
        All points and values in order.

    Raises:
        InputError: The strategy is unknown, or numbers do not fit.
        DataError: The function returns something that is no finite number.

    >>> from aftermap.laplace import Laplace
    >>> def fit(x, y, generator):
    ...     net = torch.nn.Linear(1, 1)
    ...     return Laplace(net, "regression").fit([(x, y)])
    >>> minimise(lambda x: x.sum(), [[0.0, 1.0]], fit, evaluations=6).y.shape
    torch.Size([6])
    """
    checks.choice("strategy", strategy, STRATEGIES)
    for name, value in (("evaluations", evaluations), ("initial", initial)):
        checks.count(name, value)
    if initial > evaluations:
        raise InputError(f"initial={initial} evaluations are more than all evaluations={evaluations}")
    box = check_bounds(bounds)
    x = spread(box, initial, generator)
    y = torch.stack([_value(function, point) for point in x])
    for _ in progress(range(evaluations - initial), description="optimising", enabled=show):
        if strategy == "random":
            point = spread(box, 1, generator)[0]
        else:
            predictor = check_predictor_object(fit(x, y[:, None], generator))
            point = _next(predictor, x, box, strategy, beta, generator)
        x, y = torch.cat([x, point[None]]), torch.cat([y, _value(function, point)[None]])
    return Optimisation(x, y, strategy, initial)


def _value(function: Callable[[Tensor], float | Tensor], point: Tensor) -> Tensor:
    value = torch.as_tensor(function(point.clone()), dtype=point.dtype, device=point.device).detach()
    if value.numel() != 1 or not bool(value.isfinite()):
        raise DataError(f"the function must return one finite number, got {value.tolist()} at {point.tolist()}")
    return value.reshape(())


def _next(
    predictor: Any, x: Tensor, box: Tensor, strategy: str, beta: float, generator: torch.Generator | None
) -> Tensor:
    if strategy == "thompson":
        candidates = spread(box, _CANDIDATES, generator)
        return candidates[int(thompson_sample(predictor, candidates, generator=generator).indices)]
    if strategy == "upper_confidence_bound":
        optimum = maximise(lambda p: upper_confidence_bound(p, beta), predictor, box, generator=generator)
    else:
        # Values are noisy to the model, so this is the best that it believes in, not the luckiest.
        best = float(predictor.predict(x).mean[:, 0].min())
        optimum = maximise(lambda p: log_expected_improvement(p, best), predictor, box, generator=generator)
    width = box[:, 1] - box[:, 0]
    if bool((((optimum.x - x) / width).abs().amax(1) < _CLOSE).any()):
        return spread(box, 1, generator)[0]
    return optimum.x
