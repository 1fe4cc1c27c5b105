"""The facade: scales, incremental fits, independence, changed weights, and the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aftermap as am
from aftermap.errors import AftermapError, InputError, NotFittedError
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian, HeteroscedasticGaussian
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, generator, mlp, normal, regression, seeded, untrained

STRUCTURES = ["kron", "ekfac", "diagonal", "full", "low_rank"]
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def fitted(structure: str = "kron", **options: object) -> Laplace:
    laplace = Laplace(mlp(), "classification", structure=structure, rank=9, **options)
    return laplace.fit(classes(), generator=generator(), progress=False)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("damping", ["exact", "factored"])
def test_scale_and_precision_together_divide_the_covariance(structure: str, damping: str) -> None:
    if damping == "factored":
        structure = "kron"
    one = fitted(structure, prior_precision=0.7, damping=damping)
    other = fitted(structure, prior_precision=0.7 * 5, data_scale=5.0, damping=damping)
    torch.testing.assert_close(other.posterior.to_dense(), 5 * one.posterior.to_dense(), **CLOSE)
    x = classes()[0][0]
    torch.testing.assert_close(other.predict(x).latent_cov, one.predict(x).latent_cov / 5, **CLOSE)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_temperature_divides_the_likelihood(structure: str) -> None:
    one = fitted(structure, temperature=4.0)
    other = fitted(structure, data_scale=0.25)
    torch.testing.assert_close(one.posterior.to_dense(), other.posterior.to_dense(), rtol=0, atol=0)
    torch.testing.assert_close(one.log_evidence(), other.log_evidence(), rtol=0, atol=0)
    # A warm likelihood says less: the posterior is wider, not narrower.
    x = classes()[0][0]
    assert bool((one.predict(x).latent_var > fitted(structure).predict(x).latent_var).all())


def test_data_scale_is_a_number_of_copies() -> None:
    twice = Laplace(mlp(), "classification").fit([*classes(), *classes()], progress=False)
    torch.testing.assert_close(twice.posterior.to_dense(), fitted(data_scale=2.0).posterior.to_dense(), **CLOSE)
    torch.testing.assert_close(twice.log_evidence(), fitted(data_scale=2.0).log_evidence(), **CLOSE)


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
def test_an_incremental_fit_equals_one_fit(structure: str) -> None:
    first, second = classes()
    whole = fitted(structure)
    parts = Laplace(mlp(), "classification", structure=structure).fit([first], progress=False)
    assert parts.fit([second], update=True, progress=False) is parts
    assert parts.n_data == whole.n_data == 60
    torch.testing.assert_close(parts.posterior.to_dense(), whole.posterior.to_dense(), **CLOSE)
    torch.testing.assert_close(parts.log_evidence(), whole.log_evidence(), **CLOSE)
    again = whole.tune(method="evidence").predict(first[0]).latent_cov
    found = parts.tune(method="evidence").predict(first[0]).latent_cov
    torch.testing.assert_close(found, again, rtol=1e-4, atol=1e-8)


def test_an_update_keeps_the_tuned_prior_and_a_fit_begins_anew() -> None:
    first, second = classes()
    laplace = Laplace(mlp(), "classification", prior_precision=0.7).fit([first], progress=False).tune(method="evidence")
    tuned = {k: float(v) for k, v in laplace.prior_precision.items()}
    laplace.fit([second], update=True, progress=False)
    assert {k: float(v) for k, v in laplace.prior_precision.items()} == tuned
    laplace.fit([second], progress=False)
    assert {float(v) for v in laplace.prior_precision.values()} == {0.7}
    assert laplace.n_data == 40


def test_low_rank_factors_add_up() -> None:
    first, second = classes()
    whole, parts = (Laplace(mlp(), "classification", structure="low_rank", rank=44) for _ in range(2))
    whole.fit([first, second], generator=generator(), progress=False)
    for batch in (first, second):
        parts.fit([batch], update=batch is second, generator=generator(), progress=False)
    torch.testing.assert_close(parts.posterior.to_dense(), whole.posterior.to_dense(), rtol=1e-6, atol=1e-7)


def test_an_update_that_cannot_be_exact_is_refused() -> None:
    laplace = fitted("ekfac")
    before = laplace.posterior.to_dense()
    with pytest.raises(
        AftermapError, match="structure='ekfac' cannot be updated: two such fits do not add up. Fit on all data at once"
    ):
        laplace.fit(classes()[:1], update=True, progress=False)
    torch.testing.assert_close(laplace.posterior.to_dense(), before, rtol=0, atol=0)
    assert laplace.n_data == 60


def test_several_fits_of_one_model_are_independent() -> None:
    model, x = mlp(), classes()[0][0]
    one = Laplace(model, "classification").fit(classes(), progress=False)
    before = one.predict(x).latent_cov
    two = Laplace(model, "classification", structure="diagonal", prior_precision=7.0).fit(classes()[:1], progress=False)
    two.tune(method="evidence")
    regress = Laplace(model, Gaussian(0.3)).fit([(normal(9, 3), normal(9, 4))], progress=False)
    regress.tune(method="evidence")
    torch.testing.assert_close(one.predict(x).latent_cov, before, rtol=0, atol=0)
    assert two.n_data == 20
    assert regress.n_data == 9


def test_batches_of_any_size_give_the_same() -> None:
    x, y = (torch.cat(t) for t in zip(*classes(), strict=True))
    split = Laplace(mlp(), "classification").fit(list(zip(x.split(7), y.split(7), strict=True)), progress=False)
    torch.testing.assert_close(split.posterior.to_dense(), fitted().posterior.to_dense(), **CLOSE)


def test_changed_weights_are_refused_everywhere() -> None:
    laplace, x = fitted(), classes()[0][0]
    laplace.predict(x)
    with torch.no_grad():
        laplace.model[0].weight[1, 2] += 1e-12
    message = r"weights have changed since the fit \(0.weight\)"
    for call in (
        lambda: laplace.predict(x),
        lambda: laplace.predict(x, kind="sampling", samples=2),
        lambda: laplace.joint(x),
        lambda: laplace.function_samples(x, 2),
        lambda: laplace.variance_by_layer(x),
        lambda: laplace.tune(classes()),
        lambda: laplace.fit(classes(), update=True, progress=False),
    ):
        with pytest.raises(InputError, match=message):
            call()
    assert laplace.fit(classes(), progress=False).predict(x).mean.shape == (20, 4)


def test_a_failed_fit_keeps_the_old_one() -> None:
    laplace, x = fitted(), classes()[0][0]
    before = laplace.predict(x).latent_cov
    bad = [(x, torch.full((20,), 9))]
    with pytest.raises(AftermapError):
        laplace.fit(bad, progress=False)
    torch.testing.assert_close(laplace.predict(x).latent_cov, before, rtol=0, atol=0)
    assert laplace.n_data == 60


@untrained
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_model_is_never_touched(structure: str) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 4)))
    model[0].weight.requires_grad_(False)
    model[3].bias.grad = torch.ones(4, dtype=torch.float64)
    before, x = ModelSnapshot.of(model), classes()[0][0]
    laplace = Laplace(model, "classification", structure=structure, rank=5).fit(
        classes(), generator=generator(), progress=False
    )
    assert "0.weight" not in laplace.posterior.names
    laplace.tune()
    laplace.predict(x)
    laplace.predict(x, kind="sampling", samples=2)
    laplace.predict(x[:2].clone().requires_grad_(), differentiable=True)
    laplace.joint(x[:2])
    laplace.function_samples(x, 2)
    laplace.variance_by_layer(x)
    laplace.log_evidence()
    check_unchanged(model, before)
    for bad in (x[:, :2], x * float("inf")):
        with pytest.raises(AftermapError):
            laplace.predict(bad)
    check_unchanged(model, before)


@untrained
def test_fitting_under_inference_mode() -> None:
    model, data = mlp(), classes()
    with torch.inference_mode():
        laplace = Laplace(model, "classification").fit(data, progress=False).tune()
        found = laplace.predict(data[0][0]).latent_cov
    wanted = fitted().tune().predict(classes()[0][0]).latent_cov
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert laplace.tune(method="lbfgs") is laplace


@untrained
def test_everything_in_one_call_under_inference_mode() -> None:
    model, data = mlp(), classes()
    wanted = am.fit(model, "classification", data, verbose=False).predict(data[0][0]).latent_cov
    with torch.inference_mode():
        found = am.fit(model, "classification", data, verbose=False).predict(data[0][0]).latent_cov
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_what_it_says() -> None:
    laplace = Laplace(mlp(), "classification")
    assert "not fitted" in repr(laplace)
    assert "60 data, 44 parameters" in repr(laplace.fit(classes(), progress=False))


@pytest.mark.parametrize("call", ["predict", "joint", "variance_by_layer"])
def test_not_fitted(call: str) -> None:
    laplace = Laplace(mlp(), "classification")
    with pytest.raises(NotFittedError, match=r"has not been fitted yet: call fit\(train_loader\) first"):
        getattr(laplace, call)(normal(2, 3))


def test_everything_else_needs_a_fit_too() -> None:
    laplace = Laplace(mlp(), "classification")
    for act in (
        laplace.tune,
        laplace.log_evidence,
        lambda: laplace.sample(2),
        lambda: laplace.ensemble(2),
        lambda: laplace.with_prior(2.0),
        lambda: laplace.save("nowhere"),
        lambda: laplace.prior_precision,
        lambda: laplace.n_data,
        lambda: laplace.fit(classes(), update=True, progress=False),
    ):
        with pytest.raises(NotFittedError, match="has not been fitted yet"):
            act()


def test_last_layer_is_found_by_running_the_network() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body, self.unused = nn.Linear(5, 4), nn.Linear(3, 5), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(x)))

    laplace = Laplace(seeded(Backwards), "classification", params="last_layer").fit(classes(), progress=False)
    assert laplace.posterior.names == ("head.weight", "head.bias")


@untrained
def test_selections() -> None:
    for params, names in (
        (["0"], ("0.weight", "0.bias")),
        (r".*bias", ("0.bias", "2.bias")),
        (lambda n, p: p.dim() == 2, ("0.weight", "2.weight")),
    ):
        laplace = Laplace(mlp(), "classification", params=params).fit(classes(), progress=False)
        assert laplace.posterior.names == names
        assert laplace.tune().predict(classes()[0][0]).mean.shape == (20, 4)


def test_sequences_of_another_length() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)))
    x, y = normal(6, 2, 3, seed=1), torch.arange(12).reshape(6, 2) % 4
    laplace = Laplace(model, "classification").fit([(x, y)], progress=False)
    laplace.predict(x)
    longer = normal(3, 7, 3, seed=2)
    one = laplace.predict(longer).latent_cov
    torch.testing.assert_close(one[:, 4:6], laplace.predict(longer[:, 4:6]).latent_cov, **CLOSE)
    assert laplace.predict(longer[:1, :1]).mean.shape == (1, 1, 4)


@untrained
def test_a_predicted_noise_and_several_labels() -> None:
    x = normal(30, 3, seed=1)
    likelihood = HeteroscedasticGaussian()
    spread = Laplace(mlp(3, 5, 4), likelihood).fit([(x, normal(30, 2, seed=2))], progress=False).tune()
    found = spread.predict(x)
    assert found.mean.shape == (30, 2)
    assert bool((found.total > found.epistemic).all())
    labels = Laplace(mlp(3, 5, 4), "binary").fit([(x, (normal(30, 4, seed=3) > 0).double())], progress=False).tune()
    assert labels.predict(x).mean.shape == (30, 4)


@untrained
def test_counts_and_binary() -> None:
    x = normal(30, 3, seed=1)
    counts = Laplace(mlp(3, 5, 2), "counts").fit([(x, torch.ones(30, 2, dtype=torch.float64))], progress=False)
    assert counts.tune().predict(x).kind == "counts"
    binary = Laplace(mlp(3, 5, 1), "binary").fit([(x, (x[:, :1] > 0).double())], progress=False).tune()
    assert binary.predict(x).mean.shape == (30, 1)
    assert regression()[0][0].shape == (20, 1)
