"""opt.posterior(): precision, draws, predictions, saving, and the next task's prior."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from aftermap.errors import DataError, InputError, NotFittedError
from aftermap.laplace import load, load_laplace, read_extras
from aftermap.linalg import kron
from aftermap.optim import IVON, KFAC, OGN, VOGN, NoisyKFAC, TrainedPosterior
from aftermap.posteriors.io import load_posterior
from tests.optim.problems import classifier, make_regression


def trained(preset: Any, **options: Any) -> tuple[Any, nn.Sequential, torch.Tensor]:
    net, x, y = classifier()
    opt = preset(net, lr=0.02, n_data=11, **options)
    for _ in range(4):
        opt.step(lambda: F.cross_entropy(net(x), y))
    return opt, net, x


@pytest.mark.parametrize("form", ["consistent", "published"])
def test_diagonal_precision_is_that_of_the_draws(form: str) -> None:
    opt, net, _ = trained(VOGN, temperature=0.4, prior_precision=3.0, damping=0.02, form=form)
    c, top = 0.4 * 3.0 / 11, (0.4 if form == "consistent" else 1.0) / 11
    found = opt.posterior().posterior.marginal_variance()
    for name, p in net.named_parameters():
        assert_close(found[name], top / (opt.state[p]["curvature"] + c + 0.02))
    assert_close(opt.posterior().posterior.mean["0.weight"], net[0].weight.detach())


@pytest.mark.parametrize("form", ["exact", "pi"])
def test_kronecker_precision_is_that_of_the_draws(form: str) -> None:
    opt, net, _ = trained(NoisyKFAC, temperature=0.4, prior_precision=3.0, damping=0.02, damping_form=form)
    state = opt.state[net[2].weight]
    a, b, c = state["factor_inputs"][0], state["factor_outputs"][0], 0.4 * 3.0 / 11 + 0.02
    eyes = torch.eye(7, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    pi = (a.trace() / 7 / (b.trace() / 4)).sqrt()
    if form == "exact":
        full = kron(b, a) + c * torch.eye(28, dtype=torch.float64)
    else:
        full = kron(b + c**0.5 / pi * eyes[1], a + c**0.5 * pi * eyes[0])
    place = torch.cat(
        [torch.arange(24).reshape(4, 6), torch.arange(24, 28)[:, None]], 1
    ).flatten()  # weights, then biases
    ordered = torch.empty_like(full)
    ordered[place[:, None], place] = full * 11 / 0.4
    assert_close(opt.posterior().posterior.to_dense()[-28:, -28:], ordered)


@pytest.mark.parametrize("preset", [VOGN, OGN, IVON, KFAC, NoisyKFAC])
def test_predicts_with_the_likelihood_of_cross_entropy(preset: Any) -> None:
    opt, net, x = trained(preset, prior_precision=10.0)  # narrow enough for the linearised network to be a good one
    post = opt.posterior()
    net.train()
    found = post.predict(x, samples=200, generator=torch.Generator().manual_seed(0))
    assert found.mean.shape == (11, 4)
    assert_close(found.mean.sum(1), torch.ones(11, dtype=torch.float64))
    assert bool((found.epistemic > 0).all())
    assert net.training
    linearised = post.predict(x, kind="linearised", generator=torch.Generator().manual_seed(1))
    assert_close(linearised.mean, found.mean, rtol=0, atol=0.25)
    total = torch.stack(list(post.variance_by_layer(x).values())).sum(0)
    assert bool((total > 0).all())
    assert type(opt).__name__ in repr(post)


def test_draws_match_those_of_the_optimiser() -> None:
    # Standard deviations of at most 0.2: a mean of 3,000 draws is certain to 0.004.
    opt, net, _ = trained(VOGN, prior_precision=25.0, generator=torch.Generator().manual_seed(1))
    drawn = opt.posterior().sample(3000, torch.Generator().manual_seed(0))["2.weight"]
    mine = []
    for _ in range(3000):
        with opt.sampled_params(train=False):
            mine.append(net[2].weight.detach().clone())
    assert_close(drawn.var(0), torch.stack(mine).var(0), rtol=0.2, atol=0)
    assert_close(drawn.mean(0), torch.stack(mine).mean(0), rtol=0, atol=0.05)


def test_saving(tmp_path: Path) -> None:
    opt, _, _ = trained(NoisyKFAC)
    post = opt.posterior()
    post.save(tmp_path / "posterior")
    loaded = load_posterior(tmp_path / "posterior")
    assert loaded.config["method"] == "NoisyKFAC"
    assert loaded.config["likelihood"]["name"] == "categorical"
    assert_close(loaded.posterior.to_dense(), post.posterior.to_dense(), rtol=0, atol=0)


def test_the_posterior_as_the_next_prior_is_exact_for_linear_regression() -> None:
    problem = make_regression(orthogonal=True)
    first, second = torch.arange(25), torch.arange(25, 60)
    net = problem.model()
    noise = {"likelihood": "regression", "curvature": "ggn"}
    scale = problem.noise**2

    def task(index: torch.Tensor, prior: Any) -> VOGN:
        x, y = problem.x[index], problem.y[index]
        x = torch.linalg.qr(x)[0] * 4.0  # orthogonal within each task, so that the diagonal is exact
        opt = VOGN(
            net,
            lr=0.2,
            n_data=len(index),
            prior_precision=problem.prior,
            damping=0.0,
            momentum=0.0,
            temperature=1.0,
            **noise,
        )
        if prior is not None:
            opt.set_prior(*prior)
        for step in range(900):
            opt.param_groups[0]["lr"] = 0.2 / (1 + step / 20)
            opt.step(lambda: (net(x) - y / scale**0.5).square().sum(1).mean() / 2)
        return opt

    one = task(first, None)
    two = task(second, one.posterior().as_prior())
    found = two.posterior().posterior.marginal_variance()["weight"]
    assert_close(found, torch.full((3, 4), 1 / (problem.prior + 16.0 + 16.0), dtype=torch.float64))
    xs = [torch.linalg.qr(problem.x[i])[0] * 4.0 for i in (first, second)]
    rhs = sum(x.T @ (problem.y[i] / scale**0.5) for x, i in zip(xs, (first, second), strict=True))
    exact = (rhs / (problem.prior + 32.0)).T
    assert_close(net.weight.detach(), exact, rtol=0, atol=0.5 * (problem.prior + 32.0) ** -0.5)


@pytest.mark.parametrize("preset", [VOGN, IVON])
def test_a_resumed_run_goes_on_with_the_prior_of_its_state(preset: Any) -> None:
    net, x, y = classifier()
    start = copy.deepcopy(net.state_dict())
    prior = {n: torch.full_like(p, 50.0) for n, p in net.named_parameters()}

    def stepped(opt: Any, steps: int) -> list[torch.Tensor]:
        for _ in range(steps):
            opt.step(lambda: F.cross_entropy(net(x), y))
        return [p.detach().clone() for p in net.parameters()]

    def made() -> Any:
        return preset(net, lr=0.05, n_data=11, generator=torch.Generator().manual_seed(2))

    first, plain = made(), copy.deepcopy(made().state_dict())
    first.set_prior({n: torch.ones_like(v) for n, v in prior.items()}, prior)
    stepped(first, 2)
    saved, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(net.state_dict())
    expected = stepped(first, 3)
    net.load_state_dict(weights)
    fresh = made()
    fresh.load_state_dict(saved)
    assert_close(stepped(fresh, 3), expected, rtol=0, atol=0)
    # And a state without such a prior takes it away again.
    net.load_state_dict(start)
    without = stepped(made(), 3)
    net.load_state_dict(start)
    first.load_state_dict(plain)
    assert_close(stepped(first, 3), without, rtol=0, atol=0)
    assert not torch.equal(without[0], expected[0])


def test_deterministic_weights_are_not_in_the_posterior() -> None:
    net, x, y = classifier()
    groups = [{"params": list(net[0].parameters()), "deterministic": True}, {"params": list(net[2].parameters())}]
    opt = VOGN(net, n_data=11, params=groups)
    opt.step(lambda: F.cross_entropy(net(x), y))
    assert opt.posterior().posterior.names == ("2.weight", "2.bias")


def test_errors() -> None:
    net, x, y = classifier()
    opt = VOGN(net, n_data=11)
    with pytest.raises(NotFittedError, match="take a step first"):
        opt.posterior()
    opt.step(lambda: (net(x) - 1).square().mean())
    with pytest.raises(InputError, match="the likelihood is unknown"):
        opt.posterior().predict(x)
    assert opt.posterior("regression").predict(x).mean.shape == (11, 4)
    bare = IVON(net.parameters(), n_data=11)
    with pytest.raises(InputError, match="Pass the model"):
        bare.posterior()
    assert y.shape == (11,)


def test_damping_is_left_out_of_the_next_prior_unless_asked_for() -> None:
    opt, net, _ = trained(VOGN, damping=0.3, prior_precision=2.0)
    post = opt.posterior()
    bare, half = post.as_prior()[1], post.as_prior(damping=0.5)[1]
    for name, p in net.named_parameters():
        expected = 11 * opt.state[p]["curvature"] + 2.0
        assert_close(bare[name], expected)
        assert_close(half[name], expected + 0.5 * 11 * 0.3)
    assert_close(post.as_prior(damping=1.0)[1][name], expected + 11 * 0.3)
    for share in (1.01, -0.01):
        with pytest.raises(InputError, match=f"damping={share} is the share that is kept"):
            post.as_prior(damping=share)


def test_a_saved_posterior_comes_back_as_what_it_was(tmp_path: Path) -> None:
    torch.manual_seed(3)
    net, x, y = nn.Linear(3, 4), torch.randn(6, 3), torch.randint(4, (6,))
    opt = VOGN(net, n_data=6)
    opt.step(lambda: F.cross_entropy(net(x), y))
    trained = opt.posterior()
    trained.save(tmp_path / "run", extras={"threshold": 0.25})
    loaded = load(tmp_path / "run", net)
    assert isinstance(loaded, TrainedPosterior)
    assert (loaded.method, loaded.damping) == (trained.method, trained.damping)
    for seed in (0, 1):
        draws = [t.predict(x, generator=torch.Generator().manual_seed(seed)).mean for t in (trained, loaded)]
        torch.testing.assert_close(draws[0], draws[1], rtol=0, atol=0)
    torch.testing.assert_close(loaded.as_prior(), trained.as_prior(), rtol=0, atol=0)
    assert read_extras(tmp_path / "run") == {"threshold": 0.25}
    with pytest.raises(DataError, match="VOGN built"):
        load_laplace(tmp_path / "run", net)
    with pytest.raises(
        InputError, match="VOGN built in training, which is tuned on validation data alone: leave out train_loader"
    ):
        load(tmp_path / "run", net, train_loader=[(x, y)])


def test_predictions_with_a_gradient_in_the_inputs() -> None:
    torch.manual_seed(3)
    net, x, y = nn.Linear(3, 4), torch.randn(6, 3), torch.randint(4, (6,))
    opt = VOGN(net, n_data=6)
    opt.step(lambda: F.cross_entropy(net(x), y))
    inputs = x.clone().requires_grad_()
    opt.posterior().predict(
        inputs, differentiable=True, generator=torch.Generator().manual_seed(0)
    ).total.sum().backward()
    assert inputs.grad is not None
    assert float(inputs.grad.abs().sum()) > 0


@pytest.mark.parametrize("kind", ["linearised", "sampling"])
def test_training_after_the_posterior_was_taken_is_noticed(kind: str) -> None:
    net, x, y = classifier()
    opt = VOGN(net, lr=0.02, n_data=11)
    opt.step(lambda: F.cross_entropy(net(x), y))
    posterior, weights = opt.posterior(), copy.deepcopy(net.state_dict())
    mean = posterior.posterior.mean["0.weight"].clone()
    opt.step(lambda: F.cross_entropy(net(x), y))
    with pytest.raises(
        InputError, match=r"since VOGN gave this posterior .0.weight.*call posterior.. of the optimiser"
    ):
        posterior.predict(x, kind=kind)
    assert torch.equal(posterior.posterior.mean["0.weight"], mean)
    assert opt.posterior().predict(x, kind=kind).mean.shape == (11, 4)
    net.load_state_dict(weights)
    assert posterior.predict(x, kind=kind).mean.shape == (11, 4)
