"""KFRA: the output-side Kronecker factors by a recursion that passes back one averaged matrix.

Index legend: g group, o and p output features, t and s positions of a layer's output.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from aftermap.batches import unpack_batch
from aftermap.curvature.passes.backward import Accumulator, LayerGradients
from aftermap.curvature.passes.plan import WHOLE_MODEL, ModelPlan
from aftermap.curvature.passes.record import ForwardRecord
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.structures.assign import layer_accumulators
from aftermap.curvature.structures.base import Block, Structure, register_structure
from aftermap.curvature.structures.diagonal import DiagonalBlock
from aftermap.curvature.structures.eigenbasis import DAMPINGS
from aftermap.curvature.structures.full import FullBlock
from aftermap.curvature.structures.kron import KronAccumulator, KronBlock
from aftermap.errors import InputError, UnsupportedError
from aftermap.likelihoods import Likelihood
from aftermap.linalg import take_under
from aftermap.models import evaluating, unchanged_buffers, without_wrappers

__all__ = [
    "MAX_FEATURES",
    "KfraAccumulator",
    "Values",
    "describe",
    "downstream_of",
    "function_of",
    "kfra_factors",
    "run",
    "trace",
]

MAX_FEATURES = 8192
_CHUNK = 512  # This many rows of a matrix are pulled back at once.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ELEMENTWISE_MODULES: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Softplus, nn.Softsign, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Hardtanh,
    nn.Hardsigmoid, nn.Hardswish, nn.Softshrink, nn.Hardshrink, nn.Threshold,
)  # fmt: skip
_ELEMENTWISE_FUNCTIONS: set[Any] = {
    torch.relu, torch.relu_, torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.exp, F.relu, F.relu_,
    F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.softplus, F.softsign, F.sigmoid,
    F.logsigmoid, F.tanh, F.tanhshrink, F.hardtanh, F.hardsigmoid, F.hardswish, F.softshrink, F.hardshrink,
    F.threshold,
}  # fmt: skip
_ELEMENTWISE_METHODS = {"relu", "relu_", "tanh", "tanh_", "sigmoid", "sigmoid_", "sin", "cos", "exp"}
# These linear maps are the same for every example (in eval mode).
_LINEAR_MODULES: tuple[type[nn.Module], ...] = (
    nn.Linear, *_CONVOLUTIONS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.AvgPool1d,
    nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.Flatten, nn.Unflatten, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Dropout, nn.Dropout1d,
    nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity, nn.ZeroPad2d, nn.PixelShuffle,
    nn.PixelUnshuffle,
)  # fmt: skip
_LINEAR_FUNCTIONS: set[Any] = {
    torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.squeeze, torch.unsqueeze,
    torch.mean, torch.sum, torch.cat, torch.concat, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.dropout, F.pad, operator.getitem,
    operator.neg,
}  # fmt: skip
_LINEAR_METHODS = {
    "flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze", "mean", "sum",
    "contiguous", "clone",
}  # fmt: skip
# These are linear in each argument, as long as the other one does not depend on the network's wanted layers.
_SUMS: set[Any] = {operator.add, operator.iadd, operator.sub, torch.add, torch.sub, "add", "add_", "sub"}
# A product with a constant is linear; a product of two values of the network is not supported.
_PRODUCTS: set[Any] = {operator.mul, torch.mul, "mul"}
_QUOTIENTS: set[Any] = {operator.truediv, torch.div, "div"}
# These are differentiable per example, with another derivative for each.
_OTHER_MODULES: tuple[type[nn.Module], ...] = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.LayerNorm,
    nn.GroupNorm, nn.Softmax, nn.LogSoftmax,
)  # fmt: skip
_OTHER_FUNCTIONS: set[Any] = {
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.layer_norm, F.group_norm, F.softmax, torch.softmax,
}  # fmt: skip
_SIZES = (int, float, torch.Size, torch.dtype, torch.device)  # A graph may compute these from a tensor's form.
_IN_PLACE = {"relu_", "tanh_", "sigmoid_", "add_", torch.relu_, F.relu_, operator.iadd}


@dataclass(frozen=True)
class Values:
    """The values that every node computed in one forward pass.

    Attributes:
        results: The result of each node.
        inputs: For each node copies of the tensors it was given, taken before the node could write into them.
    """

    results: dict[fx.Node, Any]
    inputs: dict[fx.Node, dict[fx.Node, Tensor]]


def trace(model: nn.Module) -> fx.Graph:
    """Returns the graph of a model in which torch's own layers are leaves.

    Raises:
        UnsupportedError: The model's Python code is such that torch.fx cannot follow it.

    >>> [node.op for node in trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU())).nodes]
    ['placeholder', 'call_module', 'call_module', 'output']
    """
    try:
        return fx.Tracer().trace(model)
    except Exception as error:  # The user's code may raise anything when it meets a symbolic value.
        raise UnsupportedError(
            f"torch.fx cannot trace {type(model).__name__} ({type(error).__name__}: {error}). KFRA needs a model "
            "without control flow that depends on tensors; use structure='kron' otherwise"
        ) from error


def _shallow_copy(model: nn.Module) -> nn.Module:
    """Returns a model with the same modules and tensors, in which torch.fx may keep the constants that it meets."""
    copied = object.__new__(type(model))
    copied.__dict__.update(model.__dict__)
    return copied


def run(graph: fx.Graph, model: nn.Module, inputs: Any) -> Values:
    """Runs the graph with inputs (a tensor, a tuple or a mapping) and keeps all results."""
    placeholders = _bind(graph, inputs)
    results: dict[fx.Node, Any] = {}
    inputs_of: dict[fx.Node, dict[fx.Node, Tensor]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            results[node] = placeholders[node]
        elif node.op == "get_attr":
            results[node] = _attribute(model, node.target)
        elif node.op != "output":
            inputs_of[node] = {n: results[n].clone() for n in node.all_input_nodes if isinstance(results[n], Tensor)}
            args, kwargs = _arguments(node, results)
            results[node] = _callable(node, model)(*args, **kwargs)
    return Values(results, inputs_of)


def function_of(node: fx.Node, source: fx.Node, values: Values, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns a node as a function of one of its inputs, with the others as they were."""
    call = _callable(node, model)
    known = {**values.results, **values.inputs[node]}

    def function(x: Tensor) -> Tensor:
        # This is a copy, because the node may work in place.
        args, kwargs = _arguments(node, {**known, source: x.clone()})
        return call(*args, **kwargs)

    return function


def downstream_of(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the given nodes and everything computed from them: where curvature has to travel."""
    reached = set(nodes)
    for node in graph.nodes:
        if any(n in reached for n in node.all_input_nodes):
            reached.add(node)
    return reached


def describe(node: fx.Node, model: nn.Module) -> str:
    """Describes a node in words, for messages."""
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
    """Finds which placeholder gets which input."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    if isinstance(inputs, Mapping):
        values_of = {node: inputs[node.target] for node in nodes if node.target in inputs}
    else:
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        values_of = dict(zip(nodes, values, strict=False))
        if len(values) > len(nodes):
            raise InputError(f"got {len(values)} inputs; the model takes {[str(n.target) for n in nodes]}")
    for node in nodes:
        if node not in values_of:
            if not node.args:
                raise InputError(f"the model's input {str(node.target)!r} is missing; got {len(values_of)} inputs")
            values_of[node] = node.args[0]
    return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in values_of.items()}


@dataclass(frozen=True)
class _Walk:
    """One batch on its way through the graph.

    `batch` holds the values of all examples, `single` those of the first one alone: shapes written into the
    graph (`x.view(x.size(0), -1)`) fit a batch of one there, so that a matrix can be pulled back row by row.
    """

    model: nn.Module
    batch: Values
    single: Values
    weight: Tensor  # [N]
    limit: int

    @property
    def total(self) -> Tensor:
        return self.weight.sum()


def kfra_factors(
    model: nn.Module,
    inputs: Any,
    likelihood: Likelihood,
    targets: Tensor,
    module_names: Sequence[str],
    *,
    weight: Tensor | None = None,
    max_features: int = MAX_FEATURES,
) -> dict[str, Tensor]:
    """Returns the output-side factors of Linear and convolution layers for one batch of M examples.

    One matrix H, an average over the batch, goes back through the graph:
    output: H = (1/M) sum_n Lambda_n; Linear: W^T H W; elementwise phi: H * (1/M) sum_n b_n b_n^T with
    b_n = phi'(h_n) (E[B C B] = C * E[b b^T]); linear operations L: L^T H L; others with one input (max
    pooling, layer norm): (1/M) sum_n J_n^T H J_n. A sum passes H to each of its terms, and where a value is
    used several times the matrices are added. A layer's factor is B = M sum_t H[(., t), (., t)].

    Because averages are multiplied on the way, the result depends on how data are split into batches; it is
    exact (for the Gauss-Newton matrix) at batch size one without residual connections. With them the cross
    terms J_F^T H + H J_F of x + F(x) are dropped, as in the authors' code.

    Args:
        model: A network with outputs [N, ..., C] that torch.fx can trace; it runs in eval mode and is unchanged
            afterwards.
        inputs: A tensor, a tuple or a mapping with N examples.
        likelihood: The likelihood, which gives `hessian(outputs, targets) -> [N, ..., C, C]`.
        targets: The targets [N, ...].
        module_names: The names of the Linear and convolution layers wanted.
        weight: The number of copies of each datum [N] (M is their sum); None means one.
        max_features: The largest flattened feature size whose matrix is built.

    Returns:
        For each name its factor B: [1, O, O] for a Linear, [G, O/G, O/G] for a convolution with G groups.

    Raises:
        InputError: A module name is unknown or unused.
        UnsupportedError: An operation has no rule, features are above the limit, or the model cannot be traced.

    References:
        Botev, Ritter and Barber 2017; Ritter, Botev and Barber 2018, eq. (15)-(17) and appendices C and G.

    >>> from aftermap.likelihoods import Gaussian
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> kfra_factors(net, torch.ones(3, 2), Gaussian(1.0), torch.zeros(3, 1), ["2"])["2"]
    tensor([[[3.]]])
    """
    batch = unpack_batch((inputs, targets, weight))
    if batch.size == 0:
        raise InputError("got no examples; pass inputs whose first dimension is at least 1")
    with evaluating(model), unchanged_buffers(model), torch.no_grad():
        model = _shallow_copy(model)
        graph = trace(model)
        calls = _calls(graph, model, module_names)
        _check_independence(graph, model)
        needed = downstream_of(graph, [node for nodes in calls.values() for node in nodes])
        weights = torch.ones(batch.size) if batch.weight is None else batch.weight
        empty = not bool(weights.sum() > 0)  # If it is empty, the average is arbitrary and the sum is zero.
        walk = _Walk(
            model,
            run(graph, model, batch.inputs),
            run(graph, model, batch.take(torch.zeros(1, dtype=torch.long)).inputs),
            torch.ones_like(weights) if empty else weights,
            max_features,
        )
        matrices = _propagate(graph, walk, likelihood, batch.targets, needed)
        factors = {}
        for name, nodes in calls.items():
            parts = [_layer_factor(model.get_submodule(name), node, matrices[node], walk) for node in nodes]
            factors[name] = torch.stack(parts).sum(0) * (0.0 if empty else 1.0)
        return factors


def _calls(graph: fx.Graph, model: nn.Module, module_names: Sequence[str]) -> dict[str, list[fx.Node]]:
    """Finds the nodes at which each wanted layer is called."""
    modules = dict(model.named_modules(remove_duplicate=False))
    calls: dict[str, list[fx.Node]] = {}
    for name in module_names:
        if name not in modules:
            raise InputError(f"got module name {name!r}; the model has {[n for n in modules if n]}")
        layer = modules[name]
        if not isinstance(layer, (nn.Linear, *_CONVOLUTIONS)):
            raise UnsupportedError(
                f"module {name!r} is a {type(layer).__name__}; KFRA has factors for Linear and Conv1d to Conv3d"
            )
        nodes = [n for n in graph.nodes if n.op == "call_module" and modules[str(n.target)] is layer]
        if not nodes:
            raise InputError(f"module {name!r} is never called in the forward pass; choose another")
        calls[name] = nodes
    return calls


def _check_independence(graph: fx.Graph, model: nn.Module) -> None:
    """Checks that examples do not see one another: a batch norm without running statistics mixes them even in eval mode."""
    for node in graph.nodes:
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, _BATCH_NORMS) and module.running_mean is None:
            raise UnsupportedError(
                f"{describe(node, model)} has no running statistics, so the examples of a batch depend on one another; "
                "KFRA needs track_running_stats=True"
            )


def _propagate(
    graph: fx.Graph, walk: _Walk, likelihood: Likelihood, targets: Tensor, needed: set[fx.Node]
) -> dict[fx.Node, Tensor]:
    """Returns the averaged matrix [F, F] at the output of every node that is computed from a wanted layer."""
    matrices: dict[fx.Node, Tensor] = {}
    for node in reversed(graph.nodes):
        if node not in needed:
            continue
        if node.op == "output":
            source = node.args[0]
            if not isinstance(source, fx.Node):
                raise UnsupportedError("the model returns several values; KFRA needs one tensor [N, ..., C]")
            matrices[source] = _output_matrix(walk, source, likelihood, targets)
            continue
        if node not in matrices:
            # This is computed but without influence on the output.
            size = walk.batch.results[node][0].numel() if isinstance(walk.batch.results[node], Tensor) else 0
            matrices[node] = walk.weight.new_zeros(size, size)
            continue
        for source in node.all_input_nodes:
            if source in needed and not isinstance(walk.batch.results[source], _SIZES):
                _check_value(source, walk)
                H = _pull_back(node, source, matrices[node], walk, needed)
                matrices[source] = matrices[source] + H if source in matrices else H
    return matrices


def _output_matrix(walk: _Walk, source: fx.Node, likelihood: Likelihood, targets: Tensor) -> Tensor:
    """Returns (1/M) sum_n w_n Lambda_n over the flattened output; positions do not interact."""
    _check_value(source, walk)
    outputs = walk.batch.results[source]
    likelihood.check(outputs, targets)
    C = outputs.shape[-1]
    Lambda = likelihood.hessian(outputs, targets).reshape(len(outputs), -1, C, C)
    w = walk.weight.to(Lambda) / walk.total.to(Lambda)
    return torch.block_diag(*torch.einsum("n,nrcd->rcd", w, Lambda))


def _check_value(node: fx.Node, walk: _Walk) -> None:
    """Checks that a value is a tensor [N, ...] of a moderate size, since a matrix can travel only through such."""
    value, one = walk.batch.results[node], walk.single.results[node]
    what = describe(node, walk.model)
    if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != len(walk.weight) or len(one) != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UnsupportedError(
            f"{what} gives {got}; KFRA needs tensors [N, ...] with the {len(walk.weight)} examples in front"
        )
    if one.numel() > walk.limit:
        raise UnsupportedError(
            f"{what} has {one.numel():,} features per example; KFRA builds a matrix of that size squared. "
            f"At most {walk.limit:,} are allowed: raise max_features, or use structure='kron'"
        )


def _pull_back(node: fx.Node, source: fx.Node, H: Tensor, walk: _Walk, needed: set[fx.Node]) -> Tensor:
    """Returns the matrix at one input of a node from that at its output."""
    module = walk.model.get_submodule(str(node.target)) if node.op == "call_module" else None
    _check_in_place(node, module, walk)
    x = walk.batch.inputs[node][source]
    if type(module) is nn.Linear and x.dim() == 2:
        return module.weight.T @ H @ module.weight
    if _is(node, module, _ELEMENTWISE_MODULES, _ELEMENTWISE_FUNCTIONS | _ELEMENTWISE_METHODS):
        whole = function_of(node, source, walk.batch, walk.model)
        b = torch.func.vjp(whole, x)[1](torch.ones_like(x))[0].reshape(len(x), -1)
        return H * (b.T @ (walk.weight.to(b)[:, None] * b) / walk.total.to(b))
    function = function_of(node, source, walk.single, walk.model)
    if _is_sum_of_branches(node, module, x, walk):
        return H  # The cross terms between the summands are dropped here.
    if _is_linear(node, module, source, walk):
        return _congruence(function, walk.single.inputs[node][source], H)
    if _is(node, module, _OTHER_MODULES, _OTHER_FUNCTIONS | {"softmax"}) and source is node.args[0]:
        total = torch.zeros(x[0].numel(), x[0].numel(), dtype=H.dtype, device=H.device)
        for n in range(len(x)):
            total += walk.weight[n].to(H) * _congruence(function, x[n : n + 1], H)
        return total / walk.total.to(H)
    known = ", ".join(m.__name__ for m in (*_LINEAR_MODULES, *_ELEMENTWISE_MODULES, *_OTHER_MODULES))
    raise UnsupportedError(
        f"KFRA has no rule for {describe(node, walk.model)}. Supported: {known}, their functional forms, "
        "reshaping, mean, cat, scaling by a constant, and sums of branches. Use structure='kron', "
        "which takes any operation"
    )


def _is(node: fx.Node, module: nn.Module | None, types: tuple[type[nn.Module], ...], names: set[Any]) -> bool:
    """Tells whether a node is one of these: exactly, because a subclass may compute something else."""
    return type(module) in types if module is not None else node.target in names


def _is_sum_of_branches(node: fx.Node, module: nn.Module | None, x: Tensor, walk: _Walk) -> bool:
    """Tells whether a node is x + F(x) without broadcasting or factors; x + x is one branch with the factor 2."""
    distinct = len(node.all_input_nodes) == len(node.args) == 2
    same_shape = x.shape == walk.batch.results[node].shape
    return module is None and node.target in _SUMS and distinct and same_shape and not node.kwargs


def _is_linear(node: fx.Node, module: nn.Module | None, source: fx.Node, walk: _Walk) -> bool:
    """Tells whether the node is a linear function of `source`, the same one for every example."""
    if _is(node, module, _LINEAR_MODULES, _LINEAR_FUNCTIONS | _LINEAR_METHODS | _SUMS):
        return True
    others = [n for n in node.all_input_nodes if n is not source]
    constant = all(n.op == "get_attr" or isinstance(walk.batch.results[n], _SIZES) for n in others)
    once = sum(argument is source for argument in node.args) == 1
    product = node.target in _PRODUCTS or (node.target in _QUOTIENTS and node.args[0] is source)
    return module is None and product and constant and once


def _check_in_place(node: fx.Node, module: nn.Module | None, walk: _Walk) -> None:
    named = module is None and node.target in _IN_PLACE
    in_place = named or bool(getattr(module, "inplace", False)) or bool(node.kwargs.get("inplace"))
    if in_place and len(node.all_input_nodes[0].users) > 1:
        raise UnsupportedError(
            f"{describe(node, walk.model)} works in place on a value that is used elsewhere too; KFRA cannot "
            "tell which of its two values is meant. Use the version that is not in place"
        )


def _congruence(function: Callable[[Tensor], Tensor], x: Tensor, H: Tensor) -> Tensor:
    """Returns J^T H J for the Jacobian J of a function at one example x [1, ...], by pulling back rows, then columns."""
    value, pullback, *_ = torch.func.vjp(function, x)
    pull = torch.func.vmap(lambda row: pullback(row.reshape(value.shape))[0].reshape(-1), chunk_size=_CHUNK)
    result: Tensor = pull(pull(H).T)
    return result


def _layer_factor(layer: Any, node: fx.Node, H: Tensor, walk: _Walk) -> Tensor:
    """Returns B = M sum_t H[(o, t), (p, t)] per group."""
    H = walk.total.to(H) * (H + H.T) / 2
    if isinstance(layer, nn.Linear):
        T = walk.single.results[node].numel() // layer.out_features
        return torch.einsum("totp->op", H.reshape(T, layer.out_features, T, layer.out_features))[None]
    T = walk.single.results[node][0, 0].numel()
    shape = (layer.groups, layer.out_channels // layer.groups, T)
    return torch.einsum("gotgpt->gop", H.reshape(*shape, *shape))


class KfraAccumulator(Accumulator):
    """Sums the factors of all layers with a weight matrix; one recursion per batch serves them all."""

    layers = ()

    def __init__(self, parts: Sequence[KronAccumulator], plan: ModelPlan, likelihood: Likelihood):
        self.parts, self.likelihood = list(parts), likelihood
        self.names = [plan.layers[p.layer].name for p in self.parts]

    def start_batch(self, record: ForwardRecord) -> None:
        if record.batch.weight is not None:
            raise UnsupportedError(
                "KFRA averages one matrix over the examples of a batch and cannot weigh them; "
                "use structure='kron' with example weights"
            )
        model, prefix = without_wrappers(record.model)
        names = [name.removeprefix(prefix) for name in self.names]
        if self.names in (
            [WHOLE_MODEL],
            [prefix.removesuffix(".")],
        ):  # The recursion walks over the children of a model.
            model, names = nn.Sequential(model), ["0"]
        factors = kfra_factors(model, record.batch.inputs, self.likelihood, record.batch.targets, names)
        for part, name in zip(self.parts, names, strict=True):
            part.start_batch(record)
            part.outputs.add_products(factors[name].to(part.outputs.dtype).expand(part.outputs.groups, -1, -1))

    def add(self, gradients: LayerGradients) -> None:
        """Does nothing, since the recursion needs no vectors."""

    def state(self) -> dict[str, Tensor]:
        return {f"{k}.{name}": value for k, part in enumerate(self.parts) for name, value in part.state().items()}

    def add_state(self, state: dict[str, Tensor]) -> None:
        for k, part in enumerate(self.parts):
            part.add_state(take_under(state, f"{k}."))

    def blocks(self) -> list[Block]:
        return [replace(b, kind="kfra") for p in self.parts for b in p.blocks() if isinstance(b, KronBlock)]


def fit_kfra(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """Fits in one pass over whole batches, since the recursion averages inside a batch."""
    accumulators = layer_accumulators(problem, KronAccumulator.of)
    krons = [a for a in accumulators if isinstance(a, KronAccumulator)]
    rest = [a for a in accumulators if not isinstance(a, KronAccumulator)]
    recursion = KfraAccumulator(krons, problem.plan, problem.likelihood)
    return problem.run([recursion, *rest], "kfra curvature", whole_batches=True)


register_structure(
    Structure(
        "kfra",
        "Kronecker factors whose output side follows a recursion through the network, without random vectors.",
        fit_kfra,
        (KronBlock, FullBlock, DiagonalBlock),
        dampings=DAMPINGS,
        streams_sums=True,
        depends_on_batches=True,  # The recursion averages over the examples of a batch.
    )
)
