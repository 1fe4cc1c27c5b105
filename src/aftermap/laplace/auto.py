"""One call: estimate the cost, choose a structure, fit, tune, check; never hand back a predictive that collapsed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from aftermap.batches import Unpack, iterate
from aftermap.errors import DataError, InputError, NumericalError, StatisticalWarning
from aftermap.laplace.cost import Cost, describe_costs, estimate_costs
from aftermap.laplace.dimension import DimensionResult
from aftermap.laplace.laplace import Laplace
from aftermap.laplace.self_check import SelfCheck, check_predictive
from aftermap.laplace.subnetwork import Subnetwork
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.models import check_device
from aftermap.params import Selection
from aftermap.posteriors import GaussianPosterior
from aftermap.progress import announce

__all__ = ["FitReport", "fit"]

_SMALL = 1500  # up to this many parameters the full matrix is cheap and keeps cross-layer covariance
_STRONGER = 10.0


@dataclass
class FitReport:
    """How `fit` came to its result.

    Attributes:
        costs: The structures that were considered, with their costs.
        chosen: The one that was taken.
        checks: Every self-check, in order, with the name of what was checked.
        notes: The decisions in words.
    """

    costs: list[Cost]
    chosen: Cost
    checks: list[tuple[str, SelfCheck]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


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
    **options: Any,
) -> Laplace:
    """Makes a trained network Bayesian.

    With validation data the prior and the data scale are tuned on the very predictive that `predict` uses; without, by the
    evidence. The result is compared with the network itself: where the predictive collapsed (evidence on networks with
    normalisation does that), it falls back to the last layer, then to a stronger prior, and says so.

    Args:
        model: The trained network, in eval mode.
        train_loader: The training data.
        val_loader: Held-out data, if there are any.
        likelihood: The likelihood, as for `Laplace`.
        structure: None chooses by the cost estimate: full for small networks, kron otherwise, the last layer where memory or
            time forbid more.
        params: Which weights are uncertain; "all" by default.
        memory_limit: The most bytes that the posterior may take.
        time_limit: The most seconds that the fit may take; None allows any time.
        unpack: What turns a batch of an unusual form into (inputs, targets).
        verbose: Whether to say what is done; None says it on a terminal.
        on_cost: A function that is handed the line with the costs before the work starts; None shows it like a progress bar.
        options: Further arguments of `Laplace`.

    Returns:
        A fitted and tuned `Laplace`; ``.report`` tells how it was chosen and checked.
    """
    if isinstance(params, Subnetwork):
        raise InputError(
            "fit chooses among structures of whole layers; for a subnetwork use Laplace(..., params=Subnetwork(...))"
        )
    parsed = parse_likelihood(likelihood)
    costs = estimate_costs(model, train_loader, parsed, params=params, unpack=unpack)
    chosen = _choose(costs, structure, memory_limit, time_limit)
    if on_cost is None:
        announce(describe_costs(chosen, costs), enabled=verbose)
    else:
        on_cost(describe_costs(chosen, costs))
    report = FitReport(costs, chosen)
    which: Selection = params if chosen.params == "all" else "last_layer"

    def attempt(structure: str, which: Selection) -> Laplace:
        laplace = Laplace(model, parsed, structure=structure, params=which, **options).fit(
            train_loader, unpack=unpack, progress=verbose
        )
        return laplace.tune(val_loader)

    laplace = attempt(chosen.structure, which)
    laplace.report = report
    if not _collapsed(laplace, train_loader, val_loader, report, f"{chosen.structure}, {chosen.params}", unpack):
        return laplace
    if val_loader is None and _match_dimension_if_collapsed(laplace, report, train_loader, unpack):
        _warn_of_fallback(report)
        return laplace
    if val_loader is None and which == "all":
        report.notes.append("the predictive of all layers collapsed; fell back to the last layer")
        laplace = attempt("kron", "last_layer")
        laplace.report = report
        if not _collapsed(laplace, train_loader, val_loader, report, "kron, last_layer", unpack):
            _warn_of_fallback(report)
            return laplace
    for _ in range(4):
        laplace.narrow(_STRONGER)
        report.notes.append(f"made the posterior {_STRONGER:g} times narrower")
        if not _collapsed(laplace, train_loader, val_loader, report, f"data scale {laplace.data_scale:g}", unpack):
            break
    _warn_of_fallback(report)
    return laplace


def _match_dimension_if_collapsed(
    laplace: Laplace, report: FitReport, train_loader: Iterable[Any], unpack: Unpack | None
) -> bool:
    """Whether the effective dimension of the full curvature, where it was not matched yet, makes a good predictive of a collapsed one."""
    posterior = laplace.posterior
    blocks = len(posterior.blocks) if isinstance(posterior, GaussianPosterior) else 0
    if blocks < 2 or laplace.data is None or isinstance(laplace.tuning, DimensionResult):
        return False
    try:
        result = laplace.tune(method="dimension").tuning
    except (DataError, NumericalError) as error:
        report.notes.append(f"the effective dimension could not be matched: {error}")
        return False
    if not isinstance(result, DimensionResult):
        return False
    report.notes.append(
        f"made the posterior {result.factor:.3g} times narrower, to the effective dimension of all layers"
    )
    return not _collapsed(laplace, train_loader, None, report, "effective dimension", unpack)


def _warn_of_fallback(report: FitReport) -> None:
    last = report.checks[-1][1]
    state = "still collapses" if last.collapsed else "passes"
    warnings.warn(
        f"the tuned posterior failed its self-check ({report.checks[0][1].message}): {'; '.join(report.notes)}. It now {state} "
        f"({last.message}). With validation data the prior is tuned on the predictive itself: fit(model, train, val)",
        StatisticalWarning,
        stacklevel=3,
    )


def _choose(costs: list[Cost], structure: str | None, memory_limit: float, time_limit: float | None) -> Cost:
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
    order = [full] if full.n_params <= _SMALL else []
    order += [by_key[k] for k in (("kron", "all"), ("diagonal", "all"), ("kron", "last_layer")) if k in by_key]
    # A diagonal over all layers is worse than Kronecker factors of the last one.
    order = [c for c in order if c.structure != "diagonal"] + [c for c in order if c.structure == "diagonal"]
    for cost in order:
        if fits(cost):
            return cost
    least = min(costs, key=lambda c: c.bytes)
    raise InputError(
        f"nothing fits into {memory_limit / 2**30:.1f} GB"
        + (f" and {time_limit:g} s" if time_limit else "")
        + f"; the smallest is {least}. Raise memory_limit= or time_limit=, or choose fewer parameters with params="
    )


def _collapsed(
    laplace: Laplace,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None,
    report: FitReport,
    what: str,
    unpack: Unpack | None,
) -> bool:
    device, dtype = check_device(laplace.model)
    data = train_loader if val_loader is None else val_loader
    checked = check_predictive(laplace, iterate(data, device=device, dtype=dtype, unpack=unpack))
    report.checks.append((what, checked))
    return checked.collapsed
