"""Stationarity and refinement: exact for linear models, wherever the weights stand."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from aftermap.errors import InputError, StatisticalWarning, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.laplace.evidence import log_evidence
from aftermap.laplace.stationarity import (
    _minimise,
    check_stationarity,
    linear_mode,
    refined_evidence,
    warn_unless_stationary,
)
from aftermap.likelihoods import Gaussian
from aftermap.posteriors import GaussianPosterior
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, linear_regression, mlp, normal, regression, trained


def moved(net: nn.Module, seed: int = 5) -> torch.Tensor:
    """Moves a Linear away from where it is; the step, weight then bias."""
    step = 0.4 * normal(5, seed=seed)
    with torch.no_grad():
        net.weight += step[None, :4]
        net.bias += step[4:]
    return step


def test_the_gain_is_exact_for_a_linear_model() -> None:
    net, data, _, _, precision = linear_regression()
    options = {"structure": "full", "prior_precision": 1.4}
    at_mode = check_stationarity(Laplace(net, Gaussian(0.6), **options).fit(data, progress=False))
    assert at_mode.gain == pytest.approx(0.0, abs=1e-20)
    assert at_mode.gradient_norm < 1e-9
    assert at_mode.stationary
    step = moved(net)
    before = ModelSnapshot.of(net)
    away = check_stationarity(Laplace(net, Gaussian(0.6), **options).fit(data, progress=False))
    check_unchanged(net, before)
    assert away.gain == pytest.approx(float(0.5 * step @ precision @ step), rel=1e-9)
    assert away.gradient_norm == pytest.approx(float((precision @ step).norm()), rel=1e-9)
    assert 0 < away.relative <= 1


@pytest.mark.parametrize("structure", ["full", "kron", "diagonal"])
def test_the_refined_evidence_of_a_linear_model_does_not_depend_on_where_it_stands(structure: str) -> None:
    net, data, features, y, _ = linear_regression()
    cov = 0.36 * torch.eye(13, dtype=torch.float64) + features @ features.T / 1.4
    truth = -0.5 * (y @ torch.linalg.solve(cov, y) + torch.logdet(cov) + 13 * math.log(2 * math.pi))
    mode = torch.cat([net.weight.detach()[0], net.bias.detach()])
    moved(net)
    before = ModelSnapshot.of(net)
    la = Laplace(net, Gaussian(0.6), structure=structure, prior_precision=1.4).fit(data, progress=False)
    found = refined_evidence(la)
    check_unchanged(net, before)
    assert found.converged
    torch.testing.assert_close(torch.cat([found.mean["weight"][0], found.mean["bias"]]), mode, rtol=1e-4, atol=1e-4)
    assert found.gain > 0.1
    if structure != "diagonal":  # one Linear with one output: its Kronecker block is the whole matrix
        assert found.log_evidence == pytest.approx(float(truth), abs=1e-5)
        assert float(la.log_evidence()) == pytest.approx(float(truth) - found.gain, abs=1e-5)


def test_refinement_of_a_classifier_takes_the_curvature_at_its_own_mode() -> None:
    """A softmax regression is linear: refining from anywhere gives the evidence of the trained one."""
    net = nn.Linear(3, 4).double().eval()
    with torch.no_grad():
        net.weight.copy_(normal(4, 3, seed=8))
        net.bias.zero_()
    away = Laplace(net, "classification", structure="full").fit(classes(), progress=False)
    found = refined_evidence(away, classes())
    best = trained(nn.Linear(3, 4).double().eval(), classes(), nn.CrossEntropyLoss(reduction="sum"), decay=1.0)
    exact = Laplace(best, "classification", structure="full").fit(classes(), progress=False)
    torch.testing.assert_close(found.mean["weight"], best.weight.detach(), rtol=1e-3, atol=1e-3)
    assert found.log_evidence == pytest.approx(float(exact.log_evidence()), abs=1e-4)
    assert not check_stationarity(away).stationary
    assert check_stationarity(exact).stationary


def test_the_mode_of_the_linear_model_is_the_one_that_the_evidence_is_taken_at() -> None:
    """For a softmax regression it is the trained one, from anywhere, under any prior; for a network its gradient vanishes there."""
    net = nn.Linear(3, 4).double().eval()
    la = Laplace(net, "classification", structure="full", prior_precision=0.7).fit(classes(), progress=False)
    found = linear_mode(la)
    best = trained(nn.Linear(3, 4).double().eval(), classes(), nn.CrossEntropyLoss(reduction="sum"), decay=0.7)
    assert found.converged
    torch.testing.assert_close(found.mean["weight"], best.weight.detach(), rtol=1e-3, atol=1e-3)

    model = mlp()
    away = Laplace(model, "classification", structure="kron", prior_precision=0.7).fit(classes(), progress=False)
    found = linear_mode(away)
    refined = refined_evidence(away)
    assert found.gain == refined.gain
    own = {n: p.detach() for n, p in model.named_parameters()}
    mode = {n: v.clone().requires_grad_() for n, v in found.mean.items()}
    loss = 0.5 * 0.7 * sum(v.square().sum() for v in mode.values())
    for x, y in classes():
        f, moved = torch.func.jvp(
            lambda params, x=x: torch.func.functional_call(model, params, (x,)),
            (own,),
            ({n: mode[n] - own[n] for n in own},),
        )
        loss = loss + nn.functional.cross_entropy(f + moved, y, reduction="sum")
    slopes = torch.autograd.grad(loss, list(mode.values()))
    assert max(float(g.abs().max()) for g in slopes) < 1e-3


def test_at_a_mode_refinement_changes_nothing() -> None:
    model = trained(mlp(), classes(), nn.CrossEntropyLoss(reduction="sum"))
    la = Laplace(model, "classification", structure="full").fit(classes(), progress=False)
    found = refined_evidence(la, [(x, y, torch.ones(len(x), dtype=torch.float64)) for x, y in classes()])
    assert found.gain == pytest.approx(0.0, abs=1e-5)
    assert found.log_evidence == pytest.approx(float(la.log_evidence()), abs=1e-4)
    again = float(log_evidence(la.posterior, la.factors, la.base_likelihood, la.hyperparameters))
    assert again == float(la.log_evidence())


def test_inputs_of_several_kinds() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 3).double()

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.inner(left + right)

    model = Sum().eval()
    a, b, y = normal(9, 2, seed=1), normal(9, 2, seed=2), torch.arange(9) % 3
    as_tuple = Laplace(model, "classification", structure="full").fit([((a, b), y)], progress=False)
    as_mapping = Laplace(model, "classification", structure="full").fit([({"left": a, "right": b}, y)], progress=False)
    one, two = refined_evidence(as_tuple), refined_evidence(as_mapping)
    assert one.log_evidence == pytest.approx(two.log_evidence, abs=1e-9)


def test_the_warning_says_what_to_do() -> None:
    net, data, _, _, _ = linear_regression()
    la = Laplace(net, Gaussian(0.6), structure="full", prior_precision=1.4).fit(data, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unless_stationary(check_stationarity(la))
    moved(net)
    away = Laplace(net, Gaussian(0.6), structure="full", prior_precision=1.4).fit(data, progress=False)
    with pytest.warns(StatisticalWarning, match="not at a mode.*Train longer.*refined_evidence"):
        warn_unless_stationary(check_stationarity(away, limit=1e-3))
    assert check_stationarity(away, limit=1e6).stationary


def test_bad_input() -> None:
    model = mlp(1, 6, 1)
    la = Laplace(model, "regression").fit(regression(), progress=False)
    with pytest.raises(InputError, match="limit=-1 must be a positive number of nats"):
        check_stationarity(la, limit=-1)
    la._fitted = replace(la.fitted, data=None)
    with pytest.raises(InputError, match="pass the training data"):
        check_stationarity(la)
    free = Laplace(model, "regression", structure="matrix_free").fit(regression(), progress=False)
    with pytest.raises(UnsupportedError, match="needs a posterior with blocks, got a MatrixFreePosterior"):
        refined_evidence(free)
    with torch.no_grad():
        model[0].bias += 1
    with pytest.raises(InputError, match="weights have changed since the fit"):
        check_stationarity(la, regression())


def test_an_evidence_needs_a_value_of_the_likelihood() -> None:

    la = Laplace(mlp(), "classification").fit(classes(), progress=False)
    with pytest.raises(InputError, match="the evidence needs the log-likelihood of the training data.*loss nan"):
        log_evidence(la.posterior, replace(la.factors, loss=math.nan), la.base_likelihood, la.hyperparameters)
    other = Laplace(mlp(1, 6, 1), "regression").fit(regression(), progress=False)
    with pytest.raises(InputError, match="0 outputs"):
        log_evidence(other.posterior, replace(other.factors, n_outputs=0), other.base_likelihood, other.hyperparameters)


def test_copies_weights_and_a_data_scale_are_the_same() -> None:
    """Every datum twice, with a weight of two, and under a data scale of two."""
    net = nn.Linear(3, 4).double().eval()
    with torch.no_grad():
        net.weight.copy_(normal(4, 3, seed=8))
        net.bias.copy_(normal(4, seed=9))
    once = classes()
    weighted = [(x, y, torch.full((len(x),), 2.0, dtype=torch.float64)) for x, y in once]
    same = []
    for data, scale in ((once + once, 1.0), (weighted, 1.0), (once, 2.0)):
        options = {"structure": "full", "prior_precision": 0.6, "prior_mean": 0.3, "data_scale": scale}
        la = Laplace(net, "classification", **options).fit(data, progress=False)
        same.append((la, check_stationarity(la), refined_evidence(la)))
    (_, first, mode), *others = same
    for la, found, refined in others:
        for name in ("gradient_norm", "relative", "gain"):
            assert getattr(found, name) == pytest.approx(getattr(first, name), rel=1e-9), name
        assert refined.gain == pytest.approx(mode.gain, rel=1e-6)
        assert refined.log_evidence == pytest.approx(mode.log_evidence, rel=1e-7)
        torch.testing.assert_close(refined.mean["weight"], mode.mean["weight"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(refined.posterior.to_dense(), mode.posterior.to_dense(), rtol=1e-3, atol=1e-3)
        assert la.n_data in (60, 120)
    # Relative to its two parts: that of the data, and that of the prior.
    x, y = (torch.cat(part) for part in zip(*once, strict=True))
    loss = 2 * nn.functional.cross_entropy(net(x), y, reduction="sum")
    data = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
    pull = torch.cat([0.6 * (p.detach() - 0.3).flatten() for p in net.parameters()])
    assert first.gradient_norm == pytest.approx(float((data + pull).norm()), rel=1e-9)
    assert first.relative == pytest.approx(float((data + pull).norm() / (data.norm() + pull.norm())), rel=1e-9)


def test_many_data_forgive_more_and_any_positive_limit_is_taken() -> None:
    net = nn.Linear(3, 4).double().eval()
    for count, limit in ((60, 1.0), (150, 1.5)):
        la = Laplace(net, "classification", structure="diagonal").fit(classes(count), progress=False)
        assert check_stationarity(la).limit == limit
    found = check_stationarity(la, limit=1e-3)
    assert found.limit == 1e-3
    assert replace(found, gain=1e-3).stationary
    assert not replace(found, gain=1.001e-3).stationary


def test_a_step_that_falls_by_less_than_it_promised_is_halved() -> None:
    """At the end of the first step the value has fallen by a twentieth of a thousandth of what the slope promised, half-way by half of it."""
    start = {"a": torch.zeros(1, dtype=torch.float64)}
    curve = 1 - 0.5e-4

    def function(at: Tensor) -> tuple[float, Tensor]:
        return float((-at + curve * at.square()).sum()), -1 + 2 * curve * at

    posterior = SimpleNamespace(covariance_mv=lambda vector: vector)
    at, gain, converged = _minimise(function, cast(GaussianPosterior, posterior), start, 1)
    assert (float(at), converged) == (0.5, False)
    assert gain == pytest.approx(0.25, abs=1e-4)
