"""What the choices in `aftermap.curvature.rules.convolution` are worth: each layer with one choice changed, beside as it is.

``python -m benchmarks.convolution`` prints, for layers of LeNet, ResNet-20 and WRN-16-2 with the batches of `MODELS`, how many
times as long the sums of per-example gradients and of their squares take on one thread: CPU time, interleaved, the median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature.rules import convolution
from aftermap.curvature.rules.base import find_rule
from aftermap.curvature.rules.convolution import ConvRows
from benchmarks.models import MODELS

__all__ = ["CONSTANTS", "LAYERS", "measure", "replaced", "time_ratio"]

# The network that a layer is taken from, the layer, and the size of its input's maps.
LAYERS: dict[str, tuple[str, nn.Conv2d, int]] = {
    "LeNet, 1 channel": ("lenet", nn.Conv2d(1, 6, 5, padding=2), 28),
    "LeNet, 6 channels": ("lenet", nn.Conv2d(6, 16, 5), 14),
    "ResNet-20, 3 channels": ("resnet20", nn.Conv2d(3, 16, 3, padding=1, bias=False), 32),
    "ResNet-20, 16 channels": ("resnet20", nn.Conv2d(16, 16, 3, padding=1, bias=False), 32),
    "ResNet-20, 32 channels": ("resnet20", nn.Conv2d(32, 32, 3, padding=1, bias=False), 16),
    "ResNet-20, 64 channels": ("resnet20", nn.Conv2d(64, 64, 3, padding=1, bias=False), 8),
    "WRN-16-2, 128 channels": ("wrn16_2", nn.Conv2d(128, 128, 3, padding=1, bias=False), 8),
}
# For each method the constants that it reads, with a smaller and a larger value than the shipped one.
CONSTANTS: dict[str, dict[str, tuple[int, int]]] = {
    "grouped kernel": {"_GROUPED_NUMBERS": (1 << 17, 1 << 23)},
    "kernel rows": {"_FEW_COLUMNS": (0, 1000), "_UNFOLDED_NUMBERS": (1 << 18, 1 << 25)},
    "unfolded windows": {"_SIDE_BY_SIDE": (0, 10_000), "_WINDOW_NUMBERS": (1 << 17, 1 << 24)},
}
VECTORS = 10  # that meet cached rows


def _rows_and_gradient(name: str) -> tuple[ConvRows, Tensor]:
    network, layer, size = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MODELS[network].batch, layer.in_channels, size, size, generator=generator)
    out = layer(x)
    rule = find_rule(layer)
    assert rule is not None
    named = {n: (n, p) for n, p in layer.named_parameters()}
    rows = rule.rows(layer, x, tuple(out.shape[1:]), named)
    assert isinstance(rows, ConvRows)
    return rows, rule.grads(layer, torch.randn(1, *out.shape, generator=generator))


@contextmanager
def replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Replaces a constant or a function of a module for a while."""
    shipped = getattr(module, name)
    try:
        setattr(module, name, value)
        yield
    finally:
        setattr(module, name, shipped)


def time_ratio(other: Callable[[], Any], shipped: Callable[[], Any], repeats: int) -> float:
    """How many times as much CPU time one function takes as another: the ratio of medians over interleaved rounds."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, times in zip((other, shipped), seconds, strict=True):
            function()  # what the other left in the caches is not measured
            start = time.process_time()
            function()
            times.append(time.process_time() - start)
    return statistics.median(seconds[0]) / statistics.median(seconds[1])


def measure(name: str, *, repeats: int) -> dict[str, float]:
    """How many times as long one layer takes with each choice changed.

    Args:
        name: A key of `LAYERS`.
        repeats: The number of interleaved rounds.
    """
    rows, gradient = _rows_and_gradient(name)
    vectors = [gradient] * VECTORS

    def shipped() -> None:
        rows.moments(gradient)

    def with_change(constant: str, value: Any) -> Callable[[], None]:
        def run() -> None:
            with replaced(convolution, constant, value):
                shipped()

        return run

    def squares(meet: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            out = gradient.new_zeros(rows.groups, gradient.shape[-1], rows.features)
            met = meet()
            for vector in vectors:
                met.add_squares_(out, vector)

        return run

    chosen = convolution.choose_method(rows, gradient.shape[-1], gradient)
    ratios = {f"{chosen} (chosen)": 1.0}
    for method in CONSTANTS:
        if method != chosen:
            always = with_change("choose_method", lambda *_, method=method: method)
            ratios[method] = time_ratio(always, shipped, repeats)
    for constant, values in CONSTANTS[chosen].items():
        for value in values:
            # Which method is chosen does not follow the size of chunks here: only the chunks are compared.
            with replaced(convolution, "choose_method", lambda *_: chosen):
                ratios[f"{constant}={value:,}"] = time_ratio(with_change(constant, value), shipped, repeats)
    ratios[f"not cached, {VECTORS} vectors"] = time_ratio(squares(lambda: rows), squares(rows.cached), repeats)
    return ratios


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25, help="interleaved rounds")
    repeats = parser.parse_args(arguments).repeats
    torch.set_num_threads(1)
    with torch.no_grad():
        for name in LAYERS:
            print(name)
            for choice, ratio in measure(name, repeats=repeats).items():
                print(f"  {choice:45} {ratio:6.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
