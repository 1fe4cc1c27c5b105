"""The full Gauss-Newton posterior without its matrix: every cross-layer covariance, at the price of products with the data.

P = s·G + P₀ acts through one pass over the data. Solves are by conjugate gradients with a Kronecker, diagonal or low-rank
posterior as preconditioner; samples by sample-then-optimise; log determinants by Lanczos quadrature (docs/mathematics/structures.md).

Exact posterior samples by solving a noisy least-squares problem (sample-then-optimise).

The minimiser of ½‖Jw − ỹ‖²_{sΛ} + ½‖w − w₀‖²_{P₀} with ỹ ~ N(0, (sΛ)⁻¹), w₀ ~ N(0, P₀⁻¹) is a draw from N(0, (sG + P₀)⁻¹).
Its normal equations are (sG + P₀) w = √s Jᵀ S ε + P₀^{½} z with SSᵀ = Λ: the root needs no inverse of Λ, which is singular
for a softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.batches import Unpack
from aftermap.curvature.passes.backward import LayerGradients
from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.passes.vectors import VECTOR_KINDS
from aftermap.curvature.structures.base import (
    Block,
    Structure,
    covariances_by_example,
    join_flat,
    paired_products,
    register_structure,
    split_flat,
)
from aftermap.distributed import broadcast_number, rank
from aftermap.draws import normal_like, signs_like
from aftermap.errors import InputError, ShapeError
from aftermap.krylov import TraceEstimate
from aftermap.likelihoods import Likelihood
from aftermap.linalg import safe_cholesky, symmetrise
from aftermap.params import Params, flatten
from aftermap.posteriors.base import GaussianPosterior, Posterior, by_module, check_scale
from aftermap.posteriors.solver import (
    SOLVE_NUMBERS,
    LinearSystem,
    Preconditioner,
    SolveReport,
    log_det_quadrature,
    symmetric_product,
)
from aftermap.prior import Prior, PriorSpec

__all__ = [
    "ESTIMATORS",
    "FUNCTIONAL_KINDS",
    "MatrixFreePosterior",
    "MatrixFreeSettings",
    "SampleNoise",
    "check_estimator",
    "common_seed",
    "draw_noise",
    "fit_no_blocks",
    "mean_estimate",
    "precondition",
    "prior_shares",
]

FUNCTIONAL_KINDS = ("cg", "samples")
ESTIMATORS = ("samples", "hutchinson")
_MAX_DENSE = 20_000


@dataclass(frozen=True)
class MatrixFreeSettings:
    """How exact a matrix-free posterior is, and at what price.

    Attributes:
        tolerance: of a solve, ‖b − Px‖ / ‖b‖; None: 1e-8 for a float64 network, 1e-4 for others.
        max_iterations: of a solve; each is one pass over the data for all right-hand sides.
        kind: of the predictive covariance: "cg" solves for every output of every input, exact up to the tolerance;
            "samples" uses the fixed samples, with relative standard deviation √(2/S), and no pass over the data.
        samples: S, the size of the fixed set, and the number of random signs of other estimates.
        probes: of the log determinant.
        steps: Lanczos steps of the log determinant, each one pass over the data.
        dense_limit: up to so many parameters the log determinant, the marginal variances and the effective parameters
            are exact, from the dense matrix.
        seed: of the fixed samples and of the probes: the same for every prior, so that priors are compared fairly.
    """

    tolerance: float | None = None
    max_iterations: int = 1000
    kind: str = "cg"
    samples: int = 64
    probes: int = 16
    steps: int = 50
    dense_limit: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FUNCTIONAL_KINDS:
            raise InputError(f"kind={self.kind!r} is not known; allowed are {', '.join(map(repr, FUNCTIONAL_KINDS))}")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise InputError(f"the tolerance must be between 0 and 1, or None, got {self.tolerance!r}")
        for name in ("max_iterations", "samples", "probes", "steps"):
            value = getattr(self, name)
            object.__setattr__(self, name, checks.count(name, value))


@dataclass(frozen=True)
class SampleNoise:
    """The random part of some samples; one set serves every prior and scale.

    Attributes:
        prior: z [S, P], standard normal.
        data: Jᵀ S ε [S, P], with covariance G.
    """

    prior: Tensor
    data: Tensor

    def right_hand_side(self, prior: Tensor, scale: Tensor) -> Tensor:
        """√s Jᵀ S ε + P₀^{½} z, with covariance sG + P₀.

        Args:
            prior: P₀ [P].
            scale: s, 0-d.

        Returns:
            [S, P].
        """
        return scale.sqrt() * self.data + prior.sqrt() * self.prior


def common_seed(generator: torch.Generator | None) -> int:
    """A seed drawn from a generator; of process 0 in a group, so that all walk through the same numbers.

    >>> common_seed(torch.Generator().manual_seed(0)) == common_seed(torch.Generator().manual_seed(0))
    True
    """
    device = torch.device("cpu") if generator is None else generator.device
    return broadcast_number(int(torch.randint(2**62, (), generator=generator, device=device)))


def draw_noise(operator: GGNOperator, count: int, seed: int) -> SampleNoise:
    """The noise of ``count`` samples, in one pass over the data.

    Args:
        operator: gives Jᵀ S ε.
        count: S.
        seed: the same on every process of a group; the data of each process get random numbers of their own.

    Raises:
        InputError: fewer than one sample.
    """
    count = checks.count("count", count)
    like = torch.empty(count, operator.size, dtype=torch.float64, device=operator.device)
    prior = normal_like(like, torch.Generator().manual_seed(seed))
    # Offset by one: the noise of the data must not repeat that of the prior.
    data = operator.noise(count, torch.Generator().manual_seed(seed + 1 + rank())).T
    return SampleNoise(prior, data)


def check_estimator(method: str) -> str:
    """The method, if it is known.

    Raises:
        InputError: it is not.
    """
    if method not in ESTIMATORS:
        raise InputError(f"method={method!r} is not known; allowed are {', '.join(map(repr, ESTIMATORS))}")
    return method


def mean_estimate(values: Tensor) -> TraceEstimate:
    """The mean of values [S] and its standard error (NaN for one value).

    >>> mean_estimate(torch.tensor([1.0, 3.0]))
    TraceEstimate(value=2.0, standard_error=1.0)
    """
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return TraceEstimate(float(values.mean()), error)


def prior_shares(system: LinearSystem, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The diagonal of R = P₀^{½} Σ P₀^{½}, the share of each entry's prior variance that is left, by random signs z.

    With a matrix Q whose diagonal is known, diag R = diag Q + E[z∘(R − Q)z]. Q = I leaves a variance of at most 1 − R_ii per
    sign vector; Q from the preconditioner leaves less where that is close. The better of the two is taken.

    Args:
        system: solves with P.
        count: S.
        seed: of the signs.

    Returns:
        diag Q [P], and z∘(R − Q)z [S, P].
    """
    like = torch.empty(count, system.operator.size, dtype=torch.float64, device=system.operator.device)
    signs = signs_like(like, torch.Generator().manual_seed(seed))
    root = system.prior.sqrt()
    moved = root * system.solve(root * signs)[0]
    guess = root * system.preconditioner.solve(root * signs)
    options = [
        (torch.ones_like(root), signs * (moved - signs)),
        (system.prior * system.preconditioner.marginal_variance(), signs * (moved - guess)),
    ]
    return min(options, key=lambda pair: float(pair[1].var(0, correction=0).sum()))


@dataclass(eq=False)
class _Shared:
    """What does not depend on the prior and the scale."""

    noise: SampleNoise | None = None
    curvature: Tensor | None = None


@dataclass(eq=False)
class _Own:
    """What does."""

    samples: Tensor | None = None
    log_det: TraceEstimate | None = None
    covariance: Tensor | None = None
    shares: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class MatrixFreePosterior(Posterior):
    r"""N(θ*, (s·G + P₀)⁻¹) with the full generalised Gauss-Newton matrix G, cross-layer terms included.

    In a group of processes every method that passes over the data must be called by all of them with the same values;
    so predict there with ``kind="samples"``.

    Attributes:
        mean: θ*, by name.
        operator: products with G.
        prior: P₀ and its mean; any diagonal.
        scale: s, 0-d float64.
        layers: layer name -> parameters.
        preconditioner: an approximation of the precision with a cheap inverse.
        settings: accuracy and cost.

    References:
        Antorán et al. 2023, Sampling-based inference for large linear models; docs/mathematics/structures.md.
    """

    mean: Params
    operator: GGNOperator
    prior: Prior
    scale: Tensor
    layers: Mapping[str, Sequence[str]]
    preconditioner: Preconditioner
    settings: MatrixFreeSettings = field(default_factory=MatrixFreeSettings)
    _shared: _Shared = field(default_factory=_Shared, repr=False)
    _own: _Own = field(default_factory=_Own, repr=False)

    @staticmethod
    def from_operator(
        operator: GGNOperator,
        prior: PriorSpec | None = None,
        *,
        preconditioner: GaussianPosterior | None = None,
        prior_mean: float | Params = 0.0,
        scale: float | Tensor | None = None,
        settings: MatrixFreeSettings | None = None,
        generator: torch.Generator | None = None,
    ) -> MatrixFreePosterior:
        """A posterior around the weights at which the operator is taken.

        Args:
            operator: products with G, over data that can be passed over again and again.
            prior: precision, see :class:`Prior`; None: the preconditioner's prior, or 1.
            preconditioner: a posterior over the same parameters with a cheap inverse: Kronecker, diagonal or low rank.
            prior_mean: a number or tensors by name; used if ``prior`` is given.
            scale: what multiplies G; None: the preconditioner's, or 1.
            settings: accuracy and cost.
            generator: gives the settings' seed; None: the seed that is there.

        Raises:
            InputError: the preconditioner is over other parameters, or a prior or scale that is not positive.

        >>> from aftermap.likelihoods import Gaussian
        >>> net = torch.nn.Linear(1, 1, bias=False).double()
        >>> data = [(torch.ones(3, 1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64))]
        >>> posterior = MatrixFreePosterior.from_operator(GGNOperator(net, data, Gaussian(1.0)), 1.0)
        >>> posterior.covariance_mv({"weight": torch.ones(1, 1, dtype=torch.float64)})["weight"]
        tensor([[0.2500]], dtype=torch.float64)
        """
        mean = {n: p.detach().clone() for n, p in operator.params.items()}
        shapes = {n: tuple(p.shape) for n, p in mean.items()}
        layers = by_module(shapes) if preconditioner is None else preconditioner.layers
        if prior is not None or preconditioner is None:
            parsed = Prior.make(1.0 if prior is None else prior, prior_mean, layers, shapes)
        else:
            parsed = preconditioner.prior
        if scale is None:
            scale = 1.0 if preconditioner is None else preconditioner.scale
        factor = check_scale(scale)
        helper = Preconditioner.make(preconditioner, parsed, factor, shapes, operator.device)
        settings = MatrixFreeSettings() if settings is None else settings
        if generator is not None:
            settings = replace(settings, seed=common_seed(generator))
        return MatrixFreePosterior(mean, operator, parsed, factor, layers, helper, settings)

    @property
    def block_names(self) -> tuple[str, ...]:
        """The names of the blocks: there is one."""
        return ("all",)

    def with_prior(
        self, precision: PriorSpec | None = None, *, scale: float | Tensor | None = None, prior: Prior | None = None
    ) -> MatrixFreePosterior:
        """The same curvature under another prior or scale; the random numbers stay, solves are done anew when asked."""
        if prior is None:
            prior = self.prior
            if precision is not None:
                prior = Prior.make(precision, dict(self.prior.mean), self.layers, self.shapes)
        factor = self.scale if scale is None else check_scale(scale)
        helper = Preconditioner.make(self.preconditioner.posterior, prior, factor, self.shapes, self.operator.device)
        return replace(self, prior=prior, scale=factor, preconditioner=helper, _own=_Own())

    def with_settings(self, **changes: Any) -> MatrixFreePosterior:
        """The same posterior with other settings, say ``kind="samples", samples=256``."""
        settings = replace(self.settings, **changes)
        same = settings.seed == self.settings.seed and settings.samples == self.settings.samples
        shared = self._shared if same else _Shared(curvature=self._shared.curvature)
        return replace(self, settings=settings, _shared=shared, _own=_Own())

    # Products and solves, on rows [k, P].

    def _prior_vector(self) -> Tensor:
        return self.prior.vector(self.names, self.operator.device)

    @property
    def _system(self) -> LinearSystem:
        return LinearSystem(
            self.operator,
            self.mean,
            self._prior_vector().detach(),
            self.scale.detach().to(self.operator.device),
            self.preconditioner,
            self.settings.tolerance,
            self.settings.max_iterations,
        )

    def _rows(self, values: Params) -> tuple[Tensor, tuple[int, ...]]:
        """name -> [..., *shape] to [k, P] in float64, and the leading shape."""
        missing = [n for n in self.names if n not in values]
        if missing:
            raise InputError(f"no values for {', '.join(missing[:5])}; give one tensor for each of the parameters")
        for name, shape in self.shapes.items():
            given = tuple(values[name].shape)
            if given[len(given) - len(shape) :] != shape:
                raise ShapeError(f"the values for {name} have shape {given}, which does not end in {shape}")
        name = self.names[0]
        lead = values[name].shape[: values[name].dim() - len(self.shapes[name])]
        rows = join_flat(values, self.names, len(lead)).to(torch.float64)
        return rows.reshape(-1, self.n_params), tuple(lead)

    def _apply(self, values: Params, function: Callable[[Tensor], Tensor]) -> Params:
        rows, lead = self._rows(values)
        found = symmetric_product(rows, function)
        parts = split_flat(found.reshape(*lead, -1), self.shapes)
        return {n: v.to(values[n].dtype) for n, v in parts.items()}

    def precision_mv(self, values: Params) -> Params:
        return self._apply(values, self._system.precision)

    def covariance_mv(self, values: Params) -> Params:
        """Covariance times [..., *shape], by conjugate gradients; differentiable in the values.

        Warns:
            NumericalWarning: the tolerance was not reached.
        """
        return self._apply(values, lambda rows: self._system.solve(rows)[0])

    def solve(self, values: Params) -> tuple[Params, SolveReport]:
        """Like `covariance_mv`, with a report of what was reached."""
        rows, lead = self._rows(values)
        found, report = self._system.solve(rows)
        parts = split_flat(found.reshape(*lead, -1), self.shapes)
        return {n: v.to(values[n].dtype) for n, v in parts.items()}, report

    # Samples.

    def sample(self, count: int, generator: torch.Generator | None = None) -> Params:
        """Exact samples (up to the tolerance): one pass for the noise, then one solve for all of them."""
        rows = self._solve_noise(draw_noise(self.operator, count, common_seed(generator)))
        deviations = split_flat(rows, self.shapes)
        return {n: self.mean[n] + deviations[n].to(self.mean[n].dtype) for n in self.names}

    def _solve_noise(self, noise: SampleNoise) -> Tensor:
        system = self._system
        return system.solve(noise.right_hand_side(system.prior, system.scale))[0]

    def fixed_samples(self) -> Tensor:
        """Deviations from the mean [S, P]: drawn once, then kept; under another prior the same noise is used."""
        if self._own.samples is None:
            if self._shared.noise is None:
                self._shared.noise = draw_noise(self.operator, self.settings.samples, self.settings.seed)
            self._own.samples = self._solve_noise(self._shared.noise)
        return self._own.samples

    # The log determinant and the diagonal of the covariance: exact for few parameters, else estimated.

    @property
    def _is_small(self) -> bool:
        return self.n_params <= self.settings.dense_limit

    def to_dense(self) -> Tensor:
        if self.n_params > _MAX_DENSE:
            raise InputError(
                f"a dense precision over {self.n_params:,} parameters would take {8 * self.n_params**2 / 2**30:,.1f} GiB; the limit "
                f"is {_MAX_DENSE:,}. Use precision_mv and covariance_mv"
            )
        if self._shared.curvature is None:
            eye = torch.eye(self.n_params, dtype=torch.float64, device=self.operator.device)
            self._shared.curvature = symmetrise(self._system.curvature(eye)) / self.scale.detach().to(eye.device)
        curvature = self._shared.curvature
        return (self.scale.to(curvature.device) * curvature + torch.diag(self._prior_vector())).cpu()

    def _dense_covariance(self) -> Tensor:
        if self._own.covariance is None:
            factor = safe_cholesky(self.to_dense().detach(), what="the posterior precision")
            self._own.covariance = torch.cholesky_inverse(factor)
        return self._own.covariance

    def estimate_log_det(self) -> TraceEstimate:
        """log |P| by Lanczos quadrature relative to the preconditioner, with its standard error; computed once.

        A low-rank preconditioner leaves almost nothing to chance.
        """
        if self._own.log_det is None:
            system = self._system
            self._own.log_det = log_det_quadrature(
                system.precision,
                self.preconditioner.safe_for(self.operator.dtype),
                probes=self.settings.probes,
                steps=self.settings.steps,
                generator=torch.Generator().manual_seed(self.settings.seed),
            )
        return self._own.log_det

    def log_det_precision(self) -> Tensor:
        """Log determinant of the precision; differentiable in prior and scale (first derivatives)."""
        if self._is_small:
            return 2 * safe_cholesky(self.to_dense(), what="the posterior precision").diagonal().log().sum()
        value = torch.tensor(self.estimate_log_det().value, dtype=torch.float64)
        prior, scale = self._prior_vector(), self.scale
        if not (prior.requires_grad or scale.requires_grad):
            return value
        # d log|P| = tr(Σ dP): a term of value zero that carries this slope, estimated from the fixed samples.
        rows = self.fixed_samples()
        along = (rows * self._system.curvature(rows)).sum(1).mean().cpu() / scale.detach()
        slope = (rows.square().mean(0) * (prior - prior.detach())).sum().cpu()
        return value + slope + along * (scale - scale.detach())

    def log_det_ratio(self) -> Tensor:
        """log |P| − log |P₀|: twice the information gained from the data, in nats."""
        return self.log_det_precision() - self._prior_vector().log().sum().cpu()

    def log_prob(self, params: Params) -> Tensor:
        points, lead = self._rows(params)
        rows = points - flatten(self.mean, self.names).to(torch.float64)
        energy = (rows * self._system.precision(rows)).sum(1).reshape(lead).cpu()
        return 0.5 * (self.log_det_precision() - self.n_params * math.log(2 * math.pi)) - 0.5 * energy

    def estimate_effective_parameters(
        self, method: str = "hutchinson"
    ) -> tuple[TraceEstimate, dict[str, TraceEstimate]]:
        """γ = tr(s·G Σ), in total and by layer, with standard errors.

        Args:
            method: "hutchinson": random signs, one solve, a variance of at most 2γ/S, by layer too; "samples": mean of
                wᵀ s·G w over the fixed samples w, one pass over the data: as good in total, but poor by layer, where terms
                between layers cancel only in the sum.
        """
        if check_estimator(method) == "samples":
            rows = self.fixed_samples()
            each = rows * self._system.curvature(rows)
        else:
            base, noise = self._prior_shares()
            each = 1 - base - noise
        parts = split_flat(each, self.shapes)
        by_layer = {k: join_flat(parts, v, 1).sum(1) for k, v in self.layers.items()}
        return mean_estimate(each.sum(1)), {k: mean_estimate(v) for k, v in by_layer.items()}

    def effective_parameters(self) -> dict[str, float]:
        """γ by layer (MacKay): how many directions of a layer the data determine; exact for few parameters."""
        if not self._is_small:
            return {k: v.value for k, v in self.estimate_effective_parameters()[1].items()}
        prior = self._prior_vector().detach().cpu()
        gains = split_flat(1 - prior * self._dense_covariance().diagonal(), self.shapes)
        return {k: sum(float(gains[n].sum()) for n in names) for k, names in self.layers.items()}

    def estimate_marginal_variance(self, method: str = "samples") -> tuple[Params, Params]:
        """The diagonal of the covariance and its standard errors.

        Args:
            method: "samples": mean of squares of the fixed samples, relative standard deviation √(2/S), never negative;
                "hutchinson": random signs; better where the data say little, but it may be negative where they say much.
        """
        if check_estimator(method) == "samples":
            each = self.fixed_samples().square()
        else:
            base, noise = self._prior_shares()
            each = (base + noise) / self._prior_vector().detach()
        error = each.std(0) / math.sqrt(len(each)) if len(each) > 1 else torch.full_like(each[0], math.nan)
        return split_flat(each.mean(0), self.shapes), split_flat(error, self.shapes)

    def marginal_variance(self) -> Params:
        """The diagonal of the covariance: exact for few parameters, else from the fixed samples."""
        if not self._is_small:
            return self.estimate_marginal_variance()[0]
        return split_flat(self._dense_covariance().diagonal().to(self.operator.device), self.shapes)

    def _prior_shares(self) -> tuple[Tensor, Tensor]:
        if self._own.shares is None:
            self._own.shares = prior_shares(self._system, self.settings.samples, self.settings.seed)
        return self._own.shares

    def functional_covariance(
        self,
        gradients: LayerGradients,
        variants: Sequence[MatrixFreePosterior] | None = None,
        *,
        diagonal: bool = False,
    ) -> list[list[Tensor]]:
        """J Σ Jᵀ as one part, for this posterior or for variants of it (made by `with_prior`).

        Args:
            gradients: Of the outputs' unit vectors at every layer.
            variants: None: only this posterior; each is treated by its own ``settings.kind``.
            diagonal: only the variances.

        Returns:
            For each variant a list of one [b, v, v] (or [b, v]).
        """
        variants = [self] if variants is None else list(variants)
        stride = max(1, SOLVE_NUMBERS // (gradients.n_vectors * self.n_params))

        def rows(by_name: Params) -> Tensor:
            return join_flat(by_name, self.names, 2).detach()

        return [[c] for c in covariances_by_example(gradients, self.names, stride, rows, variants, diagonal)]

    def output_covariance(self, gradients: Tensor, diagonal: bool) -> Tensor:
        """J Σ Jᵀ for the gradients of some outputs [v, b, P], by solves or fixed samples: [b, v, v], or [b, v]."""
        left = gradients.to(torch.float64)
        if self.settings.kind == "samples":
            moved = left @ self.fixed_samples().T / math.sqrt(self.settings.samples)  # [v, b, S]
            left = right = moved
        else:
            right = self._system.solve(left.reshape(-1, self.n_params))[0].reshape(left.shape)
        covariance = paired_products(left, right, diagonal)
        return (covariance if diagonal else symmetrise(covariance)).to(gradients.dtype)


def fit_no_blocks(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """Raises an InputError: products with the data leave no blocks behind."""
    raise InputError(
        "structure='matrix_free' has no blocks to fit: it is a posterior by products with the data. Use "
        "Laplace(model, likelihood, structure='matrix_free'), or structure='kron' for the blocks that precondition it"
    )


def precondition(
    blocks: GaussianPosterior, model: nn.Module, data: Iterable[Any], likelihood: Likelihood, unpack: Unpack | None
) -> MatrixFreePosterior:
    """The posterior with the mean, prior and scale of one in blocks, which preconditions it; it keeps the data."""
    operator = GGNOperator(model, data, likelihood, list(blocks.names), unpack)
    return MatrixFreePosterior.from_operator(operator, preconditioner=blocks)


register_structure(
    Structure(
        "matrix_free",
        "The whole matrix by products with the data, with the terms between layers; preconditioned by Kronecker factors.",
        fit_no_blocks,
        (),
        # Products are with the Gauss-Newton matrix itself, which has no empirical form.
        curvatures=tuple(kind for kind in VECTOR_KINDS if kind != "empirical"),
        updatable=False,
        saveable=False,
        posterior=precondition,
        preconditioner="kron",
    )
)
