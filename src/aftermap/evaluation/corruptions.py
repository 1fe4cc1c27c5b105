"""Corruptions and rotations of images, as a function of a severity: what a network meets outside the laboratory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aftermap import checks
from aftermap.batches import Unpack, unpack_batch
from aftermap.draws import normal_like, poisson
from aftermap.errors import ShapeError

__all__ = ["CORRUPTIONS", "Corrupted", "corrupt", "rotate"]

_SEVERITIES = 5


def _check(images: Tensor) -> Tensor:
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        shape = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ShapeError(f"images must be floating-point tensors [N, channels, height, width], got {shape}")
    return images


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotates images counter-clockwise about their centre; corners that come from outside are zero.

    Args:
        images: The images [N, C, H, W].
        degrees: The angle. For square images a multiple of 90 is exact.

    Returns:
        The rotated images [N, C, H, W].

    >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90.0)
    tensor([[[[2., 4.],
              [1., 3.]]]])
    """
    images = _check(images)
    height, width = images.shape[-2:]
    quarters = degrees / 90
    if quarters == round(quarters) and height == width:
        return torch.rot90(images, round(quarters) % 4, (-2, -1))
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    # The grid's coordinates run from −1 to 1 along both sides, which would distort images that are not square: undo
    # that.
    ratio = height / width
    matrix = torch.tensor([[cos, -sin * ratio, 0.0], [sin / ratio, cos, 0.0]], dtype=images.dtype, device=images.device)
    grid = F.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def _noise(images: Tensor, severity: int, generator: torch.Generator | None) -> Tensor:
    return (images + (0.04, 0.08, 0.12, 0.18, 0.26)[severity - 1] * normal_like(images, generator)).clamp(0, 1)


def _shot(images: Tensor, severity: int, generator: torch.Generator | None) -> Tensor:
    photons = (60.0, 25.0, 12.0, 5.0, 3.0)[severity - 1]
    return (poisson(images.clamp_min(0) * photons, generator) / photons).clamp(0, 1).to(images)


def _blur(images: Tensor, severity: int, generator: torch.Generator | None) -> Tensor:
    sigma = (0.5, 0.75, 1.0, 1.5, 2.0)[severity - 1]
    reach = min(math.ceil(3 * sigma), min(images.shape[-2:]) - 1)
    line = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    weights = (-0.5 * (line / sigma).square()).exp()
    weights = weights / weights.sum()
    channels = images.shape[1]
    padded = F.pad(images, (reach, reach, reach, reach), mode="reflect")
    rows = F.conv2d(padded, weights.view(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)
    return F.conv2d(rows, weights.view(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)


def _contrast(images: Tensor, severity: int, generator: torch.Generator | None) -> Tensor:
    mean = images.mean((-2, -1), keepdim=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1] * (images - mean)


def _brightness(images: Tensor, severity: int, generator: torch.Generator | None) -> Tensor:
    return (images + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]).clamp(0, 1)


def _pixelate(images: Tensor, severity: int, generator: torch.Generator | None) -> Tensor:
    share = (0.75, 0.6, 0.5, 0.4, 0.3)[severity - 1]
    height, width = (max(1, round(share * side)) for side in images.shape[-2:])
    return F.interpolate(F.adaptive_avg_pool2d(images, (height, width)), size=images.shape[-2:], mode="nearest")


def _rotation(images: Tensor, severity: int, generator: torch.Generator | None) -> Tensor:
    return rotate(images, 15.0 * severity)


Corruption = Callable[[Tensor, int, torch.Generator | None], Tensor]
CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": _noise,
    "shot_noise": _shot,
    "gaussian_blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "pixelate": _pixelate,
    "rotation": _rotation,
}


def corrupt(images: Tensor, kind: str, severity: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Corrupts images with values in [0, 1].

    Args:
        images: The images [N, C, H, W].
        kind: The kind of corruption, one of ``CORRUPTIONS``: gaussian_noise, shot_noise, gaussian_blur, contrast,
            brightness, pixelate, or rotation (by 15 degrees per severity).
        severity: The strength, from 1 (mild) to 5; 0 gives the images themselves.
        generator: The source of the random noise.

    Returns:
        The corrupted images [N, C, H, W].

    Raises:
        InputError: The kind or the severity is unknown.
        ShapeError: The input is no batch of images.

    References:
        After Hendrycks, Dietterich 2019; the severities are chosen for small images and differ from theirs.

    >>> corrupt(torch.zeros(2, 1, 4, 4), "brightness", 2).mean()
    tensor(0.1000)
    """
    checks.choice("kind", kind, CORRUPTIONS)
    severity = checks.count("severity", severity, 0, most=_SEVERITIES)
    images = _check(images)
    return images if severity == 0 else CORRUPTIONS[kind](images, severity, generator)


class Corrupted:
    """A data set with corrupted images, which are the same at every pass.

    Args:
        data: Batches of (images, y).
        kind: The kind of corruption; see `corrupt`.
        severity: The strength, from 0 (the images themselves) to 5.
        seed: The seed of the noise.
        unpack: A function that turns a batch of another form into (inputs, targets).

    >>> [x.max().item() for x, _ in Corrupted([(torch.zeros(2, 1, 4, 4), torch.zeros(2))], "brightness", 1)]
    [0.05...]
    """

    def __init__(self, data: Iterable[Any], kind: str, severity: int, *, seed: int = 0, unpack: Unpack | None = None):
        self.data, self.kind, self.severity, self.seed, self.unpack = data, kind, severity, seed, unpack

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        generator = torch.Generator().manual_seed(self.seed)
        for raw in self.data:
            batch = unpack_batch(raw, self.unpack)
            yield corrupt(batch.inputs, self.kind, self.severity, generator=generator), batch.targets
