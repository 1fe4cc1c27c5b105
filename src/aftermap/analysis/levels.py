"""Uncertainty by class and by pair of classes, and by input: the most uncertain ones, and where in them it sits (docs/mathematics/where.md).

The covariance of the outputs, V(x), averaged over all inputs, over those of each true class and over those of each predicted
class; and of every pair of outputs the variance of their difference, V_kk + V_jj − 2 V_kj, which stays the same when all
logits move together.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aftermap.analysis.layers import Contributions
from aftermap.batches import Batch, tensors_of
from aftermap.errors import DataError, InputError, StatisticalWarning, UnsupportedError
from aftermap.evaluation.predictor import without_samples
from aftermap.evaluation.results import Table
from aftermap.predictive import Prediction
from aftermap.predictive.predictor import PosteriorPredictor

__all__ = ["ClassResult", "ClassSums", "InputKeeper", "InputResult", "saliency_of"]

MAX_GROUPED = 32  # With more classes only the average over all inputs has a covariance.
_JACOBIAN_NUMBERS = 5 * 10**7  # This many numbers of Jacobians a saliency map holds at once.


@dataclass(frozen=True, eq=False)
class ClassResult:
    """Uncertainty by class (or output of a regression), K of them; rows are inputs times output positions.

    Attributes:
        labels: The names of the outputs.
        covariance: The mean of V [C, C]; None if only variances were taken.
        variance: The mean diagonal of V [C].
        counts: For each group, "true" and "predicted", the number of rows of each class [K]; empty for a regression.
        by_class: For each group the mean V over the rows of each class [K, C, C]; empty where it would be too large.
        epistemic: For each group the mean mutual information [K], NaN for a class without a row.
        aleatoric: For each group the mean expected entropy [K].
        accuracy: The share of right predictions of each true class [K]; None for a regression.
        pairs: The mean mutual information of the rows with true class k that were predicted as j [K, K]; NaN without a
            row.
        pair_counts: The number of such rows [K, K].
        layer_shares: For each group each layer's share of the layers' own variances [K, L]; they add up to one.
    """

    labels: tuple[str, ...]
    covariance: Tensor | None
    variance: Tensor
    counts: dict[str, Tensor]
    by_class: dict[str, Tensor]
    epistemic: dict[str, Tensor]
    aleatoric: dict[str, Tensor]
    accuracy: Tensor | None
    pairs: Tensor | None
    pair_counts: Tensor | None
    layer_shares: dict[str, Tensor]

    @property
    def contrast(self) -> Tensor | None:
        """The mean variance of the difference of every two outputs [C, C]."""
        if self.covariance is None:
            return None
        variances = self.covariance.diagonal()
        return variances[:, None] + variances - 2 * self.covariance

    @property
    def correlation(self) -> Tensor | None:
        """The correlation of the outputs, from the mean covariance [C, C]."""
        if self.covariance is None:
            return None
        scale = self.covariance.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        return self.covariance / scale / scale[:, None]

    def table(self, layers: Sequence[str]) -> Table:
        """Returns a table with one row per class, or per output of a regression."""
        if not self.counts:
            return Table({"output": list(self.labels), "variance": self.variance.tolist()})
        group = "true" if "true" in self.counts else "predicted"
        table = Table({"class": [*self.labels] if len(self.labels) == len(self.counts[group]) else ["0", "1"]})
        for word, counts in self.counts.items():
            table[f"{word} inputs"] = counts.tolist()
        if self.accuracy is not None and "true" in self.counts:
            table["accuracy"] = self.accuracy.tolist()
        for word in self.counts:
            table[f"epistemic ({word})"] = self.epistemic[word].tolist()
            table[f"aleatoric ({word})"] = self.aleatoric[word].tolist()
        if len(self.variance) == len(table["class"]):
            table["variance"] = self.variance.tolist()
        for i, layer in enumerate(layers):
            table[f"{layer} share"] = self.layer_shares[group][:, i].tolist()
        return table


class ClassSums:
    """The sums over batches that the results by class are made of."""

    def __init__(self, labels: Sequence[str] | None = None):
        self.labels = None if labels is None else tuple(map(str, labels))
        self.rows = 0
        self.sums: dict[str, Tensor] = {}

    def _add(self, key: str, value: Tensor) -> None:
        value = value.to(torch.float64).cpu()
        self.sums[key] = self.sums[key] + value if key in self.sums else value

    def add(self, contributions: Contributions, prediction: Prediction, targets: object) -> None:
        """Adds the numbers of a batch.

        Args:
            contributions: What every layer contributes to the variances of the batch.
            prediction: The prediction that was made of them.
            targets: The labels of the examples; None where only predicted classes are known.
        """
        width = contributions.mean.shape[-1]
        variance = contributions.var.reshape(-1, width)
        self.rows += len(variance)
        self._add("variance", variance.double().sum(0))
        covariance = None if contributions.cov is None else contributions.cov.reshape(-1, width, width).double()
        if covariance is not None:
            self._add("covariance", covariance.sum(0))
        groups = _groups(prediction, targets)
        if not groups:
            return
        classes = max(2, width)
        by_layer = contributions.variance["own"].sum(-1).flatten(1).T.cpu()  # [rows, L]
        numbers = {
            "count": torch.ones(len(variance)),
            "epistemic": prediction.epistemic.reshape(-1),
            "aleatoric": prediction.aleatoric.reshape(-1),
        }
        for word, labels in groups.items():
            inside = (labels >= 0) & (labels < classes)
            chosen = torch.where(inside, labels, 0)
            member = torch.zeros(len(labels), classes, dtype=torch.float64)
            member[torch.arange(len(labels)), chosen] = inside.double()
            for name, value in numbers.items():
                self._add(f"{name}/{word}", member.T @ value.detach().cpu().double())
            self._add(f"layers/{word}", member.T @ by_layer)
            if covariance is not None and classes <= MAX_GROUPED:
                by_class = torch.einsum("rk,rcd->kcd", member, covariance.detach().cpu())
                self._add(f"covariance/{word}", by_class)
            groups[word] = torch.where(inside, labels, -1)
        if "true" in groups:
            known = groups["true"] >= 0
            place = groups["true"][known] * classes + groups["predicted"][known]
            for name in ("count", "epistemic"):
                flat = torch.zeros(classes * classes, dtype=torch.float64)
                flat.index_add_(0, place, numbers[name].detach().cpu().double()[known])
                self._add(f"pair {name}", flat.reshape(classes, classes))

    def result(self) -> ClassResult:
        """Returns the means of everything that was added."""
        sums, rows = self.sums, self.rows
        width = len(sums["variance"])
        labels = tuple(map(str, range(width))) if self.labels is None else self.labels
        if len(labels) != width:
            raise InputError(
                f"classes= names {len(labels)} outputs, but the model has {width}: {', '.join(labels[:8])}"
            )
        words = [w for w in ("true", "predicted") if f"count/{w}" in sums]
        counts = {w: sums[f"count/{w}"] for w in words}
        pairs = sums.get("pair count")
        return ClassResult(
            labels,
            sums["covariance"] / rows if "covariance" in sums else None,
            sums["variance"] / rows,
            {w: c.long() for w, c in counts.items()},
            {w: sums[f"covariance/{w}"] / counts[w][:, None, None] for w in words if f"covariance/{w}" in sums},
            {w: sums[f"epistemic/{w}"] / counts[w] for w in words},
            {w: sums[f"aleatoric/{w}"] / counts[w] for w in words},
            None if pairs is None else pairs.diagonal() / counts["true"],
            None if pairs is None else sums["pair epistemic"] / pairs,
            None if pairs is None else pairs.long(),
            {w: sums[f"layers/{w}"] / sums[f"layers/{w}"].sum(1, keepdim=True) for w in words},
        )


def _groups(prediction: Prediction, targets: object) -> dict[str, Tensor]:
    """Returns true and predicted classes by row; nothing where there are no classes, or several labels at once."""
    single = prediction.kind == "binary" and prediction.mean.shape[-1] == 1
    if prediction.kind != "classification" and not single:
        return {}
    predicted = prediction.labels.reshape(-1).cpu()
    groups = {"predicted": predicted}
    if isinstance(targets, Tensor) and targets.numel() == len(predicted):
        true = targets.reshape(-1).cpu().long()
        groups = {"true": torch.where(prediction.has_label(true), true, -1), **groups}
    return groups


@dataclass(frozen=True, eq=False)
class InputResult:
    """The most uncertain inputs, most uncertain first, and two numbers for every input.

    Uncertainties are means over positions and outputs: nats for classes, variances for a regression.

    Attributes:
        indices: The places of the inputs in the data, in the order they came [T].
        inputs: The inputs themselves, each a batch of one, on the CPU.
        targets: The targets of the inputs, each a batch of one, or None.
        predictions: The predictions of the inputs, on the CPU.
        epistemic: The epistemic uncertainty of these inputs [T].
        aleatoric: The aleatoric uncertainty of these inputs [T].
        layer_shares: Each layer's share of the layers' own variances of its outputs [T, L]; they add up to one.
        all_epistemic: The epistemic uncertainty of every input [N].
        all_aleatoric: The aleatoric uncertainty of every input [N].
        saliency: The gradients of the epistemic uncertainty in the inputs, of their shape [T, ...]; None if not asked
            for.
    """

    indices: Tensor
    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    predictions: Prediction
    epistemic: Tensor
    aleatoric: Tensor
    layer_shares: Tensor
    all_epistemic: Tensor
    all_aleatoric: Tensor
    saliency: Tensor | None = None

    def table(self, layers: Sequence[str]) -> Table:
        """Returns a table with one row per input."""
        table = Table({"index": self.indices.tolist()})
        one = self.predictions.mean.dim() == 2
        if one and all(isinstance(t, Tensor) and t.numel() == 1 for t in self.targets):
            table["target"] = [t.item() for t in self.targets]
        if one and self.predictions.kind == "classification":
            table["prediction"] = self.predictions.labels.tolist()
            table["confidence"] = self.predictions.confidence.tolist()
        elif one and self.predictions.mean.shape[1] == 1:
            table["prediction"] = self.predictions.mean[:, 0].tolist()
        table["epistemic"], table["aleatoric"] = self.epistemic.tolist(), self.aleatoric.tolist()
        table["epistemic share"] = (self.epistemic / (self.epistemic + self.aleatoric)).tolist()
        for i, layer in enumerate(layers):
            table[f"{layer} share"] = self.layer_shares[:, i].tolist()
        return table


class InputKeeper:
    """Keeps the most uncertain inputs of a stream; all others are forgotten.

    Args:
        top: The number of inputs to keep.
    """

    def __init__(self, top: int):
        self.top, self.seen = top, 0
        self.epistemic: list[Tensor] = []
        self.aleatoric: list[Tensor] = []
        self.most_uncertain: list[tuple[float, int, Any, Any, Prediction, Tensor]] = []

    def add(self, batch: Batch, contributions: Contributions, prediction: Prediction) -> None:
        """Adds the inputs of a batch."""
        light = without_samples(prediction).cpu()
        epistemic, aleatoric = _by_example(light.epistemic), _by_example(light.aleatoric)
        self.epistemic.append(epistemic)
        self.aleatoric.append(aleatoric)
        layers = contributions.variance["own"].sum((2, 3)).T.cpu()  # [n, L]
        shares = layers / layers.sum(1, keepdim=True)
        for i in epistemic.argsort(descending=True, stable=True)[: self.top].tolist():
            if len(self.most_uncertain) == self.top and float(epistemic[i]) <= self.most_uncertain[-1][0]:
                break
            chosen = batch.take(torch.tensor([i]))
            example, target = _on_cpu(chosen.inputs), _on_cpu(chosen.targets)
            self.most_uncertain.append((float(epistemic[i]), self.seen + i, example, target, light[i], shares[i]))
            self.most_uncertain = sorted(self.most_uncertain, key=lambda k: (-k[0], k[1]))[: self.top]
        self.seen += batch.size

    def result(self, predictor: PosteriorPredictor, saliency: bool | None, generator: Any) -> InputResult:
        """Returns what was kept, with saliency maps if asked for."""
        selected = self.most_uncertain
        if not selected:
            raise DataError("the data hold no example")
        predictions = Prediction.concatenate([k[4] for k in selected])
        inputs = tuple(k[2] for k in selected)
        size = predictor.posterior.n_params * predictions.mean.shape[-1]
        # A map is of one uncertainty per example: outputs [N, C], not one for every pixel or token.
        possible = predictions.mean.dim() == 2 and _is_plain(inputs) and size <= _JACOBIAN_NUMBERS
        maps: Tensor | None = None
        if saliency or (saliency is None and possible):
            try:
                maps = saliency_of(predictor, inputs, generator)
            except UnsupportedError as error:
                if saliency:
                    raise
                warnings.warn(f"there are no saliency maps: {error}", StatisticalWarning, stacklevel=3)
        return InputResult(
            torch.tensor([k[1] for k in selected]),
            inputs,
            tuple(k[3] for k in selected),
            predictions,
            _by_example(predictions.epistemic),
            _by_example(predictions.aleatoric),
            torch.stack([k[5] for k in selected]),
            torch.cat(self.epistemic),
            torch.cat(self.aleatoric),
            maps,
        )


def _by_example(values: Tensor) -> Tensor:
    return values.detach().reshape(len(values), -1).double().mean(1).cpu()


def _on_cpu(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().cpu()
    if isinstance(tree, dict):
        return {k: _on_cpu(v) for k, v in tree.items()}
    return tuple(_on_cpu(v) for v in tree) if isinstance(tree, tuple | list) else tree


def _is_plain(inputs: Sequence[Any]) -> bool:
    """Tells whether every input is one floating-point tensor, all of one shape."""
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in inputs):
        return False
    return len({tuple(x.shape) for x in inputs}) == 1


def saliency_of(
    predictor: PosteriorPredictor, inputs: Sequence[Any], generator: torch.Generator | None = None
) -> Tensor:
    """Returns the gradient of the epistemic uncertainty in each input: what it hangs on (docs/mathematics/where.md).

    The uncertainty is the mutual information for classes, and the variance summed over outputs for a regression, both
    of the linearised predictive.

    Args:
        predictor: The model with its posterior and likelihood.
        inputs: The inputs, as batches of one.
        generator: The source of the link's random samples.

    Returns:
        The gradients [T, ...], of the inputs' shape.

    Raises:
        UnsupportedError: The inputs are not single floating-point tensors of one shape, and so have no such gradient, or
            the network cannot be differentiated twice.
    """
    if not _is_plain(inputs):
        shapes = [[tuple(t.shape) for t in tensors_of(x)] for x in inputs[:2]]
        raise UnsupportedError(
            f"a saliency map needs single floating-point inputs of one shape, got {shapes}…; pass saliency=False"
        )
    seed = None if generator is None else int(torch.randint(2**31, (), generator=generator))
    device = next(predictor.model.parameters()).device
    maps = []
    # Inputs go one at a time, since a Jacobian per example is formed.
    for example in inputs:
        x = example.to(device).clone().requires_grad_()
        draws = None if seed is None else torch.Generator().manual_seed(seed)
        try:
            with torch.enable_grad():
                prediction = predictor.predict(x, differentiable=True, generator=draws)
                (gradient,) = torch.autograd.grad(prediction.epistemic.sum(), x)
        except RuntimeError as error:
            raise UnsupportedError(
                f"a saliency map differentiates the network twice, which it does not allow ({error}); pass saliency=False"
            ) from error
        maps.append(gradient.detach().cpu())
    return torch.cat(maps)
