"""From what an optimiser knows to a posterior of the library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aftermap.curvature.factors import Factors, Treatment
from aftermap.errors import InputError, NotFittedError
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.params import named_parameters
from aftermap.posteriors import GaussianPosterior
from aftermap.predictive import TrainedPosterior

__all__ = ["TrainedPosterior", "trained_posterior"]


def trained_posterior(optimizer: Any, likelihood: str | Likelihood | None) -> TrainedPosterior:
    """Gathers curvature, prior and mean of an optimiser; precision N s/τ + δ + Nγ/τ for a diagonal."""
    model = optimizer._inner
    if model is None:
        raise InputError(
            "only parameters were given to the optimiser, so there is no model to predict with. Pass the model: IVON(model, …)"
        )
    blocks = optimizer._blocks()
    if not blocks:
        raise NotFittedError("no weight has a curvature yet: take a step first")
    settings, tau = optimizer.settings, optimizer.temperature
    n = settings.n_effective
    poster = settings.form == "poster"  # Σ = 1/(N(s + τδ/N + γ)) there
    precision: dict[str, Any] = {}
    extra: dict[str, float] = {}
    prior_mean: dict[str, Tensor] = {}
    covered = {name for b in blocks for name in b.shapes}
    for group in optimizer.param_groups:
        for p in group["params"]:
            name, state = optimizer._known[id(p)], optimizer.state[p]
            if name in covered:
                own = state.get("prior_precision", group["prior_precision"])
                extra[name] = n * group["damping"] / (1.0 if poster else tau)
                precision[name] = own * (tau if poster else 1.0) + extra[name]
                mean = state.get("prior_mean", group["prior_mean"])
                prior_mean[name] = (
                    mean if isinstance(mean, Tensor) else torch.full((), float(mean), dtype=torch.float64)
                )
    names = tuple(name for name in named_parameters(model) if name in covered)
    structure = "kron" if any(b.kind == "kron" for b in blocks) else "diagonal"
    treatment = {name: Treatment(b.kind, type(optimizer).__name__) for b in blocks for name in b.shapes}
    factors = Factors(structure, tuple(blocks), names, n, 0.0, settings.curvature, treatment)
    mean = {name: p.detach() for name, p in named_parameters(model).items() if name in covered}
    damping = "pi" if getattr(optimizer, "damping_form", "exact") == "factored" else "exact"
    made = GaussianPosterior.from_factors(
        factors, mean, precision, prior_mean=prior_mean, scale=1.0 if poster else 1.0 / tau, damping=damping
    )
    spec = likelihood if likelihood is not None else (settings.likelihood or optimizer.loss_kind)
    parsed = None if spec is None else parse_likelihood(spec)
    return TrainedPosterior(model, made, factors, parsed, type(optimizer).__name__, extra)
