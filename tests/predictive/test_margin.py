"""The cheap prediction of classes: one backward pass, the exact variance of one difference, which stands for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from aftermap.errors import InputError
from aftermap.laplace import Laplace
from aftermap.predictive.linearised import margin_gaussian
from tests.laplace.problems import classes, mlp, normal, regression, seeded

X = normal(9, 3, seed=4)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full", "low_rank", "subset"])
@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_the_variance_of_the_leading_difference_is_exact(structure: str, params: str) -> None:
    laplace = Laplace(mlp(), "classification", structure=structure, params=params).fit(classes(), progress=False)
    mean, covariance = laplace.joint(X)
    found = margin_gaussian(
        laplace.predictor.plan(laplace.predictor.inputs(X)), laplace.posterior, laplace.predictor.inputs(X)
    )
    for i in range(len(X)):
        a, b = mean[i].topk(2).indices.tolist()
        block = covariance[i, :, i, :]
        expected = block[a, a] + block[b, b] - block[a, b] - block[b, a]
        assert_close(2 * found.var[i], expected.expand(mean.shape[1]).to(found.var), rtol=1e-6, atol=1e-10)
    assert_close(found.mean, mean)
    assert found.cov is None


def test_with_two_classes_nothing_is_lost() -> None:
    """Two logits have one difference, so that the cheap prediction is that of the whole covariance."""
    x, y = normal(40, 3, seed=1), torch.arange(40) % 2
    laplace = Laplace(mlp(3, 5, 2), "classification").fit([(x, y)], progress=False)
    exact, cheap = (laplace.predict(X, kind=kind, link="pairwise") for kind in ("linearised", "margin"))
    assert_close(cheap.mean, exact.mean, rtol=1e-6, atol=1e-8)


def test_one_logit_is_exact() -> None:
    x, y = normal(40, 3, seed=1), (torch.arange(40) % 2)[:, None].double()
    laplace = Laplace(mlp(3, 5, 1), "binary").fit([(x, y)], progress=False)
    assert_close(laplace.predict(X, kind="margin").mean, laplace.predict(X).mean)


def test_positions_have_their_own_differences() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = seeded(Tokens).eval()
    x, y = normal(6, 5, 3, seed=2), torch.arange(30).reshape(6, 5) % 4
    laplace = Laplace(model, "classification").fit([(x, y)], progress=False)
    whole = laplace.predict(x, kind="margin")
    one = Laplace(model, "classification").fit([(x, y)], progress=False)
    for position in range(5):
        alone = one.predict(x[:, position : position + 1], kind="margin")
        assert_close(whole.latent_var[:, position : position + 1], alone.latent_var)  # type: ignore[index]


@pytest.mark.parametrize(
    ("likelihood", "data", "options"),
    [("regression", regression(), {}), ("classification", classes(), {"differentiable": True})],
)
def test_what_the_cheap_prediction_is_not_for(likelihood: str, data: Any, options: dict[str, Any]) -> None:
    model = mlp(1, 6, 1) if likelihood == "regression" else mlp()
    laplace = Laplace(model, likelihood).fit(data, progress=False)
    with pytest.raises(InputError, match="kind='margin' is the cheap prediction of classes; use kind='linearised'"):
        laplace.predict(data[0][0], kind="margin", **options)
