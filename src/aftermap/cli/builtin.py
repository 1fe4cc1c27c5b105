"""Networks that come with the command line: `builtin:mlp`, `builtin:cnn`, `builtin:lenet` and `builtin:resnet20`.

They take inputs as they are read (pixels from 0 to 1, raw columns of a table) and standardise them themselves: the mean and
deviation are buffers, set from the training data and saved with the weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.errors import InputError

__all__ = [
    "NETWORKS",
    "Network",
    "ResNet20",
    "SequentialNetwork",
    "Standardise",
    "build_network",
    "cnn",
    "lenet",
    "mlp",
]

_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


class Standardise(nn.Module):
    """(x − mean) / deviation with fixed numbers per column or channel; `inverse` for outputs: mean + deviation · x.

    Args:
        size: The number of columns or channels.
        inverse: Whether outputs are brought back to their units, instead of inputs to the scale 1.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, size: int, *, inverse: bool = False):
        super().__init__()
        self.inverse = inverse
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("deviation", torch.ones(size))

    def set_from(self, values: Tensor) -> None:
        """Takes mean and deviation from data [N, columns] or [N, channels, H, W]."""
        rows = values.transpose(0, 1).flatten(1).to(torch.float64)
        deviation = rows.std(1) if rows.shape[1] > 1 else torch.ones(len(rows), dtype=torch.float64)
        with torch.no_grad():
            self.mean.copy_(rows.mean(1))
            self.deviation.copy_(torch.where(deviation > 1e-8, deviation, 1.0))  # a constant column stays as it is

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1,) + (1,) * (x.dim() - 2)
        mean, deviation = self.mean.view(shape), self.deviation.view(shape)
        return mean + deviation * x if self.inverse else (x - mean) / deviation


class Network(nn.Module, ABC):
    """Standardised inputs, a body, and for a regression outputs in the units of the targets."""

    def __init__(self, channels: int):
        super().__init__()
        self.standardise = Standardise(channels)
        self.scale: nn.Module = nn.Identity()

    @abstractmethod
    def body(self, x: Tensor) -> Tensor:
        """Returns the outputs for standardised inputs."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.scale(self.body(self.standardise(x)))
        return outputs


class SequentialNetwork(Network):
    """A network whose layers follow each other."""

    def __init__(self, channels: int, layers: Sequence[nn.Module]):
        super().__init__(channels)
        self.layers = nn.Sequential(*layers)

    def body(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x)
        return outputs


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut; a 1×1 convolution where the shape changes."""

    def __init__(self, into: int, out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample: nn.Module | None = None
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + shortcut)


class ResNet20(Network):
    """ResNet-20 for small images: three stages of three blocks, widths 16, 32 and 64.

    Parameters are named as in public checkpoints for CIFAR-10, whose usual normalisation is the one before training.

    References:
        He et al. 2016, Deep residual learning for image recognition, section 4.2.
    """

    def __init__(self, channels: int = 3, outputs: int = 10):
        super().__init__(channels)
        self.conv1, self.bn1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.fc = nn.Linear(64, outputs)
        if channels == 3:
            self.standardise.mean.copy_(torch.tensor(_CIFAR10[0]))
            self.standardise.deviation.copy_(torch.tensor(_CIFAR10[1]))

    def body(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        outputs: Tensor = self.fc(x.mean((2, 3)))
        return outputs


def mlp(shape: Sequence[int], outputs: int) -> Network:
    """Makes a network of two hidden layers of 64 units with tanh; images are flattened.

    >>> mlp([4], 3)(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """
    first = [nn.Flatten()] if len(shape) > 1 else []
    layers = [*first, nn.Linear(math.prod(shape), 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    return SequentialNetwork(shape[0], layers)


def cnn(shape: Sequence[int], outputs: int) -> Network:
    """Makes a network of two small convolutions and two linear layers, for images of 8×8 and more.

    >>> sum(p.numel() for p in cnn([1, 8, 8], 10).parameters())
    38282
    """
    channels, height, width = _image(shape, "cnn", 8)
    layers = [nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()]
    layers += [nn.Linear(32 * (height // 2) * (width // 2), 64), nn.ReLU(), nn.Linear(64, outputs)]
    return SequentialNetwork(channels, layers)


def lenet(shape: Sequence[int], outputs: int) -> Network:
    """Makes LeNet-5 with ReLU and max-pooling, 61,706 parameters for ten classes; smaller images are padded to 32×32.

    >>> sum(p.numel() for p in lenet([1, 28, 28], 10).parameters())
    61706
    """
    channels, height, width = _image(shape, "lenet", 4)
    if height != width or height > 32 or height % 2:
        raise InputError(f"builtin:lenet takes square images of even size up to 32×32, but they are {height}×{width}")
    layers = [nn.Conv2d(channels, 6, 5, padding=(32 - height) // 2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU()]
    layers += [nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs)]
    return SequentialNetwork(channels, layers)


def _resnet20(shape: Sequence[int], outputs: int) -> Network:
    return ResNet20(_image(shape, "resnet20", 8)[0], outputs)


def _image(shape: Sequence[int], name: str, least: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        raise InputError(
            f"builtin:{name} takes images [channels, height, width] of at least {least}×{least}, but an input has shape "
            f"{list(shape)}; for tables use builtin:mlp"
        )
    channels, height, width = shape
    return channels, height, width


NETWORKS: dict[str, Callable[[Sequence[int], int], Network]] = {
    "mlp": mlp,
    "cnn": cnn,
    "lenet": lenet,
    "resnet20": _resnet20,
}


def build_network(name: str, shape: Sequence[int], outputs: int, *, rescale: bool = False) -> Network:
    """Makes a built-in network for inputs of a shape [...] and a number of outputs.

    Args:
        name: A key of ``NETWORKS``.
        shape: The shape of one input.
        outputs: The number of outputs.
        rescale: Whether outputs are in the units of regression targets.

    Raises:
        InputError: The name is unknown, or the shape does not fit.
    """
    if name not in NETWORKS:
        raise InputError(f"there is no network builtin:{name}; there are {', '.join('builtin:' + n for n in NETWORKS)}")
    network = NETWORKS[name](shape, outputs)
    if rescale:
        network.scale = Standardise(outputs, inverse=True)
    return network
