"""Products with the Jacobian and with the generalised Gauss-Newton matrix, without the matrices.

A gradient is what plain autograd gives, and J is its transpose. Forward mode gives J v faster, but PyTorch's derivatives in the
two modes contradict each other for some operations (an embedding with padding_idx moves its padding in forward mode only), and its
vectorised derivatives are wrong for others. So every product is confirmed before it is used, and made by double backward where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch, Unpack, in_dtype, iterate
from aftermap.distributed import all_reduce_, fail_together, is_distributed
from aftermap.draws import normal_like
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.likelihoods import Likelihood
from aftermap.linalg import GRADIENT_ROUNDING
from aftermap.models import (
    autograd_errors_explained,
    check_device,
    chosen_parameters,
    evaluating,
    functional_outputs,
    prepare_forward_mode,
)
from aftermap.params import Params, flatten, unflatten

__all__ = ["GGNOperator", "pushed_forward"]


class _ForwardModeContradicted(RuntimeError):
    """The derivatives of the network in forward mode are not those in backward mode; double backward takes over."""


def pushed_forward(
    model: nn.Module, params: Params, inputs: Any, directions: Iterable[Params]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the outputs f and J d for each direction d, at the weights ``params``; detached.

    Forward mode is confirmed by one backward pass with the first direction, and replaced by double backward where it fails.
    """
    prepare_forward_mode()
    weights = {n: p.detach() for n, p in params.items()}
    pushed: Callable[[list[Tensor]], Tensor] | None = None
    first = True
    for direction in directions:
        if pushed is None:
            try:
                f, u, *_ = torch.func.jvp(lambda p: functional_outputs(model, p, inputs), (weights,), (direction,))
                if not first or _is_transposed(model, weights, inputs, direction, u):
                    first = False
                    yield f.detach(), u.detach()
                    continue
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError):
                pass  # An operation knows no forward mode. The model's own errors come back below.
            with torch.enable_grad():
                leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
                outputs = functional_outputs(model, leaves, inputs)
                pushed = _double_backward(outputs, list(leaves.values()))
        yield outputs.detach(), pushed([direction[n] for n in weights]).detach()


def _is_transposed(model: nn.Module, weights: Params, inputs: Any, direction: Params, u: Tensor) -> bool:
    """Tells whether z·(J d) is (Jᵀ z)·d for a random z, up to rounding."""
    z = torch.randn(u.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(u)
    with torch.enable_grad():
        leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
        f = functional_outputs(model, leaves, inputs)
        gradients = torch.autograd.grad(f, list(leaves.values()), z, allow_unused=True, materialize_grads=True)
    pairs = [(g.double(), direction[n].double()) for n, g in zip(leaves, gradients, strict=True)]
    backwards = sum(float((g * d).sum()) for g, d in pairs)
    size = sum(float(g.norm() * d.norm()) for g, d in pairs) + float(z.norm() * u.norm())
    return abs(backwards - float((z.double() * u.double()).sum())) <= GRADIENT_ROUNDING[u.dtype] * size


def _double_backward(f: Tensor, leaves: list[Tensor]) -> Callable[[list[Tensor]], Tensor]:
    """Returns the function v -> J v: Jᵀ z is linear in z, so that its derivative in z, applied to v, is J v."""
    z = torch.zeros_like(f, requires_grad=True)
    JTz = torch.autograd.grad(f, leaves, z, create_graph=True, allow_unused=True, materialize_grads=True)

    def pushed(tangents: list[Tensor]) -> Tensor:
        used = [(g, t) for g, t in zip(JTz, tangents, strict=True) if g.requires_grad]
        options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
        return torch.autograd.grad([g for g, _ in used], z, [t for _, t in used], **options)[0]

    return pushed


class GGNOperator:
    """The matrix G = sum_n w_n J_n^T Lambda_n J_n as a function v -> G v.

    In an initialised process group each process holds a part of the data, and products are sums over all; every
    process must then ask for the same products. Every product streams once over the data: u = J v (forward mode), Lambda u, J^T Lambda u (reverse mode).
    Where an operation of the model knows no forward mode or no vmap, or where the derivatives in the two modes contradict each other, the product falls back to double
    backward, one column at a time. The model runs in eval mode and is unchanged afterwards.

    Products with a network in half precision are made in single precision, with copies of its weights: the small
    eigenvalues, which decide the posterior, would be lost otherwise. A network that insists on half precision inside gets
    products in its own.

    Args:
        model: A network with outputs [N, ..., C].
        data: Batches that can be iterated repeatedly (a list or a DataLoader), with the same examples every time.
        likelihood: The likelihood, which gives Lambda through `hessian(outputs, targets)`; class weights and ignored
            targets enter there.
        names: The names of the parameters in the flat order (each row-major). None means all that require a gradient.
        unpack: A function that turns a batch into (inputs, targets) or (inputs, targets, weight). None understands
            these as they are.
        chunk_size: The number of columns that go through the network at once; more is faster and needs more memory.

    Raises:
        InputError: A name is unknown, or the chunk size is below 1.

    >>> from aftermap.likelihoods import Gaussian
    >>> net = nn.Linear(2, 1, bias=False)
    >>> operator = GGNOperator(net, [(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1))], Gaussian(1.0))
    >>> operator.mv(torch.tensor([1.0, 0.0]))
    tensor([1., 2.])
    """

    def __init__(
        self,
        model: nn.Module,
        data: Iterable[Any],
        likelihood: Likelihood,
        names: Sequence[str] | None = None,
        unpack: Unpack | None = None,
        *,
        chunk_size: int = 16,
    ) -> None:
        if chunk_size < 1:
            raise InputError(f"got chunk_size={chunk_size}; pass at least 1")
        self._model, self._data, self._likelihood, self._unpack = model, data, likelihood, unpack
        self._params = chosen_parameters(model, names)
        self._chunk_size = chunk_size
        self._n_data: int | None = None
        self._forward_mode = True
        self._steepest = 0.0  # the largest |G v| / |v| of a batch so far
        prepare_forward_mode()
        self.names = list(self._params)
        self.size = sum(p.numel() for p in self._params.values())
        self.device, self._model_dtype = check_device(model)
        half = self._model_dtype in (torch.float16, torch.bfloat16)
        self.dtype = torch.float32 if half else self._model_dtype

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (P, P) of the matrix."""
        return self.size, self.size

    @property
    def params(self) -> Params:
        """The weights at which the matrix is taken, by name: the model's own, not copies."""
        return dict(self._params)

    @property
    def n_data(self) -> int:
        """The number of examples seen in a pass, counted now if there has been none."""
        if self._n_data is None:
            with fail_together("counting the data"):
                seen = sum(batch.size for batch in self._batches())
            return self._count(seen)
        return self._n_data

    @autograd_errors_explained()
    def mv(self, v: Tensor) -> Tensor:
        """Returns the product G v.

        The sums over batches are kept in the dtype of v: float64 vectors cost little and keep a float32
        network's product as exact as it is.

        Args:
            v: The vector [P], or vectors [P, k].

        Returns:
            The product, of the shape of v.

        Raises:
            ShapeError: The shape of v does not fit the parameters.
            DataError: The data gave another number of examples than before.
        """
        if v.dim() not in (1, 2) or v.shape[0] != self.size:
            raise ShapeError(f"got a vector of shape {tuple(v.shape)}; pass [{self.size}] or [{self.size}, k]")
        columns = v if v.dim() == 2 else v[:, None]
        total, seen = torch.zeros_like(columns), 0
        with fail_together("multiplying with the GGN"), evaluating(self._model):
            for batch in self._batches():
                total += self._batch_product(batch, columns).to(total)
                seen += batch.size
        all_reduce_([total])
        self._count(seen)
        return total if v.dim() == 2 else total[:, 0]

    @autograd_errors_explained()
    def noise(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, G), as sum_n sqrt(w_n) J_n^T S_n eps_n with S_n S_n^T = Lambda_n and standard normal eps_n.

        Args:
            count: The number of draws, in one pass over the data.
            generator: The source of the random draws; each process of a group needs another one, since each has other
                data.

        Returns:
            The draws [P, count] in float64.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"the number of draws must be a whole number of at least 1, got {count!r}")
        total, seen = torch.zeros(self.size, count, dtype=torch.float64, device=self.device), 0
        with fail_together("drawing noise with the covariance of the GGN"), evaluating(self._model):
            for batch in self._batches():
                total += self._batch_noise(batch, count, generator).to(total)
                seen += batch.size
        all_reduce_([total])
        self._count(seen)
        return total

    def __matmul__(self, v: Tensor) -> Tensor:
        return self.mv(v)

    def to_dense(self) -> Tensor:
        """Returns G [P, P] in float64; for small models and tests."""
        return self.mv(torch.eye(self.size, dtype=torch.float64, device=self.device))

    def _batches(self) -> Iterable[Batch]:
        return iterate(
            self._data,
            device=self.device,
            dtype=self._model_dtype,
            unpack=self._unpack,
            may_be_empty=is_distributed(),
        )

    def _working_params(self) -> Params:
        """Returns the weights in the precision of products."""
        return {name: p.to(self.dtype) for name, p in self._params.items()}

    def _outputs(self, params: Params, batch: Batch) -> Tensor:
        """Returns the outputs under ``params``, in the precision of products."""
        if self.dtype == self._model_dtype:
            return functional_outputs(self._model, params, batch.inputs)
        others = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        fixed = {n: t.detach().to(self.dtype) for n, t in others.items() if n not in params and t.is_floating_point()}
        return functional_outputs(self._model, {**fixed, **params}, in_dtype(batch.inputs, self.dtype))

    def _count(self, here: int) -> int:
        """Returns how many examples all processes saw in a pass in which this one saw ``here``: as many as in the pass before."""
        counted = torch.tensor([here])
        all_reduce_([counted])
        seen = int(counted)
        if self._n_data is not None and seen != self._n_data:
            raise DataError(
                f"a pass over the data gave {seen} examples, an earlier one {self._n_data}; the product "
                "needs the same data every time: pass a list or a DataLoader, not a generator"
            )
        self._n_data = seen
        return seen

    def _batch_product(self, batch: Batch, columns: Tensor) -> Tensor:
        """Returns one batch's sum of w_n J_n^T Lambda_n J_n V for V [P, k]."""
        if self.dtype != self._model_dtype:
            try:
                return self._product(batch, columns.to(self.dtype))
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError):
                # Some operation of the network insists on half precision. The model's own errors come back below.
                self.dtype, self._forward_mode = self._model_dtype, True
        return self._product(batch, columns.to(self.dtype))

    def _product(self, batch: Batch, columns: Tensor) -> Tensor:
        if self._forward_mode:
            try:
                return self._forward_product(batch, columns)
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError):
                # Some operation has no forward-mode or batching rule. The model's own errors come back below.
                result = self._double_backward_product(batch, columns)
                self._forward_mode = False
                return result
        return self._double_backward_product(batch, columns)

    def _forward_product(self, batch: Batch, columns: Tensor) -> Tensor:
        def outputs(params: Params) -> Tensor:
            return self._outputs(params, batch)

        weights = self._working_params()
        f, pullback, *_ = torch.func.vjp(outputs, weights)
        Lambda = self._output_hessian(f.detach(), batch)

        def product(tangent: Params) -> tuple[Tensor, Tensor]:
            _, u, *_ = torch.func.jvp(outputs, (weights,), (tangent,))
            Lambda_u = (Lambda @ u[..., None].to(Lambda.dtype))[..., 0]
            (gradient,) = pullback(Lambda_u.to(u.dtype))
            return flatten(gradient, self.names), (u * Lambda_u).sum()

        parts = []
        for chunk in columns.split(self._chunk_size, dim=1):
            products, energies = torch.func.vmap(product)(unflatten(chunk, weights))
            self._check_transposed(chunk, products.T.detach(), energies.detach())
            parts.append(products.T.detach())
        return torch.cat(parts, dim=1)

    def _check_transposed(self, columns: Tensor, products: Tensor, energies: Tensor) -> None:
        """Raises where v·(Jᵀ Λ J v) is not (J v)·Λ (J v): then J forwards is not the transpose of Jᵀ backwards."""
        v, Gv = columns.to(torch.float64), products.to(torch.float64)
        lengths, sizes = v.norm(dim=0), Gv.norm(dim=0)
        # Where G v vanishes it is rounding of the largest product.
        steepest = max(self._steepest, float((sizes / lengths.clamp_min(1e-300)).max()))
        rounding = GRADIENT_ROUNDING[self.dtype] * lengths * sizes
        rounding += 64 * torch.finfo(self.dtype).eps * steepest * lengths.square()
        # This is not "error > ...", since a NaN is wrong, too.
        if not bool((((v * Gv).sum(0) - energies).abs() <= rounding).all()):
            raise _ForwardModeContradicted
        self._steepest = steepest

    def _double_backward_product(self, batch: Batch, columns: Tensor) -> Tensor:
        with torch.enable_grad():
            params = {name: p.clone().requires_grad_() for name, p in self._working_params().items()}
            leaves = list(params.values())
            f = self._outputs(params, batch)
            Lambda = self._output_hessian(f.detach(), batch)
            pushed = _double_backward(f, leaves)
            out = []
            for column in columns.T:
                u = pushed(list(unflatten(column, self._params).values()))
                vector = (Lambda @ u[..., None].to(Lambda.dtype))[..., 0].to(u.dtype)
                gradient = torch.autograd.grad(f, leaves, vector, retain_graph=True, materialize_grads=True)
                out.append(torch.cat([g.reshape(-1) for g in gradient]))
        return torch.stack(out, dim=1).detach()

    def _batch_noise(self, batch: Batch, count: int, generator: torch.Generator | None) -> Tensor:
        """Returns one batch's sum of sqrt(w_n) J_n^T S_n eps_n: [P, count]."""
        with torch.enable_grad():
            params = {name: p.clone().requires_grad_() for name, p in self._working_params().items()}
            f = self._outputs(params, batch)
            outputs = f.detach()
            self._likelihood.check(outputs, batch.targets)
            columns = self._likelihood.columns(outputs.shape[-1])
            like = outputs.new_empty(()).expand(count, *outputs.shape[:-1], columns)
            vectors = self._likelihood.hessian_root_mv(outputs, normal_like(like, generator), batch.targets)
            if batch.weight is not None:
                vectors = vectors * batch.weight.to(vectors).sqrt().reshape(-1, *[1] * (outputs.dim() - 1))
            out = []
            for vector in vectors:
                gradient = torch.autograd.grad(
                    f, list(params.values()), vector, retain_graph=True, allow_unused=True, materialize_grads=True
                )
                out.append(torch.cat([g.reshape(-1) for g in gradient]))
        return torch.stack(out, dim=1).detach()

    def _output_hessian(self, f: Tensor, batch: Batch) -> Tensor:
        """Returns w_n Lambda_n in float64: [N, ..., C, C].

        In single precision a direction in which outputs do not matter, such as a shift of all logits, would get curvature.
        """
        self._likelihood.check(f, batch.targets)
        Lambda = self._likelihood.hessian(f.to(torch.float64), batch.targets)
        if batch.weight is None:
            return Lambda
        return Lambda * batch.weight.to(Lambda).reshape(-1, *[1] * (Lambda.dim() - 1))
