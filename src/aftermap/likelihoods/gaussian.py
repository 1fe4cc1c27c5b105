"""Gaussian likelihoods: known noise, and noise that the network predicts.

Index legend: N examples, ... positions, C outputs, D targets, V vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from aftermap.draws import normal_like
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.likelihoods.base import (
    Likelihood,
    aligned,
    check_outputs,
    check_values,
    sum_positions,
    unit_vectors,
)

__all__ = ["PARAMETRISATIONS", "Gaussian", "HeteroscedasticGaussian"]

_LOG_2PI = math.log(2 * math.pi)

PARAMETRISATIONS = ("mean_log_variance", "natural")


def _check_real(targets: Tensor, name: str) -> None:
    """Raises an error unless the targets are finite real numbers."""
    if targets.is_complex():
        raise DataError(f"{name}: targets must be real numbers, got {targets.dtype}.")
    check_values(targets, ~torch.isfinite(targets), "targets", "a finite number", name)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(Likelihood):
    r"""Real targets with Gaussian noise of standard deviation σ around the outputs: y_c ~ N(f_c, σ_c²).

    .. math::
        E = \sum_c \Big[\frac{(y_c - f_c)^2}{2\sigma_c^2} + \tfrac12 \log(2\pi\sigma_c^2)\Big],
        \quad \nabla E = (f - y)/\sigma^2, \quad \Lambda = \mathrm{diag}(1/\sigma^2).

    Targets have the shape of the outputs (or [N, ...] for one output). A tensor noise keeps its gradient, so
    that the evidence can be optimised in it.

    Args:
        noise: The **standard deviation** σ, not the variance: one number, or a tensor [C], one per output.

    Raises:
        InputError: The noise is not positive and finite, or has more than one dimension.

    >>> Gaussian(noise=0.5).hessian(torch.zeros(1, 2))
    tensor([[[4., 0.],
             [0., 4.]]])
    >>> Gaussian(noise=0.5)
    Gaussian(noise=0.5)
    """

    noise: float | Tensor = 1.0

    def __post_init__(self) -> None:
        try:
            noise = torch.as_tensor(self.noise)
            if not isinstance(self.noise, Tensor) and noise.dtype is not torch.bool:
                noise = torch.as_tensor(self.noise, dtype=torch.float64)  # A list from JSON keeps its digits.
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"Gaussian: noise must be a number or a tensor [C], got {self.noise!r}.") from None
        if noise.is_complex() or noise.dtype is torch.bool or noise.dim() > 1:
            raise InputError(
                "Gaussian: noise must be one number or a tensor [C], "
                f"got dtype {noise.dtype} and shape {list(noise.shape)}."
            )
        if not bool((torch.isfinite(noise) & (noise > 0)).all()):
            raise InputError(
                "Gaussian: noise is a standard deviation and must be positive and finite, "
                f"got {noise.detach().tolist()}."
            )
        if not isinstance(self.noise, Tensor):
            object.__setattr__(self, "noise", noise.item() if noise.dim() == 0 else noise)

    @property
    def kind(self) -> str:
        """The kind of targets, which is "regression"."""
        return "regression"

    def config(self) -> dict[str, Any]:
        """Returns name and noise (a number or a list)."""
        noise = self.noise.detach().tolist() if isinstance(self.noise, Tensor) else self.noise
        return {"name": "gaussian", "noise": noise}

    def _sigma(self, outputs: Tensor) -> Tensor:
        """Returns σ in the shape, dtype and device of the outputs."""
        if not isinstance(self.noise, Tensor):
            return torch.full_like(outputs, self.noise, requires_grad=False)
        if self.noise.dim() == 1 and self.noise.shape != outputs.shape[-1:]:
            raise ShapeError(
                f"Gaussian: noise has {self.noise.numel()} values, but outputs have {outputs.shape[-1]}; "
                "pass one number, or one value per output."
            )
        return self.noise.to(outputs).expand(outputs.shape)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises an error unless targets are finite numbers in the shape of the outputs."""
        check_outputs(outputs, "Gaussian")
        self._sigma(outputs)
        _check_real(targets, "Gaussian")
        aligned(outputs, targets, outputs.shape[-1], "Gaussian")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the normalised squared error, summed over outputs and positions: [N]."""
        sigma = self._sigma(outputs)
        residual = (aligned(outputs, targets, outputs.shape[-1], "Gaussian") - outputs) / sigma
        return sum_positions(0.5 * residual.square() + sigma.log() + 0.5 * _LOG_2PI).sum(-1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the gradient (f - y) / σ²: [N, ..., C]."""
        residual = outputs - aligned(outputs, targets, outputs.shape[-1], "Gaussian")
        return residual / self._sigma(outputs).square()

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Returns the gradient ε / σ with ε ~ N(0, I): [N, ..., C]."""
        return normal_like(outputs, generator) / self._sigma(outputs)

    def hessian_root_mv(self, outputs: Tensor, vectors: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns products v / σ: [V, N, ..., C]."""
        return vectors / self._sigma(outputs)

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns the diagonal root 1 / σ: [N, ..., C, C]."""
        return torch.diag_embed(self._sigma(outputs).reciprocal())

    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the outputs themselves: [N, ..., C]."""
        return outputs

    def variance(self, outputs: Tensor) -> Tensor:
        """Returns the noise variance σ²: [N, ..., C]."""
        return self._sigma(outputs).square()


@final
@dataclass(frozen=True, eq=False, repr=False)
class HeteroscedasticGaussian(Likelihood):
    r"""Real targets whose mean μ and variance v are both outputs: y_d ~ N(μ_d, v_d), with C = 2 D outputs.

    With ``"mean_log_variance"`` the first D outputs are μ, the last D are s = log v. The Hessian of E is indefinite in
    general, so the curvature is the Fisher matrix:

    .. math::
        \nabla E = \Big(\frac{\mu - y}{v},\ \tfrac12 - \frac{(y - \mu)^2}{2 v}\Big), \quad
        \Lambda = \mathrm{diag}(1/v,\ \tfrac12).

    With ``"natural"`` the first D outputs are η₁ = μ/v, the last D are η₂ = −1/(2v) < 0. Fisher and Hessian are equal,
    the covariance of (y, y²):

    .. math::
        \nabla E = (\mu - y,\ \mu^2 + v - y^2), \quad
        \Lambda = \begin{pmatrix} v & 2\mu v \\ 2\mu v & 4\mu^2 v + 2 v^2 \end{pmatrix} = L L^\top, \quad
        L = \begin{pmatrix} \sqrt v & 0 \\ 2\mu\sqrt v & \sqrt 2\, v \end{pmatrix}.

    Targets are [N, ..., D] (or [N, ...] for D = 1); ``mean`` and ``variance`` return [N, ..., D].

    Args:
        parametrisation: The meaning of the outputs: "mean_log_variance" or "natural".

    Raises:
        InputError: There is no such parametrisation.

    References:
        Immer et al. 2023, Effective Bayesian heteroscedastic regression with deep neural networks.

    >>> HeteroscedasticGaussian().hessian(torch.zeros(1, 2))
    tensor([[[1.0000, 0.0000],
             [0.0000, 0.5000]]])
    """

    parametrisation: str = "mean_log_variance"

    def __post_init__(self) -> None:
        if self.parametrisation not in PARAMETRISATIONS:
            raise InputError(
                f"HeteroscedasticGaussian: parametrisation is {self.parametrisation!r}, "
                f"but must be one of {', '.join(map(repr, PARAMETRISATIONS))}."
            )

    @property
    def kind(self) -> str:
        """The kind of targets, which is "regression"."""
        return "regression"

    def config(self) -> dict[str, Any]:
        """Returns name and parametrisation."""
        return {"name": "heteroscedastic_gaussian", "parametrisation": self.parametrisation}

    def _halves(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first and the last D outputs."""
        n_outputs = outputs.shape[-1]
        if n_outputs < 2 or n_outputs % 2:
            raise ShapeError(
                f"HeteroscedasticGaussian: outputs of shape {list(outputs.shape)} have {n_outputs} values "
                "per position, but an even number 2 D is needed: D for the means and D for the variances."
            )
        first, last = outputs.split(n_outputs // 2, -1)
        return first, last

    def _aligned(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return aligned(outputs, targets, outputs.shape[-1] // 2, "HeteroscedasticGaussian")

    @property
    def _natural(self) -> bool:
        return self.parametrisation == "natural"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises an error unless targets are finite [N, ..., D], outputs are [N, ..., 2 D] and, if natural, η₂ < 0."""
        check_outputs(outputs, "HeteroscedasticGaussian")
        _, last = self._halves(outputs)
        _check_real(targets, "HeteroscedasticGaussian")
        self._aligned(outputs, targets)
        if self._natural:
            allowed = "negative (it is -1 / (2 variance)); end the network with -softplus on the last half"
            check_values(last, ~(last < 0), "outputs[..., D:]", allowed, "HeteroscedasticGaussian")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the normalised Gaussian loss, summed over targets and positions: [N]."""
        first, last = self._halves(outputs)
        y = self._aligned(outputs, targets)
        if self._natural:
            # This is −η₂ (y − μ)² with μ = −η₁ / (2 η₂), since the completed square does not cancel.
            values = -last * (y + first / (2 * last)).square() - 0.5 * (-2 * last).log()
        else:
            values = 0.5 * (last + (y - first).square() * (-last).exp())
        return sum_positions(values + 0.5 * _LOG_2PI).sum(-1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the gradient of the class docstring: [N, ..., 2 D]."""
        mean, variance = self.mean(outputs), self.variance(outputs)
        y = self._aligned(outputs, targets)
        if self._natural:
            return torch.cat([mean - y, variance + (mean - y) * (mean + y)], -1)
        return torch.cat([(mean - y) / variance, 0.5 - 0.5 * (y - mean).square() / variance], -1)

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Returns the gradient at ỹ ~ N(μ, v): [N, ..., 2 D]."""
        mean, variance = self.mean(outputs), self.variance(outputs)
        return self.gradient(outputs, mean + variance.sqrt() * normal_like(mean, generator))

    def hessian_root_mv(self, outputs: Tensor, vectors: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns products with the root of the class docstring: [V, N, ..., 2 D]."""
        first, last = self._halves(vectors)
        mean, variance = self.mean(outputs), self.variance(outputs)
        if self._natural:
            scaled = variance.sqrt() * first
            return torch.cat([scaled, 2 * mean * scaled + math.sqrt(2) * variance * last], -1)
        return torch.cat([first / variance.sqrt(), math.sqrt(0.5) * last.expand(first.shape)], -1)

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns the root of the Fisher matrix: [N, ..., 2 D, 2 D]."""
        basis = unit_vectors(outputs, outputs.shape[-1])
        return self.hessian_root_mv(outputs, basis, targets).movedim(0, -1)

    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the mean μ: [N, ..., D]."""
        first, last = self._halves(outputs)
        return -first / (2 * last) if self._natural else first

    def variance(self, outputs: Tensor) -> Tensor:
        """Returns the variance v: [N, ..., D]."""
        _, last = self._halves(outputs)
        return -0.5 / last if self._natural else last.exp()
