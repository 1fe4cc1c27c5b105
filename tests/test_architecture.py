"""The code base obeys its rules, and every rule is shown able to fail."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from tests.architecture import (
    LAYERS,
    MAX_LINES,
    check_all_defined,
    check_distributed,
    check_hooks,
    check_imports,
    check_length,
    check_no_pickle,
    check_no_print,
    check_references,
    check_tests_assert,
    unit_of,
)

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "aftermap"
LIBRARY = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = [path for name in ("examples", "benchmarks", "experiments") for path in sorted((ROOT / name).rglob("*.py"))]
DESIGNED_UNITS = {unit for layer in LAYERS for unit in layer}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def problems_in(
    paths: list[Path],
    check: Callable[[ast.Module], list[str]],
    exempt: Callable[[str], bool] = lambda _: False,
) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in paths
        if not exempt(path.relative_to(ROOT).as_posix())
        for problem in check(parse(path))
    ]


def in_cli(path: str) -> bool:
    return path.startswith("src/aftermap/cli/") or path == "src/aftermap/__main__.py"


# The code base.


def test_the_package_and_its_tests_are_found() -> None:
    assert PACKAGE / "errors.py" in LIBRARY
    assert Path(__file__).resolve() in TESTS


def test_imports_go_one_way() -> None:
    problems = []
    for path in LIBRARY:
        problems += check_imports(parse(path), module_name(path), is_package=path.name == "__init__.py")
    assert problems == []


def test_links_to_the_right_are_few_and_known() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), node.args[0].value)
        for path in LIBRARY
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lazy_attribute"
        if isinstance(node.args[0], ast.Constant)
    }
    assert found == {
        ("evaluation/results.py", "aftermap.analysis.report"),
        ("predictive/predictor.py", "aftermap.analysis.where"),
        ("predictive/trained.py", "aftermap.laplace.trained"),
    }


def test_files_are_short() -> None:
    problems = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in LIBRARY + TESTS + SCRIPTS
        for problem in check_length(path.read_text(encoding="utf-8"))
    ]
    assert problems == []


def test_references_are_to_pages_of_the_documentation() -> None:
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    texts = LIBRARY + TESTS + SCRIPTS + sorted((ROOT / "docs").rglob("*.md"))
    problems = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in texts
        if path != Path(__file__).resolve()
        for problem in check_references(path.read_text(encoding="utf-8"), pages)
    ]
    assert problems == []


def test_every_module_lists_its_public_names() -> None:
    assert problems_in(LIBRARY, check_all_defined, lambda path: path.endswith("/__main__.py")) == []


def test_every_test_asserts() -> None:
    paths = [path for path in TESTS if path.name.startswith("test_")]
    assert problems_in(paths, check_tests_assert) == []


def test_hooks_only_where_calls_are_recorded() -> None:
    assert problems_in(LIBRARY, check_hooks, lambda path: path.endswith("aftermap/curvature/passes/record.py")) == []


def test_torch_distributed_only_in_distributed() -> None:
    assert problems_in(LIBRARY, check_distributed, lambda path: path.endswith("aftermap/distributed.py")) == []


def test_no_pickle() -> None:
    assert problems_in(LIBRARY + SCRIPTS, check_no_pickle) == []


def test_no_print_in_the_library() -> None:
    assert problems_in(LIBRARY, check_no_print, in_cli) == []


# The rules themselves.


@pytest.mark.parametrize(
    "module, unit",
    [
        ("aftermap", ""),
        ("aftermap.errors", "errors"),
        ("aftermap.curvature.fit", "curvature"),
        ("aftermap.__main__", "cli"),
    ],
)
def test_unit_of(module: str, unit: str) -> None:
    assert unit_of(module) == unit


BACK_EDGES = [
    ("aftermap.linalg", "import aftermap.curvature", "a back edge"),
    ("aftermap.linalg", "from aftermap.curvature.structures.kron import Kron", "a back edge"),
    ("aftermap.linalg", "from aftermap import laplace", "a back edge"),
    ("aftermap.linalg", "from .posteriors import base", "a back edge"),
    ("aftermap.linalg", "from . import predictive", "a back edge"),
    ("aftermap.linalg", "def f():\n    from aftermap.params import select", "a back edge"),
    ("aftermap.errors", "from aftermap.progress import progress", "a back edge"),
    ("aftermap.curvature.fit", "from ..posteriors.base import Posterior", "a back edge"),
    ("aftermap.curvature.fit", "if TYPE_CHECKING:\n    from aftermap.optim import VOGN", "a back edge"),
    ("aftermap.curvature.fit", "importlib.import_module('aftermap.laplace')", "a back edge"),
    ("aftermap.curvature.rules.base", "from aftermap.curvature.passes.plan import Site", "right of rules"),
    ("aftermap.curvature.passes.plan", "from ..structures.kron import KronBlock", "right of passes"),
    ("aftermap.curvature.structures.kron", "from aftermap.curvature.fit import MAX_FULL", "right of structures"),
    ("aftermap.curvature.rules.base", "from aftermap.curvature import reference", "one brace"),
    ("aftermap.curvature.fit", "from aftermap.curvature import Block", "not the package"),
    ("aftermap.curvature.kron", "from aftermap.curvature.rules import base", "has no place in ROOMS"),
    ("aftermap.laplace.laplace", "from aftermap.optim.vogn import VOGN", "one brace"),
    ("aftermap.optim.vogn", "from ..baselines import swag", "one brace"),
    ("aftermap.cli.main", "import aftermap.integrations.sklearn", "one brace"),
    ("aftermap.data.readers", "from aftermap.linalg import psd_eigh", "may import only"),
    ("aftermap.data.readers", "from aftermap.distributed import rank", "may import only"),
    ("aftermap.laplace.laplace", "from aftermap.testing import check_posterior", "a back edge"),
    ("aftermap.posteriors.io", "from aftermap import Laplace", "not the package"),
    ("aftermap.posteriors.io", "import aftermap", "not the package"),
    ("aftermap.utils", "import torch", "has no place in LAYERS"),
]


@pytest.mark.parametrize("module, source, message", BACK_EDGES)
def test_check_imports_finds(module: str, source: str, message: str) -> None:
    problems = check_imports(ast.parse(source), module)
    assert len(problems) == 1
    assert message in problems[0]
    assert module in problems[0]


@pytest.mark.parametrize(
    "module, source",
    [
        ("aftermap", "from aftermap.cli import main\nfrom . import laplace"),
        ("aftermap.curvature.structures.kron", "from .base import rule\nfrom aftermap.curvature import rules"),
        ("aftermap.curvature.structures.kron", "from aftermap.curvature.passes.plan import Site"),
        ("aftermap.curvature.structures.kron", "from ...linalg import psd_eigh\nfrom aftermap import errors"),
        ("aftermap.curvature", "from aftermap.curvature.fit import fit_curvature"),
        ("aftermap.likelihoods", "from aftermap.linalg import psd_eigh\nimport aftermap.errors as errors"),
        ("aftermap.data.readers", "from aftermap.errors import DataError\nfrom ..progress import progress"),
        ("aftermap.cli.fit", "import aftermap as am\nfrom aftermap import Laplace"),
        ("aftermap.testing.posterior", "from aftermap.integrations.sklearn import Classifier"),
        ("aftermap.linalg", "import aftermapping\nimport torch\nfrom math import pi"),
    ],
)
def test_check_imports_allows(module: str, source: str) -> None:
    assert check_imports(ast.parse(source), module) == []


def test_relative_imports_of_a_package_start_at_the_package() -> None:
    tree = ast.parse("from .predictive import x")
    assert check_imports(tree, "aftermap.curvature", is_package=True) == []
    assert len(check_imports(tree, "aftermap.curvature", is_package=False)) == 1


def test_check_length() -> None:
    assert check_length("x = 1\n" * (MAX_LINES - 1)) == []
    assert check_length("x = 1\n" * MAX_LINES) == ["600 lines; files stay under 600: split it"]


@pytest.mark.parametrize(
    "line, problems",
    [
        ("# the sum before the square: MATH 1.2", 1),
        ("# shares add up (MATH W4), see DESIGN.md", 1),
        ("# see docs/mathematics/nowhere.md", 1),
        ("# see docs/mathematics/layers.md", 0),
        ("with sdpa_kernel(SDPBackend.MATH):", 0),
    ],
)
def test_check_references(line: str, problems: int) -> None:
    assert len(check_references(f"x = 1\n{line}\n", {"docs/mathematics/layers.md"})) == problems


@pytest.mark.parametrize("source", ["__all__ = ['f']", "__all__: list[str] = []"])
def test_check_all_defined_allows(source: str) -> None:
    assert check_all_defined(ast.parse(source)) == []


@pytest.mark.parametrize("source", ["", "x = 1", "def f():\n    __all__ = []", "__all__: list[str]", "'__all__'"])
def test_check_all_defined_finds(source: str) -> None:
    assert check_all_defined(ast.parse(source)) == ["no __all__: list the public names"]


@pytest.mark.parametrize(
    "body",
    [
        "assert x == 3",
        "torch.testing.assert_close(x, y)",
        "assert_close(x, y)",
        "with pytest.raises(ValueError, match='m'): f()",
        "with pytest.warns(UserWarning, match='m'): f()",
        "check_posterior(posterior)",
        "testing.check_layer_rule(rule)",
        "for x in y:\n        assert x",
        "helper(x)",
        "outer_helper(x)",
    ],
)
def test_check_tests_assert_allows(body: str) -> None:
    source = "def helper(x):\n    assert x\n\ndef outer_helper(x):\n    helper(x)\n"
    assert check_tests_assert(ast.parse(f"{source}\ndef test_a():\n    {body}\n")) == []


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "x == 3",
        "torch.allclose(x, y)",
        "f(x)",
        "'assert x'",
        "print(x)",
        "harmless(x)",
        "recursive()",
    ],
)
def test_check_tests_assert_finds(body: str) -> None:
    source = "def harmless(x):\n    return x\n\ndef recursive():\n    recursive()\n"
    problems = check_tests_assert(ast.parse(f"{source}\ndef test_a():\n    {body}\n"))
    assert problems == ["line 7: test_a asserts nothing"]


def test_check_tests_assert_finds_methods_and_coroutines() -> None:
    source = """
    class TestThings:
        def test_method(self):
            f()

        def helper(self):
            pass

    async def test_later():
        f()
    """
    problems = check_tests_assert(ast.parse(dedent(source)))
    assert sorted(problem.split(": ")[1] for problem in problems) == [
        "test_later asserts nothing",
        "test_method asserts nothing",
    ]


FORBIDDEN = [
    (check_hooks, "module.register_forward_hook(f)"),
    (check_hooks, "tensor.register_hook(f)"),
    (check_hooks, "module.register_full_backward_pre_hook(f)"),
    (check_hooks, "from torch.nn.modules.module import register_module_forward_hook"),
    (check_hooks, "getattr(module, 'register_forward_hook')(f)"),
    (check_distributed, "import torch.distributed"),
    (check_distributed, "import torch.distributed.nn as dn"),
    (check_distributed, "from torch import distributed"),
    (check_distributed, "from torch.distributed import all_reduce"),
    (check_distributed, "import torch\ntorch.distributed.is_initialized()"),
    (check_distributed, "import torch as t\nt.distributed.is_initialized()"),
    (check_no_pickle, "import pickle"),
    (check_no_pickle, "from pickle import loads"),
    (check_no_pickle, "import joblib"),
    (check_no_pickle, "import torch\ntorch.load(path)"),
    (check_no_pickle, "import torch\ntorch.load(path, weights_only=False)"),
    (check_no_pickle, "import torch\ntorch.load(path, weights_only=choice)"),
    (check_no_pickle, "from torch import load"),
    (check_no_pickle, "np.load(path, allow_pickle=True)"),
    (check_no_print, "print(x)"),
    (check_no_print, "def f():\n    print()"),
]


@pytest.mark.parametrize("check, source", FORBIDDEN)
def test_rule_finds(check: Callable[[ast.Module], list[str]], source: str) -> None:
    assert len(check(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "check, source",
    [
        (
            check_hooks,
            "module.register_buffer('a', b)\nregister_rule(f)\n'we register_forward_hook in record'",
        ),
        (check_distributed, "from aftermap import distributed\ndistributed.all_reduce(x)"),
        (check_distributed, "import torch\ntorch.utils.data.distributed.DistributedSampler(d)"),
        (
            check_no_pickle,
            "import torch\ntorch.load(path, weights_only=True)\nnp.load(path, allow_pickle=False)",
        ),
        (check_no_pickle, "json.load(stream)\nself.load(path)"),
        (check_no_print, "console.print(x)\n'print(x)'"),
    ],
)
def test_rule_allows(check: Callable[[ast.Module], list[str]], source: str) -> None:
    assert check(ast.parse(source)) == []


def test_exemptions_are_narrow() -> None:
    assert in_cli("src/aftermap/cli/main.py")
    assert not in_cli("src/aftermap/client.py")
    assert {"errors", "curvature", "cli", "testing"} <= DESIGNED_UNITS
