"""From a trained network to one HTML page: digits, a Laplace approximation, and a report that compares the two.

python examples/report.py [--output report.html] [--epochs 60] [--seed 0]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import aftermap as am
from aftermap.analysis.figures import training_history
from aftermap.analysis.report import verdict, write_report
from aftermap.baselines import Deterministic
from aftermap.evaluation import evaluate, rotate


def digits(generator: torch.Generator) -> dict[str, tuple[Tensor, Tensor]]:
    """8×8 grey digits, split into train, validation and test."""
    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(bunch.target)
    order = torch.randperm(len(x), generator=generator)
    parts = {"train": order[:1000], "validation": order[1000:1300], "test": order[1300:]}
    return {name: (x[index], y[index]) for name, index in parts.items()}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(384, 48),
        nn.ReLU(),
        nn.Linear(48, 10),
    )


def train(
    model: nn.Module, data: dict[str, tuple[Tensor, Tensor]], epochs: int, generator: torch.Generator
) -> dict[str, list[float]]:
    """Adam; the loss after every epoch, on the training and on the validation data."""
    x, y = data["train"]
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    history: dict[str, list[float]] = {"training": [], "validation": []}
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimiser.step()
        with torch.no_grad():
            for name, part in (("training", "train"), ("validation", "validation")):
                history[name].append(float(nn.functional.cross_entropy(model(data[part][0]), data[part][1])))
    return history


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("report.html"))
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    data = digits(generator)
    model = network()
    history = train(model, data, options.epochs, generator)
    model.eval()

    laplace = am.Laplace(model, "classification").fit([data["train"]])
    laplace.tune([data["validation"]])
    reference = am.Reference.from_predictions(laplace.predict(data["validation"][0]))
    threshold = reference.threshold()

    x, y = data["test"]
    names = [str(name) for name in load_digits().target_names]
    noise = torch.rand(x.shape, generator=generator)
    unusual = {"turned digits": [(rotate(x, 90.0), y)], "noise": [(noise, y)]}
    plain = evaluate(Deterministic(model), [(x, y)], ood=unusual, name="MAP")
    bayesian = evaluate(laplace, [(x, y)], ood=unusual, reference=reference, name="Laplace")

    path = write_report(
        options.output,
        bayesian=bayesian,
        map=plain,
        where=laplace.where([(x, y)], classes=names),
        title="Digits: what the network does not know",
        settings={
            "data": "scikit-learn's digits, 1,000 for training, 300 for validation",
            "structure": "kron",
            "seed": options.seed,
        },
        images=x,
        classes=names,
        threshold=threshold,
        figures={"Loss during training": training_history(history, y_label="cross-entropy (nats)")},
    )
    print(verdict(bayesian, plain, threshold=threshold))
    print(f"report: {path}")
    return path


if __name__ == "__main__":
    main()
