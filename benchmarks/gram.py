"""What the strips of `aftermap.linalg.GramSum` are worth: sums of outer products with other constants, beside the shipped ones.

``python -m benchmarks.gram`` prints, for rows of several widths, how many times as long a sum takes on one thread with strips of
another height (the last one is the whole matrix at once) and with strips that are not aligned: CPU time, interleaved, the median.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from aftermap import linalg
from benchmarks.convolution import replaced, time_ratio

__all__ = ["ALIGNMENTS", "HEIGHTS", "WIDTHS", "measure"]

WIDTHS = (145, 257, 577, 1025)  # features of a row with its bias: none is a multiple of anything
ROWS = 2048
HEIGHTS = (32, 64, 256, 1 << 20)
ALIGNMENTS = (1, 64)


def measure(width: int, *, repeats: int) -> dict[str, float]:
    """How many times as long a sum over rows of this width takes with each constant changed.

    Args:
        width: The number of features.
        repeats: The number of interleaved rounds.
    """
    rows = torch.randn(1, ROWS, width, generator=torch.Generator().manual_seed(0))

    def sums(constant: str, value: int) -> Callable[[], None]:
        with replaced(linalg, constant, value):
            total = linalg.GramSum(1, width, torch.float32, torch.device("cpu"))
        return lambda: total.add(rows)

    shipped = sums("_STRIP", linalg._STRIP)
    changes = [("_STRIP", value) for value in HEIGHTS] + [("_ALIGNED", value) for value in ALIGNMENTS]
    return {f"{name}={value:,}": time_ratio(sums(name, value), shipped, repeats) for name, value in changes}


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25, help="interleaved rounds")
    repeats = parser.parse_args(arguments).repeats
    torch.set_num_threads(1)
    for width in WIDTHS:
        print(f"{ROWS:,} rows of {width}")
        for choice, ratio in measure(width, repeats=repeats).items():
            print(f"  {choice:20} {ratio:6.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
