"""The public suite for structures passes on all that are registered, and fails on each defect that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.curvature import STRUCTURES, Block, Structure, register_structure
from aftermap.curvature.structures.diagonal import DiagonalBlock, DiagonalBlockPosterior, fit_diagonal
from aftermap.curvature.structures.full import FullBlock
from aftermap.errors import DataError, InputError
from aftermap.laplace import Laplace, load
from aftermap.testing import check_structure

# What does not apply to a shipped structure, and a word of the reason.
EXPECTED_SKIPS: dict[str, dict[str, str]] = {
    "ekfac": {"sums of two fits": "updatable=False"},
    "kfra": {"splits into batches": "depends_on_batches=True", "tied weights": "KFRA has no rule for function matmul"},
}
Fit = Callable[[Any], Any]


@pytest.mark.parametrize("name", [s.name for s in STRUCTURES.values() if s.posterior is None])
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


class Doubled(DiagonalBlock):
    """Its posterior has twice its curvature."""

    def posterior(self, prior: Any, scale: Tensor, eigen: Any, **options: Any) -> DiagonalBlockPosterior:
        return super().posterior(prior, 2 * scale, eigen, **options)


@dataclass(frozen=True)
class WrongOutputs(DiagonalBlockPosterior):
    """Its linearised predictions are too wide."""

    def functional_covariance(self, *inputs: Any) -> list[Tensor]:
        return [1.5 * covariance for covariance in super().functional_covariance(*inputs)]


class WithWrongOutputs(DiagonalBlock):
    """Its posterior is right, but for the outputs."""

    def posterior(self, *inputs: Any, **options: Any) -> WrongOutputs:
        right = super().posterior(*inputs, **options)
        return WrongOutputs(right.source_block, right.prior, right.scale, right.dtype)


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
    "the posterior is another": (as_kind(Doubled), Doubled, "the posterior of structure 'defect'.*s·H"),
    "predictions are wrong": (as_kind(WithWrongOutputs), WithWrongOutputs, "the covariance of the outputs"),
    "sums are wrong": (as_kind(Forgetful), Forgetful, "the sum of two fits"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_noticed(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fit, kind, message = DEFECTS[defect]
    monkeypatch.setitem(STRUCTURES, "defect", Structure("defect", "A structure with a defect.", fit, (kind,)))
    with pytest.raises(AssertionError, match=message):
        check_structure("defect", samples=100)


def test_a_posterior_without_blocks_is_no_structure_to_check() -> None:
    with pytest.raises(AssertionError, match="structure='matrix_free' has no blocks to fit"):
        check_structure("matrix_free")


def test_what_a_registration_excludes_must_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Structure("defect", "Sums are not announced.", fit_diagonal, (DiagonalBlock,), updatable=False)
    monkeypatch.setitem(STRUCTURES, "defect", entry)
    with pytest.raises(AssertionError, match="two fits were added without an InputError"):
        check_structure("defect", samples=100)


def test_a_damping_that_is_offered_must_work(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Structure("defect", "A damping too many.", fit_diagonal, (DiagonalBlock,), dampings=("exact", "pi"))
    monkeypatch.setitem(STRUCTURES, "defect", entry)
    with pytest.raises(AssertionError, match="damping 'pi'.*is for Kronecker factors"):
        check_structure("defect", samples=100)


def test_a_posterior_that_is_not_registered_cannot_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnPosterior(DiagonalBlockPosterior):
        pass

    class OwnBlock(DiagonalBlock):
        def posterior(self, *inputs: Any, **options: Any) -> OwnPosterior:
            right = super().posterior(*inputs, **options)
            return OwnPosterior(right.source_block, right.prior, right.scale, right.dtype)

    entry = Structure("own", "It has a posterior of its own.", as_kind(OwnBlock), (OwnBlock,))
    monkeypatch.setitem(STRUCTURES, "own", entry)
    with pytest.raises(AssertionError, match="is a OwnPosterior, which cannot be saved"):
        check_structure("own", samples=100)
    monkeypatch.setitem(STRUCTURES, "own", replace(entry, posteriors=(OwnPosterior,)))
    assert check_structure("own") == {}


def test_a_folder_of_a_structure_that_is_not_registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, x = nn.Linear(2, 1), torch.ones(3, 2)
    with monkeypatch.context() as patch:
        patch.setitem(STRUCTURES, "own", Structure("own", "Of one file.", as_kind(Unscaled), (Unscaled,)))
        Laplace(model, "regression", structure="own").fit([(x, x[:, :1])]).save(tmp_path / "folder")
        assert load(tmp_path / "folder", model).structure == "own"
    with pytest.raises(DataError, match="'Unscaled', a kind that this version .* import the file that registers it"):
        load(tmp_path / "folder", model)


def test_a_name_that_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="structure='diagnal' is not known.*Did you mean 'diagonal'"):
        check_structure("diagnal")


def test_names_of_structures_and_of_their_classes_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aftermap.curvature.structures.base.STRUCTURES", dict(STRUCTURES))
    with pytest.raises(InputError, match="'kron' is registered already"):
        register_structure(Structure("kron", "Another.", fit_diagonal, (DiagonalBlock,)))
    other = type("DiagonalBlock", (DiagonalBlock,), {})
    with pytest.raises(InputError, match="a class of another structure is called DiagonalBlock, too"):
        register_structure(Structure("other", "Another.", fit_diagonal, (other,)))


def test_a_definition_that_is_run_again_replaces_the_former_one(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = dict(STRUCTURES)
    monkeypatch.setattr("aftermap.curvature.structures.base.STRUCTURES", registry)
    for number in range(2):
        register_structure(Structure("again", f"Version {number}.", as_kind(Forgetful), (Forgetful,)))
    assert registry["again"].summary == "Version 1."
