"""The contract of a likelihood p(y | f) and the checks that all likelihoods share.

Index legend: N examples, ... positions (tokens, pixels; any number of dimensions), C network outputs,
K columns of the root.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from aftermap.errors import DataError, InputError, ShapeError, UnsupportedError

__all__ = [
    "Likelihood",
    "aligned",
    "check_outputs",
    "check_temperature",
    "check_values",
    "sum_positions",
    "unit_vectors",
]

_SHOWN = 6  # Longer lists are shortened in a repr.


class Likelihood(ABC):
    r"""A likelihood p(y | f) of targets y given the outputs f of a network, with its curvature in f.

    Every quantity is a **sum**, never a mean, and belongs to one example: splitting a batch changes nothing. The law
    that every child obeys, per example and position, with Λ the Hessian of -log p(y | f) in f (or its Fisher matrix,
    where the Hessian is not positive semi-definite):

    .. math::
        S S^\top = \Lambda, \qquad \mathbb E_{\tilde y \sim p(\cdot | f)}[\tilde g \tilde g^\top] = \Lambda

    with S from :meth:`hessian_root` and g̃ from :meth:`sample_gradient`.

    Your own likelihood is a subclass that gives the six abstract methods; give :meth:`hessian_root_mv` too
    if the number of outputs is large, since the default forms S.

    >>> class Laplacian(Likelihood):
    ...     "p(y | f) = exp(-|y - f|) / 2, whose Fisher matrix is the identity."
    ...
    ...     def check(self, outputs, targets): ...
    ...     def nll(self, outputs, targets):
    ...         return sum_positions((targets - outputs).abs() + 0.6931471805599453).sum(-1)
    ...
    ...     def gradient(self, outputs, targets):
    ...         return (outputs - targets).sign()
    ...
    ...     def hessian_root(self, outputs, targets=None):
    ...         return torch.diag_embed(torch.ones_like(outputs))
    ...
    ...     def sample_gradient(self, outputs, targets=None, generator=None):
    ...         return torch.randn(outputs.shape, generator=generator).sign()
    ...
    ...     def mean(self, outputs):
    ...         return outputs
    >>> Laplacian().hessian(torch.zeros(1, 2))
    tensor([[[1., 0.],
             [0., 1.]]])
    >>> Laplacian().kind
    'custom'
    """

    @property
    def kind(self) -> str:
        """The kind of targets: "classification", "binary", "regression", "counts" or "custom"."""
        return "custom"

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises an error if outputs and targets do not fit this likelihood; the other methods check no values.

        Args:
            outputs: The network's outputs [N, ..., C].
            targets: The targets, in the form that the class describes.

        Raises:
            ShapeError: The shapes do not fit.
            DataError: A dtype or a value is not allowed; the message names the value and its index.
        """

    @abstractmethod
    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the full, normalised -log p(y | f), summed over positions and differentiable in the outputs.

        Args:
            outputs: The network's outputs [N, ..., C].
            targets: The targets, in the form that the class describes.

        Returns:
            The negative log-likelihood of each example [N].
        """

    @abstractmethod
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the gradient of ``nll(outputs, targets).sum()`` in the outputs, in closed form.

        Args:
            outputs: The network's outputs [N, ..., C].
            targets: The targets, in the form that the class describes.

        Returns:
            The gradient in the outputs [N, ..., C].
        """

    @abstractmethod
    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns a root S of the curvature Λ in the outputs: S Sᵀ = Λ at every position.

        Args:
            outputs: The network's outputs [N, ..., C].
            targets: The targets, only where Λ depends on them (class weights, ignored positions); None leaves these
                out.

        Returns:
            The root [N, ..., C, K] with K = ``columns(C)``.
        """

    @abstractmethod
    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Returns the gradient of the nll at labels drawn from p(· | f), independent at every position: E[g gᵀ] = Λ.

        Args:
            outputs: The network's outputs [N, ..., C].
            targets: The targets, only where Λ depends on them; the drawn labels do not.
            generator: The source of the random draws. None means torch's default generator.

        Returns:
            The gradient at the drawn labels [N, ..., C].
        """

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the expected target E[y | f]: probabilities, mean or rate.

        Args:
            outputs: The network's outputs [N, ..., C].

        Returns:
            The mean [N, ..., D], where D is C unless the class says otherwise.
        """

    def variance(self, outputs: Tensor) -> Tensor:
        """Returns the variance of each target given the outputs, Var[y | f]: the noise, not the uncertainty of f.

        Args:
            outputs: The network's outputs [N, ..., C].

        Returns:
            The variance [N, ..., D], of the shape of :meth:`mean`.

        Raises:
            UnsupportedError: The likelihood is your own and does not give it.
        """
        raise UnsupportedError(f"{type(self).__name__} has no variance; give it a method variance(outputs).")

    def columns(self, n_outputs: int) -> int:
        """Returns the number K of columns of the root for C = ``n_outputs`` outputs."""
        return n_outputs

    def hessian_root_mv(self, outputs: Tensor, vectors: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns products S v of the root with vectors; the built-in likelihoods do it without forming S.

        Args:
            outputs: The network's outputs [N, ..., C].
            vectors: The vectors [V, N, ..., K], V for every example.
            targets: The targets, as in :meth:`hessian_root`.

        Returns:
            The products [V, N, ..., C].
        """
        return torch.einsum("...ck,v...k->v...c", self.hessian_root(outputs, targets), vectors)

    def hessian(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns the curvature Λ = S Sᵀ in the outputs.

        Args:
            outputs: The network's outputs [N, ..., C].
            targets: The targets, as in :meth:`hessian_root`.

        Returns:
            The curvature [N, ..., C, C].
        """
        root = self.hessian_root(outputs, targets)
        return root @ root.mT

    def config(self) -> dict[str, Any]:
        """Returns the settings as plain values for JSON; ``likelihood_from_config`` is the inverse."""
        return {"name": type(self).__name__}

    def __repr__(self) -> str:
        shown = []
        for key, value in self.config().items():
            if key == "name":
                continue
            if isinstance(value, list) and len(value) > _SHOWN:
                value = f"[{', '.join(map(repr, value[:_SHOWN]))}, ... {len(value)} values]"
                shown.append(f"{key}={value}")
            else:
                shown.append(f"{key}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def sum_positions(values: Tensor) -> Tensor:
    """Sums [N, ..., C] or [N, ...] over every dimension between the first and the last.

    >>> sum_positions(torch.ones(2, 3, 4, 5)).shape
    torch.Size([2, 5])
    """
    return values if values.dim() <= 2 else values.flatten(1, -2).sum(1)


def unit_vectors(outputs: Tensor, columns: int) -> Tensor:
    """Returns the K unit vectors, the same at every example and position of [N, ..., C], without a copy.

    Args:
        outputs: The outputs [N, ..., C], which give the leading shape, the dtype and the device.
        columns: The number K of vectors.

    Returns:
        The unit vectors [K, N, ..., K].

    >>> unit_vectors(torch.zeros(5, 2, 3), 4).shape
    torch.Size([4, 5, 2, 4])
    """
    basis = torch.eye(columns, dtype=outputs.dtype, device=outputs.device)
    basis = basis.reshape(columns, *[1] * (outputs.dim() - 1), columns)
    return basis.expand(columns, *outputs.shape[:-1], columns)


def aligned(outputs: Tensor, targets: Tensor, width: int, name: str) -> Tensor:
    """Returns targets in the shape [N, ..., width] and in the outputs' dtype; never by broadcasting.

    Args:
        outputs: The network's outputs [N, ..., C].
        targets: The targets [N, ..., width], or [N, ...] if width is 1.
        width: The number of target values per position.
        name: The name of the likelihood, for the message.

    Returns:
        The targets [N, ..., width].

    Raises:
        ShapeError: The targets have any other shape.

    >>> aligned(torch.zeros(4, 1), torch.zeros(4), 1, "Gaussian").shape
    torch.Size([4, 1])
    """
    expected = (*outputs.shape[:-1], width)
    if width == 1 and targets.shape == expected[:-1]:
        targets = targets.unsqueeze(-1)
    if targets.shape != expected:
        also = f" or {list(expected[:-1])}" if width == 1 else ""
        raise ShapeError(
            f"{name}: targets have shape {list(targets.shape)}, but outputs of shape {list(outputs.shape)} "
            f"need targets of shape {list(expected)}{also}; reshape the targets or change the last layer."
        )
    return targets.to(outputs.dtype)


def check_outputs(outputs: Tensor, name: str) -> None:
    """Raises an error unless outputs are a floating-point [N, ..., C] without NaN.

    Raises:
        ShapeError: The outputs have fewer than two dimensions.
        DataError: The outputs are not floating point, or have a NaN.

    >>> check_outputs(torch.zeros(3, 2), "Gaussian")
    """
    if not outputs.is_floating_point():
        raise DataError(f"{name}: outputs must be floating point, got {outputs.dtype}; use outputs.float().")
    if outputs.dim() < 2:
        raise ShapeError(
            f"{name}: outputs must have shape [N, ..., C], got {list(outputs.shape)}; "
            "if the network has one output per example, add the last dimension with outputs.unsqueeze(-1)."
        )
    if math.isnan(float(outputs.detach().sum())):  # This is the sum of a NaN, or of infinities of both signs.
        check_values(outputs, torch.isnan(outputs), "outputs", "a number; the network produced NaN", name)


def check_values(values: Tensor, bad: Tensor, what: str, allowed: str, name: str) -> None:
    """Raises a DataError that names the first bad value and its index.

    Args:
        values: Any tensor of values.
        bad: A boolean tensor of the same shape, True where a value is not allowed.
        what: The name of the tensor in the message, such as "targets".
        allowed: The values that would be allowed, for the message.
        name: The name of the likelihood, for the message.

    Raises:
        DataError: Some entry of ``bad`` is True.

    >>> check_values(torch.tensor([1.0, 7.0]), torch.tensor([False, True]), "targets", "in [0, 1]", "Bernoulli")
    Traceback (most recent call last):
    ...
    aftermap.errors.DataError: Bernoulli: targets[1] is 7.0, but must be in [0, 1] (1 of 2 values).
    """
    if not bool(bad.any()):
        return
    index = torch.nonzero(bad)[0].tolist()
    raise DataError(
        f"{name}: {what}[{', '.join(map(str, index))}] is {values[tuple(index)].item()}, "
        f"but must be {allowed} ({int(bad.sum())} of {bad.numel()} values)."
    )


def check_temperature(value: object, name: str) -> float:
    """Returns the temperature of a likelihood as a number.

    Args:
        value: The value that the user gave.
        name: The name of the likelihood, for the message.

    Raises:
        InputError: The value is anything but a positive and finite number.

    >>> check_temperature(2, "Categorical")
    2.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(
            f"{name}: temperature must be one positive and finite number (1 leaves the outputs as they are), got {value!r}."
        )
    return float(value)
