"""The temperature of a likelihood: the same as a network with divided outputs, and learned by the evidence."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import aftermap as am
from aftermap.errors import InputError, StatisticalWarning
from aftermap.laplace import Laplace
from aftermap.laplace.marglik import TEMPERATURES, TemperatureSearch, train_by_evidence
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, at_temperature, temperature_of
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import Data, classes, generator, mlp, normal, regression, seeded, trained, untrained

T = 1.7
quiet = pytest.mark.filterwarnings("ignore:the network is not at a mode")


class Divided(nn.Module):
    """A network whose outputs are divided by a number."""

    def __init__(self, net: nn.Module, by: float):
        super().__init__()
        self.net, self.by = net, by

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / self.by


def binary(count: int = 50) -> Data:
    return [(x, (y[:, None] == torch.tensor([0, 2])).double()) for x, y in classes(count)]


CASES: dict[str, tuple[type[Any], Any, int]] = {"classes": (Categorical, classes, 4), "binary": (Bernoulli, binary, 2)}


def pair(case: str, **options: Any) -> tuple[Laplace, Laplace]:
    """With a temperature, and with divided outputs."""
    cls, data, outputs = CASES[case]
    net = mlp(outputs=outputs)
    warm = Laplace(net, cls(temperature=T), prior_precision=0.8, **options).fit(data(), progress=False)
    other = Laplace(Divided(net, T).eval(), cls(), prior_precision=0.8, **options).fit(data(), progress=False)
    return warm, other


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diagonal", "low_rank"])
@pytest.mark.parametrize("case", CASES)
@untrained
def test_it_divides_the_outputs(case: str, structure: str) -> None:
    warm, other = pair(case, structure=structure, rank=32)  # what is left out is far below the tolerance
    assert_close(warm.posterior.to_dense(), other.posterior.to_dense(), rtol=1e-8, atol=1e-9)
    assert_close(warm.log_evidence(), other.log_evidence(), rtol=1e-10, atol=0)
    warm.tune(), other.tune()
    x = normal(7, 3, seed=8)
    for link in ("auto", "mc", "probit", *(("pairwise", "bridge") if case == "classes" else ())):
        a, b = (la.predict(x, link=link, generator=generator(3)) for la in (warm, other))
        for name in ("mean", "epistemic", "aleatoric", "latent_mean", "latent_cov"):
            assert_close(getattr(a, name), getattr(b, name), rtol=1e-7, atol=1e-10)
        if link in ("auto", "mc"):
            assert_close(a.interval(), b.interval(), rtol=1e-7, atol=1e-10)
    assert_close(
        warm.predict(x, kind="sampling", samples=5, generator=generator(4)).mean,
        other.predict(x, kind="sampling", samples=5, generator=generator(4)).mean,
        rtol=1e-7,
        atol=1e-10,
    )


@pytest.mark.parametrize("case", CASES)
def test_the_other_posteriors_divide_too(case: str) -> None:
    x = normal(2, 3, seed=8)
    warm, other = pair(case, structure="matrix_free")
    a, b = warm.predict(x), other.predict(x)
    assert_close(a.mean, b.mean, rtol=1e-6, atol=1e-8)
    assert_close(a.latent_var, b.latent_var, rtol=1e-6, atol=1e-8)
    cls, data, outputs = CASES[case]
    # The Hessian-free one fine-tunes the loss itself.
    net = trained(mlp(outputs=outputs), data(), lambda f, y: cls(temperature=T).nll(f, y).sum(), decay=0.8)
    found = [
        am.HessianFree(model, likelihood, prior_precision=0.8).fit(data()).predict(x, generator=generator(3))
        for model, likelihood in ((net, cls(temperature=T)), (Divided(net, T).eval(), cls()))
    ]
    assert_close(found[0].mean, found[1].mean, rtol=1e-4, atol=1e-6)
    assert_close(found[0].latent_var, found[1].latent_var, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_the_slope_of_the_evidence(case: str) -> None:
    """d/dlog T = Σ ∂ log p − ½ Σ tr(V_n ∂Λ_n), against finite differences of new fits."""
    cls, data, outputs = CASES[case]
    net = mlp(outputs=outputs)

    def evidence(log_t: float) -> float:
        made = Laplace(net, cls(temperature=math.exp(log_t)), structure="full", prior_precision=0.8)
        return float(made.fit(data(), progress=False).log_evidence())

    at, h = math.log(T), 1e-4
    measured = (evidence(at + h) - evidence(at - h)) / (2 * h)
    la = Laplace(net, cls(temperature=T), structure="full", prior_precision=0.8).fit(data(), progress=False)
    slope = 0.0
    for x, y in data():
        f = net(x).detach()
        latent = la.predict(x)
        assert latent.latent_cov is not None
        cov = latent.latent_cov * T**2
        curved = [cls(temperature=math.exp(at + e)).hessian(f) for e in (h, -h)]
        # −log p(y | f/T) changes with log T as −f·∇.
        slope += float((f * cls(temperature=T).gradient(f, y)).sum())
        slope -= 0.5 * float((cov * (curved[0] - curved[1])).sum()) / (2 * h)
    assert measured == pytest.approx(slope, rel=1e-5)
    assert abs(measured) > 0.1


def test_the_last_layer_and_its_precision_can_say_the_same() -> None:
    # Why temperature=False is the default: (T, W, τ) and (1, W/T, τT²) are one model.
    net, scaled = mlp(), mlp()
    with torch.no_grad():
        scaled[2].weight /= T
        scaled[2].bias /= T
    for structure in ("full", "kron"):
        warm, plain = (
            Laplace(
                m, Categorical(temperature=t), structure=structure, prior_precision={"0": 0.8, "2": 0.8 * (T / t) ** 2}
            )
            for m, t in ((net, T), (scaled, 1.0))
        )
        warm.fit(classes(), progress=False), plain.fit(classes(), progress=False)
        assert_close(warm.log_evidence(), plain.log_evidence(), rtol=1e-10, atol=0)


def at_other(la: Laplace, factor: float, data: Data, structure: str) -> float:
    """The evidence at another temperature, weights and prior the same."""
    now = temperature_of(la.likelihood)
    assert now is not None
    likelihood = at_temperature(la.likelihood, factor * now)
    made = Laplace(la.model, likelihood, structure=structure, prior_precision=dict(la.posterior.prior.precision))
    return float(made.fit(data, progress=False).log_evidence())


class Loud(nn.Module):
    """A network that is sure of too much: its outputs come out ten times as large."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return 10 * self.net(x)


@quiet
@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("case", CASES)
def test_it_goes_to_the_maximum_of_the_evidence(case: str, structure: str) -> None:
    cls, make, outputs = CASES[case]
    data = make(150)
    # Good weights that stand still: the temperature and the prior alone.
    net = trained(mlp(outputs=outputs), data, lambda f, y: cls().nll(f, y).sum(), decay=0.3)
    options: dict[str, Any] = {"epochs": 8, "lr": 1e-12, "frequency": 1, "prior": "scalar", "structure": structure}
    plain = train_by_evidence(Loud(net).eval(), data, cls(), progress=False, **options)
    found = train_by_evidence(Loud(net).eval(), data, cls(), temperature=True, progress=False, **options)
    assert found.log_evidence > plain.log_evidence + 10
    values = [r.log_evidence for r in found.history]
    assert all(b > a - 1e-6 for a, b in itertools.pairwise(values))
    t = found.best.output_temperature
    assert t is not None
    assert 2 < t < 15
    assert temperature_of(found.laplace.likelihood) == t
    assert found.curves["output_temperature"] == [r.output_temperature for r in found.history]
    assert plain.curves["output_temperature"] == [1.0] * len(plain.history)
    assert float(found.laplace.log_evidence()) == pytest.approx(found.log_evidence, abs=1e-9)
    top = at_other(found.laplace, 1.0, data, structure)
    assert top == pytest.approx(found.log_evidence, abs=1e-6)
    for factor in (0.95, 1.05):
        assert at_other(found.laplace, factor, data, structure) < top


def test_weights_and_temperature_in_turn() -> None:
    options: dict[str, Any] = {"epochs": 400, "lr": 0.03, "frequency": 40, "prior": "scalar", "structure": "kron"}
    found = [
        train_by_evidence(Loud(mlp()), classes(150), "classification", temperature=t, progress=False, **options)
        for t in (False, True)
    ]
    assert found[1].log_evidence > found[0].log_evidence + 2
    assert all(each.stationarity.stationary for each in found)


def test_a_temperature_that_is_not_learned_stays(tmp_path: Path) -> None:
    net = trained(mlp(), classes(), lambda f, y: Categorical(temperature=T).nll(f, y).sum(), decay=0.5)
    found = train_by_evidence(
        net,
        classes(),
        Categorical(temperature=T),
        epochs=200,
        lr=1e-3,
        prior_precision=0.5,
        structure="kron",
        progress=False,
    )
    assert found.best.output_temperature == T
    la = found.laplace
    la.save(tmp_path / "saved")
    again = am.load(tmp_path / "saved", net)
    assert isinstance(again, Laplace)
    assert (
        repr(again.likelihood) == repr(la.likelihood) == f"Categorical(weight=None, ignore_index=-100, temperature={T})"
    )
    x = normal(6, 3, seed=9)
    assert torch.equal(again.predict(x, generator=generator()).mean, la.predict(x, generator=generator()).mean)
    assert torch.equal(again.log_evidence(), la.log_evidence())


@quiet
def test_no_maximum_is_warned_of() -> None:
    # Two groups apart: every smaller T fits better, and the curvature vanishes with it.
    x = torch.cat([0.3 * normal(20, 2) - 1, 0.3 * normal(20, 2) + 1])
    y = torch.arange(2).repeat_interleave(20)
    net = seeded(lambda: nn.Sequential(nn.Linear(2, 2)))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    with pytest.warns(StatisticalWarning, match=r"the temperature went to 0\.05.* no maximum in it; .* separates"):
        found = train_by_evidence(
            net,
            [(x, y)],
            "classification",
            epochs=12,
            lr=1e-9,
            frequency=1,
            temperature=True,
            structure="full",
            progress=False,
        )
    assert found.best.output_temperature == pytest.approx(TEMPERATURES[0])


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), "regression"])
def test_a_likelihood_without_temperature_is_refused(likelihood: str | Likelihood) -> None:
    net = mlp(1, 6, 1)
    before = ModelSnapshot.of(net)
    with pytest.raises(InputError, match="Gaussian has no temperature. A regression has a noise"):
        train_by_evidence(net, regression(), likelihood, temperature=True, progress=False)
    check_unchanged(net, before)


class Told:
    """An approximation whose evidence is a parabola in log T: value + slope · x + bend/2 · x²."""

    def __init__(self, temperature: float, slope: float, bend: float):
        self.likelihood, self.slope, self.bend = Categorical(temperature=temperature), slope, bend

    def log_evidence(self) -> float:
        x = math.log(self.likelihood.temperature)
        return -7.0 + self.slope * x + 0.5 * self.bend * x**2


@pytest.mark.parametrize(("slope", "bend"), [(0.05, -0.5), (-0.05, -0.5), (0.15, -0.5)])
def test_a_search_goes_to_the_top_of_a_parabola(slope: float, bend: float) -> None:
    search = TemperatureSearch()
    best: Any = search.improve(Told(1.0, slope, bend), lambda t: Told(t, slope, bend))  # type: ignore[arg-type, return-value]
    assert math.log(best.likelihood.temperature) == pytest.approx(-slope / bend, abs=1e-9)
    assert search.spread == pytest.approx(abs(slope / bend), rel=1e-6)


@pytest.mark.parametrize("bend", [0.0, 0.4, 3.0])
@pytest.mark.parametrize("slope", [2.0, -2.0])
def test_a_search_goes_on_uphill_where_no_top_is_in_sight(slope: float, bend: float) -> None:
    search = TemperatureSearch()
    best: Any = search.improve(Told(1.0, slope, bend), lambda t: Told(t, slope, bend))  # type: ignore[arg-type, return-value]
    assert math.log(best.likelihood.temperature) == pytest.approx(
        math.copysign(0.6, slope), abs=1e-9
    )  # twice the spread
    assert search.spread == pytest.approx(0.3)
