"""One call: estimate the cost, choose a structure, fit, tune, check, and say what came out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from aftermap.batches import Unpack, iterate
from aftermap.distributed import broadcast_number, fail_together
from aftermap.errors import InputError, StatisticalWarning
from aftermap.laplace.cost import Cost, describe_costs, estimate_costs
from aftermap.laplace.fitted import TuningResult
from aftermap.laplace.laplace import Laplace
from aftermap.laplace.self_check import SelfCheck, check_predictive
from aftermap.laplace.self_consistent import CavityCheck
from aftermap.laplace.subnetwork import Subnetwork
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.models import check_device
from aftermap.params import Selection
from aftermap.posteriors.base import has_noise
from aftermap.progress import announce

__all__ = ["FitReport", "fit"]

_SMALL = 1500  # up to this many parameters the full matrix is cheap and keeps cross-layer covariance
_SMALL_REGRESSION = 3000  # the same of a regression, for parameters or for data times outputs


@dataclass(frozen=True)
class FitReport:
    """How `fit` came to its result.

    Attributes:
        costs: The structures that were considered, with their costs.
        chosen: The one that was taken.
        tuning: How the hyperparameters were found.
        check: The comparison with the network: on validation data, or at training data that were taken out; None where there is none.
        notes: What else there is to say.
    """

    costs: list[Cost]
    chosen: Cost
    tuning: TuningResult | None = None
    check: SelfCheck | CavityCheck | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"structure: {self.chosen}"]
        if self.tuning is not None:
            lines.append(f"tuning: {self.tuning}")
        if self.check is not None:
            lines.append(f"check {'passed' if self.check.passed else 'FAILED'}: {self.check.message}")
        return "\n".join([*lines, *self.notes])

    @property
    def checks(self) -> list[tuple[str, SelfCheck | CavityCheck]]:
        """The old form of `check`, a list of names and checks."""
        warnings.warn("FitReport.checks is now one check: FitReport.check", DeprecationWarning, stacklevel=2)
        return [] if self.check is None else [(str(self.chosen), self.check)]


def fit(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    likelihood: str | Likelihood = "classification",
    *,
    structure: str | None = None,
    params: Selection = "all",
    memory_limit: float = 4 * 2**30,
    time_limit: float | None = None,
    unpack: Unpack | None = None,
    verbose: bool | None = None,
    on_cost: Callable[[str], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 100,
    **options: Any,
) -> Laplace:
    """Makes a trained network Bayesian.

    The structure is chosen by its cost, the hyperparameters by `Laplace.tune`: with validation data by their labels, without by the
    training data. The result is then compared with the network itself, once; where it is worse, a warning says so.

    Args:
        model: The trained network, in eval mode.
        train_loader: The training data.
        val_loader: Held-out data, if there are any.
        likelihood: The likelihood, as for `Laplace`.
        structure: None chooses by the cost estimate: full for small networks, kron otherwise.
        params: Which weights are uncertain. "all" leaves the choice: all layers, or the last block with its head in a network that is
            made of blocks, where predictions are several times cheaper and unusual inputs are found at least as well; the last
            layer where memory or time forbid more.
        memory_limit: The most bytes that the posterior may take.
        time_limit: The most seconds that the fit may take; None allows any time.
        unpack: What turns a batch of an unusual form into (inputs, targets).
        verbose: Whether to say what is done; None says it on a terminal.
        on_cost: A function that is handed the line with the costs before the work starts; None shows it like a progress bar.
        checkpoint: A folder that keeps the sums of the fit, so that one that was killed goes on; see `Laplace.fit`.
        every: The number of batches after which they are written.
        options: Further arguments of `Laplace`.

    Returns:
        A fitted and tuned `Laplace`; ``print(la.report)`` tells how it was chosen, tuned and checked.

    Warns:
        StatisticalWarning: The predictive is worse than the network, or the data cannot decide what they should.
    """
    if isinstance(params, Subnetwork):
        raise InputError(
            "fit chooses among structures of whole layers; for a subnetwork use Laplace(..., params=Subnetwork(...))"
        )
    parsed = parse_likelihood(likelihood)
    regression = has_noise(parsed)
    drawn = options.get("subset_size", _SMALL_REGRESSION if regression else 300)
    costs = estimate_costs(model, train_loader, parsed, params=params, subset_size=drawn, unpack=unpack)
    with fail_together("choosing a structure"):
        chosen = _choose(costs, structure, memory_limit, time_limit, regression)
    # Each process sees its own data and clock; all take the choice of the first.
    chosen = costs[broadcast_number(costs.index(chosen))]
    if chosen.structure == "subset" and regression and structure is None:
        options = {"subset_size": drawn, "rank": None, **options}
    if on_cost is None:
        announce(describe_costs(chosen, costs), enabled=verbose)
    else:
        on_cost(describe_costs(chosen, costs))
    which: Selection = params if chosen.params == "all" else chosen.params
    laplace = Laplace(model, parsed, structure=chosen.structure, params=which, **options)
    laplace.fit(train_loader, unpack=unpack, progress=verbose, checkpoint=checkpoint, every=every).tune(val_loader)
    check = _check(laplace, val_loader, unpack)
    laplace.report = FitReport(costs, chosen, laplace.tuning, check)
    # What tuning without labels found out about itself it has said already.
    if isinstance(check, SelfCheck) and not check.passed:
        warnings.warn(
            f"the Bayesian predictive is worse than the network on the validation data ({check.message}). The network's own answers are "
            "la.predictor.map_prediction(x); another structure= or params='last_layer' may do better, and more validation data tell more",
            StatisticalWarning,
            stacklevel=2,
        )
    return laplace


def _check(laplace: Laplace, val_loader: Iterable[Any] | None, unpack: Unpack | None) -> SelfCheck | CavityCheck | None:
    if val_loader is None:
        return getattr(laplace.tuning, "check", None)
    device, dtype = check_device(laplace.model)
    return check_predictive(laplace, iterate(val_loader, device=device, dtype=dtype, unpack=unpack))


def _choose(
    costs: list[Cost],
    structure: str | None,
    memory_limit: float,
    time_limit: float | None,
    regression: bool = False,
) -> Cost:
    def fits(cost: Cost) -> bool:
        return cost.bytes <= memory_limit and (time_limit is None or cost.seconds <= time_limit)

    if structure is not None:
        for cost in costs:
            if cost.structure == structure and cost.params == "all":
                return cost
        known = sorted({c.structure for c in costs})
        raise InputError(
            f"structure={structure!r} cannot be chosen here; allowed are {', '.join(known)}. Use Laplace(...) for others"
        )
    by_key = {(c.structure, c.params): c for c in costs}
    full = by_key[("full", "all")]
    order = [full] if full.n_params <= (_SMALL_REGRESSION if regression else _SMALL) else []
    if regression and full.n_rows <= _SMALL_REGRESSION:
        # The full matrix again, by the Gram matrix of the data: cheap where these are few.
        order.append(by_key[("subset", "all")])
    # A diagonal over all layers is worse than Kronecker factors of the last one.
    preferred = (("kron", "last_block"), ("kron", "all"), ("kron", "last_layer"), ("diagonal", "all"))
    order += [by_key[k] for k in preferred if k in by_key]
    for cost in order:
        if fits(cost):
            return cost
    least = min(costs, key=lambda c: c.bytes)
    raise InputError(
        f"nothing fits into {memory_limit / 2**30:.1f} GB"
        + (f" and {time_limit:g} s" if time_limit else "")
        + f"; the smallest is {least}. Raise memory_limit= or time_limit=, or choose fewer parameters with params="
    )
