"""Stronger augmentation of training images, which can stand in for validation data where training was augmented, too."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from aftermap.errors import InputError, ShapeError

__all__ = ["random_crops"]

_LOG_ASPECT = math.log(4 / 3)


def random_crops(
    images: Tensor, least: float = 0.5, *, flip: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """Returns random parts of images, each enlarged to the size of the whole.

    The share of the area is uniform between ``least`` and 1, the logarithm of the aspect ratio between those of 3/4 and 4/3, and the place
    uniform; values between pixels are interpolated linearly.

    A network that was trained on random crops has not seen its training images under stronger ones. Their labels then say nearly as much
    about the temperature as those of held-out images. A network that was trained **without** crops is ruined by this: such images are
    harder than any that it will meet.

    Args:
        images: The images [N, C, H, W].
        least: The smallest share of the area that is kept.
        flip: Whether half of the images are mirrored, left to right.
        generator: The source of the random numbers.

    Returns:
        The parts, as many images of the same size.

    Raises:
        ShapeError: The images do not have four dimensions.
        InputError: The share is not between 0 and 1.

    >>> images = torch.rand(4, 3, 8, 8)
    >>> torch.allclose(random_crops(images, 1.0, flip=False), images, atol=1e-5)
    True
    """
    if images.dim() != 4 or not images.is_floating_point():
        raise ShapeError(
            f"images must be floating-point numbers [N, C, H, W], got {images.dtype} of shape {list(images.shape)}"
        )
    if not 0 < least <= 1:
        raise InputError(f"least={least!r} must be a share of the area, above 0 and at most 1")
    if not images.numel():
        return images.clone()
    source = images.device if generator is None else generator.device
    dtype = torch.promote_types(images.dtype, torch.float32)
    drawn = torch.rand(5, len(images), generator=generator, device=source, dtype=dtype)
    share, aspect, across, down, side = drawn.to(images.device)
    area = least + (1 - least) * share
    stretch = torch.exp(_LOG_ASPECT * (aspect - 0.5))  # the root of the aspect ratio
    width, height = ((area.sqrt() * s).clamp_max(1.0) for s in (stretch, 1 / stretch))
    # A crop that is as wide as the image has no other shape: without this the least stretch would cut off a part of a whole.
    whole = area >= 1 - 1e-6
    width, height = (torch.where(whole, torch.ones_like(v), v) for v in (width, height))
    sign = torch.where(side < 0.5, -1.0, 1.0).to(width) if flip else torch.ones_like(width)
    zero = torch.zeros_like(width)
    rows = (
        torch.stack([sign * width, zero, (1 - width) * (2 * across - 1)], 1),
        torch.stack([zero, height, (1 - height) * (2 * down - 1)], 1),
    )
    places = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    enlarged = F.grid_sample(
        images.to(places.dtype), places, mode="bilinear", padding_mode="border", align_corners=False
    )
    return enlarged.to(images.dtype)
