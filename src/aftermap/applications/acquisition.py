r"""What the next label would teach: scores of a pool's inputs, and batches that do not repeat themselves.

Index legend: S samples, N pool inputs, M target inputs, C outputs, R columns of a root.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aftermap import checks
from aftermap.errors import InputError, ShapeError, UnsupportedError
from aftermap.linalg import symmetrise
from aftermap.predictive import Prediction

__all__ = [
    "ACQUISITIONS",
    "Acquisition",
    "class_predictive_information",
    "entropy",
    "expected_information_gain",
    "gaussian_predictive_information",
    "greedy_information",
    "information_of",
    "mutual_information",
    "parse_acquisition",
    "random",
    "top",
    "variance",
]

Acquisition = Callable[[Prediction, "torch.Generator | None"], Tensor]


# One number per input; the higher, the more is to be learned from its label.


def mutual_information(prediction: Prediction, generator: torch.Generator | None = None) -> Tensor:
    r"""Returns the mutual information I[y; θ | x] [N], "BALD": for a regression ½ log((Var f + σ²)/σ²), averaged over outputs.

    Args:
        prediction: A prediction of classes or of a regression.
        generator: A source of randomness that this function does not use.

    References:
        Houlsby et al. 2011, Bayesian active learning for classification and preference learning, eq. (2).

    >>> mutual_information(Prediction("regression", *(torch.ones(3, 2) for _ in range(3)), 2 * torch.ones(3, 2)))
    tensor([0.3466, 0.3466, 0.3466])
    """
    return prediction.score("mutual_information")


def entropy(prediction: Prediction, generator: torch.Generator | None = None) -> Tensor:
    """Returns the entropy H[y | x] [N] of the mean prediction, which is also high where the label is noise and teaches nothing.

    Args:
        prediction: A prediction of classes or of a regression.
        generator: A source of randomness that this function does not use.

    >>> entropy(Prediction("classification", torch.full((2, 4), 0.25), *(torch.ones(2).log() for _ in range(3))))
    tensor([0., 0.])
    """
    return prediction.score("entropy")


def variance(prediction: Prediction, generator: torch.Generator | None = None) -> Tensor:
    """Returns the variance of the outputs [N] under the posterior, without the noise.

    Args:
        prediction: A prediction of any kind; of classes one with a latent variance or samples.
        generator: A source of randomness that this function does not use.

    >>> variance(Prediction("regression", *(torch.ones(3, 2) for _ in range(4))))
    tensor([1., 1., 1.])
    """
    return prediction.score("variance")


def expected_information_gain(prediction: Prediction, generator: torch.Generator | None = None) -> Tensor:
    r"""Returns the nats [N] that the label of each input is expected to tell about the weights.

    A regression with outputs' covariance V and noise variances σ² gains

    .. math::
        \tfrac12 \log\det(I + \mathrm{diag}(\sigma)^{-1} V \mathrm{diag}(\sigma)^{-1}),

    which, unlike the mutual information of each output alone, does not count what two outputs share twice. For classes it
    is the mutual information.

    Args:
        prediction: A prediction of a regression [N, D] (with ``latent_cov``, else outputs count as independent), or of
            classes.
        generator: A source of randomness that this function does not use.

    Raises:
        UnsupportedError: The prediction is of another kind.
        ShapeError: The prediction is of a regression with positions.

    References:
        Lindley 1956, On a measure of the information provided by an experiment; MacKay 1992, Information-based objective
        functions for active data selection, eq. (8).

    >>> one = torch.ones(1, 2)
    >>> together = Prediction("regression", one, one, one, 2 * one, latent_cov=torch.ones(1, 2, 2))
    >>> expected_information_gain(together).exp() ** 2
    tensor([3.])
    """
    if prediction.kind in ("classification", "binary"):
        return mutual_information(prediction)
    if prediction.kind != "regression":
        raise UnsupportedError(
            f"the expected information is known for classes and regression, but this prediction is {prediction.kind}; "
            'use acquisition="variance"'
        )
    if prediction.mean.dim() != 2:
        raise ShapeError(f"the expected information needs outputs [N, D], got {list(prediction.mean.shape)}")
    cov = prediction.latent_cov
    if cov is None or cov.shape[-1] != prediction.aleatoric.shape[-1]:  # A log-variance head is no output of its own.
        cov = torch.diag_embed(prediction.epistemic)
    scale = prediction.aleatoric.rsqrt()
    return information_of(scale.unsqueeze(-1) * cov * scale.unsqueeze(-2))


def random(prediction: Prediction, generator: torch.Generator | None = None) -> Tensor:
    """Returns uniform numbers [N], the baseline that every other choice has to beat.

    Args:
        prediction: A prediction of which only the length counts.
        generator: The source of the random draws.

    >>> random(Prediction("regression", *(torch.ones(3, 2) for _ in range(4)))).shape
    torch.Size([3])
    """
    device = torch.device("cpu") if generator is None else generator.device
    return torch.rand(len(prediction), generator=generator, device=device, dtype=torch.float64)


ACQUISITIONS: dict[str, Acquisition] = {
    "mutual_information": mutual_information,
    "entropy": entropy,
    "variance": variance,
    "expected_information_gain": expected_information_gain,
    "random": random,
}


def parse_acquisition(acquisition: str | Acquisition) -> Acquisition:
    """Returns the function behind a name; a function of (prediction, generator) stays as it is.

    >>> parse_acquisition("bald")
    Traceback (most recent call last):
    aftermap.errors.InputError: acquisition='bald' is not known; allowed are 'mutual_information', ...
    """
    if callable(acquisition):
        return acquisition
    known = checks.choice("acquisition", acquisition, ACQUISITIONS, otherwise="a function of (prediction, generator)")
    return ACQUISITIONS[known]


def top(scores: Tensor, count: int) -> Tensor:
    """Returns the positions [count] of the highest scores, all different; of equal scores the first.

    Args:
        scores: The scores [N] to choose by.
        count: The number of positions, at most N.

    Raises:
        ShapeError: The scores are not [N].
        InputError: A score is NaN, or more positions than scores are asked for.

    >>> top(torch.tensor([1.0, 3.0, 2.0]), 2)
    tensor([1, 2])
    """
    if scores.dim() != 1:
        raise ShapeError(f"an acquisition must give one score per input, [N], got {list(scores.shape)}")
    if bool(scores.isnan().any()):
        raise InputError("an acquisition gave NaN; it must give a number for every input")
    if not 0 < count <= len(scores):
        raise InputError(f"{count} inputs were asked for, but the choice is between {len(scores)}")
    return scores.argsort(descending=True, stable=True)[:count]


# Batches of a Gaussian.


def information_of(scaled: Tensor) -> Tensor:
    """Returns ½ log det(I + A) of positive semi-definite A [..., R, R], in nats.

    >>> information_of(torch.eye(2))
    tensor(0.6931)
    """
    identity = torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
    factor = torch.linalg.cholesky(identity + symmetrise(scaled))
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def greedy_information(cov: Tensor, root: Tensor, count: int) -> tuple[Tensor, Tensor]:
    r"""Chooses inputs one by one, each for what it tells beyond those already chosen.

    With outputs f ~ N(m, V) over all N inputs together and labels of precision Λ_n = S_n S_nᵀ, the set A gains

    .. math::
        I(A) = \tfrac12 \log\det\big(I + S_A^\top V_{AA} S_A\big).

    I is submodular, so the greedy set reaches at least a share 1 − 1/e of the best one. After each choice i the covariance
    becomes that given its label, V ← V − V_{:i} S_i (I + S_iᵀ V_ii S_i)⁻¹ S_iᵀ V_{i:}; nothing is factorised anew.

    Args:
        cov: The covariance V [N, C, N, C], from ``predictor.joint(x)``.
        root: The root S [N, C, R]: diag(1/σ) for a regression; a root of the output Hessian for classes
            (``likelihood.hessian_root``), where the gain is that of the linearised model.
        count: The number of inputs to choose.

    Returns:
        The positions [count], all different, and the gain of each in nats [count]; the gains add up to I.

    Raises:
        ShapeError: The shapes do not fit together.
        InputError: More than N inputs are asked for.

    References:
        Krause, Singh, Guestrin 2008, Near-optimal sensor placements in Gaussian processes, section 4.

    >>> twins = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.5]]).reshape(3, 1, 3, 1)
    >>> greedy_information(twins, 10 * torch.ones(3, 1, 1), 2)[0]
    tensor([0, 2])
    """
    if cov.dim() != 4 or cov.shape[:2] != cov.shape[2:] or root.dim() != 3 or root.shape[:2] != cov.shape[:2]:
        raise ShapeError(
            f"a covariance [N, C, N, C] and a root [N, C, R] are needed, got {list(cov.shape)} and {list(root.shape)}"
        )
    n = len(cov)
    if not 0 < count <= n:
        raise InputError(f"{count} inputs were asked for, but the choice is between {n}")
    # In the coordinates of the labels the kernel is K[i, j] = S_iᵀ V_ij S_j.
    kernel = torch.einsum("icr,icjd,jds->irjs", root.double(), cov.double(), root.double())
    identity = torch.eye(kernel.shape[1], dtype=kernel.dtype, device=kernel.device)
    free = torch.ones(n, dtype=torch.bool, device=kernel.device)
    chosen, gains = [], []
    for _ in range(count):
        gain = information_of(torch.einsum("iris->irs", kernel)).masked_fill(~free, -torch.inf)
        best = int(gain.argmax())
        chosen.append(best)
        gains.append(gain[best])
        free[best] = False
        factor = torch.linalg.cholesky(identity + symmetrise(kernel[best, :, best]))
        half = torch.linalg.solve_triangular(factor, kernel[best].flatten(1), upper=False)  # [R, N·R]
        kernel = kernel - (half.T @ half).reshape(kernel.shape)
    return torch.tensor(chosen), torch.stack(gains).to(cov.dtype).cpu()


# What a label tells about the predictions that count, and not about the weights.


def gaussian_predictive_information(cov: Tensor, noise_variance: Tensor, pool: int) -> Tensor:
    r"""Returns the expected predictive information gain of a regression: the mean over targets of I[y; y_*].

    .. math::
        I[y; y_*] = \tfrac12\big(\log|V + \Sigma| + \log|V_* + \Sigma_*| - \log|\mathrm{joint}|\big)
                  = -\tfrac12 \log\det\big(I - L^{-1} V_{x*} (V_* + \Sigma_*)^{-1} V_{*x} L^{-\top}\big),
        \quad L L^\top = V + \Sigma.

    Args:
        cov: The covariance V [N + M, C, N + M, C] of the pool's inputs followed by the targets.
        noise_variance: The variances σ² of the noise [N + M, C].
        pool: The number N of pool inputs.

    Returns:
        The gain of each pool input [N], in nats.

    Raises:
        ShapeError: The shapes do not fit together, or there are no targets.

    References:
        Bickford Smith et al. 2023, Prediction-oriented Bayesian active learning, eq. (5).

    >>> cov = torch.tensor([[1.0, 1.0], [1.0, 1.0]]).reshape(2, 1, 2, 1)
    >>> gaussian_predictive_information(cov, torch.ones(2, 1), 1)
    tensor([0.1438])
    """
    if cov.dim() != 4 or cov.shape[:2] != cov.shape[2:] or noise_variance.shape != cov.shape[:2]:
        raise ShapeError(
            "a covariance [N + M, C, N + M, C] and noise variances [N + M, C] are needed, got "
            f"{list(cov.shape)} and {list(noise_variance.shape)}"
        )
    if not 0 < pool < len(cov):
        raise ShapeError(f"pool={pool} of {len(cov)} inputs: there must be at least one pool input and one target")
    marginal = torch.einsum("icid->icd", cov.double()) + torch.diag_embed(noise_variance.double())
    factor = torch.linalg.cholesky(marginal)
    between = cov[:pool, :, pool:].double().permute(0, 2, 1, 3)  # [N, M, C, C]
    left = torch.linalg.solve_triangular(factor[:pool, None], between, upper=False)
    whitened = torch.linalg.solve_triangular(factor[None, pool:], left.mT, upper=False)  # [N, M, C, C]
    identity = torch.eye(cov.shape[1], dtype=marginal.dtype, device=cov.device)
    rest = torch.linalg.cholesky(identity - symmetrise(whitened @ whitened.mT))
    return -rest.diagonal(dim1=-2, dim2=-1).log().sum(-1).mean(1).to(cov.dtype)


def class_predictive_information(probs: Tensor, target_probs: Tensor) -> Tensor:
    r"""Returns the expected predictive information gain of classes: the mean over targets of I[y; y_*].

    The joint is p(y, y_*) = mean_s p_s(y) p_s(y_*), with the same samples of the weights for both.

    Args:
        probs: The probabilities [S, N, C] of the pool, under joint samples.
        target_probs: The probabilities [S, M, C] of the inputs whose predictions count, under the same samples.

    Returns:
        The gain of each pool input [N], in nats.

    Raises:
        ShapeError: The shapes do not fit together.

    References:
        Bickford Smith et al. 2023, Prediction-oriented Bayesian active learning, eq. (5).

    >>> sure = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> class_predictive_information(sure, sure)
    tensor([0.6931])
    """
    if probs.dim() != 3 or target_probs.dim() != 3 or len(probs) != len(target_probs):
        raise ShapeError(
            f"probabilities [S, N, C] and [S, M, C] are needed, got {list(probs.shape)} and {list(target_probs.shape)}"
        )
    p, q = probs.double(), target_probs.double()
    entropy = torch.special.entr(p.mean(0)).sum(-1)
    target = torch.special.entr(q.mean(0)).sum(-1).mean()
    joint = torch.zeros_like(entropy)
    for m in range(q.shape[1]):  # This takes [N, C, C] numbers at a time.
        joint += torch.special.entr(torch.einsum("snc,sd->ncd", p, q[:, m]) / len(p)).sum((-2, -1))
    return (entropy + target - joint / q.shape[1]).clamp_min(0.0).to(probs.dtype)
