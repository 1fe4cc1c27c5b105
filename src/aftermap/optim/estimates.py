"""From what a closure left behind to estimates of gradient and curvature, with their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from aftermap.curvature.closures import ClosureWatch, Moments
from aftermap.curvature.per_example import ggn_squares
from aftermap.distributed import is_distributed
from aftermap.errors import InputError, UnsupportedError
from aftermap.optim.chunks import in_chunks
from aftermap.optim.collected import Collected, magnitudes
from aftermap.optim.noise import NoiseSource
from aftermap.optim.readers import Reading
from aftermap.optim.settings import Settings

__all__ = ["back_propagate", "digest", "ggn_of", "kind_of_loss"]


def kind_of_loss(loss: Tensor) -> str | None:
    """Classification where the last operation was PyTorch's cross-entropy; None where the loss does not tell."""
    name = "" if loss.grad_fn is None else loss.grad_fn.name()
    return "classification" if name.startswith("NllLoss") else None


def ggn_of(
    reading: Reading, settings: Settings, noise: NoiseSource, step: int, device: torch.device
) -> dict[str, Tensor] | None:
    """The diagonal of the GGN from the graph of a closure, which must still be alive."""
    if settings.likelihood is None or not isinstance(reading, ClosureWatch):
        return None
    generator = noise.generator(device, step=step, sample=0, stream=2)
    return ggn_squares(reading, settings.likelihood, settings.vectors, 1, generator)


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
    moments: Moments,
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
    factors = {s: (a, b * scale**2, t) for s, (a, b, t) in moments.factors.items()}
    return Collected(moments.sums, moments.squares, scale, scale**2, size, loss, factors, implied=True)
