"""The engine's front door: the curvature of a model on data, in the structure asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from aftermap.batches import Unpack
from aftermap.curvature.passes.backward import Accumulator, Block, ExampleAccumulator
from aftermap.curvature.passes.plan import Probe, agreed, probe
from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.passes.stream import Seen, Stream
from aftermap.curvature.passes.vectors import VECTOR_KINDS
from aftermap.curvature.rules.base import LayerRule
from aftermap.curvature.structures.base import Factors, Treatment
from aftermap.curvature.structures.diagonal import DiagonalSum, SiteDiagonalAccumulator
from aftermap.curvature.structures.ekfac import EigenAccumulator
from aftermap.curvature.structures.full import FullBlock, FullSum
from aftermap.curvature.structures.hessian import full_hessian
from aftermap.curvature.structures.kfra import KfraAccumulator
from aftermap.curvature.structures.kron import APPROACHES, KronAccumulator, KronBlock, decompose_bases
from aftermap.curvature.structures.low_rank import LowRankBlock, low_rank_ggn
from aftermap.distributed import all_reduce_, is_distributed, same_everywhere, together
from aftermap.errors import DataError, InputError, UnsupportedError
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.models import check_device
from aftermap.params import Selection, named_parameters, select

__all__ = ["STRUCTURES", "fit_curvature"]

STRUCTURES = ("kron", "ekfac", "kfra", "diagonal", "full", "low_rank", "hessian")
MAX_FULL = 20_000


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
    rank: int = 50,
    small_block: int = 1024,
    accumulate: torch.dtype | None = None,
    strict: bool = False,
    unpack: Unpack | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Factors:
    """Σ_n of the curvature of −log p(y_n | f(x_n, θ)) in the parameters θ.

    Args:
        model: a network with outputs [N, ..., C], in eval mode; it is unchanged afterwards.
        data: batches: a DataLoader, a list of (x, y), of (x, y, weight) or of mappings; see ``unpack``.
        likelihood: "classification", "binary", "regression", "counts", or a likelihood object.
        structure: kron, ekfac, kfra, diagonal, full, low_rank (all of the GGN), or hessian (exact, small models).
        params: "all", "last_layer", names, a regular expression, or a function of (name, parameter).
        curvature: what is back-propagated: exact, rademacher, sampled, empirical, jacobian, or auto (exact up to
            20 outputs, rademacher above).
        approach: Kronecker factors of shared weights: expand or reduce.
        samples: draws per datum for rademacher and sampled.
        passes: how often to go through data that augment themselves; the scale stays that of one pass.
        chunk: vectors back-propagated at a time; None chooses by memory.
        rank: for low_rank.
        small_block: norm layers and parameters without a rule get a full block up to this size, else a diagonal.
        accumulate: dtype of the sums; None: the model's own, at least float32. Dense blocks and decompositions are in float64 in any
            case.
        strict: raise if a selected parameter has no layer rule, instead of treating it by per-example gradients.
        unpack: turns a batch of another form into (inputs, targets) or (inputs, targets, weight).
        generator: for rademacher and sampled; None: PyTorch's default generator.
        progress: show a bar; None: on a terminal.

    Returns:
        The factors, with the number of data seen, the loss and how each parameter was treated. In an initialised
        process group: of the data of all processes.

    Raises:
        InputError, DataError, UnsupportedError: with what is wrong and what to do; the model is unchanged.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> data = [(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.zeros(2, 1))]
    >>> fit_curvature(net, data, "regression", structure="full").to_dense()
    tensor([[1., 2.],
            [2., 5.]], dtype=torch.float64)
    """
    _check_options(
        structure=(structure, STRUCTURES),
        curvature=(curvature, ("auto", *VECTOR_KINDS)),
        approach=(approach, APPROACHES),
    )
    _check_counts(
        samples=samples, passes=passes, rank=rank, small_block=small_block, chunk=1 if chunk is None else chunk
    )
    _check_together(structure, curvature, accumulate, data, passes)
    names = select(model, params)
    stream = Stream(
        model,
        data,
        parse_likelihood(likelihood),
        names,
        curvature,
        samples,
        chunk,
        passes,
        unpack,
        generator,
        progress,
        split=structure != "kfra",
    )
    with together("looking at the first batch"):
        found = probe(model, names, stream.first())
    found = agreed(found, names)
    own = named_parameters(model)
    shapes = {n: tuple(own[n].shape) for n in names}
    if strict:
        _check_strict(found, shapes)
    if structure in ("hessian", "low_rank"):
        return _by_products(structure, stream, shapes, rank)
    if structure == "full":
        _check_full(shapes)
    device, model_dtype = check_device(model)
    # Sums in half precision stop growing after a few hundred data.
    own_dtype = torch.float32 if model_dtype in (torch.float16, torch.bfloat16) else model_dtype
    dtype = own_dtype if accumulate is None else accumulate
    planned = _Plan(found, shapes, stream.likelihood, structure, approach, dtype, device, small_block)
    factors = _ekfac(stream, planned, model_dtype, own_dtype) if structure == "ekfac" else _summed(stream, planned)
    return replace(factors, names=tuple(names), treatment=planned.treatment(factors.blocks))


def _check_options(**options: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, allowed) in options.items():
        if value not in allowed:
            raise InputError(f"{name}={value!r} is not known; allowed are {', '.join(map(repr, allowed))}")


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r} must be a whole number of at least 1")


def _check_together(
    structure: str, curvature: str, accumulate: torch.dtype | None, data: Iterable[Any], passes: int
) -> None:
    """Options that are known one by one, but do not fit together."""
    if structure in ("hessian", "low_rank") and curvature not in ("auto", "exact"):
        raise InputError(
            f"structure={structure!r} uses the exact curvature of the outputs, so curvature={curvature!r} has no meaning; "
            "leave it at 'auto', or use 'exact'"
        )
    if accumulate is not None and not accumulate.is_floating_point:
        raise InputError(f"accumulate={accumulate} must be a floating-point dtype, or None for the model's own")
    needed = passes + (1 if structure == "ekfac" else 0) + 1  # the probe looks at the first batch
    if isinstance(data, Iterable) and iter(data) is data and needed > 1:
        raise DataError(
            f"data is a one-shot {type(data).__name__}, but structure={structure!r} goes through it {needed} times "
            "(once to look at the first batch). Pass a DataLoader or a list of batches"
        )


def _check_strict(found: Probe, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if not found.reasons:
        return
    listed = "\n".join(f"  {n} {shapes[n]}: {why}" for n, why in found.reasons.items())
    raise UnsupportedError(
        f"strict=True, and {len(found.reasons)} of {len(shapes)} selected parameters have no layer rule:\n{listed}\n"
        "Write a rule (docs/add_a_layer.md), choose others with params=, or pass strict=False for exact per-example treatment"
    )


def _check_full(shapes: Mapping[str, tuple[int, ...]]) -> None:
    size = sum(math.prod(s) for s in shapes.values())
    if size > MAX_FULL:
        raise InputError(
            f"a full matrix over {size:,} parameters would take {8 * size**2 / 2**30:,.1f} GiB; the limit is {MAX_FULL:,}. "
            "Use structure='kron', 'ekfac' or 'diagonal', structure='low_rank' for cross-layer terms, or choose fewer "
            "parameters with params= (for example 'last_layer')"
        )


class _Plan:
    """Which accumulator serves which parameters, and how each parameter is reported."""

    def __init__(
        self,
        found: Probe,
        shapes: dict[str, tuple[int, ...]],
        likelihood: Likelihood,
        structure: str,
        approach: str,
        dtype: torch.dtype,
        device: torch.device,
        small_block: int,
    ):
        self.found, self.shapes, self.structure, self.approach = found, shapes, structure, approach
        self.likelihood = likelihood
        self.dtype, self.device, self.small_block = dtype, device, small_block
        # A site is whole if its rule alone accounts for all of its parameters.
        self.whole = [
            number
            for number, site in enumerate(found.sites.sites)
            if all(found.by_parameter.get(n) == [number] for n in site.layout.names)
        ]
        in_whole = {n for s in self.whole for n in found.sites.sites[s].layout.names}
        self.rest = {n: s for n, s in shapes.items() if n not in in_whole}
        self.kron_sites: list[int] = []

    def accumulators(self) -> list[Accumulator]:
        """One pass over the data."""
        if self.structure == "full":
            total = sum(math.prod(s) for s in self.shapes.values())
            return [ExampleAccumulator([FullSum("all", self.shapes, self.dtype, self.device)], total)]
        made: list[Accumulator] = []
        for number in self.whole:
            made.append(self._site(number))
        if self.structure == "kfra":
            made = [
                KfraAccumulator([a for a in made if isinstance(a, KronAccumulator)], self.found.sites, self.likelihood)
            ] + [a for a in made if not isinstance(a, KronAccumulator)]
        if self.rest:
            made.append(self._rest())
        return made

    def _site(self, number: int) -> Accumulator:
        site = self.found.sites.sites[number]
        layout = site.layout
        if self.structure == "diagonal":
            return SiteDiagonalAccumulator(number, layout, self.dtype, self.device)
        if site.rule.matrix:
            self.kron_sites.append(number)
            return KronAccumulator(number, layout, self.approach, self.dtype, self.device, site.rule.one_hot)
        if layout.size <= self.small_block:
            block = FullSum(layout.name, layout.shapes, self.dtype, self.device)
            return ExampleAccumulator([block], layout.size, needs=(number,))
        return SiteDiagonalAccumulator(number, layout, self.dtype, self.device)

    def _rest(self) -> Accumulator:
        sums: list[DiagonalSum | FullSum] = []
        for name, shape in self.rest.items():
            if self.structure != "diagonal" and math.prod(shape) <= self.small_block:
                sums.append(FullSum(name, {name: shape}, self.dtype, self.device))
            else:
                sums.append(DiagonalSum({name: shape}, self.dtype, self.device))
        needs = tuple(sorted({s for n in self.rest for s in self.found.by_parameter.get(n, ())}))
        return ExampleAccumulator(sums, sum(math.prod(s) for s in self.rest.values()), needs)

    def treatment(self, blocks: Iterable[Block]) -> dict[str, Treatment]:
        """How each parameter was treated."""
        rules: dict[str, LayerRule] = {}
        for name, numbers in self.found.by_parameter.items():
            rules[name] = self.found.sites.sites[numbers[0]].rule
        told: dict[str, Treatment] = {}
        for block in blocks:
            for name in block.shapes:
                note = self.found.reasons.get(name, "")
                if name in self.found.unused:
                    note = "unused: the outputs do not depend on it"
                elif len(self.found.by_parameter.get(name, ())) > 1:
                    note = "tied between layers of different kinds"
                rule = type(rules[name]).__name__ if name in rules else "per-example"
                told[name] = Treatment(block.kind, rule, note)
        return {n: told[n] for n in self.shapes}


def _collect(structure: str, accumulators: list[Accumulator], seen: Seen, passes: int) -> Factors:
    """The sums of one stream, over all processes, per pass."""
    blocks = tuple(b for a in accumulators for b in a.results())
    if passes > 1:
        blocks = tuple(b.scaled(1 / passes) for b in blocks)
    names = tuple(n for b in blocks for n in b.shapes)
    factors = Factors(structure, blocks, names, seen.n_data, seen.loss, seen.kind, {}, seen.n_outputs)
    return factors.all_reduced()


def _summed(stream: Stream, planned: _Plan) -> Factors:
    """One pass over the data with all accumulators."""
    structure, accumulators = planned.structure, planned.accumulators()
    with together(f"summing the {structure} curvature"):
        seen = stream.run(planned.found, accumulators, f"{structure} curvature")
    return _collect(structure, accumulators, seen, stream.passes)


def _ekfac(stream: Stream, planned: _Plan, model_dtype: torch.dtype, basis_dtype: torch.dtype) -> Factors:
    """Two passes: Kronecker factors, of which only the bases are kept, then squared gradients in these bases."""
    factors = _summed(stream, planned)
    krons = [b for b in factors.blocks if isinstance(b, KronBlock)]
    rest = [None if isinstance(b, KronBlock) else b for b in factors.blocks]
    factors = replace(factors, blocks=())  # the factors go as their bases come
    second: list[Accumulator] = [
        EigenAccumulator(site, planned.found.sites.sites[site].layout, basis, model_dtype, planned.dtype)
        for site, basis in zip(planned.kron_sites, decompose_bases(krons, basis_dtype), strict=True)
    ]
    with together("summing the eigenvalues of EKFAC"):
        seen = stream.run(planned.found, second, "ekfac eigenvalues")
    corrected = iter(_collect("ekfac", second, seen, stream.passes).blocks)
    return replace(factors, blocks=tuple(next(corrected) if b is None else b for b in rest))


def _by_products(structure: str, stream: Stream, shapes: dict[str, tuple[int, ...]], rank: int) -> Factors:
    """Structures that need products with the matrix instead of per-layer sums."""
    names = list(shapes)
    if structure == "hessian":
        _check_full(shapes)
    with together("summing the loss"):
        seen = stream.run_loss()
    if structure == "hessian":
        matrix = full_hessian(stream.model, stream.data, stream.likelihood, names, stream.unpack).matrix
        block: Block = FullBlock("all", shapes, matrix, "hessian")
    else:
        operator = GGNOperator(stream.model, stream.data, stream.likelihood, names, stream.unpack)
        generator = stream.generator
        if is_distributed():  # every process must walk through the same vectors
            seed = same_everywhere(int(torch.randint(2**62, (), generator=generator)))
            generator = torch.Generator().manual_seed(seed)
        vectors, values = low_rank_ggn(operator, min(rank, operator.size), generator=generator)
        block = LowRankBlock("all", shapes, vectors, values)
    count = torch.tensor([seen.n_data, seen.loss], dtype=torch.float64)
    all_reduce_([count])
    n_data, loss = count.tolist()
    treatment = {n: Treatment(block.kind, "products", "") for n in names}
    return Factors(structure, (block,), tuple(names), n_data, loss, "exact", treatment, seen.n_outputs)
