"""Tuning on validation labels through the facade: what is reported, what does not matter, and data that say little."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import aftermap as am
from aftermap.baselines import TemperatureScaling
from aftermap.errors import DataError, InputError, StatisticalWarning
from aftermap.laplace import GridResult, Laplace, ValidationResult
from aftermap.likelihoods import Categorical
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, generator, mlp, new_classes, normal, trained, untrained


@cache
def network(count: int = 120, decay: float = 0.05) -> nn.Module:
    return trained(mlp(), classes(count), nn.CrossEntropyLoss(reduction="sum"), decay=decay, steps=60)


def fitted(structure: str = "kron", **options: Any) -> Laplace:
    laplace = Laplace(network(), options.pop("likelihood", "classification"), structure=structure, **options)
    return laplace.fit(classes(120), generator=generator(), progress=False)


def losses(laplace: Laplace, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return -laplace.predict(x, **options).log_prob(y)


def undecided(laplace: Laplace, x: Tensor, y: Tensor, samples: int = 100) -> float:
    """What the mean loss may differ by where rounding decides at which positions "auto" draws: those with a variance next to its limit."""
    cov = laplace.predict(x).latent_cov
    assert cov is not None
    variance = cov.diagonal(dim1=1, dim2=2)
    largest = (variance[:, :, None] + variance[:, None] - 2 * cov).amax((1, 2))
    draws, closed = (losses(laplace, x, y, link=link, samples=samples) for link in ("mc", "pairwise"))
    return float((draws - closed).abs()[(largest - 0.5).abs() < 0.005].sum()) / len(x)


@pytest.mark.parametrize(
    ("structure", "options"),
    [
        ("kron", {}),
        ("full", {"temperature": 3.0, "data_scale": 0.4}),
        ("diagonal", {"likelihood": Categorical(temperature=2.0)}),
        ("low_rank", {"prior_precision": 7.0}),
        ("kron", {"params": "last_layer", "damping": "factored"}),
    ],
)
def test_the_numbers_of_the_report_are_those_of_the_predictive(structure: str, options: dict[str, Any]) -> None:
    laplace, ((x, y),) = fitted(structure, **options), new_classes(150)
    before = ModelSnapshot.of(laplace.model)
    state = torch.get_rng_state()
    assert laplace.tune([(x, y)]) is laplace
    check_unchanged(laplace.model, before)
    assert torch.equal(state, torch.get_rng_state())
    found = laplace.tuning
    assert isinstance(found, ValidationResult)
    assert laplace.data_scale == found.data_scale
    assert laplace.output_temperature == found.output_temperature
    assert {float(v) for v in laplace.prior_precision.values()} == {found.precision}
    assert found.nll == pytest.approx(float(losses(laplace, x, y).mean()), abs=1e-6)
    plain = -laplace.predictor.map_prediction(x).log_prob(y).mean()
    assert found.network_nll == pytest.approx(float(plain), rel=1e-9)
    scaling = TemperatureScaling(laplace.model, temperature=found.temperature)
    assert found.temperature_nll == pytest.approx(float(-scaling.predict(x).log_prob(y).mean()), rel=1e-6)
    # The width is what it is called: the mean variance of a contrast of the logits over T.
    latent = laplace.predict(x).latent_cov
    contrast = (latent.diagonal(dim1=1, dim2=2).sum(1) - latent.sum((1, 2)) / 4) / 3
    assert float(contrast.mean()) == pytest.approx(found.width, rel=1e-6)


@pytest.mark.parametrize(
    ("k", "dtype", "link"),
    [
        *((k, torch.float32, "auto") for k in (1, 2, 3, 10, 100)),
        *((k, torch.float64, link) for k in (1, 3) for link in ("auto", "mc", "probit")),
    ],
)
def test_the_link_that_is_tuned_is_the_one_that_predicts(k: int, dtype: torch.dtype, link: str) -> None:
    """One logit and many classes: what tuning reports of the labels is what predictions give of them, to the rounding of draws."""
    x = normal(400, 3, seed=1)
    y = (x @ normal(3, k, seed=2) + 0.5 * normal(400, k, seed=3)).to(dtype)
    y = (y > 0).to(dtype) if k == 1 else y.argmax(1)
    x = x.to(dtype)
    model = mlp(3, 4, k).to(dtype)
    loss = nn.BCEWithLogitsLoss(reduction="sum") if k == 1 else nn.CrossEntropyLoss(reduction="sum")
    trained(model, [(x[:250], y[:250])], loss, decay=0.05, steps=20)
    fit = Laplace(model, "binary" if k == 1 else "classification").fit([(x[:250], y[:250])], progress=False)
    laplace = fit.tune([(x[250:], y[250:])], link=link)
    found = laplace.tuning
    assert not found.deterministic
    both = link == "auto" and 1 < k <= 10  # draws at some positions, a closed form at the others
    state = torch.get_rng_state()
    room = 1e-5 + (undecided(laplace, x[250:], y[250:]) if both else 0.0)
    assert found.nll == pytest.approx(float(losses(laplace, x[250:], y[250:], link=link).mean()), abs=room)
    plain = -laplace.predictor.map_prediction(x[250:]).log_prob(y[250:]).double().mean()
    assert found.network_nll == pytest.approx(float(plain), abs=1e-5)
    # Predictions without a generator are the same every time, and leave the global one alone.
    assert torch.equal(state, torch.get_rng_state())
    one, two = (laplace.predict(x[250:], link=link) for _ in range(2))
    assert torch.equal(one.mean, two.mean)
    # As many draws as are asked for.
    few = laplace.tune([(x[250:], y[250:])], link=link, samples=20).tuning
    expected = float(losses(laplace, x[250:], y[250:], link=link, samples=20).mean())
    room = 1e-5 + (undecided(laplace, x[250:], y[250:], 20) if both else 0.0)
    assert few.nll == pytest.approx(expected, abs=room)


def test_where_a_tuning_starts_does_not_matter() -> None:
    data = new_classes(150)
    first = fitted().tune(data)
    for other in (
        fitted(data_scale=30.0, prior_precision=0.01).tune(data),
        fitted().tune(method="evidence").tune(data),
        fitted().narrow(7.0).tune(data),
        fitted().tune(data).tune(data),
    ):
        assert other.tuning.tried == first.tuning.tried
        assert_close(other.predict(data[0][0]).latent_cov, first.predict(data[0][0]).latent_cov, rtol=1e-9, atol=1e-12)


def test_the_evidence_stays_that_of_the_data_as_they_are() -> None:
    laplace = fitted(data_scale=2.0)
    laplace.tune(new_classes(150))
    found = laplace.tuning
    ratio = laplace.data_scale / laplace.fitted.narrowing
    assert ratio == pytest.approx(2.0)
    by_hand = fitted(data_scale=2.0, prior_precision=2.0 * found.ratio)
    assert_close(laplace.log_evidence(), by_hand.log_evidence(), rtol=1e-9, atol=0)


def test_a_later_tuning_by_the_evidence_forgets_what_labels_said() -> None:
    laplace = fitted().tune(new_classes(150)).tune(method="evidence")
    fresh = fitted().tune(method="evidence")
    assert (laplace.output_temperature, laplace.data_scale) == (1.0, pytest.approx(1.0))
    for layer, value in fresh.prior_precision.items():
        assert float(laplace.prior_precision[layer]) == pytest.approx(float(value), rel=1e-2)


def test_the_order_of_the_data_and_their_batches_do_not_matter() -> None:
    ((x, y),) = new_classes(150)
    first = fitted().tune([(x, y)]).tuning
    order = torch.randperm(150, generator=generator(4))
    for size in (150, 7, 1):
        data = list(zip(x[order].split(size), y[order].split(size), strict=True))
        found = fitted().tune(data).tuning
        assert [row[:2] for row in found.tried] == [row[:2] for row in first.tried]
        for name in ("data_scale", "output_temperature", "temperature", "nll", "standard_error"):
            assert getattr(found, name) == pytest.approx(getattr(first, name), rel=1e-6), name


def test_more_than_a_thousand_examples_are_sampled() -> None:
    ((x, y),) = new_classes(3000)
    laplace = fitted()
    found = laplace.tune([(x, y)]).tuning
    assert found.n_data == 1000
    assert laplace.tune([(x, y)]).tuning == found
    other = laplace.tune([(x, y)], generator=generator(5)).tuning
    assert other.n_data == 1000
    assert other.network_nll != found.network_nll
    # Not the first thousand: the sample is of all data.
    backwards = [(x[i : i + 500], y[i : i + 500]) for i in range(0, 3000, 500)]
    last = laplace.tune(backwards).tuning
    with torch.no_grad():
        first_thousand = float(nn.functional.cross_entropy(network()(x[:1000]), y[:1000]))
        everything = float(nn.functional.cross_entropy(network()(x), y))
    assert abs(last.network_nll - everything) < 0.15
    assert last.network_nll != pytest.approx(first_thousand, rel=1e-9)


class Tokens(nn.Module):
    """The same network at every position."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_positions_without_a_label_are_not_there() -> None:
    ((x, y),) = new_classes(180)
    sequences, labels = x.reshape(30, 6, 3), y.reshape(30, 6).clone()
    missing = torch.rand(30, 6, generator=generator(1)) < 0.3
    labels[missing] = -100
    train = [(a.reshape(-1, 4, 3), b.reshape(-1, 4)) for a, b in classes(120)]
    laplace = Laplace(Tokens(network()).eval(), "classification").fit(train, progress=False)
    found = laplace.tune([(sequences, labels)]).tuning
    kept = ~missing.reshape(-1)
    alone = Laplace(network(), "classification", approach="expand").fit(classes(120), progress=False)
    expected = alone.tune([(x[kept], y[kept])]).tuning
    assert found.n_data == expected.n_data == int(kept.sum())
    assert found.network_nll == pytest.approx(expected.network_nll, rel=1e-9)
    assert found.temperature == pytest.approx(expected.temperature, rel=1e-6)
    # The curvature of both fits is the same: positions are data.
    assert (found.width, found.ratio) == (expected.width, expected.ratio)
    assert found.data_scale == pytest.approx(expected.data_scale, rel=1e-6)
    with pytest.raises(DataError, match="no labelled position"):
        laplace.tune([(sequences, torch.full_like(labels, -100))])


def test_weights_of_examples_come_with_the_batches() -> None:
    ((x, y),) = new_classes(150)
    weight = torch.ones(150, dtype=torch.float64)
    weight[:50] = 2.0
    one = fitted().tune([(x, y, weight)]).tuning
    two = fitted().tune([(torch.cat([x, x[:50]]), torch.cat([y, y[:50]]))]).tuning
    assert one.data_scale == pytest.approx(two.data_scale, rel=1e-6)
    assert one.nll == pytest.approx(two.nll, rel=1e-6)


def test_binary_and_several_labels_at_once() -> None:
    x = normal(400, 3, seed=1)
    y = (x @ normal(3, 2, seed=2) + 0.5 * normal(400, 2, seed=3) > 0).double()
    model = trained(mlp(3, 5, 2), [(x[:200], y[:200])], nn.BCEWithLogitsLoss(reduction="sum"), decay=0.05, steps=60)
    laplace = Laplace(model, "binary").fit([(x[:200], y[:200])], progress=False).tune([(x[200:], y[200:])])
    found = laplace.tuning
    assert isinstance(found, ValidationResult)
    assert found.n_data == 400
    # Of each label, where `log_prob` is of both together.
    predicted, plain = laplace.predict(x[200:]), laplace.predictor.map_prediction(x[200:])
    assert found.nll == pytest.approx(float(-predicted.log_prob(y[200:]).mean()) / 2, abs=1e-9)
    assert found.network_nll == pytest.approx(float(-plain.log_prob(y[200:]).mean()) / 2, rel=1e-9)
    with pytest.raises(
        InputError, match="link 'bridge' does not exist for Bernoulli; use one of 'auto', 'mc', 'probit'"
    ):
        laplace.tune([(x[200:], y[200:])], link="bridge")


# Data that say little, or something else than what is asked


class Constant(nn.Module):
    """Answers that do not depend on the input, from parameters that do not matter."""

    def __init__(self, logits: Tensor, slope: float) -> None:
        super().__init__()
        self.inner, self.slope = nn.Linear(3, len(logits)).double(), slope
        self.register_buffer("logits", logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits + self.slope * (self.inner(x) - self.inner(x).detach())


def test_outputs_that_say_nothing() -> None:
    """All classes alike, whatever the input: no temperature has an influence."""
    model = Constant(torch.zeros(4, dtype=torch.float64), 1.0).eval()
    laplace = Laplace(model, "classification").fit(classes(120), progress=False).tune(new_classes(150))
    found = laplace.tuning
    assert found.temperature == 1.0
    assert found.network_nll == pytest.approx(math.log(4))
    assert found.nll <= math.log(4) + 0.02
    assert bool(torch.isfinite(laplace.predict(new_classes(9)[0][0]).mean).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_posterior_without_variance_leaves_temperature_scaling(dtype: torch.dtype) -> None:
    model = Constant(torch.tensor([2.0, 0.0, -1.0, 0.5], dtype=torch.float64), 0.0).to(dtype).eval()
    train, held = ([(x.to(dtype), y) for x, y in data] for data in (classes(120), new_classes(150)))
    laplace = Laplace(model, "classification").fit(train, progress=False)
    with pytest.warns(StatisticalWarning, match="the posterior has no variance on the validation inputs"):
        laplace.tune(held)
    found = laplace.tuning
    assert found.deterministic
    assert found.width == 0.0
    assert found.tried == ()
    assert found.nll == found.temperature_nll
    assert "its variance is zero: it adds nothing here" in str(found)
    scaling = TemperatureScaling(model, temperature=laplace.output_temperature)
    x = held[0][0]
    assert_close(laplace.predict(x).mean, scaling.predict(x).mean, rtol=1e-6, atol=1e-7)
    assert float(laplace.predict(x).epistemic.abs().max()) < 1e-6
    assert 1e-6 < laplace.data_scale < 1e6
    assert math.isfinite(float(laplace.log_evidence()))


def test_one_class_and_five_examples_are_told() -> None:
    ((x, y),) = new_classes(150)
    laplace = fitted()
    with pytest.warns(StatisticalWarning, match="all validation labels are of one class"):
        laplace.tune([(x[y == 2], y[y == 2])])
    assert laplace.tuning.n_classes == 1
    assert 0.3 < laplace.output_temperature < 5
    with pytest.warns(StatisticalWarning, match="only 5 validation labels, so that the temperature .* mostly a guess"):
        laplace.tune([(x[:5], y[:5])])
    assert laplace.tuning.n_data == 5
    assert 0.3 < laplace.output_temperature < 5
    assert bool(torch.isfinite(laplace.predict(x).mean).all())


def test_validation_data_that_were_trained_on_are_told() -> None:
    laplace = fitted()
    with pytest.warns(StatisticalWarning, match="120 of 120 validation inputs are among the first 120 training inputs"):
        laplace.tune(classes(120))
    (x, y), ((new, labels),) = classes(120)[0], new_classes(100)
    laplace.tune([(torch.cat([new, x[:2]]), torch.cat([labels, y[:2]]))])  # two may be equal by chance
    laplace.tune([(new, labels)])


def regression() -> tuple[Laplace, list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """A fit of a small regression, its data, and others."""
    x = normal(140, 3, seed=1)
    y = x @ normal(3, 1, seed=2) + 0.3 * normal(140, 1, seed=3)
    data = [(x[:80], y[:80])]
    model = trained(mlp(3, 4, 1), data, nn.MSELoss(reduction="sum"), decay=0.01, steps=30)
    return Laplace(model, "regression", structure="full").fit(data, progress=False), data, (x[80:], y[80:])


def test_the_same_is_told_of_regressions_and_of_the_grid() -> None:
    laplace, train, (x, y) = regression()
    trained_on = "80 of 80 validation inputs are among the first 80 training inputs"
    with pytest.warns(StatisticalWarning, match=trained_on):
        laplace.tune(train)
    for grid in (laplace, fitted()):
        data = train if grid is laplace else classes(120)
        with pytest.warns(StatisticalWarning, match="validation data are training data"):
            grid.tune(data, precisions=[1.0], scales=[1.0, 10.0])
    with pytest.warns(
        StatisticalWarning, match="only 5 validation examples, so that the noise .* is mostly what training"
    ):
        laplace.tune([(x[:5], y[:5])])
    with pytest.warns(StatisticalWarning, match="there is only 1 validation example, so that"):
        laplace.tune([(x[:1], y[:1])])
    with pytest.warns(StatisticalWarning, match="all validation targets are the same"):
        laplace.tune([(x, y[:1].expand_as(y))])
    laplace.tune([(x, y)])


def test_a_regression_leaves_out_an_input_whose_output_is_not_finite() -> None:
    laplace, train, (x, y) = regression()
    far = x.clone()
    far[0, 0] = -50.0
    broken = Laplace(Broken(laplace.model, -40.0).eval(), "regression", structure="full").fit(train, progress=False)
    with pytest.warns(StatisticalWarning, match="not finite for 1 of 60 validation examples, which are left out"):
        broken.tune([(far, y)])
    expected = laplace.tune([(x[1:], y[1:])]).tuning
    assert broken.tuning.noise == pytest.approx(expected.noise, rel=1e-9)
    assert broken.tuning.n_labels == expected.n_labels == 59
    with pytest.raises(DataError, match="not finite for 60 of 60 validation examples. Look at these inputs"):
        broken.tune([(far[:1].expand(60, 3), y)])


def test_every_grid_point_equally_good_is_told_once() -> None:
    model = Constant(torch.tensor([2.0, 0.0, -1.0, 0.5], dtype=torch.float64), 0.0).eval()
    laplace = Laplace(model, "classification").fit(classes(120), progress=False)
    with pytest.warns(
        StatisticalWarning, match="all 156 grid points are equally good on 150 validation examples"
    ) as told:
        laplace.tune(new_classes(150), method="grid")
    assert len(told) == 1
    assert (laplace.data_scale, laplace.tuning.precision) == (1.0, 1.0)


@untrained
def test_no_variance_is_told_without_labels() -> None:
    model = Constant(torch.tensor([2.0, 0.0, -1.0, 0.5], dtype=torch.float64), 0.0).eval()
    laplace = Laplace(model, "classification").fit(classes(120), progress=False)
    with pytest.warns(
        StatisticalWarning, match="no variance on the training inputs: the network's outputs do not depend"
    ):
        laplace.tune()
    x = new_classes(9)[0][0]
    assert_close(laplace.predict(x).mean, laplace.predictor.map_prediction(x).mean)


def test_a_warning_points_to_the_call() -> None:
    ((x, y),) = new_classes(5)
    for data in ([(x, y)], classes(120)):
        with pytest.warns(StatisticalWarning) as said:
            fitted().tune(data)
        assert [w.filename for w in said] == [__file__] * len(said)


class Broken(nn.Module):
    """Not a number for inputs whose first feature is below a threshold."""

    def __init__(self, inner: nn.Module, below: float) -> None:
        super().__init__()
        self.inner, self.below = inner, below

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] < self.below, torch.nan, self.inner(x))


def test_an_input_whose_output_is_not_finite_is_left_out_and_told() -> None:
    ((x, y),) = new_classes(150)
    low = float(x[:, 0].sort().values[:2].mean())  # between the smallest two
    data = [b for b in classes(120) if bool((b[0][:, 0] > low).all())] or [
        (a[a[:, 0] > low], b[a[:, 0] > low]) for a, b in classes(120)
    ]
    laplace = Laplace(Broken(network(), low).eval(), "classification").fit(data, progress=False)
    with pytest.warns(StatisticalWarning, match="not finite for 1 of 150 validation examples, which are left out"):
        laplace.tune(list(zip(x.split(40), y.split(40), strict=True)))
    assert laplace.tuning.n_data == 149
    expected = (
        Laplace(network(), "classification").fit(data, progress=False).tune([(x[x[:, 0] > low], y[x[:, 0] > low])])
    )
    assert laplace.tuning.nll == pytest.approx(expected.tuning.nll, rel=1e-6)
    laplace.model.below = 0.0
    before = laplace.posterior
    with pytest.raises(DataError, match=r"not finite for \d+ of 150 validation examples. Look at these inputs"):
        laplace.tune([(x, y)])
    assert laplace.posterior is before


def test_saving_keeps_the_temperature_and_the_predictions_bit_by_bit(tmp_path: Path) -> None:
    laplace, ((x, y),) = fitted(), new_classes(150)
    laplace.tune([(x, y)])
    again = am.load(laplace.save(tmp_path / "posterior"), network())
    assert again.output_temperature == laplace.output_temperature
    assert again.data_scale == laplace.data_scale
    for kind in ("linearised", "sampling"):
        one, two = (la.predict(x, kind=kind, generator=generator(1)) for la in (laplace, again))
        assert torch.equal(one.mean, two.mean)
        assert torch.equal(one.epistemic, two.epistemic)
    assert torch.equal(again.log_evidence(), laplace.log_evidence())
    assert again.tune([(x, y)]).tuning == laplace.tuning


def test_what_takes_the_grid_instead() -> None:
    data = new_classes(60)
    quiet = {"precisions": [1.0], "scales": [1.0, 10.0]}
    assert isinstance(fitted().tune(data, **quiet).tuning, GridResult)
    assert isinstance(fitted().tune(data, method="grid", **quiet).tuning, GridResult)
    assert isinstance(fitted().tune(data, kind="sampling", samples=5, **quiet).tuning, GridResult)
    assert isinstance(fitted().tune(data, method="validation").tuning, ValidationResult)
    counts = Laplace(mlp(3, 5, 2), "counts").fit([(normal(30, 3), torch.ones(30, 2).double())], progress=False)
    assert isinstance(counts.tune([(normal(9, 3), torch.ones(9, 2).double())], **quiet).tuning, GridResult)


def test_bad_input() -> None:
    laplace = fitted()
    before = laplace.posterior
    with pytest.raises(DataError, match="data are empty"):
        laplace.tune([])
    with pytest.raises(InputError, match="link is 'softmax'"):
        laplace.tune(new_classes(60), link="softmax")
    with pytest.raises(InputError, match="samples=0 must be a whole number of at least 1"):
        laplace.tune(new_classes(60), samples=0)
    with pytest.raises(DataError):
        laplace.tune([(normal(9, 3), torch.full((9,), 7))])
    with pytest.raises(InputError, match="needs validation data"):
        laplace.tune(method="validation")
    assert laplace.posterior is before
    free = Laplace(network(), "classification", structure="matrix_free").fit(classes(), progress=False)
    with pytest.raises(InputError, match="needs a Gaussian posterior in blocks, got a MatrixFreePosterior"):
        free.tune(new_classes(60))
