"""What every metric asks of its tensors, said once: they are real, finite, of the right shape, and distributions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aftermap.errors import DataError, InputError, ShapeError

__all__ = [
    "PROBABILITY_FLOOR",
    "SUM_TOLERANCE",
    "TensorLike",
    "check_classification",
    "check_flags",
    "check_gaussian",
    "check_probabilities",
    "check_real",
    "check_same_shape",
    "check_samples",
    "check_scores",
    "check_variance",
    "to_tensor",
]

TensorLike = Tensor | npt.ArrayLike
# Probabilities are raised to this inside a logarithm, and nowhere else.
PROBABILITY_FLOOR = 1e-12
# A row of probabilities may sum away from one by this much: room for float32, not for logits.
SUM_TOLERANCE = 1e-4


def to_tensor(name: str, value: TensorLike) -> Tensor:
    """Returns ``value`` as a tensor: tensors pass through, anything else goes by way of numpy."""
    if isinstance(value, Tensor):
        # Apple's device has no float64, so the result is then on the CPU.
        return value.cpu() if value.device.type == "mps" else value
    try:
        # The copy is needed because torch warns about read-only arrays and refuses negative strides.
        return torch.from_numpy(np.array(value))
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{name} must be a tensor or an array of numbers, got {type(value).__name__} ({error}). "
            "Pass a torch tensor, a numpy array or a list of equal length rows."
        ) from error


def _first_bad(bad: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in bad.nonzero()[0])


def check_real(name: str, value: TensorLike, *, allow_infinite: bool = False, allow_empty: bool = False) -> Tensor:
    """Returns ``value`` as float64, refusing NaN, infinity (unless allowed), complex numbers and emptiness."""
    tensor = to_tensor(name, value)
    if tensor.is_complex():
        raise InputError(f"{name} must be real, got {tensor.dtype}. Pass its real part or its modulus.")
    tensor = tensor.to(torch.float64)
    if tensor.numel() == 0 and not allow_empty:
        raise DataError(f"{name} is empty (shape {list(tensor.shape)}), but at least one value is needed.")
    bad = tensor.isnan() if allow_infinite else ~tensor.isfinite()
    if bad.any():
        where = _first_bad(bad)
        kind = "NaN" if allow_infinite else "NaN or infinite"
        raise DataError(
            f"{name} holds {int(bad.sum())} {kind} value(s) out of {tensor.numel()}, the first at index "
            f"{list(where)}. Find out where they come from, or leave those examples out."
        )
    return tensor


def check_probabilities(name: str, value: TensorLike, *, min_dim: int = 1, allow_empty: bool = False) -> Tensor:
    """Returns probabilities over the last dimension as float64, refusing what is no distribution."""
    probs = check_real(name, value, allow_empty=allow_empty)
    if probs.dim() < min_dim or probs.shape[-1] < 2:
        raise ShapeError(
            f"{name} must have at least {min_dim} dimension(s), the last over two or more classes, got shape "
            f"{list(probs.shape)}. For one probability per example pass torch.stack([1 - p, p], -1)."
        )
    negative = probs < 0
    if negative.any():
        where = _first_bad(negative)
        raise DataError(
            f"{name} must not be negative, got {probs[where].item():.6g} at index {list(where)}. "
            "If these are logits, pass logits.softmax(-1)."
        )
    sums = probs.sum(-1)
    wrong = (sums - 1.0).abs() > SUM_TOLERANCE
    if wrong.any():
        where = _first_bad(wrong)
        raise DataError(
            f"{name} must sum to one over the last dimension (within {SUM_TOLERANCE:g}), but the row at "
            f"index {list(where)} sums to {sums[where].item():.6g}. If these are logits, pass "
            "logits.softmax(-1); if they are half precision, take the softmax in float32."
        )
    return probs


def _check_labels(labels: TensorLike, probs: Tensor) -> Tensor:
    tensor = to_tensor("labels", labels)
    if tensor.is_floating_point() or tensor.is_complex():
        raise InputError(
            f"labels must be integers (class indices), got {tensor.dtype}. Pass labels.long(), "
            "or labels.argmax(-1) if they are one-hot."
        )
    if tensor.shape != probs.shape[:-1]:
        hint = "Average the probabilities over samples first." if tensor.dim() < probs.dim() - 1 else ""
        if tensor.shape == probs.shape:
            hint = "If the labels are one-hot, pass labels.argmax(-1)."
        raise ShapeError(
            f"labels must have the shape of probs without its last dimension, {list(probs.shape[:-1])}, got "
            f"{list(tensor.shape)} for probs of shape {list(probs.shape)}. {hint}".rstrip()
        )
    tensor = tensor.to(device=probs.device, dtype=torch.int64)
    n_classes = probs.shape[-1]
    outside = (tensor < 0) | (tensor >= n_classes)
    if outside.any():
        where = _first_bad(outside)
        raise DataError(
            f"labels must lie in 0..{n_classes - 1} for {n_classes} classes, got {int(tensor[where])} at "
            f"index {list(where)}. Number the classes from 0 and leave out masked positions (such as -100)."
        )
    return tensor


def check_classification(probs: TensorLike, labels: TensorLike, *, allow_empty: bool = False) -> tuple[Tensor, Tensor]:
    """Returns probabilities [N, C] and labels [N]; leading dimensions (tokens, pixels) are flattened."""
    p = check_probabilities("probs", probs, min_dim=2, allow_empty=allow_empty)
    y = _check_labels(labels, p)
    return p.reshape(-1, p.shape[-1]), y.reshape(-1)


def check_samples(name: str, value: TensorLike, targets: TensorLike) -> tuple[Tensor, Tensor]:
    """Returns samples [S, *shape] and targets [*shape], both float64."""
    samples = check_real(name, value)
    y = check_real("targets", targets)
    if samples.dim() < 2 or samples.shape[1:] != y.shape:
        raise ShapeError(
            f"{name} must have shape [S, *targets.shape] = [S, {', '.join(map(str, y.shape))}], got "
            f"{list(samples.shape)}. Put the samples in the first dimension and squeeze trailing ones."
        )
    return samples, y.to(samples.device)


def check_same_shape(**tensors: Tensor) -> None:
    """Refuses tensors of different shapes: broadcasting [N] against [N, 1] would make an N x N table."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(f"all of these must have the same shape, got {listed}. Squeeze or expand them first.")


def check_variance(name: str, value: TensorLike, shape: Sequence[int], *, allow_empty: bool = False) -> Tensor:
    """Returns a positive variance; a single number stands for the same variance everywhere."""
    variance = check_real(name, value, allow_empty=allow_empty)
    if variance.dim() == 0:
        variance = variance.expand(tuple(shape))
    bad = variance <= 0
    if bad.any():
        where = _first_bad(bad)
        raise DataError(
            f"{name} must be positive, got {variance[where].item():.6g} at index {list(where)}. "
            "Add the observation noise, or check that it is a variance and not its logarithm."
        )
    return variance


def check_gaussian(
    mean: TensorLike, variance: TensorLike, targets: TensorLike, *, allow_empty: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, variance and targets of one shape, [N] or [N, D], all float64."""
    mu = check_real("mean", mean, allow_empty=allow_empty)
    if mu.dim() == 0:
        raise ShapeError("mean must have shape [N] or [N, D], got a single number. Pass a vector.")
    y = check_real("targets", targets, allow_empty=allow_empty).to(mu.device)
    var = check_variance("variance", variance, mu.shape, allow_empty=allow_empty).to(mu.device)
    check_same_shape(mean=mu, variance=var, targets=y)
    return mu, var, y


def check_flags(name: str, value: TensorLike) -> Tensor:
    """Returns a vector [N] of booleans from booleans or from zeros and ones."""
    tensor = to_tensor(name, value)
    if tensor.dim() != 1:
        raise ShapeError(f"{name} must be a vector [N], got shape {list(tensor.shape)}. Flatten it first.")
    if tensor.dtype == torch.bool:
        return tensor
    bad = (tensor != 0) & (tensor != 1)
    if bad.any():
        where = _first_bad(bad)
        raise DataError(
            f"{name} must be booleans or zeros and ones, got {tensor[where].item()} at index {list(where)}. "
            "Compare with what you count as positive first."
        )
    return tensor.to(torch.bool)


def check_scores(name: str, value: TensorLike, *, allow_empty: bool = False) -> Tensor:
    """Returns a vector [N] of scores; infinite scores are allowed, since only their order counts."""
    scores = check_real(name, value, allow_infinite=True, allow_empty=allow_empty)
    if scores.dim() != 1:
        raise ShapeError(
            f"{name} must be a vector [N], one score per example, got shape {list(scores.shape)}. Flatten it first."
        )
    return scores
