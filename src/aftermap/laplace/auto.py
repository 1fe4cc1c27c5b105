"""One call: estimate the cost, choose a structure, fit, tune, check, and say what came out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aftermap.batches import Batch, Unpack, iterate, unpack_batch
from aftermap.curvature.passes.stream import first_batch
from aftermap.distributed import broadcast_number, fail_together, gathered
from aftermap.errors import InputError, StatisticalWarning, warn_caller
from aftermap.laplace.cost import Cost, FirstLook, describe_costs, rehearsed_candidate, rehearsed_cost, shape_costs
from aftermap.laplace.fitted import TuningResult
from aftermap.laplace.laplace import Laplace
from aftermap.laplace.output_noise import residual_noise
from aftermap.laplace.self_check import SelfCheck, check_predictive
from aftermap.laplace.self_consistent import CavityCheck, SelfConsistentResult
from aftermap.laplace.subnetwork import Subnetwork
from aftermap.likelihoods import Gaussian, Likelihood, infer_task, parse_likelihood
from aftermap.models import call_model, check_device, check_is_network, check_modes, explain_model_errors
from aftermap.params import Selection, check_parameters
from aftermap.posteriors.base import has_noise
from aftermap.predictive.display import html_table
from aftermap.progress import announce, showing

__all__ = ["FitReport", "fit", "predictions_after_fit"]

_ORDER = "fit(model, likelihood, train_loader, val_loader)"
_SMALL = 1500  # up to this many parameters the full matrix is cheap and keeps cross-layer covariance
_SMALL_REGRESSION = 3000  # the same of a regression, for parameters or for data times outputs
_CHECKED = 1000  # validation data that tuning and the check look at
_LONG = 60.0  # seconds of a fit for which the alternatives are rehearsed, too


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
            # What the tuning says of its own check stands in the next line.
            tuning = self.tuning.found if isinstance(self.tuning, SelfConsistentResult) else self.tuning
            lines.append(f"tuning: {tuning}")
        if self.check is not None:
            lines.append(f"check {self.check.state}: {self.check.message}")
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        named = [line.partition(": ") for line in str(self).split("\n")]
        return html_table("fit", {"": [n for n, _, _ in named], " ": [t for _, _, t in named]}, left=["", " "])

    @property
    def checks(self) -> list[tuple[str, SelfCheck | CavityCheck]]:
        """The old form of `check`, a list of names and checks."""
        warnings.warn("FitReport.checks is now one check: FitReport.check", DeprecationWarning, stacklevel=2)
        return [] if self.check is None else [(str(self.chosen), self.check)]


@torch.inference_mode(False)
def fit(
    model: nn.Module,
    *arguments: Any,
    likelihood: str | Likelihood | None = None,
    train_loader: Iterable[Any] | None = None,
    val_loader: Iterable[Any] | None = None,
    structure: str | None = None,
    params: Selection = "all",
    memory_limit: float = 4 * 2**30,
    time_limit: float | None = None,
    unpack: Unpack | None = None,
    verbose: bool | None = None,
    on_cost: Callable[[str], None] | None = None,
    predictions: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 100,
    **options: Any,
) -> Laplace:
    """Makes a trained network Bayesian: ``fit(model, likelihood, train_loader, val_loader)``.

    The likelihood and the validation data may be left out: ``fit(model, train_loader)``. The structure is chosen by its cost, the
    hyperparameters by `Laplace.tune`: with validation data by their labels, without by the training data. The result is then compared with the network itself, once; where it is worse, a warning says so.

    Args:
        model: The trained network, in eval mode.
        arguments: The likelihood, the training data and the validation data, in this order, as for `Laplace`; each may also be
            given by its name.
        likelihood: The likelihood, as for `Laplace`. None finds it by the targets, and says which: whole numbers are classes,
            or binary where the network has one output; other numbers are a regression. The word "regression" gives each of
            several outputs its own noise, in the ratio of their residuals.
        train_loader: The training data.
        val_loader: Held-out data, if there are any.
        structure: None chooses by the cost estimate: full for small networks, kron otherwise. Where a regression has fewer data than weights, the
            full matrix takes its dual form: structure="subset" with all data.
        params: Which weights are uncertain. "all" leaves the choice: all layers, or the last block with its head in a network that is
            made of blocks, where predictions are several times cheaper and unusual inputs are found at least as well; the last
            layer where memory or time forbid more.
        memory_limit: The most bytes that the posterior may take.
        time_limit: The most seconds that the fit may take; None allows any time.
        unpack: What turns a batch of an unusual form into (inputs, targets).
        verbose: Whether to say what is done; None says it on a terminal.
        on_cost: A function that is handed the line with the costs before the work starts; None shows it like a progress bar.
        predictions: The number of inputs that the caller will predict afterwards, which the line with the costs counts.
        checkpoint: A folder that keeps the sums of the fit, so that one that was killed goes on; see `Laplace.fit`.
        every: The number of batches after which they are written.
        options: Further arguments of `Laplace`.

    Returns:
        A fitted and tuned `Laplace`; ``print(la.report)`` tells how it was chosen, tuned and checked.

    Warns:
        StatisticalWarning: The predictive is worse than the network, or the data cannot decide what they should.
    """
    check_is_network(model, _ORDER)
    check_parameters(model)
    if isinstance(params, Subnetwork):
        raise InputError(
            "fit chooses among structures of whole layers; for a subnetwork use Laplace(..., params=Subnetwork(...))"
        )
    likelihood, train_loader, val_loader = _arranged(arguments, likelihood, train_loader, val_loader)
    val_loader = list(val_loader) if isinstance(val_loader, Iterator) else val_loader  # it is gone through twice
    notes = []
    if likelihood is None:
        likelihood = _inferred(model, train_loader, unpack)
        notes.append(
            f"likelihood: {likelihood}, inferred from the targets; pass likelihood= if they mean something else"
        )
        announce(notes[0], enabled=verbose)
    parsed, by_word = parse_likelihood(likelihood), isinstance(likelihood, str)
    regression = has_noise(parsed)
    drawn = options.get("subset_size", _SMALL_REGRESSION if regression else 300)
    look = FirstLook.at(model, train_loader, unpack)
    if regression and by_word:
        by_output = _with_noise_by_output(model, look.batch, val_loader, train_loader, unpack)
        if by_output is not None:
            parsed = by_output
            notes.append(
                "noise: one for each output, in the ratio of their residuals; likelihood=Gaussian(noise=...) sets another"
            )
    costs = shape_costs(model, look, parsed, params=params, subset_size=drawn)
    if time_limit is not None:
        costs = [rehearsed_candidate(model, look, parsed, cost, params, drawn) for cost in costs]
    with fail_together("choosing a structure"):
        chosen = _choose(costs, structure, memory_limit, time_limit, regression)
    # Each process sees its own data and clock; all take the choice of the first.
    place = broadcast_number(costs.index(chosen))
    chosen = costs[place]
    if chosen.structure == "subset" and regression and structure is None:
        options = {"subset_size": drawn, "rank": None, **options}
    which: Selection = params if chosen.params == "all" else chosen.params
    laplace = Laplace(model, parsed, structure=chosen.structure, params=which, **options)
    held_out = None if val_loader is None else _size_of(val_loader)
    chosen = rehearsed_cost(laplace, look, chosen, validation=held_out) or chosen
    if chosen.seconds > _LONG and time_limit is None:
        costs = [
            c if i == place else rehearsed_candidate(model, look, parsed, c, params, drawn) for i, c in enumerate(costs)
        ]
    costs[place] = chosen
    line = describe_costs(chosen, costs, predictions_after_fit(val_loader) + predictions)
    if on_cost is None:
        announce(line, enabled=verbose)
    else:
        on_cost(line)
    with showing(verbose):
        laplace.fit(train_loader, unpack=unpack, checkpoint=checkpoint, every=every).tune(val_loader)
        check = _check(laplace, val_loader, unpack)
    laplace.report = FitReport(costs, chosen, laplace.tuning, check, notes)
    _warn_if_worse(check)
    return laplace


def _warn_if_worse(check: SelfCheck | CavityCheck | None) -> None:
    """Warns of what validation labels speak against; what tuning without labels found out about itself it has said already."""
    if not isinstance(check, SelfCheck) or check.passed:
        return
    message = f"check FAILED on the validation data: {check.message}"
    if not check.at_chance:
        message = (
            f"the Bayesian predictive is worse than the network on the validation data ({check.message}). The network's own answers are "
            "la.predictor.map_prediction(x); another structure= or params='last_layer' may do better, and more validation data tell more"
        )
    warn_caller(message, StatisticalWarning)


def predictions_after_fit(val_loader: Iterable[Any] | None) -> int:
    """Returns how many inputs the check predicts: up to 1,000 validation data, and none without them."""
    return 0 if val_loader is None else min(_CHECKED, _size_of(val_loader))


def _size_of(val_loader: Iterable[Any]) -> int:
    """Returns the number of validation data; where it cannot be known, as many as tuning looks at."""
    size = getattr(getattr(val_loader, "dataset", None), "__len__", None)
    if size is not None:
        return int(size())
    batches = _number_of_batches(val_loader)
    if batches is None:
        return _CHECKED
    first = next(iter(val_loader), None)
    return batches * (unpack_batch(first).size if isinstance(first, tuple | list) and len(first) in (2, 3) else 1)


def _is_likelihood(argument: object) -> bool:
    return isinstance(argument, str | Likelihood) or (isinstance(argument, type) and issubclass(argument, Likelihood))


def _arranged(
    arguments: tuple[Any, ...], likelihood: Any, train_loader: Any, val_loader: Any
) -> tuple[Any, Iterable[Any], Iterable[Any] | None]:
    """Returns the likelihood, the training data and the validation data, by their places and names.

    Raises:
        InputError: One is given twice or missing, or the likelihood does not stand second.
    """
    rest, order = list(arguments), _ORDER
    if len(rest) == 3 and _is_likelihood(rest[2]) and not _is_likelihood(rest[0]):
        warn_caller(f"the likelihood stands second now, as in Laplace: {order}", DeprecationWarning)
        rest.insert(0, rest.pop())
    if rest and (_is_likelihood(rest[0]) or (rest[0] is None and len(rest) > 1)):
        argument = rest.pop(0)
        if likelihood is not None and argument is not None:
            raise InputError(
                f"the likelihood is given twice, as {argument!r} and as likelihood={likelihood!r}; the order is {order}"
            )
        likelihood = likelihood if argument is None else argument
    wrong = next((a for a in (*rest, train_loader, val_loader) if _is_likelihood(a)), None)
    if wrong is not None:
        raise InputError(f"{wrong!r} stands where data are expected; the order is {order}")
    for name, value in (("train_loader", train_loader), ("val_loader", val_loader)):
        if rest and value is not None and (name == "train_loader" or len(rest) > 1):
            raise InputError(f"{name} is given twice, by its place and by its name; the order is {order}")
    if len(rest) > 2:
        raise InputError(
            f"fit takes at most three arguments after the model without a name, but got {len(arguments)}; the order is {order}"
        )
    train = rest[0] if rest else train_loader
    if train is None:
        raise InputError(f"fit needs the training data: {order}")
    return likelihood, train, rest[1] if len(rest) > 1 else val_loader


def _inferred(model: nn.Module, data: Iterable[Any], unpack: Unpack | None) -> str:
    """Returns the word for the likelihood that the first targets show, those of the first process for all."""
    check_modes(model)  # before the first forward pass, which would move BatchNorm's statistics
    batch = first_batch(model, data, unpack, together=True)
    with fail_together("inferring the likelihood"):
        with explain_model_errors(model, lambda: batch.inputs), torch.no_grad():
            outputs = call_model(model, batch.inputs)
        task = infer_task(batch.targets, outputs)
    return gathered(task)[0]


def _with_noise_by_output(
    model: nn.Module,
    batch: Batch,
    held_out: Iterable[Any] | None,
    training: Iterable[Any],
    unpack: Unpack | None,
) -> Likelihood | None:
    """Returns a Gaussian likelihood with the residuals of several outputs as their noise; None where there is one output."""
    with explain_model_errors(model, lambda: batch.inputs), torch.no_grad():
        outputs = call_model(model, batch.take(torch.arange(1)).inputs)
    if outputs.dim() < 2 or outputs.shape[-1] == 1:
        return None
    noise = residual_noise(model, outputs.shape[-1], held_out, training, unpack=unpack)
    return None if noise is None else Gaussian(noise)


def _check(laplace: Laplace, val_loader: Iterable[Any] | None, unpack: Unpack | None) -> SelfCheck | CavityCheck | None:
    if val_loader is None:
        return getattr(laplace.tuning, "check", None)
    device, dtype = check_device(laplace.model)
    batches = iterate(val_loader, device=device, dtype=dtype, unpack=unpack)
    return check_predictive(laplace, batches, total=_number_of_batches(val_loader))


def _number_of_batches(loader: Iterable[Any]) -> int | None:
    """Returns the number of batches of a loader; None where nobody knows it."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a loader over a stream
        return None


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
        # The same posterior from the Gram matrix of the data; the smaller of the two matrices is the cheaper one.
        cheaper = full.n_params > _SMALL and full.n_rows < full.n_params
        order.insert(0 if cheaper else len(order), by_key[("subset", "all")])
    # A diagonal over all layers is worse than Kronecker factors of the last one.
    preferred = (("kron", "last_block"), ("kron", "all"), ("kron", "last_layer"), ("diagonal", "all"))
    order += [by_key[k] for k in preferred if k in by_key]
    for cost in order:
        if fits(cost):
            return cost
    least = min(costs, key=lambda c: c.bytes)
    raise InputError(
        f"nothing fits into {memory_limit / 2**30:.1f} GB"
        + (f" and {time_limit:g} s" if time_limit is not None else "")
        + f"; the smallest is {least}. Raise memory_limit= or time_limit=, or choose fewer parameters with params="
    )
