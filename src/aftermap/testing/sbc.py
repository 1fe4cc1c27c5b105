"""Simulation-based calibration: whether a method's posterior is right, on average over data drawn from the prior."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap import checks
from aftermap.errors import ShapeError
from aftermap.progress import progress as progress_bar

__all__ = ["CalibrationRanks", "simulation_based_calibration"]

Simulate = Callable[[torch.Generator], tuple[Tensor, object]]
Sample = Callable[[object, int, torch.Generator], Tensor]


@dataclass(frozen=True)
class CalibrationRanks:
    """The ranks of true parameters among posterior samples.

    Attributes:
        ranks: The number of the L samples that lie below the true value [runs, P], each in 0..L.
        n_samples: The number L of posterior samples.
    """

    ranks: Tensor
    n_samples: int

    @property
    def shares(self) -> Tensor:
        """The ranks spread over (0, 1): (rank + ½) / (L + 1)."""
        return (self.ranks.double() + 0.5) / (self.n_samples + 1)

    def histogram(self, bins: int = 10) -> Tensor:
        """Returns counts [P, bins] of the ranks: flat for an exact posterior, a valley for a narrow one, a hill for a wide one."""
        place = (self.shares * bins).long().clamp_max(bins - 1)
        return torch.stack([torch.bincount(column, minlength=bins) for column in place.T])

    def deviation(self) -> Tensor:
        """Returns the Kolmogorov-Smirnov distance [P] of the ranks from uniform: 0 for a perfect posterior, at most 1."""
        runs = len(self.ranks)
        grid = torch.arange(self.n_samples + 1)
        below = (self.ranks.unsqueeze(-1) <= grid).double().mean(0)  # [P, L + 1]
        return (below - (grid + 1).double() / (self.n_samples + 1)).abs().amax(-1) if runs else torch.empty(0)

    def p_value(self) -> Tensor:
        """Returns the probability [P] of at least this deviation under an exact posterior (asymptotic Kolmogorov law).

        Small values say that the posterior is not exact; with discrete ranks they are somewhat too large, never too small.
        """
        runs = len(self.ranks)
        scaled = (math.sqrt(runs) + 0.12 + 0.11 / math.sqrt(runs)) * self.deviation()
        k = torch.arange(1, 101, dtype=torch.float64)
        terms = 2 * (-1.0) ** (k - 1) * torch.exp(-2 * k.square() * scaled.unsqueeze(-1).square())
        return torch.where(scaled < 0.2, 1.0, terms.sum(-1)).clamp(0, 1)

    def spread_ratio(self) -> Tensor:
        """Returns the spread [P] of the ranks relative to uniform ones: 1 is exact, above 1 overconfident, below 1 too careful."""
        return (self.shares - 0.5).square().mean(0).mul(12).sqrt()


def simulation_based_calibration(
    simulate: Simulate,
    sample: Sample,
    *,
    runs: int = 200,
    n_samples: int = 99,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> CalibrationRanks:
    """Returns the ranks of true parameters under a method's posterior.

    In each run θ ~ prior and data ~ p(· | θ) are drawn, and the method gives L posterior samples. If its posterior is exact, the rank
    of every θ_i among them is uniform on 0..L.

    Args:
        simulate: A function of a generator that draws θ [P] from the prior and then data from the likelihood, and
            returns (θ, data).
        sample: A function of (data, L, generator) that returns independent posterior samples [L, P] (thin a chain).
        runs: The number of simulated data sets.
        n_samples: The number L of posterior samples.
        generator: The source of everything random.
        progress: Whether to show a progress bar. None shows it on a terminal.

    Returns:
        The ranks with their deviation from uniform.

    Raises:
        InputError: There are fewer than 10 runs, or no samples.
        ShapeError: The samples have another shape than [L, P].

    References:
        Talts et al. 2018, Validating Bayesian inference algorithms with simulation-based calibration, algorithm 1.

    >>> def simulate(g):
    ...     theta = torch.randn(1, generator=g)
    ...     return theta, theta + torch.randn(1, generator=g)
    >>> def sample(y, count, g):  # the exact posterior N(y/2, 1/2)
    ...     return y / 2 + torch.randn(count, 1, generator=g) / 2**0.5
    >>> found = simulation_based_calibration(simulate, sample, generator=torch.Generator().manual_seed(0))
    >>> found.p_value().item() > 0.05
    True
    """
    runs, n_samples = checks.count("runs", runs, 10), checks.count("n_samples", n_samples)
    source = generator
    if source is None:  # This one is private, seeded from the default one.
        source = torch.Generator().manual_seed(int(torch.randint(2**62, (1,))))
    ranks = []
    for _ in progress_bar(range(runs), description="calibration", enabled=progress):
        theta, data = simulate(source)
        drawn = sample(data, n_samples, source)
        if theta.dim() != 1 or drawn.shape != (n_samples, len(theta)):
            raise ShapeError(
                f"simulate must return θ of shape [P] and sample [L, P]; got {list(theta.shape)} and {list(drawn.shape)} "
                f"with L = {n_samples}"
            )
        ranks.append((drawn < theta).sum(0))
    return CalibrationRanks(torch.stack(ranks), n_samples)
