"""Kinds of vectors and likelihoods: unbiased where random, right where exact, never off by a constant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.curvature import Factors, fit_curvature, reference
from aftermap.errors import InputError
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from tests.curvature.layer_cases import normal
from tests.likelihood_cases import BUILT_IN, WIDTH, make_data


def fit(model: nn.Module, data: Any, likelihood: Any, structure: str, **options: Any) -> Factors:
    return fit_curvature(model, data, likelihood, structure=structure, progress=False, **options)


def small(outputs: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


class NegativeHalf(nn.Module):
    """Natural parameters of a Gaussian: the second half of the outputs is negative."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.model(x).chunk(2, -1)
        return torch.cat([first, -F.softplus(second) - 0.2], -1)


def check_all(model: nn.Module, x: Tensor, y: Tensor, likelihood: Likelihood) -> None:
    args = (model, x, likelihood, y)
    truth = reference.ggn(*args)
    data = [(x, y)]
    full = fit(model, data, likelihood, "full", curvature="exact")
    torch.testing.assert_close(full.to_dense(), truth, rtol=1e-9, atol=1e-11)
    diagonal = fit(model, data, likelihood, "diagonal", curvature="exact").diagonal()
    for name, expected in reference.diagonal_ggn(*args).items():
        torch.testing.assert_close(diagonal[name], expected, rtol=1e-9, atol=1e-11)
    ekfac = fit(model, data, likelihood, "ekfac", curvature="exact")
    torch.testing.assert_close(ekfac.trace(), float(truth.trace()), rtol=1e-10, atol=0)
    fisher = fit(model, data, likelihood, "full", curvature="empirical")
    torch.testing.assert_close(fisher.to_dense(), reference.empirical_fisher(*args), rtol=1e-9, atol=1e-11)
    squares = fit(model, data, likelihood, "diagonal", curvature="empirical").diagonal()
    for name, expected in reference.sum_squared_gradients(*args).items():
        torch.testing.assert_close(squares[name], expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(full.loss, float(likelihood.nll(model(x).detach(), y).sum()))
    assert full.n_data == len(x)


@pytest.mark.parametrize("positions", [(), (2,)])
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_likelihood(name: str, positions: tuple[int, ...]) -> None:
    model: nn.Module = small()
    if name == "natural":
        model = NegativeHalf(model)
    _, y = make_data(name, (5, *positions))
    check_all(model, normal(5, *positions, 3), y, BUILT_IN[name])


def test_binary_with_one_logit_and_multi_label() -> None:
    x = normal(6, 3)
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    check_all(small(1), x, y, Bernoulli())
    one = fit(small(1), [(x, y)], "binary", "full")
    two = fit(small(1), [(x, y[:, None].double())], "binary", "full")
    torch.testing.assert_close(one.to_dense(), two.to_dense())
    check_all(small(2), x, torch.stack([y, 1 - y], 1), Bernoulli())


class Laplacian(Likelihood):
    """A likelihood of the user's own: p(y | f) = exp(−|y − f|)/2."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.shape != outputs.shape:
            raise InputError("Laplacian: shapes differ")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((targets - outputs).abs() + 0.6931471805599453).flatten(1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).sign()

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        return torch.diag_embed(torch.ones_like(outputs))

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        return torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype).sign()

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs


def test_a_likelihood_of_the_users_own() -> None:
    model, x, y = small(), normal(5, 3), normal(5, WIDTH, seed=1)
    check_all(model, x, y, Laplacian())
    estimate = fit(
        model, [(x, y)], Laplacian(), "diagonal", curvature="sampled", samples=2000,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    truth = float(reference.ggn(model, x, Laplacian(), y).trace())
    assert abs(estimate.trace() / truth - 1) < 0.05


def test_ignored_examples_count_for_nothing() -> None:
    model, x = small(), normal(6, 3)
    y = torch.tensor([0, -1, 2, 3, -1, 1])
    weight = torch.tensor([0.5, 2.0, 1.5, 0.25], dtype=torch.float64)
    likelihood = Categorical(weight=weight, ignore_index=-1)
    kept = y >= 0
    for structure in ("diagonal", "full"):
        found = fit(model, [(x, y)], likelihood, structure)
        expected = fit(model, [(x[kept], y[kept])], likelihood, structure)
        torch.testing.assert_close(found.to_dense(), expected.to_dense())


def test_empirical_curvature_of_a_regression_is_not_off_by_two() -> None:
    model = nn.Linear(2, 3, bias=False).double()
    x, y, noise = normal(4, 2), normal(4, 3, seed=1), 0.5
    gradients = ((model(x) - y).detach() / noise**2)[:, :, None] * x[:, None, :]
    expected = torch.einsum("noi,npj->oipj", gradients, gradients).reshape(6, 6)
    found = fit(model, [(x, y)], Gaussian(noise=noise), "full", curvature="empirical")
    torch.testing.assert_close(found.to_dense(), expected)
    one = fit(model, [(x[:1], y[:1])], Gaussian(noise=noise), "kron", curvature="empirical")
    torch.testing.assert_close(one.to_dense(), torch.outer(gradients[0].reshape(-1), gradients[0].reshape(-1)))


def test_jacobian_kind_is_the_gram_matrix_of_jacobians() -> None:
    model, x, y = small(), normal(5, 3), make_data("categorical", (5,))[1]
    J = reference.jacobian(model, x)
    found = fit(model, [(x, y)], "classification", "full", curvature="jacobian")
    torch.testing.assert_close(found.to_dense(), torch.einsum("ncp,ncq->pq", J, J))


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
@pytest.mark.parametrize("kind", ["rademacher", "sampled"])
def test_random_kinds_are_unbiased_with_an_error_like_one_over_root_m(kind: str, structure: str) -> None:
    model, x, y = small(), normal(6, 3), make_data("categorical", (6,))[1]
    exact = fit(model, [(x, y)], "classification", structure, curvature="exact").to_dense()
    errors = []
    for samples in (25, 6400):
        squared = []
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            found = fit(
                model, [(x, y)], "classification", structure, curvature=kind, samples=samples, generator=generator
            )
            assert found.curvature == kind
            squared.append(float((found.to_dense() - exact).norm() / exact.norm()) ** 2)
        errors.append((sum(squared) / len(squared)) ** 0.5)
    # Sixteen times the root of the samples: an error of a sixteenth, and no constant left over.
    assert errors[1] < 0.03
    assert 8 < errors[0] / errors[1] < 32


def test_sampled_is_divided_once() -> None:
    model, x, y = small(), normal(6, 3), make_data("categorical", (6,))[1]
    exact = fit(model, [(x, y)], "classification", "diagonal", curvature="exact").trace()
    for samples in (50, 1000):
        traces = [
            fit(
                model, [(x, y)], "classification", "diagonal", curvature="sampled", samples=samples,
                generator=torch.Generator().manual_seed(seed),
            ).trace()
            for seed in range(8)
        ]  # fmt: skip
        assert abs(sum(traces) / len(traces) / exact - 1) < 0.1


@pytest.mark.parametrize("structure", ["kron", "diagonal", "ekfac", "full"])
def test_random_kinds_repeat_with_the_generator_and_ignore_the_chunk(structure: str) -> None:
    model, x, y = small(), normal(6, 3), make_data("categorical", (6,))[1]
    found = [
        fit(
            model, [(x, y)], "classification", structure, curvature="rademacher", samples=7, chunk=chunk,
            generator=torch.Generator().manual_seed(3),
        ).to_dense()
        for chunk in (None, 1, 2, 7)
    ]  # fmt: skip
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-10)
    state = torch.get_rng_state()
    fit(model, [(x, y)], "classification", structure, curvature="rademacher", generator=torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)


def test_auto_is_exact_up_to_twenty_outputs() -> None:
    x, y = normal(4, 3), torch.zeros(4, dtype=torch.int64)
    assert fit(small(20), [(x, y)], "classification", "kron").curvature == "exact"
    assert fit(small(21), [(x, y)], "classification", "kron").curvature == "rademacher"


@pytest.mark.parametrize("structure", ["low_rank", "hessian"])
def test_structures_by_products_refuse_other_vectors(structure: str) -> None:
    x, y = normal(4, 3), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(InputError, match="curvature='sampled'.*exact"):
        fit(small(), [(x, y)], "classification", structure, curvature="sampled")
