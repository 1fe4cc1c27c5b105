"""The mode of the linear model of a classifier, to rounding: Newton's method in the space of the outputs of its images.

The logits of the linear model are f(x, θ*) + J(x)(v − θ*), and v* minimises p Σ loss + ½ τ ‖v‖². Only differences of logits count, so
let H have orthonormal columns that are orthogonal to (1, …, 1): with K = (HᵀJ)(HᵀJ)ᵀ the mode is v* = (HᵀJ)ᵀc, its outputs
are b + K c, and its squared norm is cᵀK c. One step solves a system of as many unknowns as images have outputs, however many weights there are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.antoran2022.kernel import gram, jacobians, product

__all__ = ["LinearModel"]


class LinearModel:
    """The linear model of some images, each of which counts several times.

    Args:
        model: A classifier in evaluation mode.
        x: Images [n, ...].
        y: Labels [n].
        weight: p, how often each image counts.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, weight: float):
        own = {k: p.detach() for k, p in model.named_parameters()}
        theta = torch.cat([p.reshape(-1) for p in own.values()])
        with torch.no_grad():
            outputs = torch.cat([model(part) for part in x.split(100)]).double()
        n, classes = outputs.shape
        self._basis = torch.linalg.qr(torch.eye(classes, dtype=torch.float64) - 1 / classes).Q[:, : classes - 1]
        rows = torch.cat([self._basis.T.to(theta.dtype) @ j for j in jacobians(model, x)])
        self._kernel = gram(rows)
        self._start = (outputs @ self._basis).reshape(-1) - product(rows, theta[None])[:, 0]
        self._weight, self._shape = weight, (n, classes - 1)
        self._target = nn.functional.one_hot(y, classes).double()

    def mode_squared(self, tau: float, iterations: int = 50) -> tuple[float, bool]:
        """‖v*‖², and whether Newton's method came to rest: a further step would gain less than 1e-8 nats."""
        c = torch.zeros_like(self._start)
        value, slope, root = self._loss(c, tau)
        converged = False
        for _ in range(iterations):
            moved = self._kernel @ c
            right = self._blocks(root, self._blocks(root.mT, moved)) - slope
            inner = self._kernel_between(root)
            inner.diagonal().add_(tau)
            solved = torch.cholesky_solve(
                self._blocks(root.mT, self._kernel @ right)[:, None], torch.linalg.cholesky(inner)
            )[:, 0]
            step = (right - self._blocks(root, solved)) / tau - c
            gain = -float((slope + tau * c) @ (self._kernel @ step))
            if gain <= 1e-8:
                converged = True
                break
            length = 1.0
            while length > 1e-6:
                new = self._loss(c + length * step, tau)
                if new[0] <= value - 1e-4 * length * gain:
                    break
                length /= 2
            else:
                break
            c, (value, slope, root) = c + length * step, new
        return float(c @ (self._kernel @ c)), converged

    def _loss(self, c: Tensor, tau: float) -> tuple[float, Tensor, Tensor]:
        """The energy; its slope in the outputs without the prior's part; roots of the Hessians of the outputs [n, K, K]."""
        moved = self._kernel @ c
        logits = (self._start + moved).reshape(self._shape) @ self._basis.T
        logs = logits.log_softmax(-1)
        p = logs.exp()
        value = -self._weight * float((logs * self._target).sum()) + 0.5 * tau * float(c @ moved)
        slope = self._weight * ((p - self._target) @ self._basis).reshape(-1)
        hessian = self._weight * self._basis.T @ (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) @ self._basis
        values, vectors = torch.linalg.eigh(hessian)
        return value, slope, vectors * values.clamp_min(0).sqrt()[:, None, :]

    def _blocks(self, matrices: Tensor, vector: Tensor) -> Tensor:
        return (matrices @ vector.reshape(*self._shape, 1)).reshape(-1)

    def _kernel_between(self, root: Tensor) -> Tensor:
        """Rᵀ K R for roots R in blocks."""
        n, width = self._shape
        left = torch.einsum("ika,ikjl->iajl", root, self._kernel.reshape(n, width, n, width))
        return torch.einsum("iajl,jlb->iajb", left, root).reshape(n * width, n * width)
