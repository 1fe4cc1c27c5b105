"""What evaluation asks of a method: `predict(x) -> Prediction`, and going through data with it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from aftermap.batches import Unpack, iterate, tensors_of
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.models import check_device
from aftermap.predictive import Prediction

__all__ = [
    "PredictedData",
    "Predictor",
    "accepts",
    "check_predictor_object",
    "model_of",
    "predict_all",
    "without_samples",
]


@runtime_checkable
class Predictor(Protocol):
    """Anything that predicts: Laplace, an optimiser's posterior, every baseline, or an object of your own."""

    def predict(self, x: Any, **options: Any) -> Prediction:
        """A Prediction for inputs x."""
        ...


@dataclass(frozen=True)
class PredictedData:
    """Predictions for a data set, without the samples, and what belongs to them.

    Attributes:
        prediction: of all N examples, on the CPU.
        targets: [N, ...], or None if the data have none.
        data_hash: SHA-256 of inputs and targets, in order.
        input_shape: shape of one example's (first) input.
    """

    prediction: Prediction
    targets: Tensor | None
    data_hash: str
    input_shape: tuple[int, ...]


def check_predictor_object(predictor: object) -> Predictor:
    """Raises unless the object predicts."""
    if not isinstance(predictor, Predictor):
        hint = ""
        if isinstance(predictor, nn.Module):
            hint = "; for a plain network use aftermap.baselines.Deterministic(model)"
        raise InputError(f"a predictor needs a method predict(x), which {type(predictor).__name__} does not have{hint}")
    return predictor


def accepts(predictor: Predictor, name: str) -> bool:
    """Whether ``predict`` takes an argument of this name."""
    known = inspect.signature(predictor.predict).parameters
    return name in known or any(p.kind is p.VAR_KEYWORD for p in known.values())


def model_of(predictor: object) -> nn.Module | None:
    """The network behind a predictor, if it shows one."""
    model = getattr(predictor, "model", None)
    return model if isinstance(model, nn.Module) else None


def predict_all(
    predictor: Predictor,
    data: Iterable[Any],
    *,
    options: Mapping[str, Any] | None = None,
    unpack: Unpack | None = None,
    need_targets: bool = True,
    keep_samples: bool = False,
    on_inputs: Callable[[Any], None] | None = None,
) -> PredictedData:
    """Predicts a whole data set, batch by batch.

    Args:
        predictor: the method.
        data: batches of (x, y).
        options: passed to ``predict``.
        unpack: turns a batch of another form into (inputs, targets).
        need_targets: refuse data without targets.
        keep_samples: keep the S samples of every example (memory: S times the mean).
        on_inputs: called with the inputs of every batch: what else is computed for the same examples, of data that may be
            shuffled or read once only.

    Returns:
        The predictions with their targets.

    Raises:
        DataError: data without targets, or that are empty.
    """
    model = model_of(predictor)
    device = torch.device("cpu") if model is None else check_device(model)[0]
    digest = hashlib.sha256()
    predictions, targets, shape = [], [], None
    for batch in iterate(data, device=device, dtype=None, unpack=unpack):
        prediction = without_samples(predictor.predict(batch.inputs, **(options or {})), keep_samples=keep_samples)
        predictions.append(prediction.cpu())
        if on_inputs is not None:
            on_inputs(batch.inputs)
        if not isinstance(batch.targets, Tensor) and need_targets:
            raise DataError("a batch has no tensor of targets, and metrics need them; pass (x, y) batches")
        for tensor in (*tensors_of(batch.inputs), *tensors_of(batch.targets)):
            digest.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if isinstance(batch.targets, Tensor):
            targets.append(batch.targets.cpu())
        now = tuple(next(iter(tensors_of(batch.inputs))).shape[1:])
        if shape is None:
            shape = now
    if not predictions or shape is None:
        raise DataError("the data hold no example")
    if targets and len({t.shape[1:] for t in targets}) > 1:
        raise ShapeError("the targets of two batches have different shapes; they cannot be evaluated together")
    joined = torch.cat(targets) if len(targets) == len(predictions) else None
    return PredictedData(Prediction.concatenate(predictions), joined, f"sha256:{digest.hexdigest()}", shape)


def without_samples(prediction: Prediction, *, keep_samples: bool = False) -> Prediction:
    """Returns a detached prediction without covariances and, for classes, without samples: metrics need neither, and they fill memory.

    The samples of other predictions are kept, since their density and quantiles are made of them.
    """
    prediction = prediction.detach()
    classes = prediction.kind in ("classification", "binary")
    if keep_samples or not classes:
        return replace(prediction, latent_cov=None, latent_var=_variance(prediction))
    return replace(
        prediction, samples=None, sample_variance=None, weights=None, latent_cov=None, latent_var=_variance(prediction)
    )


def _variance(prediction: Prediction) -> Tensor | None:
    """What the score "variance" needs: the latent variance, else that of the sampled probabilities."""
    if prediction.kind not in ("classification", "binary"):
        return prediction.latent_var
    if prediction.latent_var is not None or prediction.latent_cov is not None or prediction.samples is not None:
        return prediction._class_variance()
    return None
