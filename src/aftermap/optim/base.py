"""The core of natural-gradient variational inference as an optimiser: draw weights, read closures, update.

With data loss ℓ̄(w) = (1/N) Σ_n ℓ_n(w), prior N(μ₀, 1/δ), temperature τ and Gaussian q(w) = N(μ, Σ), the optimum of
E_q[N ℓ̄/τ] + KL(q‖p) has the precision N h/τ + δ with h the expected curvature of ℓ̄ (Khan & Nielsen 2018). Presets
differ in the structure of Σ (diagonal, Kronecker), in the estimate of h, and in how the mean moves.

One step: for k = 1 … K draw w = μ + σ ε, run the closure, add up [Σg, Σh, n, loss]; sum over processes by one message;
put the mean back; update. Whatever the closure does, the parameters hold the mean afterwards.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from aftermap.curvature.passes.closure import ClosureReader
from aftermap.curvature.passes.gradient_reader import GradientReader, loss_of, with_loss
from aftermap.curvature.structures.base import Block, Factors, Treatment
from aftermap.curvature.structures.diagonal import DiagonalBlock
from aftermap.distributed import broadcast_, is_distributed, make_mesh, unsynchronised, unwrapped
from aftermap.errors import InputError, NotFittedError, NumericalWarning, StatisticalWarning
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.optim.noise import NoiseSource, in_chunks, mix
from aftermap.optim.options import Settings, as_generator_seed, check_group, parse_schedule
from aftermap.optim.statistics import Collected, add_block, back_propagate, digest, from_blocks, ggn_of, kind_of_loss
from aftermap.params import named_parameters
from aftermap.posteriors import GaussianPosterior
from aftermap.predictive import TrainedPosterior

__all__ = [
    "LeftOut",
    "VariationalOptimizer",
    "check_state",
    "load_extra",
    "momenta",
    "prior_of",
    "saved_extra",
    "store_prior",
    "trained_posterior",
    "warn_of_left_gradients",
    "warn_of_skipped_step",
]

_VERSION = 1
Group = dict[str, Any]


class LeftOut(Exception):
    """A closure left its batch out by returning None; never leaves ``step``."""


def warn_of_skipped_step() -> None:
    """The step's sums are not finite."""
    warnings.warn(
        "a step was skipped (opt.skipped_steps counts them): the loss or a gradient is not finite. Parameters and "
        "statistics are unchanged. Check the data, or lower the learning rate or the temperature",
        NumericalWarning,
        stacklevel=6,
    )


def warn_of_left_gradients(before: Mapping[str, Tensor | None]) -> bool:
    """Warns of gradients that were in ``.grad`` before a step with a closure, and are not used by it.

    Args:
        before: parameter name -> ``.grad`` before the closure; zeros count as none.

    Returns:
        Whether there were any.
    """
    left = [n for n, g in before.items() if g is not None and bool(g.any())]
    if left:
        warnings.warn(
            f"step(closure) does not use the gradients that were in .grad of {len(left)} parameters ({left[0]}, …) before: "
            "they come from a backward pass outside the closure, and so from no draw of the weights. To accumulate, put every "
            "backward pass into `with opt.sampled_params():` and call step() without a closure; otherwise call "
            "opt.zero_grad() before step or in the closure",
            StatisticalWarning,
            stacklevel=5,
        )
    return bool(left)


def prior_of(group: Mapping[str, Any], params: Sequence[Tensor], state: Any, factor: float) -> tuple[Any, Any]:
    """(factor · δ, μ₀): numbers, or lists of tensors where a prior per weight was set in the group; factor is τ/N."""
    if not params or not any("prior_precision" in state.get(p, {}) for p in group["params"]):
        return factor * group["prior_precision"], group["prior_mean"]
    precision, mean = [], []
    for p in params:
        own = state[p]
        known = "prior_precision" in own
        precision.append(
            own["prior_precision"] * factor if known else torch.full_like(p, factor * group["prior_precision"])
        )
        mean.append(own["prior_mean"] if known else torch.full_like(p, group["prior_mean"]))
    return precision, mean


def store_prior(
    params: Mapping[str, Tensor], state: Any, mean: Mapping[str, Tensor], precision: Mapping[str, Tensor]
) -> None:
    """Checks a prior per weight and keeps it with the parameters' state."""
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
        parameter = params[name]
        state[parameter]["prior_precision"] = value.detach().to(parameter).clone()
        state[parameter]["prior_mean"] = mean[name].detach().to(parameter).clone()


def momenta(optimizer: Optimizer, params: Sequence[Tensor]) -> list[Tensor]:
    """The momentum of each parameter, 0 before its first step."""
    states = [optimizer.state[p] for p in params]
    for p, state in zip(params, states, strict=True):
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
    return [state["momentum"] for state in states]


def saved_extra(optimizer: Any) -> dict[str, Any]:
    """Everything beyond PyTorch's state, in plain numbers and words."""
    return {
        "version": _VERSION,
        "kind": type(optimizer).__name__,
        "steps": optimizer.steps,
        "skipped_steps": optimizer.skipped_steps,
        "seed": optimizer._noise.seed,
        "temperature": optimizer.settings.temperature.config(),
    }


def check_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raises unless a state belongs to this kind of optimiser and to parameters of these shapes."""
    kind = type(optimizer).__name__
    extra = state.get("aftermap")
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
    ours, theirs = optimizer.param_groups, state["param_groups"]
    sizes = [len(g["params"]) for g in ours], [len(g["params"]) for g in theirs]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"the saved parameter groups hold {sizes[1]} parameters, but this optimiser's hold {sizes[0]}. Nothing was changed"
        )
    for group, saved in zip(ours, theirs, strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            for name in ("momentum", "curvature"):
                value = state["state"].get(key, {}).get(name)
                if value is not None and value.shape != parameter.shape:
                    raise InputError(
                        f"the saved {name} of parameter {key} has shape {tuple(value.shape)}, but the parameter has shape "
                        f"{tuple(parameter.shape)}. Nothing was changed"
                    )


def load_extra(optimizer: Any, extra: Mapping[str, Any]) -> None:
    """Restores step, seed and schedules."""
    optimizer.steps = int(extra["steps"])
    optimizer.skipped_steps = int(extra["skipped_steps"])
    optimizer._noise = NoiseSource(int(extra["seed"]), optimizer._noise.group)
    optimizer.settings = replace(optimizer.settings, temperature=parse_schedule(extra["temperature"], "temperature"))
    optimizer._own_priors = any("prior_precision" in own for own in optimizer.state.values())
    optimizer._held = None
    optimizer._draws = 0


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


class VariationalOptimizer(Optimizer, ABC):
    """What all presets share; abstract.

    Args:
        model: the network (DistributedDataParallel is seen through); None: only parameters are known.
        groups: parameter groups.
        defaults: of the groups: lr, momentum, new_curvature_weight, prior_precision, prior_mean, damping, deterministic.
        settings: everything else.
        generator: gives the seed of the private noise.

    Attributes:
        skip_without_loss: a closure that returns None leaves its batch out (in Lightning); otherwise it is an error.
    """

    def __init__(
        self,
        model: nn.Module | None,
        groups: list[Group],
        defaults: dict[str, Any],
        settings: Settings,
        generator: torch.Generator | None,
    ):
        self.model = model
        self.settings = settings
        self._inner = None if model is None else unwrapped(model)
        self._known = {} if self._inner is None else {id(p): n for n, p in named_parameters(self._inner).items()}
        self.steps = self.skipped_steps = 0
        self.loss_kind: str | None = None
        self.skip_without_loss = False
        self._active = self._cleared = self._warned_of_left = self._own_priors = False
        self._held: Collected | None = None
        self._draws = 0
        self._reader: tuple[tuple[str, ...], ClosureReader | GradientReader] | None = None
        super().__init__(groups, defaults)
        self.mesh = make_mesh(settings.sample_groups)
        device = self.param_groups[0]["params"][0].device
        seed = torch.tensor(as_generator_seed(generator), dtype=torch.int64, device=device)
        if is_distributed():
            broadcast_([seed, *(p.data for g in self.param_groups for p in g["params"])])
        self._noise = NoiseSource(mix(int(seed), 0x5EED), self.mesh.sample_rank)

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group; its numbers are checked, and its parameters must belong to the model."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            unknown = [tuple(p.shape) for p in group["params"] if self.model is not None and id(p) not in self._known]
            if unknown:
                raise InputError(f"a parameter of shape {unknown[0]} does not belong to the model that was given")
        except InputError:
            self.param_groups.pop()
            raise
        start = len(self._known)
        if self.model is None:
            self._known.update({id(p): f"parameter {start + i}" for i, p in enumerate(group["params"])})

    @abstractmethod
    def _draw_group(self, group: Group, params: list[Tensor], noise: list[Tensor]) -> list[Tensor]:
        """Weights w = μ + σ ε of one group; ``params`` hold the means."""

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
        """Whether a parameter is drawn now: not where it is deterministic, frozen, or has no curvature yet."""
        return not group["deterministic"] and parameter.requires_grad and "curvature" in self.state[parameter]

    @property
    def temperature(self) -> float:
        """τ at this step."""
        return self.settings.temperature(self.steps)

    def noise_scale(self) -> float:
        """√(τ/N): what multiplies 1/√(s + τδ/N + γ) in σ; the poster's form has 1/√N."""
        return math.sqrt((1.0 if self.settings.form == "poster" else self.temperature) / self.settings.n_effective)

    def effective_prior_precision(self) -> list[float]:
        """δ + Nγ/τ of each group: damping narrows the posterior like a prior, without pulling the mean."""
        tempered = self.settings.n_effective / self.temperature
        return [g["prior_precision"] + tempered * g["damping"] for g in self.param_groups]

    def _prior(self, group: Group, params: Sequence[Tensor]) -> tuple[Any, Any]:
        """(τδ/N, μ₀): numbers, or lists of tensors where a prior per weight was set."""
        factor = self.temperature / self.settings.n_effective
        if not self._own_priors:  # asked many times in a step: no look at every parameter's state
            return factor * group["prior_precision"], group["prior_mean"]
        return prior_of(group, params, self.state, factor)

    def set_prior(self, mean: Mapping[str, Tensor], precision: Mapping[str, Tensor]) -> None:
        """A prior with its own mean and precision for each weight: the posterior of the last task (Nguyen et al. 2018).

        Args:
            mean: parameter name -> [*shape].
            precision: parameter name -> [*shape], above 0.

        Raises:
            InputError: an unknown name, a wrong shape, or a precision that is not above 0.
        """
        by_name = {self._known[id(p)]: p for g in self.param_groups for p in g["params"]}
        store_prior(by_name, self.state, mean, precision)
        self._own_priors = True

    def _trained(self) -> dict[str, Tensor]:
        """Every parameter that requires a gradient now, by name."""
        return {self._known[id(p)]: p for g in self.param_groups for p in g["params"] if p.requires_grad}

    @contextmanager
    def _drawn(self, sample: int, *, sampling: bool, stream: int = 0) -> Iterator[dict[str, Tensor]]:
        """Inside, the parameters hold a draw of the weights; yields the noise by name."""
        if self._active:
            raise InputError("sampled_params() and step() cannot be nested: leave the inner block first")
        noise: dict[str, Tensor] = {}
        saved: list[tuple[Tensor, Tensor]] = []
        self._active = True
        try:
            if sampling:
                for number, group in enumerate(self.param_groups):
                    params = [p for p in group["params"] if self._needs_noise(group, p)]
                    if not params:
                        continue
                    with torch.no_grad():
                        z = self._noise.normal(params, step=self.steps, sample=sample, stream=4 * number + stream)
                        values = self._draw_group(group, params, z)
                    if self.settings.curvature == "reparametrised":  # for the others noise would only cost memory
                        noise.update({self._known[id(p)]: e for p, e in zip(params, z, strict=True)})
                    for parameter, value in zip(params, values, strict=True):
                        saved.append((parameter, parameter.data))
                        parameter.data = value
                    del z, values
            yield noise
        finally:
            for parameter, mean in saved:
                parameter.data = mean
            # A backward pass that comes too late would use the mean in the place of the draw: now autograd refuses it.
            if saved:
                increment_version([p for p, _ in saved])
            self._active = False

    @contextmanager
    def sampled_params(
        self, train: bool = True, *, batch_size: int | None = None, loss_scale: float = 1.0
    ) -> Iterator[VariationalOptimizer]:
        """Inside, the parameters hold a draw of the weights; with ``train`` what a backward pass leaves is collected.

        One block is one (batch or micro-batch, draw). Call ``backward`` inside; do not divide the loss by the number of
        blocks: afterwards ``.grad`` is the mean over the examples of all blocks, to be clipped if wanted, and ``step()``
        without a closure uses it. ``zero_grad()`` outside a block forgets what was collected.

        Args:
            train: False: only draw, for evaluation.
            batch_size: examples in this block, where the model's input does not tell.
            loss_scale: what the loss was multiplied with before ``backward``: ``scaler.get_scale()`` of a GradScaler.
        """
        sample = self._draws
        if not train:
            with self._drawn(sample, sampling=True, stream=1):
                yield self
            self._draws += 1
            return
        reader = self._read()
        params = self._trained()
        with self._drawn(sample, sampling=self.settings.sampling) as noise:
            before = {n: p.grad for n, p in params.items()}
            try:
                for p in params.values():
                    p.grad = None
                with self._watching(reader, batch_size) as reading:
                    yield self
                moments, zero = reading.finish(scale=loss_scale), torch.zeros((), dtype=torch.float64)
                reading.release()
                part = digest(moments, noise, zero, self.settings, None, known=self.model is not None)
                grads = {n: p.grad for n, p in params.items() if p.grad is not None}
            except BaseException:
                for n, p in params.items():
                    p.grad = before[n]
                raise
        self._draws += 1
        self._held = add_block(self._held, part, params, before, grads, mean=self.settings.reduction == "mean")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``.grad``; outside `sampled_params` also what was collected there."""
        super().zero_grad(set_to_none)
        if self._active:
            self._cleared = True
        else:
            self._held = None

    def _read(self) -> ClosureReader | GradientReader:
        """The reader for the parameters that are trained now."""
        trained = self._trained()
        names = tuple(trained)
        if self._reader is None or self._reader[0] != names:
            if self.settings.curvature in ("squares", "ggn") and self._inner is not None:
                made: ClosureReader | GradientReader = self._make_watcher(self._inner, list(names))
            else:
                made = GradientReader(self._inner, trained)
            self._reader = (names, made)
        return self._reader[1]

    def _make_watcher(self, model: nn.Module, names: list[str]) -> ClosureReader:
        return ClosureReader(model, names, gradients_only=self.settings.curvature == "ggn")

    def _watching(self, reader: ClosureReader | GradientReader, size: int | None) -> AbstractContextManager[Any]:
        watching = reader.reading(size)
        return watching if self.model is None else unsynchronised(self.model, watching)

    def _run(self, closure: Callable[[], Any], sample: int, size: int | None) -> tuple[Collected, Any]:
        """One draw, one closure."""
        reader = self._read()
        params = self._trained()
        self._cleared = False
        with self._drawn(sample, sampling=self.settings.sampling) as noise:
            before = {n: p.grad for n, p in params.items()}
            try:
                for p in params.values():
                    p.grad = None
                with self._watching(reader, size) as reading:
                    result = closure()
                    nothing = result is None and not reading.gradients_came
                    if nothing and self.skip_without_loss and not is_distributed():  # the others would wait for a sum
                        raise LeftOut
                    loss = loss_of(result)
                    ggn = self.settings.curvature == "ggn"
                    back_propagate(reading, loss, ggn=ggn, only_parameters=self.model is None)
                moments = reading.finish()
                curvature = ggn_of(reading, self.settings, self._noise, self.steps, loss.device) if ggn else None
                reading.release()
                given = {n: p.grad for n, p in params.items() if p.grad is not None}
            finally:
                for n, p in params.items():
                    p.grad = before[n]
            total = loss.detach().to(torch.float64)
            total = total * moments.size if self.settings.reduction == "mean" else total
            part = digest(moments, noise, total, self.settings, curvature, known=self.model is not None)
            self.loss_kind = kind_of_loss(loss) or self.loss_kind
        if not self._cleared and not self._warned_of_left:
            self._warned_of_left = warn_of_left_gradients(before)
        if given:  # the closure ran its own backward pass, and may have clipped
            part.replace_grads(given)
        return part, result

    def step(self, closure: Callable[[], Any] | None = None, *, batch_size: int | None = None) -> Any:
        """One optimiser step.

        Args:
            closure: runs the model and returns the loss, or a tuple (loss, …) or a mapping with "loss". It need not call
                ``backward`` (cheaper); if it does, ``.grad`` as it leaves it is the gradient, clipped or not. None: uses
                what was collected in `sampled_params`. Gradients that are in ``.grad`` before the call are not used (a
                warning says so once) and are there afterwards.
            batch_size: examples in a batch of this process, where the model's input does not tell.

        Returns:
            What the last draw's closure returned, with the loss averaged over draws and processes (detached); None without
            a closure.

        Raises:
            InputError: the closure returned no loss, a batch larger than n_data, or nothing was collected.
        """
        if closure is None:
            held, self._held = self._held, None
            self._finish(from_blocks(held, self._trained(), mean=self.settings.reduction == "mean"))
            return None
        if self._active:
            raise InputError("step() was called inside sampled_params(): leave the block first")
        drawn = self.settings.sampling and any(self._needs_noise(g, p) for g in self.param_groups for p in g["params"])
        total: Collected | None = None
        result: Any = None
        for sample in range(self.settings.mc_samples if drawn else 1):
            try:
                part, result = self._run(closure, sample, batch_size)
            except LeftOut:
                self.skipped_steps += 1
                return None
            if total is None:
                total = part
            else:
                total.add(part)
        if total is None:
            return None
        loss = self._finish(total)
        return with_loss(result, loss)

    @torch.no_grad()
    def _finish(self, total: Collected) -> Tensor:
        """Sums over processes, checks, and updates."""
        if is_distributed():
            total.all_reduced(self._trained(), self._factor_shapes())
        loss = total.loss / total.size if self.settings.reduction == "mean" else total.loss
        self._draws = 0
        if not total.is_finite():
            self.skipped_steps += 1
            warn_of_skipped_step()
            self.steps += 1  # new noise: the same draw would fail again
            return loss
        if self.settings.max_grad_norm is not None:
            total.clip(self.settings.max_grad_norm)
        self._update(total)
        self.steps += 1
        return loss

    def _factor_shapes(self) -> dict[int, tuple[Tensor, Tensor, int]]:
        """Kronecker factors that every process must send; none for a diagonal structure."""
        return {}

    def _update(self, total: Collected) -> None:
        scales = (total.grad_scale / total.size, total.curvature_scale / total.size)
        for group in self.param_groups:
            named = ((self._known[id(p)], p) for p in group["params"] if p.requires_grad)
            used = [(n, p) for n, p in named if n in total.grads and n in total.curvature]
            for part in in_chunks(used):  # working memory is that of a part, and a part's sums are let go
                grads, curvature = ([sums.pop(n) for n, _ in part] for sums in (total.grads, total.curvature))
                self._update_group(group, [p for _, p in part], grads, curvature, scales)
                del grads, curvature

    def posterior(self, likelihood: str | Likelihood | None = None) -> TrainedPosterior:
        """The Gaussian over the weights as it is now: it predicts, samples, saves, and serves as the next task's prior.

        Args:
            likelihood: for predictions; None: the one given to the optimiser, or classification where the closure's loss was
                PyTorch's cross-entropy.
        """
        return trained_posterior(self, likelihood)

    def _blocks(self) -> list[Block]:
        """The curvature N·s of every weight that has a distribution, as blocks of sums over data."""
        n = self.settings.n_effective
        owned = [(self._known[id(p)], p) for g in self.param_groups for p in g["params"] if not g["deterministic"]]
        return [DiagonalBlock(m, {m: self.state[p]["curvature"] * n}) for m, p in owned if "curvature" in self.state[p]]

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's state with step, seed and schedules: a resumed run is bit-identical, on any number of processes."""
        return {**super().state_dict(), "aftermap": self._extra()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state; a state of another optimiser or of other parameters raises and changes nothing."""
        check_state(self, state_dict)
        super().load_state_dict(state_dict)
        self._load_extra(state_dict["aftermap"])

    def _extra(self) -> dict[str, Any]:
        return saved_extra(self)

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        load_extra(self, extra)
