"""Brute force for single layers: Kronecker factors by explicit loops, and the Hessian recursion of an MLP.

Indices: n example, t position (pixel, token, call), g group, k column of the root S of the output Hessian.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aftermap.errors import InputError, ShapeError, UnsupportedError

if TYPE_CHECKING:
    from aftermap.likelihoods import Likelihood

__all__ = [
    "Inputs",
    "Params",
    "count_examples",
    "example",
    "example_weights",
    "forward",
    "hessian_recursion",
    "kron_factors",
    "select",
    "unfold_input",
]

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
Params = dict[str, Tensor]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_APPROACHES = ("expand", "reduce")
_PAD_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def example(inputs: Inputs, n: int) -> Inputs:
    """Returns example n of `inputs` as a batch of one; what is not a tensor with N rows is passed on as it is.

    >>> example((torch.arange(3), "mode"), 1)
    (tensor([1]), 'mode')
    """
    count = count_examples(inputs)

    def cut(value: Any) -> Any:
        is_batched = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == count
        return value[n : n + 1] if is_batched else value

    if isinstance(inputs, Tensor):
        return inputs[n : n + 1]
    if isinstance(inputs, Mapping):
        return {key: cut(value) for key, value in inputs.items()}
    return tuple(cut(value) for value in inputs)


def count_examples(inputs: Inputs) -> int:
    """Returns the number of examples: the first dimension of the first tensor."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0]
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    raise InputError(f"got inputs of type {type(inputs).__name__} without a tensor; pass a tensor, a tuple or a dict")


def select(model: nn.Module, names: Sequence[str] | None) -> Params:
    """Returns the chosen parameters, detached, in the order of `names`."""
    available = dict(model.named_parameters())
    if names is None:
        names = [name for name, p in available.items() if p.requires_grad]
    missing = [name for name in names if name not in available]
    if missing or not names:
        raise InputError(f"got parameter names {missing or list(names)}; the model has {list(available)}")
    return {name: available[name].detach() for name in names}


def forward(model: nn.Module, params: Params, inputs: Inputs) -> Tensor:
    """Returns the model's output with `params` in place; buffers are copied so that nothing of the model changes."""
    state = {name: b.detach().clone() for name, b in model.named_buffers()}
    state.update(params)
    args = () if isinstance(inputs, Mapping) else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    tables: list[Any] = [table for m in model.modules() for table in (m._parameters, m._buffers)]
    own = [(table, dict(table)) for table in tables]
    try:
        outputs = torch.func.functional_call(model, state, args, dict(inputs) if isinstance(inputs, Mapping) else {})
    finally:
        # PyTorch leaves other tensors in a module that has two names.
        for table, tensors in own:
            table.update(tensors)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def example_weights(weight: Tensor | None, count: int, like: Tensor) -> Tensor:
    """Returns per-example weights [N], which are ones when there are none."""
    if weight is None:
        return torch.ones(count, dtype=like.dtype, device=like.device)
    if weight.shape != (count,):
        raise ShapeError(f"got weight of shape {tuple(weight.shape)}; pass one weight per example, shape ({count},)")
    return weight.to(like)


class _Probe(nn.Module):
    """Wraps a layer of a *copy* of the model: it keeps inputs, and adds a zero that receives the output gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.inputs: list[Tensor] = []
        self.zeros: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        zero = torch.zeros_like(out, requires_grad=True)
        self.inputs.append(x.detach().clone())
        self.zeros.append(zero)
        return out + zero


def kron_factors(
    module_name: str,
    model: nn.Module,
    inputs: Inputs,
    likelihood: Likelihood,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    approach: str = "expand",
) -> tuple[Tensor, Tensor, float]:
    """Returns the Kronecker factors of one Linear or convolution, from the exact root S of the output Hessian (KFLR).

    expand: A = sum_n w_n sum_t a_nt a_nt^T, B = sum_n w_n sum_k sum_t g_nkt g_nkt^T, rows = sum_n w_n T_n.
    reduce: A = sum_n w_n (sum_t a_nt)(sum_t a_nt)^T, B = sum_n w_n sum_k (sum_t g_nkt)(sum_t g_nkt)^T,
    rows = sum_n w_n T_n^2.
    The block for the row-major vec of [weight, bias] is B (x) A / rows. Here a_nt is the (unfolded) input
    with a trailing 1 when the layer has a bias, and g_nkt the gradient of S_k . f_n with respect to the
    layer's output at position t.
    Several calls of the layer count as further positions. The model is copied, never changed.

    Args:
        module_name: The dotted name of the layer in `model`.
        model: A network with outputs [N, ..., C].
        inputs: A tensor, a tuple or a mapping of tensors with N examples.
        likelihood: The likelihood, which gives `hessian_root(outputs, targets) -> [N, ..., C, K]`.
        targets: The targets [N, ...].
        weight: The weight of each example [N], or None.
        approach: The kind of sums: "expand" or "reduce".

    Returns:
        The factors A [G, D, D] and B [G, O/G, O/G] (G = 1 for a Linear), and the number of rows.

    Raises:
        InputError: The module name or the approach is unknown.
        UnsupportedError: The module is neither a Linear nor a convolution.
    """
    if approach not in _APPROACHES:
        raise InputError(f"got approach {approach!r}; allowed: {', '.join(_APPROACHES)}")
    probed, probe = _with_probe(model, module_name)
    w = example_weights(weight, count_examples(inputs), next(model.parameters()))
    A_sum: Tensor | float = 0.0
    B_sum: Tensor | float = 0.0
    rows = 0.0
    for n in range(count_examples(inputs)):
        probe.inputs.clear()
        probe.zeros.clear()
        with torch.enable_grad():
            outputs = forward(probed, {}, example(inputs, n))
        if not probe.inputs:
            raise InputError(f"module {module_name!r} is never called in the forward pass; choose another")
        a = torch.cat([unfold_input(probe.layer, x) for x in probe.inputs], dim=1)  # [G, T, D]
        root = likelihood.hessian_root(outputs.detach(), targets[n : n + 1])
        root = root.reshape(-1, *root.shape[-2:])  # [R, C, K]
        T = a.shape[1]
        if approach == "reduce":
            a = a.sum(dim=1, keepdim=True)
        A_sum = A_sum + w[n] * torch.stack([a_g.T @ a_g for a_g in a])
        rows += float(w[n]) * (T if approach == "expand" else T * T)
        for r, k in itertools.product(range(root.shape[0]), range(root.shape[2])):
            vector = torch.zeros_like(outputs).reshape(root.shape[0], -1)
            vector[r] = root[r, :, k]
            grads = torch.autograd.grad(outputs, probe.zeros, vector.reshape(outputs.shape), retain_graph=True)
            g = torch.cat([_output_rows(probe.layer, grad) for grad in grads], dim=1)  # [G, T, O/G]
            if approach == "reduce":
                g = g.sum(dim=1, keepdim=True)
            B_sum = B_sum + w[n] * torch.stack([g_g.T @ g_g for g_g in g])
    if not isinstance(A_sum, Tensor) or not isinstance(B_sum, Tensor):
        raise InputError("got no examples; pass inputs whose first dimension is at least 1")
    return A_sum.detach(), B_sum.detach(), rows


def unfold_input(layer: Any, x: Tensor) -> Tensor:
    """Returns the inputs a_t that meet the weight of one example, by explicit indexing.

    Args:
        layer: A layer: Linear, Conv1d, Conv2d or Conv3d.
        x: The layer's input with one example, [1, ..., D] or [1, channels, *space].

    Returns:
        The inputs [G, T, D(+1)]: groups, positions, features in the order of the flattened weight; a trailing 1 when
        there is a bias.

    >>> unfold_input(nn.Linear(2, 3), torch.tensor([[5.0, 6.0]]))
    tensor([[[5., 6., 1.]]])
    """
    a = x.reshape(1, -1, layer.in_features) if isinstance(layer, nn.Linear) else _patches(layer, x)
    if layer.bias is None:
        return a
    return torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)


def _patches(layer: Any, x: Tensor) -> Tensor:
    """Returns patches [G, T, channels/G * kernel] of a convolution's input [1, channels, *space]."""
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    pads: list[tuple[int, int]] = []
    for d, size in enumerate(kernel):
        if layer.padding == "same":
            total = dilation[d] * (size - 1)
            pads.append((total // 2, total - total // 2))
        elif layer.padding == "valid":
            pads.append((0, 0))
        else:
            pads.append((layer.padding[d], layer.padding[d]))
    flat = [side for pair in reversed(pads) for side in pair]  # F.pad starts with the last dimension
    padded = nn.functional.pad(x, flat, mode=_PAD_MODES[layer.padding_mode])[0]
    steps = [(padded.shape[1 + d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(len(kernel))]
    per_group = layer.in_channels // layer.groups
    groups = []
    for g in range(layer.groups):
        rows = []
        for position in itertools.product(*(range(s) for s in steps)):
            start = [p * s for p, s in zip(position, stride, strict=True)]
            features = [
                padded[(c, *(b + o * e for b, o, e in zip(start, offset, dilation, strict=True)))]
                for c in range(g * per_group, (g + 1) * per_group)
                for offset in itertools.product(*(range(size) for size in kernel))
            ]
            rows.append(torch.stack(features))
        groups.append(torch.stack(rows))
    return torch.stack(groups)


def _output_rows(layer: Any, g: Tensor) -> Tensor:
    """Returns the gradients at the layer's output of one example as [G, T, O/G]."""
    if isinstance(layer, nn.Linear):
        return g.reshape(1, -1, layer.out_features)
    return g.reshape(layer.groups, layer.out_channels // layer.groups, -1).transpose(1, 2)


def _with_probe(model: nn.Module, module_name: str) -> tuple[nn.Module, _Probe]:
    """Returns a copy of the model in which the named layer is wrapped by a probe, everywhere it occurs."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if module_name not in modules:
        raise InputError(f"got module name {module_name!r}; the model has {[name for name in modules if name]}")
    if not isinstance(modules[module_name], (nn.Linear, *_CONVOLUTIONS)):
        kind = type(modules[module_name]).__name__
        raise UnsupportedError(f"module {module_name!r} is a {kind}; supported: Linear, Conv1d, Conv2d, Conv3d")
    twin = copy.deepcopy(model)
    layer = twin.get_submodule(module_name)
    probe = _Probe(layer)
    if layer is twin:
        return probe, probe
    owners = [m for m in twin.modules() if not isinstance(m, _Probe)]
    for owner in owners:
        for name, child in list(owner._modules.items()):
            if child is layer:
                owner._modules[name] = probe
    return twin, probe


def hessian_recursion(
    mlp: nn.Sequential, x: Tensor, likelihood: Likelihood, y: Tensor, *, gauss_newton: bool = False
) -> dict[str, Tensor]:
    """Returns the Hessians of E_n with respect to the pre-activations h_l of an MLP, by recursion from the output.

    The recursion is H_L = Lambda_n; H_l = B_l W_{l+1}^T H_{l+1} W_{l+1} B_l + D_l with B = diag(phi'(h_l)) and D =
    diag(phi''(h_l) * dE/da_l).

    Args:
        mlp: A Sequential of Linear layers and elementwise activations.
        x: The inputs [N, D].
        likelihood: The likelihood, which gives `gradient` and `hessian` in the outputs.
        y: The targets [N, ...].
        gauss_newton: Whether to drop D, which gives the Gauss-Newton matrix of the pre-activations.

    Returns:
        For the name of each Linear the Hessian [N, O, O] with respect to its output.

    Raises:
        UnsupportedError: A child is neither a Linear nor elementwise.

    References:
        Ritter, Botev, Barber 2018, eq. (15)-(17).
    """
    children = list(mlp.named_children())
    result: dict[str, list[Tensor]] = {name: [] for name, m in children if isinstance(m, nn.Linear)}
    for n in range(len(x)):
        values = [x[n].detach()]
        for _, module in children:
            values.append(module(values[-1].clone()).detach())
        g = likelihood.gradient(values[-1][None], y[n : n + 1])[0]
        H = likelihood.hessian(values[-1][None], y[n : n + 1])[0]
        for (name, module), h in zip(reversed(children), reversed(values[:-1]), strict=True):
            if isinstance(module, nn.Linear):
                result[name].append(H)
                W = module.weight.detach()
                H, g = W.T @ H @ W, W.T @ g
            else:
                first, second = _derivatives(module, h, name)
                B = torch.diag(first)
                D = torch.diag(torch.zeros_like(second) if gauss_newton else second * g)  # eq. (17)
                H, g = B @ H @ B + D, first * g  # eq. (15)
    return {name: torch.stack(Hs) for name, Hs in result.items()}


def _derivatives(activation: Callable[[Tensor], Tensor], h: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Returns the first and second derivative of an elementwise function at h [D]."""

    def apply(z: Tensor) -> Tensor:
        return activation(z.clone())  # This is a copy, since the activation may work in place.

    def slope(z: Tensor) -> Tensor:
        return torch.func.vjp(apply, z)[1](torch.ones_like(z))[0]

    jacobian = torch.stack([torch.func.vjp(apply, h)[1](unit)[0] for unit in torch.eye(len(h)).to(h)])
    if apply(h).shape != h.shape or bool((jacobian - torch.diag(jacobian.diagonal())).abs().max() > 0):
        raise UnsupportedError(f"child {name!r} is not elementwise; the recursion knows Linear and elementwise layers")
    return slope(h), torch.func.vjp(slope, h)[1](torch.ones_like(h))[0]
