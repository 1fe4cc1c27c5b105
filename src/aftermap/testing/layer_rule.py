"""The contract of a layer rule: every curvature of a layer, against brute force."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch
from aftermap.curvature import Factors, fit_curvature, reference
from aftermap.curvature.passes.backward import Accumulator, BackwardPass, LayerGradients
from aftermap.curvature.passes.plan import plan_model
from aftermap.curvature.passes.record import ForwardRecord, record_calls
from aftermap.curvature.rules.base import InputRows, MatrixRows
from aftermap.curvature.structures.kron import KronBlock
from aftermap.likelihoods import Categorical, Likelihood
from aftermap.models import call_model, only_require_grad
from aftermap.testing.predictor import ModelSnapshot, check_unchanged

__all__ = ["check_layer_rule"]

_OUTPUTS = 3


def check_layer_rule(
    module: nn.Module,
    *inputs: Any,
    likelihood: Likelihood | None = None,
    targets: Tensor | None = None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    without_rule: Sequence[str] = (),
    tolerance: float = 1e-10,
) -> None:
    """Compares every curvature of a layer with brute force in float64, in a small network around it.

    It checks, for all parameters of the layer together and for each alone: that the rule is used at all, per-example
    gradients, the diagonal and the full GGN, Kronecker factors against the rows one by one and (one datum, nothing
    shared) against the exact block, the trace of EKFAC, batches split unevenly, example weights, two calls of the layer
    in one pass, and that the model is left as it was.

    Args:
        module: The layer, of which a copy in float64 and eval mode is checked.
        inputs: The arguments that the layer is called with: tensors [N, ...] of at least three examples; others are
            passed on.
        likelihood: The likelihood of the small network's three outputs; Categorical by default.
        targets: The targets [N, ...] for another likelihood.
        wrap: A function that makes the network [N, ..., 3] from the layer; by default the layer, tanh and a fixed
            random linear map.
        without_rule: The parameters of the layer that are known to be treated by per-example gradients.
        tolerance: The relative tolerance of comparisons.

    Raises:
        AssertionError: Something differs; the message says what, by how much, and for which parameters.

    >>> check_layer_rule(nn.Linear(4, 2), torch.randn(5, 4))
    """
    torch_inputs = tuple(_double(x) for x in inputs)
    layer = copy.deepcopy(module).double().eval()
    size = next(x.shape[0] for x in torch_inputs if isinstance(x, Tensor))
    generator = torch.Generator().manual_seed(1)
    if targets is None:
        targets = torch.randint(_OUTPUTS, (size,), generator=generator)
    likelihood = Categorical() if likelihood is None else likelihood
    built: list[tuple[str, nn.Module]] = []
    if wrap is not None:
        built.append(("wrapped", wrap(layer)))
    else:
        width = _picked(layer(*torch_inputs))[0].numel()
        head = torch.randn(width, _OUTPUTS, generator=generator, dtype=torch.float64) / width**0.5
        built.append(("called once", _Small(layer, head, 1)))
        built.append(("called twice", _Small(layer, head, 2)))
    for label, model in built:
        model = model.double().eval()
        every = [n for n, p in model.named_parameters() if p.is_floating_point()]
        if not every:
            raise AssertionError(f"{type(module).__name__} has no parameters: there is nothing to check")
        choices = [every] if len(every) == 1 else [every, *([n] for n in every)]
        for names in choices:
            where = f"{type(module).__name__} {label}, parameters {', '.join(names)}"
            case = _Case(model, torch_inputs, targets, likelihood, names, tuple(without_rule), where, tolerance)
            before = ModelSnapshot.of(model)
            _check_case(case)
            check_unchanged(model, before)


class _Small(nn.Module):
    """The network head(tanh(layer(x))) and, for two calls, a second call on changed inputs."""

    head: Tensor

    def __init__(self, layer: nn.Module, head: Tensor, calls: int):
        super().__init__()
        self.layer = layer
        self.calls = calls
        self.register_buffer("head", head)

    def forward(self, *inputs: Any) -> Tensor:
        total: Tensor = torch.tanh(_picked(self.layer(*inputs))).flatten(1) @ self.head
        if self.calls == 2:
            again = _picked(self.layer(*(_changed(x) for x in inputs)))
            total = total + torch.sin(again).flatten(1) @ self.head
        return total


def _picked(output: Any) -> Tensor:
    """Returns the tensor of an output that may be a tuple."""
    outputs = output if isinstance(output, Tensor) else output[0]
    return outputs


def _changed(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        return value
    return 0.5 * value - 0.1 if value.is_floating_point() else value.flip(-1 if value.dim() > 1 else ())


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclass(frozen=True)
class _Case:
    model: nn.Module
    inputs: tuple[Any, ...]
    targets: Tensor
    likelihood: Likelihood
    names: list[str]
    without_rule: tuple[str, ...]
    where: str
    tolerance: float

    @property
    def size(self) -> int:
        return len(self.targets)

    def cut(self, index: Sequence[int]) -> tuple[tuple[Any, ...], Tensor]:
        chosen = torch.tensor(index)
        size = self.size

        def one(x: Any) -> Any:
            return x[chosen] if isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == size else x

        return tuple(one(x) for x in self.inputs), self.targets[chosen]

    def fit(self, structure: str, batches: Sequence[Any] | None = None, **options: Any) -> Factors:
        data = [(self.inputs, self.targets)] if batches is None else batches
        options = {"curvature": "exact", "params": self.names, "progress": False, **options}
        return fit_curvature(self.model, data, self.likelihood, structure=structure, **options)

    def compare(self, what: str, actual: Tensor, expected: Tensor) -> None:
        actual, expected = actual.detach(), expected.detach()
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        error = float((actual.to(expected) - expected).abs().max()) if actual.shape == expected.shape else float("inf")
        if not error <= self.tolerance * scale + 1e-14:
            raise AssertionError(
                f"{what} of {self.where}: the largest error is {error:.3e}, entries are up to {scale:.3e} "
                f"(relative tolerance {self.tolerance:g}; shapes {tuple(actual.shape)} and {tuple(expected.shape)})"
            )

    def compare_all(self, what: str, actual: Factors, expected: Factors) -> None:
        self.compare(what, actual.to_dense(), expected.to_dense())


def _check_case(case: _Case) -> None:
    args = (case.model, case.inputs, case.likelihood, case.targets, case.names)
    truth = reference.ggn(*args)
    full = case.fit("full")
    _check_treatment(case, full)
    case.compare("the full GGN", full.to_dense(), truth)
    kinds = {structure: case.fit(structure) for structure in ("diagonal", "kron", "ekfac")}
    case.compare("the diagonal of the GGN", _flat(case, kinds["diagonal"].diagonal()), truth.diagonal())
    case.compare("the trace of EKFAC", truth.new_tensor(kinds["ekfac"].trace()), truth.trace())
    squares = case.fit("diagonal", curvature="empirical").diagonal()
    case.compare("Σ g²", _flat(case, squares), _flat(case, reference.sum_squared_gradients(*args)))
    _check_one_datum(case)
    _check_rows(case, kinds["kron"])
    _check_batches(case, kinds["kron"], kinds["diagonal"])


def _flat(case: _Case, params: dict[str, Tensor]) -> Tensor:
    return torch.cat([params[n].reshape(-1) for n in case.names])


def _check_treatment(case: _Case, factors: Factors) -> None:
    for name, treatment in factors.treatment.items():
        known = any(name == n or name.endswith(f".{n}") for n in case.without_rule)
        if treatment.by_rule == known:
            raise AssertionError(
                f"{case.where}: {name} was treated by {treatment.rule} ({treatment.note or 'no note'}), but a rule was "
                f"{'not ' if known else ''}expected"
            )


class _Gradients(Accumulator):
    """An accumulator that holds the gradients that arrive."""

    def add(self, gradients: LayerGradients) -> None:
        self.gradients = gradients


def _observed_gradients(case: _Case) -> tuple[ForwardRecord, LayerGradients]:
    """Returns the observed gradient, back-propagated to the layers."""
    batch = Batch(case.inputs, case.targets, None, case.size)
    plan = plan_model(case.model, case.names, batch)
    with only_require_grad(case.model, case.names):
        with record_calls(plan) as calls:
            outputs = call_model(case.model, case.inputs)
        record, arrived = ForwardRecord.make(case.model, batch, outputs, plan, calls), _Gradients()
        vector = case.likelihood.gradient(outputs.detach(), case.targets)[None]
        BackwardPass(record, [arrived]).run(vector, together=False)
        return record, arrived.gradients


def _check_rows(case: _Case, kron: Factors) -> None:
    """Checks per-example gradients, and every sum over rows against the rows themselves, one by one."""
    record, gradients = _observed_gradients(case)
    truth = reference.per_example_gradients(case.model, case.inputs, case.likelihood, case.targets, case.names)
    for name, value in gradients.per_example(case.names, 0, case.size).items():
        case.compare(f"per-example gradients ({name})", value[0], truth[name])
    blocks = {b.layout.names: b for b in kron.blocks if isinstance(b, KronBlock)}
    for number, calls in record.calls.items():
        block = blocks.get(record.plan.layers[number].layout.names)
        rows = [_all_rows(call.rows, block.layout.out) for call in calls] if block is not None else []
        if block is None or not rows:
            continue
        # A packed projection called part by part holds zeros for the other parts; only real rows count.
        expected = functools.reduce(torch.add, [torch.einsum("bgti,bgtj->gij", r, r) for r in rows])
        inputs = block.inputs if block.inputs.dim() == 3 else torch.diag_embed(block.inputs)
        case.compare("the input factor", inputs, expected)
        totals = functools.reduce(torch.add, [r.sum(2) for r in rows])
        found_total = functools.reduce(
            torch.add, [c.rows.sum_over_positions() for c in calls if isinstance(c.rows, MatrixRows)]
        )
        case.compare("sums over positions (reduce)", found_total, totals)
        lengths = sum(r.shape[2] * r.flatten(2).any(2).any(0) for r in rows)
        case.compare("the number of rows", block.rows, (case.size * torch.as_tensor(lengths)).to(block.rows))


def _all_rows(rows: InputRows, out: int) -> Tensor:
    """Finds every row a[b, g, t] by asking for the gradient that only position t has."""
    units = torch.zeros(rows.shared, rows.batch, rows.groups, rows.shared, out, dtype=torch.float64)
    index = torch.arange(rows.shared)
    units[index, :, :, index, 0] = 1.0
    return rows.per_example_gradients(units)[..., 0, :].permute(1, 2, 0, 3)  # [t, b, g, o, i] -> [b, g, t, i]


def _check_one_datum(case: _Case) -> None:
    """Checks that the Kronecker block is exact for one datum with nothing shared."""
    inputs, targets = case.cut([0])
    kron = case.fit("kron", [(inputs, targets)])
    start = 0
    place = {}
    for name, shape in kron.shapes.items():
        size = torch.Size(shape).numel()
        place[name] = torch.arange(start, start + size)
        start += size
    truth = reference.ggn(case.model, inputs, case.likelihood, targets, case.names)
    for block in kron.blocks:
        if isinstance(block, KronBlock) and bool((block.rows > 1).any()):
            continue
        if block.kind == "diagonal":
            continue
        index = torch.cat([place[n] for n in block.shapes])
        expected = truth[index[:, None], index]
        if isinstance(block, KronBlock):  # There is one block per group.
            expected = expected * (_groups(block)[:, None] == _groups(block))
        case.compare(f"the {block.kind} block for one datum", block.to_dense(), expected)


def _groups(block: KronBlock) -> Tensor:
    """Returns the group of each entry of a block, in the order of its parameters."""
    layout = block.layout
    groups = torch.arange(layout.groups).repeat_interleave(layout.out * layout.in_)
    ordered = torch.empty_like(groups)
    ordered[layout.positions()] = groups
    return ordered


def _check_batches(case: _Case, kron: Factors, diagonal: Factors) -> None:
    """Checks that splitting the data changes nothing, and that a weight of two is a datum twice."""
    last = case.size
    split = [case.cut(range(1)), case.cut(range(1, last))]
    case.compare_all("kron in uneven batches", case.fit("kron", split), kron)
    case.compare_all("diagonal in uneven batches", case.fit("diagonal", split), diagonal)
    weight = torch.ones(last, dtype=torch.float64)
    weight[0], weight[-1] = 2.0, 0.0
    weighted = [(case.inputs, case.targets, weight)]
    copied = [case.cut([0]), case.cut([0]), case.cut(range(1, last - 1))]
    for structure, approach in (("kron", "expand"), ("kron", "reduce"), ("diagonal", "expand")):
        actual, expected = (case.fit(structure, data, approach=approach) for data in (weighted, copied))
        case.compare_all(f"{structure} ({approach}) with weights", actual, expected)
