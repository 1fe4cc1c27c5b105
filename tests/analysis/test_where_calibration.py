"""The calibration test of the map (docs/mathematics/where.md), saliency maps, and posteriors that training built."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from aftermap.analysis import where
from aftermap.analysis.levels import saliency_of
from aftermap.curvature import reference
from aftermap.laplace import Laplace
from aftermap.likelihoods import Categorical, Gaussian
from aftermap.optim import VOGN
from aftermap.posteriors.dual import DualPosterior
from aftermap.predictive.predictor import PosteriorPredictor
from aftermap.testing.predictor import ModelSnapshot, check_unchanged
from tests.analysis.cases import by_module, fitted, generator, iris, iris_net, look, normal, seeded, wave


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full", "low_rank", "matrix_free"])
def test_drawing_one_layer_raises_the_loss_by_half_gamma(structure: str) -> None:
    # A narrow posterior: data and prior count 10¹⁰ times, so that γ stays and a ReLU network is linear in a layer: no draw
    # crosses a kink. Not trained: weight decay takes dead units to the kink itself, where no step is small.
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    la = fitted(structure, net, data_scale=1e10, prior_precision=1e10, rank=60)
    found = la.where(look(), saliency=False, top=1, calibration=list(iris()), draws=60, generator=generator(5))
    for row in found.calibration:
        assert row.draws == 60
        assert row.standard_error > 0
        # Measured against linearised: the network is linear in so small a step.
        assert abs(row.measured - row.linearised) < 4.5 * row.standard_error
        if structure not in ("kron", "ekfac"):
            # ½ Σ tr(Λ V) = ½γ / power: an identity where the curvature's blocks are exact.
            assert row.linearised == pytest.approx(row.expected, rel=1e-6)
        else:
            assert row.linearised == pytest.approx(row.expected, rel=0.5)
    if structure in ("diagonal", "kron", "ekfac"):
        for row, layer in zip(found.calibration, found.layers, strict=True):
            assert row.expected == pytest.approx(0.5e-10 * layer.effective, rel=1e-9)


def test_the_gap_of_a_smooth_network_is_the_curvature_of_its_residuals() -> None:
    # tanh: the measured rise is ½ tr(H_ℓℓ C) with the exact Hessian, of which the GGN is a part only.
    la = Laplace(iris_net(), "classification", structure="full", data_scale=1e6, prior_precision=1e6)
    la.fit(look(), progress=False)
    found = la.where(look(), saliency=False, top=1, calibration=True, draws=200, generator=generator(5))
    x, y = torch.cat([b[0] for b in look()]), torch.cat([b[1] for b in look()])
    hessian = reference.hessian(la.model, x, Categorical(), y)
    precision = la.posterior.to_dense()
    for row in found.calibration:
        rows = by_module(la.model)[row.layer]
        covariance = torch.linalg.inv(precision[rows][:, rows])
        truth = 0.5 * float((hessian[rows][:, rows] * covariance).sum())
        assert abs(row.measured - truth) < 4 * row.standard_error
        assert row.linearised == pytest.approx(row.expected, rel=1e-6)
    first, last = found.calibration
    assert first.measured > 2 * first.linearised  # the residuals' part, which the GGN leaves out
    assert abs(last.measured - last.linearised) < 4 * last.standard_error


def test_a_linear_regression_is_calibrated_whatever_the_width_of_its_posterior() -> None:
    net = seeded(lambda: nn.Linear(4, 3))
    x, y = normal(20, 4, seed=1), normal(20, 3, seed=2)
    la = Laplace(net, Gaussian(0.5), structure="kron", prior_precision=0.3).fit([(x, y)], progress=False)
    found = la.where([(x, y)], calibration=True, draws=400, generator=generator(2), saliency=False)
    (row,) = found.calibration
    assert found.layer_names == ("(model)",)
    assert row.linearised == pytest.approx(row.expected, rel=1e-9)
    assert row.expected == pytest.approx(0.5 * found.layers[0].effective, rel=1e-9)
    assert abs(row.measured - row.expected) < 4 * row.standard_error < 0.2 * row.expected
    # Through the predictor alone, which knows the noise but not the facade, the numbers are the same.
    again = where(la.predictor, [(x, y)], calibration=True, draws=2, generator=generator(2), saliency=False)
    assert again.calibration[0].expected == pytest.approx(row.expected, rel=1e-9)
    # Half of the training data carry half of it, up to what each datum weighs.
    half = la.where([(x, y)], calibration=[(x[:10], y[:10])], draws=2, generator=generator(2), saliency=False)
    assert half.calibration[0].expected == pytest.approx(row.expected / 2, rel=1e-9)
    # A weight counts copies.
    weighted = [(x, y, torch.full((20,), 2.0, dtype=torch.float64))]
    twice = la.where([(x, y)], calibration=weighted, draws=2, generator=generator(2), saliency=False)
    assert twice.calibration[0].linearised == pytest.approx(2 * row.linearised, rel=1e-9)


def test_the_draws_have_the_conditional_covariance() -> None:
    from aftermap.analysis.parts import split_by_layer

    for structure in ("full", "low_rank", "kron"):
        la = fitted(structure, rank=20)
        precision = la.posterior.to_dense()
        for part in split_by_layer(la.posterior, la.model):
            for layer in part.layers:
                rows = by_module(la.model)[layer]
                drawn = part.draw(layer, 40_000, generator(1))
                flat = torch.cat([drawn[n].flatten(1) for n in part.layers[layer]], 1)
                truth = torch.linalg.inv(precision[rows][:, rows])
                error = (flat.T @ flat / len(flat) - truth).norm() / truth.norm()
                assert float(error) < 0.05
                half = 0.5 * float(len(rows) - truth.trace())
                assert part.half_effective(layer) == pytest.approx(half, rel=1e-7)


def test_saliency_is_the_slope_of_the_epistemic_uncertainty() -> None:
    la = fitted("full")
    found = la.where(look(), top=3, saliency=True)
    assert found.inputs.saliency.shape == (3, 4)

    def epistemic(x: Tensor) -> Tensor:
        return la.predict(x, generator=torch.Generator().manual_seed(seed)).epistemic

    # The draws of the link are fixed by a seed; the same one makes the same function of x.
    seed = int(torch.randint(2**31, (), generator=generator(0)))
    slopes = saliency_of(la.predictor, found.inputs.inputs, generator(0))
    for x, slope in zip(found.inputs.inputs, slopes, strict=True):
        for j in range(4):
            step = torch.zeros_like(x)
            step[0, j] = 1e-5
            assert float(slope[j]) == pytest.approx(float(epistemic(x + step) - epistemic(x - step)) / 2e-5, rel=1e-4)

    net, data = wave()
    la = Laplace(net, Gaussian(0.3), structure="kron").fit(data, progress=False)
    found = la.where(data, top=1)
    x, step = found.inputs.inputs[0], torch.zeros(1, 3, dtype=torch.float64)
    step[0, 1] = 1e-5
    rise = la.predict(x + step).epistemic.sum() - la.predict(x - step).epistemic.sum()
    assert float(found.inputs.saliency[0, 1]) == pytest.approx(float(rise) / 2e-5, rel=1e-5)
    with pytest.raises(Exception, match="a saliency map needs single floating-point inputs"):
        saliency_of(la.predictor, [torch.zeros(1, 3, dtype=torch.long)])


def test_the_posterior_of_an_optimiser() -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)))
    net.train()
    (x, y), _ = iris()
    optimiser = VOGN(net, lr=1e-2, n_data=len(x), prior_precision=3.0)
    for _ in range(3):
        optimiser.step(lambda: nn.functional.cross_entropy(net(x), y))
    posterior = optimiser.posterior()
    before = ModelSnapshot.of(net)
    found = posterior.where([(x, y)], calibration=True, draws=3, generator=generator(), top=2)
    check_unchanged(net, before)
    # Weight and bias have blocks of their own there; the layer holds both.
    assert found.layer_names == ("0", "3")
    assert [k.n_parameters for k in found.layers] == [40, 27]
    parts = posterior.variance_by_layer(x)
    whole = sum(float(v.sum()) for v in parts.values())
    for layer in found.layers:
        own = sum(float(v.sum()) for n, v in parts.items() if n.startswith(f"{layer.name}."))
        assert layer.predictive_share == pytest.approx(own / whole, rel=1e-9)
        effective = sum(v for n, v in posterior.posterior.effective_parameters().items() if n.startswith(layer.name))
        assert layer.effective == pytest.approx(effective, rel=1e-9)
    assert all(math.isfinite(r.measured) for r in found.calibration)


def test_a_posterior_known_by_products_alone() -> None:
    net, data = wave()
    dual = DualPosterior.from_data(net, data, Gaussian(0.3), 1.5)
    full = Laplace(net, Gaussian(0.3), structure="full", prior_precision=1.5).fit(data, progress=False)
    found = where(PosteriorPredictor(net, dual, Gaussian(0.3)), data, saliency=False)
    truth = full.where(data, saliency=False)
    for one, other in zip(found.layers, truth.layers, strict=True):
        assert one.predictive_share == pytest.approx(other.predictive_share, rel=1e-7)
        assert one.cross_share == pytest.approx(other.cross_share, rel=1e-6)
        assert one.effective == pytest.approx(other.effective, rel=1e-7)
    assert found.information == pytest.approx(truth.information, rel=1e-7)


def test_single_precision_and_binary_targets() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).eval()
    x = iris()[0][0].float()
    y = (iris()[0][1] == 1).float()[:, None]
    la = Laplace(net, "binary", structure="full").fit([(x, y)], progress=False)
    found = la.where([(x, y)], top=2)
    assert abs(math.fsum(k.predictive_share + k.cross_share for k in found.layers) - 1) < 1e-10
    assert found.kind == "binary"
    assert found.classes.counts["true"].tolist() == [int((y == 0).sum()), int(y.sum())]
    assert found.table("class")["class"] == ["0", "1"]
    assert found.inputs.saliency.shape == (2, 4)


def test_iris_maps_agree_in_order_between_structures() -> None:
    # The map is a property of the data: full, Kronecker and diagonal posteriors rank the weights alike.
    maps = {}
    for structure in ("full", "kron", "diagonal"):
        found = fitted(structure).where(look(), saliency=False, top=1)
        maps[structure] = torch.cat([m.contraction.flatten() for m in found.weights()])
    for structure in ("kron", "diagonal"):
        ranks = torch.stack([maps["full"].argsort().argsort().double(), maps[structure].argsort().argsort().double()])
        assert float(torch.corrcoef(ranks)[0, 1]) > 0.6
    # A diagonal precision is never wider than the full marginal: 1/P_ii ≤ (P⁻¹)_ii.
    assert bool((maps["diagonal"] >= maps["full"] - 1e-9).all())
    assert iris_net()[0].weight.grad is None
