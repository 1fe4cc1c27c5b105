"""Training images under random crops in the place of validation data: where it equals labels, and where it ruins the temperature.

    python -m experiments.tuning.augmentation --data-dir DATA [--posterior kron|subset] [--images 10000]

First the temperature alone, for a pretrained CIFAR-10 ResNet-20 that was trained with crops and for networks of the quality benchmark
that were not; then the last block of the ResNet-20, tuned on crops, on test images and SVHN. Writes augmentation.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.baselines import TemperatureScaling
from aftermap.data import random_crops
from aftermap.metrics import auroc, ece, labelled_scores
from aftermap.predictive import Prediction
from benchmarks.quality.datasets import _as_input, _read
from benchmarks.quality.networks import load_resnet20
from benchmarks.quality.training import CACHE, DATA, load_task

HERE = Path(__file__).resolve().parent
LEAST = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WITHOUT = ("mnist2k_mlp", "fashion_lenet")  # development tasks whose networks saw no augmentation
TUNED, FITTED, TRAINED = 5000, 2000, 50000


def batches(x: Tensor, y: Tensor, size: int = 250) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def crops(
    x: Tensor, y: Tensor, least: float, flip: bool, shape: tuple[int, ...] | None = None
) -> list[tuple[Tensor, Tensor]]:
    """The images under random crops; flat ones have a shape to be cropped in."""
    images = x if shape is None else x.reshape(len(x), *shape)
    cropped = random_crops(images, least, flip=flip, generator=torch.Generator().manual_seed(0))
    return batches(cropped.reshape(x.shape), y)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(250)]).double()


def temperatures(
    model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], flip: bool, shape: Any = None
) -> dict[str, float]:
    """Test NLL of the network, under the best temperature, and under that of training images with and without crops."""
    outputs, labels = logits(model, test[0]), test[1]

    def nll(temperature: float) -> float:
        return float(nn.functional.cross_entropy(outputs / temperature, labels))

    def found(data: list[tuple[Tensor, Tensor]]) -> float:
        return TemperatureScaling(model).fit(data).temperature

    identity = TemperatureScaling(nn.Identity()).fit([(outputs, labels)])
    row = {"network": nll(1.0), "best": nll(identity.temperature), "plain training images": nll(found(batches(*train)))}
    return row | {f"crops from {least}": nll(found(crops(*train, least, flip, shape))) for least in LEAST}


def numbers(predict: Callable[[Tensor], Prediction], x: Tensor, y: Tensor, unusual: Tensor) -> dict[str, float]:
    def asked(inputs: Tensor) -> Prediction:
        parts = []
        for part in inputs.split(250):
            p = predict(part).detach()
            parts.append(Prediction(p.kind, p.mean, p.epistemic, p.aleatoric, p.total, link=p.link))
        return Prediction.concatenate(parts)

    inside, outside = asked(x), asked(unusual)
    row = {"nll": -float(inside.log_prob(y).mean()), "ece": float(ece(inside.mean, y))}
    for score in ("entropy", "mutual_information"):
        a, b = inside.score(score), outside.score(score)
        if bool(torch.cat([a, b]).any()):
            row[score] = float(auroc(*labelled_scores(a, b)))
    return row


def resnet(folder: Path) -> tuple[nn.Module, dict[str, tuple[Tensor, Tensor]]]:
    parts = {}
    for name, data, part in (("train", "cifar10", "train"), ("test", "cifar10", "test"), ("svhn", "svhn", "test")):
        x, y = _read(folder, data, part)
        parts[name] = _as_input(x[:10000], "colour"), torch.from_numpy(y[:10000])
    return load_resnet20(folder), parts


def last_block(
    model: nn.Module, parts: dict[str, tuple[Tensor, Tensor]], structure: str, images: int, order: Tensor
) -> dict[str, float]:
    """The last block, fitted on some training images, tuned on others under crops, without any held-out label."""
    x, y = parts["train"]
    options = {"subset_size": 300, "rank": 50} if structure == "subset" else {}
    start = time.process_time()
    la = am.Laplace(
        model, "classification", structure=structure, params="last_block", data_scale=TRAINED / FITTED, **options
    )
    la.fit(batches(x[order[:FITTED]], y[order[:FITTED]]), progress=False)
    fitted = time.process_time()
    la.tune(crops(x[order[-TUNED:]], y[order[-TUNED:]], 0.5, True))
    tuned = time.process_time()
    print(la.tuning, flush=True)

    def predict(inputs: Tensor) -> Prediction:
        return la.predict(inputs, generator=torch.Generator().manual_seed(0))

    row = numbers(predict, *(part[:images] for part in parts["test"]), parts["svhn"][0][:images])
    return row | {"fit": fitted - start, "tune": tuned - fitted, "seconds": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=DATA)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--posterior", choices=("kron", "subset", "none"), default="kron")
    parser.add_argument("--images", type=int, default=10000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = HERE / "augmentation.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    model, parts = resnet(options.data_dir)
    order = torch.from_numpy(np.random.default_rng(0).permutation(10000))

    def keep(name: str, row: dict[str, float]) -> None:
        results[name] = {k: float(f"{v:.4g}") for k, v in row.items()}
        print(name, json.dumps(results[name]), flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    if "cifar10_resnet20" not in results:
        some = order[:2000]
        keep("cifar10_resnet20", temperatures(model, tuple(part[some] for part in parts["train"]), parts["test"], True))  # type: ignore[arg-type]
    for name in WITHOUT:
        if name not in results:
            task = load_task(name, 0, data_dir=options.data_dir, cache=options.cache)
            some = task.splits.train[0][:2000], task.splits.train[1][:2000]
            shape = (1, 28, 28) if some[0].dim() == 2 else None
            keep(name, temperatures(task.model, some, task.test, False, shape))
    if options.posterior != "none":
        name = f"last block, {options.posterior}, {options.images} images"
        keep(name, last_block(model, parts, options.posterior, options.images, order))


if __name__ == "__main__":
    main()
