"""What people see: tables of the first inputs as text, and as HTML in which everything is escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.evaluation.results import Metric, Results, Table, compare
from aftermap.predictive.display import html_table, text_table
from aftermap.predictive.prediction import KINDS, Prediction

HOSTILE = "<script>alert('x')</script>&\""


class Cells(HTMLParser):
    """Reads the rows of a table, and refuses tags that are never closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in ("table", "caption", "thead", "tbody", "tr", "th", "td", "p")
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        else:
            self.words += data


def prediction(kind: str, *shape: int) -> Prediction:
    generator = torch.Generator().manual_seed(len(shape))
    mean = torch.rand(*shape, generator=generator)
    if kind == "classification":
        mean = mean / mean.sum(-1, keepdim=True)
    parts = shape[:-1] if kind == "classification" else shape
    one, two = torch.rand(2, *parts, generator=generator)
    return Prediction(kind, mean, one, two, one + two, link="mc")


def test_rows_of_classes() -> None:
    p = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.25, 0.25]])
    shown = Prediction("classification", p, torch.tensor([0.01, 0.25]), torch.ones(2), torch.tensor([1.01, 1.25]))
    assert str(shown).splitlines() == [
        "classification of 2 inputs: 3 classes (link samples)",
        "input  class  confidence  epistemic  aleatoric",
        "----------------------------------------------",
        "    0      1       0.700     0.0100     1.0000",
        "    1      0       0.500     0.2500     1.0000",
        "epistemic and aleatoric in nats",
    ]


def test_rows_of_numbers() -> None:
    mean, function, noise = torch.tensor([[1.5], [-20.0]]), torch.tensor([[0.09], [4.0]]), torch.tensor([[0.16], [5.0]])
    shown = Prediction("regression", mean, function, noise, function + noise, link="linearised")
    lines = str(shown).splitlines()
    assert lines[0] == "regression of 2 inputs: 1 output (link linearised)"
    assert lines[3].split() == ["0", "1.5", "±", "0.5", "0.3"]  # √(0.09 + 0.16), √0.09
    assert lines[4].split() == ["1", "-20", "±", "3", "2"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 2), (7, 2), (3, 4, 2), (2, 3, 4, 3), (9, 1), (0, 3)])
def test_every_kind_and_shape(kind: str, shape: tuple[int, ...]) -> None:
    shown = prediction(kind, *shape)
    units = (shape[:-1] if kind == "classification" else shape) if 0 not in shape else (0,)
    count = torch.Size(units).numel()
    text, cells = str(shown), Cells(shown._repr_html_())
    assert len(cells.rows) == 1 + min(5, count)
    assert (f"and {count - 5} more" in text) == (f"and {count - 5} more" in cells.words) == (count > 5)
    for row in cells.rows[1:]:
        for cell in row:
            assert cell in text
    if len(shape) == 3 and kind == "regression":  # example, position, output
        assert [row[0] for row in cells.rows[1:4]] == ["0, 0, 0", "0, 0, 1", "0, 1, 0"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_graphs_and_dtypes(dtype: torch.dtype) -> None:
    parts: list[Tensor] = [torch.full((3, 2), 0.25, dtype=dtype, requires_grad=True) for _ in range(4)]
    assert "0.25 ± 0.5" in str(Prediction("regression", *parts))
    assert "nan ± nan" in str(Prediction("regression", *(torch.full((3, 2), torch.nan) for _ in range(4))))


def test_everything_is_escaped() -> None:
    columns = {HOSTILE: [HOSTILE, "2"]}
    for html in (
        html_table(HOSTILE, columns, note=HOSTILE),
        Table({HOSTILE: [HOSTILE, 2]})._repr_html_(),
        Results(HOSTILE, HOSTILE, 3, {HOSTILE: Metric(1, 0, 2)})._repr_html_(),
        compare({HOSTILE: Results("a", "regression", 3, {HOSTILE: Metric(1, 1, 1)})})._repr_html_(),
    ):
        assert "script" not in re.sub(r"&lt;/?script&gt;", "", html)
        assert HOSTILE in {c for row in Cells(html).rows for c in row}


def test_tables_of_results() -> None:
    results = Results("kron", "classification", 1200, {"nll": Metric(0.5, 0.4, 0.6), "ece": Metric(0.02, 0.02, 0.02)})
    cells = Cells(results._repr_html_())
    assert cells.words == "kron: classification, 1,200 examples"
    assert cells.rows == [["metric", "value", "interval"], ["nll", "0.5", "[0.4, 0.6]"], ["ece", "0.02", ""]]
    assert str(Results("empty", "classification", 0, {})) == "empty: classification, 0 examples"
    both = compare({"a": results, "b": results}, ["nll"], extras={"a": {"seconds": 1.5}})
    assert Cells(both._repr_html_()).rows == [
        ["method", "nll", "seconds"],
        ["a", "0.5000*", "1.5"],
        ["b", "0.5000 ", "-"],
    ]
    assert str(both).splitlines()[2].split() == ["a", "0.5000*", "1.5"]
    long = Cells(html_table("", {"x": [str(i) for i in range(130)]}))
    assert len(long.rows) == 101
    assert long.words == "… and 30 more."
    assert text_table({"x": []}) == "x\n-"


def test_a_laplace_approximation_in_a_notebook() -> None:
    net = type(HOSTILE, (nn.Linear,), {})(2, 1)
    laplace = am.Laplace(net, "regression", structure="full")
    before = dict(Cells(laplace._repr_html_()).rows[1:])
    assert before["network"] == HOSTILE
    assert before["state"] == "not fitted"
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    laplace.fit([(x, x.sum(1, keepdim=True))])
    fitted = dict(Cells(laplace._repr_html_()).rows[1:])
    assert (fitted["data"], fitted["uncertain parameters"]) == ("30", "3")
    assert (fitted["prior precision"], fitted["noise σ"]) == ("1", "1")
    laplace.with_prior(2.5)
    assert dict(Cells(laplace._repr_html_()).rows[1:])["prior precision"] == "2.5"
    assert "30 data" in str(laplace)
