"""What a fit will cost before it is started: time from a rehearsal on few data, memory from the shapes.

`estimate_cost` rehearses one approximation (`aftermap.laplace.rehearsal`). To choose among several, their times are first compared by
formulas. One unit u is a forward and backward pass with the gradients of all parameters on the first batch, measured. The curvatures
cost multiples of it that follow from the layers' shapes: with F the forward flops of all layers with weight matrices, b the share of
them that vectors are propagated back through, and sums over the layers that are uncertain,

    Kronecker:  (1 + bV + r_A/2 + V r_B/2)/3 u,   r_A = Σ N T D²/F,  r_B = Σ N T O²/F,  V back-propagated vectors,
    diagonal:   (1 + 2bV)/3 u,        full: the same plus P² per vector and datum,
    subset:     (1 + 2bV m/N)/3 u for m of N data, plus the Gram matrix of their V m rows,

plus eigendecompositions, whose time is measured. A prediction of one input propagates all C outputs back and contracts each
layer's Jacobian with its covariance: with r_P = Σ T D O/F' for weights that are shared over T positions, per forward pass F' of one input,

    Kronecker:  1 + bC + C r_P + r_A + C r_B forward passes,   diagonal: 1 + bC + C r_P,   full and subset: also C P² and C P R.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from aftermap.batches import Batch, Unpack, unpack_batch
from aftermap.curvature.passes.last_block import find_last_block, find_last_layer, last_block
from aftermap.curvature.passes.plan import find_layers
from aftermap.curvature.passes.record import record_calls
from aftermap.curvature.passes.stream import first_batch
from aftermap.curvature.passes.vectors import resolve_kind
from aftermap.curvature.structures.subset import subset_work
from aftermap.distributed import is_distributed
from aftermap.errors import AftermapError
from aftermap.laplace.laplace import Laplace
from aftermap.laplace.rehearsal import dense_seconds, rehearse
from aftermap.likelihoods import Likelihood
from aftermap.linalg import DenseWork
from aftermap.models import call_model, check_modes, explain_model_errors, only_require_grad
from aftermap.params import Selection, named_parameters, select
from aftermap.progress import in_seconds

__all__ = [
    "Cost",
    "FirstLook",
    "describe_costs",
    "estimate_cost",
    "estimate_costs",
    "rehearsed_candidate",
    "rehearsed_cost",
    "shape_costs",
]

_SHORT = 0.5  # seconds by the shapes, below which nobody waits for the fit, and a rehearsal would be most of it
_REHEARSED_BYTES = 2**27  # structures that are larger are not rehearsed to be compared with others
_CANDIDATES = (
    ("kron", "all"),
    ("ekfac", "all"),
    ("diagonal", "all"),
    ("full", "all"),
    ("subset", "all"),
    ("kron", "last_block"),
    ("kron", "last_layer"),
)


@dataclass(frozen=True)
class Cost:
    """An estimate of what a structure will cost.

    Attributes:
        structure: The structure of the curvature.
        params: The parameters that it is for: "all" (of those that were chosen), "last_block" or "last_layer".
        n_params: How many numbers are uncertain.
        seconds: The time of the fit and of the decompositions.
        bytes: The memory of the factors and of the posterior, beside what training needs.
        n_data: How many data there are, as far as the loader tells.
        n_rows: The number of data times the number of their outputs: how many rows the Jacobian of all data has.
        seconds_per_prediction: The time that the linearised predictive takes for one input.
        seconds_of_tuning: The time of the tuning that follows the fit; 0 where it is not known.
    """

    structure: str
    params: str
    n_params: int
    seconds: float
    bytes: float
    n_data: int = 0
    n_rows: int = 0
    seconds_per_prediction: float = 0.0
    seconds_of_tuning: float = 0.0

    def total(self, predictions: int) -> float:
        """Returns the seconds of the fit, of the tuning and of so many predictions: those that a check and thresholds make."""
        return self.seconds + self.after_fit(predictions)

    def after_fit(self, predictions: int) -> float:
        """Returns the seconds of the tuning and of so many predictions."""
        return self.seconds_of_tuning + predictions * self.seconds_per_prediction

    def __str__(self) -> str:
        where = "" if self.params == "all" else f" of the {self.params.replace('_', ' ')}"
        return f"{self.structure}{where}, {self.n_params:,} parameters: about {in_seconds(self.seconds)} and {_memory(self.bytes)}"


def _memory(size: float) -> str:
    return f"{max(1.0, size / 2**20):,.0f} MB" if size < 2**30 else f"{size / 2**30:,.1f} GB"


def describe_costs(chosen: Cost, costs: Sequence[Cost], predictions: int = 0) -> str:
    """Says in one line the choice and its alternatives.

    Args:
        chosen: The choice.
        costs: The choice and its alternatives.
        predictions: How many inputs will be predicted after the fit, for a check and thresholds.
    """
    others = "; ".join(
        f"{c.structure}{'' if c.params == 'all' else ' ' + c.params} {in_seconds(c.seconds)} {_memory(c.bytes)}"
        for c in costs
        if c is not chosen
    )
    after = chosen.after_fit(predictions)
    more = f", then {in_seconds(after)} for tuning and checks" if after >= 1 else ""
    return f"{chosen}{more}" + (f" (alternatives: {others})" if others else "")


@dataclass(frozen=True)
class FirstLook:
    """What the estimates of all structures start from.

    Attributes:
        batch: The first batch.
        n_data: The number of data.
        batches: The number of batches; 1 where it is unknown.
        fetch: The seconds that a batch takes to be loaded, where no other process does it meanwhile.
    """

    batch: Batch
    n_data: int
    batches: int
    fetch: float

    @staticmethod
    def at(model: nn.Module, data: Iterable[Any], unpack: Unpack | None) -> FirstLook:
        """Looks at the first batch of the data, and how long the second takes to come."""
        check_modes(model)  # before the first forward pass, which would move BatchNorm's statistics
        batch = first_batch(model, data, unpack, together=True)
        return FirstLook(batch, _size_of(data, batch, unpack), _count(data), _fetch_seconds(data))


def _fetch_seconds(data: Iterable[Any]) -> float:
    """Returns the seconds between the first batch and the second; 0 where worker processes load them, or where there is one."""
    if isinstance(data, Iterator) or getattr(data, "num_workers", 0) > 0 or _count(data) < 2:
        return 0.0
    with torch.random.fork_rng():
        batches = iter(data)
        next(batches, None)
        start = time.perf_counter()
        next(batches, None)
        return time.perf_counter() - start


def estimate_cost(
    laplace: Laplace,
    data: Iterable[Any],
    *,
    validation: int | None = None,
    tuned: bool = True,
    unpack: Unpack | None = None,
) -> Cost:
    """Returns the cost of one approximation, by a rehearsal of its fit and of its tuning on some of the first batch.

    The rehearsal aims at a quarter of a second, or 1.5 % of the fit (the first one in a process takes longer), and changes nothing.

    Args:
        laplace: The approximation as it will be fitted, with any structure, also one of your own.
        data: The training data. Where the number of batches is unknown (no ``len``), the time is for one batch.
        validation: The number of validation data that it will be tuned on; None tunes without them.
        tuned: Whether it will be tuned.
        unpack: What turns a batch of an unusual form into (inputs, targets).

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    >>> data = [(torch.randn(8, 2), torch.arange(8) % 2)] * 5
    >>> cost = estimate_cost(Laplace(net, "classification", structure="full"), data)
    >>> cost.n_params, cost.n_data, cost.seconds > 0
    (17, 40, True)
    """
    look = FirstLook.at(laplace.model, data, unpack)
    with explain_model_errors(laplace.model, lambda: look.batch.inputs):
        return _by_rehearsal(laplace, look, validation, tuned)


def _by_rehearsal(
    laplace: Laplace, look: FirstLook, validation: int | None, tuned: bool, shapes: Cost | None = None
) -> Cost:
    rehearsal = rehearse(laplace, look.batch, look.n_data, validation=validation, tuned=tuned, fetch=look.fetch)
    if shapes is None:
        which = laplace.params if laplace.params in ("last_layer", "last_block") else "all"
        rows = look.n_data * rehearsal.n_outputs
        shapes = Cost(laplace.structure, str(which), rehearsal.n_params, 0.0, rehearsal.bytes, look.n_data, rows)
    return replace(
        shapes, seconds=rehearsal.fit, seconds_per_prediction=rehearsal.prediction, seconds_of_tuning=rehearsal.tuning
    )


def rehearsed_cost(
    laplace: Laplace, look: FirstLook, shapes: Cost | None, *, validation: int | None = None, tuned: bool = True
) -> Cost | None:
    """Returns the cost by a rehearsal; that by the shapes where the fit is short, in a process group, or where few data are not enough.

    Shapes say nothing of parameters outside the layers that have a rule (a recurrent layer): such a network is always rehearsed.

    Args:
        laplace: The approximation as it will be fitted.
        look: The first look at the data.
        shapes: The cost by the shapes, if there is one.
        validation: The number of validation data; None for none.
        tuned: Whether it will be tuned.
    """
    if is_distributed():  # Each process has its own clock, and would stop after another number of rehearsals.
        return shapes
    predictions = 0 if not tuned else 500 if validation is None else 2 * min(1000, validation)
    if shapes is not None and shapes.total(predictions) < _SHORT and _has_rules_for_all(laplace.model):
        return shapes
    try:
        return _by_rehearsal(laplace, look, validation, tuned, shapes)
    except AftermapError:  # The fit itself will say what is wrong, if few data are not the reason.
        return shapes


def _has_rules_for_all(model: nn.Module) -> bool:
    """Tells whether every parameter belongs to a layer whose gradients follow from a rule."""
    names = [n for n, p in named_parameters(model).items() if p.is_floating_point()]
    known = find_layers(model, names).layers_of_parameter
    return all(n in known for n in names)


def estimate_costs(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    *,
    params: Selection = "all",
    subset_size: int = 300,
    unpack: Unpack | None = None,
) -> list[Cost]:
    """Returns the costs of the structures that are worth considering, each by a rehearsal on some of the first batch.

    Args:
        model: The trained network, in eval mode.
        data: The training data. Where the number of batches is unknown (no ``len``), the time is for one batch.
        likelihood: The likelihood of the targets.
        params: Which weights are uncertain. The last block (of a network that is made of blocks) and the last layer are
            considered beside "all".
        subset_size: The number of examples of structure="subset".
        unpack: What turns a batch of an unusual form into (inputs, targets).
    """
    look = FirstLook.at(model, data, unpack)
    costs = shape_costs(model, look, likelihood, params=params, subset_size=subset_size)
    return [rehearsed_candidate(model, look, likelihood, c, params, subset_size) for c in costs]


def rehearsed_candidate(
    model: nn.Module, look: FirstLook, likelihood: Likelihood, cost: Cost, params: Selection, subset_size: int
) -> Cost:
    """Returns the cost of one candidate by a rehearsal of its fit, without a tuning; large ones keep the cost by their shapes."""
    if cost.bytes > _REHEARSED_BYTES:
        return cost
    which = params if cost.params == "all" else cost.params
    laplace = Laplace(model, likelihood, structure=cost.structure, params=which, subset_size=subset_size)
    return rehearsed_cost(laplace, look, cost, tuned=False) or cost


def shape_costs(
    model: nn.Module, look: FirstLook, likelihood: Likelihood, *, params: Selection = "all", subset_size: int = 300
) -> list[Cost]:
    """Returns the costs of the structures that are worth considering, by the shapes of the layers and one measured batch."""
    batch = look.batch
    with explain_model_errors(model, lambda: batch.inputs):
        shapes = _Shapes.of(model, batch, likelihood, look.n_data, look.batches)
    chosen = {"all": select(model, find_last_block(model, batch) if params == "last_block" else params)}
    if params == "all":
        chosen["last_layer"] = find_last_layer(model, batch)
        block = _block_of_blocks(model, batch)
        if block is not None:
            chosen["last_block"] = block
    return [
        shapes.cost(structure, which, chosen[which], subset_size) for structure, which in _CANDIDATES if which in chosen
    ]


def _size_of(data: Iterable[Any], batch: Batch, unpack: Unpack | None) -> int:
    """Returns the number of data, as far as a loader tells."""
    size = getattr(getattr(data, "dataset", None), "__len__", None)
    if size is not None:
        return int(size())
    if isinstance(data, list | tuple):
        return sum(unpack_batch(item, unpack).size for item in data)
    return batch.size * _count(data)


def _count(data: Iterable[Any]) -> int:
    """Returns the number of batches; 1 where it is unknown, as for a loader over a stream, which has ``__len__`` and raises there."""
    try:
        return len(data) if isinstance(data, Sized) else 1
    except TypeError:
        return 1


def _block_of_blocks(model: nn.Module, batch: Batch) -> list[str] | None:
    """Returns the parameters of the last block of a network that is made of blocks; None for other networks."""
    try:
        block = last_block(model, batch)
    except AftermapError:
        return None
    return list(block.names) if block.is_module else None


@dataclass(frozen=True)
class _Shapes:
    """What the costs of all structures are worked out from.

    Attributes:
        model: The network.
        batch: The first batch.
        n_data: The number of data.
        batches: The number of batches.
        unit: The seconds of a forward and backward pass over the batch.
        vectors: The number of vectors that are propagated back for each datum.
        outputs: The number of outputs of a datum.
    """

    model: nn.Module
    batch: Batch
    n_data: int
    batches: int
    unit: float
    vectors: int
    outputs: int

    @staticmethod
    def of(model: nn.Module, batch: Batch, likelihood: Likelihood, n_data: int, batches: int) -> _Shapes:
        names = [n for n, p in named_parameters(model).items() if p.is_floating_point()]
        with torch.no_grad():
            outputs = call_model(model, batch.inputs)
        exact = resolve_kind("auto", outputs) == "exact"
        vectors = likelihood.columns(outputs.shape[-1]) * math.prod(outputs.shape[1:-1]) if exact else 1
        return _Shapes(model, batch, n_data, batches, _unit(model, batch, names), vectors, math.prod(outputs.shape[1:]))

    def cost(self, structure: str, which: str, names: Sequence[str], subset_size: int) -> Cost:
        """Returns the cost of a structure over some parameters."""
        parameters = named_parameters(self.model)
        every = [n for n, p in parameters.items() if p.is_floating_point()]
        plan = find_layers(self.model, every)
        with only_require_grad(self.model, every), record_calls(plan) as calls:
            call_model(self.model, self.batch.inputs)
        uncertain = {i for i, layer in enumerate(plan.layers) if any(n in names for n in layer.layout.names)}
        size, vectors = sum(parameters[n].numel() for n in names), self.vectors
        forward = behind = inner = outer = shared = memory = 0.0
        widths: list[int] = []
        reached = False
        for call in calls:
            layout = plan.layers[call.layer].layout
            rows = math.prod(call.out_shape) / max(1, layout.out)  # examples · positions · groups
            flops = rows * layout.in_ * layout.out
            forward += flops
            reached |= call.layer in uncertain
            behind += flops if reached else 0.0
            if call.layer in uncertain:
                inner += rows * layout.in_**2 / 2
                outer += rows * layout.out**2 / 2
                shared += flops if rows > self.batch.size * layout.groups else 0.0
        for i in uncertain:
            layer = plan.layers[i]
            wide = 0 if layer.rule.one_hot else layer.layout.in_
            widths += [wide, layer.layout.out] * layer.layout.groups
            memory += layer.layout.groups * 20 * (wide**2 + layer.layout.out**2)
        forward = max(forward, 1.0)
        back = vectors * behind / forward
        drawn = min(subset_size, self.n_data)
        rows = drawn * vectors
        passes = {
            "kron": 1 + back + inner / forward + vectors * outer / forward,
            "ekfac": 2 + 3 * back + inner / forward + vectors * outer / forward,
            "diagonal": 1 + 2 * back,
            "full": 1 + 2 * back + vectors * self.batch.size * size**2 / forward,
            "subset": 1 + 2 * back * drawn / max(1, self.n_data),
        }[structure]
        decomposed = min(rows, size)
        work = {
            "kron": DenseWork(0.0, tuple(widths)),
            "ekfac": DenseWork(0.0, tuple(widths)),
            "full": DenseWork(0.0, (size,)),
            "subset": subset_work(size, rows, None),
        }.get(structure, DenseWork())
        memory_of = {
            "ekfac": memory + 16.0 * size,
            "diagonal": 16.0 * size,
            "full": 28.0 * size**2,
            "subset": 12.0 * rows * size,
        }
        seconds = self.batches * self.unit * passes / 3 + dense_seconds(work)
        contracted = {
            "kron": 2 * inner + 2 * self.outputs * outer,
            "ekfac": 2 * inner + 2 * self.outputs * outer,
            "full": self.batch.size * self.outputs * float(size) ** 2,
            "subset": self.batch.size * self.outputs * float(size) * decomposed,
        }.get(structure, 0.0)
        of_prediction = 1 + self.outputs * (behind + shared) / forward + contracted / forward
        return Cost(
            structure,
            which,
            size,
            seconds,
            memory_of.get(structure, memory),
            self.n_data,
            self.n_data * self.outputs,
            self.unit / 3 / self.batch.size * of_prediction,
        )


def _unit(model: nn.Module, batch: Batch, names: Sequence[str]) -> float:
    """Returns seconds of one forward and backward pass."""
    parameters = named_parameters(model)
    best = math.inf
    with only_require_grad(model, names), torch.enable_grad():
        for _ in range(2):
            start = time.perf_counter()
            total = call_model(model, batch.inputs).sum()
            torch.autograd.grad(total, [parameters[n] for n in names], allow_unused=True)
            best = min(best, time.perf_counter() - start)
    return best
