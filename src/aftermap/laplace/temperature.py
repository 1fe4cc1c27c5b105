"""The temperature T of p(y | f) = softmax(f/T) or sigmoid(f/T), by the evidence.

A power of the likelihood cannot be learned: it leaves no normalised density, and its evidence always prefers a smaller power. Dividing
the outputs does leave one. The Gauss-Newton matrix depends on T through every Λ(f/T)/T², so the evidence at another T is that of
a new pass over the data: nothing is extrapolated.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from aftermap.errors import InputError, StatisticalWarning
from aftermap.laplace.laplace import Laplace
from aftermap.likelihoods import Bernoulli, Categorical, Likelihood

__all__ = ["TEMPERATURES", "TemperatureSearch", "at_temperature", "temperature_of", "warn_at_the_end"]

TEMPERATURES = (0.05, 20.0)
_FIRST, _LEAST, _MOST = 0.3, 0.03, math.log(2.0)  # of a step in log T


def temperature_of(likelihood: Likelihood) -> float | None:
    """T, or None for a likelihood without a temperature.

    >>> temperature_of(Categorical(temperature=2.0)), temperature_of(Bernoulli())
    (2.0, 1.0)
    """
    return likelihood.temperature if isinstance(likelihood, Categorical | Bernoulli) else None


def at_temperature(likelihood: Likelihood, temperature: float) -> Likelihood:
    """The same likelihood at another temperature.

    Raises:
        InputError: it has none.

    >>> at_temperature(Bernoulli(), 3.0)
    Bernoulli(temperature=3.0)
    """
    if not isinstance(likelihood, Categorical | Bernoulli):
        raise InputError(
            f"temperature=True learns T of softmax(f/T) or sigmoid(f/T), and {type(likelihood).__name__} has no temperature; "
            "leave it at False (the noise of a regression is learned with noise=True)"
        )
    return replace(likelihood, temperature=temperature)


@dataclass
class TemperatureSearch:
    """A maximum of the evidence in log T by parabolas through three values, the step of one look being the spread of the next.

    Attributes:
        spread: h, how far the outer two values are from the present T in log T.
    """

    spread: float = _FIRST

    def improve(self, start: Laplace, fitted: Callable[[float], Laplace]) -> Laplace:
        """The best of the present T, T·e^±h and the top of their parabola, prior precisions fixed.

        Args:
            start: at the present temperature.
            fitted: makes the same at another temperature, with the same prior; a pass over the data. It is called up to three times.

        Returns:
            The one with the largest evidence; never worse than the start.
        """
        now = temperature_of(start.likelihood)
        assert now is not None  # at_temperature refused all others
        middle = math.log(now)
        tried: dict[float, tuple[float, Laplace]] = {middle: (float(start.log_evidence()), start)}

        def value(at: float) -> float:
            at = min(max(at, math.log(TEMPERATURES[0])), math.log(TEMPERATURES[1]))
            if at not in tried:
                made = fitted(math.exp(at))
                tried[at] = float(made.log_evidence()), made
            return tried[at][0]

        h = self.spread
        low, centre, high = value(middle - h), value(middle), value(middle + h)
        bend = low + high - 2 * centre
        onwards = 2 * h if high > low else -2 * h  # where there is no top in sight
        step = 0.5 * h * (low - high) / bend if bend < 0 else onwards
        value(middle + min(max(step, -_MOST), _MOST))
        best = max((at for at in tried if math.isfinite(tried[at][0])), key=lambda at: tried[at][0], default=middle)
        self.spread = min(max(abs(best - middle), _LEAST), _FIRST)
        return tried[best][1]


def warn_at_the_end(temperature: float) -> None:
    """A temperature at the end of its range says nothing but that there is no maximum."""
    if TEMPERATURES[0] * 1.001 < temperature < TEMPERATURES[1] * 0.999:
        return
    why = (
        "the outputs say nothing about the labels yet: train longer, or look later (burn_in=)"
        if temperature > 1
        else "the network separates the training data, so that their curvature vanishes with T: leave temperature=False, and scale the "
        "outputs on held-out data instead"
    )
    warnings.warn(
        f"the temperature went to {temperature:g}, the end of its range, so the evidence has no maximum in it; most likely {why}",
        StatisticalWarning,
        stacklevel=3,
    )
