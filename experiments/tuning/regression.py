"""Regressions tuned with and without validation labels, on UCI data: likelihood and coverage of every rule.

    python -m experiments.tuning.regression --data-dir DATA               development and held-out sets, up to 1,000 training data
    python -m experiments.tuning.regression --data-dir DATA --large       5,000 training data, larger networks, every structure

DATA holds uci_regression/*.npz with X and y; diabetes comes with scikit-learn. The full covariance is computed in its dual form, from the kernel
JJᵀ in double precision. One thread; about ten minutes each.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from aftermap.laplace import Laplace
from aftermap.laplace.regression import tune_regression
from aftermap.laplace.regression_rule import (
    LinearModel,
    RegressionResult,
    apply_rule,
    evidence_ratio,
    fit_scale,
    learning_slope,
)

Data = tuple[Tensor, Tensor]
DEVELOPMENT = ("bostonHousing", "yacht", "energy", "diabetes", "power-plant")
HELD_OUT = ("concrete", "wine-quality-red", "kin8nm", "naval-propulsion-plant", "protein-tertiary-structure")
LARGE = ("power-plant", "kin8nm", "naval-propulsion-plant", "protein-tertiary-structure")
NETWORKS = ("tanh 1x50, decay by hold-out", "relu 2x50, overfitted", "tanh 2x64, decay 1")
LARGE_NETWORKS = ("tanh 2x64", "relu 2x128")
LABELS = (30, 100, 300)
DRAWS = 10  # of validation sets of the smaller sizes


@dataclass(frozen=True)
class Task:
    """A trained network (double precision) and its standardised data."""

    name: str
    network: str
    seed: int
    model: nn.Module
    train: Data
    val: Data
    test: Data


def load(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        bunch = load_diabetes()
        return bunch.data.astype(float), bunch.target.astype(float)
    arrays = np.load(folder / "uci_regression" / f"{name}.npz")
    return arrays["X"].astype(float), arrays["y"].astype(float).reshape(-1)


def split(name: str, folder: Path, seed: int, n_train: int) -> tuple[Data, Data, Data]:
    """A quarter (at most 1,000) to test, a fifth (at most 300) to validate, at most n_train of the rest to train."""
    x, y = load(name, folder)
    order = np.random.default_rng(seed).permutation(len(y))
    n_test, n_val = min(1000, len(y) // 4), min(300, len(y) // 5)
    test, val, train = order[:n_test], order[n_test : n_test + n_val], order[n_test + n_val :][:n_train]
    scale = x[train].std(0)
    x = (x - x[train].mean(0)) / np.where(scale < 1e-9, 1.0, scale)
    y = (y - y[train].mean()) / y[train].std()

    def tensors(index: np.ndarray) -> Data:
        return torch.tensor(x[index], dtype=torch.float32), torch.tensor(y[index], dtype=torch.float32)[:, None]

    return tensors(train), tensors(val), tensors(test)


def make_network(network: str, width_in: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    kind, shape = network.split(",")[0].split(" ")
    depth, width = (int(v) for v in shape.split("x"))
    activation = nn.Tanh if kind == "tanh" else nn.ReLU
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Linear(width_in if i == 0 else width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def train(network: str, data: Data, seed: int, decay: float, steps: int, batch: int | None = None) -> nn.Module:
    """Adam on the mean squared error with decay/N times the squared weights."""
    x, y = data
    model = make_network(network, x.shape[1], seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2 if batch is None else 5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        index = slice(None) if batch is None else torch.randint(len(x), (batch,), generator=generator)
        loss = (model(x[index]) - y[index]).square().mean()
        loss = loss + decay / len(x) * sum(p.square().sum() for p in model.parameters())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model


def train_small(network: str, data: Data, seed: int) -> nn.Module:
    if "overfitted" in network:
        return train(network, data, seed, 0.0, 3000)
    if "hold-out" not in network:
        return train(network, data, seed, 1.0, 1500)
    some = len(data[0]) * 4 // 5

    def error(decay: float) -> float:
        model = train(network, (data[0][:some], data[1][:some]), seed, decay, 1000)
        with torch.no_grad():
            return float((model(data[0][some:]) - data[1][some:]).square().mean())

    return train(network, data, seed, min((0.03, 0.3, 3.0), key=error), 1000)


def rows(model: nn.Module, x: Tensor) -> Tensor:
    """Gradients of the output in all weights [N, P], in double precision."""
    params = {k: v.detach().double() for k, v in model.named_parameters()}

    def output(p: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, p, (one[None],))[0, 0]

    with torch.no_grad():
        parts = vmap(grad(output), in_dims=(None, 0))(params, x.double())
    return torch.cat([v.reshape(len(x), -1) for v in parts.values()], 1)


@dataclass(frozen=True)
class Dual:
    """The full linear model of a network in its dual form: leverages of any inputs at any r."""

    model: nn.Module
    linear: LinearModel
    jacobian: Tensor

    @staticmethod
    def of(model: nn.Module, data: Data) -> Dual:
        model = copy.deepcopy(model).double()
        jacobian = rows(model, data[0])
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        linear = LinearModel.make(
            jacobian @ jacobian.T,
            jacobian @ weights,
            residuals(model, data),
            torch.ones(len(jacobian), dtype=torch.float64),
            float(weights.square().sum()),
            jacobian.shape[1],
        )
        return Dual(model, linear, jacobian)

    def leverage(self, x: Tensor, ratio: float) -> Tensor:
        parts = []
        for chunk in x.split(250):
            new = rows(self.model, chunk)
            explained = (new @ self.jacobian.T @ self.linear.vectors).square() / (self.linear.values + ratio)
            parts.append((new.square().sum(1) - explained.sum(1)).clamp_min(0.0) / ratio)
        return torch.cat(parts)


def residuals(model: nn.Module, data: Data) -> Tensor:
    with torch.no_grad():
        return (data[1].double() - copy.deepcopy(model).double()(data[0].double()))[:, 0]


def score(error: Tensor, variance: Tensor) -> list[float]:
    """Negative log-likelihood, and the coverage of 50, 90 and 95 % intervals."""
    nll = float((0.5 * (2 * math.pi * variance).log() + error.square() / (2 * variance)).mean())
    z = (error / variance.sqrt()).abs()
    return [nll] + [float((z < NormalDist().inv_cdf(0.5 + q / 2)).double().mean()) for q in (0.5, 0.9, 0.95)]


def predictive_variance(laplace: Laplace, x: Tensor) -> Tensor:
    return laplace.predict(x, diagonal=True).total.double()[:, 0]


def with_labels(task: Task, dual: Dual, result: RegressionResult, out: dict[str, list[float]]) -> None:
    """The network with a noise from n labels, and the rule with the same labels; means over draws of these."""
    error, held = residuals(task.model, task.test), residuals(task.model, task.val)
    on_test, on_val = (dual.leverage(d[0], result.ratio) for d in (task.test, task.val))
    generator = np.random.default_rng(0)
    for count in LABELS:
        found = defaultdict(list)
        for _ in range(DRAWS if count < len(held) else 1):
            index = torch.as_tensor(generator.permutation(len(held))[:count])
            found["network"].append(score(error, held[index].square().mean().expand(len(error))))
            factor, width = fit_scale(held[index][:, None], on_val[index][:, None], result.noise)
            found["rule"].append(score(error, factor * result.noise**2 * (1 + width * on_test)))
        for name, values in found.items():
            out[f"{name}, {count} labels"] = np.mean(values, 0).tolist()


def small_task(task: Task) -> dict[str, Any]:
    dual = Dual.of(task.model, task.train)
    error = residuals(task.model, task.test)
    out: dict[str, list[float]] = {}
    ratio, _ = evidence_ratio(dual.linear)
    linear = dual.linear
    evidence = (linear.squares + ratio * linear.distance) / linear.count
    out["full evidence"] = score(error, evidence * (1 + dual.leverage(task.test[0], ratio)))
    result = apply_rule(linear)
    out["rule, no labels"] = score(error, result.noise**2 * (1 + dual.leverage(task.test[0], result.ratio)))
    with_labels(task, dual, result, out)
    for structure in ("kron", "diagonal"):
        laplace = Laplace(task.model, "regression", structure=structure).fit([task.train], progress=False)
        tuned = tune_regression(laplace.fitted, laplace.base_likelihood, laplace.predictor, warn=False)
        labelled = tune_regression(
            laplace.fitted, laplace.base_likelihood, laplace.predictor, val_data=[task.val], warn=False
        )
        if structure == "kron":
            out["kron evidence"] = score(error, predictive_variance(laplace.tune(method="evidence"), task.test[0]))
        out[f"{structure}, rule, no labels"] = score(error, predictive_variance(laplace.adopt(tuned), task.test[0]))
        out[f"{structure}, rule, all labels"] = score(error, predictive_variance(laplace.adopt(labelled), task.test[0]))
    last = Laplace(task.model, "regression", structure="full", params="last_layer").fit([task.train], progress=False)
    tuned = tune_regression(last.fitted, last.base_likelihood, last.predictor, warn=False)
    out["last layer, rule, no labels"] = score(error, predictive_variance(last.adopt(tuned), task.test[0]))
    numbers = {"ratio": result.ratio, "noise": result.noise, "gamma": result.gamma, "n": result.n_data}
    return {"scores": out, "rule": numbers, "loo": [result.loo_nll, result.constant_nll]}


def large_task(task: Task) -> dict[str, Any]:
    """Structures whose cost does not grow with the square of the data, all with the rule from 1,000 of them."""
    error = residuals(task.model, task.test)
    out = {"network, 300 labels": score(error, residuals(task.model, task.val).square().mean().expand(len(error)))}
    index = torch.randperm(len(task.train[0]), generator=torch.Generator().manual_seed(0))[:1000]
    dual = Dual.of(task.model, (task.train[0][index], task.train[1][index]))
    copies = len(task.train[0]) / len(index)
    result = apply_rule(
        dual.linear, copies=copies, mean_square=float(residuals(task.model, task.train).square().mean())
    )
    leverage = dual.leverage(task.test[0], result.ratio)
    narrowing = copies ** learning_slope(dual.linear, result.ratio)
    out["subset of 1,000, as it is"] = score(error, result.noise**2 * (1 + leverage))
    out["subset of 1,000, learning curve"] = score(error, result.noise**2 * (1 + leverage / narrowing))
    batches = list(zip(task.train[0].split(500), task.train[1].split(500), strict=True))
    options: list[tuple[str, dict[str, Any]]] = [
        ("kron", {"structure": "kron"}),
        ("diagonal", {"structure": "diagonal"}),
        ("last layer", {"structure": "full", "params": "last_layer"}),
        ("low rank 50", {"structure": "low_rank", "rank": 50}),
    ]
    for name, option in options:
        laplace = Laplace(task.model, "regression", **option).fit(batches, progress=False)
        tuned = tune_regression(laplace.fitted, laplace.base_likelihood, laplace.predictor, warn=False)
        labelled = tune_regression(
            laplace.fitted, laplace.base_likelihood, laplace.predictor, val_data=[task.val], warn=False
        )
        out[f"{name}, matched"] = score(error, predictive_variance(laplace.adopt(tuned), task.test[0]))
        out[f"{name}, 300 labels"] = score(error, predictive_variance(laplace.adopt(labelled), task.test[0]))
        laplace.adopt(tuned).narrow(1 / tuned.narrowing)
        out[f"{name}, not matched"] = score(error, predictive_variance(laplace, task.test[0]))
    return {"scores": out, "rule": {"ratio": result.ratio, "noise": result.noise, "narrowing": narrowing}}


def summary(runs: list[dict[str, Any]], base: str) -> dict[str, dict[str, float]]:
    table = {}
    for method in runs[0]["scores"]:
        values = np.array([r["scores"][method] for r in runs])
        against = values[:, 0] - np.array([r["scores"][base][0] for r in runs])
        sets = np.array([r["set"] for r in runs])
        worst = min(float(values[sets == s, 3].mean()) for s in set(sets))
        table[method] = {
            "nll mean": float(values[:, 0].mean()),
            "nll median": float(np.median(values[:, 0])),
            "coverage 50": float(values[:, 1].mean()),
            "coverage 90": float(values[:, 2].mean()),
            "coverage 95": float(values[:, 3].mean()),
            "worst set's 95": worst,
            "worst against network": float(against.max()),
        }
    return table


def run(
    names: tuple[str, ...], networks: tuple[str, ...], seeds: int, folder: Path, small: bool
) -> list[dict[str, Any]]:
    work: Callable[[Task], dict[str, Any]] = small_task if small else large_task
    runs = []
    for name in names:
        for network in networks:
            for seed in range(seeds):
                data = split(name, folder, seed, 1000 if small else 5000)
                if small:
                    model = train_small(network, data[0], seed)
                else:
                    model = train(network, data[0], seed, 0.1 if "tanh" in network else 0.0, 3200, 1000)
                task = Task(name, network, seed, model.eval(), *data)
                runs.append({"set": name, "network": network, "split": seed, **work(task)})
                print(name, network, seed, {k: round(v[0], 3) for k, v in runs[-1]["scores"].items()}, flush=True)
    return runs


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}\n| rule | " + " | ".join(next(iter(table.values()))) + " |")
    for method, row in table.items():
        print(f"| {method} | " + " | ".join(f"{v:.3f}" for v in row.values()) + " |")


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--large", action="store_true", help="the large sets instead of the small ones")
    parser.add_argument("--sets", nargs="*", help="only these sets")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("regression.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    stored = json.loads(options.results.read_text()) if options.results.exists() else {}
    parts = {"large": LARGE} if options.large else {"development": DEVELOPMENT, "held out": HELD_OUT}
    for part, names in parts.items():
        names = tuple(n for n in names if options.sets is None or n in options.sets)
        if not names:
            continue
        small = not options.large
        runs = run(names, NETWORKS if small else LARGE_NETWORKS, 2 if small else 1, options.data_dir, small)
        table = summary(runs, "network, 300 labels")
        show(part, table)
        stored[part] = rounded({"summary": table, "runs": runs})
        options.results.write_text(json.dumps(stored, separators=(",", ":")))


if __name__ == "__main__":
    main()
