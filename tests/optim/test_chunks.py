"""Parameters in parts, vectors of what lies side by side in memory, and denominators that are kept."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.optim import IVON
from aftermap.optim.ivon import Denominators
from aftermap.optim.noise import as_one, in_chunks, views
from tests.optim.problems import classifier

SHAPES = [(2, 3), (0, 4), (), (5,), (1, 2, 2)]


def some(shapes: list[tuple[int, ...]] = SHAPES, **options: Any) -> list[Tensor]:
    return [torch.full(s, float(i), **options) for i, s in enumerate(shapes)]


def test_chunks_keep_order_and_bounds() -> None:
    items = [(i, torch.zeros(n)) for i, n in enumerate((3, 4, 9, 1, 1, 5, 2))]
    parts = list(in_chunks(items, 7))
    assert [i for part in parts for i, _ in part] == list(range(7))
    assert [[p.numel() for _, p in part] for part in parts] == [[3, 4], [9], [1, 1, 5], [2]]
    assert list(in_chunks([], 7)) == []


def test_views_have_the_shapes_and_the_order() -> None:
    like = some()
    found = views(torch.arange(20.0), like)
    assert [v.shape for v in found] == [v.shape for v in like]
    assert torch.cat([v.flatten() for v in found]).tolist() == list(range(16))


def test_views_of_one_memory_are_one_vector() -> None:
    for shapes in (SHAPES, [s for s in SHAPES if s != (0, 4)]):
        memory = torch.arange(16.0)
        parts = [v for v in views(memory, some(shapes)) if v.numel()]
        one = as_one(parts)
        assert one is not None
        assert one.data_ptr() == memory.data_ptr()
        assert torch.equal(one, memory)
        part = as_one(parts[1:3])
        assert part is not None
        assert part.tolist() == list(range(6, 12))


def test_other_memory_other_kinds_and_other_orders_are_no_vector() -> None:
    memory = torch.arange(12.0)
    a, b, c = memory[:4], memory[4:8].view(2, 2), memory[8:]
    assert as_one([a, b, c]) is not None
    assert as_one([a, c]) is None
    assert as_one([b, a]) is None
    assert as_one([a, b.T]) is None
    assert as_one([a, b.view(torch.int32)]) is None
    assert as_one([a, b.clone()]) is None
    # Two memories that touch each other, as an allocator for graphics cards can lay them.
    raw = bytearray(32)
    first = torch.frombuffer(raw, dtype=torch.float32, count=4)
    second = torch.frombuffer(raw, dtype=torch.float32, count=4, offset=16)
    assert second.data_ptr() == first.data_ptr() + 16
    assert as_one([first, second]) is None


def test_denominators_follow_the_curvature_and_the_shift() -> None:
    weights = some()
    h = [v + 1 for v in weights]
    kept = Denominators()

    def check(shift: float, which: slice = slice(None)) -> None:
        few, known = weights[which], h[which]
        for _ in range(2):
            torch.testing.assert_close(kept.root(few, known, shift), [(v + shift).sqrt() for v in known])
            torch.testing.assert_close(kept.root(few, known, shift), [(v + shift).sqrt() for v in known])
            torch.testing.assert_close(kept.plain(few, known, shift), [v + shift for v in known])
            torch.testing.assert_close(kept.plain(few, known, shift), [v + shift for v in known])

    check(0.5)
    check(2.0)
    h[3].mul_(7)  # in place
    check(2.0)
    check(2.0, slice(1, 4))  # in another combination
    h[0].mul_(3)
    kept.root(weights[2:4], h[2:4], 2.0)  # roots of some, sums of others
    check(2.0)
    h[4] = torch.full_like(h[4], 11.0)  # another tensor
    check(2.0)


def test_what_has_not_changed_is_not_worked_out_again() -> None:
    weights, h = some(), [v + 1 for v in some()]
    kept = Denominators()
    values = kept.root(weights, h, 1.0)
    versions = [v._version for v in values]
    again = kept.root(weights[1:4], h[1:4], 1.0)
    assert all(a is b for a, b in zip(again, values[1:4], strict=True))
    assert [v._version for v in values] == versions


def test_steps_are_the_same_with_new_curvature_tensors() -> None:
    """Replaced or not, saved and loaded or not, with a parameter that takes part only now and then."""

    def trained(replace: bool, reload: bool) -> list[Tensor]:
        net, x, y = classifier(norm=True)
        net.eval()
        extra = nn.Parameter(torch.ones(3))
        net.register_parameter("extra", extra)
        torch.manual_seed(0)
        opt = IVON(net, lr=0.1, n_data=11, new_curvature_weight=0.1)
        for step in range(6):
            opt.step(lambda: F.cross_entropy(net(x), y) + (extra.square().sum() if step % 2 else 0.0))  # noqa: B023
            if replace:
                for p in net.parameters():
                    opt.state[p]["curvature"] = opt.state[p]["curvature"].clone()
            if reload:
                file = io.BytesIO()
                torch.save(opt.state_dict(), file)
                file.seek(0)
                opt.load_state_dict(torch.load(file))
        return [v for p in net.parameters() for v in (p.detach(), opt.state[p]["curvature"])]

    expected = trained(False, False)
    assert any(float(c.std()) > 0 for c in expected[1::2] if c.numel() > 1)
    for replace, reload in ((True, False), (False, True)):
        torch.testing.assert_close(trained(replace, reload), expected, rtol=0, atol=0)
