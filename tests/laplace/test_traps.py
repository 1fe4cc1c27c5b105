"""Defects that other libraries had, each as a regression test of the Laplace layer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from aftermap.errors import AftermapError
from aftermap.laplace import Laplace
from aftermap.laplace.evidence import log_evidence, squared_error
from aftermap.likelihoods import Gaussian
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, generator, mlp, normal, regression, seeded, untrained


def fitted(**options: object) -> Laplace:
    return Laplace(mlp(), "classification", **options).fit(classes(), progress=False)


def test_the_grid_starts_every_point_with_nothing_in_hand() -> None:
    """A metric that is reused without a reset makes the order of the grid matter."""
    one, two = fitted(), fitted()
    one.tune(classes(seed=12), precisions=[1.0, 30.0], scales=[0.5, 5.0])
    two.tune(classes(seed=12), precisions=[30.0, 1.0], scales=[5.0, 0.5])
    assert sorted(one.tuning.table) == sorted(two.tuning.table)
    assert (one.tuning.data_scale, one.tuning.precision) == (two.tuning.data_scale, two.tuning.precision)


def test_the_evidence_has_a_gradient_in_the_noise() -> None:
    """A power taken with `math.pow` cuts the graph: the gradient of the determinant's part is lost."""
    laplace = Laplace(mlp(1, 6, 1), Gaussian(0.5)).fit(regression(), progress=False)
    level = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def value(at: Tensor) -> Tensor:
        moved = replace(laplace.hyperparameters, noise=at)
        posterior = moved.applied_to(laplace.posterior, laplace.factors.curvature)
        return log_evidence(posterior, laplace.factors, laplace.base_likelihood, moved)

    (slope,) = torch.autograd.grad(value(level), level)
    squares, gamma = squared_error(laplace.base_likelihood, laplace.factors), laplace.posterior.effective_parameters()
    # ∂/∂log σ = SSE/σ² − (N·K − γ)
    torch.testing.assert_close(float(slope) * 0.5, squares / 0.25 - (60 - sum(gamma.values())))


@pytest.mark.parametrize("structure", ["kron", "full", "low_rank"])
def test_samples_have_the_covariance_and_not_only_the_mean(structure: str) -> None:
    """Transposed or upper Cholesky factors keep the mean and the spectrum, and live for years."""
    model = seeded(lambda: nn.Linear(3, 2))
    x = normal(9, 3, seed=1) * torch.tensor([0.2, 1.0, 4.0], dtype=torch.float64)
    targets = torch.arange(9) % 2
    laplace = Laplace(model, "classification", structure=structure, rank=5).fit([(x, targets)], progress=False)
    drawn = laplace.sample(30_000, generator(1))
    flat = torch.cat([drawn[n].reshape(30_000, -1) for n in laplace.posterior.names], 1)
    wanted = torch.linalg.inv(laplace.posterior.to_dense())
    error = ((wanted.diagonal()[:, None] * wanted.diagonal() + wanted.square()) / 30_000).sqrt()
    assert bool(((flat.T.cov() - wanted).abs() < 5 * error).all())


def test_more_samples_of_the_fisher_change_its_noise_and_not_its_size() -> None:
    """Monte-Carlo factors that are divided by the number of samples twice shrink with it."""
    exact = fitted(structure="diagonal", curvature="exact").factors.trace()
    sampled = Laplace(mlp(), "classification", structure="diagonal", curvature="sampled")
    for samples in (1, 200):
        sampled.fit(classes(), samples=samples, generator=generator(3), progress=False)
        assert sampled.factors.trace() == pytest.approx(exact, rel=0.3 if samples == 1 else 0.05)


def test_the_empirical_fisher_of_a_regression_has_no_factor_of_two() -> None:
    data = regression()
    model = mlp(1, 6, 1)
    laplace = Laplace(model, Gaussian(1.0), structure="full", curvature="empirical").fit(data, progress=False)
    total = 0.0
    singles = [(x[i : i + 1], y[i : i + 1]) for x, y in data for i in range(len(x))]
    for one, target in singles:
        loss = 0.5 * (model(one) - target).square().sum()
        total += sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(model.parameters())))
    assert laplace.factors.trace() == pytest.approx(total)


def test_the_temperature_divides_in_the_posterior_and_in_the_evidence() -> None:
    """One of two places multiplied, the other divided."""
    cold, plain = fitted(temperature=0.5), fitted()
    torch.testing.assert_close(
        cold.posterior.to_dense() - torch.eye(44), 2 * (plain.posterior.to_dense() - torch.eye(44)), check_dtype=False
    )
    energy = float(plain.posterior.prior.energy(plain.posterior.mean))
    volume = 0.5 * float(torch.linalg.slogdet(cold.posterior.to_dense())[1])
    assert float(cold.log_evidence()) == pytest.approx(-2 * plain.factors.loss - energy - volume)


def test_several_outputs_do_not_divide_the_noise() -> None:
    """A mean over the outputs of a squared loss makes the noise √K too small."""
    x = normal(500, 2, seed=1)
    model = seeded(lambda: nn.Linear(2, 3))
    y = model(x).detach() + 0.4 * normal(500, 3, seed=2)
    laplace = Laplace(model, "regression").fit([(x, y)], progress=False).tune()
    assert float(laplace.hyperparameters.noise) == pytest.approx(0.4, rel=0.05)


def test_the_noise_is_in_the_predictive_variance() -> None:
    laplace = Laplace(mlp(1, 6, 1), Gaussian(0.5)).fit(regression(), progress=False)
    found = laplace.predict(normal(5, 1))
    torch.testing.assert_close(found.total, found.epistemic + 0.25)
    low, high = found.interval(0.95)
    torch.testing.assert_close(high - low, 2 * 1.959963984540054 * found.total.sqrt())
    narrow = found.interval(0.95, noise=False)
    assert bool((narrow[1] - narrow[0] < high - low).all())


@pytest.mark.parametrize("link", ["bridge", "probit", "mc"])
def test_a_prediction_does_not_change_what_it_is_made_of(link: str) -> None:
    """An in-place subtraction in the bridge moved the logits of the caller."""
    laplace, x = fitted(), classes()[0][0]
    found = laplace.predict(x, link=link, generator=generator(1))
    torch.testing.assert_close(found.latent_mean, laplace.model(x).detach(), rtol=0, atol=0)
    torch.testing.assert_close(laplace.predict(x, link=link, generator=generator(1)).mean, found.mean, rtol=0, atol=0)


def test_a_layer_that_is_called_twice_counts_once_with_both_gradients() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.tanh(self.inner(x)))

    model = seeded(Twice)
    x, y = normal(1, 3, seed=1), torch.tensor([2])
    one = Laplace(model, "classification", structure="ekfac").fit([(x, y)], progress=False)
    full = Laplace(model, "classification", structure="full").fit([(x, y)], progress=False)
    assert one.factors.trace() == pytest.approx(full.factors.trace())


@untrained
def test_a_batch_norm_layer_and_a_frozen_one_do_not_crash() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 4))

    model = seeded(build)
    model[0].requires_grad_(False)
    laplace = Laplace(model, "classification").fit(classes(), progress=False).tune()
    assert laplace.posterior.names[0] == "1.weight"
    assert math.isfinite(float(laplace.log_evidence()))
    assert set(laplace.factors.treatment) == set(laplace.posterior.names)


def test_nothing_of_the_users_is_lost_when_something_fails() -> None:
    """exit() in a library, sampled weights left in the model, eval() never undone, gradients wiped, attributes added."""
    model = mlp()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    laplace = Laplace(model, "classification").fit(classes(), progress=False)
    before = ModelSnapshot.of(model)
    for act in (
        lambda: laplace.predict(normal(2, 9)),
        lambda: laplace.predict(normal(2, 9), kind="sampling"),
        lambda: laplace.predict(normal(2, 9), kind="sampling", local=True),
        lambda: laplace.joint(normal(2, 9)),
        lambda: laplace.fit([(normal(2, 3), torch.tensor([0, 9]))], progress=False),
        lambda: laplace.tune([(normal(2, 3), torch.tensor([0, 9]))]),
    ):
        with pytest.raises(AftermapError):
            act()
        check_unchanged(model, before)


def test_the_number_of_data_is_what_was_seen() -> None:
    """`len(dataset)` is wrong for a loader that drops its last batch."""
    x, y = (torch.cat(t) for t in zip(*classes(), strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7, drop_last=True)
    laplace = Laplace(mlp(), "classification").fit(loader, progress=False)
    assert laplace.n_data == 56


def test_higher_scores_are_more_unusual() -> None:
    laplace, x = fitted(), classes()[0][0]
    near, far = laplace.predict(x), laplace.predict(20 * x)
    assert float(far.score("variance").mean()) > float(near.score("variance").mean())
