"""A model as a graph of operations with their values: what the recursion of KFRA walks over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import InputError, UnsupportedError

__all__ = ["Values", "describe", "downstream_of", "function_of", "run", "trace"]


@dataclass(frozen=True)
class Values:
    """What every node computed in one forward pass.

    Attributes:
        results: node -> its result.
        inputs: node -> copies of the tensors it was given, taken before the node could write into them.
    """

    results: dict[fx.Node, Any]
    inputs: dict[fx.Node, dict[fx.Node, Tensor]]


def trace(model: nn.Module) -> fx.Graph:
    """The graph of a model in which torch's own layers are leaves.

    Raises:
        UnsupportedError: torch.fx cannot follow the model's Python code.

    >>> [node.op for node in trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU())).nodes]
    ['placeholder', 'call_module', 'call_module', 'output']
    """
    try:
        return fx.Tracer().trace(model)
    except Exception as error:  # whatever the user's code raises when it meets a symbolic value
        raise UnsupportedError(
            f"torch.fx cannot trace {type(model).__name__} ({type(error).__name__}: {error}). KFRA needs a model "
            "without control flow that depends on tensors; use structure='kron' otherwise"
        ) from error


def run(graph: fx.Graph, model: nn.Module, inputs: Any) -> Values:
    """Run the graph with inputs (a tensor, a tuple or a mapping) and keep all results."""
    placeholders = _bind(graph, inputs)
    results: dict[fx.Node, Any] = {}
    kept: dict[fx.Node, dict[fx.Node, Tensor]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            results[node] = placeholders[node]
        elif node.op == "get_attr":
            results[node] = _attribute(model, node.target)
        elif node.op != "output":
            kept[node] = {n: results[n].clone() for n in node.all_input_nodes if isinstance(results[n], Tensor)}
            args, kwargs = _arguments(node, results)
            results[node] = _callable(node, model)(*args, **kwargs)
    return Values(results, kept)


def function_of(node: fx.Node, source: fx.Node, values: Values, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A node as a function of one of its inputs, with the others as they were."""
    call = _callable(node, model)
    known = {**values.results, **values.inputs[node]}

    def function(x: Tensor) -> Tensor:
        # A copy, because the node may work in place.
        args, kwargs = _arguments(node, {**known, source: x.clone()})
        return call(*args, **kwargs)

    return function


def downstream_of(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The given nodes and everything computed from them: where curvature has to travel."""
    found = set(nodes)
    for node in graph.nodes:
        if any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def describe(node: fx.Node, model: nn.Module) -> str:
    """A node in words, for messages."""
    if node.op == "call_module":
        return f"{type(model.get_submodule(str(node.target))).__name__} {str(node.target)!r}"
    if node.op == "call_function":
        return f"function {getattr(node.target, '__name__', node.target)} (node {node.name!r})"
    if node.op == "call_method":
        return f"method .{node.target}() (node {node.name!r})"
    return f"{node.op} {node.name!r}"


def _callable(node: fx.Node, model: nn.Module) -> Callable[..., Any]:
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    if node.op == "call_method":
        name = str(node.target)
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    if callable(node.target):
        return node.target
    raise UnsupportedError(f"KFRA does not know what to do with {describe(node, model)}")


def _arguments(node: fx.Node, results: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
    args = fx.node.map_arg(node.args, lambda n: results[n])
    kwargs = fx.node.map_arg(node.kwargs, lambda n: results[n])
    return args, kwargs


def _attribute(model: nn.Module, target: Any) -> Any:
    value: Any = model
    for part in str(target).split("."):
        value = getattr(value, part)
    return value.detach() if isinstance(value, Tensor) else value


def _bind(graph: fx.Graph, inputs: Any) -> dict[fx.Node, Any]:
    """Which placeholder gets which input."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    if isinstance(inputs, Mapping):
        given = {node: inputs[node.target] for node in nodes if node.target in inputs}
    else:
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        given = dict(zip(nodes, values, strict=False))
        if len(values) > len(nodes):
            raise InputError(f"got {len(values)} inputs; the model takes {[str(n.target) for n in nodes]}")
    for node in nodes:
        if node not in given:
            if not node.args:
                raise InputError(f"the model's input {str(node.target)!r} is missing; got {len(given)} inputs")
            given[node] = node.args[0]
    return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
