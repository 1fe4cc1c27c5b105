"""Small errors for a source file: a sign, a factor, a transposed matrix, a limit, a term that is left out.

A mutation is found again by its name alone: the file, the function, the operator, and its number among those of this operator
in the function.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["BY_HAND", "OPERATORS", "Mutation", "mutate", "mutations_of"]

_SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_LIMITS: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_TRANSPOSED = ("T", "mT")
_DROPPED_CALLS = ("sqrt", "square", "square_", "rsqrt", "exp", "log", "transpose", "cumsum", "flip", "abs", "log1p")
# A message is no number, and a test that compares words is not wanted.
_SKIPPED = (ast.Raise, ast.JoinedStr, ast.Assert, ast.AnnAssign, ast.Import, ast.ImportFrom)


BY_HAND = "by hand"  # The operator of a mutation whose text before and after somebody wrote.


@dataclass(frozen=True)
class Mutation:
    """One error.

    Attributes:
        file: The path of the file below src/aftermap.
        function: The function that it is in, with its class.
        operator: One of `OPERATORS`, or `BY_HAND`; then the function is a name for it.
        number: Its number among those of this operator in the function.
        line: The line in the file as it is now, for people.
        before: The expression.
        after: The expression that takes its place.
    """

    file: str
    function: str
    operator: str
    number: int
    line: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """What finds the mutation again."""
        return f"{self.file}:{self.function}:{self.operator}:{self.number}"


def _sign_or_factor(node: ast.AST) -> ast.AST | None:
    """Adds instead of subtracting, multiplies instead of dividing, and the other way round."""
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        return ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        return node.operand
    return None


def _dropped_term(node: ast.AST) -> ast.AST | None:
    """Leaves out the second term of a sum, or what is added in place."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return node.left
    if isinstance(node, ast.AugAssign):
        return ast.Pass()
    return None


def _number(node: ast.AST) -> ast.AST | None:
    """Takes another number: one half becomes one, and every other one is one more."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return ast.Constant(1.0 if node.value == 0.5 else node.value + 1)
    return None


def _limit(node: ast.AST) -> ast.AST | None:
    """Moves a limit by one: less becomes less or equal, and the other way round."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _LIMITS:
        return ast.Compare(node.left, [_LIMITS[type(node.ops[0])]()], node.comparators)
    return None


def _transposed(node: ast.AST) -> ast.AST | None:
    """Forgets to transpose, or multiplies two matrices in the other order."""
    if isinstance(node, ast.Attribute) and node.attr in _TRANSPOSED:
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return ast.BinOp(node.right, ast.MatMult(), node.left)
    return None


def _dropped_call(node: ast.AST) -> ast.AST | None:
    """Forgets a root, a square, a logarithm or a permutation."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _DROPPED_CALLS:
        owner = node.func.value
        return node.args[0] if isinstance(owner, ast.Name) and owner.id in ("torch", "math") and node.args else owner
    return None


OPERATORS: dict[str, Callable[[ast.AST], ast.AST | None]] = {
    "sign or factor": _sign_or_factor,
    "dropped term": _dropped_term,
    "number": _number,
    "limit": _limit,
    "transposed": _transposed,
    "dropped call": _dropped_call,
}


@dataclass(frozen=True)
class _Place:
    """A node inside a function, and where it hangs in the tree.

    Attributes:
        function: The function that it is in, with its class.
        node: The node.
        parent: The node that it hangs on.
        field: The field of the parent.
        place: Its place in the field, where that is a list.
        is_memory: Whether it belongs to a number of examples that go at once into the working memory: no result depends on it.
    """

    function: str
    node: ast.AST
    parent: ast.AST
    field: str
    place: int | None
    is_memory: bool


def _places(tree: ast.Module) -> Iterator[_Place]:
    """Every node inside a function."""

    def walk(node: ast.AST, function: str, inside: bool, is_memory: bool) -> Iterator[_Place]:
        for field, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            for place, child in enumerate(children):
                if not isinstance(child, ast.AST) or isinstance(child, _SKIPPED):
                    continue
                # Annotations, defaults and decorators are no arithmetic of the function.
                if field in ("annotation", "returns", "decorator_list", "args") and isinstance(
                    node, ast.FunctionDef | ast.ClassDef | ast.arg
                ):
                    continue
                if isinstance(child, ast.Call) and _is_warning(child):
                    continue
                names = ast.FunctionDef | ast.ClassDef
                below = f"{function}.{child.name}".lstrip(".") if isinstance(child, names) else function
                within = inside or isinstance(child, ast.FunctionDef)
                memory = is_memory or _is_of_memory(child)
                if inside:
                    yield _Place(function, child, node, field, place if isinstance(value, list) else None, memory)
                yield from walk(child, below, within, memory)

    return walk(tree, "", False, False)


def _is_of_memory(node: ast.AST) -> bool:
    """Tells whether a call says how many examples go at once: `examples_per_chunk`, or max(1, SOME_NUMBERS // of each)."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id == "examples_per_chunk":
        return True
    shares = (
        n.left for a in node.args for n in ast.walk(a) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.FloorDiv)
    )
    return node.func.id == "max" and any(isinstance(n, ast.Name) and n.id.endswith("_NUMBERS") for n in shares)


def _is_warning(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return "warn" in name or "Error" in name


def _is_text(node: ast.AST) -> bool:
    """Tells whether an expression is surely a text, or a statement appends one: what a message says is not arithmetic."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) or _is_text(node.orelse)
    if isinstance(node, ast.AugAssign):
        return _is_text(node.value)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def mutations_of(source: str, file: str) -> list[Mutation]:
    """Every mutation of a source, but for those of its working memory and of its messages.

    >>> [m.after for m in mutations_of("def f(a, b):\\n    return 0.5 * a - b", "f.py")]
    ['0.5 * a + b', '0.5 * a', '0.5 / a', '1.0']
    >>> mutations_of("def f(a):\\n    return examples_per_chunk(2 * a), max(1, _NUMBERS // (3 * a))", "f.py")
    []
    >>> mutations_of("def f(a):\\n    text = 'so ' + a\\n    text += f', {a}' if a else ''\\n    return text", "f.py")
    []
    """
    tree = ast.parse(source)
    count: Counter[tuple[str, str]] = Counter()
    found = []
    for place in _places(tree):
        for operator, change in OPERATORS.items():
            after = change(place.node)
            if after is None:
                continue
            number = count[place.function, operator]
            count[place.function, operator] += 1
            if place.is_memory or _is_text(place.node):
                continue
            texts = (ast.unparse(ast.fix_missing_locations(copy.deepcopy(n))) for n in (place.node, after))
            found.append(Mutation(file, place.function, operator, number, getattr(place.node, "lineno", 0), *texts))
    return found


def mutate(source: str, mutation: Mutation) -> str:
    """The source with one mutation in it.

    >>> source = "def f(a, b):\\n    return 0.5 * a - b"
    >>> print(mutate(source, mutations_of(source, "f.py")[0]))
    def f(a, b):
        return 0.5 * a + b
    """
    if mutation.operator == BY_HAND:
        if source.count(mutation.before) != 1:
            raise LookupError(
                f"{mutation.name}: {mutation.before!r} is {source.count(mutation.before)} times in the source, not once"
            )
        return source.replace(mutation.before, mutation.after)
    tree = ast.parse(source)
    number = 0
    for place in _places(tree):
        if place.function != mutation.function:
            continue
        after = OPERATORS[mutation.operator](place.node)
        if after is None:
            continue
        if number == mutation.number:
            if place.place is None:
                setattr(place.parent, place.field, after)
            else:
                getattr(place.parent, place.field)[place.place] = after
            return ast.unparse(ast.fix_missing_locations(tree))
        number += 1
    raise LookupError(f"{mutation.name} is not in the source any more")
