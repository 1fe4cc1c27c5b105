"""The verdict: is the Bayesian network better than the network alone, in words; shared by report and command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aftermap.analysis.report.comparison import Row, comparison, paired_error
from aftermap.analysis.report.definitions import written
from aftermap.evaluation.results import Results
from aftermap.evaluation.selective import Threshold

__all__ = ["LEVELS", "Verdict", "verdict"]

LEVELS = ("good", "worse", "alone")
_TWO_SIDED = 2.0


@dataclass(frozen=True)
class Verdict:
    """What an evaluation says.

    Attributes:
        level: "good": not worse than the network alone; "worse": worse beyond the tolerance; "alone": nothing to compare with.
        headline: one sentence.
        text: the numbers behind it.
        problems: why the level is worse, one phrase each.
    """

    level: str
    headline: str
    text: str
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.headline} {self.text}".strip()


def verdict(
    bayesian: Results,
    map: Results | None = None,
    *,
    threshold: Threshold | None = None,
    accuracy_drop: float = 0.02,
    underconfidence: float = 0.10,
    nll_rise: float | None = None,
) -> Verdict:
    """Judges a Bayesian predictor beside the network it came from.

    Worse means: accuracy lower by more than ``accuracy_drop``, or NLL higher by more than ``nll_rise``, each also by more than
    two standard errors of the paired difference where every input is in both tables; or a mean confidence below the accuracy by
    more than ``underconfidence`` beyond what the network itself shows; or an NLL that is not finite.

    Args:
        bayesian: the evaluation of the Bayesian predictor.
        map: that of the network alone, on the same data; None: the numbers are told without a comparison.
        threshold: for flagging inputs, if one was chosen; it ends the text.
        accuracy_drop: allowed fall in accuracy.
        underconfidence: allowed mean confidence below accuracy.
        nll_rise: allowed rise of the NLL in nats; None: 0.02 plus 5 % of the network's NLL for classes, otherwise 0.2.

    Returns:
        The verdict; `str` gives headline and text.

    Raises:
        InputError: evaluations of different data or tasks.

    >>> import torch
    >>> from aftermap.baselines import Deterministic
    >>> from aftermap.evaluation import evaluate
    >>> x, y = torch.eye(3).repeat(5, 1), torch.arange(3).repeat(5)
    >>> sharp, soft = torch.nn.Linear(3, 3, bias=False), torch.nn.Identity()
    >>> sharp.weight.data = 9 * torch.eye(3)
    >>> results = [evaluate(Deterministic(m), [(x, y)], n_resamples=0) for m in (sharp, soft)]
    >>> verdict(*results).level, verdict(results[1], results[0]).level
    ('good', 'worse')
    """
    rows = {row.name: row for row in comparison(bayesian, map)}
    ends = _flagging(threshold)
    if map is None:
        return Verdict("alone", _alone(bayesian, rows), " ".join([*_detections(rows, compared=False), *ends]))
    problems = _problems(bayesian, map, accuracy_drop, underconfidence, nll_rise)
    numbers = _numbers(rows)
    text = f"{numbers[0].upper()}{numbers[1:]}." if numbers else ""
    text = " ".join([text, *_detections(rows, compared=True), *ends]).strip()
    if problems:
        return Verdict("worse", f"Worse than the network alone: {'; '.join(problems)}.", text, tuple(problems))
    return Verdict("good", _headline(rows), text)


def _problems(
    bayesian: Results, map: Results, accuracy_drop: float, underconfidence: float, nll_rise: float | None
) -> list[str]:
    ours, theirs = bayesian.metrics, map.metrics
    found = []
    if "accuracy" in ours and "accuracy" in theirs:
        fall = theirs["accuracy"].value - ours["accuracy"].value
        if fall > accuracy_drop and fall > _TWO_SIDED * (paired_error("correct", bayesian, map) or 0.0):
            found.append(f"accuracy {_change(theirs['accuracy'].value, ours['accuracy'].value, 'percent')}")
    if "nll" in ours and "nll" in theirs:
        before, after = theirs["nll"].value, ours["nll"].value
        classes = bayesian.kind in ("classification", "binary")
        allowed = nll_rise if nll_rise is not None else 0.02 + 0.05 * abs(before) if classes else 0.2
        chance = _TWO_SIDED * (paired_error("nll", bayesian, map) or 0.0)
        # Not "after − before > …": a number that is not finite must be a problem, too.
        if not after - before <= max(allowed, chance):
            found.append(f"negative log-likelihood {_change(before, after, 'nats')}")
    name = "signed_calibration_error"
    if name in ours and name in theirs:
        before, after = theirs[name].value, ours[name].value
        if -after > underconfidence + max(0.0, -before):
            found.append(f"confidence {-100 * after:.1f}\u00a0% below accuracy")
    return found


def _change(before: float, after: float, form: str) -> str:
    return f"{written(before, form)} → {written(after, form)}"


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _headline(rows: dict[str, Row]) -> str:
    def marked(mark: str, *pairs: tuple[str, str]) -> list[str]:
        return [text for name, text in pairs if name in rows and rows[name].mark == mark]

    # Below 0.5 a score is worse than guessing, and a step towards 0.5 is no help to anybody.
    areas = [
        row.mark
        for name, row in rows.items()
        if name.endswith("/auroc") and (row.mark == "worse" or (row.bayesian is not None and row.bayesian.value > 0.5))
    ]
    gains = marked(
        "better",
        ("accuracy", "more accurate"),
        ("rmse", "more accurate"),
        ("ece", "better calibrated"),
        ("coverage_0.95", "better calibrated"),
    )
    if "better" in areas and "worse" not in areas:
        gains.append("better at finding unusual inputs")
    losses = marked(
        "worse",
        ("accuracy", "less accurate"),
        ("rmse", "less accurate"),
        ("ece", "less well calibrated"),
        ("coverage_0.95", "less well calibrated"),
    )
    if "worse" in areas:
        losses.append("worse at finding some unusual inputs")
    gains += marked("better", ("nll", "with a better likelihood")) if not gains or losses else []
    losses += marked("worse", ("nll", "with a worse likelihood"))
    if losses:
        start = f"{_capital(_join(gains))}, but {_join(losses)}" if gains else _capital(_join(losses))
        return f"{start}, within the tolerance."
    if not gains:
        return "As good as the network alone, and not better by more than chance."
    kept = rows.get("accuracy")
    return f"{_capital(_join(gains))}{', at the same accuracy' if kept is not None and kept.mark == 'same' else ''}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _numbers(rows: dict[str, Row]) -> str:
    """Accuracy, calibration and likelihood, before and after."""
    parts = []
    for name, words in (
        ("ece", "calibration error"),
        ("accuracy", "accuracy"),
        ("rmse", "root mean squared error"),
        ("coverage_0.95", "share inside the 95\u00a0% interval"),
        ("nll", "negative log-likelihood"),
    ):
        row = rows.get(name)
        if row is None or row.map is None or row.bayesian is None:
            continue
        before, after = row.text("map"), row.text("bayesian")
        parts.append(f"{words} unchanged at {after}" if before == after else f"{words} {before} → {after}")
    return ", ".join(parts)


def _detections(rows: dict[str, Row], *, compared: bool) -> list[str]:
    found = []
    for name, row in rows.items():
        if not name.endswith("/auroc") or row.bayesian is None:
            continue
        data = name.rpartition("/")[0].rpartition("/")[0]
        after = row.text("bayesian")
        before = row.text("map") if compared else after
        found.append(f"{data} {after if before == after else f'{before} → {after}'}")
    return [f"AUROC of unusual data: {', '.join(found)}."] if found else []


def _alone(results: Results, rows: dict[str, Row]) -> str:
    def said(name: str) -> str:
        return rows[name].text("bayesian") if name in rows else "–"

    if results.kind in ("classification", "binary"):
        return f"{said('accuracy')} right, with a calibration error of {said('ece')}."
    if "coverage_0.95" in rows:
        return f"Root mean squared error {said('rmse')}; the 95\u00a0% interval holds {said('coverage_0.95')} of the targets."
    return f"Root mean squared error {said('rmse')}."


def _flagging(threshold: Threshold | None) -> list[str]:
    if threshold is None:
        return []
    rate = f"{100 * threshold.false_alarm_rate:g}\u00a0%"
    if threshold.value == float("inf"):
        return [f"Too few validation data ({threshold.n_data:,}) to promise {rate} false alarms: nothing is flagged."]
    return [
        f"Flag inputs with {threshold.score.replace('_', ' ')} above {threshold.value:.3g}: "
        f"{rate} false alarms on validation data."
    ]
