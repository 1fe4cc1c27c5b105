"""Tuning a regression with one noise: gradients of some training data, the rule, and the width of any posterior matched to it.

The rule (`regression_rule`) is that of the full linear model. A posterior with other terms, such as Kronecker factors, the last layer or
some directions, takes its prior and noise, and is divided by one number for its variance on unseen data to be that of the full model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch, iterate
from aftermap.curvature import Factors
from aftermap.curvature.passes.plan import CheckedPlan
from aftermap.curvature.structures.base import flatten_batch
from aftermap.distributed import broadcast_, fail_together, gathered, is_distributed
from aftermap.errors import DataError, InputError, StatisticalWarning, warn_caller
from aftermap.laplace.evidence import squared_error
from aftermap.laplace.examples import FiniteExamples
from aftermap.laplace.fitted import Fitted, Tuned
from aftermap.laplace.overlap import warn_if_trained_on
from aftermap.laplace.regression_rule import (
    LinearModel,
    RegressionResult,
    apply_rule,
    fit_scale,
    match_width,
    misfits,
)
from aftermap.laplace.self_check import network_at_chance
from aftermap.laplace.subnetwork import is_subnetwork
from aftermap.likelihoods import Gaussian, Likelihood
from aftermap.likelihoods.base import aligned
from aftermap.linalg import DenseWork
from aftermap.models import call_model, check_device
from aftermap.params import named_parameters, select
from aftermap.posteriors.base import Hyperparameters
from aftermap.predictive import PosteriorPredictor, latent_gaussians
from aftermap.predictive.linearised import output_gradients
from aftermap.prior import Prior

__all__ = ["ExampleSample", "draw_examples", "linear_model", "regression_work", "tune_regression"]

_ALL_ROWS = 3000  # up to this many rows all data are used
_EXAMPLES = 1000  # else so many examples
_LABELS = 1000
_OUTPUTS = 30  # numbers of one example that are used, at most
_NUMBERS = 2.5e8  # of the rows, all together
_PASS_NUMBERS = 2.5e7  # of the rows of one pass through the network
_FEW_LABELS = 10  # as many as what is known without labels counts for
_LEAST = 30  # examples below which the rows of all parameters are too dear, or the result is uncertain
_RATIO_WORK = 1000  # multiplications for each entry of the matrix of rows that the search for the best ratio is worth
_SAME = 0.02  # by how much leverages of the same covariance may differ


def tune_regression(
    fitted: Fitted,
    likelihood: Likelihood,
    predictor: PosteriorPredictor,
    data: Iterable[Any] | None = None,
    val_data: Iterable[Any] | None = None,
    *,
    seed: int = 0,
    warn: bool = True,
) -> Tuned:
    """Tunes prior, noise and width of a regression, from its training data and, if there are some, validation labels.

    The parameters that the rule looks at are all that require a gradient, and those of the posterior: what the network was trained on.

    Args:
        fitted: The fit.
        likelihood: The `Gaussian` that its curvature is of (`split_noise`).
        predictor: A predictor of the same network.
        data: The training data; None takes those of the fit.
        val_data: Held-out data with targets; None tunes without labels.
        seed: The seed of the sample of the training data, where there are more than 3,000 numbers in them.
        warn: Whether to warn of a result that is not to be relied on.

    Returns:
        The tuned posterior with a `RegressionResult`.

    Raises:
        InputError: The likelihood has no noise, or there are no training data at hand.
        DataError: The data cannot tell anything.

    Warns:
        StatisticalWarning: The data are few, leave-one-out predictions are much worse than with one variance for all data, or one noise
            does not serve all outputs.
    """
    if not isinstance(likelihood, Gaussian):
        raise InputError(
            f"this tuning is for regressions with a Gaussian likelihood, got {likelihood!r}; use method='evidence' or "
            "validation data for others"
        )
    data = fitted.data if data is None else data
    if data is None:
        raise InputError(
            "tuning a regression passes over the training data again, and they are not at hand (a loaded posterior, or a fit on "
            "a generator). Hand them over with tune(train_loader=...), or use tune(method='evidence')"
        )
    plain = fitted.without_narrowing()
    model = predictor.model
    device, dtype = check_device(model)
    names = _trained_names(model, plain)
    batches = iterate(data, device=device, dtype=dtype, unpack=fitted.unpack, may_be_empty=is_distributed())
    sample = _sample(batches, plain, names, model, seed)
    with fail_together("tuning a regression"):
        linear, scale = linear_model(sample, likelihood, model, names, plain)
    mean_square = None if sample.is_whole else _mean_square(likelihood, plain.factors)
    copies = _copies(sample, linear, plain)
    result = apply_rule(
        linear, copies=copies, mean_square=mean_square, least_noise=float(torch.finfo(dtype).eps) * scale
    )
    chosen = _Chosen.of(call_outputs(model, sample.batches[0]), likelihood)
    left = linear.leave_one_out(result.ratio)
    spread = misfits(left.residuals, result.noise**2 * (1 + left.leverage), left.weights, len(chosen.outputs))
    result = replace(result, misfits=spread)
    tuned = _applied(plain, result)
    if not _is_the_model(tuned, plain, names):
        leverage = _leverage(tuned, likelihood, predictor, sample.batches, result)
        if not (sample.is_whole and _is_same(leverage, linear, result)):
            result = replace(result, narrowing=match_width(leverage, linear, result.ratio, copies))
            tuned = _applied(plain, result)
    if val_data is not None:
        validation = iterate(val_data, device=device, dtype=dtype, unpack=fitted.unpack)
        result = _with_labels(result, tuned, plain, likelihood, predictor, validation, seed)
        tuned = _applied(plain, result)
    else:
        with torch.no_grad():
            outputs = torch.cat([call_model(model, b.inputs) for b in sample.batches])
        targets = torch.cat([b.targets for b in sample.batches]).reshape(outputs.shape)
        result = replace(result, chance=network_at_chance(likelihood, outputs, targets))
        tuned = replace(tuned, result=result)
    agreed = _agreed(result)
    if agreed is not result:
        result, tuned = agreed, _applied(plain, agreed)
    if warn:
        _warn(result)
    return tuned


def _trained_names(model: nn.Module, fitted: Fitted) -> list[str]:
    """Returns all parameters that require a gradient and those of the posterior; the latter alone where the rows of all are too many."""
    uncertain = set(fitted.posterior.names)
    trained = [
        n for n, p in named_parameters(model).items() if n in uncertain or (p.requires_grad and p.is_floating_point())
    ]
    sizes = {n: p.numel() for n, p in named_parameters(model).items()}
    outputs = min(_OUTPUTS, max(1, fitted.factors.n_outputs))
    if sum(sizes[n] for n in trained) * outputs * _LEAST <= _NUMBERS:
        return trained
    if sum(sizes[n] for n in uncertain) * outputs * _LEAST <= _NUMBERS:
        return select(model, list(fitted.posterior.names))
    raise InputError(
        f"the gradients of {_LEAST} examples with {outputs} outputs in {sum(sizes[n] for n in uncertain):,} parameters do not fit into memory; "
        "tune by validation data or the evidence, or choose fewer parameters with params='last_layer'"
    )


@dataclass(frozen=True)
class ExampleSample:
    """Some examples, drawn without replacement.

    Attributes:
        batches: The examples.
        seen: How many examples with a positive weight there were.
        size: How many of them were drawn.
    """

    batches: list[Batch]
    seen: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether every example was drawn."""
        return self.size == self.seen


def draw_examples(batches: Iterable[Batch], limit: int, seed: int, most: int | None = None) -> ExampleSample:
    """Draws a uniform sample of the data in one pass, in the order of the data; memory for the sample alone.

    Args:
        batches: The data; examples with weight zero count as missing.
        limit: How many examples to draw where there are more than ``most``.
        seed: The seed of the draw.
        most: Up to how many examples are all taken; None: ``limit``.
    """
    most = limit if most is None else most
    generator = torch.Generator().manual_seed(seed)
    sample: list[tuple[Tensor, Batch]] = []
    seen = size = 0
    for batch in batches:
        if batch.targets is None:
            raise DataError("a batch has no targets; a regression is tuned on data with targets")
        there = torch.arange(batch.size) if batch.weight is None else (batch.weight > 0).nonzero()[:, 0].cpu()
        marks = torch.rand(len(there), generator=generator, dtype=torch.float64)
        if len(there):
            sample.append((marks, batch.take(there) if len(there) < batch.size else batch))
        seen, size = seen + len(there), size + len(there)
        if size > 2 * most:
            sample, size = _smallest(sample, most), most
    if seen > most:
        sample, size = _smallest(sample, min(limit, most)), min(limit, most)
    return ExampleSample([b for _, b in sample], seen, size)


def _smallest(batches: Sequence[tuple[Tensor, Batch]], size: int) -> list[tuple[Tensor, Batch]]:
    bound = torch.cat([m for m, _ in batches]).sort().values[size - 1]
    chosen = [(m, b, (m <= bound).nonzero()[:, 0]) for m, b in batches]
    return [(m[i], b.take(i)) for m, b, i in chosen if len(i)]


def _most_examples(outputs: int, parameters: int) -> int:
    """Returns the number of examples up to which all are taken."""
    return max(2, min(_ALL_ROWS, int(_NUMBERS // parameters)) // min(_OUTPUTS, max(1, outputs)))


def regression_work(n_data: int, outputs: int, parameters: int) -> tuple[int, DenseWork]:
    """Returns how many examples the rule looks at, and the dense work on the matrix of their rows.

    Args:
        n_data: The number of training data.
        outputs: The numbers that the network returns for one of them.
        parameters: The number of parameters that the rule looks at.
    """
    most = _most_examples(outputs, parameters)
    examples = n_data if n_data <= most else min(_EXAMPLES, most)
    rows = examples * min(_OUTPUTS, max(1, outputs))
    return examples, DenseWork(float(rows) ** 2 * (parameters + _RATIO_WORK), (rows,))


def _sample(
    batches: Iterable[Batch], fitted: Fitted, names: Sequence[str], model: nn.Module, seed: int
) -> ExampleSample:
    """Returns examples of the data of all processes, the same on each."""
    parameters = named_parameters(model)
    most = _most_examples(fitted.factors.n_outputs, sum(parameters[n].numel() for n in names))
    limit = min(_EXAMPLES, most)
    with fail_together("tuning a regression"):
        sample = draw_examples(batches, limit, seed, most)
    if is_distributed():
        sample = _of_all_processes(sample, limit, seed, most, check_device(model)[0])
    if sample.size < 2:
        raise DataError(
            f"there are {sample.size} training examples with a positive weight; a regression is tuned on two at least"
        )
    return sample


def _of_all_processes(sample: ExampleSample, limit: int, seed: int, most: int, device: torch.device) -> ExampleSample:
    """Returns the examples of all processes, of each as many as its share of the data where together they are too many."""
    seen = sum(gathered(sample.seen))
    wanted = sample.size if seen <= most else min(sample.size, round(limit * sample.seen / seen))
    marks = torch.randperm(sample.size, generator=torch.Generator().manual_seed(seed)).split(
        [b.size for b in sample.batches]
    )
    drawn = [b.take((m < wanted).nonzero()[:, 0].to(device)) for m, b in zip(marks, sample.batches, strict=True)]
    batches = [b.to(device) for part in gathered([b.to(torch.device("cpu")) for b in drawn if b.size]) for b in part]
    return ExampleSample(batches, seen, sum(b.size for b in batches))


def linear_model(
    sample: ExampleSample, likelihood: Gaussian, model: nn.Module, names: Sequence[str], fitted: Fitted
) -> tuple[LinearModel, float]:
    """Returns the linear model of a network on some examples, and the root mean square of their targets.

    Args:
        sample: The examples.
        likelihood: Its noise whitens the outputs.
        model: The network.
        names: The parameters.
        fitted: It gives the prior's mean and how often each datum counts.
    """
    shift = _distance(model, names, fitted)
    checked = CheckedPlan(model, names, sample.batches[0])
    chosen = _Chosen.of(call_outputs(model, sample.batches[0]), likelihood)
    lines, residuals, targets, weights = [], [], [], []
    for batch in sample.batches:
        for piece in batch.pieces(max(1, int(_PASS_NUMBERS // (chosen.count * len(shift))))):
            rows, outputs = _rows(checked, piece, chosen)
            y = aligned(outputs, piece.targets, outputs.shape[-1], "Gaussian").to(torch.float64)
            likelihood.check(outputs, piece.targets)
            lines.append(rows)
            residuals.append(chosen.whitened(y - outputs.to(torch.float64)))
            targets.append(chosen.whitened(y))
            weights.append(_weights(piece))
    matrix = torch.cat(lines).flatten(0, 1)
    whitener = chosen.whitener.repeat(len(matrix) // chosen.count)
    linear = LinearModel.make(
        _kernel(matrix) * whitener * whitener[:, None],
        whitener * _product(matrix, shift),
        torch.cat(residuals).reshape(-1),
        fitted.hyperparameters.likelihood_weight * torch.cat(weights),
        float(shift.square().sum()),
        matrix.shape[1],
    )
    return linear, float(torch.cat(targets).square().mean().sqrt())


def call_outputs(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the outputs for the first example of a batch."""
    with torch.no_grad():
        return call_model(model, batch.take(torch.arange(1)).inputs)


def _weights(batch: Batch) -> Tensor:
    return (
        torch.ones(batch.size, dtype=torch.float64) if batch.weight is None else batch.weight.to("cpu", torch.float64)
    )


@dataclass(frozen=True)
class _Chosen:
    """Which numbers of an output [positions, C] are looked at: all, or evenly spaced ones where there are many.

    Attributes:
        outputs: Some of the C outputs.
        positions: Some of the positions.
        whitener: 1/noise of the numbers, positions first [M].
    """

    outputs: list[int]
    positions: list[int]
    whitener: Tensor

    @staticmethod
    def of(values: Tensor, likelihood: Gaussian) -> _Chosen:
        width = values.shape[-1]
        places = math.prod(values.shape[1:-1])
        outputs = _spread(width, _OUTPUTS)
        positions = _spread(places, max(1, _OUTPUTS // len(outputs)))
        noise = torch.as_tensor(likelihood.noise, dtype=torch.float64).detach().cpu().expand(width)
        return _Chosen(outputs, positions, (1 / noise[outputs]).repeat(len(positions)))

    @property
    def count(self) -> int:
        """The number M of numbers."""
        return len(self.whitener)

    def whitened(self, values: Tensor) -> Tensor:
        """Returns the chosen ones of [b, ..., C], divided by the noise: [b, M] in float64."""
        flat = values.detach().reshape(len(values), -1, values.shape[-1])[:, self.positions][..., self.outputs]
        return flat.flatten(1).to("cpu", torch.float64) * self.whitener


def _spread(count: int, most: int) -> list[int]:
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


def _rows(checked: CheckedPlan, batch: Batch, chosen: _Chosen) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the chosen numbers [b, M, P], not whitened, and the outputs."""
    parts: dict[int, list[Tensor]] = {p: [] for p in chosen.positions}
    outputs = []
    for part, position, values, gradients in output_gradients(checked, batch, outputs=chosen.outputs):
        if position == 0:
            outputs.append(values)
        if position in parts:
            by_name = gradients.per_example(checked.names, 0, part.stop - part.start)
            parts[position].append(flatten_batch(by_name, checked.names).transpose(0, 1).detach().cpu())
    return torch.cat([torch.cat(p) for p in parts.values()], dim=1), torch.cat(outputs)


def _kernel(rows: Tensor) -> Tensor:
    """Returns JJᵀ in float64, without a copy of J in it."""
    kernel = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for columns in rows.split(max(1, int(_PASS_NUMBERS // len(rows))), dim=1):
        exact = columns.to(torch.float64)
        kernel.addmm_(exact, exact.T)
    return kernel


def _product(rows: Tensor, vector: Tensor) -> Tensor:
    size = max(1, int(_PASS_NUMBERS // rows.shape[1]))
    return torch.cat([part.to(torch.float64) @ vector for part in rows.split(size)])


def _distance(model: nn.Module, names: Sequence[str], fitted: Fitted) -> Tensor:
    """Returns θ − μ₀, flat; parameters that the prior does not know, and fixed entries of one that it does, have the mean 0."""
    parameters = named_parameters(model)
    means = {} if is_subnetwork(fitted.factors) else fitted.hyperparameters.prior.mean
    parts = []
    for name in names:
        value = parameters[name].detach().to("cpu", torch.float64)
        mean = means.get(name)
        parts.append((value if mean is None else value - mean.detach().to("cpu", torch.float64)).reshape(-1))
    return torch.cat(parts)


def _mean_square(likelihood: Likelihood, factors: Factors) -> float | None:
    """Returns the mean squared residual of all data of the fit; None where the loss does not hold it in enough digits."""
    if not math.isfinite(factors.loss) or not factors.n_outputs:
        return None
    squares = squared_error(likelihood, factors)
    return squares / (factors.n_data * factors.n_outputs) if squares > 1e-3 * abs(factors.loss) else None


def _copies(sample: ExampleSample, linear: LinearModel, fitted: Fitted) -> float:
    """Returns how many numbers of all data each of the linear model's stands for."""
    rows = len(linear.targets) / sample.size
    return max(1.0, sample.seen / sample.size * max(1, fitted.factors.n_outputs) / rows)


def _applied(fitted: Fitted, result: RegressionResult) -> Tuned:
    """Returns the fit under the hyperparameters of a result."""
    old = fitted.hyperparameters
    prior = Prior.make(result.precision, dict(old.prior.mean), fitted.posterior.layers, fitted.posterior.shapes)
    noise = torch.tensor(result.noise, dtype=torch.float64)
    tuned: Hyperparameters = replace(old, prior=prior, noise=noise)
    if result.narrowing != 1.0:
        tuned = tuned.narrowed(result.narrowing)
    return Tuned(tuned.applied_to(fitted.posterior, fitted.factors.curvature), tuned, result, result.narrowing)


def _is_the_model(tuned: Tuned, fitted: Fitted, names: Sequence[str]) -> bool:
    """Tells whether a posterior is that of the full linear model by construction."""
    posterior = tuned.posterior
    if set(posterior.names) != set(names) or fitted.factors.curvature != "exact":
        return False
    return posterior.has_every_term and fitted.factors.structure != "hessian"


def _leverage(
    tuned: Tuned,
    likelihood: Gaussian,
    predictor: PosteriorPredictor,
    batches: Sequence[Batch],
    result: RegressionResult,
) -> Tensor:
    """Returns jᵀΣj/σ² of the chosen numbers [n, M]."""
    posterior = tuned.posterior
    plan = CheckedPlan(predictor.model, posterior.names, batches[0])
    chosen = _Chosen.of(call_outputs(predictor.model, batches[0]), likelihood)
    parts = []
    for batch in batches:
        (latent,) = latent_gaussians(plan, posterior, batch, diagonal=True)
        parts.append(chosen.whitened(latent.var) * chosen.whitener)
    return torch.cat(parts) / result.noise**2


def _is_same(leverage: Tensor, linear: LinearModel, result: RegressionResult) -> bool:
    """Tells whether these are the leverages of the full linear model on its own data: then the posterior is this model's."""
    left = linear.leave_one_out(result.ratio).leverage * linear.weights[:, None]
    if linear.outputs > 1:
        rows = (linear.vectors * (linear.values / (linear.values + result.ratio)).sqrt()).square().sum(1)
        expected = rows.reshape(left.shape)
    else:
        expected = left / (1 + left)
    expected = expected / linear.weights[:, None]
    return float((leverage - expected).abs().sum()) <= _SAME * float(expected.sum())


def _with_labels(
    result: RegressionResult,
    tuned: Tuned,
    fitted: Fitted,
    likelihood: Gaussian,
    predictor: PosteriorPredictor,
    validation: Iterable[Batch],
    seed: int,
) -> RegressionResult:
    """Returns the result after validation labels have set the scale of the predictive variance."""
    with fail_together("reading validation data"):
        sample = draw_examples(validation, _LABELS, seed)
        if not sample.size:
            raise DataError("no validation example has a positive weight")
    warn_if_trained_on(sample.batches, fitted)
    batches = list(FiniteExamples(predictor.model, sample.batches, "validation"))
    chosen = _Chosen.of(call_outputs(predictor.model, batches[0]), likelihood)
    residuals, targets = [], []
    for batch in batches:
        with torch.no_grad():
            outputs = call_model(predictor.model, batch.inputs)
        likelihood.check(outputs, batch.targets)
        y = aligned(outputs, batch.targets, outputs.shape[-1], "Gaussian").to(torch.float64)
        targets.append(chosen.whitened(y))
        residuals.append(chosen.whitened(y - outputs.to(torch.float64)))
    values = torch.cat(targets)
    if len(values) > 1 and bool((values == values[0]).all()):
        warn_caller(
            "all validation targets are the same, so that they say little about others. Hold out data that are like those to come",
            StatisticalWarning,
        )
    leverage = _leverage(tuned, likelihood, predictor, batches, result)
    weights = torch.cat([_weights(b) for b in batches])
    factor, width = fit_scale(torch.cat(residuals), leverage, result.noise, weights)
    return replace(
        result,
        noise=result.noise * math.sqrt(factor),
        precision=result.precision / factor,
        narrowing=result.narrowing / width,
        factor=factor,
        width=width,
        n_labels=sum(b.size for b in batches),
        misfits=misfits(
            torch.cat(residuals),
            factor * result.noise**2 * (1 + width * leverage),
            weights,
            len(chosen.outputs),
        ),
    )


def _agreed(result: RegressionResult) -> RegressionResult:
    """Returns the first process's result in a process group, where each has looked at its own data."""
    numbers = [result.ratio, result.noise, result.narrowing]
    shared = torch.tensor(numbers, dtype=torch.float64)
    broadcast_([shared])
    ratio, noise, narrowing = shared.tolist()
    if [ratio, noise, narrowing] == numbers:
        return result
    return replace(result, ratio=ratio, noise=noise, precision=ratio / noise**2, narrowing=narrowing)


def _warn(result: RegressionResult) -> None:
    if (result.alarm and not result.n_labels) or result.uneven or result.chance is not None:
        warn_caller(result.sentence(), StatisticalWarning)
    elif 0 < result.n_labels < _FEW_LABELS:
        only = f"there {'is' if result.n_labels == 1 else 'are'} only {result.n_labels} validation {'example' if result.n_labels == 1 else 'examples'}"
        warn_caller(
            f"{only}, so that the noise {result.noise:.3g} is mostly what training data say of it. Hold out more data that are like those to come",
            StatisticalWarning,
        )
    elif result.n_data < 10 and result.n_labels < 10:
        warn_caller(
            f"{result.n_data} training examples say little about the noise and the prior of a regression; check the intervals on "
            "data that were held out",
            StatisticalWarning,
        )
