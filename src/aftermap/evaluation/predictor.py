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

    @property
    def predict(self) -> Callable[..., Prediction]:
        """The function that returns a Prediction for the inputs x, with options of the predictor's own."""
        ...


@dataclass(frozen=True)
class PredictedData:
    """The predictions for a data set, without their samples, and what belongs to them.

    Attributes:
        prediction: The prediction for all N examples, on the CPU.
        targets: The targets [N, ...], or None if the data have none.
        data_hash: The SHA-256 hash of inputs and targets, in order.
        input_shape: The shape of one example's (first) input.
    """

    prediction: Prediction
    targets: Tensor | None
    data_hash: str
    input_shape: tuple[int, ...]


def check_predictor_object(predictor: object) -> Predictor:
    """Returns the object if it can predict, and raises an error otherwise."""
    if not isinstance(predictor, Predictor):
        hint = ""
        if isinstance(predictor, nn.Module):
            hint = "; for a plain network use aftermap.baselines.Deterministic(model)"
        raise InputError(f"a predictor needs a method predict(x), which {type(predictor).__name__} does not have{hint}")
    return predictor


def accepts(predictor: Predictor, name: str) -> bool:
    """Tells whether ``predict`` takes an argument of this name."""
    known = inspect.signature(predictor.predict).parameters
    return name in known or any(p.kind is p.VAR_KEYWORD for p in known.values())


def model_of(predictor: object) -> nn.Module | None:
    """Returns the network behind a predictor, or None if the predictor shows none."""
    model = getattr(predictor, "model", None)
    return model if isinstance(model, nn.Module) else None


def predict_all(
    predictor: Predictor,
    data: Iterable[Any],
    *,
    options: Mapping[str, Any] | None = None,
    unpack: Unpack | None = None,
    need_targets: bool = True,
    on_inputs: Callable[[Any], None] | None = None,
) -> PredictedData:
    """Predicts a whole data set, batch by batch.

    Args:
        predictor: The method that predicts.
        data: Batches of (x, y).
        options: Options that are passed to ``predict``.
        unpack: A function that turns a batch of another form into (inputs, targets).
        need_targets: Whether to refuse data without targets.
        on_inputs: A function that is called with the inputs of every batch, for what else is computed for the same
            examples of data that may be shuffled or read only once.

    Returns:
        The predictions with their targets.

    Raises:
        DataError: The data are empty, or have no targets although they are needed.
    """
    model = model_of(predictor)
    device = torch.device("cpu") if model is None else check_device(model)[0]
    digest = hashlib.sha256()
    predictions, targets, shape = [], [], None
    for batch in iterate(data, device=device, dtype=None, unpack=unpack):
        prediction = without_samples(predictor.predict(batch.inputs, **(options or {})))
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


def without_samples(prediction: Prediction) -> Prediction:
    """Returns a detached prediction without covariances and, for classes, without samples: metrics need neither, and they fill memory.

    The samples of other predictions are kept, since their density and quantiles are made of them.
    """
    prediction = prediction.detach()
    if prediction.kind not in ("classification", "binary"):
        return replace(prediction, latent_cov=None, latent_var=_variance(prediction))
    return replace(
        prediction, samples=None, sample_variance=None, weights=None, latent_cov=None, latent_var=_variance(prediction)
    )


def _variance(prediction: Prediction) -> Tensor | None:
    """Returns what the score "variance" needs: the latent variance if there is one, else that of the sampled probabilities."""
    if prediction.kind not in ("classification", "binary"):
        return prediction.latent_var
    if prediction.latent_var is not None or prediction.latent_cov is not None or prediction.samples is not None:
        return prediction._class_variance()
    return None
