"""What each section of a report shows: figures with captions, small tables, cards; no HTML here but the figures' SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from aftermap.analysis import figures
from aftermap.analysis.report.comparison import main_score, score_in_words, variance_notes
from aftermap.analysis.report.definitions import definition, written
from aftermap.analysis.report.selective import OperatingPoints, column, operating_points
from aftermap.analysis.report.svg import inline_svg, plot_box
from aftermap.analysis.result import Where
from aftermap.errors import InputError
from aftermap.evaluation.results import Results
from aftermap.evaluation.selective import EITHER, Threshold

__all__ = [
    "Picture",
    "Section",
    "attacks",
    "calibration",
    "check_where",
    "detection",
    "picture",
    "selective",
    "used_definitions",
    "where_section",
]

_CLASSES = ("classification", "binary")
_COLUMN = 3.5  # In inches.
_HEIGHT = 2.8  # In inches; figures that stand side by side are equally high.
_COLUMNS = {
    "layer": ("Layer", "text"),
    "kind": ("Kind", "text"),
    "parameters": ("Weights", "count"),
    "effective": ("Set by the data", "number"),
    "information": ("Information, nats", "number"),
    "own share": ("Variance of the outputs", "percent"),
    "epistemic share": ("Epistemic uncertainty", "percent"),
}
_MOST_LAYERS = 24  # A longer table belongs in a file.


@dataclass(frozen=True)
class Picture:
    """A figure of the page: its SVG, what stands under it, and where its plotting area lies."""

    svg: str
    caption: str
    box: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    limits: tuple[float, float, float, float] = (0.0, 1.0, 0.0, 1.0)
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """Sentences, pictures and a table, each of which may be empty."""

    notes: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    points: OperatingPoints | None = None
    loss: str = ""
    caption: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


def picture(drawn: Any, key: str, caption: str, description: str) -> Picture:
    """Turns an Axes, or a Figure of several, into a picture of the page."""
    svg = inline_svg(drawn, key, description)
    if not hasattr(drawn, "get_xlim"):
        return Picture(svg, caption, wide=drawn.get_figwidth() > 1.3 * _COLUMN)
    (left, right), (bottom, top) = drawn.get_xlim(), drawn.get_ylim()
    return Picture(svg, caption, plot_box(drawn), (float(left), float(right), float(bottom), float(top)))


def _by_name(bayesian: Results, map: Results | None) -> dict[str, Results]:
    """Returns the evaluations by name, the Bayesian predictor first, since it has the first colour everywhere."""
    if map is None:
        return {bayesian.name: bayesian}
    if map.name == bayesian.name:
        return {"Bayesian": bayesian, "network alone": map}
    return {bayesian.name: bayesian, map.name: map}


def _curves(named: Mapping[str, Results], key: str) -> dict[str, Any]:
    return {name: r.curves[key] for name, r in named.items() if key in r.curves}


def calibration(bayesian: Results, map: Results | None) -> Section | None:
    """Shows confidence against accuracy, or the promised against the observed share of targets."""
    named = _by_name(bayesian, map)
    if bayesian.kind in _CLASSES:
        return _class_calibration(bayesian, named)
    curves = _curves(named, "interval_calibration")
    pictures = []
    if curves:
        areas = [f"{name} {r.metrics['miscalibration_area'].value:.3f}" for name, r in named.items() if name in curves]
        pictures.append(
            picture(
                figures.interval_calibration(curves, ax=figures.axes(height=_HEIGHT)),
                "calibration",
                "Share of targets inside the central interval, over the share that the interval promises. On the diagonal a 90\u00a0% "
                "interval holds 90\u00a0% of the targets; under it intervals are too narrow, above it too wide.",
                f"Calibration of intervals; area between curve and diagonal: {', '.join(areas)}.",
            )
        )
    mean, targets = column(bayesian, "prediction"), column(bayesian, "target")
    parts = [column(bayesian, c) for c in ("epistemic", "aleatoric")]
    if mean is not None and targets is not None and parts[0] is not None and parts[1] is not None:
        deviation = np.sqrt(np.maximum(parts[0] + parts[1], 0))
        missed = float((np.abs(targets - mean) > 2 * deviation).mean())
        pictures.append(
            picture(
                figures.observed_against_predicted(mean, deviation, targets, ax=figures.axes(height=_HEIGHT)),
                "observed",
                "Observed targets over predicted means, each with a bar of two standard deviations. Crosses lie further away than "
                "that: 4.6\u00a0% of the points if the predictive is Gaussian and calibrated.",
                f"Observed over predicted values; {missed:.1%} lie outside two standard deviations.",
            )
        )
    levels = [n for n in bayesian.metrics if n.startswith("coverage_")]
    before_after = dict(reversed(named.items()))
    rows = []
    for name in levels:
        promised = float(name.rpartition("_")[2])
        cells = [f"{100 * promised:g}\u00a0%"]
        for r in before_after.values():
            inside, width = r.metrics.get(name), r.metrics.get(f"width_{promised:g}")
            cells.append("–" if inside is None else written(inside.value, "percent"))
            cells.append("–" if width is None else written(width.value, "number"))
        rows.append(cells)
    header = ["Interval", *(text for name in before_after for text in (f"Inside, {name}", f"Width, {name}"))]
    if not pictures and not rows:
        return None
    return Section(pictures=pictures, header=header, rows=rows, caption="Intervals for new targets, noise included")


def _class_calibration(bayesian: Results, named: Mapping[str, Results]) -> Section | None:
    curves = _curves(named, "reliability")
    notes, pictures = [], []
    for name, r in named.items():
        off = r.metrics.get("signed_calibration_error")
        if off is not None and math.isfinite(off.value):
            direction = "above" if off.value > 0 else "below"
            notes.append(f"{name}: mean confidence {abs(100 * off.value):.1f}\u00a0% {direction} accuracy.")
    if curves:
        errors = [
            f"{name} {written(r.metrics['ece'].value, 'percent')}" for name, r in named.items() if "ece" in r.metrics
        ]
        pictures.append(
            picture(
                figures.reliability(curves, ax=figures.axes(height=_HEIGHT)),
                "calibration",
                "Share of right answers for each level of confidence. Points below the diagonal are overconfident. Bars are 95\u00a0% "
                "intervals; the strip above shows the number of answers in each bin.",
                f"Reliability diagram; calibration error: {', '.join(errors)}.",
            )
        )
    wrong = {
        f"{side} answers": bayesian.curves[f"entropy_{side}"]
        for side in ("right", "wrong")
        if f"entropy_{side}" in bayesian.curves
    }
    if len(wrong) == 2:
        pictures.append(
            picture(
                figures.inverse_ecdf(wrong, ax=figures.axes(height=_HEIGHT)),
                "errors",
                f"{bayesian.name}: the share of right and of wrong answers whose entropy lies above a threshold. "
                "The further apart the curves, the better the uncertainty points at errors.",
                "Share of right and wrong answers above each entropy.",
            )
        )
    return Section(notes=notes, pictures=pictures) if pictures else None


def selective(bayesian: Results, map: Results | None) -> Section | None:
    """Shows risk against coverage, with the table behind the slider."""
    named = _by_name(bayesian, map)
    ours = next(iter(named))
    points = operating_points(bayesian, {n: r for n, r in named.items() if n != ours})
    if points is None:
        return None
    drawn = {ours: {"coverage": points.coverage, "risk": points.risk}}
    drawn |= {n: {"coverage": points.coverage, "risk": risk} for n, risk in points.others.items()}
    classes = bayesian.kind in _CLASSES
    loss = "error rate of the answers" if classes else "mean squared error of the answers"
    caption = (
        f"{loss.capitalize()} when only the inputs with the lowest {score_in_words(points.score)} are answered and the others are "
        "set aside. "
        "The dot is the operating point chosen above."
    )
    at = points.risk[79]
    shown = written(at, "percent" if classes else "number")
    drawing = picture(
        figures.risk_coverage(drawn, loss=loss, percent=classes),
        "selective",
        caption,
        f"Risk over coverage; at 80 % coverage the risk is {shown}.",
    )
    drawing = replace(
        drawing, svg=drawing.svg.removesuffix("</svg>") + _dot(drawing, points.coverage[79], at) + "</svg>"
    )
    notes = []
    if points.score == EITHER:
        notes.append(
            "Inputs are ordered by the larger of two ranks: the share of the validation inputs with a smaller entropy, and the share "
            "with a smaller mutual information. The entropy is large if the answer lies between classes, the mutual information if "
            "plausible weights disagree about it. An input is set aside if one of the two is larger than on nearly all validation inputs."
            + (f" For {', '.join(points.others)}, inputs are ordered by entropy." if points.others else "")
        )
    loss = "error rate" if classes else "mean squared error"
    return Section(notes=notes, pictures=[drawing], points=points, loss=loss)


def _dot(drawing: Picture, coverage: float, risk: float) -> str:
    """Returns the operating point on the curve; the page's script moves it, and without a script it stays at 80 %."""
    left, top, width, height = drawing.box
    low, high, bottom, ceiling = drawing.limits
    x = left + width * (coverage - low) / (high - low)
    y = top + height * (1 - min(max((risk - bottom) / (ceiling - bottom), 0.0), 1.0))
    return (
        f'<g class="operating-point"><line x1="{x:.2f}" x2="{x:.2f}" y1="{top:.2f}" y2="{top + height:.2f}"/>'
        f'<circle cx="{x:.2f}" cy="{y:.2f}" r="4"/></g>'
    )


def detection(bayesian: Results, map: Results | None, threshold: Threshold | None = None) -> Section | None:
    """Shows other data beside the test data: histograms of the score, shares above a threshold, ROC, and every score's numbers."""
    if not bayesian.ood:
        return None
    named = dict(reversed(_by_name(bayesian, map).items()))  # The network alone comes first.
    ours, score = list(named)[-1], main_score(bayesian)
    sets = ("test", *bayesian.ood)
    known = _known(named, score, sets)
    pictures = _histograms(known, score, threshold, ours)
    if score == EITHER:  # The network alone has no such ranks: both by entropy, on one scale.
        pictures = [*_histograms(_known(named, "entropy", sets), "entropy", None, ours), *pictures]
    entropies = {
        d: bayesian.curves[f"entropy/{d}"] for d in ("test", *bayesian.ood) if f"entropy/{d}" in bayesian.curves
    }
    if entropies:
        caption = f"{ours}: the share of each set whose entropy lies above a threshold."
        drawn = figures.inverse_ecdf(entropies, ax=figures.axes(height=_HEIGHT))
        pictures.append(picture(drawn, "above", caption, caption))
    if ours in known:
        areas = ", ".join(f"{d} {bayesian.ood[d][score]['auroc'].value:.3f}" for d in bayesian.ood)
        outside = {d: known[ours][d] for d in bayesian.ood}
        pictures.append(
            picture(
                figures.roc(known[ours]["test"], outside, ax=figures.axes(height=_HEIGHT)),
                "roc",
                f"{ours}: share of each other set that is found, over the share of test inputs that raise a false alarm.",
                f"ROC curves by {score_in_words(score)}; AUROC: {areas}.",
            )
        )
    rows = []
    for data, scores in bayesian.ood.items():
        for key in scores:
            cells = [_detection_cells(r, data, key) for r in named.values()]
            rows.append([data, score_in_words(key), *(c[0] for c in cells), *(c[1] for c in cells)])
    header = ["Other set", "Score", *(f"AUROC, {n}" for n in named), *(f"FPR95, {n}" for n in named)]
    caption = "Every score on every other set"
    return Section(notes=variance_notes(bayesian, map), pictures=pictures, header=header, rows=rows, caption=caption)


def _known(named: Mapping[str, Results], score: str, sets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the scores by predictor and set, of the predictors whose scores are known for every set."""
    known = {name: {d: column(r, score, d) for d in sets} for name, r in named.items()}
    return {name: values for name, values in known.items() if all(v is not None for v in values.values())}


def _detection_cells(results: Results, data: str, score: str) -> tuple[str, str]:
    numbers = results.ood.get(data, {}).get(score)
    # The network alone has no epistemic uncertainty: an AUROC of 0.5 for a score that is zero everywhere says nothing.
    if numbers is None or numbers["mean_inside"].value == numbers["mean_outside"].value == 0.0:
        return "–", "–"
    return written(numbers["auroc"].value, "share"), written(numbers["fpr95"].value, "percent")


def _histograms(
    known: Mapping[str, Mapping[str, Any]], score: str, threshold: Threshold | None, ours: str
) -> list[Picture]:
    """Draws one picture per predictor, all on one scale."""
    if not known:
        return []
    drawable = threshold is not None and threshold.score == score and math.isfinite(threshold.value)
    limit = threshold.value if threshold is not None and drawable else None
    words = score_in_words(score)
    every = np.concatenate([values for sets in known.values() for values in sets.values()])
    margin = 0.02 * (every.max() - every.min())
    drawn = {}
    for name, sets in known.items():
        others = {d: values for d, values in sets.items() if d != "test"}
        drawn[name] = figures.score_histograms(
            sets["test"],
            others,
            score=f"{words} (nats)" if score == "entropy" else words,
            threshold=limit if name == ours else None,
            ax=figures.axes(height=_HEIGHT),
        )
    top = max(ax.get_ylim()[1] for ax in drawn.values())
    pictures = []
    for number, (name, ax) in enumerate(drawn.items()):
        ax.set(xlim=(every.min() - margin, every.max() + margin), ylim=(0, top))
        caption = f"{name}: how the {words} is spread over the test data and over each other set."
        pictures.append(picture(ax, f"histogram{score}{number}", caption, f"Histograms of the {words} for {name}."))
    return pictures


def attacks(bayesian: Results, map: Results | None) -> Section | None:
    """Shows accuracy and entropy along the strength of each attack."""
    if not bayesian.attacks:
        return None
    named = _by_name(bayesian, map)
    pictures = []
    for number, attack in enumerate(bayesian.attacks):
        curves = {n: r.attacks[attack] for n, r in named.items() if attack in r.attacks}
        for quantity in ("accuracy", "entropy"):
            meaning = figures.ATTACK_QUANTITIES[quantity]
            pictures.append(
                picture(
                    figures.attack_curves(curves, quantity=quantity),
                    f"attack{number}{quantity}",
                    f"{attack}: {meaning}, over the strength of the attack. Each predictor is attacked through its own predictive.",
                    f"{meaning} under the attack {attack}.",
                )
            )
    return Section(pictures=pictures)


def used_definitions(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns label and meaning of every number, once each."""
    definitions = {}
    for name in names:
        meaning = definition(name)
        if meaning.meaning:
            definitions[meaning.label] = meaning.meaning
    return list(definitions.items())


def check_where(where: Any) -> None:
    """Raises an error unless the argument is the result of `where`, or None."""
    if where is not None and not isinstance(where, Where):
        raise InputError(f"where must be the result of where(predictor, loader), got {type(where).__name__}")


def where_section(where: Where) -> Section:
    """Shows layer shares, the classes that are taken for each other, and what the most uncertain inputs look at."""
    table = _layer_table(where)
    shown = [key for key in _COLUMNS if key in table]
    return Section(
        notes=_notes(where),
        pictures=_pictures(where),
        header=[_COLUMNS[key][0] for key in shown],
        rows=[[_cell(table[key][i], _COLUMNS[key][1]) for key in shown] for i in _shown_layers(where)],
        caption="Layers in the order of the network",
    )


def _layer_table(where: Where) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {**where.table("layer"), "own share": list(where.own_shares)}
    if (
        where.crosses
    ):  # With what layers have in common, shares of nats are no shares of anything that a person can picture.
        table.pop("epistemic share", None)
    return table


def _notes(where: Where) -> list[str]:
    total = math.fsum(layer.effective for layer in where.layers)
    count = sum(layer.n_parameters for layer in where.layers)
    share, largest = max(zip(where.own_shares, where.layer_names, strict=True))
    notes = [
        f"The weights of layer {largest} cause {written(share, 'percent')} of the variance of the network's outputs. According to "
        f"the {where.structure} posterior, the training data determine about {total:,.0f} of {count:,} uncertain weights; all in "
        f"all they gave {where.information:,.0f} nats of information about the weights (a nat is 1.44 bits)."
    ]
    if where.crosses:
        notes.append(where.in_common_in_words())
    elif where.kind == "classification" and "epistemic share" in _layer_table(where):
        notes.append(
            "The table shows two shares for each layer. The share of the variance of the outputs counts every change of a logit (an output "
            "before the softmax). The share of the epistemic uncertainty counts only changes that move probabilities. A layer that "
            "shifts logits about which the network is sure anyway has a large first share and a small second one."
        )
    if len(where.layers) > _MOST_LAYERS:
        notes.append(f"The table shows the {_MOST_LAYERS} layers with the largest shares of {len(where.layers)}.")
    if where.certain:
        names = ", ".join(where.certain[:6]) + (f" and {len(where.certain) - 6} more" if len(where.certain) > 6 else "")
        notes.append(f"These parameters are not in the posterior, so they are treated as certain: {names}.")
    return notes


def _shown_layers(where: Where) -> list[int]:
    order = sorted(range(len(where.layers)), key=lambda i: -where.own_shares[i])
    return sorted(order[:_MOST_LAYERS])


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "–"
    if form == "text":
        return str(value)
    return f"{value:,}" if form == "count" else f"{value:,.1f}" if form == "number" else written(float(value), form)


def _pictures(where: Where) -> list[Picture]:
    pictures = [
        picture(
            where.figure("layers", title=""),
            "layers",
            "Share of each layer in the variance of the network's outputs; the shares add to one. Circles: share of the weights.",
            "Bars: "
            + ", ".join(f"{where.layer_names[i]} {where.own_shares[i]:.1%}" for i in _shown_layers(where))
            + ".",
        )
    ]
    if where.kind == "classification" and where.classes.pairs is not None:
        caption = "Mean epistemic uncertainty of the test inputs by true and predicted class: off the diagonal, the confusions."
        pictures.append(picture(where.figure("pairs", title=""), "pairs", caption, caption))
    if where.weights_of is not None and any(layer.layer.kind.startswith("Conv") for layer in where.layers):
        caption = "Filters of the first convolution: their weights, and the standard deviation that the posterior leaves them."
        pictures.append(picture(where.figure("filters", title=""), "filters", caption, caption))
    if where.inputs.saliency is not None and _are_images(where):
        caption = "The most uncertain inputs, and below each the pixels on which its epistemic uncertainty hangs. Above: true class → answer."
        pictures.append(picture(where.figure("saliency", title=""), "saliency", caption, caption))
    return pictures


def _are_images(where: Where) -> bool:
    """Tells whether the inputs have a height and a width, so that a map over them can be looked at."""
    shape = getattr(where.inputs.inputs[0], "shape", ()) if len(where.inputs.inputs) else ()
    return len(shape) >= 2 and min(shape[-2:]) > 1
