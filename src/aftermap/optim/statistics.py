"""From what a closure left behind to estimates of gradient and curvature, summed over closures and processes in one message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from aftermap.curvature.passes.closure import ClosureReading
from aftermap.curvature.passes.gradient_reader import ClosureStatistics, Reading
from aftermap.curvature.structures.diagonal import ggn_diagonal_of_closure
from aftermap.curvature.structures.kron import KronBlock
from aftermap.distributed import all_reduce_, is_distributed
from aftermap.errors import InputError, UnsupportedError
from aftermap.linalg import all_finite
from aftermap.optim.noise import NoiseSource, as_one, in_chunks
from aftermap.optim.options import Settings

__all__ = [
    "Collected",
    "Factor",
    "add_block",
    "back_propagate",
    "digest",
    "from_blocks",
    "ggn_of",
    "kind_of_loss",
    "magnitudes",
]

Factor = tuple[Tensor, Tensor, int]
_SMALL_NUMBERS = 1 << 12  # up to so many a copy costs less than an operation


@dataclass
class Collected:
    """Statistics of one or more closures.

    The true sums are ``grad_scale`` · grads and ``curvature_scale`` · curvature: for a mean loss over n examples the factor n
    (n² for squares) is kept aside, since one closure needs no pass over the numbers for it.

    Attributes:
        grads: parameter name -> Σ_n g_n, unscaled.
        curvature: parameter name -> Σ_n of the curvature's estimate, unscaled.
        size: examples, over all closures.
        loss: Σ of the loss over examples, float64.
        factors: site -> Kronecker sums (scaled already), with n of their own in ``size``.
        implied: whether gradients are finite wherever their curvature is, because it was made of them.
        known: the curvature's `magnitudes`, where they were found on the way.
    """

    grads: dict[str, Tensor]
    curvature: dict[str, Tensor]
    grad_scale: float
    curvature_scale: float
    size: float
    loss: Tensor
    factors: dict[int, Factor] = field(default_factory=dict)
    implied: bool = False
    known: list[Tensor] | None = None

    def add(self, other: Collected) -> None:
        """Adds another closure's sums to this one's."""
        self.grad_scale = _merge(self.grads, self.grad_scale, other.grads, other.grad_scale)
        self.curvature_scale = _merge(self.curvature, self.curvature_scale, other.curvature, other.curvature_scale)
        self.implied = self.implied and other.implied
        self.known = None
        self.size += other.size
        self.loss = self.loss + other.loss
        for site, (inputs, outputs, rows) in other.factors.items():
            if site in self.factors:
                mine = self.factors[site]
                self.factors[site] = (mine[0] + inputs, mine[1] + outputs, rows)
            else:
                self.factors[site] = (inputs, outputs, rows)

    def all_reduced(self, shapes: dict[str, Tensor], sites: dict[int, Factor]) -> None:
        """Sums over all processes, in place, by one message; parameters that no process used stay missing.

        Args:
            shapes: every parameter that may take part, the same on all processes: what is missing here counts as zero.
            sites: the same for Kronecker factors: tensors of the right shape.
        """
        if not is_distributed() or not shapes:
            return
        like = next(iter(shapes.values()))
        own_g = set(self.grads)
        used = torch.tensor([float(n in own_g) for n in shapes], dtype=like.dtype, device=like.device)
        has_curvature = torch.tensor([float(n in self.curvature) for n in shapes], dtype=like.dtype, device=like.device)
        count = torch.tensor([self.size, float(self.loss)], dtype=like.dtype, device=like.device)
        for name, value in shapes.items():
            for sums, scale in ((self.grads, self.grad_scale), (self.curvature, self.curvature_scale)):
                sums[name] = sums[name] * scale if name in sums else torch.zeros_like(value)
        self.factors = {s: self.factors.get(s, tuple_zeros(f)) for s, f in sites.items()}
        factors = [t for a, b, _ in self.factors.values() for t in (a, b)]
        all_reduce_([used, has_curvature, count, *self.grads.values(), *self.curvature.values(), *factors])
        self.grad_scale = self.curvature_scale = 1.0
        self.known = None
        for place, name in enumerate(shapes):
            if not used[place]:
                del self.grads[name]
            if not has_curvature[place]:
                del self.curvature[name]
        self.size, self.loss = float(count[0]), count[1].to(torch.float64)

    def replace_grads(self, grads: Mapping[str, Tensor]) -> None:
        """Takes these gradients instead; nothing is known about them."""
        self.grads.update({n: g.to_dense() if g.is_sparse else g for n, g in grads.items()})
        self.implied = False

    def is_finite(self) -> bool:
        """Whether loss, gradients and curvature are finite."""
        if not math.isfinite(float(self.loss)):
            return False
        grads = [g for n, g in self.grads.items() if not self.implied or n not in self.curvature]
        curvature = list(self.curvature.values())
        known = magnitudes(curvature) if self.known is None else self.known
        if all(all_finite(torch.stack(part)) for part in _by_device([*known, *magnitudes(grads)])):
            return True
        return all(all_finite(v) for v in (*grads, *curvature))  # large numbers overflow

    def clip(self, longest: float) -> None:
        """Shortens the mean gradient to ``longest`` by its scale."""
        norms = torch.stack([n.to(torch.float64).cpu() for n in torch._foreach_norm(list(self.grads.values()))])
        length = float(norms.norm()) * self.grad_scale / self.size
        if length > longest:
            self.grad_scale *= longest / length


def add_block(
    held: Collected | None,
    part: Collected,
    params: Mapping[str, Tensor],
    before: Mapping[str, Tensor | None],
    grads: Mapping[str, Tensor],
    *,
    mean: bool,
) -> Collected:
    """Adds a block of `sampled_params`; ``.grad`` becomes the gradient over the examples of all blocks.

    Args:
        held: earlier blocks; dropped where they are not finite (a gradient scaler has skipped them).
        part: the new block.
        params: by name.
        before: ``.grad`` after the earlier blocks.
        grads: ``.grad`` of the new block.
        mean: the loss is a mean over examples, so blocks weigh by their size; otherwise they add up.
    """
    fresh = held is None or not held.is_finite()
    done = 0.0 if fresh or held is None else held.size
    new_share, old_share = (part.size / (part.size + done), done / (part.size + done)) if mean else (1.0, 1.0)
    for name, parameter in params.items():
        total: Tensor | None = None
        for value, share in ((None if fresh else before[name], old_share), (grads.get(name), new_share)):
            if value is not None:
                total = value * share if total is None else total.add(value, alpha=share)
        parameter.grad = total
    if fresh or held is None:
        return part
    held.add(part)
    return held


def from_blocks(held: Collected | None, params: Mapping[str, Tensor], *, mean: bool) -> Collected:
    """What the blocks of `sampled_params` collected, with ``.grad`` as it is now (clipped or not) as the gradient.

    Args:
        held: the blocks' sums.
        params: by name.
        mean: the loss is a mean over examples.

    Raises:
        InputError: there was no block.
    """
    if held is None:
        raise InputError(
            "step() without a closure uses what was collected in `with opt.sampled_params():`, but nothing was. Put the "
            "forward and backward pass into such a block, or pass a closure: opt.step(lambda: loss_fn(model(x), y))"
        )
    held.grads = {}
    held.replace_grads({n: p.grad.detach() for n, p in params.items() if p.grad is not None})
    held.grad_scale = held.size if mean else 1.0
    return held


def magnitudes(values: list[Tensor]) -> list[Tensor]:
    """Some numbers that are finite only if every entry of the tensors is; that they overflow is rare.

    >>> [bool(m.isfinite()) for m in magnitudes([torch.ones(2), torch.tensor([1.0, math.nan])])]
    [False]
    """
    found: list[Tensor] = []
    for part in _by_device(values):
        one = as_one(part)
        if one is not None and one.dtype in (torch.float32, torch.float64):
            found.append(torch.dot(one, one))  # half the time of a norm
            continue
        small = [v for v in part if v.numel() <= _SMALL_NUMBERS]
        if len(small) > 1:
            part = [*(v for v in part if v.numel() > _SMALL_NUMBERS), _flatten_dense_tensors(small)]
        found += torch._foreach_norm(part)
    return found


def _by_device(values: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for value in values:
        found.setdefault(value.device, []).append(value)
    return list(found.values())


def tuple_zeros(factor: Factor) -> Factor:
    """Zeros of the shapes of a factor."""
    return torch.zeros_like(factor[0]), torch.zeros_like(factor[1]), factor[2]


def _merge(mine: dict[str, Tensor], my_scale: float, theirs: dict[str, Tensor], their_scale: float) -> float:
    """Adds ``their_scale`` · theirs to ``my_scale`` · mine in place; returns the scale of the result."""
    if not mine:
        mine.update(theirs)
        return their_scale
    for name, value in theirs.items():
        factor = their_scale / my_scale
        if name in mine:
            mine[name] = mine[name].add(value, alpha=factor)
        else:
            mine[name] = value * factor
    return my_scale


def kind_of_loss(loss: Tensor) -> str | None:
    """Classification where the last operation was PyTorch's cross-entropy; None where the loss does not tell."""
    name = "" if loss.grad_fn is None else loss.grad_fn.name()
    return "classification" if name.startswith("NllLoss") else None


def ggn_of(
    reading: Reading, settings: Settings, noise: NoiseSource, step: int, device: torch.device
) -> dict[str, Tensor] | None:
    """The diagonal of the GGN from the graph of a closure, which must still be alive."""
    if settings.likelihood is None or not isinstance(reading, ClosureReading):
        return None
    generator = noise.generator(device, step=step, sample=0, stream=2)
    return ggn_diagonal_of_closure(reading, settings.likelihood, settings.vectors, 1, generator)


def back_propagate(reading: Reading, loss: Tensor, *, ggn: bool, only_parameters: bool) -> None:
    """The backward pass of a closure that did none; raises where one that did cannot be used."""
    if not reading.gradients_came:
        if not loss.requires_grad:
            raise InputError(
                "the closure's loss does not depend on any parameter that requires a gradient, and the closure ran no backward "
                "pass. Do not detach the loss, and leave torch.no_grad() out of the closure"
            )
        reading.differentiate(loss, keep=ggn)
    elif only_parameters and is_distributed():
        raise UnsupportedError(
            "with several processes and only parameters given, a closure must return the loss without calling backward: "
            "a DistributedDataParallel wrapper would average gradients unseen. Pass the model instead of its parameters"
        )
    elif ggn:
        raise UnsupportedError(
            "curvature='ggn' needs the graph: return the loss without calling backward in the closure"
        )


def digest(
    moments: ClosureStatistics,
    noise: dict[str, Tensor],
    loss: Tensor,
    settings: Settings,
    ggn: dict[str, Tensor] | None,
    *,
    known: bool,
) -> Collected:
    """One closure's contribution.

    Args:
        moments: sums for the loss as it was returned.
        noise: ε by parameter name; overwritten where the curvature is reparametrised.
        loss: Σ of the loss over examples.
        settings: which estimate, and the reduction of the loss.
        ggn: the diagonal of the GGN of the sum loss, where that was asked for.
        known: whether the size of the batch is known.

    Raises:
        InputError: a batch larger than the data set it should come from.
    """
    size = moments.size
    if known and size > settings.n_data:
        raise InputError(
            f"the batch holds {size} examples, but n_data={settings.n_data:g}; n_data is the number of training data, "
            "not of batches"
        )
    scale = float(size) if settings.reduction == "mean" else 1.0  # an example's own gradient is n times its share
    if ggn is not None:
        return Collected(moments.sums, ggn, scale, 1.0, size, loss)
    if settings.curvature == "reparametrised":
        # ε ∘ g: each process with its own noise, before any average (Price's theorem needs the pair).
        # The noise is used up here, so its memory serves.
        products = {n: e for n, e in noise.items() if n in moments.sums}
        found: list[Tensor] = []
        for part in in_chunks(list(products.items())):
            values = [e for _, e in part]
            torch._foreach_mul_(values, [moments.sums[n] for n, _ in part])
            found += magnitudes(values)  # while they are in the cache
        return Collected(moments.sums, products, scale, scale, size, loss, implied=True, known=found)
    if settings.curvature == "micro_batch":
        squares = {n: g.square() for n, g in moments.sums.items()}
        return Collected(moments.sums, squares, scale, scale**2, size, loss, implied=True)
    factors = {
        k: (b.inputs, b.outputs * scale**2, int(b.rows.max()) // size)
        for k, b in moments.blocks.items()
        if isinstance(b, KronBlock)
    }
    return Collected(moments.sums, moments.squares, scale, scale**2, size, loss, factors, implied=True)
