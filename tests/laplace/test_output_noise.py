"""Several outputs of a regression, in units of their own: each gets its noise, or a warning says that one does not serve them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.errors import StatisticalWarning
from aftermap.laplace import Laplace
from aftermap.laplace.output_noise import residual_noise
from aftermap.likelihoods import Gaussian
from tests.laplace.problems import normal

DOUBLE = torch.float64
UNITS = torch.tensor([1.0, 100.0, 0.01], dtype=DOUBLE)
NOISE = 0.3 * UNITS


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x = normal(n, 2, seed=seed)
    clean = torch.stack([x[:, 0], x[:, 0] - x[:, 1], 2 * x[:, 1]], 1)
    return x, UNITS * clean + NOISE * normal(n, 3, seed=seed + 1)


def least_squares(x: Tensor, y: Tensor) -> nn.Module:
    """A linear network at its best weights, in evaluation mode."""
    model = nn.Sequential(nn.Linear(2, 3)).double()
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1, dtype=DOUBLE)], 1), y).solution
    with torch.no_grad():
        model[0].weight.copy_(solution[:2].T)
        model[0].bias.copy_(solution[2])
    return model.eval()


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("likelihood", ["regression", None])
def test_each_output_has_its_noise(labels: bool, likelihood: str | None) -> None:
    x, y = data(200, seed=1)
    held_out = [data(100, seed=3)] if labels else None
    laplace = am.fit(least_squares(x, y), likelihood, [(x, y)], held_out, verbose=False)
    assert isinstance(laplace.likelihood, Gaussian)
    torch.testing.assert_close(
        torch.as_tensor(laplace.likelihood.noise) / NOISE, torch.ones(3, dtype=DOUBLE), rtol=0.2, atol=0
    )
    new, targets = data(1000, seed=5)
    lower, upper = laplace.predict(new).interval(0.9)
    covered = ((targets >= lower) & (targets <= upper)).double().mean(0)
    assert ((covered - 0.9).abs() < 0.06).all(), covered
    assert "one for each output" in str(laplace.report)
    assert "noise σ" in str(laplace)


def test_a_noise_that_was_given_stays() -> None:
    x, y = data(200, seed=1)
    with pytest.warns(
        StatisticalWarning, match=r"in output 2, whose intervals are too wide, and .* in output 1, whose are too narrow"
    ):
        laplace = am.fit(least_squares(x, y), Gaussian(1.0), [(x, y)], verbose=False)
    assert isinstance(laplace.likelihood, Gaussian)
    assert isinstance(laplace.likelihood.noise, float)


@pytest.mark.parametrize("labels", [False, True])
def test_one_noise_that_does_not_serve_all_outputs_is_told_of(labels: bool) -> None:
    x, y = data(200, seed=1)
    laplace = Laplace(least_squares(x, y), "regression").fit([(x, y)])
    with pytest.warns(StatisticalWarning, match="Give each output its own noise"):
        laplace.tune([data(100, seed=3)] if labels else None)
    # With the noise of each output the same tuning is silent.
    Laplace(least_squares(x, y), Gaussian(NOISE)).fit([(x, y)]).tune([data(100, seed=3)] if labels else None)


def test_residuals_of_the_first_source_that_has_enough() -> None:
    x, y = data(60, seed=1)
    model = least_squares(*data(200, seed=7))
    weight = torch.arange(60.0, dtype=DOUBLE) % 3
    with torch.no_grad():
        squares = (y - model(x)).square()
    batches = [(x[:25], y[:25], weight[:25]), (x[25:], y[25:], weight[25:])]
    wanted = ((weight[:, None] * squares).sum(0) / weight.sum()).sqrt()
    before = torch.get_rng_state()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 20, shuffle=True)
    torch.testing.assert_close(residual_noise(model, 3, [(x[:10], y[:10])], batches), wanted)
    torch.testing.assert_close(residual_noise(model, 3, None, loader), squares.mean(0).sqrt())
    assert torch.equal(torch.get_rng_state(), before)
    # What has no finite answer is left out here, as in the check; an empty source gives way to the next.
    broken = x.clone()
    broken[:2] = 1e308
    kept = [(broken, y)]
    torch.testing.assert_close(residual_noise(model, 3, [], kept), squares[2:].mean(0).sqrt())
    once = iter(batches)
    assert residual_noise(model, 3, None, once) is None
    assert len(list(once)) == 2
    assert residual_noise(model, 3, None, [(x, y[:, :2])]) is None


def test_outputs_that_are_reproduced_exactly() -> None:
    x, y = data(60, seed=1)
    model = least_squares(x, y)
    with torch.no_grad():
        exact = model(x)
    y = torch.stack([y[:, 0], exact[:, 1], torch.full_like(y[:, 2], 5.0)], 1)
    model[0].weight.data[2] = 0.0  # type: ignore[index,union-attr]
    model[0].bias.data[2] = 5.0  # type: ignore[index,union-attr]
    noise = residual_noise(model, 3, [(x, y)], None)
    assert noise is not None
    assert float(noise[1]) == pytest.approx(1e-3 * float(exact[:, 1].std(correction=0)), rel=1e-6)
    assert 0 < float(noise[2]) <= float(noise[:2].min())
