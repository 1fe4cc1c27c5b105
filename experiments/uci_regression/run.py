"""UCI regression on the standard splits: likelihood, error and coverage beside the published column of MC dropout.

python -m experiments.uci_regression.run [--budget small]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from aftermap.analysis.figures import CATEGORIES, axes, finish, save_svg
from experiments.framework import Job, Results, Verdict, judged, mean_and_error, run
from experiments.uci_regression.methods import BASELINES, LEVELS, bayesian, load, others

__all__ = ["BUDGETS", "DATA", "PUBLISHED", "TITLE", "figures", "jobs", "tables", "verdicts"]

TITLE = "UCI regression on the standard splits"
DATA = ("uci_regression",)
# RMSE and log-likelihood of MC dropout with a grid search, 20 splits (5 of protein).
PUBLISHED = {
    "bostonhousing": (2.90, -2.40),
    "concrete": (4.82, -2.93),
    "energy": (0.54, -1.21),
    "kin8nm": (0.08, 1.14),
    "naval-propulsion-plant": (0.00, 4.45),
    "power-plant": (4.01, -2.80),
    "protein-tertiary-structure": (4.27, -2.87),
    "wine-quality-red": (0.62, -0.93),
    "yacht": (0.67, -1.25),
}
OURS = "fit"  # what `aftermap.fit(model, train, validation)` gives without further options: the method that U1 and U2 judge
NAMES = {
    "network": "network",
    "fit": "am.fit",
    "kron": "Kronecker",
    "full": "full",
    "unlabelled": "am.fit without validation data",
    "ensemble": "ensemble",
    "dropout": "MC dropout",
    "vogn": "VOGN",
    "hfl": "Hessian-free",
}
TOLERANCE = 0.03


@dataclass(frozen=True)
class Settings:
    """The size of everything.

    Attributes:
        sets: The data sets.
        splits: How many of the standard splits.
        more_splits: The same for sets whose training part is small, without Hessian-free Laplace beyond ``splits``.
        few_rows: What counts as small.
        rows: The most training rows; None takes all.
        hidden: Hidden units.
        steps, epochs: Steps of Adam, and epochs at least.
        batch, rate: Batch size and first learning rate.
        decays: The weight decays that are tried, times N.
        members: Networks of an ensemble.
        drops: The probabilities of dropping that are tried.
        samples: Draws of dropout and VOGN.
        vogn_rates, vogn_steps: The learning rates of VOGN that are tried, and its steps.
        hfl_rows: The most training rows for Hessian-free Laplace.
        hfl_queries: Its test inputs.
        hfl_steps: Its steps at most for each fine-tuning.
    """

    sets: tuple[str, ...] = tuple(PUBLISHED)
    splits: int = 3
    more_splits: int = 5
    few_rows: int = 1600
    rows: int | None = None
    hidden: int = 50
    steps: int = 2500
    epochs: int = 6
    batch: int = 64
    rate: float = 1e-2
    decays: tuple[float, ...] = (0.03, 0.3, 3.0)
    members: int = 5
    drops: tuple[float, ...] = (0.01, 0.05, 0.1)
    samples: int = 100
    vogn_rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    vogn_steps: int = 2500
    hfl_rows: int = 1500
    hfl_queries: int = 8
    hfl_steps: int = 150


BUDGETS = {
    "stated": Settings(),
    "small": Settings(
        sets=("yacht", "wine-quality-red"),
        splits=1,
        more_splits=1,
        rows=60,
        hidden=4,
        steps=30,
        epochs=1,
        decays=(0.3,),
        members=2,
        drops=(0.05,),
        samples=5,
        vogn_rates=(3e-3,),
        vogn_steps=20,
        hfl_queries=2,
        hfl_steps=30,
    ),
}
# Sets whose training part has fewer than `few_rows` rows.
SMALL = ("bostonhousing", "concrete", "energy", "wine-quality-red", "yacht")


def scale(settings: Settings) -> str:
    """How much smaller everything is."""
    return (
        f"{settings.splits} to {settings.more_splits} of the 20 standard splits, and {settings.steps:,} steps of training or {settings.epochs} epochs, whichever is more "
        "(the published networks: up to 4,000 epochs)."
    )


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """Network and Laplace, then the other methods on the same splits."""
    for part, what in (("laplace", bayesian), ("others", others)):
        for name in settings.sets:
            for number in range(_splits(settings, name)):
                yield Job(f"{part}/{name}/split{number}", partial(_run, what, settings, data_dir, name, number))


def _splits(settings: Settings, name: str) -> int:
    return settings.more_splits if name in SMALL else settings.splits


def _run(what: Any, settings: Settings, data_dir: Path, name: str, number: int) -> dict[str, Any]:
    found = what(load(name, number, settings.rows, data_dir), settings, name)
    return {f"{method}_{key}": value for method, row in found.items() for key, value in row.items()}


# What came out


def _part(method: str) -> str:
    return "others" if method in BASELINES else "laplace"


def _numbers(results: Results, name: str, method: str, key: str) -> list[float]:
    return results.numbers(f"{_part(method)}/{name}/*", f"{method}_{key}")


def verdicts(results: Results) -> list[Verdict]:
    """U1 and U2, about the default call."""
    needs = {f"laplace/{name}/*": _splits(results.settings, name) for name in results.settings.sets}
    return judged(results, needs, ["U1", "U2"], lambda r: [_likelihood(r), _coverage(r)])


def _least(results: Results, of_nine: int) -> int:
    """So many of nine sets, or as large a share of fewer."""
    return math.ceil(of_nine / 9 * len(results.settings.sets))


def _likelihood(results: Results) -> Verdict:
    texts, behind = [], []
    for name in results.settings.sets:
        found = _numbers(results, name, OURS, "log_likelihood")
        texts.append(f"{name} {mean_and_error(found, 2)}")
        if round(fmean(found), 2) < PUBLISHED[name][1]:
            behind.append(name)
    count = len(results.settings.sets)
    enough = count - len(behind) >= _least(results, 6)
    ours = f"am.fit at least as good on {count - len(behind)} of {count}: " + ", ".join(texts)
    reason = f"behind on {', '.join(behind)}. {_why_behind(results, behind)}"
    return Verdict.of("U1", enough, ours, reason, results.settings.splits)


def _why_behind(results: Results, behind: list[str]) -> str:
    """How much of it is the error of the network, which no width of its intervals mends."""
    larger, apart = [], []
    for name in behind:
        rmse, found = (_numbers(results, name, OURS, key) for key in ("rmse", "log_likelihood"))
        if fmean(rmse) > PUBLISHED[name][0]:
            larger.append(name)
        of_error = [-math.log(error) - 0.5 * math.log(2 * math.pi * math.e) for error in rmse]
        apart.append(fmean(found) - fmean(of_error))
    return (
        f"On {len(larger)} of these {len(behind)} the error of the network is above the published one, too, and the likelihood is within "
        f"{max(map(abs, apart)):.2f} of that of a Gaussian with this error as its width"
    )


def _coverage(results: Results) -> Verdict:
    outside, texts = [], []
    above: dict[float, int] = dict.fromkeys(LEVELS, 0)
    close: dict[float, int] = dict.fromkeys(LEVELS, 0)
    for name in results.settings.sets:
        found = [fmean(_numbers(results, name, OURS, f"cover{level:.0%}".rstrip("%"))) for level in LEVELS]
        texts.append(f"{name} " + "/".join(f"{100 * value:.0f}" for value in found))
        for value, level in zip(found, LEVELS, strict=True):
            close[level] += abs(value - level) <= TOLERANCE
            above[level] += value > level + TOLERANCE
        if any(abs(value - level) > TOLERANCE for value, level in zip(found, LEVELS, strict=True)):
            outside.append(name)
    count = len(results.settings.sets)
    enough = count - len(outside) >= _least(results, 7)
    ours = f"am.fit within .03 at 50, 90 and 95 % on {count - len(outside)} of {count}: " + ", ".join(texts)
    by_level = ", ".join(f"{close[level]} at {level:.0%}" for level in LEVELS)
    reason = f"farther on {', '.join(outside)}. Level by level {by_level} of {count} sets are within .03; too much is covered on {above[0.5]} at 50 %, on {above[0.95]} at 95 %"
    if above[0.5] > above[0.95]:
        reason += ", as where errors have heavier tails than the Gaussian whose width is fitted to them: its middle is too wide where its ends are right"
    return Verdict.of("U2", enough, ours, reason, results.settings.splits)


def tables(results: Results) -> str:
    """Log-likelihood, RMSE and coverage of every method that was run, on every set."""
    lines: list[str] = []
    shown = [m for m in NAMES if m != "hfl" and _numbers(results, "*", m, "rmse")]
    for key, label, digits, published in (("log_likelihood", "Log-likelihood", 2, 1), ("rmse", "RMSE", 3, 0)):
        lines += [f"### {label}", "", "| set | published dropout | " + " | ".join(NAMES[m] for m in shown) + " |"]
        lines += ["|---" * (len(shown) + 2) + "|"]
        for name in results.settings.sets:
            cells = [mean_and_error(_numbers(results, name, m, key), digits) for m in shown]
            lines.append(f"| {name} | {PUBLISHED[name][published]:.2f} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["### Coverage of 50 / 90 / 95 % intervals", "", "| set | " + " | ".join(NAMES[m] for m in shown) + " |"]
    lines += ["|---" * (len(shown) + 1) + "|"]
    for name in results.settings.sets:
        lines.append(f"| {name} | " + " | ".join(_covered(results, name, m) for m in shown) + " |")
    lines += ["", *_hessian_free(results)]
    return "\n".join(lines)


def _covered(results: Results, name: str, method: str) -> str:
    found = [_numbers(results, name, method, f"cover{level:.0%}".rstrip("%")) for level in LEVELS]
    return " / ".join(f"{100 * fmean(f):.0f}" for f in found) if all(found) else "–"


def _hessian_free(results: Results) -> list[str]:
    if not _numbers(results, "*", "hfl", "queries"):
        return []
    lines = [
        "### Hessian-free Laplace beside the full Gauss-Newton matrix, both with the prior and noise of training, on the same few inputs",
        "",
    ]
    lines += ["| set | Hessian-free: log-likelihood | full: log-likelihood | flagged |", "|---|---|---|---|"]
    for name in results.settings.sets:
        ours, full = (_numbers(results, name, "hfl", key) for key in ("log_likelihood", "same_log_likelihood"))
        flagged, queries = (sum(_numbers(results, name, "hfl", key)) for key in ("flagged", "queries"))
        if queries:
            lines.append(
                f"| {name} | {mean_and_error(ours, 2)} | {mean_and_error(full, 2)} | {flagged:.0f} of {queries:.0f} |"
            )
    return lines


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Log-likelihood above the published one, and coverage, set by set."""
    done = [name for name in results.settings.sets if results.among(f"laplace/{name}/*")]
    if not done:
        return {}
    ax = axes(width=6.0, height=2.8)
    shown = ("network", "fit", "ensemble", "dropout", "vogn")
    for place, method in enumerate(shown):
        found = {i: _numbers(results, name, method, "log_likelihood") for i, name in enumerate(done)}
        at = {i: fmean(v) - PUBLISHED[done[i]][1] for i, v in found.items() if v}
        if not at:
            continue
        ax.plot(
            [i + 0.12 * (place - 2) for i in at],
            [max(v, -2.0) for v in at.values()],
            "osD^v"[place],
            color=CATEGORIES[place],
            markersize=4,
            label=NAMES[method],
        )
    ax.axhline(0, color="0.5", linewidth=0.8)
    ax.set_xticks(range(len(done)), [name.split("-")[0].removesuffix("housing") for name in done])
    finish(ax, y="log-likelihood above the published (nats)", legend=True)
    (folder / "likelihood.svg").write_text(save_svg(ax.figure), encoding="utf-8")
    ax = axes(width=6.0, height=2.4)
    for place, level in enumerate(LEVELS):
        heights = [fmean(_numbers(results, name, OURS, f"cover{level:.0%}".rstrip("%"))) for name in done]
        ax.plot(range(len(done)), heights, "o", color=CATEGORIES[place], markersize=4, label=f"{level:.0%}")
        ax.axhspan(level - TOLERANCE, level + TOLERANCE, color=CATEGORIES[place], alpha=0.15, linewidth=0)
    ax.set_xticks(range(len(done)), [name.split("-")[0].removesuffix("housing") for name in done])
    finish(ax, y="coverage on test data", legend=True)
    (folder / "coverage.svg").write_text(save_svg(ax.figure), encoding="utf-8")
    return {
        "likelihood.svg": "Mean log-likelihood on the test part above the published one of MC dropout; differences below −2 are drawn at −2.",
        "coverage.svg": "Coverage of the default call on the test part: 50, 90 and 95 % intervals, each with its band of ± .03.",
    }


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__], "uci_regression"))
