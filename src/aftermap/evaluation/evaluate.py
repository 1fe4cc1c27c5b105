"""One call for everything that is reported about a method: which numbers for each kind of task, with bootstrap intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aftermap import metrics as m
from aftermap.baselines.detectors import Detector
from aftermap.batches import Unpack, describe, tensors_of, unpack_batch
from aftermap.errors import DataError, InputError, ShapeError, UnsupportedError
from aftermap.evaluation.adversarial import Attack
from aftermap.evaluation.ood import Detection, DetectorScores, check_detectors, detections, variance_ratio
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
from aftermap.progress import waiting

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
    """Bootstrap intervals for several metrics of the same data, all computed with the same resamples.

    Args:
        n_resamples: The number of resamples; 0 gives no intervals.
        level: The confidence level of the intervals.
        seed: The seed that the resamples are drawn with.
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


def as_classes(prediction: Prediction, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns probabilities [M, C], labels [M] and the places [M] of the positions that have a label; a binary output is two classes."""
    if prediction.kind == "binary":
        p = prediction.mean.double()
        y = aligned(p, targets, p.shape[-1], "evaluate")
        if not bool(((y == 0) | (y == 1)).all()):
            raise DataError("evaluate needs binary targets that are 0 or 1, got others")
        probs, labels = torch.stack([1 - p, p], -1).reshape(-1, 2), y.reshape(-1).long()
        return probs, labels, torch.arange(len(labels))
    probs, labels = prediction.mean.reshape(-1, prediction.mean.shape[-1]), targets.reshape(-1)
    known = prediction.has_label(labels).nonzero()[:, 0]
    if not len(known):
        raise DataError(f"every target is {prediction.ignore_index}, the index of positions to leave out")
    return probs[known], labels[known], known


def class_metrics(probs: Tensor, labels: Tensor, uncertainty: Tensor, boot: Bootstrap) -> dict[str, Metric]:
    """Returns accuracy, proper scores, calibration errors, and how well the uncertainty finds the errors."""
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
        "augrc": boot(m.augrc, scores, wrong.double()),
    }
    for coverage in _COVERAGES:
        metrics[f"accuracy_at_{coverage:.0%}".replace("%", "")] = _point(
            m.accuracy_at_coverage(scores, wrong, coverage=coverage)
        )
    if 0 < int(wrong.sum()) < len(wrong):  # Without both right and wrong answers there is nothing to tell apart.
        metrics["auroc_errors"] = boot(m.auroc, scores, wrong, strata=wrong)
        metrics["fpr95_errors"] = _point(m.fpr_at_tpr(scores, wrong))
    return metrics


def _point(value: float) -> Metric:
    return Metric(value, value, value)


def class_curves(probs: Tensor, labels: Tensor, uncertainty: Tensor) -> dict[str, dict[str, list[float]]]:
    """Returns reliability bins, risk against coverage, and the inverse ECDF of the entropy of right and of wrong answers."""
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
    """Returns the share of values above each threshold, thinned for a figure."""
    curve = m.inverse_ecdf(values.double())
    return {"threshold": _thin(curve.thresholds), "share_above": _thin(curve.fraction)}


def _thin(values: Tensor, most: int = 400) -> list[float]:
    picked = torch.linspace(0, len(values) - 1, min(most, len(values))).round().long()
    return [float(v) for v in values[picked].tolist()]


def regression_metrics(prediction: Prediction, targets: Tensor, boot: Bootstrap) -> dict[str, Metric]:
    """Returns the error, proper scores, and the coverage and width of intervals for new targets (noise included)."""
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
    """Returns the calibration of intervals, and the risk when the most uncertain inputs are set aside."""
    if prediction.kind != "regression":
        return {}
    mean, total = prediction.mean.double(), prediction.total.double()
    y = aligned(mean, targets, mean.shape[-1], "evaluate")
    calibration = m.interval_calibration(mean, total, y)
    risk = m.risk_coverage(prediction.score("entropy"), _over_outputs(prediction, (y - mean).square()))
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
    detectors: Sequence[Detector] | Mapping[str, Detector] = (),
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

    For classification (and binary outputs, taken as two classes) the numbers are accuracy, NLL, Brier score, calibration
    errors, areas under the risk-coverage curves, accuracy at 80 and 90 % coverage, and AUROC and FPR95 of finding errors
    by entropy. For regression and counts they are RMSE, NLL, coverage and width of intervals, and for a regression also
    CRPS, interval score, chi-square and miscalibration area. For all of them there is the rank correlation of the two
    parts of the uncertainty, where neither is constant.

    Args:
        predictor: Any object with ``predict(x) -> Prediction``; for a plain network `baselines.Deterministic(model)`.
        data: The test data, as batches of (x, y).
        ood: The data sets to find unusual, by name: a tensor of inputs, batches of (x, anything), or of x with targets None, with the same
            input shape.
        attacks: The attacks to run: `FGSM(...)`, `TargetedAttack(...)`, `PGD(...)`.
        detectors: Fitted detectors of unusual inputs (`baselines.KNN(model).fit(train)` and others), whose scores are judged
            beside the predictor's own, on every OOD set and at finding its errors. A mapping names them.
        scores: The scores to detect unusual data with: entropy, mutual_information, variance, max_probability, and with a
            reference either. None means all that the predictor has.
        reference: The scores of this predictor on held-out usual inputs. They add the score "either", the metric ``flagged``
            (the share of the test data that is flagged) and for every OOD set and score ``detected``, the share that is flagged.
        name: The predictor's name in tables. None means the name of its class.
        options: Options that are passed to every ``predict``, such as ``{"kind": "sampling", "samples": 30}``.
        unpack: A function that turns a batch of another form into (inputs, targets).
        n_resamples: The number of bootstrap resamples; 0 gives no intervals.
        level: The confidence level of the intervals.
        seed: The seed of the bootstrap, and of the predictor's samples where it takes a generator.
        table: Whether to keep a table with one row per input.
        attack_options: Options that are passed to ``predict`` under attack instead of ``options``, such as a smaller,
            fixed ensemble.
        max_attacked: The greatest number of examples to attack. None attacks all of them.

    Returns:
        Numbers with intervals, the table of inputs, the curves, and where they come from.

    Raises:
        InputError, DataError, ShapeError: The first argument is no predictor, the data have no targets, labels are out
            of range, OOD data have another shape, a score is unknown, or the name of a detector is taken.
        UnsupportedError: A detector needs a classifier and the task is another one, or there are several answers per input.

    >>> from aftermap.baselines import Deterministic
    >>> x, y = torch.eye(3).repeat(5, 1), torch.arange(3).repeat(5)
    >>> results = evaluate(Deterministic(torch.nn.Identity()), [(x, y)], n_resamples=0)
    >>> results["accuracy"], round(results["nll"], 3)
    (1.0, 0.551)
    """
    check_predictor_object(predictor)
    ood = _checked_sets(ood)
    _check_options(n_resamples, attacks, reference, scores)
    named = check_detectors(detectors)
    scored = {key: DetectorScores(named) for key in ("test", *ood)}
    chosen = dict(options or {})
    if accepts(predictor, "generator"):
        chosen.setdefault("generator", torch.Generator().manual_seed(seed))
    started = time.perf_counter()
    inside = predict_all(predictor, data, options=chosen, unpack=unpack, on_inputs=scored["test"].add)
    seconds = time.perf_counter() - started - scored["test"].seconds
    _check_task(named, inside.prediction)
    outside = {n: _outside(predictor, n, d, inside, chosen, unpack, scored[n]) for n, d in ood.items()}
    others = {key: detected.scores() for key, detected in scored.items()}

    with waiting("scores and their intervals"):
        boot = Bootstrap(n_resamples, level, seed)
        numbers, curves = _measure(inside, boot)
        numbers.update(_detected_errors(inside, others["test"], boot))
        if reference is not None:
            numbers["flagged"] = _share(reference.flag(inside.prediction), level)
        for key, collected in (("", inside), *outside.items()):
            numbers.update(_parts_compared(key, collected.prediction, boot))
        for key, collected in (("test", inside), *outside.items()):
            if collected.prediction.kind in ("classification", "binary"):
                curves[f"entropy/{key}"] = inverse_ecdf(collected.prediction.score("entropy"))
        detections = _detect(inside, outside, scores, others, reference, boot)
    attacked = _attack(
        predictor, data, attacks, seed, options if attack_options is None else attack_options, unpack, max_attacked
    )
    return Results(
        name or type(predictor).__name__,
        inside.prediction.kind,
        len(inside.prediction),
        numbers,
        detections,
        attacked,
        _table(inside, outside, scores, others, reference) if table else {},
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


def _checked_sets(ood: Mapping[str, Iterable[Any]] | None) -> dict[str, Iterable[Any]]:
    """Returns the sets of unusual inputs as batches, by name."""
    if ood is not None and not isinstance(ood, Mapping):
        raise InputError(
            f"ood is {describe(ood)}, but must be a mapping from names to data, such as ood={{'other': loader}} or ood={{'other': x}}"
        )
    if ood is not None and "test" in ood:
        raise InputError('an OOD set cannot be called "test": that is what the rows of the data themselves are called')
    return {n: _as_batches(n, d) for n, d in (ood or {}).items()}


def _check_options(
    n_resamples: int, attacks: Sequence[Attack], reference: Reference | None, scores: Sequence[str] | None
) -> None:
    """Raises where an option is not what it must be, before anything is predicted."""
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


def _detect(
    inside: PredictedData,
    outside: Mapping[str, PredictedData],
    scores: Sequence[str] | None,
    others: Mapping[str, Mapping[str, Tensor]],
    reference: Reference | None,
    boot: Bootstrap,
) -> dict[str, dict[str, dict[str, Metric]]]:
    """Returns how well each score tells each set of unusual inputs from the test data."""
    by_set = detections(
        inside.prediction,
        {n: c.prediction for n, c in outside.items()},
        scores=scores,
        others=others,
        reference=reference,
        n_resamples=boot.n_resamples,
        level=boot.level,
        generator=torch.Generator().manual_seed(boot.seed),
    )
    metrics = {d: {s: _metrics(detection) for s, detection in by_score.items()} for d, by_score in by_set.items()}
    for key, other in outside.items():
        _add_shares(metrics[key], inside.prediction, other.prediction, reference, boot.level)
    return metrics


def _as_batches(name: str, data: Any) -> Iterable[Any]:
    """Returns batches of unusual inputs, from a tensor or as they are."""
    if isinstance(data, Tensor):
        return [(x, None) for x in data.split(1024)]
    one_batch = isinstance(data, tuple) and all(isinstance(t, Tensor) for t in data)
    if one_batch or isinstance(data, str | bytes | Mapping):
        raise DataError(
            f"the OOD set {name!r} is {describe(data)}; pass a tensor of inputs, a DataLoader or a list of batches (x, None)"
        )
    return data


def _outside(
    predictor: Predictor,
    name: str,
    data: Iterable[Any],
    inside: PredictedData,
    options: Mapping[str, Any],
    unpack: Unpack | None,
    scores: DetectorScores,
) -> PredictedData:
    first, data = _peek(data)
    shape = _shape_of(first, unpack)
    if shape is not None and shape != inside.input_shape:
        raise ShapeError(
            f"the OOD set {name!r} has inputs of shape {list(shape)}, the test data {list(inside.input_shape)}; "
            "resize or reshape it first"
        )
    return predict_all(predictor, data, options=options, unpack=unpack, need_targets=False, on_inputs=scores.add)


def _check_task(detectors: Mapping[str, Detector], prediction: Prediction) -> None:
    """Raises where a detector does not fit the task."""
    for name, detector in detectors.items():
        if detector.needs_classes and prediction.kind != "classification":
            raise UnsupportedError(
                f"the detector {name!r} is for classification with logits [N, C], but the predictions are of kind {prediction.kind!r}. "
                "KNN looks at features alone and fits every task"
            )
        if prediction.mean.dim() != 2:
            raise UnsupportedError(
                f"the detector {name!r} gives one score per input, but the predictions have shape {list(prediction.mean.shape)}: "
                "several answers for each"
            )


def _detected_errors(inside: PredictedData, scores: Mapping[str, Tensor], boot: Bootstrap) -> dict[str, Metric]:
    """Returns how well the scores of detectors find the predictor's errors."""
    prediction, targets = inside.prediction, inside.targets
    one = prediction.kind == "classification" or (prediction.kind == "binary" and prediction.mean.shape[1] == 1)
    if not scores or not one or targets is None:
        return {}
    probs, labels, known = as_classes(prediction, targets)
    wrong = m.misclassified(probs, labels)
    if not 0 < int(wrong.sum()) < len(wrong):
        return {}
    metrics: dict[str, Metric] = {}
    for name, values in scores.items():
        metrics[f"auroc_errors_{name}"] = boot(m.auroc, values[known], wrong, strata=wrong)
        metrics[f"fpr95_errors_{name}"] = _point(m.fpr_at_tpr(values[known], wrong))
    return metrics


def _over_outputs(prediction: Prediction, squares: Tensor) -> Tensor:
    """Returns the mean over the outputs [N]; squares of several outputs of numbers count in units of each output's mean variance."""
    squares = squares.double()
    if prediction.kind not in ("classification", "binary") and squares.shape[-1] > 1:
        squares = squares / prediction.total.double().flatten(0, -2).mean(0)
    return squares.reshape(len(prediction), -1).mean(1)


def _parts_compared(key: str, prediction: Prediction, boot: Bootstrap) -> dict[str, Metric]:
    """Returns the rank correlation of epistemic and aleatoric uncertainty; none where one of them is the same for all inputs."""
    rounding = (
        4 * torch.finfo(prediction.total.dtype).eps * float(_over_outputs(prediction, prediction.total).abs().max())
    )
    parts = [_over_outputs(prediction, v) for v in (prediction.epistemic, prediction.aleatoric)]
    if any(float(v.max() - v.min()) <= rounding for v in parts):
        return {}
    name = "epistemic_aleatoric_correlation"
    return {f"{key}/{name}" if key else name: boot(_rank_correlation, *parts)}


def _rank_correlation(first: Tensor, second: Tensor) -> float:
    """Returns the metric of the same name; a resample in which a part is the same for all inputs says nothing, and counts as 0."""
    constant = bool((first == first[0]).all()) or bool((second == second[0]).all())
    return 0.0 if constant else m.rank_correlation(first, second)


def _peek(data: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Returns the first batch and the data; a generator, which can be read only once, is kept in a list."""
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
        probs, labels, known = as_classes(prediction, targets)
        uncertainty, information = (v.reshape(-1)[known] for v in (prediction.total, prediction.epistemic))
        numbers = class_metrics(probs, labels, uncertainty, boot)
        numbers["mutual_information"] = boot(_mean, information.double())
        return numbers, dict(class_curves(probs, labels, uncertainty))
    return regression_metrics(prediction, targets, boot), dict(regression_curves(prediction, targets))


def _metrics(detection: Detection) -> dict[str, Metric]:
    plain = {n: getattr(detection, n) for n in ("aupr_out", "aupr_in", "fpr95", "mean_inside", "mean_outside")}
    return {"auroc": Metric(*detection.auroc), **{n: Metric(v, v, v) for n, v in plain.items()}}


def _share(flags: Tensor, level: float) -> Metric:
    """Returns the share of flagged inputs, with its exact interval."""
    events, trials = int(flags.sum()), len(flags)
    return Metric(events / trials, *clopper_pearson(events, trials, level=level))


def _add_shares(
    numbers: dict[str, dict[str, Metric]],
    inside: Prediction,
    outside: Prediction,
    reference: Reference | None,
    level: float,
) -> None:
    """Adds what share of another set is flagged by each score, and how much wider its outputs vary than those of usual data."""
    for score in numbers:
        if reference is not None and score in reference.thresholds:
            numbers[score]["detected"] = _share(reference.flag(outside, score), level)
    ratio = variance_ratio(inside, outside) if "variance" in numbers else None
    if ratio is not None:
        numbers["variance"]["median_ratio"] = _point(ratio)


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
    others: Mapping[str, Mapping[str, Tensor]],
    reference: Reference | None,
) -> dict[str, list[Any]]:
    parts = [_rows(n, c, scores, others[n], reference) for n, c in (("test", inside), *outside.items())]
    columns = list(dict.fromkeys(c for part in parts for c in part))
    return {c: [v for part in parts for v in part.get(c, [None] * len(part["index"]))] for c in columns}


def _rows(
    name: str,
    collected: PredictedData,
    scores: Sequence[str] | None,
    others: Mapping[str, Tensor],
    reference: Reference | None,
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
    rows.update({s: v.tolist() for s, v in others.items()})
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
    """Returns an option as it goes into the provenance: a number or word as it is, anything larger by its type."""
    return value if value is None or isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"
