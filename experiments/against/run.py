"""What other papers say against Laplace approximations: that curvature hurts, that ensembles need none, that nothing separates two kinds of uncertainty.

    python -m experiments.against.run [--budget small]

The tasks are those of benchmarks/quality that have unusual inputs and whose networks train in seconds. Every Laplace approximation is tuned
by the default rule on the same 300 (or as many as there are) validation data.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.analysis.figures import CATEGORIES, axes, finish, save_svg
from aftermap.predictive import Prediction
from benchmarks.quality import Prepared, load_task
from benchmarks.quality.identity import register_identity
from benchmarks.quality.measure import predict_all
from benchmarks.quality.training import cut, train_network
from experiments.framework import Job, Paired, Results, Verdict, judged, mean_and_error, paired, run, work_folder

__all__ = ["BUDGETS", "DATA", "TITLE", "figures", "jobs", "tables", "verdicts"]

TITLE = "What others say against Laplace"
DATA = ("mnist", "fashion-mnist", "kmnist", "notmnist", "uci_classification")
METHODS = {
    "network": "network",
    "kron": "Laplace, Kronecker",
    "identity": "Laplace, identity curvature",
    "ensemble": "ensemble",
    "mixture": "mixture of Laplace",
    "dropout": "MC dropout",
    "field": "mean-field variational",
}
SCORES = ("entropy", "mutual_information")
SEPARATE = 0.5  # a rank correlation below this says that the two parts are two


@dataclass(frozen=True)
class Settings:
    """The size of everything.

    Attributes:
        tasks: Tasks of the quality benchmark.
        seeds: Cuts of the data and starts.
        members: Networks of the ensemble and of the mixture.
        labels: Validation data that every Laplace approximation is tuned on.
        dropping: The probability of dropping.
        field_epochs: Epochs of mean-field inference, from the trained network on.
        samples: Draws of dropout and mean-field inference.
        test: Test inputs at most, and inputs of each unusual kind.
    """

    tasks: tuple[str, ...] = ("digits_mlp", "satellite_mlp", "vehicle_mlp")
    seeds: int = 3
    members: int = 5
    labels: int = 300
    dropping: float = 0.2
    field_epochs: int = 6
    samples: int = 30
    test: int = 500


BUDGETS = {
    "stated": Settings(),
    "small": Settings(tasks=("vehicle_mlp",), seeds=1, members=2, labels=30, field_epochs=1, samples=4, test=30),
}


def scale(settings: Settings) -> str:
    """How much smaller everything is."""
    return f"{len(settings.tasks)} small tasks with {settings.seeds} seeds, where the papers have ResNets on CIFAR and ImageNet."


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """Every method on each task, seed by seed."""
    for name in settings.tasks:
        for seed in range(settings.seeds):
            yield Job(f"task/{name}/seed{seed}", partial(_task, settings, data_dir, name, seed))


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _laplace(model: nn.Module, task: Prepared, labels: Any, structure: str) -> am.Laplace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        la = am.Laplace(model, task.likelihood, structure=structure).fit(task.train, progress=False)
        return la.tune(labels)


def _predictors(settings: Settings, task: Prepared, seed: int) -> dict[str, Any]:
    labels = task.validation(min(settings.labels, len(task.splits.pool[0])), 0)
    members, _ = task.members(settings.members)
    components = [_laplace(model, task, labels, "kron") for model in members]
    shape = tuple(task.splits.train[0].shape[1:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * (seed + 1))
        fresh = task.task.network.build(shape, task.splits.outputs)
        dropping = am.MCDropout(fresh, task.likelihood, insert=settings.dropping, samples=settings.samples)
        train_network(dropping.model, task.splits.train, task.task.training, task.likelihood, _generator(seed))
    field = am.MeanField(task.model, task.likelihood, samples=settings.samples)
    batches = cut(*task.splits.train, task.task.training.batch)
    field.fit(batches, epochs=settings.field_epochs, generator=_generator(seed), progress=False)
    return {
        "network": am.baselines.Deterministic(task.model, task.likelihood),
        "kron": components[0],
        "identity": _laplace(task.model, task, labels, register_identity()),
        "ensemble": am.Ensemble(members, task.likelihood),
        "mixture": am.Mixture(components, weights="uniform"),
        "dropout": dropping,
        "field": field,
    }


def _predict(predictor: Any, x: Tensor) -> Prediction:
    return predict_all(lambda piece: predictor.predict(piece, generator=_generator()), x)


def _area(usual: Prediction, unusual: Prediction, score: str) -> float:
    outside = torch.cat([torch.zeros(len(usual)), torch.ones(len(unusual))]).bool()
    return am.metrics.auroc(torch.cat([usual.score(score), unusual.score(score)]), outside)


def _task(settings: Settings, data_dir: Path, name: str, seed: int) -> dict[str, Any]:
    task = load_task(name, seed, data_dir=data_dir, cache=work_folder("networks"))
    x, y = (values[: settings.test] for values in task.test)
    numbers = {}
    for method, predictor in _predictors(settings, task, seed).items():
        usual = _predict(predictor, x)
        others = {kind: _predict(predictor, inputs[: settings.test]) for kind, inputs in task.ood.items()}
        row: dict[str, Any] = {
            "accuracy": float((usual.mean.argmax(-1) == y).double().mean()),
            "nll": -float(usual.log_prob(y).double().mean()),
        }
        for score in SCORES if method != "network" else SCORES[:1]:
            row[f"auroc_{score}"] = fmean(_area(usual, other, score) for other in others.values())
        if method != "network":
            row["rank_in"] = am.metrics.rank_correlation(usual.epistemic, usual.aleatoric)
            row["rank_out"] = fmean(am.metrics.rank_correlation(o.epistemic, o.aleatoric) for o in others.values())
        numbers[method] = row
    return numbers


# What came out


def _values(results: Results, task: str, method: str, key: str) -> list[float]:
    return [value[method][key] for _, value in sorted(results.among(f"task/{task}/*").items())]


def _difference(results: Results, task: str, first: str, second: str, key: str) -> Paired:
    return paired(_values(results, task, first, key), _values(results, task, second, key))


def verdicts(results: Results) -> list[Verdict]:
    """A1 to A3."""
    needs = {f"task/{name}/*": results.settings.seeds for name in results.settings.tasks}
    return judged(results, needs, ["A1", "A2", "A3"], lambda r: [_identity(r), _ensembles(r), _parts(r)])


def _identity(results: Results) -> Verdict:
    """Identity curvature finds more by the entropy, which is the score of the claim; mutual information and NLL stand beside."""
    texts, conditions, reverse = [], [], []
    for task in results.settings.tasks:
        area, other, nll = (
            _difference(results, task, "identity", "kron", key)
            for key in ("auroc_entropy", "auroc_mutual_information", "nll")
        )
        conditions.append(area.higher)
        if area.lower:
            reverse.append(task)
        texts.append(f"{task} AUROC {area} (mutual information {other}), NLL {nll}")
    return Verdict.of(
        "A1",
        conditions,
        "identity less Kronecker, tuned alike: " + "; ".join(texts),
        f"AUROC higher on {sum(conditions)} of {len(conditions)} tasks, lower on {len(reverse)}, no clear difference on the others",
        results.settings.seeds,
    )


def _ensembles(results: Results) -> Verdict:
    texts, inside, outside = [], [], []
    for task in results.settings.tasks:
        nll = _difference(results, task, "ensemble", "mixture", "nll")
        area = _difference(results, task, "mixture", "ensemble", "auroc_entropy")
        inside.append(nll.lower)
        outside.append(area.higher)
        texts.append(
            f"{task} NLL of the ensemble less the mixture {nll}, AUROC of the mixture less the ensemble {area}"
        )
    return Verdict.of(
        "A2",
        [*inside, *outside],
        "; ".join(texts),
        f"the ensemble has the lower NLL on {sum(inside)}, the mixture the higher AUROC on {sum(outside)} of {len(inside)} tasks",
        results.settings.seeds,
    )


def _parts(results: Results) -> Verdict:
    texts, conditions, separated = [], [], []
    for method, label in METHODS.items():
        if method == "network":
            continue
        words = []
        for key, place in (("rank_in", "in"), ("rank_out", "out of")):
            found = [fmean(_values(results, task, method, key)) for task in results.settings.tasks]
            conditions.append(fmean(found) >= SEPARATE)
            words.append(f"{fmean(found):.2f} ({min(found):.2f} to {max(found):.2f})")
            if not conditions[-1]:
                separated.append(f"{label} {place} distribution ({fmean(found):.2f})")
        texts.append(f"{label} {words[0]}, {words[1]}")
    return Verdict.of(
        "A3",
        conditions,
        "rank correlation of epistemic and aleatoric part in, out of distribution, mean (range) over tasks: "
        + "; ".join(texts),
        f"below {SEPARATE}: " + "; ".join(separated),
        results.settings.seeds,
    )


def tables(results: Results) -> str:
    """Every method on every task."""
    lines: list[str] = []
    for task in results.settings.tasks:
        if not results.among(f"task/{task}/*"):
            continue
        lines += [f"### {task}", ""]
        lines += [
            "| method | accuracy | NLL | AUROC (entropy) | AUROC (mutual information) | rank correlation of the parts, in | out |"
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        for method, label in METHODS.items():
            row = [value[method] for _, value in sorted(results.among(f"task/{task}/*").items())]
            keys = ("accuracy", "nll", "auroc_entropy", "auroc_mutual_information", "rank_in", "rank_out")
            cells = [mean_and_error([r[k] for r in row if k in r], 3) for k in keys]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def figures(results: Results, folder: Path) -> dict[str, str]:
    """AUROC of every method, and the rank correlation of its two parts, task by task."""
    tasks = [t for t in results.settings.tasks if results.among(f"task/{t}/*")]
    if not tasks:
        return {}
    captions = {}
    for file, key, label, caption in (
        (
            "auroc.svg",
            "auroc_entropy",
            "AUROC, unusual inputs by entropy",
            "Unusual inputs found by the entropy of the prediction, mean over kinds of inputs and seeds.",
        ),
        (
            "parts.svg",
            "rank_in",
            "rank correlation",
            "Rank correlation of the epistemic with the aleatoric part on test inputs: at 1 they say the same.",
        ),
    ):
        ax = axes(width=6.0, height=2.8)
        shown = [m for m in METHODS if key in next(iter(results.values.values()))[m]]
        for place, method in enumerate(shown):
            heights = [fmean(_values(results, task, method, key)) for task in tasks]
            at = [i + 0.1 * (place - len(shown) / 2) for i in range(len(tasks))]
            ax.plot(at, heights, "osD^vPX"[place], color=CATEGORIES[place], markersize=4, label=METHODS[method])
        ax.set_xticks(range(len(tasks)), tasks)
        finish(ax, y=label).legend(fontsize=6, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
        (folder / file).write_text(save_svg(ax.figure), encoding="utf-8")
        captions[file] = caption
    return captions


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__], "against"))
