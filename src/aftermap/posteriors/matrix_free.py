"""The full Gauss-Newton posterior without its matrix: every cross-layer covariance, at the price of products with the data.

The precision P = s·G + P₀ acts through one pass over the data. Solves are by conjugate gradients with a Kronecker,
diagonal or low-rank posterior as preconditioner; samples by sample-then-optimise; log determinants by Lanczos
quadrature (docs/mathematics/structures.md).

Exact posterior samples come from solving a noisy least-squares problem (sample-then-optimise).

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
from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.passes.vectors import VECTOR_KINDS
from aftermap.curvature.structures.base import (
    Block,
    Structure,
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
from aftermap.params import Params, by_module, flatten
from aftermap.posteriors.base import CurvaturePosterior, GaussianPosterior, check_scale
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
        tolerance: The tolerance of a solve, ‖b − Px‖ / ‖b‖. None means 1e-8 for a float64 network, 1e-4 for others.
        max_iterations: The greatest number of iterations of a solve; each is one pass over the data for all right-hand
            sides.
        kind: The kind of predictive covariance: "cg" solves for every output of every input, exact up to the tolerance;
            "samples" uses the fixed samples, with relative standard deviation √(2/S), and no pass over the data.
        samples: The size S of the fixed set, and the number of random signs of other estimates.
        probes: The number of probes of the log determinant.
        steps: The number of Lanczos steps of the log determinant, each one pass over the data.
        dense_limit: The number of parameters up to which the log determinant, the marginal variances and the effective
            parameters are exact, from the dense matrix.
        seed: The seed of the fixed samples and of the probes. It is the same for every prior, so that priors are
            compared fairly.
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
        checks.choice("kind", self.kind, FUNCTIONAL_KINDS)
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise InputError(f"the tolerance must be between 0 and 1, or None, got {self.tolerance!r}")
        for name in ("max_iterations", "samples", "probes", "steps"):
            value = getattr(self, name)
            object.__setattr__(self, name, checks.count(name, value))


@dataclass(frozen=True)
class SampleNoise:
    """The random part of some samples; one set serves every prior and scale.

    Attributes:
        prior: The standard normal numbers z [S, P].
        data: The numbers Jᵀ S ε [S, P], with covariance G.
    """

    prior: Tensor
    data: Tensor

    def right_hand_side(self, prior: Tensor, scale: Tensor) -> Tensor:
        """Returns √s Jᵀ S ε + P₀^{½} z, with covariance sG + P₀.

        Args:
            prior: The prior's precisions P₀ [P].
            scale: The factor s of the curvature, 0-d.

        Returns:
            The right-hand sides [S, P].
        """
        return scale.sqrt() * self.data + prior.sqrt() * self.prior


def common_seed(generator: torch.Generator | None) -> int:
    """Returns a seed drawn from a generator; of process 0 in a group, so that all walk through the same numbers.

    >>> common_seed(torch.Generator().manual_seed(0)) == common_seed(torch.Generator().manual_seed(0))
    True
    """
    device = torch.device("cpu") if generator is None else generator.device
    return broadcast_number(int(torch.randint(2**62, (), generator=generator, device=device)))


def draw_noise(operator: GGNOperator, count: int, seed: int) -> SampleNoise:
    """Draws the noise of ``count`` samples, in one pass over the data.

    Args:
        operator: The operator that gives Jᵀ S ε.
        count: The number S of samples.
        seed: The seed, the same on every process of a group; the data of each process get random numbers of their own.

    Raises:
        InputError: There is less than one sample.
    """
    count = checks.count("count", count)
    like = torch.empty(count, operator.size, dtype=torch.float64, device=operator.device)
    prior = normal_like(like, torch.Generator().manual_seed(seed))
    # The seed is offset by one, since the noise of the data must not repeat that of the prior.
    data = operator.noise(count, torch.Generator().manual_seed(seed + 1 + rank())).T
    return SampleNoise(prior, data)


def mean_estimate(values: Tensor) -> TraceEstimate:
    """Returns the mean of values [S] and its standard error (NaN for one value).

    >>> mean_estimate(torch.tensor([1.0, 3.0]))
    TraceEstimate(value=2.0, standard_error=1.0)
    """
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return TraceEstimate(float(values.mean()), error)


def prior_shares(system: LinearSystem, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Estimates the diagonal of R = P₀^{½} Σ P₀^{½}, the share of each entry's prior variance that is left, by random signs z.

    With a matrix Q whose diagonal is known, diag R = diag Q + E[z∘(R − Q)z]. Q = I leaves a variance of at most 1 − R_ii per
    sign vector; Q from the preconditioner leaves less where that is close. The better of the two is taken.

    Args:
        system: The linear system that solves with P.
        count: The number S of samples.
        seed: The seed of the signs.

    Returns:
        The diagonal of Q [P], and z∘(R − Q)z [S, P].
    """
    like = torch.empty(count, system.operator.size, dtype=torch.float64, device=system.operator.device)
    signs = signs_like(like, torch.Generator().manual_seed(seed))
    root = system.prior.sqrt()
    shares = root * system.solve(root * signs)[0]
    guess = root * system.preconditioner.solve(root * signs)
    options = [
        (torch.ones_like(root), signs * (shares - signs)),
        (system.prior * system.preconditioner.marginal_variance(), signs * (shares - guess)),
    ]
    return min(options, key=lambda pair: float(pair[1].var(0, correction=0).sum()))


@dataclass(eq=False)
class _Shared:
    """The parts that do not depend on the prior and the scale."""

    noise: SampleNoise | None = None
    curvature: Tensor | None = None


@dataclass(eq=False)
class _PriorDependent:
    """The parts that depend on the prior and the scale."""

    samples: Tensor | None = None
    log_det: TraceEstimate | None = None
    covariance: Tensor | None = None
    shares: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class MatrixFreePosterior(CurvaturePosterior):
    r"""The posterior N(θ*, (s·G + P₀)⁻¹) with the full generalised Gauss-Newton matrix G, cross-layer terms included.

    In a group of processes every method that passes over the data must be called by all of them with the same values;
    so predict there with ``kind="samples"``.

    Attributes:
        mean: The trained weights θ*, by name.
        operator: The products with G.
        prior: The prior, with its precisions P₀, any diagonal, and its mean.
        scale: The factor s of the curvature, 0-d float64.
        layers: For each layer the names of its parameters.
        preconditioner: An approximation of the precision with a cheap inverse.
        settings: The settings of accuracy and cost.

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
    _prior_dependent: _PriorDependent = field(default_factory=_PriorDependent, repr=False)
    is_estimated = True
    has_every_term = True
    working_numbers = (
        SOLVE_NUMBERS  # Every solve passes over the data again and again, whatever the number of its rows.
    )

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
        """Makes a posterior around the weights at which the operator is taken.

        Args:
            operator: The products with G, over data that can be passed over again and again.
            prior: The prior's precision, see :class:`Prior`. None means the preconditioner's prior, or 1.
            preconditioner: A posterior over the same parameters with a cheap inverse: Kronecker, diagonal or low rank.
            prior_mean: The mean of the prior, a number or tensors by name, which is used if ``prior`` is given.
            scale: The factor of G. None means the preconditioner's, or 1.
            settings: The settings of accuracy and cost.
            generator: The source of the settings' seed. None keeps the seed that is there.

        Raises:
            InputError: The preconditioner is over other parameters, or a prior or scale is not positive.

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

    def with_prior(
        self, precision: PriorSpec | None = None, *, scale: float | Tensor | None = None, prior: Prior | None = None
    ) -> MatrixFreePosterior:
        """Returns the same curvature under another prior or scale; the random numbers stay, solves are done anew when asked."""
        prior, factor = self._new_prior_and_scale(precision, scale, prior)
        helper = Preconditioner.make(self.preconditioner.posterior, prior, factor, self.shapes, self.operator.device)
        return replace(self, prior=prior, scale=factor, preconditioner=helper, _prior_dependent=_PriorDependent())

    def with_settings(self, **changes: Any) -> MatrixFreePosterior:
        """Returns the same posterior with other settings, say ``kind="samples", samples=256``."""
        settings = replace(self.settings, **changes)
        same = settings.seed == self.settings.seed and settings.samples == self.settings.samples
        shared = self._shared if same else _Shared(curvature=self._shared.curvature)
        return replace(self, settings=settings, _shared=shared, _prior_dependent=_PriorDependent())

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
        """Turns tensors [..., *shape] by name into [k, P] in float64, and returns the leading shape."""
        missing = [n for n in self.names if n not in values]
        if missing:
            raise InputError(f"no values for {', '.join(missing[:5])}; give one tensor for each of the parameters")
        for name, shape in self.shapes.items():
            actual = tuple(values[name].shape)
            if actual[len(actual) - len(shape) :] != shape:
                raise ShapeError(f"the values for {name} have shape {actual}, which does not end in {shape}")
        name = self.names[0]
        lead = values[name].shape[: values[name].dim() - len(self.shapes[name])]
        rows = join_flat(values, self.names, len(lead)).to(torch.float64)
        return rows.reshape(-1, self.n_params), tuple(lead)

    def _apply(self, values: Params, function: Callable[[Tensor], Tensor]) -> Params:
        rows, lead = self._rows(values)
        products = symmetric_product(rows, function)
        parts = split_flat(products.reshape(*lead, -1), self.shapes)
        return {n: v.to(values[n].dtype) for n, v in parts.items()}

    def precision_mv(self, values: Params) -> Params:
        return self._apply(values, self._system.precision)

    def covariance_mv(self, values: Params) -> Params:
        """Returns the covariance times [..., *shape], by conjugate gradients; differentiable in the values.

        Warns:
            NumericalWarning: The tolerance was not reached.
        """
        return self._apply(values, lambda rows: self._system.solve(rows)[0])

    def solve(self, values: Params) -> tuple[Params, SolveReport]:
        """Solves like `covariance_mv`, and returns a report of what was reached."""
        rows, lead = self._rows(values)
        solutions, report = self._system.solve(rows)
        parts = split_flat(solutions.reshape(*lead, -1), self.shapes)
        return {n: v.to(values[n].dtype) for n, v in parts.items()}, report

    # Samples.

    def sample(self, count: int, generator: torch.Generator | None = None) -> Params:
        """Draws exact samples (up to the tolerance), by one pass for the noise and one solve for all of them."""
        rows = self._solve_noise(draw_noise(self.operator, count, common_seed(generator)))
        deviations = split_flat(rows, self.shapes)
        return {n: self.mean[n] + deviations[n].to(self.mean[n].dtype) for n in self.names}

    def _solve_noise(self, noise: SampleNoise) -> Tensor:
        system = self._system
        return system.solve(noise.right_hand_side(system.prior, system.scale))[0]

    def fixed_samples(self) -> Tensor:
        """Returns deviations from the mean [S, P], drawn once and then kept; under another prior the same noise is used."""
        if self._prior_dependent.samples is None:
            if self._shared.noise is None:
                self._shared.noise = draw_noise(self.operator, self.settings.samples, self.settings.seed)
            self._prior_dependent.samples = self._solve_noise(self._shared.noise)
        return self._prior_dependent.samples

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
        if self._prior_dependent.covariance is None:
            factor = safe_cholesky(self.to_dense().detach(), what="the posterior precision")
            self._prior_dependent.covariance = torch.cholesky_inverse(factor)
        return self._prior_dependent.covariance

    def estimate_log_det(self) -> TraceEstimate:
        """Estimates log |P| by Lanczos quadrature relative to the preconditioner, with its standard error; computed once.

        A low-rank preconditioner leaves almost nothing to chance.
        """
        if self._prior_dependent.log_det is None:
            system = self._system
            self._prior_dependent.log_det = log_det_quadrature(
                system.precision,
                self.preconditioner.safe_for(self.operator.dtype),
                probes=self.settings.probes,
                steps=self.settings.steps,
                generator=torch.Generator().manual_seed(self.settings.seed),
            )
        return self._prior_dependent.log_det

    def log_det_precision(self) -> Tensor:
        """Returns the log determinant of the precision, differentiable in prior and scale (first derivatives)."""
        if self._is_small:
            return 2 * safe_cholesky(self.to_dense(), what="the posterior precision").diagonal().log().sum()
        value = torch.tensor(self.estimate_log_det().value, dtype=torch.float64)
        prior, scale = self._prior_vector(), self.scale
        if not (prior.requires_grad or scale.requires_grad):
            return value
        # Since d log|P| = tr(Σ dP), this is a term of value zero that carries this slope, estimated from the fixed
        # samples.
        rows = self.fixed_samples()
        along = (rows * self._system.curvature(rows)).sum(1).mean().cpu() / scale.detach()
        slope = (rows.square().mean(0) * (prior - prior.detach())).sum().cpu()
        return value + slope + along * (scale - scale.detach())

    def log_det_ratio(self) -> Tensor:
        return self.log_det_precision() - self._prior_vector().log().sum().cpu()

    def log_prob(self, params: Params) -> Tensor:
        points, lead = self._rows(params)
        rows = points - flatten(self.mean, self.names).to(torch.float64)
        energy = (rows * self._system.precision(rows)).sum(1).reshape(lead).cpu()
        return 0.5 * (self.log_det_precision() - self.n_params * math.log(2 * math.pi)) - 0.5 * energy

    def estimate_effective_parameters(
        self, method: str = "hutchinson"
    ) -> tuple[TraceEstimate, dict[str, TraceEstimate]]:
        """Estimates γ = tr(s·G Σ), in total and by layer, with standard errors.

        Args:
            method: The way to estimate: "hutchinson" uses random signs, one solve, a variance of at most 2γ/S, by layer
                too; "samples" takes the mean of wᵀ s·G w over the fixed samples w, one pass over the data: as good in
                total, but poor by layer, where terms between layers cancel only in the sum.
        """
        if checks.choice("method", method, ESTIMATORS) == "samples":
            rows = self.fixed_samples()
            gains = rows * self._system.curvature(rows)
        else:
            base, noise = self._prior_shares()
            gains = 1 - base - noise
        parts = split_flat(gains, self.shapes)
        by_layer = {k: join_flat(parts, v, 1).sum(1) for k, v in self.layers.items()}
        return mean_estimate(gains.sum(1)), {k: mean_estimate(v) for k, v in by_layer.items()}

    def effective_parameters(self) -> dict[str, float]:
        """Returns γ by layer (MacKay), the number of directions of a layer that the data determine; exact for few parameters."""
        if not self._is_small:
            return {k: v.value for k, v in self.estimate_effective_parameters()[1].items()}
        prior = self._prior_vector().detach().cpu()
        gains = split_flat(1 - prior * self._dense_covariance().diagonal(), self.shapes)
        return {k: sum(float(gains[n].sum()) for n in names) for k, names in self.layers.items()}

    def estimate_marginal_variance(self, method: str = "samples") -> tuple[Params, Params]:
        """Estimates the diagonal of the covariance, with its standard errors.

        Args:
            method: The way to estimate: "samples" takes the mean of squares of the fixed samples, with relative
                standard deviation √(2/S) and never negative; "hutchinson" uses random signs, which is better where the
                data say little, but may be negative where they say much.
        """
        if checks.choice("method", method, ESTIMATORS) == "samples":
            variances = self.fixed_samples().square()
        else:
            base, noise = self._prior_shares()
            variances = (base + noise) / self._prior_vector().detach()
        error = (
            variances.std(0) / math.sqrt(len(variances))
            if len(variances) > 1
            else torch.full_like(variances[0], math.nan)
        )
        return split_flat(variances.mean(0), self.shapes), split_flat(error, self.shapes)

    def marginal_variance(self) -> Params:
        """Returns the diagonal of the covariance: exact for few parameters, else from the fixed samples."""
        if not self._is_small:
            return self.estimate_marginal_variance()[0]
        return split_flat(self._dense_covariance().diagonal().to(self.operator.device), self.shapes)

    def _prior_shares(self) -> tuple[Tensor, Tensor]:
        if self._prior_dependent.shares is None:
            self._prior_dependent.shares = prior_shares(self._system, self.settings.samples, self.settings.seed)
        return self._prior_dependent.shares

    def times_covariance(self, rows: Tensor) -> Tensor:
        """Returns rows [..., P] times the covariance, by solves, or from the fixed samples with ``settings.kind="samples"``."""
        if self.settings.kind != "samples":
            return super().times_covariance(rows)
        samples = self.fixed_samples()
        return (rows @ samples.T) @ samples / len(samples)

    def output_covariance(self, gradients: Tensor, diagonal: bool) -> Tensor:
        if self.settings.kind != "samples":
            return super().output_covariance(gradients, diagonal)
        samples = self.fixed_samples()
        deviations = gradients.to(torch.float64) @ samples.T / math.sqrt(len(samples))  # of the outputs [v, b, S]
        return paired_products(deviations, deviations, diagonal).to(gradients.dtype)


def fit_no_blocks(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """Raises an InputError: products with the data leave no blocks behind."""
    raise InputError(
        "structure='matrix_free' has no blocks to fit: it is a posterior by products with the data. Use "
        "Laplace(model, likelihood, structure='matrix_free'), or structure='kron' for the blocks that precondition it"
    )


def precondition(
    blocks: GaussianPosterior, model: nn.Module, data: Iterable[Any], likelihood: Likelihood, unpack: Unpack | None
) -> MatrixFreePosterior:
    """Returns the posterior with the mean, prior and scale of one in blocks, which preconditions it; it keeps the data."""
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
