"""The poster's table on CIFAR-10: LeNet-5, a wide network and a residual one, with all that is compared on them.

Settings are chosen once, on training images that are held out, among as many for every method (`TRIALS`); test images and house
numbers are looked at by the final runs alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.framework import Job, result_of
from experiments.osawa2019.settings import TRIALS, VARIANTS, Pictures, Settings, Values
from experiments.osawa2019.training import Batches, Data, closure, judge, network, optimiser, train

__all__ = ["jobs"]

TUNING_SEED = 1000


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """For every network and method the choice of its setting, then one job for each seed; variants of VOGN follow it."""
    for part in settings.all_pictures():
        data, name = Data(data_dir, part), part.network
        for method in part.methods:
            yield Job(f"{name}/tune_{method}", partial(_tune, part, data, method))
            for seed in range(part.seeds):
                yield Job(f"{name}/{method}/seed{seed}", partial(_final, part, data, method, seed))
            for variant in VARIANTS if name == "residual" and method == "vogn" else ():
                for seed in range(part.seeds):
                    yield Job(f"{name}/{variant}/seed{seed}", partial(_variant, part, data, variant, seed))
        for seed in range(part.seeds) if part in settings.pictures() else ():
            yield Job(f"cost/{name}/seed{seed}", partial(_cost, part, data, seed))


def _tune(settings: Pictures, data: Data, method: str) -> dict[str, Any]:
    """NLL and accuracy on held-out images for every setting, and which is the best; a single setting needs no trial."""
    trials = TRIALS[settings.network][method]
    if len(trials) == 1:
        return {"chosen": 0, "settings": dict(trials[0])}
    curves = [train(method, settings, data, TUNING_SEED, values, watched=False).curve[-1] for values in trials]
    scores = [c["nll"] if settings.chosen_by == "nll" else -c["accuracy"] for c in curves]
    best = scores.index(min(scores))
    return {
        "nll": [c["nll"] for c in curves],
        "accuracy": [c["accuracy"] for c in curves],
        "chosen": best,
        "settings": dict(trials[best]),
    }


def _values(settings: Pictures, method: str) -> Values:
    return TRIALS[settings.network][method][result_of(f"{settings.network}/tune_{method}")["chosen"]]


def _final(settings: Pictures, data: Data, method: str, seed: int) -> dict[str, Any]:
    trained = train(method, settings, data, seed, _values(settings, method))
    return judge(trained, data, settings.samples)


def _variant(settings: Pictures, data: Data, variant: str, seed: int) -> dict[str, Any]:
    """VOGN on the residual network with one thing changed; prior and damping stay."""
    values, changes, norm = dict(_values(settings, "vogn")), dict[str, Any](), True
    if variant.startswith("rho"):
        changes["augmentation"] = float(variant.removeprefix("rho"))
    elif variant == "no_norm":
        norm = False
    else:
        changes["momentum"] = 0.0
        if variant == "no_momentum_scaled":
            values["lr"] *= 10.0  # 1/(1 - 0.9), by which heavy-ball momentum enlarges the rate
    return judge(train("vogn", settings, data, seed, values, norm=norm, **changes), data, settings.samples)


def _cost(settings: Pictures, data: Data, seed: int) -> dict[str, Any]:
    """Processor seconds of four steps of each optimiser, one after the other, again and again."""
    kinds: dict[str, tuple[str, int]] = {"adam": ("adam", 1), "vogn_1": ("vogn", 1)}
    kinds[f"vogn_{settings.timed_draws}"] = ("vogn", settings.timed_draws)
    if "kfac" in settings.methods:
        kinds |= {name: (name, 1) for name in ("ogn", "kfac", "noisy_kfac")}
    torch.manual_seed(seed)
    steppers = {}
    for kind, (method, draws) in kinds.items():
        model = network(settings.network)
        more = {"mc_samples": draws} if method in ("vogn", "noisy_kfac") else {}
        values = TRIALS[settings.network]["adam" if method == "adam" else "vogn"][-1]
        steppers[kind] = (method, model, optimiser(method, model, settings, 1000, values, **more))
    batches = list(Batches(*data.train, settings.timed_batch, torch.Generator().manual_seed(seed)))[:4]
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(settings.rounds + 1):
        for kind, (method, model, opt) in steppers.items():
            start = time.process_time()
            for x, y in batches:
                opt.step(closure(method, model, opt, x, y))
            if number:  # the first round reads the network, and is free of noise
                found[kind].append((time.process_time() - start) / len(batches))
    return {**found, "draws": settings.timed_draws}
