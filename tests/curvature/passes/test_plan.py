"""Networks whose use of a weight, or whose order of rows, depends on the data: noticed on the batch where it happens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.batches import Batch
from aftermap.curvature import fit_curvature, reference
from aftermap.curvature.passes import plan as plan_module
from aftermap.curvature.passes.backward import contradictions
from aftermap.curvature.passes.last_block import find_last_layer
from aftermap.curvature.passes.plan import PlanCheck, PlanContradicted, plan_model
from aftermap.curvature.passes.record import ForwardRecord, record_calls, uses_in_graph
from aftermap.errors import InputError, StatisticalWarning, UnsupportedError
from aftermap.likelihoods import Categorical

N = 30


class Sorted(nn.Module):
    """Sorts the batch by length (as for packed sequences), works, and sorts back."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out, self.beside = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = length.argsort(descending=True, stable=True)
        hidden = torch.tanh(self.inside(x[order]))
        return self.beside(x) + self.out(hidden)[order.argsort()]


class SortedAndTrimmed(nn.Module):
    """Sorts the batch by length, and works on no more positions than its longest example has."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out, self.beside = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(9, 3)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order, longest = length.argsort(descending=True, stable=True), int(length.max())
        present = torch.arange(longest) < length[order][:, None]
        hidden = torch.tanh(self.inside(x[order][:, :longest])) * present[..., None]
        return self.beside(x[:, :, 0]) + self.out(hidden.sum(1))[order.argsort()]


class Gated(nn.Module):
    """Uses a weight in its layer and, where a gate is open, once more as a bare tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inside(x)) + (x[:, :1] > 0).to(x) * (x @ self.inside.weight))


class SecondStage(nn.Module):
    """Uses a layer, and a weight of another once more, only for batches that need it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.second, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inside(x))
        if bool((x[:, 0] > 5.0).any()):
            far = (x[:, :1] > 5.0).to(x)
            hidden = hidden + far * torch.tanh(self.second(hidden) + x @ self.inside.weight)
        return self.out(hidden)


class TimeMajor(nn.Module):
    """Folds time before the batch: rows of an example are apart, which does not show at length one."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        rows = torch.tanh(self.inside(x.transpose(0, 1).reshape(length * size, 2)))
        return self.out(rows.view(length, size, 4).mean(0))


class Experts(nn.Module):
    """A sparse mixture: an expert sees only the examples that are routed to it, and perhaps none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(3, 2), nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(3, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate(x).softmax(-1)
        hidden = x.new_zeros(len(x), 4)
        for k, expert in enumerate(self.experts):
            index = (weight.argmax(-1) == k).nonzero()[:, 0]
            hidden = hidden.index_add(0, index, weight[index, k : k + 1] * torch.tanh(expert(x[index])))
        return self.out(hidden)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double().eval()


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def labels(count: int = N) -> Tensor:
    return torch.arange(count) % 3


def truth(model: nn.Module, x: Any, y: Tensor) -> Tensor:
    return reference.ggn(model, x, Categorical(), y, [n for n, _ in model.named_parameters()])


def sorted_inputs() -> tuple[Tensor, Tensor]:
    """The first three are in order."""
    length = torch.arange(N) * 7 % 9
    length[:3] = 9
    return inputs(N, 3), length


def trimmed_inputs() -> tuple[Tensor, Tensor]:
    """The first three are in order, and the longest example is among others than those that are run again."""
    length = torch.arange(N) * 7 % 5 + 1
    length[:3], length[5] = 4, 9
    return inputs(N, 9, 3), length


def gated_inputs() -> Tensor:
    """The gate is closed for the first three."""
    x = inputs(N, 3)
    x[:3, 0] = -x[:3, 0].abs()
    return x


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "sorted": (Sorted, sorted_inputs()),
    "sorted and trimmed": (SortedAndTrimmed, trimmed_inputs()),
    "gated": (Gated, gated_inputs()),
    "time-major": (TimeMajor, inputs(N, 4, 2)),
    "experts": (Experts, inputs(N, 3)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_a_first_batch_that_the_first_examples_do_not_represent(case: str, structure: str) -> None:
    kind, x = CASES[case]
    model, y = made(kind), labels()
    factors = fit_curvature(model, [(x, y)], "classification", structure=structure, curvature="exact")
    expected = truth(model, x, y)
    expected = expected if structure == "full" else torch.diag(expected.diagonal())
    torch.testing.assert_close(factors.to_dense(), expected, rtol=1e-9, atol=1e-10)
    assert any(not t.by_rule for t in factors.treatment.values())


@pytest.mark.parametrize("case", CASES)
def test_predictions_of_networks_that_depend_on_the_data(case: str) -> None:
    kind, x = CASES[case]
    model, y = made(kind), labels()
    laplace = am.Laplace(model, "classification", structure="full").fit([(x, y)])
    few = tuple(t[:6] for t in x) if isinstance(x, tuple) else x[:6]
    one_by_one = [tuple(t[i : i + 1] for t in x) if isinstance(x, tuple) else x[i : i + 1] for i in range(6)]
    together = laplace.predict(few).latent_cov
    alone = torch.cat([laplace.predict(x).latent_cov for x in one_by_one])  # type: ignore[misc]
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("late", [2, 7])
def test_another_use_is_noticed_on_the_batch_where_it_appears(late: int) -> None:
    model, y = made(SecondStage), labels(4)
    batches = [(inputs(40, 3).clamp_max(2.0)[4 * k : 4 * k + 4].clone(), y) for k in range(10)]
    batches[late - 1][0][1, 0] = 6.0
    with pytest.warns(StatisticalWarning, match=f"inside.weight.*noticed on batch {late}"):
        factors = fit_curvature(model, batches, "classification", structure="full", curvature="exact")
    expected = sum((truth(model, x, y) for x, y in batches), torch.zeros(()))
    torch.testing.assert_close(factors.to_dense(), expected, rtol=1e-9, atol=1e-10)
    assert factors.treatment["inside.weight"].rule == "per-example"
    # A layer that is first used on that batch has a rule, and is not called unused.
    assert factors.treatment["second.weight"].by_rule
    assert factors.treatment["second.weight"].note == ""


def test_mixing_without_a_new_signature_is_noticed_on_batches_that_are_powers_of_two() -> None:
    model = made(Sorted)
    x, ordered = inputs(8, 3), torch.ones(8)  # nothing to sort
    names = [n for n, _ in model.named_parameters()]
    plan = plan_model(model, names, Batch((x, ordered), None, None, 8))
    assert "inside.weight" in plan.layers_of_parameter
    check = PlanCheck(plan)
    for number in range(1, 9):
        length = ordered if number < 7 else torch.tensor([3, 8, 1, 7, 2, 6, 4, 5])
        batch = Batch((x, length), None, None, 8)
        with record_calls(plan) as calls:
            outputs = model(x, length)
        record = ForwardRecord.make(model, batch, outputs, plan, calls)
        if number == 8:
            with pytest.raises(PlanContradicted, match="inside"):
                check.check(record)
        else:
            check.check(record)  # on batch 7 the same signature is trusted


def test_the_plan_verifies_the_rules_before_the_first_batch_and_no_batch_does_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The verification's graph does not stand beside that of a batch; after a new start, what is still covered stays known."""
    sizes: list[int] = []

    def counted(record: ForwardRecord) -> dict[str, str]:
        sizes.append(record.size)
        return contradictions(record)

    monkeypatch.setattr(plan_module, "contradictions", counted)
    model, y = made(SecondStage), labels(4)
    batches = [(inputs(40, 3).clamp_max(2.0)[4 * k : 4 * k + 4].clone(), y) for k in range(10)]
    fit_curvature(model, batches, "classification", structure="diagonal")
    assert sizes == [3]
    batches[6][0][1, 0] = 6.0
    sizes.clear()
    with pytest.warns(StatisticalWarning, match="noticed on batch 7"):
        fit_curvature(model, batches, "classification", structure="diagonal")
    # Batch 7 is contradicted by the number of its uses. In the second run its signature is new, and it alone is verified.
    assert sizes == [3, 4]


def test_a_batch_of_one_example_says_nothing_of_batches_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of one example can be compared with another one, so that both are looked at, each once."""
    sizes: list[int] = []

    def counted(record: ForwardRecord) -> dict[str, str]:
        sizes.append(record.size)
        return contradictions(record)

    monkeypatch.setattr(plan_module, "contradictions", counted)
    x, y = inputs(12, 3).clamp_max(2.0), labels(12)
    batches = [(x[:4], y[:4]), (x[4:5], y[4:5]), (x[5:6], y[5:6]), (x[6:], y[6:])]
    fit_curvature(made(SecondStage), batches, "classification", structure="diagonal")
    assert sizes == [3, 1]


@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
def test_inputs_of_other_examples_are_told_apart_beside_values_that_are_not_finite(odd: float) -> None:
    rows, index = torch.arange(12.0).reshape(4, 3), torch.tensor([2, 0])
    rows[0, 1] = odd
    assert not plan_module._is_of_other_examples(rows, rows[index], index)
    assert plan_module._is_of_other_examples(rows, rows[index.flip(0)], index)
    torch.testing.assert_close(rows[2], torch.tensor([6.0, 7.0, 8.0]))  # the recorded input is as it was


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite_are_compared_too_and_do_not_widen_the_comparison(odd: float) -> None:
    index = torch.tensor([0, 1])
    masked = torch.tensor([[1.0, odd], [1.0, 2.0]])  # The rows differ in what is masked alone.
    assert plan_module._is_of_other_examples(masked, masked.flip(0), index)
    assert plan_module._is_of_other_examples(masked, -masked if odd == odd else masked.nan_to_num(), index)
    small = torch.tensor([[1e-4, odd], [1.1e-4, odd]])
    assert not plan_module._is_of_other_examples(small, small.clone(), index)
    assert plan_module._is_of_other_examples(small, small.flip(0), index)


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float64, 1e-8), (torch.float32, 1e-3), (torch.bfloat16, 5e-2)], ids=str
)
def test_inputs_are_compared_to_the_rounding_of_their_precision(dtype: torch.dtype, rounding: float) -> None:
    rows, index = torch.tensor([[1.0, 2.0], [-4.0, 3.0]], dtype=dtype), torch.tensor([0, 1])
    for share, told in ((0.5, False), (2.0, True)):
        moved = rows.clone()
        moved[1, 0] *= 1 + share * rounding  # the largest entry
        assert plan_module._is_of_other_examples(rows, moved, index) == told


def test_a_prediction_at_length_one_does_not_spoil_later_ones() -> None:
    model, x = made(TimeMajor), inputs(20, 4, 2)
    for structure in ("kron", "diagonal", "full"):
        first, second = (
            am.Laplace(model, "classification", structure=structure).fit([(x, labels(20))]) for _ in range(2)
        )
        expected = first.predict(x[:5]).latent_cov
        second.predict(x[:5, :1])
        torch.testing.assert_close(second.predict(x[:5]).latent_cov, expected, rtol=1e-10, atol=1e-12)


def test_compiled_networks_run_as_they_were_written() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    x, y = inputs(17, 4), labels(17)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="eager")
        compiled(x[:1])  # specialises a graph to batches of one, without hooks
    batches = [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]
    for structure in ("kron", "full"):
        expected = fit_curvature(model, batches, "classification", structure=structure)
        factors = fit_curvature(compiled, batches, "classification", structure=structure)
        torch.testing.assert_close(factors.to_dense(), expected.to_dense(), rtol=1e-10, atol=1e-12)
        assert all(t.by_rule for t in factors.treatment.values())


class Flat(nn.Module):
    """One number for each example: [N], or [N, 1] as all other networks have it."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.inside, self.out, self.flat = nn.Linear(3, 4), nn.Linear(4, 1), flat

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.out(torch.tanh(self.inside(x)))
        return outputs.squeeze(-1) if self.flat else outputs


@pytest.mark.parametrize("size", [1, 2, 5])
def test_one_output_for_each_example_is_planned_like_one_column_where_it_is_allowed(size: int) -> None:
    names = ["inside.weight", "inside.bias", "out.weight", "out.bias"]
    plans = [
        plan_model(
            made(lambda flat=flat: Flat(flat)), names, Batch(inputs(size, 3), None, None, size), flat_outputs=True
        )
        for flat in (False, True)
    ]
    for plan in plans:
        # Of one example the layers put out 4 numbers and 1, of the 3 that come in.
        assert (plan.numbers, plan.input_numbers, plan.width) == (5, 3, 1)
        assert set(plan.layers_of_parameter) == set(names)
        assert plan.unused == frozenset()
    assert plans[0].vectors_go_together == plans[1].vectors_go_together
    with pytest.raises(InputError, match="For one output per example add a last dimension"):
        plan_model(made(lambda: Flat(True)), names, Batch(inputs(size, 3), None, None, size))


class MixedOutputs(nn.Module):
    """Subtracts the mean of the batch from one number for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.out(x).squeeze(-1)
        return outputs - outputs.mean()


def test_flat_outputs_that_mix_examples_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="other examples"):
        plan_model(made(MixedOutputs), ["out.weight"], Batch(inputs(4, 3), None, None, 4), flat_outputs=True)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return torch.cat([self.left(hidden), self.right(hidden)], -1)


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return 2 * self.head(hidden) + hidden


def test_the_last_layer_is_one_that_all_outputs_depend_on() -> None:
    batch = Batch(inputs(2, 3), None, None, 2)
    with pytest.raises(
        UnsupportedError, match=r"found right, but outputs \[0\] of 3 do not depend on it: .* several heads"
    ):
        find_last_layer(made(TwoHeads), batch)
    assert find_last_layer(made(Skip), batch) == ["head.weight", "head.bias"]


def test_uses_are_counted_behind_casts_and_in_other_dtypes() -> None:
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        twice = layer(layer(x))
    assert uses_in_graph(twice, dict(layer.named_parameters())) == {"weight": 2, "bias": 2}
    assert uses_in_graph(layer(x).detach(), dict(layer.named_parameters())) == {"weight": 0, "bias": 0}


# Arguments without a batch dimension that have as many rows as the batch has examples.


class Weighted(nn.Module):
    """f(x, shared) = (x · scale) shared, or with a per-example offset; `scale` has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.linspace(0.5, 1.5, 5)), nn.Linear(5, 2)

    def forward(self, x: Tensor, shared: Tensor, offset: Tensor | None = None) -> Tensor:
        hidden = torch.tanh((x * self.scale) @ shared)
        return self.out(hidden if offset is None else hidden + offset)


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full", "low_rank"])
@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_square_argument_of_the_batch_length_is_left_whole(structure: str, as_mapping: bool) -> None:
    torch.manual_seed(0)
    model = Weighted().double()
    x, shared, offset = torch.randn(60, 5), torch.randn(5, 5), torch.randn(60, 5)
    x, shared, offset = x.double(), shared.double(), offset.double()
    targets = torch.randn(60, 2).double()

    def batches(size: int) -> list[Any]:
        rows = [slice(k, k + size) for k in range(0, 60, size)]
        if as_mapping:
            return [({"x": x[r], "shared": shared, "offset": offset[r]}, targets[r]) for r in rows]
        return [((x[r], shared, offset[r]), targets[r]) for r in rows]

    # Batches of 5 are ambiguous, those of 20 are not.
    expected = fit_curvature(model, batches(20), "regression", structure=structure)
    found = fit_curvature(model, batches(5), "regression", structure=structure)
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-9, atol=1e-9)


def test_a_later_batch_of_the_length_of_a_shared_argument_is_read_like_the_first() -> None:
    torch.manual_seed(0)
    model, x, shared, targets = Weighted().double(), torch.randn(13, 5), torch.randn(5, 5), torch.randn(13, 2)
    x, shared, targets = x.double(), shared.double(), targets.double()
    whole = fit_curvature(model, [((x, shared), targets)], "regression", structure="full")
    parts = [((x[r], shared), targets[r]) for r in (slice(0, 8), slice(8, 13))]
    found = fit_curvature(model, parts, "regression", structure="full")
    torch.testing.assert_close(found.to_dense(), whole.to_dense(), rtol=1e-9, atol=1e-9)


def test_predictions_with_an_ambiguous_argument() -> None:
    torch.manual_seed(0)
    model, x, shared, targets = Weighted().double(), torch.randn(13, 5), torch.randn(5, 5), torch.randn(13, 2)
    x, shared, targets = x.double(), shared.double(), targets.double()
    for params in ("all", "last_layer"):
        laplace = am.Laplace(model, "regression", params=params).fit([((x[:5], shared), targets[:5])])
        expected = laplace.predict((x, shared)).epistemic[:5]
        torch.testing.assert_close(laplace.predict((x[:5], shared)).epistemic, expected)
        fresh = am.Laplace(model, "regression", params=params).fit([((x[:5], shared), targets[:5])])
        torch.testing.assert_close(fresh.predict((x[:5], shared)).epistemic, expected)


def test_an_argument_that_cannot_be_decided_is_named() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 2)

        def forward(self, x: Tensor, first: Tensor, second: Tensor, other: Tensor) -> Tensor:
            if len(first) != 4 or len(second) != 4:
                raise RuntimeError("four rows are needed")
            return self.out(x + other) + first.sum() + second.sum()

    arguments = (torch.randn(4, 3), torch.randn(4, 2), torch.randn(4, 2), torch.randn(4, 3))
    with pytest.raises(InputError, match="arguments 1, 2, 3 have 4 rows.*wrapper module"):
        fit_curvature(Twice(), [(arguments, torch.zeros(4, 2))], "regression")


def test_an_error_of_the_model_itself_comes_through() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 2)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            raise RuntimeError("broken by its author")

    with pytest.raises(RuntimeError, match="broken by its author"):
        fit_curvature(Broken(), [((torch.zeros(4, 3), torch.zeros(4, 3)), torch.zeros(4, 2))], "regression")
