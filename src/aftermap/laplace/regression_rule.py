r"""Prior, noise and width of a regression from leave-one-out residuals of its linear model: pure functions of numbers.

At the trained weights θ the network is replaced by its linear model, y ≈ f + J(φ − θ). Its rows J, whitened by the likelihood,
give K = JJᵀ = U diag(S) Uᵀ, and everything below is a sum over S. With the ratio r = prior precision × noise variance,

.. math::
    e = r (K + r)^{-1} t,\quad t = y - f + J(\theta - \mu_0), \qquad A = r (K + r)^{-1}, \qquad \gamma = \sum S/(S + r):

e are the residuals of the linear model at its optimum, eᵢ/Aᵢᵢ those of the fit without datum i, and 1/Aᵢᵢ is the predictive
variance there in units of the noise. docs/mathematics/tuning.md has the derivations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.errors import DataError, NumericalError
from aftermap.laplace.golden import golden_section
from aftermap.laplace.self_consistent import CavityCheck
from aftermap.linalg import psd_eigh

__all__ = [
    "LinearModel",
    "RegressionResult",
    "apply_rule",
    "evidence_ratio",
    "fit_scale",
    "learning_slope",
    "leave_one_out_ratio",
    "match_width",
    "misfits",
]

_CAP = 1000.0  # how far leave-one-out may raise r above the evidence's
_FLOOR = 1e-13  # the least r as a share of the largest eigenvalue; below it is rounding
_GRID = tuple(10 ** (k / 4) for k in range(-48, 17))  # ratios r to try, in units of the mean eigenvalue
_ALARM = 0.2  # nats by which leave-one-out may be worse than a constant variance
_BY_HEART = 0.8  # share of determined numbers above which 95 % intervals covered 79 to 100 % on single networks
_FEW = 20  # examples below which residuals say little of each output
_UNEVEN = 2.0  # a factor between the noises of two outputs at which 95 % intervals cover some 86 and 99.8 %
_WIDTHS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.001)
_PSEUDO = 10.0  # how many labelled examples the values found without labels count for, where they are right
_DOUBTED = (1.0, 0.1, 0.01)  # the same where labels say that they are wrong: the farther off, the less
_RIGHT = 0.9  # how often they are right, before labels are seen
_BUDGET = 0.01  # nats of validation likelihood that a wider posterior may cost


@dataclass(frozen=True)
class RegressionResult:
    """Prior, noise and width that were found for a regression, and how.

    Attributes:
        precision: The prior precision, r / noise², before the covariance is divided by ``narrowing``.
        ratio: The ratio r, the prior precision in units of the noise's.
        noise: The noise σ, in units of the likelihood that the curvature is of.
        gamma: The effective number of parameters at r for all data.
        determined: γ as a share of the numbers in the data; near 1 the network has learned them by heart.
        ratio_evidence: The r that maximises the evidence.
        ratio_loo: The r with the best leave-one-out likelihood.
        loo_nll: The leave-one-out negative log-likelihood per number at r and the noise.
        constant_nll: The same with one variance for all data.
        n_data: How many training examples r was found on.
        n_params: How many parameters these examples have gradients in.
        at_edge: Whether the evidence has no maximum within the numbers that rounding allows, so that leave-one-out alone chose r.
        narrowing: By what the covariance was divided so that its width is that of the full linear model on unseen data, and by
            labels; 1 for a posterior that is this model's.
        factor: What validation labels multiplied the predictive variance by; None without labels.
        width: The share of the posterior's variance that validation labels left; None without labels.
        n_labels: How many validation examples were used.
        misfits: The root mean square residual of each output, in units of what is predicted for it; 1 where its noise is right.
        chance: A sentence where the network knows no more of its training data than their mean; None else, and with labels.
    """

    precision: float
    ratio: float
    noise: float
    gamma: float
    ratio_evidence: float
    ratio_loo: float
    loo_nll: float
    constant_nll: float
    n_data: int
    n_params: int
    determined: float = 0.0
    at_edge: bool = False
    narrowing: float = 1.0
    factor: float | None = None
    width: float | None = None
    n_labels: int = 0
    misfits: tuple[float, ...] = ()
    chance: str | None = None

    @property
    def uneven(self) -> bool:
        """Whether one noise does not serve all outputs: their residuals ask for ones that differ by more than a factor of two."""
        return bool(self.misfits) and max(self.misfits) > _UNEVEN * min(self.misfits)

    @property
    def converged(self) -> bool:
        """Whether the evidence is stationary at ``ratio_evidence``."""
        return not self.at_edge

    @property
    def alarm(self) -> bool:
        """Whether the variances that differ between inputs make leave-one-out predictions much worse than one variance for all."""
        return self.loo_nll > self.constant_nll + _ALARM

    @property
    def check(self) -> CavityCheck:
        """The comparison of these variances with one variance for all data, when each datum is left out."""
        difference = self.loo_nll - self.constant_nll
        message = f"{difference:+.3f} nats against one variance for all data, when each of {self.n_data:,} training data is left out"
        message += "" if self.chance is None else f"; {self.chance}"
        passed = not self.alarm and self.chance is None
        return CavityCheck(difference, math.nan, 0.0, self.n_data, passed, message, self.chance is not None)

    def __str__(self) -> str:
        return self.sentence()

    def sentence(self) -> str:
        """Says what was done, in plain English."""
        origin = (
            f"Noise {self.noise:.3g} and prior precision {self.precision:.3g} come from leave-one-out residuals and the evidence of "
            f"{self.n_data:,} training examples, which determine about {self.gamma:.0f} numbers"
        )
        parts = [origin]
        if self.n_labels:
            parts.append(
                f"{self.n_labels:,} validation examples multiplied the predictive variance by {self.factor:.3g}"
                + ("" if self.width == 1 else f" and the posterior's part of it by {self.width:.3g}")
            )
        if self.at_edge:
            parts.append(
                "the network reproduces its data, or never left its prior mean, so the evidence has no maximum"
            )
        if self.determined > _BY_HEART and not self.n_labels:
            parts.append(
                f"these are {100 * self.determined:.0f} % of the numbers in the data, so the network has nearly learned them by heart and the "
                "width is uncertain: validation labels would settle it"
            )
        if self.alarm:
            worse = self.loo_nll - self.constant_nll
            parts.append(
                f"beware: leaving out one datum at a time, these variances are {worse:.2f} nats worse than one variance for all data. "
                "Check the intervals on held-out data: tune(val_loader)"
            )
        if self.uneven:
            wide, narrow = (self.misfits.index(f(self.misfits)) for f in (min, max))
            parts.append(
                f"beware: residuals are {self.misfits[wide]:.2g} of what is predicted in output {wide}, whose intervals are too wide, and "
                f"{self.misfits[narrow]:.2g} in output {narrow}, whose are too narrow. Give each output its own noise: "
                "likelihood=Gaussian(noise=...), the deviations of residuals on held-out data"
            )
        if self.chance is not None:
            parts.append(f"beware: {self.chance.removesuffix('?')}")
        return "; ".join(parts) + ("." if self.chance is None else "?")


@dataclass(frozen=True)
class LinearModel:
    """The linear model of a network at its weights, decomposed; M numbers for each of n examples, R = n·M rows.

    Attributes:
        values: The eigenvalues S [R] of K, not negative.
        vectors: The eigenvectors U [R, R].
        targets: The targets t [R], whitened, multiplied by the roots of the weights.
        residuals: The residuals y − f [R], in the same units.
        weights: How many data each example stands for [n].
        distance: The squared distance ‖θ − μ₀‖² of the weights from their prior mean.
        n_params: The length of a row.
    """

    values: Tensor
    vectors: Tensor
    targets: Tensor
    residuals: Tensor
    weights: Tensor
    distance: float
    n_params: int

    @staticmethod
    def make(
        kernel: Tensor, shift: Tensor, residuals: Tensor, weights: Tensor, distance: float, n_params: int
    ) -> LinearModel:
        """Makes the model by decomposing K.

        Args:
            kernel: K = JJᵀ [R, R] of whitened rows, the M rows of an example together.
            shift: The linear part J(θ − μ₀) of the outputs [R].
            residuals: The residuals y − f [R], whitened.
            weights: How many data each example stands for [n]; positive.
            distance: The squared distance ‖θ − μ₀‖² of the weights from their prior mean.
            n_params: The length of a row.

        Raises:
            DataError: Fewer than two examples, or outputs that do not depend on the parameters.
            NumericalError: Numbers that are not finite.
        """
        if len(weights) < 2:
            raise DataError(
                f"{len(weights)} training example cannot show how far a regression is off on others; use more data, or set "
                "prior_precision= and the noise of the likelihood yourself"
            )
        if not all(bool(torch.isfinite(v).all()) for v in (kernel, shift, residuals)) or not math.isfinite(distance):
            raise NumericalError(
                "gradients or residuals of the training data are not finite; look at the outputs of the network on these data"
            )
        root = weights.sqrt().repeat_interleave(len(residuals) // len(weights))
        values, vectors = psd_eigh(kernel * root * root[:, None])
        if not float(values.max()) > 0:
            raise DataError(
                "the outputs on the training data do not depend on the chosen parameters: every gradient is zero. Choose others with "
                "params=, and check that the network is not constant"
            )
        return LinearModel(
            values.clamp_min(0.0), vectors, root * (residuals + shift), root * residuals, weights, distance, n_params
        )

    @property
    def outputs(self) -> int:
        """The number M of rows of an example."""
        return len(self.targets) // len(self.weights)

    @property
    def count(self) -> float:
        """How many numbers the data stand for: M Σ weights."""
        return self.outputs * float(self.weights.sum())

    @property
    def squares(self) -> float:
        """The sum of squared residuals of the network."""
        return float(self.residuals.square().sum())

    def gamma(self, ratio: float, copies: float = 1.0) -> float:
        """Returns the effective number of parameters Σ cS/(cS + r) where every datum counts ``copies`` times."""
        return float((copies * self.values / (copies * self.values + ratio)).sum())

    def leave_one_out(self, ratio: float) -> LeaveOneOut:
        """Predicts every example from all others, at this r."""
        shares = ratio / (self.values + ratio)
        residuals = self.vectors @ (shares * (self.vectors.T @ self.targets))
        if self.outputs == 1:
            inverse = 1 / (self.vectors.square() @ shares)
            left, diagonal = (inverse * residuals)[:, None], inverse[:, None]
        else:
            rows = (self.vectors * shares.sqrt()).reshape(len(self.weights), self.outputs, -1)
            inverse = torch.linalg.inv(rows @ rows.mT)
            left = (inverse @ residuals.reshape(len(self.weights), -1, 1))[..., 0]
            diagonal = inverse.diagonal(dim1=-2, dim2=-1)
        # Weights are copies, and all copies of an example are left out together.
        leverage = (diagonal - 1).clamp_min(0.0) / self.weights[:, None]
        return LeaveOneOut(left / self.weights.sqrt()[:, None], leverage, self.weights)

    def part(self, examples: int) -> LinearModel:
        """Returns the linear model of the first examples alone."""
        rows = examples * self.outputs
        some = self.vectors[:rows] * self.values.sqrt()
        values, vectors = psd_eigh(some @ some.T)
        return replace(
            self,
            values=values.clamp_min(0.0),
            vectors=vectors,
            targets=self.targets[:rows],
            residuals=self.residuals[:rows],
            weights=self.weights[:examples],
        )


@dataclass(frozen=True)
class LeaveOneOut:
    """Predictions of every example from all others.

    Attributes:
        residuals: Target minus prediction [n, M].
        leverage: The variance of the prediction without noise, in units of the noise's [n, M].
        weights: How many data each example stands for [n].
    """

    residuals: Tensor
    leverage: Tensor
    weights: Tensor

    def mean(self, values: Tensor) -> float:
        """Returns the weighted mean over examples of values [n, M]."""
        return float((self.weights[:, None] * values).sum() / (self.weights.sum() * values.shape[1]))

    @property
    def noise_variance(self) -> float:
        """The noise variance that makes the left-out data most probable."""
        return self.mean(self.residuals.square() / (1 + self.leverage))

    @property
    def criterion(self) -> float:
        """Twice the negative log-likelihood per number at that noise, without its constants."""
        noise = self.noise_variance
        return (math.log(noise) if noise > 0 else -math.inf) + self.mean((1 + self.leverage).log())

    def nll(self, noise_variance: float) -> float:
        """Returns the negative log-likelihood per number at a noise variance."""
        variance = noise_variance * (1 + self.leverage)
        return self.mean(0.5 * (2 * math.pi * variance).log() + self.residuals.square() / (2 * variance))

    def constant_nll(self, least: float) -> float:
        """Returns the same with the best of all constant variances that are not below ``least``."""
        squares = self.mean(self.residuals.square())
        variance = max(squares, least)
        return 0.5 * math.log(2 * math.pi * variance) + squares / (2 * variance)


def evidence_ratio(model: LinearModel, mean_square: float | None = None) -> tuple[float, bool]:
    """Returns the r that maximises the evidence of the linear model at the trained weights, and whether it is at an edge.

    With noise and prior precision profiled out, the derivative in log r is ½(γ(r) − N r‖θ−μ₀‖²/(SSE + r‖θ−μ₀‖²)): a falling
    function minus a rising one, so it has one zero, which is found by bisection between bounds that hold it.

    Args:
        model: The linear model.
        mean_square: The mean squared residual; None takes that of the model's own data.

    Returns:
        The ratio r, which is infinite at the upper edge (the weights are at their prior mean), and whether there is no zero within the numbers that
        rounding allows.
    """
    count, distance, largest = model.count, model.distance, float(model.values.max())
    squares = model.squares if mean_square is None else mean_square * count
    if distance <= 0:
        return math.inf, True
    least = _FLOOR * largest
    low = max(least, min(largest, squares / (2 * count * distance)))
    high = max(squares / distance, 2 * float(model.values.sum()) / count, 2 * low)

    def slope(ratio: float) -> float:
        return model.gamma(ratio) - count * ratio * distance / (squares + ratio * distance)

    if slope(low) <= 0:
        return low, True
    return _bisect(slope, low, high), False


def _bisect(slope: Callable[[float], float], low: float, high: float) -> float:
    """Finds where a falling function of a positive number, positive at ``low`` and negative at ``high``, is zero."""
    while high > low * (1 + 1e-12):
        middle = math.sqrt(low * high)
        if middle in (low, high):
            break
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return math.sqrt(low * high)


def leave_one_out_ratio(model: LinearModel) -> float:
    """Returns the r whose leave-one-out predictions are most probable, with the noise profiled out.

    The best of a grid with four values per decade, in units of the mean eigenvalue, is refined between its neighbours.
    """
    unit = float(model.values.sum()) / len(model.values)

    def criterion(log_ratio: float) -> float:
        return model.leave_one_out(math.exp(log_ratio)).criterion

    logs = [math.log(g * unit) for g in _GRID]
    values = [criterion(x) for x in logs]
    best = values.index(min(values))
    inside = golden_section(criterion, logs[max(0, best - 1)], logs[min(best + 1, len(logs) - 1)], 12)
    return math.exp(inside if criterion(inside) <= values[best] else logs[best])


def learning_slope(model: LinearModel, ratio: float) -> float:
    """Returns how fast the leverage of unseen data falls with the number n of data, as a power of 1/n from 0 to 1.

    It is read off between half of the examples and all of them, on geometric means.
    """
    half = model.part(len(model.weights) // 2).leave_one_out(ratio).leverage
    whole = model.leave_one_out(ratio).leverage
    return min(1.0, max(0.0, (_log_mean(half) - _log_mean(whole)) / math.log(2)))


def _log_mean(values: Tensor) -> float:
    positive = values[values > 0]
    return float(positive.log().mean()) if len(positive) else -math.inf


def match_width(leverage: Tensor, model: LinearModel, ratio: float, copies: float = 1.0) -> float:
    """Returns by what to divide a covariance for its leverages to be those of the full linear model on unseen data.

    Geometric means over the examples are compared. Where the data are a sample, each standing for ``copies``, the leverage of unseen
    data is carried on along its learning curve to all data.

    Args:
        leverage: The leverages jᵀΣj/σ² of the same rows under the covariance Σ at r [n, M].
        model: The linear model of the sample.
        ratio: The ratio r of the rule.
        copies: How many data each example of the sample stands for.
    """
    wanted = model.leave_one_out(ratio).leverage
    both = (leverage > 0) & (wanted > 0)
    if not bool(both.any()):
        return 1.0
    slope = learning_slope(model, ratio) if copies > 1 and len(model.weights) >= 4 else 0.0
    excess = float((leverage[both].log() - wanted[both].log()).mean())
    return math.exp(excess + slope * math.log(copies))


def apply_rule(
    model: LinearModel, *, copies: float = 1.0, mean_square: float | None = None, least_noise: float = 0.0
) -> RegressionResult:
    """Finds prior and noise of a regression without labels.

    r is the evidence's, or leave-one-out's where that asks for a stronger prior, up to a thousand times the evidence's. The noise is the
    larger of that of the network's own residuals, SSE/(N − γ), and of the left-out data.

    Args:
        model: The linear model of the training data, or of a sample of them.
        copies: How many numbers of the data each number of the sample stands for.
        mean_square: The mean squared residual over all data; None takes the sample's.
        least_noise: The smallest σ that rounding can tell from none.

    Raises:
        DataError: There is no noise: targets and outputs are equal and zero.
    """
    by_evidence, at_edge = evidence_ratio(model, mean_square)
    by_loo = leave_one_out_ratio(model)
    ratio = (
        by_loo if math.isinf(by_evidence) else max(by_evidence, by_loo if at_edge else min(by_loo, _CAP * by_evidence))
    )
    left = model.leave_one_out(ratio)
    gamma = model.gamma(ratio, copies)
    squares = model.squares / model.count if mean_square is None else mean_square
    total = model.count * copies
    residual_variance = squares * total / max(total - gamma, 1e-9 * total)
    variance = max(residual_variance, left.noise_variance, least_noise**2)
    if not (math.isfinite(variance) and variance > 0):
        raise DataError(
            "targets and outputs of the training data are all equal and zero, so there is no noise to be found; use "
            "Laplace(..., likelihood=Gaussian(noise)).tune(noise=False), or other data"
        )
    return RegressionResult(
        precision=ratio / variance,
        ratio=ratio,
        noise=math.sqrt(variance),
        gamma=gamma,
        ratio_evidence=by_evidence,
        ratio_loo=by_loo,
        loo_nll=left.nll(variance),
        constant_nll=left.constant_nll(max(residual_variance, least_noise**2)),
        n_data=len(model.weights),
        n_params=model.n_params,
        determined=gamma / total,
        at_edge=at_edge,
    )


def misfits(residuals: Tensor, variance: Tensor, weights: Tensor, outputs: int) -> tuple[float, ...]:
    """Returns root mean square residuals of each output in units of the predictive deviation; none for one output, or few examples.

    Args:
        residuals: What was predicted wrongly [n, M], positions first.
        variance: The predictive variance of the same numbers [n, M].
        weights: How many data each example stands for [n].
        outputs: How many outputs there are; M is a multiple.
    """
    if outputs == 1 or len(residuals) < _FEW:
        return ()
    squares = (residuals.square() / variance).reshape(len(residuals), -1, outputs).mean(1)
    return tuple(((weights / weights.sum()) @ squares).sqrt().tolist())


def fit_scale(residuals: Tensor, leverage: Tensor, noise: float, weights: Tensor | None = None) -> tuple[float, float]:
    """Finds what labels say of a predictive variance s²(1 + h): a factor for all of it, and the share of h to keep.

    The labels are smoothed towards what is believed without them: beside n examples with squared residuals ρ² there are m whose
    expected squares are s²(1 + h). m is ten, or fewer where the labels say that this belief is wrong (`_pseudo_examples`). For each share k of h the factor is the minimum of this smoothed negative log-likelihood, and the
    largest k is taken that costs no more than a hundredth of a nat.

    Args:
        residuals: Of the validation data [n, M], whitened.
        leverage: The leverages h [n, M].
        noise: The noise s of the rule.
        weights: How many data each example stands for [n]; None means one.

    Returns:
        The factor of the predictive variance, and the share k of the posterior's variance.
    """
    weights = residuals.new_ones(len(residuals)) if weights is None else weights
    share = (weights / weights.sum())[:, None] / residuals.shape[1]
    examples = float(weights.sum().square() / weights.square().sum())
    believed = noise**2 * (1 + leverage)
    pseudo = _pseudo_examples(examples, float((share * residuals.square() / believed).sum()))
    squares = (examples * residuals.square() + pseudo * believed) / (examples + pseudo)
    candidates = []
    for width in _WIDTHS:
        base = noise**2 * (1 + width * leverage)
        factor = float((share * squares / base).sum())
        candidates.append((0.5 * math.log(factor) + 0.5 * float((share * base.log()).sum()), factor, width))
    best = min(nll for nll, _, _ in candidates)
    return next((factor, width) for nll, factor, width in candidates if nll <= best + _BUDGET)


def _pseudo_examples(examples: float, ratio: float) -> float:
    r"""Returns how many examples a believed variance counts for beside so many labels, whose squares are ``ratio`` of it on average.

    A variance that was believed with m examples is φ times the true one, with φ from an inverse gamma of m degrees of freedom. The
    labels' probability under it,

    .. math::
        \log p(\rho\mid m) = \log\Gamma\big(\tfrac{n+m}2\big) - \log\Gamma\big(\tfrac m2\big) + \tfrac m2\log m - \tfrac{n+m}2\log(m + n\,\text{ratio}),

    decides between a belief of ten examples and weaker ones; the mean of m is returned.
    """

    def log_probability(m: float) -> float:
        half = (examples + m) / 2
        return math.lgamma(half) - math.lgamma(m / 2) + m / 2 * math.log(m) - half * math.log(m + examples * ratio)

    counts = (_PSEUDO, *_DOUBTED)
    prior = (_RIGHT, *[(1 - _RIGHT) / len(_DOUBTED)] * len(_DOUBTED))
    logs = torch.tensor([math.log(p) + log_probability(m) for p, m in zip(prior, counts, strict=True)])
    return float(torch.softmax(logs, 0) @ torch.tensor(counts))
