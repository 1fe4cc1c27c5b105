"""The contract of a predictor: what everything with `predict(x) -> Prediction` does, and what a new one must do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.errors import InputError
from aftermap.evaluation.predictor import Predictor
from aftermap.predictive import Prediction

__all__ = ["ModelSnapshot", "check_predictor", "check_unchanged"]

_SEED = 20


@dataclass(frozen=True)
class ModelSnapshot:
    """Everything of a model that a function must not change, as it was.

    Attributes:
        tensors: For each parameter or buffer the object's id, and a copy of its values.
        grads: For each parameter the id of its ``.grad`` and a copy of it, or None.
        requires_grad: The flag of each parameter.
        training: The mode of each module.
        attributes: For each module the names in its ``__dict__``.
        hooks: For each module the keys of each of its hook tables.
    """

    tensors: Mapping[str, tuple[int, Tensor]]
    grads: Mapping[str, tuple[int, Tensor] | None]
    requires_grad: Mapping[str, bool]
    training: Mapping[str, bool]
    attributes: Mapping[str, tuple[str, ...]]
    hooks: Mapping[str, Mapping[str, tuple[Any, ...]]]

    @staticmethod
    def of(model: nn.Module) -> ModelSnapshot:
        """Returns the state of a model now."""
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        parameters = dict(model.named_parameters())
        modules = dict(model.named_modules())
        return ModelSnapshot(
            {n: (id(t), t.detach().clone()) for n, t in tensors.items()},
            {n: None if p.grad is None else (id(p.grad), p.grad.detach().clone()) for n, p in parameters.items()},
            {n: p.requires_grad for n, p in parameters.items()},
            {n: m.training for n, m in modules.items()},
            {n: tuple(m.__dict__) for n, m in modules.items()},
            {
                n: {k: tuple(v) for k, v in m.__dict__.items() if k.endswith(("_hooks", "_with_kwargs"))}
                for n, m in modules.items()
            },
        )


def check_unchanged(model: nn.Module, before: ModelSnapshot) -> None:
    """Raises an error unless a model is, bit by bit, what it was.

    Args:
        model: The model as it is now.
        before: The state that it had before.

    Raises:
        AssertionError: The model was changed; the message names everything that differs.

    >>> net = nn.Linear(2, 3)
    >>> before = ModelSnapshot.of(net)
    >>> check_unchanged(net, before)
    >>> _ = net.train(False)
    >>> check_unchanged(net, before)
    Traceback (most recent call last):
    ...
    AssertionError: the model was changed: training of the model
    """
    now = ModelSnapshot.of(model)
    wrong: list[str] = []
    for what in ("requires_grad", "training", "attributes", "hooks"):
        old, new = getattr(before, what), getattr(now, what)
        wrong += [f"{what} of {n or 'the model'}" for n in {**old, **new} if old.get(n) != new.get(n)]
    for what in ("tensors", "grads"):
        old, new = getattr(before, what), getattr(now, what)
        wrong += [f"{what} of {n}" for n in {**old, **new} if not _same(old.get(n), new.get(n))]
    if wrong:
        raise AssertionError(f"the model was changed: {', '.join(wrong)}")


def _same(old: tuple[int, Tensor] | None, new: tuple[int, Tensor] | None) -> bool:
    if old is None or new is None:
        return old is new
    (old_id, a), (new_id, b) = old, new
    if old_id != new_id or a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.device.type == "meta":  # There are no values to compare.
        return True
    return bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan()))


def check_predictor(predictor: Predictor, x: Tensor, *, differentiable: bool = True) -> None:
    """Runs the whole contract on a fitted predictor.

    It checks that the answer is a `Prediction` of every input with finite numbers; probabilities are probabilities; the
    two parts of the uncertainty are not negative and add up; a generator with the same seed gives the same answer and
    PyTorch's own generator is left alone; the model is left alone, bit by bit; there is no autograd graph unless asked
    for, and then the right gradient in x (against a central difference); one input alone gives what it gave among
    others, where no samples are drawn; inputs that are not finite are refused, and so is an option that ``predict``
    does not have.

    Args:
        predictor: Any object with ``predict(x, generator=...)`` and, unless ``differentiable`` is False,
            ``differentiable=True``.
        x: At least three inputs [N, ...] in float64.
        differentiable: Whether gradients in x are checked.

    Raises:
        AssertionError: The contract is broken; the message says what is wrong.

    >>> from aftermap.baselines import Deterministic
    >>> check_predictor(Deterministic(nn.Linear(3, 4).double()), torch.ones(5, 3, dtype=torch.float64))
    """
    _check_form(predictor, x)
    _check_repeats(predictor, x)
    _check_leaves_alone(predictor, x)
    _check_alone(predictor, x)
    _check_bad_input(predictor, x)
    _check_unknown_option(predictor, x)
    if differentiable:
        _check_gradient(predictor, x)


def _predict(predictor: Predictor, x: Tensor, seed: int = _SEED, **options: Any) -> Prediction:
    prediction = predictor.predict(x, generator=torch.Generator().manual_seed(seed), **options)
    if not isinstance(prediction, Prediction):
        raise AssertionError(f"predict must return a Prediction, got {type(prediction).__name__}")
    return prediction


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _check_form(predictor: Predictor, x: Tensor) -> None:
    prediction = _predict(predictor, x)
    _require(len(prediction) == len(x), f"{len(x)} inputs gave {len(prediction)} predictions")
    parts = {
        "mean": prediction.mean,
        "epistemic": prediction.epistemic,
        "aleatoric": prediction.aleatoric,
        "total": prediction.total,
    }
    for name, value in parts.items():
        _require(bool(value.isfinite().all()), f"{name} is not finite")
        _require(not value.requires_grad, f"{name} has an autograd graph that nobody asked for")
        if name != "mean":
            _require(float(value.min()) >= -1e-9, f"{name} is negative: {float(value.min()):g}")
    torch.testing.assert_close(
        prediction.epistemic + prediction.aleatoric, prediction.total, msg="the parts do not add up to total"
    )
    if prediction.kind in ("classification", "binary"):
        inside = bool((prediction.mean >= 0).all() and (prediction.mean <= 1 + 1e-9).all())
        _require(inside, "the mean is not made of probabilities")
    if prediction.kind == "classification":
        sums = prediction.mean.sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), msg="probabilities do not sum to one")
        _require(
            float(prediction.total.max()) <= math.log(prediction.mean.shape[-1]) + 1e-9, "an entropy exceeds log C"
        )


def _check_repeats(predictor: Predictor, x: Tensor) -> None:
    first, again = _predict(predictor, x), _predict(predictor, x)
    _require(torch.equal(first.mean, again.mean), "the same seed gave two different means")
    _require(torch.equal(first.epistemic, again.epistemic), "the same seed gave two different uncertainties")


def _check_leaves_alone(predictor: Predictor, x: Tensor) -> None:
    models = [m for m in (getattr(predictor, "model", None),) if isinstance(m, nn.Module)]
    models += [m for m in getattr(predictor, "models", []) if isinstance(m, nn.Module)]
    before = [ModelSnapshot.of(model) for model in models]
    state, inputs = torch.get_rng_state(), x.clone()
    _predict(predictor, x)
    for model, old in zip(models, before, strict=True):
        check_unchanged(model, old)
    _require(torch.equal(state, torch.get_rng_state()), "PyTorch's own generator was used although one was given")
    _require(torch.equal(x, inputs), "the inputs were changed")


def _check_alone(predictor: Predictor, x: Tensor) -> None:
    """Checks that where the seed does not matter, the other inputs of the batch do not matter either."""
    whole = _predict(predictor, x)
    if not torch.equal(whole.mean, _predict(predictor, x, _SEED + 1).mean):
        return
    alone = torch.cat([_predict(predictor, x[i : i + 1]).mean for i in range(len(x))])
    torch.testing.assert_close(alone, whole.mean, msg="an input alone is predicted otherwise than among others")


def _check_bad_input(predictor: Predictor, x: Tensor) -> None:
    bad = x.clone()
    bad[1] = math.nan
    try:
        predictor.predict(bad)
    except InputError:
        return
    raise AssertionError("inputs that are NaN must raise an InputError (DataError)")


def _check_unknown_option(predictor: Predictor, x: Tensor) -> None:
    """Checks that a misspelt option is not swallowed: the answer would be another one than the user asked for."""
    try:
        predictor.predict(x, no_such_option=1)
    except (TypeError, InputError):
        return
    raise AssertionError("predict must refuse an option that it does not have; name its arguments instead of **options")


def _check_gradient(predictor: Predictor, x: Tensor) -> None:
    """Checks the derivative of the summed log of the mean along a random direction, for the same samples."""
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(_SEED), dtype=x.dtype)

    def value(inputs: Tensor, **options: Any) -> Tensor:
        mean = _predict(predictor, inputs, **options).mean
        return (mean.square() + mean).sum()

    point = x.clone().requires_grad_()
    answer = value(point, differentiable=True)
    _require(answer.requires_grad, "differentiable=True gave a prediction without a gradient in x")
    exact = (torch.autograd.grad(answer, point)[0] * direction).sum()
    step = 1e-5
    with torch.no_grad():
        numeric = (value(x + step * direction) - value(x - step * direction)) / (2 * step)
    torch.testing.assert_close(exact, numeric, rtol=1e-3, atol=1e-5, msg="the gradient in x is wrong")
