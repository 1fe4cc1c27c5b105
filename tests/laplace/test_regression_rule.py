"""Tuning a regression: leave-one-out against refits, the evidence against a grid, kernels against weights, invariances, edges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from aftermap.batches import Batch
from aftermap.errors import DataError, InputError, NumericalError, StatisticalWarning
from aftermap.laplace import Laplace, RegressionResult, regression
from aftermap.laplace.fitted import Tuned
from aftermap.laplace.regression import draw_examples, tune_regression
from aftermap.laplace.regression_rule import (
    LinearModel,
    apply_rule,
    evidence_ratio,
    fit_scale,
    learning_slope,
    leave_one_out_ratio,
    match_width,
    misfits,
)
from aftermap.likelihoods import Categorical, Gaussian
from tests.laplace.problems import generator

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=generator(seed))


def made(rows: Tensor, targets: Tensor, theta: Tensor, mean: float = 0.0, weights: Tensor | None = None) -> LinearModel:
    """The linear model of rows [n·M, P] at weights that are not its optimum."""
    weights = torch.ones(len(rows), dtype=DOUBLE) if weights is None else weights
    shift = theta - mean
    return LinearModel.make(
        rows @ rows.T, rows @ shift, targets - rows @ theta, weights, float(shift.square().sum()), rows.shape[1]
    )


def problem(n: int, p: int, seed: int = 0, noise: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, targets and weights near those that made the targets."""
    rows, truth = normal(n, p, seed=seed), normal(p, seed=seed + 1)
    return (
        rows,
        rows @ truth + noise * normal(n, seed=seed + 2),
        truth + 0.3 * noise / math.sqrt(n) * normal(p, seed=seed + 3),
    )


def refit(rows: Tensor, targets: Tensor, weights: Tensor, ratio: float, mean: float = 0.0) -> tuple[Tensor, Tensor]:
    """The ridge solution in weight space, and the covariance in units of the noise's variance."""
    precision = rows.T @ (weights[:, None] * rows) + ratio * torch.eye(rows.shape[1], dtype=DOUBLE)
    covariance = torch.linalg.inv(precision)
    solution = mean + covariance @ rows.T @ (weights * (targets - mean * rows.sum(1)))
    return solution, covariance


@pytest.mark.parametrize(("n", "p"), [(12, 5), (7, 11)])
@pytest.mark.parametrize("outputs", [1, 2])
def test_leave_one_out_is_a_refit_without_each_example(n: int, p: int, outputs: int) -> None:
    rows, targets, theta = problem(n * outputs, p)
    weights = torch.tensor([0.5, 1.0, 3.0], dtype=DOUBLE).repeat(n)[:n]
    linear = LinearModel.make(
        rows @ rows.T,
        rows @ (theta - 0.4),
        targets - rows @ theta,
        weights,
        float((theta - 0.4).square().sum()),
        p,
    )
    left = linear.leave_one_out(0.7)
    each = weights.repeat_interleave(outputs)
    for i in range(n):
        others = torch.arange(n * outputs) // outputs != i
        solution, covariance = refit(rows[others], targets[others], each[others], 0.7, 0.4)
        out = rows[~others]
        torch.testing.assert_close(left.residuals[i], targets[~others] - out @ solution)
        torch.testing.assert_close(left.leverage[i], (out @ covariance @ out.T).diagonal())


def log_evidence(rows: Tensor, targets: Tensor, theta: Tensor, precision: float, variance: float) -> float:
    """The Laplace evidence at θ in weight space."""
    n, p = rows.shape
    residual = targets - rows @ theta
    hessian = rows.T @ rows / variance + precision * torch.eye(p, dtype=DOUBLE)
    fit = -0.5 * float(residual.square().sum()) / variance - 0.5 * n * math.log(2 * math.pi * variance)
    prior = 0.5 * p * math.log(precision) - 0.5 * precision * float(theta.square().sum())
    return fit + prior - 0.5 * float(torch.logdet(hessian))


@pytest.mark.parametrize(("n", "p"), [(30, 6), (15, 25)])
def test_the_evidence_is_largest_at_the_ratio_that_bisection_finds(n: int, p: int) -> None:
    rows, targets, theta = problem(n, p, seed=5)
    linear = made(rows, targets, theta)
    ratio, at_edge = evidence_ratio(linear)
    variance = (linear.squares + ratio * linear.distance) / n
    best = log_evidence(rows, targets, theta, ratio / variance, variance)
    assert not at_edge
    for a in torch.linspace(-3, 3, 25).tolist():
        for b in torch.linspace(-2, 2, 17).tolist():
            assert (
                log_evidence(rows, targets, theta, ratio / variance * math.exp(a), variance * math.exp(b))
                <= best + 1e-9
            )
    gamma = linear.gamma(ratio)
    assert variance == pytest.approx(linear.squares / (n - gamma))
    assert ratio / variance == pytest.approx(gamma / linear.distance)


def test_leave_one_out_is_best_at_the_ratio_found_and_its_noise_is_profiled() -> None:
    linear = made(*problem(40, 25, seed=3))
    ratio = leave_one_out_ratio(linear)
    best = linear.leave_one_out(ratio)
    for step in torch.linspace(-9, 9, 181).tolist():
        assert linear.leave_one_out(ratio * math.exp(step)).criterion >= best.criterion - 1e-7
    at_best = best.nll(best.noise_variance)
    assert at_best == pytest.approx(0.5 * (best.criterion + math.log(2 * math.pi) + 1))
    assert best.nll(1.2 * best.noise_variance) > at_best < best.nll(best.noise_variance / 1.2)


def test_the_kernel_gives_the_numbers_of_weight_space() -> None:
    rows, targets, theta = problem(9, 4)
    linear = made(rows, targets, theta)
    _, covariance = refit(rows, targets, torch.ones(9, dtype=DOUBLE), 0.5)
    assert linear.gamma(0.5) == pytest.approx(float((covariance @ rows.T @ rows).trace()))
    part = linear.part(6)
    torch.testing.assert_close(
        part.leave_one_out(0.5).residuals, made(rows[:6], targets[:6], theta).leave_one_out(0.5).residuals
    )


def test_weights_are_copies() -> None:
    rows, targets, theta = problem(8, 5)
    weights = torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 1.0, 1.0], dtype=DOUBLE)
    index = torch.repeat_interleave(torch.arange(8), weights.long())
    weighted, copied = made(rows, targets, theta, weights=weights), made(rows[index], targets[index], theta)
    assert evidence_ratio(weighted)[0] == pytest.approx(evidence_ratio(copied)[0], rel=1e-8)
    assert weighted.gamma(0.3) == pytest.approx(copied.gamma(0.3))
    assert weighted.count == copied.count
    assert weighted.squares == pytest.approx(copied.squares)


@pytest.mark.parametrize("unit", [1e-6, 250.0])
def test_units_of_targets_and_of_weights_change_nothing_else(unit: float) -> None:
    rows, targets, theta = problem(20, 12, seed=8)
    plain, scaled = apply_rule(made(rows, targets, theta)), apply_rule(made(rows, unit * targets, unit * theta))
    assert scaled.noise == pytest.approx(unit * plain.noise, rel=1e-6)
    assert scaled.ratio == pytest.approx(plain.ratio, rel=1e-6)
    other = apply_rule(made(rows / unit, targets, unit * theta))
    assert other.noise == pytest.approx(plain.noise, rel=1e-6)
    assert other.ratio == pytest.approx(plain.ratio / unit**2, rel=1e-6)
    assert scaled.loo_nll - scaled.constant_nll == pytest.approx(plain.loo_nll - plain.constant_nll, abs=1e-6)


def test_the_rule_takes_the_larger_ratio_and_the_larger_noise() -> None:
    strong = made(*problem(60, 20, seed=2))
    found = apply_rule(strong)
    assert found.ratio == pytest.approx(max(found.ratio_evidence, min(found.ratio_loo, 1000 * found.ratio_evidence)))
    own = strong.squares / (60 - strong.gamma(found.ratio))
    assert found.noise**2 == pytest.approx(max(own, strong.leave_one_out(found.ratio).noise_variance))
    assert found.precision == pytest.approx(found.ratio / found.noise**2)
    assert found.determined == pytest.approx(strong.gamma(found.ratio) / 60)


def test_intervals_cover_where_the_linear_model_is_true() -> None:
    covered, count = 0, 0
    for seed in range(20):
        rows, truth = normal(60, 40, seed=100 + seed) / math.sqrt(40), normal(40, seed=200 + seed)
        targets = rows @ truth + 0.5 * normal(60, seed=300 + seed)
        theta, covariance = refit(rows, targets, torch.ones(60, dtype=DOUBLE), 0.25)
        found = apply_rule(made(rows, targets, theta))
        _, covariance = refit(rows, targets, torch.ones(60, dtype=DOUBLE), found.ratio)
        new = normal(200, 40, seed=400 + seed) / math.sqrt(40)
        variance = found.noise**2 * (1 + (new @ covariance * new).sum(1))
        error = new @ (truth - theta) + 0.5 * normal(200, seed=500 + seed)
        covered += int((error.abs() < 1.96 * variance.sqrt()).sum())
        count += 200
    assert covered / count == pytest.approx(0.95, abs=0.025)


def test_a_width_is_matched_to_unseen_data() -> None:
    linear = made(*problem(30, 60, seed=1))
    wanted = linear.leave_one_out(0.4).leverage
    assert match_width(7 * wanted, linear, 0.4) == pytest.approx(7)
    slope = learning_slope(linear, 0.4)
    assert match_width(7 * wanted, linear, 0.4, copies=9.0) == pytest.approx(7 * 9**slope)
    assert match_width(0 * wanted, linear, 0.4) == 1


def test_leverages_of_a_determined_model_fall_with_the_number_of_data() -> None:
    assert learning_slope(made(*problem(400, 3, seed=4)), 1e-3) == pytest.approx(1.0, abs=0.05)
    assert learning_slope(made(*problem(12, 500, seed=4)), 1e-3) < 0.2


def test_labels_set_the_scale_and_leave_the_width_they_cannot_judge() -> None:
    h = normal(4000, 1).square()
    factor, width = fit_scale(2 * (1 + h).sqrt() * normal(4000, 1, seed=1), h, 1.0)
    assert factor == pytest.approx(4.0, rel=0.1)
    assert width == 1.0
    factor, width = fit_scale(0.5 * normal(4000, 1, seed=2), 100 * h, 0.5)
    assert width <= 0.01
    assert float((factor * (1 + width * 100 * h)).mean()) == pytest.approx(1.0, rel=0.05)
    # Five labels beside ten examples that are believed; many labels that are far off leave nothing of the belief.
    believed = (1 + h).sqrt()
    assert fit_scale(believed[:5], h[:5], 1.0) == pytest.approx((1.0, 1.0), rel=1e-6)
    assert fit_scale(0.3 * believed[:5], h[:5], 1.0)[0] == pytest.approx((5 * 0.09 + 10) / 15, rel=0.05)
    assert fit_scale(0.1 * believed[:300], h[:300], 1.0)[0] == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("wrong", [100.0, 0.01])
def test_labels_correct_a_variance_that_is_wrong_by_orders_of_magnitude(wrong: float) -> None:
    h = 10 * normal(150, 1).square()
    residuals = normal(150, 1, seed=1)
    factor, width = fit_scale(residuals, h, math.sqrt(wrong))
    variance = factor * wrong * (1 + width * h)
    best = 0.5 * residuals.square().mean().log() + 0.5
    nll = (0.5 * variance.log() + residuals.square() / (2 * variance)).mean()
    assert float(nll - best) < 0.1


def test_repeated_labels_with_smaller_weights_say_the_same() -> None:
    h, error = normal(6, 2).square(), normal(6, 2, seed=1)
    twice = fit_scale(error.repeat(2, 1), h.repeat(2, 1), 0.7, torch.ones(12, dtype=DOUBLE))
    weighted = fit_scale(error[[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]], h[[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]], 0.7)
    assert twice == pytest.approx(weighted)


def test_data_that_are_reproduced_exactly_are_at_the_edge() -> None:
    rows = normal(10, 30)
    theta = rows.T @ torch.linalg.solve(rows @ rows.T, normal(10, seed=1))
    found = apply_rule(made(rows, rows @ theta, theta))
    assert found.at_edge
    assert not found.converged
    assert found.noise > 0
    assert found.ratio == pytest.approx(max(found.ratio_loo, found.ratio_evidence))
    assert "no maximum" in found.sentence()


def test_weights_at_their_prior_mean_leave_the_choice_to_leave_one_out() -> None:
    rows, targets, _ = problem(15, 4)
    found = apply_rule(made(rows, targets, torch.zeros(4, dtype=DOUBLE)))
    assert math.isinf(found.ratio_evidence)
    assert found.ratio == found.ratio_loo


def test_bad_numbers_are_refused() -> None:
    rows, targets, theta = problem(5, 3)
    with pytest.raises(DataError, match="1 training example cannot"):
        made(rows[:1], targets[:1], theta)
    with pytest.raises(DataError, match="every gradient is zero"):
        made(0 * rows, targets, theta)
    with pytest.raises(NumericalError, match="not finite"):
        made(rows, targets * math.nan, theta)
    with pytest.raises(DataError, match="no noise to be found"):
        apply_rule(made(rows, 0 * targets, 0 * theta))


def test_the_alarm_speaks() -> None:
    result = RegressionResult(1.0, 1.0, 1.0, 3.0, 1.0, 1.0, loo_nll=1.0, constant_nll=0.9, n_data=10, n_params=4)
    assert not result.alarm
    alarmed = replace(result, loo_nll=1.2)
    assert alarmed.alarm
    assert "0.30 nats worse" in alarmed.sentence()
    assert result.sentence().endswith("numbers.")
    assert "95 % of the numbers in the data" in replace(result, determined=0.95).sentence()


# On networks


def network(width_in: int = 2, outputs: int = 1, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width_in, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def data(n: int = 40, outputs: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = normal(n, 2, seed=seed)
    y = torch.stack([(x[:, 0] * (k + 1)).sin() + x[:, 1] for k in range(outputs)], 1)
    return x, y + 0.2 * normal(n, outputs, seed=seed + 1)


def trained(x: Tensor, y: Tensor, decay: float = 0.02) -> nn.Module:
    model = network(outputs=y.shape[1])
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=60)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = (model(x) - y).square().sum() + decay * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimiser.step(closure)
    return model.eval()


def tuned_by(laplace: Laplace, **options: object) -> Tuned:
    return tune_regression(laplace.fitted, laplace.base_likelihood, laplace.predictor, **options)  # type: ignore[arg-type]


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """[n·M, P], by one backward pass for each number."""
    parameters = list(model.parameters())
    lines = [torch.autograd.grad(v, parameters, retain_graph=True) for v in model(x).reshape(-1)]
    return torch.stack([torch.cat([g.reshape(-1) for g in line]) for line in lines])


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_full_posterior_predicts_as_the_linear_model(outputs: int) -> None:
    x, y = data(outputs=outputs)
    model = trained(x, y)
    noise = torch.tensor([1.0, 2.0, 0.5], dtype=DOUBLE)[:outputs]
    likelihood = Gaussian(noise) if outputs > 1 else Gaussian(0.7)
    laplace = Laplace(model, likelihood, structure="full", prior_mean=0.1).fit([(x, y)])
    tuned = tuned_by(laplace, warn=False)  # the noises are not in the ratio of the residuals
    whitener = (1 / noise if outputs > 1 else torch.ones(1, dtype=DOUBLE)).repeat(len(x))
    rows = whitener[:, None] * jacobian(model, x)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    residual = whitener * (y - model(x)).detach().reshape(-1)
    linear = LinearModel.make(
        rows @ rows.T,
        rows @ (theta - 0.1),
        residual,
        torch.ones(len(x), dtype=DOUBLE),
        float((theta - 0.1).square().sum()),
        len(theta),
    )
    expected = apply_rule(linear)
    assert isinstance(tuned.result, RegressionResult)
    assert tuned.result.narrowing == 1.0
    assert tuned.result.ratio == pytest.approx(expected.ratio, rel=1e-6)
    assert tuned.result.noise == pytest.approx(expected.noise, rel=1e-6)
    new = data(5, outputs, seed=9)[0]
    _, covariance = refit(rows, residual, torch.ones(len(rows), dtype=DOUBLE), expected.ratio)
    latent = (jacobian(model, new) @ covariance * jacobian(model, new)).sum(1).reshape(5, outputs)
    laplace.adopt(tuned)
    base = noise.square() if outputs > 1 else 1.0
    torch.testing.assert_close(laplace.predict(new).total, expected.noise**2 * (base + latent), rtol=1e-5, atol=1e-9)


def test_batches_and_their_order_change_nothing() -> None:
    x, y = data()
    laplace = Laplace(trained(x, y), "regression", structure="kron").fit([(x, y)])
    first = tuned_by(laplace).result
    order = torch.randperm(len(x), generator=generator(1))
    parts = list(zip(x[order].split(7), y[order].split(7), strict=True))
    second = tuned_by(laplace, data=parts).result
    for name in ("ratio", "noise", "narrowing", "loo_nll", "gamma"):
        assert getattr(second, name) == pytest.approx(getattr(first, name), rel=1e-6)


@pytest.mark.parametrize("options", [{"structure": "kron"}, {"structure": "diagonal"}, {"params": "last_layer"}])
def test_other_posteriors_get_the_width_of_the_full_one_on_unseen_data(options: dict[str, str]) -> None:
    x, y = data(30)
    model = trained(x, y, decay=0.002)
    laplace = Laplace(model, "regression", **options).fit([(x, y)])  # type: ignore[arg-type]
    tuned = tuned_by(laplace)
    full = Laplace(model, "regression", structure="full").fit([(x, y)])
    reference = tuned_by(full)
    assert tuned.result.ratio == pytest.approx(reference.result.ratio)
    assert tuned.narrowing == tuned.result.narrowing != 1.0
    laplace.adopt(tuned)
    latent = laplace.predict(x).epistemic / tuned.result.noise**2
    rows = jacobian(model, x)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    linear = LinearModel.make(
        rows @ rows.T,
        rows @ theta,
        (y - model(x)).detach().reshape(-1),
        torch.ones(30, dtype=DOUBLE),
        float(theta.square().sum()),
        len(theta),
    )
    wanted = linear.leave_one_out(tuned.result.ratio).leverage
    torch.testing.assert_close(latent.log().mean(), wanted.log().mean(), rtol=1e-5, atol=1e-5)


def test_a_posterior_that_is_the_full_one_is_recognised() -> None:
    x, y = data(25)
    model = nn.Linear(2, 1).double().eval()
    laplace = Laplace(model, "regression", structure="low_rank", rank=3).fit([(x, y)])
    assert tuned_by(laplace).narrowing == 1.0


def test_tuning_again_finds_the_same() -> None:
    x, y = data()
    laplace = Laplace(trained(x, y), "regression", structure="kron").fit([(x, y)])
    val = data(50, seed=4)
    laplace.adopt(tuned_by(laplace, val_data=[val]))
    first = laplace.hyperparameters
    laplace.adopt(tuned_by(laplace, val_data=[val]))
    torch.testing.assert_close(laplace.hyperparameters.noise, first.noise)
    assert laplace.data_scale == pytest.approx(first.data_scale)


def test_labels_correct_a_noise_that_training_data_cannot_show() -> None:
    x, y = data(200)
    model = trained(x, y)
    laplace = Laplace(model, "regression", structure="full").fit([(x, y)])
    new, targets = data(1500, seed=7)
    noisy = targets + 1.0 * normal(1500, 1, seed=8)
    without = tuned_by(laplace)
    found = tuned_by(laplace, val_data=[(new, noisy)])
    assert found.result.n_labels == 1000
    variance = found.result.noise**2
    assert variance == pytest.approx(float((noisy - model(new)).detach().square().mean()), rel=0.1)
    assert found.result.noise == pytest.approx(without.result.noise * math.sqrt(found.result.factor), rel=1e-9)
    assert "1,000 validation examples" in found.result.sentence()


def test_many_data_are_sampled_and_the_noise_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "_ALL_ROWS", 250)
    monkeypatch.setattr(regression, "_EXAMPLES", 150)
    x, y = data(900)
    model = trained(x, y)
    full = Laplace(model, "regression", structure="full").fit([(x, y)])
    tuned = tuned_by(full)
    assert tuned.result.n_data == 150
    assert tuned_by(full).result == tuned.result
    squares = float((y - model(x)).detach().square().sum())
    own = squares / (900 - tuned.result.gamma)
    assert own * (1 - 1e-9) <= tuned.result.noise**2 < 1.5 * own  # or that of the data left out of the sample
    assert tuned.narrowing == 1.0
    # Kronecker factors know all data; the width of the sample is carried on to as many.
    kron = Laplace(model, "regression", structure="kron").fit([(x, y)])
    new = data(300, seed=3)[0]
    wide = kron.adopt(tuned_by(kron)).predict(new).epistemic / full.adopt(tuned).predict(new).epistemic
    assert 0.7 < float(wide.log().mean().exp()) < 1.4


def test_a_data_scale_counts_every_datum_so_often() -> None:
    x, y = data(30)
    model = trained(x, y)
    once = Laplace(model, "regression", structure="full").fit([(x, y, torch.full((30,), 3.0))])
    scaled = Laplace(model, "regression", structure="full", data_scale=3.0).fit([(x, y)])
    first, second = tuned_by(once), tuned_by(scaled)
    assert first.result.ratio == pytest.approx(second.result.ratio, rel=1e-6)
    new = data(4, seed=5)[0]
    torch.testing.assert_close(once.adopt(first).predict(new).total, scaled.adopt(second).predict(new).total)


def test_a_sample_is_uniform_and_leaves_out_what_has_no_weight() -> None:
    counts = torch.zeros(20)
    for seed in range(400):
        batches = [
            Batch(torch.arange(5.0)[:, None] + 5 * k, torch.zeros(5, 1), torch.tensor([1.0, 0, 1, 1, 1]), 5)
            for k in range(4)
        ]
        sample = draw_examples(batches, 4, seed)
        assert (sample.size, sample.seen) == (4, 16)
        drawn = torch.cat([b.inputs for b in sample.batches]).long().reshape(-1)
        assert drawn.tolist() == sorted(drawn.tolist())
        counts[drawn] += 1
    assert counts[1::5].sum() == 0
    kept = counts[counts > 0]
    assert len(kept) == 16
    assert float((kept / 400 - 0.25).abs().max()) < 0.09


def test_bad_use_is_refused() -> None:
    x, y = data(12)
    laplace = Laplace(network(), "regression").fit([(x, y)])
    with pytest.raises(InputError, match="regressions with a Gaussian likelihood"):
        tune_regression(laplace.fitted, Categorical(), laplace.predictor)
    with pytest.raises(InputError, match="not at hand"):
        tune_regression(replace(laplace.fitted, data=None), laplace.base_likelihood, laplace.predictor)
    with pytest.raises(DataError, match="empty"):
        tuned_by(laplace, val_data=[])
    one = Laplace(network(), "regression").fit([(x[:1], y[:1])])
    with pytest.raises(DataError, match="two at least"):
        tuned_by(one)


def test_few_data_are_said_to_be_few() -> None:
    x, y = data(6)
    laplace = Laplace(trained(x, y, decay=1.0), "regression", structure="full").fit([(x, y)])
    with pytest.warns(StatisticalWarning, match="6 training examples say little"):
        tuned_by(laplace)


@pytest.mark.filterwarnings("ignore:.*nats worse")
def test_constant_targets_give_a_small_positive_noise() -> None:
    x = data(20)[0]
    y = torch.full((20, 1), 3.0, dtype=DOUBLE)
    result = tuned_by(Laplace(trained(x, y, decay=1e-6), "regression", structure="full").fit([(x, y)])).result
    assert 0 < result.noise < 0.1
    assert math.isfinite(result.precision)


@pytest.mark.parametrize(
    ("most", "outputs", "positions"), [(50, [0, 1], [0, 1, 2]), (4, [0, 1], [0, 1]), (1, [0], [0])]
)
def test_numbers_of_an_output_with_positions(
    most: int, outputs: list[int], positions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The linear model of a network with [N, 3, 2] outputs, whitened by the noise of each, against its dense Jacobian."""
    monkeypatch.setattr(regression, "_OUTPUTS", most)

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 6, dtype=DOUBLE)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x)).reshape(len(x), 3, 2)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Positions()
    x, y = (
        torch.randn(7, 2, generator=generator(1), dtype=DOUBLE),
        torch.randn(7, 3, 2, generator=generator(2), dtype=DOUBLE),
    )
    noise = torch.tensor([0.5, 2.0], dtype=DOUBLE)
    likelihood = Gaussian(noise)
    chosen = regression._Chosen.of(model(x), likelihood)
    assert (chosen.outputs, chosen.positions) == (outputs, positions)
    assert chosen.count == len(outputs) * len(positions) <= max(most, 1)
    expected = (y[:, positions][..., outputs] / noise[outputs]).flatten(1)
    torch.testing.assert_close(chosen.whitened(y), expected)
    weight = torch.linspace(0.5, 2.0, 7, dtype=DOUBLE)
    fit = Laplace(model, likelihood, structure="full", prior_mean=0.2, data_scale=1.5).fit([(x, y, weight)])
    names = list(fit.posterior.names)
    sample = draw_examples([Batch(x[:3], y[:3], weight[:3], 3), Batch(x[3:], y[3:], weight[3:], 4)], 10, 0)
    linear, scale = regression.linear_model(sample, likelihood, model, names, fit.fitted)
    jacobian = torch.autograd.functional.jacobian(
        lambda *p: (
            torch.func.functional_call(model, dict(zip(names, p, strict=True)), (x,))[:, positions][..., outputs]
            / noise[outputs]
        ),
        tuple(dict(model.named_parameters())[n].detach() for n in names),
    )
    rows = torch.cat([j.flatten(3).flatten(0, 2) for j in jacobian], 1)
    kernel = (linear.vectors * linear.values) @ linear.vectors.T
    whole = linear.weights.repeat_interleave(linear.outputs).sqrt()
    torch.testing.assert_close(linear.weights, 1.5 * weight)
    torch.testing.assert_close(kernel, whole[:, None] * (rows @ rows.T) * whole, rtol=1e-6, atol=1e-9)
    assert scale == pytest.approx(float(expected.square().mean().sqrt()))
    assert linear.outputs == len(outputs) * len(positions)


@pytest.mark.parametrize("count", [20, 33])
def test_misfits_are_the_residuals_of_each_output_in_predictive_deviations(count: int) -> None:
    """Of two positions with three outputs each, by loops; examples count by their weights."""
    residuals, variance = normal(count, 6, seed=1), 0.2 + normal(count, 6, seed=2).square()
    weights = torch.linspace(0.5, 3.0, count, dtype=DOUBLE)
    expected = []
    for output in range(3):
        total = 0.0
        for example in range(count):
            for number in (output, 3 + output):
                share = float(residuals[example, number]) ** 2 / float(variance[example, number]) / 2
                total += float(weights[example]) * share
        expected.append(math.sqrt(total / float(weights.sum())))
    assert misfits(residuals, variance, weights, 3) == pytest.approx(expected, rel=1e-12)
    assert misfits(residuals[:19], variance[:19], weights[:19], 3) == ()  # They say little.
    assert misfits(residuals, variance, weights, 1) == ()
