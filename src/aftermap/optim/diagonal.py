"""The equations of a diagonal Gaussian posterior, on lists of tensors (``torch._foreach_*``), in place.

Symbols: μ mean, m momentum, s curvature of the mean loss, ĝ mean gradient, ĥ new estimate of the curvature,
c = τδ/N, γ damping, α learning rate, β₁ momentum, β₂ weight of the new curvature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["add_curvature_", "add_momentum_", "denominator", "draw", "ivon_curvature_", "move_"]


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
