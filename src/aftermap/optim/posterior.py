"""The posterior that an optimiser has built, as a posterior of the library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature.closure_plan import evaluating
from aftermap.curvature.diagonal import DiagonalBlock
from aftermap.curvature.factors import Factors, Treatment
from aftermap.errors import InputError, NotFittedError
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.optim.settings import check_number
from aftermap.params import Params, named_parameters
from aftermap.posteriors import GaussianPosterior
from aftermap.posteriors.io import save_posterior
from aftermap.predictive import Prediction
from aftermap.predictive.predictor import PosteriorPredictor

__all__ = ["TrainedPosterior", "trained_posterior"]


class TrainedPosterior:
    """A network with the Gaussian over its weights that training has built; final.

    Args:
        model: the network, at the mean.
        posterior: the Gaussian.
        factors: the curvature it was made from, as sums over the data.
        likelihood: for predictions; None: unknown.
        method: the optimiser's name.
        damping: parameter -> what damping adds to its precision, Nγ/τ.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: GaussianPosterior,
        factors: Factors,
        likelihood: Likelihood | None,
        method: str,
        damping: Mapping[str, float],
    ):
        self.model, self.posterior, self.factors, self.method = model, posterior, factors, method
        self.damping = dict(damping)
        self._likelihood = likelihood
        self._predictor: PosteriorPredictor | None = None

    @property
    def likelihood(self) -> Likelihood:
        """p(y | f).

        Raises:
            InputError: it was not given, and the loss did not tell.
        """
        if self._likelihood is None:
            raise InputError(
                "the likelihood is unknown: a loss does not always tell it. Pass it: opt.posterior('regression') or "
                "opt.posterior(aftermap.likelihoods.Gaussian(noise=0.3))"
            )
        return self._likelihood

    @property
    def predictor(self) -> PosteriorPredictor:
        """What predicts: model, posterior and likelihood."""
        if self._predictor is None:
            self._predictor = PosteriorPredictor(self.model, self.posterior, self.likelihood)
        return self._predictor

    def predict(
        self,
        x: Any,
        *,
        kind: str = "sampling",
        samples: int = 10,
        link: str = "auto",
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Predicts with uncertainty; in evaluation mode, after which the model's modes are as before.

        Args:
            x: inputs as the model takes them.
            kind: "sampling" (default: the network under draws of the weights, as in training) or "linearised".
            samples: draws of the weights; for "linearised" of the link.
            link: for "linearised": auto, mc, probit, pairwise or bridge.
            generator: for the draws.
        """
        predictor = self.predictor
        with evaluating(self.model):
            return predictor.predict(x, kind=kind, samples=samples, link=link, generator=generator)

    def variance_by_layer(self, x: Any) -> dict[str, Tensor]:
        """Each layer's part of the variance of the outputs [N, ..., C]: where the uncertainty sits."""
        predictor = self.predictor
        with evaluating(self.model):
            return dict(predictor.variance_by_layer(x))

    def sample(self, count: int, generator: torch.Generator | None = None) -> Params:
        """Weights: name -> [count, *shape]."""
        return self.posterior.sample(count, generator)

    def as_prior(self, *, damping: float = 0.0) -> tuple[Params, Params]:
        """(mean, precision) of each weight, for `set_prior` of the next task's optimiser.

        Precisions are one over the marginal variance, without what damping added to a diagonal posterior: it steadies the
        optimiser, but no datum said it. Keeping a share of it keeps more of the old task at the price of learning the new one
        less freely: the weights were never tried farther from the mean than damping allowed.

        Args:
            damping: the share that is kept, 0 to 1.

        >>> from aftermap.optim import VOGN
        >>> net = nn.Linear(3, 2)
        >>> opt = VOGN(net, n_data=4)
        >>> loss = opt.step(lambda: nn.functional.cross_entropy(net(torch.ones(4, 3)), torch.tensor([0, 1, 0, 1])))
        >>> VOGN(net, n_data=4).set_prior(*opt.posterior().as_prior())
        """
        check_number("damping", damping, 0.0, high=1.0)
        mean = {n: v.clone() for n, v in self.posterior.mean.items()}
        variance = self.posterior.marginal_variance()
        diagonal = {n for b in self.factors.blocks if isinstance(b, DiagonalBlock) for n in b.shapes}
        precision = {n: 1 / variance[n] - ((1 - damping) * self.damping[n] if n in diagonal else 0.0) for n in mean}
        return mean, {n: v.to(mean[n].dtype) for n, v in precision.items()}

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Writes the posterior as json and safetensors into a folder, whole or not at all."""
        likelihood = None if self._likelihood is None else self._likelihood.config()
        config = {"method": self.method, "likelihood": likelihood}
        state: dict[str, Tensor] = {**named_parameters(self.model), **dict(self.model.named_buffers())}
        return save_posterior(folder, self.posterior, self.factors, config, weights=state, overwrite=overwrite)

    def __repr__(self) -> str:
        return f"TrainedPosterior({self.method}, {self.posterior.n_params:,} weights in {len(self.posterior.blocks)} blocks)"


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
