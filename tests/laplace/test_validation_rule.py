"""Tuning on validation labels: the rule against one written anew, what it promises, and data of every kind and number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from aftermap.baselines import TemperatureScaling
from aftermap.laplace import ValidationResult
from aftermap.laplace.latents import OutputGaussians
from aftermap.laplace.validation import RATIOS, _cheapest_temperature, search_family
from aftermap.likelihoods import Bernoulli, Categorical
from aftermap.predictive.latent import normal_points
from tests.laplace.problems import contrast_root, generator, normal

CLASSES = [2, 3, 10, 100]


# The rule, written anew in float64 from its formulas; NumPy only


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def pairwise(f: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Log-probabilities [n, K] by the probit approximation of all differences, whose variances are [n, K, K]."""
    scaled = (f[:, None, :] - f[:, :, None]) / np.sqrt(1 + math.pi / 8 * variance)
    return log_softmax(-np.log(np.exp(scaled).sum(-1)))


def rule(f: np.ndarray, covariances: list[np.ndarray], y: np.ndarray, weight: np.ndarray) -> dict[str, Any]:
    """The point that the rule takes for logits f [n, K], covariances [n, K, K] and labels y [n] that stand for weight [n] data."""
    n, k = float(weight.sum()), f.shape[1]
    f = f - f.mean(1, keepdims=True)
    onehot = np.eye(k)[y]
    share = weight / n

    def mean(values: np.ndarray) -> float:
        return float(share @ values)

    temperatures = 1.1 ** np.arange(-10, 17)
    score = np.array([n * mean((onehot * log_softmax(f / t)).sum(1)) for t in temperatures])
    score -= 0.5 * ((np.log(temperatures) - 0.2) / 0.5) ** 2
    belief = np.exp(score - score.max())
    belief /= belief.sum()
    Q = sum(b * np.exp(log_softmax(f / t)) for b, t in zip(belief, temperatures, strict=True))
    q = (n * onehot + 300 * Q) / (n + 300)

    def loss(log_p: np.ndarray, labels: np.ndarray) -> float:
        return mean(-(labels * log_p).sum(1))

    found = minimize_scalar(
        lambda s: loss(log_softmax(f / math.exp(s)), q), bounds=(math.log(0.05), math.log(50)), options={"xatol": 1e-9}
    )
    t0, least = math.exp(found.x), found.fun
    entropy = mean(-(Q * np.log(np.maximum(Q, 1e-300))).sum(1))
    budget = min(0.002, 0.02 * entropy)
    points = normal_points(100, k, fixed=True).numpy()
    centred = np.eye(k) - 1 / k
    tried = []
    order = [(w, i) for w in (2.0, 1.0, 0.5, 0.25, 0.1) for i in range(4)]
    order.sort(key=lambda p: -(math.log(p[0]) - math.log(RATIOS[p[1]]) / 8))
    for w, i in order:
        V = covariances[i]
        v = mean(np.einsum("ab,nbc,ca->n", centred, V, centred)) / (k - 1)
        root = contrast_root(torch.as_tensor(V)).numpy()
        noise = np.einsum("nab,sb->sna", root, points[:, :-1]) * math.sqrt(w / v)

        diagonal = np.diagonal(V, axis1=1, axis2=2)
        apart = (diagonal[:, :, None] + diagonal[:, None, :] - 2 * V) * w / v
        narrow = (apart.max((1, 2)) <= 0.5) & (k <= 10)

        def log_p(
            t: float, noise: np.ndarray = noise, apart: np.ndarray = apart, narrow: np.ndarray = narrow
        ) -> np.ndarray:
            drawn = np.log(np.exp(log_softmax(f / t + noise)).mean(0))
            return np.where(narrow[:, None], pairwise(f / t, apart), drawn)

        logs = np.linspace(math.log(t0 / (1.2 * math.sqrt(1 + math.pi * w / 8))), math.log(1.05 * t0), 5)
        costs = [loss(log_p(math.exp(s)), q) - least for s in logs]
        best = int(np.argmin(costs))
        cost, t = costs[best], math.exp(logs[best])
        three = slice(min(max(best, 1), 3) - 1, min(max(best, 1), 3) + 2)
        a, b, _ = np.polyfit(logs[three], costs[three], 2)
        if a > 0:
            vertex = math.exp(float(np.clip(-b / (2 * a), logs[three][0], logs[three][-1])))
            at_vertex = loss(log_p(vertex), q) - least
            if at_vertex < cost:
                cost, t = at_vertex, vertex
        tried.append((w, RATIOS[i], t, cost))
        if cost <= budget:
            c = v / (w * t**2)
            losses = [-(onehot * lp).sum(1) for lp in (log_softmax(f), log_softmax(f / t0), log_p(t))]
            return {
                "ratio": RATIOS[i],
                "width": w,
                "data_scale": c,
                "precision": RATIOS[i] * c,
                "output_temperature": t,
                "temperature": t0,
                "budget": budget,
                "nlls": [mean(x) for x in losses],
                "error": math.sqrt(float(share**2 @ (losses[2] - losses[1] - mean(losses[2] - losses[1])) ** 2)),
                "tried": tried,
            }
    raise AssertionError("no point is within the budget")


def problem(
    k: int, n: int = 200, sure: float = 2.0, seed: int = 0, weight: Tensor | None = None, wide: float = 1.0
) -> OutputGaussians:
    """Labels of K classes, logits that are ``sure`` times too large, and covariances that shrink with the ratio."""
    truth = 2 * normal(n, k, seed=seed)
    y = torch.multinomial(torch.softmax(truth, 1), 1, generator=generator(seed + 1))[:, 0]
    roots = normal(n, k, k, seed=seed + 2) * (
        0.3 + torch.rand(n, 1, 1, generator=generator(seed + 3), dtype=torch.float64)
    )
    curvature = torch.logspace(-3, 1, k, dtype=torch.float64)
    covariances = tuple(wide * (roots / (curvature + r)) @ roots.mT for r in RATIOS)
    weight = torch.ones(n, dtype=torch.float64) if weight is None else weight
    return OutputGaussians(sure * truth, covariances, y, weight, n)


def anew(gaussians: OutputGaussians) -> dict[str, Any]:
    covariances = [c.numpy() for c in gaussians.covariances]
    return rule(gaussians.mean.numpy(), covariances, gaussians.targets.numpy(), gaussians.weight.numpy())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", CLASSES)
def test_the_rule_against_one_written_anew(k: int, weighted: bool) -> None:
    count = 25 if k == 100 else 200
    weight = 0.5 + 3 * torch.rand(count, generator=generator(9), dtype=torch.float64) if weighted else None
    gaussians = problem(k, count, weight=weight)
    found, expected = search_family(gaussians, Categorical()), anew(gaussians)
    assert not found.deterministic
    assert (found.ratio, found.width) == (expected["ratio"], expected["width"])
    # The minimum over temperatures is found to 1e-4, and draws are in single precision.
    for name in ("data_scale", "precision", "output_temperature", "temperature", "budget"):
        assert getattr(found, name) == pytest.approx(expected[name], rel=3e-4), name
    nlls = (found.network_nll, found.temperature_nll, found.nll)
    assert nlls == pytest.approx(expected["nlls"], abs=1e-5)
    assert found.difference == found.nll - found.temperature_nll
    assert found.standard_error == pytest.approx(expected["error"], rel=1e-3)
    assert found.n_data == count
    assert found.n_classes == len(gaussians.targets.unique())
    assert len(found.tried) == len(expected["tried"])
    for one, other in zip(found.tried, expected["tried"], strict=True):
        assert one[:2] == other[:2]
        assert one[3] == pytest.approx(other[3], abs=2e-6)


@pytest.mark.parametrize("sure", [0.5, 1.0, 4.0])
def test_points_are_tried_in_order_until_one_is_within_the_budget(sure: float) -> None:
    found = search_family(problem(10, sure=sure), Categorical())
    values = [math.log(w) - math.log(r) / 8 for w, r, _, _ in found.tried]
    assert values == sorted(values, reverse=True)
    assert len(set(found.tried)) == len(found.tried) <= 20
    *before, last = found.tried
    assert all(cost > found.budget for _, _, _, cost in before)
    assert last[3] <= found.budget
    assert (last[0], last[1], last[2]) == (found.width, found.ratio, found.output_temperature)
    for w, _, t, _ in found.tried:
        assert found.temperature / (1.2 * math.sqrt(1 + math.pi * w / 8)) <= t * (1 + 1e-12)
        assert t <= 1.05 * found.temperature * (1 + 1e-12)


def test_a_single_logit_is_two_classes() -> None:
    f, v = 3 * normal(150, seed=1), torch.rand(150, generator=generator(2), dtype=torch.float64)
    y = (torch.rand(150, generator=generator(3), dtype=torch.float64) < torch.sigmoid(f / 2)).double()
    weight = torch.ones(150, dtype=torch.float64)
    sign = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64) / 4
    variances = [v / (0.1 + r) for r in RATIOS]
    one = OutputGaussians(f[:, None], tuple(u[:, None, None] for u in variances), y[:, None], weight, 150)
    halves = torch.stack([-f / 2, f / 2], 1)
    two = OutputGaussians(halves, tuple(u[:, None, None] * sign for u in variances), y.long(), weight, 150)
    probit, of_two = search_family(one, Bernoulli(), link="probit"), search_family(two, Categorical(), link="pairwise")
    assert len(probit.tried) == len(of_two.tried)
    for name in ("ratio", "width", "data_scale", "output_temperature", "nll", "standard_error"):
        assert getattr(probit, name) == pytest.approx(getattr(of_two, name), rel=1e-9), name
    # The integral over one logit against draws of two.
    integral, drawn = search_family(one, Bernoulli()), search_family(two, Categorical(), link="mc", samples=2**13)
    assert (integral.ratio, integral.width) == (drawn.ratio, drawn.width)
    assert integral.output_temperature == pytest.approx(drawn.output_temperature, rel=1e-3)
    assert integral.nll == pytest.approx(drawn.nll, abs=1e-4)
    # The same model with the first logit at zero has another root of its covariance, and so other draws.
    zero = torch.zeros(150, dtype=torch.float64)
    other = OutputGaussians(
        torch.stack([zero, f], 1),
        tuple(torch.stack([torch.stack([zero, zero], 1), torch.stack([zero, u], 1)], 1) for u in variances),
        y.long(),
        weight,
        150,
    )
    a, b = search_family(one, Bernoulli()), search_family(other, Categorical())
    assert a.temperature == pytest.approx(b.temperature, rel=1e-9)
    assert a.budget == pytest.approx(b.budget, rel=1e-9)
    assert (a.network_nll, a.temperature_nll) == pytest.approx((b.network_nll, b.temperature_nll), rel=1e-9)


def test_several_labels_at_once_are_so_many_logits() -> None:
    """An output with its own label is a datum of its own; what outputs share does not matter."""
    f = 3 * normal(50, 4, seed=1)
    y = (torch.rand(50, 4, generator=generator(3), dtype=torch.float64) < torch.sigmoid(f / 2)).double()
    roots = normal(50, 4, 4, seed=2)
    covariances = [roots @ roots.mT / (1 + r) for r in RATIOS]
    weight = 0.5 + torch.rand(50, generator=generator(5), dtype=torch.float64)
    found = search_family(OutputGaussians(f, tuple(covariances), y, weight, 50), Bernoulli())
    alone = [c.diagonal(dim1=1, dim2=2).reshape(-1, 1, 1) for c in covariances]
    flat = OutputGaussians(f.reshape(-1, 1), tuple(alone), y.reshape(-1, 1), weight.repeat_interleave(4), 200)
    expected = search_family(flat, Bernoulli())
    assert (found.ratio, found.width) == (expected.ratio, expected.width)
    for name in ("data_scale", "output_temperature", "temperature", "network_nll", "nll", "standard_error"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12), name
    assert found.n_data == expected.n_data == 200


def test_a_temperature_of_the_likelihood_divides_first() -> None:
    gaussians = problem(3)
    plain, at_two = search_family(gaussians, Categorical()), search_family(gaussians, Categorical(temperature=2.0))
    halved = OutputGaussians(
        gaussians.mean / 2, tuple(c / 4 for c in gaussians.covariances), gaussians.targets, gaussians.weight, 200
    )
    by_hand = search_family(halved, Categorical())
    assert at_two.output_temperature == pytest.approx(2 * by_hand.output_temperature, rel=1e-9)
    assert at_two.data_scale == pytest.approx(by_hand.data_scale, rel=1e-9)
    assert at_two.network_nll == pytest.approx(by_hand.network_nll, rel=1e-12)
    # Whatever the network was trained at, the predictive is nearly the same.
    assert at_two.output_temperature == pytest.approx(plain.output_temperature, rel=0.1)
    assert at_two.nll == pytest.approx(plain.nll, abs=0.005)


def test_the_size_of_the_covariance_is_made_up_for_by_the_data_scale() -> None:
    narrow, wide = search_family(problem(3), Categorical()), search_family(problem(3, wide=100.0), Categorical())
    assert wide.data_scale == pytest.approx(100 * narrow.data_scale, rel=1e-4)
    assert wide.output_temperature == pytest.approx(narrow.output_temperature, rel=1e-4)
    assert wide.width == narrow.width


def test_many_labels_give_the_temperature_of_temperature_scaling() -> None:
    gaussians = problem(3, 10_000)
    scaling = TemperatureScaling(nn.Identity()).fit([(gaussians.mean, gaussians.targets)])
    found = search_family(replace(gaussians, covariances=gaussians.covariances[:1]), Categorical(), ratios=[1e-3])
    assert found.temperature == pytest.approx(scaling.temperature, rel=5e-3)


def test_few_labels_leave_the_temperature_near_its_prior() -> None:
    ours, theirs = [], []
    for seed in range(20):
        gaussians = problem(3, 20, sure=1.5, seed=100 * seed)
        ours.append(math.log(search_family(gaussians, Categorical()).temperature))
        theirs.append(
            math.log(TemperatureScaling(nn.Identity()).fit([(gaussians.mean, gaussians.targets)]).temperature)
        )
    assert np.std(ours) < 0.6 * np.std(theirs)
    # Labels that a network has all right: the likelihood alone would ask for a temperature of zero.
    gaussians = problem(3, 20, sure=1.5)
    right = OutputGaussians(gaussians.mean, gaussians.covariances, gaussians.mean.argmax(1), gaussians.weight, 20)
    assert abs(math.log(search_family(right, Categorical()).temperature) - 0.2) < 2 * 0.5


def test_a_datum_of_weight_two_is_there_twice_and_one_of_weight_zero_is_not() -> None:
    weight = torch.ones(120, dtype=torch.float64)
    weight[:40], weight[40:60] = 2.0, 0.0
    weighted = problem(3, 120, weight=weight)
    rows = torch.cat([torch.arange(40), torch.arange(40), torch.arange(60, 120)])
    copied = OutputGaussians(
        weighted.mean[rows],
        tuple(c[rows] for c in weighted.covariances),
        weighted.targets[rows],
        torch.ones(140, dtype=torch.float64),
        140,
    )
    one, two = search_family(weighted, Categorical()), search_family(copied, Categorical())
    assert (one.ratio, one.width) == (two.ratio, two.width)
    for name in ("data_scale", "output_temperature", "temperature", "budget", "network_nll", "temperature_nll", "nll"):
        assert getattr(one, name) == pytest.approx(getattr(two, name), rel=1e-6), name
    # Copies that are told apart look like more data than they are.
    assert one.standard_error > two.standard_error


@pytest.mark.parametrize("link", ["mc", "probit", "pairwise", "bridge"])
def test_every_link_is_tuned_for_itself(link: str) -> None:
    found = search_family(problem(3), Categorical(), link=link)
    assert found.tried[-1][3] <= found.budget or found.deterministic
    assert found.nll != search_family(problem(3), Categorical()).nll
    if link == "mc":
        many = problem(12)
        assert search_family(many, Categorical(), link=link) == search_family(many, Categorical())


def test_a_width_that_nobody_can_afford_leaves_temperature_scaling() -> None:
    """All variance at one example in a hundred, of which the network is rightly sure: every width costs more than the budget."""
    gaussians = problem(3, 2000, sure=1.0)
    mean, spread = gaussians.mean.clone(), torch.zeros(2000, 1, 1, dtype=torch.float64)
    mean[:20] = 4 * nn.functional.one_hot(gaussians.targets[:20], 3).double()
    spread[:20] = 1.0
    eye = torch.eye(3, dtype=torch.float64)
    covariances = tuple(spread * eye / (1 + r) for r in RATIOS)
    found = search_family(OutputGaussians(mean, covariances, gaussians.targets, gaussians.weight, 2000), Categorical())
    assert found.deterministic
    assert len(found.tried) == 20
    assert found.output_temperature == found.temperature
    assert found.nll == found.temperature_nll
    # Under such a data scale next to nothing is left of the variance.
    assert float((covariances[-1] / found.data_scale).max()) < 1e-6


@pytest.mark.parametrize(
    ("difference", "error", "deterministic", "said"),
    [
        (
            0.0005,
            0.001,
            False,
            "The labels cannot tell how wide the posterior should be, so a fixed rule sets its width",
        ),
        (
            -0.01,
            0.001,
            False,
            "The posterior predicts the labels better than the temperature alone, by more than chance",
        ),
        (0.003, 0.001, False, "slightly worse than the temperature alone; the rule accepts that"),
        (0.0, 0.0, True, "No posterior was as good as the temperature alone"),
    ],
)
def test_what_it_says(difference: float, error: float, deterministic: bool, said: str) -> None:
    found = ValidationResult(
        0.001, 2.0, 10.0, 0.01, 1.3, deterministic, 1234, 10, 0.5, 0.4, 0.4 + difference, difference, error, 0.002, 1.5
    )
    assert said in str(found)
    assert "of 1,234 validation labels: 0.5000 by the network alone, 0.4000 with a temperature" in str(found)


def test_the_cheapest_temperature_is_the_vertex_of_a_parabola() -> None:
    asked: list[float] = []

    def cost(best: float) -> Callable[[float], float]:
        def bowl(t: float) -> float:
            asked.append(t)
            return 0.3 + 2 * (math.log(t) - best) ** 2

        return bowl

    for best in (-0.4, 0.0, 0.33, 0.69):
        asked.clear()
        found = _cheapest_temperature(cost(best), 0.5, 2.0)
        assert found == (pytest.approx(0.3), pytest.approx(math.exp(best)))
        assert asked[:5] == pytest.approx([2.0 ** (k / 2 - 1) for k in range(5)])
        assert len(asked) == 6
    # At an end that is the best there is nothing to go to beyond it, and a flat cost has no vertex.
    assert _cheapest_temperature(lambda t: t, 0.5, 2.0) == (0.5, pytest.approx(0.5))
    assert _cheapest_temperature(lambda t: -math.log(t), 0.5, 2.0) == (pytest.approx(-math.log(2)), pytest.approx(2.0))
    assert _cheapest_temperature(lambda t: 1.0, 0.5, 2.0) == (1.0, pytest.approx(0.5))
