"""Images of inputs as small PNG pictures inside the page."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

import numpy as np
import torch

from aftermap.errors import DataError, ShapeError
from aftermap.late import optional

__all__ = ["as_images", "data_uri"]


def as_images(images: Any, n_data: int) -> Any:
    """Images of the test inputs as one array [N, H, W] or [N, H, W, 3], not yet scaled.

    Args:
        images: [N, H, W], [N, 1, H, W], [N, 3, H, W], [N, H, W, 1] or [N, H, W, 3]: tensor or array; in the order of the test data.
        n_data: N.

    Raises:
        ShapeError: another shape, or another number of images than inputs.
        DataError: numbers that are not finite.

    >>> as_images(torch.zeros(5, 1, 4, 3), 5).shape
    (5, 4, 3)
    """
    array = images.detach().cpu().numpy() if isinstance(images, torch.Tensor) else np.asarray(images)
    if array.ndim == 4 and array.shape[1] in (1, 3):
        array = np.moveaxis(array, 1, -1)
    if array.ndim == 4 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[-1] != 3):
        raise ShapeError(
            f"images must have shape [N, H, W], [N, 1, H, W] or [N, 3, H, W], got {list(np.shape(images))}; "
            "leave images out for inputs that are not pictures"
        )
    if len(array) != n_data:
        raise ShapeError(f"there must be one image per test input: got {len(array)} for {n_data}")
    if not bool(np.isfinite(array).all()):
        raise DataError("images hold numbers that are not finite")
    return array


def data_uri(image: Any, low: float, high: float) -> str:
    """A picture [H, W] (grey) or [H, W, 3] as a PNG data address; `low` is black and `high` full brightness.

    >>> data_uri(np.eye(3), 0.0, 1.0)[:22]
    'data:image/png;base64,'
    """
    scaled = np.clip((np.asarray(image, dtype=np.float64) - low) / max(high - low, 1e-12), 0, 1)
    buffer = BytesIO()
    matplotlib_image = optional("matplotlib.image", "plot", "pictures")
    matplotlib_image.imsave(buffer, scaled, format="png", cmap="gray", vmin=0, vmax=1, metadata={"Software": None})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
