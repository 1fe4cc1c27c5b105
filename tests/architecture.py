"""The rules of the code base, each a function of a parsed source that returns the problems it finds."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator

__all__ = [
    "LAYERS",
    "MAX_LINES",
    "check_all_defined",
    "check_distributed",
    "check_hooks",
    "check_imports",
    "check_length",
    "check_no_pickle",
    "check_no_print",
    "check_references",
    "check_tests_assert",
    "imported_modules",
    "unit_of",
]

MAX_LINES = 600

# A unit imports only from layers to its left. Units of one brace (one tuple) never import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("lazy", "checks", "writing"),
    ("progress",),
    ("distributed",),
    ("linalg", "draws"),
    ("krylov",),
    ("params",),
    ("likelihoods", "prior"),
    ("batches",),
    ("models",),
    ("metrics",),
    ("data",),
    ("curvature",),
    ("posteriors",),
    ("predictive",),
    ("laplace", "hessian_free", "optim", "baselines"),
    ("evaluation",),
    ("applications",),
    ("analysis",),
    ("integrations", "cli"),
    ("testing",),
)
# The same inside a large unit: files and folders of it. The last of curvature only pass on names for one release.
ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "curvature": (
        ("rules", "reference"),
        ("passes",),
        ("structures",),
        ("fit",),
        ("layers", "rows"),
    )
}
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}
ROOM_RANK = {unit: {room: rank for rank, layer in enumerate(rooms) for room in layer} for unit, rooms in ROOMS.items()}
ONLY_FROM = {"data": {"errors", "lazy", "checks", "progress"}}
# The last units may use the package as its users do; for the others that is an edge to everything.
MAY_IMPORT_PACKAGE = {"integrations", "cli", "testing"}
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
HOOK = re.compile(r"register_(\w+_)?hooks?")
ASSERTING_CALL = re.compile(r"raises|warns|fail|assert\w*|check_\w+")


def unit_of(module: str) -> str:
    """`aftermap.curvature.fit` -> `curvature`; the package itself -> ``; `aftermap.__main__` -> `cli`."""
    parts = module.split(".")
    unit = parts[1] if len(parts) > 1 else ""
    return "cli" if unit == "__main__" else unit


def imported_modules(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) for every import, also relative ones and those inside functions."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                # `from aftermap import linalg` and `from . import linalg` name the unit last.
                yield node.lineno, ".".join([*base, alias.name])
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def check_imports(tree: ast.AST, module: str, *, is_package: bool = False) -> list[str]:
    """Import direction of one library module."""
    unit = unit_of(module)
    if unit == "":
        return []
    if unit not in RANK:
        return [f"{module}: unit {unit!r} has no place in LAYERS of tests/architecture.py; add it"]
    problems = []
    for line, target in imported_modules(tree, module, is_package=is_package):
        if target.split(".")[0] != "aftermap":
            continue
        other = unit_of(target)
        where = f"{module}:{line}: {unit} imports {target}"
        if other == unit:
            problems += _check_rooms(module, target, where)
            continue
        if other not in RANK:
            if unit not in MAY_IMPORT_PACKAGE:
                problems.append(f"{where}: import the unit that owns the name, not the package")
        elif unit in ONLY_FROM and other not in ONLY_FROM[unit]:
            problems.append(f"{where}: {unit} may import only {sorted(ONLY_FROM[unit])}")
        elif RANK[other] == RANK[unit]:
            problems.append(f"{where}: units of one brace never import each other")
        elif RANK[other] > RANK[unit]:
            problems.append(f"{where}: a back edge; {other} is to the right of {unit}")
    return problems


def _check_rooms(module: str, target: str, where: str) -> list[str]:
    """Import direction between two modules of one unit."""
    unit, room, other = unit_of(module), *(".".join(name.split(".")[2:3]) for name in (module, target))
    ranks = ROOM_RANK.get(unit, {})
    if not ranks or room in ("", other):
        return []
    if room not in ranks:
        return [f"{module}: {room!r} has no place in ROOMS of tests/architecture.py; add it"]
    if other not in ranks:
        return [f"{where}: import the file that owns the name, not the package"]
    if ranks[other] == ranks[room]:
        return [f"{where}: rooms of one brace never import each other"]
    return [f"{where}: a back edge; {other} is to the right of {room}"] if ranks[other] > ranks[room] else []


def check_length(source: str) -> list[str]:
    """Files stay under MAX_LINES lines."""
    count = len(source.splitlines())
    return [] if count < MAX_LINES else [f"{count} lines; files stay under {MAX_LINES}: split it"]


def check_references(source: str, pages: Collection[str]) -> list[str]:
    """A comment refers to pages of the documentation that exist, never to a text outside the repository."""
    problems = []
    for number, line in enumerate(source.splitlines(), 1):
        if re.search(r"\b(MATH|DESIGN)( [\dW]|\.md)", line):
            problems.append(f"line {number} refers to a text outside the repository; name a page of docs/mathematics")
        missing = set(re.findall(r"\bdocs/[\w/]+\.md", line)) - set(pages)
        problems += [f"line {number} refers to {page}, which does not exist" for page in sorted(missing)]
    return problems


def check_all_defined(tree: ast.Module) -> list[str]:
    """A module says at its top level what is public."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return []
    return ["no __all__: list the public names"]


def check_tests_assert(tree: ast.Module) -> list[str]:
    """Every test function asserts, itself or through a function of the same file."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    asserting = {name for name, node in functions.items() if _asserts(node, set())}
    while True:
        more = {name for name, node in functions.items() if _asserts(node, asserting)}
        if more == asserting:
            break
        asserting = more
    problems = []
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in owner.body:
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
            if is_test and not _asserts(node, asserting):
                problems.append(f"line {node.lineno}: {node.name} asserts nothing")
    return problems


def _asserts(function: ast.AST, asserting: set[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = _called_name(node)
            if ASSERTING_CALL.fullmatch(name) or name in asserting:
                return True
    return False


def check_hooks(tree: ast.AST) -> list[str]:
    """Hooks are registered in one file only, which removes them again."""
    return _find(tree, lambda name: HOOK.fullmatch(name) is not None, "hooks belong in curvature/passes/record.py")


def check_distributed(tree: ast.AST) -> list[str]:
    """torch.distributed is used in one file only."""
    message = "torch.distributed belongs in distributed.py"
    problems = [
        f"line {line}: {target}: {message}"
        for line, target in imported_modules(tree, "", is_package=False)
        if target.split(".")[:2] == ["torch", "distributed"]
    ]
    torches = _names_bound_to(tree, "torch")
    for node in ast.walk(tree):
        is_distributed = isinstance(node, ast.Attribute) and node.attr == "distributed"
        if is_distributed and isinstance(node.value, ast.Name) and node.value.id in torches:
            problems.append(f"line {node.lineno}: {message}")
    return problems


def check_no_pickle(tree: ast.AST) -> list[str]:
    """Nothing that can run code while it loads."""
    problems = []
    for line, target in imported_modules(tree, "", is_package=False):
        if target.split(".")[0] in PICKLES:
            problems.append(f"line {line}: {target}: no pickle; save tensors as safetensors and the rest as JSON")
        elif target == "torch.load":
            problems.append(f"line {line}: call it as torch.load(..., weights_only=True)")
    torches = _names_bound_to(tree, "torch")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        constants = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "load":
            is_torch = isinstance(function.value, ast.Name) and function.value.id in torches
            if is_torch and constants.get("weights_only") is not True:
                problems.append(f"line {node.lineno}: torch.load without weights_only=True")
        if constants.get("allow_pickle") is True:
            problems.append(f"line {node.lineno}: allow_pickle=True")
    return problems


def check_no_print(tree: ast.AST) -> list[str]:
    """The library does not write to the screen."""
    return [
        f"line {node.lineno}: print belongs in the command line; warn, raise or return instead"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def _called_name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _names_bound_to(tree: ast.AST, module: str) -> set[str]:
    return {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == module or (alias.asname is None and alias.name.startswith(f"{module}."))
    }


def _find(tree: ast.AST, matches: Callable[[str], bool], message: str) -> list[str]:
    """Names in any role: attribute, variable, imported name, or text handed to getattr."""
    problems = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        problems += [f"line {node.lineno}: {name}: {message}" for name in names if matches(name)]  # type: ignore[attr-defined]
    return problems
