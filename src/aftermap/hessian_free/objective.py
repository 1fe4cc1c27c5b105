"""The training objective, pushed: φ(θ) = L(θ) − Σ_q w_q ψ_q(θ), for many weight vectors and pushes at once.

L = Σ_n −log p(y_n | f_n) / T + ½ (θ − μ₀)ᵀP₀(θ − μ₀) is a sum over data. All evaluations are pure functions of the weights:
the user's model is never written to.

Index legend: m members (weight vectors), p parameters, q functionals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap
from torch.utils._pytree import tree_leaves

from aftermap.batches import Batch, Unpack, iterate
from aftermap.errors import DataError
from aftermap.likelihoods import Likelihood
from aftermap.linalg import differing
from aftermap.models import autograd_errors_explained, evaluating, functional_outputs
from aftermap.params import Params, flatten, named_parameters, unflatten
from aftermap.predictive.functionals import FunctionalSet, Network
from aftermap.prior import Prior

__all__ = ["Evaluation", "Objective", "Push"]

# This many examples go through the network at once, if they came in smaller batches.
_MERGED = 512

Scalar = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Push:
    """The term −Σ_q w_q ψ_q that is added to the objective of each member.

    Attributes:
        functionals: The Q functionals ψ.
        weights: The weights w [m, Q], which include λ and its sign.
    """

    functionals: FunctionalSet
    weights: Tensor

    def of(self, index: Tensor) -> Push:
        """Returns the push of some members."""
        return Push(self.functionals, self.weights[index])


@dataclass(frozen=True)
class Evaluation:
    """Values and gradients at some members.

    Attributes:
        loss: The objective L of each member [m], without the push.
        shift: The push Σ_q w_q ψ_q of each member [m].
        gradient: The gradient of φ = loss − shift of each member [m, P].
    """

    loss: Tensor
    shift: Tensor
    gradient: Tensor

    @property
    def value(self) -> Tensor:
        """The objectives φ of the members [m]."""
        return self.loss - self.shift


class Objective:
    """The objective L and its pushed versions.

    Args:
        model: The network in eval mode, which is never written to.
        names: The names of the parameters that move.
        likelihood: The likelihood, with its noise.
        prior: The prior over these parameters.
        power: The factor 1/T of the log-likelihood.
        dtype: The dtype of the work; weights, buffers and inputs are copied to it.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        likelihood: Likelihood,
        prior: Prior,
        power: float,
        dtype: torch.dtype,
    ):
        self.model, self.names, self.likelihood, self.power, self.dtype = model, tuple(names), likelihood, power, dtype
        parameters = named_parameters(model)
        self.like: Params = {n: parameters[n].detach() for n in names}
        self.centre = flatten(self.like).to(dtype)
        self.device = self.centre.device
        self.precision = prior.vector(self.names, self.device).detach().to(dtype)
        means = [prior.mean[n].detach().to(self.device).expand(self.like[n].shape).reshape(-1) for n in names]
        self.prior_mean = torch.cat(means).to(dtype)
        rest = {n: p.detach() for n, p in parameters.items() if n not in self.like} | dict(model.named_buffers())
        self.fixed = {n: t.to(dtype) if t.is_floating_point() else t for n, t in rest.items()}
        self.batches: list[Batch] = []
        self.n_data, self.n_batches = 0.0, 0
        self._vectorised, self._confirmed = True, False

    @property
    def size(self) -> int:
        """The number P of parameters."""
        return len(self.centre)

    def network(self, theta: Tensor) -> Network:
        """Returns the network under weights [P]."""
        return Network(self.model, unflatten(theta, self.like), self.fixed)

    def read(self, data: Iterable[Any], unpack: Unpack | None, *, keep: bool) -> None:
        """Goes through the data once: counts and checks them, and keeps them if asked to.

        Raises:
            DataError: There are no targets, or the data do not fit the likelihood.
        """
        dtype = next((v.dtype for v in self.like.values()), None)
        self.batches, self.n_data, self.n_batches = [], 0.0, 0
        with evaluating(self.model), torch.no_grad():
            for batch in iterate(data, device=self.device, dtype=dtype, unpack=unpack):
                if not isinstance(batch.targets, Tensor):
                    raise DataError("a batch has no tensor of targets; the objective needs (x, y) batches")
                batch = self.cast(batch)
                outputs = self._outputs(unflatten(self.centre, self.like), batch.inputs)
                self.likelihood.check(outputs, batch.targets)
                self.n_data += batch.size if batch.weight is None else float(batch.weight.sum())
                self.n_batches += 1
                if keep:
                    self.batches.append(batch)
        self.batches = _merged(self.batches)

    def cast(self, batch: Batch) -> Batch:
        """Returns the batch in the dtype of the work."""

        def to(tree: Any) -> Any:
            if isinstance(tree, Tensor):
                return tree.to(self.dtype) if tree.is_floating_point() else tree
            if isinstance(tree, dict):
                return {k: to(v) for k, v in tree.items()}
            return tuple(to(v) for v in tree) if isinstance(tree, tuple) else tree

        weight = None if batch.weight is None else batch.weight.to(self.dtype)
        return Batch(to(batch.inputs), to(batch.targets), weight, batch.size)

    # The terms of one member.

    def _outputs(self, params: Params, inputs: Any) -> Tensor:
        return functional_outputs(self.model, {**self.fixed, **params}, inputs)

    def _data_loss(self, theta: Tensor, batch: Batch) -> Tensor:
        values = self.likelihood.nll(self._outputs(unflatten(theta, self.like), batch.inputs), batch.targets)
        total = values.sum() if batch.weight is None else (values * batch.weight).sum()
        return self.power * total

    def _data_part(self, batch: Batch) -> Scalar:
        return lambda theta: self._data_loss(theta, batch)

    def _pushed_part(self, batch: Batch, functionals: FunctionalSet, scale: float) -> Callable[..., Any]:
        def pushed(theta: Tensor, weights: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            loss, shift = self._data_loss(theta, batch), self._shift(theta, functionals, weights)
            return scale * loss - shift, (loss, shift)

        return pushed

    def _energy(self, theta: Tensor) -> Tensor:
        return 0.5 * (self.precision * (theta - self.prior_mean).square()).sum(-1)

    def _shift(self, theta: Tensor, functionals: FunctionalSet, weights: Tensor) -> Tensor:
        return (weights * functionals(self.network(theta))).sum()

    # All members at once.

    @autograd_errors_explained()
    def _mapped(self, single: Callable[..., Any], *rows: Tensor) -> Any:
        """Runs ``single`` for every row: vectorised, or one by one where an operation has no batching rule."""
        if self._vectorised:
            try:
                results = vmap(single)(*rows)
                self._vectorised = self._confirmed = self._confirmed or _is_confirmed(results, single, rows)
                return results if self._confirmed else _looped(single, *rows)
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError, ValueError):
                # The model's or the functional's own errors come back below, where nothing is vectorised.
                results = _looped(single, *rows)
                self._vectorised = False
                return results
        return _looped(single, *rows)

    def evaluate(
        self, theta: Tensor, push: Push | None = None, *, batch: Batch | None = None, scale: float = 1.0
    ) -> Evaluation:
        """Returns values and gradients at members [m, P].

        Args:
            theta: The weights of the members [m, P].
            push: The push of each member. None means the objective itself.
            batch: One batch, weighted by ``scale`` to stand for all data. None means the kept data.
            scale: The number of batches.
        """
        loss, gradient = self._energy(theta), self.precision * (theta - self.prior_mean)
        shift = torch.zeros_like(loss)
        parts = self.batches if batch is None else [batch]
        if push is not None and parts:
            # One pass through the vectorised network serves a batch and the push together, since it is what takes the
            # time.
            both = grad(self._pushed_part(parts[0], push.functionals, scale), has_aux=True)
            slope, (value, shift) = self._mapped(both, theta, push.weights)
            loss, gradient, shift = loss + scale * value.detach(), gradient + slope.detach(), shift.detach()
            parts = parts[1:]
        elif push is not None:
            alone = grad_and_value(lambda t, w: self._shift(t, push.functionals, w))
            slope, shift = self._mapped(alone, theta, push.weights)
            gradient, shift = gradient - slope.detach(), shift.detach()
        for part in parts:
            slope, value = self._mapped(grad_and_value(self._data_part(part)), theta)
            loss, gradient = loss + scale * value.detach(), gradient + scale * slope.detach()
        return Evaluation(loss, shift, gradient)

    def hessian_products(self, theta: Tensor, vectors: Tensor, push: Push | None = None) -> Tensor:
        """Returns ∇²φ v for each member: [m, P]."""

        def along(function: Scalar) -> Callable[[Tensor, Tensor], Tensor]:
            return lambda t, v: grad(lambda s: (grad(function)(s) * v).sum())(t)

        product = self.precision * vectors
        for part in self.batches:
            product = product + self._mapped(along(self._data_part(part)), theta, vectors).detach()
        if push is not None:
            functionals = push.functionals

            def pushed(t: Tensor, v: Tensor, w: Tensor) -> Tensor:
                return along(lambda s: self._shift(s, functionals, w))(t, v)

            product = product - self._mapped(pushed, theta, vectors, push.weights).detach()
        return product

    def values(self, theta: Tensor, functionals: FunctionalSet) -> Tensor:
        """Returns ψ [m, Q] at members [m, P]."""
        with torch.no_grad(), evaluating(self.model):
            return self._mapped(lambda t: functionals(self.network(t)), theta)

    def losses(self, theta: Tensor, data: Iterable[Batch]) -> Tensor:
        """Returns L [m] over given batches, without gradients."""
        total = self._energy(theta)
        with torch.no_grad(), evaluating(self.model):
            for batch in data:
                total = total + self._mapped(self._data_part(batch), theta)
        return total


def _merged(batches: list[Batch]) -> list[Batch]:
    """Joins small batches of plain tensors to larger ones: fewer, not larger, steps take the time."""
    merged: list[Batch] = []
    for batch in batches:
        last = merged[-1] if merged else None
        if last is None or last.size + batch.size > _MERGED or not _alike(last, batch):
            merged.append(batch)
            continue
        weight = None if last.weight is None or batch.weight is None else torch.cat([last.weight, batch.weight])
        inputs, targets = (torch.cat([getattr(last, k), getattr(batch, k)]) for k in ("inputs", "targets"))
        merged[-1] = Batch(inputs, targets, weight, last.size + batch.size)
    return merged


def _alike(one: Batch, other: Batch) -> bool:
    plain = all(isinstance(b.inputs, Tensor) and isinstance(b.targets, Tensor) for b in (one, other))
    return (
        plain
        and one.inputs.shape[1:] == other.inputs.shape[1:]
        and one.targets.shape[1:] == other.targets.shape[1:]
        and (one.weight is None) == (other.weight is None)
    )


def _is_confirmed(results: Any, single: Callable[..., Any], rows: Sequence[Tensor]) -> bool:
    """Tells whether the last row gives the same alone: the vectorised derivatives of a few operations are silently wrong."""
    leaves, truth = tree_leaves(results), tree_leaves(single(*(r[-1] for r in rows)))
    named = {str(n): t for n, t in enumerate(truth)}
    return not differing({str(n): f[-1].detach().clone() for n, f in enumerate(leaves)}, named, truth[0].dtype)


def _looped(single: Callable[..., Any], *rows: Tensor) -> Any:
    results = [single(*row) for row in zip(*rows, strict=True)]
    return _stacked(results)


def _stacked(results: list[Any]) -> Any:
    if isinstance(results[0], tuple):
        return tuple(_stacked(list(part)) for part in zip(*results, strict=True))
    return torch.stack(results)
