"""Hessian-free Laplace (McInerney and Kallus 2024): does it have the variance of the exact Hessian, and does it predict as well?

python -m experiments.mcinerney2024.run [--budget small]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aftermap.likelihoods import Gaussian
from experiments.framework import Job, Results, Verdict, judged, mean_and_error, paired, run
from experiments.mcinerney2024 import figures as drawings
from experiments.mcinerney2024.methods import APPROXIMATIONS, METHODS, predictions, spread, wide_network
from experiments.mcinerney2024.problems import (
    GAP,
    Problem,
    classification_split,
    gap_split,
    network,
    regression_split,
    settle,
    sine,
    spread_features,
    train,
    with_noise_from_data,
)

TITLE = "Hessian-free Laplace (McInerney and Kallus 2024)"
DATA = ("uci_regression", "uci_classification")
NAMES = {
    "hfl": "Hessian-free",
    "exact": "exact Hessian",
    "ggn": "Gauss-Newton",
    "kron": "Kronecker",
    "diagonal": "diagonal",
    "last_layer": "last layer",
}
NETWORKS: dict[str, tuple[tuple[int, ...], str]] = {
    "tanh-10": ((10,), "tanh"),
    "tanh-6-6": ((6, 6), "tanh"),
    "silu-10": ((10,), "silu"),
}
# Above the 99 % point of the studentised range of nine groups with three seeds each (5.8).
RANGE = 6.0


@dataclass(frozen=True)
class Settings:
    """The size of everything.

    Attributes:
        seeds: Seeds of the sine.
        queries: Inputs between -2 and 2 of the sine.
        hidden: Hidden units of the network on the sine.
        tasks, networks: The tasks and networks of the table of approximations.
        table_seeds, table_queries, table_rows: Seeds, inputs and training rows of each of its cells.
        gap_sets, gap_features, gap_queries, gap_rows, gap_hidden: The UCI sets with a gap, in how many features of each a gap is
            made, test inputs, training rows at most, hidden units.
        wide, wide_rows, wide_queries, wide_seeds: Width of both hidden layers, rows, inputs and seeds of the large network.
        steps, wide_steps: Steps of L-BFGS at most, before Newton's and of the large network.
        prior: The precision of the prior.
    """

    seeds: int = 8
    queries: int = 21
    hidden: int = 20
    tasks: tuple[str, ...] = ("sine", "boston", "banana")
    networks: tuple[str, ...] = tuple(NETWORKS)
    table_seeds: int = 3
    table_queries: int = 8
    table_rows: int = 120
    gap_sets: tuple[str, ...] = ("bostonHousing", "concrete", "power-plant")
    gap_features: int = 3
    gap_queries: int = 12
    gap_rows: int = 200
    gap_hidden: int = 10
    wide: int = 220
    wide_rows: int = 20
    wide_queries: int = 12
    wide_seeds: int = 3
    steps: int = 1000
    wide_steps: int = 2000
    prior: float = 1.0


BUDGETS = {
    "stated": Settings(),
    "small": Settings(
        seeds=1,
        queries=5,
        hidden=6,
        tasks=("boston", "banana"),
        networks=("tanh-6-6",),
        table_seeds=1,
        table_queries=2,
        table_rows=30,
        gap_sets=("bostonHousing", "concrete"),
        gap_features=1,
        gap_queries=3,
        gap_rows=30,
        gap_hidden=3,
        wide=5,
        wide_rows=30,
        wide_queries=4,
        wide_seeds=1,
        steps=200,
    ),
}
# Where fine-tuning stops: its gradient relative to the push.
TOLERANCE, WIDE_TOLERANCE = 1e-5, 1e-3


def scale(settings: Settings) -> str:
    """How much smaller everything is."""
    return (
        "the document's own data were not at hand; networks are small where the exact Hessian is needed, UCI sets have at most "
        f"{settings.gap_rows} training rows, and the large network has {settings.wide_rows}."
    )


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """The parts: the sine (H1, H3), the table of approximations (H2, H6), gaps (H4), the large network (H5)."""
    for seed in range(settings.seeds):
        yield Job(f"sine/seed{seed}", lambda s=seed: _sine(settings, s))
    for name in settings.gap_sets:
        for place in range(settings.gap_features):
            yield Job(f"gap/{name}/gap{place}", lambda n=name, p=place: _gap(settings, data_dir, n, p))
    for task in settings.tasks:
        for name in settings.networks:
            for seed in range(settings.table_seeds):
                yield Job(
                    f"table/{task}/{name}/seed{seed}", lambda t=task, n=name, s=seed: _cell(settings, data_dir, t, n, s)
                )
    for seed in range(settings.wide_seeds):
        yield Job(f"wide/seed{seed}", lambda s=seed: _wide(settings, data_dir, s))


def _trained(problem: Problem, hidden: tuple[int, ...], activation: str, settings: Settings, seed: int) -> Any:
    model = train(network(problem, hidden, activation, seed), problem, settings.prior, settings.steps)
    return settle(model, problem, settings.prior)


def _sine(settings: Settings, seed: int) -> dict[str, Any]:
    problem = sine(seed, settings.queries)
    model = _trained(problem, (settings.hidden,), "tanh", settings, seed)
    found, facts = predictions(model, problem, settings.prior, TOLERANCE)
    x, truth, mean = problem.queries[:, 0], problem.answers[:, 0], found["hfl"].mean[:, 0]
    gap = (x > GAP[0]) & (x < GAP[1])
    numbers: dict[str, Any] = {**facts, "x": x, "mean": mean}
    for name, prediction in found.items():
        sd = spread(prediction)
        covered = (truth - mean).abs() <= 1.96 * sd
        numbers |= {f"sd_{name}": sd, f"gap_{name}": float(covered[gap].double().mean())}
    return numbers


def _cell(settings: Settings, data_dir: Path, task: str, name: str, seed: int) -> dict[str, Any]:
    rows, count = settings.table_rows, settings.table_queries
    if task == "sine":
        problem = sine(seed, count)
    elif task == "boston":
        problem = regression_split(data_dir, "bostonHousing", seed, count, rows)
        problem = replace(problem, likelihood=Gaussian(noise=0.3))
    else:
        problem = classification_split(data_dir, task, seed, count, rows)
    hidden, activation = NETWORKS[name]
    model = _trained(problem, hidden, activation, settings, seed)
    found, facts = predictions(model, problem, settings.prior, TOLERANCE)
    exact = spread(found["exact"])
    ratios = {n: (spread(found[n]) / exact).log() for n in METHODS if n != "exact"}
    return facts | _judged(found, problem) | {f"log_ratio_{n}": float(r.mean()) for n, r in ratios.items()}


def _judged(found: dict[str, Any], problem: Problem) -> dict[str, float]:
    numbers = {}
    for name, prediction in found.items():
        numbers[f"nll_{name}"] = -float(prediction.log_prob(problem.answers).mean())
        if prediction.kind == "regression":
            lower, upper = prediction.interval(0.95)
            inside = (problem.answers >= lower) & (problem.answers <= upper)
            numbers |= {
                f"coverage_{name}": float(inside.double().mean()),
                f"sd_{name}": float(spread(prediction).mean()),
            }
    return numbers


def _gap(settings: Settings, data_dir: Path, name: str, place: int) -> dict[str, Any]:
    feature = spread_features(data_dir, name, settings.gap_features)[place]
    problem = gap_split(data_dir, name, feature, place, settings.gap_queries, settings.gap_rows)
    hidden = (settings.gap_hidden,)
    problem = with_noise_from_data(problem, hidden, "tanh", settings.prior, 200, place)
    model = _trained(problem, hidden, "tanh", settings, place)
    found, facts = predictions(model, problem, settings.prior, TOLERANCE)
    rmse = (found["hfl"].mean - problem.answers).square().mean().sqrt()
    noise = float(problem.likelihood.noise)  # type: ignore[attr-defined]
    inside = ((found["hfl"].mean - problem.answers).abs() <= 1.96 * noise).double().mean()
    network_nll = math.log(noise) + 0.5 * math.log(2 * math.pi) + float(rmse) ** 2 / (2 * noise**2)
    return {
        **facts,
        **_judged(found, problem),
        "feature": feature,
        "noise": noise,
        "rmse": float(rmse),
        "coverage_network": float(inside),
        "nll_network": network_nll,
    }


def _wide(settings: Settings, data_dir: Path, seed: int) -> dict[str, Any]:
    return wide_network(
        data_dir,
        "concrete",
        seed,
        width=settings.wide,
        rows=settings.wide_rows,
        queries=settings.wide_queries,
        prior=settings.prior,
        steps=settings.wide_steps,
        tolerance=WIDE_TOLERANCE,
    )


# What came out


def _errors(results: Results, method: str) -> torch.Tensor:
    """Relative errors of the variance against the exact Hessian, at every query of every seed; what is missing is infinite."""
    found = []
    for value in results.among("sine/*").values():
        for ours, exact in list(zip(value[f"sd_{method}"], value["sd_exact"], strict=True)):
            found.append(math.inf if ours is None else abs((ours / exact) ** 2 - 1))
    return torch.tensor(found, dtype=torch.float64)


def verdicts(results: Results) -> list[Verdict]:
    """The six claims; a part of which jobs are missing is not judged."""
    settings = results.settings
    parts = {
        "sine/*": (settings.seeds, {"H1": _h1, "H3": _h3}),
        "table/*/*/*": (len(settings.tasks) * len(settings.networks) * settings.table_seeds, {"H2": _h2, "H6": _h6}),
        "gap/*/*": (len(settings.gap_sets) * settings.gap_features, {"H4": _h4}),
        "wide/*": (settings.wide_seeds, {"H5": _h5}),
    }
    return [
        verdict
        for part, (count, judges) in parts.items()
        for id, judge in judges.items()
        for verdict in judged(results, {part: count}, (id,), lambda r, judge=judge: [judge(r)])
    ]


def _h1(results: Results) -> Verdict:
    ours, ggn = _errors(results, "hfl"), _errors(results, "ggn")
    seeds = len(results.among("sine/*"))
    return Verdict.of(
        "H1",
        [float(ours.max()) <= 0.05, float(ours.median()) <= 0.05],
        f"largest error {float(ours.max()):.2g}, median {float(ours.median()):.2g} at {len(ours)} queries; "
        f"Gauss-Newton: {float(ggn.max()):.2g}, {float(ggn.median()):.2g}",
        f"{int((ours > 0.05).sum())} of {len(ours)} queries differ by more than 5 %",
        seeds,
    )


def _cells(results: Results, method: str) -> dict[tuple[str, str], list[float]]:
    settings = results.settings
    places = [(t, n) for t in settings.tasks for n in settings.networks]
    return {(t, n): results.numbers(f"table/{t}/{n}/*", f"log_ratio_{method}") for t, n in places}


def _h2(results: Results) -> Verdict:
    conditions, words = [], []
    for method in APPROXIMATIONS:
        cells = list(_cells(results, method).values())
        means = [sum(c) / len(c) for c in cells]
        free = sum(len(c) - 1 for c in cells)
        within = sum((v - m) ** 2 for c, m in zip(cells, means, strict=True) for v in c) / max(1, free)
        error = math.sqrt(within * sum(1 / len(c) for c in cells) / len(cells))
        conditions.append(max(means) - min(means) > RANGE * error)
        words.append(f"{NAMES[method]} {math.exp(min(means)):.2f} to {math.exp(max(means)):.2f}")
    return Verdict.of(
        "H2",
        conditions,
        f"standard deviation over that of the exact Hessian, mean of each of {len(cells)} settings: "
        + ", ".join(words),
        f"the settings differ by more than {RANGE:g} standard errors for {sum(conditions)} of {len(conditions)} approximations",
        results.settings.table_seeds,
    )


def _h3(results: Results) -> Verdict:
    found = {m: results.numbers("sine/*", f"gap_{m}") for m in METHODS}
    mean = sum(found["hfl"]) / len(found["hfl"])
    return Verdict.of(
        "H3",
        mean >= 0.95,
        ", ".join(f"{NAMES[m]} {mean_and_error(v, 2)}" for m, v in found.items()),
        f"the coverage is {mean:.2f}",
        len(found["hfl"]),
    )


def _h4(results: Results) -> Verdict:
    """Coverage of at least .9 on average; in each set a coverage not lower and an NLL not higher than any approximation's."""
    conditions, lost = [], []
    for name in results.settings.gap_sets:
        for what, worse in (("coverage", "lower"), ("nll", "higher")):
            ours = results.numbers(f"gap/{name}/*", f"{what}_hfl")
            bad = [
                m
                for m in APPROXIMATIONS
                if getattr(paired(ours, results.numbers(f"gap/{name}/*", f"{what}_{m}")), worse)
            ]
            conditions.append(not bad)
            lost += [f"{name}: {what} {worse} than that of {NAMES[m]}" for m in bad]
    coverage = results.numbers("gap/*/*", "coverage_hfl")
    mean = sum(coverage) / len(coverage)
    conditions.append(mean >= 0.9)
    if mean < 0.9:
        lost.append(f"coverage of 95 % intervals {mean:.2f} on average")
    words = [
        f"{NAMES[m]} {results.text('gap/*/*', f'coverage_{m}', 2)} / {results.text('gap/*/*', f'nll_{m}', 2)}"
        for m in METHODS
    ]
    return Verdict.of(
        "H4",
        conditions,
        f"coverage of 95 % intervals / NLL over {len(results.settings.gap_sets)} sets: " + ", ".join(words),
        "; ".join(lost),
        results.settings.gap_features,
    )


def _h5(results: Results) -> Verdict:
    def rank(method: str) -> list[float]:
        return results.numbers("wide/*", f"rank_{method}")

    def seconds(what: str) -> str:
        values = results.numbers("wide/*", f"seconds_{what}")
        return f"{sum(values) / len(values):.2g}"

    weights = int(results.numbers("wide/*", "weights")[0])
    flagged, asked = (int(sum(results.numbers("wide/*", name))) for name in ("flagged", "functionals"))
    means = {m: sum(rank(m)) / len(rank(m)) for m in ("hfl", "amortised_sign")}
    return Verdict.of(
        "H5",
        [means["hfl"] >= 0.9, means["amortised_sign"] >= 0.9],
        f"{weights:,} weights; rank correlation: two fine-tunings per query {mean_and_error(rank('hfl'), 2)} ({flagged} of {asked} queries flagged), amortised over the training "
        f"data {mean_and_error(rank('amortised_sign'), 2)} (all signs positive {mean_and_error(rank('amortised_ones'), 2)}, over the queries "
        f"{mean_and_error(rank('amortised_queries'), 2)}), Kronecker {mean_and_error(rank('kron'), 2)}, Gauss-Newton "
        f"{mean_and_error(rank('ggn'), 2)}. Seconds per query: {seconds('hfl')}; amortised {seconds('amortised')} after {seconds('amortised_once')} "
        f"once; conjugate gradients {seconds('cg')} (Hessian), {seconds('ggn')} (Gauss-Newton); Kronecker {seconds('kron')}",
        "; ".join(
            words
            for words, m in (
                ("two point estimates per query do not order the inputs as the exact Hessian does", "hfl"),
                (
                    "the amortised form gives sums of covariances, which do not order the inputs as the variances do",
                    "amortised_sign",
                ),
            )
            if means[m] < 0.9
        ),
        results.settings.wide_seeds,
    )


def _h6(results: Results) -> Verdict:
    worst: dict[str, float] = {}
    for task in results.settings.tasks:
        ours, exact = (results.numbers(f"table/{task}/*/*", f"nll_{m}") for m in ("hfl", "exact"))
        worst[task] = max(abs(a - b) for a, b in zip(ours, exact, strict=True))
    return Verdict.of(
        "H6",
        [w <= 0.05 for w in worst.values()],
        "largest difference of NLL over networks and seeds: " + ", ".join(f"{n} {w:.2g}" for n, w in worst.items()),
        "above 0.05 on " + ", ".join(n for n, w in worst.items() if w > 0.05),
        results.settings.table_seeds,
    )


def tables(results: Results) -> str:
    """The table of approximations (H2), and the gaps set by set (H4)."""
    methods = [m for m in METHODS if m != "exact"]
    lines = ["### Standard deviation over that of the exact Hessian (H2)", ""]
    lines += ["| task | network | " + " | ".join(NAMES[m] for m in methods) + " |", "|---" * (len(methods) + 2) + "|"]
    for task in results.settings.tasks:
        for name in results.settings.networks:
            cells = [results.numbers(f"table/{task}/{name}/*", f"log_ratio_{m}") for m in methods]
            ratios = [mean_and_error([math.exp(v) for v in c], 2) for c in cells]
            lines.append(f"| {task} | {name} | " + " | ".join(ratios) + " |")
    lines += ["", "### UCI sets with a gap (H4): coverage of 95 % intervals, NLL", ""]
    shown = ("network", *METHODS)
    head = ["network alone", *(NAMES[m] for m in METHODS)]
    lines += ["| set | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for name in results.settings.gap_sets:
        texts = [
            f"{results.text(f'gap/{name}/*', f'coverage_{m}', 2)}, {results.text(f'gap/{name}/*', f'nll_{m}', 2)}"
            for m in shown
        ]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Draws four figures; returns their captions."""
    return drawings.draw(results, folder, NAMES)


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__], "mcinerney2024"))
