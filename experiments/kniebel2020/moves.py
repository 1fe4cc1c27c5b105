"""How the uncertainty moves between layers with depth, width, training length and data size (findings W8 to W11).

Of a multilayer perceptron one thing is varied at a time. The place of its uncertainty is one number, the centre of the epistemic shares of its
layers on test images: 0 if all of it comes from the first layer, 1 if all comes from the last. A finding is a direction: the sign of
the rank correlation of the centre with what is varied, over all values and seeds of a data set. The rule was fixed before the run: it counts on a
data set where its size is at least .5, and it must be the same on every data set and for both priors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aftermap as am
from benchmarks.quality.datasets import Images as ImageData
from benchmarks.quality.networks import MLP
from benchmarks.quality.tasks import Training
from benchmarks.quality.training import train_network
from experiments.framework import Job, Results, Verdict, judged, mean_and_error
from experiments.kniebel2020.layers import PRIORS, by_layer, fitted, tuned
from experiments.kniebel2020.settings import Moves

__all__ = ["AXES", "LEAST", "correlation", "curve", "direction", "jobs", "statement", "verdicts"]

BATCH = 64
LEAST = 0.5  # the size of a rank correlation that counts


@dataclass(frozen=True)
class Axis:
    """What is varied.

    Attributes:
        id: The finding.
        values: The name of its values in the settings.
        grows: What the words for more of it are.
        unit: What its values count.
    """

    id: str
    values: str
    grows: str
    unit: str


AXES = {
    "depth": Axis("W8", "depth", "more hidden layers", "hidden layers"),
    "width": Axis("W9", "widths", "wider layers", "hidden units in each layer"),
    "length": Axis("W10", "lengths", "longer training", "epochs"),
    "size": Axis("W11", "sizes", "more training data", "training images"),
}


def jobs(settings: Moves, data_dir: Path) -> Iterator[Job]:
    """Each axis on each set, seed by seed."""
    for axis in AXES:
        for name in settings.sets:
            for seed in range(settings.seeds):
                yield Job(f"moves/{axis}/{name}/seed{seed}", partial(_axis, settings, data_dir, axis, name, seed))


def _build(widths: tuple[int, ...], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + seed)
        return MLP(widths).build((784,), 10)


def _train(model: nn.Module, data: tuple[Tensor, Tensor], settings: Moves, seed: int) -> nn.Module:
    count = len(data[0])
    epochs = math.ceil(settings.steps / math.ceil(count / BATCH))
    training = Training(epochs, settings.rate, BATCH, settings.prior / count)
    train_network(model, data, training, "classification", torch.Generator().manual_seed(seed))
    return model


def _snapshots(settings: Moves, data: tuple[Tensor, Tensor], seed: int) -> Iterator[tuple[int, nn.Module]]:
    """One training at a constant rate, seen after each of the lengths."""
    x, y = data
    model = _build((settings.width, settings.width), seed)
    optimiser = torch.optim.Adam(model.parameters(), settings.rate, weight_decay=settings.prior / len(x))
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, max(settings.lengths) + 1):
        model.train()
        for chosen in torch.randperm(len(x), generator=generator).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimiser.step()
        if epoch in settings.lengths:
            yield epoch, model.eval()


def _networks(
    settings: Moves, axis: str, data: tuple[Tensor, Tensor], seed: int
) -> Iterator[tuple[int, nn.Module, tuple[Tensor, Tensor]]]:
    """The value, the trained network, and the data that it has seen."""
    some = (data[0][: settings.train], data[1][: settings.train])
    if axis == "length":
        for value, model in _snapshots(settings, some, seed):
            yield value, model, some
        return
    for value in getattr(settings, AXES[axis].values):
        widths = (settings.width,) * (value if axis == "depth" else 2)
        if axis == "width":
            widths = (value, value)
        seen = (data[0][:value], data[1][:value]) if axis == "size" else some
        yield value, _train(_build(widths, seed), seen, settings, seed), seen


def _axis(settings: Moves, data_dir: Path, axis: str, name: str, seed: int) -> dict[str, Any]:
    most = max(settings.train, *settings.sizes)
    splits = ImageData((name,), "flat", most, pool=0, test=settings.test).load(data_dir, seed)
    x, y = splits.test
    rows: dict[str, list[Any]] = {}
    for value, model, seen in _networks(settings, axis, splits.train, seed):
        la = fitted(model, seen, settings.prior)
        with torch.no_grad():
            accuracy = float((model(x).argmax(1) == y).double().mean())
        row: dict[str, Any] = {"value": value, "accuracy": accuracy}
        for prior in PRIORS:
            found = by_layer(la if prior == "trained" else tuned(la), x[: settings.seen])
            determined = sum(found["effective"]) / sum(found["parameters"])
            first = found["effective"][0] / found["parameters"][0]
            row |= {f"{k}_{prior}": found[k] for k in ("centre", "logit_centre", "nats", "shares")}
            row |= {f"determined_{prior}": determined, f"first_determined_{prior}": first}
        for key, entry in row.items():
            rows.setdefault(key, []).append(entry)
    return rows


# What came out


def _points(results: Results, axis: str, name: str, key: str) -> tuple[list[float], list[float]]:
    """Values and numbers of all seeds, one after the other."""
    found = [v for _, v in sorted(results.among(f"moves/{axis}/{name}/*").items())]
    return [v for job in found for v in job["value"]], [v for job in found for v in job[key]]


def correlation(results: Results, axis: str, name: str, key: str) -> float:
    """The rank correlation of a number with what is varied, over all values and seeds of a set."""
    return am.metrics.rank_correlation(*_points(results, axis, name, key))


def curve(results: Results, axis: str, name: str, key: str) -> dict[int, list[float]]:
    """The numbers of all seeds, by value."""
    found: dict[int, list[float]] = {}
    for value, number in zip(*_points(results, axis, name, key), strict=True):
        found.setdefault(int(value), []).append(number)
    return found


def direction(results: Results, axis: str) -> float:
    """1 if the uncertainty moves to the output, -1 if to the input: the sign of the mean correlation, with the prior of training."""
    found = [correlation(results, axis, name, "centre_trained") for name in results.settings.moves.sets]
    return 1.0 if sum(found) >= 0 else -1.0


def statement(results: Results, axis: str) -> str:
    """The finding in words."""
    where = "output" if direction(results, axis) > 0 else "input"
    return f"with {AXES[axis].grows} the uncertainty moves towards the {where}"


def verdicts(results: Results) -> list[Verdict]:
    """W8 to W11."""
    settings = results.settings.moves
    found = []
    for axis, about in AXES.items():
        needs = {f"moves/{axis}/*/*": settings.seeds * len(settings.sets)}
        found += judged(results, needs, [about.id], lambda r, a=axis: [_verdict(r, a)])
    return found


def _verdict(results: Results, axis: str) -> Verdict:
    sets, sign = results.settings.moves.sets, direction(results, axis)
    conditions, against, texts = [], [], []
    for name in sets:
        ranks = {prior: correlation(results, axis, name, f"centre_{prior}") for prior in PRIORS}
        ends = curve(results, axis, name, "centre_trained")
        low, high = min(ends), max(ends)
        texts.append(
            f"{name} ρ = {ranks['trained']:+.2f} (tuned {ranks['tuned']:+.2f}), centre {mean_and_error(ends[low], 2)} at {low} "
            f"to {mean_and_error(ends[high], 2)} at {high}"
        )
        for prior, rank in ranks.items():
            conditions.append(sign * rank >= LEAST)
            if not conditions[-1]:
                against.append(f"{name} with the {prior} prior, ρ = {rank:+.2f}")
    unit = AXES[axis].unit
    return Verdict.of(
        AXES[axis].id,
        conditions,
        f"{statement(results, axis)} (by {unit}): " + "; ".join(texts),
        "counterexamples: " + "; ".join(against),
        results.settings.moves.seeds,
    )
