"""Occam's razor: networks with 1, 5 and 20 hidden layers, ranked by the evidence and by the likelihood of test data (L2)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import aftermap as am
from examples.occams_razor import data, network
from experiments.framework import Job
from experiments.immer2021.settings import Occam

__all__ = ["jobs"]


def _job(settings: Occam, depth: int, seed: int) -> dict[str, Any]:
    train, test = data(120, 2 * seed), data(settings.test, 2 * seed + 1)

    def factory() -> torch.nn.Module:
        torch.manual_seed(seed)
        return network(depth, settings.width)

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", am.errors.StatisticalWarning)  # Whether it is at a mode is in the numbers.
        best = am.select(
            {"it": factory},
            train,
            "regression",
            test=test,
            generator=torch.Generator().manual_seed(seed),
            epochs=settings.epochs,
            lr=1e-2,
            frequency=max(1, settings.epochs // 10),
        ).best
    line = torch.linspace(-1.3, 1.3, 80)[:, None]
    prediction = best.training.laplace.predict(line)
    count = sum(len(y) for _, y in train)
    assert best.test_log_likelihood is not None
    return {
        "log_evidence": best.log_evidence,
        "log_evidence_per_datum": best.log_evidence / count,
        "test_log_likelihood": best.test_log_likelihood,
        "effective_parameters": best.training.best.effective_parameters,
        "stationary": best.stationary,
        "noise": best.training.best.noise,
        "weights": best.n_params,
        "curves": {
            "x": line[:, 0],
            "mean": prediction.mean[:, 0],
            "sd": prediction.epistemic[:, 0].sqrt(),
            "total_sd": prediction.total[:, 0].sqrt(),
            "data": [train[0][0][:, 0].tolist(), train[0][1][:, 0].tolist()],
        },
    }


def jobs(settings: Occam) -> Iterator[Job]:
    """A job for every depth and seed."""
    for seed in range(settings.seeds):
        for depth in settings.depths:
            yield Job(f"occam/depth{depth}/seed{seed}", partial(_job, settings, depth, seed))
