"""Mean-field variational inference (Bayes by backprop, FFG): an independent Gaussian for every weight.

Local reparametrisation works for any module: linear maps of vectors draw their outputs instead of their weights.

A linear map h = W a + b with independent Gaussian weights has, for one example, h ~ N(M a + m, S a² + s) exactly. Drawing h
for every example gives gradients of far lower variance than one draw of W for the whole batch (Kingma et al. 2015). With
shared weights (convolutions, tokens, a layer used twice) the outputs of one example are correlated, so that weights are drawn there.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aftermap import checks
from aftermap.baselines.base import (
    Baseline,
    Particles,
    batches_of,
    eval_outputs,
    mean_nll,
    targets_of,
)
from aftermap.batches import Batch, Unpack
from aftermap.draws import normal_like
from aftermap.errors import DataError, NotFittedError, NumericalError
from aftermap.likelihoods import Likelihood
from aftermap.models import functional_outputs
from aftermap.params import Params, Selection, select
from aftermap.predictive.sampling import with_padding
from aftermap.progress import progress as progress_bar

__all__ = ["ESTIMATORS", "LocalNoise", "MeanField", "gaussian_kl", "local_layers"]

ESTIMATORS = ("local", "weights")


class _Uses(TorchFunctionMode):
    """Counts in which functions every parameter is used."""

    def __init__(self, params: Params):
        super().__init__()
        self.names = {id(value): name for name, value in params.items()}
        self.uses: Counter[str] = Counter()
        self.pairs: list[tuple[str, str | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [self.names[id(a)] for a in (*args, *kwargs.values()) if id(a) in self.names]
        reads_only = getattr(func, "__name__", "") in ("__get__", "dim", "size", "numel", "is_floating_point")
        if not reads_only:
            self.uses.update(used)
        if func is F.linear:
            inputs, weight, bias = _linear_arguments(args, kwargs)
            if id(weight) in self.names and inputs.dim() == 2:
                self.pairs.append((self.names[id(weight)], self.names.get(id(bias)) if bias is not None else None))
        return func(*args, **kwargs)


def _linear_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Any, Any]:
    named = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    return named["input"], named["weight"], named.get("bias")


def local_layers(model: nn.Module, params: Params, inputs: Any) -> dict[str, str | None]:
    """Returns the weight and bias of every linear map of vectors [N, D] whose parameters are used nowhere else.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4, bias=False))
    >>> local_layers(net, dict(net.named_parameters()), torch.ones(5, 2))
    {'0.weight': '0.bias', '2.weight': None}
    """
    values = {n: v.detach().clone() for n, v in params.items()}
    with torch.no_grad(), _Uses(values) as seen:
        functional_outputs(model, values, inputs)
    once = {n for n, count in seen.uses.items() if count == 1}
    return {w: b for w, b in seen.pairs if w in once and (b is None or b in once)}


class LocalNoise(TorchFunctionMode):
    """While active, linear maps with the given mean weights add the noise that random weights would give.

    Args:
        means: The mean of each parameter by name; the tensors that the model is called with.
        deviations: The standard deviation of each parameter, by name.
        layers: The bias that belongs to each weight, from :func:`local_layers`.
        generator: The source of the random noise.
    """

    def __init__(
        self,
        means: Params,
        deviations: Params,
        layers: Mapping[str, str | None],
        generator: torch.Generator | None,
    ):
        super().__init__()
        self.variances = {id(means[w]): deviations[w].square() for w in layers}
        self.bias_variances = {id(means[w]): None if b is None else deviations[b].square() for w, b in layers.items()}
        self.generator = generator

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is not F.linear:
            return result
        inputs, weight, _ = _linear_arguments(args, kwargs)
        if id(weight) not in self.variances:
            return result
        variance = F.linear(inputs.square(), self.variances[id(weight)], self.bias_variances[id(weight)])
        # The floor keeps the gradient of the root finite where every input is zero.
        return result + variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt() * normal_like(
            result, self.generator
        )


def gaussian_kl(mean: Tensor, deviation: Tensor, prior_mean: float, prior_precision: float) -> Tensor:
    r"""Returns KL(N(μ, σ²) ‖ N(m, 1/τ)), summed over entries.

    .. math::
        \mathrm{KL} = \tfrac12 \sum [\tau\sigma^2 + \tau(\mu - m)^2 - 1 - \log \tau\sigma^2]

    Args:
        mean: The mean μ, of any shape.
        deviation: The standard deviation σ, of the same shape.
        prior_mean: The mean m of the prior.
        prior_precision: The precision τ of the prior.

    Returns:
        The divergence in nats, as a 0-d tensor.

    >>> gaussian_kl(torch.zeros(3), torch.ones(3), 0.0, 1.0)
    tensor(0.)
    """
    scaled = prior_precision * deviation.square()
    return 0.5 * (scaled + prior_precision * (mean - prior_mean).square() - 1 - scaled.log()).sum()


@final
class MeanField(Baseline):
    r"""A fully factorised Gaussian q(w) = N(μ, σ²), σ = softplus(ρ), fitted by the evidence lower bound.

    .. math::
        \mathrm{ELBO} = \sum_n \mathbb E_q \log p(y_n \mid f(x_n, w)) - \mathrm{KL}(q \,\|\, N(m, 1/\tau))

    The KL is a sum, counted once for the whole data set. Fitting works on a copy of any module: linear maps of vectors draw
    their outputs (local reparametrisation), all other weights are drawn once per batch.

    Args:
        model: A trained or a fresh network, which gives the architecture and the first means. It is never changed.
        likelihood: How targets depend on outputs: "classification", "binary", "regression", "counts" or an object from `aftermap.likelihoods`.
        prior_precision: The precision τ of the prior of every weight.
        prior_mean: The mean m of the prior of every weight.
        initial_scale: The first σ. It is small, so that training first finds a good mean: a first σ of the prior's size costs more than
            one per cent of accuracy on MNIST.
        params: Which weights are uncertain. The others keep their values.
        estimator: What is drawn: "local" draws the outputs of linear layers, one noise for every example; "weights"
            draws all weights.
        samples: How many networks a prediction averages over, unless `predict` is told otherwise.

    References:
        Blundell et al. 2015, Weight uncertainty in neural networks, eq. (2); Kingma, Salimans, Welling 2015, Variational
        dropout and the local reparameterization trick, eq. (6); Graves 2011.

    >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> mf = MeanField(net, "regression").fit([(x, x**3)], epochs=2)
    >>> mf.predict(x, samples=5).epistemic.shape
    torch.Size([20, 1])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        *,
        prior_precision: float = 1.0,
        prior_mean: float = 0.0,
        initial_scale: float = 1e-3,
        params: Selection = "all",
        estimator: str = "local",
        samples: int = 100,
    ):
        checks.choice("estimator", estimator, ESTIMATORS)
        super().__init__(copy.deepcopy(model), likelihood)
        self.prior_precision = checks.number("prior_precision", prior_precision, above=0)
        self.prior_mean, self.samples = float(prior_mean), checks.count("samples", samples)
        parameters = dict(self.model.named_parameters())
        names = select(self.model, params)
        first = math.log(math.expm1(checks.number("initial_scale", initial_scale, above=0)))
        self._mean = {n: parameters[n].detach().clone().requires_grad_() for n in names}
        self._rho = {n: torch.full_like(parameters[n].detach(), first).requires_grad_() for n in names}
        self._local: dict[str, str | None] | None = {} if estimator == "weights" else None
        self._fitted = False
        self.n_data: float | None = None
        self.history: list[float] = []

    @property
    def mean(self) -> Params:
        """The means μ, by name."""
        return {n: m.detach() for n, m in self._mean.items()}

    @property
    def deviation(self) -> Params:
        """The standard deviations σ, by name."""
        return {n: F.softplus(r.detach()) for n, r in self._rho.items()}

    def kl(self) -> Tensor:
        """Returns KL(q ‖ prior), summed over all weights."""
        parts = [
            gaussian_kl(self._mean[n], F.softplus(self._rho[n]), self.prior_mean, self.prior_precision)
            for n in self._mean
        ]
        return torch.stack(parts).sum()

    def fit(
        self,
        data: Iterable[Any],
        *,
        epochs: int = 50,
        lr: float = 1e-3,
        n_data: float | None = None,
        samples: int = 1,
        temperature: float = 1.0,
        unpack: Unpack | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> MeanField:
        """Maximises the ELBO with Adam and a cosine schedule; called again it goes on from where it was.

        Args:
            data: Batches of (x, y), which are read ``epochs`` times (and once more to count them, unless ``n_data`` is
                given).
            epochs: The number of passes over the data.
            lr: The first learning rate.
            n_data: The number N of data. None counts them.
            samples: The number of draws per step.
            temperature: The factor of the KL; 1 gives the ELBO.
            unpack: A function that turns a batch of another form into (inputs, targets).
            generator: The source of the random noise.
            progress: Whether to show a progress bar. None shows it on a terminal.

        Returns:
            This object; −ELBO / N of each epoch is in ``history``.
        """
        epochs, samples = checks.count("epochs", epochs), checks.count("samples", samples)
        temperature = checks.number("temperature", temperature, above=0)
        if epochs > 1 or n_data is None:
            checks.repeatable("data", data, "mean-field training (to count the data, and in every epoch)")
        self.n_data = self._count(data, unpack) if n_data is None else checks.number("n_data", n_data, above=0)
        optimiser = torch.optim.Adam([*self._mean.values(), *self._rho.values()], lr=checks.number("lr", lr, above=0))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):  # Noise comes from q alone.
                module.eval()
        try:
            for _ in progress_bar(range(epochs), description="mean-field", enabled=progress):
                self.history.append(self._epoch(data, unpack, optimiser, samples, temperature, generator))
                schedule.step()
        finally:
            self.model.eval()
        with torch.no_grad():  # The copy stands at the mean, so that its weights say which fit this is.
            for name, p in self.model.named_parameters():
                if name in self._mean:
                    p.copy_(self._mean[name])
        self._fitted = True
        return self

    def _count(self, data: Iterable[Any], unpack: Unpack | None) -> float:
        sizes = [float(b.size if b.weight is None else b.weight.sum()) for b in batches_of(self.model, data, unpack)]
        if not sum(sizes) > 0:
            raise DataError("the data hold no example")
        return sum(sizes)

    def _epoch(
        self,
        data: Iterable[Any],
        unpack: Unpack | None,
        optimiser: torch.optim.Optimizer,
        samples: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> float:
        total, weight = 0.0, 0.0
        n_data = self.n_data or 1.0
        for batch in batches_of(self.model, data, unpack):
            with torch.enable_grad():
                fit, count = self._expected_nll(batch, samples, generator)
                loss = fit + temperature * self.kl() / n_data  # The KL is counted once for all N data.
                optimiser.zero_grad()
                loss.backward()
            if not math.isfinite(loss.item()):
                raise NumericalError(f"the loss became {loss.item()}; lower lr, or standardise inputs and targets")
            optimiser.step()
            total, weight = total + count * loss.item(), weight + count
        if weight == 0:
            raise DataError("a pass over the data gave no example: the data changed since they were counted")
        return total / weight

    def _expected_nll(self, batch: Batch, samples: int, generator: torch.Generator | None) -> tuple[Tensor, float]:
        """Returns the Monte Carlo mean of −log p over a batch, differentiable in μ and ρ, and the number of data."""
        if self._local is None:
            self._local = local_layers(self.model, self.mean, batch.inputs)
        deviation = {n: F.softplus(r) for n, r in self._rho.items()}
        inside = {name for pair in self._local.items() for name in pair if name is not None}
        values: list[Tensor] = []
        count = 0.0
        for _ in range(samples):
            weights = {
                n: m if n in inside else m + deviation[n] * normal_like(m, generator) for n, m in self._mean.items()
            }
            weights = with_padding(self.model, weights)
            with LocalNoise(weights, deviation, self._local, generator):
                outputs = self._outputs(weights, batch.inputs)
            if not values:
                self.likelihood.check(outputs.detach(), targets_of(batch))
            value, count = mean_nll(self.likelihood, outputs, batch)
            values.append(value)
        return torch.stack(values).mean(), count

    def _outputs(self, weights: Params, inputs: Any) -> Tensor:
        # While training, BatchNorm's statistics are learned.
        return functional_outputs(self.model, weights, inputs, update_buffers=self.model.training)

    def elbo(
        self,
        data: Iterable[Any],
        *,
        samples: int = 10,
        unpack: Unpack | None = None,
        generator: torch.Generator | None = None,
    ) -> float:
        """Returns the evidence lower bound on the data, in nats (a sum over them), by Monte Carlo."""
        total = 0.0
        with torch.no_grad():
            for batch in batches_of(self.model, data, unpack):
                value, count = self._expected_nll(batch, checks.count("samples", samples), generator)
                total -= value.item() * count
            return total - self.kl().item()

    def sample(self, count: int, generator: torch.Generator | None = None) -> Params:
        """Draws weights from q: for each name a tensor [count, *shape]."""
        deviation = self.deviation
        return {
            n: m + deviation[n] * normal_like(m.expand(checks.count("count", count), *m.shape), generator)
            for n, m in self.mean.items()
        }

    def particles(self, count: int = 30, generator: torch.Generator | None = None) -> Particles:
        """Returns a fixed set of weights from q as an ensemble."""
        drawn = self.sample(count, generator)
        weights = [with_padding(self.model, {n: v[i] for n, v in drawn.items()}) for i in range(count)]
        return Particles(self.model, weights, self.likelihood)

    def outputs(self, inputs: Any, samples: int | None, generator: torch.Generator | None) -> Tensor:
        if not self._fitted:
            raise NotFittedError("this mean-field posterior has not been fitted yet: call fit(train_loader) first")
        outputs = []
        for _ in range(self.samples if samples is None else samples):
            weights = with_padding(self.model, {n: v[0] for n, v in self.sample(1, generator).items()})
            outputs.append(eval_outputs(self.model, weights, inputs))
        return torch.stack(outputs)
