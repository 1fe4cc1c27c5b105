"""Parts of a data set that never overlap, whichever command asks for them."""

from __future__ import annotations

import torch

from aftermap.data.examples import Examples
from aftermap.errors import DataError, InputError

__all__ = ["PARTS", "part_of", "split"]

PARTS = ("train", "validation", "test")
_SEED = 20180  # fixed: training and testing may happen in different processes, weeks apart


def split(data: Examples, *, validation: float, test: float) -> dict[str, Examples]:
    """Train, validation and test, by a fixed permutation of the examples.

    Args:
        data: to be split; always split in the same way.
        validation: share of the validation part, in [0, 1).
        test: share of the test part, in [0, 1).

    Returns:
        The parts by name; a part of share 0 is left out.

    Raises:
        InputError: shares that leave nothing for training.
        DataError: too few examples for the parts.

    >>> data = Examples(torch.arange(10.0)[:, None], None, "ten")
    >>> {name: len(part) for name, part in split(data, validation=0.2, test=0.2).items()}
    {'train': 6, 'validation': 2, 'test': 2}
    """
    if min(validation, test) < 0 or not validation + test < 1:
        raise InputError(f"the shares validation={validation} and test={test} must be at least 0 and together below 1")
    n = len(data)
    n_test, n_validation = round(test * n), round(validation * n)
    sizes = {"train": n - n_test - n_validation, "validation": n_validation, "test": n_test}
    empty = [k for k, share in (("validation", validation), ("test", test)) if share > 0 and sizes[k] == 0]
    if empty or sizes["train"] < 1:
        raise DataError(f"{data.name} holds {n} examples, too few to be split")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(_SEED))
    found, start = {}, 0
    for name in PARTS:
        if sizes[name]:
            found[name] = data.take(order[start : start + sizes[name]])
            start += sizes[name]
    return found


def part_of(data: Examples, part: str, *, validation: float = 0.2, test: float = 0.2) -> Examples:
    """One part of a data set that has no official parts: "train", "validation", "test" or "all"."""
    if part == "all":
        return data
    if part not in PARTS:
        raise InputError(f"part={part!r} is not known; allowed are {', '.join(PARTS)} and all")
    return split(data, validation=validation, test=test)[part]
