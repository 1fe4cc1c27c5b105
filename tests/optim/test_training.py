"""How the optimisers behave in training loops: groups, accumulation, mixed precision, clipping, priors, statistics."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.errors import InputError, StatisticalWarning
from aftermap.optim import IVON, KFAC, OGN, VOGN, NoisyKFAC, update_bn, warmup
from aftermap.optim.base import VariationalOptimizer
from tests.optim.problems import classifier


def seed(number: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def ones(net: nn.Module) -> dict[str, Tensor]:
    return {n: torch.ones_like(p) for n, p in net.named_parameters()}


def reference_vogn(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    noise: list[dict[str, Tensor]],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    c: float,
    gamma: float,
) -> dict[str, Tensor]:
    """MATH 4.1 written out, with given noise; the first step is free of noise and sets s."""
    names = [n for n, _ in net.named_parameters()]
    mu = {n: p.detach().clone() for n, p in net.named_parameters()}
    m = {n: torch.zeros_like(v) for n, v in mu.items()}
    s: dict[str, Tensor] = {}
    for number, eps in enumerate(noise):
        w = {n: mu[n] + eps[n] * (1 / 11 / (s[n] + c + gamma)).sqrt() if number else mu[n] for n in names}
        each = torch.func.vmap(
            torch.func.grad(lambda p, a, b: F.cross_entropy(torch.func.functional_call(net, p, a[None]), b[None])),
            in_dims=(None, 0, 0),
        )(w, x, y)
        for n in names:
            h = each[n].square().mean(0)
            s[n] = h if number == 0 else (1 - beta2) * s[n] + beta2 * h
            m[n] = beta1 * m[n] + each[n].mean(0) + c * mu[n]
            mu[n] = mu[n] - lr * m[n] / (s[n] + c + gamma)
    return mu


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_vogn_follows_its_equations(reduction: str) -> None:
    net, x, y = classifier()
    opt = VOGN(
        net,
        lr=0.01,
        n_data=11,
        momentum=0.8,
        new_curvature_weight=0.3,
        prior_precision=2.0,
        damping=0.1,
        reduction=reduction,
        generator=seed(),
    )
    params = list(net.parameters())
    names = [n for n, _ in net.named_parameters()]
    noise = [dict(zip(names, opt._noise.normal(params, step=t, sample=0), strict=True)) for t in range(4)]
    expected = reference_vogn(net, x, y, noise, lr=0.01, beta1=0.8, beta2=0.3, c=2.0 / 11, gamma=0.1)
    for _ in range(4):
        opt.step(lambda: F.cross_entropy(net(x), y, reduction=reduction))
    for name, p in net.named_parameters():
        assert_close(p.detach(), expected[name])


def test_first_step_is_free_of_noise_and_sets_the_curvature() -> None:
    net, x, y = classifier()
    opt = VOGN(net, lr=0.0, n_data=11, generator=seed())
    before = net[0].weight.detach().clone()
    seen = []
    opt.step(lambda: (seen.append(net[0].weight.detach().clone()), F.cross_entropy(net(x), y))[1])
    assert_close(seen[0], before, rtol=0, atol=0)
    opt.step(lambda: (seen.append(net[0].weight.detach().clone()), F.cross_entropy(net(x), y))[1])
    assert not torch.equal(seen[1], before)


def test_draws_have_the_variance_of_the_formula() -> None:
    net, x, y = classifier()
    opt = VOGN(net, lr=0.0, n_data=11, temperature=0.3, prior_precision=2.0, damping=0.01, generator=seed())
    opt.step(lambda: F.cross_entropy(net(x), y))
    expected = 0.3 / 11 / (opt.state[net[0].weight]["curvature"] + 0.3 * 2.0 / 11 + 0.01)
    draws = []
    for _ in range(4000):
        with opt.sampled_params(train=False):
            draws.append(net[0].weight.detach().flatten())
    cov = torch.cov(torch.stack(draws).T)
    assert_close(cov, torch.diag(expected.flatten()), rtol=0, atol=0.1 * float(expected.max()))
    assert_close(
        torch.stack(draws).mean(0), net[0].weight.detach().flatten(), rtol=0, atol=0.07 * float(expected.max()) ** 0.5
    )


def test_samples_are_averaged() -> None:
    nets = [classifier()[0] for _ in range(3)]
    _, x, y = classifier()
    opts = [
        VOGN(n, lr=0.01, n_data=11, initial_curvature=0.5, mc_samples=k, generator=seed())
        for n, k in zip(nets, (1, 1, 2), strict=True)
    ]
    opts[1]._noise.generator = lambda d, *, step, sample, stream=0, keep=opts[1]._noise.generator: keep(
        d, step=step, sample=1, stream=stream
    )  # type: ignore[method-assign]
    start = nets[0][0].weight.detach().clone()
    for net, opt in zip(nets, opts, strict=True):
        opt.step(lambda net=net: F.cross_entropy(net(x), y))
    states = [o.state[n[0].weight] for n, o in zip(nets, opts, strict=True)]
    for key in ("momentum", "curvature"):
        assert_close(states[2][key], (states[0][key] + states[1][key]) / 2)
    assert not torch.equal(nets[2][0].weight, start)


def test_micro_batches_of_any_size_are_one_batch() -> None:
    results = []
    for cuts in ((11,), (4, 7), (2, 8, 1)):
        net, x, y = classifier()
        opt = OGN(net, lr=0.02, n_data=11)
        for _ in range(3):
            opt.zero_grad()
            for a, b in zip(x.split(cuts), y.split(cuts), strict=True):
                with opt.sampled_params():
                    F.cross_entropy(net(a), b).backward()
            opt.step()
        results.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


def test_sum_losses_of_micro_batches_add_up() -> None:
    results = []
    for cuts in ((11,), (4, 7)):
        net, x, y = classifier()
        opt = OGN(net, lr=0.02, n_data=11, reduction="sum")
        for _ in range(3):
            for a, b in zip(x.split(cuts), y.split(cuts), strict=True):
                with opt.sampled_params():
                    F.cross_entropy(net(a), b, reduction="sum").backward()
            opt.step()
        results.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert_close(results[1], results[0])


def test_grad_is_the_mean_over_blocks_and_can_be_clipped() -> None:
    net, x, y = classifier()
    opt = OGN(net, lr=0.02, n_data=11, momentum=0.0, prior_precision=0.0)
    for a, b in ((x[:4], y[:4]), (x[4:], y[4:])):
        with opt.sampled_params():
            F.cross_entropy(net(a), b).backward()
    expected = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    for p, g in zip(net.parameters(), expected, strict=True):
        assert_close(p.grad, g)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    clipped = net[0].weight.grad.clone()
    before = net[0].weight.detach().clone()
    opt.step()
    below = opt.state[net[0].weight]["curvature"] + 1e-2
    assert_close(net[0].weight.detach(), before - 0.02 * clipped / below)


def test_clipping_inside_a_closure_and_by_option_agree() -> None:
    results = []
    for option in (False, True):
        net, x, y = classifier()
        opt = VOGN(net, lr=0.02, n_data=11, max_grad_norm=0.05 if option else None, generator=seed())

        def closure(net: nn.Module = net, x: Tensor = x, y: Tensor = y, option: bool = option) -> Tensor:
            loss = F.cross_entropy(net(x), y)
            if not option:
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            return loss

        for _ in range(4):
            opt.step(closure)
        results.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_zero_grad_outside_a_block_forgets() -> None:
    net, x, y = classifier()
    opt = VOGN(net, lr=0.02, n_data=11, generator=seed())
    with opt.sampled_params():
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
    assert opt._held is not None
    opt.zero_grad()
    with pytest.raises(InputError, match="nothing was"):
        opt.step()


def test_a_late_backward_pass_is_refused_by_autograd() -> None:
    net, x, y = classifier()
    opt = VOGN(net, lr=0.02, n_data=11, generator=seed())
    opt.step(lambda: F.cross_entropy(net(x), y))
    with opt.sampled_params(train=False):
        loss = F.cross_entropy(net(x), y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_groups_have_their_own_prior_rate_and_noise() -> None:
    net, x, y = classifier()
    groups = [
        {"params": list(net[0].parameters()), "deterministic": True},
        {"params": list(net[2].parameters()), "prior_precision": 50.0, "lr": 0.0},
    ]
    opt = VOGN(net, lr=0.05, n_data=11, params=groups, generator=seed())
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    seen: list[dict[str, Tensor]] = []
    for _ in range(3):
        opt.step(
            lambda: (
                seen.append({n: p.detach().clone() for n, p in net.named_parameters()}),
                F.cross_entropy(net(x), y),
            )[1]
        )
    assert_close(net[2].weight.detach(), before["2.weight"], rtol=0, atol=0)
    assert not torch.equal(net[0].weight, before["0.weight"])
    assert not torch.equal(seen[2]["2.weight"], before["2.weight"])
    assert opt.effective_prior_precision() == pytest.approx([1.0 + 11e-2, 50.0 + 11e-2])


def test_add_param_group_during_training() -> None:
    net, x, y = classifier()
    opt = VOGN(net, lr=0.02, n_data=11, params=list(net[2].parameters()), generator=seed())
    opt.step(lambda: F.cross_entropy(net(x), y))
    opt.add_param_group({"params": list(net[0].parameters()), "prior_precision": 3.0})
    before = net[0].weight.detach().clone()
    for _ in range(2):
        opt.step(lambda: F.cross_entropy(net(x), y))
    assert not torch.equal(net[0].weight, before)
    with pytest.raises(InputError, match="does not belong to the model"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2, 3))]})
    assert len(opt.param_groups) == 2


def test_batch_norm_is_deterministic_without_prior() -> None:
    net, x, y = classifier(norm=True)
    opt = VOGN(net, lr=0.01, n_data=11, generator=seed())
    assert [g["deterministic"] for g in opt.param_groups] == [False, True]
    assert opt.param_groups[1]["prior_precision"] == 0.0
    seen = []
    with pytest.warns(StatisticalWarning, match="BatchNorm layers"):
        opt.step(lambda: F.cross_entropy(net(x), y))
    before = net[1].weight.detach().clone()
    opt.step(lambda: (seen.append(net[1].weight.detach().clone()), F.cross_entropy(net(x), y))[1])
    assert_close(seen[0], before, rtol=0, atol=0)
    assert not torch.equal(net[1].weight, before)
    variational = VOGN(net, n_data=11, batch_norm="variational")
    assert len(variational.param_groups) == 1


def test_update_bn_gives_plain_averages_and_restores_modes() -> None:
    net, x, _ = classifier(norm=True)
    net.eval()
    net[1].momentum = 0.3
    update_bn(net, [(x[:5], None), (x[5:10], None)])
    hidden = net[0](x).detach()
    expected = torch.stack([hidden[:5].mean(0), hidden[5:10].mean(0)]).mean(0)
    assert_close(net[1].running_mean, expected)
    assert net[1].momentum == 0.3
    assert not net.training
    assert not net[1].training


@pytest.mark.parametrize("preset", [VOGN, OGN, IVON, KFAC, NoisyKFAC])
def test_bfloat16_autocast(preset: type[VariationalOptimizer]) -> None:
    net, x, y = classifier()
    net, x = net.to(torch.float32), x.to(torch.float32)
    opt = preset(net, lr=0.01, n_data=2000)  # type: ignore[call-arg]

    def closure() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(net(x), y)

    losses = [float(opt.step(closure)) for _ in range(30)]
    assert min(losses[-5:]) < losses[0]
    assert all(v.dtype == torch.float32 for s in opt.state.values() for v in s.values() if isinstance(v, Tensor))
    if preset is VOGN:
        watcher = opt._read()
        assert watcher.plan is not None  # type: ignore[union-attr]
        assert not watcher.plan.uncovered  # type: ignore[union-attr]


@pytest.mark.parametrize("preset", [VOGN, IVON])
def test_gradient_scaler(preset: type[VariationalOptimizer]) -> None:
    results = []
    for scaled in (False, True):
        net, x, y = classifier()
        opt = preset(net, lr=0.01, n_data=11, generator=seed())  # type: ignore[call-arg]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(4):
            opt.zero_grad()
            with opt.sampled_params(loss_scale=scaler.get_scale()):
                loss = F.cross_entropy(net(x), y)
                # The second time the scaled loss overflows, and the scaler skips the step.
                scaler.scale(loss * (float("inf") if scaled and step == 1 else 1.0)).backward()
            if not scaled and step == 1:
                continue
            scaler.step(opt)
            scaler.update()
        assert opt.steps == 3
        results.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert_close(results[1], results[0])


def test_temperature_schedule_reaches_the_noise() -> None:
    net, x, y = classifier()
    opt = VOGN(net, lr=0.0, n_data=11, temperature=warmup(4, start=0.2), generator=seed())
    found = []
    for _ in range(6):
        found.append(opt.temperature)
        opt.step(lambda: F.cross_entropy(net(x), y))
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_augmentation_multiplies_the_data() -> None:
    net, _, _ = classifier()
    opt = VOGN(net, n_data=11, augmentation=10.0)
    assert opt.noise_scale() == pytest.approx(110**-0.5)


def test_a_prior_per_weight_pulls_the_mean_and_narrows_the_noise() -> None:
    net, x, y = classifier()
    opt = VOGN(net, lr=0.1, n_data=11, damping=0.0, momentum=0.0, generator=seed())
    opt.set_prior(ones(net), {n: v * 1e7 for n, v in ones(net).items()})
    for _ in range(200):
        opt.step(lambda: F.cross_entropy(net(x), y))
    for p in net.parameters():
        assert_close(p.detach(), torch.ones_like(p), rtol=0, atol=1e-3)
    saved = opt.state_dict()
    other = VOGN(net, lr=0.1, n_data=11)
    other.load_state_dict(saved)
    assert_close(other.state[net[0].weight]["prior_precision"], torch.full((6, 5), 1e7, dtype=torch.float64))


def test_ivon_counts_uneven_blocks_by_their_size() -> None:
    results = []
    for cuts in ((11,), (3, 8)):
        net, x, y = classifier()
        opt = IVON(net, lr=0.1, n_data=11, generator=seed())
        opt._noise.normal = lambda like, *, step, sample, stream=0: [torch.ones_like(t) for t in like]  # type: ignore[method-assign]
        for a, b in zip(x.split(cuts), y.split(cuts), strict=True):
            with opt.sampled_params():
                F.cross_entropy(net(a), b).backward()
        opt.step()
        results.append(torch.cat([opt.state[p]["curvature"].flatten() for p in net.parameters()]))
    assert_close(results[1], results[0])


def test_noise_does_not_depend_on_the_global_seed_state() -> None:
    found = []
    for draws in (0, 5):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            torch.rand(draws)
            net, x, y = classifier()
            opt = VOGN(net, lr=0.02, n_data=11)
            for _ in range(3):
                opt.step(lambda net=net, x=x, y=y: F.cross_entropy(net(x), y))
            found.append(net[0].weight.detach().clone())
    assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("preset", [VOGN, IVON, KFAC])
def test_no_graph_outlives_a_step(preset: type[VariationalOptimizer]) -> None:
    net, x, y = classifier()
    opt = preset(net, n_data=11)  # type: ignore[call-arg]
    alive: list[weakref.ref[Tensor]] = []

    def closure() -> Tensor:
        out = net(x)
        alive.append(weakref.ref(out))
        return F.cross_entropy(out, y)

    for _ in range(3):
        opt.step(closure)
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
