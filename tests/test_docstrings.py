"""The documentation inside the code is written in sentences: every entry of a docstring can be read aloud."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "aftermap"
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))

NAMED = ("Args", "Attributes", "Raises", "Warns")  # sections of entries "name: sentence"
PLAIN = ("Returns", "Yields")  # sections of one entry without a name
HEADING = re.compile(rf"({'|'.join(NAMED + PLAIN)}):$")
NAME = re.compile(r"\*{0,2}[\w.]+(, \*{0,2}[\w.]+)*: +")
FULL_STOP = re.compile(r"\.[)\]\"'`]*$")  # a bracket or a quote may close after it
WORD = re.compile(r"[^\W\d_]{2,}")
ACTION = re.compile(r"(Inside|[A-Z][a-z-]*s),? ")  # "Returns the …", "Draws …", "Inside, the model is …"
# Properties are things, and have the names of things; the commands of the command line say what to do.
THINGS = ("property", "setter", "command", "callback")


def problems_of(text: str) -> Iterator[str]:
    """What keeps a docstring, as `ast.get_docstring` returns it, from being read aloud."""
    first = text.partition("\n")[0]
    if not FULL_STOP.search(first):
        yield f"the first line does not end with a full stop: {first}"
    if len(first.split()) < 3:
        yield f"the first line has fewer than three words: {first}"
    for section, entry in entries_of(text):
        name = NAME.match(entry)
        if section in NAMED and not name:
            yield f"{section} has an entry without a name: {entry}"
            continue
        if section == "Args" and name and "," in name[0]:  # the site's builder knows no two arguments in one entry
            yield f"Args has an entry of several arguments: {entry}"
        body = entry[name.end() :] if section in NAMED and name else entry
        if "a" <= body[:1] <= "z":
            yield f"{section} has an entry that does not start with a capital letter: {entry}"
        if not FULL_STOP.search(body):
            yield f"{section} has an entry that does not end with a full stop: {entry}"
        if len(WORD.findall(body)) < 2:
            yield f"{section} has an entry without words: {entry}"


def entries_of(text: str) -> Iterator[tuple[str, str]]:
    """(section, entry) of every entry in a docstring, each on one line."""
    section, indent, found = "", 0, list[tuple[str, str]]()
    for line in text.split("\n")[1:]:
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if depth == 0:
            heading = HEADING.match(line)
            section, indent = (heading[1] if heading else ""), 0
        elif section:
            starts = not indent or (depth == indent and section in NAMED)
            indent = indent or depth
            if starts:
                found.append((section, line.strip()))
            else:
                found[-1] = (section, f"{found[-1][1]} {line.strip()}")
    return iter(found)


def public_docstrings(node: ast.AST, name: str = "the module") -> Iterator[tuple[str, str]]:
    """(name, docstring) of a module, and of everything public inside it that has one."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield name, text
        for child in ast.iter_child_nodes(node):
            inner = getattr(child, "name", None)
            if isinstance(inner, str) and (not inner.startswith("_") or inner.startswith("__")):
                yield from public_docstrings(child, inner if isinstance(node, ast.Module) else f"{name}.{inner}")


def functions_without_an_action(tree: ast.AST) -> Iterator[str]:
    """The functions whose docstring does not begin with what they do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
            if text and not ACTION.match(text) and not any(word in decorators for word in THINGS):
                yield f"{node.name}: {text.partition(chr(10))[0]}"


@pytest.mark.parametrize("file", FILES)
def test_functions_say_first_what_they_do(file: str) -> None:
    found = list(functions_without_an_action(ast.parse((SOURCE / file).read_text(encoding="utf-8"))))
    assert not found, f"{file} has docstrings that do not begin with a verb:\n" + "\n".join(found)


def test_a_docstring_without_a_verb_is_found() -> None:
    code = 'def f():\n    """The sum of all."""\n\n@property\ndef g():\n    """The sum."""\n\ndef h():\n    """Returns the sum."""'
    assert list(functions_without_an_action(ast.parse(code))) == ["f: The sum of all."]


@pytest.mark.parametrize("file", FILES)
def test_docstrings_are_sentences(file: str) -> None:
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    found = [f"{name}: {problem}" for name, text in public_docstrings(tree) for problem in problems_of(text)]
    assert not found, f"{file} has docstrings that cannot be read aloud:\n" + "\n".join(found)


def test_the_whole_library_is_read() -> None:
    texts = [text for file in FILES for _, text in public_docstrings(ast.parse((SOURCE / file).read_text("utf-8")))]
    assert len(FILES) > 150
    assert sum(len(list(entries_of(text))) for text in texts) > 2000


GOOD = """Draws from a normal distribution.

    Args:
        count: The number of draws.
        *sizes: The sizes, each
            described elsewhere (see `torch.randn`).
        scale: σ, the standard deviation.
        mode: "fast" or "exact", as in "the manual."

    Returns:
        The draws [count], which are not: sorted.

        They may repeat.

    Raises:
        InputError: The count is below 1.

    >>> draw(count=1)
    """


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("normal distribution.", "normal distribution", "the first line does not end with a full stop"),
        ("Draws from a normal distribution.", "Normal draws.", "fewer than three words"),
        ("count: The number of draws.", "count: of the draws.", "Args has an entry that does not start with a capital"),
        (
            "count: The number of draws.",
            "count: The number of draws",
            "Args has an entry that does not end with a full",
        ),
        ("count: The number of draws.", "count: S.", "Args has an entry without words: count: S."),
        ("count: The number of draws.", "The number of draws.", "Args has an entry without a name"),
        ("count: The number of draws.", "count, more: The number of draws.", "an entry of several arguments: count"),
        ("elsewhere (see `torch.randn`).", "elsewhere (see `torch.randn`)", "does not end with a full stop: *sizes"),
        ("The draws [count]", "draws [count]", "Returns has an entry that does not start with a capital"),
        ("They may repeat.", "They may repeat", "Returns has an entry that does not end with a full stop"),
        ("The count is below 1.", "a count below 1.", "Raises has an entry that does not start with a capital"),
    ],
)
def test_a_clipped_phrase_is_found(old: str, new: str, problem: str) -> None:
    def problems(text: str) -> list[str]:
        (_, docstring), *_ = public_docstrings(ast.parse(f'"""{text}"""'))
        return list(problems_of(docstring))

    assert problems(GOOD) == []
    (found,) = problems(GOOD.replace(old, new))
    assert problem in found


def test_only_public_docstrings_are_read() -> None:
    source = (
        '"""A."""\nclass B:\n    """C."""\n    def d(self):\n        """E."""\n    def _f(self):\n        """G."""\n'
    )
    source += "    def __call__(self):\n        '''H.'''\nclass _I:\n    '''J.'''\n    def k(self):\n        '''L.'''\n"
    expected = [("the module", "A."), ("B", "C."), ("B.d", "E."), ("B.__call__", "H.")]
    assert list(public_docstrings(ast.parse(source))) == expected
