"""The law of the vectors: their outer products sum to the curvature, exactly or in expectation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.curvature.passes.vectors import VECTOR_KINDS, Vectors, make_vectors, resolve_kind
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.likelihoods import Categorical, Gaussian, Likelihood
from tests.likelihood_cases import BUILT_IN, LEADING, WIDTH, make_data, seeded

EXACT = {"rtol": 1e-12, "atol": 1e-12}
EXAMPLE_WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)

each = pytest.mark.parametrize("name", BUILT_IN)
each_leading = pytest.mark.parametrize("leading", LEADING, ids=str)


def outer_sum(vectors: Vectors, size: int | None = None) -> Tensor:
    """Σ_v v vᵀ per example, flattened over (positions, C): [N, R·C, R·C]."""
    total: Tensor | float = 0.0
    seen = 0
    for chunk in vectors.chunks(size):
        flat = chunk.flatten(2)
        seen += len(flat)
        total = total + torch.einsum("vna,vnb->nab", flat, flat)
    assert seen == vectors.count
    assert isinstance(total, Tensor)
    return total


def curvature(likelihood: Likelihood, outputs: Tensor, targets: Tensor | None) -> Tensor:
    """blockdiag_r(Λ_r) per example: [N, R·C, R·C]."""
    blocks = likelihood.hessian(outputs, targets)
    return torch.stack([torch.block_diag(*b.reshape(-1, *b.shape[-2:])) for b in blocks])


@each
@each_leading
@pytest.mark.parametrize("size", [None, 1, 5, 1000])
def test_exact_vectors_sum_to_the_curvature(name: str, leading: tuple[int, ...], size: int | None) -> None:
    likelihood = BUILT_IN[name]
    outputs, targets = make_data(name, leading)
    vectors = make_vectors("exact", likelihood, outputs, targets)
    assert vectors.count == math.prod(leading[1:]) * likelihood.columns(WIDTH)
    assert_close(outer_sum(vectors, size), curvature(likelihood, outputs, targets), **EXACT)


@each_leading
def test_jacobian_vectors_are_the_identity(leading: tuple[int, ...]) -> None:
    outputs, targets = make_data("categorical", leading)
    vectors = make_vectors("jacobian", Categorical(), outputs, targets, weight=EXAMPLE_WEIGHT)
    size = math.prod(leading[1:]) * WIDTH
    assert vectors.count == size
    rows = torch.cat(list(vectors.chunks(3))).flatten(2)
    expected = torch.eye(size, dtype=torch.float64).unsqueeze(1).expand(size, 5, size)
    assert_close(rows, expected, rtol=0, atol=0)  # in order: row i is output i, and no weights


@each
def test_empirical_vector_is_the_observed_gradient(name: str) -> None:
    likelihood = BUILT_IN[name]
    outputs, targets = make_data(name, (5, 3))
    (chunk,) = make_vectors("empirical", likelihood, outputs, targets).chunks()
    assert_close(chunk, likelihood.gradient(outputs, targets).unsqueeze(0), rtol=0, atol=0)


@each
@pytest.mark.parametrize("kind", ["rademacher", "sampled"])
def test_random_vectors_are_unbiased(name: str, kind: str) -> None:
    likelihood = BUILT_IN[name]
    outputs, targets = make_data(name, (3, 2), seed=2)
    samples = 5_000
    vectors = make_vectors(kind, likelihood, outputs, targets, samples=samples, generator=seeded(3))
    assert vectors.count == samples
    flat = torch.cat(list(vectors.chunks(1000))).flatten(2) * math.sqrt(samples)
    outer = flat.unsqueeze(-1) * flat.unsqueeze(-2)
    error = (outer.mean(0) - curvature(likelihood, outputs, targets)).abs()
    # six standard errors, estimated from the draws; the floor is for entries without spread
    assert (error <= 6 * outer.std(0) / math.sqrt(samples) + 1e-12).all()
    assert (flat.mean(0).abs() <= 6 * flat.std(0) / math.sqrt(samples) + 1e-12).all()


@pytest.mark.parametrize("kind", ["rademacher", "sampled"])
def test_error_falls_as_one_over_the_root_of_the_samples(kind: str) -> None:
    outputs, targets = make_data("weighted", (5, 3))
    likelihood = BUILT_IN["weighted"]
    exact = curvature(likelihood, outputs, targets)
    errors = []
    for samples in (4, 64, 1024):
        squared = 0.0
        for repeat in range(12):
            g = seeded(100 * samples + repeat)
            vectors = make_vectors(kind, likelihood, outputs, targets, samples=samples, generator=g)
            squared += (outer_sum(vectors, 256) - exact).square().sum().item() / 12
        errors.append(math.sqrt(squared))
    # sixteen times the samples: a quarter of the error
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize("kind", ["exact", "rademacher", "sampled", "empirical"])
@each_leading
def test_weights_multiply_the_outer_products(kind: str, leading: tuple[int, ...]) -> None:
    outputs, targets = make_data("categorical", leading)

    def build(weight: Tensor | None) -> Vectors:
        return make_vectors(kind, Categorical(), outputs, targets, weight=weight, samples=3, generator=seeded(4))

    expected = EXAMPLE_WEIGHT[:, None, None] * outer_sum(build(None))
    assert_close(outer_sum(build(EXAMPLE_WEIGHT)), expected, **EXACT)


def test_a_weight_of_two_is_two_copies() -> None:
    outputs, targets = make_data("categorical", (5,))
    weighted = make_vectors("exact", Categorical(), outputs, targets, weight=torch.tensor([2, 1, 1, 3, 1]))
    twice = torch.tensor([0, 0, 1, 2, 3, 3, 3, 4])
    copies = outer_sum(make_vectors("exact", Categorical(), outputs[twice], targets[twice]))
    assert_close(outer_sum(weighted).sum(0), copies.sum(0), **EXACT)


@pytest.mark.parametrize("kind", VECTOR_KINDS)
@pytest.mark.parametrize("name", ["ignoring", "gaussian", "natural"])
def test_chunk_size_changes_nothing(kind: str, name: str) -> None:
    outputs, targets = make_data(name, (5, 3))

    def build() -> Vectors:
        return make_vectors(kind, BUILT_IN[name], outputs, targets, samples=7, generator=seeded(5))

    whole = torch.cat(list(build().chunks()))
    for size in (1, 2, 5):
        chunks = list(build().chunks(size))
        assert all(len(chunk) <= size for chunk in chunks)
        assert_close(torch.cat(chunks), whole, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["exact", "jacobian"])
def test_without_a_size_one_position_is_built_at_a_time(kind: str) -> None:
    outputs, targets = make_data("categorical", (5, 3, 2))
    vectors = make_vectors(kind, Categorical(), outputs, targets)
    columns = WIDTH - 1 if kind == "exact" else WIDTH
    chunks = list(vectors.chunks())
    assert [tuple(chunk.shape) for chunk in chunks] == [(columns, 5, 3, 2, WIDTH)] * 6
    for position, chunk in enumerate(chunks):
        rows = chunk.reshape(columns, 5, 6, WIDTH).abs().sum((0, 1, 3))
        assert rows.nonzero().flatten().tolist() == [position]


def test_chunks_are_built_lazily() -> None:
    """A million outputs per example: the whole set would need terabytes, one chunk does not."""
    outputs = torch.zeros(1, 1000, 1000)
    vectors = make_vectors("exact", Gaussian(noise=0.5), outputs, None)
    assert vectors.count == 1_000_000
    chunk = next(vectors.chunks(2))
    assert chunk.shape == (2, 1, 1000, 1000)
    assert chunk.sum().item() == 4.0


@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_vectors_carry_no_gradient_and_keep_dtype(kind: str) -> None:
    outputs, targets = make_data("gaussian", (5,))
    noise = torch.tensor(0.3, requires_grad=True)
    leaf = outputs.float().requires_grad_()
    for chunk in make_vectors(kind, Gaussian(noise), leaf, targets, generator=seeded()).chunks():
        assert not chunk.requires_grad
        assert chunk.dtype is torch.float32
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_vectors_back_propagate(kind: str) -> None:
    """Σ (Jᵀv)(Jᵀv)ᵀ of a linear network is Jᵀ (Σ v vᵀ) J."""
    g = seeded(6)
    x = torch.randn(5, 3, generator=g, dtype=torch.float64)
    weight = torch.randn(WIDTH, 3, generator=g, dtype=torch.float64, requires_grad=True)
    outputs = x @ weight.T
    targets = torch.randint(WIDTH, (5,), generator=g)

    def build() -> Vectors:
        return make_vectors(kind, Categorical(), outputs, targets, samples=2, generator=seeded(7))

    ggn = torch.zeros(WIDTH * 3, WIDTH * 3, dtype=torch.float64)
    for chunk in build().chunks(2):
        for vector in chunk:
            for n in range(5):
                (pulled,) = torch.autograd.grad(outputs[n], weight, vector[n], retain_graph=True)
                ggn += torch.outer(pulled.flatten(), pulled.flatten())
    expected = torch.einsum("nab,ni,nj->aibj", outer_sum(build()), x, x).reshape(ggn.shape)
    assert_close(ggn, expected, **EXACT)


def test_samples_are_independent_draws() -> None:
    outputs, targets = make_data("categorical", (5, 3))
    for kind in ("rademacher", "sampled"):
        vectors = make_vectors(kind, Categorical(), outputs, targets, samples=2, generator=seeded(8))
        (pair,) = vectors.chunks()
        assert not torch.equal(pair[0], pair[1])
        (again,) = make_vectors(kind, Categorical(), outputs, targets, samples=2, generator=seeded(8)).chunks()
        assert torch.equal(pair, again)


def test_a_generator_leaves_the_global_seed_alone() -> None:
    outputs, targets = make_data("categorical", (5, 3))
    before = torch.get_rng_state()
    for kind in VECTOR_KINDS:
        list(make_vectors(kind, Categorical(), outputs, targets, generator=seeded()).chunks())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_likelihood_of_your_own_needs_only_its_root() -> None:
    class Own(Likelihood):
        """A dense root that depends on the targets, with fewer columns than outputs."""

        check = nll = gradient = sample_gradient = mean = lambda self, *args: None

        def columns(self, n_outputs: int) -> int:
            return 2

        def hessian_root(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
            root = torch.stack([outputs, outputs.square()], -1)
            return root if targets is None else root * targets[..., None, None]

    outputs, targets = make_data("categorical", (5, 3))
    vectors = make_vectors("exact", Own(), outputs, targets.double())
    assert vectors.count == 6
    assert_close(outer_sum(vectors, 4), curvature(Own(), outputs, targets.double()), **EXACT)
    (signs,) = make_vectors("rademacher", Own(), outputs, None, generator=seeded()).chunks()
    assert signs.shape == (1, 5, 3, WIDTH)


def test_rademacher_never_forms_the_root() -> None:
    """A vocabulary of fifty thousand words: the root would need ten gigabytes per token."""
    outputs = torch.randn(2, 3, 50_000, generator=seeded())
    targets = torch.randint(50_000, (2, 3), generator=seeded())
    (vector,) = make_vectors("auto", Categorical(), outputs, targets, generator=seeded()).chunks()
    assert vector.shape == (1, 2, 3, 50_000)
    assert_close(vector.sum(-1), torch.zeros(1, 2, 3), rtol=0, atol=1e-5)  # 1ᵀS = 0


def test_auto_depends_on_the_outputs_of_one_example() -> None:
    assert resolve_kind("auto", torch.zeros(100, 20)) == "exact"
    assert resolve_kind("auto", torch.zeros(2, 21)) == "rademacher"
    assert resolve_kind("auto", torch.zeros(2, 4, 5)) == "exact"
    assert resolve_kind("auto", torch.zeros(2, 3, 7)) == "rademacher"
    for kind in VECTOR_KINDS:
        assert resolve_kind(kind, torch.zeros(2, 21)) == kind
    outputs, targets = make_data("categorical", (5,))
    assert make_vectors("auto", Categorical(), outputs, targets).kind == "exact"


def test_bad_input_is_explained() -> None:
    outputs, targets = make_data("categorical", (5,))
    with pytest.raises(InputError, match="'fisher', but must be one of 'auto', 'exact', .*'jacobian'"):
        make_vectors("fisher", Categorical(), outputs, targets)
    with pytest.raises(InputError, match="need targets, got None"):
        make_vectors("empirical", Categorical(), outputs, None)
    with pytest.raises(InputError, match="samples is 0"):
        make_vectors("sampled", Categorical(), outputs, targets, samples=0)
    with pytest.raises(InputError, match="chunk is 0, but must be 1 or more"):
        make_vectors("exact", Categorical(), outputs, targets).chunks(0)
    with pytest.raises(ShapeError, match=r"weight has shape \[3\].*\[5\]"):
        make_vectors("exact", Categorical(), outputs, targets, weight=torch.ones(3))
    with pytest.raises(DataError, match=r"weight\[2\] is -1.0, but must be finite and 0 or more"):
        make_vectors("exact", Categorical(), outputs, targets, weight=torch.tensor([1, 1, -1.0, 1, 1]))
    with pytest.raises(ShapeError, match=r"unsqueeze\(-1\)"):
        make_vectors("exact", Categorical(), outputs[:, 0], targets)
