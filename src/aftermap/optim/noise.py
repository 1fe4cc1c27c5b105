"""Private noise: a function of (seed, step, sample, stream, group of processes), so that only the seed is saved.

Every draw of the weights has its own generator state. Processes of one sample group draw the same weights without talking
to each other, a resumed run draws what the uninterrupted one would have drawn, and PyTorch's global generator is never
touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["NoiseSource", "draw_seed", "mix"]

_MASK = 2**64 - 1


def mix(*numbers: int) -> int:
    """Mixes some numbers to a well-spread 63-bit number (splitmix64, Steele et al. 2014).

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


def draw_seed(generator: torch.Generator | None) -> int:
    """Returns a seed for the private noise: drawn from the generator, or PyTorch's initial seed, which is only read."""
    if generator is None:
        return torch.initial_seed() & (2**62 - 1)
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


class NoiseSource:
    """Standard normal numbers for draws of the weights.

    Args:
        seed: The seed of all noise of one optimiser.
        group: The number of the sample group that this process belongs to. Other groups draw other weights.
        groups: The number of sample groups. Draw k of group g is draw kG + g of a single process, so that G groups with K draws
            each draw what one process with GK draws draws.

    >>> source = NoiseSource(3)
    >>> first = source.normal([torch.zeros(2)], step=5, sample=0)[0]
    >>> bool(torch.equal(first, NoiseSource(3).normal([torch.zeros(2)], step=5, sample=0)[0]))
    True
    """

    def __init__(self, seed: int, group: int = 0, groups: int = 1):
        self.seed, self.group, self.groups = seed, group, groups

    def generator(self, device: torch.device, *, step: int, sample: int, stream: int = 0) -> torch.Generator:
        """Returns a generator in the state of one draw."""
        seed = mix(self.seed, step, sample * self.groups + self.group, 0, stream)
        return torch.Generator(device=device).manual_seed(seed)

    def normal(self, like: Sequence[Tensor], *, step: int, sample: int, stream: int = 0) -> list[Tensor]:
        """Draws normal numbers of the shapes, dtypes and devices of ``like``."""
        generators = {d: self.generator(d, step=step, sample=sample, stream=stream) for d in {t.device for t in like}}
        return [
            torch.empty_like(t, memory_format=torch.contiguous_format).normal_(generator=generators[t.device])
            for t in like
        ]
