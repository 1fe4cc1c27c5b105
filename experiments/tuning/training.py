"""The temperature of `aftermap train`: held-out likelihood of VOGN, IVON and noisy K-FAC, and of OGN and K-FAC by draws and by the linear model.

    python -m experiments.tuning.training --data-dir DATA [--only NAME ...]

Small tables, 60 % for training and 40 % held out by a fixed permutation; the built-in network and the command's own settings, 500 steps. The
settings were chosen on CHOSEN_ON, with their held-out parts in view; CONFIRMED_ON was looked at afterwards, once. Rows that are in training.json
already are not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from aftermap.cli.builtin import build_network
from aftermap.cli.training import DAMPINGS, RATES, Recipe, Run, enough_epochs, make_optimizer, train_network
from aftermap.data import Examples, builtin
from aftermap.likelihoods import Categorical
from experiments.framework import default_data_dir

HERE = Path(__file__).resolve().parent
CHOSEN_ON = ("vehicle", "glass", "ionosphere")
CONFIRMED_ON = ("wine", "breast_cancer", "banana", "australian")
BATCH, PRIOR = 128, 10.0


def table(name: str, data_dir: Path) -> tuple[Tensor, Tensor]:
    """Inputs and class indices, in a fixed random order."""
    if name in ("wine", "breast_cancer"):
        examples = builtin(name)
        x, y = examples.inputs.numpy(), examples.targets.numpy()  # type: ignore[union-attr]
    else:
        (place,) = (data_dir / "uci_classification").glob(f"{name}*.npz")
        with np.load(place, allow_pickle=False) as file:
            names = sorted(file.files)
            parts = {
                kind: [file[n] for n in names if n.lower() == kind or n.lower().startswith(f"{kind}_")] for kind in "xy"
            }
        x, y = np.concatenate(parts["x"]), np.concatenate([p.reshape(-1) for p in parts["y"]])
    order = np.random.default_rng(0).permutation(len(x))
    labels = np.unique(y, return_inverse=True)[1].reshape(-1)
    return torch.tensor(x[order], dtype=torch.float32), torch.tensor(labels[order])


def measure(name: str, optimizer: str, temperature: float, data_dir: Path) -> dict[str, Any]:
    """The likelihood of the held-out part under the network at the mean, draws of the weights, and the linear model."""
    x, y = table(name, data_dir)
    n = int(0.6 * len(x))
    torch.manual_seed(0)
    network = build_network("mlp", list(x.shape[1:]), int(y.max()) + 1)
    network.standardise.set_from(x[:n])
    recipe = Recipe(
        model="builtin:mlp",
        options={},
        data=name,
        n_data=n,
        task="classification",
        noise=None,
        optimizer=optimizer,
        epochs=enough_epochs(n, BATCH),
        batch_size=BATCH,
        lr=RATES[optimizer],
        prior_precision=PRIOR,
        damping=DAMPINGS[optimizer],
        mc_samples=1,
        temperature=temperature,
        seed=0,
    )
    likelihood = Categorical()
    optimiser: Any = make_optimizer(recipe, network, likelihood)
    with tempfile.TemporaryDirectory() as folder:
        train_network(
            Run(Path(folder), recipe), network, optimiser, Examples(x[:n], y[:n], name), likelihood, every=1e9
        )
    posterior, held_out = optimiser.posterior(likelihood), y[n:]
    with torch.no_grad():
        row = {"network": float(F.cross_entropy(network(x[n:]), held_out))}
    for kind, samples in (("sampling", 32), ("linearised", 100)):
        prediction = posterior.predict(
            x[n:], kind=kind, samples=samples, generator=torch.Generator().manual_seed(0), progress=False
        )
        row[kind] = float(-prediction.log_prob(held_out).mean())
    return {k: round(v, 4) for k, v in row.items()}


def plan() -> list[tuple[str, str, float]]:
    """(data, optimiser, temperature) of every row; OGN and K-FAC have no temperature."""
    rows = [(d, "vogn", t) for d in CHOSEN_ON for t in (1.0, 0.3, 0.1, 0.03)]
    rows += [("vehicle", o, t) for o in ("ivon", "noisy_kfac") for t in (1.0, 0.1)]
    rows += [(d, o, 1.0) for d in CHOSEN_ON[:2] for o in ("ogn", "kfac")]
    return rows + [(d, "vogn", t) for d in CONFIRMED_ON for t in (1.0, 0.1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=default_data_dir())
    parser.add_argument("--only", nargs="*", help="the data to run on; all by default")
    options = parser.parse_args()
    place = HERE / "training.json"
    rows: dict[str, Any] = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
    for name, optimizer, temperature in plan():
        key = f"{name} {optimizer} {temperature:g}"
        if key in rows or (options.only and name not in options.only):
            continue
        rows[key] = measure(name, optimizer, temperature, options.data_dir)
        place.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
