"""One call for everything that is reported about a method: which numbers for each kind of task, with bootstrap intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aftermap import metrics as m
from aftermap.batches import Unpack, tensors_of, unpack_batch
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.evaluation.adversarial import Attack
from aftermap.evaluation.ood import Detection, detections, variance_ratio
from aftermap.evaluation.predictor import (
    PredictedData,
    Predictor,
    accepts,
    check_predictor_object,
    model_of,
    predict_all,
)
from aftermap.evaluation.reference import Reference, available_scores, check_scores
from aftermap.evaluation.results import Metric, Results, provenance
from aftermap.evaluation.selective import clopper_pearson
from aftermap.likelihoods.base import aligned
from aftermap.params import weights_hash
from aftermap.predictive import Prediction

__all__ = [
    "LEVELS",
    "Bootstrap",
    "as_classes",
    "class_curves",
    "class_metrics",
    "evaluate",
    "regression_curves",
    "regression_metrics",
]

LEVELS = (0.5, 0.9, 0.95)
_COVERAGES = (0.8, 0.9)


class Bootstrap:
    """Intervals for several metrics of the same data: every metric sees the same resamples.

    Args:
        n_resamples: 0: no intervals.
        level: of the intervals.
        seed: of the resamples.
    """

    def __init__(self, n_resamples: int, level: float, seed: int):
        self.n_resamples, self.level, self.seed = n_resamples, level, seed

    def __call__(
        self, metric: Callable[..., float], *data: Tensor, method: str = "percentile", strata: Any = None
    ) -> Metric:
        if not self.n_resamples:
            value = float(metric(*data))
            return Metric(value, value, value)
        interval = m.bootstrap_interval(
            metric,
            *data,
            n_resamples=self.n_resamples,
            level=self.level,
            method=method,
            strata=strata,
            generator=torch.Generator().manual_seed(self.seed),
        )
        return Metric(interval.estimate, interval.lower, interval.upper)


def _mean(values: Tensor) -> float:
    return values.mean().item()


def as_classes(prediction: Prediction, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [M, C], labels [M] and the entropy [M] of every position that counts; a binary output is two classes."""
    if prediction.kind == "binary":
        p = prediction.mean.double()
        y = aligned(p, targets, p.shape[-1], "evaluate")
        if not bool(((y == 0) | (y == 1)).all()):
            raise DataError("evaluate needs binary targets that are 0 or 1, got others")
        probs, labels = torch.stack([1 - p, p], -1).reshape(-1, 2), y.reshape(-1).long()
        return probs, labels, prediction.total.reshape(-1)
    probs, labels = prediction.mean.reshape(-1, prediction.mean.shape[-1]), targets.reshape(-1)
    keep = labels != ignore_index
    if not bool(keep.any()):
        raise DataError(f"every target is {ignore_index}, the index of positions to leave out")
    return probs[keep], labels[keep], prediction.total.reshape(-1)[keep]


def class_metrics(probs: Tensor, labels: Tensor, uncertainty: Tensor, boot: Bootstrap) -> dict[str, Metric]:
    """Accuracy, proper scores, calibration, and how well the uncertainty finds the errors."""
    wrong = m.misclassified(probs, labels)
    scores = uncertainty.double()
    metrics = {
        "accuracy": boot(_mean, (~wrong).double()),
        "nll": boot(_mean, m.pointwise_nll(probs, labels)),
        "brier": boot(_mean, m.pointwise_brier(probs, labels)),
        # Resampling adds to the bias of a calibration error; the basic interval turns it around.
        "ece": boot(m.ece, probs, labels, method="basic"),
        "adaptive_ece": boot(m.adaptive_ece, probs, labels, method="basic"),
        "mce": _point(m.mce(probs, labels)),
        "classwise_ece": _point(m.classwise_ece(probs, labels)),
        "signed_calibration_error": boot(_mean, probs.amax(-1).double() - (~wrong).double()),
        "entropy": boot(_mean, scores),
        "aurc": boot(m.aurc, scores, wrong.double()),
    }
    for coverage in _COVERAGES:
        metrics[f"accuracy_at_{coverage:.0%}".replace("%", "")] = _point(
            m.accuracy_at_coverage(scores, wrong, coverage=coverage)
        )
    if 0 < int(wrong.sum()) < len(wrong):  # without both kinds there is nothing to tell apart
        metrics["auroc_errors"] = boot(m.auroc, scores, wrong, strata=wrong)
        metrics["fpr95_errors"] = _point(m.fpr_at_tpr(scores, wrong))
    return metrics


def _point(value: float) -> Metric:
    return Metric(value, value, value)


def class_curves(probs: Tensor, labels: Tensor, uncertainty: Tensor) -> dict[str, dict[str, list[float]]]:
    """Reliability bins, risk against coverage, and the inverse ECDF of the entropy of right and wrong answers."""
    wrong = m.misclassified(probs, labels)
    bins = m.reliability_bins(probs, labels)
    risk = m.risk_coverage(uncertainty.double(), wrong)
    curves = {
        "reliability": {
            "confidence": bins.confidence.tolist(),
            "accuracy": bins.accuracy.tolist(),
            "count": [float(c) for c in bins.count.tolist()],
        },
        "risk_coverage": {"coverage": _thin(risk.coverage), "risk": _thin(risk.risk)},
    }
    for name, rows in (("right", ~wrong), ("wrong", wrong)):
        if bool(rows.any()):
            curves[f"entropy_{name}"] = inverse_ecdf(uncertainty[rows])
    return curves


def inverse_ecdf(values: Tensor) -> dict[str, list[float]]:
    """Share of values above each threshold, thinned for a figure."""
    curve = m.inverse_ecdf(values.double())
    return {"threshold": _thin(curve.thresholds), "share_above": _thin(curve.fraction)}


def _thin(values: Tensor, most: int = 400) -> list[float]:
    picked = torch.linspace(0, len(values) - 1, min(most, len(values))).round().long()
    return [float(v) for v in values[picked].tolist()]


def regression_metrics(prediction: Prediction, targets: Tensor, boot: Bootstrap) -> dict[str, Metric]:
    """Error, proper scores, and coverage and width of intervals for new targets (noise included)."""
    mean = prediction.mean.double()
    y = aligned(mean, targets, mean.shape[-1], "evaluate")
    metrics = {"rmse": boot(m.rmse, mean.flatten(1), y.flatten(1))}
    if prediction.kind == "custom":
        return metrics
    metrics["nll"] = boot(_mean, -prediction.log_prob(targets).double())
    metrics["epistemic"] = boot(_mean, prediction.epistemic.double().flatten(1).mean(1))
    for level in LEVELS:
        lower, upper = (end.double() for end in prediction.interval(level))
        inside = ((y >= lower) & (y <= upper)).double().flatten(1).mean(1)
        metrics[f"coverage_{level:g}"] = boot(_mean, inside)
        metrics[f"width_{level:g}"] = boot(_mean, (upper - lower).flatten(1).mean(1))
    if prediction.kind == "regression":
        total = prediction.total.double()
        metrics["crps"] = boot(m.crps_gaussian, mean.flatten(1), total.flatten(1), y.flatten(1))
        metrics["chi_square"] = boot(_mean, ((y - mean).square() / total).flatten(1).mean(1))
        lower, upper = prediction.interval(0.95)
        metrics["interval_score_0.95"] = boot(
            m.interval_score, lower.double().flatten(1), upper.double().flatten(1), y.flatten(1)
        )
        metrics["miscalibration_area"] = _point(m.interval_calibration(mean, total, y).area)
    return metrics


def regression_curves(prediction: Prediction, targets: Tensor) -> dict[str, dict[str, Sequence[float]]]:
    """Calibration of intervals and the risk when the most uncertain inputs are set aside."""
    if prediction.kind != "regression":
        return {}
    mean, total = prediction.mean.double(), prediction.total.double()
    y = aligned(mean, targets, mean.shape[-1], "evaluate")
    calibration = m.interval_calibration(mean, total, y)
    risk = m.risk_coverage(prediction.score("entropy"), (y - mean).square().flatten(1).mean(1))
    return {
        "interval_calibration": {"level": calibration.levels.tolist(), "coverage": calibration.observed.tolist()},
        "risk_coverage": {"coverage": _thin(risk.coverage), "risk": _thin(risk.risk)},
    }


def evaluate(
    predictor: Predictor,
    data: Iterable[Any],
    *,
    ood: Mapping[str, Iterable[Any]] | None = None,
    attacks: Sequence[Attack] = (),
    scores: Sequence[str] | None = None,
    reference: Reference | None = None,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    unpack: Unpack | None = None,
    n_resamples: int = 200,
    level: float = 0.95,
    seed: int = 0,
    table: bool = True,
    attack_options: Mapping[str, Any] | None = None,
    max_attacked: int | None = 1000,
) -> Results:
    """Evaluates a predictor on test data, on data that it should find unusual, and under attack.

    Classification (and binary outputs, as two classes): accuracy, NLL, Brier score, calibration errors, area under the
    risk-coverage curve, accuracy at 80 and 90 % coverage, AUROC and FPR95 of finding errors by entropy. Regression and counts:
    RMSE, NLL, coverage and width of intervals, and for a regression CRPS, interval score, chi-square and miscalibration area.

    Args:
        predictor: anything with ``predict(x) -> Prediction``; for a plain network `baselines.Deterministic(model)`.
        data: batches of (x, y).
        ood: name -> batches of (x, anything) or x with targets None; of the same input shape.
        attacks: `FGSM(...)`, `TargetedAttack(...)`, `PGD(...)`.
        scores: for OOD: entropy, mutual_information, variance, max_probability, and with a reference either; None: all that
            the predictor has.
        reference: the scores of this predictor on held-out usual inputs. It adds the score "either", the metric ``flagged`` (the
            share of the test data that it flags) and for every OOD set and score ``detected``, the share that is flagged.
        name: in tables; None: the predictor's class.
        options: passed to every ``predict``, such as ``{"kind": "sampling", "samples": 30}``.
        unpack: turns a batch of another form into (inputs, targets).
        n_resamples: of the bootstrap; 0: no intervals.
        level: of the intervals.
        seed: of the bootstrap, and of the predictor's samples where it takes a generator.
        table: keep one row per input.
        attack_options: passed to ``predict`` under attack instead of ``options``: a smaller, fixed ensemble.
        max_attacked: attack only so many examples; None: all.

    Returns:
        Numbers with intervals, the table of inputs, curves, and provenance.

    Raises:
        InputError, DataError, ShapeError: what is no predictor, data without targets, labels out of range, OOD data of another
            shape, an unknown score.

    >>> from aftermap.baselines import Deterministic
    >>> x, y = torch.eye(3).repeat(5, 1), torch.arange(3).repeat(5)
    >>> results = evaluate(Deterministic(torch.nn.Identity()), [(x, y)], n_resamples=0)
    >>> results["accuracy"], round(results["nll"], 3)
    (1.0, 0.551)
    """
    check_predictor_object(predictor)
    if isinstance(n_resamples, bool) or not isinstance(n_resamples, int) or n_resamples < 0 or n_resamples == 1:
        raise InputError(f"n_resamples must be 0 (no intervals) or at least 2, got {n_resamples!r}")
    for attack in attacks:
        if not isinstance(attack, Attack):
            raise InputError(f"attacks must be FGSM, TargetedAttack or PGD objects, got {type(attack).__name__}")
    if reference is not None and not isinstance(reference, Reference):
        raise InputError(
            f"reference must be a Reference, as Reference.from_predictions(…) makes it, got {type(reference).__name__}"
        )
    if scores is not None:
        check_scores(scores, reference=reference is not None)
    if "test" in (ood or {}):
        raise InputError('an OOD set cannot be called "test": that is what the rows of the data themselves are called')
    started = time.perf_counter()
    chosen = dict(options or {})
    if accepts(predictor, "generator"):
        chosen.setdefault("generator", torch.Generator().manual_seed(seed))
    inside = predict_all(predictor, data, options=chosen, unpack=unpack)
    seconds = time.perf_counter() - started
    outside = {n: _outside(predictor, n, d, inside, chosen, unpack) for n, d in (ood or {}).items()}
    boot = Bootstrap(n_resamples, level, seed)
    numbers, curves = _measure(inside, boot)
    detected = detections(
        inside.prediction,
        {n: c.prediction for n, c in outside.items()},
        scores=scores,
        reference=reference,
        n_resamples=n_resamples,
        level=level,
        generator=torch.Generator().manual_seed(seed),
    )
    found = {d: {s: _metrics(detection) for s, detection in by_score.items()} for d, by_score in detected.items()}
    if reference is not None:
        numbers["flagged"] = _share(reference.flag(inside.prediction), level)
    for key, other in outside.items():
        _add_shares(found[key], inside.prediction, other.prediction, reference, level)
    for key, collected in (("test", inside), *outside.items()):
        if collected.prediction.kind in ("classification", "binary"):
            curves[f"entropy/{key}"] = inverse_ecdf(collected.prediction.score("entropy"))
    attacked = _attack(
        predictor, data, attacks, seed, options if attack_options is None else attack_options, unpack, max_attacked
    )
    return Results(
        name or type(predictor).__name__,
        inside.prediction.kind,
        len(inside.prediction),
        numbers,
        found,
        attacked,
        _table(inside, outside, scores, reference) if table else {},
        curves,
        _facts(
            predictor,
            inside,
            outside,
            seconds,
            seed=seed,
            n_resamples=n_resamples,
            level=level,
            flagged_by=None if reference is None else reference.default,
            options=options,
        ),
    )


def _outside(
    predictor: Predictor,
    name: str,
    data: Iterable[Any],
    inside: PredictedData,
    options: Mapping[str, Any],
    unpack: Unpack | None,
) -> PredictedData:
    first, data = _peek(data)
    shape = _shape_of(first, unpack)
    if shape is not None and shape != inside.input_shape:
        raise ShapeError(
            f"the OOD set {name!r} has inputs of shape {list(shape)}, the test data {list(inside.input_shape)}; "
            "resize or reshape it first"
        )
    return predict_all(predictor, data, options=options, unpack=unpack, need_targets=False)


def _peek(data: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """The first batch, and the data; a generator, which can be read once only, is kept in a list."""
    if iter(data) is data:
        data = list(data)
    return next(iter(data), None), data


def _shape_of(batch: Any, unpack: Unpack | None) -> tuple[int, ...] | None:
    if batch is None:
        return None
    return tuple(next(iter(tensors_of(unpack_batch(batch, unpack).inputs))).shape[1:])


def _measure(inside: PredictedData, boot: Bootstrap) -> tuple[dict[str, Metric], dict[str, Any]]:
    prediction, targets = inside.prediction, inside.targets
    if targets is None:
        raise InputError("the test data have no targets")
    if prediction.kind in ("classification", "binary"):
        if prediction.kind == "classification" and targets.is_floating_point():
            raise InputError(f"class labels must be integers, got {targets.dtype}; use labels.long()")
        probs, labels, uncertainty = as_classes(prediction, targets)
        numbers = class_metrics(probs, labels, uncertainty, boot)
        numbers["mutual_information"] = boot(_mean, prediction.score("mutual_information").double())
        return numbers, dict(class_curves(probs, labels, uncertainty))
    return regression_metrics(prediction, targets, boot), dict(regression_curves(prediction, targets))


def _metrics(detection: Detection) -> dict[str, Metric]:
    plain = {n: getattr(detection, n) for n in ("aupr_out", "aupr_in", "fpr95", "mean_inside", "mean_outside")}
    return {"auroc": Metric(*detection.auroc), **{n: Metric(v, v, v) for n, v in plain.items()}}


def _share(flags: Tensor, level: float) -> Metric:
    """The share of flagged inputs, with its exact interval."""
    events, trials = int(flags.sum()), len(flags)
    return Metric(events / trials, *clopper_pearson(events, trials, level=level))


def _add_shares(
    found: dict[str, dict[str, Metric]],
    inside: Prediction,
    outside: Prediction,
    reference: Reference | None,
    level: float,
) -> None:
    """Adds what share of another set is flagged by each score, and how much wider its outputs vary than those of usual data."""
    for score in found:
        if reference is not None and score in reference.thresholds:
            found[score]["detected"] = _share(reference.flag(outside, score), level)
    ratio = variance_ratio(inside, outside) if "variance" in found else None
    if ratio is not None:
        found["variance"]["median_ratio"] = _point(ratio)


def _attack(
    predictor: Predictor,
    data: Iterable[Any],
    attacks: Sequence[Attack],
    seed: int,
    options: Mapping[str, Any] | None,
    unpack: Unpack | None,
    most: int | None,
) -> dict[str, dict[str, Any]]:
    chosen = {k: v for k, v in (options or {}).items() if k != "generator"}
    curves: dict[str, dict[str, Any]] = {}
    for attack in attacks:
        curve = attack.run(predictor, data, seed=seed, options=chosen, unpack=unpack, max_examples=most)
        key, count = attack.name, 2
        while key in curves:
            key, count = f"{attack.name}_{count}", count + 1
        curves[key] = curve.to_dict()
    return curves


def _table(
    inside: PredictedData,
    outside: Mapping[str, PredictedData],
    scores: Sequence[str] | None,
    reference: Reference | None,
) -> dict[str, list[Any]]:
    parts = [_rows(n, c, scores, reference) for n, c in (("test", inside), *outside.items())]
    columns = list(dict.fromkeys(c for part in parts for c in part))
    return {c: [v for part in parts for v in part.get(c, [None] * len(part["index"]))] for c in columns}


def _rows(
    name: str, collected: PredictedData, scores: Sequence[str] | None, reference: Reference | None
) -> dict[str, list[Any]]:
    prediction: Prediction = collected.prediction
    n = len(prediction)
    rows: dict[str, list[Any]] = {"set": [name] * n, "index": list(range(n))}
    classes = prediction.kind in ("classification", "binary")
    one = prediction.mean.dim() == 2 and (prediction.kind == "classification" or prediction.mean.shape[-1] == 1)
    if one:
        answer = (prediction.labels if classes else prediction.mean).reshape(n)
        rows["prediction"] = answer.tolist()
        if classes:
            rows["confidence"] = prediction.confidence.reshape(n).tolist()
    rows["epistemic"] = prediction.epistemic.reshape(n, -1).mean(1).tolist()
    rows["aleatoric"] = prediction.aleatoric.reshape(n, -1).mean(1).tolist()
    rows.update({s: v.tolist() for s, v in available_scores(prediction, scores, reference).items()})
    if reference is not None:
        rows["flag"] = reference.flag(prediction).tolist()
    targets = collected.targets
    if name == "test" and targets is not None and prediction.kind != "custom":
        rows["nll"] = (-prediction.log_prob(targets)).tolist()
        if one and targets.numel() == n:
            rows["target"] = targets.reshape(n).tolist()
            if classes:
                rows["correct"] = (prediction.labels.reshape(n) == targets.reshape(n)).tolist()
    return rows


def _facts(
    predictor: Predictor, inside: PredictedData, outside: Mapping[str, PredictedData], seconds: float, **settings: Any
) -> dict[str, Any]:
    model = model_of(predictor)
    return provenance(
        predictor=type(predictor).__name__,
        description=repr(predictor) if type(predictor).__repr__ is not object.__repr__ else type(predictor).__name__,
        weights_hash=None if model is None else weights_hash(dict(model.state_dict())),
        data_hash=inside.data_hash,
        ood_hashes={n: c.data_hash for n, c in outside.items()},
        seconds=seconds,
        seconds_per_1000=1000 * seconds / max(1, len(inside.prediction)),
        **{**settings, "options": {k: _shown(v) for k, v in (settings.get("options") or {}).items()}},
    )


def _shown(value: Any) -> Any:
    """An option as it goes into the provenance: a number or word as it is, anything larger by its type."""
    return value if value is None or isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"
