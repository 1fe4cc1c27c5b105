"""The code in the documentation runs, and the pages say what the library is."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from aftermap.errors import StatisticalWarning
from docs import make_gallery, make_notebooks, run_pages
from tests.architecture import LAYERS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page for page in run_pages.pages()}
# Importing transformers or lightning takes longer than all other pages together.
SLOW = {"how_to/hugging_face.md": "transformers", "how_to/lightning.md": "lightning"}
NEEDS = {"how_to/scikit_learn.md": "sklearn", **SLOW}
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+(?:\n[^$\n]+)?)\$", re.DOTALL)  # as pymdownx.arithmatex reads them
BEYOND = {
    "cli",
    "integrations",
    "lazy",
    "writing",
    "draws",
    "models",
    "prior",
}  # units whose reference is elsewhere, or that are no one's to use


# A page on how to add something: what it registers, and the check that it ends with.
ADDED = {
    "add_a_layer.md": ("Transposed", "check_layer_rule"),
    "add_a_structure.md": ("isotropic", "check_structure"),
    "add_a_posterior.md": (None, "check_posterior"),
    "add_an_optimiser.md": (None, "check_optimizer"),
}


@pytest.fixture
def registered() -> Iterator[Callable[[], set[str]]]:
    """The names of registered layers and structures, which a page may add to; they are put back."""
    import aftermap.posteriors  # noqa: F401 (registers a structure)
    from aftermap.curvature.rules import base
    from aftermap.curvature.structures.base import STRUCTURES

    tables: list[dict[Any, Any]] = [base._RULES, STRUCTURES]
    before = [dict(table) for table in tables]
    yield lambda: {*(kind.__name__ for kind in base._RULES), *STRUCTURES}
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def docstrings() -> Iterator[tuple[str, str]]:
    """(module, docstring) of everything in the library that has one."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield path.relative_to(ROOT).as_posix(), text


@functools.cache
def markdown_sources() -> list[tuple[str, str]]:
    """(name, Markdown without code) of every page, and of every docstring as the site shows it."""
    pytest.importorskip("griffe", reason="the documentation's tools are not installed")
    as_markdown = importlib.import_module("docs.docstrings").as_markdown
    texts = [(p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8")) for p in sorted(DOCS.rglob("*.md"))]
    texts += [(name, as_markdown(text)) for name, text in docstrings()]
    code = re.compile(r"^ *```.*?^ *```|``.+?``|`[^`\n]*`", re.DOTALL | re.MULTILINE)
    return [(name, code.sub("", text)) for name, text in texts]


def formulas() -> list[tuple[str, str, bool]]:
    """(source, TeX, whether it stands on a line of its own) of every formula."""
    return [(n, m[1] or m[2], m[1] is not None) for n, text in markdown_sources() for m in FORMULA.finditer(text)]


def bash_commands() -> list[tuple[str, str]]:
    """(page, command line) of every `aftermap …` in a bash block."""
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            lines = [line.split("#")[0].split(">")[0].strip() for line in block.splitlines()]
            found += [(page.name, re.sub(r"^.*-m aftermap", "aftermap", line)) for line in lines if "aftermap " in line]
    return found


def commands() -> dict[str, Any]:
    pytest.importorskip("typer.main", reason="the command line is not installed")
    from aftermap.cli.app import COMMANDS, load_command

    return {name: load_command(name) for name in COMMANDS}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else [], id=n) for n in PAGES])
@pytest.mark.filterwarnings("ignore:the best point lies at the edge:aftermap.errors.StatisticalWarning")
def test_page_runs_and_prints_what_it_says(name: str, registered: Callable[[], set[str]]) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    page, before = PAGES[name], registered()
    # Only of pages that import a library whose own warnings are not ours.
    with warnings.catch_warnings():
        if name in SLOW:
            warnings.simplefilter("ignore")
        printed = run_pages.run_page(page)
    added = ADDED.get(name, (None,))[0]
    assert registered() - before == ({added} if added else set())
    blocks = run_pages.blocks_of(text_of(name))
    assert len(printed) == len(blocks) > 0
    for block, out in zip(blocks, printed, strict=True):
        if block.output is not None:
            said = run_pages.masked(block.output)
            assert said, f"{name}, line {block.line}: the page says nothing; python docs/run_pages.py --write {page}"
            assert said == run_pages.masked(out), f"{name}, line {block.line}"
        else:
            assert not out, f"{name}, line {block.line} prints, but the page does not say what"


@pytest.mark.parametrize("name", list(ADDED))
def test_a_page_on_how_to_add_runs_its_check(
    name: str, registered: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from aftermap import testing

    calls: list[Any] = []
    monkeypatch.setattr(testing, ADDED[name][1], lambda *inputs, **options: calls.append(inputs) or {})
    run_pages.run_page(PAGES[name])
    assert len(calls) == 1, f"{name} does not run {ADDED[name][1]}"
    assert f"]({'docs/' + name})" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"]({'docs/' + name})" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert {p.name for p in DOCS.glob("add_*.md")} == set(ADDED)


def test_every_tutorial_and_guide_has_code() -> None:
    without = [p for folder in ("tutorials", "how_to") for p in sorted((DOCS / folder).glob("*.md"))]
    without = [p for p in without if p.relative_to(DOCS).as_posix() not in PAGES]
    assert [p.name for p in without] == ["command_line.md"]  # its commands are checked below


def test_commands_on_the_pages_exist() -> None:
    known, seen = commands(), set()
    for page, line in bash_commands():
        words = shlex.split(line)
        verb, rest = words[1], words[2:]
        assert verb in known, f"{page}: {line}"
        flags = {flag for p in known[verb].params for flag in (*p.opts, *p.secondary_opts)}
        used = {w for w in rest if w.startswith("-")}
        assert used <= flags, f"{page}: {line}: there is no {used - flags}"
        seen.add(verb)
    assert {"doctor", "fit", "report", "predict", "evaluate", "train"} <= seen


def test_every_command_is_in_the_guide() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", text_of("how_to/command_line.md"), re.MULTILINE))
    assert set(commands()) <= listed


def test_the_configuration_file_of_the_guide_fits_its_commands() -> None:
    block = re.search(r"```toml\n(.*?)```", text_of("how_to/command_line.md"), re.DOTALL)
    assert block is not None
    content, known = tomllib.loads(block[1]), commands()
    own = {k: v for k, v in content.items() if k in known}
    common = {k for k in content if k not in known}
    assert set(own) == {"fit", "report"}
    for verb, entries in own.items():
        names = {p.name for p in known[verb].params} | {o.lstrip("-") for p in known[verb].params for o in p.opts}
        assert {*entries, *common} <= names, verb


def test_every_unit_has_a_reference() -> None:
    source = ROOT / "src" / "aftermap"
    units = {p.stem for p in source.glob("*.py") if not p.stem.startswith("_")}
    units |= {p.parent.name for p in source.glob("*/__init__.py")}
    shown = {
        m for p in (DOCS / "reference").glob("*.md") for m in re.findall(r"^::: (\S+)$", p.read_text(), re.MULTILINE)
    }
    assert {f"aftermap.{unit}" for unit in units - BEYOND} <= shown
    linked = set(re.findall(r"\]\((\w+)\.md\)", text_of("reference/index.md")))
    assert linked == {p.stem for p in (DOCS / "reference").glob("*.md")} - {"index"}
    for module in shown - {m for m in shown if m.startswith("aftermap.integrations")}:
        assert importlib.import_module(module).__all__


def test_the_paths_on_the_page_on_architecture_exist() -> None:
    steps = re.findall(r"^[│├└─ ]*([\w.]+) {2,}([\w/]+\.py)$", text_of("architecture.md"), re.MULTILINE)
    assert len(steps) > 40
    for step, file in steps:
        module = importlib.import_module("aftermap." + file.removesuffix(".py").replace("/", "."))
        value: Any = module
        for part in step.split("."):
            assert hasattr(value, part), f"{file} has no {step}"
            value = getattr(value, part)
        assert value.__module__ == module.__name__, f"{step} is not in {file}"


def test_the_classes_on_the_page_on_architecture_are_those_of_the_code() -> None:
    from aftermap.curvature.passes.backward import Accumulator
    from aftermap.curvature.structures.base import Structure
    from aftermap.laplace.fitted import Fitted
    from aftermap.posteriors.base import Hyperparameters

    code = "\n".join(re.findall(r"^```py\n(.*?)^```", text_of("architecture.md"), re.DOTALL | re.MULTILINE))
    shown = {node.name: node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef)}
    assert set(shown) == {"Accumulator", "Structure", "Hyperparameters", "Fitted"}
    for kind in (Structure, Hyperparameters, Fitted):
        names = [
            n.target.id
            for n in shown[kind.__name__].body
            if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        ]
        assert names == [f.name for f in fields(kind)]
    methods = {node.name for node in shown["Accumulator"].body if isinstance(node, ast.FunctionDef)}
    assert methods == {
        name for name, value in vars(Accumulator).items() if callable(value) and not name.startswith("_")
    }


def test_the_order_of_imports_on_the_page_is_the_one_that_is_tested() -> None:
    diagram = re.search(r"^errors ▶.*?^```", text_of("architecture.md"), re.DOTALL | re.MULTILINE)
    assert diagram is not None
    words = re.sub(r"\(.*?\)|```", "", diagram[0])
    assert [tuple(re.findall(r"\w+", layer)) for layer in words.split("▶")] == list(LAYERS)


def test_every_metric_is_defined() -> None:
    from aftermap import metrics
    from aftermap.analysis.report.definitions import _KNOWN

    text = text_of("metrics.md")
    functions = {n for n in metrics.__all__ if n[0].islower()}
    helpers = {"labelled_scores", "gaussian_interval", "interval_calibration_from_pit"}
    assert {n for n in functions - helpers if f"`{n}`" not in text} == set()
    split = {"auroc", "fpr95", "coverage", "risk", "threshold", "epistemic_split", "epistemic", "seconds_per_1000"}
    named = set(_KNOWN) - split - {"mean_inside", "mean_outside", "aupr_out", "aupr_in"}
    assert {n for n in named if f"`{n}`" not in text} == set()


def test_no_formula_is_shown_as_its_source() -> None:
    raw = re.compile(r"\\[a-zA-Z]{2,}|\$|:math:|\.\. math")
    for name, text in markdown_sources():
        found = raw.search(FORMULA.sub("", text))
        assert found is None, f"{name}: {found[0]!r} stands outside $...$, $$...$$ and code"
    sources = {name for name, _, _ in formulas()}
    assert len([n for n in sources if n.startswith("docs/mathematics/")]) > 10
    assert len([n for n in sources if n.startswith("src/")]) > 10


def test_every_formula_can_be_rendered() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("KaTeX is run by node, which is not installed")
    program = """
        const katex = require(process.argv[1]);
        for (const [name, source, displayMode] of JSON.parse(require("fs").readFileSync(0, "utf8"))) {
            try { katex.renderToString(source, { displayMode, strict: "error" }); }
            catch (error) { console.log(name + ": " + error.message); }
        }
    """
    given = json.dumps(formulas())
    katex = str(DOCS / "javascripts" / "katex.min.js")
    done = subprocess.run([node, "-e", program, katex], input=given, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_formulas_need_no_network() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^  - ((?:stylesheets|javascripts)/\S+)$", config, re.MULTILINE)
    assert {Path(p).name for p in listed} == {
        "katex.min.css",
        "formulas.css",
        "pages.css",
        "katex.min.js",
        "formulas.js",
    }
    assert all((DOCS / p).is_file() for p in listed)
    styles = text_of("stylesheets/katex.min.css")
    fonts = set(re.findall(r"url\(([^)]*)\)", styles))
    assert fonts == {f"fonts/{p.name}" for p in (DOCS / "stylesheets" / "fonts").iterdir()}
    assert "MIT" in text_of("javascripts/katex.LICENSE.txt")


def test_pictures_are_small_and_used() -> None:
    pictures = sorted((DOCS / "images").iterdir())
    assert {p.name for p in pictures} >= {"report.png", "layer_shares.svg"}
    assert [p.name for p in pictures if p.stat().st_size > 150_000] == []
    pages = "".join(p.read_text(encoding="utf-8") for p in DOCS.rglob("*.md"))
    assert [p.name for p in pictures if f"images/{p.name}" not in pages] == []


def test_helpers_of_the_pages_work_as_they_say() -> None:
    import doctest

    modules = [run_pages]
    if find_spec("griffe") is not None:
        modules.append(importlib.import_module("docs.docstrings"))
    for module in modules:
        found = doctest.testmod(module)
        assert found.attempted > 0
        assert found.failed == 0


def test_an_output_is_compared_in_words() -> None:
    assert run_pages.masked("NLL 0.151*  (3 of 4)\n---\n") == run_pages.masked("NLL 1.5e-01 (33 of 40)\n")
    assert run_pages.masked("accuracy 0.9") != run_pages.masked("precision 0.9")


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build = pytest.importorskip("mkdocs.commands.build", reason="mkdocs is not installed")
    pytest.importorskip("mkdocstrings")
    from mkdocs.config import load_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"))
        config.plugins.on_startup(command="build", dirty=False)
        build.build(config)  # strict: raises on any warning
    assert (tmp_path / "site" / "reference" / "laplace.html").stat().st_size > 100_000
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "fonts.googleapis" not in page
    for name in ("mathematics/structures.html", "reference/optim.html"):
        page = (tmp_path / "site" / name).read_text(encoding="utf-8")
        assert 'class="arithmatex"' in page
        assert "javascripts/katex.min.js" in page


def test_quickstart_runs_and_helps() -> None:
    state = torch.random.get_rng_state()
    try:
        names = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
        with warnings.catch_warnings():
            # After a few epochs the network is not yet overconfident, and the grid's edge (no uncertainty) is right.
            warnings.simplefilter("ignore", StatisticalWarning)
            numbers = names["main"](["--epochs", "6"])
    finally:
        torch.random.set_rng_state(state)
    assert numbers["accuracy"] > 0.9
    assert numbers["nll"] < numbers["nll_network"] + 0.02


def test_the_reference_of_the_command_line_is_that_of_the_commands() -> None:
    pytest.importorskip("typer")
    from docs import command_reference

    assert command_reference.PAGE.read_text(encoding="utf-8") == command_reference.page(), (
        "the commands have changed: python docs/command_reference.py"
    )


@pytest.mark.parametrize("name", make_notebooks.TUTORIALS)
def test_a_notebook_is_its_tutorial(name: str) -> None:
    """The code of a tutorial is run by `test_page`; a notebook must hold that code, no more and no less."""
    stored = (make_notebooks.FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert stored == make_notebooks.notebook(name), "the tutorials have changed: python -m docs.make_notebooks"
    cells = json.loads(stored)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code == [block.code.rstrip("\n") for block in run_pages.blocks_of(text_of(f"tutorials/{name}.md"))]
    assert f"tutorials/{name}.md" in PAGES
    assert len({cell["id"] for cell in cells}) == len(cells)
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", "".join(line for cell in cells for line in cell["source"])):
        assert (make_notebooks.FOLDER / link).exists(), link


def test_the_gallery_shows_what_there_is() -> None:
    assert make_gallery.PAGE.read_text(encoding="utf-8") == make_gallery.page(), (
        "examples, experiments or pictures have changed: python -m docs.make_gallery"
    )
    shown = re.findall(r"\]\((images/[^)]+)\)", make_gallery.page())
    assert len(shown) >= len(make_gallery.PICTURES)
    assert all((DOCS / picture).is_file() for picture in shown)


@pytest.mark.parametrize(
    "page", [p for p in sorted((DOCS / "reference").glob("*.md")) if "      members:\n" in p.read_text()]
)
def test_a_reference_page_with_an_order_leaves_nothing_out(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (unit,) = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    listed = re.findall(r"^        - (\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(importlib.import_module(unit).__all__)
