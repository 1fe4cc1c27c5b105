"""Active learning: ask for the labels that teach most, fit again, and count what that saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from aftermap import checks
from aftermap import metrics as m
from aftermap.applications.acquisition import (
    Acquisition,
    greedy_information,
    mutual_information,
    parse_acquisition,
    random,
    top,
)
from aftermap.batches import take, unpack_inputs
from aftermap.errors import DataError, InputError, ShapeError, UnsupportedError
from aftermap.evaluation.evaluate import as_classes
from aftermap.evaluation.predictor import Predictor, accepts, check_predictor_object, predict_all
from aftermap.likelihoods import Likelihood
from aftermap.likelihoods.base import aligned
from aftermap.predictive import Prediction
from aftermap.progress import progress

__all__ = ["History", "JointInformation", "Selector", "active_learning"]

Oracle = Callable[[Tensor], Tensor]
Fit = Callable[[Any, Tensor, "torch.Generator | None"], Predictor]
_BETTER_HIGH = {"accuracy": True, "nll": False, "rmse": False}
_CHUNK = 500


@runtime_checkable
class Selector(Protocol):
    """Chooses a whole batch, for choices in which the inputs of a batch depend on each other."""

    def select(self, predictor: Predictor, inputs: Any, count: int, generator: torch.Generator | None) -> Tensor:
        """Returns positions [count] among the inputs, all different."""
        ...


@dataclass(frozen=True)
class History:
    """What active learning asked for, and what it learned.

    Attributes:
        acquisition: The way in which inputs were chosen.
        labels: The number of labels after each round, the initial ones first.
        indices: The indices of what was labelled, in order [labels[-1]].
        metrics: For each metric its value on the test data after each round: accuracy and nll for classes, rmse and nll
            otherwise.
    """

    acquisition: str
    labels: tuple[int, ...]
    indices: Tensor
    metrics: Mapping[str, tuple[float, ...]]

    @property
    def accuracy(self) -> tuple[float, ...]:
        """The accuracy on the test data after each round."""
        return self._values("accuracy")

    def _values(self, name: str) -> tuple[float, ...]:
        if name not in self.metrics:
            raise InputError(f"the history has no metric {name!r}; it has {', '.join(map(repr, self.metrics))}")
        return self.metrics[name]

    def labels_to(self, level: float, metric: str = "accuracy") -> int | None:
        """Returns the number of labels at which a metric first was as good as ``level``; None if it never was.

        >>> History("random", (10, 20), torch.arange(20), {"accuracy": (0.8, 0.9)}).labels_to(0.85)
        20
        """
        sign = 1.0 if _BETTER_HIGH.get(metric, True) else -1.0
        pairs = zip(self.labels, self._values(metric), strict=True)
        return next((labels for labels, value in pairs if sign * value >= sign * level), None)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain numbers, for JSON."""
        return {
            "acquisition": self.acquisition,
            "labels": list(self.labels),
            "indices": self.indices.tolist(),
            "metrics": {name: list(values) for name, values in self.metrics.items()},
        }


@dataclass(frozen=True)
class JointInformation:
    r"""Greedy batches by what they tell **together**: ½ log det(I + Sᵀ V S) of the outputs of several inputs.

    For classes V is the covariance of the logits and S Sᵀ = diag(p) − p pᵀ at the mean logits: the information of the linearised
    model. The joint covariance of the whole pool does not fit, so the greedy choice is among the inputs with the highest
    mutual information.

    Args:
        candidates: The number of such inputs to choose among, at least the size of the batch.

    References:
        Kirsch, van Amersfoort, Gal 2019, BatchBALD, for the aim; the Gaussian form is that of `greedy_information`.
    """

    candidates: int = 100

    def select(self, predictor: Predictor, inputs: Any, count: int, generator: torch.Generator | None) -> Tensor:
        joint, likelihood = getattr(predictor, "joint", None), getattr(predictor, "likelihood", None)
        if joint is None or not isinstance(likelihood, Likelihood):
            raise UnsupportedError(
                f"JointInformation needs a predictor with joint(x) and a likelihood, such as Laplace; "
                f'{type(predictor).__name__} has none: use acquisition="mutual_information"'
            )
        size = unpack_inputs(inputs).size
        scores = _scores(predictor, inputs, mutual_information, generator, {})
        near = top(scores, min(size, max(count, self.candidates)))
        mean, cov = joint(take(inputs, near, size))
        positions, _ = greedy_information(cov, likelihood.hessian_root(mean), count)
        return near[positions]


def active_learning(
    pool: Any,
    labels_oracle: Oracle | Tensor,
    fit: Fit,
    *,
    acquisition: str | Acquisition | Selector = "mutual_information",
    batch: int = 10,
    budget: int,
    initial: int | Sequence[int] | Tensor = 20,
    test: Iterable[Any],
    until: Callable[[Mapping[str, float]], bool] | None = None,
    generator: torch.Generator | None = None,
    options: Mapping[str, Any] | None = None,
    show: bool | None = None,
) -> History:
    """Labels a pool little by little, always where the predictor expects to learn most.

    Each round fits on the labels so far, measures on the test data, scores the pool's other inputs and asks for the labels of
    the best ``batch`` of them. No input is asked for twice.

    Args:
        pool: The N inputs as the model takes them: a tensor [N, ...], a tuple or a mapping of tensors.
        labels_oracle: The labels: a function of indices [B] that returns their targets [B, ...], or the tensor of all
            targets [N, ...].
        fit: A function of (inputs, targets, generator) that returns a predictor.
        acquisition: A name of `ACQUISITIONS`, a function of (prediction, generator) that returns scores [N], or a
            `Selector` for batches that are chosen together, such as `JointInformation()`.
        batch: The number of labels per round; the last round takes what is left of the budget.
        budget: The number of labels at the end, the initial ones included.
        initial: The number of labels to begin with, chosen at random, or their indices.
        test: Batches (x, y) to measure on.
        until: A function of the metrics that ends the rounds before the budget is spent, after the first round for
            which it is true, for instance ``lambda found: found["accuracy"] >= 0.95``.
        generator: The source of the random choices, which is also handed to ``fit`` and ``predict``.
        options: Options that are passed to ``predict``.
        show: Whether to show a progress bar. None shows it on a terminal.

    Returns:
        The history of the rounds.

    Raises:
        InputError: The pool cannot give the budget, the acquisition is unknown, or indices are out of range or given
            twice.
        DataError: The oracle returns another number of labels than it was asked for.

    >>> from aftermap.laplace import Laplace
    >>> x = torch.linspace(-1, 1, 50)[:, None]
    >>> def fit(x, y, generator):
    ...     net = torch.nn.Linear(1, 1)
    ...     return Laplace(net, "regression").fit([(x, y)])
    >>> found = active_learning(x, 2 * x, fit, batch=2, budget=8, initial=4, test=[(x, 2 * x)])
    >>> found.labels
    (4, 6, 8)
    """
    size = unpack_inputs(pool).size
    if not isinstance(acquisition, Selector):
        acquisition = parse_acquisition(acquisition)
    known = _first(initial, size, generator)
    _check_numbers(size, len(known), batch, budget)
    oracle = _oracle(labels_oracle, size)
    test = list(test)
    targets = _ask(oracle, known)
    labels: list[int] = []
    measured: dict[str, list[float]] = {}
    rounds = 1 + -(-(budget - len(known)) // batch)
    for number in progress(range(rounds), description="active learning", enabled=show):
        predictor = check_predictor_object(fit(take(pool, known, size), targets, generator))
        labels.append(len(known))
        metrics = _measure(predictor, test, generator, options or {})
        for name, value in metrics.items():
            measured.setdefault(name, []).append(value)
        if number == rounds - 1 or (until is not None and until(metrics)):
            break
        rest = _others(known, size)
        count = min(batch, budget - len(known))
        new = rest[_choose(acquisition, predictor, take(pool, rest, size), count, generator, options or {})]
        known = torch.cat([known, new])
        targets = torch.cat([targets, _ask(oracle, new)])
    return History(_name(acquisition), tuple(labels), known, {n: tuple(v) for n, v in measured.items()})


def _others(known: Tensor, size: int) -> Tensor:
    free = torch.ones(size, dtype=torch.bool)
    free[known] = False
    return free.nonzero().squeeze(1)


def _name(acquisition: Acquisition | Selector) -> str:
    return getattr(acquisition, "__name__", type(acquisition).__name__)


def _check_numbers(size: int, known: int, batch: object, budget: object) -> None:
    for name, value in (("batch", batch), ("budget", budget)):
        checks.count(name, value)
    if not known <= int(budget) <= size:  # type: ignore[call-overload]
        raise InputError(
            f"budget={budget} counts all labels, also the {known} initial ones, of a pool of {size}: "
            f"it must lie between {known} and {size}"
        )


def _first(initial: int | Sequence[int] | Tensor, size: int, generator: torch.Generator | None) -> Tensor:
    if isinstance(initial, int) and not isinstance(initial, bool):
        if not 1 <= initial <= size:
            raise InputError(f"initial={initial} must lie between 1 and the pool's size of {size}")
        device = torch.device("cpu") if generator is None else generator.device
        return torch.randperm(size, generator=generator, device=device)[:initial].cpu()
    index = torch.as_tensor(initial)
    if index.dim() != 1 or index.is_floating_point() or index.dtype is torch.bool or len(index) == 0:
        raise InputError("initial must be a number of labels, or indices [n] of the pool")
    if int(index.min()) < 0 or int(index.max()) >= size:
        raise InputError(f"initial holds indices from {int(index.min())} to {int(index.max())}, the pool has {size}")
    if len(index.unique()) < len(index):
        raise InputError("initial holds an index twice")
    return index.long().cpu()


def _oracle(labels: Oracle | Tensor, size: int) -> Oracle:
    if isinstance(labels, Tensor):
        if labels.dim() == 0 or len(labels) != size:
            raise ShapeError(f"the labels have shape {list(labels.shape)}, but the pool has {size} inputs")
        return lambda index: labels[index.to(labels.device)]
    if not callable(labels):
        raise InputError(f"labels_oracle must be a function of indices or a tensor, got {type(labels).__name__}")
    return labels


def _ask(oracle: Oracle, index: Tensor) -> Tensor:
    labels = torch.as_tensor(oracle(index))
    if labels.dim() == 0 or len(labels) != len(index):
        raise DataError(f"labels_oracle was asked for {len(index)} labels, and gave shape {list(labels.shape)}")
    return labels


def _predict(predictor: Predictor, inputs: Any, generator: torch.Generator | None, options: Mapping[str, Any]) -> Any:
    seeded = {"generator": generator} if accepts(predictor, "generator") else {}
    return predictor.predict(inputs, **{**seeded, **options}).detach()


def _scores(
    predictor: Predictor,
    inputs: Any,
    acquisition: Acquisition,
    generator: torch.Generator | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Returns the scores [N] of all inputs, computed some at a time."""
    size, pieces = unpack_inputs(inputs).size, []
    for part in torch.arange(size).split(_CHUNK):
        prediction: Prediction = _predict(predictor, take(inputs, part, size), generator, options)
        scores = torch.as_tensor(acquisition(prediction, generator)).cpu()
        if scores.shape != (len(part),):
            raise ShapeError(
                f"the acquisition {_name(acquisition)} gave shape {list(scores.shape)} for {len(part)} inputs; "
                "it must give one score each, [N]"
            )
        pieces.append(scores)
    return torch.cat(pieces)


def _choose(
    acquisition: Acquisition | Selector,
    predictor: Predictor,
    inputs: Any,
    count: int,
    generator: torch.Generator | None,
    options: Mapping[str, Any],
) -> Tensor:
    size = unpack_inputs(inputs).size
    if not isinstance(acquisition, Selector):
        if acquisition is random:  # There is no need to look at the pool.
            device = torch.device("cpu") if generator is None else generator.device
            return torch.randperm(size, generator=generator, device=device)[:count].cpu()
        return top(_scores(predictor, inputs, acquisition, generator, options), count)
    picked = acquisition.select(predictor, inputs, count, generator).cpu()
    if picked.shape != (count,) or len(picked.unique()) < count or int(picked.min()) < 0 or int(picked.max()) >= size:
        raise InputError(
            f"the selector {_name(acquisition)} must give {count} different positions below {size}, got {picked.tolist()}"
        )
    return picked


def _measure(
    predictor: Predictor, test: list[Any], generator: torch.Generator | None, options: Mapping[str, Any]
) -> dict[str, float]:
    seeded = {"generator": generator} if accepts(predictor, "generator") else {}
    predicted = predict_all(predictor, test, options={**seeded, **options})
    prediction, targets = predicted.prediction, predicted.targets
    if targets is None:
        raise DataError("the test data have no targets")
    if prediction.kind in ("classification", "binary"):
        probs, labels, _ = as_classes(prediction, targets)
        return {"accuracy": m.accuracy(probs, labels), "nll": m.nll(probs, labels)}
    y = aligned(prediction.mean, targets, prediction.mean.shape[-1], "active_learning")
    error = (prediction.mean.double() - y.double()).square().mean().sqrt().item()
    return {"rmse": error, "nll": -prediction.log_prob(targets).double().mean().item()}
