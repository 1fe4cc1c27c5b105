"""Dense curvature over chosen single entries of the parameters; all other weights stay as they are.

G_S = Σ_n Σ_v (J_nᵀ v)_S (J_nᵀ v)_Sᵀ is the submatrix of the full curvature at the entries S, summed without ever forming the
full one (Daxberger et al. 2021, Bayesian deep learning via subnetwork inference, section 4).

The posterior has the full covariance over chosen entries of the parameters; all others are fixed at their trained
values.

A fixed weight has no variance: its rows and columns of the covariance are zero. Precision and determinants are those of the
chosen entries alone, s·G_S + D_S (Daxberger et al. 2021, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Unpack
from aftermap.curvature.passes.backward import PerExampleAccumulator, PerExampleSum
from aftermap.curvature.passes.plan import PlanContradicted, plan_model
from aftermap.curvature.passes.stream import CurvatureProblem, first_batch
from aftermap.curvature.structures.base import Block, BlockPosterior, Factors, Treatment, same_names
from aftermap.curvature.structures.eigenbasis import Eigen
from aftermap.curvature.structures.flat import put_entries, take_entries
from aftermap.curvature.structures.full import FullBlock, FullBlockPosterior
from aftermap.curvature.structures.layer_parts import DenseLayerParts
from aftermap.distributed import fail_together
from aftermap.errors import InputError
from aftermap.likelihoods import Likelihood
from aftermap.linalg import GramSum, symmetrise
from aftermap.models import check_device
from aftermap.params import Params, named_parameters
from aftermap.prior import Prior

__all__ = [
    "SubnetworkBlock",
    "SubnetworkBlockPosterior",
    "SubnetworkSum",
    "fit_entries",
]

_INNER = "entries"


@dataclass(frozen=True)
class SubnetworkBlock(Block):
    """A dense matrix over some entries of some parameters.

    Attributes:
        label: The name of the block in tables.
        sizes: The parameters and their whole shapes.
        entries: For each parameter the places of its entries in its flattened values, ascending.
        matrix: The matrix [S, S], in the order of ``entries``.
    """

    label: str
    sizes: Mapping[str, tuple[int, ...]]
    entries: Mapping[str, Tensor]
    matrix: Tensor
    kind: str = "subset"

    @property
    def name(self) -> str:
        return self.label

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {n: tuple(s) for n, s in self.sizes.items()}

    @property
    def size(self) -> int:
        """The number S of uncertain weights."""
        return len(self.matrix)

    @property
    def places(self) -> Tensor:
        """The entries' places in the concatenation of the flattened parameters [S]."""
        places, start = [], 0
        for name, shape in self.sizes.items():
            places.append(self.entries[name].cpu() + start)
            start += math.prod(shape)
        return torch.cat(places)

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> SubnetworkBlock:
        return replace(self, matrix=tensors["matrix"])

    def scaled(self, factor: float) -> SubnetworkBlock:
        return replace(self, matrix=self.matrix * factor)

    def __add__(self, other: Block) -> Block:
        same_names(self, other)
        if isinstance(other, SubnetworkBlock) and not torch.equal(self.places, other.places):
            raise InputError("two subnetworks over different entries cannot be added; fit both over the same ones")
        return super().__add__(other)

    def with_fixed_means(self, weights: Params, prior_mean: float | Params) -> Params:
        means: Params = {}
        for name, places in self.entries.items():
            mean = prior_mean.get(name, 0.0) if isinstance(prior_mean, Mapping) else prior_mean
            flat = weights[name].to(torch.float64).reshape(-1).clone()
            wanted = torch.as_tensor(mean, dtype=torch.float64, device=flat.device).expand(weights[name].shape)
            flat[places.to(flat.device)] = wanted.reshape(-1)[places.to(flat.device)]
            means[name] = flat.reshape(weights[name].shape)
        return means

    def to_dense(self) -> Tensor:
        """Returns the matrix [p, p] over whole parameters; rows and columns of fixed entries are zero."""
        total = sum(math.prod(s) for s in self.sizes.values())
        dense = torch.zeros(total, total, dtype=torch.float64)
        places = self.places
        dense[places[:, None], places] = symmetrise(self.matrix.to(torch.float64)).cpu()
        return dense

    def diagonal(self) -> dict[str, Tensor]:
        return put_entries(self.matrix.diagonal().to(torch.float64), self.entries, self.shapes)

    def posterior(
        self, prior: Prior, scale: Tensor, eigen: Sequence[Eigen], *, damping: str, dtype: torch.dtype, n_data: float
    ) -> SubnetworkBlockPosterior:
        dense = FullBlock(self.label, {_INNER: (self.size,)}, self.matrix)
        inner = FullBlockPosterior.of(dense, _inner_prior(self, prior), scale, dtype)
        return SubnetworkBlockPosterior(self, inner, inner.scale)


class SubnetworkSum(PerExampleSum):
    """Sums the outer products of some entries of per-example gradients."""

    def __init__(
        self,
        label: str,
        shapes: Mapping[str, tuple[int, ...]],
        entries: Mapping[str, Tensor],
        device: torch.device,
    ):
        self.label, self.shapes, self.names, self.entries = label, dict(shapes), tuple(shapes), dict(entries)
        size = sum(len(p) for p in entries.values())
        self.sums = GramSum(1, size, torch.float64, device)

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        self.sums.add(take_entries(gradients, self.entries, 2).flatten(0, 1)[None].to(torch.float64))

    def block(self) -> SubnetworkBlock:
        return SubnetworkBlock(self.label, self.shapes, self.entries, self.sums.full()[0])


@torch.inference_mode(False)
def fit_entries(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    entries: Mapping[str, Tensor],
    *,
    curvature: str = "auto",
    samples: int = 1,
    passes: int = 1,
    unpack: Unpack | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Factors:
    """Sums the curvature over chosen entries, cross terms included.

    Args:
        model: A network with outputs [N, ..., C], in eval mode; it is unchanged afterwards.
        data: Batches of (x, y), as for `fit_curvature`.
        likelihood: The likelihood of the targets.
        entries: For each parameter the places of its entries in its flattened values, ascending and distinct.
        curvature: The kind of vectors that are back-propagated; see `fit_curvature`.
        samples: The number of draws per datum for the random kinds.
        passes: The number of passes through data that augment themselves.
        unpack: A function that turns a batch of another form into (inputs, targets).
        generator: The source of the random vectors.
        progress: Whether to show a progress bar. None shows it on a terminal.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> from aftermap.likelihoods import Gaussian
    >>> data = [(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.zeros(2, 1))]
    >>> fit_entries(net, data, Gaussian(1.0), {"weight": torch.tensor([1])}).blocks[0].matrix
    tensor([[5.]], dtype=torch.float64)
    """
    names = [n for n in named_parameters(model) if n in entries]
    shapes = {n: tuple(named_parameters(model)[n].shape) for n in names}
    batch = first_batch(model, data, unpack, together=True)
    with fail_together("looking at the first batch"):
        plan = plan_model(model, names, batch)
    plan = plan.agree_over_processes(names)
    device, dtype = check_device(model)
    dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    while True:
        problem = CurvatureProblem(
            model,
            data,
            likelihood,
            names,
            plan,
            curvature,
            samples=samples,
            passes=passes,
            sums_dtype=dtype,
            unpack=unpack,
            generator=generator,
            show_progress=progress,
        )
        matrix = SubnetworkSum("subnetwork", shapes, {n: entries[n] for n in names}, device)
        accumulator = PerExampleAccumulator([matrix], sum(math.prod(s) for s in shapes.values()))
        try:
            blocks, counts = problem.run([accumulator], "subnetwork curvature")
            break
        except PlanContradicted as contradicted:
            plan = plan.without(contradicted.reasons)
    treatment = {
        n: Treatment("subset", "per-example", f"{len(entries[n]):,} of {math.prod(shapes[n]):,} entries") for n in names
    }
    factors = Factors(
        "full", blocks, tuple(names), counts.n_data, counts.loss, counts.kind, treatment, counts.n_outputs
    )
    return factors.all_reduced()


@dataclass(frozen=True)
class SubnetworkBlockPosterior(BlockPosterior):
    """A dense block over some entries under a prior.

    Attributes:
        source_block: The block with the entries and their curvature.
        inner: The dense posterior over them as one vector [S].
        scale: The factor s of the curvature, 0-d.
    """

    source_block: SubnetworkBlock
    inner: FullBlockPosterior
    scale: Tensor

    @property
    def source(self) -> Block:
        return self.source_block

    def with_prior(self, prior: Prior, scale: Tensor) -> SubnetworkBlockPosterior:
        inner = self.inner.with_prior(_inner_prior(self.source_block, prior), scale)
        return replace(self, inner=inner, scale=inner.scale)

    def log_det_ratio(self) -> Tensor:
        return self.inner.log_det_ratio()

    def log_det_prior(self) -> Tensor:
        return self.inner.log_det_prior()

    def effective_parameters(self) -> Tensor:
        return self.inner.effective_parameters()

    def _put(self, vector: Tensor) -> Params:
        return put_entries(vector, self.source_block.entries, self.shapes)

    def _take(self, values: Params) -> Tensor:
        name = self.names[0]
        return take_entries(values, self.source_block.entries, values[name].dim() - len(self.shapes[name]))

    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        return self._put(self.inner.sample(count, generator)[_INNER])

    def precision_mv(self, values: Params) -> Params:
        """Returns the precision of the chosen entries times theirs, and zero at fixed ones."""
        return self._put(self.inner.precision_mv({_INNER: self._take(values)})[_INNER])

    def covariance_mv(self, values: Params) -> Params:
        return self._put(self.inner.covariance_mv({_INNER: self._take(values)})[_INNER])

    def marginal_variance(self) -> Params:
        return self._put(self.inner.marginal_variance()[_INNER])

    def to_dense(self) -> Tensor:
        """Returns the precision [p, p] over whole parameters; rows and columns of fixed entries are zero."""
        places = self.source_block.places.to(self.scale.device)
        total = sum(int(torch.Size(s).numel()) for s in self.shapes.values())
        dense = torch.zeros(total, total, dtype=torch.float64, device=self.scale.device)
        dense[places[:, None], places] = self.inner.to_dense().detach()
        return dense

    def split_by_layer(self, layers: Mapping[str, tuple[str, ...]], prior: Prior) -> DenseLayerParts:
        """Splits the chosen entries by layer, under their dense covariance."""
        return DenseLayerParts.of(self.inner, layers, self.shapes, self.source_block.entries)

    def gradient_rows(self, gradients: Params) -> Tensor:
        """Returns only the chosen columns of per-example gradients: [v, b, S]."""
        return take_entries(gradients, self.source_block.entries, 2)

    def output_covariance(self, gradients: Tensor, diagonal: bool) -> Tensor:
        """Returns J_S Σ_S J_Sᵀ for the gradients of some outputs."""
        return self.inner.output_covariance(gradients, diagonal)


def _inner_prior(block: SubnetworkBlock, prior: Prior) -> Prior:
    """Returns the prior of the chosen entries as one vector; one shared number stays one, so that a gradient in it is whole."""
    names, shape = tuple(block.sizes), (block.size,)
    value = prior.precision[names[0]]
    if not prior.is_shared(names):
        value = prior.vector(names, block.matrix.device)[block.places.to(block.matrix.device)]
    return Prior({_INNER: value}, {_INNER: torch.zeros((), dtype=torch.float64)}, {_INNER: shape})
