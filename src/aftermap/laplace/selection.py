"""Model selection by the evidence: train every candidate, rank by log marginal likelihood (Occam's razor)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.batches import Unpack, iterate
from aftermap.errors import DataError, InputError, StatisticalWarning
from aftermap.laplace.marglik import EvidenceTraining, train_by_evidence
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.models import check_device

__all__ = ["Candidate", "Ranking", "select"]


@dataclass(frozen=True)
class Candidate:
    """One trained candidate for a model.

    Attributes:
        name: The name that was given.
        log_evidence: The log evidence of the best restart, in nats.
        test_log_likelihood: The mean log predictive probability of a test datum; None without test data.
        n_params: The number of uncertain parameters.
        seconds: The time of training, over all restarts.
        training: The best restart, with its model, posterior and history.
        restarts: The log evidence of every restart.
    """

    name: str
    log_evidence: float
    test_log_likelihood: float | None
    n_params: int
    seconds: float
    training: EvidenceTraining
    restarts: tuple[float, ...]

    @property
    def stationary(self) -> bool:
        """Whether its weights are at a mode, as an evidence assumes."""
        return self.training.stationarity.stationary


@dataclass(frozen=True)
class Ranking:
    """The candidates from the best evidence to the worst.

    Attributes:
        candidates: The candidates in this order.
    """

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The candidate with the largest evidence."""
        return self.candidates[0]

    @property
    def names(self) -> list[str]:
        """The names from best to worst."""
        return [c.name for c in self.candidates]

    @property
    def evidences(self) -> dict[str, float]:
        """The log evidence by name, best first."""
        return {c.name: c.log_evidence for c in self.candidates}

    @property
    def probabilities(self) -> dict[str, float]:
        """The posterior probability of each candidate if all were equally likely before: the softmax of the log evidences."""
        values = torch.tensor([c.log_evidence for c in self.candidates], dtype=torch.float64).softmax(0)
        return dict(zip(self.names, values.tolist(), strict=True))

    @property
    def table(self) -> list[dict[str, Any]]:
        """A table with one row per candidate, best first.

        Its keys are name, log_evidence, difference (to the best), test_log_likelihood, n_params, effective_parameters, stationary and
        seconds.
        """
        top = self.best.log_evidence
        return [
            {
                "name": c.name,
                "log_evidence": c.log_evidence,
                "difference": c.log_evidence - top,
                "test_log_likelihood": c.test_log_likelihood,
                "n_params": c.n_params,
                "effective_parameters": c.training.best.effective_parameters,
                "stationary": c.stationary,
                "seconds": c.seconds,
            }
            for c in self.candidates
        ]

    def __getitem__(self, name: str) -> Candidate:
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise InputError(f"there is no candidate {name!r}; there are {', '.join(map(repr, self.names))}")

    def __len__(self) -> int:
        return len(self.candidates)

    def __str__(self) -> str:
        tested = self.best.test_log_likelihood is not None
        width = max(len("model"), *(len(n) for n in self.names))
        head = f"{'model':{width}}  {'log evidence':>12}  {'difference':>10}"
        head += f"  {'test log-lik.':>13}" if tested else ""
        lines = [head + f"  {'parameters':>10}  {'effective':>9}  at a mode"]
        for row in self.table:
            line = f"{row['name']:{width}}  {row['log_evidence']:12.1f}  {row['difference']:10.1f}"
            line += f"  {row['test_log_likelihood']:13.3f}" if tested else ""
            mode = "yes" if row["stationary"] else "no"
            lines.append(line + f"  {row['n_params']:10,}  {row['effective_parameters']:9.1f}  {mode:>9}")
        return "\n".join(lines)


def select(
    factories: Mapping[str, Callable[[], nn.Module]],
    data: Iterable[Any],
    likelihood: str | Likelihood,
    *,
    test: Iterable[Any] | None = None,
    restarts: int = 1,
    unpack: Unpack | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Ranking:
    """Trains each candidate by evidence and ranks them; no validation data are needed.

    Evidences are compared on the same data and with the same structure of the curvature, so both are common to all candidates.

    Args:
        factories: For each name a function that makes the untrained network.
        data: Training batches: a DataLoader or a list.
        likelihood: The likelihood, as in `Laplace`.
        test: Batches to compute the mean test log-likelihood on, for the table only; it has no part in the ranking.
        restarts: The number of times that each candidate is made and trained anew; the best evidence counts.
        unpack: A function that turns a batch of another form into (inputs, targets).
        generator: The source of the initial weights (PyTorch's own generator is put back afterwards) and of the
            curvature. None means PyTorch's own.
        options: Options of `train_by_evidence`: epochs, lr, structure and so on.

    Returns:
        The ranking; `print(ranking)` shows the table, `ranking.best.training.laplace` predicts.

    Raises:
        InputError: There are no candidates, or a network stands where a function is wanted.

    Warns:
        StatisticalWarning: Some networks are not at a mode, so that their evidences are uncertain; one warning has
            their names.

    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> ranking = select(
    ...     {"line": lambda: nn.Linear(1, 1), "constant": lambda: nn.Linear(1, 1, bias=False)},
    ...     [(x, 1 + 0.1 * (9 * x).sin())],
    ...     "regression",
    ...     epochs=400,
    ...     lr=0.05,
    ... )
    >>> ranking.names
    ['line', 'constant']

    References:
        MacKay 1992; Immer et al. 2021.
    """
    _check(factories, data, restarts)
    parsed = parse_likelihood(likelihood)
    candidates = []
    for name, factory in factories.items():
        start = time.perf_counter()
        runs = []
        for _ in range(restarts):
            model = _make_network(name, factory, generator)
            with warnings.catch_warnings():
                # This is told once, for all of them, below.
                warnings.filterwarnings("ignore", "the network is not at a mode", StatisticalWarning)
                runs.append(train_by_evidence(model, data, parsed, unpack=unpack, generator=generator, **options))
        best = max(runs, key=lambda r: r.log_evidence)
        score = None if test is None else _score(best, test, unpack)
        seconds = time.perf_counter() - start
        size = best.laplace.posterior.n_params
        evidences = tuple(r.log_evidence for r in runs)
        candidates.append(Candidate(name, best.log_evidence, score, size, seconds, best, evidences))
    ranking = Ranking(tuple(sorted(candidates, key=lambda c: -c.log_evidence)))
    _warn(ranking)
    return ranking


def _check(factories: Mapping[str, Callable[[], nn.Module]], data: Iterable[Any], restarts: int) -> None:
    if not isinstance(factories, Mapping) or not factories:
        raise InputError("select needs candidates: a mapping from names to functions that make a network")
    for name, factory in factories.items():
        if isinstance(factory, nn.Module) or not callable(factory):
            raise InputError(
                f"the candidate {name!r} is a {type(factory).__name__}; pass a function that makes a fresh network, "
                f"such as {{{name!r}: lambda: nn.Sequential(...)}}"
            )
    restarts = checks.count("restarts", restarts)
    if isinstance(data, Iterator):
        raise DataError(
            "the data are a one-shot iterator, but every candidate goes through them; pass a DataLoader or a list"
        )


def _make_network(name: str, factory: Callable[[], nn.Module], generator: torch.Generator | None) -> nn.Module:
    if generator is None:
        model = factory()
    else:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = factory()
    if not isinstance(model, nn.Module):
        raise InputError(f"the candidate {name!r} made a {type(model).__name__}; it must make an nn.Module")
    return model


def _score(training: EvidenceTraining, test: Iterable[Any], unpack: Unpack | None) -> float:
    device, dtype = check_device(training.model)
    values: list[Tensor] = []
    for batch in iterate(test, device=device, dtype=dtype, unpack=unpack):
        prediction = training.laplace.predict(batch.inputs)
        values.append(prediction.log_prob(batch.targets).to(torch.float64).reshape(batch.size, -1).sum(1))
    return float(torch.cat(values).mean())


def _warn(ranking: Ranking) -> None:
    away = [c for c in ranking.candidates if not c.stationary]
    if away:
        worst = max(away, key=lambda c: c.training.stationarity.gain)
        listed = ", ".join(repr(c.name) for c in away)
        warnings.warn(
            f"{len(away)} of {len(ranking)} candidates are not at a mode ({listed}), so their evidences are uncertain by some nats; "
            f"for {worst.name!r} {worst.training.stationarity.message}. Train longer or with a smaller learning rate (epochs=, lr=)",
            StatisticalWarning,
            stacklevel=3,
        )
