"""The main job in a minute: train a small network on scikit-learn's digits, make it Bayesian, look at what it gains.

python examples/quickstart.py [--epochs 30] [--seed 0]
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics


def digits(generator: torch.Generator) -> dict[str, tuple[Tensor, Tensor]]:
    """8×8 grey digits, split into train, validation and test."""
    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(bunch.target)
    order = torch.randperm(len(x), generator=generator)
    parts = {"train": order[:1000], "validation": order[1000:1300], "test": order[1300:]}
    return {name: (x[index], y[index]) for name, index in parts.items()}


def network() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, generator: torch.Generator) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimiser.step()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    data = digits(generator)
    model = network()
    train(model, *data["train"], options.epochs, generator)
    model.eval()

    # From here on: three lines.
    start = time.perf_counter()
    laplace = am.Laplace(model, "classification").fit([data["train"]])
    laplace.tune([data["validation"]])
    seconds = time.perf_counter() - start

    x, y = data["test"]
    turned = torch.rot90(x, 1, (2, 3))  # the same digits on their side: nothing the network has seen
    plain, bayes = laplace.predictor.map_prediction(x), laplace.predict(x)
    table = []
    for name, prediction, odd in (
        ("network", plain, laplace.predictor.map_prediction(turned)),
        ("Bayesian", bayes, laplace.predict(turned)),
    ):
        scores, positive = metrics.labelled_scores(prediction.score("entropy"), odd.score("entropy"))
        table.append(
            (
                name,
                metrics.accuracy(prediction.mean, y),
                metrics.nll(prediction.mean, y),
                metrics.ece(prediction.mean, y),
                metrics.auroc(scores, positive),
            )
        )
    print(laplace.factors.summary())
    print(f"\nfitted and tuned in {seconds:.1f} s; {laplace.tuning}\n")
    print(f"{'':10}{'accuracy':>10}{'NLL':>8}{'ECE':>8}{'AUROC turned':>14}")
    for name, accuracy, nll, ece, auroc in table:
        print(f"{name:10}{accuracy:10.3f}{nll:8.3f}{ece:8.3f}{auroc:14.3f}")
    shares = laplace.variance_by_layer(x)
    total = sum(float(v.mean()) for v in shares.values())
    print("\nwhere the uncertainty of the outputs sits (share of the predictive variance):")
    for layer, part in shares.items():
        share = float(part.mean()) / total
        print(f"  layer {layer:4}{share:7.1%}  {'█' * round(40 * share)}")
    unsure = bayes.epistemic.argsort(descending=True)[:3]
    print("\nmost uncertain test digits:")
    for index in unsure.tolist():
        print(
            f"  number {index}: a {int(y[index])}, predicted {int(bayes.labels[index])} with {float(bayes.confidence[index]):.0%}; "
            f"epistemic {float(bayes.epistemic[index]):.2f}, aleatoric {float(bayes.aleatoric[index]):.2f} nats"
        )
    return {"nll": table[1][2], "nll_network": table[0][2], "accuracy": table[1][1], "accuracy_network": table[0][1]}


if __name__ == "__main__":
    main()
