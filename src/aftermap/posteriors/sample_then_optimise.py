"""Exact posterior samples by solving a noisy least-squares problem (sample-then-optimise).

The minimiser of ½‖Jw − ỹ‖²_{sΛ} + ½‖w − w₀‖²_{P₀} with ỹ ~ N(0, (sΛ)⁻¹), w₀ ~ N(0, P₀⁻¹) is a draw from N(0, (sG + P₀)⁻¹).
Its normal equations are (sG + P₀) w = √s Jᵀ S ε + P₀^{½} z with SSᵀ = Λ: the root needs no inverse of Λ, which is singular
for a softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.curvature.ggn_operator import GGNOperator
from aftermap.distributed import rank, same_everywhere
from aftermap.errors import InputError
from aftermap.likelihoods.draws import normal_like

__all__ = ["SampleNoise", "common_seed", "draw_noise"]


@dataclass(frozen=True)
class SampleNoise:
    """The random part of some samples; one set serves every prior and scale.

    Attributes:
        prior: z [S, P], standard normal.
        data: Jᵀ S ε [S, P], with covariance G.
    """

    prior: Tensor
    data: Tensor

    def right_hand_side(self, prior: Tensor, scale: Tensor) -> Tensor:
        """√s Jᵀ S ε + P₀^{½} z, with covariance sG + P₀.

        Args:
            prior: P₀ [P].
            scale: s, 0-d.

        Returns:
            [S, P].
        """
        return scale.sqrt() * self.data + prior.sqrt() * self.prior


def common_seed(generator: torch.Generator | None) -> int:
    """A seed drawn from a generator; of process 0 in a group, so that all walk through the same numbers.

    >>> common_seed(torch.Generator().manual_seed(0)) == common_seed(torch.Generator().manual_seed(0))
    True
    """
    device = torch.device("cpu") if generator is None else generator.device
    return same_everywhere(int(torch.randint(2**62, (), generator=generator, device=device)))


def draw_noise(operator: GGNOperator, count: int, seed: int) -> SampleNoise:
    """The noise of ``count`` samples, in one pass over the data.

    Args:
        operator: gives Jᵀ S ε.
        count: S.
        seed: the same on every process of a group; the data of each process get random numbers of their own.

    Raises:
        InputError: fewer than one sample.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"the number of samples must be a whole number of at least 1, got {count!r}")
    like = torch.empty(count, operator.size, dtype=torch.float64, device=operator.device)
    prior = normal_like(like, torch.Generator().manual_seed(seed))
    # Offset by one: the noise of the data must not repeat that of the prior.
    data = operator.noise(count, torch.Generator().manual_seed(seed + 1 + rank())).T
    return SampleNoise(prior, data)
