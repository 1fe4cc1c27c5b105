"""The features of a network, which are what goes into its last layer, and statistics of them that stay small and keep their digits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.baselines.base import batches_of
from aftermap.batches import Batch, Unpack
from aftermap.curvature.passes.last_block import find_last_layer
from aftermap.curvature.passes.record import outputs_replaced
from aftermap.errors import DataError, InputError, ShapeError, UnsupportedError
from aftermap.linalg import all_finite
from aftermap.models import call_model, check_outputs, evaluating
from aftermap.params import named_parameters

__all__ = [
    "ClassMoments",
    "FeatureBatch",
    "FeatureReader",
    "FeatureSample",
    "class_labels",
    "class_logits",
    "outputs_of",
    "read_features",
]

_ADVICE = "Name another layer with layer=, one whose input is [N, F]"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class FeatureBatch:
    """What a network made of a batch; all in float64 on the CPU.

    Attributes:
        features: What went into the layer [N, F].
        outputs: What the network returned [N, C].
        targets: The batch's targets as they came, or None.
        weight: How often each example counts [N].
        precision: The dtype in which the network computed the features.
    """

    features: Tensor
    outputs: Tensor
    targets: Any
    weight: Tensor
    precision: torch.dtype


class FeatureReader:
    """Reads what goes into a layer while the network runs; of the network nothing changes.

    Positions are averaged: of a convolution's input [N, F, H, W], and of a linear layer's input [N, T, F].

    Args:
        model: The network.
        layer: The name of a module. None finds the last layer with a weight matrix.
        batch: A batch, which the layer is looked for and tried with.

    Raises:
        InputError: There is no such module.
        UnsupportedError: There is no last layer with a weight matrix, or its input has no dimension that belongs to the examples.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    >>> batch = Batch(torch.ones(5, 2), None, None, 5)
    >>> FeatureReader(net, None, batch).read(batch).features.shape
    torch.Size([5, 3])
    """

    def __init__(self, model: nn.Module, layer: str | None, batch: Batch):
        self.model = model
        self.modules = _last_modules(model, batch) if layer is None else [_named_module(model, layer)]
        self._checked = False
        self.width: int | None = None  # the number of features, once something was read

    def _run(self, batch: Batch) -> tuple[Tensor, list[tuple[Tensor, Tensor]], list[int]]:
        """Runs the network: the outputs, (features, output) of every call of the layer, and how many dimensions each input had."""
        calls: list[tuple[Tensor, Tensor]] = []
        dimensions: list[int] = []

        def keep(module: nn.Module, features: Any, output: Any) -> Any:
            calls.append((_pooled(module, features, batch.size), output))
            dimensions.append(features.dim())
            return output

        changes: dict[nn.Module, Callable[[Tensor, Tensor], Tensor]] = {m: partial(keep, m) for m in self.modules}
        with torch.no_grad(), evaluating(self.model), outputs_replaced(changes):
            outputs = call_model(self.model, batch.inputs)
        return outputs, calls, dimensions

    def read(self, batch: Batch) -> FeatureBatch:
        """Runs the network on a batch that is on its device."""
        outputs, calls, dimensions = self._run(batch)
        check_outputs(outputs, batch.size)
        if not calls:
            raise UnsupportedError(f"the layer whose input the features are was not called. {_ADVICE}")
        # As `find_last_layer`: the call whose output is returned as it is, failing that the last one.
        features = next((inputs for inputs, output in calls if output is outputs), calls[-1][0])
        if not all_finite(features):
            raise DataError("the features are not finite; check the weights and the scale of the inputs")
        if max(dimensions) > 2 and batch.size > 1 and not self._checked:
            self._checked = True
            self._check_rows(features, batch)
        self.width = features.shape[1] if self.width is None else self.width
        if features.shape[1] != self.width:
            raise ShapeError(
                f"the inputs have {features.shape[1]} features per example, those before had {self.width}; resize them to one size"
            )
        weight = torch.ones(batch.size) if batch.weight is None else batch.weight
        return FeatureBatch(_plain(features), _plain(outputs), batch.targets, _plain(weight), features.dtype)

    def _check_rows(self, features: Tensor, batch: Batch) -> None:
        """Raises where the first dimension of the layer's input is not that of the examples, but happens to be as long."""
        alone = self.read(batch.take(torch.arange(1))).features[0]
        together = _plain(features)
        if float((alone - together[0]).abs().max()) > 1e-2 * float(together.abs().max()):
            raise UnsupportedError(
                "the features of an example depend on the other examples of its batch: the first dimension of the layer's input is "
                f"not that of the examples, or the network mixes them. {_ADVICE}"
            )


def _plain(values: Tensor) -> Tensor:
    return values.detach().cpu().to(torch.float64)  # on the CPU first: not every device has float64


def outputs_of(model: nn.Module, inputs: Any, size: int) -> Tensor:
    """Returns the outputs [N, ..., C] of a network in eval mode, float64 on the CPU; of the network nothing changes."""
    with torch.no_grad(), evaluating(model):
        outputs = call_model(model, inputs)
    check_outputs(outputs, size)
    return _plain(outputs)


def _last_modules(model: nn.Module, batch: Batch) -> list[nn.Module]:
    """Returns every module that owns the weight of the last layer; most weights have one owner."""
    try:
        with evaluating(model):
            name = find_last_layer(model, batch)[0]
    except UnsupportedError as error:
        raise UnsupportedError(f"the network has no last layer to read features at ({error}). {_ADVICE}") from error
    weight = named_parameters(model)[name]
    return [m for m in model.modules() if any(p is weight for p in m._parameters.values())]


def _named_module(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    del modules[""]
    checks.choice("layer", name, modules)
    return modules[name]


def _pooled(module: nn.Module, features: Any, size: int) -> Tensor:
    """Returns the input of a layer as features [N, F], a copy: what follows may overwrite it."""
    is_tensor = isinstance(features, Tensor)
    if not is_tensor or not features.is_floating_point() or features.dim() < 2 or features.shape[0] != size:
        what = f"a tensor {features.dtype} {list(features.shape)}" if is_tensor else type(features).__name__
        raise UnsupportedError(
            f"the input of {type(module).__name__} is {what} for {size} examples; features must be floating-point numbers with the "
            f"examples first. {_ADVICE}"
        )
    if features.dim() == 2:
        return features.detach().clone()
    if isinstance(module, _CONVOLUTIONS):
        return features.detach().flatten(2).mean(2)
    if isinstance(module, nn.Linear):
        return features.detach().flatten(1, -2).mean(1)
    raise UnsupportedError(
        f"the input of {type(module).__name__} has shape {list(features.shape)}, and which of its dimensions are positions is known of "
        f"linear layers and convolutions only. {_ADVICE}"
    )


def read_features(
    model: nn.Module, data: Iterable[Any], layer: str | None, unpack: Unpack | None
) -> tuple[FeatureReader, Iterator[FeatureBatch]]:
    """Returns a reader of the layer's input, and the features of all batches of the data; examples of weight 0 are left out.

    Raises:
        DataError: The data are empty, or not finite.
        ShapeError: The network's outputs are not [N, C].
    """
    batches = iter(batches_of(model, data, unpack))
    first = next(batches, None)
    if first is None:
        raise DataError("the data hold no example; a detector is fitted on training data")
    reader = FeatureReader(model, layer, first)

    def stream() -> Iterator[FeatureBatch]:
        batch: Batch | None = first
        while batch is not None:
            read = reader.read(batch)
            if read.outputs.dim() != 2:
                raise ShapeError(
                    f"the network returned shape {list(read.outputs.shape)}; detectors need one answer per example, [N, C]"
                )
            yield _without_zero_weights(read)
            batch = next(batches, None)

    return reader, stream()


def _without_zero_weights(batch: FeatureBatch) -> FeatureBatch:
    keep = batch.weight > 0
    if bool(keep.all()):
        return batch
    targets = batch.targets[keep.to(batch.targets.device)] if isinstance(batch.targets, Tensor) else batch.targets
    return FeatureBatch(batch.features[keep], batch.outputs[keep], targets, batch.weight[keep], batch.precision)


def class_logits(owner: str, outputs: Tensor) -> Tensor:
    """Returns outputs that are the logits [N, C] of at least two classes; raises for all others.

    Raises:
        UnsupportedError: They have another shape.
    """
    if outputs.dim() != 2 or outputs.shape[1] < 2:
        raise UnsupportedError(
            f"{owner} needs the logits [N, C] of at least two classes, but the network returned shape {list(outputs.shape)}. "
            "For one logit of a binary network return two, 0 and the logit; for a regression KNN works"
        )
    return outputs


def class_labels(owner: str, targets: Any, classes: int) -> Tensor:
    """Returns the class labels [N] on the CPU.

    Raises:
        UnsupportedError: The targets are not whole numbers, one per example.
        DataError: A label is not one of the network's classes.
    """
    if not isinstance(targets, Tensor):
        raise DataError(f"{owner} needs class labels, but a batch has no tensor of targets; pass (x, y) batches")
    if targets.is_floating_point() or targets.is_complex() or targets.dim() != 1:
        raise UnsupportedError(
            f"{owner} is for classification with labels [N] that are whole numbers; got targets {targets.dtype} of shape "
            f"{list(targets.shape)}. For a regression KNN works, which looks at no targets"
        )
    labels = targets.detach().cpu().long()
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise DataError(f"labels must lie in 0..{classes - 1} for {classes} classes, got {int(outside[0])}")
    return labels


class ClassMoments:
    """Counts and means of features by class, and their scatter about the class means, in float64.

    Batches are centred at their own class means before they are summed, and merged by the shift between means (Chan, Golub,
    LeVeque 1983), so that features whose mean is large beside their spread lose no digits.

    Args:
        classes: The number C of classes.
        width: The number F of features.

    >>> moments = ClassMoments(1, 1)
    >>> moments.add(
    ...     torch.tensor([[1e8], [1e8 + 2]], dtype=torch.float64), torch.zeros(2, dtype=torch.long), torch.ones(2)
    ... )
    >>> moments.scatter.item()
    2.0
    """

    def __init__(self, classes: int, width: int):
        self.count = torch.zeros(classes, dtype=torch.float64)
        self.mean = torch.zeros(classes, width, dtype=torch.float64)
        self.scatter = torch.zeros(width, width, dtype=torch.float64)
        self.square = 0.0  # the sum of all squares of features, for their rounding
        self.rows = 0

    def add(self, features: Tensor, labels: Tensor, weight: Tensor) -> None:
        """Adds features [N, F] with labels [N], each as often as its weight [N] says."""
        weight = weight.to(torch.float64)
        count = torch.zeros_like(self.count).index_add_(0, labels, weight)
        mean = torch.zeros_like(self.mean).index_add_(0, labels, features * weight[:, None])
        mean /= torch.where(count > 0, count, 1.0)[:, None]
        centred = (features - mean[labels]) * weight.sqrt()[:, None]
        total = self.count + count
        share = count / torch.where(total > 0, total, 1.0)
        shift = torch.where(count[:, None] > 0, mean - self.mean, 0.0)
        between = shift * (self.count * share).sqrt()[:, None]
        self.scatter += centred.T @ centred + between.T @ between
        self.mean += shift * share[:, None]
        self.count = total
        self.square += float((features.square() * weight[:, None]).sum())
        self.rows += len(features)

    @property
    def total(self) -> float:
        """The number of examples, copies counted."""
        return float(self.count.sum())

    @property
    def centre(self) -> Tensor:
        """The mean of all features [F]."""
        return self.count @ self.mean / self.total

    def scatter_about(self, origin: Tensor) -> Tensor:
        """Returns Σ (φ − origin)(φ − origin)ᵀ [F, F] over all features."""
        shift = (self.mean - origin) * self.count.sqrt()[:, None]
        return self.scatter + shift.T @ shift

    def rounding(self, precision: torch.dtype) -> float:
        """Returns the variance of the rounding errors of features that a network computed in this precision."""
        return torch.finfo(precision).eps ** 2 / 12 * self.square / (self.total * self.mean.shape[1])


class FeatureSample:
    """A uniform sample of at most so many rows of a stream, whatever its batches.

    Every row draws a number, and the rows with the smallest numbers stay. Up to ``most`` rows all of them are kept.

    Args:
        most: The largest number of rows that are held.
        seed: The seed of the draws.

    >>> sample = FeatureSample(2, seed=0)
    >>> for row in torch.arange(5.0).split(1):
    ...     sample.add(row[:, None])
    >>> sample.rows.shape, sample.seen
    (torch.Size([2, 1]), 5)
    """

    def __init__(self, most: int, seed: int):
        self.most, self.seen = most, 0
        self._generator = torch.Generator().manual_seed(seed)
        self._new: list[Tensor] = []  # until there are too many
        self._rows: Tensor | None = None
        self._keys = torch.empty(0, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """Looks at rows [N, F]."""
        keys = torch.rand(len(rows), generator=self._generator, dtype=torch.float64)
        self.seen += len(rows)
        if self._rows is None:
            free = self.most - len(self._keys)
            self._new.append(rows[:free].clone())
            self._keys = torch.cat([self._keys, keys[:free]])
            rows, keys = rows[free:], keys[free:]
            if len(rows):
                self._rows, self._new = torch.cat(self._new), []
        for some, theirs in zip(rows.split(self.most), keys.split(self.most), strict=True):
            self._replace(some, theirs)

    def _replace(self, rows: Tensor, keys: Tensor) -> None:
        """Puts rows with smaller keys in the places of those with the largest."""
        if self._rows is None or not len(rows):
            return
        size = len(self._keys)
        chosen = torch.zeros(size + len(rows), dtype=torch.bool)
        chosen[torch.cat([self._keys, keys]).topk(size, largest=False).indices] = True
        places, new = (~chosen[:size]).nonzero()[:, 0], chosen[size:].nonzero()[:, 0]
        self._rows[places], self._keys[places] = rows[new], keys[new]

    @property
    def rows(self) -> Tensor:
        """The sample [M, F]."""
        if self._rows is not None:
            return self._rows
        if not self._new:
            raise InputError("the sample is empty; add rows first")
        return torch.cat(self._new)
