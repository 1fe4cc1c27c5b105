"""The last layer of a network, and its last block with the head, found by the order in which its modules run.

A *weight layer* is a module with a weight matrix: linear, convolution, embedding, attention (its projections together), or any
module without parts that owns a matrix. The *heads* are the weight layers whose outputs reach the network's outputs without
another one in between. A network made of blocks has modules of one class again and again: the *block* is the last of them
to run, and everything that runs from there on belongs to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from aftermap import checks
from aftermap.batches import Batch
from aftermap.curvature.passes.plan import ModelPlan, find_layers, on_one_example, run_recorded
from aftermap.curvature.passes.record import RecordedCall, record_modules, uses_in_graph
from aftermap.curvature.rules.base import find_rule
from aftermap.errors import InputError, UnsupportedError
from aftermap.models import call_model, check_modes, only_require_grad
from aftermap.params import describe_names, named_parameters

__all__ = ["LastBlock", "find_last_block", "find_last_layer", "last_block"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# So many weight layers may stand between the last block and the heads: a pooler, a last 1 × 1 convolution, hidden layers of a head.
_MOST_BETWEEN = 2


@dataclass(frozen=True)
class LastBlock:
    """What `last_block` found.

    Attributes:
        block: The module where the block begins.
        heads: The weight layers that make the outputs.
        names: All parameters that belong to it, in the model's order.
        words: The modules that hold these parameters, in words.
        is_module: Whether the block is a module with several layers, as in networks that are made of blocks; otherwise it is a single layer.
    """

    block: str
    heads: tuple[str, ...]
    names: tuple[str, ...]
    words: str
    is_module: bool = False

    def __str__(self) -> str:
        return self.words


def find_last_block(model: nn.Module, batch: Batch) -> list[str]:
    """Returns the names of the parameters of the last block and of all that runs after it, the head included; see `last_block`.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> find_last_block(net, Batch(torch.zeros(1, 2), None, None, 1))
    ['2.weight', '2.bias', '4.weight', '4.bias']
    """
    return list(last_block(model, batch).names)


def last_block(model: nn.Module, batch: Batch) -> LastBlock:
    """Returns the last block of a residual, convolutional or transformer network, with its head.

    In a network with modules of one class that each hold two weight layers or more (residual blocks, encoder layers), the
    block is the last of these to run. Parts that each block has once, such as its attention or its perceptron, are no
    blocks. In a plain network it is the last weight layer before the head. All parameters belong to it whose module runs
    for the first time when the block runs or later; a module that ran before, too, is left out, unless it is a head.

    Args:
        model: The network, in eval mode; it is unchanged afterwards.
        batch: Inputs, of which one example is run.

    Raises:
        InputError: No weight layer runs before the head; or a layer is in training mode whose outputs would be random or
            depend on other examples.
        UnsupportedError: It cannot be told which layer makes the outputs.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> print(last_block(net, Batch(torch.zeros(1, 2), None, None, 1)))
    2 and 4
    """
    check_modes(model)  # before the first forward pass, which would move BatchNorm's statistics
    names = [n for n, p in named_parameters(model).items() if p.is_floating_point()]
    with only_require_grad(model, names):
        order = on_one_example(batch, lambda one: _Order.of(model, one))
    before = order.before_heads()
    if not before:
        raise InputError(
            f"params='last_block' found no layer with a weight matrix before the head ({checks.few(order.heads, 3)}): there is "
            "no block. Use params='last_layer' or 'all'"
        )
    block = _block(order, before)
    names = order.names_from(order.first[block])
    is_module = not _is_weight_layer(order.modules[block])
    return LastBlock(block, tuple(order.heads), tuple(names), describe_names(model, names), is_module)


def _is_weight_layer(module: nn.Module) -> bool:
    """Tells whether a module has a weight matrix of its own. Attention is one layer with its projections."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    rule = find_rule(module)
    if rule is not None:
        return rule.matrix
    if any(True for child in module.children() for _ in child.parameters()):
        return False
    parameters = [p for p in module._parameters.values() if p is not None and p.is_floating_point()]
    return any(_is_matrix(p) for p in parameters)


def _is_matrix(parameter: Tensor) -> bool:
    return sum(length > 1 for length in parameter.shape) > 1


@dataclass(frozen=True)
class _Order:
    """The order in which the modules of a network ran on one example.

    Attributes:
        modules: The network's modules by path.
        used: The parameters that the outputs depend on -> the modules that own each of them.
        first: The place of a module's first call, or of the first call inside it.
        called: The paths of all modules that were called themselves.
        heads: The weight layers whose outputs reach the network's outputs without another one in between.
        layers: The weight layers that the outputs depend on, in the order of their last calls.
    """

    modules: Mapping[str, nn.Module]
    used: Mapping[str, Sequence[str]]
    first: Mapping[str, int]
    called: frozenset[str]
    heads: Sequence[str]
    layers: Sequence[str]

    @staticmethod
    def of(model: nn.Module, batch: Batch) -> _Order:
        """Runs the network on a batch; every floating-point parameter requires a gradient."""
        with record_modules(model) as calls:
            outputs = call_model(model, batch.inputs)
        if outputs.grad_fn is None:
            raise InputError(
                "params='last_block': the outputs depend on no parameter; is part of the forward pass under torch.no_grad()?"
            )
        modules = dict(model.named_modules())
        attention = tuple(f"{n}." if n else "" for n, m in modules.items() if isinstance(m, nn.MultiheadAttention))
        weights = [c for c in calls if _is_weight_layer(c.module) and not c.path.startswith(attention)]
        weights += [c for c in calls if isinstance(c.module, nn.MultiheadAttention) and c.path == ""]
        heads, leaves = _reached(outputs.grad_fn, {node for c in weights for node in c.nodes})
        _check_leaves(model, leaves)
        behind, _ = _reached(outputs.grad_fn, set())
        last = {c.path: place for place, c in enumerate(weights) if not behind.isdisjoint(c.nodes)}
        first: dict[str, int] = {}
        for place, call in enumerate(calls):
            for path in _upwards(call.path):
                first.setdefault(path, place)
        return _Order(
            modules,
            _owners(modules, uses_in_graph(outputs, named_parameters(model))),
            first,
            frozenset(c.path for c in calls),
            list(dict.fromkeys(c.path for c in weights if not heads.isdisjoint(c.nodes))),
            sorted(last, key=last.__getitem__),
        )

    def before_heads(self) -> list[str]:
        """Returns the weight layers that are no heads, in the order in which they ran."""
        return [path for path in self.layers if path not in self.heads]

    def holds(self, path: str) -> list[str]:
        """Returns the weight layers within a module."""
        return [layer for layer in self.layers if path in _upwards(layer)]

    def is_large(self, path: str) -> bool:
        """Tells whether a module holds two weight layers or more, and no head."""
        members = self.holds(path)
        return path != "" and len(members) > 1 and not set(members) & set(self.heads)

    def names_from(self, start: int) -> list[str]:
        """Returns the parameters whose modules run for the first time at a place or later, and those of the heads."""
        names = []
        for name, owners in self.used.items():
            # A parameter of a module that is never called is used by the nearest module around it that is.
            users = [next(p for p in _upwards(owner) if p in self.called) for owner in owners]
            if any(user in self.heads for user in users) or all(self.first[user] >= start for user in users):
                names.append(name)
        return names


def _upwards(path: str) -> list[str]:
    """Returns a path and those of all modules around it, the innermost first.

    >>> _upwards("layer3.2")
    ['layer3.2', 'layer3', '']
    """
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _owners(modules: Mapping[str, nn.Module], uses: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns for each used parameter the paths of all modules that own it."""
    owners: dict[int, list[str]] = {}
    for path, module in modules.items():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(path)
    parameters = named_parameters(modules[""])
    return {name: owners[id(parameters[name])] for name, count in uses.items() if count}


def _reached(start: Node, ends: set[Node]) -> tuple[set[Node], list[Tensor]]:
    """Returns the nodes of a graph up to some ends, these included, and the leaves that are not behind them."""
    seen, stack, leaves = {start}, [start], []
    while stack:
        node = stack.pop()
        if node in ends:
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        stack += new
    return seen, leaves


def _check_leaves(model: nn.Module, leaves: Sequence[Tensor]) -> None:
    """Raises where the outputs use a weight matrix that is not the layer's whose call made them: the true head has no call."""
    between = {id(leaf) for leaf in leaves}
    for path, module in model.named_modules():
        rule = find_rule(module)
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in between or (rule is not None and not rule.matrix):
                continue
            if _is_matrix(parameter):
                raise UnsupportedError(
                    f"params='last_block': the outputs use {path}{'.' if path else ''}{name} directly, not through a call of the "
                    "layer that owns it, so the head cannot be told. Name the parameters with params=[...]"
                )


def _block(order: _Order, before: Sequence[str]) -> str:
    """Returns the module where the last block begins."""
    large = [path for path in order.modules if order.is_large(path)]
    kinds = Counter(_kind(order, path) for path in large if not isinstance(order.modules[path], _CONTAINERS))
    for layer in reversed(before[-1 - _MOST_BETWEEN :]):
        around = [p for p in _upwards(layer) if p in large and not isinstance(order.modules[p], _CONTAINERS)]
        counts = [kinds[_kind(order, path)] for path in around]
        for place, count in enumerate(counts):
            if count > 1 or isinstance(order.modules[around[place]], _TRANSFORMER_LAYERS):
                # A part that each block has once is no block: the blocks are as many as their parts.
                while place + 1 < len(counts) and counts[place + 1] == count > 1:
                    place += 1
                return around[place]
    return _plain_block(order, before, large)


def _kind(order: _Order, path: str) -> type[nn.Module]:
    return type(order.modules[path])


def _plain_block(order: _Order, before: Sequence[str], large: Sequence[str]) -> str:
    """Returns the block of a network without modules of one class: a module that holds nothing but layers, or the last layer."""
    simple = [p for p in large if not any(q != p and p in _upwards(q) for q in large)]
    last = before[-1]
    inner = next((path for path in _upwards(last) if path in simple), last)
    # One that holds all layers is the trunk of a plain network.
    return last if set(before) <= set(order.holds(inner)) else inner


def find_last_layer(model: nn.Module, batch: Batch) -> list[str]:
    """Returns the names of the parameters of the last layer with a weight matrix.

    It is the layer whose output is returned as it is; failing that (a reshape or a scale follows), the last one called.

    Raises:
        UnsupportedError: No layer with a weight matrix was called, or the outputs come from several such layers.
        InputError: A layer is in training mode whose outputs would be random or depend on other examples.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> find_last_layer(net, Batch(torch.zeros(1, 2), None, None, 1))
    ['2.weight', '2.bias']
    """
    check_modes(model)  # This comes before the first forward pass, which would move BatchNorm's statistics.
    names = [n for n, p in named_parameters(model).items() if p.is_floating_point()]
    plan = find_layers(model, names)
    with only_require_grad(model, names):
        outputs, calls = on_one_example(batch, lambda one: run_recorded(model, plan, one))
    matrix = [c for c in calls if plan.layers[c.layer].rule.matrix]
    if not matrix:
        raise UnsupportedError(
            "params='last_layer' found no layer with a weight matrix in the forward pass; name the parameters with params=[...]"
        )
    edge = get_gradient_edge(outputs)
    last = next((c for c in matrix if c.edge == edge), matrix[-1])
    if last.edge != edge:
        _check_all_outputs_depend_on(last, outputs, plan)
    return list(plan.layers[last.layer].layout.names)


def _check_all_outputs_depend_on(call: RecordedCall, outputs: Tensor, plan: ModelPlan) -> None:
    """Raises an error where a layer is one of several heads: the variance of the other outputs would be zero, without a word."""
    units = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
    heads = [u.expand_as(outputs) for u in units]
    gradients = [torch.autograd.grad(outputs, call.edge, h, retain_graph=True, allow_unused=True)[0] for h in heads]
    independent = [c for c, g in enumerate(gradients) if g is None or not bool(g.any())]
    if 0 < len(independent) < len(units):
        raise UnsupportedError(
            f"params='last_layer' found {plan.layers[call.layer].name}, but outputs {independent[:5]} of {len(units)} do not "
            "depend on it: the network has several heads. Name the parameters of all of them with params=[...]"
        )
