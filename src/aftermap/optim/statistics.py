"""The sums of one optimiser step: gradients, curvature, loss and number of examples, over closures and processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aftermap.curvature.passes.closure import ClosureReader
from aftermap.curvature.passes.gradient_reader import ClosureStatistics, GradientReader
from aftermap.curvature.rules.base import Layout
from aftermap.curvature.structures.kron import KronBlock
from aftermap.distributed import all_reduce_, is_distributed
from aftermap.errors import InputError, UnsupportedError
from aftermap.linalg import all_finite
from aftermap.optim.options import Settings

__all__ = [
    "StepStatistics",
    "add_micro_batch",
    "check_own_backward",
    "factor_dtype",
    "from_micro_batches",
    "parameter_chunks",
]

# So many numbers are updated at once: the working memory of an update is that of a chunk, not that of the network.
_CHUNK_NUMBERS = 1 << 18


def factor_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype of Kronecker factors: in half precision a rounded factor would not be positive semi-definite.

    >>> factor_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    return torch.promote_types(parameter.dtype, torch.float32)


def parameter_chunks(
    parameters: Sequence[tuple[str, Tensor]], numbers: int = _CHUNK_NUMBERS
) -> Iterator[list[tuple[str, Tensor]]]:
    """Splits named parameters into lists of up to ``numbers`` numbers each; a larger parameter stands alone.

    >>> [len(c) for c in parameter_chunks([("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(7))], 5)]
    [2, 1]
    """
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, parameter in parameters:
        if chunk and size + parameter.numel() > numbers:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, parameter))
        size += parameter.numel()
    if chunk:
        yield chunk


@dataclass
class StepStatistics:
    """Sums over the examples of one or more closures.

    The true sums are ``grad_scale`` · grads and ``curvature_scale`` · curvature: for a mean loss over n examples the factor n
    (n² for squares) stands aside, since one closure then needs no pass over the numbers for it.

    Attributes:
        grads: Parameter name -> Σ_n g_n, unscaled. A parameter that no loss depends on is missing.
        curvature: Parameter name -> Σ_n of the curvature's estimate, unscaled.
        grad_scale: The factor of the gradients.
        curvature_scale: The factor of the curvature.
        size: The number of examples, over all closures.
        loss: Σ of the loss over examples, in float64.
        factors: Layout of a layer -> the sums of its Kronecker factors, with the number of their rows; already scaled.
    """

    grads: dict[str, Tensor]
    curvature: dict[str, Tensor]
    grad_scale: float
    curvature_scale: float
    size: float
    loss: Tensor
    factors: dict[Layout, KronBlock] = field(default_factory=dict)

    @staticmethod
    def of_closure(
        moments: ClosureStatistics,
        reader: ClosureReader | GradientReader,
        noise: Mapping[str, Tensor],
        loss: Tensor,
        settings: Settings,
        ggn: dict[str, Tensor] | None = None,
    ) -> StepStatistics:
        """Returns the statistics of one closure.

        Args:
            moments: The sums for the loss as it was returned.
            reader: What read the closure.
            noise: ε by parameter name; it is overwritten where the curvature is reparametrised.
            loss: Σ of the loss over examples.
            settings: They say which estimate of the curvature is wanted, and how the loss sums over examples.
            ggn: The diagonal of the GGN of the summed loss, where that is the estimate.

        Raises:
            InputError: The batch is larger than the data set that it should come from.
        """
        if reader.model is not None and moments.size > settings.n_data:
            raise InputError(
                f"the batch holds {moments.size} examples, but n_data={settings.n_data:g}; n_data is the number of training "
                "data, not of batches"
            )
        # An example's own gradient is n times its share of a mean.
        scale = float(moments.size) if settings.reduction == "mean" else 1.0
        grads, curvature, curvature_scale = moments.sums, moments.squares, scale**2
        if ggn is not None:
            curvature, curvature_scale = ggn, 1.0
        elif settings.curvature == "reparametrised":
            # ε ∘ g: every process with its own noise, before any average, since Price's theorem needs the pair.
            curvature, curvature_scale = {n: e for n, e in noise.items() if n in grads}, scale
            if curvature:
                torch._foreach_mul_(list(curvature.values()), [grads[n] for n in curvature])
        elif settings.curvature == "micro_batch":
            curvature = {n: g.square() for n, g in grads.items()}
        statistics = StepStatistics(grads, curvature, scale, curvature_scale, moments.size, loss)
        for block in moments.blocks.values():
            if isinstance(block, KronBlock):
                statistics.factors[block.layout] = replace(block, outputs=block.outputs * scale**2)
        return statistics

    def add(self, other: StepStatistics) -> None:
        """Adds the sums of another closure.

        Where one of the two has a gradient but no estimate of its curvature, the other's estimate stands for all examples. A
        layer with Kronecker factors in the one and squares in the other has squares afterwards.
        """
        size = self.size + other.size
        for mine, theirs in ((self, other), (other, self)):
            for name in [n for n in mine.curvature if n in theirs.grads and n not in theirs.curvature]:
                mine.curvature[name] = mine.curvature[name] * (size / mine.size)
        self.grad_scale = _add_scaled(self.grads, self.grad_scale, other.grads, other.grad_scale)
        self.curvature_scale = _add_scaled(self.curvature, self.curvature_scale, other.curvature, other.curvature_scale)
        self.size = size
        self.loss = self.loss + other.loss
        for layout, block in other.factors.items():
            earlier = self.factors.get(layout)
            if earlier is not None:
                inputs, outputs = earlier.inputs + block.inputs, earlier.outputs + block.outputs
                rows = earlier.rows + block.rows
                block = replace(earlier, inputs=inputs, outputs=outputs, rows=rows)
            self.factors[layout] = block
        for layout in [x for x in self.factors if not self.curvature.keys().isdisjoint(x.names)]:
            del self.factors[layout]

    def all_reduce(self, parameters: Mapping[str, Tensor], layouts: Sequence[Layout]) -> list[Layout]:
        """Sums over all processes, in place. What no process has stays missing.

        A first message in float64 counts the examples and says which sums exist anywhere; a second one holds these sums, in
        the order of ``parameters`` and ``layouts`` on every process, with zeros for what a process does not have.

        Where a process has a gradient but no estimate of its curvature, the estimate of the others stands for all examples.

        Args:
            parameters: Every parameter that may take part, by name, the same on all processes.
            layouts: Every layer that may have Kronecker factors, the same on all processes.

        Returns:
            The layers whose factors were dropped, because a process that uses the layer has none for it.
        """
        if not is_distributed() or not parameters:
            return []
        device = next(iter(parameters.values())).device
        flags = [(name in self.grads, name in self.curvature) for name in parameters]
        flags += [(any(n in self.grads for n in x.names), x in self.factors) for x in layouts]
        rows = [[used, estimated, self.size if used and not estimated else 0.0] for used, estimated in flags]
        counts = torch.tensor([[self.size, float(self.loss), 0.0], *rows], dtype=torch.float64, device=device)
        all_reduce_([counts])
        (size, loss, _), *rows = counts.tolist()
        by_name = dict(zip(parameters, rows, strict=False))
        by_layout = dict(zip(layouts, rows[len(by_name) :], strict=True))
        grads, curvature, factors = dict[str, Tensor](), dict[str, Tensor](), dict[Layout, KronBlock]()
        for name, parameter in parameters.items():
            users, estimates, _ = by_name[name]
            if users:
                grads[name] = _scaled_or_zero(self.grads.get(name), self.grad_scale, parameter)
            if estimates:
                curvature[name] = _scaled_or_zero(self.curvature.get(name), self.curvature_scale, parameter)
        for layout in layouts:
            _, estimates, unknown = by_layout[layout]
            if estimates and not unknown:
                factors[layout] = self.factors.get(layout) or _zero_block(layout, parameters)
        tensors = [t.contiguous() for block in factors.values() for t in block.tensors().values()]
        all_reduce_([*grads.values(), *curvature.values(), *tensors])
        summed = iter(tensors)
        self.factors = {n: b.with_tensors(dict(zip(b.tensors(), summed, strict=False))) for n, b in factors.items()}
        for name, value in curvature.items():
            known = size - by_name[name][2]
            if 0 < known < size:
                value.mul_(size / known)
        self.grads, self.curvature, self.grad_scale, self.curvature_scale = grads, curvature, 1.0, 1.0
        self.size, self.loss = size, torch.tensor(loss, dtype=torch.float64, device=device)
        return [layout for layout, (_, estimates, unknown) in by_layout.items() if estimates and unknown]

    def replace_grads(self, grads: Mapping[str, Tensor]) -> None:
        """Takes these gradients instead of the collected ones."""
        self.grads.update({n: g.to_dense() if g.is_sparse else g for n, g in grads.items()})

    def is_finite(self) -> bool:
        """Tells whether loss, gradients and curvature are finite."""
        if not math.isfinite(float(self.loss)):
            return False
        sums = [*self.grads.values(), *self.curvature.values()]
        sums += [t for block in self.factors.values() for t in block.tensors().values()]
        if not sums or all(math.isfinite(n) for n in _norms(sums).tolist()):
            return True
        return all(all_finite(v) for v in sums)  # the norm of large numbers overflows

    def clip(self, longest: float) -> None:
        """Shortens the mean gradient to the length ``longest``, by its scale."""
        length = float(_norms(list(self.grads.values())).norm()) * self.grad_scale / self.size
        if length > longest:
            self.grad_scale *= longest / length


def add_micro_batch(
    earlier: StepStatistics | None,
    statistics: StepStatistics,
    params: Mapping[str, Tensor],
    before: Mapping[str, Tensor | None],
    grads: Mapping[str, Tensor],
    *,
    mean: bool,
) -> StepStatistics:
    """Adds a block of `sampled_params`; ``.grad`` becomes the gradient over the examples of all blocks.

    Args:
        earlier: The earlier blocks. They are dropped where they are not finite: a gradient scaler has skipped them.
        statistics: The new block.
        params: The trained parameters by name.
        before: ``.grad`` after the earlier blocks.
        grads: ``.grad`` of the new block.
        mean: Whether the loss is a mean over examples, so that blocks weigh by their size; otherwise they add up.
    """
    if earlier is not None and not earlier.is_finite():
        earlier = None
    done = 0.0 if earlier is None else earlier.size
    total = done + statistics.size
    old_share, new_share = (done / total, statistics.size / total) if mean else (1.0, 1.0)
    for name, parameter in params.items():
        grad: Tensor | None = None
        for value, share in ((None if earlier is None else before[name], old_share), (grads.get(name), new_share)):
            if value is not None:
                grad = value * share if grad is None else grad.add(value, alpha=share)
        parameter.grad = grad
    if earlier is None:
        return statistics
    earlier.add(statistics)
    return earlier


def from_micro_batches(
    statistics: StepStatistics | None, params: Mapping[str, Tensor], *, mean: bool
) -> StepStatistics:
    """Returns what the blocks of `sampled_params` collected, with ``.grad`` as it is now (clipped or not) as the gradient.

    Args:
        statistics: The sums of the blocks.
        params: The trained parameters by name.
        mean: Whether the loss is a mean over examples.

    Raises:
        InputError: There was no block.
    """
    if statistics is None:
        raise InputError(
            "step() without a closure uses what was collected in `with opt.sampled_params():`, but nothing was. Put the "
            "forward and backward pass into such a block, or pass a closure: opt.step(lambda: loss_fn(model(x), y))"
        )
    statistics.grads = {}
    statistics.replace_grads({n: p.grad.detach() for n, p in params.items() if p.grad is not None})
    statistics.grad_scale = statistics.size if mean else 1.0
    return statistics


def check_own_backward(*, ggn: bool, only_parameters: bool) -> None:
    """Raises where the backward pass that a closure ran itself cannot be used."""
    if only_parameters and is_distributed():
        raise UnsupportedError(
            "with several processes and only parameters given, a closure must return the loss without calling backward: "
            "a DistributedDataParallel wrapper would average gradients unseen. Pass the model instead of its parameters"
        )
    if ggn:
        raise UnsupportedError(
            "curvature='ggn' needs the graph: return the loss without calling backward in the closure"
        )


def _norms(values: list[Tensor]) -> Tensor:
    """Returns the Euclidean norm of each tensor, in float64."""
    norms = torch._foreach_norm(values)
    return torch.stack([n.to(norms[0].device, torch.float64) for n in norms])


def _add_scaled(mine: dict[str, Tensor], my_scale: float, theirs: dict[str, Tensor], their_scale: float) -> float:
    """Adds ``their_scale`` · theirs to ``my_scale`` · mine; returns the scale of the result."""
    if not mine:
        mine.update(theirs)
        return their_scale
    factor = their_scale / my_scale
    for name, value in theirs.items():
        mine[name] = mine[name].add(value, alpha=factor) if name in mine else value * factor
    return my_scale


def _scaled_or_zero(value: Tensor | None, scale: float, parameter: Tensor) -> Tensor:
    """Returns a sum without its scale, in the parameter's dtype; zeros where this process has none."""
    if value is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return (value * scale).to(parameter.dtype)


def _zero_block(layout: Layout, parameters: Mapping[str, Tensor]) -> KronBlock:
    """Returns the Kronecker sums of a layer that this process did not call."""
    like = parameters[layout.names[0]]
    shape, dtype = layout.groups, factor_dtype(like)
    inputs = like.new_zeros(shape, layout.in_, layout.in_, dtype=dtype)
    outputs = like.new_zeros(shape, layout.out, layout.out, dtype=dtype)
    return KronBlock(layout, inputs, outputs, like.new_zeros(shape, dtype=torch.float64))
