"""The contract suite over every kind of block and prior, and posteriors that are broken in one place each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aftermap.curvature.structures.base import split_flat
from aftermap.curvature.structures.full import FullBlock, FullBlockPosterior
from aftermap.curvature.structures.kron import KronBlockPosterior
from aftermap.params import Params
from aftermap.posteriors import GaussianPosterior
from aftermap.testing import check_posterior
from tests.posteriors.cases import CASES, generator, made, normal, posterior_of

PER_PARAMETER = ["diagonal", "diagonal odd", "diagonal transposed", "full", "full odd", "low_rank", "low_rank odd"]
KRONS = [c for c in CASES if c.startswith(("kron", "kfra"))]


def per_layer(case: str) -> list[float]:
    return [0.4 + 0.7 * i for i in range(len(posterior_of(case).layers))]


def per_parameter(case: str) -> dict[str, Tensor]:
    shapes = made(case)[1].shapes
    return {n: 0.3 + normal(*s, seed=i).square() for i, (n, s) in enumerate(shapes.items())}


@pytest.mark.parametrize("case", CASES)
def test_one_prior(case: str) -> None:
    check_posterior(posterior_of(case, scale=1.7), generator())


@pytest.mark.parametrize("case", CASES)
def test_a_prior_per_layer(case: str) -> None:
    check_posterior(posterior_of(case, per_layer(case), prior_mean=0.2), generator(1))


@pytest.mark.parametrize("case", PER_PARAMETER)
def test_a_prior_per_entry(case: str) -> None:
    check_posterior(posterior_of(case, per_parameter(case), scale=0.6), generator(2))


@pytest.mark.parametrize("damping", ["factored", "pi"])
@pytest.mark.parametrize("case", KRONS)
def test_factored_damping(case: str, damping: str) -> None:
    check_posterior(posterior_of(case, 0.7, scale=1.7, damping=damping), generator(3))


@pytest.mark.parametrize("damping", ["factored", "pi"])
def test_factored_damping_with_a_prior_per_layer(damping: str) -> None:
    check_posterior(posterior_of("kron", [0.4, 1.9], damping=damping), generator(3))


@pytest.mark.parametrize("case", ["kron", "kron embedding", "ekfac", "diagonal", "full", "low_rank"])
def test_float32_models(case: str) -> None:
    posterior = posterior_of(case, dtype=torch.float32)
    check_posterior(posterior, generator(4))
    assert {v.dtype for v in posterior.sample(2, generator()).values()} == {torch.float32}
    assert posterior.to_dense().dtype == posterior.log_det_ratio().dtype == torch.float64


def test_a_curvature_of_rank_zero() -> None:
    posterior = posterior_of("low_rank", 0.7)
    block = posterior.blocks[0].source
    empty = replace(block, vectors=block.tensors()["vectors"][:, :0], values=block.tensors()["values"][:0])
    _, factors = made("low_rank")
    made_of = replace(factors, blocks=(empty,))
    for prior in (0.7, [0.4, 1.9]):
        check_posterior(GaussianPosterior.from_factors(made_of, posterior.mean, prior), generator(5))


def test_block_order_may_differ_from_the_order_of_names() -> None:
    posterior = posterior_of("kron mixed with full")
    assert [n for b in posterior.blocks for n in b.names] != list(posterior.names)
    assert posterior.names == tuple(made("kron mixed with full")[0].state_dict())


# Broken posteriors: what must not live for years.


def broken(posterior: GaussianPosterior, block: Any, at: int = 0) -> GaussianPosterior:
    return replace(posterior, blocks=tuple(block if i == at else b for i, b in enumerate(posterior.blocks)))


@dataclass(frozen=True)
class TransposedCholesky(FullBlockPosterior):
    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        factor = torch.linalg.cholesky(self.to_dense())
        noise = torch.randn(count, self.size, generator=generator, dtype=torch.float64)
        return split_flat(noise @ torch.linalg.inv(factor).T, self.shapes)


@dataclass(frozen=True)
class RightCholesky(FullBlockPosterior):
    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        factor = torch.linalg.cholesky(self.to_dense())
        noise = torch.randn(count, self.size, generator=generator, dtype=torch.float64)
        return split_flat(noise @ torch.linalg.inv(factor), self.shapes)


@dataclass(frozen=True)
class TransposedBasis(KronBlockPosterior):
    def precision_mv(self, values: Params) -> Params:
        rotated = self.basis.rotate(self.layout.join(values)) * self.precision
        return self.layout.split(self.basis.outputs.transpose(-1, -2) @ rotated @ self.basis.inputs)


@dataclass(frozen=True)
class ForgottenScale(KronBlockPosterior):
    @property
    def precision(self) -> Tensor:
        return super(ForgottenScale, replace(self, scale=torch.ones_like(self.scale))).precision


@dataclass(frozen=True)
class VarianceOfTheDiagonal(FullBlockPosterior):
    def marginal_variance(self) -> Params:
        return split_flat(1 / self.to_dense().diagonal(), self.shapes)


@dataclass(frozen=True)
class ShiftedSamples(FullBlockPosterior):
    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        return {n: v + 0.2 for n, v in super().sample(count, generator).items()}


@dataclass(frozen=True)
class PriorForgottenInRatio(FullBlockPosterior):
    def log_det_ratio(self) -> Tensor:
        return torch.log1p(self.values).sum()


@dataclass(frozen=True)
class StuckPrior(FullBlockPosterior):
    def with_prior(self, prior: Any, scale: Tensor) -> StuckPrior:
        return self


@dataclass(frozen=True)
class WrongGamma(FullBlockPosterior):
    def effective_parameters(self) -> Tensor:
        return super().effective_parameters() * 1.01


BROKEN = [
    ("full last layer", TransposedCholesky, "the covariance of 20,000 samples is up to"),
    ("kron", TransposedBasis, "to_dense against"),
    ("kron", ForgottenScale, "to_dense against s·H"),
    ("full last layer", VarianceOfTheDiagonal, "marginal_variance"),
    ("full last layer", ShiftedSamples, "the mean of 20,000 samples is"),
    ("full last layer", PriorForgottenInRatio, "log_det_precision"),
    ("full last layer", StuckPrior, "with_prior"),
    ("full last layer", WrongGamma, "effective_parameters of 2"),
]


@pytest.mark.parametrize("case, kind, message", BROKEN, ids=[b[1].__name__ for b in BROKEN])
def test_the_suite_can_fail(case: str, kind: Any, message: str) -> None:
    posterior = posterior_of(case, 0.7, scale=1.7)
    wrong = kind(**vars(posterior.blocks[0]))
    with pytest.raises(AssertionError, match=message):
        check_posterior(broken(posterior, wrong), generator())


def test_the_suite_accepts_another_right_way_to_sample() -> None:
    posterior = posterior_of("full last layer", 0.7)
    block = posterior.blocks[0]
    assert isinstance(block.source, FullBlock)
    check_posterior(broken(posterior, RightCholesky(**vars(block))), generator())


@dataclass(frozen=True)
class Reordered(GaussianPosterior):
    def marginal_variance(self) -> Params:
        return dict(reversed(super().marginal_variance().items()))


def test_the_suite_sees_a_wrong_order_of_names() -> None:
    with pytest.raises(AssertionError, match="marginal_variance has the names"):
        check_posterior(Reordered(**vars(posterior_of("kron"))), generator())
