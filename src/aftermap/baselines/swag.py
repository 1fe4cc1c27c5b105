"""SWAG: the Gaussian that the iterates of SGD at a constant rate trace out."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.baselines.base import (
    Baseline,
    Particles,
    batches_of,
    eval_outputs,
    mean_nll,
    private_randomness,
    targets_of,
)
from aftermap.batches import Unpack
from aftermap.draws import normal_like
from aftermap.errors import InputError, NotFittedError, NumericalError, StatisticalWarning
from aftermap.likelihoods import Likelihood
from aftermap.models import call_model, check_device, update_bn
from aftermap.params import Params
from aftermap.progress import progress as progress_bar

__all__ = ["SWAG"]


@final
class SWAG(Baseline):
    r"""Stochastic weight averaging Gaussian: N(θ̄, s ½ (Σ_diag + D Dᵀ/(K − 1))).

    Here θ̄ and Σ_diag are mean and variance of the collected weights; the columns of D are the last K weights minus the
    running mean at their time. A sample is

    .. math::
        \theta = \bar\theta + \sqrt{s/2}\,\Big(\Sigma_\mathrm{diag}^{1/2} z_1 + \tfrac{1}{\sqrt{K-1}} D z_2\Big).

    Args:
        model: A trained network, where the SGD starts. It is copied and never changed.
        likelihood: How targets depend on outputs: "classification", "binary", "regression", "counts" or an object from `aftermap.likelihoods`.
        rank: The number K of the last collected weights that give a column of D. With 0 the covariance is diagonal.
        scale: The factor s of the covariance.
        samples: How many networks a prediction averages over, unless `predict` is told otherwise.

    References:
        Maddox et al. 2019, A simple baseline for Bayesian uncertainty in deep learning, eq. (1) and algorithm 1.

    >>> net = nn.Linear(3, 4)
    >>> swag = SWAG(net, rank=3).fit([(torch.randn(20, 3), torch.randint(4, (20,)))], epochs=5, lr=0.1)
    >>> swag.predict(torch.ones(6, 3), samples=7).samples.shape
    torch.Size([7, 6, 4])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        *,
        rank: int = 20,
        scale: float = 1.0,
        samples: int = 30,
    ):
        super().__init__(copy.deepcopy(model), likelihood)
        self.rank, self.scale = checks.count("rank", rank, 0), checks.number("scale", scale, above=0)
        self.samples = checks.count("samples", samples)
        self.collected, self._steps = 0, 0
        self._mean: Params = {}
        self._square_sum: Params = {}
        self._columns: deque[Params] = deque(maxlen=self.rank)

    # Collecting

    def collect(self, model: nn.Module | None = None) -> SWAG:
        """Takes the weights of a model (in your own training loop) or of the copy into the moments; returns self."""
        source = self.model if model is None else model
        now = {n: p.detach().clone() for n, p in source.named_parameters() if p.requires_grad}
        if self._mean and {n: p.shape for n, p in now.items()} != {n: m.shape for n, m in self._mean.items()}:
            raise InputError("SWAG.collect: the model has other parameters than the one that was collected before")
        if not now:
            raise InputError("SWAG.collect: the model has no parameter that requires a gradient")
        self.collected += 1
        columns = {}
        for name, value in now.items():
            # This is Welford's update, since squares of large weights with small spread would cancel.
            old = self._mean.get(name, torch.zeros_like(value))
            delta = value - old
            new = old + delta / self.collected
            self._mean[name] = new
            self._square_sum[name] = self._square_sum.get(name, torch.zeros_like(value)) + delta * (value - new)
            columns[name] = value - new
        self._columns.append(columns)
        return self

    def fit(
        self,
        data: Iterable[Any],
        *,
        epochs: int = 20,
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        collect_every: int | None = None,
        unpack: Unpack | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> SWAG:
        """Runs SGD at a constant rate on the copy and collects weights; then refreshes BatchNorm under the mean.

        Args:
            data: Batches of (x, y), which are read ``epochs`` times.
            epochs: How many passes over the data are made.
            lr: The constant learning rate: large enough to leave the mode, small enough to stay in its basin.
            momentum: The momentum of SGD.
            weight_decay: The weight decay of SGD.
            collect_every: How many steps lie between two collections. None collects at the end of each epoch.
            unpack: A function that turns a batch of another form into (inputs, targets).
            generator: The source of dropout in the network, and of a DataLoader that shuffles without a generator of its own.
            progress: Whether a bar is shown; None shows one on a terminal.

        Returns:
            This object, with the collected weights.
        """
        epochs = checks.count("epochs", epochs)
        if epochs > 1:
            checks.repeatable("data", data, "SWAG, in every epoch,")
        every = None if collect_every is None else checks.count("collect_every", collect_every)
        chosen = [p for p in self.model.parameters() if p.requires_grad]
        optimiser = torch.optim.SGD(
            chosen, lr=checks.number("lr", lr, above=0), momentum=momentum, weight_decay=weight_decay
        )
        self.model.train()
        try:
            with private_randomness(generator, check_device(self.model)[0]):
                for _ in progress_bar(range(epochs), description="SWAG", enabled=progress):
                    self._epoch(data, unpack, optimiser, every)
        finally:
            self.model.eval()
            optimiser.zero_grad()
        if self.collected < 2:
            warnings.warn(
                "SWAG collected fewer than two sets of weights: its variance is zero", StatisticalWarning, stacklevel=2
            )
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name in self._mean:
                    p.copy_(self._mean[name])
        update_bn(self.model, data, unpack=unpack)
        return self

    def _epoch(
        self, data: Iterable[Any], unpack: Unpack | None, optimiser: torch.optim.Optimizer, every: int | None
    ) -> None:
        for batch in batches_of(self.model, data, unpack):
            with torch.enable_grad():
                outputs = call_model(self.model, batch.inputs, update_buffers=True)
                self.likelihood.check(outputs.detach(), targets_of(batch))
                loss, _ = mean_nll(self.likelihood, outputs, batch)
                optimiser.zero_grad()
                loss.backward()
            if not torch.isfinite(loss):
                raise NumericalError(f"the loss became {loss.item()}; lower lr")
            optimiser.step()
            self._steps += 1
            if every is not None and self._steps % every == 0:
                self.collect()
        if every is None:
            self.collect()

    # The Gaussian

    @property
    def mean(self) -> Params:
        """The mean θ̄ of the collected weights, by name."""
        if not self.collected:
            raise NotFittedError("no weights have been collected: call fit(train_loader), or collect() while you train")
        return dict(self._mean)

    @property
    def variance(self) -> Params:
        """The variance Σ_diag of the collected weights (divided by their number, as in the paper), by name."""
        mean = self.mean
        return {n: self._square_sum[n] / self.collected for n in mean}

    def sample(self, count: int, generator: torch.Generator | None = None) -> Params:
        """Draws weights: for each name a tensor [count, *shape]."""
        count, columns = checks.count("count", count), len(self._columns)
        first, variance = next(iter(self.mean.values())), self.variance
        shared = normal_like(first.new_zeros(count, columns), generator)  # All parameters share one z₂.
        drawn: Params = {}
        for name, mean in self.mean.items():
            noise = normal_like(mean.expand(count, *mean.shape), generator) * variance[name].sqrt()
            if columns > 1:
                matrix = torch.stack([c[name] for c in self._columns])
                noise = noise + torch.tensordot(shared.to(matrix), matrix, 1) / (columns - 1) ** 0.5
            drawn[name] = mean + (self.scale / 2) ** 0.5 * noise  # eq. (1)
        return drawn

    def particles(
        self,
        count: int = 30,
        generator: torch.Generator | None = None,
        *,
        data: Iterable[Any] | None = None,
        unpack: Unpack | None = None,
    ) -> Particles:
        """Returns a fixed set of weights as an ensemble; with ``data`` each gets BatchNorm statistics of its own."""
        drawn = self.sample(count, generator)
        weights = []
        for i in range(count):
            particle = {n: v[i] for n, v in drawn.items()}
            if data is not None:
                net = copy.deepcopy(self.model)
                net.load_state_dict(particle, strict=False)
                update_bn(net, data, unpack=unpack)
                particle |= {n: b.detach().clone() for n, b in net.named_buffers()}
            weights.append(particle)
        return Particles(self.model, weights, self.likelihood)

    def outputs(self, inputs: Any, samples: int | None, generator: torch.Generator | None) -> Tensor:
        outputs = []
        for _ in range(self.samples if samples is None else samples):
            weights = {n: v[0] for n, v in self.sample(1, generator).items()}
            outputs.append(eval_outputs(self.model, weights, inputs))
        return torch.stack(outputs)
