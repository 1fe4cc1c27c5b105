"""The scikit-learn estimators: its own checks, exact cases, units, copies, and what is said of bad input."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks
from torch import nn

from aftermap.errors import DataError, InputError, ShapeError
from aftermap.integrations.network import Standardised, mlp, moments
from aftermap.integrations.sklearn import BayesianClassifier, BayesianRegressor
from aftermap.testing.predictor import ModelSnapshot, check_unchanged

QUICK: dict[str, Any] = {"hidden": (8,), "rounds": 2, "epochs": 20, "lr": 0.1}
X, Y = make_regression(60, 3, n_informative=3, noise=5.0, random_state=0)


def linear(features: int, outputs: int) -> nn.Module:
    return nn.Linear(features, outputs, dtype=torch.float64)


# scikit-learn's own checks; none is expected to fail. It skips those that need pandas or another array library.


@parametrize_with_checks([BayesianClassifier(**QUICK), BayesianRegressor(**QUICK)])
def test_estimator_checks(estimator: Any, check: Any) -> None:
    with np.errstate(all="raise"):
        assert check(estimator) is None


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [BayesianClassifier(), BayesianRegressor()], ids=lambda e: type(e).__name__)
def test_estimator_checks_as_it_comes(estimator: Any) -> None:
    failed = [r for e, c in estimator_checks_generator(estimator) for r in [_outcome(e, c)] if r is not None]
    assert failed == []


def _outcome(estimator: Any, check: Any) -> str | None:
    try:
        check(estimator)
    except Exception as error:
        return None if type(error).__name__ == "SkipTest" else f"{check}: {error}"
    return None


# Exact cases


def test_a_linear_network_is_bayesian_ridge_regression() -> None:
    """The evidence of a linear model is the same whoever maximises it; only the bias has no prior there."""
    centred, targets = X - X.mean(0), (Y - Y.mean())[:, None] @ np.ones((1, 1))

    def weights_only(features: int, outputs: int) -> nn.Module:
        return nn.Linear(features, outputs, bias=False, dtype=torch.float64)

    ours = BayesianRegressor(weights_only, standardise=False, epochs=250, rounds=5, lr=10.0, random_state=0)
    ours.fit(centred, targets[:, 0])
    flat = {"alpha_1": 0.0, "alpha_2": 0.0, "lambda_1": 0.0, "lambda_2": 0.0}
    theirs = BayesianRidge(fit_intercept=False, max_iter=3000, tol=1e-12, **flat).fit(centred, targets[:, 0])
    new = np.random.RandomState(1).normal(size=(9, 3))
    mean, std = ours.predict(new, return_std=True)
    mean_theirs, std_theirs = theirs.predict(new, return_std=True)
    np.testing.assert_allclose(ours.noise_[0], theirs.alpha_**-0.5, rtol=1e-3)
    np.testing.assert_allclose(mean, mean_theirs, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(std, std_theirs, rtol=1e-3)


def test_a_covariance_holds_the_deviations_and_the_noise() -> None:
    model = BayesianRegressor(**QUICK, random_state=0).fit(X, Y)
    mean, std = model.predict(X[:7], return_std=True)
    mean_too, covariance = model.predict(X[:7], return_cov=True)
    np.testing.assert_allclose(mean, mean_too)
    np.testing.assert_allclose(np.diag(covariance), std**2)
    without = covariance - model.noise_[0] ** 2 * np.eye(7)
    assert np.linalg.eigvalsh(without).min() > -1e-8 * np.abs(without).max()
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() > 0
    two = BayesianRegressor(**QUICK, random_state=0).fit(X, np.stack([Y, -3 * Y], 1))
    mean, covariance = two.predict(X[:7], return_cov=True)
    assert mean.shape == (7, 2)
    assert covariance.shape == (7, 7, 2)
    np.testing.assert_allclose(
        two.predict(X[:7], return_std=True)[1] ** 2, np.stack([np.diag(covariance[..., k]) for k in (0, 1)], 1)
    )


@pytest.mark.parametrize("scale, shift", [(1e-6, 0.0), (1e5, -3e6)])
def test_units_of_inputs_and_targets_do_not_matter(scale: float, shift: float) -> None:
    one = BayesianRegressor(**QUICK, random_state=0).fit(X, Y)
    other = BayesianRegressor(**QUICK, random_state=0).fit(X * 7 + 2, Y * scale + shift)
    (mean, std), (mean_too, std_too) = one.predict(X, True), other.predict(X * 7 + 2, True)
    np.testing.assert_allclose((mean_too - shift) / scale, mean, rtol=1e-5, atol=1e-5 * Y.std())
    np.testing.assert_allclose(std_too / scale, std, rtol=1e-5)
    np.testing.assert_allclose(other.noise_ / scale, one.noise_, rtol=1e-5)


def test_weights_count_like_copies() -> None:
    weight = np.random.RandomState(0).randint(0, 4, len(X))
    weighted = BayesianRegressor(**QUICK, random_state=0).fit(X, Y, sample_weight=weight)
    repeated = BayesianRegressor(**QUICK, random_state=0).fit(X.repeat(weight, 0), Y.repeat(weight))
    for a, b in zip(weighted.predict(X, True), repeated.predict(X, True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert weighted.laplace_.n_data == weight.sum()


def test_moments_of_weighted_columns() -> None:
    values, weight = torch.tensor([[1.0, 5.0], [2.0, 5.0], [4.0, 5.0]]), torch.tensor([1.0, 2.0, 1.0])
    mean, scale = moments(values, weight)
    torch.testing.assert_close(mean, torch.tensor([2.25, 5.0]))
    torch.testing.assert_close(scale, torch.tensor([np.sqrt(4.75 / 4), 1.0], dtype=torch.float32))
    net = Standardised(nn.Identity(), (mean, scale), (mean, scale))
    torch.testing.assert_close(net(values), values)


# Use


def test_labels_of_any_kind_in_a_pipeline_and_a_search() -> None:
    bunch = load_iris()
    names = bunch.target_names[bunch.target]
    train_x, test_x, train_y, test_y = train_test_split(bunch.data, names, random_state=0, stratify=names)
    pipeline = make_pipeline(MinMaxScaler(), BayesianClassifier(**QUICK, random_state=0))
    search = GridSearchCV(
        pipeline, {"bayesianclassifier__structure": ["kron", "diagonal"]}, cv=2, scoring="neg_log_loss"
    ).fit(train_x, train_y)
    assert search.score(test_x, test_y) > -0.35
    assert (search.predict(test_x) == test_y).mean() > 0.9
    best = search.best_estimator_[-1]
    assert list(best.classes_) == ["setosa", "versicolor", "virginica"]
    probabilities = search.predict_proba(test_x)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    far = search.predict_proba(test_x + 50.0)
    assert far.max(1).mean() < 1


def test_the_predictive_has_both_kinds_of_uncertainty() -> None:
    x = np.linspace(-1, 1, 40)[:, None]
    model = BayesianRegressor(**QUICK, random_state=0).fit(x, np.sin(3 * x[:, 0]))
    found = model.predictive(np.array([[0.0], [4.0]]))
    assert float(found.epistemic[1]) > 5 * float(found.epistemic[0])
    torch.testing.assert_close(found.aleatoric[:, 0], torch.full((2,), model.noise_[0] ** 2, dtype=torch.float64))


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
@pytest.mark.parametrize("kind", [BayesianClassifier, BayesianRegressor])
def test_copies_predict_the_same(kind: Any, way: str) -> None:
    y = Y if kind is BayesianRegressor else (Y > 0).astype(int)
    model = kind(**QUICK, random_state=0).fit(X, y)
    ask = (lambda m: m.predict(X, True)[1]) if kind is BayesianRegressor else (lambda m: m.predict_proba(X))
    before = ask(model)
    if way == "pickle":
        file = io.BytesIO()
        pickle.dump(model, file)
        again = pickle.loads(file.getvalue())
    else:
        again = copy.deepcopy(model)
    np.testing.assert_array_equal(ask(again), before)
    assert clone(again).get_params()["epochs"] == QUICK["epochs"]


def test_random_state_decides_everything_and_the_global_seed_nothing() -> None:
    state = torch.get_rng_state()
    fits = []
    for place, seed in enumerate((3, 3, 4)):
        torch.manual_seed(place)
        fits.append(BayesianRegressor(linear, **QUICK, random_state=seed).fit(X, Y))
        fits.append(BayesianRegressor(**QUICK, batch_size=16, random_state=seed).fit(X, Y))
        assert torch.initial_seed() == place
    torch.set_rng_state(state)
    (a, b), (c, d), (e, f) = [[m.predict(X) for m in fits[i : i + 2]] for i in (0, 2, 4)]
    np.testing.assert_array_equal(a, c)
    np.testing.assert_array_equal(b, d)
    assert np.abs(a - e).max() > 0
    assert np.abs(b - f).max() > 0


def test_a_module_of_ones_own_is_copied_and_may_have_batch_norm_and_dropout() -> None:
    own = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 2))
    before = ModelSnapshot.of(own)
    model = BayesianClassifier(own, epochs=30, rounds=2, random_state=0).fit(X, Y > 0)
    assert model.score(X, Y > 0) > 0.9
    assert model.predict_proba(X).dtype == np.float64
    check_unchanged(own, before)


def test_images_go_into_a_network_of_ones_own() -> None:
    images = np.random.RandomState(0).rand(30, 4, 5)
    y = images.mean((1, 2)) > 0.5
    net = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(12, 2))
    model = BayesianClassifier(net, epochs=10, rounds=1, random_state=0).fit(images, y)
    assert model.predict(images[:6]).shape == (6,)
    with pytest.raises(ValueError, match="Found array with dim 3"):
        BayesianClassifier().fit(images, y)


def test_the_default_network_starts_from_its_generator() -> None:
    one, two = (mlp(3, (5, 4), 2, "relu", torch.Generator().manual_seed(s), torch.float64) for s in (0, 0))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    first = next(one.parameters())
    assert float(first.detach().abs().max()) <= 3**-0.5


def test_a_fixed_prior_is_kept() -> None:
    model = BayesianRegressor(**QUICK, prior_precision=3, random_state=0).fit(X, Y)
    assert {float(v) for v in model.laplace_.prior_precision.values()} == {3.0}


@pytest.mark.parametrize(
    "settings, error, match",
    [
        ({"epochs": 0}, InputError, "epochs=0 must be a whole number of at least 1"),
        ({"rounds": True}, InputError, "rounds=True must be a whole number"),
        ({"prior_precision": "guess"}, InputError, "prior_precision='guess' must be a positive .*'evidence'"),
        ({"prior_precision": -1.0}, InputError, "prior_precision=-1.0 must be"),
        ({"structure": "krn"}, InputError, "structure='krn' is not known; allowed are .*'kron'.*or None"),
        ({"activation": "step"}, InputError, "activation='step' is not known; allowed are 'gelu'"),
        ({"hidden": (0,)}, InputError, r"hidden=\(0,\) must hold whole numbers above 0"),
        ({"module": 3}, InputError, "module=3 must be None, a torch module, or a function"),
        ({"module": lambda f, o: "net"}, InputError, "this gave a str"),
        ({"module": nn.Linear(3, 4)}, ShapeError, r"gave shape \(2, 4\) for 2 examples; these targets need \(2, 1\)"),
        ({"module": nn.Identity(), "standardise": False}, ShapeError, r"gave shape \(2, 3\)"),
        ({"lr": 1e200}, DataError, "the training loss is .* Lower lr=1e"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        BayesianRegressor(**{**QUICK, **settings}).fit(X, Y)


def test_bad_data_are_named() -> None:
    with pytest.raises(ValueError, match="weight"):  # by scikit-learn itself, or by us where it is older
        BayesianRegressor().fit(X, Y, sample_weight=np.zeros(len(X)))
    with pytest.raises(DataError, match="one class only .*'cat'.* needs at least two classes"):
        BayesianClassifier().fit(X, np.full(len(X), "cat"))
    model = BayesianRegressor(**QUICK, random_state=0).fit(X, Y)
    with pytest.raises(InputError, match="not for both"):
        model.predict(X, return_std=True, return_cov=True)
