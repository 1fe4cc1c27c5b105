"""One fine-tuning for many inputs: row sums, not variances; random signs; calibration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from aftermap.errors import InputError, NotFittedError, ShapeError
from aftermap.hessian_free import HessianFree
from aftermap.testing import ModelSnapshot, check_predictor, check_unchanged
from tests.hessian_free.problems import PRIOR, Problem, classification, curve
from tests.laplace.problems import generator, normal


def fitted(problem: Problem) -> HessianFree:
    hf = HessianFree(problem.model, problem.likelihood, prior_precision=PRIOR, deviation=0.02)
    return hf.fit(problem.data)


def test_the_score_is_a_row_sum_of_the_covariance_and_not_a_variance() -> None:
    problem = curve()
    new = torch.tensor([[0.2], [-1.9]], dtype=torch.float64)
    everything = replace(problem, asked=torch.cat([problem.asked, new]))
    C = everything.truth(everything.jacobian()[:, 0])
    hf = fitted(problem)
    before = ModelSnapshot.of(problem.model)
    score = hf.amortise(problem.asked)
    found = score.score(everything.asked)[:, 0]  # also at inputs that were not pushed
    sums = C[:, :4].sum(1)
    assert_close(found, sums, rtol=5e-3, atol=5e-3 * float(sums.abs().max()))
    ratio = sums[:4] / C.diagonal()[:4]
    assert float((ratio - 1).abs().max()) > 0.3
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    signed = hf.amortise(problem.asked, signs=signs).score(everything.asked)[:, 0]
    expected = C[:, :4] @ signs.double()
    assert_close(signed, expected, rtol=5e-3, atol=5e-3 * float(expected.abs().max()))
    assert float(signed.min()) < 0  # a score, with a sign
    check_unchanged(problem.model, before)


def test_the_score_of_classes_is_that_of_a_contrast() -> None:
    problem = classification()
    C = torch.linalg.inv(problem.hessian())
    outputs = problem.model(problem.asked).detach()
    contrast = torch.nn.functional.one_hot(outputs.argmax(1), 4).double() - 0.25
    g = torch.einsum("ncp,nc->np", problem.jacobian(), contrast)
    found = fitted(problem).amortise(problem.asked).score(problem.asked)
    truth = (g @ C @ g.T).sum(1)
    assert_close(found, truth, rtol=5e-3, atol=5e-3 * float(truth.abs().max()))


def test_random_signs_are_unbiased_with_the_stated_error() -> None:
    problem = curve()
    C = problem.truth(problem.jacobian()[:, 0])
    found = fitted(problem).probe_variances(problem.asked, 64, generator(2))
    error = (found.variance[:, 0] - C.diagonal()).abs()
    stated = ((C.square().sum(1) - C.diagonal().square()) / 64).sqrt()
    assert bool((error < 4 * stated).all())
    assert_close(found.standard_error[:, 0], stated, rtol=0.5, atol=0)
    assert found.variance.shape == (4, 1)
    assert all(r.status == "ok" for r in found.reports)


def test_calibration_finds_the_scale_and_predictions_use_it() -> None:
    problem = curve()
    score = fitted(problem).amortise(problem.asked)
    with pytest.raises(NotFittedError, match="call calibrate"):
        score.predict(problem.asked)
    x = torch.linspace(-3, 3, 1500, dtype=torch.float64)[:, None]
    variance = 7.0 * score.score(x).abs()
    outputs = problem.model(x).detach()
    y = outputs + (variance + 0.09).sqrt() * normal(1500, 1, seed=6)
    calibrated = score.calibrate([(x[:700], y[:700]), (x[700:], y[700:])])
    assert calibrated.scale == pytest.approx(7.0, rel=0.25)
    assert score.scale is None
    prediction = calibrated.predict(problem.asked)
    assert_close(prediction.epistemic, calibrated.scale * score.score(problem.asked).abs())
    check_predictor(_with_model(calibrated), problem.asked, differentiable=False)


def _with_model(score: object) -> object:
    class Both:
        model = score.objective.model  # type: ignore[attr-defined]
        predict = staticmethod(score.predict)  # type: ignore[attr-defined]

    return Both()


def test_calibration_of_classes_and_bad_input() -> None:
    problem = classification()
    hf = fitted(problem)
    calibrated = hf.amortise(problem.data[0][0]).calibrate(problem.data)
    prediction = calibrated.predict(problem.asked)
    assert_close(prediction.mean.sum(-1), torch.ones(3, dtype=torch.float64))
    assert calibrated.scale is not None
    with pytest.raises(ShapeError, match="signs must be 3 finite numbers"):
        hf.amortise(problem.asked, signs=torch.ones(2))
    with pytest.raises(InputError, match="probes=1 must be a whole number"):
        hf.probe_variances(problem.asked, 1)
