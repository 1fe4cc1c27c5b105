"""VOGN and OGN: the variational online Gauss-Newton method and its noise-free relative.

The equations of a diagonal Gaussian posterior, on lists of tensors (``torch._foreach_*``), in place.

Symbols: μ mean, m momentum, s curvature of the mean loss, ĝ mean gradient, ĥ new estimate of the curvature,
c = τδ/N, γ damping, α learning rate, β₁ momentum, β₂ weight of the new curvature.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.distributed import unwrapped
from aftermap.errors import InputError
from aftermap.likelihoods import Likelihood
from aftermap.optim.base import Group, VariationalOptimizer, momenta
from aftermap.optim.noise import in_chunks
from aftermap.optim.options import Schedule, make_groups, make_settings

__all__ = [
    "OGN",
    "VOGN",
    "DiagonalOptimizer",
    "add_curvature_",
    "add_momentum_",
    "check_model",
    "denominator",
    "draw",
    "ivon_curvature_",
    "move_",
]

_TINY = 1e-12  # a deterministic weight without prior, damping and curvature does not move


def denominator(curvature: list[Tensor], prior: Any, damping: float) -> list[Tensor]:
    """s + c + γ.

    Args:
        curvature: s.
        prior: c, a number or a list of tensors.
        damping: γ.
    """
    if isinstance(prior, list):
        found = torch._foreach_add(curvature, prior)
        if damping:
            torch._foreach_add_(found, damping)
        return list(found)
    return list(torch._foreach_add(curvature, prior + damping))


def draw(mean: list[Tensor], noise: list[Tensor], below: list[Tensor], scale: float) -> list[Tensor]:
    """w = μ + scale · ε / √(s + c + γ), with scale = √(τ/N); ``below`` is overwritten."""
    torch._foreach_sqrt_(below)
    return list(torch._foreach_addcdiv(mean, noise, below, value=scale))  # MATH 4.1; poster, Algorithm 1, line 9


def add_momentum_(
    momentum: list[Tensor],
    grads: list[Tensor],
    scale: float,
    mean: list[Tensor],
    prior: Any,
    prior_mean: Any,
    beta: float,
    *,
    normalised: bool,
) -> None:
    """m ← β₁ m + w (ĝ + c (μ − μ₀)), w = 1 (heavy ball, as published) or 1 − β₁ (normalised); ĝ = scale · grads."""
    weight = 1 - beta if normalised else 1.0
    if normalised and scale == 1:
        torch._foreach_lerp_(momentum, grads, weight)  # the same in one pass
    else:
        torch._foreach_mul_(momentum, beta)
        torch._foreach_add_(momentum, grads, alpha=scale * weight)  # poster, Algorithm 1, line 17
    if isinstance(prior, list):
        away = torch._foreach_sub(mean, prior_mean)
        torch._foreach_addcmul_(momentum, prior, away, value=weight)
        return
    if prior:
        torch._foreach_add_(momentum, mean, alpha=prior * weight)
        if prior_mean:
            torch._foreach_sub_(momentum, prior * weight * prior_mean)


def add_curvature_(curvature: list[Tensor], new: list[Tensor], scale: float, beta: float, keep: float) -> None:
    """s ← keep · s + β₂ ĥ, ĥ = scale · new; keep is 1 − β₂, in the poster's form 1 − τβ₂."""
    torch._foreach_mul_(curvature, keep)
    torch._foreach_add_(curvature, new, alpha=beta * scale)  # MATH 4.1; poster, Algorithm 1, line 18


def move_(mean: list[Tensor], momentum: list[Tensor], below: list[Tensor], rate: float) -> None:
    """μ ← μ − α m / (s + c + γ)."""
    torch._foreach_addcdiv_(mean, momentum, below, value=-rate)  # MATH 4.1; poster, Algorithm 1, line 19


def ivon_curvature_(
    curvature: list[Tensor], products: list[Tensor], root: list[Tensor], scale: float, beta: float
) -> None:
    """h ← h + β₂ f + ½ β₂² f² / (h + c), f = ĥ − h: a Riemannian step that keeps h + c above 0.

    In terms of q = f / √(h + c) = scale · products − h / √(h + c) it needs no memory of its own.

    Args:
        curvature: h, changed in place.
        products: g ∘ ε, so that ĥ = scale · √(h + c) · products; overwritten.
        root: √(h + c) of the curvature before the step.
        scale: of the mean over examples, times √(N/τ).
        beta: β₂, the weight of the new curvature.
    """
    torch._foreach_addcdiv_(products, curvature, root, value=-1 / scale)  # q / scale
    torch._foreach_addcmul_(curvature, root, products, value=beta * scale)
    torch._foreach_addcmul_(curvature, products, products, value=0.5 * (beta * scale) ** 2)  # Shen et al. 2024, line 5


def check_model(model: object, name: str) -> nn.Module:
    """Raises unless a module was given."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{name} needs the model itself, because it reads per-example gradients at the layers; got {type(model).__name__}. "
            f"Write {name}(model, …), not {name}(model.parameters(), …)"
        )
    return model


class DiagonalOptimizer(VariationalOptimizer):
    """A diagonal posterior whose mean moves by MATH 4.1; abstract in spirit: use VOGN or OGN."""

    def _draw_group(self, group: Group, params: list[Tensor], noise: list[Tensor]) -> list[Tensor]:
        drawn: list[Tensor] = []
        for part in in_chunks(list(zip(noise, params, strict=True))):
            few = [p for _, p in part]
            prior, _ = self._prior(group, few)
            below = denominator([self.state[p]["curvature"] for p in few], prior, group["damping"])
            drawn += draw([p.data for p in few], [e for e, _ in part], below, self.noise_scale())
        return drawn

    def _update_group(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor],
        curvature: list[Tensor],
        scales: tuple[float, float],
    ) -> None:
        settings = self.settings
        self._first_curvature(params, curvature, scales[1])
        momentum = momenta(self, params)
        known = [self.state[p]["curvature"] for p in params]
        prior, prior_mean = self._prior(group, params)
        data = [p.data for p in params]
        normalised = settings.momentum_form == "normalised"
        beta1, beta2 = group["momentum"], group["new_curvature_weight"]
        add_momentum_(momentum, grads, scales[0], data, prior, prior_mean, beta1, normalised=normalised)
        keep = 1 - beta2 * (self.temperature if settings.form == "poster" else 1.0)
        add_curvature_(known, curvature, scales[1], beta2, keep)
        rate = group["lr"] / (1 - beta1 ** (self.steps + 1)) if normalised else group["lr"]
        below = denominator(known, prior, group["damping"] + (_TINY if group["deterministic"] else 0.0))
        move_(data, momentum, below, rate)

    def _first_curvature(self, params: list[Tensor], curvature: list[Tensor], scale: float) -> None:
        """Before its first update a weight has the initial curvature, or what its first batch says."""
        for parameter, new in zip(params, curvature, strict=True):
            if "curvature" not in self.state[parameter]:
                first = self.settings.initial_curvature
                value = new * scale if first is None else torch.full_like(parameter, first)
                self.state[parameter]["curvature"] = value.contiguous()

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        if self.settings.initial_curvature is not None:  # then noise starts with the first step
            for p in self.param_groups[-1]["params"]:
                self.state[p]["curvature"] = torch.full_like(p.data, self.settings.initial_curvature)


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
        model: the network; a DistributedDataParallel wrapper is seen through.
        lr: α.
        n_data: N, the number of training data.
        params: parameter groups, or None for everything that requires a gradient. A group may set lr, momentum,
            new_curvature_weight, prior_precision, prior_mean, damping and deterministic.
        mc_samples: K, draws per step; the first step is free of noise (unless initial_curvature is given).
        momentum: β₁.
        momentum_form: "heavy_ball" (as published: the rate is in effect α/(1 − β₁)) or "normalised" (with bias correction).
        new_curvature_weight: β₂, the weight of the *new* curvature.
        prior_precision: δ.
        prior_mean: μ₀.
        damping: γ; no weight's noise exceeds √(τ/(Nγ)). Where noise of that size drowns the weights, raise γ together with lr.
        temperature: τ, a number or a `Schedule`; warm up from about 0.1 if training is unstable.
        augmentation: ρ, multiplies N when the data are augmented.
        curvature: "squares", "ggn" (needs likelihood), "reparametrised" (needs initial_curvature) or "micro_batch".
        likelihood: for "ggn".
        vectors: for "ggn": "exact", "rademacher" or "sampled" (one backward pass each), or "auto".
        form: "consistent", or "poster" for the equations as printed there (right for τ = 1 only).
        initial_curvature: s before the first step; None: that of the first batch.
        batch_norm: "deterministic" (no noise, no prior) or "variational".
        reduction: how the closure's loss sums over the examples of a batch: "mean" or "sum".
        max_grad_norm: shortens the mean gradient.
        sample_groups: groups of processes that draw different weights; 1: all draw the same.
        generator: gives the seed of the noise; None: derived from PyTorch's seed.

    >>> net = nn.Linear(3, 2)
    >>> opt = VOGN(net, lr=0.1, n_data=4)
    >>> x, y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
    >>> loss = opt.step(lambda: nn.functional.cross_entropy(net(x), y))
    >>> sorted(opt.state[net.weight])
    ['curvature', 'momentum']

    References:
        Khan et al. 2018 (VOGN); Osawa et al. 2019, Algorithm 1.

    Differs from the paper: the temperature enters Σ as for the tempered posterior (MATH 4), unless form="poster"; squares
    of convolution biases and norm layers are exact.
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
        check_model(model, "VOGN")
        settings = make_settings(
            n_data=n_data,
            mc_samples=mc_samples,
            reduction=reduction,
            temperature=temperature,
            augmentation=augmentation,
            curvature=curvature,
            likelihood=likelihood,
            vectors=vectors,
            form=form,
            momentum_form=momentum_form,
            initial_curvature=initial_curvature,
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
        super().__init__(model, make_groups(unwrapped(model), params, batch_norm), defaults, settings, generator)


class OGN(DiagonalOptimizer):
    """Online Gauss-Newton: VOGN without drawing weights. The place to start tuning (Osawa et al. 2019).

    The posterior is a Laplace approximation at the mean with the running curvature: weights were never perturbed.

    Args:
        model: the network.
        lr: α.
        n_data: N; with prior_precision it sets the weight decay δ/N.
        params: parameter groups, or None.
        momentum: β₁.
        momentum_form: "heavy_ball" or "normalised".
        new_curvature_weight: β₂, the weight of the *new* curvature.
        prior_precision: δ.
        prior_mean: μ₀.
        damping: γ.
        curvature: "squares", "ggn" (needs likelihood) or "micro_batch".
        likelihood: for "ggn".
        vectors: for "ggn": "exact", "rademacher" or "sampled" (one backward pass each), or "auto".
        initial_curvature: s before the first step; None: that of the first batch.
        batch_norm: "deterministic" (no prior) or "variational".
        reduction: "mean" or "sum".
        max_grad_norm: shortens the mean gradient.

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
        n_data: float | None = None,
        params: Iterable[Any] | None = None,
        momentum: float = 0.9,
        momentum_form: str = "heavy_ball",
        new_curvature_weight: float = 0.05,
        prior_precision: float = 1.0,
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
        check_model(model, "OGN")
        if curvature == "reparametrised":
            raise InputError(
                "OGN draws no weights, so curvature='reparametrised' has nothing to work with; use VOGN or IVON"
            )
        settings = make_settings(
            n_data=n_data,
            sampling=False,
            reduction=reduction,
            curvature=curvature,
            likelihood=likelihood,
            vectors=vectors,
            momentum_form=momentum_form,
            initial_curvature=initial_curvature,
            max_grad_norm=max_grad_norm,
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
        super().__init__(model, make_groups(unwrapped(model), params, batch_norm), defaults, settings, None)
