"""The Gaussians over the outputs of some examples, flat over positions: what the rules of tuning are computed from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aftermap.batches import Batch
from aftermap.errors import DataError
from aftermap.laplace.examples import FiniteExamples, random_examples
from aftermap.likelihoods import Categorical, Likelihood
from aftermap.models import call_model, explain_model_errors
from aftermap.posteriors import Posterior
from aftermap.predictive import PosteriorPredictor, latent_gaussians, sampled_outputs
from aftermap.progress import progress

__all__ = ["OutputGaussians", "drawn_outputs", "output_gaussians"]

_NUMBERS = 10**8  # of covariances that are held at once
_LEAST_EXAMPLES = 50


@dataclass(frozen=True)
class OutputGaussians:
    """The Gaussians N(f_i, V_i) over the outputs at M labelled positions, under one or several posteriors; float64 on the CPU.

    Attributes:
        mean: The network's outputs f [M, C].
        covariances: The covariances V [M, C, C], one for each posterior.
        targets: The targets [M], or [M, C] where every output has its own.
        weight: How many data each position stands for [M].
        n_examples: The number of examples that the positions are of.
    """

    mean: Tensor
    covariances: tuple[Tensor, ...]
    targets: Tensor
    weight: Tensor
    n_examples: int

    @property
    def size(self) -> int:
        """The number M of labelled positions."""
        return len(self.mean)

    def average(self, values: Tensor) -> float:
        """Returns the weighted mean of one number for each position [M]."""
        return float((self.weight * values).sum() / self.weight.sum())


def output_gaussians(
    predictor: PosteriorPredictor,
    batches: Iterable[Batch],
    likelihood: Likelihood,
    posteriors: Sequence[Posterior],
    *,
    limit: int,
    generator: torch.Generator | None = None,
    what: str = "validation",
) -> OutputGaussians:
    """Returns the Gaussians over the outputs of a random sample of labelled examples, in one pass through the network.

    Args:
        predictor: The network with a posterior.
        batches: The labelled data.
        likelihood: The likelihood, which judges targets and knows which positions are left out.
        posteriors: Variants of the predictor's posterior (`GaussianPosterior.with_prior`).
        limit: The largest number of positions; there are fewer where the covariances of many outputs would not fit.
        generator: The source of the random sample.
        what: What the data are called in messages.

    Raises:
        DataError: There are no labelled data, or the network's outputs are not finite for many of them.
        InputError: The network does not accept the inputs.

    Warns:
        StatisticalWarning: The network's outputs are not finite for a few examples, which are left out.
    """
    chosen: list[Batch] = []
    means: list[Tensor] = []
    covariances: list[list[Tensor]] = [[] for _ in posteriors]
    targets, weights, examples = [], [], 0
    labelled = (batch for batch in batches if isinstance(batch.targets, Tensor))
    first = next(labelled, None)
    if first is None:
        raise DataError(f"the {what} data are empty or have no targets")
    with explain_model_errors(predictor.model, lambda: first.inputs), torch.no_grad():
        outputs = call_model(predictor.model, first.take(torch.arange(1)).inputs)
    positions, wide = math.prod(outputs.shape[1:-1]), outputs.shape[-1]
    most = min(limit, max(_LEAST_EXAMPLES, _NUMBERS // (len(posteriors) * wide**2)))
    chosen = random_examples(_with_first(first, labelled), max(1, math.ceil(most / positions)), generator)
    finite = FiniteExamples(predictor.model, chosen, what)
    for batch in progress(finite, description=f"tuning: {what} data", total=len(chosen)):
        latents = latent_gaussians(predictor.plan(batch), predictor.posterior, batch, variants=posteriors)
        likelihood.check(latents[0].mean, batch.targets)
        counted = _counted(likelihood, batch.targets, latents[0].mean)
        means.append(latents[0].mean[counted].cpu())
        targets.append(_flat_targets(batch.targets, latents[0].mean, counted).cpu())
        weights.append(_flat_weights(batch, counted))
        for place, latent in enumerate(latents):
            assert latent.cov is not None  # diagonal=False
            covariances[place].append(latent.cov[counted].cpu())
        examples += batch.size
    mean, weight = torch.cat(means).double(), torch.cat(weights).double()
    if not len(mean) or not float(weight.sum()) > 0:
        raise DataError(f"the {what} data have no labelled position with a positive weight")
    return OutputGaussians(
        mean, tuple(torch.cat(c).double() for c in covariances), torch.cat(targets), weight, examples
    )


def drawn_outputs(
    model: nn.Module,
    batches: Iterable[Batch],
    likelihood: Likelihood,
    posterior: Posterior,
    samples: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the outputs of the network under draws of its weights, the same for all examples, at M labelled positions.

    Args:
        model: The network.
        batches: The labelled data.
        likelihood: The likelihood, which judges targets and knows which positions are left out.
        posterior: The posterior over the weights.
        samples: The number S of draws.

    Returns:
        The outputs under the draws [S, M, C] and at the mean [M, C] in float64, the targets [M] or [M, C], and how many data each
        position stands for [M].

    Raises:
        DataError: There are no labelled data, or the network's outputs are not finite for many of them.
    """
    draws, means, targets, weights = [], [], [], []
    for batch in FiniteExamples(model, batches, "validation"):
        if not isinstance(batch.targets, Tensor):
            continue
        with torch.no_grad():
            mean = call_model(model, batch.inputs)
            drawn = sampled_outputs(model, posterior, batch.inputs, samples, torch.Generator().manual_seed(0))
        likelihood.check(mean, batch.targets)
        counted = _counted(likelihood, batch.targets, mean)
        draws.append(drawn[:, counted].cpu())
        means.append(mean[counted].cpu())
        targets.append(_flat_targets(batch.targets, mean, counted).cpu())
        weights.append(_flat_weights(batch, counted))
    if not weights or not float(torch.cat(weights).sum()) > 0:
        raise DataError("the validation data have no labelled position with a positive weight")
    return torch.cat(draws, 1).double(), torch.cat(means).double(), torch.cat(targets), torch.cat(weights).double()


def _with_first(first: Batch, rest: Iterable[Batch]) -> Iterable[Batch]:
    yield first
    yield from rest


def _counted(likelihood: Likelihood, targets: Tensor, mean: Tensor) -> Tensor:
    """Tells which positions [N, ...] have a label."""
    if isinstance(likelihood, Categorical):
        return targets.to(mean.device) != likelihood.ignore_index
    return torch.ones(mean.shape[:-1], dtype=torch.bool, device=mean.device)


def _flat_weights(batch: Batch, counted: Tensor) -> Tensor:
    weight = torch.ones(batch.size) if batch.weight is None else batch.weight.cpu()
    return weight.reshape(-1, *[1] * (counted.dim() - 1)).expand(counted.shape)[counted.cpu()]


def _flat_targets(targets: Tensor, mean: Tensor, counted: Tensor) -> Tensor:
    if targets.shape == counted.shape:
        return targets.to(mean.device)[counted]
    return targets.to(mean.device).reshape(mean.shape)[counted]
