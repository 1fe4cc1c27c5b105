"""Classifiers tuned with and without validation labels: which rules help, on the development tasks of the quality benchmark.

    python -m experiments.tuning.classification --data-dir DATA [--tasks digits_mlp,satellite_mlp] [--seeds 0]

The networks are those of `benchmarks.quality`, from its cache. Every rule starts from the same Kronecker factors (the full matrix of small
networks); writes classification.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import aftermap as am
from aftermap.batches import iterate
from aftermap.laplace.dimension import match_dimension
from aftermap.laplace.fitted import Fitted
from aftermap.laplace.latents import output_gaussians
from aftermap.laplace.self_consistent import self_consistent_scale
from aftermap.metrics import auroc, ece, labelled_scores
from aftermap.predictive import Prediction
from benchmarks.quality.training import CACHE, DATA, Prepared, load_task

HERE = Path(__file__).resolve().parent
TASKS = ("digits_mlp", "satellite_mlp", "satellite1k_bn", "breast_cancer_logit", "banana_logit", "mnist2k_mlp")
LABELS = 100
Predict = Callable[[Tensor], Prediction]


def numbers(predict: Predict, task: Prepared) -> dict[str, float]:
    """NLL, ECE and mean AUROC of entropy over the sets of unusual inputs, on at most 500 test inputs and 200 unusual ones."""
    x, y = (part[:500] for part in task.splits.test)
    inside = predict(x)
    probabilities, labels = inside.mean, y
    if task.likelihood == "binary":
        probabilities, labels = torch.cat([1 - inside.mean, inside.mean], -1), y.long().reshape(-1)
    areas = [
        float(auroc(*labelled_scores(inside.score("entropy"), predict(other[:200]).score("entropy"))))
        for other in task.ood.values()
    ]
    return {
        "nll": -float(inside.log_prob(y).mean()),
        "ece": float(ece(probabilities, labels)),
        "auroc": sum(areas) / len(areas) if areas else float("nan"),
    }


def widened(la: am.Laplace, factor: float) -> None:
    """The precisions that the evidence found, times a factor, and the width that agrees with itself under them."""
    la.tune(method="evidence")
    fitted: Fitted = la.fitted
    precision = {n: factor * v for n, v in fitted.hyperparameters.prior.precision.items()}
    prior = fitted.hyperparameters.prior.with_precision(precision)
    hyperparameters = replace(fitted.hyperparameters, prior=prior)
    posterior = hyperparameters.applied_to(fitted.posterior, fitted.factors.curvature)

    def data() -> Any:
        return iterate(fitted.data or [], device=torch.device("cpu"))

    full = len(posterior.blocks) == 1 and posterior.blocks[0].source.joins_layers
    seeded = torch.Generator().manual_seed(0)
    matched = None if full else match_dimension(la.model, data(), la.base_likelihood, posterior, generator=seeded)
    dimension = 1.0 if matched is None else max(1.0, matched.factor)
    own = torch.Generator().manual_seed(0)
    gaussians = output_gaussians(la.predictor, data(), la.base_likelihood, [posterior], limit=500, generator=own)
    la.with_prior({n: v.reshape(-1)[0] for n, v in precision.items()})
    la.narrow(dimension * self_consistent_scale(gaussians, la.base_likelihood, dimension)[0])


def rules(la: am.Laplace, task: Prepared) -> dict[str, Callable[[], Any]]:
    labels = task.validation(LABELS, 0)
    return {
        "evidence": lambda: la.tune(method="evidence"),
        "matched dimension": lambda: la.tune(method="dimension"),
        "self-consistent (the rule)": lambda: la.tune(method="self_consistent"),
        "self-consistent, precisions × .3": lambda: widened(la, 0.3),
        "self-consistent, precisions × .1": lambda: widened(la, 0.1),
        f"{LABELS} labels: grid": lambda: la.tune(labels, method="grid"),
        f"{LABELS} labels (the rule)": lambda: la.tune(labels),
    }


def measure(name: str, seed: int, data_dir: Path, cache: Path) -> dict[str, dict[str, float]]:
    task = load_task(name, seed, data_dir=data_dir, cache=cache)
    size = sum(p.numel() for p in task.model.parameters())
    structure = "full" if size <= 1500 else "kron"
    la = am.Laplace(task.model, task.likelihood, structure=structure).fit(task.train, progress=False)
    found = {"network": numbers(la.predictor.map_prediction, task)}
    scaled = am.TemperatureScaling(task.model, task.likelihood).fit(task.validation(LABELS, 0))
    found[f"{LABELS} labels: temperature"] = numbers(scaled.predict, task)
    for rule, tune in rules(la, task).items():
        start = time.process_time()
        tune()
        seconds = time.process_time() - start
        found[rule] = {**numbers(la.predict, task), "seconds": seconds}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=DATA)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="0")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for name in options.tasks.split(","):
        for seed in map(int, options.seeds.split(",")):
            results[f"{name}/{seed}"] = measure(name, seed, options.data_dir, options.cache)
            print(name, seed, json.dumps(results[f"{name}/{seed}"]), flush=True)
    rounded = {
        task: {rule: {k: float(f"{v:.4g}") for k, v in row.items()} for rule, row in rows.items()}
        for task, rows in results.items()
    }
    (HERE / "classification.json").write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    print(table(results))


def table(results: dict[str, Any]) -> str:
    """Differences to the network, averaged over tasks, with the worst task."""
    lines = ["| rule | NLL mean / worst | ECE mean | AUROC mean / worst | seconds |", "|---|---|---|---|---|"]
    for rule in next(iter(results.values())):
        rows = [(task["network"], task[rule]) for task in results.values()]
        nll, area = ([row[key] - base[key] for base, row in rows] for key in ("nll", "auroc"))
        errors = [row["ece"] for _, row in rows]
        seconds = [row.get("seconds", 0.0) for _, row in rows]
        count = len(rows)
        lines.append(
            f"| {rule} | {sum(nll) / count:+.3f} / {max(nll):+.3f} | {sum(errors) / count:.3f} | "
            f"{sum(area) / count:+.3f} / {min(area):+.3f} | {sum(seconds) / count:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
