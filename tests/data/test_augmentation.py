"""Random crops: which part of an image they show is read off images whose values are their own coordinates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aftermap.data import random_crops
from aftermap.errors import InputError, ShapeError

SIZE = 64


def coordinates(count: int) -> Tensor:
    """Images with two channels: the place from left to right and from top to bottom, in shares of the size."""
    place = (torch.arange(SIZE, dtype=torch.float64) + 0.5) / SIZE
    return torch.stack([place.expand(SIZE, SIZE), place[:, None].expand(SIZE, SIZE)]).expand(count, 2, SIZE, SIZE)


def parts(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Width and height of the part that each image shows, in shares of the whole, and whether it is mirrored."""
    inner = slice(SIZE // 4, 3 * SIZE // 4)  # away from the border, where values are repeated
    across, down = images[:, 0, SIZE // 2, inner], images[:, 1, inner, SIZE // 2]
    steps = SIZE * (across[:, 1:] - across[:, :-1]).mean(1), SIZE * (down[:, 1:] - down[:, :-1]).mean(1)
    return steps[0].abs(), steps[1], steps[0] < 0


@pytest.mark.parametrize("least", [0.2, 0.5, 0.9])
def test_area_aspect_and_place(least: float) -> None:
    images = random_crops(coordinates(2000), least, generator=torch.Generator().manual_seed(0))
    width, height, mirrored = parts(images)
    area = width * height
    assert float(area.max()) <= 1 + 1e-9
    aspect = width / height
    assert float(aspect.min()) > 3 / 4 - 1e-9
    assert float(aspect.max()) < 4 / 3 + 1e-9
    # Where neither side is cut by the edge, the area is what was drawn.
    free = (width < 1 - 1e-9) & (height < 1 - 1e-9)
    assert float(area[free].min()) > least - 1e-9
    assert 0.45 < float(mirrored.double().mean()) < 0.55
    middle = images[:, :, SIZE // 2 - 1 : SIZE // 2 + 1, SIZE // 2 - 1 : SIZE // 2 + 1].mean((2, 3))
    for centre, side in zip(middle.T, (width, height), strict=True):
        assert bool(((centre - side / 2 > -1e-9) & (centre + side / 2 < 1 + 1e-9)).all())
        spread = (centre - 0.5)[free].abs().max()
        assert float(spread) > 0.8 * (1 - math.sqrt(least * 4 / 3)) / 2 if least < 0.6 else True
    assert float(area[free].mean()) == pytest.approx((least + 1) / 2, abs=0.1)


def test_the_whole_image() -> None:
    images = torch.rand(6, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(random_crops(images, 1.0, flip=False), images, atol=1e-5)
    found = random_crops(images, 1.0, generator=torch.Generator().manual_seed(1))
    either = [
        torch.allclose(f, x, atol=1e-5) or torch.allclose(f, x.flip(-1), atol=1e-5)
        for f, x in zip(found, images, strict=True)
    ]
    assert all(either)


def test_seeds_and_dtypes() -> None:
    images = torch.rand(4, 1, 8, 8)
    one, two = (random_crops(images, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert random_crops(images.to(torch.bfloat16)).dtype == torch.bfloat16
    assert random_crops(images[:0]).shape == (0, 1, 8, 8)


def test_bad_input() -> None:
    with pytest.raises(
        ShapeError, match=r"must be floating-point numbers \[N, C, H, W\], got torch.float32 of shape \[3, 8, 8\]"
    ):
        random_crops(torch.rand(3, 8, 8))
    with pytest.raises(ShapeError, match="got torch.uint8"):
        random_crops(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    for least in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(InputError, match="must be a share of the area"):
            random_crops(torch.rand(1, 1, 8, 8), least)
