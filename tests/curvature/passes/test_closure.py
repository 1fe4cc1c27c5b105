"""Reading closures: gradients are autograd's and squares are those of single examples, whatever the closure does."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from aftermap.curvature.passes.closure import ClosureReader
from aftermap.curvature.passes.gradient_reader import ClosureStatistics, with_loss
from aftermap.errors import InputError, StatisticalWarning, UnsupportedError

DTYPE = torch.float64
Penalty = Callable[[nn.Module], Tensor]


def data(seed: int = 0, n: int = 6, positive: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=DTYPE)
    x[:, 0] = x[:, 0].abs() if positive else -x[:, 0].abs()
    return x, torch.randint(3, (n,), generator=generator)


def seeded(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for p in model.to(DTYPE).parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=DTYPE) * 0.7)
    return model


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


class Gated(nn.Module):
    """Uses a weight once more, outside its layer, for examples whose first feature is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if bool((x[:, 0] > 0).any()):
            h = h + (x[:, :1] > 0).to(x) * (x @ self.a.weight)
        out: Tensor = self.o(h)
        return out


class Branch(nn.Module):
    """Calls a layer only where the first feature of some example is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if bool((x[:, 0] > 0).any()):
            h = h + torch.tanh(self.b(h))
        out: Tensor = self.o(h)
        return out


class Experts(nn.Module):
    """Each expert sees the examples that a feature's sign gives to it; one of them may see none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.o = nn.ModuleList(nn.Linear(3, 4) for _ in range(2)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for k, expert in enumerate(self.experts):
            index = ((x[:, 1] > 0) == bool(k)).nonzero()[:, 0]
            h = h.index_add(0, index, torch.tanh(expert(x[index])))
        out: Tensor = self.o(h)
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = checkpoint(lambda h: torch.tanh(self.b(torch.tanh(h))), h, use_reentrant=False)
        out: Tensor = self.o(h)
        return out


def read(
    reader: ClosureReader, x: Tensor, y: Tensor, *, backward: bool, penalty: Penalty | None = None
) -> ClosureStatistics:
    """The statistics of one closure with a summed loss, which calls ``backward`` itself or leaves that to the reader."""
    model = reader.model
    model.zero_grad()
    with reader.reading() as reading:
        loss = F.cross_entropy(model(x), y, reduction="sum")
        if penalty is not None:
            loss = loss + penalty(model)
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            reading.differentiate(loss)
    statistics = reading.finish()
    reading.release()
    if backward:  # what a closure's own backward pass leaves is the gradient
        statistics.sums.update({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return statistics


def expected(
    model: nn.Module, x: Tensor, y: Tensor, penalty: Penalty | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Autograd's gradient of the whole loss, and the sum of squared gradients of single examples (without the penalty)."""
    names, params = zip(*model.named_parameters(), strict=True)
    loss = F.cross_entropy(model(x), y, reduction="sum")
    loss = loss if penalty is None else loss + penalty(model)
    sums = dict(zip(names, torch.autograd.grad(loss, params, allow_unused=True), strict=True))
    squares = {n: torch.zeros_like(p) for n, p in zip(names, params, strict=True)}
    for i in range(len(x)):
        one = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        for name, g in zip(names, torch.autograd.grad(one, params, allow_unused=True), strict=True):
            squares[name] += 0 if g is None else g.square()
    used = {n: g for n, g in sums.items() if g is not None}
    return used, {n: squares[n] for n in used}


def assert_exact(
    statistics: ClosureStatistics, model: nn.Module, x: Tensor, y: Tensor, penalty: Penalty | None = None
) -> None:
    sums, squares = expected(model, x, y, penalty)
    assert statistics.size == len(x)
    for name in sums:
        assert_close(statistics.sums[name], sums[name], msg=lambda m, n=name: f"gradient of {n}: {m}")
        assert_close(statistics.squares[name], squares[name], msg=lambda m, n=name: f"squares of {n}: {m}")
    for name in set(statistics.sums) - set(sums):  # a layer that saw no example has no gradient, or a zero one
        assert not statistics.sums[name].any()
        assert not statistics.squares[name].any()


def reader_of(model: nn.Module) -> ClosureReader:
    return ClosureReader(model, [n for n, _ in model.named_parameters()])


def decay(model: nn.Module) -> Tensor:
    return 0.3 * next(model.parameters()).square().sum()


both = pytest.mark.parametrize("backward", [False, True], ids=["returns the loss", "calls backward"])


@both
def test_a_penalty_that_appears_at_the_third_step(backward: bool) -> None:
    model = seeded(Plain())
    reader = reader_of(model)
    heard: list[str] = []
    for step in range(6):
        x, y = data(step)
        penalty = decay if step >= 2 else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            statistics = read(reader, x, y, backward=backward, penalty=penalty)
        heard += [str(w.message) for w in caught if issubclass(w.category, StatisticalWarning)]
        assert_exact(statistics, model, x, y, penalty)
    # A closure that runs its own backward pass hands its gradient over; nothing has to change, and nothing is said.
    assert len(heard) == (0 if backward else 1)
    assert backward or "0.weight" in heard[0]


@both
def test_a_gated_second_use_that_appears_at_the_second_step(backward: bool) -> None:
    model = seeded(Gated())
    reader = reader_of(model)
    for step, positive in enumerate((False, True, True, False, True)):
        x, y = data(step, positive=positive)
        if step == 1:
            with pytest.warns(StatisticalWarning, match="a.weight.*another way than in the steps before") as caught:
                statistics = read(reader, x, y, backward=backward)
            assert len(caught) == 1
        else:
            statistics = read(reader, x, y, backward=backward)
        assert_exact(statistics, model, x, y)


@both
def test_a_layer_that_is_first_used_at_the_fourth_step(backward: bool) -> None:
    model = seeded(Branch())
    reader = reader_of(model)
    for step in range(6):
        x, y = data(step, positive=step in (3, 5))
        assert_exact(read(reader, x, y, backward=backward), model, x, y)


@both
@pytest.mark.parametrize("first", ["both experts", "an empty expert"])
def test_layers_called_on_a_part_of_the_batch(backward: bool, first: str) -> None:
    model = seeded(Experts())
    reader = reader_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StatisticalWarning)
        for step in range(5):
            x, y = data(step)
            if (step % 2 == 0) == (first == "an empty expert"):
                x[:, 1] = x[:, 1].abs()
            assert_exact(read(reader, x, y, backward=backward), model, x, y)


@both
def test_gradient_checkpointing(backward: bool) -> None:
    model = seeded(Checkpointed())
    reader = reader_of(model)
    for step in range(4):
        x, y = data(step)
        assert_exact(read(reader, x, y, backward=backward), model, x, y)


@both
def test_a_checkpoint_with_a_penalty_later(backward: bool) -> None:
    model = seeded(Checkpointed())
    reader = reader_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StatisticalWarning)
        for step in range(4):
            x, y = data(step)
            penalty = decay if step >= 2 else None
            assert_exact(read(reader, x, y, backward=backward, penalty=penalty), model, x, y, penalty)


@both
def test_batch_norm_in_training_mode_has_the_true_gradient(backward: bool) -> None:
    model = seeded(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))).train()
    reader = reader_of(model)
    for step in range(4):
        x, y = data(step)
        if step == 0:
            with pytest.warns(StatisticalWarning, match="BatchNorm layers .* training mode") as caught:
                statistics = read(reader, x, y, backward=backward)
            assert len(caught) == 1
        else:
            statistics = read(reader, x, y, backward=backward)
        params = dict(model.named_parameters())
        loss = F.cross_entropy(model(x), y, reduction="sum")
        for name, truth in zip(params, torch.autograd.grad(loss, list(params.values())), strict=True):
            assert_close(statistics.sums[name], truth, atol=1e-12, rtol=1e-6)
            assert bool((statistics.squares[name] >= 0).all())


@both
def test_autocast(backward: bool) -> None:
    model = seeded(Plain()).float()
    reader = reader_of(model)
    for step in range(3):
        x, y = data(step)
        x = x.float()
        model.zero_grad()
        with reader.reading() as reading:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y, reduction="sum")
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                reading.differentiate(loss)
        statistics = reading.finish()
        reading.release()
        sums, squares = expected(model, x, y)
        for name in sums:
            assert statistics.squares[name].dtype == torch.float32
            assert_close(statistics.sums[name], sums[name], atol=0.05, rtol=0.1)
            assert_close(statistics.squares[name], squares[name], atol=0.05, rtol=0.1)
    assert reader.plan is not None
    assert not reader.plan.uncovered


@both
def test_submodules_without_the_whole_model(backward: bool) -> None:
    model = seeded(Plain())
    reader = reader_of(model)
    for step in range(3):
        x, y = data(step)
        model.zero_grad()
        with reader.reading() as reading:
            loss = F.cross_entropy(model[2](torch.tanh(model[0](x))), y, reduction="sum")  # type: ignore[index]
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                reading.differentiate(loss)
        statistics = reading.finish()
        reading.release()
        assert_exact(statistics, model, x, y)


class TwoOutputs(Gated):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out, out.exp()  # type: ignore[return-value]


@both
@pytest.mark.parametrize("model", [Gated(), TwoOutputs()], ids=["submodules", "two outputs"])
def test_squares_are_refused_where_a_second_use_appears_and_examples_cannot_be_run_alone(
    model: nn.Module, backward: bool
) -> None:
    reader = reader_of(seeded(model))

    def step(number: int, positive: bool) -> None:
        x, y = data(number, positive=positive)
        model.zero_grad()
        with reader.reading() as reading:
            out = model(x)[0] if isinstance(model, TwoOutputs) else Gated.forward(model, x)  # type: ignore[arg-type]
            loss = F.cross_entropy(out, y, reduction="sum")
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                reading.differentiate(loss)
        try:
            reading.finish()
        finally:
            reading.release()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StatisticalWarning)
        for number in range(3):
            step(number, positive=False)
        with pytest.raises(UnsupportedError, match=r"a\.weight has no layer rule.*call the whole model once"):
            step(3, positive=True)


def test_submodules_with_a_penalty_cannot_have_squares_without_the_model() -> None:
    model = seeded(Plain())
    reader = reader_of(model)
    for step in range(2):
        x, y = data(step)
        with reader.reading() as reading:
            loss = F.cross_entropy(model[2](torch.tanh(model[0](x))), y, reduction="sum")  # type: ignore[index]
            reading.differentiate(loss)
        reading.finish()
        reading.release()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StatisticalWarning)
        with reader.reading() as reading:
            loss = F.cross_entropy(model[2](torch.tanh(model[0](x))), y, reduction="sum") + decay(model)  # type: ignore[index]
            reading.differentiate(loss)
        with pytest.raises(UnsupportedError, match=r"0\.weight has no layer rule.*call the whole model once"):
            reading.finish()


def test_a_closure_that_calls_no_layer() -> None:
    model = seeded(Plain())
    with reader_of(model).reading() as reading:
        reading.differentiate(decay(model))
    with pytest.raises(InputError, match="did not call the model"):
        reading.finish()


def test_inputs_are_let_go_as_the_backward_pass_reaches_their_layer() -> None:
    width = 64
    model = seeded(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6))))
    reader = reader_of(model)
    alive: list[int] = []
    inputs: list[weakref.ref[Tensor]] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(lambda _: alive.append(sum(r() is not None for r in inputs)))

    for step in range(3):
        x = torch.randn(5, width, dtype=DTYPE, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        handles = [layer.register_forward_hook(keep) for layer in model]  # type: ignore[union-attr]
        with reader.reading() as reading:
            loss = model(x).square().sum()
            inputs[:] = [weakref.ref(call.inputs) for call in reading.record.calls]
            alive.clear()
            reading.differentiate(loss)
        for handle in handles:
            handle.remove()
        if step == 2:  # the first closure is held until the plan is known, later ones are not
            assert alive == sorted(alive, reverse=True)
            assert alive[-1] <= 2
        assert not any(call.inputs.numel() for call in reading.record.calls) or step == 0
        reading.finish()
        reading.release()


@both
def test_nothing_keeps_the_graph_alive_after_a_step(backward: bool) -> None:
    model = seeded(Plain())
    reader = reader_of(model)
    gc.collect()
    gc.disable()
    try:
        for step in range(3):
            x, y = data(step)
            model.zero_grad()
            with reader.reading() as reading:
                saved = model(x)  # the graph saves what the loss is made of
                loss = F.cross_entropy(saved, y, reduction="sum")
                if backward:
                    loss.backward()  # type: ignore[no-untyped-call]
                else:
                    reading.differentiate(loss)
            reading.finish()
            reading.release()
            held = [weakref.ref(v) for v in (loss, saved, reading)]
            del loss, saved, reading
            assert [reference() for reference in held] == [None, None, None]
    finally:
        gc.enable()


def test_a_second_backward_pass_is_refused() -> None:
    model = seeded(Plain())
    reader = reader_of(model)
    x, y = data()
    with reader.reading() as reading:
        loss = F.cross_entropy(model(x), y)
        reading.differentiate(loss, keep=True)
        with pytest.raises(UnsupportedError, match="second backward pass"):
            loss.backward()  # type: ignore[no-untyped-call]
    reading.release()


def test_gradients_of_several_backward_passes_add_up_where_only_gradients_are_wanted() -> None:
    """Two parts of the loss and a penalty, each with a pass of its own: at the parameters and at the network's outputs."""
    model, (x, y) = seeded(Plain()), data()
    reader = ClosureReader(model, [n for n, _ in model.named_parameters()], gradients_only=True)
    with reader.reading() as reading:
        outputs = model(x)
        for part, more in ((slice(0, 2), True), (slice(2, 6), False)):
            F.cross_entropy(outputs[part], y[part], reduction="sum").backward(retain_graph=more)  # type: ignore[no-untyped-call]
        decay(model).backward()  # type: ignore[no-untyped-call]
    statistics = reading.finish()
    at_outputs = reading.record.model_calls[0].gradient
    reading.release()
    sums, _ = expected(model, x, y, decay)
    assert set(statistics.sums) == set(sums)
    for name, gradient in sums.items():
        assert_close(statistics.sums[name], gradient)
    assert_close(at_outputs, outputs.detach().softmax(-1) - F.one_hot(y, 3))


def test_two_calls_of_the_model_are_refused() -> None:
    model = seeded(Plain())
    reader = reader_of(model)
    x, y = data()
    with reader.reading() as reading:
        reading.differentiate(F.cross_entropy(model(x), y) + F.cross_entropy(model(2 * x), y))
    with pytest.raises(UnsupportedError, match="called the model 2 times"):
        reading.finish()


def test_a_step_returns_what_its_closure_returned_with_another_loss() -> None:
    class Found(NamedTuple):
        loss: Tensor
        accuracy: float
        count: int

    loss, new = torch.tensor(3.0), torch.tensor(2.0)
    assert with_loss(loss, new) is new
    assert with_loss((loss, 0.5, 7), new) == (new, 0.5, 7)
    assert with_loss([loss, 0.5, 7], new) == [new, 0.5, 7]
    assert with_loss(Found(loss, 0.5, 7), new) == (new, 0.5, 7)
    assert with_loss({"accuracy": 0.5, "loss": loss}, new) == {"accuracy": 0.5, "loss": new}
