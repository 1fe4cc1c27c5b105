"""Hamiltonian Monte Carlo and NUTS through Pyro: samples of the true posterior of a small network."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.baselines.base import (
    Baseline,
    Particles,
    batches_of,
    eval_outputs,
    private_seed,
    targets_of,
)
from aftermap.batches import Batch, Unpack
from aftermap.draws import normal_like
from aftermap.errors import DataError, InputError, NotFittedError, StatisticalWarning, UnsupportedError
from aftermap.likelihoods import Likelihood
from aftermap.models import evaluating, functional_outputs
from aftermap.params import Params, Selection, flatten, select, unflatten
from aftermap.predictive.sampling import with_padding
from aftermap.progress import progress as progress_bar

__all__ = ["HMC", "KERNELS", "ChainDiagnostics"]

KERNELS = ("nuts", "hmc")
_R_HAT = 1.1  # Chains that disagree more than this have not reached the posterior.


def _pyro() -> Any:
    """Imports the parts of Pyro that are used here, when they are needed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from pyro.infer import HMC as Hamiltonian
            from pyro.infer import MCMC, NUTS
            from pyro.ops.stats import effective_sample_size, split_gelman_rubin
    except ImportError as error:
        raise UnsupportedError("HMC needs Pyro: pip install 'aftermap[hmc]'") from error
    return Hamiltonian, NUTS, MCMC, effective_sample_size, split_gelman_rubin


@dataclass(frozen=True)
class ChainDiagnostics:
    """Numbers that tell how far the chains can be trusted.

    Weights of a network can be permuted without changing it, so that chains may rightly disagree about weights; what must agree
    are the outputs.

    Attributes:
        r_hat: The split R̂ of each weight [P].
        effective_samples: The number of effective samples of each weight [P], over all chains.
        output_r_hat: The split R̂ of each network output on (at most 100 of) the data [M].
        output_effective_samples: The number of effective samples of each output [M].
        acceptance: The mean acceptance rate of each chain.
        divergences: The number of divergent transitions of each chain.
    """

    r_hat: Tensor
    effective_samples: Tensor
    output_r_hat: Tensor
    output_effective_samples: Tensor
    acceptance: tuple[float, ...]
    divergences: tuple[int, ...]


@final
class HMC(Baseline):
    r"""Samples of the posterior of a small network, as the truth to compare with.

    The density is proportional to exp(−U(θ)),

    .. math::
        U(\theta) = -\sum_n \log p(y_n \mid f(x_n, \theta)) + \tfrac\tau2 \|\theta - m\|^2.

    The whole data set is in memory and used at every step.

    Args:
        model: The network. The first chain starts at its weights. It is never changed.
        likelihood: How targets depend on outputs: "classification", "binary", "regression", "counts" or an object from `aftermap.likelihoods`.
        prior_precision: The precision τ of the prior of every weight.
        prior_mean: The mean m of the prior of every weight.
        params: Which weights are uncertain. The others keep their values.
        kernel: The sampler: "nuts" adapts the length of its trajectories; "hmc" has a fixed one.
        chains: The number of chains, which run one after the other.
        warmup: How many steps adapt step size and mass; they are thrown away.
        draws: How many samples of each chain remain.
        step_size: The first step size.
        trajectory: The time that a sample of "hmc" travels. π/2, with masses adapted to the posterior, is a quarter of a Gaussian's
            period and makes its samples nearly independent.
        spread: How far around the model's weights the other chains start: a standard deviation, in units of the prior's.
        max_params: The most parameters that are allowed: larger models are refused.

    Raises:
        UnsupportedError: There are more parameters than ``max_params``, the model has BatchNorm (whose statistics tie
            the data together), or Pyro is not installed.

    References:
        Neal 2011, MCMC using Hamiltonian dynamics; Hoffman, Gelman 2014, The No-U-Turn sampler.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        *,
        prior_precision: float = 1.0,
        prior_mean: float = 0.0,
        params: Selection = "all",
        kernel: str = "nuts",
        chains: int = 4,
        warmup: int = 500,
        draws: int = 500,
        step_size: float = 0.01,
        trajectory: float = math.pi / 2,
        spread: float = 0.1,
        max_params: int = 10_000,
    ):
        super().__init__(model, likelihood)
        checks.choice("kernel", kernel, KERNELS)
        norms = [n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if norms:
            raise UnsupportedError(
                f"HMC refuses BatchNorm ({', '.join(norms[:3])}): its statistics belong to other weights. Use LayerNorm or GroupNorm"
            )
        self.names = select(model, params)
        size = sum(dict(model.named_parameters())[n].numel() for n in self.names)
        if size > max_params:
            raise UnsupportedError(
                f"HMC over {size:,} parameters would take days; max_params={max_params:,}. Choose fewer weights with params=, "
                "or raise max_params if you mean it"
            )
        self.prior_precision = checks.number("prior_precision", prior_precision, above=0)
        self.prior_mean, self.kernel, self.spread = float(prior_mean), kernel, float(spread)
        self.chains, self.warmup = checks.count("chains", chains), checks.count("warmup", warmup, 0)
        self.draws = checks.count("draws", draws, 4)
        self.step_size = checks.number("step_size", step_size, above=0)
        self.trajectory = checks.number("trajectory", trajectory, above=0)
        self._like: Params = {n: p.detach() for n, p in model.named_parameters() if n in self.names}
        self._chains: Tensor | None = None
        self._diagnostics: ChainDiagnostics | None = None

    def _weights(self, theta: Tensor) -> Params:
        """Returns the weights of a point θ [P] by name; the padding of an embedding is no weight, and stays that of the model."""
        return with_padding(self.model, unflatten(theta, self._like, self.names))

    def energy(self, theta: Tensor, batches: list[Batch]) -> Tensor:
        """Returns U at weights θ [P], the negative log posterior without its constant, as a 0-d tensor."""
        weights = self._weights(theta)
        value = 0.5 * self.prior_precision * (theta - self.prior_mean).square().sum()
        for batch in batches:
            outputs = functional_outputs(self.model, weights, batch.inputs)
            nll = self.likelihood.nll(outputs, targets_of(batch))
            value = value + (nll if batch.weight is None else nll * batch.weight).sum()
        return value

    def fit(
        self,
        data: Iterable[Any],
        *,
        unpack: Unpack | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> HMC:
        """Runs the chains and keeps their samples.

        Args:
            data: Batches of (x, y), which are all kept in memory.
            unpack: A function that turns a batch of another form into (inputs, targets).
            generator: The source of the starts and seeds of the chains.
            progress: Whether to show a progress bar over chains. None shows it on a terminal.

        Returns:
            This object, with the samples of its chains.

        Warns:
            StatisticalWarning: The chains disagree about the network's outputs (R̂ > 1.1).
        """
        hamiltonian, nuts, mcmc, *_ = _pyro()
        batches = list(batches_of(self.model, data, unpack))
        if not batches:
            raise DataError("the data hold no example")
        with torch.no_grad():
            for batch in batches:
                self.likelihood.check(eval_outputs(self.model, {}, batch.inputs), targets_of(batch))
        origin = flatten(self._like, self.names)
        samples, rates, divergent = [], [], []
        with evaluating(self.model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            for chain in progress_bar(range(self.chains), description="HMC chains", enabled=progress):
                start = origin.clone()
                if chain:
                    start += self.spread * self.prior_precision**-0.5 * normal_like(start, generator)

                def potential(point: dict[str, Tensor]) -> Tensor:
                    return self.energy(point["theta"], batches)

                settings = {"potential_fn": potential, "step_size": self.step_size, "adapt_step_size": True}
                if self.kernel == "nuts":
                    kernel = nuts(**settings)
                else:
                    kernel = hamiltonian(**settings, trajectory_length=self.trajectory)
                seed = private_seed(generator)
                with torch.random.fork_rng():  # Pyro draws from the default generator.
                    torch.manual_seed(seed)
                    run = mcmc(
                        kernel,
                        num_samples=self.draws,
                        warmup_steps=self.warmup,
                        initial_params={"theta": start},
                        disable_progbar=True,
                    )
                    run.run()
                samples.append(run.get_samples()["theta"].detach())
                facts = run.diagnostics()
                rates.append(float(facts["acceptance rate"]["chain 0"]))
                divergent.append(len(facts["divergences"]["chain 0"]))
        self._chains = torch.stack(samples)
        self._diagnose(batches, tuple(rates), tuple(divergent))
        return self

    def _diagnose(self, batches: list[Batch], rates: tuple[float, ...], divergent: tuple[int, ...]) -> None:
        *_, effective_sample_size, split_gelman_rubin = _pyro()
        thin = self.draw_table[:, :: max(1, self.draws // 100)]
        rows = []
        with torch.no_grad():
            for chain in thin:
                values = [eval_outputs(self.model, self._weights(theta), batches[0].inputs) for theta in chain]
                rows.append(torch.stack([v[:100].flatten() for v in values]))
        outputs = torch.stack(rows)
        r_hat = split_gelman_rubin(outputs)
        self._diagnostics = ChainDiagnostics(
            split_gelman_rubin(self.draw_table),
            effective_sample_size(self.draw_table),
            r_hat,
            effective_sample_size(outputs),
            rates,
            divergent,
        )
        if self.chains > 1 and float(r_hat.max()) > _R_HAT:
            warnings.warn(
                f"the chains disagree about the network's outputs: R-hat is up to {float(r_hat.max()):.2f} (should be below {_R_HAT}). "
                "Raise warmup and draws, or start nearer with spread=",
                StatisticalWarning,
                stacklevel=3,
            )

    @property
    def draw_table(self) -> Tensor:
        """All kept samples [chains, draws, P], each parameter row-major in the order of ``names``."""
        if self._chains is None:
            raise NotFittedError("no samples have been drawn yet: call fit(train_loader) first")
        return self._chains

    @property
    def diagnostics(self) -> ChainDiagnostics:
        """The diagnostics of the chains: R̂, effective sample sizes, acceptance and divergences."""
        if self._diagnostics is None:
            raise NotFittedError("no samples have been drawn yet: call fit(train_loader) first")
        return self._diagnostics

    def particles(self, count: int | None = None) -> Particles:
        """Returns ``count`` samples, evenly spaced over all chains, as a fixed ensemble; None means all."""
        rows = self.draw_table.flatten(0, 1)
        if count is not None:
            if checks.count("count", count) > len(rows):
                raise InputError(f"count={count}, but only {len(rows)} samples were drawn")
            rows = rows[torch.linspace(0, len(rows) - 1, count).round().long()]
        return Particles(self.model, [self._weights(row) for row in rows], self.likelihood)

    def outputs(self, inputs: Any, samples: int | None, generator: torch.Generator | None) -> Tensor:
        return self.particles(samples).outputs(inputs, None, generator)
