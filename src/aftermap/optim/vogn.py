"""VOGN and OGN: the variational online Gauss-Newton method and its noise-free relative.

The equations of a diagonal Gaussian posterior stand first, as functions of lists of tensors, with the numbers of
docs/mathematics/optimisers.md. A name that ends in an underscore changes its first argument in place.

Symbols: μ mean, m momentum, s curvature of the mean loss, ĝ mean gradient, ĥ new estimate of the curvature,
c = τδ/N with the prior precision δ, μ₀ prior mean, γ damping, α learning rate, β₁ momentum, β₂ weight of the new curvature.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.likelihoods import Likelihood
from aftermap.optim.base import Group, PerWeight, VariationalOptimizer
from aftermap.optim.options import Schedule, constructor_options

__all__ = [
    "OGN",
    "VOGN",
    "DiagonalOptimizer",
    "add_pull_of_prior_",
    "damped_curvature",
    "draw_weights",
    "new_curvature_",
    "new_mean_",
    "new_momentum_",
]

_TINY = 1e-12  # a deterministic weight without prior, damping and curvature does not move


def damped_curvature(curvature: list[Tensor], prior: PerWeight, damping: float) -> list[Tensor]:
    """Returns s + c + γ, where c is a number or a list of tensors."""
    if isinstance(prior, list):
        sums = torch._foreach_add(curvature, prior)
        torch._foreach_add_(sums, damping)
        return list(sums)
    return list(torch._foreach_add(curvature, prior + damping))


def draw_weights(mean: list[Tensor], noise: list[Tensor], damped: list[Tensor], scale: float) -> list[Tensor]:
    """Draws w = μ + scale · ε / √(s + c + γ) with scale = √(τ/N); ``damped`` = s + c + γ is overwritten."""
    torch._foreach_sqrt_(damped)
    return list(torch._foreach_addcdiv(mean, noise, damped, value=scale))  # eq. (1)


def new_momentum_(
    momentum: list[Tensor],
    grads: list[Tensor],
    scale: float,
    mean: list[Tensor],
    prior: PerWeight,
    prior_mean: PerWeight,
    beta: float,
    *,
    normalised: bool,
) -> None:
    """Updates m ← β₁ m + w (ĝ + c (μ − μ₀)), w = 1 (heavy ball, as published) or 1 − β₁ (normalised); ĝ = scale · grads."""
    weight = 1 - beta if normalised else 1.0
    torch._foreach_mul_(momentum, beta)
    torch._foreach_add_(momentum, grads, alpha=scale * weight)  # eq. (2)
    add_pull_of_prior_(momentum, mean, prior, prior_mean, weight)


def add_pull_of_prior_(
    values: list[Tensor], mean: list[Tensor], prior: PerWeight, prior_mean: PerWeight, weight: float
) -> None:
    """Adds weight · c (μ − μ₀), where c and μ₀ are numbers or lists of tensors."""
    if isinstance(prior, list):
        torch._foreach_addcmul_(values, prior, torch._foreach_sub(mean, prior_mean), value=weight)
    elif prior:
        torch._foreach_add_(values, mean, alpha=prior * weight)
        assert not isinstance(prior_mean, list)  # Numbers go together, and so do tensors.
        if prior_mean:
            torch._foreach_sub_(values, prior * weight * prior_mean)


def new_curvature_(curvature: list[Tensor], estimate: list[Tensor], scale: float, beta: float, decay: float) -> None:
    """Updates s ← (1 − decay) s + β₂ ĥ, ĥ = scale · estimate; decay is β₂, in the published form τβ₂."""
    torch._foreach_mul_(curvature, 1 - decay)
    torch._foreach_add_(curvature, estimate, alpha=beta * scale)  # eq. (3)


def new_mean_(mean: list[Tensor], momentum: list[Tensor], damped: list[Tensor], rate: float) -> None:
    """Updates μ ← μ − α m / (s + c + γ)."""
    torch._foreach_addcdiv_(mean, momentum, damped, value=-rate)  # eq. (4)


class DiagonalOptimizer(VariationalOptimizer):
    """An optimiser with a diagonal posterior that moves by equations (1) to (4); VOGN and OGN are its final forms."""

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        if self.settings.initial_curvature is not None:  # then noise starts with the first step
            for p in self.param_groups[-1]["params"]:
                self.state[p]["curvature"] = torch.full_like(p.data, self.settings.initial_curvature)

    def _draw_group(self, group: Group, params: list[Tensor], noise: list[Tensor]) -> list[Tensor]:
        return draw_weights([p.data for p in params], noise, self._damped(group, params), self.noise_scale())

    def _damped(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        """Returns s + c + γ of each parameter."""
        prior, _ = self._prior(group, params)
        damping = group["damping"] + (_TINY if group["deterministic"] else 0.0)
        return damped_curvature([self.state[p]["curvature"] for p in params], prior, damping)

    def _update_group(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor],
        curvature: list[Tensor],
        scales: tuple[float, float],
    ) -> None:
        self._first_curvature(params, curvature, scales[1])
        momentum, mean = self._momenta(params), [p.data for p in params]
        prior, prior_mean = self._prior(group, params)
        normalised = self.settings.momentum_form == "normalised"
        new_momentum_(momentum, grads, scales[0], mean, prior, prior_mean, group["momentum"], normalised=normalised)
        beta2 = group["new_curvature_weight"]
        decay = beta2 * (self.temperature if self.settings.form == "published" else 1.0)
        new_curvature_([self.state[p]["curvature"] for p in params], curvature, scales[1], beta2, decay)
        new_mean_(mean, momentum, self._damped(group, params), self._rate(group))

    def _rate(self, group: Group) -> float:
        """Returns α; a normalised momentum is divided by 1 − β₁ᵗ, with t the number of updates, this one among them."""
        normalised = self.settings.momentum_form == "normalised"
        bias = 1 - group["momentum"] ** (self.updates + 1) if normalised else 1.0
        return float(group["lr"] / bias)

    def _first_curvature(self, params: list[Tensor], curvature: list[Tensor], scale: float) -> None:
        """Gives weights before their first update the initial curvature, or what their first batch says."""
        initial = self.settings.initial_curvature
        for parameter, estimate in zip(params, curvature, strict=True):
            if "curvature" not in self.state[parameter]:
                first = estimate * scale if initial is None else torch.full_like(parameter.data, initial)
                self.state[parameter]["curvature"] = first.contiguous()


class VOGN(DiagonalOptimizer):
    r"""Variational online Gauss-Newton: training that ends with a Gaussian over the weights.

    .. math::
        w &= \mu + \sigma\varepsilon, \quad \sigma^2 = \frac{\tau}{N} \big/ (s + \tau\delta/N + \gamma) \\
        m &\leftarrow \beta_1 m + \hat g(w) + \tfrac{\tau\delta}{N}(\mu - \mu_0) \\
        s &\leftarrow (1-\beta_2)\,s + \beta_2\,\hat h(w), \quad \hat h = \tfrac1M \textstyle\sum_i g_i(w)^2 \\
        \mu &\leftarrow \mu - \alpha\, m / (s + \tau\delta/N + \gamma)

    The fixed point has the precision N h/τ + δ + Nγ/τ: damping narrows the posterior but does not move the mean. Squared
    per-example gradients are the empirical Fisher information, not the Gauss-Newton matrix; ``curvature="ggn"`` is that.

    Args:
        model: The network; a DistributedDataParallel wrapper is seen through.
        lr: α, the learning rate.
        n_data: N, the number of training data, or the data set itself.
        params: Groups of parameters; None means everything that requires a gradient. A group may set lr, momentum,
            new_curvature_weight, prior_precision, prior_mean, damping and deterministic.
        mc_samples: K, the number of draws in a step. The first step is free of noise, unless initial_curvature is given.
        momentum: β₁, the share of the old momentum.
        momentum_form: "heavy_ball" (as published: the rate is in effect α/(1 − β₁)) or "normalised" (with a correction of the
            bias by the number of updates).
        new_curvature_weight: β₂, the weight of the *new* curvature.
        prior_precision: δ, the precision of the prior.
        weight_decay: λ, the weight decay on the mean loss, another way to say prior_precision = λN (ρN with augmentation).
        prior_mean: μ₀, the mean of the prior.
        damping: γ; no weight's noise exceeds √(τ/(Nγ)). Where noise of that size drowns the weights, raise γ together with lr.
        temperature: τ, a number or a `Schedule`; warm up from about 0.1 if training is unstable.
        augmentation: ρ, which multiplies N when the data are augmented.
        curvature: The estimate ĥ: "squares", "ggn" (which needs likelihood), "reparametrised" (which needs
            initial_curvature) or "micro_batch".
        likelihood: The likelihood of curvature="ggn".
        vectors: The vectors of curvature="ggn": "exact", "rademacher" or "sampled" (one backward pass each), or "auto".
        form: "consistent", or "published" for the equations as Osawa et al. 2019 print them (right for τ = 1 only).
        initial_curvature: The curvature s before the first step; None means that of the first batch.
        batch_norm: How the parameters of BatchNorm are treated: "deterministic" (no noise, no prior) or "variational".
        reduction: How the closure's loss sums over the examples of a batch: "mean" or "sum".
        max_grad_norm: The greatest length of the mean gradient; a longer one is shortened.
        sample_groups: The number of groups of processes that draw different weights; with 1 all draw the same.
        generator: The generator that gives the seed of the noise; None derives it from PyTorch's seed.

    >>> net = nn.Linear(3, 2)
    >>> opt = VOGN(net, lr=0.1, n_data=4)
    >>> x, y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
    >>> loss = opt.step(lambda: nn.functional.cross_entropy(net(x), y))
    >>> sorted(opt.state[net.weight])
    ['curvature', 'momentum']

    References:
        Khan et al. 2018 (VOGN); Osawa et al. 2019, Algorithm 1.

    It differs from the paper in two ways: the temperature enters Σ as for the tempered posterior, unless form="published"; and
    squares of convolution biases and norm layers are exact.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        n_data: float | Sized | None = None,
        params: Iterable[Any] | None = None,
        mc_samples: int = 1,
        momentum: float = 0.9,
        momentum_form: str = "heavy_ball",
        new_curvature_weight: float = 0.05,
        prior_precision: float = 1.0,
        weight_decay: float | None = None,
        prior_mean: float = 0.0,
        damping: float = 1e-2,
        temperature: float | Schedule = 1.0,
        augmentation: float = 1.0,
        curvature: str = "squares",
        likelihood: str | Likelihood | None = None,
        vectors: str = "auto",
        form: str = "consistent",
        initial_curvature: float | None = None,
        batch_norm: str = "deterministic",
        reduction: str = "mean",
        max_grad_norm: float | None = None,
        sample_groups: int = 1,
        generator: torch.Generator | None = None,
    ):
        super().__init__(model, params, constructor_options(locals()), generator)


class OGN(DiagonalOptimizer):
    """Online Gauss-Newton: VOGN without drawing weights. The place to start tuning (Osawa et al. 2019).

    The posterior is a Laplace approximation at the mean with the running curvature: weights were never perturbed.

    Args:
        model: The network; a DistributedDataParallel wrapper is seen through.
        lr: α, the learning rate.
        n_data: N, the number of training data, or the data set itself; with prior_precision it sets the weight decay δ/N.
        params: Groups of parameters; None means everything that requires a gradient.
        momentum: β₁, the share of the old momentum.
        momentum_form: "heavy_ball" or "normalised", as in `VOGN`.
        new_curvature_weight: β₂, the weight of the *new* curvature.
        prior_precision: δ, the precision of the prior.
        weight_decay: λ, the weight decay on the mean loss, another way to say prior_precision = λN (ρN with augmentation).
        prior_mean: μ₀, the mean of the prior.
        damping: γ, which is added to the curvature.
        curvature: The estimate ĥ: "squares", "ggn" (which needs likelihood) or "micro_batch".
        likelihood: The likelihood of curvature="ggn".
        vectors: The vectors of curvature="ggn": "exact", "rademacher" or "sampled" (one backward pass each), or "auto".
        initial_curvature: The curvature s before the first step; None means that of the first batch.
        batch_norm: How the parameters of BatchNorm are treated: "deterministic" (no prior) or "variational".
        reduction: How the closure's loss sums over the examples of a batch: "mean" or "sum".
        max_grad_norm: The greatest length of the mean gradient; a longer one is shortened.

    >>> net = nn.Linear(3, 2)
    >>> opt = OGN(net, lr=0.1, n_data=4)
    >>> float(opt.step(lambda: net(torch.ones(4, 3)).square().mean())) > 0
    True
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        n_data: float | Sized | None = None,
        params: Iterable[Any] | None = None,
        momentum: float = 0.9,
        momentum_form: str = "heavy_ball",
        new_curvature_weight: float = 0.05,
        prior_precision: float = 1.0,
        weight_decay: float | None = None,
        prior_mean: float = 0.0,
        damping: float = 1e-2,
        curvature: str = "squares",
        likelihood: str | Likelihood | None = None,
        vectors: str = "auto",
        initial_curvature: float | None = None,
        batch_norm: str = "deterministic",
        reduction: str = "mean",
        max_grad_norm: float | None = None,
    ):
        super().__init__(model, params, {**constructor_options(locals()), "sampling": False}, None)
