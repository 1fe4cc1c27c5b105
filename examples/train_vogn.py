"""Bayesian training against Adam: LeNet-5 on Fashion-MNIST, CIFAR-10 or scikit-learn's digits.

One line differs between the optimisers. Data are read from the folder AFTERMAP_DATA (idx files of Fashion-MNIST; CIFAR-10 as
webp mosaics), by default ../shared/data beside the repository; --data digits needs none.

python examples/train_vogn.py --data fashion-mnist --optimizers adam,vogn,ivon --epochs 5 --figure run.png
python examples/train_vogn.py --data cifar10 --epochs 10 --tune --seeds 2      # the same search for each, several seeds

With --tune every optimiser, Adam too, gets the same search: --trials settings from its row of SPACES, each trained for as
many epochs as the final runs on nine tenths of the training images and judged by the NLL on the last tenth. (Half the epochs
mislead: they choose rates that overfit in the whole time.) Test images are looked at by the final runs only.

Means over two seeds after 10 epochs on 20,000 images, 10,000 test images (accuracy, NLL, ECE); see docs/tutorials/training.md.
    CIFAR-10:       Adam  0.590  1.180  0.057
    CIFAR-10:       VOGN  0.589  1.165  0.014
    Fashion-MNIST:  Adam  0.890  0.310  0.017
    Fashion-MNIST:  VOGN  0.887  0.321  0.014
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap import metrics
from aftermap.optim import IVON, KFAC, OGN, VOGN, NoisyKFAC, warmup

Split = tuple[Tensor, Tensor]
Values = dict[str, float]
SAMPLES = 16  # draws of the weights for the last prediction; a quarter of them on the way
FOLDER = Path(os.environ.get("AFTERMAP_DATA", Path(__file__).resolve().parents[1] / "../shared/data"))


def read_idx(path: Path) -> np.ndarray:
    raw = gzip.decompress(path.read_bytes())
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(np.frombuffer(raw, ">i4", raw[3], 4))


def read_mosaic(path: Path) -> np.ndarray:
    """32×32 tiles of a lossless mosaic, row by row: [n, 32, 32, 3]."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    picture = np.asarray(Image.open(path).convert("RGB"))
    rows, columns = picture.shape[0] // 32, picture.shape[1] // 32
    return picture.reshape(rows, 32, columns, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)


def load(name: str, limit: int) -> tuple[Split, Split]:
    """Training and validation images, standardised, with labels."""
    if name == "digits":
        from sklearn.datasets import load_digits

        bunch = load_digits()
        x = F.interpolate(torch.tensor(bunch.images, dtype=torch.float32)[:, None], size=28)
        y, cut = torch.tensor(bunch.target), 1300
    elif name == "cifar10":
        folder = FOLDER / name
        labels = np.load(folder / "labels.npz")
        parts = [read_mosaic(folder / f"train_{a:05d}_{a + 9999:05d}.webp")[:10000] for a in (0, 10000)]
        parts.append(read_mosaic(folder / "test_10k.webp")[:10000])
        x = torch.tensor(np.concatenate(parts)).permute(0, 3, 1, 2).float()
        y = torch.tensor(np.concatenate([labels["train_labels_all"][:20000], labels["test_labels"]]).astype(np.int64))
        cut = 20000
    else:
        files = [FOLDER / name / f"{p}-{k}-ubyte.gz" for p in ("train", "t10k") for k in ("images-idx3", "labels-idx1")]
        images, targets, test_images, test_targets = (read_idx(f) for f in files)
        x = torch.tensor(np.concatenate([images, test_images])).float()[:, None]
        y, cut = torch.tensor(np.concatenate([targets, test_targets]).astype(np.int64)), len(images)
    mean, deviation = x[:cut].mean((0, 2, 3), keepdim=True), x[:cut].std((0, 2, 3), keepdim=True)
    x = (x - mean) / deviation
    train = (x[: min(cut, limit)], y[: min(cut, limit)])
    return train, (x[cut:][:limit], y[cut:][:limit])


def lenet(channels: int, size: int) -> nn.Sequential:
    """LeNet-5; a 28×28 image is padded to 32×32."""
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=(32 - size) // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


# What --tune may choose from, for each optimiser. The first value of each setting is used without --tune.
SPACES: dict[str, dict[str, tuple[float, ...]]] = {
    "adam": {"lr": (4e-3, 1e-3, 2e-3), "weight_decay": (1e-3, 1e-4, 0.0)},
    "vogn": {"lr": (5e-3, 2e-3, 1e-2), "damping": (0.1, 0.05, 0.2), "prior_precision": (30.0, 10.0, 100.0)},
    "ogn": {"lr": (5e-3, 2e-3, 1e-2), "damping": (0.1, 0.05, 0.2), "prior_precision": (30.0, 10.0, 100.0)},
    "ivon": {"lr": (0.4, 0.2, 0.8), "initial_curvature": (0.3, 0.1, 1.0), "prior_precision": (30.0, 10.0, 100.0)},
    "kfac": {"lr": (5e-3, 2e-3, 1e-2), "damping": (0.1, 0.05, 0.2), "prior_precision": (30.0, 10.0, 100.0)},
    "noisy_kfac": {"lr": (5e-3, 2e-3, 1e-2), "damping": (0.1, 0.05, 0.2), "prior_precision": (30.0, 10.0, 100.0)},
}
LABELS = {"adam": "Adam", "vogn": "VOGN", "ogn": "OGN", "ivon": "IVON", "kfac": "K-FAC", "noisy_kfac": "noisy K-FAC"}
MAKERS: dict[str, Any] = {"vogn": VOGN, "ogn": OGN, "ivon": IVON, "kfac": KFAC, "noisy_kfac": NoisyKFAC}


def usual(name: str) -> Values:
    """The settings without a search."""
    return {key: values[0] for key, values in SPACES[name].items()}


def build(name: str, model: nn.Sequential, n_data: int, steps: int, values: Mapping[str, float]) -> Any:
    """The optimiser and its settings; everything else is the same for all."""
    if name == "adam":
        return torch.optim.Adam(model.parameters(), **values)
    more: dict[str, Any] = {}
    if name in ("vogn", "noisy_kfac"):
        more["temperature"] = warmup(max(1, steps // 2))
    if name in ("kfac", "noisy_kfac"):
        more |= {"factor_every": 5, "inverse_every": 50}
    return MAKERS[name](model, n_data=n_data, **values, **more)


def batches(x: Tensor, y: Tensor, size: int, generator: torch.Generator) -> Iterator[Split]:
    order = torch.randperm(len(x), generator=generator)
    for index in order.split(size):
        yield x[index], y[index]


@torch.no_grad()
def probabilities(model: nn.Module, optimizer: Any, x: Tensor, samples: int) -> Tensor:
    """Class probabilities; a Bayesian optimiser averages over draws of the weights."""

    def run() -> Tensor:
        return torch.cat([model(part).softmax(1) for part in x.split(2000)])

    if not hasattr(optimizer, "sampled_params") or not optimizer.settings.sampling:
        return run()
    total = torch.zeros(len(x), 10)
    for _ in range(samples):
        with optimizer.sampled_params(train=False):
            total += run() / samples
    return total


def judge(p: Tensor, y: Tensor) -> dict[str, float]:
    if not bool(p.isfinite().all()):  # the rate was too large: a result, too
        return {"accuracy": 0.0, "nll": float("inf"), "ece": 1.0, "auroc": 0.5}
    wrong = p.argmax(1) != y
    score = 1 - p.max(1).values
    return {
        "accuracy": metrics.accuracy(p, y),
        "nll": metrics.nll(p, y),
        "ece": metrics.ece(p, y),
        "auroc": metrics.auroc(score, wrong) if bool(wrong.any()) else 1.0,
    }


def train(
    name: str,
    data: tuple[Split, Split],
    epochs: int,
    batch: int,
    seed: int,
    values: Mapping[str, float],
    every: int = 1,
) -> dict[str, Any]:
    """Trains, and judges after every ``every`` epochs and at the end."""
    (x, y), validation = data
    torch.manual_seed(seed)
    model = lenet(x.shape[1], x.shape[2])
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(x) // batch)
    optimizer = build(name, model, len(x), steps, values)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    curve: list[dict[str, float]] = []
    seconds = 0.0
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        for a, b in batches(x, y, batch, generator):

            def closure(a: Tensor = a, b: Tensor = b) -> Tensor:
                loss = F.cross_entropy(model(a), b)
                if name == "adam":
                    optimizer.zero_grad()
                    loss.backward()
                return loss

            optimizer.step(closure)
            schedule.step()
        seconds += time.perf_counter() - start
        if epoch % every and epoch < epochs:
            continue
        samples = SAMPLES if epoch == epochs else SAMPLES // 4
        curve.append(judge(probabilities(model, optimizer, validation[0], samples), validation[1]))
        shown = "  ".join(f"{k} {v:.4f}" for k, v in curve[-1].items())
        print(f"{name:11s} {told(values)}  seed {seed} epoch {epoch:2d}  {shown}", flush=True)
    return {**curve[-1], "seconds": seconds, "settings": dict(values), "curve": curve}


def told(values: Mapping[str, float]) -> str:
    return " ".join(f"{key} {value:g}" for key, value in values.items())


def trials(name: str, number: int) -> list[Values]:
    """The usual settings, and others drawn from the optimiser's space: always the same ones."""
    space = SPACES[name]
    others = [dict(zip(space, point, strict=True)) for point in product(*space.values())][1:]
    return [usual(name), *random.Random(0).sample(others, min(number - 1, len(others)))]


def tuned(name: str, train_split: Split, number: int, epochs: int, batch: int) -> Values:
    """The settings with the best NLL on the last tenth of the training images, after training on the others."""
    x, y = train_split
    cut = len(x) - len(x) // 10
    parts = ((x[:cut], y[:cut]), (x[cut:], y[cut:]))
    return min(trials(name, number), key=lambda values: train(name, parts, epochs, batch, 1000, values, epochs)["nll"])


def averaged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds; the smallest and the largest value beside each."""
    keys = ("accuracy", "nll", "ece", "auroc", "seconds")
    found: dict[str, Any] = {k: sum(r[k] for r in runs) / len(runs) for k in keys}
    found["range"] = {k: [min(r[k] for r in runs), max(r[k] for r in runs)] for k in keys}
    return {**found, "settings": runs[0]["settings"], "curve": runs[0]["curve"]}


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), constrained_layout=True)
    for axis, (key, title) in zip(axes, (("accuracy", "accuracy"), ("nll", "NLL"), ("ece", "ECE")), strict=True):
        for name, found in results.items():
            values = [c[key] for c in found["curve"]]
            axis.plot(range(1, len(values) + 1), values, marker="o", markersize=4, label=LABELS.get(name, name))
        axis.set_xlabel("epoch")
        axis.set_title(f"{title} on test images")
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion-mnist", choices=("fashion-mnist", "cifar10", "mnist", "digits"))
    parser.add_argument("--optimizers", default="adam,vogn,ivon,ogn,noisy_kfac")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--limit", type=int, default=60000, help="use only so many images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="runs per optimiser")
    parser.add_argument("--tune", action="store_true", help="choose settings on held-out training images")
    parser.add_argument("--trials", type=int, default=6, help="settings that --tune tries for each optimiser")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    data = load(asked.data, asked.limit)
    names = asked.optimizers.split(",")
    results = {}
    for name in names:
        values = usual(name)
        if asked.tune:
            values = tuned(name, data[0], asked.trials, asked.epochs, asked.batch)
        seeds = range(asked.seed, asked.seed + asked.seeds)
        results[name] = averaged([train(name, data, asked.epochs, asked.batch, seed, values) for seed in seeds])
    print(f"\n{'':11s} accuracy    NLL    ECE  AUROC  seconds   (means over {asked.seeds} seeds)")
    for name, r in results.items():
        numbers = " ".join(f"{r[k]:.4f}" for k in ("accuracy", "nll", "ece", "auroc"))
        print(f"{name:11s}   {numbers} {r['seconds']:8.1f}   {told(r['settings'])}")
    if asked.figure:
        draw(results, asked.figure)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
