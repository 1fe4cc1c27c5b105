"""No probability sees a number that is added to all logits of an input, so nothing that is tuned or predicted may depend on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import aftermap as am
from aftermap.likelihoods import Categorical
from aftermap.predictive.links import gaussian_prediction
from tests.laplace.problems import normal, seeded


class Shifted(nn.Module):
    """A classifier whose logits have their logsumexp taken off, or anything else that is common to them."""

    def __init__(self, network: nn.Module, shift: str):
        super().__init__()
        self.network, self.shift = network, shift

    def forward(self, x: Tensor) -> Tensor:
        logits = self.network(x)
        if self.shift == "log_softmax":
            return logits.log_softmax(-1)
        return logits + 3 * logits[:, :1].square() if self.shift == "square" else logits


def trained(classes: int) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    x = normal(260, 4, seed=0)
    y = (x[:, :classes] + 0.7 * normal(260, classes, seed=1)).argmax(1)
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, classes)).double())
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[:100]), y[:100]).backward()
        optimiser.step()
    return model.eval(), (x[:100], y[:100]), (x[100:], y[100:])


@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.parametrize("shift", ["log_softmax", "square"])
@pytest.mark.parametrize("labels", [True, False])
def test_tuning_and_predictions_do_not_see_a_common_shift(structure: str, shift: str, labels: bool) -> None:
    model, train, val = trained(4)
    tuned = [
        am.Laplace(Shifted(model, kind).eval(), "classification", structure=structure)
        .fit([train], progress=False)
        .tune([val] if labels else None)
        for kind in ("none", shift)
    ]
    for what in ("data_scale", "output_temperature"):
        plain, shifted = (getattr(laplace, what) for laplace in tuned)
        assert_close(shifted, plain, rtol=1e-6, atol=0)
    plain, shifted = (laplace.predict(val[0], link="mc") for laplace in tuned)
    assert_close(shifted.mean, plain.mean, rtol=1e-5, atol=1e-7)
    assert_close(shifted.epistemic, plain.epistemic, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_draws_of_a_shifted_gaussian_are_the_same_and_right(classes: int) -> None:
    root, mean = normal(5, classes, classes, seed=3), normal(5, classes, seed=4)
    cov = root @ root.mT
    shift = normal(5, classes, classes, seed=5)
    shift[:, 1:] = shift[:, :1]  # the same change of every logit: 1 uᵀ
    seen = (torch.eye(classes, dtype=torch.float64) + shift) @ root
    plain = gaussian_prediction(Categorical(), mean, cov, link="mc", samples=4000)
    moved = gaussian_prediction(Categorical(), mean + 5, seen @ seen.mT, link="mc", samples=4000)
    assert_close(moved.mean, plain.mean, rtol=1e-6, atol=1e-9)
    generator = torch.Generator().manual_seed(0)
    draws = mean + torch.einsum(
        "nij,sj->sni", root, torch.randn(200_000, classes, generator=generator, dtype=torch.float64)
    )
    p = draws.softmax(-1)
    assert_close(plain.mean, p.mean(0), rtol=0, atol=0.01)
    entropy = -(p * p.log()).sum(-1).mean(0)
    assert_close(plain.aleatoric, entropy, rtol=0, atol=0.02)
