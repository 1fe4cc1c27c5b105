"""Small networks without labels: which covariance, and how far an alarm is believed where the data are known by heart.

    python -m experiments.tuning.small_networks --data-dir DATA [--seeds 1,2] [--kinds brief,decay,plain,heart]

Ten tables with 45 to 300 training rows, none of them a held-out task of the quality benchmark, with networks of at most 1,500 weights that were
trained briefly, under weight decay, plainly, or until they know their data by heart.

The bound was found on networks of seed 0. Written down before any other network was measured: it is taken if on networks of other seeds the worst
difference of NLL to the network falls, the mean does not rise by more than .002, the mean ECE does not rise, the mean AUROC of unusual inputs falls by
at most one point, and no network loses more than .05 nats. Writes small_networks.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import sklearn.datasets
import torch
from torch import Tensor

import aftermap as am
from aftermap.laplace import self_consistent
from aftermap.metrics import auroc, ece, labelled_scores
from benchmarks.quality.datasets import _table
from benchmarks.quality.networks import MLP
from benchmarks.quality.tasks import Training
from benchmarks.quality.training import DATA, train_network

HERE = Path(__file__).resolve().parent
# Table, training rows, hidden layers, whether one logit.
NETWORKS: tuple[tuple[str, int, tuple[int, ...], bool], ...] = (
    ("iris", 60, (50,), False),
    ("glass", 110, (30,), False),
    ("breast_cancer", 60, (30,), True),
    ("breast_cancer", 230, (20, 20), False),
    ("four_digits", 80, (15,), False),
    ("satellite", 120, (30,), False),
    ("banana", 100, (50,), True),
    ("moons", 45, (25, 25), True),
    ("blobs", 150, (40,), False),
    ("noisy", 300, (40,), False),
)
KINDS = {
    "brief": (150, 2e-3, 0.0),
    "decay": (800, 5e-3, 1e-2),
    "plain": (500, 5e-3, 0.0),
    "heart": (2500, 5e-3, 0.0),
}  # steps, rate, weight decay
RULES = {
    "full matrix (the rule)": {"structure": "full"},
    "full matrix, without the bound": {"structure": "full"},
    "Kronecker factors": {"structure": "kron"},
}


def table(name: str, folder: Path) -> tuple[Any, Any]:
    """Returns features and labels, of a table or drawn."""
    drawn = {
        "moons": lambda: sklearn.datasets.make_moons(2000, noise=0.25, random_state=7),
        "blobs": lambda: sklearn.datasets.make_blobs(2000, 10, centers=4, cluster_std=6.0, random_state=7),
        "noisy": lambda: sklearn.datasets.make_classification(
            2000, 20, n_informative=6, n_classes=3, flip_y=0.15, random_state=7
        ),
    }
    if name in drawn:
        return drawn[name]()
    x, y = _table(folder, "digits" if name == "four_digits" else name)
    return (x[y < 4], y[y < 4]) if name == "four_digits" else (x, y)


def splits(name: str, rows: int, binary: bool, seed: int, folder: Path) -> tuple[Any, Any, dict[str, Tensor], int]:
    """Returns training data, at most 1,000 test data, unusual inputs, and the number of outputs."""
    x, y = table(name, folder)
    y = np.unique(y, return_inverse=True)[1]
    order = np.random.RandomState(seed).permutation(len(y))
    chosen = order[:rows], order[rows : rows + 1000]
    mean, deviation = x[chosen[0]].mean(0), x[chosen[0]].std(0)
    deviation = np.where(deviation > 1e-6 * (abs(mean) + 1), deviation, 1.0)
    labels = y[:, None].astype(np.float32) if binary else y
    train, test = ((torch.from_numpy((x[c] - mean) / deviation).float(), torch.from_numpy(labels[c])) for c in chosen)
    draw = np.random.RandomState(seed + 1)
    low, high = train[0].amin(0), train[0].amax(0)
    uniform = torch.from_numpy(draw.uniform(-1, 1, (300, x.shape[1]))).float()
    unusual = {
        "scaled": 3 * test[0][:300],
        "shuffled": torch.stack([column[draw.permutation(len(column))] for column in test[0].T], 1)[:300],
        "box": (low + high) / 2 + 0.75 * (high - low) * uniform,
    }
    return train, test, unusual, 1 if binary else int(y.max()) + 1


def numbers(predict: Any, test: tuple[Tensor, Tensor], unusual: dict[str, Tensor]) -> dict[str, Any]:
    found = predict(test[0])
    p, labels = found.mean, test[1].long().reshape(-1)
    p = torch.cat([1 - p, p], -1) if p.shape[-1] == 1 else p
    inside = found.score("entropy")
    areas = [float(auroc(*labelled_scores(inside, predict(x).score("entropy")))) for x in unusual.values()]
    nll = -float(found.log_prob(test[1]).double().mean())
    return {"nll": nll, "ece": float(ece(p, labels)), "auroc": areas}


def measure(network: tuple[str, int, tuple[int, ...], bool], kind: str, seed: int, folder: Path) -> dict[str, Any]:
    name, rows, hidden, binary = network
    train, test, unusual, outputs = splits(name, rows, binary, seed, folder)
    steps, rate, decay = KINDS[kind]
    torch.manual_seed(seed)
    activation = "tanh" if len(name) % 2 else "relu"
    model = MLP(hidden, activation).build(train[0].shape[1:], outputs)
    training = Training(max(1, steps // math.ceil(rows / 64)), rate, 64, decay)
    likelihood = "binary" if binary else "classification"
    train_network(model, train, training, likelihood, torch.Generator().manual_seed(seed))
    batches = list(zip(train[0].split(250), train[1].split(250), strict=True))
    found: dict[str, Any] = {}
    for rule, options in RULES.items():
        la = am.Laplace(model, likelihood, **options).fit(batches, progress=False)  # type: ignore[arg-type]
        if not found:
            found["network"] = numbers(la.predictor.map_prediction, test, unusual)
        cost = math.inf if rule.endswith("without the bound") else self_consistent._COST
        with patch.object(self_consistent, "_COST", cost):
            la.tune()
        tuned: Any = la.tuning
        described = {"c": tuned.curvature, "correction": tuned.correction, "temperature": tuned.output_temperature}
        found[rule] = {**numbers(la.predict, test, unusual), **described, "cavities": tuned.check.difference}
    return found


def summary(results: dict[str, dict[str, Any]]) -> str:
    """Returns a table of differences to the network: NLL, ECE and AUROC of unusual inputs, for each seed and kind of training."""
    lines = [
        "| seed, training | rule | networks | NLL mean / worst | above +.015 | ECE mean / worst | AUROC mean / worst |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    groups = sorted({tuple(key.split("/")[1:]) for key in results}, key=lambda g: (g[1], list(KINDS).index(g[0])))
    seeds = sorted({seed for _, seed in groups})
    for kind, seed in [*groups, *(("all", seed) for seed in seeds)]:
        rows = [r for key, r in results.items() if key.endswith(f"/{seed}") and kind in ("all", key.split("/")[1])]
        for rule in RULES:
            nll, error = ([r[rule][c] - r["network"][c] for r in rows] for c in ("nll", "ece"))
            areas = [a - b for r in rows for a, b in zip(r[rule]["auroc"], r["network"]["auroc"], strict=True)]
            lines.append(
                f"| {seed}, {kind} | {rule} | {len(rows)} | {statistics.fmean(nll):+.3f} / {max(nll):+.3f} | "
                f"{statistics.fmean(d > 0.015 for d in nll):.0%} | {statistics.fmean(error):+.3f} / {max(error):+.3f} | "
                f"{statistics.fmean(areas):+.3f} / {min(areas):+.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=DATA)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--output", type=Path, default=HERE, help="the folder for small_networks.json, which grows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = options.output / "small_networks.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for seed in map(int, options.seeds.split(",")):
        for kind in options.kinds.split(","):
            for network in NETWORKS:
                key = f"{network[0]}{network[1]}/{kind}/{seed}"
                if key not in results:
                    results[key] = _rounded(measure(network, kind, seed, options.data_dir))
                    path.parent.mkdir(parents=True, exist_ok=True)
                    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in results.items())
                    path.write_text(f"{{\n{lines}\n}}\n")
    print(summary(results))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else float(f"{value:.4g}")


if __name__ == "__main__":
    main()
