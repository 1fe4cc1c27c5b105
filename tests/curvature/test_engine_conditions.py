"""The same networks under other conditions: little memory, float32, uneven lengths, unusual grad modes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.curvature import fit_curvature, reference
from aftermap.errors import InputError
from aftermap.likelihoods import Categorical
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.curvature.layer_cases import CASES, normal, randomise
from tests.curvature.models import MODELS
from tests.curvature.test_engine_models import EXPECTED_WITHOUT_RULE, build, check_against_reference, fit

USERS_OF_BUDGET = (
    "rules.base",
    "rules.linear",
    "rules.convolution",
    "passes.backward",
    "structures.diagonal",
    "structures.ekfac",
)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contraction takes at most two examples at a time."""
    changed = 0
    for name in USERS_OF_BUDGET:
        module = importlib.import_module(f"aftermap.curvature.{name}")
        if hasattr(module, "examples_per_chunk"):
            monkeypatch.setattr(module, "examples_per_chunk", lambda *_: 2)
            changed += 1
    assert changed > 3


NAMES = ("separable", "transformer", "tied_all", "class_token", "gru", "mapping", "several_calls", "folded_frames")


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", NAMES)
def test_little_memory(name: str) -> None:
    check_against_reference(*build(name))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize(
    "name", ["conv2d", "conv2d_groups", "transpose2d", "conv1d", "conv2d_shift", "embedding_padding"]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_little_memory_for_factors(name: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, inputs = CASES[name]()
    torch.manual_seed(0)
    model = nn.Sequential(randomise(layer), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double().eval()
    x = inputs[0]
    model(x)
    y, weight = torch.arange(len(x)) % 3, normal(len(x), seed=2).abs()
    data = [(x, y, weight)] if weighted else [(x, y)]
    options: dict[str, Any] = {"params": ["0"], "progress": False}
    small = [
        fit_curvature(model, data, "classification", structure=s, **options) for s in ("kron", "diagonal", "ekfac")
    ]
    monkeypatch.undo()
    for found, structure in zip(small, ("kron", "diagonal", "ekfac"), strict=True):
        expected = fit_curvature(model, data, "classification", structure=structure, **options)
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("name", ["separable", "transformer", "pixels"])
def test_vectors_in_chunks(name: str, chunk: int) -> None:
    model, inputs, targets = build(name)
    for structure in ("kron", "diagonal", "full", "ekfac"):
        found = fit(model, inputs, targets, structure, chunk=chunk)
        expected = fit(model, inputs, targets, structure)
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", [n for n in MODELS if n in EXPECTED_WITHOUT_RULE])
def test_float32_uses_the_same_rules(name: str) -> None:
    model, inputs, targets = build(name)
    exact = fit(model, inputs, targets, "diagonal")

    def single(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x

    inputs = (
        {k: single(v) for k, v in inputs.items()}
        if isinstance(inputs, dict)
        else tuple(single(v) for v in inputs)
        if isinstance(inputs, tuple)
        else single(inputs)
    )
    found = fit(model.float(), inputs, targets, "diagonal")
    assert {n for n, t in found.treatment.items() if not t.by_rule} == EXPECTED_WITHOUT_RULE[name]
    for key, value in exact.diagonal().items():
        torch.testing.assert_close(found.diagonal()[key], value, rtol=5e-3, atol=1e-5)


class Tokens(nn.Module):
    """Tokens of any number, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.attention = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.out(self.norm(h + self.attention(h, h, h)[0]).mean(1))


@pytest.mark.parametrize("sizes", [(1, 4), (3, 2), (2, 3)])
def test_batches_of_uneven_size_and_length(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Tokens().double()
    data = [
        (normal(sizes[0], 2, 3), torch.arange(sizes[0]) % 2),
        (normal(sizes[1], 3, 3, seed=1), torch.arange(sizes[1]) % 2),
    ]
    likelihood = Categorical()
    truth = sum(reference.ggn(model, x, likelihood, y) for x, y in data)
    assert isinstance(truth, Tensor)
    fits = {s: fit_curvature(model, data, likelihood, structure=s, progress=False) for s in ("full", "ekfac", "kron")}
    torch.testing.assert_close(fits["full"].to_dense(), truth, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fits["ekfac"].trace(), float(truth.trace()))
    A, B, rows = (
        sum(parts)
        for parts in zip(*(reference.kron_factors("a", model, x, likelihood, y) for x, y in data), strict=True)
    )
    sums = next(b for b in fits["kron"].blocks if b.name == "a").tensors()
    torch.testing.assert_close(sums["inputs"], A)
    torch.testing.assert_close(sums["outputs"], B)
    assert float(sums["rows"]) == rows == sizes[0] * 2 + sizes[1] * 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full", "low_rank", "hessian"])
@pytest.mark.filterwarnings("ignore:the Hessian is indefinite")
def test_grad_modes_of_the_caller_do_not_matter(mode: Any, structure: str) -> None:
    model, inputs, targets = build("custom")
    expected = fit(model, inputs, targets, structure, generator=torch.Generator().manual_seed(0))
    with mode():
        made_inside = inputs * 1.0
        found = fit(model, made_inside, targets, structure, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-9, atol=1e-10)


def test_layers_that_have_no_weights_yet() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2)).double()
    with pytest.raises(InputError, match="1.weight.*no values yet.*forward pass"):
        fit_curvature(model, [(normal(4, 3), torch.arange(4) % 2)], "classification", progress=False)
    assert isinstance(model[1], nn.LazyLinear)


class Adapter(nn.Linear):
    """A layer with a forward pass of its own: its parent's rule must not be used."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.down, self.up = nn.Parameter(normal(2, width)), nn.Parameter(normal(out, 2, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


def test_subclasses_with_a_forward_of_their_own_are_not_mistaken() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Adapter(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    kron = check_against_reference(model, normal(5, 3), torch.arange(5) % 2)
    assert {n for n, t in kron.treatment.items() if not t.by_rule} == {"0.weight", "0.bias", "0.down", "0.up"}
    assert kron.treatment["0.weight"].note == "no rule for Adapter"


def test_hooks_of_the_user_are_respected() -> None:
    model, inputs, targets = build("inplace")
    handle = model[0].register_forward_hook(lambda module, args, output: 2.0 * output)
    before = ModelSnapshot.of(model)
    check_against_reference(model, inputs, targets)
    check_unchanged(model, before)
    handle.remove()


def test_the_random_state_is_left_alone() -> None:
    model, inputs, targets = build("separable")
    state = torch.get_rng_state()
    fit(model, inputs, targets, "ekfac")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full"])
def test_half_precision_is_summed_in_wider_numbers(dtype: torch.dtype, structure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 6, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2)
    )
    x, y = normal(6, 2, 4), torch.arange(6) % 2
    exact = fit_curvature(model.double(), [(x, y)], "classification", structure=structure, progress=False)
    found = fit_curvature(model.to(dtype), [(x.to(dtype), y)], "classification", structure=structure, progress=False)
    for block in found.blocks:
        # A dense matrix keeps every digit, since a weak prior asks for its small eigenvalues.
        expected = torch.float64 if block.kind == "full" else torch.float32
        assert {t.dtype for k, t in block.tensors().items() if k != "rows"} == {expected}
    assert all(t.by_rule for t in found.treatment.values())
    assert abs(found.trace() / exact.trace() - 1) < 0.05
