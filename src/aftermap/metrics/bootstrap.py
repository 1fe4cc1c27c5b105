"""Confidence intervals for any metric, by drawing the examples again with replacement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap import checks
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.metrics.tensors import TensorLike, to_tensor

__all__ = ["BootstrapInterval", "bootstrap_interval"]

_METHODS = ("percentile", "basic")


@dataclass(frozen=True)
class BootstrapInterval:
    """A metric with its confidence interval.

    Attributes:
        estimate: The metric on the data themselves.
        lower: The lower end of the interval.
        upper: The upper end of the interval.
        level: The confidence level that was asked for.
        method: How the interval is formed from the resamples: "percentile" or "basic".
        replicates: The metric on each resample, float64 [R], in the order drawn.
    """

    estimate: float
    lower: float
    upper: float
    level: float
    method: str
    replicates: Tensor

    @property
    def standard_error(self) -> float:
        """The standard deviation of the replicates."""
        return self.replicates.std().item()


def _strata_rows(strata: TensorLike | None, n: int) -> list[Tensor]:
    if strata is None:
        return [torch.arange(n)]
    groups = to_tensor("strata", strata).cpu()
    if groups.shape != (n,):
        raise ShapeError(f"strata must have shape [{n}], one group per example, got {list(groups.shape)}.")
    return [(groups == value).nonzero().squeeze(-1) for value in groups.unique()]


def _resample(rows: list[Tensor], generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator is not None else torch.device("cpu")
    drawn = []
    for members in rows:
        choice = torch.randint(members.numel(), (members.numel(),), generator=generator, device=device)
        drawn.append(members[choice.cpu()])
    return torch.cat(drawn)


def _scalar(value: float | Tensor) -> float:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        raise InputError(f"the metric must return one finite number, got {value!r}. Wrap it in a function that does.")
    return float(number)


def bootstrap_interval(
    metric: Callable[..., float | Tensor],
    *data: TensorLike,
    n_resamples: int = 1000,
    level: float = 0.95,
    method: str = "percentile",
    strata: TensorLike | None = None,
    generator: torch.Generator | None = None,
) -> BootstrapInterval:
    """Returns the bootstrap confidence interval of ``metric(*data)`` over examples.

    With t the estimate and q_a the a-quantile of the metric over resamples, alpha = 1 - level:
    percentile [q_{alpha/2}, q_{1-alpha/2}]; basic [2 t - q_{1-alpha/2}, 2 t - q_{alpha/2}], which also turns
    the bias of the metric around (ECE is biased upwards, and more so on resamples: prefer basic for it).

    Args:
        metric: A function of the data that returns one number.
        *data: Tensors [N, ...] that share their first dimension; the same rows are drawn from all.
        n_resamples: The number R of resamples, at least 2.
        level: The confidence level, in (0, 1).
        method: How the interval is formed from the resamples: "percentile" or "basic".
        strata: A group for each example [N]. Examples are drawn within groups, so that the groups keep their sizes.
            Pass the positives for AUROC, so that no resample lacks a kind.
        generator: The source of the random draws, for a result that can be repeated.

    Returns:
        The interval, as :class:`BootstrapInterval`.

    Raises:
        InputError: There are no data, the method is unknown, or the metric does not return one finite number.
        ShapeError: Data or strata have different lengths.
        DataError: There are no examples, or the metric refuses a resample.

    References:
        Davison, Hinkley (1997), Bootstrap methods and their application, eq. (5.6) and section 5.3.1.

    >>> from aftermap.metrics import rmse
    >>> interval = bootstrap_interval(rmse, [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], n_resamples=10)
    >>> interval.estimate, interval.lower, interval.upper
    (1.0, 1.0, 1.0)
    """
    n_resamples = checks.count("n_resamples", n_resamples, 2)
    level = checks.fraction("level", level)
    checks.choice("method", method, _METHODS)
    if not data:
        raise InputError("data is missing: pass the tensors that the metric takes, such as probs and labels.")
    tensors = [to_tensor(f"data[{i}]", value).detach() for i, value in enumerate(data)]
    lengths = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
    if len(set(lengths)) != 1:
        raise ShapeError(f"all data must share their first dimension, got lengths {lengths}. Put the examples first.")
    if lengths[0] == 0:
        raise DataError("data is empty: at least one example is needed.")
    rows = _strata_rows(strata, lengths[0])
    estimate = _scalar(metric(*tensors))
    replicates = torch.empty(n_resamples, dtype=torch.float64)
    for r in range(n_resamples):
        index = _resample(rows, generator)
        try:
            replicates[r] = _scalar(metric(*(tensor[index.to(tensor.device)] for tensor in tensors)))
        except DataError as error:
            raise DataError(
                f"the metric refused resample {r}: {error} If a resample may lack a kind of example, pass "
                "strata= (for AUROC: the positives)."
            ) from error
    tail = 0.5 * (1.0 - level)
    low, high = torch.quantile(replicates, torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    if method == "basic":
        low, high = 2.0 * estimate - high, 2.0 * estimate - low
    return BootstrapInterval(estimate, low, high, level, method, replicates)
