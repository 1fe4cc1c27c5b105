"""nn.MultiheadAttention: its projections are not module calls, so its forward pass is written out with taps.

PyTorch computes the whole block in one function; the projections' inputs and outputs are not visible to hooks. Here the
same computation stands step by step (Vaswani et al. 2017, eq. 1), and every projection is reported to a tap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.curvature.rules.base import InputRows, LayerRule, Layout, Named, append_ones, matrix_layout, without_view
from aftermap.curvature.rules.linear import DenseRows, LinearRule
from aftermap.errors import InputError

__all__ = ["PackedProjectionRule", "attention_forward", "attention_projections"]

Tap = Callable[[str, Tensor, Tensor, int | None], None]  # (projection, input, output, group)
_PROJECTIONS = ("q", "k", "v")


class PackedProjectionRule(LayerRule):
    """The in-projection: the query, key and value matrices are stacked in one parameter, and each is a group."""

    leading = True
    roles = ("in_proj_weight", "in_proj_bias")

    def layout(self, name: str, module: Any, named: Named) -> Layout:
        _, first = next(iter(named.values()))
        out = first.shape[0] // 3
        return matrix_layout(name, named, 3, out, (3, out, first.numel() // (3 * out)), (0, 1, 2))

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> InputRows:
        data = inputs.reshape(inputs.shape[0], 1, -1, inputs.shape[-1])
        data = data if "weight" in named else data[..., :0]
        return DenseRows(data.expand(-1, 3, -1, -1), "bias" in named)

    def rows_of_group(self, inputs: Tensor, group: int, named: Named) -> InputRows:
        """Returns the rows of one projection alone; the other groups hold zeros."""
        data = inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
        data = data if "weight" in named else data[..., :0]
        data = append_ones(data) if "bias" in named else data
        full = data.new_zeros(data.shape[0], 3, *data.shape[1:])
        full[:, group] = data
        return DenseRows(full, ones=False, only_group=group)

    def grads(self, module: Any, grads: Tensor) -> Tensor:
        lines = grads.reshape(*grads.shape[:2], -1, 3, grads.shape[-1] // 3)
        return lines.transpose(2, 3)

    def grads_of_group(self, grads: Tensor, group: int) -> Tensor:
        """Arranges the output gradient [v, b, ..., o] of one projection as [v, b, 3, t, o], with zeros for the others."""
        lines = grads.reshape(*grads.shape[:2], -1, grads.shape[-1])
        full = lines.new_zeros(*lines.shape[:2], 3, *lines.shape[2:])
        full[:, :, group] = lines
        return full


def attention_projections(module: nn.MultiheadAttention) -> Mapping[str, tuple[LayerRule, dict[str, str]]]:
    """Returns for each projection its rule and, by role, the attribute path of its parameters."""
    projections: dict[str, tuple[LayerRule, dict[str, str]]] = {}
    if module._qkv_same_embed_dim:
        projections["in_proj"] = (PackedProjectionRule(), {"weight": "in_proj_weight", "bias": "in_proj_bias"})
    else:
        for letter in _PROJECTIONS:
            projections[f"{letter}_proj"] = (LinearRule(), {"weight": f"{letter}_proj_weight"})
    projections["out_proj"] = (LinearRule(), {"weight": "out_proj.weight", "bias": "out_proj.bias"})
    return projections


def attention_forward(module: nn.MultiheadAttention, tap: Tap) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Makes a forward pass with the signature and the results of ``module.forward`` that reports every projection."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise InputError("is_causal=True is a hint about attn_mask and needs one, as in PyTorch; pass attn_mask")
        batched = query.dim() == 3
        axis = 1 if module.batch_first and batched else 0  # position axis
        q, k, v = _project(module, tap, query, key, value)
        if not batched:
            q, k, v = (t[:, None] for t in (q, k, v))
        elif module.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        # [t, b, e] from here on, as in the original.
        length, batch, width = q.shape
        if module.bias_k is not None and module.bias_v is not None:
            k = torch.cat([k, module.bias_k.expand(1, batch, width)])
            v = torch.cat([v, module.bias_v.expand(1, batch, width)])
        if module.add_zero_attn:
            k, v = (torch.cat([t, t.new_zeros(1, batch, width)]) for t in (k, v))
        heads = module.num_heads
        q, k, v = (t.reshape(t.shape[0], batch, heads, width // heads).permute(1, 2, 0, 3) for t in (q, k, v))
        scores = (q / math.sqrt(width // heads)) @ k.transpose(-1, -2)  # [b, heads, t, s]
        if is_causal and key_padding_mask is None and not need_weights:
            # PyTorch then ignores attn_mask, and its causal mask also hides rows that were added to the keys.
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = _masked(scores, attn_mask, key_padding_mask, heads)
        weights = F.dropout(scores.softmax(-1), module.dropout, module.training)
        mixed = (weights @ v).permute(2, 0, 1, 3).reshape(length, batch, width)
        mixed = mixed[:, 0] if not batched else (mixed.transpose(0, axis) if axis else mixed)
        output = without_view(F.linear(mixed, module.out_proj.weight, module.out_proj.bias))
        tap("out_proj", mixed, output, None)
        if not need_weights:
            return output, None
        shown = weights.mean(1) if average_attn_weights else weights
        return output, shown if batched else shown[0]

    return forward


def _project(module: nn.MultiheadAttention, tap: Tap, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    bias = module.in_proj_bias
    if not module._qkv_same_embed_dim:
        biases: Any = [None] * 3 if bias is None else bias.chunk(3)
        projected = []
        for letter, x, b in zip(_PROJECTIONS, (query, key, value), biases, strict=True):
            y = F.linear(x, getattr(module, f"{letter}_proj_weight"), b)
            tap(f"{letter}_proj", x, y, None)
            projected.append(y)
        return projected
    weight = module.in_proj_weight
    if query is key and key is value:
        packed = F.linear(query, weight, bias)
        tap("in_proj", query, packed, None)
        return list(packed.chunk(3, -1))
    weights = weight.chunk(3)
    biases = [None] * 3 if bias is None else bias.chunk(3)
    projected = []
    for group, (x, w, b) in enumerate(zip((query, key, value), weights, biases, strict=True)):
        y = F.linear(x, w, b)
        tap("in_proj", x, y, group)
        projected.append(y)
    return projected


def _masked(scores: Tensor, attn_mask: Tensor | None, padding: Tensor | None, heads: int) -> Tensor:
    """Adds the masks to the scores: True hides a key, and a number is added. Extra bias and zero keys stay visible."""
    extra = scores.shape[-1]
    if attn_mask is not None:
        mask = attn_mask if attn_mask.dim() == 2 else attn_mask.reshape(-1, heads, *attn_mask.shape[1:])
        mask = F.pad(_additive(mask, scores.dtype), (0, extra - mask.shape[-1]))
        scores = scores + mask
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding[None]
        pad = F.pad(_additive(padding, scores.dtype), (0, extra - padding.shape[-1]))
        scores = scores + pad[:, None, None, :]
    return scores


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
    return mask.to(dtype)
