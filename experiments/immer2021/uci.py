"""Classification of tables: the network, sampling, the linearised predictive and a subset of data (claims L3 to L5, L8).

Networks of all prior precisions are trained at once, as one stack; Adam treats every number by itself, so that each is trained as it would be alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics
from aftermap.likelihoods import parse_likelihood
from experiments.framework import Job
from experiments.immer2021.contest import Pair, contest, network_probabilities, predicted, quality
from experiments.immer2021.settings import Uci

__all__ = ["DEPTHS", "STRUCTURES", "jobs", "multilayer", "read", "split", "train_stack"]

STRUCTURES = ("full", "kron", "diagonal", "subset")
# With two hidden layers the full matrix has up to 6,310 rows, whose decomposition takes a minute at every precision.
DEPTHS: dict[int, tuple[str, ...]] = {1: STRUCTURES, 2: ("kron", "diagonal", "subset")}


def read(data_dir: Path, name: str) -> Pair:
    """All rows of a set: features [N, D] and classes [N]."""
    if name == "digits":
        examples = am.data.builtin("digits")
        assert examples.targets is not None
        return examples.inputs.flatten(1).double(), examples.targets.long()
    split_before = data_dir / "uci_classification" / f"{name}_presplit.npz"
    if split_before.is_file():
        z = np.load(split_before)
        x, y = np.concatenate([z["X_tr"], z["X_te"]]), np.concatenate([z["y_tr"], z["y_te"]])
    else:
        z = np.load(data_dir / "uci_classification" / f"{name}.npz")
        x, y = z["X"], z["y"]
    return torch.from_numpy(x).double(), torch.from_numpy(np.unique(y, return_inverse=True)[1]).long()


def split(x: Tensor, y: Tensor, seed: int, rows: int) -> tuple[Pair, Pair, Pair]:
    """Training, validation and test data: 70, 15 and 15 % of every class, standardised by the training data."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.randperm(len(x), generator=generator)[:rows]
    x, y = x[kept], y[kept]
    parts: tuple[list[Tensor], ...] = ([], [], [])
    for label in y.unique():
        index = (y == label).nonzero()[:, 0]
        ends = (round(0.7 * len(index)), round(0.85 * len(index)))
        for part, chosen in zip(parts, index.tensor_split(ends), strict=True):
            part.append(chosen)
    train, validation, test = (torch.cat(p) for p in parts)
    deviation = x[train].std(0)
    x = (x - x[train].mean(0)) / torch.where(deviation > 0, deviation, 1.0)
    return (x[train], y[train]), (x[validation], y[validation]), (x[test], y[test])


def multilayer(features: int, width: int, depth: int, outputs: int, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    """A perceptron with hidden layers of one width."""
    sizes = [features, *[width] * depth]
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(sizes):
        layers += [nn.Linear(into, out), activation()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def train_stack(
    model: nn.Module, data: Pair, likelihood: str, precisions: tuple[float, ...], steps: int, lr: float = 5e-3
) -> list[dict[str, Tensor]]:
    """Weights of the network under every prior precision: Adam over all data, whose rate falls to nothing along a cosine.

    Args:
        model: The network, which every copy starts from.
        data: The training data.
        likelihood: "classification" or "binary".
        precisions: The precisions of the prior N(0, 1/precision).
        steps: The number of steps.
        lr: The first learning rate.
    """
    x, y = data[0].float(), data[1]
    loss = parse_likelihood(likelihood)
    y = y[:, None].float() if likelihood == "binary" else y
    stack = {n: torch.stack([p.detach()] * len(precisions)).requires_grad_() for n, p in model.named_parameters()}
    strength = torch.tensor(precisions)
    optimiser = torch.optim.Adam(stack.values(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    outputs = torch.func.vmap(lambda params: torch.func.functional_call(model, params, (x,)))
    for _ in range(steps):
        optimiser.zero_grad()
        found = outputs(stack)
        fit = loss.nll(found.flatten(0, 1), torch.cat([y] * len(precisions))).sum()
        energy = sum((0.5 * strength * p.square().flatten(1).sum(1)).sum() for p in stack.values())
        ((fit + energy) / len(x)).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return [{n: p[k].detach().clone() for n, p in stack.items()} for k in range(len(precisions))]


def _job(settings: Uci, data_dir: Path, name: str, depth: int, seed: int) -> dict[str, Any]:
    train, validation, test = split(*read(data_dir, name), seed, settings.rows)
    classes = int(train[1].max()) + 1
    likelihood = "binary" if classes == 2 else "classification"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = multilayer(train[0].shape[1], settings.width, depth, 1 if classes == 2 else classes)
    stack = train_stack(model, train, likelihood, settings.precisions, settings.steps)

    def networks() -> Iterator[tuple[float, nn.Module]]:
        for precision, weights in zip(settings.precisions, stack, strict=True):
            own = multilayer(train[0].shape[1], settings.width, depth, 1 if classes == 2 else classes)
            own.load_state_dict(weights)
            yield precision, own.double().eval()

    def fits(structure: str) -> Iterator[tuple[float, am.Laplace]]:
        for precision, own in networks():
            yield precision, _fit(own, likelihood, structure, train, precision, settings.subset, seed)

    numbers: dict[str, Any] = {"n": len(train[0])}
    chosen = contest(
        networks(), {"map": lambda m: metrics.nll(network_probabilities(m, likelihood, validation[0]), validation[1])}
    )["map"]
    numbers |= quality("map", network_probabilities(chosen.predictor, likelihood, test[0]), test[1])
    numbers["map_precision"] = chosen.precision
    for structure in DEPTHS[depth]:
        kinds = ("linearised",) if structure == "subset" else ("linearised", "sampling")

        def loss(la: am.Laplace, kind: str) -> float:
            return metrics.nll(predicted(la, kind, validation[0], settings.samples, seed), validation[1])

        scorers: dict[str, Any] = {kind: partial(loss, kind=kind) for kind in kinds}
        if structure != "subset":
            scorers["evidence"] = lambda la: -float(la.log_evidence())
        for rule, best in contest(fits(structure), scorers).items():
            kind = "linearised" if rule == "evidence" else rule
            p = predicted(best.predictor, kind, test[0], settings.samples, seed)
            numbers |= quality(f"{structure}_{rule}", p, test[1])
            numbers |= {f"{structure}_{rule}_precision": best.precision, f"{structure}_{rule}_scores": best.scores}
    return numbers


def _fit(
    model: nn.Module, likelihood: str, structure: str, train: Pair, precision: float, subset: int, seed: int
) -> am.Laplace:
    """The posterior; a subset of M data of N gets the precision times N/M, as in the paper."""
    x, y = train
    y = y[:, None].double() if likelihood == "binary" else y
    if structure == "subset":
        some = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:subset]
        precision *= len(x) / len(some)
        x, y = x[some], y[some]
        la = am.Laplace(model, likelihood, structure="subset", subset_size=len(x), rank=None, prior_precision=precision)
    else:
        la = am.Laplace(model, likelihood, structure=structure, curvature="exact", prior_precision=precision)
    return la.fit([(x, y)], progress=False)


def jobs(settings: Uci, data_dir: Path) -> Iterator[Job]:
    """A job for every set, depth and seed."""
    for depth in settings.depths:
        for name in settings.sets:
            for seed in settings.seeds:
                yield Job(f"uci/{name}/depth{depth}/seed{seed}", partial(_job, settings, data_dir, name, depth, seed))
