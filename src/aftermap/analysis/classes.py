"""Uncertainty by class and by pair of classes (MATH W5).

The covariance of the outputs, V(x), averaged over all inputs, over those of each true class and over those of each predicted
class; and of every pair of outputs the variance of their difference, V_kk + V_jj − 2 V_kj, which stays the same when all
logits move together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.analysis.layers import Contributions
from aftermap.analysis.tables import Table
from aftermap.errors import InputError
from aftermap.predictive import Prediction

__all__ = ["ClassResult", "ClassSums"]

MAX_GROUPED = 32  # classes; beyond it only the average over all inputs has a covariance


@dataclass(frozen=True, eq=False)
class ClassResult:
    """K classes (or outputs of a regression), rows being inputs times output positions.

    Attributes:
        labels: names of the outputs.
        covariance: mean V [C, C]; None if only variances were taken.
        variance: mean diagonal of V [C].
        counts: group -> rows of each class [K]; groups are "true" and "predicted"; empty for a regression.
        by_class: group -> mean V over the rows of each class [K, C, C]; empty where it would be too large.
        epistemic: group -> mean mutual information [K], NaN for a class without a row.
        aleatoric: group -> mean expected entropy [K].
        accuracy: share of right predictions of each true class [K]; None for a regression.
        pairs: mean mutual information of the rows with true class k that were predicted as j [K, K]; NaN without a row.
        pair_counts: how many there are [K, K].
        layer_shares: group -> each layer's share of the variance, cross terms included [K, L].
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
        """Mean variance of the difference of every two outputs [C, C]."""
        if self.covariance is None:
            return None
        own = self.covariance.diagonal()
        return own[:, None] + own - 2 * self.covariance

    @property
    def correlation(self) -> Tensor | None:
        """Correlation of the outputs, from the mean covariance [C, C]."""
        if self.covariance is None:
            return None
        scale = self.covariance.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        return self.covariance / scale / scale[:, None]

    def table(self, layers: Sequence[str]) -> Table:
        """One row per class, or per output of a regression."""
        if not self.counts:
            return Table({"output": list(self.labels), "variance": self.variance.tolist()})
        group = "true" if "true" in self.counts else "predicted"
        found = Table({"class": [*self.labels] if len(self.labels) == len(self.counts[group]) else ["0", "1"]})
        for word, counts in self.counts.items():
            found[f"{word} inputs"] = counts.tolist()
        if self.accuracy is not None and "true" in self.counts:
            found["accuracy"] = self.accuracy.tolist()
        for word in self.counts:
            found[f"epistemic ({word})"] = self.epistemic[word].tolist()
            found[f"aleatoric ({word})"] = self.aleatoric[word].tolist()
        if len(self.variance) == len(found["class"]):
            found["variance"] = self.variance.tolist()
        for i, layer in enumerate(layers):
            found[f"{layer} share"] = self.layer_shares[group][:, i].tolist()
        return found


class ClassSums:
    """Sums over batches."""

    def __init__(self, labels: Sequence[str] | None = None):
        self.labels = None if labels is None else tuple(map(str, labels))
        self.rows = 0
        self.sums: dict[str, Tensor] = {}

    def _add(self, key: str, value: Tensor) -> None:
        value = value.to(torch.float64).cpu()
        self.sums[key] = self.sums[key] + value if key in self.sums else value

    def add(self, found: Contributions, prediction: Prediction, targets: object) -> None:
        """Adds a batch.

        Args:
            found: its contributions.
            prediction: made of them.
            targets: of the examples; None: only predicted classes are known.
        """
        width = found.mean.shape[-1]
        variance = found.var.reshape(-1, width)
        self.rows += len(variance)
        self._add("variance", variance.double().sum(0))
        covariance = None if found.cov is None else found.cov.reshape(-1, width, width).double()
        if covariance is not None:
            self._add("covariance", covariance.sum(0))
        groups = _groups(prediction, targets)
        if not groups:
            return
        classes = max(2, width)
        each = found.whole.sum(-1).flatten(1).T.cpu()  # [rows, L]
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
            self._add(f"layers/{word}", member.T @ each)
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
        """Means of everything."""
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
    """True and predicted classes by row; nothing where there are no classes, or several labels at once."""
    single = prediction.kind == "binary" and prediction.mean.shape[-1] == 1
    if prediction.kind != "classification" and not single:
        return {}
    predicted = prediction.labels.reshape(-1).cpu()
    found = {"predicted": predicted}
    if isinstance(targets, Tensor) and targets.numel() == len(predicted):
        found = {"true": targets.reshape(-1).cpu().long(), **found}
    return found
