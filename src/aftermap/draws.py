"""Random numbers for a tensor: drawn on the generator's device, returned on the tensor's device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["normal_like", "poisson", "signs_like", "uniform_like"]


def _device(like: Tensor, generator: torch.Generator | None) -> torch.device:
    """Returns the device to draw on: a generator draws only on its own; without one the tensor's is used."""
    return like.device if generator is None else generator.device


def _dtype(like: Tensor) -> torch.dtype:
    """Returns the dtype to draw in: half precision is too coarse, so at least float32."""
    return torch.promote_types(like.dtype, torch.float32)


def uniform_like(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws uniform numbers in [0, 1) of the shape of ``like``, in at least float32.

    Args:
        like: A tensor that gives shape, device and dtype.
        generator: The source of the random draws. None means torch's default generator.

    Returns:
        A tensor of the shape of ``like``, on its device, float32 or wider.

    >>> uniform_like(torch.zeros(2, 3), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """
    drawn = torch.rand(like.shape, generator=generator, device=_device(like, generator), dtype=_dtype(like))
    return drawn.to(like.device)


def normal_like(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws standard normal numbers of the shape, device and dtype of ``like``.

    Args:
        like: A tensor that gives shape, device and dtype.
        generator: The source of the random draws. None means torch's default generator.

    Returns:
        A tensor like ``like``.

    >>> normal_like(torch.zeros(2, 3), torch.Generator().manual_seed(0)).dtype
    torch.float32
    """
    drawn = torch.randn(like.shape, generator=generator, device=_device(like, generator), dtype=_dtype(like))
    return drawn.to(like.device, like.dtype)


def signs_like(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws independent signs, -1 or +1 with probability one half each, of the shape, device and dtype of ``like``.

    Args:
        like: A tensor that gives shape, device and dtype.
        generator: The source of the random draws. None means torch's default generator.

    Returns:
        A tensor like ``like``.

    >>> signs_like(torch.zeros(5), torch.Generator().manual_seed(0)).abs().tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    bits = torch.randint(2, like.shape, generator=generator, device=_device(like, generator))
    return (2 * bits - 1).to(like.device, like.dtype)


def poisson(rate: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws Poisson counts with the given rates, in at least float32.

    Args:
        rate: The non-negative rates, of any shape.
        generator: The source of the random draws. None means torch's default generator.

    Returns:
        Counts of the shape and on the device of ``rate``, float32 or wider.

    >>> poisson(torch.zeros(3)).tolist()
    [0.0, 0.0, 0.0]
    """
    drawn = torch.poisson(rate.to(_device(rate, generator), _dtype(rate)), generator=generator)
    return drawn.to(rate.device)
