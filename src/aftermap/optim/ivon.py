"""IVON: an improved variational online Newton method, which needs no per-example gradients.

The equations stand first, as functions of lists of tensors, with the numbers of docs/mathematics/optimisers.md; equation (6)
is `new_momentum_` of `aftermap.optim.vogn`, normalised and without a prior. A name that ends in an underscore changes its
first argument in place.

Symbols: μ mean, m momentum, h curvature of the mean loss, ĝ mean gradient, ĥ its estimate of the curvature, ε noise,
c = τδ/N with the prior precision δ, μ₀ prior mean, γ damping, α learning rate, β₁ momentum, β₂ weight of the new curvature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sized
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.optim.base import Group, PerWeight, VariationalOptimizer
from aftermap.optim.options import Schedule, constructor_options
from aftermap.optim.statistics import StepStatistics
from aftermap.optim.vogn import add_pull_of_prior_, damped_curvature, draw_weights, new_momentum_

__all__ = ["IVON", "estimate_hessian_", "new_hessian_", "new_mean_"]


def estimate_hessian_(products: list[Tensor], damped: list[Tensor], scale: float) -> None:
    """Turns products into ĥ = ĝ ∘ ε / σ = scale · products · √(h + c + γ), with scale · products = ĝ ∘ ε √(N/τ); ``damped`` = h + c + γ."""
    torch._foreach_mul_(products, torch._foreach_sqrt(damped))
    torch._foreach_mul_(products, scale)  # eq. (5)


def new_hessian_(hessian: list[Tensor], estimate: list[Tensor], damped: list[Tensor], beta: float) -> None:
    """Updates h ← h + β₂ (ĥ − h) + ½ β₂² (ĥ − h)² / (h + c + γ), which keeps h + c + γ above 0; overwrites the estimate."""
    torch._foreach_sub_(estimate, hessian)
    torch._foreach_add_(hessian, estimate, alpha=beta)
    torch._foreach_mul_(estimate, estimate)
    torch._foreach_addcdiv_(hessian, estimate, damped, value=0.5 * beta**2)  # eq. (7)


def new_mean_(
    mean: list[Tensor],
    momentum: list[Tensor],
    damped: list[Tensor],
    rate: float,
    correction: float,
    prior: PerWeight,
    prior_mean: PerWeight,
    clip_radius: float = math.inf,
) -> None:
    """Updates μ ← μ − α (m/(1 − β₁ᵗ) + c (μ − μ₀)) / (h + c + γ), with entries of the quotient cut to ± clip_radius.

    Args:
        mean: The means μ of the weights.
        momentum: The momentum m of the gradient.
        damped: The sum h + c + γ with the new h.
        rate: The learning rate α.
        correction: The correction 1 − β₁ᵗ of the momentum's start.
        prior: The prior's part c, a number or a list of tensors.
        prior_mean: μ₀, a number or a list of tensors.
        clip_radius: The bound of an entry.
    """
    step = list(torch._foreach_div(momentum, correction))
    add_pull_of_prior_(step, mean, prior, prior_mean, 1.0)
    torch._foreach_div_(step, damped)
    if not math.isinf(clip_radius):
        torch._foreach_clamp_min_(step, -clip_radius)
        torch._foreach_clamp_max_(step, clip_radius)
    torch._foreach_add_(mean, step, alpha=-rate)  # eq. (8)


class IVON(VariationalOptimizer):
    r"""Variational Newton with the reparametrised estimate of the Hessian's diagonal (Price's theorem).

    .. math::
        \hat h &= \hat g \circ \varepsilon / \sigma, \quad \sigma^2 = \frac{\tau}{N}\big/(h + c + \gamma), \quad c = \tau\delta/N \\
        m &\leftarrow \beta_1 m + (1-\beta_1)\,\hat g \\
        h &\leftarrow (1-\beta_2)\,h + \beta_2 \hat h + \tfrac12\beta_2^2 (h - \hat h)^2/(h + c + \gamma) \\
        \mu &\leftarrow \mu - \alpha\,\big(m/(1-\beta_1^t) + c(\mu - \mu_0)\big)/(h + c + \gamma)

    The estimate is unbiased for E_q[∇²ℓ̄], so for Bayesian linear regression the fixed point is the mean-field optimum.

    Args:
        model: The network, or an iterable of parameters or of groups (then every closure counts as one example).
        lr: α, the learning rate, in the units of a Newton step: 0.1 is usual.
        n_data: N, the number of training data, or the data set itself.
        params: Groups of parameters, only with a model; None means everything that requires a gradient.
        mc_samples: K, the number of draws in a step.
        momentum: β₁, the share of the old momentum.
        new_curvature_weight: β₂, the weight of the *new* curvature.
        prior_precision: δ, the precision of the prior; a weight decay of λ on a mean loss is δ = λN.
        weight_decay: λ, the weight decay on the mean loss, another way to say prior_precision = λN (ρN with augmentation).
        prior_mean: μ₀, the mean of the prior.
        damping: γ, which is added to h + c.
        temperature: τ, a number or a `Schedule`.
        augmentation: ρ, which multiplies N when the data are augmented.
        initial_curvature: The curvature h before the first step; large values start with little noise.
        clip_radius: Entries of the preconditioned step are cut to ± this.
        rescale_lr: Whether α is multiplied by h₀ + c, so that the first steps are those of SGD with rate α.
        batch_norm: How the parameters of BatchNorm are treated: "deterministic" (no noise, no prior) or "variational".
        reduction: How the closure's loss sums over the examples of a batch: "mean" or "sum".
        max_grad_norm: The greatest length of the mean gradient; a longer one is shortened.
        sample_groups: The number of groups of processes that draw different weights; with 1 all draw the same.
        generator: The generator that gives the seed of the noise; None derives it from PyTorch's seed.

    >>> net = nn.Linear(3, 2)
    >>> opt = IVON(net.parameters(), lr=0.1, n_data=4)
    >>> float(opt.step(lambda: net(torch.ones(4, 3)).square().mean())) > 0
    True

    References:
        Shen et al. 2024, Algorithm 1; Lin et al. 2020 (the step that keeps h positive).
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        lr: float = 0.1,
        *,
        n_data: float | Sized | None = None,
        params: Iterable[Any] | None = None,
        mc_samples: int = 1,
        momentum: float = 0.9,
        new_curvature_weight: float = 1e-5,
        prior_precision: float = 1.0,
        weight_decay: float | None = None,
        prior_mean: float = 0.0,
        damping: float = 0.0,
        temperature: float | Schedule = 1.0,
        augmentation: float = 1.0,
        initial_curvature: float = 0.1,
        clip_radius: float = math.inf,
        rescale_lr: bool = True,
        batch_norm: str = "deterministic",
        reduction: str = "mean",
        max_grad_norm: float | None = None,
        sample_groups: int = 1,
        generator: torch.Generator | None = None,
    ):
        options = {**constructor_options(locals()), "curvature": "reparametrised", "momentum_form": "normalised"}
        if isinstance(model, nn.Module):
            super().__init__(model, params, options, generator)
        else:
            super().__init__(None, model, options, generator)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            self.state[p]["curvature"] = torch.full_like(p.data, self.settings.initial_curvature or 0.0)

    def _draw_group(self, group: Group, params: list[Tensor], noise: list[Tensor]) -> list[Tensor]:
        return draw_weights([p.data for p in params], noise, self._damped(group, params), self.noise_scale())

    def _damped(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        """Returns h + c + γ of each parameter."""
        prior, _ = self._prior(group, params)
        return damped_curvature([self.state[p]["curvature"] for p in params], prior, group["damping"])

    def _update(self, statistics: StepStatistics) -> None:
        # Deterministic weights have no noise and so no estimate: their curvature stays what it was.
        statistics.curvature = dict.fromkeys(statistics.grads, torch.empty(0)) | statistics.curvature
        super()._update(statistics)

    def _update_group(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor],
        curvature: list[Tensor],
        scales: tuple[float, float],
    ) -> None:
        momentum, mean = self._momenta(params), [p.data for p in params]
        hessian = [self.state[p]["curvature"] for p in params]
        new_momentum_(momentum, grads, scales[0], mean, 0.0, 0.0, group["momentum"], normalised=True)  # eq. (6)
        damped = self._damped(group, params)
        if all(c.shape == h.shape for c, h in zip(curvature, hessian, strict=True)):
            estimate_hessian_(curvature, damped, scales[1] / self.noise_scale())  # 1/σ = √(N/τ) √(h + c + γ)
            new_hessian_(hessian, curvature, damped, group["new_curvature_weight"])
            damped = self._damped(group, params)
        prior, prior_mean = self._prior(group, params)
        rate = group["lr"]
        if self.settings.rescale_lr:
            rate *= (self.settings.initial_curvature or 0.0) + (prior if isinstance(prior, float) else 0.0)
        correction = 1 - group["momentum"] ** (self.updates + 1)
        new_mean_(mean, momentum, damped, rate, correction, prior, prior_mean, self.settings.clip_radius)
