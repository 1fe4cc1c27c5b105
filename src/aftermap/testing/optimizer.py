"""The contract of an optimiser: what every preset of `aftermap.optim` does, and what a new one must do."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.errors import InputError, NumericalWarning, StatisticalWarning

__all__ = ["check_optimizer"]

Factory = Callable[[nn.Module, int], Any]
_N = 23


def check_optimizer(factory: Factory) -> None:
    """Runs the whole contract on a small network in float64.

    It checks that the object is a `torch.optim.Optimizer` with its numbers in the groups; training lowers the loss; the
    parameters hold the mean between steps, also after an exception; ``.grad`` and PyTorch's global generator are left
    alone; the same seed gives the same run; a state saved and loaded (without pickle) continues bit by bit; blocks of
    `sampled_params` with ``step()`` equal a closure; a backward pass inside the closure equals one outside; schedulers,
    frozen and unused parameters, extra outputs; a loss that is not finite is skipped; a state of another optimiser is
    refused.

    Args:
        factory: A function of (model, n_data) that makes the optimiser; it is called often, and must give the same seed
            each time.

    Raises:
        AssertionError: The contract is broken; the message says what is wrong.

    >>> from aftermap.optim import VOGN
    >>> check_optimizer(lambda net, n: VOGN(net, lr=0.02, n_data=n, generator=torch.Generator().manual_seed(0)))
    """
    for check in (
        _check_is_optimizer,
        _check_learns,
        _check_repeats,
        _check_resume,
        _check_blocks,
        _check_own_backward,
        _check_exception,
        _check_leaves_alone,
        _check_frozen_and_unused,
        _check_scheduler,
        _check_extras,
        _check_not_finite,
        _check_foreign_state,
        _check_nesting,
    ):
        check(factory)


class _Net(nn.Module):
    """A network of two layers, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.idle = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


def _make() -> tuple[_Net, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():  # Layers draw their weights from the default generator.
        net = _Net().to(torch.float64)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    x = torch.randn(_N, 5, generator=generator, dtype=torch.float64)
    return net, x, (x @ torch.randn(5, 4, generator=generator, dtype=torch.float64)).argmax(1)


def _train(opt: Any, net: nn.Module, x: Tensor, y: Tensor, steps: int) -> list[float]:
    return [float(opt.step(lambda: F.cross_entropy(net(x), y))) for _ in range(steps)]


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in net.named_parameters()}


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _expect_same(actual: dict[str, Tensor], expected: dict[str, Tensor], message: str, tolerance: float = 0.0) -> None:
    for name, value in expected.items():
        error = float((actual[name] - value).abs().max())
        _expect(error <= tolerance, f"{message}: {name} differs by {error:.2e}")


def _expect_error(action: Callable[[], Any], part: str, message: str) -> None:
    try:
        action()
    except InputError as error:
        _expect(part in str(error), f"{message}: the error says {error}")
        return
    raise AssertionError(f"{message}: no InputError was raised")


def _check_is_optimizer(factory: Factory) -> None:
    net, _, _ = _make()
    opt = factory(net, _N)
    _expect(isinstance(opt, torch.optim.Optimizer), "it is not a torch.optim.Optimizer")
    for key in ("lr", "momentum", "new_curvature_weight", "prior_precision", "prior_mean", "damping", "deterministic"):
        _expect(all(key in g for g in opt.param_groups), f"{key} is not in the parameter groups")


def _check_learns(factory: Factory) -> None:
    net, x, y = _make()
    losses = _train(factory(net, _N), net, x, y, 150)
    _expect(losses[-1] < 0.8 * losses[0], f"150 steps took the loss from {losses[0]:.3f} to {losses[-1]:.3f} only")


def _check_repeats(factory: Factory) -> None:
    runs = []
    for _ in range(2):
        net, x, y = _make()
        _train(factory(net, _N), net, x, y, 4)
        runs.append(_weights(net))
    _expect_same(runs[1], runs[0], "the same seed gives another run")


def _check_resume(factory: Factory) -> None:
    net, x, y = _make()
    opt = factory(net, _N)
    _train(opt, net, x, y, 3)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, file)
    _train(opt, net, x, y, 4)
    again, _, _ = _make()
    other = factory(again, _N)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved["net"])
    other.load_state_dict(saved["opt"])
    _train(other, again, x, y, 4)
    _expect_same(_weights(again), _weights(net), "a resumed run is not bit-identical")


def _check_blocks(factory: Factory) -> None:
    runs = []
    for blocks in (False, True):
        net, x, y = _make()
        opt = factory(net, _N)
        for _ in range(4):
            if not blocks:
                opt.step(lambda net=net, x=x, y=y: F.cross_entropy(net(x), y))
                continue
            opt.zero_grad()
            samples = opt.settings.mc_samples if opt.steps > 0 or opt.settings.initial_curvature is not None else 1
            for _ in range(samples):
                with opt.sampled_params():
                    F.cross_entropy(net(x), y).backward()
            opt.step()
        runs.append(_weights(net))
    _expect_same(runs[1], runs[0], "sampled_params() and step() differ from step(closure)", 1e-10)


def _check_own_backward(factory: Factory) -> None:
    runs = []
    for backward_inside in (False, True):
        net, x, y = _make()
        opt = factory(net, _N)

        def closure(
            net: nn.Module = net, opt: Any = opt, x: Tensor = x, y: Tensor = y, backward_inside: bool = backward_inside
        ) -> Tensor:
            if backward_inside:
                opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            if backward_inside:
                loss.backward()
                return loss.detach()
            return loss

        for _ in range(4):
            opt.step(closure)
        runs.append(_weights(net))
    _expect_same(runs[1], runs[0], "a closure that calls backward gives another run", 1e-10)


def _check_exception(factory: Factory) -> None:
    net, x, y = _make()
    opt = factory(net, _N)
    _train(opt, net, x, y, 2)
    before = _weights(net)

    def fail() -> Tensor:
        net(x)
        raise ZeroDivisionError

    for action in (lambda: opt.step(fail), lambda: _in_block(opt, fail)):
        try:
            action()
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError("an exception in the closure was swallowed")
        _expect_same(_weights(net), before, "after an exception the mean was not restored")
    _train(opt, net, x, y, 1)


def _in_block(opt: Any, action: Callable[[], Any]) -> None:
    with opt.sampled_params():
        action()


def _check_leaves_alone(factory: Factory) -> None:
    net, x, y = _make()
    opt = factory(net, _N)
    gradient = torch.ones_like(net.first.weight)
    net.first.weight.grad = gradient
    state = torch.get_rng_state()
    with warnings.catch_warnings():  # That the gradient is not used is said once, or not at all.
        warnings.simplefilter("ignore", StatisticalWarning)
        _train(opt, net, x, y, 3)
    _expect(net.first.weight.grad is gradient and bool((gradient == 1).all()), "step(closure) changed .grad")
    _expect(bool(torch.equal(state, torch.get_rng_state())), "the global random state was touched")
    _expect(all(not m._forward_hooks for m in net.modules()), "hooks were left on the model")


def _check_frozen_and_unused(factory: Factory) -> None:
    net, x, y = _make()
    opt = factory(net, _N)
    _train(opt, net, x, y, 2)
    net.first.bias.requires_grad_(False)
    before = _weights(net)
    _train(opt, net, x, y, 2)
    after = _weights(net)
    for name in ("first.bias", "idle.weight", "idle.bias"):
        _expect_same({name: after[name]}, {name: before[name]}, "a frozen or unused parameter moved")
    _expect(not torch.equal(after["first.weight"], before["first.weight"]), "the other parameters did not move")


def _check_scheduler(factory: Factory) -> None:
    net, x, y = _make()
    opt = factory(net, _N)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.0)
    _train(opt, net, x, y, 1)
    scheduler.step()
    before = _weights(net)
    _train(opt, net, x, y, 2)
    _expect_same(_weights(net), before, "a scheduler's rate of zero still moved the mean")


def _check_extras(factory: Factory) -> None:
    net, x, y = _make()
    opt = factory(net, _N)

    def closure() -> tuple[Tensor, Tensor]:
        out = net(x)
        return F.cross_entropy(out, y), out.detach()

    loss, out = opt.step(closure)
    _expect(out.shape == (_N, 4) and loss.numel() == 1 and not loss.requires_grad, "extra outputs of a tuple were lost")
    returned = opt.step(lambda: {"loss": closure()[0], "accuracy": 0.5})
    _expect(
        returned["accuracy"] == 0.5 and math.isfinite(float(returned["loss"])), "extra outputs of a mapping were lost"
    )


def _check_not_finite(factory: Factory) -> None:
    net, x, y = _make()
    opt = factory(net, _N)
    _train(opt, net, x, y, 2)
    before = _weights(net)
    state = {k: v.clone() for p in opt.state for k, v in opt.state[p].items() if isinstance(v, Tensor)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step(lambda: F.cross_entropy(net(x), y) * math.nan)
    _expect(any(isinstance(w.message, NumericalWarning) for w in caught), "a loss of nan was not reported")
    _expect_same(_weights(net), before, "a loss of nan moved the mean")
    after = {k: v for p in opt.state for k, v in opt.state[p].items() if isinstance(v, Tensor)}
    _expect_same(after, state, "a loss of nan changed the statistics")
    _expect(opt.skipped_steps == 1, "the skipped step was not counted")
    _train(opt, net, x, y, 1)


def _check_foreign_state(factory: Factory) -> None:
    net, x, y = _make()
    opt = factory(net, _N)
    _train(opt, net, x, y, 2)
    state = opt.state_dict()
    foreign = torch.optim.Adam(net.parameters()).state_dict()
    _expect_error(lambda: opt.load_state_dict(foreign), "another optimiser", "a state of Adam was accepted")
    _expect(opt.steps == state["aftermap"]["steps"], "a refused state changed the step")
    small = nn.Linear(5, 4, dtype=torch.float64)
    mine = factory(small, _N)
    _expect_error(lambda: mine.load_state_dict(state), "Nothing was changed", "a state of another model was accepted")


def _check_nesting(factory: Factory) -> None:
    net, x, y = _make()
    opt = factory(net, _N)
    _train(opt, net, x, y, 2)

    def nested() -> None:
        with opt.sampled_params(), opt.sampled_params():
            pass

    _expect_error(nested, "nested", "nested sampled_params() was accepted")
    before = _weights(net)
    with opt.sampled_params(train=False):
        inside = _weights(net)
    drew = any(not torch.equal(inside[n], before[n]) for n in ("first.weight", "last.weight"))
    _expect(drew, "sampled_params(train=False) did not draw weights")
    _expect_same(_weights(net), before, "sampled_params(train=False) did not put the mean back")
