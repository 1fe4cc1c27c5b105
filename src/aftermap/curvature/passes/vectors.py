"""The vectors that are back-propagated from the outputs of a network: the only switch for the kind of curvature.

The curvature of one example in its outputs f [..., C], flattened over its R positions, is blockdiag_r(Λ_r),
with Λ_r the Hessian of the negative log-likelihood at position r. A set of vectors v stands for it through
Σ_v v vᵀ; back-propagated, Jᵀv gives the generalised Gauss-Newton matrix Σ_v (Jᵀv)(Jᵀv)ᵀ = Σ_r J_rᵀ Λ_r J_r.

Index legend: V vectors, N examples, R positions, C outputs, K columns of the root of Λ_r.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aftermap.draws import signs_like
from aftermap.errors import InputError, ShapeError
from aftermap.likelihoods.base import Likelihood, check_values

__all__ = ["AUTO_LIMIT", "VECTOR_KINDS", "Vectors", "make_vectors", "resolve_kind"]

VECTOR_KINDS = ("exact", "rademacher", "sampled", "empirical", "jacobian")
AUTO_LIMIT = 20  # "auto" is exact up to this many outputs of one example.


def resolve_kind(kind: str, outputs: Tensor) -> str:
    """Returns the kind of vectors that a word stands for: "auto" is exact for R·C ≤ 20 outputs, rademacher above.

    Args:
        kind: The kind of vectors: one of ``VECTOR_KINDS`` or "auto".
        outputs: The network's outputs [N, ..., C].

    Returns:
        The kind, one of ``VECTOR_KINDS``.

    Raises:
        InputError: The word is another one.
        ShapeError: The outputs have fewer than two dimensions.

    >>> resolve_kind("auto", torch.zeros(8, 10)), resolve_kind("auto", torch.zeros(8, 3, 10))
    ('exact', 'rademacher')
    """
    if outputs.dim() < 2:
        raise ShapeError(
            f"outputs must have shape [N, ..., C], got {list(outputs.shape)}; "
            "if the network has one output per example, add the last dimension with outputs.unsqueeze(-1)."
        )
    if kind == "auto":
        return "exact" if math.prod(outputs.shape[1:]) <= AUTO_LIMIT else "rademacher"
    if kind not in VECTOR_KINDS:
        allowed = ", ".join(map(repr, ("auto", *VECTOR_KINDS)))
        raise InputError(f"the kind of curvature is {kind!r}, but must be one of {allowed}.")
    return kind


@dataclass(frozen=True, eq=False)
class Vectors:
    """A set of ``count`` vectors for every example, built chunk by chunk; see :func:`make_vectors`.

    A random kind draws while it is iterated, one vector at a time: the size of the chunks changes nothing,
    and a second iteration draws anew.

    Args:
        kind: The kind of vectors, one of ``VECTOR_KINDS``.
        count: The number V of vectors.
    """

    kind: str
    count: int
    _likelihood: Likelihood = field(repr=False)
    _outputs: Tensor = field(repr=False)  # [N, ..., C], detached
    _targets: Tensor | None = field(repr=False)
    _root_weight: Tensor | None = field(repr=False)  # [N, 1, ..., 1]: the square root of the weights
    _generator: torch.Generator | None = field(repr=False)
    _columns: int = field(repr=False)  # vectors of one position; all of them where a vector covers every position

    def chunks(self, size: int | None = None) -> Iterator[Tensor]:
        """Yields the vectors in chunks.

        Args:
            size: The greatest number of vectors at a time. None takes the vectors of one position at a time for exact
                and jacobian (all of them if there is one position), and all vectors of the other kinds.

        Yields:
            Vectors [v, N, ..., C] with v ≤ size, in the dtype and on the device of the outputs.

        Raises:
            InputError: The size is below 1.
        """
        if size is not None and size < 1:
            raise InputError(f"the number of vectors in a chunk is {size}, but must be 1 or more, or None.")
        # This is checked here, not at the first use of the iterator.
        step = size or max(self._columns, 1)
        return (self._chunk(start, min(start + step, self.count)) for start in range(0, self.count, step))

    @torch.no_grad()
    def _chunk(self, start: int, stop: int) -> Tensor:
        """Returns the vectors start ... stop - 1: [v, N, ..., C]."""
        if self.kind == "jacobian":  # The identity belongs to the network, not to the data, so it takes no weights.
            return self._unit_vectors(start, stop).contiguous()
        if self.kind == "exact":
            basis = self._unit_vectors(start, stop)
            chunk = self._likelihood.hessian_root_mv(self._outputs, basis, self._targets)
        else:
            # One draw comes after the other, so that the random numbers do not depend on the size of the chunk.
            chunk = torch.stack([self._draw() for _ in range(start, stop)])
            chunk = chunk if self.count == 1 else chunk / math.sqrt(self.count)
        if self.kind == "rademacher":
            chunk = self._likelihood.hessian_root_mv(self._outputs, chunk, self._targets)
        return chunk if self._root_weight is None else chunk * self._root_weight

    def _unit_vectors(self, start: int, stop: int) -> Tensor:
        """Returns rows start ... stop - 1 of the identity over (positions, columns): [v, N, ..., K]."""
        positions, columns = self._outputs.shape[1:-1], self._columns
        index = torch.arange(start, stop, device=self._outputs.device)
        basis = self._outputs.new_zeros(stop - start, math.prod(positions) * columns)
        basis.scatter_(1, index.unsqueeze(1), 1.0)
        basis = basis.reshape(stop - start, 1, *positions, columns)
        return basis.expand(-1, self._outputs.shape[0], *[-1] * (len(positions) + 1))

    def _draw(self) -> Tensor:
        """Draws one sample for every example: a gradient [N, ..., C], or the signs [N, ..., K] of rademacher."""
        outputs, targets = self._outputs, self._targets
        if self.kind == "rademacher":
            columns = self._likelihood.columns(outputs.shape[-1])
            return signs_like(outputs.new_empty(()).expand(*outputs.shape[:-1], columns), self._generator)
        if self.kind == "sampled":
            return self._likelihood.sample_gradient(outputs, targets, self._generator)
        if targets is None:  # make_vectors has refused this.
            raise InputError("empirical vectors need targets.")
        return self._likelihood.gradient(outputs, targets)


def make_vectors(
    kind: str,
    likelihood: Likelihood,
    outputs: Tensor,
    targets: Tensor | None,
    *,
    weight: Tensor | None = None,
    samples: int = 1,
    generator: torch.Generator | None = None,
) -> Vectors:
    r"""Returns the vectors to back-propagate for one kind of curvature.

    Per example, with w its weight and everything flattened over (positions, C):

    .. math::
        \sum_v v v^\top = w\,\mathrm{blockdiag}_r(\Lambda_r)

    - ``exact``: the columns of the root S of Λ, each at one position: R·K vectors, equality.
    - ``rademacher``: S ε with random signs ε at all positions at once, M samples: equality in expectation.
    - ``sampled``: gradients at labels drawn from the model, M samples: equality in expectation.
    - ``empirical``: the observed gradient g, one vector: w g gᵀ, which is not a curvature of the likelihood.
    - ``jacobian``: the R·C unit vectors: the identity, without weights.
    - ``auto``: exact for R·C ≤ 20, rademacher above.

    Targets are not checked here: call ``likelihood.check`` where data enter.

    Args:
        kind: The kind of vectors: one of ``VECTOR_KINDS`` or "auto".
        likelihood: The likelihood, which gives Λ.
        outputs: The network's outputs [N, ..., C], which are detached.
        targets: The targets in the form that the likelihood describes; None if there are none (not for empirical).
        weight: The weights [N], not negative; a weight of w means w copies of the datum. None means 1.
        samples: The number M of samples for rademacher and sampled; the other kinds draw nothing and take no notice.
        generator: The source of the random draws. None means torch's default generator.

    Returns:
        The vectors; ``chunks`` builds them.

    Raises:
        InputError: The kind is unknown, there is less than one sample, or empirical has no targets.
        ShapeError: The weight is not [N].
        DataError: A weight is negative or not finite.

    >>> from aftermap.likelihoods import Gaussian
    >>> vectors = make_vectors("exact", Gaussian(noise=0.5), torch.zeros(1, 2), None)
    >>> vectors
    Vectors(kind='exact', count=2)
    >>> next(vectors.chunks())
    tensor([[[2., 0.]],
            [[0., 2.]]])

    References:
        Dangel, Kunstner and Hennig 2020, BackPACK (exact and sampled); Hutchinson 1990 (random signs).
    """
    kind = resolve_kind(kind, outputs)
    outputs = outputs.detach()
    positions, n_outputs = math.prod(outputs.shape[1:-1]), outputs.shape[-1]
    if kind in ("exact", "jacobian"):
        columns = likelihood.columns(n_outputs) if kind == "exact" else n_outputs
        count = positions * columns
    elif kind == "empirical":
        columns = count = 1
        if targets is None:
            raise InputError("empirical vectors are the observed gradients and need targets, got None.")
    else:
        columns = count = samples
        if samples < 1:
            raise InputError(f"samples is {samples}, but must be 1 or more.")
    root_weight = None if weight is None else _root_weight(weight, outputs)
    return Vectors(kind, count, likelihood, outputs, targets, root_weight, generator, columns)


def _root_weight(weight: Tensor, outputs: Tensor) -> Tensor:
    """Returns the square root of the weights of the examples, ready to multiply [V, N, ..., C]."""
    if weight.shape != outputs.shape[:1]:
        raise ShapeError(
            f"weight has shape {list(weight.shape)}, but one value per example is needed: {[outputs.shape[0]]}."
        )
    bad = ~(torch.isfinite(weight) & (weight >= 0))
    check_values(weight, bad, "weight", "finite and 0 or more", "make_vectors")
    return weight.detach().to(outputs).sqrt().reshape(-1, *[1] * (outputs.dim() - 1))
