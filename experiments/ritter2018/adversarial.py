"""Section 5.3 and appendix C: attacks on each method's own predictive (claims R10 to R15)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aftermap.analysis.figures import CATEGORIES, finish, save_svg
from aftermap.baselines import Baseline, Particles
from aftermap.evaluation import FGSM, TargetedAttack, input_range
from experiments.framework import Job, Results, Verdict, judged, mean_and_error, paired
from experiments.ritter2018.notmnist import METHODS as STRUCTURES
from experiments.ritter2018.notmnist import NAMES as ALL_NAMES
from experiments.ritter2018.notmnist import Digits, batches, chosen, images, shown, undecided
from experiments.ritter2018.settings import Images

__all__ = ["figures", "jobs", "tables", "verdicts"]

NAMES = {m: n for m, n in ALL_NAMES.items() if m != "field"}
STEPS = tuple(k / 20 for k in range(11))
_BOTH = ("kron", "plain")  # with and without augmentation
_TUNED = {"kron": "notmnist/tune_kron/*", "plain": "augmentation/tune_plain/*"}
AUGMENTED = {
    "kron": "augmented, minibatch",
    "plain": "plain, minibatch",
    "few": "few, minibatch",
    "exact": "few, exact",
}


def jobs(settings: Images, data_dir: Path) -> Iterator[Job]:
    """Both attacks on four methods, then the curvature without augmentation, with and without minibatches; last a wider posterior."""
    every = [Digits(settings, data_dir, seed) for seed in range(settings.seeds)]
    for digits in every:
        for method in NAMES:
            yield from _attacks(digits, f"adversarial/{{}}_{method}", method, settings.attacked, settings.aimed)
    for digits in every:
        seed, count = digits.seed, settings.compared
        yield Job(f"augmentation/fit_plain/seed{seed}", partial(digits.fit, "plain"))
        yield Job(f"augmentation/tune_plain/seed{seed}", partial(digits.tune, "plain"))
        yield Job(f"augmentation/fit_few/seed{seed}", partial(_fit_few, digits))
        for name in AUGMENTED:  # The augmented one, too, for the same images.
            yield from _attacks(digits, f"augmentation/{{}}_{name}", name, count, count)
    for digits in every:
        yield from _attacks(digits, "adversarial/{}_wide", "wide", settings.attacked, settings.aimed)


def _attacks(digits: Digits, key: str, method: str, attacked: int, aimed: int) -> Iterator[Job]:
    yield Job(f"{key.format('untargeted')}/seed{digits.seed}", partial(_untargeted, digits, method, attacked))
    yield Job(f"{key.format('targeted')}/seed{digits.seed}", partial(_targeted, digits, method, aimed))


def _scale(digits: Digits) -> Tensor:
    return input_range(images(digits.data_dir, "mnist", "train")[0])


def _attacked(digits: Digits, count: int) -> list[tuple[Tensor, Tensor]]:
    return batches(digits.data("test", count), 250)


def _predictor(digits: Digits, method: str) -> Baseline:
    count = digits.settings.attack_samples
    if method in ("few", "exact"):
        # Both with the scale and precision that the grid found without augmentation: only the curvature differs.
        tuned, la = digits.laplace("plain"), digits.untuned(method)
        share = tuned.n_data / la.n_data
        scale, precision = tuned.data_scale, float(next(iter(tuned.prior_precision.values())))
        posterior = la.posterior.with_prior(precision, scale=scale * share)
        return Particles.from_posterior(la.model, posterior, count, generator=digits.generator(60))
    return digits.predictor(method, count)


def _untargeted(digits: Digits, method: str, count: int) -> dict[str, Any]:
    attack = FGSM(scale=_scale(digits), steps=STEPS)
    curve = attack.run(_predictor(digits, method), _attacked(digits, count))
    return {
        "entropy_area": _area(curve.entropy, STEPS[1]),
        "kept_area": _area(curve.kept, STEPS[1]),
        "accuracy_area": _area(curve.accuracy, STEPS[1]),
        "no_gradient": curve.no_gradient,
        "curves": curve.to_dict(),
    }


def _targeted(digits: Digits, method: str, count: int) -> dict[str, Any]:
    attack = TargetedAttack(scale=_scale(digits), target=0, step=1e-2, iterations=digits.settings.iterations)
    curve = attack.run(_predictor(digits, method), _attacked(digits, count))
    return {
        "steps_to_half": _crossing([1 - k for k in curve.kept], 0.5),
        "steps_to_all": _crossing(curve.target, 0.99),
        "peak_entropy": max(curve.entropy),
        "entropy_area": _area(curve.entropy, 1 / digits.settings.iterations),
        "excluded": curve.excluded,
        "curves": curve.to_dict(),
    }


def _area(values: list[float], width: float) -> float:
    return width * (sum(values) - (values[0] + values[-1]) / 2)


def _crossing(values: list[float], level: float) -> float:
    """The step at which a curve reaches a level, between steps by a line; the last step where it never does."""
    for step, value in enumerate(values):
        if value >= level:
            before = values[step - 1] if step else value
            return float(step) if value == before else step - (value - level) / (value - before)
    return float(len(values) - 1)


def _fit_few(digits: Digits) -> dict[str, Any]:
    """The same images once in minibatches of 100 and once by single data."""
    return {"n_data": digits.fit("few")["n_data"], "exact_n_data": digits.fit("exact")["n_data"]}


# Verdicts


def verdicts(results: Results) -> list[Verdict]:
    """R10 to R15."""
    count = results.settings.images.seeds
    first = {f"adversarial/untargeted_{m}/*": count for m in NAMES}
    second = {f"adversarial/targeted_{m}/*": count for m in NAMES} | {f"notmnist/tune_{m}/*": count for m in STRUCTURES}
    pairs = {f"augmentation/{kind}_{m}/*": count for kind in ("untargeted", "targeted") for m in ("few", "exact")}
    plain = {f"augmentation/{kind}_{m}/*": count for kind in ("untargeted", "targeted") for m in _BOTH}
    plain |= dict.fromkeys(_TUNED.values(), count)
    return [
        *judged(results, first, ("R10", "R11"), lambda r: [_most_uncertain(r), _kept(r)]),
        *judged(results, second, ("R12", "R13"), lambda r: [_steps(r), _peak(r)]),
        *judged(results, plain, ("R14",), lambda r: [_augmented(r)]),
        *judged(results, pairs, ("R15",), lambda r: [_minibatch(r)]),
    ]


def _by_method(results: Results, kind: str, name: str) -> dict[str, list[float]]:
    return {m: results.numbers(f"adversarial/{kind}_{m}/*", name) for m in NAMES}


def _words(numbers: Mapping[str, list[float]], digits: int) -> str:
    return ", ".join(f"{NAMES[m]} {mean_and_error(v, digits)}" for m, v in numbers.items())


def _most_uncertain(results: Results) -> Verdict:
    areas = _by_method(results, "untargeted", "entropy_area")
    others = [m for m in NAMES if m != "kron"]
    conditions = [paired(areas["kron"], areas[m]).higher for m in others]
    reason = "not above " + ", ".join(NAMES[m] for m, held in zip(others, conditions, strict=True) if not held)
    reason += f"; {chosen(results)}"
    return Verdict.of("R10", conditions, f"area under the entropy: {_words(areas, 3)}", reason, len(areas["kron"]))


def _kept(results: Results) -> Verdict:
    kept = _by_method(results, "untargeted", "kept_area")
    areas = _by_method(results, "untargeted", "entropy_area")
    others = [m for m in NAMES if m != "deterministic"]
    conditions = [
        paired(kept["kron"], kept["dropout"]).higher,
        paired(kept["diagonal"], kept["dropout"]).higher,
        all(paired(kept["deterministic"], kept[m]).higher for m in others),
        all(paired(areas["deterministic"], areas[m]).lower for m in others),
    ]
    parts = ("Kronecker above dropout", "diagonal above dropout", "deterministic keeps most", "and is least uncertain")
    reason = ", ".join(f"{name} {'yes' if held else 'no'}" for name, held in zip(parts, conditions, strict=True))
    return Verdict.of(
        "R11", conditions, f"area under the kept predictions: {_words(kept, 3)}", reason, len(kept["kron"])
    )


def _steps(results: Results) -> Verdict:
    half, every = (_by_method(results, "targeted", name) for name in ("steps_to_half", "steps_to_all"))
    means = {m: sum(v) / len(v) for m, v in half.items()}
    best = max((m for m in NAMES if m != "kron"), key=lambda m: means[m])
    ratio = means["kron"] / means[best]
    ours = f"steps to half: {_words(half, 1)}; to 99 %: {_words(every, 1)}; ratio {ratio:.2f} to {NAMES[best]}"
    return Verdict.of("R12", ratio >= 1.5, ours, f"the ratio is below 1.5; {chosen(results)}", len(half["kron"]))


def _peak(results: Results) -> Verdict:
    peaks = _by_method(results, "targeted", "peak_entropy")
    others = [m for m in NAMES if m != "kron"]
    conditions = [paired(peaks["kron"], peaks[m]).lower for m in others]
    reason = "not below " + ", ".join(NAMES[m] for m, held in zip(others, conditions, strict=True) if not held)
    return Verdict.of("R13", conditions, f"peak of the mean entropy: {_words(peaks, 2)}", reason, len(peaks["kron"]))


def _augmented(results: Results) -> Verdict:
    sizes = {
        name: results.numbers(_TUNED[m], "mean_deviation") for name, m in zip(("with", "without"), _BOTH, strict=True)
    }
    areas = {
        kind: [results.numbers(f"augmentation/{kind}_{m}/*", "entropy_area") for m in _BOTH]
        for kind in ("untargeted", "targeted")
    }
    conditions = [paired(sizes["without"], sizes["with"]).lower, *(paired(a, b).higher for a, b in areas.values())]
    ours = (
        f"mean standard deviation {mean_and_error(sizes['with'], 4)} with, {mean_and_error(sizes['without'], 4)} without; "
        + "; ".join(
            f"{kind} area {mean_and_error(a, 3)} with, {mean_and_error(b, 3)} without" for kind, (a, b) in areas.items()
        )
    )
    parts = ("narrower without", "untargeted area larger with", "targeted area larger with")
    held = ", ".join(f"{name} {'yes' if good else 'no'}" for name, good in zip(parts, conditions, strict=True))
    return Verdict.of("R14", conditions, ours, f"{held}. {_same_grid(results, sizes)}", len(sizes["with"]))


def _same_grid(results: Results, sizes: Mapping[str, list[float]], wide: float = 0.01) -> str:
    """What the two grids of appendix C say, point by point: the mean over seeds of the likelihood of the same N and τ."""
    found: list[dict[tuple[float, float], list[float]]] = [{}, {}]
    for way, into in zip(_BOTH, found, strict=True):
        for value in results.among(_TUNED[way]).values():
            for scale, precision, nll in value["tables"][0]:
                into.setdefault((scale, precision), []).append(nll)
    ours, plain = ({k: sum(v) / len(v) for k, v in rows.items()} for rows in found)
    least = min(*ours.values(), *plain.values())
    compared = [k for k in ours if k in plain and min(ours[k], plain[k]) > least + wide]
    better = sum(ours[k] < plain[k] for k in compared)
    seeds = "; ".join(f"{name} {', '.join(f'{v:.2g}' for v in values)}" for name, values in sizes.items())
    return (
        f"Mean standard deviation by seed: {seeds}. Within 0.001 nats of the best are {undecided(results, _TUNED['kron'])} with augmentation, and {undecided(results, _TUNED['plain'])} without. At the same N and τ, where the posterior is wide "
        f"enough to cost {wide:g} nats, held-out images are likelier with augmentation at {better} of {len(compared)} points"
    )


def _minibatch(results: Results) -> Verdict:
    worst: dict[str, float] = {}
    for kind in ("untargeted", "targeted"):
        rows = [
            [results.values[key.replace("few", m)]["curves"] for m in ("few", "exact")]
            for key in results.among(f"augmentation/{kind}_few/*")
        ]
        for name in ("entropy", "kept"):
            few, exact = (torch.tensor([row[k][name] for row in rows]).mean(0) for k in (0, 1))
            worst[f"{kind} {name}"] = float((few - exact).abs().max() / exact.abs().max())
    ours = "largest difference of the mean curves, relative to their height: " + ", ".join(
        f"{k} {100 * v:.1f} %" for k, v in worst.items()
    )
    seeds = len(results.among("augmentation/untargeted_few/*"))
    return Verdict.of("R15", [v <= 0.05 for v in worst.values()], ours, "a curve differs by more than 5 %", seeds)


# Tables and figures


def tables(results: Results) -> str:
    """Both attacks in numbers."""
    columns = {
        ("untargeted", "entropy_area"): "untargeted: area under entropy",
        ("untargeted", "kept_area"): "under predictions kept",
        ("targeted", "steps_to_half"): "targeted: steps to half",
        ("targeted", "steps_to_all"): "to 99 %",
        ("targeted", "peak_entropy"): "peak of the mean entropy",
    }
    lines = ["Attacks (figures 3 and 4):", "", "| | " + " | ".join(columns.values()) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for method, name in shown(results).items():
        cells = [results.text(f"adversarial/{kind}_{method}/*", column) for kind, column in columns]
        if method != "field":
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) if results.among("adversarial/*/*") else ""


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Figures 3 and 4 of the methods, 6 and 7 of the ways to compute the curvature, means over seeds; returns their captions."""
    methods = {f"adversarial/{{}}_{m}": n for m, n in NAMES.items()}
    ways = {f"augmentation/{{}}_{m}": n for m, n in AUGMENTED.items()}
    captions = {}
    for number, kind, curves, what in (
        (3, "untargeted", methods, "each method"),
        (4, "targeted", methods, "each method"),
        (6, "untargeted", ways, "Kronecker-factored Laplace with the curvature computed in four ways"),
        (7, "targeted", ways, "Kronecker-factored Laplace with the curvature computed in four ways"),
    ):
        found = {name: results.among(f"{key.format(kind)}/*") for key, name in curves.items()}
        if all(found.values()):
            file = f"figure{number}.svg"
            _draw(folder / file, kind, {n: list(v.values()) for n, v in found.items()})
            captions[file] = f"Figure {number}: an attack, {kind}, on {what}; means over seeds."
    return captions


def _draw(path: Path, kind: str, found: Mapping[str, list[dict[str, Any]]]) -> None:
    from matplotlib.figure import Figure

    wanted = {"entropy": "mean entropy (nats)", "kept": "share of predictions kept"}
    if kind == "targeted":
        wanted["target"] = "share predicted as 0"
    figure = Figure(figsize=(2.5 * len(wanted), 2.6), layout="constrained")
    panels = figure.subplots(1, len(wanted))
    for ax, (column, label) in zip(panels, wanted.items(), strict=True):
        for place, (name, rows) in enumerate(found.items()):
            mean = torch.tensor([row["curves"][column] for row in rows]).mean(0)
            ax.plot(rows[0]["curves"]["steps"], mean.tolist(), color=CATEGORIES[place], lw=1.2, label=name)
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0, top=None if column == "entropy" else 1.02)
        finish(ax, x="step size η" if kind == "untargeted" else "steps of η = 0.01", y=label)
    handles, labels = panels[0].get_legend_handles_labels()
    columns = 4 if kind == "targeted" else 2
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=7, frameon=False, labelcolor="#333333"
    )
    path.write_text(save_svg(figure), encoding="utf-8")
