"""Likelihoods against torch.func, closed forms, torch.distributions and brute force over all labels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.testing import assert_close

from aftermap.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from tests.likelihood_cases import BUILT_IN, LEADING, WEIGHT, WIDTH, make_data, seeded

C = WIDTH
EXACT = {"rtol": 1e-12, "atol": 1e-12}
CANONICAL = [name for name in BUILT_IN if name != "mean_log_variance"]  # Fisher = Hessian

each = pytest.mark.parametrize("name", BUILT_IN)
each_leading = pytest.mark.parametrize("leading", LEADING, ids=str)


def hessian_blocks(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """[N, R·C, R·C] by torch.func, one example at a time."""

    def single(f: Tensor, y: Tensor) -> Tensor:
        return likelihood.nll(f.unsqueeze(0), y.unsqueeze(0))[0]

    size = outputs[0].numel()
    return vmap(jacrev(jacrev(single)))(outputs, targets).reshape(-1, size, size)


def block_diagonal(blocks: Tensor) -> Tensor:
    """[N, ..., C, C] to [N, R·C, R·C]."""
    return torch.stack([torch.block_diag(*example.reshape(-1, C, C)) for example in blocks])


@each
@each_leading
def test_gradient_is_the_derivative_of_nll(name: str, leading: tuple[int, ...]) -> None:
    likelihood = BUILT_IN[name]
    outputs, targets = make_data(name, leading)
    likelihood.check(outputs, targets)
    nll = likelihood.nll(outputs, targets)
    assert nll.shape == (5,)
    expected = grad(lambda f: likelihood.nll(f, targets).sum())(outputs)
    assert_close(likelihood.gradient(outputs, targets), expected, **EXACT)


@pytest.mark.parametrize("name", CANONICAL)
@each_leading
def test_fisher_equals_hessian_for_the_canonical_ones(name: str, leading: tuple[int, ...]) -> None:
    likelihood = BUILT_IN[name]
    outputs, targets = make_data(name, leading)
    expected = hessian_blocks(likelihood, outputs, targets)
    assert_close(block_diagonal(likelihood.hessian(outputs, targets)), expected, **EXACT)


@each
@each_leading
def test_root_has_its_shape_and_products_match_it(name: str, leading: tuple[int, ...]) -> None:
    likelihood = BUILT_IN[name]
    outputs, targets = make_data(name, leading)
    root = likelihood.hessian_root(outputs, targets)
    columns = likelihood.columns(C)
    assert root.shape == (*leading, C, columns)
    assert columns == (C - 1 if isinstance(likelihood, Categorical) else C)
    assert_close(likelihood.hessian(outputs, targets), root @ root.mT, **EXACT)
    vectors = torch.randn(6, *leading, columns, generator=seeded(1), dtype=torch.float64)
    product = likelihood.hessian_root_mv(outputs, vectors, targets)
    assert_close(product, (root @ vectors.unsqueeze(-1)).squeeze(-1), **EXACT)
    assert_close(Likelihood.hessian_root_mv(likelihood, outputs, vectors, targets), product, **EXACT)


def test_mean_log_variance_fisher_is_the_expected_hessian() -> None:
    likelihood = HeteroscedasticGaussian()
    outputs, _ = make_data("mean_log_variance", (5,))
    # the Hessian is quadratic in y: the mean over mean ± one standard deviation is its expectation
    mean, spread = likelihood.mean(outputs), likelihood.variance(outputs).sqrt()
    expected = sum(hessian_blocks(likelihood, outputs, mean + s * spread) for s in (-1, 1)) / 2
    assert_close(likelihood.hessian(outputs), expected, **EXACT)
    at_mean = hessian_blocks(likelihood, outputs, mean + 3 * spread)
    assert not torch.allclose(at_mean, expected)  # Fisher and Hessian do differ here


def test_mean_log_variance_hessian_is_indefinite() -> None:
    """The reason for the Fisher matrix."""
    outputs, targets = make_data("mean_log_variance", (5,))
    eigenvalues = torch.linalg.eigvalsh(hessian_blocks(HeteroscedasticGaussian(), outputs, targets))
    assert eigenvalues.min() < -1e-3
    assert torch.linalg.eigvalsh(HeteroscedasticGaussian().hessian(outputs)).min() > 0


@each
def test_nll_is_the_normalised_density(name: str) -> None:
    likelihood = BUILT_IN[name]
    outputs, targets = make_data(name, (5, 3))
    mean, sd = likelihood.mean(outputs), likelihood.variance(outputs).sqrt()
    if isinstance(likelihood, Categorical):
        weight = likelihood.weight if isinstance(likelihood.weight, Tensor) else None
        expected = torch.nn.functional.cross_entropy(
            outputs.movedim(-1, 1) / likelihood.temperature,
            targets,
            weight,
            ignore_index=likelihood.ignore_index,
            reduction="none",
        )
    elif isinstance(likelihood, Bernoulli):
        logits = outputs / likelihood.temperature
        expected = -torch.distributions.Bernoulli(logits=logits).log_prob(targets.double()).sum(-1)
    elif isinstance(likelihood, Poisson):
        expected = -torch.distributions.Poisson(outputs.exp()).log_prob(targets.double()).sum(-1)
    else:
        expected = -torch.distributions.Normal(mean, sd).log_prob(targets).sum(-1)
    assert_close(likelihood.nll(outputs, targets), expected.sum(1), **EXACT)


@each
def test_mean_and_variance_have_the_leading_shape(name: str) -> None:
    outputs, targets = make_data(name, (5, 3))
    width = targets.shape[-1] if targets.dim() == 3 else C
    likelihood = BUILT_IN[name]
    assert likelihood.mean(outputs).shape == (5, 3, width)
    assert likelihood.variance(outputs).shape == (5, 3, width)
    assert (likelihood.variance(outputs) > 0).all()


def test_natural_and_mean_log_variance_are_the_same_density() -> None:
    natural, targets = make_data("natural", (5, 3))
    mean, variance = BUILT_IN["natural"].mean(natural), BUILT_IN["natural"].variance(natural)
    outputs = torch.cat([mean, variance.log()], -1)
    assert_close(BUILT_IN["natural"].nll(natural, targets), HeteroscedasticGaussian().nll(outputs, targets))
    assert_close(mean / variance, natural[..., :2], **EXACT)


@each
def test_splitting_a_batch_changes_nothing(name: str) -> None:
    likelihood = BUILT_IN[name]
    outputs, targets = make_data(name, (5, 3))
    for method in (likelihood.nll, likelihood.gradient, likelihood.hessian_root):
        parts = torch.cat([method(outputs[s], targets[s]) for s in (slice(0, 2), slice(2, 5))])
        # A vectorised sigmoid and its scalar tail may differ in the last bit.
        assert_close(method(outputs, targets), parts, rtol=1e-15, atol=0)


@each
def test_float32_stays_float32_and_agrees(name: str) -> None:
    likelihood = BUILT_IN[name]
    outputs, targets = make_data(name, (5, 3))
    narrow = targets.float() if targets.is_floating_point() else targets
    for method in (likelihood.nll, likelihood.gradient, likelihood.hessian_root):
        value = method(outputs.float(), narrow)
        assert value.dtype is torch.float32
        assert_close(value.double(), method(outputs, targets), rtol=1e-4, atol=1e-5)
    assert likelihood.sample_gradient(outputs.float(), narrow, seeded()).dtype is torch.float32
    assert likelihood.mean(outputs.float()).dtype is torch.float32


@each
def test_sampled_gradients_have_mean_zero_and_covariance_hessian(name: str) -> None:
    likelihood = BUILT_IN[name]
    outputs, targets = make_data(name, (3,), seed=4)
    draws = 40_000
    many = outputs.repeat_interleave(draws, 0)
    g = likelihood.sample_gradient(many, targets.repeat_interleave(draws, 0), seeded(5)).reshape(3, draws, C)
    expected = likelihood.hessian(outputs, targets)
    outer = g.unsqueeze(-1) * g.unsqueeze(-2)
    # six standard errors, estimated from the draws; the floor is for entries that are zero
    assert ((g.mean(1)).abs() <= 6 * g.std(1) / math.sqrt(draws) + 1e-12).all()
    assert ((outer.mean(1) - expected).abs() <= 6 * outer.std(1) / math.sqrt(draws) + 1e-12).all()


def test_sampled_positions_are_independent() -> None:
    outputs = torch.zeros(20_000, 2, 3, dtype=torch.float64)
    g = Categorical().sample_gradient(outputs, generator=seeded(6))
    cross = torch.einsum("na,nb->ab", g[:, 0], g[:, 1]) / len(g)
    assert_close(cross, torch.zeros(3, 3, dtype=torch.float64), rtol=0, atol=0.02)


def test_categorical_fisher_by_enumeration() -> None:
    outputs, _ = make_data("categorical", (5, 3))
    p = outputs.softmax(-1)
    fisher = torch.zeros(5, 3, C, C, dtype=torch.float64)
    for label in range(C):
        g = Categorical().gradient(outputs, torch.full((5, 3), label))
        fisher += p[..., label, None, None] * g.unsqueeze(-1) * g.unsqueeze(-2)
    assert_close(Categorical().hessian(outputs), fisher, **EXACT)


@pytest.mark.parametrize("top", range(C))
@pytest.mark.parametrize("gap", [30.0, 69.0, 300.0])  # exp(-69) = 1e-30
def test_categorical_root_is_exact_for_one_hot_probabilities(top: int, gap: float) -> None:
    outputs = -gap - torch.arange(C, dtype=torch.float64).unsqueeze(0)
    outputs[0, top] = 0.0
    p = outputs.softmax(-1)[0]
    others = torch.stack([p[[j for j in range(C) if j != c]].sum() for c in range(C)])  # 1 - p, exactly
    expected = torch.where(torch.eye(C, dtype=torch.bool), p * others, -torch.outer(p, p))
    # entry by entry, relative: 1e-30 counts as much as 1
    assert_close(Categorical().hessian(outputs)[0], expected, rtol=1e-12, atol=0)
    gradient = Categorical().gradient(outputs, torch.tensor([top]))[0]
    residual = p.clone()
    residual[top] = -others[top]
    assert_close(gradient, residual, rtol=1e-12, atol=0)


def test_extreme_logits_stay_finite() -> None:
    outputs = torch.tensor([[1e4, -1e4, 0.0], [-math.inf, 2.0, 1.0]])
    root = Categorical().hessian_root(outputs)
    assert root.isfinite().all()
    assert Categorical().sample_gradient(outputs, generator=seeded()).isfinite().all()
    assert Bernoulli().hessian_root(outputs[:1]).isfinite().all()
    assert_close(Bernoulli().nll(outputs[:1], torch.tensor([[1, 0, 1]])), torch.tensor([math.log(2)]))


def test_bernoulli_tail_keeps_its_digits() -> None:
    f = torch.tensor([[50.0], [-50.0]], dtype=torch.float64)
    y = torch.tensor([[1], [0]])
    tail = torch.full((2,), math.exp(-50), dtype=torch.float64)
    assert_close(Bernoulli().nll(f, y), tail, rtol=1e-12, atol=0)
    assert_close(Bernoulli().gradient(f, y).abs().squeeze(-1), tail, rtol=1e-12, atol=0)
    assert_close(Bernoulli().hessian(f).flatten(), tail, rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction_weight", [None, WEIGHT], ids=["plain", "weighted"])
def test_categorical_is_torch_cross_entropy_sum(reduction_weight: Tensor | None) -> None:
    outputs, targets = make_data("ignoring", (5, 3))
    likelihood = Categorical(weight=reduction_weight, ignore_index=-1)
    expected = torch.nn.functional.cross_entropy(
        outputs.flatten(0, 1), targets.flatten(), reduction_weight, ignore_index=-1, reduction="sum"
    )
    assert_close(likelihood.nll(outputs, targets).sum(), expected, **EXACT)


def test_ignored_positions_are_zero_everywhere_even_next_to_nan() -> None:
    outputs, _ = make_data("categorical", (5, 3))
    targets = torch.tensor([[0, -100, 3]] * 5)
    outputs[:, 1] = math.nan
    likelihood = Categorical()
    for value in (
        likelihood.gradient(outputs, targets),
        likelihood.hessian_root(outputs, targets),
        likelihood.hessian(outputs, targets),
        likelihood.sample_gradient(outputs, targets, seeded()),
    ):
        assert_close(value[:, 1], torch.zeros_like(value[:, 1]), rtol=0, atol=0)
        assert value.isfinite().all()
    seen = likelihood.nll(outputs[:, [0, 2]], targets[:, [0, 2]])
    assert_close(likelihood.nll(outputs, targets), seen, **EXACT)


def test_weights_enter_the_curvature_only_with_targets() -> None:
    outputs, targets = make_data("weighted", (5,))
    plain = Categorical().hessian(outputs)
    assert_close(BUILT_IN["weighted"].hessian(outputs), plain, **EXACT)
    scaled = WEIGHT[targets][:, None, None] * plain
    assert_close(BUILT_IN["weighted"].hessian(outputs, targets), scaled, **EXACT)


def test_channels_moved_to_the_end_are_accepted() -> None:
    """An image network gives [N, C, H, W]; moving C makes a tensor that is not contiguous."""
    outputs = torch.randn(5, C, 3, 2, generator=seeded(), dtype=torch.float64).movedim(1, -1)
    targets = torch.randint(C, (5, 3, 2), generator=seeded())
    moved, plain = outputs, outputs.contiguous()
    for method in ("nll", "gradient", "hessian_root"):
        assert_close(getattr(Categorical(), method)(moved, targets), getattr(Categorical(), method)(plain, targets))
    assert_close(
        Categorical().sample_gradient(moved, targets, seeded(2)),
        Categorical().sample_gradient(plain, targets, seeded(2)),
    )


def test_drawn_label_frequencies_match_probabilities() -> None:
    logits = torch.tensor([0.3, -math.inf, 1.2, -0.7, 0.0], dtype=torch.float64)
    draws = 50_000
    g = Categorical().sample_gradient(logits.expand(draws, 5), generator=seeded(3))
    labels = (g < 0).double().mean(0)
    assert labels[1] == 0
    assert_close(labels, logits.softmax(-1), rtol=0, atol=6 * 0.5 / math.sqrt(draws))


@each
def test_same_seed_same_draw(name: str) -> None:
    outputs, targets = make_data(name, (5, 3))
    likelihood = BUILT_IN[name]
    first = likelihood.sample_gradient(outputs, targets, seeded(1))
    assert_close(likelihood.sample_gradient(outputs, targets, seeded(1)), first, rtol=0, atol=0)
    assert not torch.equal(likelihood.sample_gradient(outputs, targets, seeded(2)), first)


def test_sampling_with_a_generator_leaves_the_global_seed_alone() -> None:
    before = torch.get_rng_state()
    for name, likelihood in BUILT_IN.items():
        likelihood.sample_gradient(*make_data(name, (5,)), seeded(1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(), (C,)], ids=["scalar", "per_output"])
def test_gaussian_is_differentiable_in_a_tensor_noise(shape: tuple[int, ...]) -> None:
    outputs, targets = make_data("gaussian", (5, 3))
    noise = torch.full(shape, 0.4, dtype=torch.float64)
    derivative = grad(lambda s: Gaussian(s).nll(outputs, targets).sum())(noise)
    slope = -(outputs - targets).square() / noise**3 + 1 / noise
    assert_close(derivative, slope.sum((0, 1)) if shape else slope.sum(), **EXACT)
    trace = grad(lambda s: Gaussian(s).hessian(outputs).diagonal(dim1=-2, dim2=-1).sum())(noise)
    assert_close(trace.sum(), torch.tensor(-2 * outputs.numel() / 0.4**3, dtype=torch.float64))


@pytest.mark.parametrize("likelihood", [Bernoulli(), Gaussian(), Poisson()], ids=repr)
def test_flat_targets_are_accepted_for_one_output(likelihood: Likelihood) -> None:
    outputs = torch.randn(5, 1, generator=seeded(), dtype=torch.float64)
    targets = torch.tensor([0, 1, 1, 0, 1])
    likelihood.check(outputs, targets)
    assert_close(likelihood.nll(outputs, targets), likelihood.nll(outputs, targets.unsqueeze(-1)))
    assert_close(likelihood.gradient(outputs, targets), likelihood.gradient(outputs, targets.unsqueeze(-1)))


def test_bernoulli_accepts_soft_and_bool_targets() -> None:
    outputs, targets = make_data("bernoulli", (5,))
    Bernoulli().check(outputs, targets.bool())
    Bernoulli().check(outputs, torch.full((5, C), 0.3))
    assert_close(Bernoulli().nll(outputs, targets.bool()), Bernoulli().nll(outputs, targets.double()))
