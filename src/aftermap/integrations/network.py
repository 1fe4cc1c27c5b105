r"""A network for tables of numbers: its standardisation, its start and its training, all from one generator.

The training objective is the negative log posterior of N data with weights w_n,

    Σ_n w_n ℓ_n(θ) + ½ Σ_l δ_l ‖θ_l‖²,     ℓ_n = −log p(y_n | f_θ(x_n)),

where the prior precision δ_l of each layer (and the noise of a regression) come from the evidence of the last round.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.errors import DataError, InputError

__all__ = ["ACTIVATIONS", "Standardised", "Table", "mlp", "moments", "train"]

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class Table:
    """A table of data in memory.

    Attributes:
        x: The inputs [N, ...].
        y: The class numbers [N], or targets [N, D].
        weight: The number of data that each datum stands for [N], above 0.
    """

    x: Tensor
    y: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def batches(self, size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns the data in order, ``size`` at a time."""
        parts = (t.split(size) for t in (self.x, self.y, self.weight))
        return list(zip(*parts, strict=True))


def moments(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weighted mean and standard deviation over the first dimension; a constant column has the deviation 1.

    >>> moments(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 3.0]))
    (tensor([2.5000]), tensor([0.8660]))
    """
    share = (weight / weight.sum()).reshape(-1, *[1] * (values.dim() - 1))
    mean = (share * values).sum(0)
    deviation = (share * (values - mean).square()).sum(0).sqrt()
    # What is left of a constant column after rounding is no scale.
    constant = deviation <= 1e3 * torch.finfo(values.dtype).eps * mean.abs()
    return mean, torch.where(constant | (deviation == 0), 1.0, deviation)


class Standardised(nn.Module):
    """A network y = mean_y + scale_y · network((x − mean_x)/scale_x), with data in their own units outside and near 1 inside.

    Args:
        network: Any module from inputs to outputs.
        x: The (mean, scale) of the inputs. With None they go in as they are.
        y: The (mean, scale) of the outputs. With None they come out as they are.
    """

    mean_x: Tensor | None
    scale_x: Tensor | None
    mean_y: Tensor | None
    scale_y: Tensor | None

    def __init__(
        self, network: nn.Module, x: tuple[Tensor, Tensor] | None = None, y: tuple[Tensor, Tensor] | None = None
    ):
        super().__init__()
        self.network = network
        for name, pair in (("x", x), ("y", y)):
            for place, part in enumerate(("mean", "scale")):
                self.register_buffer(f"{part}_{name}", None if pair is None else pair[place])

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs [N, C] of inputs [N, ...]."""
        if self.mean_x is not None and self.scale_x is not None:
            x = (x - self.mean_x) / self.scale_x
        outputs: Tensor = self.network(x)
        if self.mean_y is not None and self.scale_y is not None:
            outputs = outputs * self.scale_y + self.mean_y
        return outputs


def mlp(
    inputs: int, hidden: Sequence[int], outputs: int, activation: str, generator: torch.Generator, dtype: torch.dtype
) -> nn.Sequential:
    """Returns a fully connected network whose weights come from ``generator``: uniform in ±1/√(inputs of the layer).

    >>> net = mlp(3, (5,), 2, "tanh", torch.Generator().manual_seed(0), torch.float64)
    >>> [tuple(p.shape) for p in net.parameters()]
    [(5, 3), (5,), (2, 5), (2,)]
    """
    checks.choice("activation", activation, ACTIVATIONS)
    sizes = [inputs, *hidden, outputs]
    if any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
        raise InputError(f"hidden={tuple(hidden)!r} must hold whole numbers above 0: the widths of the hidden layers")
    layers: list[nn.Module] = []
    for place, (before, after) in enumerate(itertools.pairwise(sizes)):
        layer = nn.utils.skip_init(nn.Linear, before, after, dtype=dtype)
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(before), 1 / math.sqrt(before), generator=generator)
        layers += [layer] if place == len(sizes) - 2 else [layer, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


def train(
    model: nn.Module,
    data: Table,
    loss: Callable[[Tensor, Tensor], Tensor],
    precision: float | Mapping[str, Tensor],
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    generator: torch.Generator,
) -> None:
    """Moves the weights towards the maximum of the posterior by Adam, whose rate falls along a cosine to 0.

    Data that fit into one batch are never shuffled: then a datum of weight k counts exactly like k copies of it.

    Args:
        model: The network, which is trained in training mode and left in evaluation mode.
        data: All training data.
        loss: A function of (outputs, targets) that returns negative log-likelihoods [N].
        precision: The precision of the prior, one number or tensors by parameter name.
        epochs: The number of passes through the data.
        batch_size: The number of data in a step.
        lr: The rate of Adam at the start.
        generator: The source of the random order of the data.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise InputError("the module has no parameter that requires a gradient, so there is nothing to train")
    delta = {n: precision if isinstance(precision, float) else precision.get(n, 0.0) for n in named}
    optimiser = torch.optim.Adam(named.values(), lr=lr)
    whole = float(data.weight.sum())
    steps = epochs * math.ceil(len(data) / batch_size)
    done = 0
    model.train()
    for _ in range(epochs):
        if len(data) <= batch_size:
            order: tuple[Tensor | slice, ...] = (slice(None),)
        else:
            order = torch.randperm(len(data), generator=generator).to(data.x.device).split(batch_size)
        for index in order:
            optimiser.param_groups[0]["lr"] = 0.5 * lr * (1 + math.cos(math.pi * done / steps))
            weight = data.weight[index]
            losses = loss(model(data.x[index]), data.y[index])
            penalty = sum((delta[n] * p.square()).sum() for n, p in named.items())
            value = (weight * losses).sum() / weight.sum() + 0.5 * penalty / whole
            if not bool(torch.isfinite(value.detach())):
                raise DataError(
                    f"the training loss is {float(value.detach())} after {done} steps. Lower lr={lr:g}, or look for extreme "
                    "values in the data"
                )
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            done += 1
    optimiser.zero_grad()
    model.eval()
