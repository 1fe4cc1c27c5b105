"""Hessian-free Laplace: variances from how far a fine-tuned network gives way when it is pushed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.batches import Batch, Unpack, check_inputs, iterate, unpack_batch, unpack_inputs
from aftermap.curvature.passes.last_block import find_last_block, find_last_layer
from aftermap.distributed import all_reduce_, broadcast_, distribute_work, world_size
from aftermap.errors import (
    DataError,
    InputError,
    NotFittedError,
    NumericalError,
    NumericalWarning,
    ShapeError,
    StatisticalWarning,
)
from aftermap.hessian_free.amortised import AmortisedScore, Probes, amortise, probe_variances
from aftermap.hessian_free.minimise import BatchFineTuner, FineTuner, FullDataFineTuner
from aftermap.hessian_free.objective import Objective
from aftermap.hessian_free.pushes import PushReport, pack, perturb, unpack_reports
from aftermap.hessian_free.settings import Settings
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.linalg import symmetrise
from aftermap.models import check_device, check_modes, check_outputs, evaluating, explain_model_errors
from aftermap.params import Params, Selection, named_parameters, select
from aftermap.predictive import Prediction, WeightsFingerprint, gaussian_prediction
from aftermap.predictive.functionals import Functional, FunctionalSet, OutputSet, parse_functionals
from aftermap.prior import Prior, PriorSpec

__all__ = ["HessianFree", "MapReport", "VarianceReport", "check_common", "check_minimum"]

_NUMBERS = len(PushReport.__dataclass_fields__)


@dataclass(frozen=True)
class MapReport:
    """How well the trained weights minimise the objective.

    Attributes:
        n_data: The number of examples (with weights, their sum).
        loss: The objective L at the trained weights.
        gradient_norm: The norm ‖∇L‖ at the trained weights.
        decrement: The distance √(2(L(θ*) − L(θ₀))) with θ₀ the fine-tuned weights: to leading order Newton's decrement
            √(∇LᵀH⁻¹∇L), the distance to the minimum in posterior standard deviations. No functional drifts by more than
            this many of its own.
        final_gradient_norm: The norm of the gradient after fine-tuning.
        steps: The number of steps of the fine-tuning.
        converged: Whether the fine-tuning reached its goal (methods on all data).
        polished: Whether the fine-tuned copy, not the trained weights, is the centre of the posterior.
        method: The name of the optimiser.
    """

    n_data: float
    loss: float
    gradient_norm: float
    decrement: float
    final_gradient_norm: float
    steps: int
    converged: bool
    polished: bool
    method: str


@dataclass(frozen=True)
class VarianceReport:
    """How the variances of some functionals were found.

    Attributes:
        functionals: One report for each functional; for predictions in the order of the flattened outputs.
        asymmetry: The largest |C_ij − C_ji| relative to √(C_ii C_jj), which is zero for exact derivatives.
        projected: The negative eigenvalues that were set to zero, relative to the trace.
    """

    functionals: tuple[PushReport, ...]
    asymmetry: float
    projected: float

    @property
    def ok(self) -> bool:
        """Whether all functionals went without a flag."""
        return all(r.status == "ok" for r in self.functionals)

    def summary(self) -> str:
        """Returns a table with one line per functional."""
        head = f"{'':>4}{'variance':>11}{'λ':>10}{'move/sd':>9}{'bend':>8}{'rise':>7}{'bias':>9}{'residual':>10}{'steps':>7}  status"
        lines = [
            f"{i:4}{r.variance:11.4g}{r.step:10.3g}{r.deviation:9.2g}{r.curvature:8.1g}{r.energy:7.3f}{r.bias:9.1g}{r.residual:10.1g}"
            f"{int(r.steps):7}  {r.status}"
            for i, r in enumerate(self.functionals)
        ]
        return "\n".join([head, *lines])


def check_common(n_data: float, loss: float) -> None:
    """Checks that all processes of a group have the same data, since functionals are shared out, not data."""
    local = torch.tensor([n_data, loss], dtype=torch.float64)
    sums = torch.stack([local, local.square()])
    all_reduce_([sums])
    mean, square = sums / world_size()
    if bool((square - mean.square() > 1e-6 * (1 + square)).any()):
        raise DataError(
            f"the processes hold different data ({n_data:g} examples with loss {loss:.6g} here, {mean[0]:g} with {mean[1]:.6g} on "
            "average). A Hessian-free posterior shares out functionals, not data: give every process all data"
        )


def check_minimum(report: MapReport, rise: float, settings: Settings, polish: bool, force: bool) -> None:
    """Refuses weights that are no minimum, and an optimiser that leaves one, unless told to go on."""
    if not rise <= max(0.5 * settings.max_decrement**2, 1e-6 * abs(report.loss)) and not force:
        raise NumericalError(
            f"fine-tuning without a push made the loss larger, by {rise:.3g} from {report.loss:.6g}: {settings.method} does not settle. "
            "Lower lr, use larger batches or more steps, or a method on all data (lbfgs, newton_cg)"
        )
    if not report.converged and report.steps >= settings.max_steps:  # One that is stuck at rounding has converged.
        warnings.warn(
            f"fine-tuning without a push stopped after {report.steps} steps at a gradient of {report.final_gradient_norm:.3g} (trained "
            f"weights: {report.gradient_norm:.3g}): the minimum is not reached, and the measured distance to it may be too small. "
            "Raise max_steps, or train further",
            NumericalWarning,
            stacklevel=4,
        )
    if polish or report.decrement <= settings.max_decrement:
        return
    message = (
        f"the trained weights are {report.decrement:.3g} posterior standard deviations away from the minimum of the objective "
        f"(allowed: {settings.max_decrement:g}; gradient norm {report.gradient_norm:.3g}, loss {report.loss:.6g}). A Laplace "
        "approximation needs a minimum of Σ −log p(y|f)/T + ½ θᵀP₀θ"
    )
    if not force:
        raise InputError(
            f"{message}. Train longer, with this prior_precision (weight decay · N); or fit(polish=True) to work with a "
            "fine-tuned copy; or fit(force=True) to go on as it is"
        )
    warnings.warn(f"{message}; forced to go on", StatisticalWarning, stacklevel=4)


class HessianFree:
    r"""The Laplace posterior with the exact Hessian, without a Hessian.

    With L the negative log posterior and θ_λ = argmin L(θ) − λψ(θ), the implicit function theorem gives

    .. math::
        \frac{d\,\psi(\theta_\lambda)}{d\lambda}\Big|_0 = g^\top H^{-1} g = \mathrm{Var}_{LA}[\psi],
        \qquad \frac{d\,\psi_j(\theta_{\lambda})}{d\lambda_i}\Big|_0 = g_i^\top H^{-1} g_j,

    so two fine-tunings of a copy, pushed by ±λ, give a row of the covariance: all cross-layer terms included, no curvature
    formed or inverted. It needs what training needs, and a minimum: the distance to it is measured in `fit`.

    Args:
        model: A trained network with outputs [N, ..., C], in eval mode. It is never changed.
        likelihood: The likelihood: "classification", "binary", "regression", "counts", or an object from
            `aftermap.likelihoods`.
        params: The weights that are uncertain: "all", "last_layer", "last_block", names, a regular expression or a function.
        prior_precision: The precision of the prior that the weights were trained with: one number, one per layer, or a
            mapping; see `posteriors.Prior`.
        prior_mean: The mean of the prior: a number or tensors by name.
        temperature: The number that the log-likelihood is divided by.
        method: The optimiser: "lbfgs" or "newton_cg" (all data, small networks), "sgd" or "adam" (batches, large ones),
            or "auto".
        settings: All other options, see `Settings`: step, deviation, symmetric, tolerance, steps, lr, queries, strict,
            ...

    In a group of processes the functionals are shared out; every process must hold **all** data.

    References:
        McInerney and Kallus 2024, Hessian-free Laplace in Bayesian deep learning.

    >>> net = nn.Linear(1, 1, bias=False).double()
    >>> x = torch.ones(3, 1, dtype=torch.float64)
    >>> hf = HessianFree(net, "regression").fit([(x, x)], polish=True)
    >>> hf.variance_of(lambda f: f(x)[0, 0])
    tensor(0.2500, dtype=torch.float64)
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        *,
        params: Selection = "all",
        prior_precision: PriorSpec = 1.0,
        prior_mean: float | Params = 0.0,
        temperature: float = 1.0,
        method: str = "auto",
        **settings: Any,
    ):
        self.model = checks.module("HessianFree", model)
        self.likelihood = parse_likelihood(likelihood)
        self.params, self.temperature = params, checks.number("temperature", temperature, above=0)
        checks.keywords("HessianFree", settings, [k for k in Settings.__dataclass_fields__ if k != "method"])
        self.settings = Settings(method=method, **settings)
        self.map_report: MapReport | None = None
        self.report: VarianceReport | None = None
        self._prior_precision, self._prior_mean = prior_precision, prior_mean
        self._objective: Objective | None = None
        self._fine_tuner: FineTuner | None = None
        self._origin: Tensor | None = None
        self._centre: Tensor | None = None
        self._watch: WeightsFingerprint | None = None

    # Fitting

    @torch.inference_mode(False)
    def fit(
        self,
        data: Iterable[Any],
        *,
        unpack: Unpack | None = None,
        polish: bool = False,
        force: bool = False,
    ) -> HessianFree:
        """Reads the data and measures how far the trained weights are from the minimum, by fine-tuning a copy with λ = 0.

        Args:
            data: Batches of (x, y). Methods on all data read them once and keep them; sgd and adam go through them
                again and again.
            unpack: A function that turns a batch of another form into (inputs, targets).
            polish: Whether to take the fine-tuned copy as the centre of the posterior, however far it is; the model
                stays as it is.
            force: Whether to go on although the weights are farther from the minimum than ``max_decrement``.

        Returns:
            This object; ``map_report`` says what was measured.

        Raises:
            DataError: The data can be read only once where they are needed again: for sgd and adam, and to find the
                last layer.
            NumericalError: The optimiser does not settle.
            InputError: The weights are not a minimum of this objective, and neither ``polish`` nor ``force`` is given.
        """
        check_modes(self.model)
        _, dtype = check_device(self.model)
        if self.params in ("last_layer", "last_block"):
            checks.repeatable("data", data, f"HessianFree with params={self.params!r}")
        names = select(self.model, self._selection(data, unpack))
        parameters = named_parameters(self.model)
        shapes = {n: tuple(parameters[n].shape) for n in names}
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
        prior = Prior.make(self._prior_precision, self._prior_mean, layers, shapes)
        settings = self.settings.resolved(sum(parameters[n].numel() for n in names), dtype)
        work = settings.dtype or dtype
        if not settings.on_all_data:
            checks.repeatable("data", data, f"HessianFree with method={settings.method!r}")
        objective = Objective(self.model, names, self.likelihood, prior, 1 / self.temperature, work)
        with explain_model_errors(self.model, lambda: unpack_batch(next(iter(data)), unpack).inputs):
            objective.read(data, unpack, keep=settings.on_all_data)
        fine_tuner: FullDataFineTuner | BatchFineTuner
        if settings.on_all_data:
            fine_tuner = FullDataFineTuner(objective, settings)
        else:
            fine_tuner = BatchFineTuner(objective, data, settings, unpack)
        # This is far below any push: what is left of the gradient moves nothing by more than 1e-5 standard deviations.
        goal = 100 * settings.relative_tolerance(work) * float(objective.precision.min().sqrt())
        fine_tuned, before = fine_tuner.control(objective.centre, goal)
        check_common(objective.n_data, float(before.loss[0]))
        control = fine_tuned.control.clone()
        broadcast_([control])
        decrement = float((2 * (before.loss[0] - fine_tuned.control_loss)).clamp_min(0.0).sqrt())
        report = MapReport(
            objective.n_data,
            float(before.loss[0]),
            float(before.gradient.norm()),
            decrement,
            float(fine_tuned.gradient.norm()),
            int(fine_tuned.steps[0]),
            bool(fine_tuned.converged[0]),
            polish,
            settings.method,
        )
        check_minimum(report, float(fine_tuned.control_loss - before.loss[0]), settings, polish, force)
        # Nothing is stored before everything has succeeded: a failed fit leaves the old one.
        self._objective, self._fine_tuner, self.map_report, self.report = objective, fine_tuner, report, None
        self._centre = control if polish else objective.centre
        self._origin = control if settings.on_all_data or polish else objective.centre
        if isinstance(fine_tuner, BatchFineTuner):
            fine_tuner.origin = self._origin
        self._settings = settings
        self._watch = WeightsFingerprint.of(self.model)
        return self

    def _selection(self, data: Iterable[Any], unpack: Unpack | None) -> Selection:
        if self.params not in ("last_layer", "last_block"):
            return self.params
        device, dtype = check_device(self.model)
        batch = next(iter(iterate(data, device=device, dtype=dtype, unpack=unpack)))
        return (find_last_layer if self.params == "last_layer" else find_last_block)(self.model, batch)

    def _fitted(self) -> tuple[Objective, FineTuner, Tensor]:
        if self._objective is None or self._fine_tuner is None or self._origin is None or self._watch is None:
            raise NotFittedError("this Hessian-free posterior has not been fitted yet: call fit(train_loader) first")
        self._watch.check(self.model)
        check_modes(self.model)
        return self._objective, self._fine_tuner, self._origin

    # Variances

    @torch.inference_mode(False)
    def variance_of(self, functional: Functional | Sequence[Functional]) -> Tensor:
        """Returns the variance of a scalar functional ψ of the network under the Laplace posterior with the exact Hessian.

        Args:
            functional: A function of the network f, such as ``lambda f: f(x)[0, 1] - f(x)[0, 0]``, or several, for
                their covariance.

        Returns:
            The variance as a 0-d float64 tensor; for a sequence of Q functionals their covariance [Q, Q]. ``report``
            says how it went.

        Raises:
            InputError: A functional is not scalar or does not depend on the parameters.
            NumericalError: A functional runs away, because the weights are no minimum.
        """
        functionals, single = parse_functionals(functional)
        covariance = self._covariances([functionals], allow_zero=False)[0]
        return covariance[0, 0] if single else covariance

    def _covariances(self, sets: Sequence[FunctionalSet], *, allow_zero: bool) -> list[Tensor]:
        """Returns the covariances [Q, Q] of each set; the rows are shared out over processes."""
        objective, fine_tuner, origin = self._fitted()
        settings = self._settings
        most = settings.members(objective.size)
        jobs = [(s, a, min(a + most, s.count)) for s in sets for a in range(0, s.count, most)]

        def work(job: int) -> list[Tensor]:
            functionals, start, stop = jobs[job]
            part = functionals.part(start, stop)
            pushed = perturb(objective, fine_tuner, part, origin, settings, allow_zero=allow_zero)
            difference = objective.values(pushed.plus, functionals) - objective.values(pushed.minus, functionals)
            rows = (difference / pushed.width[:, None]).double()
            lost = torch.tensor([r.status == "runaway" for r in pushed.reports])
            rows[lost] = float("nan")
            return [rows.cpu(), pack(pushed.reports)]

        like = torch.empty(0, dtype=torch.float64)
        shapes = [[(stop - start, s.count), (stop - start, _NUMBERS)] for s, start, stop in jobs]
        done = distribute_work([float(stop - start) for _, start, stop in jobs], shapes, work, like)
        covariances, reports, place = [], [], 0
        asymmetry, projected = 0.0, 0.0
        for functionals in sets:
            count = -(-functionals.count // most)
            rows = torch.cat([rows for rows, _ in done[place : place + count]])
            reports += [r for _, numbers in done[place : place + count] for r in unpack_reports(numbers)]
            place += count
            scale = rows.diagonal().abs().sqrt().clamp_min(1e-300)
            gaps = ((rows - rows.T) / scale / scale[:, None]).nan_to_num(0.0).abs()
            covariance, clipped = _positive(symmetrise(rows))
            asymmetry, projected = max(asymmetry, float(gaps.max())), max(projected, clipped)
            covariances.append(covariance)
        self.report = VarianceReport(tuple(reports), asymmetry, projected)
        return covariances

    # Predictions

    def _inputs(self, x: Any) -> Batch:
        objective, _, _ = self._fitted()
        batch = unpack_inputs(x).to(objective.device)
        check_inputs(batch.inputs, next(iter(objective.like.values())).dtype)
        if batch.size == 0:
            raise DataError("the inputs hold no example; there is nothing to predict")
        return batch

    def _outputs(self, batch: Batch) -> Tensor:
        """Returns the network's own answer at the posterior's centre, in the dtype of the work."""
        objective, _, _ = self._fitted()
        assert self._centre is not None
        with torch.no_grad(), evaluating(self.model), explain_model_errors(self.model, lambda: batch.inputs):
            outputs = objective.network(self._centre)(batch.inputs)
        check_outputs(outputs, batch.size)
        return outputs

    @torch.inference_mode(False)
    def predict(
        self,
        x: Any,
        *,
        link: str = "auto",
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Predicts with uncertainty, by two fine-tunings for every output of every input.

        Args:
            x: The inputs as the model takes them.
            link: The way from a latent Gaussian to probabilities: auto, mc, probit, pairwise or bridge.
            samples: The number of samples of the link (mc).
            generator: The source of the random samples.

        Returns:
            The prediction, with the full covariance over the outputs of each input at each position. With ``strict=False``,
            what rests on a variance that ran away is NaN.
        """
        batch = self._inputs(x)
        outputs = self._outputs(batch)
        width, classes = outputs[0].numel(), outputs.shape[-1]
        most = max(1, self._settings.members(self._fitted()[0].size) // width)
        sets = [OutputSet(part, width) for part in batch.pieces(most)]
        blocks = []
        for covariance in self._covariances(sets, allow_zero=True):
            split = covariance.reshape(-1, classes, len(covariance) // classes, classes)
            blocks.append(torch.diagonal(split, dim1=0, dim2=2).movedim(-1, 0))  # [positions, C, C]
        cov = torch.cat(blocks).reshape(*outputs.shape, classes).to(outputs.device)
        dtype = next(iter(named_parameters(self.model).values())).dtype
        lost = ~cov.isfinite().all(-1).all(-1)
        cov = torch.where(lost[..., None, None], 0.0, cov)
        prediction = gaussian_prediction(
            self.likelihood, outputs.to(dtype), cov.to(dtype), link=link, samples=samples, generator=generator
        )
        return prediction.without_variance(lost) if bool(lost.any()) else prediction

    @torch.inference_mode(False)
    def joint(self, x: Any) -> tuple[Tensor, Tensor]:
        """Returns mean [N, C] and covariance [N, C, N, C] of the outputs of several inputs together."""
        batch = self._inputs(x)
        outputs = self._outputs(batch)
        if outputs.dim() != 2:
            raise ShapeError(f"a joint covariance is over outputs [N, C]; this model returns {tuple(outputs.shape)}")
        covariance = self._covariances([OutputSet(batch, outputs.shape[1])], allow_zero=True)[0]
        dtype = next(iter(named_parameters(self.model).values())).dtype
        return outputs.to(dtype), covariance.reshape(*outputs.shape, *outputs.shape).to(outputs.device, dtype)

    # One fine-tuning for many inputs

    @torch.inference_mode(False)
    def amortise(self, x: Any, *, signs: Tensor | None = None) -> AmortisedScore:
        """Runs one pair of fine-tunings, pushed at all of ``x`` at once, that gives a score for **any** input.

        The score is a row sum of the covariance, Σ_j s_j C(x, x_j): not a variance. See `AmortisedScore`.

        Args:
            x: The reference inputs.
            signs: The numbers s_j, one per reference input [N]. None means ones.
        """
        objective, fine_tuner, origin = self._fitted()
        assert self._centre is not None
        batch = self._inputs(x)
        return amortise(
            objective,
            fine_tuner,
            origin,
            self._centre,
            self._settings,
            self.likelihood,
            batch,
            self._outputs(batch),
            signs,
        )

    @torch.inference_mode(False)
    def probe_variances(self, x: Any, probes: int = 32, generator: torch.Generator | None = None) -> Probes:
        """Returns unbiased variances of all outputs of ``x`` from pushes with random signs: E[s_j Σ_k s_k C_jk] = C_jj.

        Args:
            x: The inputs as the model takes them.
            probes: The number R of pairs of fine-tunings, however many inputs there are.
            generator: The source of the random signs.
        """
        objective, fine_tuner, origin = self._fitted()
        batch = self._inputs(x)
        outputs = self._outputs(batch)
        return probe_variances(objective, fine_tuner, origin, self._settings, batch, outputs, probes, generator)

    def __repr__(self) -> str:
        state = "not fitted" if self.map_report is None else f"{self.map_report.n_data:g} data"
        return (
            f"HessianFree({type(self.model).__name__}, {self.likelihood!r}, method={self.settings.method!r}, {state})"
        )


def _positive(matrix: Tensor) -> tuple[Tensor, float]:
    """Returns the nearest positive semi-definite matrix, and what was cut off relative to the trace."""
    known = matrix.diagonal().isfinite()
    if not bool(known.all()):  # What ran away is unknown; the rest is a covariance of its own.
        whole = matrix.clone()
        part, cut = _positive(matrix[known][:, known]) if bool(known.any()) else (matrix[:0, :0], 0.0)
        whole[known.unsqueeze(1) & known] = part.flatten()
        return whole, cut
    values, vectors = torch.linalg.eigh(matrix)
    cut = float(-values.clamp_max(0.0).sum() / values.abs().sum().clamp_min(1e-300))
    if float(values[0]) >= 0:
        return matrix, 0.0
    return symmetrise((vectors * values.clamp_min(0.0)) @ vectors.T), cut
