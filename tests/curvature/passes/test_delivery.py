"""Gradients are handed out inside the backward pass, each as soon as it is complete, and then let go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from aftermap.batches import unpack_batch
from aftermap.curvature.passes.backward import Accumulator, BatchStep, Block, VectorStep, deliver
from aftermap.curvature.passes.plan import find_sites, probe
from aftermap.curvature.passes.record import arriving_gradients, backpropagate, capture
from aftermap.models import gradients_for


class Branches(nn.Module):
    """Two branches from the input that meet, a layer that is called twice, and one that is never reached."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 5), nn.Linear(3, 5)
        self.twice, self.head = nn.Linear(5, 5), nn.Linear(5, 2)
        self.beside = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.tanh(self.left(x)) + torch.relu(self.right(x))
        self.beside(both)  # its result is not used
        return self.head(both + self.twice(torch.tanh(self.twice(both))))


class Recorder(Accumulator):
    """Notes when it is called and with how many gradients."""

    def __init__(self, label: str, needs: tuple[int, ...] | None, log: list[tuple[str, int]]):
        self.label, self.needs, self.log = label, needs, log
        self.seen: dict[int, list[Tensor]] = {}

    def on_vectors(self, step: VectorStep) -> None:
        self.log.append((self.label, sum(len(v) for v in step.grads.values())))
        self.seen = {s: [g for _, g in found] for s, found in step.grads.items()}

    def results(self) -> list[Block]:
        return []


@pytest.fixture
def net() -> Branches:
    torch.manual_seed(0)
    return Branches().double()


def stepped(net: Branches) -> tuple[BatchStep, Tensor]:
    x = torch.randn(4, 3, dtype=torch.float64)
    names = [n for n, _ in net.named_parameters()]
    batch = unpack_batch((x, torch.zeros(4, dtype=torch.long)))
    found = probe(net, names, batch)
    with capture(found.sites) as calls:
        outputs = net(x)
    step = BatchStep.make(net, batch, outputs, found.sites, found.by_parameter, calls, found.axes)
    return step, torch.randn(1, 4, 2, dtype=torch.float64)


def test_the_same_gradients_as_when_autograd_holds_them_all(net: Branches) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    names = [n for n, _ in net.named_parameters()]
    with gradients_for(net, names), capture(find_sites(net, names)) as calls:
        outputs = net(x)
    edges = [c.edge for c in calls]
    vector = torch.randn(1, 4, 2, dtype=torch.float64)
    expected = next(backpropagate(outputs, edges, vector, batched=False, keep=True))
    arrived: dict[int, Tensor] = {}
    passes: list[int] = []
    arriving_gradients(outputs, edges, vector, arrived.__setitem__, lambda: passes.append(len(arrived)), keep=True)
    assert passes == [5]
    assert set(arrived) == {n for n, g in enumerate(expected) if g is not None}
    assert len(arrived) == 5  # of six calls, one does not reach the outputs
    for number, grad in arrived.items():
        torch.testing.assert_close(grad[None], expected[number])
    # The hooks are gone: a second pass tells nobody.
    arrived.clear()
    torch.autograd.grad(outputs, edges, vector[0], allow_unused=True)
    assert arrived == {}


def test_consumers_are_served_in_the_order_of_the_backward_pass(net: Branches) -> None:
    step, vector = stepped(net)
    sites = {site.name: number for number, site in enumerate(step.sites.sites)}
    log: list[tuple[str, int]] = []
    labels = ["left", "right", "twice", "beside", "head"]
    each = [Recorder(label, (sites[label],), log) for label in labels]
    everything = Recorder("everything", None, log)
    nothing = Recorder("nothing", (), log)
    deliver(step, vector, [*each, everything, nothing], keep=False)
    order = [label for label, _ in log]
    assert order[0] == "head"
    assert order[1] == "twice"  # once both of its calls have their gradient
    assert sorted(order) == sorted([*labels, "everything", "nothing"])
    assert dict(log) == {"head": 1, "twice": 2, "left": 1, "right": 1, "beside": 0, "everything": 5, "nothing": 0}
    torch.testing.assert_close(everything.seen[sites["left"]][0], each[0].seen[sites["left"]][0])


def test_several_vectors_are_delivered_as_each_would_be(net: Branches) -> None:
    step, first = stepped(net)
    vectors = torch.cat([first, torch.randn(2, 4, 2, dtype=torch.float64)])
    alone: list[dict[int, list[Tensor]]] = []
    for vector in vectors.split(1):
        recorder = Recorder("all", None, [])
        deliver(step, vector, [recorder], keep=True)
        alone.append(recorder.seen)
    seen: list[dict[int, list[Tensor]]] = []

    class Keeper(Recorder):
        def on_vectors(self, step: VectorStep) -> None:
            super().on_vectors(step)
            seen.append(dict(self.seen))

    deliver(step, vectors, [Keeper("all", None, [])], keep=False)
    assert len(seen) == 3
    for found, expected in zip(seen, alone, strict=True):
        torch.testing.assert_close(found, expected)


def test_an_error_of_a_consumer_arrives_and_leaves_no_hook(net: Branches) -> None:
    class Broken(Recorder):
        def on_vectors(self, step: VectorStep) -> None:
            raise ZeroDivisionError("broken")

    step, vector = stepped(net)
    with pytest.raises(ZeroDivisionError, match="broken"):
        deliver(step, vector, [Broken("broken", None, [])], keep=True)
    log: list[tuple[str, int]] = []
    deliver(step, vector, [Recorder("all", None, log)], keep=False)
    assert log == [("all", 5)]
