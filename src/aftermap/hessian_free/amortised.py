r"""One fine-tuning for many inputs: row sums of the covariance as a score, and variances by random signs.

Pushing Σ_j s_j ψ_j(θ) for reference inputs x_j moves the output at any x by λ Σ_j s_j C(x, x_j) (McInerney and Kallus).
That is a **row sum** of the covariance, not a variance: it can be several times larger, or negative. With s_j = 1 it is
a score that needs a scale, found on validation data. With random signs s_j = ±1 it is unbiased for the variance at x_j
itself,

.. math:: E\Big[s_j \sum_k s_k C_{jk}\Big] = C_{jj}, \qquad \mathrm{sd} = \sqrt{\textstyle\sum_{k\ne j} C_{jk}^2 / R},

slowly so. Index legend: j, k reference inputs; r probes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from aftermap import checks
from aftermap.batches import Batch, check_inputs, iterate, unpack_inputs
from aftermap.distributed import distribute_work
from aftermap.errors import DataError, NotFittedError, ShapeError
from aftermap.hessian_free.minimise import FineTuner
from aftermap.hessian_free.objective import Objective
from aftermap.hessian_free.pushes import PushReport, pack, perturb, unpack_reports
from aftermap.hessian_free.settings import Settings
from aftermap.likelihoods import Categorical, Likelihood
from aftermap.models import check_modes, evaluating
from aftermap.params import named_parameters
from aftermap.predictive import Prediction, WeightsFingerprint, gaussian_prediction
from aftermap.predictive.functionals import FunctionalSet, Network, OutputSet

__all__ = ["AmortisedScore", "Probes", "amortise", "probe_variances"]

# Scales that calibration tries, relative to the noise or to 1: seven decades, then a finer search around the best.
_DECADES = torch.logspace(-4, 3, 29, dtype=torch.float64)


class _Sum(FunctionalSet):
    """The sum Σ_j a_j ψ_j as one functional."""

    def __init__(self, outputs: OutputSet, weights: Tensor):
        self.outputs, self.weights, self.count = outputs, weights, 1

    def __call__(self, network: Network) -> Tensor:
        return (self.outputs(network) * self.weights).sum().reshape(1)

    def part(self, start: int, stop: int) -> FunctionalSet:
        return self


@dataclass(frozen=True)
class AmortisedScore:
    """A score for every input from one pair of pushed networks: two forward passes each.

    Attributes:
        objective: The network and where its weights are.
        centre, plus, minus: The weights [P] at the centre and after the two pushes.
        width: The distance 2λ between the pushes (or λ, one-sided).
        likelihood: The likelihood, with its noise.
        report: The report of the fine-tuning.
        scale: The factor in variance = scale · |score|; None before `calibrate`.
        reference: The number of inputs that were pushed.

    The score is Σ_j s_j C(x, x_j), summed over the reference inputs: of every output for regression and the like [N, ..., C]; of
    the contrast between the network's own top class and the mean logit for classification [N, ...], as a sum of all logits
    says nothing (the softmax does not see it).
    """

    objective: Objective
    centre: Tensor
    plus: Tensor
    minus: Tensor
    width: float
    likelihood: Likelihood
    report: PushReport
    reference: int
    scale: float | None = None
    _watch: WeightsFingerprint | None = field(default=None, repr=False)

    def _row_sums(self, x: Any) -> tuple[Tensor, Tensor]:
        """Returns the outputs at the centre, and their derivative in λ, both [N, ..., C]."""
        objective = self.objective
        if self._watch is not None:
            self._watch.check(objective.model)
        check_modes(objective.model)
        batch = unpack_inputs(x).to(objective.device)
        check_inputs(batch.inputs, next(iter(objective.like.values())).dtype)
        if batch.size == 0:
            raise DataError("the inputs hold no example; there is nothing to predict")
        with torch.no_grad(), evaluating(objective.model):
            centre, plus, minus = (objective.network(t)(batch.inputs) for t in (self.centre, self.plus, self.minus))
        return centre, (plus - minus) / self.width

    def score(self, x: Any) -> Tensor:
        """Returns the signed row sum [N, ..., C], or [N, ...] for classification."""
        outputs, row_sums = self._row_sums(x)
        return self._scored(outputs, row_sums)

    def _scored(self, outputs: Tensor, row_sums: Tensor) -> Tensor:
        if not isinstance(self.likelihood, Categorical):
            return row_sums
        return (row_sums * _contrast(outputs)).sum(-1)

    def calibrate(self, data: Iterable[Any], *, unpack: Any = None) -> AmortisedScore:
        """Finds the scale that makes |score| a variance, by the best predictive log-likelihood on validation data.

        Args:
            data: Labelled batches that were held out.
            unpack: A function that turns a batch of another form into (inputs, targets).

        Returns:
            The same score with its scale.
        """
        objective = self.objective
        dtype = next(iter(objective.like.values())).dtype
        parts = [
            (*self._row_sums(b.inputs), b.targets)
            for b in iterate(data, device=objective.device, dtype=dtype, unpack=unpack)
        ]
        outputs, row_sums = (torch.cat([p[k] for p in parts]) for k in (0, 1))
        targets = torch.cat([p[2] for p in parts])
        size = self._variance(outputs, row_sums, 1.0)
        middle = float(size.double().mean().clamp_min(1e-300))

        def quality(scale: float) -> float:
            variance = self._variance(outputs, row_sums, scale)
            prediction = gaussian_prediction(self.likelihood, outputs, latent_var=variance, link=self._link())
            return float(prediction.log_prob(targets).double().mean())

        grid = (_DECADES / middle).tolist()
        best = max(grid, key=quality)
        for spread in (1.3, 1.1, 1.03):
            best = max((best / spread, best, best * spread), key=quality)
        return replace(self, scale=best)

    def _link(self) -> str:
        return "probit" if isinstance(self.likelihood, Categorical) else "auto"

    def _variance(self, outputs: Tensor, row_sums: Tensor, scale: float) -> Tensor:
        size = scale * self._scored(outputs, row_sums).abs()
        return size[..., None].expand(outputs.shape) if isinstance(self.likelihood, Categorical) else size

    def predict(self, x: Any, *, generator: torch.Generator | None = None) -> Prediction:
        """Predicts with the calibrated score as the variance of each output.

        Raises:
            NotFittedError: The score has no scale yet.
        """
        if self.scale is None:
            raise NotFittedError(
                "the amortised score is a row sum of the covariance and has no scale yet: call calibrate(val_loader) first, and "
                "predict with what it returns"
            )
        outputs, row_sums = self._row_sums(x)
        dtype = next(iter(named_parameters(self.objective.model).values())).dtype
        variance = self._variance(outputs, row_sums, self.scale)
        return gaussian_prediction(
            self.likelihood, outputs.to(dtype), latent_var=variance.to(dtype), link=self._link(), generator=generator
        )


def _contrast(outputs: Tensor) -> Tensor:
    """Returns e_k − 1/C with k the top class."""
    top = torch.nn.functional.one_hot(outputs.argmax(-1), outputs.shape[-1]).to(outputs)
    return top - 1 / outputs.shape[-1]


def amortise(
    objective: Objective,
    fine_tuner: FineTuner,
    origin: Tensor,
    centre: Tensor,
    settings: Settings,
    likelihood: Likelihood,
    batch: Batch,
    outputs: Tensor,
    signs: Tensor | None,
) -> AmortisedScore:
    """Pushes all outputs of a batch at once; see `HessianFree.amortise`."""
    coefficients = torch.ones(batch.size, dtype=objective.dtype) if signs is None else torch.as_tensor(signs)
    if coefficients.shape != (batch.size,) or not bool(coefficients.isfinite().all()) or not bool(coefficients.any()):
        raise ShapeError(
            f"signs must be {batch.size} finite numbers, one per reference input and not all zero; got shape {tuple(coefficients.shape)}"
        )
    weights = _contrast(outputs) if isinstance(likelihood, Categorical) else torch.ones_like(outputs)
    weights = weights * coefficients.to(outputs).reshape(-1, *[1] * (outputs.dim() - 1))
    functional = _Sum(OutputSet(batch, outputs[0].numel()), weights.reshape(-1))
    pushed = perturb(objective, fine_tuner, functional, origin, settings)
    return AmortisedScore(
        objective,
        centre,
        pushed.plus[0],
        pushed.minus[0],
        float(pushed.width[0]),
        likelihood,
        pushed.reports[0],
        batch.size,
        _watch=WeightsFingerprint.of(objective.model),
    )


@dataclass(frozen=True)
class Probes:
    """Variances from pushes with random signs.

    Attributes:
        variance: The variances [N, ..., C]; they are unbiased, so they may be negative.
        standard_error: The standard errors [N, ..., C], from the spread over probes.
        reports: The report of each push.
    """

    variance: Tensor
    standard_error: Tensor
    reports: tuple[PushReport, ...]


def probe_variances(
    objective: Objective,
    fine_tuner: FineTuner,
    origin: Tensor,
    settings: Settings,
    batch: Batch,
    outputs: Tensor,
    probes: int,
    generator: torch.Generator | None,
) -> Probes:
    """Returns random-sign (Hutchinson) variances of all outputs of a batch; see `HessianFree.probe_variances`."""
    probes = checks.count("probes", probes, 2)
    functionals = OutputSet(batch, outputs[0].numel())
    device = torch.device("cpu") if generator is None else generator.device
    signs = torch.randint(2, (probes, functionals.count), generator=generator, device=device).cpu().double() * 2 - 1
    most = settings.members(objective.size)
    starts = list(range(0, probes, most))

    def work(job: int) -> list[Tensor]:
        some = signs[starts[job] : starts[job] + most]
        pushed = perturb(objective, fine_tuner, functionals, origin, settings, combine=some, allow_zero=True)
        change = objective.values(pushed.plus, functionals) - objective.values(pushed.minus, functionals)
        return [(change / pushed.width[:, None]).double().cpu() * some, pack(pushed.reports)]

    sizes = [min(most, probes - start) for start in starts]
    shapes = [[(n, functionals.count), (n, len(PushReport.__dataclass_fields__))] for n in sizes]
    done = distribute_work([float(n) for n in sizes], shapes, work, torch.empty(0, dtype=torch.float64))
    estimates = torch.cat([rows for rows, _ in done])
    reports = tuple(r for _, numbers in done for r in unpack_reports(numbers))
    shape = outputs.shape
    error = estimates.std(0) / math.sqrt(probes)
    return Probes(estimates.mean(0).reshape(shape), error.reshape(shape), reports)
