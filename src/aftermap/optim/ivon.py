"""IVON: an improved variational online Newton method, which needs no per-example gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.distributed import unwrapped
from aftermap.optim.base import Group, VariationalOptimizer, momenta
from aftermap.optim.options import Schedule, make_groups, make_settings
from aftermap.optim.statistics import Collected
from aftermap.optim.vogn import add_momentum_, denominator, ivon_curvature_, move_

__all__ = ["IVON", "Denominators"]


@dataclass(slots=True)
class _Kept:
    """``value`` is h + shift, or its root, of the curvature h as it was at a version (−1: of none yet)."""

    value: Tensor
    curvature: Tensor
    version: int = -1
    shift: float = 0.0
    rooted: bool = False

    def is_of(self, shift: float) -> bool:
        """Whether h and the shift are what they were."""
        return self.version == self.curvature._version and self.shift == shift

    def renew(self, shift: float) -> None:
        """Works h + shift out again, in place."""
        torch.add(self.curvature, shift, out=self.value)
        self.version, self.shift, self.rooted = self.curvature._version, shift, False


class Denominators:
    """h + shift or √(h + shift) of parameters, in memory of its own: worked out again only where h or shift has changed.

    What is asked for overwrites what was asked for before.

    >>> kept, weight, h = Denominators(), torch.zeros(2), torch.tensor([3.0, 8.0])
    >>> kept.root([weight], [h], 1.0)[0].tolist()
    [2.0, 3.0]
    >>> _ = h.add_(1)
    >>> kept.plain([weight], [h], 1.0)[0].tolist()
    [5.0, 10.0]
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}  # by the parameter's id

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()

    def plain(self, params: Sequence[Tensor], curvature: Sequence[Tensor], shift: float) -> list[Tensor]:
        """h + shift of each parameter."""
        kept = self._of(params, curvature)
        for k in kept:
            if k.rooted or not k.is_of(shift):
                k.renew(shift)
        return [k.value for k in kept]

    def root(self, params: Sequence[Tensor], curvature: Sequence[Tensor], shift: float) -> list[Tensor]:
        """√(h + shift) of each parameter."""
        kept = self._of(params, curvature)
        for k in kept:
            if not k.is_of(shift):
                k.renew(shift)
        plain = [k for k in kept if not k.rooted]
        if plain:
            torch._foreach_sqrt_([k.value for k in plain])
        for k in plain:
            k.rooted = True
        return [k.value for k in kept]

    def _of(self, params: Sequence[Tensor], curvature: Sequence[Tensor]) -> list[_Kept]:
        found: list[_Kept] = []
        for parameter, h in zip(params, curvature, strict=True):
            kept = self._kept.get(id(parameter))
            if kept is None or kept.curvature is not h:
                kept = self._kept[id(parameter)] = _Kept(torch.empty_like(h), h)
            found.append(kept)
        return found


class IVON(VariationalOptimizer):
    r"""Variational Newton with the reparametrised estimate of the Hessian's diagonal (Price's theorem).

    .. math::
        \hat h &= \hat g \circ \varepsilon / \sigma, \quad \sigma^2 = \frac{\tau}{N}\big/(h + c), \quad c = \tau\delta/N \\
        m &\leftarrow \beta_1 m + (1-\beta_1)\,\hat g \\
        h &\leftarrow (1-\beta_2)\,h + \beta_2 \hat h + \tfrac12\beta_2^2 (h - \hat h)^2/(h + c) \\
        \mu &\leftarrow \mu - \alpha\,\big(m/(1-\beta_1^t) + c(\mu - \mu_0)\big)/(h + c)

    The estimate is unbiased for E_q[∇²ℓ̄], so for Bayesian linear regression the fixed point is the mean-field optimum.

    Args:
        model: the network, or an iterable of parameters or of groups (then every closure counts as one example).
        lr: α; in the units of a Newton step: 0.1 is usual.
        n_data: N.
        params: parameter groups, or None; only with a model.
        mc_samples: K.
        momentum: β₁.
        new_curvature_weight: β₂, the weight of the *new* curvature.
        prior_precision: δ; a weight decay of λ on a mean loss is δ = λN.
        prior_mean: μ₀.
        damping: γ, added to h + c.
        temperature: τ, a number or a `Schedule`.
        augmentation: ρ.
        initial_curvature: h before the first step; large values start with little noise.
        clip_radius: entries of the preconditioned step are cut to ± this.
        rescale_lr: multiplies α by h₀ + c, so that the first steps are those of SGD with rate α.
        batch_norm: "deterministic" or "variational".
        reduction: "mean" or "sum".
        max_grad_norm: shortens the mean gradient.
        sample_groups: groups of processes that draw different weights.
        generator: gives the seed of the noise.

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
        n_data: float | None = None,
        params: Iterable[Any] | None = None,
        mc_samples: int = 1,
        momentum: float = 0.9,
        new_curvature_weight: float = 1e-5,
        prior_precision: float = 1.0,
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
        settings = make_settings(
            n_data=n_data,
            mc_samples=mc_samples,
            reduction=reduction,
            temperature=temperature,
            augmentation=augmentation,
            curvature="reparametrised",
            momentum_form="normalised",
            initial_curvature=initial_curvature,
            max_grad_norm=max_grad_norm,
            sample_groups=sample_groups,
        )
        self.clip_radius, self.rescale_lr = clip_radius, rescale_lr
        self._below = Denominators()
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "new_curvature_weight": new_curvature_weight,
            "prior_precision": prior_precision,
            "prior_mean": prior_mean,
            "damping": damping,
            "deterministic": False,
        }
        whole = model if isinstance(model, nn.Module) else None
        given = params if whole is not None else model
        groups = make_groups(unwrapped(whole) if whole is not None else nn.Module(), given, batch_norm)  # type: ignore[arg-type]
        super().__init__(whole, groups, defaults, settings, generator)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            self.state[p]["curvature"] = torch.full_like(p.data, self.settings.initial_curvature or 0.0)

    def _draw_group(self, group: Group, params: list[Tensor], noise: list[Tensor]) -> list[Tensor]:
        root = self._root(group, params)
        return list(torch._foreach_addcdiv([p.data for p in params], noise, root, value=self.noise_scale()))

    def _root(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        """√(h + c + γ): what the last update or draw has left, where nothing has changed since."""
        prior, _ = self._prior(group, params)
        known = [self.state[p]["curvature"] for p in params]
        if isinstance(prior, float):
            return self._below.root(params, known, prior + group["damping"])
        root = denominator(known, prior, group["damping"])
        torch._foreach_sqrt_(root)
        return root

    def _update(self, total: Collected) -> None:
        # Deterministic weights have no noise and so no estimate: their curvature stays what it was.
        total.curvature = dict.fromkeys(total.grads, torch.empty(0)) | total.curvature
        super()._update(total)

    def _update_group(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor],
        curvature: list[Tensor],
        scales: tuple[float, float],
    ) -> None:
        momentum = momenta(self, params)
        known = [self.state[p]["curvature"] for p in params]
        prior, prior_mean = self._prior(group, params)
        damping = group["damping"]
        add_momentum_(momentum, grads, scales[0], [], 0.0, 0.0, group["momentum"], normalised=True)
        estimated = all(c.shape == k.shape for c, k in zip(curvature, known, strict=True))
        if estimated:
            scale = scales[1] / self.noise_scale()  # 1/σ = √(N/τ) √(h + c)
            ivon_curvature_(known, curvature, self._root(group, params), scale, group["new_curvature_weight"])
        if isinstance(prior, float):
            below = self._below.plain(params, known, prior + damping)
        else:
            below = denominator(known, prior, damping)
        self._move(group, params, momentum, below, prior, prior_mean)
        if estimated and isinstance(prior, float):
            self._below.root(params, known, prior + damping)  # for the next draw, while it is in the cache

    def _move(
        self,
        group: Group,
        params: list[Tensor],
        momentum: list[Tensor],
        below: list[Tensor],
        prior: Any,
        prior_mean: Any,
    ) -> None:
        """μ ← μ − α (m/(1 − β₁ᵗ) + c (μ − μ₀)) / (h + c + γ)."""
        data = [p.data for p in params]
        rate = group["lr"]
        if self.rescale_lr:
            rate *= (self.settings.initial_curvature or 0.0) + (prior if isinstance(prior, float) else 0.0)
        correction = 1 - group["momentum"] ** (self.steps + 1)
        clipped = not math.isinf(self.clip_radius)
        if isinstance(prior, float) and not prior_mean and not clipped:  # needs no memory of its own
            if prior:
                move_(data, data, below, rate * prior)
            move_(data, momentum, below, rate / correction)
            return
        # m/(1 − β₁ᵗ) + c (μ − μ₀), times (1 − β₁ᵗ): one pass fewer.
        if isinstance(prior, list):
            away = torch._foreach_sub(data, prior_mean)
            step = list(torch._foreach_addcmul(momentum, prior, away, value=correction))
        else:
            step = list(torch._foreach_add(momentum, data, alpha=prior * correction))
            if prior and prior_mean:
                torch._foreach_sub_(step, prior * correction * prior_mean)
        if not clipped:
            move_(data, step, below, rate / correction)
            return
        torch._foreach_div_(step, below)
        torch._foreach_clamp_min_(step, -self.clip_radius * correction)
        torch._foreach_clamp_max_(step, self.clip_radius * correction)
        torch._foreach_add_(data, step, alpha=-rate / correction)
