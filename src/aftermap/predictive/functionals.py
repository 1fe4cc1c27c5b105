"""Scalar functionals ψ(θ) of a network, and their variance under a posterior over its weights.

A functional is a function of the network itself: it is handed something to call with inputs, and returns one number. An output,
a difference of two, the mean over a region, a probability are written the same way for every posterior:

    lambda f: f(x)[0, 2] - f(x)[0, 1]

Index legend: q functionals, p parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.batches import Batch, tensors_of
from aftermap.curvature.structures.base import join_flat
from aftermap.errors import InputError
from aftermap.linalg import symmetrise
from aftermap.models import evaluating, functional_outputs
from aftermap.params import Params, named_parameters
from aftermap.posteriors import Posterior

__all__ = [
    "Functional",
    "FunctionalSet",
    "Network",
    "OutputSet",
    "functional_covariance",
    "functional_gradients",
    "parse_functionals",
]


class Network:
    """A network under some weights, which is called with inputs.

    Args:
        model: The module, which is not written to.
        params: The weights in question, by name: those that the posterior is over. They are also an attribute, for
            functionals of the weights themselves.
        fixed: Other tensors of the model to put in place (parameters that are not in question, buffers).
    """

    def __init__(self, model: nn.Module, params: Params, fixed: Mapping[str, Tensor] | None = None):
        self.params = params
        self._model, self._fixed = model, dict(fixed or {})

    def __call__(self, x: Any) -> Tensor:
        """Returns the outputs [N, ..., C]; floating-point inputs take the device and dtype of the weights."""
        like = next(iter(self.params.values()))
        return functional_outputs(self._model, {**self._fixed, **self.params}, _placed(x, like))


def _placed(x: Any, like: Tensor) -> Any:
    if isinstance(x, Tensor):
        return x.to(like.device, like.dtype) if x.is_floating_point() else x.to(like.device)
    if isinstance(x, Mapping):
        return {k: _placed(x[k], like) for k in x}
    if isinstance(x, tuple | list):
        return tuple(_placed(item, like) for item in x)
    return x


Functional = Callable[[Network], Tensor]


class FunctionalSet(ABC):
    """A set of Q functionals that are evaluated together."""

    count: int

    @abstractmethod
    def __call__(self, network: Network) -> Tensor:
        """Returns their values [Q]."""

    @abstractmethod
    def part(self, start: int, stop: int) -> FunctionalSet:
        """Returns the functionals from start to stop - 1 alone."""


class _UserFunctions(FunctionalSet):
    """The functions that a user wrote."""

    def __init__(self, functions: Sequence[Functional]):
        self.functions, self.count = list(functions), len(functions)

    def __call__(self, network: Network) -> Tensor:
        return torch.stack([self._value(place, network) for place in range(self.count)])

    def _value(self, place: int, network: Network) -> Tensor:
        value: object = self.functions[place](network)
        if not isinstance(value, Tensor):
            raise InputError(
                f"functional {place} returned a {type(value).__name__}; it must return a tensor with one number that still "
                "depends on the network: no float(), .item() or .numpy() inside"
            )
        if value.numel() != 1:
            raise InputError(
                f"functional {place} is not scalar: it returned shape {tuple(value.shape)}. Take one entry, a mean or a sum, "
                "or pass a list of functionals to get their covariance"
            )
        return value.reshape(())

    def part(self, start: int, stop: int) -> FunctionalSet:
        return _UserFunctions(self.functions[start:stop])


class OutputSet(FunctionalSet):
    """Every output of every input, flattened: Q = N · width.

    Args:
        batch: The inputs of the batch.
        width: The number of outputs of one input.
        start: The first of the Q functionals.
        stop: The end of their range; all by default.
    """

    def __init__(self, batch: Batch, width: int, start: int = 0, stop: int | None = None):
        self.batch, self.width, self.start = batch, width, start
        self.count = (batch.size * width if stop is None else stop) - start

    def __call__(self, network: Network) -> Tensor:
        return network(self.batch.inputs).reshape(-1)[self.start : self.start + self.count]

    def part(self, start: int, stop: int) -> FunctionalSet:
        first, last = (self.start + start) // self.width, -(-(self.start + stop) // self.width)
        some = self.batch.take(torch.arange(first, last))
        offset = first * self.width
        return OutputSet(some, self.width, self.start + start - offset, self.start + stop - offset)


def parse_functionals(functional: object) -> tuple[FunctionalSet, bool]:
    """Returns what a user gave as a set, and whether it was a single functional.

    Raises:
        InputError: The argument is neither a function nor a sequence of functions.

    >>> parse_functionals(lambda f: f(torch.ones(1, 2))[0, 0])[1]
    True
    """
    if callable(functional):
        return _UserFunctions([functional]), True
    if isinstance(functional, Sequence) and functional and all(callable(member) for member in functional):
        return _UserFunctions(list(functional)), False
    raise InputError(
        f"a functional is a function of the network, such as lambda f: f(x)[0, 0], or a list of such; got {functional!r}"
    )


def functional_gradients(
    model: nn.Module,
    names: Sequence[str],
    functionals: FunctionalSet,
    *,
    params: Params | None = None,
    fixed: Mapping[str, Tensor] | None = None,
    allow_zero: bool = False,
) -> tuple[Tensor, Params]:
    """Returns values ψ [Q] and gradients g = dψ/dθ by name [Q, *shape], at the model's weights or at others.

    Args:
        model: The network in eval mode, which is unchanged afterwards.
        names: The names of the parameters.
        functionals: The functionals ψ.
        params: The weights at which to evaluate. None means the model's own weights.
        fixed: Other tensors of the model; see `Network`.
        allow_zero: Whether a gradient of zero is no error (for outputs of inputs that nobody chose one by one).

    Raises:
        InputError: A functional is not scalar, does not depend on these parameters, or has values that are not finite.

    >>> from aftermap.predictive.functionals import parse_functionals
    >>> net = nn.Linear(2, 1, bias=False)
    >>> each, _ = parse_functionals(lambda f: f(torch.tensor([[1.0, 3.0]])).sum())
    >>> functional_gradients(net, ["weight"], each)[1]["weight"]
    tensor([[[1., 3.]]])
    """
    parameters = named_parameters(model)
    where = {n: parameters[n].detach() for n in names} if params is None else params
    with evaluating(model), torch.enable_grad():
        leaves = {n: v.detach().clone().requires_grad_() for n, v in where.items()}
        values = functionals(Network(model, leaves, fixed))
        lines: dict[str, list[Tensor]] = {n: [] for n in leaves}
        for place, value in enumerate(values.unbind()):
            # A stack of values has a graph as soon as one of them has: only the gradients tell which.
            gradients_of_value: list[Tensor | None] = [None] * len(leaves)
            if value.requires_grad:
                gradients_of_value = list(
                    torch.autograd.grad(value, list(leaves.values()), retain_graph=True, allow_unused=True)
                )
            if not allow_zero and all(g is None or not bool(g.any()) for g in gradients_of_value):
                raise InputError(
                    f"functional {place} does not depend on the parameters {checks.few(leaves, 4)}: its gradient is zero. "
                    "Compute it from what is passed in, f(x), not from the model itself, and without detach()"
                )
            for (name, leaf), g in zip(leaves.items(), gradients_of_value, strict=True):
                lines[name].append(torch.zeros_like(leaf) if g is None else g)
    gradients = {n: torch.stack(v) for n, v in lines.items()}
    if not all(bool(t.isfinite().all()) for t in (values, *tensors_of(gradients))):
        raise InputError("a functional or its gradient is not finite at the trained weights; it has no variance there")
    return values.detach(), gradients


def functional_covariance(posterior: Posterior, gradients: Params) -> Tensor:
    """Returns g Σ gᵀ [Q, Q], in float64, for any posterior.

    A matrix-free posterior with ``kind="samples"`` answers from its fixed samples (sample-then-optimise), which is
    unbiased, with relative standard deviation √(2/S).

    Args:
        posterior: A posterior over the parameters of the gradients.
        gradients: The gradients [Q, *shape] by name.
    """
    wide = {n: g.to(torch.float64) for n, g in gradients.items()}
    rows = join_flat(wide, posterior.names, 1)
    return symmetrise(rows @ posterior.times_covariance(rows).T)
