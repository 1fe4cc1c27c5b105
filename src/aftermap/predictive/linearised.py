"""The linearised predictive: f_lin(x, θ) = f(x, θ*) + J(x)(θ − θ*) is Gaussian under a Gaussian posterior.

Its covariance J Σ Jᵀ is contracted layer by layer (Immer, Korzepa & Bauer 2021, with the contractions of
docs/mathematics/predictive.md): the outputs are back-propagated to the layers, and a posterior contracts each of them at once. A
Jacobian [b, c, P] never exists, and the layers' contributions add up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from aftermap.batches import Batch
from aftermap.curvature.passes.backward import Accumulator, BackwardPass, LayerGradients
from aftermap.curvature.passes.plan import CheckedPlan
from aftermap.curvature.passes.products import pushed_forward
from aftermap.curvature.passes.record import ForwardRecord
from aftermap.curvature.structures.base import flatten_batch
from aftermap.errors import InputError
from aftermap.linalg import differing
from aftermap.models import (
    autograd_errors_explained,
    check_outputs,
    evaluating,
    functional_outputs,
    only_require_grad,
)
from aftermap.params import Params, named_parameters
from aftermap.posteriors import Posterior
from aftermap.predictive.sampling import weight_samples

__all__ = [
    "LatentGaussian",
    "check_chosen",
    "differentiable_latent",
    "examples_at_once",
    "function_samples",
    "joint_covariance",
    "latent_gaussians",
    "margin_gaussian",
    "output_gradients",
]

# This many gradients of all outputs at all layers are alive at once (128 MB in float32).
_NUMBERS = 1 << 25
_JOINT_NUMBERS = 2 * 10**8
_Posterior = TypeVar("_Posterior", bound=Posterior)


class _GatheredGradients(Accumulator):
    """An accumulator that holds the gradients of all vectors at all layers."""

    stacks_vectors = True

    def add(self, gradients: LayerGradients) -> None:
        self.gradients = gradients


def output_gradients(
    checked: CheckedPlan,
    batch: Batch,
    *,
    outputs: Sequence[int] | None = None,
    margin: bool = False,
    numbers: int = _NUMBERS,
) -> Iterator[tuple[slice, int, Tensor, LayerGradients]]:
    """Back-propagates the outputs of some examples at a time, one output position after another.

    Args:
        checked: How the network's layers are read, and which parameters are meant.
        batch: The batch of inputs.
        outputs: The indices of the chosen outputs, of C; None for all.
        margin: Whether to propagate one vector instead, the difference of the two largest outputs of each example.
        numbers: How many gradient numbers may be alive at once: a memory knob.

    Yields:
        Tuples of (examples, position, network outputs [b, ..., C], gradients of the chosen outputs at that position).
    """
    plan, start = checked.plan, 0
    check_chosen(outputs, plan.width)
    batch = plan.marked(batch)
    vectors = 1 if margin else None if outputs is None else len(outputs)
    with only_require_grad(checked.model, checked.names):
        for part in batch.pieces(examples_at_once(checked, batch, vectors=vectors, numbers=numbers)):
            record = checked.record(part)
            for position, gradients in _gradients_by_position(record, outputs, margin):
                yield slice(start, start + part.size), position, record.outputs.detach(), gradients
            start += part.size


def examples_at_once(checked: CheckedPlan, batch: Batch, *, vectors: int | None = None, numbers: int = _NUMBERS) -> int:
    """Returns how many examples' gradients of so many vectors are alive at once; None for those of all outputs."""
    plan = checked.plan
    vectors = plan.width if vectors is None else vectors
    return max(1, numbers // (plan.numbers_per_example(plan.marked(batch)) * vectors))


def check_chosen(chosen: Sequence[int] | None, width: int) -> None:
    """Raises an error unless the chosen outputs exist."""
    if chosen is None:
        return
    wrong = [k for k in chosen if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k < width]
    if wrong or not len(chosen):
        raise InputError(f"outputs={list(chosen)!r} must name some of the {width} outputs, 0 to {width - 1}")


def _gradients_by_position(
    record: ForwardRecord, chosen: Sequence[int] | None, margin: bool
) -> Iterator[tuple[int, LayerGradients]]:
    """Yields the gradients of the chosen outputs [v, b, ...], one output position (token, pixel) after another."""
    outputs = record.outputs
    size, width = outputs.shape[0], outputs.shape[-1]
    positions = math.prod(outputs.shape[1:-1])
    if margin:
        rows = _margin_vectors(outputs).reshape(1, size, positions, width)
    else:
        index = torch.arange(width) if chosen is None else torch.as_tensor(list(chosen))
        units = torch.eye(width, dtype=outputs.dtype, device=outputs.device)[index]
        rows = units[:, None, None].expand(len(index), size, positions, width)
    gathered = _GatheredGradients()
    backward = BackwardPass(record, [gathered])
    if backward.ends_at_outputs and outputs.dim() == 2:
        backward.serve_outputs(rows[:, :, 0], unit_vectors=chosen is None and not margin)
        yield 0, gathered.gradients
        return
    for position in range(positions):
        vectors = torch.zeros_like(rows)
        vectors[:, :, position] = rows[:, :, position]
        vectors = vectors.reshape(len(rows), *outputs.shape)
        backward.run(vectors, together=record.plan.vectors_go_together, keep_graph=position < positions - 1)
        yield position, gathered.gradients


def _margin_vectors(outputs: Tensor) -> Tensor:
    """Returns e_a − e_b of the two largest outputs a and b at every position [b, ..., C]; for one output 1."""
    if outputs.shape[-1] == 1:
        return torch.ones_like(outputs)
    first, second = outputs.detach().topk(2).indices.unbind(-1)
    vectors = torch.zeros_like(outputs).scatter_(-1, first.unsqueeze(-1), 1.0)
    return vectors.scatter_(-1, second.unsqueeze(-1), -1.0)


@dataclass(frozen=True)
class LatentGaussian:
    """The mean and covariance of the outputs of some inputs.

    Attributes:
        mean: The means [N, ..., C] of all outputs, also where only some were chosen.
        cov: The covariance [N, ..., c, c] with c the chosen outputs; None if only variances were asked for.
        var: The variances [N, ..., c].
        by_layer: For each layer its part of the variance [N, ..., c]; they add up to `var`.
    """

    mean: Tensor
    cov: Tensor | None
    var: Tensor
    by_layer: Mapping[str, Tensor]


def latent_gaussians(
    checked: CheckedPlan,
    posterior: _Posterior,
    batch: Batch,
    *,
    variants: Sequence[_Posterior] | None = None,
    diagonal: bool = False,
    outputs: Sequence[int] | None = None,
    by_layer: bool = False,
) -> list[LatentGaussian]:
    """Returns the Gaussian over the outputs, for the posterior or for variants of it, in one pass through the network.

    Args:
        checked: The plan of the trained network, in eval mode, and of the posterior's parameters.
        posterior: The posterior over these parameters.
        batch: The batch of inputs.
        variants: The same posterior under other priors and scales (`with_prior`). None means only the posterior itself.
        diagonal: Whether to compute only the variances.
        outputs: The indices of the chosen outputs, of C; None for all.
        by_layer: Whether to keep the layers' parts of the variance.

    Returns:
        One LatentGaussian per variant.
    """
    which = [posterior] if variants is None else list(variants)
    means: list[Tensor] = []
    parts: list[dict[int, list[Tensor]]] = [{} for _ in which]  # By variant and position, these are chunks.
    shares: list[dict[int, list[Tensor]]] = [{} for _ in which]
    for _, position, values, gradients in output_gradients(checked, batch, outputs=outputs):
        if position == 0:
            means.append(values)
        for place, blocks in enumerate(posterior.functional_covariance(gradients, which, diagonal=diagonal)):
            parts[place].setdefault(position, []).append(torch.stack(blocks).sum(0))
            if by_layer:
                variances = [b if diagonal else b.diagonal(dim1=-2, dim2=-1) for b in blocks]
                shares[place].setdefault(position, []).append(torch.stack(variances))
    mean = torch.cat(means)
    space = mean.shape[1:-1]
    latents = []
    for place in range(len(which)):
        stacked = torch.stack([torch.cat(chunks) for _, chunks in sorted(parts[place].items())], dim=1)
        stacked = stacked.reshape(len(mean), *space, *stacked.shape[2:])
        var = stacked if diagonal else stacked.diagonal(dim1=-2, dim2=-1)
        layers: dict[str, Tensor] = {}
        if by_layer:
            joined = torch.stack([torch.cat(c, dim=1) for _, c in sorted(shares[place].items())], dim=2)
            for name, share in zip(posterior.block_names, joined, strict=True):
                layers[name] = share.reshape(len(mean), *space, -1)
        latents.append(LatentGaussian(mean, None if diagonal else stacked, var.clamp_min(0.0), layers))
    return latents


def margin_gaussian(checked: CheckedPlan, posterior: Posterior, batch: Batch) -> LatentGaussian:
    """Returns a Gaussian over the outputs whose variance is that of one difference, from one backward pass.

    The variance v of the difference between the two largest outputs is that of the linearised network, exactly or, for wide layers
    with Kronecker factors, to about a tenth (`Posterior.approximate_variance`). All outputs are then taken as independent with variance v/2, so that every difference varies as this one does.

    Args:
        checked: The plan of the trained network, in eval mode, and of the posterior's parameters.
        posterior: The posterior over these parameters.
        batch: The batch of inputs.
    """
    means: list[Tensor] = []
    parts: dict[int, list[Tensor]] = {}  # By position, these are chunks.
    for _, position, values, gradients in output_gradients(checked, batch, margin=True):
        if position == 0:
            means.append(values)
        parts.setdefault(position, []).append(posterior.approximate_variance(gradients))
    mean = torch.cat(means)
    variance = torch.stack([torch.cat(chunks) for _, chunks in sorted(parts.items())], dim=1)  # [N, positions, 1]
    variance = variance.reshape(*mean.shape[:-1], 1).clamp_min(0.0)
    half = variance if mean.shape[-1] == 1 else variance / 2
    return LatentGaussian(mean, None, half.expand(mean.shape), {})


def joint_covariance(checked: CheckedPlan, posterior: Posterior, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns mean [N, C] and covariance [N, C, N, C] over several inputs together.

    Raises:
        InputError: The Jacobian of all inputs would not fit; draw function samples instead.
    """
    lines: dict[str, list[Tensor]] = {n: [] for n in posterior.names}
    means = []
    for part, position, values, gradients in output_gradients(checked, batch):
        if values.dim() != 2:
            raise InputError(f"a joint covariance is over outputs [N, C]; this model returns {tuple(values.shape)}")
        if batch.size * values.shape[1] * posterior.n_params > _JOINT_NUMBERS:
            raise InputError(
                f"the joint covariance of {batch.size} inputs with {values.shape[1]} outputs over {posterior.n_params:,} parameters "
                "needs a Jacobian that is too large; ask for fewer inputs, or draw function_samples(x, n)"
            )
        if position == 0:
            means.append(values)
        for name, value in gradients.per_example(posterior.names, 0, part.stop - part.start).items():
            lines[name].append(value)
    jacobian = {n: torch.cat(v, dim=1) for n, v in lines.items()}  # [C, N, *shape]
    left = flatten_batch(jacobian, posterior.names)
    right = flatten_batch(posterior.covariance_mv(jacobian), posterior.names)
    return torch.cat(means), torch.einsum("cnp,dmp->ncmd", left, right)


@autograd_errors_explained()
def function_samples(
    model: nn.Module, posterior: Posterior, inputs: Any, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """Returns samples f(x, θ*) + J(x)(θ_s − θ*) with the true correlation between inputs: [count, N, ..., C]; one jvp each."""
    parameters = named_parameters(model)
    mean = {n: parameters[n].detach() for n in posterior.names}
    draws = weight_samples(posterior, count, generator)
    directions = ({n: weights[n] - posterior.mean[n] for n in posterior.names} for weights in draws)
    with evaluating(model), torch.no_grad():
        return torch.stack([f + pushed for f, pushed in pushed_forward(model, mean, inputs, directions)])


def differentiable_latent(
    model: nn.Module,
    posterior: Posterior,
    inputs: Tensor,
    *,
    diagonal: bool = False,
    outputs: Sequence[int] | None = None,
) -> LatentGaussian:
    """Returns mean and covariance that can be differentiated in ``inputs`` (Bayesian optimisation, attacks, saliency).

    It forms a Jacobian per example, so it is for small batches; `latent_gaussians` does not.
    """
    parameters = named_parameters(model)
    params = {n: parameters[n].detach() for n in posterior.names}

    with evaluating(model), torch.enable_grad():
        try:
            mean, lines = _vectorised_jacobian(model, params, inputs)
            # The vectorised derivatives of a few operations are silently wrong.
            truth = {n: v[:, 0].detach() for n, v in _looped_jacobian(model, params, inputs[:1])[1].items()}
            confirmed = not differing({n: v[:, 0].detach().clone() for n, v in lines.items()}, truth, mean.dtype)
        except RuntimeError:  # An operation has no batching rule, and the loop makes the same numbers.
            confirmed = False
        if not confirmed:
            mean, lines = _looped_jacobian(model, params, inputs)
    check_outputs(mean, len(inputs))
    check_chosen(outputs, mean.shape[-1])
    if outputs is not None:
        lines = {n: v.unflatten(0, (-1, mean.shape[-1]))[:, list(outputs)].flatten(0, 1) for n, v in lines.items()}
    left = flatten_batch(lines, posterior.names)
    right = flatten_batch(posterior.covariance_mv(lines), posterior.names)
    var = (left * right).sum(-1).T.reshape(*mean.shape[:-1], -1)
    if diagonal:
        return LatentGaussian(mean, None, var, {})
    if mean.dim() != 2:
        raise InputError(
            f"a differentiable covariance is over outputs [N, C]; got {tuple(mean.shape)}: use diagonal=True"
        )
    return LatentGaussian(mean, torch.einsum("vbp,wbp->bvw", left, right), var, {})


def _vectorised_jacobian(model: nn.Module, params: Params, inputs: Tensor) -> tuple[Tensor, Params]:
    """Returns outputs [N, ..., C] and J [outputs, N, *shape] by name, both functions of the inputs."""

    def single(chosen: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        value = functional_outputs(model, chosen, x[None])[0]
        return value.reshape(-1), value

    jacobian, mean = vmap(jacrev(single, has_aux=True), in_dims=(None, 0))(params, inputs)
    return mean, {n: v.transpose(0, 1) for n, v in jacobian.items()}


def _looped_jacobian(model: nn.Module, params: Params, inputs: Tensor) -> tuple[Tensor, Params]:
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    means, lines = [], []
    for example in inputs.split(1):
        value = functional_outputs(model, leaves, example)[0]
        rows = [
            torch.autograd.grad(output, list(leaves.values()), create_graph=True, allow_unused=True)
            for output in value.reshape(-1)
        ]
        means.append(value)
        lines.append(rows)
    jacobian = {}
    for place, (name, leaf) in enumerate(leaves.items()):
        zero = torch.zeros_like(leaf)
        jacobian[name] = torch.stack(
            [torch.stack([zero if r[place] is None else r[place] for r in rows]) for rows in lines], dim=1
        )
    return torch.stack(means), jacobian
