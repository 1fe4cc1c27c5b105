"""am.fit: the choice by cost, one tuning, one check, and what is said when the check fails."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.batches import iterate
from aftermap.errors import DataError, InputError, StatisticalWarning
from aftermap.laplace import (
    Laplace,
    SelfCheck,
    SelfConsistentResult,
    ValidationResult,
    auto,
    check_predictive,
    estimate_costs,
    self_check,
)
from aftermap.likelihoods import Categorical, Gaussian
from aftermap.predictive import Prediction
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, gaussian_nll, mlp, new_classes, normal, regression, seeded, trained

mistrusted = pytest.mark.filterwarnings("ignore:the posterior that was found without held-out labels")


@cache
def classifier(hidden: int = 5, count: int = 300) -> nn.Module:
    return trained(mlp(3, hidden, 4), classes(count), nn.CrossEntropyLoss(reduction="sum"), steps=60)


def test_small_networks_get_the_full_matrix() -> None:
    model = classifier()
    before = ModelSnapshot.of(model)
    laplace = am.fit(model, classes(300), verbose=False)
    check_unchanged(model, before)
    assert laplace.structure == "full"
    assert laplace.report.chosen.structure == "full"
    assert laplace.predict(classes()[0][0]).mean.shape == (20, 4)


def test_without_validation_data_the_report_holds_the_tuning_and_its_check() -> None:
    laplace = am.fit(classifier(), classes(300), verbose=False)
    report = laplace.report
    assert isinstance(laplace.tuning, SelfConsistentResult)
    assert report.tuning is laplace.tuning
    assert report.check is laplace.tuning.check
    assert report.check.passed
    structure, tuning, check, likelihood = str(report).splitlines()
    assert likelihood.startswith("likelihood: classification, inferred from the targets")
    assert structure == f"structure: {report.chosen}"
    assert f"{tuning}; {report.check.message}" == f"tuning: {laplace.tuning}"
    assert check == f"check passed: {report.check.message}"
    with pytest.warns(DeprecationWarning, match="FitReport.checks is now one check: FitReport.check"):
        assert report.checks == [(str(report.chosen), report.check)]


def test_with_validation_data_the_check_is_on_these() -> None:
    held_out = new_classes()
    laplace = am.fit(classifier(), classes(300), held_out, verbose=False)
    report = laplace.report
    assert isinstance(report.tuning, ValidationResult)
    assert isinstance(report.check, SelfCheck)
    assert report.check.n_data == 200
    x, y = (torch.cat(t) for t in zip(*held_out, strict=True))
    losses = [p.log_prob(y).neg() for p in (laplace.predictor.map_prediction(x), laplace.predict(x))]
    assert report.check.map_nll == pytest.approx(float(losses[0].mean()), rel=1e-9)
    assert report.check.map_nll == pytest.approx(report.tuning.network_nll, rel=1e-9)
    # The draws of the predictive are others than those of the tuning.
    assert report.check.bayes_nll == pytest.approx(float(losses[1].mean()), abs=0.01)
    assert report.check.difference == report.check.bayes_nll - report.check.map_nll
    assert "check passed: accuracy" in str(report)


def test_larger_networks_get_kronecker_factors_and_validation_tunes_the_predictive() -> None:
    laplace = am.fit(classifier(300, 60), classes(), new_classes(60), verbose=False)
    assert laplace.structure == "kron"
    assert isinstance(laplace.tuning, ValidationResult)


@mistrusted
def test_memory_and_time_limits_decide() -> None:
    model = classifier(300, 60)
    costs = {(c.structure, c.params): c for c in estimate_costs(model, classes(), Categorical())}
    kron, last = costs["kron", "all"], costs["kron", "last_layer"]
    assert kron.bytes > last.bytes
    assert costs["full", "all"].bytes > 10 * kron.bytes
    between = auto._choose(list(costs.values()), None, (kron.bytes + last.bytes) / 2, None)
    assert (between.structure, between.params) in {("kron", "last_layer"), ("diagonal", "all")}
    laplace = am.fit(model, classes(), memory_limit=last.bytes, verbose=False)
    assert laplace.posterior.names == ("2.weight", "2.bias") or laplace.structure == "diagonal"


def test_nothing_fits() -> None:
    with pytest.raises(InputError, match=r"nothing fits into 0.0 GB; the smallest is .* Raise memory_limit="):
        am.fit(classifier(), classes(), memory_limit=10.0, verbose=False)
    with pytest.raises(InputError, match=r"and 1e-09 s; the smallest is"):
        am.fit(classifier(), classes(), time_limit=1e-9, verbose=False)


@mistrusted
def test_a_structure_can_be_asked_for() -> None:
    assert am.fit(classifier(), classes(), structure="diagonal", verbose=False).structure == "diagonal"
    with pytest.raises(
        InputError, match="structure='kfra' cannot be chosen here; allowed are diagonal, ekfac, full, kron"
    ):
        am.fit(classifier(), classes(), structure="kfra", verbose=False)


def test_a_subnetwork_is_not_for_this_function() -> None:
    with pytest.raises(InputError, match="for a subnetwork use Laplace"):
        am.fit(classifier(), classes(), params=am.Subnetwork(3), verbose=False)  # type: ignore[arg-type]


def test_one_line_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    am.fit(classifier(), classes(300), verbose=True)
    said = capsys.readouterr()
    line = next(x for x in (said.out + said.err).splitlines() if "alternatives" in x)
    assert line.startswith("full, 44 parameters: about")
    assert "kron" in line
    assert "last_layer" in line


def test_silent_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    am.fit(classifier(), classes(300), verbose=False)
    said = capsys.readouterr()
    assert said.out + said.err == ""


@pytest.mark.filterwarnings("ignore:the best point lies at the edge")
def test_a_regression_takes_the_cheaper_form_of_the_full_matrix_and_both_are_equal() -> None:
    data = regression(40)
    model = trained(mlp(1, 501, 1), data, nn.MSELoss(reduction="sum"), decay=0.1, steps=50)  # 1,504 weights
    dual, primal = (am.fit(model, data, likelihood="regression", structure=s, verbose=False) for s in (None, "full"))
    assert (dual.structure, primal.structure) == ("subset", "full")
    assert dual.report.tuning.noise == pytest.approx(primal.report.tuning.noise, rel=1e-6)
    x = torch.linspace(-3, 3, 50, dtype=torch.float64)[:, None]
    torch.testing.assert_close(dual.predict(x).total, primal.predict(x).total, rtol=1e-5, atol=0)
    # As many data as weights have no dual form that is cheaper.
    costs = dual.report.costs
    more = [replace(c, n_rows=1600) for c in costs]
    assert auto._choose(more, None, 2**32, None, regression=True).structure == "full"


def test_regression() -> None:
    data = regression(noise=0.3)
    model = trained(mlp(1, 6, 1), data, gaussian_nll(0.3))
    laplace = am.fit(model, data, likelihood="regression", verbose=False)
    assert float(laplace.hyperparameters.noise) == pytest.approx(0.3, rel=0.3)
    held = am.fit(model, "regression", data, regression(noise=0.3, seed=14), verbose=False)
    assert held.report.check.passed
    assert held.report.check.map_accuracy is None


def forced(monkeypatch: pytest.MonkeyPatch, precision: float) -> None:
    """Tuning that chooses a prior that is far too wide."""

    def tune(self: Laplace, val_loader: object = None, **options: object) -> Laplace:
        return self.with_prior(precision)

    monkeypatch.setattr(Laplace, "tune", tune)


def test_a_predictive_that_is_worse_than_the_network_is_warned_of_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rule, one check, one warning: the posterior stays what the rule made it."""
    forced(monkeypatch, 1e-5)
    with pytest.warns(
        StatisticalWarning, match=r"worse than the network on the validation data \(accuracy .*last_layer"
    ):
        laplace = am.fit(classifier(20, 60), classes(), new_classes(), structure="kron", verbose=False)
    assert {float(v) for v in laplace.prior_precision.values()} == {1e-5}
    assert laplace.data_scale == 1.0
    assert laplace.posterior.names == tuple(dict(laplace.model.named_parameters()))
    assert not laplace.report.check.passed
    assert "check FAILED: accuracy" in str(laplace.report)


def test_the_warning_without_validation_data_is_that_of_the_tuning() -> None:
    """Said to be a twentieth of a datum each, the data determine more of the posterior than they can."""
    with pytest.warns(StatisticalWarning, match="found without held-out labels is not to be trusted") as said:
        laplace = am.fit(classifier(5, 60), classes(), data_scale=0.05, verbose=False)
    assert len(said) == 1
    assert not laplace.report.check.passed
    assert "of the data determine more of the posterior than a single datum can" in str(laplace.report)


def test_the_check_knows_a_good_posterior_from_a_bad_one() -> None:
    model = classifier()
    batches = list(iterate(classes(), device=torch.device("cpu")))
    good = Laplace(model, "classification", prior_precision=10.0).fit(classes(300), progress=False)
    report = check_predictive(good, batches)
    assert not report.collapsed
    x, y = (torch.cat(t) for t in zip(*classes(), strict=True))
    assert report.n_data == 60
    assert report.map_accuracy == pytest.approx(float((model(x).argmax(1) == y).double().mean()))
    assert report.map_nll == pytest.approx(float(nn.functional.cross_entropy(model(x), y).detach()))
    bad = good.with_prior(1e-7)
    assert check_predictive(bad, batches, link="mc").bayes_confidence < report.bayes_confidence
    assert "accuracy" in report.message
    assert check_predictive(good, batches, limit=10).n_data == 20
    with pytest.raises(DataError, match="no labelled data"):
        check_predictive(good, [])


def test_a_changed_answer_or_two_are_chance() -> None:
    targets = torch.zeros(50, dtype=torch.long)
    right = torch.tensor([0.9, 0.1], dtype=torch.float64).expand(50, 2)

    def flipped(count: int) -> Prediction:
        p = right.clone()
        p[:count] = torch.tensor([0.49, 0.51], dtype=torch.float64)
        zero = torch.zeros(50, dtype=torch.float64)
        return Prediction("classification", p, zero, zero, zero)

    assert not self_check._compare(flipped(0), flipped(3), targets).collapsed
    assert self_check._compare(flipped(0), flipped(8), targets).collapsed


def test_the_check_of_binary_and_regression() -> None:
    x = normal(40, 3, seed=1)
    y = (x[:, :1] > 0).double()
    binary = Laplace(mlp(3, 5, 1), "binary").fit([(x, y)], progress=False)
    report = check_predictive(binary, list(iterate([(x, y)], device=torch.device("cpu"))))
    wanted = ((binary.model(x) > 0) == (y > 0.5)).double().mean()
    assert report.map_accuracy == pytest.approx(float(wanted))
    wide = Laplace(mlp(3, 5, 1), Gaussian(0.1), prior_precision=1e-6).fit([(x[:2], y[:2])], progress=False)
    assert check_predictive(wide, list(iterate([(x, wide.model(x).detach())], device=torch.device("cpu")))).collapsed


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_token_outputs() -> None:
    x = normal(40, 6, 3, seed=1)
    y = (x @ normal(3, 4, seed=2) + normal(40, 6, 4, seed=3)).argmax(-1)
    y[0, :2] = -100
    model = trained(
        seeded(Tokens),
        [(x, y)],
        lambda f, t: nn.functional.cross_entropy(f.flatten(0, 1), t.flatten(), reduction="sum"),
    )
    laplace = am.fit(model, [(x, y)], verbose=False)
    assert laplace.report.check.passed
    # 240 positions, of which two have no label.
    assert laplace.report.check.n_data == 238
    assert laplace.predict(x).mean.shape == (40, 6, 4)


def test_what_print_and_a_notebook_show() -> None:
    laplace = am.fit(classifier(), classes(300), verbose=False)
    lines = str(laplace).splitlines()
    assert lines[0] == f"Laplace: 300 data, {laplace.posterior.n_params} uncertain parameters"
    assert [line.split()[0] for line in lines[1:4]] == ["network", "likelihood", "structure"]
    assert "classification" in lines[2]
    assert "check passed" in str(laplace)
    assert len(lines) < 15
    assert max(map(len, lines[:5])) < 80
    shown = laplace.report._repr_html_()
    assert shown.startswith("<table>")
    assert str(laplace.report.chosen) in shown.replace("&#x27;", "'")
    assert "not fitted" in str(am.Laplace(classifier(), "classification"))


class _Broken(nn.Module):
    """Not a number for inputs whose first feature is far below all others."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] < -40, torch.nan, self.inner(x))


def test_one_validation_input_without_an_answer_does_not_spoil_the_fit() -> None:
    ((x, y),) = new_classes(60)
    far = x.clone()
    far[7, 0] = -50.0
    with pytest.warns(
        StatisticalWarning, match="not finite for 1 of 60 validation examples, which are left out"
    ) as told:
        laplace = am.fit(_Broken(classifier()).eval(), classes(300), [(far, y)], verbose=False)
    assert len(told) == 1
    assert laplace.report.check.n_data == 59
    assert laplace.report.check.message.endswith("; 1 left out, whose outputs are not finite")
    assert bool(torch.isfinite(laplace.predict(x).mean).all())


def test_labels_of_one_class_do_not_make_a_network_one_at_chance() -> None:
    ((x, y),) = new_classes(200)
    with pytest.warns(StatisticalWarning, match="all validation labels are of one class") as told:
        laplace = am.fit(classifier(), classes(300), [(x[y == 2], y[y == 2])], verbose=False)
    assert len(told) == 1
    assert laplace.report.check.passed
