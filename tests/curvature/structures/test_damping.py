"""Factored damping (Ritter et al. 2018, eq. 9): what it is, and what it is not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from aftermap.curvature.structures.base import Factors
from aftermap.curvature.structures.kron import KronBlock
from aftermap.errors import InputError
from aftermap.linalg import kron
from aftermap.posteriors import GaussianPosterior
from tests.posteriors.cases import made, mean_of, posterior_of

PLAIN = ["kron", "kron grouped expand", "kron grouped reduce", "kron embedding", "kron dead", "kfra"]


def rebalanced(factors: Factors, factor: float) -> Factors:
    """A -> cA, B -> B/c: the same matrix in other factors."""
    blocks = tuple(
        replace(b, inputs=b.inputs * factor, outputs=b.outputs / factor) if isinstance(b, KronBlock) else b
        for b in factors.blocks
    )
    return replace(factors, blocks=blocks)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_the_identity_of_equation_9(scale: float) -> None:
    """(√N H + √τ I) ⊗ (√N Q + √τ I) = N H ⊗ Q + τ I + √(Nτ) (H ⊗ I + I ⊗ Q) with means over data H and Q."""
    prior = 0.7
    _, factors = made("kron")
    posterior = posterior_of("kron", prior, damping="factored", scale=scale)
    n_data = scale * factors.n_data
    for block, made_of in zip(posterior.blocks, factors.blocks, strict=True):
        assert isinstance(made_of, KronBlock)
        inner = made_of.input_mean()[0]
        outer = made_of.outputs[0] / factors.n_data
        eye_in, eye_out = (torch.eye(len(m), dtype=torch.float64) for m in (inner, outer))
        expanded = n_data * kron(outer, inner) + prior * kron(eye_out, eye_in)
        expanded = expanded + math.sqrt(n_data * prior) * (kron(outer, eye_in) + kron(eye_out, inner))
        place = made_of.layout.positions()
        wanted = torch.empty_like(expanded)
        wanted[place[:, None], place] = expanded
        torch.testing.assert_close(block.to_dense(), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("damping", ["factored", "pi"])
@pytest.mark.parametrize("case", PLAIN)
def test_factored_damping_is_never_below_the_exact_precision(case: str, damping: str) -> None:
    exact, factored = posterior_of(case, 0.7), posterior_of(case, 0.7, damping=damping)
    gap = torch.linalg.eigvalsh(factored.to_dense() - exact.to_dense())
    assert float(gap.min()) > -1e-9
    assert float(gap.max()) > 1e-2
    for name, variance in factored.marginal_variance().items():
        assert bool((variance <= exact.marginal_variance()[name] * (1 + 1e-12)).all())
    assert float(factored.log_det_ratio()) > float(exact.log_det_ratio())


@pytest.mark.parametrize("case", PLAIN)
def test_only_eq_9_depends_on_how_the_factors_are_balanced(case: str) -> None:
    model, factors = made(case)
    changes = {}
    for damping in ("exact", "pi", "factored"):
        before = GaussianPosterior.from_factors(factors, mean_of(model), 0.7, damping=damping).to_dense()
        after = GaussianPosterior.from_factors(
            rebalanced(factors, 3.0), mean_of(model), 0.7, damping=damping
        ).to_dense()
        changes[damping] = float((after - before).abs().max() / before.abs().max())
    assert changes["exact"] < 1e-12
    assert changes["pi"] < 1e-12
    assert changes["factored"] > 1e-3


@pytest.mark.parametrize("damping", ["exact", "factored", "pi"])
def test_a_common_factor_of_data_and_prior_only_rescales_the_covariance(damping: str) -> None:
    one = posterior_of("kron", 0.7, damping=damping, scale=1.3)
    other = posterior_of("kron", 0.7 * 4, damping=damping, scale=1.3 * 4)
    torch.testing.assert_close(other.to_dense(), 4 * one.to_dense(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("damping", ["exact", "factored", "pi"])
def test_a_layer_without_curvature_keeps_its_prior(damping: str) -> None:
    posterior = posterior_of("kron mixed with full", 0.7, damping=damping)
    found = posterior.marginal_variance()
    for name in ("idle.weight", "idle.bias"):
        torch.testing.assert_close(found[name], torch.full_like(found[name], 1 / 0.7))
    assert posterior.effective_parameters()["idle"] == pytest.approx(0.0, abs=1e-12)


def test_a_dead_layer_keeps_its_prior() -> None:
    for damping in ("exact", "pi"):
        posterior = posterior_of("kron dead layer", 0.7, damping=damping)
        found = posterior.marginal_variance()["0.weight"]
        torch.testing.assert_close(found, torch.full_like(found, 1 / 0.7))


def test_dead_units_keep_their_prior() -> None:
    posterior = posterior_of("kron dead", 0.7)
    found = posterior.marginal_variance()
    torch.testing.assert_close(found["0.weight"][:2], torch.full((2, 3), 1 / 0.7, dtype=torch.float64))
    assert bool((found["0.weight"][2:] < 1 / 0.7).all())


def test_factored_damping_needs_factors() -> None:
    with pytest.raises(InputError, match="damping='factored' is for Kronecker factors, and structure='ekfac' has none"):
        posterior_of("ekfac", damping="factored")


@pytest.mark.parametrize("case", ["full", "diagonal", "low_rank"])
def test_damping_of_other_structures_is_not_ignored_silently(case: str) -> None:
    with pytest.raises(InputError, match=f"damping='pi' is for Kronecker factors, and structure='{case}' has none"):
        posterior_of(case, damping="pi")


def test_unknown_damping() -> None:
    with pytest.raises(InputError, match="damping='eq9' is not known; allowed are 'exact', 'factored', 'pi'"):
        posterior_of("kron", damping="eq9")
