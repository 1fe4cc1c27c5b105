"""The contract of a Gaussian posterior: everything that it offers, against its dense precision in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aftermap.curvature.structures.base import Factors
from aftermap.curvature.structures.kron import KronBlock, KronBlockPosterior
from aftermap.linalg import kron
from aftermap.params import Params
from aftermap.posteriors.base import GaussianPosterior, Posterior

__all__ = ["check_posterior", "dense_precision"]


def check_posterior(
    posterior: Posterior,
    generator: torch.Generator,
    *,
    samples: int = 20_000,
    tolerance: float | None = None,
) -> None:
    """Compares a posterior with its dense precision P = s·H + P₀, written out from the curvature and the prior.

    It checks `to_dense` (symmetric, positive definite and, for a :class:`GaussianPosterior`, the right matrix);
    products with precision and covariance, also batched; the log determinant and its ratio to the prior's; `log_prob`
    against torch.distributions; marginal variances; mean **and covariance** of samples within statistical error;
    effective parameters, 0 ≤ γ ≤ P and γ = P − tr(P₀Σ); `with_prior` against a posterior made from nothing; the order
    of names.

    Args:
        posterior: A posterior over at most a few hundred numbers.
        generator: The source of samples and test vectors.
        samples: The number of samples that are drawn for their moments.
        tolerance: The relative tolerance. None means 1e-8, or 1e-4 for float32 weights.

    Raises:
        AssertionError: Something differs; the message says what, and by how much.

    >>> from aftermap.curvature import fit_curvature
    >>> net = torch.nn.Linear(2, 3).double()
    >>> data = [(torch.randn(5, 2).double(), torch.randn(5, 3).double())]
    >>> factors = fit_curvature(net, data, "regression")
    >>> posterior = GaussianPosterior.from_factors(factors, dict(net.named_parameters()))
    >>> check_posterior(posterior, torch.Generator().manual_seed(0))
    """
    if tolerance is None:
        tolerance = 1e-8 if all(v.dtype == torch.float64 for v in posterior.mean.values()) else 1e-4
    _check_names(posterior, generator)
    dense = posterior.to_dense()
    if tuple(dense.shape) != (posterior.n_params,) * 2 or dense.dtype != torch.float64:
        raise AssertionError(
            f"to_dense is {dense.dtype} {tuple(dense.shape)}, not float64 [P, P], P = {posterior.n_params}"
        )
    _close("to_dense against its transpose", dense, dense.T, tolerance)
    if isinstance(posterior, GaussianPosterior):
        truth = dense_precision(posterior)
        _close("to_dense against s·H + P₀", dense, truth, tolerance)
    else:
        truth = (dense + dense.T) / 2
    smallest = float(torch.linalg.eigvalsh(truth).min())
    if smallest <= 0:
        raise AssertionError(f"the precision is not positive definite: its smallest eigenvalue is {smallest:.3g}")
    covariance = torch.linalg.inv(truth)
    _check_products(posterior, truth, covariance, generator, tolerance)
    _check_densities(posterior, truth, generator, tolerance)
    _close("marginal_variance", _flat(posterior.marginal_variance(), posterior), covariance.diagonal(), tolerance)
    _check_samples(posterior, truth, generator, samples)
    if isinstance(posterior, GaussianPosterior):
        _check_effective(posterior, covariance, tolerance)
        _check_with_prior(posterior, tolerance)


def dense_precision(posterior: GaussianPosterior) -> Tensor:
    """Returns the precision [P, P] over `names`, from the curvature's own dense form and the prior, without a decomposition.

    With factored damping a Kronecker block is (√(s/N) B + √δ/π I) ⊗ (√(sN) A + π√δ I) (Ritter et al. 2018, eq. 9: π = 1).
    """
    starts, total = {}, 0
    for name, value in posterior.mean.items():
        starts[name], total = total, total + value.numel()
    dense = torch.zeros(total, total, dtype=torch.float64)
    scale = float(posterior.scale.detach())
    for block in posterior.blocks:
        place = torch.cat([torch.arange(posterior.mean[n].numel()) + starts[n] for n in block.names])
        if posterior.damping != "exact" and isinstance(block, KronBlockPosterior):
            part = _damped(block, scale, float(posterior.prior.scalar(block.names).detach()), posterior.damping == "pi")
        else:
            prior = posterior.prior.vector(block.names).detach().cpu()
            part = scale * block.source.to_dense().cpu() + torch.diag(prior)
        dense[place[:, None], place] = part
    return dense


def _damped(block: KronBlockPosterior, scale: float, prior: float, with_pi: bool) -> Tensor:
    source, n_data = block.source, block.eigen.n_data
    if not isinstance(source, KronBlock):
        raise AssertionError(f"factored damping of a {type(source).__name__}, which has no Kronecker factors")
    inputs, outputs = source.input_mean().cpu(), source.outputs.to(torch.float64).cpu()
    layout, parts = source.layout, []
    for g in range(layout.groups):
        right = math.sqrt(scale * n_data) * (torch.diag(inputs[g]) if inputs.dim() == 2 else inputs[g])
        left = math.sqrt(scale / n_data) * outputs[g]
        pi = 1.0
        if with_pi and (float(left.trace()) == 0 or float(right.trace()) == 0):
            left, right = torch.zeros_like(left), torch.zeros_like(right)  # Without curvature the prior stays as it is.
        elif with_pi:
            pi = math.sqrt(float(right.diagonal().mean() / left.diagonal().mean()))
        left = left + math.sqrt(prior) / pi * torch.eye(layout.out, dtype=torch.float64)
        right = right + math.sqrt(prior) * pi * torch.eye(layout.in_, dtype=torch.float64)
        parts.append(kron(left, right))
    dense, place = torch.block_diag(*parts), layout.positions()
    ordered = torch.empty_like(dense)
    ordered[place[:, None], place] = dense
    return ordered


def _close(what: str, got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Compares relative to the largest entry, since small entries of a precision are differences of large ones."""
    if got.shape != wanted.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)} instead of {tuple(wanted.shape)}")
    got, wanted = got.detach().cpu().to(torch.float64), wanted.detach().to(torch.float64)
    error = float((got - wanted).abs().max()) if got.numel() else 0.0
    size = float(wanted.abs().max()) if got.numel() else 0.0
    if not error <= tolerance * max(size, 1e-300):
        raise AssertionError(f"{what}: the largest error is {error:.3g} where the largest entry is {size:.3g}")


def _check_names(posterior: Posterior, generator: torch.Generator) -> None:
    names = list(posterior.names)
    one = {n: torch.zeros(s, dtype=torch.float64) for n, s in posterior.shapes.items()}
    results = {
        "mean": posterior.mean,
        "precision_mv": posterior.precision_mv(one),
        "covariance_mv": posterior.covariance_mv(one),
        "marginal_variance": posterior.marginal_variance(),
        "sample": posterior.sample(2, generator),
    }
    for what, values in results.items():
        if list(values) != names:
            raise AssertionError(f"{what} has the names {list(values)}, the posterior {names}")
    for name, shape in posterior.shapes.items():
        drawn = results["sample"][name]
        if tuple(drawn.shape) != (2, *shape) or drawn.dtype != posterior.mean[name].dtype:
            raise AssertionError(f"two samples of {name} {shape} are {drawn.dtype} {tuple(drawn.shape)}")


def _flat(values: Params, posterior: Posterior, lead: int = 0) -> Tensor:
    parts = [values[n].reshape(*values[n].shape[:lead], -1) for n in posterior.names]
    return torch.cat(parts, dim=-1).detach().cpu().to(torch.float64)


def _split(vectors: Tensor, posterior: Posterior) -> Params:
    sizes = [v.numel() for v in posterior.mean.values()]
    parts = vectors.split(sizes, dim=-1)
    device = next(iter(posterior.mean.values())).device
    return {
        n: p.reshape((*vectors.shape[:-1], *posterior.shapes[n])).to(device)
        for n, p in zip(posterior.names, parts, strict=True)
    }


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64).cpu()


def _check_products(
    posterior: Posterior, truth: Tensor, covariance: Tensor, generator: torch.Generator, tolerance: float
) -> None:
    for lead in ((), (3,), (2, 5)):
        vectors = _normal((*lead, posterior.n_params), generator)
        values = _split(vectors, posterior)
        forward, backward = posterior.precision_mv(values), posterior.covariance_mv(values)
        where = f"for leading dimensions {list(lead)}"
        _close(f"precision_mv {where}", _flat(forward, posterior, len(lead)), vectors @ truth, tolerance)
        _close(f"covariance_mv {where}", _flat(backward, posterior, len(lead)), vectors @ covariance, tolerance)
        again = _flat(posterior.covariance_mv(forward), posterior, len(lead))
        # The condition of P multiplies the rounding of float32 eigenvectors.
        condition = float(torch.linalg.cond(truth)) if tolerance > 1e-6 else 1.0
        _close(f"covariance_mv of precision_mv {where}", again, vectors, tolerance * max(condition, 1.0))


def _check_densities(posterior: Posterior, truth: Tensor, generator: torch.Generator, tolerance: float) -> None:
    log_det = torch.linalg.slogdet(truth)[1]
    _close("log_det_precision", posterior.log_det_precision(), log_det, tolerance * max(1.0, 1 / float(log_det.abs())))
    mean = _flat(posterior.mean, posterior)
    normal = torch.distributions.MultivariateNormal(mean, precision_matrix=truth, validate_args=False)
    for lead in ((), (4,), (2, 3)):
        # Steps are of one standard deviation, or the energy drowns everything else.
        step = _normal((*lead, posterior.n_params), generator) @ torch.linalg.cholesky(torch.linalg.inv(truth)).T
        values = mean + step
        actual = posterior.log_prob(_split(values, posterior))
        _close(f"log_prob for leading dimensions {list(lead)}", actual, normal.log_prob(values), tolerance)
    if isinstance(posterior, GaussianPosterior):
        prior = posterior.prior.vector(posterior.names).detach().cpu()
        _close(
            "log_det_ratio", posterior.log_det_ratio(), log_det - prior.log().sum(), tolerance * len(prior)
        )  # This is a difference of two log determinants.


def _check_samples(posterior: Posterior, truth: Tensor, generator: torch.Generator, count: int) -> None:
    """Checks that samples whitened by the true precision have mean 0 and covariance I within six standard errors."""
    parts = []
    for start in range(0, count, 5_000):
        drawn = _flat(posterior.sample(min(5_000, count - start), generator), posterior, 1)
        parts.append(drawn - _flat(posterior.mean, posterior))
    white = torch.cat(parts) @ torch.linalg.cholesky(truth)
    size = posterior.n_params
    shift = float(white.mean(0).abs().max()) * math.sqrt(count)
    if not shift < 6:
        raise AssertionError(f"the mean of {count:,} samples is {shift:.1f} standard errors away from the mean")
    moments = white.T @ white / count - torch.eye(size, dtype=torch.float64)
    deviation = torch.full((size, size), 1.0, dtype=torch.float64).fill_diagonal_(math.sqrt(2))
    worst = float((moments.abs() / deviation).max()) * math.sqrt(count)
    if not worst < 6.5:
        raise AssertionError(f"the covariance of {count:,} samples is up to {worst:.1f} standard errors away from P⁻¹")


def _check_effective(posterior: GaussianPosterior, covariance: Tensor, tolerance: float) -> None:
    prior = posterior.prior.vector(posterior.names).detach().cpu()
    expected = _split(1 - prior * covariance.diagonal(), posterior)
    actual = posterior.effective_parameters()
    if list(actual) != list(posterior.layers):
        raise AssertionError(
            f"effective_parameters has the layers {list(actual)}, the posterior {list(posterior.layers)}"
        )
    for layer, names in posterior.layers.items():
        wanted = sum(float(expected[n].sum()) for n in names)
        size = sum(posterior.mean[n].numel() for n in names)
        if not abs(actual[layer] - wanted) <= tolerance * size:
            raise AssertionError(
                f"effective_parameters of {layer}: {actual[layer]:.6g}, but P − tr(P₀Σ) = {wanted:.6g}"
            )
        if not -tolerance * size <= actual[layer] <= size * (1 + tolerance):
            raise AssertionError(f"effective_parameters of {layer}: {actual[layer]:.6g} is not within 0 and {size}")


def _check_with_prior(posterior: GaussianPosterior, tolerance: float) -> None:
    """Checks other precisions (all twice as large, and one factor per layer) and another scale, against a fresh posterior."""
    count = len(posterior.layers)
    steps = torch.linspace(0.5, 2.5, count) if count > 1 else torch.tensor([0.4])
    by_layer = {n: float(steps[i]) for i, names in enumerate(posterior.layers.values()) for n in names}
    for what, factors in (("twice the prior", dict.fromkeys(by_layer, 2.0)), ("a prior per layer", by_layer)):
        precision = {n: posterior.prior.precision[n].detach() * f for n, f in factors.items()}
        prior = posterior.prior.with_precision(precision)
        for scale in (None, 0.3 * float(posterior.scale.detach())):
            changed = posterior.with_prior(prior=prior, scale=scale)
            fresh = GaussianPosterior.from_factors(
                _sources(posterior),
                posterior.mean,
                precision,
                prior_mean=dict(posterior.prior.mean),
                scale=changed.scale,
                damping=posterior.damping,
            )
            label = f"with_prior ({what}, scale {float(changed.scale):.3g})"
            _close(f"{label}: to_dense", changed.to_dense(), fresh.to_dense(), tolerance)
            _close(f"{label}: to_dense against s·H + P₀", changed.to_dense(), dense_precision(changed), tolerance)
            mine, theirs = (_flat(p.marginal_variance(), p) for p in (changed, fresh))
            _close(f"{label}: marginal_variance", mine, theirs, tolerance)
            _close(f"{label}: log_det_ratio", changed.log_det_ratio(), fresh.log_det_ratio(), tolerance)


def _sources(posterior: GaussianPosterior) -> Factors:
    """Returns the factors that the posterior was made from, as far as a posterior needs them."""
    counts = [b.eigen.n_data for b in posterior.blocks if isinstance(b, KronBlockPosterior)]
    blocks = tuple(b.source for b in posterior.blocks)
    return Factors("any", blocks, posterior.names, counts[0] if counts else 1.0, 0.0, "exact", {})
