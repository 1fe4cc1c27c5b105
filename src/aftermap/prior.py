"""The prior N(mean, 1/precision) over the selected parameters.

Weight decay λ on a mean loss over N data is a precision of λ·N (`precision_from_weight_decay`); PyTorch's optimisers use
the gradient λθ, so there is no further factor two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap import checks
from aftermap.errors import InputError
from aftermap.params import Params

__all__ = ["Prior", "PriorSpec", "precision_from_weight_decay"]

PriorSpec = float | Tensor | Sequence[float] | Mapping[str, float | Tensor]


def precision_from_weight_decay(weight_decay: float, n_data: int) -> float:
    """Returns the prior precision that ``weight_decay`` of an optimiser on a mean loss over ``n_data`` stands for.

    >>> precision_from_weight_decay(5e-4, 50_000)
    25.0
    """
    if weight_decay < 0 or n_data < 1:
        raise InputError(f"weight decay must not be negative and n_data at least 1, got {weight_decay} and {n_data}")
    return weight_decay * n_data


@dataclass(frozen=True)
class Prior:
    """A prior of independent Gaussians over the parameters.

    Attributes:
        precision: For each parameter a number (0-d), or one number per entry (the parameter's shape), in float64.
        mean: For each parameter a number (0-d) or a tensor of the parameter's shape.
        shapes: The shapes of the parameters, in order.
    """

    precision: Mapping[str, Tensor]
    mean: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]

    @staticmethod
    def make(
        precision: PriorSpec,
        mean: float | Mapping[str, Tensor],
        layers: Mapping[str, Sequence[str]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> Prior:
        """Makes a prior from what a user gave.

        Args:
            precision: One number; a sequence with one per layer; or a mapping from layer names, parameter names or
                regular expressions for parameter names to numbers (or, for parameters, tensors of their shape). In a
                mapping every parameter must be met; where several keys fit, the longest wins.
            mean: One number or a mapping from parameter names to tensors.
            layers: For each layer the names of its parameters, in order.
            shapes: The shapes of every selected parameter.

        >>> prior = Prior.make({"fc": 2.0}, 0.0, {"fc": ["fc.weight"]}, {"fc.weight": (2, 3)})
        >>> float(prior.precision["fc.weight"])
        2.0
        """
        values = _per_parameter(precision, layers, shapes)
        means = dict.fromkeys(shapes, _number(0.0 if isinstance(mean, Mapping) else mean, "the prior mean"))
        if isinstance(mean, Mapping):
            unknown = [n for n in mean if n not in shapes]
            if unknown:
                raise InputError(f"the prior mean names {unknown[:5]}, which are not among the selected parameters")
            means.update({n: _number(v, f"the prior mean of {n}") for n, v in mean.items()})
        prior = Prior(values, means, dict(shapes))
        prior._check()
        return prior

    def _check(self) -> None:
        for name, shape in self.shapes.items():
            for what, value in (("precision", self.precision[name]), ("mean", self.mean[name])):
                if value.dim() and tuple(value.shape) != shape:
                    raise InputError(
                        f"the prior {what} of {name} has shape {tuple(value.shape)}; allowed is a number or shape {shape}"
                    )
            if not bool(torch.isfinite(self.mean[name]).all()):
                raise InputError(f"the prior mean of {name} must be finite; it has entries that are not")
            value = self.precision[name].detach()
            if not bool((torch.isfinite(value) & (value > 0)).all()):
                raise InputError(
                    f"the prior precision of {name} must be positive and finite, got {float(value.min()):g}. "
                    "It is 1/variance; a flat prior has no posterior here: use a small number such as 1e-6"
                )

    def with_precision(self, precision: Mapping[str, Tensor]) -> Prior:
        """Returns the same prior mean with other precisions (kept as they are, gradients included)."""
        return replace(self, precision=dict(precision))

    def is_scalar(self, names: Sequence[str]) -> bool:
        """Tells whether all of these parameters share one number."""
        values = [self.precision[n] for n in names]
        if any(v.dim() for v in values):
            return False
        first = float(values[0].detach())
        return all(v is values[0] or float(v.detach()) == first for v in values)

    def is_shared(self, names: Sequence[str]) -> bool:
        """Tells whether one and the same 0-d tensor serves all of these parameters, so that a gradient in it is theirs."""
        first = self.precision[names[0]]
        return first.dim() == 0 and all(self.precision[n] is first for n in names)

    def scalar(self, names: Sequence[str]) -> Tensor:
        """Returns the one number that these parameters share.

        Raises:
            InputError: The parameters do not share one number.
        """
        if not self.is_scalar(names):
            raise InputError(
                f"{', '.join(names)} form one Kronecker block, which can carry only one prior precision: one number per layer, "
                "or structure='diagonal', 'full' or 'low_rank' for a precision per parameter"
            )
        return self.precision[names[0]]

    def vector(self, names: Sequence[str], device: torch.device | None = None) -> Tensor:
        """Returns the precisions of these parameters, flattened: [p]."""
        parts = [self.precision[n].to(device).expand(self.shapes[n]).reshape(-1) for n in names]
        return torch.cat(parts)

    def energy(self, params: Params) -> Tensor:
        """Returns ½ Σ precision (θ − mean)², minus the log prior without its constant."""
        total = torch.zeros((), dtype=torch.float64)
        for name in self.shapes:
            value = params[name].detach().to(torch.float64)
            difference = value - self.mean[name].to(value.device)
            total = total + 0.5 * (self.precision[name].to(value.device) * difference.square()).sum().cpu()
        return total

    def squared_distance(self, params: Params, names: Sequence[str]) -> float:
        """Returns ‖θ − mean‖² over some parameters."""
        return sum(
            float((params[n].detach().to(torch.float64) - self.mean[n].to(params[n].device)).square().sum())
            for n in names
        )


def _per_parameter(
    precision: PriorSpec, layers: Mapping[str, Sequence[str]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    if isinstance(precision, Mapping):
        return _from_mapping(precision, layers, shapes)
    value = _number(precision, "the prior precision")
    if value.dim() == 0:
        return dict.fromkeys(shapes, value)
    if value.dim() != 1 or len(value) != len(layers):
        raise InputError(
            f"a sequence of prior precisions must have one number per layer: {len(layers)} here ({checks.few(layers)}), "
            f"got shape {tuple(value.shape)}"
        )
    return {n: one for one, names in zip(value.unbind(), layers.values(), strict=True) for n in names}


def _from_mapping(
    precision: Mapping[str, float | Tensor], layers: Mapping[str, Sequence[str]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    chosen: dict[str, Tensor] = {}
    used: set[str] = set()
    patterns = {k: _pattern(k) for k in precision}
    values = {k: _number(v, f"the prior precision of {k!r}") for k, v in precision.items()}
    for name in shapes:
        layer = next((k for k, names in layers.items() if name in names), "")
        keys = [k for k in precision if k in (name, layer) or patterns[k].fullmatch(name)]
        if keys:
            # The parameter's own name beats its layer's, which beats a pattern.
            best = max(keys, key=lambda k: (k == name, k == layer, len(k)))
            used.update(keys)
            chosen[name] = values[best]
    missing = [n for n in shapes if n not in chosen]
    unused = [k for k in precision if k not in used]
    if missing or unused:
        raise InputError(
            f"the prior precisions do not fit: no number for {checks.few(missing) or 'none'}; fits nothing: {checks.few(unused) or 'none'}. "
            f"Layers are {checks.few(layers)}"
        )
    return chosen


def _number(value: object, what: str) -> Tensor:
    """Returns a number or numbers as a float64 tensor; gradients are kept."""
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} must be a number or numbers, got {value!r}") from error


def _pattern(key: str) -> re.Pattern[str]:
    try:
        return re.compile(key)
    except (re.error, TypeError):
        # A layer's own name need not be a regular expression; what fits nothing is reported as such.
        return re.compile(re.escape(str(key)))
