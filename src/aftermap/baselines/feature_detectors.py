"""Detectors that compare the features of an input with those of the training data: neighbours, Gaussians, and a subspace."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.baselines.detectors import FeatureDetector
from aftermap.baselines.features import (
    ClassMoments,
    FeatureBatch,
    FeatureReader,
    FeatureSample,
    class_labels,
    class_logits,
)
from aftermap.errors import DataError, InputError, StatisticalWarning, UnsupportedError
from aftermap.linalg import psd_eigh

__all__ = ["KNN", "Mahalanobis", "RelativeMahalanobis", "ViM"]

# Rows of stored and of new features whose distances are made at a time: 64 MB of float64.
_STORED_ROWS, _NEW_ROWS = 8192, 1024
_MOST_FEATURES = 50_000
# Principal dimensions of ViM for so many features and more; for fewer than the last, one half of them.
_PRINCIPAL = ((2048, 1000), (768, 512))
_AGREE = 1e-3  # by so much, relative to the largest, outputs may differ from the last layer's W φ + b
_ROUNDING_MARGIN = 8.0  # deviations so many times those of rounding alone are no rounding


@final
class KNN(FeatureDetector[Tensor]):
    r"""The distance to the k-th nearest of the training features, all of length one.

    .. math::
        s(x) = \lVert z - z_{(k)} \rVert, \qquad z = \varphi(x) / \lVert \varphi(x) \rVert

    It looks at neither outputs nor targets, so that it works for a regression, too. Features that are all zero stay zero, at
    distance 1 from all others.

    Args:
        model: The network. It is never changed.
        k: Which neighbour counts. The paper takes 50 for the 50,000 images of CIFAR-10; it must be well below the number of examples of
            a class, or the k-th neighbour is of another one.
        layer: The name of the module whose input the features are. None finds the last layer with a weight matrix.
        max_features: The largest number of features that are stored, a uniform sample where the data are more.
        seed: The seed of this sample.

    References:
        Sun, Ming, Zhu, Li 2022, Out-of-distribution detection with deep nearest neighbors, algorithm 1.

    Differs from the paper: the search is exact, in float64, and not by an approximate index.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(2, 3))
    >>> detector = KNN(net, k=1).fit([(torch.eye(2), torch.tensor([0, 1]))])
    >>> detector.score(torch.tensor([[5.0, 0.0], [-1.0, -1.0]]))
    tensor([0.0000, 1.8478], dtype=torch.float64)
    """

    name = "knn"
    needs_classes = False

    def __init__(
        self,
        model: nn.Module,
        *,
        k: int = 50,
        layer: str | None = None,
        max_features: int = _MOST_FEATURES,
        seed: int = 0,
    ):
        super().__init__(model, layer=layer)
        self.k = checks.count("k", k)
        self.max_features = checks.count("max_features", max_features, self.k, advice="Store at least k features")
        self.seed = checks.count("seed", seed, 0)

    def _learn(self, reader: FeatureReader, batches: Iterator[FeatureBatch]) -> Tensor:
        sample = FeatureSample(self.max_features, self.seed)
        for batch in batches:
            if bool((batch.weight != 1).any()):
                raise UnsupportedError(
                    "KNN counts neighbours, so that an example counts once or, with weight 0, not at all; got other weights. "
                    "Repeat examples instead"
                )
            sample.add(batch.features.to(batch.precision))  # without loss: in the precision in which they were computed
        if sample.seen < self.k:
            raise DataError(
                f"k={self.k}, but the data hold only {sample.seen} examples. Pass more of them, or a smaller k"
            )
        return sample.rows

    def _of_features(self, statistics: Tensor, batch: FeatureBatch) -> Tensor:
        return torch.cat([self._distances(statistics, some) for some in _unit(batch.features).split(_NEW_ROWS)])

    def _distances(self, stored: Tensor, new: Tensor) -> Tensor:
        """Returns the distance [N] of unit rows [N, F] from the k-th nearest stored one."""
        nearest = new.new_empty(len(new), 0)
        for some in stored.split(_STORED_ROWS):
            squares = _squared_distances(new, _unit(some.to(torch.float64)))
            candidates = torch.cat([nearest, squares], 1)
            nearest = candidates.topk(min(self.k, candidates.shape[1]), dim=1, largest=False).values
        return nearest.amax(1).sqrt()


def _unit(rows: Tensor) -> Tensor:
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / torch.where(lengths > 0, lengths, 1.0)


def _squared_distances(rows: Tensor, others: Tensor) -> Tensor:
    """Returns the squared distances [N, M] of rows [N, F] and [M, F]."""
    squares = rows.square().sum(1)[:, None] + others.square().sum(1)
    return squares.addmm_(rows, others.T, alpha=-2).clamp_min_(0.0)


@dataclass(frozen=True)
class _Whitening:
    """A metric in which a covariance is the identity: ‖P(φ − centre)‖², and the places [M, r] of means in it."""

    centre: Tensor
    matrix: Tensor
    places: Tensor

    @staticmethod
    def of(covariance: Tensor, centre: Tensor, means: Tensor, rounding: float) -> _Whitening:
        values, vectors = psd_eigh(covariance, what="the covariance of the features")
        floor = max(_ROUNDING_MARGIN**2 * rounding, len(values) * torch.finfo(torch.float64).eps * float(values[-1]))
        keep = values > floor
        if not bool(keep.any()):
            raise DataError("the training features do not vary, so that there is no distance in units of their spread")
        matrix = vectors[:, keep] / values[keep].sqrt()
        return _Whitening(centre, matrix, (means - centre) @ matrix)

    def squares(self, features: Tensor) -> Tensor:
        """Returns the squared Mahalanobis distances [N, M] of features [N, F] from the means."""
        return _squared_distances((features - self.centre) @ self.matrix, self.places)


class _ClassGaussians(FeatureDetector[tuple[_Whitening, _Whitening]]):
    """Gaussians with one covariance around the class means, and one Gaussian of all features."""

    def __init__(self, model: nn.Module, *, layer: str | None = None, shrinkage: float = 0.0):
        super().__init__(model, layer=layer)
        self.shrinkage = checks.fraction("shrinkage", shrinkage, zero=True, one=True, advice="0 shrinks nothing")

    def _learn(self, reader: FeatureReader, batches: Iterator[FeatureBatch]) -> tuple[_Whitening, _Whitening]:
        owner, moments, precision = type(self).__name__, None, torch.float64
        for batch in batches:
            classes = class_logits(owner, batch.outputs).shape[1]
            moments = ClassMoments(classes, batch.features.shape[1]) if moments is None else moments
            moments.add(batch.features, class_labels(owner, batch.targets, classes), batch.weight)
            precision = batch.precision
        if moments is None or moments.total == 0:
            raise DataError(f"the data hold no example that counts; {owner} is fitted on training data")
        seen, width = moments.count > 0, moments.mean.shape[1]
        if moments.rows - int(seen.sum()) < width and self.shrinkage == 0:
            warnings.warn(
                f"{moments.rows} examples of {int(seen.sum())} classes do not span {width} features: their covariance is singular, "
                "and directions in which the training data do not vary are left out of every distance. Fit on more data, or "
                "pass shrinkage=0.01",
                StatisticalWarning,
                stacklevel=3,
            )
        centre, rounding = moments.centre, moments.rounding(precision)
        within = self._shrunk(moments.scatter / moments.total)
        all_data = self._shrunk(moments.scatter_about(centre) / moments.total)
        return (
            _Whitening.of(within, centre, moments.mean[seen], rounding),
            _Whitening.of(all_data, centre, centre[None], rounding),
        )

    def _shrunk(self, covariance: Tensor) -> Tensor:
        level = self.shrinkage * covariance.diagonal().mean()
        return (1 - self.shrinkage) * covariance + level * torch.eye(len(covariance), dtype=torch.float64)


@final
class Mahalanobis(_ClassGaussians):
    r"""The squared Mahalanobis distance of features from the nearest class mean, under one covariance within classes.

    .. math::
        s(x) = \min_c\, (\varphi - \mu_c)^\top \Sigma^{+} (\varphi - \mu_c), \qquad
        \Sigma = \frac{1}{N} \sum_c \sum_{n: y_n = c} (\varphi_n - \mu_c)(\varphi_n - \mu_c)^\top

    Where Σ is singular its pseudo-inverse is taken, as in the paper's code: directions in which the training features do not vary, by
    more than rounding, do not count, and what is unusual only there is not seen. `shrinkage` makes them count.

    Args:
        model: A classifier. It is never changed.
        layer: The name of the module whose input the features are. None finds the last layer with a weight matrix.
        shrinkage: The share λ of (1 − λ) Σ + λ (tr Σ / F) I.

    References:
        Lee, Lee, Lee, Shin 2018, A simple unified framework for detecting out-of-distribution samples and adversarial attacks.

    Differs from the paper: features of the last layer only, without a perturbation of the input and without a regression over
    layers that is trained on unusual data.
    """

    name = "mahalanobis"

    def _of_features(self, statistics: tuple[_Whitening, _Whitening], batch: FeatureBatch) -> Tensor:
        return statistics[0].squares(batch.features).amin(1)


@final
class RelativeMahalanobis(_ClassGaussians):
    r"""The Mahalanobis distance from the nearest class mean, less that from the mean of all training features.

    .. math::
        s(x) = \min_c d_c(x) - d_0(x), \qquad d_0 = (\varphi - \mu_0)^\top \Sigma_0^{+} (\varphi - \mu_0)

    with d_c as in `Mahalanobis`, and μ₀ and Σ₀ the mean and covariance of all features, whatever their class. Directions that all
    classes share, and in which inputs are unusual for reasons of their own, cancel.

    Args:
        model: A classifier. It is never changed.
        layer: The name of the module whose input the features are. None finds the last layer with a weight matrix.
        shrinkage: The share λ of (1 − λ) Σ + λ (tr Σ / F) I, for both covariances.

    References:
        Ren, Fort, Liu, Roy, Padhy, Lakshminarayanan 2021, A simple fix to Mahalanobis distance for improving near-OOD detection.

    Differs from the paper: singular covariances have a pseudo-inverse.
    """

    name = "relative_mahalanobis"

    def _of_features(self, statistics: tuple[_Whitening, _Whitening], batch: FeatureBatch) -> Tensor:
        within, all_data = statistics
        return within.squares(batch.features).amin(1) - all_data.squares(batch.features)[:, 0]


@dataclass(frozen=True)
class _Virtual:
    """What the virtual logit is made of: its origin u [F], the residual directions R [F, F − D], and its scale α."""

    origin: Tensor
    residual: Tensor
    alpha: float

    def norms(self, features: Tensor) -> Tensor:
        return torch.linalg.vector_norm((features - self.origin) @ self.residual, dim=1)


@final
class ViM(FeatureDetector[_Virtual]):
    r"""Virtual-logit matching: how far features leave the principal subspace of the training features, against their logits.

    .. math::
        s(x) = \alpha \lVert R^\top (\varphi - u) \rVert - \log \sum_c \exp f_c(x), \qquad
        \alpha = \frac{\sum_n \max_c f_c(x_n)}{\sum_n \lVert R^\top (\varphi_n - u) \rVert}

    The origin u = −W⁺b is the point that the last layer W φ + b takes closest to zero; the columns of R are the eigenvectors of
    Σ (φ − u)(φ − u)ᵀ over the training data behind the first D. The score rises with the probability of a virtual class whose logit
    is the first term.

    Args:
        model: A classifier whose logits are W φ + b. It is never changed.
        dim: The number D of principal dimensions, less than the number F of features. None takes 1000 for 2048 features and more, 512
            for 768 and more, and one half of them for fewer.
        layer: The name of the module whose input the features are. None finds the last layer with a weight matrix.
        max_features: The largest number of training examples that α is computed from, a uniform sample where there are more.
        seed: The seed of this sample.

    References:
        Wang, Li, Feng, Zhang 2022, ViM: out-of-distribution with virtual-logit matching, section 4.

    Differs from the paper: the default D for fewer than 768 features, of which the paper has none. The score is the logarithm of
    the odds of the virtual class, which orders inputs as its probability does, without rounding to 1.
    """

    name = "vim"

    def __init__(
        self,
        model: nn.Module,
        *,
        dim: int | None = None,
        layer: str | None = None,
        max_features: int = _MOST_FEATURES,
        seed: int = 0,
    ):
        super().__init__(model, layer=layer)
        self.dim = None if dim is None else checks.count("dim", dim)
        self.max_features = checks.count("max_features", max_features)
        self.seed = checks.count("seed", seed, 0)

    def _learn(self, reader: FeatureReader, batches: Iterator[FeatureBatch]) -> _Virtual:
        moments, precision = None, torch.float64
        sample = FeatureSample(self.max_features, self.seed)
        weight, bias = _affine_layer(reader)
        for batch in batches:
            classes = class_logits("ViM", batch.outputs).shape[1]
            class_labels("ViM", batch.targets, classes)
            _check_affine(batch, weight, bias)
            moments = ClassMoments(1, batch.features.shape[1]) if moments is None else moments
            moments.add(batch.features, torch.zeros(len(batch.features), dtype=torch.long), batch.weight)
            precision = batch.precision
            sample.add(torch.cat([batch.features, batch.outputs.amax(1)[:, None], batch.weight[:, None]], 1))
        if moments is None or moments.total == 0:
            raise DataError("the data hold no example that counts; ViM is fitted on training data")
        origin = -torch.linalg.pinv(weight) @ bias
        _, vectors = psd_eigh(moments.scatter_about(origin) / moments.total, what="the second moment of the features")
        width = len(origin)
        residual = vectors[:, : width - self._principal(width)]
        unscaled = _Virtual(origin, residual, 1.0)
        features, largest, counts = sample.rows[:, :-2], sample.rows[:, -2], sample.rows[:, -1]
        residuals = float(unscaled.norms(features) @ counts / counts.sum())
        rounding = _ROUNDING_MARGIN * (width * moments.rounding(precision)) ** 0.5
        return _Virtual(origin, residual, _scale(float(largest @ counts / counts.sum()), residuals, rounding))

    def _principal(self, width: int) -> int:
        """Returns the number of principal dimensions of so many features."""
        usual = next((dim for least, dim in _PRINCIPAL if width >= least), width // 2)
        dim = usual if self.dim is None else self.dim
        if not 0 < dim < width:
            raise InputError(
                f"dim={dim} must be at least 1 and less than the number of features, which is {width}: what is left is the residual"
            )
        return dim

    def _of_features(self, statistics: _Virtual, batch: FeatureBatch) -> Tensor:
        return statistics.alpha * statistics.norms(batch.features) - batch.outputs.logsumexp(1)


def _scale(largest: float, residual: float, rounding: float) -> float:
    """Returns α, the mean of the largest logits over that of the residuals."""
    if largest <= 0:
        raise DataError(
            f"the largest logits of the training data are {largest:.3g} on average, so that no virtual logit can match them; "
            "ViM is for networks whose logits are positive for classes they know"
        )
    if residual <= rounding:
        raise DataError(
            "the training features lie in the principal subspace, so that there is no residual to scale. Pass a smaller dim"
        )
    return largest / residual


def _affine_layer(reader: FeatureReader) -> tuple[Tensor, Tensor]:
    """Returns W [C, F] and b [C] of the layer, float64."""
    module = reader.modules[0]
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() < 2 or weight[0, 0].numel() != 1:
        raise UnsupportedError(
            f"ViM needs a last layer that computes W φ + b, a Linear or a convolution of one point; got {type(module).__name__}"
        )
    weight = weight.detach().cpu().to(torch.float64).flatten(1)
    offset = bias.detach().cpu().to(torch.float64) if isinstance(bias, Tensor) else weight.new_zeros(len(weight))
    return weight, offset


def _check_affine(batch: FeatureBatch, weight: Tensor, bias: Tensor) -> None:
    """Raises unless the outputs are W φ + b, up to the rounding of the network's precision."""
    agree = batch.outputs.shape[1] == len(weight) and batch.features.shape[1] == weight.shape[1]
    if agree:
        error = (batch.features @ weight.T + bias - batch.outputs).abs().amax()
        tolerance = max(_AGREE, 4 * torch.finfo(batch.precision).eps)
        agree = len(batch.outputs) == 0 or float(error) <= tolerance * float(batch.outputs.abs().amax())
    if not agree:
        raise UnsupportedError(
            "ViM needs logits that are W φ + b of the layer's input φ, but something follows the layer. Pass a network "
            "that returns its last layer's output, or use another detector"
        )
