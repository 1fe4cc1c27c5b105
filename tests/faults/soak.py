"""One process for a long time, many threads, worker processes and copies: the same numbers, and no growth of memory.

`python -m tests.faults.soak` (or some of its parts: growth, threads, workers, copies) writes benchmarks/results/soak.json, which `python -m tests.faults.page` puts on the page of reliability.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import multiprocessing
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.hessian_free import HessianFree

__all__ = [
    "COPIES",
    "MOST_ERROR",
    "MOST_GROWTH",
    "OUTPUT",
    "PARTS",
    "STRUCTURES",
    "WAYS",
    "WORKS",
    "data",
    "difference",
    "fitted",
    "main",
    "memory_growth",
    "network",
    "objects",
    "thread_error",
    "worker_error",
    "wrong",
]

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "results" / "soak.json"
STRUCTURES = ("kron", "ekfac", "diagonal", "full", "low_rank", "subset")
WAYS = ("fork", "spawn")
WORKS = {"predict": 10_000, "fit": 200}
MOST_GROWTH = 6 << 20  # One thousand bytes per prediction would be 9 MB; the allocator itself moves by a few.
MOST_ERROR = 1e-6
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}


def network() -> nn.Sequential:
    """A small network with fixed weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).eval()


def data(count: int = 40) -> tuple[Tensor, Tensor]:
    """Inputs and labels, the same at every call."""
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3


def fitted(structure: str = "kron") -> am.Laplace:
    """A posterior over the small network."""
    la = am.Laplace(network(), "classification", structure=structure, subset_size=20)
    return la.fit([data()], generator=torch.Generator().manual_seed(0))


def resident() -> int:
    """The bytes that the process holds in memory now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_growth(work: str, count: int) -> int:
    """How many bytes the process grew by while it did the last nine tenths of the work.

    Args:
        work: "predict", or "fit" with tuning and a prediction.
        count: How often it is done.
    """
    la, (x, _) = fitted(), data(8)

    def once() -> None:
        if work == "predict":
            la.predict(x, link="probit")
        else:
            fitted().tune(method="evidence").predict(x, link="probit")

    for _ in range(count // 10):
        once()
    before = resident()
    for _ in range(count - count // 10):
        once()
    return resident() - before


def thread_error(structure: str, threads: int = 8, rounds: int = 4) -> float:
    """The largest difference between predictions that threads made at once on one object and those of one thread."""
    la, (x, _) = fitted(structure), data(8 * threads)
    parts = x.split(8)
    expected = [la.predict(part, link="probit") for part in parts]
    fresh = fitted(structure)  # Its first predictions, which plan and remember, happen at once.
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda part: fresh.predict(part, link="probit"), list(parts) * rounds))
    pairs = [(prediction, expected[number % threads]) for number, prediction in enumerate(found)]
    return max(
        float((getattr(one, name) - getattr(two, name)).abs().max())
        for one, two in pairs
        for name in ("mean", "latent_cov")
    )


def _predict_in_worker(task: tuple[am.Laplace, Tensor]) -> tuple[Tensor, Tensor]:
    torch.set_num_threads(1)
    la, x = task
    prediction = la.predict(x, link="probit")
    # As arrays: tensors travel through shared memory, of which containers have little.
    return prediction.mean.numpy(), prediction.latent_cov.numpy()


def worker_error(method: str) -> float:
    """The largest difference between predictions of worker processes and of this one; the posterior is sent to them.

    Args:
        method: How workers start: "fork" or "spawn".
    """
    la, (x, _) = fitted(), data(32)
    expected = la.predict(x, link="probit")
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
        parts = list(pool.map(_predict_in_worker, [(la, part) for part in x.split(8)]))
    mean, covariance = (torch.cat([torch.from_numpy(p[k]) for p in parts]) for k in range(2))
    return max(float((mean - expected.mean).abs().max()), float((covariance - expected.latent_cov).abs().max()))


def objects() -> dict[str, Any]:
    """One object of every public kind that users hold after a call."""
    x, y = data()
    la, net = fitted(), network()
    tuned = fitted().tune(method="evidence")
    found: dict[str, Any] = {structure: fitted(structure) for structure in STRUCTURES}
    found |= {
        "Prediction": la.predict(x[:4]),
        "Factors": la.factors,
        "GaussianPosterior": la.posterior,
        "Prior": la.posterior.prior,
        "hyperparameters": la.hyperparameters,
        "EvidenceResult": tuned.tuning,
        "ValidationResult": fitted().tune([(x, y)], method="validation").tuning,
        "SelfConsistentResult": fitted().tune().tuning,
        "MatrixFreePosterior": am.Laplace(network(), "classification", structure="matrix_free").fit([(x, y)]).posterior,
        "DualPosterior": am.posteriors.DualPosterior.from_data(network(), [(x, y)], "classification"),
        "HessianFree": HessianFree(network(), "classification").fit([(x, y)], force=True),
        "Ensemble": am.Ensemble([network(), network()], "classification"),
        "TemperatureScaling": am.TemperatureScaling(network(), "classification").fit([(x, y)]),
        "Mixture": am.Mixture([fitted(), fitted()]),
        "Deterministic": am.baselines.Deterministic(network(), "classification"),
        "MCDropout": am.MCDropout(nn.Sequential(network(), nn.Dropout(0.1)), "classification"),
        "Where": la.where([(x, y)]),
        "Results": am.evaluate(la, [(x, y)]),
        "Reference": am.Reference.from_predictions(la.predict(x)),
        "Examples": am.data.Examples(x, y, "some"),
    }
    for detector in ("Energy", "GEN", "KNN", "Mahalanobis", "RelativeMahalanobis", "ViM"):
        options = {"k": 5} if detector == "KNN" else {}
        found[detector] = getattr(am.baselines, detector)(network(), **options).fit([(x, y)])
    for likelihood in ("Bernoulli", "Categorical", "Gaussian", "HeteroscedasticGaussian", "Poisson"):
        found[likelihood] = getattr(am.likelihoods, likelihood)()
    for name in ("VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC"):
        net = network()
        opt = getattr(am.optim, name)(net, lr=0.01, n_data=len(x))
        opt.step(lambda net=net: nn.functional.cross_entropy(net(x), y))
        found[f"posterior of {name}"] = opt.posterior("classification")
    return found


def difference(one: Any, two: Any, path: str = "", seen: set[int] | None = None) -> str | None:
    """Where two objects differ, in types, in plain values or in a bit of a tensor; None where they do not."""
    seen = set() if seen is None else seen
    if id(one) in seen:
        return None
    seen.add(id(one))
    if type(one) is not type(two):
        return f"{path}: {type(one).__name__} and {type(two).__name__}"
    if isinstance(one, Tensor):
        alike = one.dtype == two.dtype and one.shape == two.shape and one.requires_grad == two.requires_grad
        return None if alike and torch.equal(one.nan_to_num(), two.nan_to_num()) else f"{path}: other numbers"
    if isinstance(one, torch.Generator):
        return difference(one.get_state(), two.get_state(), path, seen)
    if isinstance(one, int | float | str | bytes | bool | torch.dtype | torch.device | Path) or one is None:
        return None if one == two or one != one else f"{path}: {one!r} and {two!r}"
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(one, Mapping):
        if list(map(str, one)) != list(map(str, two)):
            return f"{path}: other keys"
        parts = [(f"{path}[{k!r}]", a, b) for (k, a), b in zip(one.items(), two.values(), strict=True)]
    elif isinstance(one, Sequence):
        if len(one) != len(two):
            return f"{path}: other lengths"
        parts = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, two, strict=True))]
    elif dataclasses.is_dataclass(one):
        names = [f.name for f in dataclasses.fields(one)]
        parts = [(f"{path}.{n}", getattr(one, n), getattr(two, n)) for n in names]
    elif isinstance(one, nn.Module) or (hasattr(one, "__dict__") and not callable(one)):
        if list(vars(one)) != list(vars(two)):
            return f"{path}: other attributes"
        parts = [(f"{path}.{n}", a, vars(two)[n]) for n, a in vars(one).items()]
    return next((d for p, a, b in parts if (d := difference(a, b, p, seen)) is not None), None)


def _copies() -> dict[str, Any]:
    things = objects()
    return {
        how: {"objects": len(things), "other": [n for n, t in things.items() if difference(t, make(t)) is not None]}
        for how, make in COPIES.items()
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "growth": lambda: {w: {"count": n, "megabytes": round(memory_growth(w, n) / 2**20, 2)} for w, n in WORKS.items()},
    "threads": lambda: {s: thread_error(s) for s in STRUCTURES},
    "workers": lambda: {w: worker_error(w) for w in WAYS},
    "copies": _copies,
}


def main(parts: Sequence[str] = tuple(PARTS), output: Path = OUTPUT) -> dict[str, Any]:
    """Does some parts, and writes what was found beside what is there of the others."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", am.errors.StatisticalWarning)
    results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    results |= {part: PARTS[part]() for part in parts}
    output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


def wrong(results: Mapping[str, Any]) -> list[str]:
    """The parts in which memory grew, or numbers were others."""
    found = [f"growth, {w}" for w, e in results["growth"].items() if not e["megabytes"] < MOST_GROWTH / 2**20]
    for part in ("threads", "workers"):
        found += [f"{part}, {name}" for name, error in results[part].items() if not error < MOST_ERROR]
    return found + [f"{how}: {name}" for how, entry in results["copies"].items() for name in entry["other"]]


if __name__ == "__main__":
    told = main(sys.argv[1:] or tuple(PARTS))
    sys.stdout.write(json.dumps(told, indent=2) + "\n")
    sys.exit(f"wrong: {wrong(told)}" if wrong(told) else 0)
