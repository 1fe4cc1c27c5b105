"""The slow truth: curvature by brute force, for small models and for tests.

Every function here loops: over examples, over outputs, over positions. Nothing is shared with the fast
engine, so that the two can be compared. Models should be in eval mode: each example is passed through the
network alone, as a batch of one.

By convention all results are *sums* over data of the negative log-likelihood E_n. With J_n = d f_n / d theta [R*C, P]
(R positions, C outputs) and Lambda_n = d^2 E_n / d f^2, the generalised Gauss-Newton matrix is sum_n w_n J_n^T Lambda_n
J_n. The flat order is that of `names`, each parameter row-major. A weight w_n means w_n copies of the datum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from aftermap.curvature.reference.layers import (
    Inputs,
    Params,
    count_examples,
    example,
    example_weights,
    forward,
    select,
)
from aftermap.errors import InputError

if TYPE_CHECKING:
    from aftermap.likelihoods import Likelihood

__all__ = [
    "diagonal_ggn",
    "empirical_fisher",
    "ggn",
    "hessian",
    "jacobian",
    "linearised_covariance",
    "per_example_gradients",
    "sum_squared_gradients",
]


def jacobian(model: nn.Module, inputs: Inputs, names: Sequence[str] | None = None) -> Tensor:
    """Returns the Jacobian of the flattened outputs of every example with respect to the parameters.

    It is J[n, i, p] = d f_n[i] / d theta[p], where i runs over positions and outputs, row-major.

    Args:
        model: A network with outputs [N, ..., C].
        inputs: A tensor, a tuple (`model(*inputs)`) or a mapping (`model(**inputs)`).
        names: The names of the parameters in the flat order. None means all that require a gradient.

    Returns:
        The Jacobians J [N, R*C, P].

    >>> model = nn.Linear(2, 3, bias=False)
    >>> jacobian(model, torch.tensor([[1.0, 2.0]]))[0]
    tensor([[1., 2., 0., 0., 0., 0.],
            [0., 0., 1., 2., 0., 0.],
            [0., 0., 0., 0., 1., 2.]])
    """
    params = select(model, names)
    rows = []
    for n in range(count_examples(inputs)):

        def outputs(p: Params, n: int = n) -> Tensor:
            return forward(model, p, example(inputs, n)).reshape(-1)

        rows.append(_rows(outputs, params))
    return torch.stack(rows)


def per_example_gradients(
    model: nn.Module,
    inputs: Inputs,
    likelihood: Likelihood,
    targets: Tensor,
    names: Sequence[str] | None = None,
    weight: Tensor | None = None,
) -> Params:
    """Returns the gradient of w_n E_n for every example, one backward pass each.

    Args:
        model: A network with outputs [N, ..., C].
        inputs: A tensor, a tuple or a mapping of tensors with N examples.
        likelihood: The likelihood, which gives `nll(outputs, targets) -> [N]`.
        targets: The targets [N, ...].
        names: The names of the parameters. None means all that require a gradient.
        weight: The weight of each example [N], or None.

    Returns:
        For each name the gradients [N, *shape of the parameter].
    """
    params = select(model, names)
    gradients = []
    for n in range(count_examples(inputs)):

        def loss(p: Params, n: int = n) -> Tensor:
            return likelihood.nll(forward(model, p, example(inputs, n)), targets[n : n + 1]).sum()

        gradients.append(torch.func.grad(loss)(params))
    w = example_weights(weight, len(gradients), next(iter(params.values())))
    return {name: torch.stack([w[n] * g[name] for n, g in enumerate(gradients)]) for name in params}


def sum_squared_gradients(
    model: nn.Module,
    inputs: Inputs,
    likelihood: Likelihood,
    targets: Tensor,
    names: Sequence[str] | None = None,
    weight: Tensor | None = None,
) -> Params:
    """Returns the diagonal of the empirical Fisher: sum_n w_n g_n^2 (per-example squares, not the square of the sum).

    The arguments and shapes are those of `per_example_gradients`.

    Returns:
        For each name a tensor of the parameter's shape.
    """
    gradients = per_example_gradients(model, inputs, likelihood, targets, names)
    result = {}
    for name, g in gradients.items():
        w = example_weights(weight, len(g), g)
        result[name] = sum((w[n] * g[n] ** 2 for n in range(len(g))), torch.zeros_like(g[0]))
    return result


def ggn(
    model: nn.Module,
    inputs: Inputs,
    likelihood: Likelihood,
    targets: Tensor,
    names: Sequence[str] | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Returns the generalised Gauss-Newton matrix G = sum_n w_n sum_r J_nr^T Lambda_nr J_nr.

    The arguments and shapes are those of `per_example_gradients`; here the likelihood gives `hessian(outputs, targets)
    -> [N, ..., C, C]`.

    Returns:
        The matrix G [P, P], symmetric and positive semi-definite.
    """
    params = select(model, names)
    J = jacobian(model, inputs, names)
    w = example_weights(weight, len(J), J)
    G = J.new_zeros(J.shape[-1], J.shape[-1])
    for n in range(len(J)):
        outputs = forward(model, params, example(inputs, n)).detach()
        C = outputs.shape[-1]
        Lambda = likelihood.hessian(outputs, targets[n : n + 1]).reshape(-1, C, C)
        for r in range(len(Lambda)):
            J_r = J[n, r * C : (r + 1) * C]
            G += w[n] * J_r.T @ Lambda[r] @ J_r
    return G


def empirical_fisher(
    model: nn.Module,
    inputs: Inputs,
    likelihood: Likelihood,
    targets: Tensor,
    names: Sequence[str] | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Returns the empirical Fisher sum_n w_n g_n g_n^T with gradients g_n at the observed targets.

    The arguments and shapes are those of `per_example_gradients`.

    Returns:
        The empirical Fisher matrix [P, P].
    """
    gradients = per_example_gradients(model, inputs, likelihood, targets, names)
    g = torch.cat([v.reshape(len(v), -1) for v in gradients.values()], dim=1)
    w = example_weights(weight, len(g), g)
    return sum((w[n] * torch.outer(g[n], g[n]) for n in range(len(g))), g.new_zeros(g.shape[1], g.shape[1]))


def hessian(
    model: nn.Module,
    inputs: Inputs,
    likelihood: Likelihood,
    targets: Tensor,
    names: Sequence[str] | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Returns the Hessian of sum_n w_n E_n, which is indefinite in general.

    The arguments and shapes are those of `per_example_gradients`.

    Returns:
        The Hessian [P, P], symmetric up to rounding.
    """
    params = select(model, names)
    w = example_weights(weight, count_examples(inputs), next(iter(params.values())))
    total: Tensor | None = None
    for n in range(count_examples(inputs)):

        def gradient(p: Params, n: int = n) -> Tensor:
            def loss(q: Params) -> Tensor:
                return likelihood.nll(forward(model, q, example(inputs, n)), targets[n : n + 1]).sum()

            return torch.cat([g.reshape(-1) for g in torch.func.grad(loss)(p).values()])

        H = w[n] * _rows(gradient, params)
        total = H if total is None else total + H
    if total is None:
        raise InputError("got no examples; pass inputs whose first dimension is at least 1")
    return total


def diagonal_ggn(
    model: nn.Module,
    inputs: Inputs,
    likelihood: Likelihood,
    targets: Tensor,
    names: Sequence[str] | None = None,
    weight: Tensor | None = None,
) -> Params:
    """Returns the diagonal of `ggn`, cut into parameters.

    The arguments and shapes are those of `per_example_gradients`.

    Returns:
        For each name a tensor of the parameter's shape.
    """
    params = select(model, names)
    pieces = (
        ggn(model, inputs, likelihood, targets, names, weight).diagonal().split([p.numel() for p in params.values()])
    )
    return {name: d.reshape(p.shape) for (name, p), d in zip(params.items(), pieces, strict=True)}


def linearised_covariance(J: Tensor, Sigma: Tensor) -> Tensor:
    """Returns the covariance of the linearised outputs, V_n = J_n Sigma J_n^T.

    Args:
        J: The Jacobians [N, R*C, P].
        Sigma: The covariance of the weights [P, P].

    Returns:
        The covariances V [N, R*C, R*C].

    >>> linearised_covariance(torch.tensor([[[1.0, 2.0]]]), torch.eye(2))
    tensor([[[5.]]])
    """
    return torch.stack([J_n @ Sigma @ J_n.T for J_n in J])


def _rows(function: Callable[[Params], Tensor], params: Params) -> Tensor:
    """Returns the Jacobian of a vector-valued function, one vjp per output: no vmap, so every op is allowed."""
    value, pullback, *_ = torch.func.vjp(function, params)
    rows = []
    for i in range(value.numel()):
        unit = torch.zeros_like(value)
        unit[i] = 1.0
        (row,) = pullback(unit)
        rows.append(torch.cat([row[name].reshape(-1) for name in params]))
    return torch.stack(rows).detach()
