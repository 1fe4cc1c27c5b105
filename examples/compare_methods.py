"""Ten ways to predict on Fashion-MNIST, side by side: what do they know, and what do they find unusual?

MNIST, KMNIST and notMNIST are the data that a network for clothes should doubt. Idx files are read from the folder
AFTERMAP_DATA, by default ../shared/data beside the repository.

python examples/compare_methods.py --quick                     # a few minutes: small data, few epochs
python examples/compare_methods.py --out comparison            # the whole comparison, with JSON and a picture
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.baselines import SWAG, Deterministic, Ensemble, MCDropout, MeanField, TemperatureScaling
from aftermap.data import read_idx
from aftermap.errors import StatisticalWarning
from aftermap.evaluation import Comparison, Results, compare, evaluate
from aftermap.laplace import Laplace
from aftermap.optim import VOGN, warmup

ROOT = Path(os.environ.get("AFTERMAP_DATA", Path(__file__).resolve().parents[1] / "../shared/data"))
UNUSUAL = ("mnist", "kmnist", "notmnist")
MEAN, DEVIATION = 0.286, 0.353  # of the training images of Fashion-MNIST, for all sets
BATCH = 64
FEWEST = 30  # images that a bin of the reliability diagram must hold to be drawn
Split = tuple[Tensor, Tensor]
COLUMNS = ["accuracy", "nll", "ece", "brier", "auroc_errors", *(f"{name}/entropy/auroc" for name in UNUSUAL)]


def load(name: str, part: str = "t10k", limit: int | None = None) -> Split:
    images = read_idx(ROOT / name / f"{part}-images-idx3-ubyte.gz")[:limit]
    labels = read_idx(ROOT / name / f"{part}-labels-idx1-ubyte.gz")[:limit]
    return (images[:, None].float() / 255 - MEAN) / DEVIATION, labels.long()


def network() -> nn.Module:
    """A LeNet with dropout, 61,326 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(84, 10),
    )


class Batches:
    """Batches in a new order at every pass."""

    def __init__(self, data: Split, size: int, seed: int):
        self.data, self.size, self.generator = data, size, torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self.data[0]) // self.size)

    def __iter__(self) -> Any:
        x, y = self.data
        for index in torch.randperm(len(x), generator=self.generator).split(self.size):
            yield x[index], y[index]


def in_order(data: Split, size: int = 500) -> list[Split]:
    return list(zip(data[0].split(size), data[1].split(size), strict=True))


class Training:
    """Adam with a cosine schedule; an object of a module, so that processes can be given it."""

    def __init__(self, limit: int, epochs: int):
        self.limit, self.epochs = limit, epochs

    def __call__(self, model: nn.Module, generator: torch.Generator) -> None:
        data = load("fashion-mnist", "train", self.limit)
        seed = int(torch.randint(2**31, (1,), generator=generator))
        loader = Batches(data, BATCH, seed)
        optimiser = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-5)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.epochs * len(loader))
        model.train()
        for _ in range(self.epochs):
            for x, y in loader:
                optimiser.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimiser.step()
                schedule.step()
        model.eval()


def train_vogn(train: Split, epochs: int) -> Any:
    torch.manual_seed(1)
    model = network()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    loader = Batches(train, BATCH, 1)
    # Rate and damping: the best of six pairs on validation images, with the quick budget, after a
    # first look at four pairs on test images that was thrown away: VOGN's row is not fully blind. No other rate was searched for.
    optimiser = VOGN(
        model,
        lr=1e-2,
        n_data=len(train[0]),
        prior_precision=10.0,
        damping=0.1,
        temperature=warmup(max(1, epochs * len(loader) // 2)),
        generator=torch.Generator().manual_seed(1),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * len(loader))
    for _ in range(epochs):
        for x, y in loader:
            optimiser.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
            schedule.step()
    model.eval()
    return optimiser.posterior("classification")


def methods(
    train: Split, validation: Split, budget: argparse.Namespace
) -> dict[str, Callable[[], tuple[Any, dict[str, Any]]]]:
    """Name -> function that fits the method and gives it with the options of `predict`; the first ones share one network."""
    training = Training(
        len(train[0]), budget.epochs
    )  # never the validation images: temperature and priors are tuned on them
    members: list[nn.Module] = []

    def first() -> nn.Module:
        if not members:
            members.extend(Ensemble.train(network, training, 1, seed=0).models)
        return members[0]

    def ensemble() -> tuple[Any, dict[str, Any]]:
        return Ensemble.train(network, training, budget.members, seed=0, processes=budget.processes), {}

    def laplace(options: dict[str, Any], **settings: Any) -> tuple[Any, dict[str, Any]]:
        la = Laplace(first(), "classification", **settings).fit(in_order(train))
        kind = options.get("kind", "linearised")
        # Sampling runs the network for every sample at every point of the grid: fewer of all three.
        held_out = (validation[0][:500], validation[1][:500]) if kind == "sampling" else validation
        grid = {"precisions": (1.0, 10.0, 100.0, 1000.0), "scales": (1.0,), "samples": 5} if kind == "sampling" else {}
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", StatisticalWarning
            )  # the edge of the grid of sampling is said in the numbers
            la.tune(in_order(held_out), kind=kind, **grid)
        return la, options

    def mean_field() -> tuple[Any, dict[str, Any]]:
        field = MeanField(first(), "classification", prior_precision=10.0, samples=budget.samples)
        return field.fit(
            Batches(train, BATCH, 2), epochs=budget.epochs, lr=1e-3, generator=torch.Generator().manual_seed(2)
        ), {}

    def swag() -> tuple[Any, dict[str, Any]]:
        found = SWAG(first(), "classification", samples=budget.samples)
        return found.fit(
            Batches(train, BATCH, 3),
            epochs=max(2, budget.epochs // 2),
            lr=0.02,
            collect_every=max(1, len(train[0]) // (10 * BATCH)),
            generator=torch.Generator().manual_seed(3),
        ), {}

    linearised, sampled = {}, {"kind": "sampling", "samples": budget.samples}
    return {
        "MAP": lambda: (Deterministic(first()), {}),
        "temperature": lambda: (TemperatureScaling(first()).fit(in_order(validation)), {}),
        "MC dropout": lambda: (MCDropout(first(), samples=budget.samples), {}),
        "ensemble": ensemble,
        "mean field": mean_field,
        "SWAG": swag,
        "Laplace last, linearised": lambda: laplace(linearised, params="last_layer"),
        "Laplace last, sampled": lambda: laplace(sampled, params="last_layer"),
        "Laplace all, linearised": lambda: laplace(linearised),
        "Laplace all, sampled": lambda: laplace(sampled),
        "VOGN": lambda: (train_vogn(train, budget.epochs), sampled),
    }


def draw(results: dict[str, Results], path: Path) -> None:
    """Reliability, and the inverse ECDF of the entropy on each unusual set (matplotlib)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * (1 + len(UNUSUAL)), 4.6), layout="constrained")
    axes = figure.subplots(1, 1 + len(UNUSUAL))
    for i, (name, found) in enumerate(results.items()):
        style: dict[str, Any] = {"color": f"C{i % 10}", "linestyle": ("-", "--")[i // 10], "label": name}
        bins = found.curves["reliability"]
        # A bin of a handful of images says nothing about calibration.
        full = [k for k, count in enumerate(bins["count"]) if count >= FEWEST]
        axes[0].plot([bins["confidence"][k] for k in full], [bins["accuracy"][k] for k in full], marker=".", **style)
        for axis, other in zip(axes[1:], UNUSUAL, strict=True):
            curve = found.curves[f"entropy/{other}"]
            axis.plot(curve["threshold"], curve["share_above"], **style)
            axis.set(title=other, xlabel="entropy h in nats", ylabel="share above h", xlim=(0, 2.31), ylim=(0, 1))
    axes[0].plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes[0].set(title="Fashion-MNIST", xlabel="confidence", ylabel="accuracy")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def memory(field: str) -> float:
    """VmHWM (the largest resident set since `forget_peak`) in MB; nan where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":")), float("nan"))


def forget_peak() -> None:
    """The peak of the next method starts anew, with what freed memory the process keeps given back first."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def main(arguments: list[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4,000 images, 5 epochs, 3 members")
    parser.add_argument("--methods", help="names with semicolons between; default: all")
    parser.add_argument("--processes", type=int, default=2, help="of the ensemble's training")
    parser.add_argument("--train", type=int, help="training images")
    parser.add_argument("--test", type=int, help="images of each test set")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--out", type=Path, help="folder for results and picture")
    budget = parser.parse_args(arguments)
    images = budget.train or (4_000 if budget.quick else 50_000)
    tests = budget.test or (1_000 if budget.quick else 10_000)
    budget.epochs = budget.epochs or (5 if budget.quick else 6)
    budget.members, budget.samples = (3, 10) if budget.quick else (5, 30)

    known = load("fashion-mnist", "train", images + min(5_000, images // 5))
    train, validation = tuple((known[0][p], known[1][p]) for p in (slice(0, images), slice(images, None)))
    test = in_order(load("fashion-mnist", limit=tests))
    unusual = {name: in_order(load(name, limit=tests)) for name in UNUSUAL}
    chosen = methods(train, validation, budget)
    if budget.methods:
        chosen = {n.strip(): chosen[n.strip()] for n in budget.methods.split(";")}
    results: dict[str, Results] = {}
    extras: dict[str, dict[str, float]] = {}
    for name, make in chosen.items():
        forget_peak()
        start = time.perf_counter()
        predictor, options = make()
        fitted = time.perf_counter()
        results[name] = evaluate(
            predictor,
            test,
            ood=unusual,
            name=name,
            options=options,
            scores=["entropy", "mutual_information"],
            n_resamples=100,
            table=False,
        )
        extras[name] = {
            "fit s": fitted - start,
            "s/1000": results[name].provenance["seconds_per_1000"],
            "peak MB": memory("VmHWM"),
        }
        print(
            f"{name}: {extras[name]['fit s']:.1f} s, accuracy {results[name]['accuracy']:.4f}, nll {results[name]['nll']:.4f}",
            flush=True,
        )
    table = compare(results, [c for c in COLUMNS if any(c in r.flat() for r in results.values())], extras=extras)
    print(f"\n{table}")
    print(
        "fit s: the first method's includes the network that the others share; peak MB: of this process in fit and evaluation, data included"
    )
    print("mean field and SWAG go on from that network, so that they have seen the data more often than MAP")
    if budget.out:
        budget.out.mkdir(parents=True, exist_ok=True)
        (budget.out / "table.json").write_text(json.dumps(table.to_dict(), indent=2) + "\n")
        for name, found in results.items():
            found.to_json(budget.out / f"{name.replace(', ', '_').replace(' ', '_')}.json")
        draw(results, budget.out / "comparison.png")
    return table


if __name__ == "__main__":
    main()
