"""Acquisitions: against conjugate linear models, determinants and sums by brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from aftermap.applications import (
    ACQUISITIONS,
    class_predictive_information,
    entropy,
    expected_information_gain,
    gaussian_predictive_information,
    greedy_information,
    mutual_information,
    random,
    variance,
)
from aftermap.applications.acquisition import parse_acquisition, top
from aftermap.errors import InputError, ShapeError, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from aftermap.predictive import Prediction
from tests.laplace.problems import classes, generator, linear_regression, mlp, normal

NOISE, PRIOR = 0.6, 1.4


def conjugate() -> tuple[Laplace, Tensor]:
    """A Bayesian linear regression and its posterior precision."""
    net, data, _, _, precision = linear_regression(NOISE, PRIOR)
    laplace = Laplace(net, Gaussian(NOISE), structure="full", prior_precision=PRIOR)
    return laplace.fit(data, progress=False), precision


def log_det(matrix: Tensor) -> Tensor:
    return torch.linalg.slogdet(matrix)[1]


def random_covariance(inputs: int, outputs: int, seed: int = 3) -> Tensor:
    root = normal(inputs * outputs, inputs * outputs + 2, seed=seed)
    return (root @ root.T / inputs).reshape(inputs, outputs, inputs, outputs)


def test_information_of_a_linear_model_is_the_drop_of_the_posterior_entropy() -> None:
    """½ log |P + xxᵀ/σ²| / |P|, computed in the weights."""
    laplace, precision = conjugate()
    x = normal(7, 4, seed=9)
    wide = torch.cat([x, torch.ones(7, 1, dtype=torch.float64)], 1)
    wanted = torch.stack([0.5 * (log_det(precision + torch.outer(w, w) / NOISE**2) - log_det(precision)) for w in wide])
    prediction = laplace.predict(x)
    torch.testing.assert_close(mutual_information(prediction), wanted, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(expected_information_gain(prediction), wanted, rtol=1e-9, atol=1e-11)
    spread = (wide @ torch.linalg.inv(precision) * wide).sum(1)
    torch.testing.assert_close(variance(prediction), spread, rtol=1e-9, atol=1e-11)
    total = 0.5 * (2 * math.pi * math.e * (spread + NOISE**2)).log()
    torch.testing.assert_close(entropy(prediction), total, rtol=1e-9, atol=1e-11)


def test_information_of_several_outputs_counts_what_they_share_once() -> None:
    """A network with two outputs: the drop of the posterior entropy in the weights, per-output noise included."""
    noise = torch.tensor([0.5, 1.5], dtype=torch.float64)
    x, y = normal(11, 3, seed=1), normal(11, 2, seed=2)
    laplace = Laplace(mlp(outputs=2), Gaussian(noise), structure="full", prior_precision=PRIOR).fit(
        [(x, y)], progress=False
    )
    new = normal(1, 3, seed=7)
    precision = laplace.posterior.to_dense()
    params = dict(laplace.model.named_parameters())
    rows = torch.func.jacrev(lambda p: torch.func.functional_call(laplace.model, p, new)[0])(params)
    jacobian = torch.cat([rows[n].reshape(2, -1) for n in laplace.posterior.names], 1)
    after = precision + jacobian.T @ (jacobian / noise[:, None] ** 2)
    gain = expected_information_gain(laplace.predict(new))
    torch.testing.assert_close(gain[0], 0.5 * (log_det(after) - log_det(precision)), rtol=1e-8, atol=1e-10)
    independent = laplace.predict(new, diagonal=True)
    wanted = 0.5 * torch.log1p(independent.epistemic / independent.aleatoric).sum(1)
    torch.testing.assert_close(expected_information_gain(independent), wanted)
    assert float(gain) < float(wanted)


def test_information_of_classes_is_the_mutual_information() -> None:
    laplace = Laplace(mlp(), "classification").fit(classes(), progress=False)
    prediction = laplace.predict(normal(6, 3, seed=5), kind="sampling", samples=9, generator=generator(1))
    p = prediction.samples
    wanted = torch.special.entr(p.mean(0)).sum(-1) - torch.special.entr(p).sum(-1).mean(0)
    torch.testing.assert_close(mutual_information(prediction), wanted, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(expected_information_gain(prediction), wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("outputs, columns", [(1, 1), (3, 2)])
def test_greedy_gains_add_up_to_the_determinant(outputs: int, columns: int) -> None:
    cov, root = random_covariance(5, outputs), normal(5, outputs, columns, seed=4)
    chosen, gains = greedy_information(cov, root, 5)
    assert sorted(chosen.tolist()) == [0, 1, 2, 3, 4]
    for count in range(1, 6):
        inside = chosen[:count].tolist()
        torch.testing.assert_close(gains[:count].sum(), joint_information(cov, root, inside), rtol=1e-9, atol=1e-11)
        others = [i for i in range(5) if i not in inside[:-1]]
        best = max(float(joint_information(cov, root, [*inside[:-1], i])) for i in others)
        assert float(joint_information(cov, root, inside)) == pytest.approx(best, rel=1e-9)


def joint_information(cov: Tensor, root: Tensor, inside: list[int]) -> Tensor:
    """½ log det(I + Sᵀ V S) of a set, from its definition."""
    width = cov.shape[1]
    block = cov[inside][:, :, inside].reshape(len(inside) * width, -1)
    whole = torch.block_diag(*[root[i] for i in inside])
    scaled = whole.T @ block @ whole
    return 0.5 * log_det(torch.eye(len(scaled), dtype=torch.float64) + scaled)


def test_greedy_is_close_to_the_best_set_and_avoids_twins() -> None:
    cov = random_covariance(7, 1)
    root = torch.ones(7, 1, 1, dtype=torch.float64)
    chosen, gains = greedy_information(cov, root, 3)
    best = max(float(joint_information(cov, root, list(c))) for c in itertools.combinations(range(7), 3))
    assert float(gains.sum()) >= (1 - 1 / math.e) * best
    assert bool((gains.diff() <= 1e-12).all())  # submodular: less and less
    # An exact copy of the most informative input tells nothing new if labels are precise.
    index = torch.tensor([*range(7), int(chosen[0])])
    twins = cov[index][:, :, index]
    picked, _ = greedy_information(twins, 1e4 * torch.ones(8, 1, 1, dtype=torch.float64), 3)
    assert len({0, 7} & {int(i) if int(i) != int(chosen[0]) else 0 for i in picked}) <= 1


def test_greedy_equals_conditioning_in_the_weights() -> None:
    """The second choice of a linear model is the best one after the first label was taken in."""
    laplace, precision = conjugate()
    x = normal(8, 4, seed=9)
    wide = torch.cat([x, torch.ones(8, 1, dtype=torch.float64)], 1)
    _, cov = laplace.joint(x)
    root = laplace.likelihood.hessian_root(torch.zeros(8, 1, dtype=torch.float64))
    chosen, gains = greedy_information(cov, root, 2)
    after = precision + torch.outer(wide[chosen[0]], wide[chosen[0]]) / NOISE**2
    left = (wide @ torch.linalg.inv(after) * wide).sum(1)
    left[chosen[0]] = 0
    assert int(left.argmax()) == int(chosen[1])
    torch.testing.assert_close(gains[1], 0.5 * torch.log1p(left.max() / NOISE**2), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("outputs", [1, 3])
def test_predictive_information_of_gaussians(outputs: int) -> None:
    cov, noise = random_covariance(6, outputs), 0.3 + normal(6, outputs, seed=6).square()
    found = gaussian_predictive_information(cov, noise, 4)
    for n in range(4):
        wanted = 0.0
        for m in (4, 5):
            pair = cov[[n, m]][:, :, [n, m]].reshape(2 * outputs, -1) + noise[[n, m]].flatten().diag()
            own, other = pair[:outputs, :outputs], pair[outputs:, outputs:]
            wanted += 0.25 * float(log_det(own) + log_det(other) - log_det(pair))
        assert float(found[n]) == pytest.approx(wanted, rel=1e-9)


def test_predictive_information_of_classes() -> None:
    p, q = normal(9, 4, 3, seed=1).softmax(-1), normal(9, 2, 5, seed=2).softmax(-1)
    found = class_predictive_information(p, q)
    for n in range(4):
        wanted = 0.0
        for m in range(2):
            joint = torch.einsum("sc,sd->cd", p[:, n], q[:, m]) / 9
            product = torch.outer(p[:, n].mean(0), q[:, m].mean(0))
            wanted += 0.5 * float((joint * (joint / product).log()).sum())
        assert float(found[n]) == pytest.approx(wanted, rel=1e-9)
    sure = p[:1].expand(9, 4, 3)  # weights that are known: nothing to learn
    torch.testing.assert_close(class_predictive_information(sure, q), torch.zeros(4, dtype=torch.float64))


def test_random_and_top() -> None:
    prediction = Prediction("regression", *(torch.ones(50, 2) for _ in range(4)))
    first, again = (random(prediction, generator(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert len(first.unique()) == 50
    assert top(torch.tensor([1.0, 3.0, 3.0, -torch.inf]), 3).tolist() == [1, 2, 0]


def test_bad_input() -> None:
    with pytest.raises(InputError, match="'bald' is not known; allowed are 'mutual_information'"):
        parse_acquisition("bald")
    assert set(ACQUISITIONS) == {"mutual_information", "entropy", "variance", "expected_information_gain", "random"}
    with pytest.raises(InputError, match="NaN"):
        top(torch.tensor([1.0, torch.nan]), 1)
    with pytest.raises(InputError, match="3 inputs were asked for, but the choice is between 2"):
        top(torch.ones(2), 3)
    with pytest.raises(ShapeError, match=r"one score per input, \[N\], got \[2, 2\]"):
        top(torch.ones(2, 2), 1)
    counts = Prediction("counts", *(torch.ones(3, 1) for _ in range(4)))
    with pytest.raises(UnsupportedError, match='use acquisition="variance"'):
        expected_information_gain(counts)
    with pytest.raises(ShapeError, match=r"outputs \[N, D\]"):
        expected_information_gain(Prediction("regression", *(torch.ones(3, 5, 2) for _ in range(4))))
    cov = random_covariance(3, 2)
    with pytest.raises(ShapeError, match=r"root \[N, C, R\] are needed"):
        greedy_information(cov, torch.ones(2, 2, 1), 1)
    with pytest.raises(InputError, match="choice is between 3"):
        greedy_information(cov, torch.ones(3, 2, 1), 4)
    with pytest.raises(ShapeError, match="at least one pool input and one target"):
        gaussian_predictive_information(cov, torch.ones(3, 2), 3)
    with pytest.raises(ShapeError, match="noise variances"):
        gaussian_predictive_information(cov, torch.ones(3), 1)
    with pytest.raises(ShapeError, match="probabilities"):
        class_predictive_information(torch.ones(2, 3, 4), torch.ones(3, 3, 4))
