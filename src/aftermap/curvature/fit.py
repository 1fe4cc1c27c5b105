"""The engine's front door: the curvature of a model on data, in the structure asked for."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from aftermap import checks
from aftermap.batches import Unpack
from aftermap.curvature.passes.checkpoint import Checkpoint
from aftermap.curvature.passes.last_block import find_last_block
from aftermap.curvature.passes.plan import ModelPlan, PlanContradicted, plan_model
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts, first_batch
from aftermap.curvature.structures import (  # noqa: F401 (every module registers its structure)
    diagonal,
    ekfac,
    full,
    hessian,
    kfra,
    kron,
    low_rank,
    subset,
)
from aftermap.curvature.structures.base import STRUCTURES, Block, Factors, Structure, Treatment, find_structure
from aftermap.curvature.structures.kron import APPROACHES
from aftermap.distributed import fail_together, rank
from aftermap.errors import InputError, StatisticalWarning, UnsupportedError
from aftermap.likelihoods import Bernoulli, Likelihood, parse_likelihood
from aftermap.models import check_device
from aftermap.params import Selection, by_module, named_parameters, select, weights_hash

__all__ = ["PlannedLayers", "fit_curvature"]


@dataclass(frozen=True)
class PlannedLayers:
    """The layers of a fit, known before its pass over the data.

    Attributes:
        names: For each layer the names of its parameters.
        shapes: The shapes of all parameters, by name.
        with_one_precision: The layers whose block can have only one prior precision.
    """

    names: Mapping[str, Sequence[str]]
    shapes: Mapping[str, tuple[int, ...]]
    with_one_precision: frozenset[str]

    @staticmethod
    def of(structure: Structure, plan: ModelPlan, shapes: Mapping[str, tuple[int, ...]]) -> PlannedLayers:
        """Returns the layers that a structure will have blocks for, as long as no batch contradicts the plan."""
        if structure.blocks and all(block.joins_layers for block in structure.blocks):
            return PlannedLayers(by_module(shapes), shapes, frozenset())
        whole = [plan.layers[number] for number in plan.whole_layers]
        names = {layer.layout.name: list(layer.layout.names) for layer in whole}
        covered = {name for members in names.values() for name in members}
        names.update({name: [name] for name in shapes if name not in covered})
        one = any(block.one_precision for block in structure.blocks)
        return PlannedLayers(names, shapes, frozenset(x.layout.name for x in whole if one and x.rule.matrix))


@torch.inference_mode(False)
def fit_curvature(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: str | Likelihood,
    *,
    structure: str = "kron",
    params: Selection = "all",
    curvature: str = "auto",
    approach: str = "expand",
    samples: int = 1,
    passes: int = 1,
    chunk: int | None = None,
    rank: int | None = 50,
    subset_size: int = 300,
    small_block: int = 1024,
    accumulate: torch.dtype | None = None,
    strict: bool = False,
    unpack: Unpack | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
    check_layers: Callable[[PlannedLayers], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 100,
) -> Factors:
    """Returns Σ_n of the curvature of −log p(y_n | f(x_n, θ)) in the parameters θ.

    Args:
        model: A network with outputs [N, ..., C], in eval mode; it is unchanged afterwards.
        data: Batches: a DataLoader, a list of (x, y), of (x, y, weight) or of mappings; see ``unpack``.
        likelihood: "classification", "binary", "regression", "counts", or a likelihood object.
        structure: The approximation: "kron", "ekfac", "kfra", "diagonal", "full", "low_rank", "subset" (all of the
            Gauss-Newton matrix), "hessian" (exact, for small models), or one that was added by `register_structure`.
        params: "all", "last_layer", "last_block", names, a regular expression, or a function of (name, parameter).
        curvature: What is back-propagated: "exact", "rademacher", "sampled", "empirical", "jacobian", or "auto" (exact up
            to 20 outputs, rademacher above).
        approach: How Kronecker factors treat shared weights: "expand" or "reduce".
        samples: The number of draws for each datum, for rademacher and sampled.
        passes: The number of times to go through data that augment themselves; the scale stays that of one pass.
        chunk: The number of vectors that are back-propagated at a time; None chooses by memory.
        rank: The number of directions that "low_rank" and "subset" keep; None keeps all of "subset".
        subset_size: The number of examples that "subset" draws.
        small_block: The size up to which norm layers and parameters without a rule get a full block; larger ones get a
            diagonal.
        accumulate: The dtype of the sums; None takes the model's own, at least float32. Long sums are totalled in float64;
            dense blocks and decompositions are in float64 in any case.
        strict: Whether to refuse a selected parameter without a layer rule, instead of treating it by per-example gradients.
        unpack: A function that turns a batch of another form into (inputs, targets) or (inputs, targets, weight).
        generator: The source of random vectors, and of the examples of "subset"; None takes PyTorch's default generator.
        progress: Whether to show a bar; None shows it on a terminal.
        check_layers: A function that is called with the layers before the pass over the data, to refuse what does not fit them.
        checkpoint: A folder that keeps the sums, so that a fit that was killed goes on when it is called again with the same
            model, data and options. All processes must see it. Delete it when the result is saved.
        every: The number of batches after which the sums are written to ``checkpoint``.

    Returns:
        The factors, with the number of data seen, the loss and how each parameter was treated. In an initialised process
        group they are those of the data of all processes.

    Raises:
        InputError, DataError, UnsupportedError: Something is wrong, and the message says what to do; the model is unchanged.

    Warns:
        StatisticalWarning: The network returns probabilities where logits are needed, or a layer rule did not hold.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> data = [(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.zeros(2, 1))]
    >>> fit_curvature(net, data, "regression", structure="full").to_dense()
    tensor([[1., 2.],
            [2., 5.]], dtype=torch.float64)
    """
    entry = find_structure(structure)
    entry.check_options(curvature, damping="exact")
    checks.choice("approach", approach, APPROACHES)
    if accumulate is not None and not accumulate.is_floating_point:
        raise InputError(f"accumulate={accumulate} must be a floating-point dtype, or None for the model's own")
    if isinstance(data, Iterable):  # Anything else is refused with the first batch.
        checks.repeatable("data", data, f"a fit with structure={structure!r}")
    dtype = check_device(model)[1]
    options: dict[str, Any] = {
        "curvature": curvature,
        "approach": approach,
        "samples": checks.count("samples", samples),
        "passes": checks.count("passes", passes),
        "chunk": None if chunk is None else checks.count("chunk", chunk),
        "rank": entry.check_rank(rank),
        "subset_size": checks.count("subset_size", subset_size),
        "small_block": checks.count("small_block", small_block),
        # Sums in half precision stop growing after a few hundred data.
        "sums_dtype": accumulate or (torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype),
    }
    parsed = parse_likelihood(likelihood)
    if params == "last_block":
        batch = first_batch(model, data, unpack, together=True)
        with fail_together("looking for the last block"):
            params = find_last_block(model, batch)
    names, parameters = select(model, params), named_parameters(model)
    entry.check_size({n: tuple(parameters[n].shape) for n in names})
    batch = first_batch(model, data, unpack, together=True)
    with fail_together("looking at the first batch"):
        plan = plan_model(model, names, batch)
    del batch
    plan = plan.agree_over_processes(names)
    problem = CurvatureProblem(
        model, data, parsed, names, plan, unpack=unpack, generator=generator, show_progress=progress, **options
    )
    if check_layers is not None:
        check_layers(PlannedLayers.of(entry, plan, problem.shapes))
    if checkpoint is not None:
        problem = _with_checkpoint(problem, entry, checkpoint, every)
    while True:
        if strict:
            _check_strict(problem.plan, problem.shapes)
        try:
            blocks, counts = entry.fit(problem)
            break
        except PlanContradicted as contradicted:
            problem = _without_rules(problem, contradicted)
            _warn_of_new_start(contradicted)
    if counts.probabilities:
        _warn_of_probabilities(parsed)
    treatment = _treatment(entry, problem.plan, blocks, counts, problem.shapes)
    factors = Factors(
        structure, blocks, tuple(names), counts.n_data, counts.loss, counts.kind, treatment, counts.n_outputs
    )
    return factors.all_reduced(counts_only=entry.blocks_are_global)


def _without_rules(problem: CurvatureProblem, contradicted: PlanContradicted) -> CurvatureProblem:
    """Returns the problem without the layer rules that a batch contradicted."""
    checkpoint = problem.checkpoint
    return replace(
        problem,
        plan=problem.plan.without(contradicted.reasons),
        checkpoint=None if checkpoint is None else checkpoint.without_rules(contradicted.reasons),
    )


def _with_checkpoint(
    problem: CurvatureProblem, entry: Structure, folder: str | os.PathLike[str], every: int
) -> CurvatureProblem:
    """Returns the problem with the checkpoint of a folder: its sums, the rules it gave up, and its random numbers."""
    _check_resumable(entry, problem.passes)
    identity = _identity(problem, entry)
    checkpoint = Checkpoint.open(folder, every, identity)
    given_up = {n: why for n, why in checkpoint.given_up.items() if n in problem.plan.layers_of_parameter}
    generator = problem.generator or _generator(identity, problem.device)
    return replace(problem, plan=problem.plan.without(given_up), checkpoint=checkpoint, generator=generator)


def _check_resumable(entry: Structure, passes: int) -> None:
    """Raises where the sums of a fit cannot be kept in a checkpoint."""
    if not entry.streams_sums:
        able = ", ".join(repr(s.name) for s in STRUCTURES.values() if s.streams_sums)
        raise UnsupportedError(
            f"checkpoint= keeps sums over the data, and a fit with structure={entry.name!r} is not such a sum; allowed are {able}. Choose one "
            "of them, or fit without checkpoint="
        )
    if passes > 1:
        raise UnsupportedError(
            f"checkpoint= needs data that are the same each time, but passes={passes} is for data that augment themselves: fit with "
            "passes=1, or without checkpoint="
        )


def _identity(problem: CurvatureProblem, entry: Structure) -> dict[str, str]:
    """Returns what must be the same when a fit goes on: in words, by which a difference is told."""
    state = {**dict(problem.model.named_parameters()), **dict(problem.model.named_buffers())}
    return {
        "weights": weights_hash(state),
        "structure": entry.name,
        "parameters": " ".join(problem.names),
        "likelihood": json.dumps(problem.likelihood.config(), sort_keys=True, default=str),
        "curvature": problem.curvature,
        "approach": problem.approach,
        "samples": str(problem.samples),
        "small_block": str(problem.small_block),
        "dtype of the sums": str(problem.sums_dtype),
    }


def _generator(identity: Mapping[str, str], device: torch.device) -> torch.Generator:
    """Makes a source of random vectors that is the same for the same fit, another one on each process."""
    seed = int(identity["weights"].removeprefix("sha256:")[:15], 16)
    return torch.Generator(device).manual_seed(seed + rank())


def _check_strict(plan: ModelPlan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if not plan.uncovered:
        return
    listed = "\n".join(f"  {n} {shapes[n]}: {why}" for n, why in plan.uncovered.items())
    raise UnsupportedError(
        f"strict=True, and {len(plan.uncovered)} of {len(shapes)} selected parameters have no layer rule:\n{listed}\n"
        "Write a rule (docs/add_a_layer.md), choose others with params=, or pass strict=False for exact per-example treatment"
    )


def _warn_of_new_start(contradicted: PlanContradicted) -> None:
    if contradicted.batch > 1:
        warnings.warn(
            f"{contradicted}. {len(contradicted.reasons)} parameters are treated by exact per-example gradients instead of "
            f"their layer rules, and the fit starts again (noticed on batch {contradicted.batch})",
            StatisticalWarning,
            stacklevel=4,
        )


def _warn_of_probabilities(likelihood: Likelihood) -> None:
    binary = isinstance(likelihood, Bernoulli)
    twice = "the sigmoid" if binary else "the softmax"
    seen = "it ends with a sigmoid" if binary else "its outputs are nowhere negative and add up to 1"
    log_odds = "torch.logit(p)" if binary else "torch.log(p), since softmax(log p) = p"
    warnings.warn(
        f"the network returns probabilities ({seen}), but logits are needed: {twice} is applied twice, so that predictions are "
        f"far less certain than the network is. Take {twice} away from the end of the network; a network that cannot be changed can be "
        f"wrapped in one that returns {log_odds}",
        StatisticalWarning,
        stacklevel=4,
    )


def _treatment(
    entry: Structure,
    plan: ModelPlan,
    blocks: Sequence[Block],
    counts: DataCounts,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Treatment]:
    """Returns how each parameter was treated."""
    treatment: dict[str, Treatment] = {}
    for block in blocks:
        for name in block.shapes:
            layers = plan.layers_of_parameter.get(name, [])
            rule = type(plan.layers[layers[0]].rule).__name__ if layers else "per-example"
            note = plan.uncovered.get(name, "")
            if name in plan.unused and name not in counts.used:
                note = "unused: the outputs do not depend on it"
            elif len(layers) > 1:
                note = "tied between layers of different kinds"
            if not entry.reads_layers:
                rule, note = "products", ""
            treatment[name] = Treatment(block.kind, rule, note)
    named = [name for block in blocks for name in block.shapes]
    if sorted(named) != sorted(shapes):
        raise InputError(
            f"the fit of structure={entry.name!r} returned blocks over {sorted(named)}, but its blocks must hold each of "
            f"{sorted(shapes)} once; aftermap.testing.check_structure({entry.name!r}) checks a structure"
        )
    return {n: treatment[n] for n in shapes}
