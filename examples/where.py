"""Where is the uncertainty? LeNet-5 on MNIST or scikit-learn's digits: by layer, filter, weight, class, input and pixel.

MNIST is read as idx files from the folder AFTERMAP_DATA, by default ../shared/data beside the repository; --data digits
needs none. The test images are the ones looked at, and a quarter of them are turned by a right angle: nothing the network
has seen.

python examples/where.py --data mnist --structure kron --out where/
"""

from __future__ import annotations

import argparse
import os
from collections import OrderedDict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftermap as am
from aftermap.analysis import Where
from aftermap.data.readers import read_idx

FOLDER = Path(os.environ.get("AFTERMAP_DATA", Path(__file__).resolve().parents[1] / "../shared/data"))
Split = tuple[Tensor, Tensor]


def load(name: str, limit: int, generator: torch.Generator) -> dict[str, Split]:
    """28×28 grey digits in 0 to 1, split into train and test."""
    if name == "digits":
        from sklearn.datasets import load_digits

        bunch = load_digits()
        x = F.interpolate(torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16, size=28, mode="bilinear")
        y = torch.tensor(bunch.target)
    else:
        files = [FOLDER / "mnist" / f"train-{k}-ubyte.gz" for k in ("images-idx3", "labels-idx1")]
        images, labels = (read_idx(f) for f in files)
        x, y = images[:, None].float() / 255, labels.long()
    order = torch.randperm(len(x), generator=generator)[: limit or None]
    parts = zip(("train", "test"), order.tensor_split([round(0.75 * len(order))]), strict=True)
    return {key: (x[index], y[index]) for key, index in parts}


def lenet() -> nn.Sequential:
    """LeNet-5, its layers by name."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 6, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            fc1=nn.Linear(400, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            fc3=nn.Linear(84, 10),
        )
    )


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, generator: torch.Generator) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimiser.step()


def batches(x: Tensor, y: Tensor, size: int = 128) -> list[Split]:
    return list(zip(x.split(size), y.split(size), strict=True))


def main(arguments: list[str] | None = None) -> Where:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("digits", "mnist"), default="digits")
    parser.add_argument("--structure", default="kron")
    parser.add_argument("--limit", type=int, default=0, help="images used in all; 0: every one")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for figures and numbers")
    options = parser.parse_args(arguments)
    generator = torch.Generator().manual_seed(options.seed)
    data = load(options.data, options.limit, generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = lenet()
    train(model, *data["train"], options.epochs, generator)
    model.eval()

    la = am.Laplace(model, "classification", structure=options.structure).fit(batches(*data["train"]))
    la.tune()  # without held-out data
    x, y = data["test"]
    x = torch.cat([x[: 3 * len(x) // 4], torch.rot90(x[3 * len(x) // 4 :], 1, (2, 3))])
    some = tuple(part[:1000] for part in data["train"])
    found: Where = la.where(batches(x, y), calibration=batches(*some), draws=8, generator=generator)

    print(found)
    for level in ("class", "weight", "input"):
        print(f"\nby {level}:\n{found.table(level)}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        found.to_json(options.out / "where.json")
        for name in ("layers", "filters", "weights", "classes", "pairs", "inputs", "saliency", "calibration"):
            found.figure(name).savefig(options.out / f"{name}.png", dpi=200)
        found.figure("filters", layer="fc3").savefig(options.out / "filters_fc3.png", dpi=200)
    return found


if __name__ == "__main__":
    main()
