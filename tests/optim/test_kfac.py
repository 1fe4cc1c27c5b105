"""Kronecker structure: the covariance of draws, the natural gradient, refreshes and damping."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature.structures.eigenbasis import KroneckerEigenbasis, damped_eigenvalues, eigendecompose
from aftermap.errors import InputError, StatisticalWarning, UnsupportedError
from aftermap.linalg import kron
from aftermap.optim import KFAC, NoisyKFAC
from aftermap.optim.kfac import draw_deviation, natural_gradient
from tests.optim.problems import classifier
from tests.optim.ranks import Gated, uneven_data


def factors(groups: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    roots = [torch.randn(groups, d, d + 2, generator=generator, dtype=torch.float64) for d in (3, 4)]
    a, b = (r @ r.transpose(-1, -2) for r in roots)
    return a, b


def decompose(a: Tensor, b: Tensor) -> tuple[KroneckerEigenbasis, Tensor, Tensor]:
    """The eigenbasis of (A, B) and the eigenvalues of A and of B."""
    (a_values, a_vectors), (b_values, b_vectors) = eigendecompose([("A", a), ("B", b)])
    return KroneckerEigenbasis(a_vectors, b_vectors), a_values, b_values


def test_draws_have_the_exact_covariance() -> None:
    a, b = factors()
    basis, a_values, b_values = decompose(a, b)
    below = damped_eigenvalues(b_values, a_values, prior=0.7, damping="exact")
    noise = torch.randn(200_000, 2, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = draw_deviation(basis, noise, below, 0.5).flatten(2)
    for g in range(2):
        expected = 0.25 * torch.linalg.inv(kron(b[g], a[g]) + 0.7 * torch.eye(12, dtype=torch.float64))
        scale = float(expected.diagonal().max())
        assert_close(torch.cov(drawn[:, g].T), expected, rtol=0, atol=0.02 * scale)
        assert_close(drawn[:, g].mean(0), torch.zeros(12, dtype=torch.float64), rtol=0, atol=0.01 * scale**0.5)


def test_factored_damping_is_a_matrix_normal() -> None:
    a, b = factors(1)
    basis, a_values, b_values = decompose(a, b)
    below = damped_eigenvalues(b_values, a_values, prior=0.7, damping="pi")
    eye_a, eye_b = torch.eye(3, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    pi = (a[0].trace() / 3 / (b[0].trace() / 4)).sqrt()
    precision = kron(b[0] + 0.7**0.5 / pi * eye_b, a[0] + 0.7**0.5 * pi * eye_a)
    noise = torch.randn(200_000, 1, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.linalg.inv(precision)
    scale = float(expected.diagonal().max())
    found = torch.cov(draw_deviation(basis, noise, below, 1.0).flatten(1).T)
    assert_close(found, expected, rtol=0, atol=0.02 * scale)
    _, a_scaled, b_scaled = decompose(a * 9, b / 9)
    assert_close(damped_eigenvalues(b_scaled, a_scaled, prior=0.7, damping="pi"), below)


def test_the_natural_gradient_is_the_solution() -> None:
    a, b = factors(1)
    basis, a_values, b_values = decompose(a, b)
    block = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = natural_gradient(basis, block, damped_eigenvalues(b_values, a_values, prior=0.3, damping="exact"))
    expected = torch.linalg.solve(kron(b[0], a[0]) + 0.3 * torch.eye(12, dtype=torch.float64), block.flatten())
    assert_close(found.flatten(), expected)


def test_draws_of_the_optimiser_have_the_covariance_of_its_factors() -> None:
    net, x, y = classifier()
    opt = NoisyKFAC(
        net,
        lr=0.01,
        n_data=11,
        temperature=0.5,
        damping=0.05,
        prior_precision=2.0,
        generator=torch.Generator().manual_seed(0),
    )
    opt.step(lambda: F.cross_entropy(net(x), y))
    state = opt.state[net[2].weight]
    a, b = state["factor_inputs"][0], state["factor_outputs"][0]
    full = kron(b, a) + (0.5 * 2.0 / 11 + 0.05) * torch.eye(28, dtype=torch.float64)
    expected = 0.5 / 11 * torch.linalg.inv(full)
    draws = []
    for _ in range(6000):
        with opt.sampled_params(train=False):
            draws.append(torch.cat([net[2].weight, net[2].bias[:, None]], 1).detach().flatten())
    found = torch.cov(torch.stack(draws).T)
    assert_close(found, expected, rtol=0, atol=0.08 * float(expected.diagonal().max()))


def test_factors_of_the_first_step() -> None:
    net, x, y = classifier()
    opt = KFAC(net, lr=0.01, n_data=11)
    hidden = torch.tanh(net[0](x)).detach()
    out = net(x).softmax(1).detach()
    opt.step(lambda: F.cross_entropy(net(x), y))
    rows = torch.cat([hidden, torch.ones(11, 1, dtype=torch.float64)], 1)
    grads = out - F.one_hot(y, 4)
    state = opt.state[net[2].weight]
    assert_close(state["factor_inputs"][0], rows.T @ rows / 11)
    assert_close(state["factor_outputs"][0], grads.T @ grads / 11)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_step_is_the_natural_gradient(reduction: str) -> None:
    net, x, y = classifier()
    opt = KFAC(net, lr=0.1, n_data=11, prior_precision=3.0, damping=0.2, reduction=reduction)
    before = torch.cat([net[2].weight, net[2].bias[:, None]], 1).detach().clone()
    grads = torch.autograd.grad(F.cross_entropy(net(x), y), [net[2].weight, net[2].bias])
    gradient = torch.cat([grads[0], grads[1][:, None]], 1) + 3.0 / 11 * before
    opt.step(lambda: F.cross_entropy(net(x), y, reduction=reduction))
    state = opt.state[net[2].weight]
    full = kron(state["factor_outputs"][0], state["factor_inputs"][0])
    full = full + (3.0 / 11 + 0.2) * torch.eye(28, dtype=torch.float64)
    expected = before - 0.1 * torch.linalg.solve(full, gradient.flatten()).reshape(4, 7)
    assert_close(torch.cat([net[2].weight, net[2].bias[:, None]], 1).detach(), expected)


def test_factors_and_inverses_are_refreshed_when_asked() -> None:
    net, x, y = classifier()
    opt = KFAC(net, lr=0.05, n_data=11, factor_every=2, inverse_every=4)
    seen = []
    for _ in range(6):
        opt.step(lambda: F.cross_entropy(net(x), y))
        state = opt.state[net[0].weight]
        seen.append((state["factor_inputs"].clone(), state["factor_outputs"].clone(), state["values_outputs"].clone()))
    changed = [not torch.equal(seen[i][1], seen[i + 1][1]) for i in range(5)]
    assert changed == [False, True, False, True, False]
    decomposed = [not torch.equal(seen[i][2], seen[i + 1][2]) for i in range(5)]
    assert decomposed == [False, False, False, True, False]


def test_norm_layers_get_a_diagonal() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.GroupNorm(3, 3), nn.Flatten(), nn.Linear(36, 4)).to(torch.float64)
    x = torch.randn(7, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(7) % 4
    opt = NoisyKFAC(net, lr=0.01, n_data=7, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        opt.step(lambda: F.cross_entropy(net(x), y))
    assert "curvature" in opt.state[net[1].weight]
    assert "factor_inputs" not in opt.state[net[1].weight]
    assert opt.state[net[0].weight]["factor_inputs"].shape == (1, 9, 9)


def test_a_layer_in_two_groups_is_refused() -> None:
    net, x, y = classifier()
    weights = [p for p in net.parameters() if p.dim() == 2]
    biases = [p for p in net.parameters() if p.dim() == 1]
    opt = KFAC(net, lr=0.1, n_data=11, params=[{"params": weights}, {"params": biases, "prior_precision": 0.1}])
    with pytest.raises(InputError, match="in different groups"):
        opt.step(lambda: F.cross_entropy(net(x), y))


def test_a_prior_per_weight_is_refused() -> None:
    net, _, _ = classifier()
    opt = KFAC(net, n_data=11)
    with pytest.raises(UnsupportedError, match="does not fit a Kronecker posterior"):
        opt.set_prior({}, {})


def test_a_scaled_loss_gives_the_same_step() -> None:
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    ends = []
    for scale in (1.0, 256.0):
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        opt = KFAC(net, lr=0.1, n_data=6)
        with opt.sampled_params(loss_scale=scale):
            (scale * nn.functional.cross_entropy(net(x), y)).backward()
        for p in net.parameters():
            p.grad = p.grad / scale  # as a GradScaler does before the step
        opt.step()
        ends.append(net.weight.detach().clone())
    torch.testing.assert_close(ends[0], ends[1])


class SometimesGated(Gated):
    """A closed gate leaves no trace in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool((x[:, 0] > 0).any()) else self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("optimizer", [KFAC, NoisyKFAC])
def test_a_layer_that_is_used_in_another_way_gets_a_diagonal(optimizer: type[KFAC] | type[NoisyKFAC]) -> None:
    net, (closed, opened), y = uneven_data(SometimesGated)
    opt = optimizer(net, lr=1e-3, n_data=12)
    for _ in range(2):
        opt.step(lambda: F.cross_entropy(net(closed), y))
    weight, last = net.first.weight, net.last.weight
    assert isinstance(weight, Tensor)
    assert isinstance(last, Tensor)
    assert "factor_inputs" in opt.state[weight]
    with pytest.warns(StatisticalWarning, match="first.weight is used in another way than in the steps before"):
        opt.step(lambda: F.cross_entropy(net(opened), y))
    for _ in range(2):
        assert set(opt.state[weight]) == {"curvature", "momentum"}
        assert "factor_inputs" in opt.state[last]
        opt.step(lambda: F.cross_entropy(net(closed), y))
    assert {b.kind for b in opt.posterior("classification").factors.blocks} == {"diagonal", "kron"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 1), (0, 0, 1)])
def test_micro_batches_with_factors_and_with_squares_are_reconciled(order: tuple[int, ...]) -> None:
    net, inputs, y = uneven_data(SometimesGated)
    opt = KFAC(net, lr=0.1, n_data=6 * len(order), momentum=0.0)
    weight = net.first.weight
    assert isinstance(weight, Tensor)
    before = weight.detach().clone()
    mean, squares = torch.zeros_like(before), torch.zeros_like(before)
    for k in order:
        mean += torch.autograd.grad(F.cross_entropy(net(inputs[k]), y), weight)[0] / len(order)
        if k == 1 or order[0] == 1:  # a layer without a rule has squares from then on
            for i in range(len(y)):
                loss = F.cross_entropy(net(inputs[k][i : i + 1]), y[i : i + 1])
                squares += torch.autograd.grad(loss, weight)[0].square()
    n_squares = len(y) * sum(k == 1 or order[0] == 1 for k in order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StatisticalWarning)
        for k in order:
            with opt.sampled_params():
                F.cross_entropy(net(inputs[k]), y).backward()  # type: ignore[no-untyped-call]
        opt.step()
    assert set(opt.state[weight]) == {"curvature", "momentum"}
    assert_close(opt.state[weight]["curvature"], squares / n_squares)
    prior = 1.0 / (6 * len(order))
    assert_close(weight.detach(), before - 0.1 * (mean + prior * before) / (squares / n_squares + prior + 1e-2))


def test_layers_without_factors_on_another_process_are_named() -> None:
    net, x, y = classifier()
    opt = KFAC(net, lr=1e-3, n_data=11)
    opt.step(lambda: F.cross_entropy(net(x), y))
    layouts = opt._layouts_to_reduce()
    with pytest.warns(StatisticalWarning, match="one process use 0 in a way that gives no Kronecker factors") as caught:
        opt._settle(layouts[:1])
    assert "another way than in the steps before" not in str(caught[0].message)
    opt.step(lambda: F.cross_entropy(net(x), y))
    reader = opt._closure_reader()
    assert reader is not None
    assert reader.plan is not None
    assert not reader.plan.uncovered  # its rule still makes its squares
    assert set(opt.state[net[0].weight]) == {"curvature", "momentum"}
    assert "factor_inputs" in opt.state[net[2].weight]


def trained_with_penalty(optimizer: type[KFAC] | type[NoisyKFAC], name: str, start: int, own_backward: bool) -> Tensor:
    """The weights after five steps, with a penalty on one weight from step ``start`` on."""
    _, x, y = classifier()
    torch.manual_seed(0)  # of the weights, and of the noise
    net = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4)).to(torch.float64)
    opt = optimizer(net, lr=0.05, n_data=11, inverse_every=1)

    def closure() -> Tensor:
        loss = F.cross_entropy(net(x), y)
        if opt.steps >= start:
            loss = loss + 0.5 * net.get_parameter(name).square().sum()
        if own_backward:
            opt.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(5):
        opt.step(closure)
    assert [n for n, p in net.named_parameters() if "factor_inputs" in opt.state[p]] == ["0.weight", "3.weight"]
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
@pytest.mark.parametrize("optimizer", [KFAC, NoisyKFAC])
def test_a_penalty_leaves_the_factors_and_counts_in_the_gradient(
    optimizer: type[KFAC] | type[NoisyKFAC], name: str, start: int
) -> None:
    returned, ran_backward = (trained_with_penalty(optimizer, name, start, own) for own in (False, True))
    assert_close(returned, ran_backward)
    assert not torch.allclose(returned, trained_with_penalty(optimizer, name, 99, False))
