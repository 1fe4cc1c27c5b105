"""Draws of logits: their differences have the covariance of the Gaussian, and say so where its digits are gone."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from aftermap.errors import NumericalError, NumericalWarning
from aftermap.predictive.latent import check_latent, draw_logits

CLASSES = 4


def covariance_of_draws(cov: Tensor) -> Tensor:
    """The covariance of the draws less what is common to their logits, from as many points as make the identity."""
    latent = check_latent(torch.zeros(cov.shape[:-1], dtype=cov.dtype), cov, None)
    drawn = draw_logits(latent, torch.eye(CLASSES)).double()  # [S, N, C]
    drawn = drawn - drawn.mean(-1, keepdim=True)
    return torch.einsum("snc,snd->ncd", drawn, drawn)


def contrasts() -> Tensor:
    """Covariances [3, C, C] of contrasts: what is common to all logits has none."""
    root = torch.randn(3, CLASSES, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    root = root - root.mean(1, keepdim=True)
    return root @ root.mT


@pytest.mark.parametrize("common", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences_of_drawn_logits_have_their_covariance(dtype: torch.dtype, common: float) -> None:
    exact = contrasts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = covariance_of_draws((exact + common).to(dtype))
    # Each entry of the covariance was rounded to its precision.
    torch.testing.assert_close(drawn, exact, rtol=1e-5, atol=8 * torch.finfo(dtype).eps * (1 + common))


@pytest.mark.parametrize("common", [1e6, 1e9, 1e12])
def test_differences_that_drown_in_what_logits_have_in_common_come_with_a_warning(common: float) -> None:
    exact = contrasts()
    with pytest.warns(NumericalWarning, match="3 of 3 outputs have at most two digits left"):
        drawn = covariance_of_draws((exact + common).float())
    assert bool(drawn.isfinite().all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(covariance_of_draws(exact + 1e6), exact, rtol=1e-5, atol=1e-8)


def test_a_covariance_that_is_none_is_refused() -> None:
    values, vectors = torch.linalg.eigh(contrasts())
    values[:, 1] *= -1  # The first one is that of what is common.
    with pytest.raises(NumericalError, match="latent_cov is not positive semi-definite"):
        covariance_of_draws((vectors * values[:, None]) @ vectors.mT + 10)


@pytest.mark.parametrize("with_covariance", [True, False])
def test_outputs_that_are_divided_have_covariances_divided_twice(with_covariance: bool) -> None:
    cov = contrasts()
    mean, var = torch.arange(12.0, dtype=torch.float64).view(3, CLASSES), cov.diagonal(dim1=-2, dim2=-1)
    divided = check_latent(mean, cov if with_covariance else None, var).divided_by(2.0)
    torch.testing.assert_close(divided.mean, 0.5 * mean)
    torch.testing.assert_close(divided.var, 0.25 * var)
    torch.testing.assert_close(divided.full(), 0.25 * (cov if with_covariance else torch.diag_embed(var)))
