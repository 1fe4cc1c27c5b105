"""Reading closures whose rows are not plainly those of examples, and whose gradients are not all that of the loss."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.errors import StatisticalWarning, UnsupportedError
from tests.curvature.passes.test_closure import (
    DTYPE,
    Plain,
    assert_exact,
    both,
    data,
    expected,
    read,
    reader_of,
    seeded,
)


class TimeMajor(nn.Module):
    """Folds time before the batch: rows of an example are apart, which does not show at length one."""

    def __init__(self, *, squeezed: bool = False) -> None:
        super().__init__()
        self.a, self.o, self.squeezed = nn.Linear(3, 4), nn.Linear(4, 1 if squeezed else 3), squeezed

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        rows = torch.tanh(self.a(x.transpose(0, 1).reshape(length * size, 3)))
        out: Tensor = self.o(rows.view(length, size, 4).mean(0))
        return out.squeeze(-1) if self.squeezed else out


@both
@pytest.mark.parametrize("squeezed", [False, True], ids=["outputs [N, C]", "outputs [N]"])
def test_rows_in_another_order_in_a_later_step(squeezed: bool, backward: bool) -> None:
    """The sums over examples are right whatever the order of the rows, so that they cannot show whose rows they are."""
    model = seeded(TimeMajor(squeezed=squeezed))
    reader = reader_of(model)
    for step, length in enumerate((1, 4, 4, 1)):
        x = torch.randn(6, length, 3, generator=torch.Generator().manual_seed(step), dtype=DTYPE)
        y = torch.arange(6) % 3
        loss = (lambda out, y: (out - y).square().sum()) if squeezed else partial(F.cross_entropy, reduction="sum")
        singles = [
            torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]), [*model.parameters()]) for i in range(6)
        ]
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", StatisticalWarning)
            with reader.reading() as reading:
                total = loss(model(x), y)
                if backward:
                    total.backward()
                else:
                    reading.differentiate(total)
            statistics = reading.finish()
        assert len(caught) == (step == 1)
        for name, each in zip(dict(model.named_parameters()), zip(*singles, strict=True), strict=True):
            gradients = torch.stack(each)
            assert_close(statistics.squares[name], gradients.square().sum(0), rtol=1e-9, atol=1e-12)


class TimeFirst(nn.Module):
    """Takes [time, batch, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(torch.tanh(self.a(x)).mean(0))
        return out


@both
@pytest.mark.parametrize("length, count", [(4, 8), (3, 8), (8, 4), (4, 4), (2, 6)])
def test_squares_are_refused_where_the_batch_does_not_come_first(length: int, count: int, backward: bool) -> None:
    model = seeded(TimeFirst())
    reader = reader_of(model)
    x = torch.randn(length, count, 3, generator=torch.Generator().manual_seed(0), dtype=DTYPE)
    for size in (None, count):
        with reader.reading(size) as reading:
            loss = F.cross_entropy(model(x), torch.arange(count) % 3)
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                reading.differentiate(loss)
        with pytest.raises(UnsupportedError, match=f"returned {count} rows .*need examples in the first dimension"):
            reading.finish()


class Graphs(nn.Module):
    """Takes the nodes of all graphs [nodes, features] and the graph of each node; there is one output for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, graph: Tensor, edges: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        hidden = hidden.index_add(0, edges[1], hidden[edges[0]])
        out: Tensor = self.o(hidden.new_zeros(int(graph.max()) + 1, 4).index_add(0, graph, hidden))
        return out


@both
@pytest.mark.parametrize("size", [None, 3])
def test_squares_are_refused_for_batches_of_graphs(size: int | None, backward: bool) -> None:
    model = seeded(Graphs())
    reader = reader_of(model)
    nodes = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=DTYPE)
    graph, edges = torch.arange(3).repeat_interleave(4), torch.tensor([[0, 5, 10, 11], [1, 6, 9, 8]])
    with reader.reading(size) as reading:
        loss = F.cross_entropy(model(nodes, graph, edges), torch.arange(3))
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            reading.differentiate(loss)
    with pytest.raises(UnsupportedError, match="examples"):
        reading.finish()


class WithTemperature(Plain):
    """Has a parameter that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))


@both
def test_a_parameter_that_only_the_loss_uses_has_no_squares(backward: bool) -> None:
    model = seeded(WithTemperature())
    reader = reader_of(model)
    x, y = data()
    with reader.reading() as reading:
        loss = F.cross_entropy(model(x) / model.temperature, y)
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            reading.differentiate(loss)
    with pytest.raises(
        UnsupportedError, match="temperature has a gradient that does not come through the model's outputs"
    ):
        reading.finish()


class Force(nn.Module):
    """Differentiates in its own forward pass: its outputs are read from the gradient of an energy, or weighed by it."""

    def __init__(self, *, differentiable: bool) -> None:
        super().__init__()
        self.a, self.b, self.o, self.differentiable = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(3, 3), differentiable

    def forward(self, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        energy = self.b(torch.tanh(self.a(place))).sum()
        (force,) = torch.autograd.grad(energy, place, create_graph=self.differentiable)
        out: Tensor = self.o(force)
        return out


@both
@pytest.mark.parametrize("differentiable", [False, True])
def test_a_backward_pass_inside_the_model_is_not_that_of_the_loss(differentiable: bool, backward: bool) -> None:
    model = seeded(Force(differentiable=differentiable))
    reader = reader_of(model)
    for step in range(3):
        x, y = data(step)
        assert_exact(read(reader, x, y, backward=backward), model, x, y)


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum()


@both
def test_a_gradient_in_the_loss_is_no_backward_pass_of_the_closure(backward: bool) -> None:
    model = seeded(Plain())
    reader = reader_of(model)
    for step in range(3):
        x, y = data(step)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StatisticalWarning)
            with reader.reading() as reading:
                inputs = x.clone().requires_grad_()
                out = model(inputs)
                (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
                loss = F.cross_entropy(out, y, reduction="sum") + slope.square().sum()
                assert not reading.gradients_came
                if backward:
                    loss.backward()  # type: ignore[no-untyped-call]
                    assert reading.gradients_came
                else:
                    reading.differentiate(loss)
            statistics = reading.finish()
        sums, squares = expected(model, x, y, lambda m, x=x: gradient_penalty(m, x))  # type: ignore[misc]
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad if backward else statistics.sums[name], sums[name])
        for name in ("0.weight", "2.weight"):  # They are used once more; what is squared is without the penalty then.
            assert_close(statistics.squares[name], squares[name])


@pytest.mark.parametrize("steps", [1, 3])
def test_a_closure_whose_backward_pass_makes_a_graph_has_squares(steps: int) -> None:
    model = seeded(Plain())
    reader = reader_of(model)
    for step in range(steps):
        x, y = data(step)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with reader.reading() as reading:
                F.cross_entropy(model(x), y, reduction="sum").backward(create_graph=step == steps - 1)  # type: ignore[no-untyped-call]
            if step == steps - 1:
                with pytest.raises(UnsupportedError, match="has no layer rule"):
                    reading.finish()
            else:
                reading.finish()
        model.zero_grad()
