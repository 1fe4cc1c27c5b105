"""A pretrained ResNet-20 (BatchNorm, residual joins) becomes Bayesian in all of its layers: calibration and detection of SVHN.

    AFTERMAP_DATA=path/to/data python examples/resnet20_cifar10.py [--quick]

Fits Kronecker factors of every layer on 10,000 training images, tunes on labels of the first 5,000 test images (1,000 of them),
measures on the other 5,000 and on house numbers (SVHN). The table compares the network itself, temperature scaling, the
last layer and all layers. Needs Pillow, and about a quarter of an hour on two cores; --quick takes about two minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aftermap as am
from aftermap import metrics

DATA = Path(os.environ.get("AFTERMAP_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
DEVIATION = torch.tensor([0.2023, 0.1994, 0.2010]).view(3, 1, 1)


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, into: int, out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + shortcut)


class ResNet20(nn.Module):
    """Three stages of three blocks, widths 16, 32, 64."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(x.mean((2, 3)))


def images(path: Path, count: int) -> Tensor:
    """The first ``count`` tiles of a mosaic of 32×32 images, normalised."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    mosaic = np.asarray(Image.open(path).convert("RGB"))
    rows, columns = mosaic.shape[0] // 32, mosaic.shape[1] // 32
    tiles = mosaic.reshape(rows, 32, columns, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)[:count]
    return (torch.from_numpy(tiles.copy()).permute(0, 3, 1, 2).float() / 255 - MEAN) / DEVIATION


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(100), y.split(100), strict=True))


def row(name: str, inside: Tensor, labels: Tensor, outside: Tensor) -> tuple[str, float, float, float, float, float]:
    """Accuracy, NLL, ECE, AUROC of errors and of the foreign images, by entropy."""
    scores, positive = metrics.labelled_scores(metrics.entropy(inside), metrics.entropy(outside))
    return (
        name,
        metrics.accuracy(inside, labels),
        metrics.nll(inside, labels),
        metrics.ece(inside, labels),
        metrics.auroc(metrics.entropy(inside), metrics.misclassified(inside, labels)),
        metrics.auroc(scores, positive),
    )


def main(arguments: list[str] | None = None) -> list[tuple[str, float, float, float, float, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the data")
    options = parser.parse_args(arguments)
    if not (DATA / "models" / "cifar10_resnet20.npz").exists():
        sys.exit(f"no data in {DATA}: set AFTERMAP_DATA to the folder with cifar10/, svhn/ and models/")
    share = 10 if options.quick else 1
    n_train, n_half, n_foreign = 10_000 // share, 5_000 // share, 5_000 // share

    weights = np.load(DATA / "models" / "cifar10_resnet20.npz")
    model = ResNet20()
    model.load_state_dict({k: torch.from_numpy(weights[k]) for k in weights.files})
    model.eval()
    labels = np.load(DATA / "cifar10" / "labels.npz")
    train_x = images(DATA / "cifar10" / "train_00000_09999.webp", n_train)
    train_y = torch.from_numpy(labels["train_labels_all"][:n_train]).long()
    test_x = images(DATA / "cifar10" / "test_10k.webp", 10_000)
    test_y = torch.from_numpy(labels["test_labels"]).long()
    tune_x, tune_y = test_x[:n_half], test_y[:n_half]
    x, y = test_x[5_000 : 5_000 + n_half], test_y[5_000 : 5_000 + n_half]
    foreign = images(DATA / "svhn" / "test_10k.webp", n_foreign)

    def logits(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(part) for part in inputs.split(500)])

    table = [row("network", logits(x).softmax(-1), y, logits(foreign).softmax(-1))]
    tuned = logits(tune_x)
    grid = [1 + k / 100 for k in range(201)]
    best = min(grid, key=lambda t: metrics.nll((tuned / t).softmax(-1), tune_y))
    table.append(row("temperature", (logits(x) / best).softmax(-1), y, (logits(foreign) / best).softmax(-1)))

    for name, params in (("last layer", "last_layer"), ("all layers", "all")):
        start = time.perf_counter()
        laplace = am.Laplace(model, "classification", params=params).fit(batches(train_x, train_y))
        fitted = time.perf_counter()
        laplace.tune(batches(tune_x, tune_y))
        done = time.perf_counter()

        def predicted(inputs: Tensor, predictor: am.Laplace = laplace) -> Tensor:
            generator = torch.Generator().manual_seed(0)
            parts = [predictor.predict(part, samples=512, generator=generator).mean for part in inputs.split(100)]
            return torch.cat(parts)

        table.append(row(f"Laplace, {name}", predicted(x), y, predicted(foreign)))
        print(
            f"{name}: fit {fitted - start:.0f} s, tuning {done - fitted:.0f} s, prediction {time.perf_counter() - done:.0f} s\n"
            f"  {laplace.tuning}",
            flush=True,
        )
    print(f"\n{'':22}{'accuracy':>10}{'NLL':>8}{'ECE-15':>8}{'AUROC errors':>14}{'AUROC SVHN':>12}")
    for name, accuracy, nll, ece, errors, outside in table:
        print(f"{name:22}{accuracy:10.4f}{nll:8.4f}{ece:8.4f}{errors:14.4f}{outside:12.4f}")
    return table


if __name__ == "__main__":
    main()
