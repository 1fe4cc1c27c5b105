"""Noise of the weights: normal in its middle and its tails, and a function of seed, step and sample alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from aftermap.optim import noise
from aftermap.optim.noise import NoiseSource, box_muller_

MANY = [torch.zeros(1000, 301), torch.zeros(7), torch.zeros(2, 3, 5), torch.zeros(())]


def flat(values: list[Tensor]) -> Tensor:
    return torch.cat([v.flatten() for v in values])


@pytest.mark.parametrize("chunk", [1 << 18, 1 << 12])
def test_many_numbers_are_standard_normal(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_BLOCK_NUMBERS", chunk)
    found = NoiseSource(3).normal(MANY, step=1, sample=0)
    assert [v.shape for v in found] == [v.shape for v in MANY]
    z = flat(found).double()
    count = len(z)
    assert count > noise._MANY_NUMBERS
    for power, expected, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs(float((z**power).mean()) - expected) < 5 * math.sqrt(variance / count)
    # Kolmogorov-Smirnov: above 1.95/√n with probability 0.001.
    ordered = torch.special.ndtr(z.sort().values)
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert float((ordered - steps).abs().max()) < 1.95 / math.sqrt(count)
    for far in (3.0, 4.0):
        expected = count * math.erfc(far / math.sqrt(2))
        assert abs(int((z.abs() > far).sum()) - expected) < 5 * math.sqrt(expected)


def test_neighbours_and_pairs_are_uncorrelated() -> None:
    z = flat(NoiseSource(5).normal([torch.zeros(1 << 18)], step=0, sample=0)).double()
    count = len(z)
    half = count // 2
    for a, b in ((z[:-1], z[1:]), (z[:half], z[half:]), (z[:half] ** 2 - 1, z[half:] ** 2 - 1)):
        spread = math.sqrt(float(a.square().mean() * b.square().mean()) / len(a))
        assert abs(float((a * b).mean())) < 5 * spread


def test_noise_depends_on_seed_step_sample_group_and_stream_alone() -> None:
    def draw(seed: int, group: int, step: int, sample: int, stream: int) -> Tensor:
        return flat(NoiseSource(seed, group).normal(MANY, step=step, sample=sample, stream=stream))

    first = draw(1, 0, 0, 0, 0)
    before = torch.get_rng_state()
    assert torch.equal(first, draw(1, 0, 0, 0, 0))
    assert torch.equal(before, torch.get_rng_state())
    for other in ((2, 0, 0, 0, 0), (1, 1, 0, 0, 0), (1, 0, 1, 0, 0), (1, 0, 0, 1, 0), (1, 0, 0, 0, 1)):
        assert not torch.equal(first, draw(*other))
        assert abs(float(torch.corrcoef(torch.stack([first, draw(*other)]))[0, 1])) < 5 / math.sqrt(len(first))


def test_the_number_of_threads_changes_nothing() -> None:
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(flat(NoiseSource(1).normal(MANY, step=0, sample=0)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_defaults_of_the_user_change_nothing() -> None:
    expected = NoiseSource(1).normal(MANY, step=0, sample=0)
    try:
        torch.set_default_dtype(torch.float64)
        found = NoiseSource(1).normal(MANY, step=0, sample=0)
        with torch.device("meta"):
            found += NoiseSource(1).normal(MANY, step=0, sample=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected * 2, strict=True))


def packed(radii: list[int], turns: list[int]) -> np.ndarray:
    """Every pair of 32 bits and 16 bits."""
    pairs = [(a, b) for a in radii for b in turns]
    words = np.array([a for a, _ in pairs], dtype=np.uint32).tobytes()
    words += np.array([b for _, b in pairs], dtype=np.uint16).tobytes()
    return np.frombuffer(words + b"\0" * (-len(words) % 8), dtype=np.uint64).copy()


def test_every_pattern_of_bits_gives_a_finite_number() -> None:
    radii, turns = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1], [0, 1, 2**14, 2**15 - 1, 2**15, 2**16 - 1]
    out = torch.empty(2 * 36)
    box_muller_(out, packed(radii, turns))
    assert bool(torch.isfinite(out).all())
    assert float(out.abs().max()) <= math.sqrt(64 * math.log(2)) * (1 + 1e-6)


def test_the_angles_are_evenly_spread_and_the_radii_have_their_distribution() -> None:
    out = torch.empty(2 << 16)
    box_muller_(out, packed([2**30], list(range(2**16))))  # one radius, u = ½, and every angle
    sine, cosine = out.double().view(2, -1) / math.sqrt(-2 * math.log(0.5))
    assert float((torch.atan2(sine, cosine).sort().values.diff() - 2 * math.pi * 2.0**-16).abs().max()) < 1e-6
    for power, expected in ((1, 0.0), (2, 1 / 2), (3, 0.0), (4, 3 / 8), (6, 5 / 16), (8, 35 / 128)):
        assert float((cosine**power).mean()) == pytest.approx(expected, abs=1e-6)
        assert float((sine**power).mean()) == pytest.approx(expected, abs=1e-6)
    assert float((sine * cosine).mean()) == pytest.approx(0, abs=1e-6)
    words = list(range(2**15, 2**32, 2**16))  # evenly spread, one angle
    out = torch.empty(2 * len(words))
    box_muller_(out, packed(words, [0]))
    squared = out.double().view(2, -1)[1] ** 2  # of which half is exponential
    for far in (0.1, 1.0, 4.0, 9.0, 16.0):
        assert float((squared > far).double().mean()) == pytest.approx(math.exp(-far / 2), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_drawn_too(dtype: torch.dtype) -> None:
    (z,) = NoiseSource(3).normal([torch.zeros(300, 301, dtype=dtype)], step=1, sample=0)
    assert z.dtype == dtype
    assert abs(float(z.double().mean())) < 5 / math.sqrt(z.numel())
    assert abs(float(z.double().var()) - 1) < 0.03
