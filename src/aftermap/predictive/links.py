"""From a Gaussian over network outputs, or from samples of them, to a Prediction.

Index legend: S samples, N examples, ... positions (tokens, pixels), C outputs, D targets per position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from aftermap import checks
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from aftermap.likelihoods.base import check_outputs, check_values
from aftermap.predictive.latent import Latent, at_least_float32, check_latent, draw, draw_logits, normal_points, shares
from aftermap.predictive.prediction import Prediction
from aftermap.predictive.quadrature import bernoulli_gaussian

__all__ = [
    "LINKS",
    "check_link",
    "gaussian_prediction",
    "laplace_bridge",
    "log_probabilities",
    "pairwise_probit",
    "probit",
    "samples_prediction",
    "uses_draws",
]

LINKS = ("auto", "mc", "probit", "pairwise", "bridge")
_LINKS_OF: dict[type[Likelihood], tuple[str, ...]] = {Categorical: LINKS, Bernoulli: ("auto", "mc", "probit")}
_PAIRWISE_MAX_CLASSES = 10
_PAIRWISE_MAX_VARIANCE = 0.5  # of a difference of two logits; beyond it sampling is clearly more accurate
_BRIDGE_LEAST = 1e-12  # a variance of this size relative to the largest is zero up to rounding
_SAFE = 1e-30  # a mean probability above this has lost nothing to underflow
_FEW_CLASSES = 16
_LEAST_SHARE = 0.1  # a drawn natural parameter keeps at least this share of its mean: the noise stays finite
_MAX_LOG_CONCENTRATION = 300.0  # the digamma function of e^300 is still exact


def probit(latent_mean: Tensor, latent_var: Tensor) -> Tensor:
    r"""Returns scaled logits m / √(1 + π v / 8), whose sigmoid or softmax approximates the mean probability.

    For one logit this is MacKay's approximation of E σ(f), off by at most 0.02. For several classes it ignores their
    correlation and is **not** invariant when all logits move together.

    Args:
        latent_mean: The means m [..., C].
        latent_var: The variances v [..., C].

    Returns:
        The scaled logits [..., C].

    References:
        MacKay 1992, The evidence framework applied to classification networks;
        Lu et al. 2020, Mean-field approximation to Gaussian-softmax integral, "mf0".

    >>> probit(torch.tensor([2.0]), torch.tensor([24 / torch.pi]))
    tensor([1.])
    """
    return latent_mean / (1 + math.pi / 8 * latent_var).sqrt()


def pairwise_probit(latent_mean: Tensor, latent_cov: Tensor) -> Tensor:
    r"""Returns log-probabilities by the probit approximation of every pair of classes.

    .. math::
        p_k \propto \Big[\sum_j \exp\frac{m_j - m_k}{\sqrt{1 + \frac\pi8 (V_{kk} + V_{jj} - 2 V_{kj})}}\Big]^{-1},

    renormalised. Two classes give the binary probit of their difference; adding c 11ᵀ to V changes nothing.

    Args:
        latent_mean: The means m [..., C].
        latent_cov: The covariance V [..., C, C].

    Returns:
        The log-probabilities [..., C].

    References:
        Lu et al. 2020, Mean-field approximation to Gaussian-softmax integral, "mf2"; here with renormalisation.

    >>> pairwise_probit(torch.zeros(2), torch.eye(2)).exp()
    tensor([0.5000, 0.5000])
    """
    scale = (1 + math.pi / 8 * _pair_variance(latent_cov)).sqrt()
    difference = latent_mean.unsqueeze(-2) - latent_mean.unsqueeze(-1)  # [..., k, j] = m_j − m_k
    return F.log_softmax(-torch.logsumexp(difference / scale, -1), -1)


def laplace_bridge(latent_mean: Tensor, latent_cov: Tensor, *, normalise: bool = False) -> Tensor:
    r"""Returns the log of the Dirichlet parameters α whose Laplace approximation in logits is the given Gaussian.

    First the Gaussian is conditioned on Σ f = 0, m ← m − V1 1ᵀm / 1ᵀV1 and V ← V − V11ᵀV / 1ᵀV1; then

    .. math::
        \alpha_k = \frac{1}{V_{kk}} \Big(1 - \frac 2C + \frac{e^{m_k}}{C^2} \sum_l e^{-m_l}\Big).

    Args:
        latent_mean: The means m [..., C].
        latent_cov: The covariance V [..., C, C].
        normalise: Whether first to divide V by c and m by √c, with c the mean of V_kk over √(C/2).

    Returns:
        The logarithms log α [..., C].

    Raises:
        DataError: A variance is zero, for which there is no Dirichlet.

    References:
        Hobbhahn, Kristiadi, Hennig 2022, Fast predictive uncertainty for classification with Bayesian deep networks.

    >>> alpha = torch.tensor([5.0, 3.0, 2.0])
    >>> mean = alpha.log() - alpha.log().mean()
    >>> inverse = 1 / alpha
    >>> spread = inverse.unsqueeze(-1) + inverse
    >>> cov = inverse.diag() - spread / 3 + inverse.sum() / 9
    >>> laplace_bridge(mean, cov + 1).exp()
    tensor([5.0000, 3.0000, 2.0000])
    """
    n_classes = latent_mean.shape[-1]
    row = latent_cov.sum(-1)
    everything = row.sum(-1, keepdim=True)
    gain = torch.where(everything > 0, row / torch.where(everything > 0, everything, 1.0), 0.0)
    mean = latent_mean - gain * latent_mean.sum(-1, keepdim=True)
    variance = latent_cov.diagonal(dim1=-2, dim2=-1) - gain * row
    least = _BRIDGE_LEAST * latent_cov.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    allowed = 'positive once the common shift of all logits is removed; use link="mc" or "pairwise"'
    check_values(variance, ~(variance > least), "variance", allowed, 'link "bridge"')
    if normalise:
        scale = variance.mean(-1, keepdim=True) / math.sqrt(n_classes / 2)
        mean, variance = mean / scale.sqrt(), variance / scale
    exponent = mean + torch.logsumexp(-mean, -1, keepdim=True) - 2 * math.log(n_classes)
    if n_classes > 2:
        exponent = torch.logaddexp(exponent, exponent.new_tensor(1 - 2 / n_classes).log())
    return exponent - variance.log()  # log α


def gaussian_prediction(
    likelihood: Likelihood,
    latent_mean: Tensor,
    latent_cov: Tensor | None = None,
    latent_var: Tensor | None = None,
    *,
    link: str = "auto",
    samples: int = 100,
    generator: torch.Generator | None = None,
) -> Prediction:
    r"""Predicts from a Gaussian N(m, V) over the outputs at every position.

    - classification: ``mc`` averages the probabilities of S even-spread (scrambled Sobol) draws; ``probit``,
      ``pairwise`` and ``bridge`` are closed forms; ``auto`` is ``pairwise`` at positions with at most 10 classes where no
      difference of two logits has a variance above 0.5, and ``mc`` elsewhere. Of a closed form the mutual information comes from
      S **fixed** draws, and the expected entropy is the entropy of the mean less that; the bridge's is that of its Dirichlet.
    - binary: ``auto`` integrates numerically, to 1e-12; ``probit``, ``mc``.
    - regression: exact for Gaussian noise; a predicted log-variance s gives E eˢ = exp(m_s + v_s/2); natural parameters
      are drawn, with η₂ kept below a tenth of its mean, since the expectation of 1/η₂ does not exist.
    - counts: rate exp(m + v/2), and Var = (eᵛ − 1) rate² + rate.
    - a likelihood of your own: drawn, through its ``mean`` and ``variance``.

    Draws are shared by all positions: splitting a batch changes nothing. Without a generator they are the same in every call, and those
    that a posterior is tuned with. The mean is differentiable in m, V and v (through a singular covariance only in m, if drawn).

    Args:
        likelihood: The likelihood p(y | f).
        latent_mean: The means m [N, ..., C].
        latent_cov: The covariance V [N, ..., C, C], or None if only the variances are known: outputs are then
            independent.
        latent_var: The variances v [N, ..., C], which are not used where ``latent_cov`` is given.
        link: The link, one of ``LINKS``.
        samples: The number S of draws.
        generator: The source of the random draws. None takes the same draws in every call. Closed forms leave it alone.

    Returns:
        The prediction, with the latent Gaussian in it: of the outputs, or of the logits f/T for a likelihood with a temperature.

    Raises:
        InputError: The link is unknown or not one of this likelihood, or there is neither a covariance nor a variance.
        ShapeError, DataError: Shapes do not fit, a value is NaN or infinite, or a variance is negative.
        NumericalError: A covariance is not positive semi-definite.

    >>> pred = gaussian_prediction(Categorical(), torch.zeros(1, 2), torch.eye(2).unsqueeze(0), link="pairwise")
    >>> pred.mean
    tensor([[0.5000, 0.5000]])
    """
    check_link(likelihood, link)
    samples = checks.count("samples", samples)
    latent = check_latent(latent_mean, latent_cov, latent_var)
    if isinstance(likelihood, Categorical | Bernoulli) and likelihood.temperature != 1:
        latent = latent.divided_by(likelihood.temperature)
    if isinstance(likelihood, Categorical):
        prediction = _classification(latent, link, samples, generator)
    elif link == "mc":
        prediction = _drawn(_at_one(likelihood), latent, samples, generator)
    elif isinstance(likelihood, Bernoulli):
        prediction = _binary(latent, link)
    elif isinstance(likelihood, Gaussian):
        prediction = _moments("regression", latent.mean, latent.var, likelihood.variance(latent.mean))
    elif isinstance(likelihood, HeteroscedasticGaussian) and likelihood.parametrisation == "mean_log_variance":
        mean = likelihood.mean(latent.mean)  # which also checks that the number of outputs is even
        epistemic, log_spread = latent.var.split(mean.shape[-1], -1)
        prediction = _moments("regression", mean, epistemic, likelihood.variance(latent.mean) * (log_spread / 2).exp())
    elif isinstance(likelihood, Poisson):
        rate = (latent.mean + latent.var / 2).exp()
        prediction = _moments("counts", rate, torch.expm1(latent.var) * rate.square(), rate)
    else:
        prediction = _drawn(likelihood, latent, samples, generator)
    prediction = replace(prediction, latent_mean=latent.mean, latent_cov=latent.cov, latent_var=latent.var)
    return _with_ignore_index(prediction, likelihood)


def log_probabilities(likelihood: Likelihood, latent: Latent, link: str, drawn: Tensor | None) -> Tensor:
    """Returns the logarithms of the mean probabilities under a Gaussian over logits: the `mean` of a prediction, to all its digits.

    The rules of tuning judge a predictive by this function, and predictions are made of the same parts.

    Args:
        likelihood: A `Categorical` or a `Bernoulli`. The logits have its temperature in them already.
        latent: The Gaussian over logits [N, ..., C].
        link: The link, one of those of the likelihood.
        drawn: Logits that were drawn from the Gaussian [S, N, ..., C]; None where `uses_draws` says that nobody looks at them.

    Returns:
        The logarithms [N, ..., C], or [N, ..., C, 2] for a `Bernoulli`: of zero, then of one.

    >>> latent = check_latent(torch.zeros(1, 1), None, torch.ones(1, 1))
    >>> log_probabilities(Bernoulli(), latent, "auto", None).exp()
    tensor([[[0.5000, 0.5000]]], dtype=torch.float64)
    """
    if isinstance(likelihood, Categorical):
        return _class_means(latent, link, None if drawn is None else _log_mean_softmax(drawn))
    if drawn is not None:
        means = [F.logsigmoid(logits).logsumexp(0) - math.log(len(logits)) for logits in (-drawn, drawn)]
        return torch.stack(means, -1)
    one, zero, _ = _binary_means(latent, link)
    return torch.stack([zero, one], -1).log()


def _log_mean_softmax(outputs: Tensor) -> Tensor:
    """Returns the logarithms of the mean probabilities [N, ..., C] of outputs [S, N, ..., C]."""
    mean = _over_classes(F.softmax, outputs).mean(0)
    if bool((mean > _SAFE).all()):
        return mean.log()
    # This is twice as dear, but nothing underflows.
    return _over_classes(F.log_softmax, outputs).logsumexp(0) - math.log(len(outputs))


def _over_classes(function: Callable[[Tensor, int], Tensor], outputs: Tensor) -> Tensor:
    """Returns a softmax, or its logarithm, of samples [S, N, ..., C] over the classes.

    Over the last dimension PyTorch's kernels take up to fifteen times as long as over another one where that is short.
    """
    if outputs.shape[-1] >= _FEW_CLASSES:
        return function(outputs, -1)
    return function(outputs.movedim(-1, 1), 1).movedim(1, -1)


def uses_draws(likelihood: Likelihood, link: str) -> bool:
    """Tells whether a link of a `Categorical` or a `Bernoulli` averages draws, at least at some positions.

    >>> uses_draws(Categorical(), "auto"), uses_draws(Bernoulli(), "auto")
    (True, False)
    """
    return link == "mc" or (link == "auto" and isinstance(likelihood, Categorical))


def samples_prediction(likelihood: Likelihood, outputs: Tensor, *, weights: Tensor | None = None) -> Prediction:
    r"""Predicts with a mixture: outputs of S networks, or of one network with S samples of its weights.

    Probabilities, means and rates are averaged, never logits. Variances are those of the mixture, with μ_s and σ_s² the
    mean and variance of y given sample s: epistemic Σ w_s (μ_s − μ̄)², aleatoric Σ w_s σ_s².

    Args:
        likelihood: The likelihood p(y | f).
        outputs: The outputs [S, N, ..., C], samples first.
        weights: The mixture weights [S], not negative, which are scaled to sum to one. None means equal weights.

    Returns:
        The prediction; its ``samples`` are E[y | f_s].

    Raises:
        ShapeError, DataError: The outputs are not [S, N, ..., C], a value is NaN or infinite, or weights are bad.

    >>> pred = samples_prediction(Gaussian(noise=0.5), torch.tensor([[[1.0]], [[3.0]]]))
    >>> pred.mean.item(), pred.epistemic.item(), pred.total.item()
    (2.0, 1.0, 1.25)
    """
    check_outputs(outputs, "samples_prediction")
    if outputs.dim() < 3 or outputs.shape[0] == 0:
        raise ShapeError(
            f"samples_prediction: outputs must have shape [S, N, ..., C] with samples first, got "
            f"{list(outputs.shape)}; stack them with torch.stack, or use outputs.unsqueeze(0) for a single one."
        )
    check_values(outputs, ~outputs.isfinite(), "outputs", "finite", "samples_prediction")
    outputs = at_least_float32(outputs)
    if isinstance(likelihood, Categorical | Bernoulli):
        outputs, likelihood = outputs / likelihood.temperature, _at_one(likelihood)
    share = _check_weights(weights, outputs)
    prediction = _mixture(likelihood, outputs, shares(outputs, share))
    return _with_ignore_index(replace(prediction, link="samples", weights=share), likelihood)


def _with_ignore_index(prediction: Prediction, likelihood: Likelihood) -> Prediction:
    """Returns the prediction with the class index that the likelihood leaves out."""
    return (
        replace(prediction, ignore_index=likelihood.ignore_index) if isinstance(likelihood, Categorical) else prediction
    )


def _at_one(likelihood: Likelihood) -> Likelihood:
    """Returns the likelihood of logits, which have its temperature in them already."""
    return replace(likelihood, temperature=1.0) if isinstance(likelihood, Categorical | Bernoulli) else likelihood


def check_link(likelihood: Likelihood, link: str) -> None:
    """Raises an error for a link that is not known, or not one of this likelihood.

    Args:
        likelihood: The likelihood of the predictive.
        link: The name of the link.

    Raises:
        InputError: The link is not known, or is one of other likelihoods.
    """
    if link not in LINKS:
        raise InputError(f"link is {link!r}, but must be one of {', '.join(map(repr, LINKS))}.")
    allowed = next((links for cls, links in _LINKS_OF.items() if isinstance(likelihood, cls)), ("auto", "mc"))
    if link not in allowed:
        raise InputError(
            f"link {link!r} does not exist for {type(likelihood).__name__}; use one of {', '.join(map(repr, allowed))}."
        )


def _check_weights(weights: Tensor | None, outputs: Tensor) -> Tensor | None:
    if weights is None:
        return None
    weights = torch.as_tensor(weights, device=outputs.device).to(outputs.dtype)
    if weights.shape != outputs.shape[:1]:
        raise ShapeError(f"weights have shape {list(weights.shape)}, but there are {outputs.shape[0]} samples.")
    check_values(
        weights, ~(weights.isfinite() & (weights >= 0)), "weights", "finite and 0 or more", "samples_prediction"
    )
    if not bool(weights.sum() > 0):
        raise DataError("weights are all zero; at least one sample must count.")
    return weights / weights.sum()


def _pair_variance(cov: Tensor) -> Tensor:
    """Returns the variance of every difference of two outputs [..., C, C]."""
    diagonal = cov.diagonal(dim1=-2, dim2=-1)
    return (diagonal.unsqueeze(-1) + diagonal.unsqueeze(-2) - cov - cov.mT).clamp_min(0.0)


def _drawn(likelihood: Likelihood, latent: Latent, samples: int, generator: torch.Generator | None) -> Prediction:
    outputs = draw(latent, normal_points(samples, latent.mean.shape[-1], generator, fixed=generator is None))
    if isinstance(likelihood, HeteroscedasticGaussian) and likelihood.parametrisation == "natural":
        width = likelihood.mean(latent.mean).shape[-1]
        eta = latent.mean[..., width:]
        check_values(eta, ~(eta < 0), "values[..., D:]", "negative: it is -1 / (2 variance)", "latent_mean")
        outputs = torch.cat([outputs[..., :width], outputs[..., width:].minimum(_LEAST_SHARE * eta)], -1)
    return replace(samples_prediction(likelihood, outputs), link="mc")


def _moments(kind: str, mean: Tensor, epistemic: Tensor, aleatoric: Tensor) -> Prediction:
    return Prediction(kind, mean, epistemic, aleatoric, epistemic + aleatoric, link="closed_form")


def _split(total: Tensor, information: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns epistemic, aleatoric and their sum, where the mutual information lies between 0 and the total."""
    epistemic = information.clamp_min(0.0).minimum(total)
    aleatoric = total - epistemic
    return epistemic, aleatoric, epistemic + aleatoric


def _entropy(log_p: Tensor) -> Tensor:
    """Returns the entropy from log-probabilities, without an infinite slope where a probability underflows."""
    return -(log_p.exp() * log_p).sum(-1)


def _binary_entropy(p: Tensor, q: Tensor) -> Tensor:
    """Returns the entropy of a Bernoulli with probabilities p and q = 1 − p, each given without cancellation."""
    tiny = torch.finfo(p.dtype).tiny
    return -(p * p.clamp_min(tiny).log() + q * q.clamp_min(tiny).log())


def _class_average(log_p: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the probabilities [S, N, ..., C], the log of their mean [N, ..., C] and the mutual information [N, ...]."""
    p = log_p.exp()
    mean = (share * p).sum(0)
    is_safe = bool((mean > _SAFE).all())  # otherwise something may have been lost to underflow
    log_mean = mean.log() if is_safe else torch.logsumexp(log_p + share.log(), 0)
    expected = -(share * (p * log_p)).sum(0).sum(-1)
    return p, log_mean, _entropy(log_mean) - expected


def _class_means(latent: Latent, link: str, drawn: Tensor | None) -> Tensor:
    """Returns the logarithms of the mean probabilities [N, ..., C], where ``drawn`` [N, ..., C] are those of draws, if the link has any."""
    if link == "bridge":
        return F.log_softmax(laplace_bridge(latent.mean.double(), latent.full().double()), -1)
    if link == "probit":
        return F.log_softmax(probit(latent.mean, latent.var), -1)
    if link == "pairwise":
        return pairwise_probit(latent.mean, latent.full())
    assert drawn is not None  # uses_draws
    if link == "mc" or latent.mean.shape[-1] > _PAIRWISE_MAX_CLASSES:
        return drawn
    # decided for each position on its own: the other examples of a batch must not matter
    narrow = _pair_variance(latent.full()).amax((-2, -1)) <= _PAIRWISE_MAX_VARIANCE
    return torch.where(narrow.unsqueeze(-1), pairwise_probit(latent.mean, latent.full()), drawn)


def _classification(latent: Latent, link: str, samples: int, generator: torch.Generator | None) -> Prediction:
    n_classes = latent.mean.shape[-1]
    if n_classes < 2:
        raise ShapeError(f'latent_mean has {n_classes} class; for one logit per example use Bernoulli() or "binary".')
    if link == "bridge":
        return _bridge(latent)
    closed_form = link in ("probit", "pairwise")
    points = normal_points(samples, n_classes, generator, fixed=closed_form or generator is None)
    log_p = _over_classes(F.log_softmax, draw_logits(latent, points))
    probabilities, drawn, information = _class_average(log_p, shares(log_p, None))
    log_mean = _class_means(latent, link, drawn)
    if link == "auto" and n_classes > _PAIRWISE_MAX_CLASSES:
        link = "mc"
    parts = _split(_entropy(log_mean), information)
    samples_kept = None if closed_form else probabilities
    return Prediction("classification", log_mean.exp(), *parts, samples=samples_kept, link=link)


def _bridge(latent: Latent) -> Prediction:
    log_alpha = laplace_bridge(latent.mean.double(), latent.full().double())
    log_mean = F.log_softmax(log_alpha, -1)
    alpha = log_alpha.clamp_max(_MAX_LOG_CONCENTRATION).exp()
    # of a Dirichlet: E H[p] = ψ(α₀ + 1) − Σ p̄_k ψ(α_k + 1)
    expected = torch.digamma(alpha.sum(-1) + 1) - (log_mean.exp() * torch.digamma(alpha + 1)).sum(-1)
    total = _entropy(log_mean)
    mean, total, information, alpha = (
        t.to(latent.mean.dtype) for t in (log_mean.exp(), total, total - expected, alpha)
    )
    return Prediction("classification", mean, *_split(total, information), concentration=alpha, link="bridge")


def _binary_means(latent: Latent, link: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mean probabilities of one and of zero, and the mutual information, [N, ..., C] in float64."""
    # Of the two probabilities the smaller one is integrated, and keeps all its digits.
    likely = latent.mean > 0
    smaller, expected = bernoulli_gaussian(torch.where(likely, -latent.mean, latent.mean), latent.var)
    one, zero = torch.where(likely, 1 - smaller, smaller), torch.where(likely, smaller, 1 - smaller)
    information = _binary_entropy(one, zero) - expected
    if link == "probit":
        logits = probit(latent.mean, latent.var).double()
        one, zero = logits.sigmoid(), (-logits).sigmoid()
    return one, zero, information


def _binary(latent: Latent, link: str) -> Prediction:
    one, zero, information = _binary_means(latent, link)
    parts = _split(_binary_entropy(one, zero), information)
    mean, epistemic, aleatoric = (value.to(latent.mean.dtype) for value in (one, *parts[:2]))
    link = "probit" if link == "probit" else "quadrature"
    return Prediction("binary", mean, epistemic, aleatoric, epistemic + aleatoric, link=link)


def _mixture(likelihood: Likelihood, outputs: Tensor, share: Tensor) -> Prediction:
    """Averages over samples [S, N, ..., C] with weights [S, 1, ...]."""
    kind = likelihood.kind
    rows = outputs.flatten(0, 1)  # a likelihood of your own knows [N, ..., C] only
    if kind == "classification":
        log_p = _over_classes(F.log_softmax, outputs)
        if not isinstance(likelihood, Categorical):
            p = likelihood.mean(rows).unflatten(0, outputs.shape[:2])
            log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log()
        p, log_mean, information = _class_average(log_p, share)
        return Prediction(kind, log_mean.exp(), *_split(_entropy(log_mean), information), samples=p)
    means = likelihood.mean(rows).unflatten(0, outputs.shape[:2])
    mean = (share * means).sum(0)
    if kind == "binary":
        others = (-outputs).sigmoid() if isinstance(likelihood, Bernoulli) else 1 - means
        total = _binary_entropy(mean, (share * others).sum(0))
        expected = (share * _binary_entropy(means, others)).sum(0)
        return Prediction(kind, mean, *_split(total, total - expected), samples=means)
    variances = likelihood.variance(rows).unflatten(0, outputs.shape[:2])
    epistemic = (share * (means - mean).square()).sum(0)
    aleatoric = (share * variances).sum(0)
    sample_variance = None if kind == "counts" else variances
    return Prediction(
        kind, mean, epistemic, aleatoric, epistemic + aleatoric, samples=means, sample_variance=sample_variance
    )
