"""Gradients are handed out inside the backward pass, each as soon as it is complete, and then let go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from aftermap.batches import unpack_batch
from aftermap.curvature.passes.backward import Accumulator, BackwardPass, LayerGradients
from aftermap.curvature.passes.plan import plan_model
from aftermap.curvature.passes.record import ForwardRecord, record_calls


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

    def __init__(self, label: str, layers: tuple[int, ...] | None, log: list[tuple[str, int]], *, stacks: bool = False):
        self.label, self.layers, self.log, self.stacks_vectors = label, layers, log, stacks
        self.seen: list[dict[int, list[Tensor]]] = []

    def add(self, gradients: LayerGradients) -> None:
        self.log.append((self.label, sum(len(v) for v in gradients.by_layer.values())))
        self.seen.append({k: [g for _, g in calls] for k, calls in gradients.by_layer.items()})


@pytest.fixture
def net() -> Branches:
    torch.manual_seed(0)
    return Branches().double()


def record_of(net: Branches) -> tuple[ForwardRecord, Tensor]:
    x = torch.randn(4, 3, dtype=torch.float64)
    names = [n for n, _ in net.named_parameters()]
    batch = unpack_batch((x, torch.zeros(4, dtype=torch.long)))
    plan = plan_model(net, names, batch)
    with record_calls(plan) as calls:
        outputs = net(x)
    return ForwardRecord.make(net, batch, outputs, plan, calls), torch.randn(1, 4, 2, dtype=torch.float64)


def test_the_same_gradients_as_when_autograd_holds_them_all(net: Branches) -> None:
    record, vector = record_of(net)
    expected = torch.autograd.grad(record.outputs, record.edges, vector[0], retain_graph=True, allow_unused=True)
    arrived = Recorder("all", None, [])
    BackwardPass(record, [arrived]).run(vector, together=False, keep_graph=True)
    (seen,) = arrived.seen
    assert sum(len(v) for v in seen.values()) == 5  # of six calls, one does not reach the outputs
    for number, calls in record.calls.items():
        wanted = [expected[c.edge] for c in calls if expected[c.edge] is not None]
        assert len(wanted) == len(seen[number])
        for gradient, truth in zip(seen[number], wanted, strict=True):
            torch.testing.assert_close(gradient[0, :, 0, 0], truth)
    # The hooks are gone: another pass tells nobody.
    torch.autograd.grad(record.outputs, record.edges, vector[0], allow_unused=True)
    assert len(arrived.seen) == 1


def test_consumers_are_served_in_the_order_of_the_backward_pass(net: Branches) -> None:
    record, vector = record_of(net)
    numbers = {layer.name: number for number, layer in enumerate(record.plan.layers)}
    log: list[tuple[str, int]] = []
    labels = ["left", "right", "twice", "beside", "head"]
    by_layer = [Recorder(label, (numbers[label],), log) for label in labels]
    everything = Recorder("everything", None, log)
    nothing = Recorder("nothing", (), log)
    BackwardPass(record, [*by_layer, everything, nothing]).run(vector, together=False)
    order = [label for label, _ in log]
    assert order[0] == "head"
    assert order[1] == "twice"  # once both of its calls have their gradient
    assert sorted(order) == sorted([*labels, "everything", "nothing"])
    assert dict(log) == {"head": 1, "twice": 2, "left": 1, "right": 1, "beside": 0, "everything": 5, "nothing": 0}
    left = numbers["left"]
    torch.testing.assert_close(everything.seen[0][left][0], by_layer[0].seen[0][left][0])


def test_several_vectors_are_delivered_as_each_would_be(net: Branches) -> None:
    record, first = record_of(net)
    vectors = torch.cat([first, torch.randn(2, 4, 2, dtype=torch.float64)])
    alone = Recorder("all", None, [])
    for vector in vectors.split(1):
        BackwardPass(record, [alone]).run(vector, together=False, keep_graph=True)
    one_by_one = Recorder("all", None, [])
    BackwardPass(record, [one_by_one]).run(vectors, together=False, keep_graph=True)
    assert len(one_by_one.seen) == len(alone.seen) == 3
    torch.testing.assert_close(one_by_one.seen, alone.seen)
    stacked = Recorder("all", None, [], stacks=True)
    BackwardPass(record, [stacked]).run(vectors, together=False, keep_graph=True)
    together = Recorder("all", None, [])
    BackwardPass(record, [together]).run(vectors, together=True, keep_graph=False)
    assert len(stacked.seen) == len(together.seen) == 1
    for number, gradients in together.seen[0].items():
        torch.testing.assert_close(stacked.seen[0][number], gradients)
        for call, gradient in enumerate(gradients):
            torch.testing.assert_close(gradient, torch.cat([seen[number][call] for seen in alone.seen]))


def test_an_error_of_a_consumer_arrives_and_leaves_no_hook(net: Branches) -> None:
    class Broken(Recorder):
        def add(self, gradients: LayerGradients) -> None:
            raise ZeroDivisionError("broken")

    record, vector = record_of(net)
    with pytest.raises(ZeroDivisionError, match="broken"):
        BackwardPass(record, [Broken("broken", None, [])]).run(vector, together=False, keep_graph=True)
    log: list[tuple[str, int]] = []
    BackwardPass(record, [Recorder("all", None, log)]).run(vector, together=False)
    assert log == [("all", 5)]
