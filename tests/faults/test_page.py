"""The page of reliability is what its program writes from the stored counts."""

from __future__ import annotations

from tests.faults.page import BESIDES, PAGE, ROOT, page_of, results


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_of(*results()), (
        "the counts or the words have changed: python -m tests.faults.page"
    )


def test_the_tests_that_the_page_names_are_there() -> None:
    for what, _, files in BESIDES:
        for file in files:
            assert "def test_" in (ROOT / file).read_text(encoding="utf-8"), f"{what}: {file}"
