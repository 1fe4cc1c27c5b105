"""The public suite for structures passes on all that are registered, and fails on each defect that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from aftermap.curvature import STRUCTURES, Block, Structure, register_structure
from aftermap.curvature.structures.diagonal import DiagonalBlock, fit_diagonal
from aftermap.curvature.structures.full import FullBlock
from aftermap.errors import InputError
from aftermap.testing import check_structure

# What does not apply to a shipped structure, and a word of the reason.
EXPECTED_SKIPS: dict[str, dict[str, str]] = {
    "ekfac": {"sums of two fits": "updatable=False"},
    "kfra": {"splits into batches": "depends_on_batches=True", "tied weights": "KFRA has no rule for function matmul"},
}
Fit = Callable[[Any], Any]


@pytest.mark.parametrize("name", list(STRUCTURES))
def test_every_registered_structure_keeps_the_contract(name: str) -> None:
    skipped, expected = check_structure(name), EXPECTED_SKIPS.get(name, {})
    assert set(skipped) == set(expected)
    for what, reason in expected.items():
        assert reason in skipped[what]


class SkewedDiagonal(DiagonalBlock):
    """Its diagonal is not that of its matrix."""

    def diagonal(self) -> dict[str, Tensor]:
        return {n: 2 * v for n, v in super().diagonal().items()}


class Unscaled(DiagonalBlock):
    """It cannot be multiplied."""

    def scaled(self, factor: float) -> DiagonalBlock:
        return self


class Unsymmetric(DiagonalBlock):
    """Its matrix has an entry on one side only."""

    def to_dense(self) -> Tensor:
        dense = super().to_dense()
        dense[0, -1] += 1.0
        return dense


class Forgetful(DiagonalBlock):
    """A sum of two blocks is the first of them."""

    def __add__(self, other: Block) -> Block:
        return self


def changed(change: Callable[[DiagonalBlock], Block]) -> Fit:
    """A fit whose blocks are changed."""

    def fit(problem: Any) -> Any:
        blocks, counts = fit_diagonal(problem)
        return tuple(change(b) for b in blocks if isinstance(b, DiagonalBlock)), counts

    return fit


def as_kind(kind: type[DiagonalBlock]) -> Fit:
    return changed(lambda block: kind(block.label, block.values))


def without_last_block(problem: Any) -> Any:
    blocks, counts = fit_diagonal(problem)
    return blocks[:-1], counts


def with_first_block_twice(problem: Any) -> Any:
    blocks, counts = fit_diagonal(problem)
    return (*blocks, blocks[0]), counts


def times_batches(problem: Any) -> Any:
    blocks, counts = fit_diagonal(problem)
    return tuple(b.scaled(len(problem.data)) for b in blocks), counts


def by_first_example(problem: Any) -> Any:
    blocks, counts = fit_diagonal(problem)
    return tuple(b.scaled(1.0 + float(problem.data[0][0].reshape(-1)[0]) ** 2) for b in blocks), counts


def with_one_name(problem: Any) -> Any:
    blocks, counts = fit_diagonal(problem)
    return tuple(replace(b, label="layer") for b in blocks), counts


DEFECTS: dict[str, tuple[Fit, type[Block], str]] = {
    "a parameter is missing": (without_last_block, DiagonalBlock, "its blocks must hold each of"),
    "a parameter is there twice": (with_first_block_twice, DiagonalBlock, "its blocks must hold each of"),
    "a kind is not declared": (fit_diagonal, FullBlock, "registered are"),
    "two blocks have one name": (with_one_name, DiagonalBlock, "two blocks have one name"),
    "the diagonal is another": (as_kind(SkewedDiagonal), SkewedDiagonal, "diagonal of block"),
    "multiples are wrong": (as_kind(Unscaled), Unscaled, "scaled of block"),
    "the matrix is not symmetric": (as_kind(Unsymmetric), Unsymmetric, "against its transpose"),
    "the matrix is negative": (changed(lambda b: b.scaled(-1.0)), DiagonalBlock, "not positive semi-definite"),
    "there is no curvature": (changed(lambda b: b.scaled(0.0)), DiagonalBlock, "the curvature is zero"),
    "order matters": (by_first_example, DiagonalBlock, "the data in another order"),
    "batches matter": (times_batches, DiagonalBlock, "the data in two batches"),
    "sums are wrong": (as_kind(Forgetful), Forgetful, "the sum of two fits"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_noticed(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fit, kind, message = DEFECTS[defect]
    monkeypatch.setitem(STRUCTURES, "defect", Structure("defect", "A structure with a defect.", fit, (kind,)))
    with pytest.raises(AssertionError, match=message):
        check_structure("defect", samples=100)


def test_what_a_registration_excludes_must_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Structure("defect", "Sums are not announced.", fit_diagonal, (DiagonalBlock,), updatable=False)
    monkeypatch.setitem(STRUCTURES, "defect", entry)
    with pytest.raises(AssertionError, match="two fits were added without an InputError"):
        check_structure("defect", samples=100)


def test_a_name_that_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="structure='diagnal' is not known.*Did you mean 'diagonal'"):
        check_structure("diagnal")


def test_names_of_structures_and_of_their_classes_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aftermap.curvature.structures.base.STRUCTURES", dict(STRUCTURES))
    with pytest.raises(InputError, match="'kron' is registered already"):
        register_structure(Structure("kron", "Another.", fit_diagonal, (DiagonalBlock,)))
    other = type("DiagonalBlock", (DiagonalBlock,), {})
    with pytest.raises(InputError, match="a class DiagonalBlock, a name that a class of another structure has"):
        register_structure(Structure("other", "Another.", fit_diagonal, (other,)))


def test_a_definition_that_is_run_again_replaces_the_former_one(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = dict(STRUCTURES)
    monkeypatch.setattr("aftermap.curvature.structures.base.STRUCTURES", registry)
    for number in range(2):
        register_structure(Structure("again", f"Version {number}.", as_kind(Forgetful), (Forgetful,)))
    assert registry["again"].summary == "Version 1."
