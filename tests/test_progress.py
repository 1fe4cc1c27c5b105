from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from aftermap.errors import InputError
from aftermap.progress import progress, progress_enabled, waiting


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def replace_stderr(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> None:
    # Only as the module sees it: pytest puts its own sys.stderr in place between a fixture and its test.
    monkeypatch.setattr(sys.modules["aftermap.progress"], "sys", SimpleNamespace(stderr=stream))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    stream = FakeTerminal()
    replace_stderr(monkeypatch, stream)
    return stream


def test_on_for_a_terminal(terminal: FakeTerminal) -> None:
    assert progress_enabled()
    assert list(progress([7, 5, 3], description="factors")) == [7, 5, 3]
    assert "factors" in terminal.getvalue()
    assert "/3" in terminal.getvalue()


def test_off_when_standard_error_is_not_a_terminal(terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    replace_stderr(monkeypatch, stream)
    assert not progress_enabled()
    items = [7, 5, 3]
    assert progress(items, description="factors") is items
    assert stream.getvalue() == ""


def test_off_without_standard_error(terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_stderr(monkeypatch, None)
    assert not progress_enabled()


@pytest.mark.parametrize("value, shown", [("true", False), ("1", False), ("0", True), ("False", True), ("", True)])
def test_continuous_integration(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, value: str, shown: bool
) -> None:
    monkeypatch.setenv("CI", value)
    assert progress_enabled() is shown
    assert progress_enabled(True), "an explicit wish beats CI"


@pytest.mark.parametrize("rank, shown", [("0", True), ("1", False), ("13", False), ("", True)])
def test_rank_zero_only_even_when_asked_for(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, rank: str, shown: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert progress_enabled() is shown
    assert progress_enabled(True) is shown
    assert list(progress("abc", description="letters", enabled=True)) == ["a", "b", "c"]
    assert ("letters" in terminal.getvalue()) is shown


def test_explicit_wish_beats_the_terminal(terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not progress_enabled(False)
    assert list(progress([2, 4], description="even", enabled=False)) == [2, 4]
    assert terminal.getvalue() == ""
    stream = io.StringIO()
    replace_stderr(monkeypatch, stream)
    assert list(progress([2, 4], description="even", enabled=True)) == [2, 4]
    assert "even" in stream.getvalue()


def test_generators_keep_their_order_and_are_read_lazily(terminal: FakeTerminal) -> None:
    read: list[int] = []

    def numbers() -> Iterator[int]:
        for number in (4, 1, 9):
            read.append(number)
            yield number

    iterator = iter(progress(numbers(), description="squares", total=3))
    assert read == []
    assert next(iterator) == 4
    assert read == [4]
    assert list(iterator) == [1, 9]
    assert "squares" in terminal.getvalue()


def test_an_exception_in_the_loop_is_not_swallowed(terminal: FakeTerminal) -> None:
    def broken() -> Iterator[int]:
        yield 6
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        list(progress(broken(), description="reading"))


def test_old_style_sequences_are_iterable() -> None:
    class Squares:
        def __getitem__(self, index: int) -> int:
            if index >= 3:
                raise IndexError
            return index * index

    assert list(progress(Squares(), description="squares", enabled=False)) == [0, 1, 4]  # type: ignore[arg-type]


@pytest.mark.parametrize("enabled", [True, False])
def test_bad_input(terminal: FakeTerminal, enabled: bool) -> None:
    with pytest.raises(InputError, match="got int for iterable; pass something to loop over"):
        progress(17, description="none", enabled=enabled)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="got total=-2; pass a number >= 0"):
        progress([1, 2], description="none", total=-2, enabled=enabled)


def test_a_line_says_what_is_waited_for_and_goes_away(terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    with waiting("reading a file"):
        assert "reading a file …" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")
    quiet = io.StringIO()
    replace_stderr(monkeypatch, quiet)
    with waiting("reading a file"):
        pass
    assert quiet.getvalue() == ""
