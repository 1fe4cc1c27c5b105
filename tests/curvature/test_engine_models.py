"""Whole networks, from tied weights to checkpointed attention, against brute force."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.batches import Batch
from aftermap.curvature import Factors, fit_curvature, reference
from aftermap.curvature.passes.fallback import per_example_products
from aftermap.errors import UnsupportedError
from aftermap.likelihoods import Categorical
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.curvature.layer_cases import normal
from tests.curvature.models import MODELS, REFUSED

LIKELIHOOD = Categorical()


def build(name: str) -> tuple[nn.Module, Any, Tensor]:
    torch.manual_seed(0)
    model, inputs = {**MODELS, **REFUSED}[name]()
    model = model.double().eval()
    with torch.no_grad():
        args = (inputs,) if isinstance(inputs, Tensor) else () if isinstance(inputs, dict) else inputs
        outputs = model(*args, **(inputs if isinstance(inputs, dict) else {}))
    targets = torch.randint(outputs.shape[-1], outputs.shape[:-1], generator=torch.Generator().manual_seed(7))
    return model, inputs, targets


def fit(model: nn.Module, inputs: Any, targets: Tensor, structure: str, **options: Any) -> Factors:
    options = {"curvature": "exact", "progress": False, **options}
    return fit_curvature(model, [(inputs, targets)], LIKELIHOOD, structure=structure, **options)


def check_against_reference(model: nn.Module, inputs: Any, targets: Tensor, names: list[str] | None = None) -> Factors:
    before = ModelSnapshot.of(model)
    options = {} if names is None else {"params": names}
    truth = reference.ggn(model, inputs, LIKELIHOOD, targets, names)
    full = fit(model, inputs, targets, "full", **options)
    torch.testing.assert_close(full.to_dense(), truth, rtol=1e-9, atol=1e-11)
    diagonal = fit(model, inputs, targets, "diagonal", **options)
    found = torch.cat([diagonal.diagonal()[n].reshape(-1) for n in diagonal.names])
    torch.testing.assert_close(found, truth.diagonal(), rtol=1e-9, atol=1e-11)
    ekfac = fit(model, inputs, targets, "ekfac", **options)
    torch.testing.assert_close(ekfac.trace(), float(truth.trace()), rtol=1e-10, atol=1e-12)
    kron = fit(model, inputs, targets, "kron", **options)
    assert kron.names == full.names == ekfac.names
    assert kron.n_params == truth.shape[0]
    check_unchanged(model, before)
    return kron


@pytest.mark.parametrize("name", MODELS)
def test_model_against_reference(name: str) -> None:
    check_against_reference(*build(name))


def rules(factors: Factors) -> set[str]:
    return {n for n, t in factors.treatment.items() if not t.by_rule}


EXPECTED_WITHOUT_RULE: dict[str, set[str]] = {
    "tied_bias": set(),
    "tied_all": set(),
    "tied_embedding": set(),
    "tied_convolutions": set(),
    "tied_autoencoder": set(),
    "tied_groups": set(),
    "several_calls": set(),
    "functional_use": {"a.weight"},
    "functional_only": {"a.weight"},
    "inplace": set(),
    "residual_inplace": set(),
    "inplace_tokens": set(),
    "pixels": set(),
    "folded_tokens": set(),
    "folded_frames": set(),
    "folded_time_major": {"a.weight", "a.bias"},
    "sequence_first": set(),
    "positions": {"places.weight"},
    "class_token": {"token", "places", "gain"},
    "bilinear": {"a.weight", "a.bias"},
    "custom": {"matrix", "scale"},
    "transformer": set(),
    "decoder": set(),
    "unused": {"lost"},
    "only_custom_counts": {"matrix"},
    "checkpointed": set(),
    "unused_call": set(),
    "mapping": set(),
    "sparse_embedding": set(),
    "instance_norm": {"1.weight", "1.bias"},
    "separable": set(),
}


@pytest.mark.parametrize("name", EXPECTED_WITHOUT_RULE)
def test_rules_are_used_wherever_they_hold(name: str) -> None:
    model, inputs, targets = build(name)
    factors = fit(model, inputs, targets, "diagonal")
    assert rules(factors) == EXPECTED_WITHOUT_RULE[name], factors.summary()
    assert all(factors.treatment[n].note for n in rules(factors))


def test_unused_parameters_are_named() -> None:
    model, inputs, targets = build("unused")
    factors = fit(model, inputs, targets, "kron")
    noted = {n for n, t in factors.treatment.items() if t.note.startswith("unused")}
    assert noted == {"detached.weight", "detached.bias", "never.weight", "never.bias", "lost"}
    assert "unused" in factors.summary()
    torch.testing.assert_close(factors.diagonal()["never.weight"], torch.zeros(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("name", ["functional_use", "class_token", "lstm"])
def test_strict_lists_everything_and_leaves_the_model(name: str) -> None:
    model, inputs, targets = build(name)
    without = rules(fit(model, inputs, targets, "kron"))
    before = ModelSnapshot.of(model)
    with pytest.raises(UnsupportedError, match="strict=True") as caught:
        fit(model, inputs, targets, "kron", strict=True)
    for parameter in without:
        assert re.search(rf"^  {re.escape(parameter)} \(.*\): \w", str(caught.value), re.MULTILINE)
    check_unchanged(model, before)


@pytest.mark.parametrize("name", ["tied_all", "instance_norm", "transformer"])
def test_strict_passes_with_rules(name: str) -> None:
    model, inputs, targets = build(name)
    names = [n for n, _ in model.named_parameters() if name != "instance_norm" or not n.startswith("1.")]
    factors = fit(model, inputs, targets, "kron", strict=True, params=names)
    assert rules(factors) == set()


def test_frozen_parameters_are_left_out() -> None:
    model, inputs, targets = build("separable")
    for parameter in list(model.parameters())[:4]:
        parameter.requires_grad_(False)
    chosen = [n for n, p in model.named_parameters() if p.requires_grad]
    assert check_against_reference(model, inputs, targets).names == tuple(chosen)


@pytest.mark.parametrize(
    "pattern", [r".*bias", r".*norm.*", r"out\.weight|encoder\.layers\.0\.self_attn\.in_proj_bias"]
)
def test_parts_of_a_transformer(pattern: str) -> None:
    model, inputs, targets = build("transformer")
    names = [n for n, _ in model.named_parameters() if re.fullmatch(pattern, n)]
    assert check_against_reference(model, inputs, targets, names).names == tuple(names)


def test_frozen_parameter_may_be_chosen_by_name() -> None:
    model, inputs, targets = build("inplace")
    model[0].weight.requires_grad_(False)
    factors = check_against_reference(model, inputs, targets, ["0.weight", "4.bias"])
    assert factors.names == ("0.weight", "4.bias")
    assert not model[0].weight.requires_grad


def test_user_gradients_survive() -> None:
    model, inputs, targets = build("residual_inplace")
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    check_against_reference(model, inputs, targets)
    assert all(p.grad is not None for p in model.parameters())


def test_module_called_twice_is_one_block_with_all_rows() -> None:
    model, inputs, targets = build("several_calls")
    block = next(b for b in fit(model, inputs, targets, "kron").blocks if b.name == "cell")
    assert block.kind == "kron"
    assert float(block.tensors()["rows"]) == 3 * len(inputs)


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("checkpointed_attention", UnsupportedError, "Switch checkpointing off"),
        ("checkpointed_reentrant", UnsupportedError, "use_reentrant=False"),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_checkpoints_that_cannot_be_followed(name: str, error: type[Exception], message: str) -> None:
    model, inputs, targets = build(name)
    before = ModelSnapshot.of(model)
    with pytest.raises(error, match=message):
        fit(model, inputs, targets, "kron")
    check_unchanged(model, before)


def test_tensors_without_a_batch_are_passed_on_to_the_fallback() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(normal(3, 40))
            self.out = nn.Linear(40, 2)

        def forward(self, x: Tensor, mix: Tensor) -> Tensor:
            return self.out(torch.tanh(x @ mix @ self.matrix))

    torch.manual_seed(0)
    model, x, mix = Mixed().double(), normal(5, 3), normal(3, 3, seed=1)
    check_against_reference(model, (x, mix), torch.arange(5) % 2)
    J = reference.jacobian(model, (x, mix), ["matrix"]).reshape(5, 2, 3, 40)
    vectors = torch.eye(2, dtype=torch.float64)[:, None].expand(2, 5, 2)
    for module in (model, Unvectorisable(model)):
        # Three examples of five: as many as the mixing matrix has rows.
        name = next(n for n, _ in module.named_parameters() if n.endswith("matrix"))
        found = per_example_products(module, [name], Batch((x, mix), None, None, 5), vectors, 1, 3)[name]
        torch.testing.assert_close(found, J[1:4].transpose(0, 1))


class Unvectorisable(nn.Module):
    """Decides by a value, which vmap cannot follow."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        out = self.model(*inputs)
        return out if float(out.detach().sum()) < 1e9 else 2 * out
