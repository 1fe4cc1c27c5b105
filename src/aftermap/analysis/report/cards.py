"""The most uncertain inputs as cards of a report, each with what can be said about why."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch

from aftermap.analysis.neighbours import Neighbours
from aftermap.analysis.report.definitions import written
from aftermap.analysis.report.selective import column
from aftermap.analysis.result import Where
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.evaluation.results import Results
from aftermap.lazy import optional

__all__ = ["Card", "Features", "Near", "as_images", "data_uri", "most_uncertain"]

_CLASSES = ("classification", "binary")
_FEATURES = 6  # of an input, those furthest from what is usual
_LAYERS = 4  # with the largest shares


def as_images(images: Any, n_data: int) -> Any:
    """Returns images of the test inputs as one array [N, H, W] or [N, H, W, 3], not yet scaled.

    Args:
        images: A tensor or an array [N, H, W], [N, 1, H, W], [N, 3, H, W], [N, H, W, 1] or [N, H, W, 3], in the order
            of the test data.
        n_data: The number N of test inputs.

    Raises:
        ShapeError: The images have another shape, or their number is not that of the inputs.
        DataError: Some numbers are not finite.

    >>> as_images(torch.zeros(5, 1, 4, 3), 5).shape
    (5, 4, 3)
    """
    array = images.detach().cpu().numpy() if isinstance(images, torch.Tensor) else np.asarray(images)
    if array.ndim == 4 and array.shape[1] in (1, 3):
        array = np.moveaxis(array, 1, -1)
    if array.ndim == 4 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[-1] != 3):
        raise ShapeError(
            f"images must have shape [N, H, W], [N, 1, H, W] or [N, 3, H, W], got {list(np.shape(images))}; "
            "leave images out for inputs that are not pictures"
        )
    if len(array) != n_data:
        raise ShapeError(f"there must be one image per test input: got {len(array)} for {n_data}")
    if not bool(np.isfinite(array).all()):
        raise DataError("images hold numbers that are not finite")
    return array


def data_uri(image: Any, low: float, high: float) -> str:
    """Returns a picture [H, W] (grey) or [H, W, 3] as a PNG data address; `low` is black and `high` full brightness.

    >>> data_uri(np.eye(3), 0.0, 1.0)[:22]
    'data:image/png;base64,'
    """
    scaled = np.clip((np.asarray(image, dtype=np.float64) - low) / max(high - low, 1e-12), 0, 1)
    buffer = BytesIO()
    matplotlib_image = optional("matplotlib.image", "plot", "pictures")
    matplotlib_image.imsave(buffer, scaled, format="png", cmap="gray", vmin=0, vmax=1, metadata={"Software": None})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class Features:
    """The inputs of a table with the names of its columns.

    Attributes:
        names: The names of the columns [F].
        values: The test inputs [N, F], in the units of the reader.
    """

    names: Sequence[str]
    values: Any

    def of(self, index: int) -> list[tuple[str, str, str]]:
        """Returns name, value and usual range of the features of one input that lie furthest from the mean of the test inputs."""
        values = np.asarray(self.values, dtype=np.float64)
        mean, deviation = values.mean(0), values.std(0)
        away = np.abs(values[index] - mean) / np.where(deviation > 0, deviation, np.inf)
        order = np.argsort(-away, kind="stable")[:_FEATURES]
        return [
            (
                str(self.names[i]),
                written(float(values[index, i]), "number"),
                f"{written(float(mean[i]), 'number')} ± {written(float(deviation[i]), 'number')}",
            )
            for i in order.tolist()
        ]


@dataclass(frozen=True)
class Near:
    """A training example that the network takes for like an input: its place, its target in words, how far it is, a picture."""

    index: int
    target: str
    distance: str
    image: str = ""


@dataclass(frozen=True)
class Card:
    """One uncertain input, as a card of the page.

    Attributes:
        title: What the input is called.
        answer: What the predictor says.
        truth: The target, or "".
        correct: Whether the answer is right; None where nobody can say.
        share: The epistemic part of the total uncertainty, in percent.
        split: Both parts, in words.
        image: A picture of the input as a data address, or "".
        features: Name, value and usual range of the most unusual features.
        layers: The layers with the largest shares of the variance of this input, in words.
        near: The nearest training examples.
    """

    title: str
    answer: str
    truth: str
    correct: bool | None
    share: float
    split: str
    image: str = ""
    features: Sequence[tuple[str, str, str]] = ()
    layers: Sequence[tuple[str, str]] = ()
    near: Sequence[Near] = ()

    @property
    def explained(self) -> bool:
        """Whether there is anything to say about why."""
        return bool(self.features or self.layers or self.near)


def most_uncertain(
    results: Results,
    images: Any,
    classes: Sequence[str] | None,
    count: int,
    *,
    where: Where | None = None,
    features: Features | None = None,
    neighbours: Callable[[list[int]], Neighbours] | None = None,
) -> list[Card]:
    """Returns the test inputs with the largest epistemic uncertainty, or, of a predictor that has none, the largest total.

    Args:
        results: The evaluation of the predictor.
        images: The pictures of the test inputs, or None.
        classes: The names of the classes, or None.
        count: The number of cards.
        where: The result of `where` on the test inputs, in the same order, for the layers of each input.
        features: The test inputs as a table.
        neighbours: A function from the numbers of test inputs to their nearest training examples.
    """
    columns = [column(results, c) for c in ("epistemic", "aleatoric")]
    if columns[0] is None or columns[1] is None or count < 1:
        return []
    epistemic, aleatoric = columns[0], columns[1]
    # Of a regression in nats: the variances of several outputs may have units of their own.
    informative = column(results, "mutual_information")
    ranked = epistemic if informative is None else informative
    order = np.argsort(-(ranked if epistemic.max() > 0 else aleatoric), kind="stable")[:count].tolist()
    shown = as_images(images, len(epistemic)) if images is not None else None
    if features is not None and len(features.values) != len(epistemic):
        raise ShapeError(
            f"there must be one row of features per test input: got {len(features.values)} for {len(epistemic)}"
        )
    answers, targets = column(results, "prediction"), column(results, "target")
    confidence, right = column(results, "confidence"), column(results, "correct")
    is_class = results.kind in _CLASSES
    if classes is not None and answers is not None and is_class and len(classes) <= int(answers.max()):
        raise InputError(f"there are {len(classes)} names of classes, but class {int(answers.max())} is predicted")

    def in_words(value: float) -> str:
        if not is_class:
            return written(value, "number")
        return str(classes[int(value)]) if classes is not None and 0 <= value < len(classes) else f"{int(value)}"

    def picture_of(pixels: Any) -> str:
        return "" if shown is None else data_uri(pixels, float(shown.min()), float(shown.max()))

    near = neighbours(order) if neighbours is not None else None
    cards = []
    for place, i in enumerate(order):
        total = float(epistemic[i] + aleatoric[i])
        answer = "" if answers is None else in_words(answers[i])
        if confidence is not None:
            answer += f" ({100 * confidence[i]:.0f}\u00a0%)"
        elif answers is not None and not is_class:
            answer += f" ± {written(math.sqrt(max(0.0, total)), 'number')}"
        cards.append(
            Card(
                f"Input {i}",
                answer,
                "" if targets is None else in_words(targets[i]),
                None if right is None else bool(right[i]),
                100 * float(epistemic[i]) / total if total > 0 else 0.0,
                _split(float(epistemic[i]), float(aleatoric[i]), is_class),
                "" if shown is None else picture_of(shown[i]),
                () if features is None else features.of(i),
                () if where is None else _layers(where, i),
                () if near is None else _near(near, place, in_words, picture_of if shown is not None else None),
            )
        )
    return cards


def _split(epistemic: float, aleatoric: float, is_class: bool) -> str:
    """Writes both parts: nats for classes, and standard deviations in the units of the target for values."""
    if is_class:
        return f"{written(epistemic, 'nats')} epistemic + {written(aleatoric, 'nats')} aleatoric, in nats"
    parts = [written(math.sqrt(max(0.0, v)), "number") for v in (epistemic, aleatoric)]
    return f"standard deviation {parts[0]} from the weights, {parts[1]} from noise"


def _layers(where: Where, index: int) -> list[tuple[str, str]]:
    """Returns the layers with the largest shares of an input, if it is among those that `where` kept."""
    place = (where.inputs.indices == index).nonzero()
    if not len(place):
        return []
    shares = where.inputs.layer_shares[int(place[0])]
    order = shares.argsort(descending=True, stable=True)[:_LAYERS].tolist()
    return [(where.layer_names[i], written(float(shares[i]), "percent")) for i in order]


def _near(
    neighbours: Neighbours, place: int, in_words: Callable[[float], str], picture_of: Callable[[Any], str] | None
) -> list[Near]:
    near = []
    for k in range(neighbours.indices.shape[1]):
        target = (
            ""
            if neighbours.targets is None or neighbours.targets[place, k].numel() != 1
            else in_words(float(neighbours.targets[place, k]))
        )
        away = float(neighbours.distances[place, k])
        distance = (
            f"{away / neighbours.typical:.2g} × the usual distance"
            if neighbours.typical > 0
            else written(away, "number")
        )
        image = ""
        if picture_of is not None and neighbours.inputs is not None:
            image = picture_of(as_images(neighbours.inputs[place, k][None], 1)[0])
        near.append(Near(int(neighbours.indices[place, k]), target, distance, image))
    return near
