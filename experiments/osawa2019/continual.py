"""Continual learning on permuted MNIST: each task is MNIST with its pixels in another order (claim V14).

Adam goes from task to task. VOGN takes its posterior of the tasks before as its prior. The Laplace prior is the diagonal
Gauss-Newton curvature at the end of each task, added up, in training by Adam (online Laplace, elastic weights).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftermap as am
from aftermap.analysis.figures import CATEGORIES, axes, finish, save_svg
from experiments.framework import Job, Results, Verdict, judged, labelled, mean_and_error, not_met, paired, result_of
from experiments.osawa2019.settings import TRIALS, Continual

__all__ = ["figures", "jobs", "verdicts"]

METHODS = {"adam": "Adam", "laplace": "Adam with a Laplace prior", "vogn": "VOGN"}
Pair = tuple[Tensor, Tensor]
PRECISION = 1.0  # of the first prior


def _digits(folder: Path, part: str) -> Pair:
    inputs, targets = labelled(folder, "mnist", part)
    return inputs.flatten(1), targets


@dataclass(frozen=True)
class Tasks:
    """A sequence of tasks.

    Attributes:
        settings: The settings of the part.
        folder: The folder with the data sets.
        seed: The seed of orders, weights and batches.
        count: How many tasks.
    """

    settings: Continual
    folder: Path
    seed: int
    count: int

    def orders(self) -> list[Tensor]:
        """The order of the pixels in each task."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randperm(784, generator=generator) for _ in range(self.count)]

    def train(self) -> Pair:
        """The images that are trained on, in their own order."""
        x, y = _digits(self.folder, "train")
        return x[: self.settings.train], y[: self.settings.train]

    def judged_on(self, part: str) -> Pair:
        """Test images, or training images that are held out."""
        x, y = _digits(self.folder, part)
        count = self.settings.test if part == "test" else self.settings.held_out
        return x[:count], y[:count]

    def network(self) -> nn.Module:
        """Two hidden layers."""
        width = self.settings.width
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def run(self, method: str, values: Mapping[str, float], part: str) -> dict[str, Any]:
        """Accuracy on every task so far after each task."""
        (x, y), (other_x, other_y) = self.train(), self.judged_on(part)
        net, generator = self.network(), torch.Generator().manual_seed(self.seed)
        prior: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        table: list[list[float]] = []
        orders = self.orders()
        for number, order in enumerate(orders):
            prior = self._learn(method, net, x[:, order], y, prior, values, generator)
            with torch.no_grad():
                seen = [float((net(other_x[:, o]).argmax(1) == other_y).float().mean()) for o in orders[: number + 1]]
            table.append(seen)
        last = table[-1]
        return {"accuracy": sum(last) / len(last), "means": [sum(t) / len(t) for t in table], "last": last}

    def _learn(
        self,
        method: str,
        net: nn.Module,
        x: Tensor,
        y: Tensor,
        prior: Any,
        values: Mapping[str, float],
        generator: torch.Generator,
    ) -> Any:
        """Learns one task and returns the prior of the next one."""
        n, settings = len(x), self.settings
        if method == "vogn":
            opt: Any = am.optim.VOGN(
                net, lr=values["lr"], n_data=n, prior_precision=PRECISION, damping=values["damping"]
            )
            if prior is not None:
                opt.set_prior(*prior)
        else:
            opt = torch.optim.Adam(net.parameters(), lr=values["lr"])
        penalty = partial(_penalty, net, prior, n) if method == "laplace" and prior is not None else None
        steps = settings.epochs * math.ceil(n / settings.batch)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
        for _ in range(settings.epochs):
            for index in torch.randperm(n, generator=generator).split(settings.batch):

                def closure(index: Tensor = index) -> Tensor:
                    loss = F.cross_entropy(net(x[index]), y[index])
                    if method != "vogn":
                        loss = loss if penalty is None else loss + penalty()
                        opt.zero_grad()
                        loss.backward()
                    return loss

                opt.step(closure)
                schedule.step()
        if method == "adam":
            return None
        if method == "vogn":
            return opt.posterior("classification").as_prior(damping=values["kept"])
        return _laplace_prior(net, x, y, prior, values["weight"])


def _penalty(net: nn.Module, prior: tuple[dict[str, Tensor], dict[str, Tensor]], n: int) -> Tensor:
    """−log of the Gaussian prior, for each of n data."""
    mean, precision = prior
    terms = [(precision[name] * (p - mean[name]).square()).sum() for name, p in net.named_parameters()]
    return torch.stack(terms).sum() / (2 * n)


def _laplace_prior(net: nn.Module, x: Tensor, y: Tensor, prior: Any, weight: float) -> Any:
    """The diagonal Laplace posterior: the prior's precision and, so many times, the curvature of this task."""
    la = am.Laplace(net, "classification", structure="diagonal", prior_precision=PRECISION)
    la.fit(list(zip(x.split(500), y.split(500), strict=True)), progress=False)
    variance = la.posterior.marginal_variance()
    before = {n: torch.full_like(v, PRECISION) for n, v in variance.items()} if prior is None else prior[1]
    precision = {n: before[n] + weight * (1 / v - PRECISION).to(before[n]) for n, v in variance.items()}
    return {n: p.detach().clone() for n, p in net.named_parameters()}, precision


def jobs(settings: Continual, data_dir: Path) -> Iterator[Job]:
    """For every method the choice of its setting, then all sequences."""
    for method in METHODS:
        yield Job(f"continual/tune_{method}", partial(_tune, settings, data_dir, method))
    for seed in range(settings.seeds):
        for method in METHODS:
            yield Job(f"continual/{method}/seed{seed}", partial(_final, settings, data_dir, method, seed))


def _tune(settings: Continual, data_dir: Path, method: str) -> dict[str, Any]:
    tasks = Tasks(settings, data_dir, 1000, settings.tuning_tasks)
    trials = TRIALS["continual"][method]
    scores = [tasks.run(method, values, "validation")["accuracy"] for values in trials]
    best = scores.index(max(scores))
    return {"accuracy": scores, "chosen": best, "settings": dict(trials[best])}


def _final(settings: Continual, data_dir: Path, method: str, seed: int) -> dict[str, Any]:
    values = TRIALS["continual"][method][result_of(f"continual/tune_{method}")["chosen"]]
    return Tasks(settings, data_dir, seed, settings.tasks).run(method, values, "test")


def verdicts(results: Results) -> list[Verdict]:
    """V14."""
    needs = {f"continual/{m}/*": results.settings.continual.seeds for m in METHODS}
    return judged(results, needs, ("V14",), lambda r: [_verdict(r)])


def _verdict(results: Results) -> Verdict:
    found = {m: results.numbers(f"continual/{m}/*", "accuracy") for m in METHODS}
    conditions = {f"higher than {METHODS[m]}": paired(found["vogn"], found[m]).higher for m in ("adam", "laplace")}
    count = results.settings.continual.tasks
    ours = f"mean accuracy over {count} tasks at the end: " + ", ".join(
        f"{METHODS[m]} {mean_and_error(v)}" for m, v in found.items()
    )
    reason = not_met(conditions)
    return Verdict.of("V14", list(conditions.values()), ours, reason, len(found["vogn"]))


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Mean accuracy over the tasks so far."""
    runs = {m: list(results.among(f"continual/{m}/*").values()) for m in METHODS}
    if not all(runs.values()):
        return {}
    ax = axes(width=4.0)
    for colour, (method, found) in zip(CATEGORIES, runs.items(), strict=False):
        for number, value in enumerate(found):
            label = METHODS[method] if number == 0 else None
            ax.plot(range(1, len(value["means"]) + 1), value["means"], color=colour, lw=1, label=label)
    finish(ax, x="tasks so far", y="mean accuracy over them", legend="lower left")
    (folder / "continual.svg").write_text(save_svg(ax.figure), encoding="utf-8")
    return {"continual.svg": "Permuted MNIST: mean test accuracy over all tasks so far, every seed."}
