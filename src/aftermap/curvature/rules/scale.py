"""Normalisation layers and PReLU: a scale and a shift of each entry."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.curvature.rules.base import InputRows, LayerRule, Layout, Named, matrix_layout, register

__all__ = [
    "BatchNormRule",
    "GroupNormRule",
    "LayerNormRule",
    "PReLURule",
    "RMSNormRule",
    "ScaleRows",
]


@dataclass(frozen=True)
class ScaleRows(InputRows):
    """The input rows of an elementwise scale (norm layers, PReLU): each group has one output and the features (x̂, 1).

    Attributes:
        data: The values x̂ [b, g, t]; None where only the shift is selected.
        ones: Whether a shift belongs to the block.
        shape: The sizes (b, g, t).
        affine: The mean [b·g], the variance [b·g] and ε where x̂ = (data − mean) / √(variance + ε) is never computed,
            because only its sums are needed; None where the data are x̂ itself.
    """

    data: Tensor | None
    ones: bool
    shape: tuple[int, int, int]
    affine: tuple[Tensor, Tensor, float] | None = None

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.shape[0]

    @property
    def groups(self) -> int:  # type: ignore[override]
        return self.shape[1]

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.shape[2]

    @property
    def features(self) -> int:  # type: ignore[override]
        return int(self.data is not None) + int(self.ones)

    def per_example_gradients(self, grads: Tensor) -> Tensor:
        if self.data is not None and (self.affine is not None or len(grads) == 1):
            # For one vector a product and a sum are several times faster than a batch of tiny matrix products.
            gradients = torch.stack([torch.stack(self._columns(vector, self.data), -1) for vector in grads.split(1)])
            return gradients.view(-1, *self.shape[:2], 1, self.features)
        flat = grads[..., 0]  # [v, b, g, t]
        parts = [] if self.data is None else [torch.einsum("vbgt,bgt->vbg", flat, self.data)]
        if self.ones:
            parts.append(flat.sum(-1))
        return torch.stack(parts, -1)[..., None, :]

    def columns(self, grads: Tensor) -> list[Tensor] | None:
        """Returns the per-example gradients for one vector [1, b, g, t, 1] as one column [b·g] for each feature.

        Returns None where there are several vectors or only a shift: `per_example_gradients` computes those.
        """
        return None if self.data is None or len(grads) > 1 else self._columns(grads, self.data)

    def _columns(self, grads: Tensor, data: Tensor) -> list[Tensor]:
        if self.affine is None:
            flat = grads[0, ..., 0]  # [b, g, t]
            scale = torch.linalg.vecdot(flat, data).reshape(-1)
            return [scale, flat.sum(-1).reshape(-1)] if self.ones else [scale]
        mean, variance, tiny = self.affine
        # Σ_t g x̂ and Σ_t g by PyTorch's own kernel, with examples as channels.
        _, scale, shift = torch.ops.aten.native_batch_norm_backward.default(
            grads.reshape(1, -1, self.shape[2]),
            data.reshape(1, -1, self.shape[2]),
            None,
            mean,
            variance,
            None,
            None,
            False,
            tiny,
            [False, True, self.ones],
        )
        return [scale, shift] if self.ones else [scale]

    def moments(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        columns = self.columns(grads)
        if columns is None:
            return super().moments(grads)
        gradients = torch.cat(columns).view(-1, *self.shape[:2])  # [i, b, g]
        total = gradients.sum(1)
        return total.T[:, None], gradients.square_().sum(1).T[:, None]

    def examples(self, start: int, length: int) -> ScaleRows:
        data = None if self.data is None else self.data[start : start + length]
        affine = None
        if self.affine is not None:
            groups = self.shape[1]
            part = slice(start * groups, (start + length) * groups)
            affine = (self.affine[0][part], self.affine[1][part], self.affine[2])
        return ScaleRows(data, self.ones, (length, *self.shape[1:]), affine)


class _ScaleRule(LayerRule):
    """A layer y = weight ∘ x̂ + bias: each entry is a group with the features (x̂, 1)."""

    matrix = False

    def layout(self, name: str, module: Any, named: Named) -> Layout:
        _, first = next(iter(named.values()))
        return matrix_layout(name, named, first.numel(), 1, (first.numel(), 1, 1), (0, 1, 2))

    @abstractmethod
    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        """Returns x̂, in the shape of the input."""

    @abstractmethod
    def arranged(self, module: Any, values: Tensor, lead: int) -> Tensor:
        """Arranges values as [*leading, group, shared], where the first ``lead`` dimensions stay as they are."""

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> InputRows:
        # The output has the shape of the input, so that either has the same groups and shared positions.
        data = self.arranged(module, self.normalised(module, inputs) if "weight" in named else inputs, 1)
        shape = (data.shape[0], data.shape[1], data.shape[2])
        return ScaleRows(data if "weight" in named else None, "bias" in named, shape)

    def grads(self, module: Any, grads: Tensor) -> Tensor:
        return self.arranged(module, grads, 2)[..., None]


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormRule(_ScaleRule):
    """Batch normalisation with running statistics (Ritter et al. 2018, appendix G): the data stay independent."""

    def unsupported(self, module: Any) -> str | None:
        if module.training or module.running_mean is None:
            return "batch statistics make the outputs of examples depend on each other; call model.eval() and keep running statistics"
        return None

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> InputRows:
        if module.training or module.running_mean is None or "weight" not in named:
            return super().rows(module, inputs, space, named)
        data = self.arranged(module, inputs, 1)
        shape = (data.shape[0], data.shape[1], data.shape[2])
        statistics = _statistics_of_examples(module, shape[0], data.dtype)
        return ScaleRows(data, "bias" in named, shape, (*statistics, module.eps))

    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        if module.training or module.running_mean is None:  # fits refuse this, optimisers ask for it
            return F.batch_norm(inputs, None, None, None, None, True, 0.0, module.eps)
        return inputs  # only a shift is selected, which does not read them; for a scale, see `rows`

    def arranged(self, module: Any, values: Tensor, lead: int) -> Tensor:
        return values.reshape(*values.shape[: lead + 1], -1)


def _statistics_of_examples(module: Any, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the running mean and variance [b·g] of a BatchNorm, repeated for every example."""
    mean, variance = (s.to(dtype).expand(batch, -1).reshape(-1) for s in (module.running_mean, module.running_var))
    return mean, variance


@register(nn.GroupNorm)
class GroupNormRule(_ScaleRule):
    """Group normalisation, of which instance normalisation is the extreme case."""

    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        return F.group_norm(inputs, module.num_groups, None, None, module.eps)

    def arranged(self, module: Any, values: Tensor, lead: int) -> Tensor:
        return values.reshape(*values.shape[: lead + 1], -1)


@register(nn.LayerNorm)
class LayerNormRule(_ScaleRule):
    """Layer normalisation over the trailing dimensions."""

    leading = True

    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        return F.layer_norm(inputs, module.normalized_shape, None, None, module.eps)

    def arranged(self, module: Any, values: Tensor, lead: int) -> Tensor:
        size = math.prod(module.normalized_shape)
        return values.reshape(*values.shape[:lead], -1, size).transpose(-1, -2)


@register(nn.RMSNorm)
class RMSNormRule(LayerNormRule):
    """Root-mean-square normalisation, which has neither a mean nor a bias."""

    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        return F.rms_norm(inputs, module.normalized_shape, None, module.eps)


@register(nn.PReLU)
class PReLURule(_ScaleRule):
    """y = max(0, x) + weight ∘ min(0, x): the slope is a scale of the negative part."""

    roles = ("weight",)

    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        return inputs.clamp_max(0.0)

    def arranged(self, module: Any, values: Tensor, lead: int) -> Tensor:
        if module.num_parameters == 1:
            return values.reshape(*values.shape[:lead], 1, -1)
        return values.reshape(*values.shape[: lead + 1], -1)
