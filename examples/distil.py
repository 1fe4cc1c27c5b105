"""One forward pass that knows as much as many: a mixture of Laplace approximations becomes a single small network.

Three convolutional networks are trained on 300 of scikit-learn's digits; each gets a Kronecker-factored posterior, and the
average of the three (uniform weights) is distilled into one network with less than a tenth of their weights. The student sees no
label: it learns the mixture's probabilities on 900 digits, on shifted copies, and on blends of two digits, where the teacher doubts.

python examples/distil.py [--epochs 40] [--members 3] [--seed 0]
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from aftermap import metrics
from aftermap.applications import distil
from aftermap.baselines import Deterministic
from aftermap.laplace import Laplace
from aftermap.laplace.mixture import Mixture


def digits(generator: torch.Generator) -> dict[str, tuple[Tensor, Tensor]]:
    bunch = load_digits()
    x, y = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16, torch.tensor(bunch.target)
    order = torch.randperm(len(x), generator=generator)
    parts = {"train": order[:300], "validation": order[300:600], "unlabelled": order[600:1200], "test": order[1200:]}
    return {name: (x[index], y[index]) for name, index in parts.items()}


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, 10),
    )


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, generator: torch.Generator) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(50):
            optimiser.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimiser.step()
    return model.eval()


def unlabelled(x: Tensor, copies: int, generator: torch.Generator) -> Tensor:
    """The images, shifted by up to a pixel, and blends of two of them."""
    found = [x]
    for _ in range(copies):
        rows, columns = torch.randint(-1, 2, (2,), generator=generator).tolist()
        found.append(torch.roll(x, (rows, columns), (2, 3)))
        share = torch.rand(len(x), 1, 1, 1, generator=generator)
        found.append(share * x + (1 - share) * x[torch.randperm(len(x), generator=generator)])
    return torch.cat(found)


def seconds(predict: object, x: Tensor) -> float:
    start = time.perf_counter()
    predict(x)  # type: ignore[operator]
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40, help="of the student")
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--training", type=int, default=60, help="epochs of each member")
    parser.add_argument("--validation", type=int, default=300, help="digits to tune each posterior on")
    parser.add_argument("--copies", type=int, default=4, help="shifted and blended copies of the images")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    generator = torch.Generator().manual_seed(options.seed)
    with torch.random.fork_rng(devices=[]):  # first weights come from the default generator
        torch.manual_seed(options.seed)
        data = digits(generator)
        parts = []
        for _ in range(options.members):
            model = train(network(16), *data["train"], options.training, generator)
            laplace = Laplace(model, "classification").fit([data["train"]])
            parts.append(laplace.tune([tuple(part[: options.validation] for part in data["validation"])]))
        teacher = Mixture(parts, weights="uniform")
        student = network(8)
    known = torch.cat([data["train"][0], data["unlabelled"][0]])
    inputs = unlabelled(known, options.copies, generator)
    found = distil(
        teacher,
        student,
        inputs.split(100),
        epochs=options.epochs,
        optimizer=lambda p: torch.optim.Adam(p, lr=2e-3),
        test=[data["test"]],
        generator=generator,
    )

    x, y = data["test"]
    turned = torch.rot90(x, 1, (2, 3))  # the same digits on their side: seen by nobody
    print(f"{'':24}{'weights':>9}{'accuracy':>10}{'NLL':>8}{'entropy':>9}{'AUROC turned':>14}{'ms':>8}")
    numbers: dict[str, float] = {}
    for name, predictor, models in (
        ("one network", Deterministic(parts[0].model), [parts[0].model]),
        (f"mixture of {options.members} Laplace", teacher, teacher.models),
        ("student", found.student, [student]),
    ):
        prediction, odd = predictor.predict(x, generator=generator), predictor.predict(turned, generator=generator)
        scores, positive = metrics.labelled_scores(prediction.score("entropy"), odd.score("entropy"))
        weights = sum(p.numel() for model in models for p in model.parameters())
        nll, accuracy = metrics.nll(prediction.mean, y), metrics.accuracy(prediction.mean, y)
        print(
            f"{name:24}{weights:9,}{accuracy:10.3f}{nll:8.3f}{float(prediction.total.mean()):9.3f}"
            f"{metrics.auroc(scores, positive):14.3f}{1000 * seconds(predictor.predict, x):8.1f}"
        )
        numbers[f"{name}/nll"], numbers[f"{name}/accuracy"] = nll, accuracy
    print(
        f"\nstudent against mixture on test digits: KL {found.kl:.4f} nats, NLL {found.nll_difference:+.4f}, "
        f"entropy {found.entropy_difference:+.4f} (mean |difference| {found.entropy_error:.4f})"
    )
    print(
        "AUROC turned: digits on their side are in none of the student's lessons; what it was not shown it need not repeat"
    )
    return {
        **numbers,
        "kl": found.kl,
        "nll_difference": found.nll_difference,
        "entropy_difference": found.entropy_difference,
    }


if __name__ == "__main__":
    main()
