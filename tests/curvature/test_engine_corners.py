"""Corners of the engine: odd patterns of calls, nested inputs, KFRA and low rank through the front door."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.curvature import fit_curvature, reference
from aftermap.curvature.rules.base import Layout
from aftermap.curvature.structures.low_rank import LowRankBlock
from aftermap.errors import InputError, UnsupportedError
from aftermap.likelihoods import Categorical, Gaussian
from tests.curvature.layer_cases import normal
from tests.curvature.models import Apply, parameter
from tests.curvature.test_engine_models import build, check_against_reference, fit


def without_rule(factors: Any) -> set[str]:
    return {n for n, t in factors.treatment.items() if not t.by_rule}


def labels(n: int) -> Tensor:
    return torch.arange(n) % 2


def test_a_layer_called_once_per_example() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(torch.tanh(torch.cat([m.a(row[None]) for row in x])))

    torch.manual_seed(0)
    model = Apply(run, a=nn.Linear(3, 4), out=nn.Linear(4, 2)).double()
    kron = check_against_reference(model, normal(5, 3), labels(5))
    assert {"a.weight", "a.bias"} <= without_rule(kron)


def test_a_layer_called_along_two_axes() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(torch.tanh(m.a(x)).sum(1) + torch.sin(m.a(x.transpose(0, 1))).sum(0))

    torch.manual_seed(0)
    model = Apply(run, a=nn.Linear(3, 4), out=nn.Linear(4, 2)).double()
    kron = check_against_reference(model, normal(5, 6, 3), labels(5))
    assert without_rule(kron) == {"a.weight", "a.bias"}


def test_an_input_that_is_overwritten_matters_only_to_weights() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.sin(m.a(x))
        y = m.out(h)
        h.zero_()
        return y

    torch.manual_seed(0)
    model = Apply(run, a=nn.Linear(3, 4), out=nn.Linear(4, 2)).double()
    check_against_reference(model, normal(5, 3), labels(5), ["a.weight", "a.bias", "out.bias"])
    with pytest.raises(UnsupportedError, match="the input of a Linear was changed in place after the call"):
        fit(model, normal(5, 3), labels(5), "kron")


def test_nested_inputs_reach_the_fallback() -> None:
    def run(m: Any, x: Tensor, more: Any) -> Tensor:
        (y, table), named = more
        return m.out(torch.tanh((x + y @ table) @ m.matrix * named["scale"]))

    torch.manual_seed(0)
    model = Apply(run, matrix=parameter(3, 4), out=nn.Linear(4, 2)).double()
    x, y, table, scale = normal(5, 3), normal(5, 2, seed=1), normal(2, 3, seed=2), normal(5, 1, seed=3)
    inputs = (x, ((y, table), {"scale": scale}))

    def flat(m: Any, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return run(m, x, ((y, table), {"scale": scale}))

    twin = Apply(flat, matrix=model.matrix, out=model.out)
    truth = reference.ggn(twin, (x, y, scale), Categorical(), labels(5), [n for n, _ in model.named_parameters()])
    torch.testing.assert_close(fit(model, inputs, labels(5), "full").to_dense(), truth)

    def branching(m: Any, x: Tensor, more: Any) -> Tensor:  # vmap cannot follow a decision by value
        out = run(m, x, more)
        return out if float(out.detach().sum()) < 1e9 else 2 * out

    model.function = branching
    torch.testing.assert_close(fit(model, inputs, labels(5), "full").to_dense(), truth)


def test_kfra_through_the_front_door() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = normal(1, 3), labels(1)
    kfra = fit(model, x, y, "kfra")
    assert {b.kind for b in kfra.blocks} == {"kfra"}
    for block in kfra.blocks:
        truth = reference.ggn(model, x, Categorical(), y, list(block.shapes))
        torch.testing.assert_close(block.to_dense(), truth, rtol=1e-10, atol=1e-13)
    many = [(normal(1, 3, seed=s), labels(1)) for s in range(4)]
    total = fit_curvature(model, many, "classification", structure="kfra", progress=False)
    kron = fit_curvature(model, many, "classification", structure="kron", progress=False)
    torch.testing.assert_close(total.to_dense(), kron.to_dense(), rtol=1e-10, atol=1e-12)
    with pytest.raises(UnsupportedError, match="cannot weigh"):
        fit_curvature(model, [(x, y, torch.ones(1))], "classification", structure="kfra", progress=False)


def test_low_rank_blocks_add_scale_and_show_their_diagonal() -> None:
    model, inputs, targets = build("inplace")
    half = (inputs[:2], targets[:2]), (inputs[2:], targets[2:])
    truth = reference.ggn(model, inputs, Categorical(), targets)
    parts = [fit(model, x, y, "low_rank", rank=20) for x, y in half]
    total = parts[0] + parts[1]
    torch.testing.assert_close(total.to_dense(), truth, rtol=1e-7, atol=1e-8)
    assert total.n_data == 4
    torch.testing.assert_close((2.0 * total).to_dense(), 2 * total.to_dense())
    diagonal = torch.cat([d.reshape(-1) for d in total.diagonal().values()])
    torch.testing.assert_close(diagonal, total.to_dense().diagonal())
    block = total.blocks[0]
    assert isinstance(block, LowRankBlock)
    assert block.kind == "low_rank"
    again = block.with_tensors(block.tensors())
    torch.testing.assert_close(again.to_dense(), block.to_dense())
    with pytest.raises(InputError, match="cannot be added"):
        block + fit(model, inputs, targets, "full").blocks[0]


def test_low_rank_is_below_the_matrix() -> None:
    model, inputs, targets = build("inplace")
    truth = reference.ggn(model, inputs, Categorical(), targets)
    found = fit(model, inputs, targets, "low_rank", rank=2).to_dense()
    smallest = torch.linalg.eigvalsh(truth - found)[0]
    assert float(smallest) > -1e-8
    torch.testing.assert_close(torch.linalg.eigvalsh(found)[-2:], torch.linalg.eigvalsh(truth)[-2:])


def test_a_layout_survives_its_configuration() -> None:
    model, inputs, targets = build("separable")
    for block in fit(model, inputs, targets, "kron").blocks:
        layout = getattr(block, "layout", None)
        if layout is None:
            continue
        again = Layout.from_config(layout.to_config())
        assert again == layout
        own = {n: p.detach() for n, p in model.named_parameters() if n in layout.names}
        for name, value in layout.split(layout.join(own)).items():
            torch.testing.assert_close(value, own[name], rtol=0, atol=0)


def test_the_summary_is_a_table() -> None:
    model, inputs, targets = build("class_token")
    factors = fit(model, inputs, targets, "kron")
    title, _, *table = factors.summary().splitlines()
    assert title.startswith("kron curvature (exact vectors) of")
    assert "4 data" in title
    assert any("token" in line and "per-example" in line for line in table)
    # The dashes say where a column begins and ends: words stand at its left, numbers at its right.
    columns = [match.span() for match in re.finditer("-+", table[1])]
    cells = [[line[start:end].ljust(end - start) for start, end in columns] for line in (table[0], *table[2:])]
    assert [c.strip() for c in cells[0]] == ["block", "kind", "parameters", "trace", "treated by"]
    for row, block in zip(cells[1:], factors.blocks, strict=True):
        assert [c.strip() for c in row[:4]] == [block.name, block.kind, f"{block.size:,}", f"{block.trace():.4g}"]
    for column, (start, end) in enumerate(columns):
        assert max(len(row[column].strip()) for row in cells) == end - start  # as wide as its widest cell
        for row in cells:
            text = row[column].strip()
            assert row[column] == (text.rjust(end - start) if column in (2, 3) else text.ljust(end - start))


def test_a_single_output_and_a_single_parameter() -> None:
    model = nn.Linear(3, 1).double()
    x, y = normal(4, 3), normal(4, 1, seed=1)
    rows = torch.cat([x, torch.ones(4, 1, dtype=torch.float64)], 1)
    found = fit_curvature(model, [(x, y)], Gaussian(noise=0.5), progress=False)  # exact: constant curvature
    torch.testing.assert_close(found.to_dense(), rows.T @ rows / 0.25)
    bias = fit_curvature(model, [(x, y)], Gaussian(noise=0.5), params=["bias"], progress=False)
    torch.testing.assert_close(bias.to_dense(), torch.full((1, 1), 16.0, dtype=torch.float64))


class Empty(nn.Module):
    """Has a layer without inputs, one without outputs, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(3, 4), nn.Linear(4, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says that it has nothing to initialise.
            self.nothing_in, self.nothing_out = nn.Linear(0, 3), nn.Linear(3, 0)
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([torch.tanh(self.a(x)), self.nothing_out(x)], -1)
        return self.o(h) + self.nothing_in(x[:, :0]) + self.nothing.sum()


@pytest.mark.parametrize("structure", ["full", "diagonal", "kron", "ekfac", "low_rank", "subset"])
def test_layers_without_inputs_or_outputs(structure: str) -> None:
    torch.manual_seed(0)
    model, x, y = Empty().double().eval(), normal(6, 3), torch.arange(6) % 3
    rank = {"low_rank": 34, "subset": None}.get(structure, 50)
    laplace = am.Laplace(model, "classification", structure=structure, rank=rank).fit([(x, y)], progress=False)
    names = ["a.weight", "a.bias", "o.weight", "o.bias", "nothing_in.bias"]
    assert sorted(laplace.posterior.names) == sorted(names)
    truth = reference.ggn(model, x, Categorical(), y, list(laplace.posterior.names))
    found = laplace.factors.to_dense()
    if structure != "kron":
        torch.testing.assert_close(float(found.trace()), float(truth.trace()))
    if structure in ("full", "low_rank", "subset"):
        torch.testing.assert_close(found, truth, rtol=1e-8, atol=1e-10)
    jacobian = reference.jacobian(model, x, list(laplace.posterior.names))
    expected = jacobian @ torch.linalg.inv(laplace.posterior.to_dense()) @ jacobian.mT
    torch.testing.assert_close(laplace.predict(x).latent_cov, expected)
