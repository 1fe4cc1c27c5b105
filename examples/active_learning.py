"""How many labels does MNIST need? Asking for those that teach most, against asking at random.

A small convolutional network is trained anew after every batch of labels, and its last layer made Bayesian. The pool's
images with the highest mutual information between label and weights are labelled next, until the test accuracy is 95 %. Idx files are read from the folder
AFTERMAP_DATA, by default ../shared/data beside the repository.

python examples/active_learning.py --quick                     # a minute: one seed, a small pool, few labels
python examples/active_learning.py --out active_learning       # five seeds; histories, table and picture

A run whose history is already in the folder is not repeated, so that several processes can share the seeds:
python examples/active_learning.py --out active_learning --seeds 0 1 2 & python examples/active_learning.py --out ... --seeds 3 4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.applications import JointInformation, active_learning
from aftermap.data import read_idx
from aftermap.laplace import Laplace

ROOT = Path(os.environ.get("AFTERMAP_DATA", Path(__file__).resolve().parents[1] / "../shared/data"))
MEAN, DEVIATION = 0.1307, 0.3081  # of the training images
PRIOR = 1.0  # precision of the weights' prior in training
TARGET = 0.95
Split = tuple[Tensor, Tensor]
Runs = dict[str, dict[int, dict[str, Any]]]


def load(part: str) -> Split:
    images = read_idx(ROOT / "mnist" / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(ROOT / "mnist" / f"{part}-labels-idx1-ubyte.gz")
    return (images[:, None].float() / 255 - MEAN) / DEVIATION, labels.long()


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 10),
    )


class Fit:
    """Trains a new network on the labels so far and makes its last layer Bayesian, with the prior from the evidence."""

    def __init__(self, steps: int):
        self.steps = steps

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator | None) -> Laplace:
        with torch.random.fork_rng(devices=[]):  # first weights and dropout come from the default generator
            torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
            model = network()
            optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.steps)
            for _ in range(self.steps):
                index = torch.randint(len(x), (min(len(x), 64),))
                optimiser.zero_grad()
                decay = sum(p.square().sum() for p in model.parameters()) * PRIOR / (2 * len(x))
                (F.cross_entropy(model(x[index]), y[index]) + decay).backward()
                optimiser.step()
                schedule.step()
        model.eval()
        laplace = Laplace(model, "classification", params="last_layer", prior_precision=PRIOR)
        return laplace.fit([(x, y)], progress=False).tune(method="evidence")


def run(acquisition: str, seed: int, train: Split, test: Split, budget: argparse.Namespace) -> dict[str, Any]:
    """One seed: the pool and the first labels are the same for every acquisition."""
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randperm(len(train[0]), generator=generator)[: budget.pool]
    first = torch.randperm(len(pool), generator=generator)[: budget.initial]
    history = active_learning(
        train[0][pool],
        train[1][pool],
        Fit(budget.steps),
        acquisition=JointInformation() if acquisition == "joint_information" else acquisition,
        batch=budget.batch,
        budget=budget.budget,
        initial=first,
        test=list(zip(test[0].split(1000), test[1].split(1000), strict=True)),
        until=lambda found: found["accuracy"] >= TARGET,
        generator=generator,
    )
    found = {"seconds": time.perf_counter() - start, "labels_to_target": history.labels_to(TARGET), **history.to_dict()}
    print(
        f"{acquisition}, seed {seed}: {history.accuracy[-1]:.4f} with {history.labels[-1]} labels; "
        f"{TARGET:.0%} with {found['labels_to_target']}; {found['seconds']:.0f} s",
        flush=True,
    )
    return found


def table(runs: Runs) -> str:
    """Labels to the target for every seed; '>' where the budget did not reach it."""
    seeds = sorted({seed for of in runs.values() for seed in of})
    lines = [f"labels to {TARGET:.0%} accuracy".ljust(32) + "".join(f"seed {s:<6}" for s in seeds) + "median"]
    for name, of in runs.items():
        values = [of[s]["labels_to_target"] for s in seeds if s in of]
        last = max(of[s]["labels"][-1] for s in of)
        shown = [f">{last}" if v is None else str(v) for v in values]
        middle = statistics.median([float("inf") if v is None else v for v in values])
        lines.append(name.ljust(32) + "".join(v.ljust(11) for v in shown) + (f"{middle:g}"))
    return "\n".join(lines)


def draw(runs: Runs, path: Path) -> None:
    """Accuracy over labels: each seed to its end, and the mean as long as all of them go on (matplotlib)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for i, (name, of) in enumerate(runs.items()):
        for found in of.values():
            labels, accuracy = found["labels"], found["metrics"]["accuracy"]
            axis.plot(labels, accuracy, color=f"C{i}", linewidth=0.7, alpha=0.5)
            axis.plot(labels[-1:], accuracy[-1:], color=f"C{i}", marker="o", markersize=4)
        rounds = min(len(found["labels"]) for found in of.values())  # a run ends when it has reached the target
        mean = torch.tensor([found["metrics"]["accuracy"][:rounds] for found in of.values()]).mean(0)
        title = f"{name.replace('_', ' ')} (mean of {len(of)})"
        axis.plot(next(iter(of.values()))["labels"][:rounds], mean, color=f"C{i}", linewidth=2, label=title)
    axis.axhline(TARGET, color="grey", linewidth=0.8)
    axis.set(xlabel="labels", ylabel="test accuracy", ylim=(0.7, 1.0), title="MNIST: which labels to ask for")
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> Runs:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 500 images, 60 labels, 60 steps")
    parser.add_argument("--acquisitions", nargs="+", default=["mutual_information", "random"])
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--pool", type=int, help="images to choose from")
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--initial", type=int, default=25)
    parser.add_argument("--budget", type=int, help="labels at most")
    parser.add_argument("--steps", type=int, help="of each training")
    parser.add_argument("--test", type=int, help="test images")
    parser.add_argument("--out", type=Path, help="folder for histories, table and picture")
    budget = parser.parse_args(arguments)
    defaults = (500, 60, 60, 500, [0]) if budget.quick else (5_000, 1_000, 300, 10_000, [0, 1, 2, 3, 4])
    for name, value in zip(("pool", "budget", "steps", "test", "seeds"), defaults, strict=True):
        if getattr(budget, name) is None:
            setattr(budget, name, value)
    train, test = load("train"), tuple(part[: budget.test] for part in load("t10k"))
    if budget.out:
        budget.out.mkdir(parents=True, exist_ok=True)
    runs: Runs = {}
    for seed in budget.seeds:
        for name in budget.acquisitions:
            file = budget.out / f"{name}_{seed}.json" if budget.out else None
            if file is not None and file.is_file():
                found = json.loads(file.read_text())
            else:
                found = run(name, seed, train, test, budget)
                if file is not None:
                    file.write_text(json.dumps(found) + "\n")
            runs.setdefault(name, {})[seed] = found
    text = table(runs)
    print(f"\n{text}")
    if budget.out:
        (budget.out / "table.txt").write_text(text + "\n")
        draw(runs, budget.out / "active_learning.png")
    return runs


if __name__ == "__main__":
    main()
