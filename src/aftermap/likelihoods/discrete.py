"""Likelihoods of discrete targets: Categorical, Bernoulli, Poisson.

Index legend: N examples, ... positions, C outputs, K columns of the root, V vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from aftermap.draws import poisson, uniform_like
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.likelihoods.base import (
    Likelihood,
    aligned,
    check_outputs,
    check_temperature,
    check_values,
    sum_positions,
    unit_vectors,
)

__all__ = ["Bernoulli", "Categorical", "Poisson", "are_probabilities", "at_temperature", "temperature_of"]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Categorical(Likelihood):
    r"""One of C classes, with logits f/T: p(y = c | f) = softmax(f/T)_c.

    With w the class weight of the observed label (1 without weights), p = softmax(f/T) and u = √p:

    .. math::
        E = -w_y \log p_y, \quad \nabla E = \frac{w_y}{T} (p - e_y), \quad
        \Lambda = \frac{w_y}{T^2} (\mathrm{diag}(p) - p p^\top).

    For T = 1, S₀ = diag(u) − p uᵀ is a root of Λ with S₀ u = 0. The Householder reflection with reflector u + e_m maps u
    to −e_m, so column m of the reflected root vanishes and C − 1 columns remain, for j ≠ m:

    .. math::
        S_{mj} = -u_m u_j, \qquad S_{cj} = u_j \Big(\delta_{cj} - \frac{p_c}{1 + u_m}\Big) \quad (c \ne m).

    With m the most probable class no entry of S or of S Sᵀ cancels: both are exact, entry by entry, however
    close p is to one-hot.

    Targets are integers [N, ...]; positions whose target is ``ignore_index`` contribute zero to everything.
    Weights are those of ``torch.nn.functional.cross_entropy(..., reduction="sum")``.

    Args:
        weight: The non-negative weight of each class [C]; None means 1.
        ignore_index: The target value of positions to leave out.
        temperature: The temperature T that the outputs are divided by. Unlike a power of the likelihood it leaves p
            normalised, so that it can be learned by the evidence.

    Raises:
        InputError: The weight is not a vector of finite, non-negative numbers, or the temperature is not positive.

    >>> likelihood = Categorical()
    >>> f = torch.zeros(1, 2)
    >>> likelihood.nll(f, torch.tensor([1]))
    tensor([0.6931])
    >>> likelihood.hessian(f)
    tensor([[[ 0.2500, -0.2500],
             [-0.2500,  0.2500]]])
    """

    weight: Tensor | Sequence[float] | None = None
    ignore_index: int = -100
    temperature: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", check_temperature(self.temperature, "Categorical"))
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise InputError(f"Categorical: ignore_index must be an integer, got {self.ignore_index!r}.")
        if self.weight is None:
            return
        if isinstance(self.weight, Tensor):
            weight = self.weight.detach().clone()  # A later change of the user's tensor must not change this one.
        else:
            weight = torch.tensor([float(value) for value in self.weight], dtype=torch.float64)
        if weight.dim() != 1 or not bool((torch.isfinite(weight) & (weight >= 0)).all()):
            raise InputError(
                "Categorical: weight must be a vector [C] of finite, non-negative numbers, "
                f"got shape {list(weight.shape)} and values {weight.flatten()[:6].tolist()}."
            )
        object.__setattr__(self, "weight", weight)

    @property
    def kind(self) -> str:
        """The kind of targets, which is "classification"."""
        return "classification"

    def columns(self, n_outputs: int) -> int:
        """Returns C - 1, since the Householder reflection removes one column."""
        return n_outputs - 1

    def config(self) -> dict[str, Any]:
        """Returns name, weight (a list or None), ignore_index, and the temperature unless it is 1."""
        weight = self.weight.tolist() if isinstance(self.weight, Tensor) else None
        config = {"name": "categorical", "weight": weight, "ignore_index": self.ignore_index}
        return config if self.temperature == 1 else {**config, "temperature": self.temperature}

    def _check_shapes(self, outputs: Tensor, targets: Tensor | None) -> None:
        n_classes = outputs.shape[-1]
        if n_classes < 2:
            raise ShapeError(
                f"Categorical: outputs of shape {list(outputs.shape)} have {n_classes} class; at least 2 are "
                'needed. For one logit per example use Bernoulli() or "binary".'
            )
        if isinstance(self.weight, Tensor) and self.weight.shape != (n_classes,):
            raise ShapeError(
                f"Categorical: weight has {self.weight.numel()} values, but outputs have {n_classes} classes."
            )
        if targets is not None and targets.shape != outputs.shape[:-1]:
            raise ShapeError(
                f"Categorical: targets have shape {list(targets.shape)}, but outputs of shape "
                f"{list(outputs.shape)} need class indices of shape {list(outputs.shape[:-1])} "
                "(classes in the last dimension; for [N, C, H, W] use outputs.movedim(1, -1))."
            )
        if targets is not None and outputs.dim() > 3 and len(set(outputs.shape[1:])) == 1:
            raise ShapeError(
                f"Categorical: outputs of shape {list(outputs.shape)} are ambiguous: with targets of shape {list(targets.shape)} the "
                "classes may be in dimension 1 or in the last one. Let the network return one dimension of positions: "
                "outputs.movedim(1, -1).flatten(1, -2) if the classes are in dimension 1, outputs.flatten(1, -2) if they are in the last, "
                "with targets.flatten(1)."
            )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises an error unless targets are class indices [N, ...] in 0 ... C - 1 or ``ignore_index``."""
        check_outputs(outputs, "Categorical")
        if targets.dtype not in _INTEGERS:
            raise DataError(
                f"Categorical: targets must be integers (class indices), got {targets.dtype}; "
                "use targets.long(), or targets.argmax(-1) for one-hot targets."
            )
        self._check_shapes(outputs, targets)
        n_classes = outputs.shape[-1]
        if not targets.numel() or (int(targets.min()) >= 0 and int(targets.max()) < n_classes):
            return
        bad = ((targets < 0) | (targets >= n_classes)) & (targets != self.ignore_index)
        allowed = f"in 0 ... {n_classes - 1}, or ignore_index = {self.ignore_index}"
        known = targets[targets != self.ignore_index]
        if bool(bad.any()) and int(known.min()) >= 1 and int(known.max()) == n_classes:
            allowed += "; labels that count from 1 are given as targets - 1"
        elif bool((known[known < 0] == -1).any()):
            allowed += "; for examples without a label use Categorical(ignore_index=-1), or leave them out"
        check_values(targets, bad, "targets", allowed, "Categorical")

    def _labels(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns labels [N, ...] that are safe to gather with."""
        self._check_shapes(outputs, targets)
        return targets.masked_fill(targets == self.ignore_index, 0).long()

    def _weighted(self, outputs: Tensor, targets: Tensor, values: Tensor, power: float = 1.0) -> Tensor:
        """Returns values [..., N, ..., K] times a power of w_y, with exact zeros where w_y = 0 or the target is ignored."""
        if isinstance(self.weight, Tensor):
            factor = self.weight.to(outputs)[self._labels(outputs, targets)].pow(power).unsqueeze(-1)
            # This is where(), not a product, since 0 * inf would be NaN.
            values = torch.where(factor == 0, 0, factor * values)
        return values.masked_fill((targets == self.ignore_index).unsqueeze(-1), 0)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the weighted cross-entropy -w_y log p_y, summed over positions: [N]."""
        labels = self._labels(outputs, targets).unsqueeze(-1)
        picked = F.log_softmax(_over(outputs, self.temperature), -1).gather(-1, labels).neg()
        return sum_positions(self._weighted(outputs, targets, picked)).sum(-1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the gradient w_y (p - e_y) / T: [N, ..., C]."""
        residual = _residual(self.mean(outputs), self._labels(outputs, targets))
        return self._weighted(outputs, targets, _over(residual, self.temperature))

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Returns the gradient √w_y (p - e_ỹ) / T with ỹ drawn from p: [N, ..., C]."""
        self._check_shapes(outputs, targets)
        probabilities = self.mean(outputs)
        wide = torch.promote_types(outputs.dtype, torch.float32)  # Half precision is too coarse to sum in.
        cumulative = probabilities.to(wide).cumsum(-1).contiguous()
        height = (uniform_like(outputs[..., :1], generator) * cumulative[..., -1:]).contiguous()
        # right=True skips classes of probability zero; the clamp is for a height rounded up to the total.
        drawn = torch.searchsorted(cumulative, height, right=True).clamp(max=outputs.shape[-1] - 1)
        gradient = _over(_residual(probabilities, drawn.squeeze(-1)), self.temperature)
        return gradient if targets is None else self._weighted(outputs, targets, gradient, 0.5)

    def hessian_root_mv(self, outputs: Tensor, vectors: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns products with the C - 1 columns of the class docstring over T, S never formed: [V, N, ..., C]."""
        self._check_shapes(outputs, targets)
        # This goes through the logarithm, since √p is representable long after p has underflowed.
        root_p = (0.5 * F.log_softmax(_over(outputs, self.temperature), -1)).exp()  # u
        top = root_p.argmax(-1, keepdim=True)  # m
        root_top = root_p.gather(-1, top)
        # There is one coefficient per class, none for m: column j is class j + 1, and class 0 takes the place of m.
        top = top.expand(*vectors.shape[:-1], 1)
        first = F.pad(vectors, (1, 0)).gather(-1, top)
        scaled = root_p * torch.cat([first, vectors], -1).scatter(-1, top, 0.0)
        total = scaled.sum(-1, keepdim=True)
        product = (scaled - total * root_p.square() / (1 + root_top)).scatter(-1, top, -root_top * total)
        product = _over(product, self.temperature)
        return product if targets is None else self._weighted(outputs, targets, product, 0.5)

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns the C - 1 columns of the class docstring: [N, ..., C, C - 1]."""
        basis = unit_vectors(outputs, self.columns(outputs.shape[-1]))
        return self.hessian_root_mv(outputs, basis, targets).movedim(0, -1)

    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the probabilities softmax(f/T): [N, ..., C]."""
        return F.softmax(_over(outputs, self.temperature), -1)

    def variance(self, outputs: Tensor) -> Tensor:
        """Returns the variance p (1 - p) of each one-hot entry: [N, ..., C]."""
        mean = self.mean(outputs)
        return mean * (1 - mean)


def _over(values: Tensor, temperature: float) -> Tensor:
    """Returns values over T, without a copy at T = 1."""
    return values if temperature == 1 else values / temperature


def _residual(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Returns the residual p − e_y; its entry at y is minus the sum of the others, since p_y − 1 would cancel."""
    index = labels.unsqueeze(-1)
    others = probabilities.scatter(-1, index, 0.0)
    return others.scatter(-1, index, -others.sum(-1, keepdim=True))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Bernoulli(Likelihood):
    r"""Independent yes/no labels with logits f/T: one logit, or C labels that may all be true at once.

    .. math::
        E = -\sum_c [y_c \log p_c + (1 - y_c) \log(1 - p_c)], \quad \nabla E = (p - y)/T, \quad
        \Lambda = \mathrm{diag}(p(1-p))/T^2

    with p = sigmoid(f/T). Targets have the shape of the outputs (or [N, ...] for one logit) and lie in [0, 1].
    For targets strictly inside (0, 1) E is the cross-entropy, which is not normalised over y.

    Args:
        temperature: The temperature T that the outputs are divided by.

    Raises:
        InputError: The temperature is not positive.

    >>> Bernoulli().nll(torch.zeros(1, 3), torch.tensor([[0, 1, 1]]))
    tensor([2.0794])
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", check_temperature(self.temperature, "Bernoulli"))

    @property
    def kind(self) -> str:
        """The kind of targets, which is "binary"."""
        return "binary"

    def config(self) -> dict[str, Any]:
        """Returns the name, and the temperature unless it is 1."""
        return (
            {"name": "bernoulli"} if self.temperature == 1 else {"name": "bernoulli", "temperature": self.temperature}
        )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises an error unless targets lie in [0, 1] and have the shape of the outputs."""
        check_outputs(outputs, "Bernoulli")
        aligned(outputs, targets, outputs.shape[-1], "Bernoulli")
        check_values(targets, ~((targets >= 0) & (targets <= 1)), "targets", "in [0, 1]", "Bernoulli")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the binary cross-entropy, summed over labels and positions: [N]."""
        labels = aligned(outputs, targets, outputs.shape[-1], "Bernoulli")
        # This is log sigmoid on both sides, since softplus in torch is linear above its threshold, which loses digits.
        logits = _over(outputs, self.temperature)
        return sum_positions(-labels * F.logsigmoid(logits) - (1 - labels) * F.logsigmoid(-logits)).sum(-1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the gradient (p - y) / T: [N, ..., C]."""
        labels = aligned(outputs, targets, outputs.shape[-1], "Bernoulli")
        # This gives p − y without cancellation.
        return ((1 - labels) * self.mean(outputs) - labels * self.mean(-outputs)) / self.temperature

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Returns the gradient (p - ỹ) / T with ỹ drawn from p: [N, ..., C]."""
        return self.gradient(outputs, uniform_like(outputs, generator) < self.mean(outputs))

    def _root_diagonal(self, outputs: Tensor) -> Tensor:
        logits = _over(outputs, self.temperature)
        return (0.5 * (F.logsigmoid(logits) + F.logsigmoid(-logits))).exp() / self.temperature

    def hessian_root_mv(self, outputs: Tensor, vectors: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns products √(p (1 - p)) v / T: [V, N, ..., C]."""
        return self._root_diagonal(outputs) * vectors

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns the diagonal root √(p (1 - p)) / T: [N, ..., C, C]."""
        return torch.diag_embed(self._root_diagonal(outputs))

    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the probabilities sigmoid(f/T): [N, ..., C]."""
        return _over(outputs, self.temperature).sigmoid()

    def variance(self, outputs: Tensor) -> Tensor:
        """Returns the variance p (1 - p): [N, ..., C]."""
        return self.mean(outputs) * self.mean(-outputs)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Poisson(Likelihood):
    r"""Counts with the logarithm of the rate as output: y_c ~ Poisson(exp(f_c)).

    .. math::
        E = \sum_c [e^{f_c} - y_c f_c + \log\Gamma(y_c + 1)], \quad \nabla E = e^f - y, \quad
        \Lambda = \mathrm{diag}(e^f).

    Targets have the shape of the outputs (or [N, ...] for one output): whole numbers, not negative, of
    any dtype.

    >>> Poisson().nll(torch.zeros(1, 1), torch.tensor([3]))
    tensor([2.7918])
    """

    @property
    def kind(self) -> str:
        """The kind of targets, which is "counts"."""
        return "counts"

    def config(self) -> dict[str, Any]:
        """Returns only the name."""
        return {"name": "poisson"}

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises an error unless targets are whole numbers of 0 or more in the shape of the outputs."""
        check_outputs(outputs, "Poisson")
        aligned(outputs, targets, outputs.shape[-1], "Poisson")
        bad = ~((targets >= 0) & torch.isfinite(targets))
        if targets.is_floating_point():
            bad = bad | (targets != targets.round())
        check_values(targets, bad, "targets", "a whole number of 0 or more", "Poisson")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the normalised Poisson loss, summed over outputs and positions: [N]."""
        counts = aligned(outputs, targets, outputs.shape[-1], "Poisson")
        return sum_positions(outputs.exp() - counts * outputs + torch.lgamma(counts + 1)).sum(-1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the gradient exp(f) - y: [N, ..., C]."""
        return outputs.exp() - aligned(outputs, targets, outputs.shape[-1], "Poisson")

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Returns the gradient exp(f) - ỹ with ỹ ~ Poisson(exp(f)): [N, ..., C]."""
        return self.gradient(outputs, poisson(outputs.exp(), generator))

    def hessian_root_mv(self, outputs: Tensor, vectors: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns products exp(f / 2) v: [V, N, ..., C]."""
        return (0.5 * outputs).exp() * vectors

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns the diagonal root exp(f / 2): [N, ..., C, C]."""
        return torch.diag_embed((0.5 * outputs).exp())

    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the rate exp(f): [N, ..., C]."""
        return outputs.exp()

    def variance(self, outputs: Tensor) -> Tensor:
        """Returns the rate exp(f): [N, ..., C]."""
        return outputs.exp()


def temperature_of(likelihood: Likelihood) -> float | None:
    """Returns the temperature T of softmax(f/T) or sigmoid(f/T), or None for a likelihood without one.

    >>> temperature_of(Categorical(temperature=2.0)), temperature_of(Bernoulli()), temperature_of(Poisson())
    (2.0, 1.0, None)
    """
    return likelihood.temperature if isinstance(likelihood, Categorical | Bernoulli) else None


def at_temperature(likelihood: Likelihood, temperature: float) -> Likelihood:
    """Returns the same likelihood at another temperature.

    Raises:
        InputError: The likelihood has no logits that a temperature could divide.

    >>> at_temperature(Bernoulli(), 3.0)
    Bernoulli(temperature=3.0)
    """
    if not isinstance(likelihood, Categorical | Bernoulli):
        raise InputError(
            f"a temperature divides the logits of softmax(f/T) or sigmoid(f/T), and {type(likelihood).__name__} has no temperature. A "
            "regression has a noise in its place"
        )
    return replace(likelihood, temperature=temperature)


def are_probabilities(likelihood: Likelihood, outputs: Tensor) -> bool:
    """Tells whether outputs that should be logits are probabilities already.

    For classes: numbers that are nowhere negative and add up to one in every row. Logarithms of probabilities are not meant:
    softmax(log p) = p, so that they are logits like any others. For binary outputs, whose range proves nothing, it is the
    sigmoid at the end of the graph.

    Args:
        likelihood: The likelihood of the targets.
        outputs: The outputs of the network [N, ..., C], with their graph where there is one.

    >>> are_probabilities(Categorical(), torch.tensor([[0.25, 0.75]]))
    True
    >>> are_probabilities(Categorical(), torch.tensor([[0.25, 0.75]]).log())
    False
    """
    if isinstance(likelihood, Bernoulli):
        return outputs.grad_fn is not None and outputs.grad_fn.name().startswith("SigmoidBackward")
    if not isinstance(likelihood, Categorical) or outputs.shape[-1] < 2 or not outputs.numel():
        return False
    values = outputs.detach()
    tolerance = 1e-4 if torch.finfo(values.dtype).bits >= 32 else 2e-2
    return bool(((values >= 0).all() & ((values.sum(-1) - 1).abs() <= tolerance).all()).item())
