"""The exact Hessian of the summed negative log-likelihood; for small models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch, Unpack, iterate
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.structures.base import Block, Structure, register_structure
from aftermap.curvature.structures.full import FullBlock
from aftermap.distributed import all_reduce_, fail_together, is_distributed
from aftermap.errors import InputError, NumericalError, NumericalWarning
from aftermap.likelihoods import Likelihood
from aftermap.linalg import differing
from aftermap.models import autograd_errors_explained, check_device, chosen_parameters, evaluating, functional_outputs
from aftermap.params import Params

__all__ = ["MAX_PARAMETERS", "HessianResult", "full_hessian"]

MAX_PARAMETERS = 20_000


@dataclass(frozen=True)
class HessianResult:
    """A Hessian and what its spectrum says.

    Attributes:
        matrix: The Hessian [P, P], float64 and symmetric; the prior is not in it.
        min_eigenvalue: The smallest eigenvalue.
        max_eigenvalue: The largest eigenvalue.
        indefinite: Whether the smallest eigenvalue is negative beyond rounding.
        n_data: The number of examples seen.
    """

    matrix: Tensor
    min_eigenvalue: float
    max_eigenvalue: float
    indefinite: bool
    n_data: int


def full_hessian(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    names: Sequence[str] | None = None,
    unpack: Unpack | None = None,
    *,
    chunk_size: int = 32,
) -> HessianResult:
    """Returns the Hessian H = d^2 sum_n w_n E_n / d theta^2 by double backward.

    It is H = sum_n w_n [J_n^T Lambda_n J_n - sum_k r_nk d^2 f_nk / d theta^2] with the residual r_n = -dE_n/df. The
    second term makes it indefinite away from a minimum, and then it is no precision of a Gaussian: the generalised
    Gauss-Newton matrix, which drops that term, always is. For piecewise-linear networks the two agree on the diagonal
    block of every layer, but not elsewhere.

    Args:
        model: A network with outputs [N, ..., C]; it runs in eval mode and is unchanged afterwards.
        data: Batches of (x, y) or (x, y, weight).
        likelihood: The likelihood, which gives `nll(outputs, targets) -> [N]`.
        names: The names of the parameters in the flat order (each row-major). None means all that require a gradient.
        unpack: A function that turns a batch into (inputs, targets) or (inputs, targets, weight).
        chunk_size: The number of rows that are back-propagated at once; more is faster and needs more memory.

    Returns:
        A `HessianResult`; nothing is clamped.

    Raises:
        InputError: There are more than 20,000 parameters, or a name is unknown.
        NumericalError: An entry is not finite, or the matrix is not symmetric because a double backward of the model is
            wrong.

    Warns:
        NumericalWarning: The matrix is indefinite.

    References:
        Ritter, Botev, Barber 2018, section 2.1.

    >>> from aftermap.likelihoods import Gaussian
    >>> net = nn.Linear(2, 1, bias=False)
    >>> full_hessian(net, [(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1))], Gaussian(1.0)).matrix
    tensor([[1., 2.],
            [2., 4.]], dtype=torch.float64)
    """
    params = chosen_parameters(model, names)
    size = sum(p.numel() for p in params.values())
    if size > MAX_PARAMETERS:
        raise InputError(
            f"the Hessian of {size:,} parameters would need {8 * size**2 / 2**30:,.1f} GiB; at most "
            f"{MAX_PARAMETERS:,} are allowed. Choose fewer parameters (the last layer), or use a "
            "Kronecker or low-rank structure"
        )
    if chunk_size < 1:
        raise InputError(f"got chunk_size={chunk_size}; pass at least 1")
    device, dtype = check_device(model)
    H = torch.zeros(size, size, dtype=torch.float64, device=device)
    n_data = 0
    with fail_together("computing the Hessian"), evaluating(model):
        for batch in iterate(data, device=device, dtype=dtype, unpack=unpack, may_be_empty=is_distributed()):
            _add_batch(H, model, params, likelihood, batch, chunk_size)
            n_data += batch.size
    counted = torch.tensor([n_data])
    all_reduce_([H, counted])
    if not bool(torch.isfinite(H).all()):
        raise NumericalError("the Hessian is not finite; check the model's outputs and weights")
    _check_symmetry(H, params, dtype)
    H = (H + H.T) / 2
    eigenvalues = torch.linalg.eigvalsh(H)
    lowest, highest = float(eigenvalues[0]), float(eigenvalues[-1])
    rounding = 100 * torch.finfo(dtype).eps * max(abs(lowest), abs(highest))
    if lowest < -rounding:
        warnings.warn(
            f"the Hessian is indefinite: its smallest eigenvalue is {lowest:.4g} (largest {highest:.4g}), so "
            "it is not the precision of a Gaussian. Train to a minimum, or use the GGN, which never is",
            NumericalWarning,
            stacklevel=2,
        )
    return HessianResult(H, lowest, highest, lowest < -rounding, int(counted))


def _check_symmetry(H: Tensor, params: Params, dtype: torch.dtype) -> None:
    """Raises an error unless H is symmetric up to rounding, whose size the network's dtype decides."""
    difference = (H - H.T).abs()
    if float(difference.max()) <= math.sqrt(torch.finfo(dtype).eps) * float(H.abs().max()):
        return
    owner = [name for name, p in params.items() for _ in range(p.numel())]
    row, column = divmod(int(difference.argmax()), len(H))
    raise NumericalError(
        f"the Hessian is not symmetric: its entries ({row}, {column}) and ({column}, {row}), between {owner[row]} and "
        f"{owner[column]}, are {float(H[row, column]):.4g} and {float(H[column, row]):.4g}. The double backward of an "
        "operation in the network is wrong (PyTorch's weight_norm is known for it), so no Hessian can be had from "
        "autograd. Remove that operation, or use structure='full' (the GGN), which needs first derivatives only"
    )


@autograd_errors_explained()
def _add_batch(
    H: Tensor, model: nn.Module, params: Params, likelihood: Likelihood, batch: Batch, chunk_size: int
) -> None:
    """Adds the Hessian of one batch to H [P, P], some rows at a time."""
    with torch.enable_grad():
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        outputs = functional_outputs(model, leaves, batch.inputs)
        likelihood.check(outputs.detach(), batch.targets)
        loss = likelihood.nll(outputs, batch.targets)
        total = loss.sum() if batch.weight is None else (loss * batch.weight.to(loss)).sum()
        variables = list(leaves.values())
        gradient = torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(total, variables, create_graph=True, materialize_grads=True)]
        )
        if not gradient.requires_grad:  # The loss is linear in all of them.
            return
        start, batched = 0, True
        while start < len(gradient):
            stop = min(start + chunk_size, len(gradient))
            units = torch.zeros(stop - start, len(gradient), dtype=gradient.dtype, device=H.device)
            units[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
            try:
                rows = _rows(gradient, variables, units, batched)
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError):
                if not batched:
                    raise
                batched = False  # Some operation has no batching rule, so rows go one at a time.
                continue
            if batched and start == 0 and not _is_confirmed(gradient, variables, units, rows):
                batched = False  # The vectorised derivative of some operation is wrong.
                continue
            H[start:stop] += rows.to(H)
            start = stop


def _rows(gradient: Tensor, variables: list[Tensor], units: Tensor, batched: bool) -> Tensor:
    """Returns rows of the Hessian: d (units . gradient) / d theta, [len(units), P]."""

    def pull(vector: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            gradient, variables, vector, retain_graph=True, is_grads_batched=batched, materialize_grads=True
        )

    if batched:
        return torch.cat([g.reshape(len(units), -1) for g in pull(units)], dim=1)
    return torch.stack([torch.cat([g.reshape(-1) for g in pull(unit)]) for unit in units])


def _is_confirmed(gradient: Tensor, variables: list[Tensor], units: Tensor, rows: Tensor) -> bool:
    """Tells whether rows that were made together give what a random combination of them gives alone."""
    weights = torch.randn(len(units), generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(units)
    truth = _rows(gradient, variables, (weights @ units)[None], batched=False)[0]
    return not differing({"row": weights.to(rows) @ rows}, {"row": truth}, gradient.dtype)


def fit_hessian(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """Fits the exact Hessian over all selected parameters, of the data of all processes."""
    counts = problem.sum_loss()
    result = full_hessian(problem.model, problem.data, problem.likelihood, problem.names, problem.unpack)
    return (FullBlock("all", problem.shapes, result.matrix, "hessian"),), counts


register_structure(
    Structure(
        "hessian",
        "The exact Hessian of the loss, dense; it can be indefinite away from a minimum.",
        fit_hessian,
        (FullBlock,),
        passes=2,
        curvatures=("exact",),
        max_parameters=MAX_PARAMETERS,
        blocks_are_global=True,
        reads_layers=False,
    )
)
