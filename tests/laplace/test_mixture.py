"""Mixtures of Laplace approximations: against the components, sampling, and closed-form Bayesian model averaging."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.errors import DataError, InputError, NotFittedError, ShapeError, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.laplace.mixture import Mixture, load_mixture, mix
from aftermap.likelihoods import Gaussian
from aftermap.posteriors.files import sealed
from aftermap.predictive import Prediction
from aftermap.testing import check_predictor
from tests.laplace.problems import classes, generator, linear_regression, mlp, normal, regression, seeded, untrained

NOISE = 0.6


def class_parts(count: int = 3) -> list[Laplace]:
    """Different architectures with the same outputs."""
    data = classes()
    return [
        Laplace(mlp(hidden=4 + k, seed=k + 1), "classification", prior_precision=1.0 + k).fit(data, progress=False)
        for k in range(count)
    ]


def linear(columns: list[int], prior: float) -> tuple[Laplace, Tensor, Tensor, Tensor]:
    """A Bayesian linear regression on some of the inputs, at its posterior mean, with features and moments."""
    x, y = normal(13, 4, seed=1), normal(13, seed=2)

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(len(columns), 1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.linear(inputs[:, columns])

    features = torch.cat([x[:, columns], torch.ones(13, 1, dtype=torch.float64)], 1)
    precision = features.T @ features / NOISE**2 + prior * torch.eye(features.shape[1], dtype=torch.float64)
    mean = torch.linalg.solve(precision, features.T @ y / NOISE**2)
    net = seeded(Chosen)
    with torch.no_grad():
        net.linear.weight.copy_(mean[None, :-1])
        net.linear.bias.copy_(mean[-1:])
    laplace = Laplace(net, Gaussian(NOISE), structure="full", prior_precision=prior)
    return laplace.fit([(x, y[:, None])], progress=False), features, y, precision


def marginal(features: Tensor, y: Tensor, prior: float) -> Tensor:
    covariance = NOISE**2 * torch.eye(len(y), dtype=torch.float64) + features @ features.T / prior
    return torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)


MODELS = [([0, 1, 2, 3], 1.4), ([0, 2], 0.5), ([3], 3.0)]


def test_evidence_weights_are_the_posterior_over_linear_models() -> None:
    found = [linear(columns, prior) for columns, prior in MODELS]
    exact = torch.stack([marginal(f, y, prior) for (_, f, y, _), (_, prior) in zip(found, MODELS, strict=True)])
    mixture = Mixture([part for part, *_ in found], weights="evidence")
    wanted = exact.exp() / exact.exp().sum()
    torch.testing.assert_close(mixture.weights, wanted, rtol=1e-9, atol=1e-12)
    assert mixture.weights.dtype == torch.float64
    assert 1.0 < mixture.effective_number < 3.0
    torch.testing.assert_close(mixture.log_evidence(), exact.exp().mean().log(), rtol=1e-10, atol=1e-10)


def test_prediction_of_linear_models_is_the_exact_mixture_of_gaussians() -> None:
    found = [linear(columns, prior) for columns, prior in MODELS]
    mixture = Mixture([part for part, *_ in found], weights="evidence")
    x, y = normal(7, 4, seed=9), normal(7, 1, seed=8)
    means, variances = [], []
    for (part, _, _, precision), (columns, _) in zip(found, MODELS, strict=True):
        wide = torch.cat([x[:, columns], torch.ones(7, 1, dtype=torch.float64)], 1)
        means.append(part.model(x).detach())
        variances.append((wide @ torch.linalg.inv(precision) * wide).sum(1, keepdim=True))
    w = mixture.weights[:, None, None]
    mu, v = torch.stack(means), torch.stack(variances)
    mean = (w * mu).sum(0)
    pred = mixture.predict(x)
    torch.testing.assert_close(pred.mean, mean)
    torch.testing.assert_close(pred.epistemic, (w * (v + mu**2)).sum(0) - mean**2, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(pred.aleatoric, torch.full((7, 1), NOISE**2, dtype=torch.float64))
    density = (w * torch.distributions.Normal(mu, (v + NOISE**2).sqrt()).log_prob(y).exp()).sum(0).log()
    torch.testing.assert_close(pred.log_prob(y), density.squeeze(1), rtol=1e-8, atol=1e-10)
    # The joint moments agree with those of each input, and with the law of total covariance between inputs.
    joint_mean, joint = mixture.joint(x)
    torch.testing.assert_close(joint_mean, mean)
    torch.testing.assert_close(torch.einsum("ncnc->nc", joint), pred.epistemic, rtol=1e-8, atol=1e-10)
    covs = torch.stack([part.joint(x)[1] for part, *_ in found])
    second = torch.einsum("k,kncmd->ncmd", mixture.weights, covs + torch.einsum("knc,kmd->kncmd", mu, mu))
    torch.testing.assert_close(joint, second - torch.einsum("nc,md->ncmd", mean, mean), rtol=1e-8, atol=1e-9)


def test_function_samples_have_the_moments_of_the_mixture() -> None:
    mixture = Mixture([linear(columns, prior)[0] for columns, prior in MODELS], weights=[0.5, 0.3, 0.2])
    x = normal(3, 4, seed=9)
    drawn = mixture.function_samples(x, 1_500, generator(3)).squeeze(-1)
    mean, cov = mixture.joint(x)
    size = cov[:, 0, :, 0].diagonal()
    assert bool(((drawn.mean(0) - mean.squeeze(-1)).abs() < 5 * (size / 1_500).sqrt()).all())
    torch.testing.assert_close(drawn.T.cov(), cov[:, 0, :, 0], rtol=0, atol=5 * 1.5 * float(size.max()) / 1_500**0.5)


@pytest.mark.parametrize("kind", ["classification", "binary", "regression", "counts"])
def test_equal_components_are_the_component(kind: str) -> None:
    data = classes()
    if kind == "binary":
        data = [(x, torch.stack([y > 1, y % 2 == 0], 1).double()) for x, y in data]
    elif kind != "classification":
        data = [(x, y.double()[:, None]) for x, y in data]
    outputs = {"classification": 4, "binary": 2}.get(kind, 1)
    part = Laplace(mlp(outputs=outputs), kind, prior_precision=20.0).fit(data, progress=False)
    mixture = Mixture([part, part], weights=[0.3, 0.7])
    x = normal(6, 3, seed=5)
    one, both = part.predict(x, generator=generator()), mixture.predict(x, link="auto", generator=generator())
    assert both.kind == one.kind
    # The two components draw their link's samples one after the other: compare what is exact, or the first alone.
    if kind == "classification":
        one = part.predict(x, link="pairwise")
        both = mixture.predict(x, link="pairwise")
    for name in ("mean", "epistemic", "aleatoric", "total"):
        torch.testing.assert_close(getattr(both, name), getattr(one, name), rtol=1e-9, atol=1e-12)
    if kind in ("regression", "counts"):
        targets = torch.arange(6, dtype=torch.float64)[:, None]
        rtol = 1e-9 if kind == "regression" else 2e-3  # of counts: 128 rates in the place of the integral
        torch.testing.assert_close(both.log_prob(targets), one.log_prob(targets), rtol=rtol, atol=1e-9)


def test_split_of_classes_is_that_of_all_samples_together() -> None:
    """Within and between components, from the definition: every weight sample of every component with its weight."""
    parts, weights = class_parts(), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    x = normal(6, 3, seed=5)
    found = Mixture(parts, weights).predict(x, kind="sampling", samples=7, generator=generator(1))
    source = generator(1)
    p = torch.stack([part.predict(x, kind="sampling", samples=7, generator=source).samples for part in parts])
    mean = torch.einsum("k,ksnc->nc", weights, p) / 7
    expected = torch.einsum("k,ksn->n", weights, torch.special.entr(p).sum(-1)) / 7
    total = torch.special.entr(mean).sum(-1)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.total, total, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.aleatoric, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.epistemic, total - expected, rtol=1e-8, atol=1e-10)
    assert found.samples.shape == (21, 6, 4)
    torch.testing.assert_close(found.weights, weights.repeat_interleave(7) / 7)
    variance = torch.einsum("s,snc->nc", found.weights, (found.samples - mean).square()).mean(1)
    torch.testing.assert_close(found.score("variance"), variance)


def test_a_mixture_knows_more_than_it_doubts_within_its_components() -> None:
    parts = class_parts()
    x = normal(6, 3, seed=5)
    within = torch.stack([part.predict(x, link="pairwise").epistemic for part in parts]).mean(0)
    assert bool((Mixture(parts, "uniform").predict(x, link="pairwise").epistemic > within).all())


@pytest.mark.parametrize("weights", ["evidence", "uniform"])
def test_contract(weights: str) -> None:
    check_predictor(Mixture(class_parts(), weights), normal(5, 3, seed=5))


@untrained
def test_contract_of_regression() -> None:
    parts = [
        Laplace(mlp(1, 4 + k, 2, seed=k), "regression").fit(regression(outputs=2), progress=False) for k in range(2)
    ]
    mixture = Mixture(parts)
    check_predictor(mixture, normal(5, 1, seed=5))
    assert mixture.likelihood.kind == "regression"
    parts[0].tune()
    with pytest.raises(UnsupportedError, match="different likelihoods"):
        _ = mixture.likelihood


def test_huge_evidences_do_not_overflow_and_a_weight_of_zero_is_not_run() -> None:
    parts = class_parts(2)
    mixture = Mixture(parts, "evidence")
    assert mixture.log_evidences is not None
    gap = mixture.log_evidences[0] - mixture.log_evidences[1]
    torch.testing.assert_close(mixture.weights[0], gap.sigmoid(), rtol=1e-12, atol=0)
    only = Mixture(parts, [0.0, 2.0])
    with torch.no_grad():
        parts[0].model[0].weight += 1  # would be refused if it were asked
    x = normal(6, 3, seed=5)
    torch.testing.assert_close(only.predict(x, link="pairwise").mean, parts[1].predict(x, link="pairwise").mean)
    assert only.effective_number == 1.0


def test_save_and_load(tmp_path) -> None:
    parts = class_parts()
    mixture = Mixture(parts, "evidence")
    mixture.save(tmp_path / "mixture")
    again = load_mixture(tmp_path / "mixture", mixture.models)
    x = normal(6, 3, seed=5)
    first, second = (m.predict(x, generator=generator(1)) for m in (mixture, again))
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(again.weights, mixture.weights)
    assert torch.equal(again.log_evidences, mixture.log_evidences)
    with pytest.raises(InputError, match="exists and is not empty"):
        mixture.save(tmp_path / "mixture")
    Mixture(parts[:2], "uniform").save(tmp_path / "mixture", overwrite=True)
    assert sorted(p.name for p in (tmp_path / "mixture").iterdir()) == ["component_0", "component_1", "mixture.json"]
    with pytest.raises(InputError, match="holds 2 components, but 3 models"):
        load_mixture(tmp_path / "mixture", mixture.models)
    config = json.loads((tmp_path / "mixture" / "mixture.json").read_text())
    (tmp_path / "mixture" / "mixture.json").write_text(json.dumps({**config, "method": "other"}))
    with pytest.raises(DataError, match="method 'other'"):
        load_mixture(tmp_path / "mixture", mixture.models[:2])
    with pytest.raises(DataError, match="mixture.json is missing; a mixture's folder has it"):
        load_mixture(tmp_path, mixture.models)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"components": ["../elsewhere", "component_1"]},
            "components.0 should be the name of a component, such as component_0",
        ),
        ({"components": ["component_0", "component_0"]}, "must be equally many"),
        ({"components": [[], {}]}, "components.0 should be the name of a component"),
        (
            {"weights": [0.5, "0.5"]},
            "weights.1 should be a finite number of at least 0 and of at most 1, got the text '0.5'",
        ),
        ({"weights": [0.5]}, "must be equally many"),
        ({"weights": None}, "weights should be a list, got null"),
        ({"log_evidences": [1.0]}, "must be equally many"),
        ({"surprise": 1}, "has the unknown entries 'surprise'"),
    ],
)
def test_a_damaged_mixture(tmp_path: Path, change: dict[str, object], message: str) -> None:
    mixture = Mixture(class_parts(2), "uniform")
    file = mixture.save(tmp_path / "mixture") / "mixture.json"
    config = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps(config))
    with pytest.raises(DataError, match="is not what was saved: its checksum differs"):
        load_mixture(tmp_path / "mixture", mixture.models)
    file.write_text(json.dumps(sealed({k: v for k, v in config.items() if k != "checksum"})))
    with pytest.raises(DataError, match=message):
        load_mixture(tmp_path / "mixture", mixture.models)


def test_bad_input() -> None:
    parts = class_parts(2)
    with pytest.raises(InputError, match="at least one Laplace approximation"):
        Mixture([])
    with pytest.raises(InputError, match="component 1 of a mixture is Sequential"):
        Mixture([parts[0], parts[1].model])
    with pytest.raises(NotFittedError, match="fit"):
        Mixture([parts[0], Laplace(mlp(), "classification")])
    with pytest.raises(InputError, match="weights='bayes' is not known; allowed are 'evidence', 'uniform'"):
        Mixture(parts, "bayes")
    for bad in ([0.5], [0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0]):
        with pytest.raises(InputError, match="2 finite numbers"):
            Mixture(parts, bad)
    with pytest.raises(InputError, match="numbers, one per component"):
        Mixture(parts, [object(), 1.0])
    other = Laplace(linear_regression()[0], "regression").fit(linear_regression()[1], progress=False)
    with pytest.raises(InputError, match="one kind of task, got classification, regression"):
        Mixture([parts[0], other])
    fewer = Laplace(mlp(), "classification").fit(classes(count=30), progress=False)
    with pytest.raises(InputError, match="different numbers of data: 30, 60"):
        Mixture([parts[0], fewer])
    assert len(Mixture([parts[0], fewer], "uniform")) == 2
    scaled = Laplace(mlp(), "classification", data_scale=2.0).fit(classes(), progress=False)
    with pytest.raises(InputError, match="different data scales"):
        Mixture([parts[0], scaled])
    with pytest.raises(InputError, match="several networks"):
        Mixture(parts, "uniform").predict(normal(2, 3), weights=[{}])
    with pytest.raises(InputError, match="at least 1"):
        Mixture(parts, "uniform").function_samples(normal(2, 3), 0)


def test_outputs_must_agree() -> None:
    parts = class_parts(1)
    wide = Laplace(mlp(outputs=5), "classification").fit(classes(outputs=5), progress=False)
    mixture = Mixture([parts[0], wide], "uniform")
    with pytest.raises(ShapeError, match=r"one shape, got \[\(2, 4\), \(2, 5\)\]"):
        mixture.predict(normal(2, 3))
    with pytest.raises(ShapeError, match="one shape"):
        mixture.joint(normal(2, 3))
    with pytest.raises(ShapeError, match="one shape"):
        mix([part.predict(normal(2, 3)) for part in mixture.components], [0.5, 0.5])


def test_one_logit_is_split_like_two_classes() -> None:
    p = torch.tensor([[0.1, 0.9, 0.3], [0.5, 0.8, 0.0], [0.7, 1.0, 0.2]], dtype=torch.float64)
    within = 0.05 * torch.rand(3, 3, generator=generator(1), dtype=torch.float64)
    one = [Prediction("binary", q[:, None], w[:, None], w[:, None], w[:, None]) for q, w in zip(p, within, strict=True)]
    two = [Prediction("classification", torch.stack([1 - q, q], 1), w, w, w) for q, w in zip(p, within, strict=True)]
    share = [0.2, 0.5, 0.3]
    found, expected = mix(one, share), mix(two, share)
    assert_close(found.epistemic[:, 0], expected.epistemic)
    weights = torch.tensor(share, dtype=torch.float64)
    entropy = torch.special.entr(p) + torch.special.entr(1 - p)
    mean = weights @ p
    between = torch.special.entr(mean) + torch.special.entr(1 - mean) - weights @ entropy
    assert_close(found.epistemic[:, 0], weights @ within + between)
