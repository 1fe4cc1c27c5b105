"""Statistics side by side in memory: the same numbers, found as one vector only where they are one."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.optim import IVON, denominators
from aftermap.optim.chunks import as_one, in_chunks, side_by_side, views
from aftermap.optim.denominators import Denominators
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


def test_what_was_laid_side_by_side_is_one_vector() -> None:
    for shapes in (SHAPES, [s for s in SHAPES if s != (0, 4)]):
        before = some(shapes)
        after = side_by_side(before)
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(after, before, strict=True) if a.numel())
    one = as_one(after)
    assert one is not None
    assert torch.equal(one, torch.cat([v.flatten() for v in before]))
    one.add_(1)
    torch.testing.assert_close(after, [b + 1 for b in before], rtol=0, atol=0)
    part = as_one(after[1:3])
    assert part is not None
    assert len(part) == 6


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


def test_what_is_not_alike_stays_where_it_is() -> None:
    mixed = [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
    turned = [torch.zeros(2, 3).T, torch.zeros(4)]
    for given in (mixed, turned, [torch.zeros(3)]):
        assert all(a is b for a, b in zip(side_by_side(given), given, strict=True))


@pytest.mark.parametrize("beside", [True, False])
def test_denominators_follow_the_curvature_and_the_shift(beside: bool) -> None:
    weights = some()
    h = [v + 1 for v in weights]
    if beside:
        h = side_by_side(h)
    kept = Denominators()

    def check(shift: float, which: slice = slice(None)) -> None:
        chunk = kept.of(weights[which], h[which])
        torch.testing.assert_close(chunk.root(shift), [(v + shift).sqrt() for v in h[which]])
        torch.testing.assert_close(chunk.plain(shift), [v + shift for v in h[which]])
        torch.testing.assert_close(chunk.plain(shift), [v + shift for v in h[which]])
        torch.testing.assert_close(chunk.root(shift), [(v + shift).sqrt() for v in h[which]])

    check(0.5)
    check(2.0)
    h[3].mul_(7)  # in place
    check(2.0)
    check(2.0, slice(1, 4))  # in another combination: the same memory
    h[0].mul_(3)
    check(2.0, slice(2, 5))
    check(2.0)
    h[4] = torch.full_like(h[4], 11.0)  # another tensor
    check(2.0)


def test_a_parameter_has_one_memory_whatever_it_is_asked_for_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denominators, "_MOST_CHUNKS", 3)
    weights, h = some(), side_by_side(some())
    kept = Denominators()
    whole = kept.of(weights, h).root(1.0)
    for start in range(4):
        for end in range(start + 1, 6):
            few = kept.of(weights[start:end], h[start:end]).root(1.0)
            assert all(a is b for a, b in zip(few, whole[start:end], strict=True))
    assert len(kept._chunks) <= 3
    assert len(kept._kept) == 5


def test_products_are_worked_on_as_one_only_where_they_are() -> None:
    weights, h = some([(2, 3), (5,)]), side_by_side(some([(2, 3), (5,)]))
    chunk = Denominators().of(weights, h)
    chunk.root(1.0)
    together, apart = side_by_side(some([(2, 3), (5,)])), some([(2, 3), (5,)])
    assert [[v.numel() for v in values] for values in chunk.beside(together)] == [[11]] * 3
    assert [[v.numel() for v in values] for values in chunk.beside(apart)] == [[6, 5]] * 3
    torch.testing.assert_close(chunk.beside(together)[0][0], torch.cat([v.flatten() for v in h]), rtol=0, atol=0)


def test_steps_are_the_same_wherever_the_statistics_lie() -> None:
    """Neighbours in memory or not, saved and loaded or not, with a parameter that takes part only now and then."""

    def trained(scatter: bool, reload: bool) -> list[Tensor]:
        net, x, y = classifier(norm=True)
        net.eval()
        extra = nn.Parameter(torch.ones(3))
        net.register_parameter("extra", extra)
        torch.manual_seed(0)
        opt = IVON(net, lr=0.1, n_data=11, new_curvature_weight=0.1)
        for step in range(6):
            opt.step(lambda: F.cross_entropy(net(x), y) + (extra.square().sum() if step % 2 else 0.0))  # noqa: B023
            if scatter:
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
    for scatter, reload in ((True, False), (False, True)):
        torch.testing.assert_close(trained(scatter, reload), expected, rtol=0, atol=0)


def test_a_saved_state_holds_the_numbers_once() -> None:
    net, x, y = classifier()
    opt = IVON(net, lr=0.1, n_data=11)
    opt.step(lambda: F.cross_entropy(net(x), y))
    tensors = [v for state in opt.state_dict()["state"].values() for v in state.values()]
    memories = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(memories.values()) == 2 * sum(p.nbytes for p in net.parameters())
