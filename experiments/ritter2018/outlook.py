"""Appendix D and the conclusion: memory, cheap predictions, evidence, mixtures and active learning (claims R19 and R20)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics
from aftermap.applications import active_learning, distil
from aftermap.baselines import Particles
from experiments.framework import Job, Results, Verdict, judged, mean_and_error, paired
from experiments.ritter2018.notmnist import Digits, batches, images, network, probabilities
from experiments.ritter2018.settings import Images, Outlook

__all__ = ["jobs", "verdicts"]

PRIOR = 1.0


def jobs(settings: Images, outlook: Outlook, data_dir: Path) -> Iterator[Job]:
    """Memory first, which needs no training; then what needs networks."""
    yield Job("memory/bytes", partial(_bytes, settings.width))
    for seed in range(outlook.seeds):
        small = Small(outlook, data_dir, seed)
        yield Job(f"outlook/evidence/seed{seed}", small.evidence)
        for acquisition in ("mutual_information", "random"):
            yield Job(f"outlook/{acquisition}/seed{seed}", partial(small.ask, acquisition))


def cheap_jobs(settings: Images, data_dir: Path) -> Iterator[Job]:
    """What needs the networks of section 5.2."""
    for seed in range(settings.seeds):
        digits = Digits(settings, data_dir, seed)
        yield Job(f"memory/cheap/seed{seed}", partial(_cheap, digits))


def _bytes(width: int) -> dict[str, Any]:
    """The bytes of the factors of the network on MNIST against the formula of appendix D."""
    torch.manual_seed(0)
    model = network(width).eval()
    x, y = torch.rand(32, 784), torch.arange(32) % 10
    start = time.process_time()
    la = am.Laplace(model, "classification", structure="kron", curvature="sampled", damping="factored")
    la.fit([(x, y)], progress=False)
    layers = [(784 + 1, width), (width + 1, width), (width + 1, 10)]  # The bias is a column of the weights.
    measured = wanted = entries = 0
    for block, (into, out) in zip(la.factors.blocks, layers, strict=True):
        factors = [t for t in block.tensors().values() if t.dim() >= 2 and t.shape[-1] == t.shape[-2]]
        measured += sum(t.numel() for t in factors)
        wanted += into**2 + out**2
        entries += into * (into + 1) // 2 + out * (out + 1) // 2
    size = la.factors.blocks[0].tensors()
    width_of_number = next(iter(size.values())).element_size()
    weights = sum(p.numel() for p in model.parameters())
    return {
        "measured": measured * width_of_number,
        "formula": wanted * width_of_number,
        "free": entries,
        "weights": weights,
        "full": weights**2 * width_of_number,
        "fit_seconds": time.process_time() - start,
    }


def _timed(predict: Callable[[], Tensor]) -> tuple[Tensor, float]:
    start = time.process_time()
    return predict(), time.process_time() - start


def _cheap(digits: Digits) -> dict[str, Any]:
    """Fresh samples for every batch, a fixed ensemble, a smaller one, and a student."""
    settings = digits.settings
    la = digits.laplace("kron")
    x, y = digits.data("test", min(2000, settings.test))
    count, few = settings.samples, max(2, settings.samples // 5)
    fixed = la.ensemble(count, digits.generator(80))

    def fresh() -> Tensor:
        parts = x.split(500)
        source = digits.generator(81)
        return torch.cat([la.predict(p, kind="sampling", samples=count, generator=source).mean for p in parts])

    torch.manual_seed(digits.seed)
    student = network(max(8, settings.width // 4))
    teacher = Particles(la.model, fixed)
    inputs = torch.bernoulli(digits.data("train", min(10_000, settings.train))[0], generator=digits.generator(82))
    found = distil(
        teacher,
        student,
        list(inputs.split(128)),
        epochs=5,
        test=batches((x, y), 500),
        generator=digits.generator(83),
        show=False,
    )
    ways: dict[str, Callable[[], Tensor]] = {
        "fresh": fresh,
        "fixed": lambda: probabilities(teacher, x, size=500),
        "few": lambda: probabilities(Particles(la.model, fixed[:few]), x, size=500),
        "student": lambda: found.student.predict(x).mean,
        "network": lambda: digits.predictor("deterministic", 1).predict(x).mean,
    }
    result: dict[str, Any] = {"kl": found.kl, "entropy_difference": found.entropy_difference}
    for name, predict in ways.items():
        p, seconds = _timed(predict)
        result |= {f"{name}_nll": metrics.nll(p, y), f"{name}_prediction_seconds": seconds}
    return result


@dataclass(frozen=True)
class Small:
    """Small networks on a part of MNIST.

    Attributes:
        settings: The settings of the part.
        data_dir: The folder with the data sets.
        seed: The seed.
    """

    settings: Outlook
    data_dir: Path
    seed: int

    def data(self, part: str, count: int, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Some images of MNIST."""
        x, y = images(self.data_dir, "mnist", part)
        return x[offset : offset + count], y[offset : offset + count]

    def trained(self, x: Tensor, y: Tensor, seed: int) -> nn.Sequential:
        """A small network at a mode of its posterior under the prior N(0, 1), roughly."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            width = self.settings.width
            model = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
            optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.settings.steps)
            for _ in range(self.settings.steps):
                index = torch.randint(len(x), (64,))
                optimiser.zero_grad()
                decay = PRIOR / (2 * len(x)) * torch.stack([p.square().sum() for p in model.parameters()]).sum()
                (F.cross_entropy(model(x[index]), y[index]) + decay).backward()
                optimiser.step()
                schedule.step()
        return model.eval()

    def evidence(self) -> dict[str, Any]:
        """The evidence against the grid for every member, and their mixture."""
        settings = self.settings
        x, y = self.data("train", settings.train, self.seed * settings.train)
        held_out, (test, labels) = self.data("validation", 500), self.data("test", settings.test)
        tuned: dict[str, list[am.Laplace]] = {"evidence": [], "grid": []}
        rows: dict[str, list[float]] = {
            name: [] for name in ("network", "evidence", "evidence_sampling", "grid", "grid_sampling")
        }
        for member in range(settings.members):
            model = self.trained(x, y, 100 * self.seed + member)
            with torch.no_grad():
                rows["network"].append(metrics.nll(model(test).softmax(-1), labels))
            for name in ("evidence", "grid", "grid_sampling"):
                la = am.Laplace(model, "classification", prior_precision=PRIOR).fit([(x, y)], progress=False)
                self._tune(la, name, held_out)
                if name in tuned:
                    tuned[name].append(la)
                    rows[name].append(self._nll(la, "linearised", test, labels))
                if name != "grid":
                    rows[f"{name.removesuffix('_sampling')}_sampling"].append(self._nll(la, "sampling", test, labels))
        found: dict[str, Any] = {name: sum(values) / len(values) for name, values in rows.items()}
        for name, members in tuned.items():
            mixed = am.Mixture(members, weights="uniform").predict(test, generator=torch.Generator().manual_seed(0))
            found |= {f"{name}_best_member": min(rows[name]), f"{name}_mixture": metrics.nll(mixed.mean, labels)}
        return found

    def _tune(self, la: am.Laplace, name: str, held_out: tuple[Tensor, Tensor]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", am.errors.StatisticalWarning)  # The numbers are shown as they are.
            if name == "evidence":
                la.tune(method="evidence")
                return
            la.tune(
                [held_out],
                method="grid",
                kind="linearised" if name == "grid" else "sampling",
                samples=30,
                precisions=self.settings.ratios,
                scales=self.settings.scales,
            )

    def _nll(self, la: am.Laplace, kind: str, x: Tensor, y: Tensor) -> float:
        p = la.predict(x, kind=kind, samples=100, generator=torch.Generator().manual_seed(self.seed))
        return metrics.nll(p.mean, y)

    def ask(self, acquisition: str) -> dict[str, Any]:
        """Labels that are asked for one batch after another."""
        settings = self.settings

        def fit(x: Tensor, y: Tensor, generator: torch.Generator | None) -> am.Laplace:
            la = am.Laplace(self.trained(x, y, self.seed), "classification", prior_precision=PRIOR)
            la.fit([(x, y)], progress=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", am.errors.StatisticalWarning)
                return la.tune(method="evidence")

        x, y = self.data("train", settings.pool, self.seed * settings.pool)
        history = active_learning(
            x,
            y,
            fit,
            acquisition=acquisition,
            batch=10,
            budget=settings.labels,
            initial=20,
            test=batches(self.data("test", settings.test), 1000),
            generator=torch.Generator().manual_seed(self.seed),
            show=False,
        )
        return {
            "accuracy": history.accuracy[-1],
            "curves": {"labels": list(history.labels), "accuracy": list(history.accuracy)},
        }


# Verdicts


def verdicts(results: Results) -> list[Verdict]:
    """R19 and R20."""
    cheap = {"memory/bytes": 1, "memory/cheap/*": results.settings.images.seeds}
    names = ("evidence", "mutual_information", "random")
    outlook = {f"outlook/{name}/*": results.settings.outlook.seeds for name in names}
    return [
        *judged(results, cheap, ("R19",), lambda r: [_memory(r)]),
        *judged(results, outlook, ("R20",), lambda r: [_outlook(r)]),
    ]


def _memory(results: Results) -> Verdict:
    size = results.values["memory/bytes"]
    ours = (
        f"{size['measured'] / 2**20:.1f} MB of factors, by formula {size['formula'] / 2**20:.1f} MB "
        f"(the full matrix: {size['full'] / 2**40:.1f} TB); "
    )
    times = []
    for way, name in (
        ("fresh", "fresh samples"),
        ("fixed", "fixed ensemble"),
        ("few", "a fifth of it"),
        ("student", "distilled network"),
    ):
        loss = paired(results.numbers("memory/cheap/*", f"{way}_nll"), results.numbers("memory/cheap/*", "fresh_nll"))
        seconds = results.text("memory/cheap/*", f"{way}_prediction_seconds", 2)
        times.append(f"{name} {seconds} s" + ("" if way == "fresh" else f", NLL {loss.mean:+.4f}"))
    seeds = len(results.among("memory/cheap/*"))
    reason = "measured and formula differ"
    return Verdict.of("R19", size["measured"] == size["formula"], ours + "; ".join(times), reason, seeds)


def _labels(results: Results) -> list[tuple[float, float]]:
    """For each seed the labels that both choices need for what random choice has at the end, the mean of its last three rounds."""
    found = []
    for key, other in sorted(results.among("outlook/random/*").items()):
        own = results.values[key.replace("random", "mutual_information")]["curves"]
        level = sum(other["curves"]["accuracy"][-3:]) / len(other["curves"]["accuracy"][-3:])
        counts = [
            next((n for n, a in zip(c["labels"], c["accuracy"], strict=True) if a >= level), c["labels"][-1] + 10)
            for c in (own, other["curves"])
        ]
        found.append((float(counts[0]), float(counts[1])))
    return found


def _outlook(results: Results) -> Verdict:
    def of(name: str) -> list[float]:
        return results.numbers("outlook/evidence/*", name)

    asked, at_random = ([pair[k] for pair in _labels(results)] for k in (0, 1))
    conditions = [
        not paired(of("evidence"), of("grid")).higher,
        paired(of("evidence_mixture"), of("evidence_best_member")).lower,
        paired(of("grid_mixture"), of("grid_best_member")).lower,
        paired(asked, at_random).lower,
    ]
    ours = (
        f"NLL by evidence {mean_and_error(of('evidence'))} (grid {mean_and_error(of('grid'))}; under weight samples "
        f"{mean_and_error(of('evidence_sampling'))} and {mean_and_error(of('grid_sampling'))}; network {mean_and_error(of('network'))}); "
        f"mixture {mean_and_error(of('evidence_mixture'))} against its best member's {mean_and_error(of('evidence_best_member'))} by evidence, "
        f"{mean_and_error(of('grid_mixture'))} against {mean_and_error(of('grid_best_member'))} by the grid; "
        f"labels {mean_and_error(asked, 0)} against {mean_and_error(at_random, 0)} at random"
    )
    parts = (
        "evidence no worse than the grid",
        "mixture better by evidence",
        "mixture better by the grid",
        "fewer labels",
    )
    reason = ", ".join(f"{name} {'yes' if held else 'no'}" for name, held in zip(parts, conditions, strict=True))
    return Verdict.of("R20", conditions, ours, f"{reason}. {_why_not(results)}", results.settings.outlook.seeds)


def _why_not(results: Results) -> str:
    """What the numbers say about each part that may fail."""

    def of(name: str) -> list[float]:
        return results.numbers("outlook/evidence/*", name)

    loss = paired(of("evidence"), of("network"))
    gains = [paired(of(f"{name}_mixture"), of(name)) for name in ("evidence", "grid")]
    told = []
    if loss.higher:
        told.append(f"Posteriors by evidence are too wide: their NLL less that of the network itself is {loss}")
    told.append(
        f"a mixture is compared with the member that is best in hindsight; from the average member it differs by {gains[0]} by evidence and {gains[1]} by the grid"
    )
    told.append("mutual information of so few labels follows the brightness of an image (see the README)")
    return "; ".join(told)
