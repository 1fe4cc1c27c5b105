"""What every block posterior inherits for the covariance by layer, against what full and low-rank ones know better."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from aftermap.batches import Batch
from aftermap.curvature import fit_curvature
from aftermap.curvature.passes.plan import CheckedPlan
from aftermap.curvature.structures import layer_parts, low_rank
from aftermap.curvature.structures.base import BlockPosterior
from aftermap.curvature.structures.layer_parts import BlockLayerParts, DenseLayerParts, WholeLayer
from aftermap.curvature.structures.low_rank import LowRankLayerParts
from aftermap.posteriors import GaussianPosterior
from aftermap.predictive.linearised import output_gradients

LAYERS = {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias")}


def posterior_of(structure: str) -> tuple[nn.Module, GaussianPosterior]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    data = [(torch.randn(15, 3, dtype=torch.float64), torch.randint(2, (15,)))]
    factors = fit_curvature(model, data, "classification", structure=structure, rank=8, progress=False)
    return model, GaussianPosterior.from_factors(factors, dict(model.named_parameters()), {"0": 0.5, "2": 2.0})


@pytest.mark.parametrize("structure, kind", [("full", DenseLayerParts), ("low_rank", LowRankLayerParts)])
@pytest.mark.parametrize("diagonal", [False, True])
def test_the_inherited_split_agrees_with_the_own_one(structure: str, kind: type, diagonal: bool) -> None:
    model, posterior = posterior_of(structure)
    block = posterior.blocks[0]
    own = block.split_by_layer(LAYERS, posterior.prior)
    inherited = BlockPosterior.split_by_layer(block, LAYERS, posterior.prior)
    assert isinstance(own, kind)
    assert isinstance(inherited, BlockLayerParts)
    assert own.has_cross_terms
    assert inherited.has_cross_terms
    assert own.has_conditionals
    assert not inherited.has_conditionals
    x = torch.randn(5, 3, dtype=torch.float64)
    checked = CheckedPlan(model, posterior.names, Batch(x, None, None, 5))
    total = None
    for _, _, _, gradients in output_gradients(checked, Batch(x, None, None, 5)):
        left, right = own.covariances(gradients, diagonal), inherited.covariances(gradients, diagonal)
        assert_close(right.own, left.own, rtol=1e-9, atol=1e-11)
        assert_close(right.cross, left.cross, rtol=1e-9, atol=1e-11)
        total = sum(right.own.values()) + sum(right.cross.values())
        assert_close(total, block.functional_covariance(gradients, [block], diagonal)[0], rtol=1e-9, atol=1e-11)
    assert total is not None
    for layer in LAYERS:
        assert_close(inherited.variance(layer), own.variance(layer), rtol=1e-9, atol=1e-12)
        assert inherited.effective()[layer] == pytest.approx(own.effective()[layer], rel=1e-8)
        assert math.isnan(inherited.half_effective(layer))
        assert {n: v.shape[0] for n, v in inherited.draw(layer, 3, None).items()} == dict.fromkeys(LAYERS[layer], 3)
    assert inherited.information()[1] == pytest.approx(own.information()[1], rel=1e-9)


@pytest.mark.parametrize("structure, module", [("full", layer_parts), ("low_rank", low_rank)])
@pytest.mark.parametrize("layer", list(LAYERS))
def test_draws_of_a_layer_are_those_with_all_others_at_their_means(
    structure: str, module: ModuleType, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draws are linear in their numbers: those of the identity have exactly the covariance."""
    _, posterior = posterior_of(structure)
    (block,) = posterior.blocks
    monkeypatch.setattr(module, "normal_like", lambda like, generator: torch.eye(len(like), dtype=like.dtype))
    places = torch.cat([torch.full((math.prod(s),), n in LAYERS[layer]) for n, s in block.shapes.items()])
    parts = block.split_by_layer(LAYERS, posterior.prior)
    deviations = parts.draw(layer, int(places.sum()), None)
    drawn = torch.cat([deviations[n].flatten(1) for n in block.shapes if n in deviations], 1)
    conditional = torch.linalg.inv(block.to_dense()[places][:, places])
    assert_close(drawn.T @ drawn, conditional, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal"])
def test_a_block_of_one_layer_is_that_layer(structure: str) -> None:
    _, posterior = posterior_of(structure)
    for block, (layer, names) in zip(posterior.blocks, LAYERS.items(), strict=True):
        part = block.split_by_layer({layer: names}, posterior.prior)
        assert isinstance(part, WholeLayer)
        assert list(part.layers) == [layer]
        assert not part.has_cross_terms
        assert part.kind == block.source.kind


@pytest.mark.parametrize("structure", ["full", "low_rank"])
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("inherited", [False, True])
def test_few_examples_at_a_time_change_nothing(
    structure: str, diagonal: bool, inherited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, posterior = posterior_of(structure)
    block = posterior.blocks[0]
    parts = (BlockPosterior if inherited else type(block)).split_by_layer(block, LAYERS, posterior.prior)
    batch = Batch(torch.randn(7, 3, dtype=torch.float64), None, None, 7)
    (gradients,) = [g for _, _, _, g in output_gradients(CheckedPlan(model, posterior.names, batch), batch)]
    whole = parts.covariances(gradients, diagonal)
    for module in (layer_parts, low_rank):
        if hasattr(module, "examples_per_chunk"):
            monkeypatch.setattr(module, "examples_per_chunk", lambda *_: 3)
    found = parts.covariances(gradients, diagonal)
    for kind in ("own", "cross", "conditional"):
        assert set(getattr(found, kind)) == set(getattr(whole, kind))
        for layer, value in getattr(whole, kind).items():
            assert value.shape == ((7, 2) if diagonal else (7, 2, 2))
            assert_close(getattr(found, kind)[layer], value)


@pytest.mark.parametrize("layer", list(LAYERS))
def test_draws_of_a_layer_without_a_precision_have_its_marginal_covariance(
    layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, posterior = posterior_of("full")
    (block,) = posterior.blocks
    covariance = torch.linalg.inv(block.to_dense())
    parts = DenseLayerParts(LAYERS, covariance, None, torch.ones(len(covariance)).double(), block.shapes, None, 0.0)
    rows = parts.rows[layer]
    # Numbers whose Gram matrix is the identity, more of them than the layer has weights.
    numbers = torch.linalg.qr(torch.randn(len(rows) + 3, len(rows), dtype=torch.float64))[0]
    monkeypatch.setattr(layer_parts, "normal_like", lambda like, generator: numbers)
    drawn = torch.cat([v.flatten(1) for v in parts.draw(layer, len(numbers), None).values()], 1)
    assert_close(drawn.T @ drawn, covariance[rows][:, rows], rtol=1e-9, atol=1e-11)
