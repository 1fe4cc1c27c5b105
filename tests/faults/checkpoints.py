"""Damaged checkpoints and files of weights: work goes on to the bits that it would have had, or is refused with a clear error.

`python -m tests.faults.checkpoints` interrupts training and fits, damages what they go on from, starts them again, and counts what happens.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from aftermap.cli.models import load_weights
from aftermap.cli.training import CHECKPOINT, Recipe, Run, make_optimizer, train_network
from aftermap.data import Examples
from aftermap.likelihoods import Categorical
from tests.curvature.passes.checkpoint_worker import Batches, Broken, examples, fit, sums
from tests.faults.damages import BYTES, FILES, JSON_VALUES
from tests.faults.harness import Outcome, Trial, judged, main

__all__ = ["SUBJECTS", "TRIAL", "CheckpointTrial"]

OPTIMIZERS, STRUCTURES, WEIGHTS = ("vogn", "kfac", "adam"), ("kron", "ekfac", "diagonal"), ("pt", "npz", "safetensors")
SUBJECTS = (
    *(f"train ({name})" for name in OPTIMIZERS),
    *(f"fit ({name})" for name in STRUCTURES),
    *(f"weights (.{ending})" for ending in WEIGHTS),
)
_STOP = {"kron": 5, "ekfac": 11, "diagonal": 5}  # The batch at which the fit was interrupted.
_UNSEALED = ("weights (.safetensors)",)  # The format has no checksum.
# Whole weights of something else cannot be told from those that were meant.
_WEIGHTS, _EXCHANGED = SUBJECTS[-len(WEIGHTS) :], ("another file in its place", "a link in its place")


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 3))


def _train(optimizer_name: str, folder: Path, *, interrupted: bool = False) -> dict[str, Any]:
    """Trains to the end from what is in a folder, or is interrupted in its second epoch; returns all that it ends with."""
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    settings = {"lr": 0.01, "prior_precision": 1.0, "damping": 0.1, "mc_samples": 1, "temperature": 1.0, "seed": 0}
    recipe = Recipe("net", {}, "data", 20, "classification", None, optimizer_name, 3, 10, **settings)  # type: ignore[arg-type]
    model, likelihood = _network(), Categorical()
    optimizer, run = make_optimizer(recipe, model, likelihood), Run(folder, recipe)
    run.resume(model, optimizer)

    def stop(numbers: Mapping[str, float]) -> None:
        if interrupted and numbers["epoch"] == 2:
            raise Broken("interrupted")

    train_network(
        run, model, optimizer, Examples(x, torch.arange(20) % 3, "data"), likelihood, on_epoch=stop, every=0.0
    )
    return {**model.state_dict(), "history": [dict(numbers) for numbers in run.history], "step": run.step}


def _resumed(subject: str, folder: Path) -> dict[str, Any]:
    """What the work ends with that goes on from a folder."""
    kind, name = subject.split(" (")[0], subject.split("(")[1].strip(").")
    if kind == "train":
        return _train(name, folder)
    if kind == "fit":
        return sums(fit(name, Batches(*examples()), folder, curvature="exact"))
    model = _network()
    load_weights(model, folder / f"weights.{name}")
    return dict(model.state_dict())


def _interrupt(subject: str, folder: Path) -> None:
    """Writes what work goes on from."""
    kind, name = subject.split(" (")[0], subject.split("(")[1].strip(").")
    folder.mkdir(parents=True)
    if kind == "train":
        with suppress(Broken):
            _train(name, folder, interrupted=True)
    elif kind == "fit":
        with suppress(Broken):
            fit(name, Batches(*examples(), stop=_STOP[name]), folder, curvature="exact")
    else:
        torch.manual_seed(5)
        state = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 3)).state_dict()
        if name == "pt":
            torch.save(state, folder / "weights.pt")
        elif name == "npz":
            np.savez(folder / "weights.npz", **{k: v.numpy() for k, v in state.items()})
        else:
            save_file(dict(state), folder / "weights.safetensors")


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def alike(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b

    return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)


def _other_tensor(value: Tensor, chance: Random) -> Tensor:
    ways = (value.double() * torch.nan, -value.double(), value[..., None], value.flatten()[:0], value.to(torch.int8))
    return chance.choice(ways).contiguous()


def _forge_tensors(tensors: Mapping[str, Tensor], chance: Random) -> dict[str, Tensor]:
    """Changes one tensor, or takes it away."""
    changed, key = dict(tensors), chance.choice(sorted(tensors))
    if chance.random() < 0.2:
        del changed[key]
    else:
        changed[key] = _other_tensor(changed[key], chance)
    return changed


def _forge(value: Any, chance: Random) -> Any:
    """Changes one place of a tree of dicts, lists and tensors."""
    if isinstance(value, Tensor) and chance.random() < 0.5:
        return _other_tensor(value, chance)
    if isinstance(value, dict | list) and value and chance.random() < 0.9:
        copy: Any = type(value)(value)
        key = chance.choice(list(copy)) if isinstance(copy, dict) else chance.randrange(len(copy))
        if chance.random() < 0.1:
            del copy[key]
        else:
            copy[key] = _forge(copy[key], chance)
        return copy
    return chance.choice(JSON_VALUES)


class CheckpointTrial(Trial):
    """Damaged checkpoints of `train` and of `fit`, and damaged weights."""

    def __init__(self, seed: int, place: Path):
        super().__init__(seed, place)
        self.origins, self.contents = {}, {}
        for subject in SUBJECTS:
            origin = self.origins[subject] = place / "origins" / subject.replace(" ", "_")
            _interrupt(subject, origin)
            work = place / "whole"
            # Training and fits end as those that nobody interrupted.
            if subject.startswith("weights"):
                shutil.copytree(origin, work)
            self.contents[subject] = _resumed(subject, work)
            shutil.rmtree(work)

    def attempt(self, number: int) -> Outcome:
        chance = Random(f"{self.seed} {number}")
        subject = SUBJECTS[number % len(SUBJECTS)]
        folder = self.place / f"case_{number}"
        shutil.copytree(self.origins[subject], folder)
        forged = not subject.startswith("fit") and chance.random() < 0.3
        damage = self._forge(subject, folder, chance) if forged else self._damage(folder, chance)
        told = subject not in _UNSEALED and not (subject in _WEIGHTS and damage in _EXCHANGED)
        group = "forged" if forged else "damaged" if told else "no checksum"
        try:
            same = _same(_resumed(subject, folder), self.contents[subject])
            result, detail = (
                "identical content" if same else "as written" if group != "damaged" else "other content",
                "",
            )
        except Exception as error:
            # Of numbers that were forged, training says what is wrong with them; it knows no file.
            result, detail = judged(error, [str(folder), "finite", "the loss became"] if forged else [str(folder)])
        shutil.rmtree(folder)
        return Outcome(number, group, subject, damage, result, detail)

    def _damage(self, folder: Path, chance: Random) -> str:
        files = sorted(f for f in folder.iterdir() if f.is_file())
        file = chance.choice(files)
        if chance.random() < 0.25:
            way = chance.choice([w for w in FILES if w != "a folder in its place"])
            foreign = [f for origin in self.origins.values() for f in origin.iterdir()]
            FILES[way](file, [f for f in foreign if f.read_bytes() != file.read_bytes()], chance)
            return way
        way, data = chance.choice(list(BYTES)), bytearray(file.read_bytes())
        BYTES[way](data, chance)
        file.write_bytes(bytes(data))
        return way

    def _forge(self, subject: str, folder: Path, chance: Random) -> str:
        """What somebody does who writes the whole file: its content is another, and its checksums fit."""
        if subject.startswith("train"):
            content = torch.load(folder / CHECKPOINT, weights_only=True)
            torch.save(_forge(content, chance), folder / CHECKPOINT)
        else:
            (file,) = folder.iterdir()
            state = _forge_tensors(_network().state_dict(), chance)
            if file.suffix == ".pt":
                torch.save(state, file)
            elif file.suffix == ".npz":
                np.savez(file, **{k: v.numpy() for k, v in state.items()})
            else:
                save_file(state, file)
        return "another content"


TRIAL = CheckpointTrial

if __name__ == "__main__":
    sys.exit(main("tests.faults.checkpoints", 1200, "benchmarks/results/faults_checkpoints.json"))
