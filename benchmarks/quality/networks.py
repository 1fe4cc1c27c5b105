"""The networks of the tasks: each a frozen description that builds a module for an input's shape and a number of outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.quality.datasets import MissingData

__all__ = ["MLP", "Attention", "ConvNet", "LeNet", "NetworkSpec", "ResNet20", "load_resnet20"]

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class NetworkSpec(Protocol):
    """What describes a network."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A network with random weights, for inputs of this shape."""
        ...


@dataclass(frozen=True)
class MLP:
    """Fully connected layers.

    Attributes:
        widths: Of the hidden layers.
        activation: "relu" or "tanh".
        norm: Whether BatchNorm follows every hidden layer.
    """

    widths: tuple[int, ...]
    activation: str = "relu"
    norm: bool = False

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        width = math.prod(shape)
        for wider in self.widths:
            layers.append(nn.Linear(width, wider))
            if self.norm:
                layers.append(nn.BatchNorm1d(wider))
            layers.append(ACTIVATIONS[self.activation]())
            width = wider
        return nn.Sequential(*layers, nn.Linear(width, outputs))


@dataclass(frozen=True)
class LeNet:
    """LeNet-5 on 28 × 28."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        features = [nn.Conv2d(shape[0], 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        features += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        head = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs)]
        return nn.Sequential(*features, *head)


@dataclass(frozen=True)
class ConvNet:
    """3 × 3 convolutions, each followed by pooling to half the size, and one hidden layer.

    Attributes:
        widths: Channels of the convolutions.
        hidden: Width of the hidden layer.
        norm: "batch", "group", or "" for none, after every convolution.
    """

    widths: tuple[int, ...]
    hidden: int
    norm: str = ""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        channels, side = shape[0], shape[1]
        for width in self.widths:
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            if self.norm:
                layers.append(nn.BatchNorm2d(width) if self.norm == "batch" else nn.GroupNorm(4, width))
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            channels, side = width, side // 2
        layers += [nn.Flatten(), nn.Linear(channels * side * side, self.hidden), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.hidden, outputs))


class _Encoder(nn.Module):
    """Tokens cut from an input, a transformer encoder, the mean over tokens, a head."""

    def __init__(self, side: int, patch: int, width: int, depth: int, outputs: int):
        super().__init__()
        self.side, self.patch = side, patch
        self.embed = nn.Linear(patch * patch, width)
        self.position = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        count = self.side // self.patch
        x = x.reshape(-1, count, self.patch, count, self.patch).transpose(2, 3).reshape(len(x), count * count, -1)
        x = self.embed(x) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@dataclass(frozen=True)
class Attention:
    """A transformer encoder over square patches of a grey image, with LayerNorm.

    Attributes:
        patch: Side of a patch.
        width: Of a token.
        depth: How many layers.
    """

    patch: int
    width: int = 32
    depth: int = 2

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return _Encoder(math.isqrt(math.prod(shape)), self.patch, self.width, self.depth, outputs)


class _Block(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        same = stride == 1 and width_in == width
        changed = (nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.downsample = nn.Identity() if same else nn.Sequential(*changed)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(inner + self.downsample(x))


class _ResNet(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.layer1 = nn.Sequential(*(_Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(_Block(16, 32, 2), _Block(32, 32, 1), _Block(32, 32, 1))
        self.layer3 = nn.Sequential(_Block(32, 64, 2), _Block(64, 64, 1), _Block(64, 64, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.pool(self.layer3(self.layer2(self.layer1(x)))).flatten(1))


@dataclass(frozen=True)
class ResNet20:
    """ResNet-20 for 32 × 32 (He et al. 2016), 1 × 1 convolutions where the shape changes; its weights are pretrained."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return _ResNet(outputs)


def load_resnet20(folder: Path) -> nn.Module:
    """The pretrained ResNet-20 of the data folder."""
    path = folder / "models" / "cifar10_resnet20.npz"
    if not path.is_file():
        raise MissingData(f"{path} is not there; leave cifar10_resnet20 out with --tasks")
    model = _ResNet(10)
    content = np.load(path)
    model.load_state_dict({name: torch.from_numpy(content[name]) for name in content})
    return model.eval()
