"""What processes send is what docs/scaling.md says: counted in a group whose other member sends nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap import distributed

SHAPES = ((6, 7), (8, 3))  # (in with bias, out) of each layer
FACTORS = sum(i * i + o * o for i, o in SHAPES)
WEIGHTS = sum(i * o for i, o in SHAPES)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, torch.dtype]]:
    """Bytes by the kind of message and the dtype, of process 0 of two."""
    counted: Counter[tuple[str, torch.dtype]] = Counter()

    def count(kind: str) -> Any:
        def send(tensor: Tensor, *args: Any, **options: Any) -> None:
            counted[kind, tensor.dtype] += tensor.numel() * tensor.element_size()

        return send

    fakes: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_world_size": lambda: 2,
        "get_rank": lambda: 0,
        "get_backend": lambda: "gloo",
        "all_reduce": count("sum"),
        "broadcast": count("broadcast"),
        "broadcast_object_list": lambda values, src: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(distributed.dist, name, fake)
    return counted


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).eval()


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3


def test_a_fit_sends_its_factors_once_and_its_eigenvectors_once(sent: Counter[tuple[str, torch.dtype]]) -> None:
    la = am.Laplace(network(), "classification").fit([data()], progress=False)
    assert sum(i * i + o * o for i, o in SHAPES) == sum(
        b.tensors()[k].numel() for b in la.factors.blocks for k in ("inputs", "outputs")
    )
    assert sent["sum", torch.float32] == 4 * FACTORS
    # Rows of both blocks, data and loss are in float64.
    assert sent["sum", torch.float64] == 8 * (len(SHAPES) + 2)
    assert sent["broadcast", torch.float64] == 8 * (FACTORS + sum(i + o for i, o in SHAPES))
    assert sent["broadcast", torch.float32] == 0


@pytest.mark.parametrize("passes", [1, 3])
def test_the_messages_of_a_fit_do_not_grow_with_the_data(sent: Counter[tuple[str, torch.dtype]], passes: int) -> None:
    am.Laplace(network(), "classification").fit([data()] * passes, progress=False)
    assert sent["sum", torch.float32] == 4 * FACTORS


def test_a_diagonal_sends_one_number_per_weight(sent: Counter[tuple[str, torch.dtype]]) -> None:
    am.Laplace(network(), "classification", structure="diagonal").fit([data()], progress=False)
    assert sent["sum", torch.float32] == 4 * WEIGHTS
    assert sent["broadcast", torch.float64] == 0


def test_a_step_of_vogn_sends_gradient_and_curvature(sent: Counter[tuple[str, torch.dtype]]) -> None:
    net, (x, y) = network(), data()
    opt = am.optim.VOGN(net, lr=0.1, n_data=9)
    opt.step(lambda: nn.functional.cross_entropy(net(x), y))  # The first step sends what the layers are, too.
    sent.clear()
    opt.step(lambda: nn.functional.cross_entropy(net(x), y))
    assert sent["sum", torch.float32] == 2 * 4 * WEIGHTS
