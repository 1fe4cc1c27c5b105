"""The full Gauss-Newton posterior in function space: one factorisation over the data, none over the parameters.

With A = √s 𝒮ᵀJ [NK, P] (𝒮: roots of the output Hessians) the precision is AᵀA + P₀, and by Woodbury

    Σ = P₀⁻¹ − P₀⁻¹Aᵀ (I + A P₀⁻¹ Aᵀ)⁻¹ A P₀⁻¹.

It is for few data and many parameters, and gives the same numbers as `structure="full"`.

`dual_covariance` is the same predictive covariance from matrices: for few data, and as an oracle. Its indices are m
inputs asked about, n data, d outputs of one example (positions × C), k columns of the roots, p parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.batches import Unpack, iterate
from aftermap.curvature.structures.base import join_flat, split_flat
from aftermap.draws import normal_like
from aftermap.errors import InputError, ShapeError
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.linalg import safe_cholesky
from aftermap.models import autograd_errors_explained, check_device, chosen_parameters, evaluating, functional_outputs
from aftermap.params import Params, by_module
from aftermap.posteriors.base import Posterior
from aftermap.prior import Prior, PriorSpec

__all__ = ["DualPosterior", "dual_covariance"]

_NUMBERS = 2 * 10**8


def dual_covariance(
    jacobian: Tensor,
    data_jacobian: Tensor,
    data_root: Tensor,
    prior_precision: float | Tensor,
    *,
    scale: float | Tensor = 1.0,
    joint: bool = False,
) -> Tensor:
    r"""Returns J_*(sG + P₀)⁻¹J_*ᵀ without a matrix over the parameters.

    With the kernel K = J P₀⁻¹ Jᵀ and blockdiag roots 𝒮 of the output Hessians, SSᵀ = Λ,

    .. math::
        V = K_{**} - s K_{*N}\mathcal S (I + s \mathcal S^\top K_{NN} \mathcal S)^{-1} \mathcal S^\top K_{N*}

    This needs no inverse of Λ (singular for a softmax) and one factorisation of an [NK, NK] matrix.

    Args:
        jacobian: The Jacobians J_* [M, D, P] of the inputs asked about.
        data_jacobian: The Jacobians J [N, D, P] of the data.
        data_root: The roots S [N, D, K] from `likelihood.hessian_root`, times the square root of example weights.
        prior_precision: The prior's precisions P₀, a number or [P].
        scale: The factor s of the curvature.
        joint: Whether to return the covariance between inputs too.

    Returns:
        The covariance [M, D, D], or [M, D, M, D] if joint.

    Raises:
        ShapeError: The shapes do not fit together.
        InputError: The prior precision or the scale is not positive and finite.

    >>> J = torch.ones(1, 1, 1, dtype=torch.float64)
    >>> dual_covariance(J, J, J, 1.0)  # one datum with unit noise halves a unit prior variance
    tensor([[[0.5000]]], dtype=torch.float64)

    References:
        Khan, Immer, Abedi and Korzepa 2019; Immer, Korzepa and Bauer 2021, section 3.3.
    """
    if jacobian.dim() != 3 or data_jacobian.dim() != 3 or jacobian.shape[-1] != data_jacobian.shape[-1]:
        raise ShapeError(
            f"the Jacobians have shapes {tuple(jacobian.shape)} and {tuple(data_jacobian.shape)}; "
            "pass [M, D, P] and [N, D, P] with one P"
        )
    if data_root.dim() != 3 or data_root.shape[:2] != data_jacobian.shape[:2]:
        raise ShapeError(
            f"the roots have shape {tuple(data_root.shape)}; data Jacobians of shape {tuple(data_jacobian.shape)} "
            "need [N, D, K]"
        )
    size = jacobian.shape[-1]
    prior = torch.as_tensor(prior_precision, dtype=torch.float64, device=jacobian.device)
    s = torch.as_tensor(scale, dtype=torch.float64, device=jacobian.device)
    if prior.dim() and prior.shape != (size,):
        raise ShapeError(f"the prior precision has shape {tuple(prior.shape)}; pass a number or [{size}]")
    for what, value in (("prior precision", prior), ("scale", s)):
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            raise InputError(f"the {what} must be positive and finite, got {float(value.min()):g}")
    root = prior.sqrt()
    asked = jacobian.to(torch.float64) / root
    white = torch.einsum("ndp,ndk->nkp", data_jacobian.to(torch.float64) / root, data_root.to(torch.float64))
    white = s.sqrt() * white.reshape(-1, size)  # √s 𝒮ᵀ J P₀^{-½}: [NK, P]
    eye = torch.eye(len(white), dtype=torch.float64, device=white.device)
    factor = safe_cholesky(eye + white @ white.T, what="the kernel matrix of the data")
    cross = torch.einsum("ap,mdp->mad", white, asked)  # [M, NK, D]
    taken = torch.linalg.solve_triangular(factor, cross, upper=False)
    if joint:
        prior_part = torch.einsum("mdp,nep->mdne", asked, asked)
        return prior_part - torch.einsum("mad,nae->mdne", taken, taken)
    return asked @ asked.mT - taken.mT @ taken


@dataclass(frozen=True, eq=False)
class DualPosterior(Posterior):
    """The posterior N(θ*, (s·G + P₀)⁻¹) through the data's own Jacobian.

    Attributes:
        mean: The trained weights θ*, by name.
        rows: The matrix A / √s [NK, P], float64.
        prior: The prior, with its precisions P₀ and its mean.
        scale: The factor s of the curvature.
        factor: The Cholesky factor of I + A P₀⁻¹ Aᵀ [NK, NK].
    """

    mean: Params
    rows: Tensor
    prior: Prior
    scale: float
    factor: Tensor

    @staticmethod
    def from_data(
        model: nn.Module,
        data: Iterable[Any],
        likelihood: str | Likelihood,
        prior: PriorSpec = 1.0,
        *,
        prior_mean: float | Params = 0.0,
        scale: float = 1.0,
        names: Sequence[str] | None = None,
        unpack: Unpack | None = None,
    ) -> DualPosterior:
        """Reads the data once, with one backward pass for every column of every datum's root.

        Args:
            model: A trained network with outputs [N, ..., C], in eval mode; it is unchanged.
            data: Batches of (x, y) or (x, y, weight).
            likelihood: The likelihood, which gives the roots, and the noise of a regression.
            prior: The prior's precision, see :class:`Prior`; any diagonal.
            prior_mean: The mean of the prior: a number or tensors by name.
            scale: The factor of the curvature: 1/temperature.
            names: The names of the parameters. None means all that require a gradient.
            unpack: A function that turns a batch of another form into (inputs, targets).

        Raises:
            InputError: There are too many data for a dense kernel.

        >>> net = nn.Linear(1, 1, bias=False).double()
        >>> x = torch.ones(3, 1, dtype=torch.float64)
        >>> DualPosterior.from_data(net, [(x, x)], "regression").marginal_variance()["weight"]
        tensor([[0.2500]], dtype=torch.float64)
        """
        if not 0 < scale < math.inf:
            raise InputError(f"the scale of the curvature must be one positive and finite number, got {scale!r}")
        likelihood = parse_likelihood(likelihood)
        params = chosen_parameters(model, names)
        device, dtype = check_device(model)
        size, parts, count = sum(p.numel() for p in params.values()), [], 0
        with evaluating(model), torch.enable_grad():
            for batch in iterate(data, device=device, dtype=dtype, unpack=unpack):
                leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
                outputs = functional_outputs(model, leaves, batch.inputs)
                likelihood.check(outputs.detach(), batch.targets)
                roots = likelihood.hessian_root(outputs.detach(), batch.targets)  # [N, ..., C, K]
                if batch.weight is not None:
                    roots = roots * batch.weight.to(roots).sqrt().reshape(-1, *[1] * (roots.dim() - 1))
                count += roots[..., 0, :].numel()
                if count * max(size, count) > _NUMBERS:
                    raise InputError(
                        f"the dual form needs {count:,} rows over {size:,} parameters, which is too large; "
                        "use structure='full', 'low_rank' or 'matrix_free'"
                    )
                parts.append(_rows(outputs, list(leaves.values()), roots))
        shapes = {n: tuple(p.shape) for n, p in params.items()}
        parsed = Prior.make(prior, prior_mean, by_module(shapes), shapes)
        rows = torch.cat(parts)
        white = math.sqrt(scale) * rows / parsed.vector(tuple(shapes), device).detach().sqrt()
        eye = torch.eye(len(rows), dtype=torch.float64, device=device)
        factor = safe_cholesky(eye + white @ white.T, what="the kernel matrix of the data")
        return DualPosterior({n: p.clone() for n, p in params.items()}, rows, parsed, scale, factor)

    def _prior(self) -> Tensor:
        return self.prior.vector(self.names, self.rows.device).detach()

    def _precision(self, values: Tensor) -> Tensor:
        return self.scale * (values @ self.rows.T) @ self.rows + values * self._prior()

    def _covariance(self, values: Tensor) -> Tensor:
        prior = self._prior()
        scaled = values / prior
        inner = torch.cholesky_solve((scaled @ self.rows.T).reshape(-1, len(self.rows)).T, self.factor).T
        return scaled - self.scale * inner.reshape(*values.shape[:-1], -1) @ self.rows / prior

    def _apply(self, values: Params, product: Any) -> Params:
        name = self.names[0]
        flat = join_flat(values, self.names, values[name].dim() - len(self.shapes[name]))
        products = split_flat(product(flat.to(torch.float64)), self.shapes)
        return {n: v.to(values[n].dtype) for n, v in products.items()}

    def precision_mv(self, values: Params) -> Params:
        return self._apply(values, self._precision)

    def covariance_mv(self, values: Params) -> Params:
        return self._apply(values, self._covariance)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Params:
        """Draws Σ(√s Aᵀε + P₀^{½}z), which has covariance Σ, without a root of a matrix over the parameters."""
        count = checks.count("count", count)
        draws = normal_like(self.rows.new_empty(count, self.rows.shape[1] + len(self.rows)), generator)
        prior, data = draws.split([self.rows.shape[1], len(self.rows)], dim=1)
        rhs = math.sqrt(self.scale) * data @ self.rows + prior * self._prior().sqrt()
        deviations = split_flat(self._covariance(rhs), self.shapes)
        return {n: self.mean[n] + deviations[n].to(self.mean[n].dtype) for n in self.names}

    def log_det_precision(self) -> Tensor:
        return (2 * self.factor.diagonal().log().sum() + self._prior().log().sum()).cpu()

    def log_prob(self, params: Params) -> Tensor:
        difference: Mapping[str, Tensor] = {n: params[n].to(torch.float64) - self.mean[n] for n in self.names}
        name = self.names[0]
        flat = join_flat(dict(difference), self.names, difference[name].dim() - len(self.shapes[name]))
        energy = (flat * self._precision(flat)).sum(-1)
        return 0.5 * (self.log_det_precision() - self.n_params * math.log(2 * math.pi) - energy.cpu())

    def marginal_variance(self) -> Params:
        prior = self._prior()
        inner = torch.linalg.solve_triangular(self.factor, self.rows / prior, upper=False)
        return split_flat(1 / prior - self.scale * inner.square().sum(0), self.shapes)

    def to_dense(self) -> Tensor:
        return (self.scale * self.rows.T @ self.rows + torch.diag(self._prior())).cpu()


@autograd_errors_explained()
def _rows(outputs: Tensor, leaves: Sequence[Tensor], roots: Tensor) -> Tensor:
    """Returns Sᵀ J for every datum and position: [N · positions · K, P]."""
    size, width = outputs.shape[-1], roots.shape[-1]
    flat = outputs.reshape(-1, size)
    rows = []
    for place, root in enumerate(roots.detach().reshape(-1, size, width)):
        for column in root.T:
            grads = torch.autograd.grad(flat[place], leaves, column, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([g.reshape(-1) for g in grads]).to(torch.float64))
    return torch.stack(rows)
