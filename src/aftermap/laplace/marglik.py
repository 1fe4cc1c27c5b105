"""Training by evidence: weights by their log joint, priors, noise and temperature by the Laplace evidence, in turn.

Every few epochs the curvature at the present weights gives the evidence; MacKay's fixed point moves the prior
precision of each layer and the noise there, and training goes on under them. No validation data are used. What comes back is
the point of the best evidence, not the last one.

The temperature T of p(y | f) = softmax(f/T) or sigmoid(f/T) can be found by the evidence, too.

A power of the likelihood cannot be learned: it leaves no normalised density, and its evidence always prefers a smaller power. Dividing
the outputs does leave one. The Gauss-Newton matrix depends on T through every Λ(f/T)/T², so the evidence at another T is that of
a new pass over the data: nothing is extrapolated.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.batches import Batch, Unpack, iterate
from aftermap.errors import DataError, NumericalError, StatisticalWarning
from aftermap.laplace.evidence import EvidenceResult
from aftermap.laplace.laplace import Laplace
from aftermap.laplace.stationarity import Stationarity, check_stationarity, warn_unless_stationary
from aftermap.laplace.tune import tune_by_evidence
from aftermap.likelihoods import Likelihood, at_temperature, parse_likelihood, temperature_of
from aftermap.models import call_model, check_device
from aftermap.params import Selection, named_parameters, select
from aftermap.posteriors.base import split_noise, with_noise
from aftermap.progress import progress as bar

__all__ = [
    "PRIORS",
    "TEMPERATURES",
    "EvidenceRecord",
    "EvidenceTraining",
    "OptimizerFactory",
    "TemperatureSearch",
    "train_by_evidence",
    "warn_at_the_end",
]

TEMPERATURES = (0.05, 20.0)
_FIRST, _LEAST, _MOST = 0.3, 0.03, math.log(2.0)  # These are steps in log T.
PRIORS = ("layerwise", "scalar")
_SMALL = 300  # Up to this many parameters, or data × outputs, the exact Gauss-Newton matrix is quick.
_IMPROVED = 1e-3  # A smaller rise of the evidence, in nats, is not worth waiting for.
OptimizerFactory = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class TemperatureSearch:
    """A search for the maximum of the evidence in log T by parabolas through three values, whose spread follows the last step.

    Attributes:
        spread: The distance h of the outer two values from the present T, in log T.
    """

    spread: float = _FIRST

    def improve(self, start: Laplace, fitted: Callable[[float], Laplace]) -> Laplace:
        """Returns the best of the present T, T·e^±h and the top of their parabola, with prior precisions fixed.

        Args:
            start: The approximation at the present temperature.
            fitted: A function that makes the same approximation at another temperature, with the same prior, by a pass
                over the data. It is called up to three times.

        Returns:
            The approximation with the largest evidence, which is never worse than the start.
        """
        now = temperature_of(start.likelihood)
        assert now is not None  # at_temperature refused all others.
        middle = math.log(now)
        tried: dict[float, tuple[float, Laplace]] = {middle: (float(start.log_evidence()), start)}

        def value(at: float) -> float:
            at = min(max(at, math.log(TEMPERATURES[0])), math.log(TEMPERATURES[1]))
            if at not in tried:
                laplace = fitted(math.exp(at))
                tried[at] = float(laplace.log_evidence()), laplace
            return tried[at][0]

        h = self.spread
        low, centre, high = value(middle - h), value(middle), value(middle + h)
        bend = low + high - 2 * centre
        onwards = 2 * h if high > low else -2 * h  # This is for where there is no top in sight.
        step = 0.5 * h * (low - high) / bend if bend < 0 else onwards
        value(middle + min(max(step, -_MOST), _MOST))
        best = max((at for at in tried if math.isfinite(tried[at][0])), key=lambda at: tried[at][0], default=middle)
        self.spread = min(max(abs(best - middle), _LEAST), _FIRST)
        return tried[best][1]


def warn_at_the_end(temperature: float) -> None:
    """Warns of a temperature at the end of its range, which says only that there is no maximum."""
    if TEMPERATURES[0] * 1.001 < temperature < TEMPERATURES[1] * 0.999:
        return
    why = (
        "the outputs say nothing about the labels yet: train longer, or look later (burn_in=)"
        if temperature > 1
        else "the network separates the training data, so that their curvature vanishes with T: leave temperature=False, and scale the "
        "outputs on held-out data instead"
    )
    warnings.warn(
        f"the temperature went to {temperature:g}, the end of its range, so the evidence has no maximum in it; most likely {why}",
        StatisticalWarning,
        stacklevel=3,
    )


@dataclass(frozen=True)
class EvidenceRecord:
    """The state after one look at the evidence.

    Attributes:
        epoch: The number of epochs that were done.
        train_loss: The mean negative log-likelihood of a datum during the last epoch, under the noise of that time.
        log_evidence: The evidence of the weights at this epoch, under the precisions and the noise that were found for
            them.
        precision: The prior precision of each layer.
        noise: The noise σ of a regression; None where there is none.
        temperature: The fixed number that the log-likelihood is divided by.
        effective_parameters: The number γ of parameters that the data determine.
        output_temperature: The temperature T of softmax(f/T) or sigmoid(f/T); None for other likelihoods.
    """

    epoch: int
    train_loss: float
    log_evidence: float
    precision: Mapping[str, float]
    noise: float | None
    temperature: float
    effective_parameters: float
    output_temperature: float | None = None


@dataclass(frozen=True)
class EvidenceTraining:
    """The network, posterior and history that training by evidence gave.

    Attributes:
        model: The network with the weights of the best evidence, in eval mode.
        laplace: The posterior of the model, fitted and tuned.
        history: One record per look at the evidence.
        losses: The mean training loss of every epoch.
        best: The record of the point that came back.
        stationarity: The distance of the weights from a mode of their log joint.
    """

    model: nn.Module
    laplace: Laplace
    history: list[EvidenceRecord]
    losses: list[float]
    best: EvidenceRecord
    stationarity: Stationarity

    @property
    def log_evidence(self) -> float:
        """The log evidence of the best point."""
        return self.best.log_evidence

    @property
    def curves(self) -> dict[str, list[float]]:
        """The history as columns, for a figure.

        They are epoch, train_loss, log_evidence, effective_parameters, temperature, noise (regression), output_temperature
        (classification) and a "precision: layer" each.
        """
        names = ("epoch", "train_loss", "log_evidence", "effective_parameters", "temperature")
        columns = {name: [float(getattr(r, name)) for r in self.history] for name in names}
        for name in ("noise", "output_temperature"):
            if getattr(self.best, name) is not None:
                columns[name] = [float(getattr(r, name)) for r in self.history]
        for layer in self.best.precision:
            columns[f"precision: {layer}"] = [r.precision[layer] for r in self.history]
        return columns


@torch.inference_mode(False)
def train_by_evidence(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: str | Likelihood,
    *,
    epochs: int = 500,
    lr: float = 1e-2,
    optimizer: OptimizerFactory | None = None,
    burn_in: int = 0,
    frequency: int = 20,
    hyper_steps: int = 20,
    structure: str = "auto",
    params: Selection = "all",
    prior: str = "layerwise",
    prior_precision: float = 0.01,
    noise: bool = True,
    temperature: bool = False,
    likelihood_power: float = 1.0,
    patience: int | None = None,
    rank: int = 50,
    unpack: Unpack | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> EvidenceTraining:
    r"""Trains a network and its prior precisions and noise together, on the training data alone.

    The weights descend the negative log joint −p·Σ log p(y_n|f_n) + ½‖θ‖²_{P₀}, divided by N·p/σ² so that a learning rate means
    what it means in ordinary training. Every ``frequency`` epochs, and at the end, hyperparameters move to the fixed point
    τ_ℓ = γ_ℓ/‖θ_ℓ‖², σ² = SSE/(N·D − γ) of the evidence. The model is trained in place: train mode in the epochs, eval mode for the
    curvature and on return. After an error its old weights are back.

    Args:
        model: The network, with outputs [N, ..., C].
        data: Batches that can be passed over again and again: a DataLoader or a list.
        likelihood: The likelihood: "classification", "binary", "regression", "counts", or an object from
            `aftermap.likelihoods`.
        epochs: The number of passes over the data.
        lr: The learning rate of Adam, which falls to a hundredth along a cosine, if ``optimizer`` is None.
        optimizer: A function of the parameters that makes an optimiser, without weight decay, whose part the prior
            takes.
        burn_in: The number of epochs before the first look at the evidence.
        frequency: The number of epochs between looks. On small networks a look costs as much as 20 (kron) to 75
            (low_rank) steps of Adam.
        hyper_steps: The number of iterations of the fixed point at each look.
        structure: The structure of the curvature; see `Laplace`. "auto" means the exact Gauss-Newton matrix for up to
            300 parameters ("full") or 300 data × outputs ("low_rank" of that size); above, "kron", which penalises
            every model more.
        params: The weights that are under the prior and uncertain.
        prior: The form of the prior: "layerwise" (a precision per layer) or "scalar" (one for all).
        prior_precision: The precision to start with. It is weak: under a strong one, or a noise far too large, the
            first evidence may be best without any weights at all, and a layer that was switched off stays so.
        noise: Whether to learn the noise of a regression.
        temperature: Whether to learn T of softmax(f/T) or sigmoid(f/T), by the evidence of up to three more passes at
            each look, each with its own curvature. It is off because under prior="layerwise" T says nothing that the
            last layer and its precision do not say (T, W, τ and 1, W/T, τT² are the same model), and where the network
            separates its training data the evidence may rise without end as T falls, which is warned of. It pays with
            prior="scalar", or where ``params`` leaves the last layer out.
        likelihood_power: The factor p of the log-likelihood, in training and in the posterior alike. It stays fixed: an
            evidence of a likelihood that is not normalised says nothing about its power.
        patience: The number of looks without a better evidence after which training ends. None never ends early.
        rank: The rank of structure="low_rank", if that was asked for.
        unpack: A function that turns a batch of another form into (inputs, targets).
        generator: The source of the random vectors of the curvature.
        progress: Whether to show a progress bar. None shows it on a terminal.

    Returns:
        Model, posterior and history at the best evidence.

    Raises:
        InputError: A number is out of range, the prior or structure is unknown, or the likelihood has no temperature to
            learn.
        DataError: The data cannot be passed over again.
        NumericalError: The training diverged.

    Warns:
        StatisticalWarning: The weights are far from a mode, so that the evidence is not to be trusted, or the
            temperature has no maximum; the message says what to do.

    >>> x = torch.linspace(-1, 1, 30)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 1))
    >>> found = train_by_evidence(net, [(x, x + 0.1 * (50 * x).sin())], "regression", epochs=200, lr=0.1, frequency=50)
    >>> [record.epoch for record in found.history]
    [50, 100, 150, 200]

    References:
        Immer et al. 2021, Scalable marginal likelihood estimation for model selection in deep learning, algorithm 1; MacKay 1992.

    Differs from the paper: the fixed point replaces Adam on log precisions, and needs no step size.
    """
    _check(epochs, lr, burn_in, frequency, hyper_steps, prior, prior_precision, likelihood_power, patience, data)
    parsed = parse_likelihood(likelihood)
    if temperature:
        at_temperature(parsed, 1.0)  # This refuses a likelihood without one.
    run = _Run(
        model,
        data,
        *split_noise(parsed),
        select(model, params),
        likelihood_power,
        unpack,
        dict.fromkeys(named_parameters(model), prior_precision),
        TemperatureSearch() if temperature else None,
    )
    before, modes = copy.deepcopy(model.state_dict()), [(m, m.training) for m in model.modules()]
    options: dict[str, Any] = {"structure": structure, "params": params, "rank": rank}
    try:
        stepper, schedule = _optimiser(model, optimizer, lr, epochs)
        best: tuple[EvidenceRecord, Laplace, dict[str, Tensor]] | None = None
        history: list[EvidenceRecord] = []
        losses: list[float] = []
        waited = 0
        for epoch in bar(range(1, epochs + 1), description="training by evidence", enabled=progress):
            losses.append(run.epoch(stepper, epoch))
            if schedule is not None:
                schedule.step()
            if epoch != epochs and (epoch <= burn_in or epoch % frequency):
                continue
            record, laplace = run.look(epoch, losses[-1], options, prior == "layerwise", noise, hyper_steps, generator)
            history.append(record)
            waited = 0 if best is None or record.log_evidence > best[0].log_evidence + _IMPROVED else waited + 1
            if best is None or record.log_evidence > best[0].log_evidence:
                best = (record, laplace, copy.deepcopy(model.state_dict()))
            if patience is not None and waited >= patience:
                break
        assert best is not None  # The last epoch looks.
        model.load_state_dict(best[2])
        reached = check_stationarity(best[1], data, unpack=unpack)
    except BaseException:
        model.load_state_dict(before)
        for module, training in modes:
            module.training = training
        raise
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    model.eval()
    warn_unless_stationary(reached)
    if temperature and best[0].output_temperature is not None:
        warn_at_the_end(best[0].output_temperature)
    return EvidenceTraining(model, best[1], history, losses, best[0], reached)


def _optimiser(
    model: nn.Module, factory: OptimizerFactory | None, lr: float, epochs: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]:
    """Returns the user's own optimiser, or Adam with a falling rate, since a constant rate does not settle at a mode."""
    if factory is not None:
        return factory(model.parameters()), None
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, eta_min=lr / 100)


def _check(
    epochs: int,
    lr: float,
    burn_in: int,
    frequency: int,
    hyper_steps: int,
    prior: str,
    prior_precision: float,
    likelihood_power: float,
    patience: int | None,
    data: Iterable[Any],
) -> None:
    for name, count in {"epochs": epochs, "frequency": frequency, "hyper_steps": hyper_steps}.items():
        checks.count(name, count)
    if patience is not None:
        checks.count("patience", patience)
    checks.count("burn_in", burn_in, 0)
    positive = {"lr": lr, "prior_precision": prior_precision, "likelihood_power": likelihood_power}
    for name, number in positive.items():
        checks.number(name, number, above=0)
    checks.choice("prior", prior, PRIORS)
    if isinstance(data, Iterator):
        raise DataError(
            f"data is a one-shot {type(data).__name__}, but training goes through it {epochs} times. Pass a DataLoader or a list"
        )


@dataclass
class _Run:
    """The noise and precisions that change while training."""

    model: nn.Module
    data: Iterable[Any]
    base_likelihood: Likelihood
    noise: Tensor
    names: list[str]
    likelihood_weight: float
    unpack: Unpack | None
    precision: dict[str, float]
    search: TemperatureSearch | None = None
    n_data: float = field(default=0.0, init=False)
    n_outputs: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        # This counts the data that are seen, not len(dataset), since a loader may drop or repeat examples.
        self.n_data = float(sum(_count(b) for b in self.batches()))

    def batches(self) -> Iterable[Batch]:
        device, dtype = check_device(self.model)
        return iterate(self.data, device=device, dtype=dtype, unpack=self.unpack)

    def _structure(self, structure: str, rank: int) -> dict[str, Any]:
        if structure != "auto":
            return {"structure": structure, "rank": rank}
        size = sum(named_parameters(self.model)[n].numel() for n in self.names)
        if size <= _SMALL:
            return {"structure": "full"}
        numbers = self.n_outputs * sum(b.size for b in self.batches()) if self.n_outputs <= _SMALL else math.inf
        return {"structure": "low_rank", "rank": int(numbers)} if numbers <= _SMALL else {"structure": "kron"}

    def epoch(self, stepper: torch.optim.Optimizer, number: int) -> float:
        """Makes one pass over the data in train mode, and returns the mean loss of a datum."""
        self.model.train()
        likelihood, unit = with_noise(self.base_likelihood, self.noise), float(self.noise) ** 2
        parameters = named_parameters(self.model)
        # The gradient of ½‖θ‖²_{P₀} is added by hand, which needs no graph.
        decay = [(parameters[n], self.precision[n] * unit / (self.likelihood_weight * self.n_data)) for n in self.names]
        total = count = 0.0
        for batch in self.batches():
            stepper.zero_grad()
            outputs = call_model(self.model, batch.inputs, update_buffers=True)
            if number == 1:
                likelihood.check(outputs, batch.targets)
                self.n_outputs = outputs[0].numel()
            values = likelihood.nll(outputs, batch.targets)
            if batch.weight is not None:
                values = values * batch.weight.to(values)
            size = _count(batch)
            loss = values.sum()
            (loss * (unit / size)).backward()
            for parameter, share in decay:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=share)
            stepper.step()
            total, count = total + float(loss.detach()), count + size
        if not math.isfinite(total):
            raise NumericalError(
                f"the training loss is {total / count} in epoch {number}: training diverged. Lower lr=, or pass an optimizer= of your "
                "own; the model has its old weights back"
            )
        return total / count

    def look(
        self,
        epoch: int,
        loss: float,
        options: Mapping[str, Any],
        per_layer: bool,
        noise: bool,
        steps: int,
        generator: torch.Generator | None,
    ) -> tuple[EvidenceRecord, Laplace]:
        """Returns the evidence at the present weights, and the posterior with the hyperparameters that maximise it."""
        self.model.eval()
        options = {**options, **self._structure(options["structure"], options["rank"])}
        laplace = self._fitted(with_noise(self.base_likelihood, self.noise), options, generator)
        result = self._tuned(laplace, per_layer, noise, steps)
        if self.search is not None:
            # Every temperature gets the same draws, or their noise would decide.
            seed = torch.initial_seed() if generator is None else generator.initial_seed()
            base = laplace.likelihood
            tempered = self.search.improve(
                laplace,
                lambda t: self._fitted(at_temperature(base, t), options, torch.Generator().manual_seed(seed)),
            )
            if tempered is not laplace:
                laplace, result = tempered, self._tuned(tempered, per_layer, noise, steps)
        self.base_likelihood, self.noise = laplace.base_likelihood, laplace.hyperparameters.noise
        gamma = sum(laplace.posterior.effective_parameters().values())
        level = float(self.noise) if laplace.has_noise else None
        value, t = float(laplace.log_evidence()), temperature_of(laplace.likelihood)
        record = EvidenceRecord(epoch, loss, value, dict(result.precision), level, 1 / self.likelihood_weight, gamma, t)
        return record, laplace

    def _fitted(self, likelihood: Likelihood, options: Mapping[str, Any], generator: torch.Generator | None) -> Laplace:
        """Returns the posterior at the present weights and precisions."""
        precision = {n: self.precision[n] for n in self.names}
        laplace = Laplace(
            self.model, likelihood, prior_precision=precision, temperature=1 / self.likelihood_weight, **options
        )
        return laplace.fit(self.data, unpack=self.unpack, generator=generator, progress=False)

    def _tuned(self, laplace: Laplace, per_layer: bool, noise: bool, steps: int) -> EvidenceResult:
        """Moves prior and noise to the maximum of the evidence."""
        tuned = tune_by_evidence(
            laplace.fitted, laplace.base_likelihood, per_layer=per_layer, noise=noise, iterations=steps, warn=False
        )
        laplace.adopt(tuned)
        self.precision.update({n: float(v) for n, v in laplace.posterior.prior.precision.items()})
        assert isinstance(tuned.result, EvidenceResult)  # It was tuned by the evidence.
        return tuned.result


def _count(batch: Batch) -> float:
    return float(batch.size) if batch.weight is None else float(batch.weight.sum())
