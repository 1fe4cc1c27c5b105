"""The five networks that are measured, with random weights and random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Batch", "Case", "make"]

Batch = tuple[Tensor, Tensor]
VOCABULARY = 1000


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut; a 1×1 convolution where the shape changes."""

    def __init__(self, width_in: int, width: int, stride: int, *, pre: bool):
        super().__init__()
        self.pre = pre
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width_in if pre else width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        same = stride == 1 and width_in == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            ready = self.relu1(self.norm1(x))
            return self.conv2(self.relu2(self.norm2(self.conv1(ready)))) + self.shortcut(x)
        inner = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        return self.relu2(inner + self.shortcut(x))


class Encoder(nn.Module):
    """Tokens, a transformer encoder of four layers, the mean over tokens, a head."""

    def __init__(self, classes: int, width: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def mlp(classes: int) -> nn.Module:
    """784-1024-1024-C."""
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, classes))


def lenet(classes: int) -> nn.Module:
    """LeNet-5 on 28×28: the first convolution is padded by 2."""
    features = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    head = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)]
    return nn.Sequential(*features, *head)


def resnet20(classes: int) -> nn.Module:
    """ResNet-20 for 32×32 (He et al. 2016): three stages of three blocks, widths 16, 32, 64."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for out, stride in ((16, 1), (32, 2), (64, 2)):
        for number in range(3):
            layers.append(Block(width, out, stride if number == 0 else 1, pre=False))
            width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def wrn16_2(classes: int) -> nn.Module:
    """WRN-16-2 (Zagoruyko & Komodakis 2016): three stages of two blocks, widths 32, 64, 128."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    width = 16
    for out, stride in ((32, 1), (64, 2), (128, 2)):
        for number in range(2):
            layers.append(Block(width, out, stride if number == 0 else 1, pre=True))
            width = out
    layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


@dataclass(frozen=True)
class Case:
    """A network, the shape of one input, and a batch size that keeps a forward and backward pass near 10–100 ms."""

    build: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    batch: int
    tokens: bool = False


MODELS = {
    "mlp": Case(mlp, (784,), 256),
    "lenet": Case(lenet, (1, 28, 28), 256),
    "resnet20": Case(resnet20, (3, 32, 32), 16),
    "wrn16_2": Case(wrn16_2, (3, 32, 32), 8),
    "transformer": Case(Encoder, (32,), 16, tokens=True),
}


def make(name: str, *, batches: int = 1, classes: int = 10, size: int | None = None) -> tuple[nn.Module, list[Batch]]:
    """A network in eval mode and a list of batches, the same at every call.

    Args:
        name: a key of `MODELS`.
        batches: how many.
        classes: C.
        size: examples in a batch; None: the network's own.
    """
    case = MODELS[name]
    with torch.random.fork_rng():  # layers draw their weights from the default generator
        torch.manual_seed(0)
        model = case.build(classes).eval()
        for module in model.modules():
            if (
                isinstance(module, nn.BatchNorm2d)
                and module.running_mean is not None
                and module.running_var is not None
            ):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    generator = torch.Generator().manual_seed(1)
    count, data = size or case.batch, []
    for _ in range(batches):
        if case.tokens:
            x = torch.randint(VOCABULARY, (count, *case.shape), generator=generator)
        else:
            x = torch.randn(count, *case.shape, generator=generator)
        data.append((x, torch.randint(classes, (count,), generator=generator)))
    return model, data
