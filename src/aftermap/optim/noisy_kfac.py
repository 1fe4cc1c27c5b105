"""Noisy K-FAC: natural-gradient variational inference with a Kronecker-factored posterior."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from aftermap.distributed import unwrapped
from aftermap.optim.kfac import KronOptimizer
from aftermap.optim.schedules import Schedule
from aftermap.optim.settings import make_groups, make_settings
from aftermap.optim.vogn import check_model

__all__ = ["NoisyKFAC"]


class NoisyKFAC(KronOptimizer):
    r"""K-FAC whose weights are drawn from the posterior that its factors describe.

    .. math::
        W = \mu + \sqrt{\tau/N}\; U_B\big(Z / \sqrt{D}\big)U_A^\top, \qquad D = b a^\top + \tau\delta/N + \gamma

    so that Cov(vec W) = (τ/N) (B ⊗ A + (τδ/N + γ) I)⁻¹ exactly; ``damping_form="factored"`` makes it a matrix normal
    MN(μ, (τ/N) B̃⁻¹, Ã⁻¹). The mean moves as in K-FAC with the gradient at W.

    Args:
        model: the network.
        lr: α.
        n_data: N.
        params: parameter groups, or None; the parameters of one layer belong in one group.
        mc_samples: K; the first step is free of noise.
        momentum: β₁.
        momentum_form: "heavy_ball" or "normalised".
        new_curvature_weight: β₂, the weight of the *new* factors.
        prior_precision: δ.
        prior_mean: μ₀.
        damping: γ.
        damping_form: "exact" or "factored".
        temperature: τ, a number or a `Schedule`.
        augmentation: ρ.
        factor_every: steps between refreshes of the factors.
        inverse_every: steps between eigendecompositions (shared out over processes).
        batch_norm: "deterministic" or "variational".
        reduction: "mean" or "sum".
        max_grad_norm: shortens the mean gradient.
        sample_groups: groups of processes that draw different weights.
        generator: gives the seed of the noise.

    >>> net = nn.Linear(3, 2)
    >>> opt = NoisyKFAC(net, lr=0.1, n_data=4)
    >>> float(opt.step(lambda: net(torch.ones(4, 3)).square().mean())) > 0
    True

    References:
        Zhang et al. 2018, Algorithm 2; Osawa et al. 2019.

    Differs from the paper: the prior enters exactly by default, not by a factored approximation.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        n_data: float | None = None,
        params: Iterable[Any] | None = None,
        mc_samples: int = 1,
        momentum: float = 0.9,
        momentum_form: str = "heavy_ball",
        new_curvature_weight: float = 0.05,
        prior_precision: float = 1.0,
        prior_mean: float = 0.0,
        damping: float = 1e-2,
        damping_form: str = "exact",
        temperature: float | Schedule = 1.0,
        augmentation: float = 1.0,
        factor_every: int = 1,
        inverse_every: int = 10,
        batch_norm: str = "deterministic",
        reduction: str = "mean",
        max_grad_norm: float | None = None,
        sample_groups: int = 1,
        generator: torch.Generator | None = None,
    ):
        check_model(model, "NoisyKFAC")
        settings = make_settings(
            n_data=n_data,
            mc_samples=mc_samples,
            reduction=reduction,
            temperature=temperature,
            augmentation=augmentation,
            momentum_form=momentum_form,
            max_grad_norm=max_grad_norm,
            sample_groups=sample_groups,
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "new_curvature_weight": new_curvature_weight,
            "prior_precision": prior_precision,
            "prior_mean": prior_mean,
            "damping": damping,
            "deterministic": False,
        }
        super().__init__(
            model,
            make_groups(unwrapped(model), params, batch_norm),
            defaults,
            settings,
            generator,
            factor_every=factor_every,
            inverse_every=inverse_every,
            damping_form=damping_form,
        )
