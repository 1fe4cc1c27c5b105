"""Private noise: a function of (seed, step, sample, group of processes), so that nothing but a number is saved.

Each draw of the weights has its own generator state. Processes of one sample group draw the same weights without
talking to each other, a resumed run draws what the uninterrupted one would have drawn, and PyTorch's global generator
is never touched.

On a CPU PyTorch draws normal numbers on one core: 7 % of a training step of WRN-16-2 with two threads, more where layers are
dense. There, for many numbers, only the random bits are drawn in sequence (SFC64, a quarter of that time); the
transformation to normal numbers uses all cores.

How many parameters are worked on at once, and tensors that lie side by side in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

__all__ = ["NoiseSource", "as_one", "box_muller_", "in_chunks", "mix", "views"]

Item = TypeVar("Item")
_CHUNK_NUMBERS = 1 << 18  # parameters that are worked on at once: few enough for the cache, enough to launch one kernel
_MASK = 2**64 - 1
_SMALLEST = torch.tensor(2.0**-32, dtype=torch.float32, device="cpu")
# From so many numbers on bits are drawn and transformed (measured: below, PyTorch's own kernel is as fast) ...
_MANY_NUMBERS = 1 << 16
# ... so many at a time: few enough for the cache, and little memory.
_BLOCK_NUMBERS = 1 << 18


def in_chunks(
    items: Sequence[tuple[Item, Tensor]], numbers: int = _CHUNK_NUMBERS
) -> Iterator[list[tuple[Item, Tensor]]]:
    """Parts of a list of (anything, parameter) with up to ``numbers`` numbers each, or with one parameter.

    >>> [len(part) for part in in_chunks([("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(7))], 5)]
    [2, 1]
    """
    part: list[tuple[Item, Tensor]] = []
    size = 0
    for item in items:
        size += item[1].numel()
        if part and size > numbers:
            yield part
            part, size = [], item[1].numel()
        part.append(item)
    if part:
        yield part


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The beginning of a vector as tensors of these shapes, one after the other.

    >>> [v.tolist() for v in views(torch.arange(4.0), [torch.zeros(2), torch.zeros(1, 1)])]
    [[0.0, 1.0], [[2.0]]]
    """
    if all(t.numel() for t in like):
        return list(_unflatten_dense_tensors(flat, like))
    sizes = [t.numel() for t in like]  # PyTorch's function forgets the shape of what is empty
    return [part.view(t.shape) for part, t in zip(torch.split(flat[: sum(sizes)], sizes), like, strict=True)]


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The vector of all numbers, in the same memory, of tensors that follow each other there; None where they do not.

    >>> as_one(views(torch.arange(3.0), [torch.zeros(2), torch.zeros(1)])).tolist()
    [0.0, 1.0, 2.0]
    >>> as_one([torch.zeros(2), torch.ones(2)]) is None
    True
    """
    first = tensors[0]
    start = end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.dtype != first.dtype or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    # Two memories can touch each other; a third one cannot lie between the ends of one.
    if first.untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
        return None
    return first.as_strided(((end - start) // first.element_size(),), (1,))


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
        self._bits = np.random.SFC64(0)  # set anew for each draw
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device, *, step: int, sample: int, stream: int = 0) -> torch.Generator:
        """A generator set to the state of one draw."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device=device)
        return self._generators[device].manual_seed(mix(self.seed, step, sample, self.group, stream))

    def normal(self, like: Sequence[Tensor], *, step: int, sample: int, stream: int = 0) -> list[Tensor]:
        """Numbers of the shapes, dtypes and devices of ``like``."""
        plain = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in like)
        if plain and sum(t.numel() for t in like) >= _MANY_NUMBERS:
            seed_(self._bits, mix(self.seed, step, sample, self.group, stream))
            parts = in_chunks([(None, t) for t in like])
            return [z for part in parts for z in _joined([t for _, t in part], self._bits)]
        generators = {d: self.generator(d, step=step, sample=sample, stream=stream) for d in {t.device for t in like}}
        return [
            torch.empty_like(t, memory_format=torch.contiguous_format).normal_(generator=generators[t.device])
            for t in like
        ]


def seed_(bits: np.random.SFC64, number: int) -> None:
    """Sets the generator to the state that its author gives to one number: three times the number, and twelve rounds.

    NumPy's own way takes several times as long, and a training step does it for each group.

    >>> bits = np.random.SFC64(0)
    >>> seed_(bits, 7)
    >>> first = bits.random_raw()
    >>> seed_(bits, 7)
    >>> bits.random_raw() == first
    True
    """
    numbers = np.array([number, number, number, 1], dtype=np.uint64)
    bits.state = {"bit_generator": "SFC64", "state": {"state": numbers}, "has_uint32": 0, "uinteger": 0}
    bits.random_raw(12, output=False)


def _joined(like: Sequence[Tensor], bits: np.random.BitGenerator) -> list[Tensor]:
    """Normal numbers of these shapes in one piece of memory: few operations for many small tensors."""
    count = sum(t.numel() for t in like)
    flat = like[0].new_empty(count + count % 2)
    for block in flat.split(_BLOCK_NUMBERS):
        box_muller_(block, bits.random_raw(math.ceil(len(block) * 3 / 8)))
    return views(flat, like)


def box_muller_(out: Tensor, bits: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
    r"""Fills a float32 tensor of even length with independent standard normal numbers, two for each 48 random bits.

    .. math:: z_1, z_2 = \sqrt{-2 \log u}\,(\sin\theta, \cos\theta)

    with u ∈ (0, 1] from 32 bits, so that no number is larger than √(64 log 2) ≈ 6.66, and θ ∈ [−π, π) from 16: a mean over
    65,536 equally spaced angles is that over all angles, up to rounding, for everything smooth (the trapezoidal rule of a
    periodic function).

    >>> out = torch.empty(2)
    >>> box_muller_(out, np.array([2**46], dtype=np.uint64))  # u = 2⁻³², θ = π/2
    >>> [round(abs(float(z)), 2) for z in out]
    [6.66, 0.0]
    """
    half = len(out) // 2
    radius, angle = out[:half], out[half:]
    radius.copy_(torch.from_numpy(bits.view(np.int32)[:half]))  # whole numbers in [−2³¹, 2³¹]
    angle.copy_(torch.from_numpy(bits.view(np.int16)[2 * half : 3 * half]))
    # u = (|number| + ½)/2³¹: small ones keep all their digits, and 2³¹ + ½ is 2³¹ in float32.
    torch.add(_SMALLEST, radius.abs_(), alpha=2.0**-31, out=radius).log_().mul_(-2.0).sqrt_()
    sine = angle.mul_(math.pi * 2.0**-15).sin()
    angle.cos_().mul_(radius)
    radius.mul_(sine)
