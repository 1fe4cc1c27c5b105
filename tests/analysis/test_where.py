"""Layers, weights and classes against brute force: the Jacobian and the covariance as matrices."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from aftermap.analysis import Where, where
from aftermap.curvature import reference
from aftermap.errors import StatisticalWarning, UnsupportedError
from aftermap.laplace import Laplace, Subnetwork
from aftermap.likelihoods import Categorical, Gaussian
from aftermap.testing.predictor import ModelSnapshot, check_unchanged
from tests.analysis.cases import (
    STRUCTURES,
    Reused,
    Tied,
    by_module,
    fitted,
    generator,
    iris,
    iris_net,
    look,
    normal,
    normed,
    seeded,
    wave,
)

INDEPENDENT = ("kron", "ekfac", "kfra", "diagonal")


def brute(la: Laplace, data: list[tuple[Tensor, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """own, cross and conditional covariances [N, C, C] of every module, from J, Σ and P as matrices."""
    x = torch.cat([b[0] for b in data])
    jacobian = reference.jacobian(la.model, x)
    precision = la.posterior.to_dense()
    sigma = torch.linalg.inv(precision)
    found: dict[str, dict[str, Tensor]] = {}
    for name, rows in by_module(la.model).items():
        part = jacobian[..., rows]
        own = part @ sigma[rows][:, rows] @ part.mT
        all_of_it = part @ sigma[rows] @ jacobian.mT
        held = part @ torch.linalg.inv(precision[rows][:, rows]) @ part.mT
        found[name] = {"own": own, "cross": (all_of_it + all_of_it.mT) / 2 - own, "conditional": held}
    return found


@pytest.mark.parametrize("structure", STRUCTURES)
def test_layer_shares_equal_brute_force_and_add_up(structure: str) -> None:
    la = fitted(structure, prior_precision=2.0)
    found = la.where(look(), saliency=False)
    truth = brute(la, look())
    whole = sum(float((t["own"] + t["cross"]).diagonal(dim1=1, dim2=2).sum()) for t in truth.values())
    assert found.layer_names == ("0", "2")
    for layer in found.layers:
        own = truth[layer.name]["own"].diagonal(dim1=1, dim2=2)
        assert layer.predictive_share == pytest.approx(float(own.sum()) / whole, rel=1e-8)
        torch.testing.assert_close(torch.tensor(layer.by_output, dtype=torch.float64), own.mean(0), rtol=1e-8, atol=0.0)
        if found.crosses:
            cross = float(truth[layer.name]["cross"].diagonal(dim1=1, dim2=2).sum()) / whole
            assert layer.cross_share == pytest.approx(cross, rel=1e-7)
            held = {k: float(t["conditional"].diagonal(dim1=1, dim2=2).sum()) for k, t in truth.items()}
            assert layer.conditional_share == pytest.approx(held[layer.name] / sum(held.values()), rel=1e-7)
    shares = math.fsum(k.predictive_share + (k.cross_share or 0.0) for k in found.layers)
    assert abs(shares - 1) < 1e-10
    # The sum is the variance that predict() reports, by another path.
    variance = torch.cat([la.predict(x).latent_var for x, _ in look()])
    total = math.fsum(k.predictive_variance * (1 + (k.cross_share or 0.0) / k.predictive_share) for k in found.layers)
    assert total == pytest.approx(float(variance.sum(1).mean()), rel=1e-8)
    assert found.crosses == (structure not in INDEPENDENT)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_layer_numbers_equal_their_matrices(structure: str) -> None:
    la = fitted(structure, prior_precision={"0": 1.3, "2": 0.6})
    found = la.where(look(), saliency=False)
    sigma = torch.linalg.inv(la.posterior.to_dense())
    traces = {}
    for name, rows in by_module(la.model).items():
        tau = float(la.posterior.prior.precision[f"{name}.weight"])
        own, layer = sigma[rows][:, rows], found[name]
        traces[name] = float(own.trace())
        assert layer.n_parameters == len(rows)
        assert layer.effective == pytest.approx(len(rows) - tau * traces[name], rel=1e-7)
        gained = -0.5 * float(torch.logdet(own)) - 0.5 * len(rows) * math.log(tau)
        assert layer.information == pytest.approx(gained, rel=1e-7)
        assert layer.variance == pytest.approx(traces[name], rel=1e-8)
        # Effective parameters of the neurons add up to the layer's.
        units = layer.weights.units
        assert float(sum(u.effective.sum() for u in units)) == pytest.approx(layer.effective, rel=1e-7)
        assert [len(u.count) for u in units] == [{"0": 8, "2": 3}[name]]
    for name, trace in traces.items():
        assert found[name].posterior_share == pytest.approx(trace / sum(traces.values()), rel=1e-8)
    assert found.information == pytest.approx(0.5 * float(la.posterior.log_det_ratio()), rel=1e-7)
    # What several layers learnt together is never negative.
    assert found.information >= sum(k.information for k in found.layers) - 1e-9


@pytest.mark.parametrize("structure", ["kron", "full", "low_rank"])
def test_epistemic_shares_are_the_curvature_times_the_covariance(structure: str) -> None:
    la = fitted(structure)
    found = la.where(list(iris()), saliency=False)
    truth = brute(la, list(iris()))
    curvature = Categorical().hessian(iris_net()(torch.cat([x for x, _ in iris()])).detach())
    nats = {k: 0.5 * float((curvature * t["own"]).sum()) for k, t in truth.items()}
    both = {k: nats[k] + 0.5 * float((curvature * t["cross"]).sum()) for k, t in truth.items()}
    for layer in found.layers:
        assert layer.nats == pytest.approx(nats[layer.name] / found.n_data, rel=1e-7)
        assert layer.epistemic_share == pytest.approx(nats[layer.name] / sum(both.values()), rel=1e-7)
    if structure == "full":
        # For the exact posterior Σ tr(Λ V) over the training data is γ (docs/mathematics/tuning.md).
        gamma = sum(k.effective for k in found.layers)
        assert 2 * sum(both.values()) == pytest.approx(gamma, rel=1e-7)


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full", "low_rank", "matrix_free"])
def test_maps_of_single_weights(structure: str) -> None:
    la = fitted(structure, prior_precision=1.7)
    found = la.where(look(), saliency=False)
    variance = torch.linalg.inv(la.posterior.to_dense()).diagonal()
    start = 0
    for each in found.weights():
        own = variance[start : start + each.value.numel()].reshape(each.value.shape)
        start += each.value.numel()
        torch.testing.assert_close(each.variance, own, rtol=1e-7, atol=1e-12)
        torch.testing.assert_close(each.contraction, 1 - 1.7 * own, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(each.snr, each.value.abs() / own.sqrt(), rtol=1e-6, atol=1e-12)
    assert start == 67
    assert [m.name for m in found.weights("2")] == ["2.weight", "2.bias"]
    rows = found.table("weight")
    assert rows["parameter"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert sum(found["0"].weights.contraction_counts) == 40 == sum(found["0"].weights.snr_counts)


def test_a_weak_prior_leaves_the_parts_of_low_rank_layers_as_they_are_for_the_full_matrix() -> None:
    """Two layers that the data determine completely: nothing of the prior's large variance must be left by cancellation."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x[:, :2]) + self.second(100 * x[:, 2:])

    net, x = Sum().double(), normal(40, 5)
    data = [(x, x[:, :1])]
    parts = {}
    for structure in ("full", "low_rank"):
        la = Laplace(net, "regression", structure=structure, rank=5, prior_precision=1e-10).fit(data)
        parts[structure] = la.where(data, saliency=False).layers
    for low_rank, full in zip(parts["low_rank"], parts["full"], strict=True):
        assert low_rank.nats == pytest.approx(full.nats, rel=1e-6)
        assert low_rank.predictive_share == pytest.approx(full.predictive_share, rel=1e-6)
        assert low_rank.conditional_share == pytest.approx(full.conditional_share, rel=1e-6)
        assert low_rank.posterior_share == pytest.approx(full.posterior_share, rel=1e-6)


def test_a_large_matrix_free_posterior_is_cut_by_solves_and_by_samples() -> None:
    la = fitted("matrix_free", prior_precision=2.0)
    (x, y), _ = look()
    few = [(x[:5], y[:5])]
    exact = la.where(few, saliency=False)
    for kind, tolerance in (("cg", 1e-6), ("samples", 0.5)):
        settled = la.posterior.with_settings(dense_limit=5, kind=kind, samples=150)
        la._fitted = replace(la.fitted, posterior=settled)
        found = la.where(few, saliency=False)
        for layer, truth in zip(found.layers, exact.layers, strict=True):
            assert layer.predictive_share == pytest.approx(truth.predictive_share, rel=tolerance)
            assert math.isnan(layer.information)
            assert layer.conditional_share is None
            assert layer.effective == pytest.approx(truth.effective, rel=0.35)
        assert abs(math.fsum(k.predictive_share + k.cross_share for k in found.layers) - 1) < 1e-10


def test_regression_with_noise_and_several_outputs() -> None:
    net, data = wave()
    la = Laplace(net, Gaussian(0.2), structure="full").fit(data, progress=False)
    found = la.where(data, top=3)
    truth = brute(la, data)
    whole = sum(float((t["own"] + t["cross"]).diagonal(dim1=1, dim2=2).sum()) for t in truth.values())
    for layer in found.layers:
        own = float(truth[layer.name]["own"].diagonal(dim1=1, dim2=2).sum())
        assert layer.predictive_share == pytest.approx(own / whole, rel=1e-8)
    covariance = sum(t["own"] + t["cross"] for t in truth.values())
    torch.testing.assert_close(found.classes.covariance, covariance.mean(0), rtol=1e-8, atol=1e-12)
    assert found.kind == "regression"
    assert found.table("class")["output"] == ["0", "1"]
    assert found.classes.counts == {}
    # Epistemic: variance averaged over outputs; the most uncertain input has the largest.
    each = covariance.diagonal(dim1=1, dim2=2).mean(1)
    torch.testing.assert_close(found.inputs.all_epistemic, each, rtol=1e-8, atol=1e-12)
    assert found.inputs.indices.tolist() == each.argsort(descending=True)[:3].tolist()
    torch.testing.assert_close(found.inputs.aleatoric, torch.full((3,), 0.04, dtype=torch.float64))


def test_classes_average_by_true_and_predicted_class() -> None:
    la = fitted("kron")
    found = la.where(list(iris()), saliency=False, classes=["setosa", "versicolor", "virginica"])
    x, y = torch.cat([b[0] for b in iris()]), torch.cat([b[1] for b in iris()])
    prediction = la.predict(x, generator=generator())
    latent, answer = prediction.latent_cov, prediction.labels
    for word, labels in (("true", y), ("predicted", answer)):
        assert found.classes.counts[word].tolist() == torch.bincount(labels, minlength=3).tolist()
        for k in range(3):
            torch.testing.assert_close(
                found.classes.by_class[word][k], latent[labels == k].mean(0), rtol=1e-9, atol=1e-12
            )
    torch.testing.assert_close(found.classes.covariance, latent.mean(0), rtol=1e-9, atol=1e-12)
    own = latent.mean(0).diagonal()
    torch.testing.assert_close(found.classes.contrast, own[:, None] + own - 2 * latent.mean(0))
    torch.testing.assert_close(found.classes.correlation.diagonal(), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(found.classes.pair_counts.sum(1), torch.bincount(y, minlength=3))
    right = torch.stack([(answer[y == k] == k).double().mean() for k in range(3)])
    torch.testing.assert_close(found.classes.accuracy, right)
    torch.testing.assert_close(found.classes.layer_shares["true"].sum(1), torch.ones(3, dtype=torch.float64))
    assert found.table("class")["class"] == ["setosa", "versicolor", "virginica"]
    with pytest.raises(Exception, match="classes= names 2 outputs, but the model has 3"):
        la.where(list(iris()), saliency=False, classes=["a", "b"])


def test_splitting_the_batches_changes_nothing() -> None:
    la = fitted("full")
    x, y = torch.cat([b[0] for b in iris()]), torch.cat([b[1] for b in iris()])
    one = la.where([(x, y)], top=5)
    many = la.where(list(zip(x.split(37), y.split(37), strict=True)), top=5)
    assert one.inputs.indices.tolist() == many.inputs.indices.tolist()
    torch.testing.assert_close(one.inputs.saliency, many.inputs.saliency)
    for a, b in zip(one.layers, many.layers, strict=True):
        assert a.predictive_share == pytest.approx(b.predictive_share, rel=1e-12)
    torch.testing.assert_close(one.classes.pairs, many.classes.pairs, equal_nan=True)


def test_norm_layers_groups_and_transposed_convolutions() -> None:
    net = seeded(normed)
    x, y = normal(9, 2, 6, 5, seed=2), torch.arange(9) % 3
    for structure in ("kron", "diagonal", "full"):
        la = Laplace(net, "classification", structure=structure).fit([(x, y)], progress=False)
        found = la.where([(x, y)], saliency=False)
        assert found.layer_names == ("0", "1", "3", "6")
        assert [k.layer.kind for k in found.layers] == ["Conv2d", "BatchNorm2d", "ConvTranspose2d", "Linear"]
        assert abs(math.fsum(k.predictive_share + (k.cross_share or 0.0) for k in found.layers) - 1) < 1e-10
        truth = brute(la, [(x, y)])
        whole = sum(float((t["own"] + t["cross"]).diagonal(dim1=1, dim2=2).sum()) for t in truth.values())
        for layer in found.layers:
            own = float(truth[layer.name]["own"].diagonal(dim1=1, dim2=2).sum())
            assert layer.predictive_share == pytest.approx(own / whole, rel=1e-8)
    # Units are output channels: 6 of the transposed convolution, each with its bias.
    units = found["3"].weights.units
    assert [len(u.count) for u in units] == [6]
    weight, bias = (m.contraction for m in found.weights("3"))
    by_hand = [float(weight[2 * (u // 3) : 2 * (u // 3) + 2, u % 3].sum() + bias[u]) for u in range(6)]
    torch.testing.assert_close(units[0].effective, torch.tensor(by_hand, dtype=torch.float64))


def test_tied_and_reused_layers() -> None:
    tied = seeded(Tied)
    tokens, y = torch.randint(5, (11, 4), generator=generator(1)), torch.arange(11) % 5
    la = Laplace(tied, "classification").fit([(tokens, y)], progress=False)
    found = la.where([(tokens, y)])
    assert found.layer_names == ("table", "mix", "head")
    assert found["table"].layer.modules == ("table", "head")
    assert "tied weights, counted once: table (table, head)" in str(found)
    assert found.inputs.saliency is None  # tokens have no gradient
    truth = brute(la, [(tokens, y)])
    whole = sum(float((t["own"] + t["cross"]).diagonal(dim1=1, dim2=2).sum()) for t in truth.values())
    for layer in found.layers:
        own = float(truth[layer.name]["own"].diagonal(dim1=1, dim2=2).sum())
        assert layer.predictive_share == pytest.approx(own / whole, rel=1e-8)

    reused = seeded(Reused)
    x = normal(13, 4, seed=8)
    found = Laplace(reused, "classification").fit([(x, torch.arange(13) % 3)], progress=False).where([(x, None)])
    assert {k.name: k.calls for k in found.layers} == {"first": 1, "again": 3, "head": 1}
    assert "true" not in found.classes.counts
    assert found.classes.accuracy is None


def test_last_layer_and_subnetwork_say_what_is_certain() -> None:
    la = fitted("full", params="last_layer")
    found = la.where(list(iris()))
    assert found.layer_names == ("2",)
    assert found["2"].predictive_share == pytest.approx(1.0, abs=1e-12)
    assert found.certain == ("0.weight", "0.bias")
    assert "not in the posterior, so certain: 0.weight, 0.bias" in str(found)

    la = Laplace(iris_net(), "classification", params=Subnetwork(size=20)).fit(list(iris()), progress=False)
    found = la.where(list(iris()), saliency=False, calibration=True, draws=2, generator=generator())
    assert sum(k.n_parameters for k in found.layers) == 20
    fixed = sum(int(m.contraction.isnan().sum()) for m in found.weights())
    assert fixed == sum(m.value.numel() for m in found.weights()) - 20
    assert abs(math.fsum(k.predictive_share + k.cross_share for k in found.layers) - 1) < 1e-10
    variance = torch.cat([la.predict(x).latent_var for x, _ in iris()])
    own = sum(k.predictive_variance * (1 + k.cross_share / k.predictive_share) for k in found.layers)
    assert own == pytest.approx(float(variance.sum(1).mean()), rel=1e-9)
    for row in found.calibration:
        assert row.linearised == pytest.approx(row.expected, rel=1e-6)


def test_positions_of_tokens_are_rows() -> None:
    class PerToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.first(x)))

    net = seeded(PerToken)
    x, y = normal(6, 7, 4, seed=1), torch.randint(3, (6, 7), generator=generator(2))
    la = Laplace(net, "classification", structure="full").fit([(x, y)], progress=False)
    found = la.where([(x, y)], top=2, saliency=False)
    assert int(found.classes.counts["true"].sum()) == 42
    jacobian, sigma = reference.jacobian(net, x), torch.linalg.inv(la.posterior.to_dense())
    whole = float(torch.einsum("nip,pq,niq->", jacobian, sigma, jacobian))
    for name, rows in by_module(net).items():
        part = jacobian[..., rows]
        own = float(torch.einsum("nip,pq,niq->", part, sigma[rows][:, rows], part))
        assert found[name].predictive_share == pytest.approx(own / whole, rel=1e-8)
        assert found[name].predictive_variance == pytest.approx(own / 42, rel=1e-8)


def test_many_outputs_take_variances_only() -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 70)))
    x, y = normal(5, 2), torch.arange(5)
    la = Laplace(net, "classification", structure="full").fit([(x, y)], progress=False)
    found = la.where([(x, y)], saliency=False, top=2)
    assert found.classes.covariance is None
    assert found.layers[0].epistemic_share is None
    torch.testing.assert_close(
        found.classes.variance, la.predict(x, diagonal=True).latent_var.mean(0), rtol=1e-8, atol=1e-12
    )
    with pytest.raises(Exception, match="covariances of 70 outputs were not taken"):
        found.figure("classes")


def test_result_is_plain_and_the_model_is_unchanged(tmp_path) -> None:
    la = fitted("full")
    la.model.train()  # a network without dropout may stand in any mode
    before = ModelSnapshot.of(la.model)
    found = la.where(list(iris()), calibration=True, draws=2, generator=generator(), top=4)
    check_unchanged(la.model, before)
    la.model.eval()
    assert isinstance(found, Where)
    content = json.loads(found.to_json(tmp_path / "where.json", inputs=True))
    assert json.loads((tmp_path / "where.json").read_text()) == content
    assert content["layer"]["layer"] == ["0", "2"]
    assert len(content["inputs"]) == 4
    assert len(content["saliency"]) == 4
    assert "inputs" not in found.to_dict()
    for level in ("layer", "filter", "class", "input", "weight", "calibration"):
        table = found.table(level)
        assert len({len(v) for v in table.values()}) == 1
        assert str(table).splitlines()[1].startswith("---")
    assert len(found.table("filter")["unit"]) == 11
    assert "layers depend on each other" in str(found)
    assert "own share" in str(found)
    assert "cross share" not in str(found)
    shares = found.readable_layers()["own share"]
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) == pytest.approx(1)
    assert where(la, list(iris()), saliency=False).layers[0].effective == found.layers[0].effective
    assert la.predictor.where(list(iris()), saliency=False).n_data == 150


def test_bad_input_names_what_is_wrong() -> None:
    la = fitted("kron")
    with pytest.raises(
        Exception, match=r"where\(\) needs a Gaussian posterior over weights, which a Linear does not have"
    ):
        where(nn.Linear(2, 2), list(iris()))
    with pytest.raises(Exception, match="top=0 must be a whole number"):
        la.where(list(iris()), top=0)
    with pytest.raises(Exception, match="draws=True must be a whole number"):
        la.where(list(iris()), draws=True)
    with pytest.raises(Exception, match="the data are empty"):
        la.where([])
    with pytest.raises(Exception, match="can be read only once"):
        la.where(iter(iris()), calibration=True)
    with pytest.raises(Exception, match="calibration compares training losses"):
        la.where([(iris()[0][0], None)], calibration=True, saliency=False)
    with pytest.raises(Exception, match="the model does not accept inputs of shape"):
        la.where([(normal(3, 9), torch.zeros(3, dtype=torch.long))])
    with pytest.raises(Exception, match="not been fitted yet"):
        Laplace(iris_net(), "classification").where(list(iris()))
    found = la.where(list(iris()), saliency=False, top=2)
    with pytest.raises(Exception, match="level='neuron' is not known; allowed are 'layer'"):
        found.table("neuron")
    with pytest.raises(Exception, match="there is no layer 'fc' in the posterior; there are: 0, 2"):
        next(found.weights("fc"))
    with pytest.raises(Exception, match="the calibration test was not asked for"):
        found.table("calibration")
    with pytest.raises(Exception, match="figure='pie' is not known; allowed are 'layers'"):
        found.figure("pie")
    with pytest.raises(Exception, match="no saliency maps were made"):
        found.figure("saliency")


def test_pixel_outputs_have_no_saliency_map_unless_asked_for() -> None:
    seeded = torch.Generator().manual_seed(2)
    net = nn.Conv2d(2, 3, 3, padding=1).double()
    pixels = nn.Sequential(net, Channels())
    x = torch.randn(4, 2, 3, 5, generator=seeded, dtype=torch.float64)
    y = torch.randint(3, (4, 3, 5), generator=seeded)
    found = Laplace(pixels, "classification").fit([(x, y)], progress=False).where([(x, y)])
    assert found.inputs.saliency is None
    torch.testing.assert_close(sum(layer.predictive_share for layer in found.layers), 1.0)


class Channels(nn.Module):
    """[N, C, H, W] -> [N, H, W, C]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.movedim(1, -1)


class Distances(nn.Module):
    """Its distances have a first derivative and no second."""

    def __init__(self) -> None:
        super().__init__()
        self.centres, self.out = nn.Parameter(normal(4, 2)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.exp(-torch.cdist(x, self.centres)))


def test_a_network_that_has_no_saliency_maps_keeps_its_tables() -> None:
    la = Laplace(seeded(Distances), "classification").fit([(normal(9, 2), torch.arange(9) % 3)], progress=False)
    data = [(normal(5, 2, seed=1), torch.arange(5) % 3)]
    with pytest.warns(StatisticalWarning, match="no saliency maps: .*saliency=False"):
        found = la.where(data)
    assert found.inputs.saliency is None
    assert sum(found.table("layer")["predictive share"]) == pytest.approx(1.0)
    with pytest.raises(UnsupportedError, match="differentiates the network twice.*saliency=False"):
        la.where(data, saliency=True)
    assert la.where(data, saliency=False).inputs.saliency is None
