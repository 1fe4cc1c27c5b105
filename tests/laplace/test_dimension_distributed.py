"""Two processes with uneven parts of the data match the dimension as one process does with all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from aftermap.curvature.passes.products import GGNOperator
from aftermap.laplace import Laplace
from aftermap.likelihoods import Categorical
from tests.laplace.dimension_worker import normalised, results, run
from tests.laplace.problems import classes
from tests.processes import from_two_processes


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_two_processes_equal_one(tmp_path: Path) -> None:
    first, second = from_two_processes(run, tmp_path)
    alone = results(classes())
    # Both processes end with the same posterior, to the last bit.
    assert_close(first, second, rtol=0, atol=0)
    # What no draw of the data's noise enters is that of one process.
    assert_close(first["evidence"], alone["evidence"], rtol=1e-9, atol=0)
    assert_close(first["before"], alone["before"], rtol=1e-6, atol=0)
    assert first["n_data"] == alone["n_data"] == 60
    # The noise of the data is drawn by each process for its own: γ is equal up to its standard error, and to the exact one.
    model = normalised()
    la = Laplace(model, "classification").fit(classes(), progress=False).tune(method="evidence")
    dense = GGNOperator(model, classes(), Categorical()).to_dense()
    prior = la.posterior.prior.vector(la.posterior.names)
    gamma = float(torch.linalg.solve(dense + torch.diag(prior), dense).trace())
    for found in (first, alone):
        value, error, lower, upper = found["exact"].tolist()
        assert lower <= value <= upper <= 1.001 * lower
        assert abs(value - gamma) < 4 * error
        assert error < 0.05 * gamma
        # As many examples as one process takes: of a sample of 30, and all.
        assert found["counts"].tolist() == [30, 60]
    assert_close(first["some"], alone["some"], rtol=0.5, atol=0)
    # And what follows from them: the scale is the ratio.
    assert_close(first["data_scale"], first["before"] / first["gamma"], rtol=1e-9, atol=0)
    assert_close(first["data_scale"], alone["data_scale"], rtol=0.5, atol=0)
