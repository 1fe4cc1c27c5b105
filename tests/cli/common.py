"""A small trained network with its files, for all tests of the command line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from typer.testing import CliRunner

from aftermap.cli.app import app
from aftermap.data import toy

__all__ = ["Files", "answer", "invoke", "make_files", "words"]

NETS = '''
"""Networks of somebody else."""
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))


def one():
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))


def needs(width):
    return nn.Linear(2, width)


def broken():
    raise ValueError("no width is known")


def other():
    return {"a": 1}


number = 3
ready = nn.Linear(2, 3)


def batches():
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(7, 2, generator=generator), torch.arange(7) % 3) for _ in range(3)]


def pair():
    return torch.zeros(6, 2), torch.arange(6) % 3


def stream():
    return (batch for batch in batches())


def fails():
    raise OSError("the tape is torn")
'''


@dataclass(frozen=True)
class Files:
    """Where everything is."""

    folder: Path
    model: str
    weights: Path
    train: Path
    val: Path
    test: Path
    ood: Path

    def fit(self, output: Path, *more: str) -> list[str]:
        return [
            *("fit", "--model", self.model, "--weights", str(self.weights), "--train", str(self.train)),
            *("--val", str(self.val), "-o", str(output), *more),
        ]


def make_files(folder: Path) -> Files:
    """Three blobs, a network that was trained on them, and points far away."""
    nets = folder / "somebodys_nets.py"
    nets.write_text(NETS)
    data = toy("blobs", 360)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(80):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(data.inputs[:200]), data.targets[:200]).backward()
        optimiser.step()
    torch.save(model.state_dict(), folder / "model.pt")
    x, y = data.inputs.numpy(), data.targets.numpy()
    for name, part in (("train", slice(0, 200)), ("val", slice(200, 280)), ("test", slice(280, 360))):
        np.savez(folder / f"{name}.npz", x=x[part], y=y[part])
    np.savez(folder / "ood.npz", x=x[:50] * 6 + 9)
    files = [folder / f"{n}.npz" for n in ("train", "val", "test", "ood")]
    return Files(folder, f"{nets}:build", folder / "model.pt", *files)


def invoke(*arguments: str, code: int | None = 0, stdin: str | None = None) -> Any:
    """Runs a command in this process and checks its exit code; None allows that a self-check fails."""
    found = CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=False)
    allowed = (0, 3) if code is None else (code,)
    assert found.exit_code in allowed, f"exit code {found.exit_code}, not {code}\n{found.stdout}\n{found.stderr}"
    return found


def words(text: str) -> str:
    """What was said, without line breaks and frames."""
    return " ".join(text.replace("│", " ").split())


def answer(*arguments: str, code: int = 0) -> Any:
    """The JSON that a command says."""
    return json.loads(invoke(*arguments, "--json", code=code).stdout)
