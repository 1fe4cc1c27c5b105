"""Private noise: a function of (seed, step, sample, group of processes), so that nothing but a number is saved.

Each draw of the weights has its own generator state. Processes of one sample group draw the same weights without
talking to each other, a resumed run draws what the uninterrupted one would have drawn, and PyTorch's global generator
is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["NoiseSource", "mix"]

_MASK = 2**64 - 1


def mix(*numbers: int) -> int:
    """A well-spread 63-bit number from some others (splitmix64, Steele et al. 2014).

    >>> mix(1, 2) != mix(2, 1)
    True
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state & (2**63 - 1)


class NoiseSource:
    """Standard normal numbers for draws of the weights.

    >>> source = NoiseSource(3)
    >>> first = source.normal([torch.zeros(2)], step=5, sample=0)[0]
    >>> bool(torch.equal(first, NoiseSource(3).normal([torch.zeros(2)], step=5, sample=0)[0]))
    True
    """

    def __init__(self, seed: int, group: int = 0):
        self.seed, self.group = seed, group
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device, *, step: int, sample: int, stream: int = 0) -> torch.Generator:
        """A generator set to the state of one draw."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device=device)
        return self._generators[device].manual_seed(mix(self.seed, step, sample, self.group, stream))

    def normal(self, like: Sequence[Tensor], *, step: int, sample: int, stream: int = 0) -> list[Tensor]:
        """Numbers of the shapes, dtypes and devices of ``like``."""
        generators = {d: self.generator(d, step=step, sample=sample, stream=stream) for d in {t.device for t in like}}
        return [
            torch.empty_like(t, memory_format=torch.contiguous_format).normal_(generator=generators[t.device])
            for t in like
        ]
