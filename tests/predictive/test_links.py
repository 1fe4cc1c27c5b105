"""Links against large Monte Carlo averages, closed forms and invariances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.likelihoods import Bernoulli, Categorical, Gaussian
from aftermap.metrics import entropy, entropy_decomposition
from aftermap.predictive.links import LINKS, gaussian_prediction, laplace_bridge, pairwise_probit, probit

F64 = torch.float64


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latent(*shape: int, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A mean and a covariance with variances around ``scale``."""
    g, width = seeded(seed), shape[-1]
    mean = 1.5 * torch.randn(*shape, generator=g, dtype=F64)
    root = torch.randn(*shape, width + 2, generator=g, dtype=F64)
    return mean, scale * root @ root.mT / (width + 2)


def monte_carlo(mean: Tensor, cov: Tensor, draws: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Mean probabilities and mean entropy by plain independent draws, in chunks."""
    g, root = seeded(seed), torch.linalg.cholesky(cov)
    probability, nats, chunks = 0.0, 0.0, draws // 50_000
    for _ in range(chunks):
        z = torch.randn(50_000, *mean.shape, generator=g, dtype=F64)
        p = (mean + torch.einsum("...ij,s...j->s...i", root, z)).softmax(-1)
        probability = probability + p.mean(0) / chunks
        nats = nats + torch.special.entr(p).sum(-1).mean(0) / chunks
    return probability, nats


def total_variation(p: Tensor, q: Tensor) -> float:
    return 0.5 * (p - q).abs().sum(-1).mean().item()


def test_mc_converges_to_a_million_independent_draws() -> None:
    mean, cov = latent(4, 3)
    wanted, nats = monte_carlo(mean, cov, 1_000_000)
    pred = gaussian_prediction(Categorical(), mean, cov, link="mc", samples=8192, generator=seeded())
    assert_close(pred.mean, wanted, rtol=0, atol=1e-3)
    assert_close(pred.aleatoric, nats, rtol=0, atol=2e-3)
    assert_close(pred.total, torch.special.entr(wanted).sum(-1), rtol=0, atol=2e-3)


@pytest.mark.parametrize("scale, limits", [(0.1, (0.01, 0.006)), (1.0, (0.06, 0.03)), (10.0, (0.16, 0.08))])
def test_the_links_are_as_accurate_as_they_should_be(scale: float, limits: tuple[float, float]) -> None:
    mean, cov = latent(40, 3, scale=scale)
    wanted, _ = monte_carlo(mean, cov, 50_000)
    distance = {
        link: total_variation(gaussian_prediction(Categorical(), mean, cov, link=link, generator=seeded()).mean, wanted)
        for link in LINKS
    }
    assert distance["mc"] < distance["pairwise"] < distance["probit"] < distance["bridge"]
    assert distance["probit"] < limits[0]
    assert distance["pairwise"] < limits[1]
    assert distance["auto"] <= distance["pairwise"]


def test_even_draws_beat_independent_draws() -> None:
    mean, cov = latent(15, 10)
    wanted, _ = monte_carlo(mean, cov, 50_000)
    z = torch.randn(100, 15, 10, generator=seeded(), dtype=F64)
    plain = (mean + torch.einsum("nij,snj->sni", torch.linalg.cholesky(cov), z)).softmax(-1).mean(0)
    pred = gaussian_prediction(Categorical(), mean, cov, link="mc", samples=100, generator=seeded())
    assert 2 * total_variation(pred.mean, wanted) < total_variation(plain, wanted)


def test_mc_samples_have_the_right_mean_and_covariance() -> None:
    mean, cov = latent(2, 3, scale=0.5)
    pred = gaussian_prediction(Gaussian(), mean, cov, link="mc", samples=16_384, generator=seeded())
    assert pred.samples is not None
    centred = pred.samples - mean
    assert_close(pred.samples.mean(0), mean, rtol=0, atol=1e-3)
    assert_close(torch.einsum("sni,snj->nij", centred, centred) / 16_384, cov, rtol=0, atol=5e-3)


def test_pairwise_of_two_classes_is_the_binary_probit_of_their_difference() -> None:
    mean, cov = latent(5, 2)
    spread = cov[:, 0, 0] + cov[:, 1, 1] - 2 * cov[:, 0, 1]
    wanted = probit(mean[:, 0] - mean[:, 1], spread).sigmoid()
    assert_close(pairwise_probit(mean, cov).exp()[:, 0], wanted)
    binary = gaussian_prediction(Bernoulli(), (mean[:, :1] - mean[:, 1:]), None, spread.unsqueeze(-1), link="probit")
    assert_close(binary.mean[:, 0], wanted)


def test_pairwise_and_mc_ignore_a_common_shift_of_the_logits_and_probit_does_not() -> None:
    mean, cov = latent(5, 3)
    shifted = cov + 10.0
    assert_close(pairwise_probit(mean, shifted), pairwise_probit(mean, cov))
    before, after = (gaussian_prediction(Categorical(), mean, v, link="probit").mean for v in (cov, shifted))
    assert total_variation(before, after) > 0.05
    before, after = (
        gaussian_prediction(Categorical(), mean, v, link="mc", samples=8192, generator=seeded()).mean
        for v in (cov, shifted)
    )
    assert_close(after, before, rtol=0, atol=2e-3)


def dirichlet_latent(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The Laplace approximation of a Dirichlet in centred logits (MacKay 1998)."""
    width, inverse = alpha.shape[-1], 1 / alpha
    cov = inverse.diag() - (inverse.unsqueeze(-1) + inverse) / width + inverse.sum() / width**2
    return alpha.log() - alpha.log().mean(), cov


@pytest.mark.parametrize("values", [(5.0, 3.0, 2.0), (0.7, 4.0), (1.0, 20.0, 3.0, 0.5, 2.5)])
def test_the_bridge_inverts_the_laplace_approximation_of_a_dirichlet(values: tuple[float, ...]) -> None:
    alpha = torch.tensor(values, dtype=F64)
    mean, cov = dirichlet_latent(alpha)
    assert_close(laplace_bridge(mean, cov).exp(), alpha)
    assert_close(laplace_bridge(mean + 3.0, cov + 2.0).exp(), alpha)  # a common shift is conditioned away
    pred = gaussian_prediction(Categorical(), mean.unsqueeze(0), cov.unsqueeze(0), link="bridge")
    assert_close(pred.concentration, alpha.unsqueeze(0))
    assert_close(pred.mean, (alpha / alpha.sum()).unsqueeze(0))


def test_the_bridge_splits_like_its_dirichlet() -> None:
    mean, cov = dirichlet_latent(torch.tensor([5.0, 3.0, 2.0], dtype=F64))
    pred = gaussian_prediction(Categorical(), mean.unsqueeze(0), cov.unsqueeze(0), link="bridge")
    gamma = torch._standard_gamma(torch.tensor([5.0, 3.0, 2.0], dtype=F64).expand(200_000, 3), generator=seeded())
    nats = torch.special.entr(gamma / gamma.sum(-1, keepdim=True)).sum(-1).mean()
    assert_close(pred.aleatoric[0], nats, rtol=0, atol=3e-3)


def test_a_normalised_bridge_does_not_depend_on_the_scale() -> None:
    mean, cov = latent(4, 3)
    small = laplace_bridge(mean, cov, normalise=True)
    assert_close(laplace_bridge(3.0 * mean, 9.0 * cov, normalise=True), small)
    assert not torch.allclose(laplace_bridge(3.0 * mean, 9.0 * cov), small)
    alpha = torch.tensor([5.0, 3.0, 2.0, 4.0, 1.0], dtype=F64)
    mean, cov = dirichlet_latent(alpha)
    scale = cov.diagonal().mean() / (5 / 2) ** 0.5
    assert_close(laplace_bridge(mean, cov, normalise=True), laplace_bridge(mean / scale.sqrt(), cov / scale))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3), (2, 4, 5, 3)])
def test_shapes_sums_and_the_split(link: str, shape: tuple[int, ...]) -> None:
    mean, cov = latent(*shape)
    pred = gaussian_prediction(Categorical(), mean, cov, link=link, samples=33, generator=seeded())
    assert pred.mean.shape == shape
    assert_close(pred.mean.sum(-1), torch.ones(shape[:-1], dtype=F64))
    assert pred.epistemic.shape == pred.aleatoric.shape == pred.total.shape == shape[:-1]
    assert_close(pred.epistemic + pred.aleatoric, pred.total, rtol=0, atol=0)
    assert_close(pred.total, entropy(pred.mean))
    assert bool((pred.epistemic > 0).all())
    assert bool((pred.aleatoric >= 0).all())
    assert pred.latent_cov is cov
    assert_close(pred.latent_var, cov.diagonal(dim1=-2, dim2=-1))
    flat = gaussian_prediction(
        Categorical(), mean.reshape(-1, 3), cov.reshape(-1, 3, 3), link=link, samples=33, generator=seeded()
    )
    assert_close(flat.mean.reshape(shape), pred.mean)


def test_the_mc_split_is_that_of_the_metrics() -> None:
    mean, cov = latent(5, 3)
    pred = gaussian_prediction(Categorical(), mean, cov, link="mc", generator=seeded())
    assert pred.samples is not None
    wanted = entropy_decomposition(pred.samples)
    assert_close(pred.epistemic, wanted.epistemic)
    assert_close(pred.aleatoric, wanted.aleatoric)


@pytest.mark.parametrize("link", ["pairwise", "probit"])
def test_closed_forms_split_like_mc_at_small_variance(link: str) -> None:
    mean, cov = latent(6, 3, scale=0.02)
    pred = gaussian_prediction(Categorical(), mean, cov, link=link)
    many = gaussian_prediction(Categorical(), mean, cov, link="mc", samples=8192, generator=seeded())
    assert_close(pred.epistemic, many.epistemic, rtol=0.15, atol=1e-6)


@pytest.mark.parametrize("link", ["auto", "mc", "probit", "pairwise"])
def test_splitting_a_batch_changes_nothing(link: str) -> None:
    mean, cov = latent(6, 3, scale=0.4)
    whole = gaussian_prediction(Categorical(), mean, cov, link=link, generator=seeded())
    part = gaussian_prediction(Categorical(), mean[4:], cov[4:], link=link, generator=seeded())
    assert_close(part.mean, whole.mean[4:])
    assert_close(part.epistemic, whole.epistemic[4:])


def test_auto_is_pairwise_where_the_variance_is_small_and_mc_elsewhere() -> None:
    mean, cov = latent(6, 3)
    cov = cov * torch.tensor([0.01, 0.01, 0.01, 9.0, 9.0, 9.0], dtype=F64)[:, None, None]
    auto = gaussian_prediction(Categorical(), mean, cov, generator=seeded())
    mc = gaussian_prediction(Categorical(), mean, cov, link="mc", generator=seeded())
    assert_close(auto.mean[:3], pairwise_probit(mean, cov).exp()[:3])
    assert_close(auto.mean[3:], mc.mean[3:])
    mean, cov = latent(4, 11, scale=0.01)
    assert gaussian_prediction(Categorical(), mean, cov).link == "mc"


def test_closed_forms_leave_the_random_state_alone() -> None:
    mean, cov = latent(5, 3)
    before = torch.get_rng_state()
    for link in ("probit", "pairwise", "bridge"):
        gaussian_prediction(Categorical(), mean, cov, link=link)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("link", ["auto", "mc", "probit", "pairwise"])
def test_without_variance_it_is_the_softmax(link: str) -> None:
    mean, cov = latent(5, 3)
    for zero in ({"latent_cov": torch.zeros_like(cov)}, {"latent_var": torch.zeros_like(mean)}):
        pred = gaussian_prediction(Categorical(), mean, **zero, link=link)
        assert_close(pred.mean, mean.softmax(-1))
        assert_close(pred.epistemic, torch.zeros(5, dtype=F64), rtol=0, atol=1e-12)


def test_a_singular_covariance_is_drawn_from_exactly() -> None:
    mean, _ = latent(4, 3)
    vector = torch.randn(4, 3, 1, generator=seeded(), dtype=F64)
    cov = vector @ vector.mT
    cov[1] = torch.eye(3, dtype=F64)  # beside one that is not singular
    pred = gaussian_prediction(Gaussian(), mean, cov, link="mc", samples=4096, generator=seeded())
    assert pred.samples is not None
    centred = pred.samples - mean
    assert_close(torch.einsum("sni,snj->nij", centred, centred) / 4096, cov, rtol=0, atol=0.03)


def test_only_a_variance_is_a_diagonal_covariance() -> None:
    mean, cov = latent(5, 3)
    var = cov.diagonal(dim1=-2, dim2=-1)
    for link in LINKS:
        by_var = gaussian_prediction(Categorical(), mean, None, var, link=link, samples=2**14)
        by_cov = gaussian_prediction(Categorical(), mean, torch.diag_embed(var), link=link, samples=2**14)
        # Draws of a covariance leave out what is common to all logits, those of variances do not.
        exact = {} if link not in ("auto", "mc") else {"rtol": 0, "atol": 2e-4}
        assert_close(by_var.mean, by_cov.mean, **exact)
        assert by_var.latent_cov is None


@pytest.mark.parametrize("link", ["auto", "mc", "probit", "pairwise"])
def test_gradients_equal_finite_differences(link: str) -> None:
    mean, cov = latent(2, 3)

    def function(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        pred = gaussian_prediction(Categorical(), m, v, link=link, samples=16, generator=seeded())
        return pred.mean, pred.epistemic

    assert torch.autograd.gradcheck(function, (mean.requires_grad_(), cov.requires_grad_()))


def test_gradients_are_finite_at_extremes() -> None:
    mean = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 1e4]], requires_grad=True)
    cov = torch.zeros(2, 3, 3, requires_grad=True)
    for link in ("auto", "mc", "probit", "pairwise"):
        pred = gaussian_prediction(Categorical(), mean, cov, link=link)
        loss = pred.mean.sum() + pred.total.sum() + pred.epistemic.sum()
        for gradient in torch.autograd.grad(loss, (mean, cov), allow_unused=True):
            assert gradient is None or bool(gradient.isfinite().all())


@pytest.mark.parametrize("link", LINKS)
def test_float32_is_safe_at_extreme_logits(link: str) -> None:
    mean = torch.tensor([[1e4, -1e4, 0.0], [1e4, 1e4, -1e4]])
    pred = gaussian_prediction(Categorical(), mean, torch.eye(3).expand(2, 3, 3), link=link, generator=seeded())
    assert pred.mean.dtype == torch.float32
    for values in (pred.mean, pred.epistemic, pred.aleatoric, pred.total):
        assert bool(values.isfinite().all())
    assert_close(pred.mean.sum(-1), torch.ones(2))
    assert_close(pred.mean[0], torch.tensor([1.0, 0.0, 0.0]))


@pytest.mark.parametrize("link", ["auto", "mc", "probit", "pairwise"])
def test_rounding_never_makes_a_part_negative(link: str) -> None:
    mean = torch.randn(500, 3, generator=seeded())
    for scale in (0.0, 1e-12, 1e4):
        pred = gaussian_prediction(Categorical(), mean, latent_var=torch.full_like(mean, scale), link=link)
        assert float(pred.epistemic.min()) >= 0
        assert float(pred.aleatoric.min()) >= 0


def test_the_inputs_are_not_changed() -> None:
    mean, cov = latent(5, 3)
    kept = mean.clone(), cov.clone()
    for link in LINKS:
        gaussian_prediction(Categorical(), mean, cov, link=link)
    assert_close((mean, cov), kept, rtol=0, atol=0)
