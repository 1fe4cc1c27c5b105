"""Configurations of every layer with a rule: (module, inputs) by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CASES", "normal", "randomise"]

Case = tuple[nn.Module, tuple[Any, ...]]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomise(module: nn.Module) -> nn.Module:
    """Parameters and running statistics that are nowhere 0 or 1, so that nothing cancels."""
    generator = torch.Generator().manual_seed(3)
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if value.is_floating_point():
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                value.copy_(drawn.abs() + 0.5 if "running_var" in name else 0.7 * drawn + 0.1)
    return module


def _tokens(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(5))


CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: (nn.Linear(4, 2), (normal(5, 4),)),
    "linear_tokens": lambda: (nn.Linear(4, 3), (normal(5, 2, 4),)),
    "linear_4d": lambda: (nn.Linear(4, 2, bias=False), (normal(5, 2, 3, 4),)),
    "conv1d": lambda: (nn.Conv1d(2, 3, 4, stride=2, padding=3, dilation=2), (normal(5, 2, 9),)),
    "conv1d_reflect": lambda: (nn.Conv1d(3, 2, 2, padding=1, padding_mode="reflect"), (normal(4, 3, 6),)),
    "conv1d_same_even": lambda: (nn.Conv1d(3, 2, 4, padding="same"), (normal(5, 3, 7),)),
    "conv2d": lambda: (
        nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        (normal(4, 2, 5, 6),),
    ),
    "conv2d_no_bias": lambda: (nn.Conv2d(2, 3, 2, bias=False), (normal(4, 2, 3, 5),)),
    "conv2d_one_position": lambda: (nn.Conv2d(2, 3, (4, 5)), (normal(5, 2, 4, 5),)),
    "conv2d_1x1": lambda: (nn.Conv2d(4, 3, 1, stride=2), (normal(5, 4, 3, 6),)),
    "conv2d_same": lambda: (nn.Conv2d(2, 3, (3, 4), padding="same", dilation=(2, 1)), (normal(4, 2, 5, 6),)),
    "conv2d_valid": lambda: (nn.Conv2d(2, 3, (3, 2), padding="valid"), (normal(4, 2, 5, 4),)),
    "conv2d_replicate": lambda: (
        nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="replicate"),
        (normal(4, 2, 5, 6),),
    ),
    "conv2d_circular_same": lambda: (
        nn.Conv2d(2, 3, (2, 3), padding="same", padding_mode="circular"),
        (normal(4, 2, 5, 6),),
    ),
    "conv2d_groups": lambda: (nn.Conv2d(4, 6, (2, 3), groups=2), (normal(5, 4, 3, 4),)),
    "conv2d_groups_one_position": lambda: (nn.Conv2d(6, 4, (3, 2), groups=2), (normal(5, 6, 3, 2),)),
    "conv2d_depthwise": lambda: (nn.Conv2d(3, 6, 2, groups=3, stride=2, bias=False), (normal(4, 3, 5, 6),)),
    # Wide enough for the path that shifts instead of unfolding.
    "conv1d_shift": lambda: (nn.Conv1d(16, 17, 3, padding=1), (normal(3, 16, 70),)),
    "conv2d_shift": lambda: (nn.Conv2d(16, 17, 2, padding=(1, 0)), (normal(3, 16, 8, 9),)),
    "conv2d_shift_dilated": lambda: (nn.Conv2d(16, 18, 2, dilation=(2, 3), bias=False), (normal(3, 16, 10, 13),)),
    "conv2d_shift_groups": lambda: (
        nn.Conv2d(32, 34, (1, 2), groups=2, dilation=3, bias=False),
        (normal(3, 32, 8, 12),),
    ),
    "conv3d_shift": lambda: (nn.Conv3d(16, 17, (2, 1, 2), dilation=(1, 2, 2)), (normal(3, 16, 4, 5, 7),)),
    "conv3d": lambda: (
        nn.Conv3d(2, 3, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 2), dilation=(2, 1, 1)),
        (normal(4, 2, 4, 5, 3),),
    ),
    "conv3d_groups": lambda: (
        nn.Conv3d(4, 2, 2, groups=2, padding=1, padding_mode="circular"),
        (normal(3, 4, 2, 3, 2),),
    ),
    "transpose1d": lambda: (
        nn.ConvTranspose1d(3, 2, 4, stride=3, padding=2, output_padding=1, dilation=2),
        (normal(5, 3, 4),),
    ),
    "transpose2d": lambda: (
        nn.ConvTranspose2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 2)),
        (normal(4, 2, 3, 4),),
    ),
    "transpose2d_groups": lambda: (nn.ConvTranspose2d(4, 6, 2, groups=2, dilation=(2, 1)), (normal(5, 4, 3, 2),)),
    "transpose2d_crop": lambda: (nn.ConvTranspose2d(2, 3, 2, padding=2, bias=False), (normal(4, 2, 6, 5),)),
    "transpose2d_wide": lambda: (nn.ConvTranspose2d(16, 17, (1, 2)), (normal(3, 16, 8, 9),)),
    "transpose2d_output_size": lambda: (nn.ConvTranspose2d(2, 3, 3, stride=3), (normal(4, 2, 3, 2), [10, 7])),
    "transpose3d": lambda: (
        nn.ConvTranspose3d(2, 3, (2, 1, 2), stride=(1, 2, 2), padding=(1, 0, 0), output_padding=(0, 1, 1)),
        (normal(3, 2, 3, 2, 2),),
    ),
    "embedding": lambda: (nn.Embedding(7, 4), (_tokens(7, 5, 6),)),
    "embedding_one_token": lambda: (nn.Embedding(6, 4), (_tokens(6, 5),)),
    "embedding_padding": lambda: (nn.Embedding(5, 4, padding_idx=2), (_tokens(5, 6, 7),)),
    "embedding_3d": lambda: (nn.Embedding(7, 3, padding_idx=-1), (_tokens(7, 5, 2, 4),)),
    "batchnorm1d": lambda: (nn.BatchNorm1d(4), (normal(5, 4),)),
    "batchnorm1d_lines": lambda: (nn.BatchNorm1d(4), (normal(5, 4, 3),)),
    "batchnorm2d": lambda: (nn.BatchNorm2d(3, eps=0.1), (normal(5, 3, 2, 4),)),
    "batchnorm3d": lambda: (nn.BatchNorm3d(3), (normal(4, 3, 2, 2, 5),)),
    "layernorm": lambda: (nn.LayerNorm(4), (normal(5, 4),)),
    "layernorm_tokens": lambda: (nn.LayerNorm(4), (normal(5, 3, 4),)),
    "layernorm_2d": lambda: (nn.LayerNorm((3, 4)), (normal(5, 2, 3, 4),)),
    "layernorm_no_bias": lambda: (nn.LayerNorm(4, bias=False), (normal(5, 3, 4),)),
    "groupnorm": lambda: (nn.GroupNorm(2, 6), (normal(5, 6, 3),)),
    "groupnorm_2d": lambda: (nn.GroupNorm(3, 6), (normal(4, 6, 2, 5),)),
    "rmsnorm": lambda: (nn.RMSNorm(4), (normal(5, 3, 4),)),
    "rmsnorm_2d": lambda: (nn.RMSNorm((2, 4), eps=0.1), (normal(5, 3, 2, 4),)),
    "prelu": lambda: (nn.PReLU(), (normal(5, 3, 4),)),
    "prelu_channels": lambda: (nn.PReLU(3), (normal(5, 3, 4),)),
    "prelu_channels_flat": lambda: (nn.PReLU(4), (normal(5, 4),)),
}
