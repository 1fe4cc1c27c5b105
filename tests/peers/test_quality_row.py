"""The row of laplace-torch in the quality benchmark is its default: last layer, Kronecker factors, marginal likelihood."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.peers

pytest.importorskip("laplace")
methods = pytest.importorskip("benchmarks.quality.methods")
tasks = pytest.importorskip("benchmarks.quality.tasks")
training = pytest.importorskip("benchmarks.quality.training")


@pytest.mark.parametrize("name", ["quick_wine", "quick_diabetes"])
def test_it_is_measured_like_the_others(name: str, tmp_path: Path) -> None:
    prepared = training.prepare(tasks.QUICK[name], 0, tmp_path, tmp_path)
    (row,) = methods.METHODS["laplace_torch"].run(prepared, 1)
    (network,) = methods.METHODS["network"].run(prepared, 1)
    assert abs(row["nll"] - network["nll"]) < 0.5
    if name == "quick_wine":
        assert row["accuracy"] == network["accuracy"]  # the probit link does not change the order of classes much
        assert set(row["ood"]) == set(network["ood"])
    else:
        assert 0.8 < row["cover95"] <= 1
        assert row["rmse"] == pytest.approx(network["rmse"], rel=1e-5)  # linearised at the trained weights


def test_one_logit_is_left_out(tmp_path: Path) -> None:
    prepared = training.prepare(tasks.QUICK["quick_breast_cancer"], 0, tmp_path, tmp_path)
    with pytest.raises(methods.Skip, match="no likelihood for one logit"):
        next(methods.METHODS["laplace_torch"].run(prepared, 1))
