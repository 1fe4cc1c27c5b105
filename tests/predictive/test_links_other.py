"""Links of binary outputs, real numbers, counts and likelihoods of one's own; bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.errors import InputError, NumericalError
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from aftermap.predictive.links import gaussian_prediction
from aftermap.predictive.quadrature import bernoulli_entropy

F64 = torch.float64


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latent(*shape: int, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A mean and a covariance with variances around ``scale``."""
    g, width = seeded(seed), shape[-1]
    mean = 1.5 * torch.randn(*shape, generator=g, dtype=F64)
    root = torch.randn(*shape, width + 2, generator=g, dtype=F64)
    return mean, scale * root @ root.mT / (width + 2)


# Binary.


def test_binary_equals_a_million_draws() -> None:
    mean = torch.tensor([[-2.0, 0.3], [1.0, 4.0], [0.0, -6.0]], dtype=F64)
    var = torch.tensor([[0.5, 2.0], [9.0, 30.0], [0.0, 3.0]], dtype=F64)
    logits = mean + var.sqrt() * torch.randn(1_000_000, 3, 2, generator=seeded(), dtype=F64)
    pred = gaussian_prediction(Bernoulli(), mean, latent_var=var)
    assert pred.link == "quadrature"
    assert_close(pred.mean, logits.sigmoid().mean(0), rtol=0, atol=2e-3)
    assert_close(pred.aleatoric, bernoulli_entropy(logits).mean(0), rtol=0, atol=2e-3)
    assert_close(pred.total, torch.special.entr(pred.mean) + torch.special.entr(1 - pred.mean))
    assert_close(pred.epistemic + pred.aleatoric, pred.total, rtol=0, atol=0)
    assert_close(pred.epistemic[2, 0], torch.tensor(0.0, dtype=F64), rtol=0, atol=1e-10)
    for link, tolerance in (("probit", 0.02), ("mc", 2e-3)):
        other = gaussian_prediction(Bernoulli(), mean, latent_var=var, link=link, samples=4096, generator=seeded())
        assert_close(other.mean, pred.mean, rtol=0, atol=tolerance)
        assert_close(other.epistemic, pred.epistemic, rtol=0, atol=2 * tolerance)


def test_binary_agrees_with_two_classes() -> None:
    mean, cov = latent(5, 2)
    spread = (cov[:, 0, 0] + cov[:, 1, 1] - 2 * cov[:, 0, 1]).unsqueeze(-1)
    binary = gaussian_prediction(Bernoulli(), mean[:, 1:] - mean[:, :1], spread.unsqueeze(-1))
    classes = gaussian_prediction(Categorical(), mean, cov, link="mc", samples=8192, generator=seeded())
    assert_close(classes.mean[:, 1:], binary.mean, rtol=0, atol=1e-3)
    assert_close(classes.epistemic, binary.epistemic[:, 0], rtol=0, atol=1e-3)


def test_a_temperature_divides_the_logits_and_so_their_variance_by_its_square() -> None:
    """σ(f/T) with f ~ N(m, v), by a sum over a fine grid; the same for two independent logits of a softmax."""
    t, mean, var = 2.5, torch.tensor([[0.8, -1.7]], dtype=F64), torch.tensor([[3.0, 0.6]], dtype=F64)
    steps = torch.linspace(-9, 9, 2001, dtype=F64)[:, None, None]
    weights = (-0.5 * steps.square()).exp() / (-0.5 * steps.square()).exp().sum()
    binary = gaussian_prediction(Bernoulli(temperature=t), mean, latent_var=var)
    assert_close(binary.mean, (weights * ((mean + var.sqrt() * steps) / t).sigmoid()).sum(0), rtol=0, atol=1e-10)
    assert binary.latent_mean is not None
    assert binary.latent_var is not None
    assert_close(binary.latent_mean, mean / t)
    assert_close(binary.latent_var, var / t**2)

    difference, spread = mean[:, :1] - mean[:, 1:], var.sum(-1, keepdim=True)
    expected = (weights * ((difference + spread.sqrt() * steps) / t).sigmoid()).sum(0)
    for given in ({"latent_var": var}, {"latent_cov": torch.diag_embed(var)}):
        classes = gaussian_prediction(
            Categorical(temperature=t), mean, link="mc", samples=8192, generator=seeded(), **given
        )
        assert_close(classes.mean[:, :1], expected, rtol=0, atol=1e-3)
        assert classes.latent_var is not None
        assert_close(classes.latent_var, var / t**2)


# Numbers.


def test_regression_keeps_the_noise_out_of_epistemic() -> None:
    mean, cov = latent(5, 2, 3)
    noise = torch.tensor([0.3, 0.7, 1.1], dtype=F64)
    pred = gaussian_prediction(Gaussian(noise=noise), mean, cov)
    var = cov.diagonal(dim1=-2, dim2=-1)
    assert_close(pred.mean, mean)
    assert_close(pred.epistemic, var)
    assert_close(pred.aleatoric, noise.square().expand(5, 2, 3))
    assert_close(pred.total, var + noise.square())


def test_predicted_noise_is_averaged_over_the_latent_gaussian() -> None:
    mean, cov = latent(5, 4, scale=0.3)
    likelihood = HeteroscedasticGaussian()
    pred = gaussian_prediction(likelihood, mean, cov)
    assert_close(pred.mean, mean[:, :2])
    assert_close(pred.epistemic, cov.diagonal(dim1=-2, dim2=-1)[:, :2])
    assert_close(pred.aleatoric, (mean[:, 2:] + cov.diagonal(dim1=-2, dim2=-1)[:, 2:] / 2).exp())
    drawn = gaussian_prediction(likelihood, mean, cov, link="mc", samples=8192, generator=seeded())
    assert_close(drawn.aleatoric, pred.aleatoric, rtol=1e-2, atol=0)
    assert_close(drawn.epistemic, pred.epistemic, rtol=2e-2, atol=0)


def test_natural_parameters_are_drawn_and_stay_valid() -> None:
    mean, cov = latent(5, 4, scale=0.001)
    mean[:, 2:] = -mean[:, 2:].abs() - 0.5
    likelihood = HeteroscedasticGaussian("natural")
    pred = gaussian_prediction(likelihood, mean, cov, samples=512, generator=seeded())
    assert pred.link == "mc"
    assert_close(pred.mean, likelihood.mean(mean), rtol=0, atol=0.05)
    assert_close(pred.aleatoric, likelihood.variance(mean), rtol=0.05, atol=0)
    wide = gaussian_prediction(likelihood, mean, 1e4 * cov, samples=512, generator=seeded())
    assert bool((wide.aleatoric <= 10.001 * likelihood.variance(mean)).all())
    with pytest.raises(InputError, match=r"latent_mean: values\[..., D:\]\[0, 0\] is 0.5, but must be negative"):
        gaussian_prediction(likelihood, torch.full((3, 4), 0.5, dtype=F64), latent_var=torch.ones(3, 4, dtype=F64))


def test_counts_follow_the_law_of_total_variance() -> None:
    mean, cov = latent(5, 3, scale=0.2)
    pred = gaussian_prediction(Poisson(), mean, cov)
    drawn = gaussian_prediction(Poisson(), mean, cov, link="mc", samples=16_384, generator=seeded())
    for name in ("mean", "epistemic", "aleatoric", "total"):
        assert_close(getattr(drawn, name), getattr(pred, name), rtol=0.05, atol=0)
    assert_close(pred.aleatoric, pred.mean)


class Cubed(Likelihood):
    """y ~ (f³, f²): just enough of a likelihood of one's own."""

    def check(self, outputs, targets): ...
    def nll(self, outputs, targets): ...
    def gradient(self, outputs, targets): ...
    def hessian_root(self, outputs, targets=None): ...
    def sample_gradient(self, outputs, targets=None, generator=None): ...

    def mean(self, outputs):
        assert outputs.dim() == 2
        return outputs**3

    def variance(self, outputs):
        return outputs**2


def test_a_likelihood_of_ones_own_is_drawn() -> None:
    mean, var = torch.tensor([[0.5, -1.0]], dtype=F64), torch.tensor([[0.2, 0.5]], dtype=F64)
    pred = gaussian_prediction(Cubed(), mean, latent_var=var, samples=16_384, generator=seeded())
    assert (pred.kind, pred.link) == ("custom", "mc")
    assert_close(pred.mean, mean**3 + 3 * mean * var, rtol=0, atol=0.01)
    assert_close(pred.aleatoric, mean**2 + var, rtol=0, atol=0.01)
    assert_close(pred.epistemic, 9 * mean**4 * var + 36 * mean**2 * var**2 + 15 * var**3, rtol=0.03, atol=0)


def test_half_precision_is_widened() -> None:
    mean = torch.randn(5, 3, generator=seeded()).to(torch.bfloat16)
    pred = gaussian_prediction(Categorical(), mean, latent_var=torch.ones_like(mean))
    assert pred.mean.dtype == torch.float32


# Bad input.

MEAN = torch.zeros(4, 3, dtype=F64)
COV = torch.eye(3, dtype=F64).expand(4, 3, 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"latent_cov": COV, "link": "probits"}, "link is 'probits', but must be one of 'auto', 'mc', 'probit', "),
        ({}, r"pass latent_cov \[N, ..., C, C\] or latent_var \[N, ..., C\]; both are None"),
        ({"latent_cov": COV[:2]}, r"latent_cov has shape \[2, 3, 3\], but .* needs \[4, 3, 3\]"),
        ({"latent_var": MEAN[:, :2]}, r"latent_var has shape \[4, 2\], but .* needs \[4, 3\]"),
        ({"latent_var": MEAN - 1.0}, r"latent_var: variance\[0, 0\] is -1.0, but must be 0 or more"),
        ({"latent_cov": -COV}, r"latent_cov: variance\[0, 0\] is -1.0, but must be 0 or more"),
        ({"latent_var": MEAN * torch.nan}, r"latent_var: values\[0, 0\] is nan, but must be finite"),
        ({"latent_cov": COV, "samples": 0}, "samples=0 must be a whole number of at least 1"),
        ({"latent_mean": MEAN + torch.nan, "latent_cov": COV}, r"latent_mean: outputs\[0, 0\] is nan"),
        ({"latent_mean": MEAN - torch.inf, "latent_cov": COV}, "write a mask as -1e4, not -inf"),
        ({"latent_mean": MEAN.long(), "latent_cov": COV}, "must be floating point, got torch.int64"),
        ({"latent_mean": MEAN[:, :1], "latent_var": MEAN[:, :1]}, "latent_mean has 1 class"),
        ({"latent_cov": 0 * COV, "link": "bridge"}, 'link "bridge": variance.* must be positive once the common shift'),
        ({"latent_cov": 0 * COV + 2.0, "link": "bridge"}, 'link "bridge": variance.* must be positive'),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gaussian_prediction(Categorical(), **{"latent_mean": MEAN, **arguments})


@pytest.mark.parametrize("likelihood, link", [(Bernoulli(), "bridge"), (Gaussian(), "probit"), (Poisson(), "pairwise")])
def test_a_link_that_the_likelihood_does_not_have(likelihood: Likelihood, link: str) -> None:
    with pytest.raises(InputError, match=f"link '{link}' does not exist for {type(likelihood).__name__}; use one of"):
        gaussian_prediction(likelihood, MEAN, COV, link=link)


def test_an_indefinite_covariance_is_refused() -> None:
    cov = torch.ones(4, 3, 3, dtype=F64) - 2 * torch.eye(3, dtype=F64)
    cov = cov + torch.diag_embed(2 * torch.ones(4, 3, dtype=F64)) * 0.75  # variance 0.5, correlation 2
    with pytest.raises(NumericalError, match="latent_cov is not positive semi-definite"):
        gaussian_prediction(Categorical(), MEAN, cov, link="mc")
