"""Validation data that are training data: as such their labels promise too much."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aftermap.batches import Batch, iterate, tensors_of
from aftermap.distributed import all_reduce_, fail_together, is_distributed, world_size
from aftermap.errors import StatisticalWarning, warn_caller
from aftermap.laplace.fitted import Fitted

__all__ = ["warn_if_trained_on"]

_LOOKED_AT = 5000  # training data that validation inputs are looked for among


def warn_if_trained_on(validation: Sequence[Batch], fitted: Fitted) -> None:
    """Looks for validation inputs among the first training data, where these are at hand; among those of all processes.

    Args:
        validation: The validation data.
        fitted: The fit, which may know the data that it was made with.

    Warns:
        StatisticalWarning: Many of the inputs are there.
    """
    if fitted.data is None:
        return
    with fail_together("looking for validation data among training data"):
        wanted = [key for batch in validation for key in _keys(batch)]
        among: set[int] = set()
        seen = 0
        for batch in iterate(
            fitted.data, device=torch.device("cpu"), unpack=fitted.unpack, may_be_empty=is_distributed()
        ):
            among.update(_keys(batch))
            seen += batch.size
            if seen >= _LOOKED_AT:
                break
        counts = torch.tensor([sum(key in among for key in wanted), seen, len(wanted)])
    # Every process has the same validation data, and its own part of the training data.
    all_reduce_([counts])
    count = int(counts[2]) // world_size()
    shared, seen = min(int(counts[0]), count), int(counts[1])
    expected = min(1.0, seen / max(fitted.factors.n_data, 1.0)) * count
    if shared >= 3 and shared > 0.5 * expected:
        warn_caller(
            f"{shared} of {count} validation inputs are among the first {seen} training inputs: the validation data are training data. "
            "What they say of the predictive is too good, and the posterior will be too sure. Hold out data that the network has not seen",
            StatisticalWarning,
        )


def _keys(batch: Batch) -> list[int]:
    """Returns a number for each example that equal inputs share."""
    columns = [
        [hash(row.numpy().tobytes()) for row in t.detach().cpu().contiguous().reshape(batch.size, -1).view(torch.uint8)]
        for t in tensors_of(batch.inputs)
        if t.dim() and len(t) == batch.size and t.numel()
    ]
    return [hash(parts) for parts in zip(*columns, strict=True)]
