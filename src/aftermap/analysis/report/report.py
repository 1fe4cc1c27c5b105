"""One self-contained HTML file about one predictor: verdict, comparison, calibration, abstention, unusual data, provenance."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from aftermap.analysis.neighbours import Neighbours
from aftermap.analysis.report import sections
from aftermap.analysis.report.cards import Features
from aftermap.analysis.report.cards import most_uncertain as uncertain_cards
from aftermap.analysis.report.comparison import MARKS, Row, comparison, main_score, score_in_words, verdict
from aftermap.analysis.report.definitions import written
from aftermap.analysis.report.sections import check_where, where_section
from aftermap.errors import DataError, InputError
from aftermap.evaluation.results import Results
from aftermap.evaluation.selective import EITHER, Threshold
from aftermap.lazy import optional
from aftermap.writing import replaced_file

__all__ = ["render_report", "write_report"]

_VERSIONS = ("aftermap", "torch", "numpy", "python", "platform")
_HASHES = ("data_hash", "weights_hash", "ood_hashes")
_KEY_NUMBERS = {
    "classes": ("accuracy", "ece", "nll", "accuracy_at_80"),
    "values": ("rmse", "nll", "crps", "coverage_0.95"),
}
_ALWAYS_DEFINED = ("coverage", "risk", "threshold", "epistemic_split")


def write_report(
    path: str | Path,
    *,
    bayesian: Results,
    map: Results | None = None,
    where: Any = None,
    title: str = "Uncertainty report",
    settings: Mapping[str, Any] | None = None,
    images: Any = None,
    classes: Sequence[str] | None = None,
    threshold: Threshold | None = None,
    figures: Mapping[str, Any] | None = None,
    most_uncertain: int = 12,
    features: Features | None = None,
    neighbours: Callable[[list[int]], Neighbours] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Writes a report: one HTML file that needs nothing else, on screen (light or dark), on paper, at any width.

    Args:
        path: The file to write, whose folder must exist. An existing file is replaced once the new one is complete.
        bayesian: The evaluation of the Bayesian predictor.
        map: The evaluation of the network alone on the same data, to compare with.
        where: The result of `la.where(loader)`, for the section on where the uncertainty sits.
        title: The title of the report.
        settings: The settings by name, listed as they are: structure, prior precision, seeds and so on.
        images: The pictures of the test inputs in their order, [N, H, W], [N, 1, H, W] or [N, 3, H, W].
        classes: The names of the classes.
        threshold: The threshold for flagging inputs, if one was chosen.
        figures: The Axes of more figures by caption, such as a training history or a regression band.
        most_uncertain: The number of the most uncertain inputs to show.
        features: The test inputs of a table with the names of their columns, so that uncertain rows can be read.
        neighbours: A function from the numbers of test inputs to their nearest training examples
            (`aftermap.analysis.nearest_examples`), which stand beside the uncertain inputs.
        notes: Sentences that follow the verdict, such as what tuning found.

    Returns:
        The path of the file.

    Raises:
        InputError, DataError, ShapeError: The evaluations are of different data, images or names do not fit, or there
            is no such folder.
        UnsupportedError: The package matplotlib or jinja2 is not installed.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise DataError(f"the folder {target.parent} does not exist; make it first")
    if target.is_dir():
        raise DataError(f"{target} is a folder; give the name of a file, such as {target / 'report.html'}")
    text = render_report(
        bayesian=bayesian,
        map=map,
        where=where,
        title=title,
        settings=settings,
        images=images,
        classes=classes,
        threshold=threshold,
        figures=figures,
        most_uncertain=most_uncertain,
        features=features,
        neighbours=neighbours,
        notes=notes,
    )
    with replaced_file(target) as part:
        part.write_text(text, encoding="utf-8")
    return target


def render_report(
    *,
    bayesian: Results,
    map: Results | None = None,
    where: Any = None,
    title: str = "Uncertainty report",
    settings: Mapping[str, Any] | None = None,
    images: Any = None,
    classes: Sequence[str] | None = None,
    threshold: Threshold | None = None,
    figures: Mapping[str, Any] | None = None,
    most_uncertain: int = 12,
    features: Features | None = None,
    neighbours: Callable[[list[int]], Neighbours] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Returns the text of the report; the arguments are those of `write_report`."""
    for name, results in (("bayesian", bayesian), ("map", map)):
        if not isinstance(results, Results) and not (results is None and name == "map"):
            raise InputError(f"{name} must be Results, as evaluate() returns them, got {type(results).__name__}")
    # What may be refused comes first: drawing takes a second.
    check_where(where)
    rows = comparison(bayesian, map)
    cards = uncertain_cards(
        bayesian, images, classes, most_uncertain, where=where, features=features, neighbours=neighbours
    )
    shown = {row.name for row in rows}
    others = [n for n in _every_name(bayesian, map) if n not in shown and "/" not in n]
    style, script = _asset("report.css"), _asset("report.js")
    more = [
        sections.picture(ax, f"more{i}", caption, caption) for i, (caption, ax) in enumerate((figures or {}).items())
    ]
    ranks = [EITHER] if EITHER in bayesian.table else []
    environment = _environment()
    safe = environment.filters["safe"]
    return environment.get_template("report.html.j2").render(
        title=title,
        kind=bayesian.kind,
        n_data=bayesian.n_data,
        bayesian=bayesian,
        map=map,
        names=_names(bayesian, map),
        verdict=verdict(bayesian, map, threshold=threshold),
        most_nats=_most_nats(bayesian, classes),
        notes=notes,
        key_numbers=_key_numbers(bayesian, rows),
        rows=rows,
        other_rows=comparison(bayesian, map, names=others) if others else [],
        marks=MARKS,
        score=score_in_words(main_score(bayesian)),
        network_by_entropy=map is not None and main_score(bayesian) == EITHER,
        calibration=sections.calibration(bayesian, map),
        selective=sections.selective(bayesian, map),
        detection=sections.detection(bayesian, map, threshold),
        attacks=sections.attacks(bayesian, map),
        where=None if where is None else where_section(where),
        cards=cards,
        more=more,
        settings=_settings(bayesian, settings, threshold),
        provenance=_provenance(bayesian, map),
        definitions=sections.used_definitions([*_every_name(bayesian, map), *_ALWAYS_DEFINED, *ranks]),
        style=safe(style),
        script=safe(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _most_nats(bayesian: Results, classes: Sequence[str] | None) -> float | None:
    """Returns the entropy of a guess among all classes, where their number is known."""
    if bayesian.kind == "binary":
        return math.log(2)
    return math.log(len(classes)) if bayesian.kind == "classification" and classes and len(classes) > 1 else None


def _asset(name: str) -> str:
    text = (resources.files("aftermap.analysis.report") / "assets" / name).read_text(encoding="utf-8")
    return text.strip()


def _environment() -> Any:
    jinja2 = optional("jinja2", "plot", "reports")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("aftermap.analysis.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["written"] = written
    return environment


def _names(bayesian: Results, map: Results | None) -> tuple[str, str]:
    if map is not None and map.name == bayesian.name:
        return "Bayesian", "network alone"
    return bayesian.name, "" if map is None else map.name


def _key_numbers(bayesian: Results, rows: Sequence[Row]) -> list[Row]:
    chosen = _KEY_NUMBERS["classes" if bayesian.kind in ("classification", "binary") else "values"]
    by_name = {row.name: row for row in rows}
    return [by_name[name] for name in chosen if name in by_name]


def _every_name(bayesian: Results, map: Results | None) -> list[str]:
    time = ["seconds_per_1000"] if "seconds_per_1000" in bayesian.provenance else []
    return list(dict.fromkeys([*bayesian.flat(), *(map.flat() if map is not None else ()), *time]))


def _settings(
    bayesian: Results, settings: Mapping[str, Any] | None, threshold: Threshold | None
) -> list[tuple[str, str]]:
    facts = dict(settings or {})
    shown = bayesian.provenance
    for key, label in (
        ("description", "predictor"),
        ("options", "options of predict"),
        ("seed", "seed of the evaluation"),
        ("n_resamples", "bootstrap resamples"),
        ("level", "level of the intervals"),
    ):
        if key in shown and shown[key] not in (None, {}):
            facts.setdefault(label, shown[key])
    if threshold is not None:
        facts.setdefault(
            "threshold",
            f"{score_in_words(threshold.score)} above {threshold.value:.4g}, from {threshold.n_data:,} inputs",
        )
    return [(str(k).replace("_", " "), _in_words(v)) for k, v in facts.items()]


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} = {_in_words(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_in_words(v) for v in value)
    return str(value)


def _moment(value: Any) -> str:
    """Returns a time as people write it: 2026-11-15 23:38 UTC."""
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return str(value)
    return moment.strftime("%Y-%m-%d %H:%M ") + (moment.tzname() or "")


def _provenance(bayesian: Results, map: Results | None) -> dict[str, list[tuple[str, str]]]:
    facts = bayesian.provenance
    versions = [(k, str(facts[k])) for k in _VERSIONS if k in facts]
    times = [
        (f"evaluated, {r.name}", _moment(r.provenance["time"])) for r in (bayesian, map) if r and "time" in r.provenance
    ]
    hashes: list[tuple[str, str]] = []
    for key in _HASHES:
        value = facts.get(key)
        if isinstance(value, Mapping):
            hashes += [(f"{name} data", str(v)) for name, v in value.items()]
        elif value is not None:
            hashes.append(({"data_hash": "test data", "weights_hash": "weights"}[key], str(value)))
    return {"versions": versions + times, "hashes": hashes}
