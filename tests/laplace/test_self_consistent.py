"""Tuning without held-out labels: the fixed point against brute force, and what comes out of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit
from torch import Tensor, nn
from torch.testing import assert_close

import aftermap as am
from aftermap.errors import InputError, StatisticalWarning
from aftermap.laplace import Laplace, SelfConsistentResult
from aftermap.laplace.evidence import EvidenceResult
from aftermap.laplace.latents import OutputGaussians
from aftermap.laplace.self_consistent import Cavities, CavityCheck, averages_curvature, self_consistent_scale
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from aftermap.predictive.latent import normal_points
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import (
    Data,
    classes,
    contrast_root,
    gaussians,
    generator,
    mlp,
    new_classes,
    normal,
    regression,
    trained,
)
from tests.laplace.self_consistent_worker import COUNT, results, run
from tests.processes import from_two_processes

mistrusted = pytest.mark.filterwarnings("ignore:the posterior that was found without held-out labels")


def fixed_point(ratio: Callable[[float], float]) -> float:
    """The c at which the averaged curvature is c times that at the mean, by bisection."""
    return math.exp(brentq(lambda log_c: ratio(math.exp(log_c)) - math.exp(log_c), -2, 5, xtol=1e-10))


# The fixed point


@pytest.mark.parametrize("dimension", [1.0, 3.0])
@pytest.mark.parametrize("sure", [1.0, 5.0])
def test_one_logit_against_quadrature(sure: float, dimension: float) -> None:
    given = gaussians(1, sure=sure, targets=torch.zeros(80, 1, dtype=torch.float64))
    f, v, weight = given.mean[:, 0].numpy(), given.covariances[0][:, 0, 0].numpy(), given.weight.numpy()
    nodes, shares = np.polynomial.hermite_e.hermegauss(150)
    shares = shares / shares.sum()

    def slope(z: np.ndarray) -> np.ndarray:
        return expit(z) * expit(-z)

    def ratio(c: float) -> float:
        z = f[:, None] + np.sqrt(v / (dimension * c))[:, None] * nodes
        return float((weight * v) @ (slope(z) @ shares) / ((weight * v) @ slope(f)))

    c, converged = self_consistent_scale(given, Bernoulli(), dimension)
    assert converged
    assert c == pytest.approx(fixed_point(ratio), rel=0.01)


def test_data_that_a_network_is_sure_of_count_for_more() -> None:
    """Where the curvature at the outputs is nearly zero, that around them is not."""
    c = [
        self_consistent_scale(gaussians(1, sure=0.1, shift=f, targets=torch.ones(80, 1).double()), Bernoulli())[0]
        for f in (0, 3, 8)
    ]
    assert c[0] < 1 < c[1] < c[2]
    assert c[2] > 2


@pytest.mark.parametrize("classes_", [3, 10])
def test_softmax_against_many_draws(classes_: int) -> None:
    given = gaussians(classes_, count=40)
    cov, f = given.covariances[0], given.mean
    drawn = torch.einsum("nij,snj->sni", torch.linalg.cholesky(cov), normal(4000, 40, classes_, seed=9))

    def traces(z: Tensor) -> Tensor:
        p = torch.softmax(z, -1)
        hessian = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        return torch.einsum("...nij,nji->...n", hessian, cov)

    at_mean = float(given.weight @ traces(f))

    def ratio(c: float) -> float:
        parts = [traces(f + part / math.sqrt(c)).sum(0) for part in drawn.split(500)]
        return float(given.weight @ sum(parts)) / len(drawn) / at_mean

    c, converged = self_consistent_scale(given, Categorical())
    assert converged
    assert ratio(c) == pytest.approx(c, rel=0.05)
    # The iteration ends where its own draws agree.
    points = normal_points(32, classes_, fixed=True)
    own = torch.einsum("nij,sj->sni", contrast_root(cov), torch.cat([points, -points])[:, :-1])
    averaged = float(given.weight @ traces(f + own / math.sqrt(c)).mean(0)) / at_mean
    assert averaged == pytest.approx(c, rel=3e-3)


def test_counts_against_the_lognormal_mean() -> None:
    given = gaussians(2, sure=0.5, wide=0.1, targets=torch.ones(80, 2, dtype=torch.float64))
    f, v, weight = given.mean, given.covariances[0].diagonal(dim1=1, dim2=2), given.weight[:, None]

    def ratio(c: float) -> float:
        return float((weight * v * (f + v / (2 * c)).exp()).sum() / (weight * v * f.exp()).sum())

    c, converged = self_consistent_scale(given, Poisson())
    assert converged
    assert c > 1.1  # a rate is convex in its logarithm: its mean is above that of the mean
    assert c == pytest.approx(fixed_point(ratio), rel=2e-3)


def test_counts_with_a_long_tail() -> None:
    """Of a rate whose logarithm has the variance 2, sixty draws miss a tenth."""
    given = gaussians(1, sure=0.5, targets=torch.ones(80, 1, dtype=torch.float64))
    given = replace(given, covariances=(torch.full((80, 1, 1), 6.0, dtype=torch.float64),))
    c, converged = self_consistent_scale(given, Poisson())
    assert converged
    # All data alike: c = exp(v / 2c).
    assert c == pytest.approx(fixed_point(lambda value: math.exp(3.0 / value)), rel=2e-3)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Poisson()])
def test_under_little_variance_the_curvature_is_that_at_the_mean(likelihood: Likelihood) -> None:
    targets = None if isinstance(likelihood, Categorical) else torch.ones(80, 3, dtype=torch.float64)
    c, converged = self_consistent_scale(gaussians(3, sure=1.0, wide=1e-8, targets=targets), likelihood)
    assert converged
    assert c == pytest.approx(1.0, abs=1e-6)


def test_invariances() -> None:
    given = gaussians(4, sure=8.0)
    c, _ = self_consistent_scale(given, Categorical())
    # A covariance that is divided already.
    narrow = replace(given, covariances=(given.covariances[0] / 5,))
    assert self_consistent_scale(given, Categorical(), 5.0)[0] == pytest.approx(
        self_consistent_scale(narrow, Categorical())[0], rel=1e-9
    )
    # A temperature divides outputs.
    warm = replace(given, mean=2 * given.mean, covariances=(4 * given.covariances[0],))
    assert self_consistent_scale(warm, Categorical(temperature=2.0))[0] == pytest.approx(c, rel=1e-9)
    # Weights of classes are weights of examples, and these are copies.
    shares = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    by_class = self_consistent_scale(given, Categorical(weight=shares))[0]
    by_example = replace(given, weight=given.weight * shares[given.targets])
    assert by_class == pytest.approx(self_consistent_scale(by_example, Categorical())[0], rel=1e-9)
    twice = torch.cat([torch.arange(80), torch.arange(30)])
    copied = OutputGaussians(
        given.mean[twice], (given.covariances[0][twice],), given.targets[twice], torch.ones(110).double(), 110
    )
    weighted = replace(given, weight=torch.cat([2 * torch.ones(30), torch.ones(50)]).double())
    assert self_consistent_scale(copied, Categorical())[0] == pytest.approx(
        self_consistent_scale(weighted, Categorical())[0], rel=1e-9
    )
    assert abs(c - 1) > 0.05


def test_where_there_is_nothing_to_average() -> None:
    flat = gaussians(3)
    assert self_consistent_scale(replace(flat, covariances=(0 * flat.covariances[0],)), Categorical()) == (1.0, False)
    certain = replace(
        flat, mean=torch.tensor([1e6, 0.0, 0.0]).double().expand(80, 3), covariances=(1e-9 * flat.covariances[0],)
    )
    assert self_consistent_scale(certain, Categorical()) == (1.0, False)
    counts = replace(
        gaussians(1, targets=torch.ones(80, 1).double()), covariances=(torch.full((80, 1, 1), 1e8).double(),)
    )
    c, converged = self_consistent_scale(counts, Poisson())  # e^(10⁴) is no number
    assert (c, converged) == (1.0, False)


def test_which_likelihoods_it_is_for() -> None:
    assert all(averages_curvature(x) for x in (Categorical(), Bernoulli(), Poisson()))
    assert not averages_curvature(Gaussian(1.0))


# Through the facade


@cache
def network(count: int = 150) -> nn.Module:
    return trained(mlp(), classes(count), nn.CrossEntropyLoss(reduction="sum"), decay=0.1, steps=60)


def fitted(structure: str = "full", **options: object) -> Laplace:
    laplace = Laplace(network(), "classification", structure=structure, **options)
    return laplace.fit(classes(150), generator=generator(), progress=False)


@mistrusted
def test_what_cavities_ask_for_divides_the_covariance_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cavities, "corrected", lambda *_: (3.0, 2.0))
    laplace = fitted("diagonal")
    told = laplace.tune().tuning
    assert isinstance(told, SelfConsistentResult)
    assert told.correction == 3.0
    assert laplace.output_temperature == 2.0
    narrowing = told.dimension * told.curvature * 3.0
    assert laplace.fitted.narrowing == pytest.approx(narrowing)
    assert laplace.data_scale == pytest.approx(narrowing)


@mistrusted
@pytest.mark.parametrize("structure", ["full", "kron", "diagonal", "low_rank"])
def test_the_posterior_agrees_with_the_curvature_that_it_averages_over(structure: str) -> None:
    laplace = fitted(structure, rank=9)
    before, state = ModelSnapshot.of(laplace.model), torch.get_rng_state()
    assert laplace.tune() is laplace
    check_unchanged(laplace.model, before)
    assert torch.equal(state, torch.get_rng_state())
    found = laplace.tuning
    assert isinstance(found, SelfConsistentResult)
    assert found.converged
    assert found.n_data == 150
    # At the posterior that came out, the mean curvature is c times that at the network's outputs.
    x = torch.cat([b[0] for b in classes(150)])
    predicted = laplace.predict(x)
    T = laplace.output_temperature
    f, V = T * predicted.latent_mean, T**2 * predicted.latent_cov * found.correction
    noise = torch.einsum("nij,snj->sni", torch.linalg.cholesky(V + 1e-12 * torch.eye(4)), normal(1500, 150, 4, seed=3))
    curvature = Categorical().hessian(f)
    averaged = sum(Categorical().hessian(f + part) for part in noise) / len(noise)
    assert float((averaged * V).sum() / (curvature * V).sum()) == pytest.approx(found.curvature, rel=0.05)
    # And what is reported is what it has.
    assert (laplace.data_scale, laplace.output_temperature) == (found.data_scale, found.output_temperature)
    assert laplace.fitted.narrowing == pytest.approx(found.dimension * found.curvature * found.correction)
    assert found.data_scale == pytest.approx(found.dimension * found.curvature * found.correction)
    for layer, value in laplace.prior_precision.items():
        assert float(value) == pytest.approx(found.precision[layer])
    ratios = {k: found.precision[k] / (found.data_scale * found.evidence.precision[k]) for k in found.precision}
    assert max(ratios.values()) == pytest.approx(min(ratios.values()), rel=1e-6)
    assert (found.matched is None) == (structure == "full")
    assert found.dimension >= 1
    assert str(found) == f"{found.found}; {found.check.message}"


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (
            {"dimension": 1.91, "curvature": 2.02},
            "the covariance is 3.86 times smaller than the evidence makes it (1.91 to match the effective dimension, 2.02 for data that the "
            "network is sure of)",
        ),
        (
            {"curvature": 0.8, "output_temperature": 0.5},
            "the covariance is 1.25 times larger than the evidence makes it (0.8 for data that the network is unsure of); outputs are divided by "
            "0.5, because the network is less sure than it should be",
        ),
        ({"output_temperature": 2.0}, "the covariance is as the evidence makes it; outputs are divided by 2"),
        (
            {"curvature": 4.0, "correction": 8.0},
            "the covariance is 32 times smaller than the evidence makes it (4 for data that the network is sure of, 8 because training data "
            "that were taken out asked for it)",
        ),
    ],
)
def test_what_was_found_is_told_in_words(numbers: dict[str, float], words: str) -> None:
    check = CavityCheck(0.1, 0.02, 0.0, 90, True, "checked")
    plain = {"output_temperature": 1.0, "curvature": 1.0, "dimension": 1.0}
    found = SelfConsistentResult(
        precision={},
        data_scale=1.0,
        matched=None,
        evidence=EvidenceResult({}, 1.0),
        check=check,
        converged=True,
        n_data=90,
        **{**plain, **numbers},
    )
    assert str(found) == f"without held-out labels: {words}; checked"


def test_a_full_matrix_of_which_no_direction_is_left_out_is_not_matched_and_a_low_rank_is() -> None:
    """What few directions leave to the prior counts as variance that the data would have taken away."""
    x, y = new_classes(1000)[0]

    def nll(laplace: Laplace) -> float:
        return float(-laplace.predict(x, generator=generator()).log_prob(y).mean())

    few = fitted("low_rank", rank=5)
    by_evidence = nll(few.tune(method="evidence"))
    tuned = nll(few.tune())
    assert few.tuning.dimension > 2
    assert tuned < by_evidence - 0.1
    assert fitted("full").tune().tuning.dimension == 1.0


@mistrusted
def test_the_sample_of_a_process_stands_for_all_of_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def looked_at(gaussians: OutputGaussians, *others: object) -> tuple[float, bool]:
        seen.append(gaussians)
        return 1.0, True

    monkeypatch.setattr("aftermap.laplace.tune._TRAINING_INPUTS", 40)
    monkeypatch.setattr("aftermap.laplace.tune.self_consistent_scale", looked_at)
    fitted().tune()
    assert seen[0].n_examples == 40
    assert float(seen[0].weight.sum()) == pytest.approx(150)


def test_a_warm_posterior_is_not_taken_for_one_that_lacks_its_data() -> None:
    """Dividing the log-likelihood by 20 is a wish; counting every datum as a twentieth is a mistake that shows."""
    warm = fitted(temperature=20.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StatisticalWarning)
        wished, mistaken = warm.tune().tuning.check, fitted(data_scale=0.05).tune().tuning.check
    assert wished.invalid == 0
    assert mistaken.invalid > 0


@mistrusted
def test_every_tuning_starts_anew() -> None:
    first = fitted(data_scale=1.5).tune()
    for other in (
        fitted(data_scale=1.5).tune(new_classes(100)).tune(),
        fitted(data_scale=1.5).tune(method="evidence").tune(),
        fitted(data_scale=1.5).narrow(9.0).tune(),
    ):
        assert other.data_scale == pytest.approx(first.data_scale, rel=0.02)
        assert_close(other.log_evidence(), first.log_evidence(), rtol=1e-3, atol=0)


def test_labels_and_batches_in_another_order() -> None:
    x, y = (torch.cat(t) for t in zip(*classes(150), strict=True))
    order = torch.randperm(150, generator=generator(2))
    data = list(zip(x[order].split(7), y[order].split(7), strict=True))
    one, two = fitted().tune(), Laplace(network(), "classification", structure="full").fit(data, progress=False).tune()
    assert one.data_scale == pytest.approx(two.data_scale, rel=1e-4)
    assert one.tuning.check.difference == pytest.approx(two.tuning.check.difference, rel=1e-3)


@mistrusted
@pytest.mark.parametrize("kind", ["binary", "counts"])
def test_binary_and_counts(kind: str) -> None:
    x = normal(200, 3, seed=1)
    signal = x @ normal(3, 2, seed=2)
    if kind == "binary":
        y = (signal + normal(200, 2, seed=3) > 0).double()
        loss: nn.Module = nn.BCEWithLogitsLoss(reduction="sum")
    else:
        y = torch.poisson((0.5 * signal).exp(), generator=generator(4))
        loss = nn.PoissonNLLLoss(reduction="sum")
    model = trained(mlp(3, 5, 2), [(x, y)], loss, decay=0.3, steps=60)
    laplace = Laplace(model, kind, structure="full").fit([(x, y)], progress=False).tune()
    found = laplace.tuning
    assert isinstance(found, SelfConsistentResult)
    assert found.converged
    assert found.check.n_data == 200
    assert math.isfinite(found.check.difference)
    assert bool(torch.isfinite(laplace.predict(x).mean).all())


def test_data_that_are_not_at_hand(tmp_path: Path) -> None:
    expected, streamed = fitted().tune(), fitted()
    loaded = am.load(expected.save(tmp_path / "posterior"), network())
    streamed._fitted = replace(streamed.fitted, data=None)
    for laplace in (loaded, streamed):
        with pytest.warns(StatisticalWarning, match=r"not at hand .*'evidence' takes the place of 'self_consistent'"):
            laplace.tune()
        assert isinstance(laplace.tuning, EvidenceResult)
        before = laplace.posterior
        with pytest.raises(InputError, match=r"not at hand .*tune\(train_loader=..., method='self_consistent'\)"):
            laplace.tune(method="self_consistent")
        assert laplace.posterior is before
        laplace.tune(method="evidence")  # asked for: there is nothing to say
        for found in (laplace.tune(train_loader=classes(150)), laplace.tune(classes(150), method="self_consistent")):
            assert isinstance(found.tuning, SelfConsistentResult)
            assert found.data_scale == pytest.approx(expected.data_scale, rel=1e-3)


def test_a_loaded_posterior_with_its_data_is_tuned_like_the_fit(tmp_path: Path) -> None:
    first = fitted().tune()
    again = am.load(first.save(tmp_path / "posterior"), network(), train_loader=classes(150))
    first.tune(), again.tune()
    assert str(again.tuning) == str(first.tuning)
    for name, values in first.posterior.marginal_variance().items():
        torch.testing.assert_close(again.posterior.marginal_variance()[name], values, rtol=1e-9, atol=0)
    with pytest.raises(InputError, match="train_loader is a generator"):
        am.load(tmp_path / "posterior", network(), train_loader=iter(classes(150)))
    with pytest.raises(InputError, match="train_loader is a generator"):
        again.tune(train_loader=iter(classes(150)))


def test_what_it_is_not_for() -> None:
    numbers = Laplace(mlp(1, 6, 1), "regression").fit(regression(), progress=False)
    with pytest.raises(InputError, match="that of Gaussian does not. Use tune\\(\\) without a method"):
        numbers.tune(method="self_consistent")
    free = Laplace(network(), "classification", structure="matrix_free").fit(classes(150), progress=False)
    with pytest.raises(InputError, match="needs a posterior in blocks, got a MatrixFreePosterior"):
        free.tune(method="self_consistent")


def test_a_posterior_that_is_not_to_be_trusted_is_told_of() -> None:
    # Each datum counted as a twentieth: the posterior is far too wide.
    with pytest.warns(StatisticalWarning, match="is not to be trusted: .* Tune on validation data") as said:
        laplace = fitted(data_scale=0.05).tune()
    assert [w.filename for w in said] == [__file__]
    assert not laplace.tuning.check.passed
    assert laplace.tuning.check.message in str(said[0].message)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@mistrusted
def test_two_processes_equal_one(tmp_path: Path) -> None:
    first, second = from_two_processes(run, tmp_path)
    alone = results(classes(COUNT))
    messages = [bytes(found.pop("message").tolist()).decode() for found in (first, second)]
    assert_close(first, second, rtol=0, atol=0)
    assert_close(first["full"], alone["full"], rtol=1e-6, atol=1e-9)
    assert_close(first["full posterior"], alone["full posterior"], rtol=1e-6, atol=1e-9)
    # The draws of Kronecker factors' effective dimension are each process's own.
    assert_close(first["kron"][-1], alone["kron"][-1], rtol=0.5, atol=0)
    # An error of one is an error of both: neither waits for the other.
    assert "processes failed while looking at training data" in messages[0]
    assert "targets" in messages[1]


# Real data


def digits(count: int) -> tuple[Data, Tensor, Tensor]:
    pytest.importorskip("sklearn")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=generator(1))
    inputs, labels = torch.from_numpy(x / 16).float()[order], torch.from_numpy(y).long()[order]
    return [(inputs[:count], labels[:count])], inputs[count:], labels[count:]


@mistrusted
def test_digits_that_a_network_knows_by_heart() -> None:
    """At data of which it is certain the curvature is nearly zero, and the evidence counts them as none at all."""
    train, x, y = digits(1000)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(800):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(train[0][0]), train[0][1]).backward()
        optimiser.step()
    model.eval().requires_grad_(True).zero_grad(set_to_none=True)
    with torch.no_grad():
        assert float(nn.functional.cross_entropy(model(train[0][0]), train[0][1])) < 0.01
        plain = float(nn.functional.cross_entropy(model(x), y))
    laplace = Laplace(model, "classification").fit(train, progress=False)

    def nll() -> float:
        return float(-laplace.predict(x, generator=generator()).log_prob(y).mean())

    laplace.tune(method="evidence")
    wide, at_train = nll(), laplace.predict(train[0][0]).latent_var.mean()
    laplace.tune()
    assert laplace.tuning.curvature > 1.25
    assert float(laplace.predict(train[0][0]).latent_var.mean()) < 0.8 * float(at_train)
    assert nll() < wide - 0.1
    assert nll() < plain + 0.01
