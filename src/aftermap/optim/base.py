"""The core of natural-gradient variational inference as an optimiser: draw weights, read closures, update.

With data loss ℓ̄(w) = (1/N) Σ_n ℓ_n(w), prior N(μ₀, 1/δ), temperature τ and Gaussian q(w) = N(μ, Σ), the optimum of
E_q[N ℓ̄/τ] + KL(q‖p) has the precision N h/τ + δ with h the expected curvature of ℓ̄ (Khan & Nielsen 2018). The optimisers
differ in the structure of Σ (diagonal, Kronecker), in the estimate of h, and in how the mean moves.

One step: for k = 1 … K draw w = μ + σ ε, run the closure, add up [Σg, Σh, n, loss]; sum over processes; put the mean back;
update. Whatever the closure does, the parameters hold the mean afterwards.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from aftermap.curvature.passes.closure import ClosureReader, ClosureReading
from aftermap.curvature.passes.gradient_reader import GradientReader, Reading, loss_of, with_loss
from aftermap.curvature.rules.base import Layout
from aftermap.curvature.structures.base import Block, Factors, Treatment
from aftermap.curvature.structures.diagonal import DiagonalBlock, ggn_diagonal_of_closure
from aftermap.distributed import broadcast_, is_distributed, make_mesh, unsynchronised, unwrapped
from aftermap.errors import AftermapError, InputError, NotFittedError, NumericalWarning, StatisticalWarning
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.models import check_not_sharded
from aftermap.optim.noise import NoiseSource, draw_seed, mix
from aftermap.optim.options import check_group, parameter_groups, parse_schedule, read_options, without_decay
from aftermap.optim.statistics import (
    StepStatistics,
    add_micro_batch,
    check_own_backward,
    from_micro_batches,
    parameter_chunks,
)
from aftermap.params import check_not_complex, named_parameters
from aftermap.posteriors import GaussianPosterior
from aftermap.predictive import TrainedPosterior

__all__ = ["Group", "PerWeight", "VariationalOptimizer"]

_VERSION = 1  # of a saved state
# A group of parameters has so many streams of noise: 0 for training, 1 for evaluation, 2 for the GGN's vectors.
_STREAMS = 4
Group = dict[str, Any]
PerWeight = float | list[Tensor]  # one number for all weights of a group, or a tensor for each parameter


class _LeftOut(Exception):
    """A closure left its batch out by returning None; this never leaves ``step``."""


class VariationalOptimizer(Optimizer, ABC):
    """What all variational optimisers share; abstract.

    Args:
        model: The network; a DistributedDataParallel wrapper is seen through. None means that only parameters are known.
        params: Parameters or groups of parameters; None means everything in the model that requires a gradient.
        options: Option -> value, by the names in `aftermap.optim.options.OPTIONS`. What is missing has its default there.
        generator: The generator that the seed of the private noise is drawn from; None means PyTorch's initial seed.

    Attributes:
        settings: The options that all groups share; those of a group stand in ``param_groups``.
        steps: The number of steps, which also numbers the noise. Skipped steps count.
        updates: The number of steps that moved the mean. The correction of a momentum's bias counts these.
        skipped_steps: The number of steps without an update, because the loss or a gradient was not finite, or there was none.
        skip_without_loss: Whether a closure that returns None leaves its batch out (in Lightning); otherwise it is an error.

    Raises:
        InputError: An option or a parameter is not allowed.
    """

    def __init__(
        self,
        model: nn.Module | None,
        params: Iterable[Any] | None,
        options: Mapping[str, Any],
        generator: torch.Generator | None,
    ):
        name = type(self).__name__
        if model is not None and not isinstance(model, nn.Module):
            raise InputError(
                f"{name} needs the model itself, because it reads per-example gradients at the layers; got "
                f"{type(model).__name__}. Write {name}(model, …), not {name}(model.parameters(), …)"
            )
        defaults, self.settings = read_options(options)
        self.model = model
        self._network = None if model is None else unwrapped(model)
        self._names = {} if self._network is None else {id(p): n for n, p in named_parameters(self._network).items()}
        self.steps = self.updates = self.skipped_steps = 0
        self.loss_kind: str | None = None
        self.skip_without_loss = False
        self._active = self._cleared = self._warned_of_left_gradients = self._has_own_priors = False
        self._micro_batches: StepStatistics | None = None
        self._draws = 0
        self._reader: tuple[tuple[str, ...], ClosureReader | GradientReader] | None = None
        super().__init__(parameter_groups(self._network, params, self.settings.batch_norm), defaults)
        self.mesh = make_mesh(self.settings.sample_groups)
        device = self.param_groups[0]["params"][0].device
        seed = torch.tensor(draw_seed(generator), dtype=torch.int64, device=device)
        if is_distributed():
            broadcast_([seed, *(p.data for g in self.param_groups for p in g["params"])])
        self._noise = NoiseSource(mix(int(seed), 0x5EED), self.mesh.sample_rank, self.mesh.sample_size)

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group; its options are checked, and its parameters must belong to the model."""
        super().add_param_group(without_decay(param_group, self.settings))
        group = self.param_groups[-1]
        try:
            check_group(group)
            check_not_sharded(group["params"])
            check_not_complex(
                {self._names.get(id(p), f"a parameter of shape {tuple(p.shape)}"): p for p in group["params"]}
            )
            unknown = [tuple(p.shape) for p in group["params"] if self.model is not None and id(p) not in self._names]
            if unknown:
                raise InputError(f"a parameter of shape {unknown[0]} does not belong to the model that was given")
        except AftermapError:
            self.param_groups.pop()
            raise
        start = len(self._names)
        if self.model is None:
            self._names.update({id(p): f"parameter {start + i}" for i, p in enumerate(group["params"])})

    # What an optimiser says of itself.

    @abstractmethod
    def _draw_group(self, group: Group, params: list[Tensor], noise: list[Tensor]) -> list[Tensor]:
        """Draws the weights w = μ + σ ε of one group; ``params`` hold the means."""

    @abstractmethod
    def _update_group(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor],
        curvature: list[Tensor],
        scales: tuple[float, float],
    ) -> None:
        """Moves means of one group; the mean gradient is scales[0] · grads, the curvature scales[1] · curvature."""

    def _needs_noise(self, group: Group, parameter: Tensor) -> bool:
        """Tells whether a parameter is drawn now: not where it is deterministic, frozen, or has no curvature yet."""
        return not group["deterministic"] and parameter.requires_grad and "curvature" in self.state[parameter]

    def _blocks(self) -> list[Block]:
        """Returns the curvature N·s of every weight that has a distribution, as blocks of sums over data."""
        n = self.settings.n_effective
        named = [(self._names[id(p)], p) for g in self.param_groups for p in g["params"] if not g["deterministic"]]
        return [DiagonalBlock(m, {m: self.state[p]["curvature"] * n}) for m, p in named if "curvature" in self.state[p]]

    def _make_reader(self, model: nn.Module, names: list[str]) -> ClosureReader:
        """Makes the object that reads per-example statistics of a closure."""
        return ClosureReader(model, names, gradients_only=self.settings.curvature == "ggn")

    def _layouts_to_reduce(self) -> list[Layout]:
        """Returns the layers that may have Kronecker factors in this step, the same on every process."""
        return []

    # Temperature and prior.

    @property
    def temperature(self) -> float:
        """τ at this step."""
        return self.settings.temperature(self.steps)

    def noise_scale(self) -> float:
        """Returns √(τ/N), which multiplies 1/√(s + τδ/N + γ) in σ; the published form has 1/√N."""
        return math.sqrt((1.0 if self.settings.form == "published" else self.temperature) / self.settings.n_effective)

    def effective_prior_precision(self) -> list[float]:
        """Returns δ + Nγ/τ of each group: damping narrows the posterior like a prior, without pulling the mean."""
        tempered = self.settings.n_effective / self.temperature
        return [g["prior_precision"] + tempered * g["damping"] for g in self.param_groups]

    def _prior(self, group: Group, params: Sequence[Tensor]) -> tuple[PerWeight, PerWeight]:
        """Returns (τδ/N, μ₀): numbers, or lists of tensors where a prior per weight was set."""
        factor = self.temperature / self.settings.n_effective
        number, center = factor * group["prior_precision"], group["prior_mean"]
        if not self._has_own_priors or not any("prior_precision" in self.state[p] for p in group["params"]):
            return number, center
        precision, mean = [], []
        for p in params:
            state = self.state[p]
            has_own_prior = "prior_precision" in state
            precision.append(state["prior_precision"] * factor if has_own_prior else torch.full_like(p.data, number))
            mean.append(state["prior_mean"] if has_own_prior else torch.full_like(p.data, center))
        return precision, mean

    def set_prior(self, mean: Mapping[str, Tensor], precision: Mapping[str, Tensor]) -> None:
        """Sets a prior with its own mean and precision for each weight: the posterior of the last task (Nguyen et al. 2018).

        Args:
            mean: Parameter name -> [*shape].
            precision: Parameter name -> [*shape], above 0.

        Raises:
            InputError: A name is unknown, a shape is wrong, or a precision is not above 0.
        """
        params = self._parameters()
        for name, value in precision.items():
            if name not in params:
                raise InputError(f"{name!r} is not trained by this optimiser; it trains {', '.join(list(params)[:5])}…")
            if value.shape != params[name].shape or name not in mean or mean[name].shape != value.shape:
                raise InputError(
                    f"the prior of {name} must have a mean and a precision of shape {tuple(params[name].shape)}"
                )
            if not bool((value > 0).all()) or not bool(torch.isfinite(value).all()):
                raise InputError(f"the prior precision of {name} must be finite and above 0 everywhere")
        for name, value in precision.items():
            state = self.state[params[name]]
            state["prior_precision"] = value.detach().to(params[name]).clone()
            state["prior_mean"] = mean[name].detach().to(params[name]).clone()
        self._has_own_priors = True

    # Parameters, by name.

    def _parameters(self) -> dict[str, Tensor]:
        """Returns every parameter of this optimiser."""
        return {self._names[id(p)]: p for g in self.param_groups for p in g["params"]}

    def _trained(self) -> dict[str, Tensor]:
        """Returns every parameter that requires a gradient now."""
        return {self._names[id(p)]: p for g in self.param_groups for p in g["params"] if p.requires_grad}

    def _momenta(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Returns the momentum of each parameter, which is 0 before its first step."""
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p.data)
        return [self.state[p]["momentum"] for p in params]

    # Drawing weights and reading closures.

    @contextmanager
    def _drawn_weights(self, sample: int, *, sampling: bool, stream: int = 0) -> Iterator[dict[str, Tensor]]:
        """Inside, the parameters hold a draw of the weights; yields the noise by name, where an estimate needs it."""
        if self._active:
            raise InputError("sampled_params() and step() cannot be nested: leave the inner block first")
        noise: dict[str, Tensor] = {}
        means: list[tuple[Tensor, Tensor]] = []
        self._active = True
        try:
            for number, group in enumerate(self.param_groups if sampling else []):
                params = [p for p in group["params"] if self._needs_noise(group, p)]
                if not params:
                    continue
                with torch.no_grad():
                    stream_of_group = _STREAMS * number + stream
                    z = self._noise.normal(params, step=self.steps, sample=sample, stream=stream_of_group)
                    drawn = self._draw_group(group, params, z)
                if self.settings.curvature == "reparametrised":  # for the others noise would only cost memory
                    noise.update({self._names[id(p)]: e for p, e in zip(params, z, strict=True)})
                for parameter, value in zip(params, drawn, strict=True):
                    means.append((parameter, parameter.data))
                    parameter.data = value
                del z, drawn
            yield noise
        finally:
            for parameter, mean in means:
                parameter.data = mean
            # A backward pass that comes too late would use the mean in the place of the draw: now autograd refuses it.
            if means:
                increment_version([p for p, _ in means])
            self._active = False

    def _current_reader(self) -> ClosureReader | GradientReader:
        """Returns the reader for the parameters that are trained now."""
        trained = self._trained()
        names = tuple(trained)
        if self._reader is None or self._reader[0] != names:
            reader: ClosureReader | GradientReader = GradientReader(self._network, trained)
            if self.settings.curvature in ("squares", "ggn") and self._network is not None:
                reader = self._make_reader(self._network, list(names))
            self._reader = (names, reader)
        return self._reader[1]

    def _watching(self, reader: ClosureReader | GradientReader, size: int | None) -> AbstractContextManager[Any]:
        watching = reader.reading(size)
        return watching if self.model is None else unsynchronised(self.model, watching)

    @contextmanager
    def sampled_params(
        self, train: bool = True, *, batch_size: int | None = None, loss_scale: float = 1.0
    ) -> Iterator[VariationalOptimizer]:
        """Inside, the parameters hold a draw of the weights; with ``train`` what a backward pass leaves is collected.

        One block is one (batch or micro-batch, draw). Call ``backward`` inside; do not divide the loss by the number of
        blocks: afterwards ``.grad`` is the mean over the examples of all blocks, to be clipped if wanted, and ``step()``
        without a closure uses it. ``zero_grad()`` outside a block forgets what was collected.

        Args:
            train: Whether the block is a part of training. False only draws weights, for evaluation.
            batch_size: The number of examples in this block, where the model's input does not tell it.
            loss_scale: What the loss was multiplied with before ``backward``: ``scaler.get_scale()`` of a GradScaler.
        """
        sample = self._draws
        if not train:
            with self._drawn_weights(sample, sampling=True, stream=1):
                yield self
            self._draws += 1
            return
        reader = self._current_reader()
        params = self._trained()
        with self._drawn_weights(sample, sampling=self.settings.sampling) as noise:
            before = {n: p.grad for n, p in params.items()}
            try:
                for p in params.values():
                    p.grad = None
                with self._watching(reader, batch_size) as reading:
                    yield self
                moments, no_loss = reading.finish(scale=loss_scale), torch.zeros((), dtype=torch.float64)
                reading.release()
                statistics = StepStatistics.of_closure(moments, reader, noise, no_loss, self.settings)
                grads = {n: p.grad for n, p in params.items() if p.grad is not None}
            except BaseException:
                for n, p in params.items():
                    p.grad = before[n]
                raise
        self._draws += 1
        mean = self.settings.reduction == "mean"
        self._micro_batches = add_micro_batch(self._micro_batches, statistics, params, before, grads, mean=mean)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``.grad``; outside `sampled_params` also what was collected there."""
        super().zero_grad(set_to_none)
        if self._active:
            self._cleared = True
        else:
            self._micro_batches = None

    def _run(self, closure: Callable[[], Any], sample: int, size: int | None) -> tuple[StepStatistics, Any]:
        """Draws weights and runs the closure once; returns its statistics and its result."""
        reader = self._current_reader()
        params, wants_ggn = self._trained(), self.settings.curvature == "ggn"
        self._cleared = False
        with self._drawn_weights(sample, sampling=self.settings.sampling) as noise:
            before = {n: p.grad for n, p in params.items()}
            try:
                for p in params.values():
                    p.grad = None
                with self._watching(reader, size) as reading:
                    result = closure()
                    nothing = result is None and not reading.gradients_came
                    if nothing and self.skip_without_loss and not is_distributed():  # the others would wait for a sum
                        raise _LeftOut
                    loss = loss_of(result)
                    if reading.gradients_came:
                        check_own_backward(ggn=wants_ggn, only_parameters=self.model is None)
                    elif not loss.requires_grad:
                        raise InputError(
                            "the closure's loss does not depend on any parameter that requires a gradient, and the closure ran "
                            "no backward pass. Do not detach the loss, and leave torch.no_grad() out of the closure"
                        )
                    else:
                        reading.differentiate(loss, keep=wants_ggn)
                moments = reading.finish()
                ggn = self._ggn_of(reading, loss.device) if wants_ggn else None
                reading.release()
                grads = {n: p.grad for n, p in params.items() if p.grad is not None}
            finally:
                for n, p in params.items():
                    p.grad = before[n]
            total = loss.detach().to(torch.float64)
            total = total * moments.size if self.settings.reduction == "mean" else total
            statistics = StepStatistics.of_closure(moments, reader, noise, total, self.settings, ggn)
        if loss.grad_fn is not None and loss.grad_fn.name().startswith("NllLoss"):  # PyTorch's cross-entropy
            self.loss_kind = "classification"
        if not self._cleared and not self._warned_of_left_gradients:
            self._warn_of_left_gradients(before)
        if grads:  # the closure ran its own backward pass, and may have clipped
            statistics.replace_grads(grads)
        return statistics, result

    def _ggn_of(self, reading: Reading, device: torch.device) -> dict[str, Tensor] | None:
        """Returns the diagonal of the GGN from the graph of a closure, which must still be alive."""
        settings = self.settings
        if settings.likelihood is None or not isinstance(reading, ClosureReading):
            return None
        generator = self._noise.generator(device, step=self.steps, sample=0, stream=2)
        return ggn_diagonal_of_closure(reading, settings.likelihood, settings.vectors, 1, generator)

    def _warn_of_left_gradients(self, before: Mapping[str, Tensor | None]) -> None:
        """Warns once of gradients that were in ``.grad`` before a step with a closure; zeros count as none."""
        left = [n for n, g in before.items() if g is not None and bool(g.any())]
        if left:
            self._warned_of_left_gradients = True
            warnings.warn(
                f"step(closure) does not use the gradients that were in .grad of {len(left)} parameters ({left[0]}, …) "
                "before: they come from a backward pass outside the closure, and so from no draw of the weights. To "
                "accumulate, put every backward pass into `with opt.sampled_params():` and call step() without a closure; "
                "otherwise call opt.zero_grad() before step or in the closure",
                StatisticalWarning,
                stacklevel=5,
            )

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None, *, batch_size: int | None = None) -> Any:
        """Takes one optimiser step.

        Args:
            closure: A function that runs the model and returns the loss, or a tuple (loss, …) or a mapping with "loss". It need
                not call ``backward`` (cheaper); if it does, ``.grad`` as it leaves it is the gradient, clipped or not. None
                uses what was collected in `sampled_params`. Gradients that are in ``.grad`` before the call are not used (a
                warning says so once) and are there afterwards.
            batch_size: The number of examples in a batch of this process, where the model's input does not tell it.

        Returns:
            What the last draw's closure returned, with the loss averaged over draws and processes (detached); None without
            a closure.

        Raises:
            InputError: The closure returned no loss, a batch is larger than n_data, or nothing was collected.
        """
        if closure is None:
            micro_batches, self._micro_batches = self._micro_batches, None
            mean = self.settings.reduction == "mean"
            self._finish(from_micro_batches(micro_batches, self._trained(), mean=mean))
            return None
        if self._active:
            raise InputError("step() was called inside sampled_params(): leave the block first")
        drawn = self.settings.sampling and any(self._needs_noise(g, p) for g in self.param_groups for p in g["params"])
        try:
            statistics, result = self._run(closure, 0, batch_size)
            for sample in range(1, self.settings.mc_samples if drawn else 1):
                more, result = self._run(closure, sample, batch_size)
                statistics.add(more)
        except _LeftOut:
            self.skipped_steps += 1
            return None
        return with_loss(result, self._finish(statistics))

    @torch.no_grad()
    def _finish(self, statistics: StepStatistics) -> Tensor:
        """Sums over processes, checks, and updates; returns the loss."""
        if is_distributed():
            self._settle(statistics.all_reduce(self._trained(), self._layouts_to_reduce()))
        loss = statistics.loss / statistics.size if self.settings.reduction == "mean" else statistics.loss
        self._draws = 0
        if statistics.is_finite():
            if self.settings.max_grad_norm is not None:
                statistics.clip(self.settings.max_grad_norm)
            self._update(statistics)
            self.updates += 1
        else:
            self.skipped_steps += 1
            warnings.warn(
                "a step was skipped (opt.skipped_steps counts them): the loss or a gradient is not finite. Parameters and "
                "statistics are unchanged. Check the data, or lower the learning rate or the temperature",
                NumericalWarning,
                stacklevel=5,
            )
        self.steps += 1  # new noise, also after a skipped step: the same draw would fail again
        return loss

    def _settle(self, disputed: Sequence[Layout]) -> None:
        """Takes note of the layers for which only some of the processes have Kronecker factors."""

    def _update(self, statistics: StepStatistics) -> None:
        """Updates every parameter that has a gradient and an estimate of its curvature."""
        scales = (statistics.grad_scale / statistics.size, statistics.curvature_scale / statistics.size)
        for group in self.param_groups:
            named = ((self._names[id(p)], p) for p in group["params"] if p.requires_grad)
            used = [(n, p) for n, p in named if n in statistics.grads and n in statistics.curvature]
            for chunk in parameter_chunks(used):  # a chunk's sums are let go
                grads = [statistics.grads.pop(n) for n, _ in chunk]
                curvature = [statistics.curvature.pop(n) for n, _ in chunk]
                self._update_group(group, [p for _, p in chunk], grads, curvature, scales)
                del grads, curvature

    # The posterior.

    def posterior(self, likelihood: str | Likelihood | None = None) -> TrainedPosterior:
        """Returns the Gaussian over the weights as it is now: it predicts, samples, saves, and serves as the next task's prior.

        Its precision is N s/τ + δ + Nγ/τ for a diagonal, and 1/τ N (B ⊗ A) + δ + Nγ/τ for Kronecker factors.

        Args:
            likelihood: The likelihood of predictions. None means the one given to the optimiser, or classification where the
                closure's loss was PyTorch's cross-entropy.

        Raises:
            InputError: The optimiser knows only parameters.
            NotFittedError: There was no step yet.
        """
        model = self._network
        if model is None:
            raise InputError(
                "only parameters were given to the optimiser, so there is no model to predict with. Pass the model: "
                "IVON(model, …)"
            )
        blocks = self._blocks()
        if not blocks:
            raise NotFittedError("no weight has a curvature yet: take a step first")
        settings, n = self.settings, self.settings.n_effective
        # In the published form Σ = 1/(N(s + τδ/N + γ)).
        prior_factor, tau = (self.temperature, 1.0) if settings.form == "published" else (1.0, self.temperature)
        covered = {name for b in blocks for name in b.shapes}
        precision, damping, prior_mean = dict[str, Any](), dict[str, float](), dict[str, Tensor]()
        for group in self.param_groups:
            for p in group["params"]:
                name, state = self._names[id(p)], self.state[p]
                if name in covered:
                    damping[name] = n * group["damping"] / tau
                    precision[name] = (
                        prior_factor * state.get("prior_precision", group["prior_precision"]) + damping[name]
                    )
                    center = state.get("prior_mean", group["prior_mean"])
                    prior_mean[name] = (
                        center if isinstance(center, Tensor) else torch.tensor(float(center), dtype=torch.float64)
                    )
        mean = {name: p.detach().clone() for name, p in named_parameters(model).items() if name in covered}
        structure = "kron" if any(b.kind == "kron" for b in blocks) else "diagonal"
        treatment = {name: Treatment(b.kind, type(self).__name__) for b in blocks for name in b.shapes}
        factors = Factors(structure, tuple(blocks), tuple(mean), n, 0.0, settings.curvature, treatment)
        gaussian = GaussianPosterior.from_factors(
            factors, mean, precision, prior_mean=prior_mean, scale=1.0 / tau, damping=settings.damping_form
        )
        spec = likelihood if likelihood is not None else (settings.likelihood or self.loss_kind)
        parsed = None if spec is None else parse_likelihood(spec)
        return TrainedPosterior(model, gaussian, factors, parsed, type(self).__name__, damping)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Returns PyTorch's state with step, seed and schedules: a resumed run is bit-identical, on any number of processes."""
        return {**super().state_dict(), "aftermap": self._extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state; a state of another optimiser or of other parameters raises and changes nothing."""
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        self._load_extra_state(state_dict["aftermap"])

    def _extra_state(self) -> dict[str, Any]:
        """Returns everything beyond PyTorch's state, in plain numbers and words."""
        return {
            "version": _VERSION,
            "kind": type(self).__name__,
            "steps": self.steps,
            "updates": self.updates,
            "skipped_steps": self.skipped_steps,
            "seed": self._noise.seed,
            "temperature": self.settings.temperature.config(),
        }

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Restores what `_extra_state` gave."""
        self.steps = int(extra["steps"])
        self.updates = int(extra.get("updates", self.steps))  # versions that did not count updates took them for steps
        self.skipped_steps = int(extra["skipped_steps"])
        self._noise = NoiseSource(int(extra["seed"]), self._noise.group, self._noise.groups)
        self.settings = replace(self.settings, temperature=parse_schedule(extra["temperature"], "temperature"))
        self._has_own_priors = any("prior_precision" in state for state in self.state.values())
        self._micro_batches = None
        self._draws = 0

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raises unless a state belongs to this kind of optimiser and to parameters of these shapes."""
        kind, extra = type(self).__name__, state.get("aftermap")
        if not isinstance(extra, Mapping):
            raise InputError(f"this is not a state of {kind}: it was saved by another optimiser. Nothing was changed")
        if extra.get("kind") != kind:
            raise InputError(
                f"this state was saved by {extra.get('kind')}, but this optimiser is {kind}. Nothing was changed"
            )
        if extra.get("version") != _VERSION:
            raise InputError(
                f"this state has version {extra.get('version')}, but {_VERSION} is understood. Nothing was changed"
            )
        sizes = [[len(g["params"]) for g in groups] for groups in (self.param_groups, state["param_groups"])]
        if sizes[0] != sizes[1]:
            raise InputError(
                f"the saved parameter groups hold {sizes[1]} parameters, but this optimiser's hold {sizes[0]}. Nothing was "
                "changed"
            )
        for parameter, number, saved in self._saved_states(state):
            for name in ("momentum", "curvature"):
                if name in saved and saved[name].shape != parameter.shape:
                    raise InputError(
                        f"the saved {name} of parameter {number} has shape {tuple(saved[name].shape)}, but the parameter has "
                        f"shape {tuple(parameter.shape)}. Nothing was changed"
                    )

    def _saved_states(self, state: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any, Mapping[str, Any]]]:
        """Yields each parameter with its number in a saved state and what is saved there."""
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                yield parameter, number, state["state"].get(number, {})
