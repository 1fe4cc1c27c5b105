"""The network alone against its Bayesian version, number by number and in words; shared by report and command line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aftermap.analysis.report.definitions import Definition, definition, interval, written
from aftermap.errors import InputError
from aftermap.evaluation.reference import FLAG_SCORES
from aftermap.evaluation.results import Metric, Results
from aftermap.evaluation.selective import EITHER, Threshold

__all__ = [
    "LEVELS",
    "MARKS",
    "Row",
    "Verdict",
    "adds_nothing",
    "comparison",
    "main_score",
    "paired_error",
    "same_data",
    "score_in_words",
    "score_notes",
    "variance_notes",
    "verdict",
]

MARKS = {"better": "▲", "worse": "▼", "same": "=", "": ""}
_CLASSES = ("accuracy", "nll", "ece", "brier")
_VALUES = ("rmse", "nll", "crps", "coverage_0.5", "coverage_0.9", "coverage_0.95", "width_0.95", "miscalibration_area")
_NO_INTERVAL = ("mce", "classwise_ece", "miscalibration_area", "aupr_out", "aupr_in")
_TWO_SIDED = 2.0  # In standard errors.
LEVELS = ("good", "same", "nothing", "worse", "alone")
_WIDER, _AS_WIDE = (
    1.3,
    1.1,
)  # median latent variance on other inputs over that on usual ones: the posterior helps, does not
_GAIN = 0.02  # of AUROC, below which nobody would call it a help
_FAR_BETTER = 0.05  # of AUROC, by which another score must be ahead to be named
_FAR_OFF = 0.1  # of the targets, by which an interval holds more or fewer than it promises
_NOTHING = 1e-3  # a change of a confidence, or of a standard deviation relative to the noise, that nobody notices


@dataclass(frozen=True)
class Row:
    """One number of both predictors, as a row of a table.

    Attributes:
        name: The name of the number, as in `Results.flat`, or "seconds_per_1000".
        label: The name in words, with the OOD set where there is one.
        meaning: The definition of the number.
        map: The number of the network alone; None without one.
        bayesian: The number of the Bayesian predictor.
        mark: The comparison: better, worse, same, or "" where neither is better or nothing is compared.
    """

    name: str
    label: str
    meaning: Definition
    map: Metric | None
    bayesian: Metric | None
    mark: str

    def text(self, which: str) -> str:
        """Returns the number of "map" or "bayesian" as it is written."""
        metric = self.map if which == "map" else self.bayesian
        return "–" if metric is None else written(metric.value, self.meaning.form)

    def interval(self, which: str) -> str:
        """Returns its confidence interval as it is written, or ""."""
        metric = self.map if which == "map" else self.bayesian
        return "" if metric is None else interval(metric, self.meaning.form)


def same_data(bayesian: Results, map: Results | None) -> None:
    """Raises an error unless both evaluations are of one task and the same data."""
    if map is None:
        return
    if bayesian.kind != map.kind:
        raise InputError(f"one evaluation is of a {bayesian.kind}, the other of a {map.kind}; compare like with like")
    hashes = [r.provenance.get("data_hash") for r in (bayesian, map)]
    if None not in hashes and hashes[0] != hashes[1]:
        raise InputError("these results belong to different data, so that their numbers cannot be compared")


def comparison(bayesian: Results, map: Results | None = None, *, names: Sequence[str] | None = None) -> list[Row]:
    """Returns the table of a report and of the command line.

    By default the rows are accuracy, NLL, ECE, Brier score, AUROC and FPR95 by the main score for every OOD set, accuracy at
    80 % coverage and the time per 1,000 inputs; for regression RMSE, NLL, CRPS, coverage and width of intervals. A
    number is marked better or worse only if the difference is more than chance: two standard errors of the paired
    difference where every input is in both tables, otherwise neither number in the other's interval; shares without an
    interval by their binomial error. Numbers for which none of these is known are not marked, unless there was no
    bootstrap at all.

    Args:
        bayesian: The evaluation of the Bayesian predictor.
        map: The evaluation of the network alone, on the same data.
        names: The names of numbers, as in `Results.flat`. None means those above.

    Returns:
        One row per number that either has.

    Raises:
        InputError: The evaluations are of different data or tasks, or a name is unknown.
    """
    same_data(bayesian, map)
    flats = [r.flat() | _time(r) for r in (bayesian, map) if r is not None]
    chosen = _default_names(bayesian) if names is None else list(names)
    unknown = [n for n in chosen if names is not None and not any(n in flat for flat in flats)]
    if unknown:
        raise InputError(f"no result has {', '.join(unknown)}; there are: {', '.join(flats[0])}")
    rows = []
    for name in chosen:
        ours = flats[0].get(name)
        theirs = _of_network(flats[1], name) if map is not None else None
        if ours is None and theirs is None:
            continue
        meaning = definition(name)
        mark = "" if map is None or ours is None or theirs is None else _mark(name, ours, theirs, bayesian, map)
        rows.append(Row(name, _label(name, meaning), meaning, theirs, ours, mark))
    return rows


def _time(results: Results) -> dict[str, Metric]:
    seconds = results.provenance.get("seconds_per_1000")
    return {} if seconds is None else {"seconds_per_1000": Metric(float(seconds), float(seconds), float(seconds))}


def _of_network(flat: Mapping[str, Metric], name: str) -> Metric | None:
    """Returns a number of the network alone: its mutual information is 0, so that for it "either" of the two is its entropy."""
    return flat.get(name) or flat.get(name.replace(f"/{EITHER}/", "/entropy/"))


def main_score(results: Results) -> str:
    """Returns the score that tells unusual data apart: the one by which inputs are flagged, else entropy, else the first there is."""
    known = list(results.ood.values())
    for score in (results.provenance.get("flagged_by"), "entropy", "variance", *(known[0] if known else ())):
        if score is not None and all(score in scores for scores in known):
            return str(score)
    return "entropy"


def score_in_words(score: str) -> str:
    """Returns what a score is called in a sentence.

    >>> score_in_words("either"), score_in_words("max_probability")
    ('larger rank of entropy and mutual information', 'max probability')
    """
    return "larger rank of entropy and mutual information" if score == EITHER else score.replace("_", " ")


def variance_notes(results: Results, map: Results | None = None) -> list[str]:
    """Says for each other set whether the network's outputs vary more on it than on the test inputs, and what that means.

    In a study of 56 pairs of networks and unusual data, the posterior found the unusual inputs better than the network alone (by more
    than 0.02 of AUROC) in every case with a ratio of medians above 1.3, and in none below 1.1. That is a guide and no law: where the
    network alone was evaluated on the same data, what was measured is said instead of what is likely.

    Args:
        results: The evaluation of the Bayesian predictor.
        map: That of the network alone, if it is known.
    """
    notes = []
    for data, scores in results.ood.items():
        metric = scores.get("variance", {}).get("median_ratio")
        if metric is None or math.isnan(metric.value):
            continue
        ratio = metric.value
        wide = "no more" if ratio < _AS_WIDE else "more" if ratio > _WIDER else "hardly more"
        gain = None if map is None else _gain(results, map, data)
        if gain is None:
            meaning = {
                "more": ", so the posterior should help to find them",
                "hardly more": ", so it is open whether the posterior helps to find them",
                "no more": ", so the posterior is not likely to help to find them",
            }[wide]
        else:
            helps = gain > _GAIN
            link = "and" if helps == (wide == "more") else "yet"
            meaning = f", {link} the posterior " + ("helps" if helps else "does not help") + " to find them"
        notes.append(
            f"{data}: the outputs vary {wide} here than on the test inputs (ratio of the median variances: "
            f"{written(ratio, 'number')}){meaning}."
        )
    return notes


def _gain(results: Results, map: Results, data: str) -> float | None:
    """Returns by how much the AUROC of another set is higher than that of the network alone."""
    name = f"{data}/{main_score(results)}/auroc"
    ours, theirs = results.flat().get(name), _of_network(map.flat(), name)
    return None if ours is None or theirs is None else ours.value - theirs.value


def _default_names(results: Results) -> list[str]:
    score = main_score(results)
    detections = [f"{data}/{score}/{name}" for data in results.ood for name in ("auroc", "fpr95", "detected")]
    if results.kind in ("classification", "binary"):
        return [*_CLASSES, *detections, "accuracy_at_80", "seconds_per_1000"]
    return [*_VALUES, *detections, "seconds_per_1000"]


def _label(name: str, meaning: Definition) -> str:
    place = name.rpartition("/")[0]  # "set/score" of a detection, "set" of another number
    data = place.rpartition("/")[0] or place
    return f"{meaning.label}, {data}" if data else meaning.label


def _badness(name: str, meaning: Definition, value: float) -> float:
    """Returns a number of which lower is better; the share inside an interval is best at the level that the interval promises."""
    if name.startswith("coverage_"):
        return abs(value - float(name.rpartition("_")[2]))
    return -value if meaning.better == "higher" else value


def _mark(name: str, ours: Metric, theirs: Metric, bayesian: Results, map: Results) -> str:
    meaning = definition(name)
    if not (meaning.better or name.startswith("coverage_")):
        return ""
    if math.isnan(ours.value) or math.isnan(theirs.value):
        return ""
    if written(ours.value, meaning.form) == written(theirs.value, meaning.form):
        return "same"
    chance = _by_chance(name, ours, theirs, bayesian, map)
    if chance is None:
        return ""
    gain = _badness(name, meaning, theirs.value) - _badness(name, meaning, ours.value)
    return "same" if chance or gain == 0 else "better" if gain > 0 else "worse"


def _by_chance(name: str, ours: Metric, theirs: Metric, bayesian: Results, map: Results) -> bool | None:
    """Tells whether a difference may be chance; None where nobody knows."""
    if name == "seconds_per_1000":
        # A clock is noisy: half the time more or less says nothing.
        return max(ours.value, theirs.value) < 1.5 * min(ours.value, theirs.value)
    error = paired_error({"accuracy": "correct", "nll": "nll"}.get(name, ""), bayesian, map)
    if error is not None:
        return abs(ours.value - theirs.value) <= _TWO_SIDED * error
    if ours.lower < ours.upper or theirs.lower < theirs.upper:
        return theirs.lower <= ours.value <= theirs.upper or ours.lower <= theirs.value <= ours.upper
    if name.rpartition("/")[2] in ("fpr95", "fpr95_errors") or name.startswith("accuracy_at_"):
        rate = min(max(0.5 * (ours.value + theirs.value), 0.0), 1.0)
        return abs(ours.value - theirs.value) <= _TWO_SIDED * math.sqrt(2 * rate * (1 - rate) / max(1, bayesian.n_data))
    # Without a bootstrap the number is all there is; with one, a number that it leaves out cannot be judged.
    return None if bayesian.provenance.get("n_resamples") and name.rpartition("/")[2] in _NO_INTERVAL else False


def paired_error(column: str, bayesian: Results, map: Results) -> float | None:
    """Returns the standard error of the mean difference of a column over the test inputs; None where a table lacks it."""
    parts = []
    for results in (bayesian, map):
        table = results.table
        if column not in table or "set" not in table:
            return None
        parts.append([v for v, s in zip(table[column], table["set"], strict=True) if s == "test"])
    if len(parts[0]) != len(parts[1]) or len(parts[0]) < 2 or None in parts[0] or None in parts[1]:
        return None
    differences = [float(a) - float(b) for a, b in zip(*parts, strict=True)]
    n, mean = len(differences), math.fsum(differences) / len(differences)
    return math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)


@dataclass(frozen=True)
class Verdict:
    """What an evaluation says about the Bayesian predictor.

    Attributes:
        level: The judgement: "good" (better than the network alone in something, by more than chance, and worse in nothing), "same"
            (not that, and no worse beyond the tolerance), "nothing" (its answers are the network's own), "worse" (worse beyond the
            tolerance), or "alone" (nothing to compare with).
        headline: The judgement in one sentence.
        text: The numbers behind the headline.
        problems: The reasons why the level is worse, one phrase each.
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
    two standard errors of the paired difference where every input is in both tables; or, where the NLL is not better, a mean
    confidence below the accuracy by more than ``underconfidence`` beyond what the network itself shows; or an NLL that is not finite.

    Args:
        bayesian: The evaluation of the Bayesian predictor.
        map: The evaluation of the network alone, on the same data. With None the numbers are told without a comparison.
        threshold: The threshold for flagging inputs, if one was chosen; it ends the text.
        accuracy_drop: The allowed fall in accuracy.
        underconfidence: The allowed distance of the mean confidence below the accuracy.
        nll_rise: The allowed rise of the NLL in nats. None means 0.02 plus 5 % of the network's NLL for classes,
            otherwise 0.2.

    Returns:
        The verdict; `str` gives headline and text.

    Raises:
        InputError: The evaluations are of different data or tasks.

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
    text = " ".join([text, *_intervals(bayesian), *_detections(rows, compared=True), *ends]).strip()
    if problems:
        return Verdict("worse", f"Worse than the network alone: {'; '.join(problems)}.", text, tuple(problems))
    if adds_nothing(bayesian, map):
        return Verdict("nothing", _nothing(bayesian, map), text)
    return Verdict(*_headline(rows), text)


def adds_nothing(bayesian: Results, map: Results) -> bool:
    """Tells whether a posterior answers as the network alone does, to anybody who looks, on every input of every set."""

    def column(results: Results, name: str) -> list[float]:
        return [float(v) for v in results.table.get(name, []) if v is not None]

    epistemic, aleatoric = column(bayesian, "epistemic"), column(bayesian, "aleatoric")
    if not epistemic:
        return False
    if bayesian.kind not in ("classification", "binary"):
        return all(e <= _NOTHING**2 * (e + a) for e, a in zip(epistemic, aleatoric, strict=True))
    ours, theirs = column(bayesian, "confidence"), column(map, "confidence")
    if not ours or len(ours) != len(theirs):
        return False
    return max(epistemic) < _NOTHING and all(abs(a - b) < _NOTHING for a, b in zip(ours, theirs, strict=True))


def _nothing(bayesian: Results, map: Results) -> str:
    times = [r.provenance.get("seconds_per_1000") for r in (bayesian, map)]
    slower = times[0] / times[1] if times[0] and times[1] else 0.0
    cost = f" and takes {slower:.0f} times as long" if slower >= 2 else ""
    return (
        f"Adds nothing: the posterior has next to no variance here, so that it answers as the network alone does{cost}. Use the "
        "network, or try another structure, more layers, or tuning on more validation data."
    )


def score_notes(results: Results) -> list[str]:
    """Says which other score finds a set of unusual inputs far better than the one by which inputs are flagged.

    Args:
        results: The evaluation of the Bayesian predictor.
    """
    used, notes = main_score(results), []
    for data, scores in results.ood.items():
        areas = {s: n["auroc"] for s, n in scores.items() if s in FLAG_SCORES and "auroc" in n}
        if used not in areas or len(areas) < 2:
            continue
        best = max(areas, key=lambda s: areas[s].value)
        ahead = areas[best].value - areas[used].value > _FAR_BETTER and areas[best].lower > areas[used].upper
        if ahead:
            notes.append(
                f"{data}: the {score_in_words(best)} finds these inputs far better (AUROC {areas[best].value:.3f}) than the "
                f"{score_in_words(used)}, by which inputs are flagged now ({areas[used].value:.3f}). If the unusual inputs that you expect are "
                f"like these, flag by the {score_in_words(best)}: --score {best}, or score={best!r} in Python. Its threshold comes from the "
                "validation data, too."
            )
    return notes


def _problems(
    bayesian: Results, map: Results, accuracy_drop: float, underconfidence: float, nll_rise: float | None
) -> list[str]:
    ours, theirs = bayesian.metrics, map.metrics
    problems = []
    if "accuracy" in ours and "accuracy" in theirs:
        fall = theirs["accuracy"].value - ours["accuracy"].value
        if fall > accuracy_drop and fall > _TWO_SIDED * (paired_error("correct", bayesian, map) or 0.0):
            problems.append(f"accuracy {_change(theirs['accuracy'].value, ours['accuracy'].value, 'percent')}")
    if "nll" in ours and "nll" in theirs:
        before, after = theirs["nll"].value, ours["nll"].value
        classes = bayesian.kind in ("classification", "binary")
        allowed = nll_rise if nll_rise is not None else 0.02 + 0.05 * abs(before) if classes else 0.2
        chance = _TWO_SIDED * (paired_error("nll", bayesian, map) or 0.0)
        # This is not "after − before > …", since a number that is not finite must be a problem, too.
        if not after - before <= max(allowed, chance):
            problems.append(f"negative log-likelihood {_change(before, after, 'nats')}")
    name = "signed_calibration_error"
    if name in ours and name in theirs:
        before, after = theirs[name].value, ours[name].value
        # A better likelihood is an improvement, however much less sure the answers are.
        improved = "nll" in ours and "nll" in theirs and ours["nll"].value < theirs["nll"].value
        if -after > underconfidence + max(0.0, -before) and not improved:
            problems.append(f"confidence {-100 * after:.1f}\u00a0% below accuracy")
    return problems


def _change(before: float, after: float, form: str) -> str:
    return f"{written(before, form)} → {written(after, form)}"


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _headline(rows: dict[str, Row]) -> tuple[str, str]:
    """Returns the level and the headline of a predictor that is not worse beyond the tolerance."""

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
        return "same", f"{start}, within the tolerance."
    if not gains:
        return "same", "As good as the network alone, and not better by more than chance."
    accuracy = rows.get("accuracy")
    return (
        "good",
        f"{_capital(_join(gains))}{', at the same accuracy' if accuracy is not None and accuracy.mark == 'same' else ''}.",
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _numbers(rows: dict[str, Row]) -> str:
    """Writes accuracy, calibration and likelihood, before and after."""
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


def _intervals(results: Results) -> list[str]:
    """Says that intervals are too wide or too narrow, where a share of targets inside is far from what was promised."""
    shares = {float(n.rpartition("_")[2]): m.value for n, m in results.metrics.items() if n.startswith("coverage_")}
    off = {level: share - level for level, share in shares.items() if math.isfinite(share)}
    if not off:
        return []
    level = max(off, key=lambda promised: abs(off[promised]))
    chance = _TWO_SIDED * math.sqrt(level * (1 - level) / max(1, results.n_data))
    if abs(off[level]) <= max(_FAR_OFF, chance):
        return []
    word = "wide" if off[level] > 0 else "narrow"
    inside = written(shares[level], "percent")
    return [f"Its intervals are too {word}: {inside} of the targets lie inside the {100 * level:g}\u00a0% interval."]


def _detections(rows: dict[str, Row], *, compared: bool) -> list[str]:
    changes = []
    for name, row in rows.items():
        if not name.endswith("/auroc") or row.bayesian is None:
            continue
        data = name.rpartition("/")[0].rpartition("/")[0]
        after = row.text("bayesian")
        before = row.text("map") if compared else after
        changes.append(f"{data} {after if before == after else f'{before} → {after}'}")
    return [f"AUROC of unusual data: {', '.join(changes)}."] if changes else []


def _alone(results: Results, rows: dict[str, Row]) -> str:
    def text_of(name: str) -> str:
        return rows[name].text("bayesian") if name in rows else "–"

    if results.kind in ("classification", "binary"):
        return f"{text_of('accuracy')} right, with a calibration error of {text_of('ece')}."
    if "coverage_0.95" in rows:
        return f"Root mean squared error {text_of('rmse')}; the 95\u00a0% interval holds {text_of('coverage_0.95')} of the targets."
    return f"Root mean squared error {text_of('rmse')}."


def _flagging(threshold: Threshold | None) -> list[str]:
    if threshold is None:
        return []
    rate = f"{100 * threshold.false_alarm_rate:g}\u00a0%"
    if threshold.value == float("inf"):
        return [f"Too few validation data ({threshold.n_data:,}) to promise {rate} false alarms: nothing is flagged."]
    return [f"An input is flagged if {threshold.describe()}: {rate} false alarms on data like the validation data."]
