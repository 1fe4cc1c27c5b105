"""What an optimiser tells its user while it goes on: a step that was skipped, gradients that are not used."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor

from aftermap.errors import NumericalWarning, StatisticalWarning

__all__ = ["LeftOut", "warn_of_left_gradients", "warn_of_skipped_step"]


class LeftOut(Exception):
    """A closure left its batch out by returning None; never leaves ``step``."""


def warn_of_skipped_step() -> None:
    """The step's sums are not finite."""
    warnings.warn(
        "a step was skipped (opt.skipped_steps counts them): the loss or a gradient is not finite. Parameters and "
        "statistics are unchanged. Check the data, or lower the learning rate or the temperature",
        NumericalWarning,
        stacklevel=6,
    )


def warn_of_left_gradients(before: Mapping[str, Tensor | None]) -> bool:
    """Warns of gradients that were in ``.grad`` before a step with a closure, and are not used by it.

    Args:
        before: parameter name -> ``.grad`` before the closure; zeros count as none.

    Returns:
        Whether there were any.
    """
    left = [n for n, g in before.items() if g is not None and bool(g.any())]
    if left:
        warnings.warn(
            f"step(closure) does not use the gradients that were in .grad of {len(left)} parameters ({left[0]}, …) before: "
            "they come from a backward pass outside the closure, and so from no draw of the weights. To accumulate, put every "
            "backward pass into `with opt.sampled_params():` and call step() without a closure; otherwise call "
            "opt.zero_grad() before step or in the closure",
            StatisticalWarning,
            stacklevel=5,
        )
    return bool(left)
