"""The matrix-free posterior against the dense Gauss-Newton posterior."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature.fit import fit_curvature
from aftermap.curvature.structures.base import find_structure, join_flat, split_flat
from aftermap.errors import InputError, NumericalWarning, ShapeError
from aftermap.laplace import Laplace
from aftermap.likelihoods import Categorical
from aftermap.params import flatten
from aftermap.posteriors import GaussianPosterior, MatrixFreePosterior, MatrixFreeSettings
from aftermap.posteriors.solver import Preconditioner, log_det_quadrature
from tests.posteriors.matrix_free_cases import CASES, PRIOR, SCALE, Case, generator, randn

ALL = pytest.mark.parametrize("kind", list(CASES))


def flat(values: dict[str, Tensor], posterior: MatrixFreePosterior, lead: int = 1) -> Tensor:
    return join_flat(values, posterior.names, lead)


def rich_case() -> Case:
    """Many data, inputs of very different sizes: what Kronecker factors are good at."""
    g = generator(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=g))
    x = randn(400, 5) * torch.logspace(-1, 1, 5, dtype=torch.float64)
    y = torch.randint(4, (400,), generator=g)
    return Case(model, x, y, torch.ones(400, dtype=torch.float64), Categorical(), randn(7, 5, seed=2))


@ALL
def test_products_solves_and_the_dense_matrix(kind: str) -> None:
    case = CASES[kind]()
    posterior = case.matrix_free()
    truth = case.precision()
    assert_close(posterior.to_dense(), truth, rtol=1e-9, atol=1e-9)
    rows = randn(2, 3, len(truth), seed=4)
    values = split_flat(rows, posterior.shapes)
    assert_close(flat(posterior.precision_mv(values), posterior, 2), rows @ truth, rtol=1e-9, atol=1e-9)
    solved, report = posterior.solve(values)
    assert_close(flat(solved, posterior, 2), rows @ torch.linalg.inv(truth), rtol=1e-7, atol=1e-8)
    assert report.converged
    assert report.residual.shape == (6,)
    assert float(report.residual.max()) <= 2e-10
    again = posterior.covariance_mv({n: v[0, 0] for n, v in values.items()})
    assert_close(flatten(again, posterior.names), flat(solved, posterior, 2)[0, 0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("structure", [None, "kron", "ekfac", "diagonal", "low_rank", "full"])
def test_every_preconditioner_gives_the_same_solution(structure: str | None) -> None:
    case = CASES["mlp softmax"]()
    posterior = case.matrix_free(structure)
    rows = randn(3, posterior.n_params, seed=4)
    solved = posterior.covariance_mv(split_flat(rows, posterior.shapes))
    assert_close(flat(solved, posterior), rows @ torch.linalg.inv(case.precision()), rtol=1e-7, atol=1e-8)


def test_kronecker_and_low_rank_preconditioners_save_iterations() -> None:
    case = rich_case()
    rows = randn(3, 64, seed=4)
    needed = {}
    for structure in (None, "kron", "full"):
        posterior = case.matrix_free(structure, prior=0.1, tolerance=1e-8)
        needed[structure] = posterior.solve(split_flat(rows, posterior.shapes))[1].iterations
    assert needed["kron"] < 0.7 * needed[None]
    assert needed["full"] <= 2
    few = CASES["mlp softmax"]()  # 9 data with 3 directions each, 44 parameters
    plain, low = few.matrix_free(None), few.matrix_free("low_rank")
    values = split_flat(rows[:, :44], plain.shapes)
    assert low.solve(values)[1].iterations <= 2 < plain.solve(values)[1].iterations


@ALL
def test_samples_have_the_mean_and_covariance_of_the_posterior(kind: str) -> None:
    case = CASES[kind]()
    posterior = case.matrix_free("low_rank", tolerance=1e-7)
    count = 6000
    samples = posterior.sample(count, generator(2))
    deviations = flat(samples, posterior) - flatten(posterior.mean)
    white = deviations @ torch.linalg.cholesky(case.precision())  # identity covariance, if all is right
    size = white.shape[1]
    assert float(white.mean(0).abs().max()) < 4.5 / math.sqrt(count)
    assert_close(white.T @ white / count, torch.eye(size).double(), rtol=0, atol=5 * math.sqrt(2 / count))
    assert {n: tuple(v.shape[1:]) for n, v in samples.items()} == posterior.shapes


def test_samples_follow_their_generator_and_leave_the_global_seed_alone() -> None:
    posterior = CASES["mlp softmax"]().matrix_free()
    before = torch.random.get_rng_state()
    first, second = posterior.sample(3, generator(1)), posterior.sample(3, generator(1))
    other = posterior.sample(3, generator(2))
    assert_close(first, second, rtol=0, atol=0)
    assert float((first["0.weight"] - other["0.weight"]).abs().min()) > 0
    assert torch.equal(before, torch.random.get_rng_state())
    drawn = MatrixFreePosterior.from_operator(posterior.operator, generator=generator(4))
    assert (
        drawn.settings.seed
        == MatrixFreePosterior.from_operator(posterior.operator, generator=generator(4)).settings.seed
    )
    assert drawn.settings.seed != 0


def test_fixed_samples_are_kept_and_share_their_noise_between_priors() -> None:
    case = CASES["mlp gaussian"]()
    posterior = case.matrix_free(samples=5)
    kept = posterior.fixed_samples()
    assert posterior.fixed_samples() is kept
    moved = posterior.with_prior(2.5, scale=0.9)
    noise = posterior._shared.noise
    assert noise is not None
    assert moved._shared.noise is noise
    P = case.precision(2.5, 0.9)
    expected = torch.linalg.solve(P, (math.sqrt(0.9) * noise.data + math.sqrt(2.5) * noise.prior).T).T
    assert_close(moved.fixed_samples(), expected, rtol=1e-7, atol=1e-8)
    assert_close(posterior.fixed_samples(), kept, rtol=0, atol=0)
    assert posterior.with_settings(samples=7).fixed_samples().shape == (7, posterior.n_params)


@ALL
@pytest.mark.parametrize("structure", [None, "kron", "low_rank"])
def test_log_determinant_within_three_standard_errors(kind: str, structure: str | None) -> None:
    case = CASES[kind]()
    exact = torch.linalg.slogdet(case.precision()).logabsdet
    posterior = case.matrix_free(structure, probes=64)
    estimate = posterior.estimate_log_det()
    assert abs(estimate.value - float(exact)) < 3 * estimate.standard_error + 1e-6
    assert_close(posterior.log_det_precision(), torch.tensor(estimate.value, dtype=torch.float64))
    ratio = float(exact) - posterior.n_params * math.log(PRIOR)
    assert abs(float(posterior.log_det_ratio()) - ratio) < 3 * estimate.standard_error + 1e-6
    if structure == "low_rank":
        assert estimate.standard_error < 1e-5
    small = posterior.with_settings(dense_limit=1000)
    assert_close(small.log_det_precision(), exact, rtol=1e-10, atol=1e-9)


def test_the_stated_error_of_the_log_determinant_is_honest() -> None:
    case = CASES["mlp softmax"]()
    exact = float(torch.linalg.slogdet(case.precision()).logabsdet)
    posterior = case.matrix_free("kron")
    scores = []
    for seed in range(30):
        estimate = posterior.with_settings(seed=seed).estimate_log_det()
        scores.append((estimate.value - exact) / estimate.standard_error)
    spread = torch.tensor(scores)
    assert abs(float(spread.mean())) < 3.5 / math.sqrt(30)
    assert 0.6 < float(spread.std()) < 1.6


@ALL
def test_effective_parameters_and_marginal_variances(kind: str) -> None:
    case = CASES[kind]()
    posterior = case.matrix_free("kron", samples=400, tolerance=1e-6)
    covariance = torch.linalg.inv(case.precision())
    shares = split_flat(1 - PRIOR * covariance.diagonal(), posterior.shapes)
    exact = {k: sum(float(shares[n].sum()) for n in names) for k, names in posterior.layers.items()}
    assert len(exact) == 2
    total, by_layer = posterior.estimate_effective_parameters()
    assert abs(total.value - sum(exact.values())) < 3.5 * total.standard_error
    assert total.standard_error < 1.3 * math.sqrt(2 * sum(exact.values()) / 400)
    for layer, value in exact.items():
        assert abs(by_layer[layer].value - value) < 3.5 * by_layer[layer].standard_error
    assert posterior.effective_parameters() == {k: v.value for k, v in by_layer.items()}
    sampled, _ = posterior.estimate_effective_parameters("samples")
    assert abs(sampled.value - sum(exact.values())) < 3.5 * sampled.standard_error
    for method in ("samples", "hutchinson"):
        value, error = posterior.estimate_marginal_variance(method)
        score = (flatten(value) - covariance.diagonal()) / flatten(error)
        assert float(score.abs().max()) < 5
        assert 0.5 < float(score.square().mean()) < 2
    small = posterior.with_settings(dense_limit=1000)
    assert small.effective_parameters() == pytest.approx(exact, rel=1e-9)
    assert_close(flatten(small.marginal_variance()), covariance.diagonal(), rtol=1e-9, atol=0)
    assert bool((flatten(posterior.marginal_variance()) > 0).all())


def test_a_low_rank_preconditioner_makes_the_estimates_exact() -> None:
    case = CASES["mlp gaussian"]()
    posterior = case.matrix_free("low_rank", samples=2)
    exact = case.gaussian("full").effective_parameters()
    assert posterior.effective_parameters() == pytest.approx(exact, rel=1e-6)
    value, _ = posterior.estimate_marginal_variance("hutchinson")
    assert_close(flatten(value), torch.linalg.inv(case.precision()).diagonal(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("limit", [0, 1000])
def test_log_prob_is_the_gaussian_density(limit: int) -> None:
    case = CASES["mlp gaussian"]()
    posterior = case.matrix_free("low_rank", dense_limit=limit)
    points = posterior.sample(4, generator(3))
    law = torch.distributions.MultivariateNormal(flatten(posterior.mean), precision_matrix=case.precision())
    assert_close(posterior.log_prob(points), law.log_prob(flat(points, posterior)), rtol=1e-6, atol=1e-5)
    one = {n: v[2] for n, v in points.items()}
    assert_close(posterior.log_prob(one), law.log_prob(flatten(one)), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("limit", [0, 1000])
def test_the_evidence_has_slopes_in_prior_and_scale(limit: int) -> None:
    case = CASES["mlp softmax"]()
    posterior = case.matrix_free("low_rank", dense_limit=limit, samples=3000, tolerance=1e-6)
    tau = torch.tensor(PRIOR, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)
    prior = posterior.prior.with_precision(dict.fromkeys(posterior.names, tau))
    ratio = posterior.with_prior(prior=prior, scale=scale).log_det_ratio()
    found = torch.autograd.grad(ratio, [tau, scale])
    covariance = torch.linalg.inv(case.precision())
    slope = covariance.trace() - len(covariance) / PRIOR
    along = (covariance @ case.ggn()).trace()
    tolerance = 1e-8 if limit else 0.05
    assert_close(found[0], slope, rtol=tolerance, atol=0)
    assert_close(found[1], along, rtol=tolerance, atol=0)


def test_a_prior_per_parameter_and_per_layer() -> None:
    case = CASES["mlp gaussian"]()
    entries = torch.rand(44, generator=generator(5), dtype=torch.float64) + 0.3
    shapes = case.matrix_free(None).shapes
    posterior = case.matrix_free("kron", prior=split_flat(entries, shapes))
    truth = case.precision(entries)
    assert_close(posterior.to_dense(), truth, rtol=1e-9, atol=1e-9)
    rows = randn(3, 44, seed=4)
    solved = posterior.covariance_mv(split_flat(rows, shapes))
    assert_close(flat(solved, posterior), rows @ torch.linalg.inv(truth), rtol=1e-7, atol=1e-8)
    estimate = posterior.estimate_log_det()
    assert abs(estimate.value - float(torch.linalg.slogdet(truth).logabsdet)) < 3 * estimate.standard_error
    layered = posterior.with_prior([0.5, 3.0])
    expected = torch.cat([torch.full((20,), 0.5), torch.full((24,), 3.0)]).double()
    assert_close(layered.to_dense(), case.precision(expected), rtol=1e-9, atol=1e-9)


def test_prior_and_scale_come_from_the_preconditioner() -> None:
    case = CASES["mlp softmax"]()
    helper = case.gaussian("kron")
    posterior = MatrixFreePosterior.from_operator(case.operator(), preconditioner=helper)
    assert_close(posterior.to_dense(), case.precision(), rtol=1e-9, atol=1e-9)
    assert posterior.layers == helper.layers
    alone = MatrixFreePosterior.from_operator(case.operator())
    assert_close(alone.to_dense(), case.precision(1.0, 1.0), rtol=1e-9, atol=1e-9)
    assert dict(alone.layers) == dict(helper.layers)


def test_single_precision_converges_without_a_warning() -> None:
    case = CASES["mlp gaussian"]()
    small = Case(
        copy.deepcopy(case.model).float(),
        case.x.float(),
        case.y.float(),
        case.weight.float(),
        case.likelihood,
        case.asked.float(),
    )
    posterior = small.matrix_free("kron", tolerance=None, prior=1e-3)
    rows = randn(3, 44, seed=4)
    solved = posterior.covariance_mv(split_flat(rows, posterior.shapes))
    truth = rows @ torch.linalg.inv(case.precision(1e-3))
    error = (flat(solved, posterior) - truth).norm(dim=1) / truth.norm(dim=1)
    assert float(error.max()) < 1e-3
    samples = posterior.sample(3, generator(0))
    assert samples["0.weight"].dtype == torch.float32
    exact = float(torch.linalg.slogdet(case.precision(1e-3)).logabsdet)
    estimate = posterior.with_settings(probes=64).estimate_log_det()
    assert abs(estimate.value - exact) < 3 * estimate.standard_error


def test_bad_input_is_named() -> None:
    case = CASES["mlp softmax"]()
    posterior = case.matrix_free()
    values = {n: v.clone() for n, v in posterior.mean.items()}
    with pytest.warns(NumericalWarning, match=r"after 2 iterations.*max_iterations"):
        posterior.with_settings(max_iterations=2).covariance_mv(values)
    with pytest.raises(InputError, match=r"no values for 2\.bias"):
        posterior.precision_mv({n: v for n, v in values.items() if n != "2.bias"})
    with pytest.raises(InputError, match=r"no values for 2\.bias"):
        posterior.log_prob({n: v for n, v in values.items() if n != "2.bias"})
    with pytest.raises(ShapeError, match=r"0\.weight have shape \(3, 5\).*\(5, 3\)"):
        posterior.covariance_mv({**values, "0.weight": values["0.weight"].T})
    for count in (0, 2.5, True):
        with pytest.raises(InputError, match="count=.* at least 1"):
            posterior.sample(count)  # type: ignore[arg-type]
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(InputError, match="scale of the curvature must be one positive"):
            posterior.with_prior(scale=wrong)
    with pytest.raises(InputError, match="must be positive and finite"):
        posterior.with_prior(0.0)
    with pytest.raises(InputError, match="'guess'.*'samples', 'hutchinson'"):
        posterior.estimate_effective_parameters("guess")
    part = fit_curvature(case.model, case.data, case.likelihood, params="last_layer", progress=False)
    other = GaussianPosterior.from_factors(part, dict(case.model.named_parameters()))
    with pytest.raises(InputError, match=r"other parameters.*0\.bias"):
        MatrixFreePosterior.from_operator(case.operator(), preconditioner=other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "exact"}, "'exact'.*'cg', 'samples'"),
        ({"tolerance": 0.0}, "between 0 and 1"),
        ({"samples": 0}, "samples=0 must be a whole number"),
        ({"max_iterations": 1.5}, "max_iterations=1.5 must be a whole number"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MatrixFreeSettings(**settings)


def test_weights_that_changed_are_noticed() -> None:
    case = CASES["mlp softmax"]()
    posterior = case.matrix_free()
    values = dict(posterior.mean)
    before = posterior.precision_mv(values)
    with torch.no_grad():
        case.model[0].bias.add_(0.1)
    with pytest.raises(InputError, match=r"weights have changed.*0\.bias"):
        posterior.precision_mv(values)
    with torch.no_grad():
        case.model[0].bias.copy_(posterior.mean["0.bias"])
    assert_close(posterior.precision_mv(values), before, rtol=0, atol=0)


def test_the_registry_knows_it() -> None:
    entry = find_structure("matrix_free")
    assert not entry.updatable
    assert not entry.saveable
    case = CASES["mlp softmax"]()
    laplace = Laplace(case.model, case.likelihood, structure="matrix_free").fit(case.data, progress=False)
    assert isinstance(laplace.posterior, MatrixFreePosterior)
    assert laplace.factors.structure == entry.preconditioner
    with pytest.raises(InputError, match="structure='matrix_free' has no blocks to fit.*Use Laplace"):
        fit_curvature(case.model, case.data, case.likelihood, structure="matrix_free", progress=False)
    with pytest.raises(InputError, match="structure='matrix_free' cannot be updated.*Fit on all data at once"):
        laplace.fit(case.data, update=True)
    with pytest.raises(InputError, match="structure='matrixfree' is not known.*Did you mean 'matrix_free'"):
        find_structure("matrixfree")


def test_products_with_the_covariance_by_samples_are_those_with_their_second_moment() -> None:
    case = next(iter(CASES.values()))()
    posterior = case.matrix_free(kind="samples", samples=30)
    samples = posterior.fixed_samples()
    rows = randn(4, samples.shape[1], seed=5)
    moment = torch.einsum("sp,sq->pq", samples, samples) / 30
    assert_close(posterior.times_covariance(rows), rows @ moment, rtol=1e-9, atol=1e-12)
    assert_close(posterior.times_covariance(rows[None]), (rows @ moment)[None], rtol=1e-9, atol=1e-12)
    exact = torch.linalg.inv(case.precision())
    assert float((moment.diagonal() / exact.diagonal() - 1).abs().max()) < 5 * math.sqrt(2 / 30)


def test_a_solve_that_stops_early_is_told() -> None:
    case = next(iter(CASES.values()))()
    posterior = case.matrix_free(structure=None, max_iterations=1, tolerance=1e-9)
    rows = split_flat(randn(3, posterior.n_params, seed=5), posterior.shapes)
    with pytest.warns(NumericalWarning, match="conjugate gradients stopped after 1 iterations.*Raise max_iterations"):
        posterior.covariance_mv(rows)


@pytest.mark.parametrize(("probes", "steps"), [(1, 1), (1, 7), (3, 1)])
def test_quadrature_of_a_log_determinant_by_hand(probes: int, steps: int) -> None:
    """Gauss quadrature from the starting vector alone: with as many steps as rows it is the quadratic form of the matrix logarithm."""
    prior = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)
    root = randn(7, 7, seed=3)
    matrix = root @ root.T + torch.diag(prior)
    preconditioner = Preconditioner(None, {"w": (7,)}, prior)
    found = log_det_quadrature(
        lambda rows: rows @ matrix, preconditioner, probes=probes, steps=steps, generator=generator(2)
    )
    start = preconditioner.draw(probes, generator(2)) * prior.sqrt()
    start = start / start.norm(dim=1, keepdim=True)
    white = matrix / prior.sqrt() / prior.sqrt()[:, None]
    values, vectors = torch.linalg.eigh(white)
    forms = (start @ white * start).sum(1).log() if steps == 1 else (start @ vectors).square() @ values.log()
    estimates = float(prior.log().sum()) + 7 * forms
    assert found.value == pytest.approx(float(estimates.mean()), rel=1e-6)
    if probes == 1:
        assert math.isnan(found.standard_error)
    else:
        assert found.standard_error == pytest.approx(float(estimates.std()) / math.sqrt(probes), rel=1e-6)


def test_marginal_variances_are_the_mean_of_squares_of_draws_and_come_with_its_error() -> None:
    posterior = CASES["mlp gaussian"]().matrix_free("kron", samples=20)
    squares = posterior.fixed_samples().square()
    value, error = posterior.estimate_marginal_variance()
    assert_close(flatten(value), squares.mean(0))
    assert_close(flatten(error), squares.std(0) / math.sqrt(20))
    assert_close(flatten(posterior.marginal_variance()), squares.mean(0))
    one = posterior.with_settings(samples=1).estimate_marginal_variance()[1]
    assert bool(flatten(one).isnan().all())
