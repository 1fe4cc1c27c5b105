"""A posterior folder of the command line: with the network, what it was fitted on, and thresholds; and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.cli.models import make_model
from aftermap.cli.sources import Batches, DataOptions, Source
from aftermap.errors import DataError, InputError
from aftermap.evaluation import Threshold, choose_threshold
from aftermap.evaluation.ood import available_scores
from aftermap.evaluation.predictor import predict_all
from aftermap.laplace import Laplace, load
from aftermap.optim import TrainedPosterior
from aftermap.posteriors.io import load_posterior, read_model_state, read_saved_config

__all__ = ["Fitted", "calibrate", "describe_data", "load_fitted", "save_fitted"]

_QUANTILES = 201


@dataclass(frozen=True)
class Fitted:
    """What a folder holds, ready to predict.

    Attributes:
        predictor: a `Laplace`, or a `TrainedPosterior`.
        model: the network.
        extras: model, data, task, thresholds, checks: everything that the command line keeps.
        reference: quantiles of scores on validation data.
    """

    predictor: Laplace | TrainedPosterior
    model: nn.Module
    extras: dict[str, Any]
    reference: dict[str, Tensor]

    def threshold(self, score: str) -> Threshold | None:
        """The threshold of a score, if one was chosen."""
        found = self.extras.get("thresholds", {}).get(score)
        return None if found is None else Threshold.from_dict(found)

    def predict_options(self, kind: str, samples: int) -> dict[str, Any]:
        """Options for `predict`: "auto" is what suits the posterior."""
        if kind not in ("auto", "linearised", "sampling"):
            raise InputError(f"--kind {kind!r} is not known; allowed are auto, linearised, sampling")
        own = "linearised" if isinstance(self.predictor, Laplace) else "sampling"
        return {"kind": own if kind == "auto" else kind, "samples": samples}

    def data_options(self, options: DataOptions) -> DataOptions:
        """Flags about data, filled up with what the training data were like."""
        data = self.extras.get("data", {})

        def tuple_of(key: str) -> tuple[str, ...] | None:
            return None if data.get(key) is None else tuple(data[key])

        size = data.get("image_size")
        return replace(
            options,
            target=options.target or data.get("target"),
            columns=tuple_of("columns"),
            classes=tuple_of("classes"),
            folder=options.folder or data.get("folder"),
            image_size=options.image_size or (None if size is None else tuple(size)),
            channels=options.channels or data.get("channels"),
            task=self.extras.get("task", options.task) if options.task == "auto" else options.task,
        )


def calibrate(
    predictor: Any, batches: Batches, options: Mapping[str, Any], rate: float, seed: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Thresholds and quantiles of every score on held-out data.

    Returns:
        score -> threshold as plain values, and score -> 201 quantiles from the lowest to the highest.
    """
    chosen = {**options, "generator": torch.Generator().manual_seed(seed)}
    found = available_scores(predict_all(predictor, batches, options=chosen, need_targets=False).prediction)
    levels = torch.linspace(0, 1, _QUANTILES, dtype=torch.float64)
    thresholds = {s: choose_threshold(v, false_alarm_rate=rate, score=s).to_dict() for s, v in found.items()}
    return thresholds, {s: torch.quantile(v.double(), levels) for s, v in found.items()}


def save_fitted(
    predictor: Laplace | TrainedPosterior,
    folder: Path,
    extras: Mapping[str, Any],
    reference: Mapping[str, Tensor] | None,
    *,
    overwrite: bool,
) -> Path:
    """Writes everything that prediction needs, whole or not at all."""
    given = None if not reference else dict(reference)
    return predictor.save(folder, overwrite=overwrite, extras=extras, reference=given, with_model=True)


def load_fitted(
    folder: Path, *, model: str | None = None, weights: Path | None = None, device: torch.device | None = None
) -> Fitted:
    """Reads a folder and builds its network.

    Args:
        folder: written by fit or train, or by `Laplace.save`.
        model: another way to build the network than the one that was saved.
        weights: another place of its weights.
        device: where everything goes.

    Raises:
        DataError: no posterior, or a damaged one.
        InputError: the network cannot be built, or does not fit.
    """
    config = read_saved_config(folder)
    extras = dict(config.get("extras", {}))
    told = extras.get("model", {})
    spec = model or told.get("spec")
    if spec is None:
        raise InputError(f"{folder} does not say how its network is built; add --model and --weights")
    state = weights if weights is not None else read_model_state(folder)
    if state is None:
        raise InputError(f"{folder} does not hold the network's weights; add --weights")
    network = make_model(
        spec, options=told.get("options"), weights=state, device=device, seed=int(extras.get("seed", 0))
    )
    predictor = load(folder, network, device=device)
    if isinstance(predictor, TrainedPosterior) and config.get("likelihood") is None:
        raise DataError(f"{folder} does not say its likelihood")
    return Fitted(predictor, network, extras, load_posterior(folder, device=device).reference or {})


def describe_data(source: Source, options: DataOptions) -> dict[str, Any]:
    """What later commands must know about the training data."""
    examples = source.examples
    return {
        "train": source.spec,
        "target": options.target,
        "columns": None if examples is None or examples.columns is None else list(examples.columns),
        "classes": None if examples is None or examples.classes is None else list(examples.classes),
        "shape": None if examples is None else list(examples.inputs.shape[1:]),
        "folder": options.folder,
        "image_size": None if options.image_size is None else list(options.image_size),
        "channels": options.channels,
    }
