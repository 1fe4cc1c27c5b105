"""The full Gauss-Newton posterior of all fit images, exactly: solves in the space of their outputs, not of the weights.

With Φ = SᵀJ [9n, P] (S Sᵀ = Λ at every image), G = ΦᵀΦ and K = ΦΦᵀ = U diag(e) Uᵀ, and λ = τ/s:

    γ(τ, s) = Σ e/(e + λ),   v* = Φᵀ(K + λ)⁻¹(Φθ* − a) with S a = p − y,
    J (sG + τ)⁻¹ Jᵀ = (J Jᵀ − JΦᵀ(K + λ)⁻¹ΦJᵀ) / τ.

One eigendecomposition serves every τ and s. Rows of Φ are made again where they are needed: memory holds one block of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from aftermap.likelihoods import Categorical

__all__ = ["FullMatrix", "gram", "jacobians", "product"]

_CHUNK = 8192  # parameters that are summed in float32; the sums of chunks are float64
_BLOCK = 500  # images whose rows are in memory at once (5 GB for a ResNet-20)
_GROUP = 10  # images whose Jacobians are multiplied together


class FullMatrix:
    """γ, v* and predictive covariances of the full Gauss-Newton posterior of some images.

    Args:
        model: in eval mode.
        x: images [n, ...].
        y: labels [n].
        others: further images [m, ...], whose outputs will be predicted.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, others: Tensor):
        self._model = model
        theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        self.theta_squared = float(theta.double().square().sum())
        with torch.no_grad():
            outputs = torch.cat([model(part) for part in x.split(100)])
            self.outputs = torch.cat([model(part) for part in others.split(100)])
        roots = Categorical().hessian_root(outputs.double())  # [n, C, K]
        residual = Categorical().gradient(outputs.double(), y)
        self._a = torch.linalg.lstsq(roots, residual[..., None]).solution.reshape(-1)
        n, width, classes = len(x), roots.shape[-1], outputs.shape[-1]
        self._roots = roots.to(theta)
        kernel = torch.zeros(n * width, n * width, dtype=torch.float64)
        self.cross = torch.zeros(n * width, len(others) * classes, dtype=torch.float64)
        self.own = torch.zeros(len(others), classes, classes, dtype=torch.float64)
        self._theta = torch.zeros(n * width, dtype=torch.float64)
        for start in range(0, n, _BLOCK):
            block, filled = torch.empty(width * len(x[start : start + _BLOCK]), len(theta), dtype=theta.dtype), 0
            for rows in self._rows(x, start, start + _BLOCK):
                block[filled : filled + len(rows)] = rows
                filled += len(rows)
            at = slice(start * width, start * width + len(block))
            self._theta[at] = product(block, theta[None])[:, 0]
            kernel[at, at] = gram(block)
            place = at.stop
            for rows in self._rows(x, start + _BLOCK, n):
                kernel[at, place : place + len(rows)] = product(block, rows)
                kernel[place : place + len(rows), at] = kernel[at, place : place + len(rows)].T
                place += len(rows)
            place = 0
            for group in _grouped(jacobians(self._model, others)):
                if start == 0:
                    for index, jacobian in enumerate(group.split(classes), place // classes):
                        self.own[index] = product(jacobian, jacobian)
                self.cross[at, place : place + len(group)] = product(block, group)
                place += len(group)
            print(f"  kernel: {min(start + _BLOCK, n)} of {n} images", flush=True)
        values, vectors = torch.linalg.eigh(kernel)
        self.values = values.clamp_min(0)
        self._d = vectors.T @ (self._theta - self._a)
        self.cross = vectors.T @ self.cross

    def _rows(self, x: Tensor, start: int, stop: int) -> Iterator[Tensor]:
        """Sᵀ J of some images, a few at a time."""
        pairs = zip(self._roots[start:stop], jacobians(self._model, x[start:stop]), strict=True)
        return _grouped(root.T @ jacobian for root, jacobian in pairs)

    def gamma(self, tau: float, s: float) -> float:
        """The effective dimension."""
        return float((self.values / (self.values + tau / s)).sum())

    def mode_squared(self, tau: float, s: float) -> float:
        """‖v*‖² of the linear model."""
        return float((self.values * (self._d / (self.values + tau / s)).square()).sum())

    def log_determinant(self, tau: float, s: float) -> float:
        """log |sG + τ| / |τ|."""
        return float(torch.log1p(s / tau * self.values).sum())

    def covariance(self, tau: float, s: float) -> Tensor:
        """Of the outputs of the other images [m, C, C]."""
        scaled = self.cross / (self.values + tau / s).sqrt()[:, None]
        m, classes = self.own.shape[:2]
        parts = scaled.reshape(-1, m, classes)
        found = (self.own - torch.einsum("rmc,rmd->mcd", parts, parts)) / tau
        # Where the data determine everything, the difference is rounding.
        e, v = torch.linalg.eigh(0.5 * (found + found.mT))
        return (v * e.clamp_min(0)[:, None]) @ v.mT


def jacobians(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """The Jacobian [C, P] of each image."""
    own = {k: p.detach() for k, p in model.named_parameters()}

    def outputs(weights: dict[str, Tensor], image: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (image[None],))[0]

    each = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))
    for part in x.split(_GROUP) if len(x) else ():
        yield from torch.cat([j.flatten(2) for j in each(own, part).values()], 2).detach()


def _grouped(rows: Iterable[Tensor]) -> Iterator[Tensor]:
    """Rows of several images in one matrix."""
    group: list[Tensor] = []
    for part in rows:
        group.append(part)
        if len(group) == _GROUP:
            yield torch.cat(group)
            group = []
    if group:
        yield torch.cat(group)


def gram(rows: Tensor, size: int = 500) -> Tensor:
    """rows @ rows.T, each product once."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for start in range(0, len(rows), size):
        stop = min(start + size, len(rows))
        part = product(rows[start:stop], rows[start:])
        total[start:stop, start:], total[start:, start:stop] = part, part.T
    return total


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T in float64 sums of float32 chunks."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64)
    for a, b in zip(left.split(_CHUNK, 1), right.split(_CHUNK, 1), strict=True):
        total += a @ b.T
    return total
