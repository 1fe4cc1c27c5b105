"""VOGN and OGN: the variational online Gauss-Newton method and its noise-free relative."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.distributed import unwrapped
from aftermap.errors import InputError
from aftermap.likelihoods import Likelihood
from aftermap.optim.chunks import in_chunks
from aftermap.optim.core import Group, VariationalOptimizer
from aftermap.optim.diagonal import add_curvature_, add_momentum_, denominator, draw, move_
from aftermap.optim.schedules import Schedule
from aftermap.optim.settings import make_groups, make_settings
from aftermap.optim.state import momenta

__all__ = ["OGN", "VOGN", "DiagonalOptimizer", "check_model"]

_TINY = 1e-12  # a deterministic weight without prior, damping and curvature does not move


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
