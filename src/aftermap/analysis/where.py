"""Where the uncertainty is: by weight, filter, layer, class, input and pixel, from one fitted posterior (docs/mathematics/where.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from aftermap import checks
from aftermap.analysis.layers import Contributions, LayerSums, contributions, layer_results, layers_of
from aftermap.analysis.levels import ClassSums, InputKeeper
from aftermap.analysis.parts import split_by_layer
from aftermap.analysis.perturbation import Perturbation, perturbations
from aftermap.analysis.result import Where
from aftermap.analysis.weights import summarise, weight_maps
from aftermap.batches import Batch, Unpack, iterate
from aftermap.errors import InputError
from aftermap.likelihoods import Gaussian, Likelihood
from aftermap.models import check_device, evaluating, explain_model_errors
from aftermap.params import named_parameters
from aftermap.predictive.links import gaussian_prediction
from aftermap.predictive.predictor import PosteriorPredictor

__all__ = ["Where", "where"]


@torch.inference_mode(False)
def where(
    predictor: Any,
    loader: Iterable[Any],
    *,
    top: int = 16,
    saliency: bool | None = None,
    calibration: Iterable[Any] | bool = False,
    draws: int = 16,
    samples: int = 100,
    classes: Sequence[str] | None = None,
    unpack: Unpack | None = None,
    generator: torch.Generator | None = None,
) -> Where:
    """Looks for the uncertainty of a network, everywhere it can sit.

    One pass over the data gives every layer's part of the covariance of the outputs (they add up exactly), the
    predictions made from their sum, and averages by class. The weights are looked at one layer at a time.

    Args:
        predictor: A fitted `Laplace`, an optimiser's posterior (`opt.posterior()`), or a `PosteriorPredictor`.
        loader: Batches of (x, y), whose uncertainty is asked for; y may be None.
        top: The number of the most uncertain inputs that are kept.
        saliency: Whether to take the gradient of the epistemic uncertainty in each of them. None does so where inputs
            are single floating-point tensors and the Jacobian of one is not too large.
        calibration: Training data, to test that drawing one layer raises their loss by ½γ (docs/mathematics/where.md).
            True means that `loader` holds them.
        draws: The number of pairs of draws for every layer in the calibration test.
        samples: The number of samples of the link from a Gaussian over logits to probabilities.
        classes: The names of the outputs, for tables and figures.
        unpack: A function that turns a batch of another form into (inputs, targets).
        generator: The source of draws and samples. None means a fixed seed for the samples and PyTorch's own generator
            for the draws.

    Returns:
        Tables, figures, and numbers for JSON.

    Raises:
        UnsupportedError: The predictor has no Gaussian posterior over weights.
        InputError, DataError: An option is bad, or the data do not fit; the model is unchanged.

    >>> from aftermap.laplace import Laplace
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> found = where(Laplace(net, "regression").fit([(x, x**3)]), [(x, x**3)])
    >>> round(sum(found.table("layer")["predictive share"]), 6)
    1.0

    References:
        Kniebel 2020, Where is the uncertainty in Bayesian neural networks; MacKay 1992 for γ.
    """
    checks.count("top", top)
    checks.count("draws", draws)
    inner = _inner(predictor)
    model, posterior, likelihood = inner.model, inner.posterior, inner.likelihood
    parts = split_by_layer(posterior, model)
    prior: Any = getattr(posterior, "prior", None)  # It has one, or it could not be split.
    structure = str(getattr(predictor, "structure", getattr(getattr(predictor, "factors", None), "structure", "full")))
    layers = layers_of(parts, model, posterior.names, structure)
    train = _training_data(loader, calibration)
    seed = 0 if generator is None else int(torch.randint(2**31, (), generator=generator))
    seen = _WhereSums(LayerSums(), ClassSums(classes), InputKeeper(top), {}, "custom")
    tested: tuple[Perturbation, ...] = ()
    with evaluating(model):
        for batch in _batches(inner, loader, unpack):
            with explain_model_errors(model, lambda batch=batch: batch.inputs):  # type: ignore[misc]
                contributed = contributions(inner.plan(batch), parts, layers, batch, likelihood)
            seen.add(batch, contributed, likelihood, samples, torch.Generator().manual_seed(seed))
        inputs = seen.inputs.result(inner, saliency, torch.Generator().manual_seed(seed))
        if train is not None:
            power, n_data = (
                _likelihood_weight(predictor, inner),
                getattr(getattr(predictor, "factors", None), "n_data", None),
            )
            again = partial(_batches, inner, train, unpack)
            tested = perturbations(inner, parts, layers, again, draws, power, n_data, generator)

    parameters = {layer.name: layer.parameters for layer in layers}
    maps = partial(_weights_of, parameters, parts=parts, mean=posterior.mean, prior=prior, model=model)
    weights = [summarise(maps(layer.name)) for layer in layers]
    results, information = layer_results(layers, parts, weights, seen.layers, seen.calls)
    fixed = tuple(n for n in named_parameters(model) if n not in posterior.mean)
    count, by_class = seen.inputs.seen, seen.classes.result()
    return Where(structure, seen.kind, count, results, information, by_class, inputs, tested, fixed, weights_of=maps)


def _weights_of(parameters: Mapping[str, Sequence[str]], layer: str, **options: Any) -> Iterator[Any]:
    """Returns the maps of a layer's weights; a function of the module, so that a result can be pickled."""
    return weight_maps(layer, parameters[layer], **options)


@dataclass
class _WhereSums:
    """The sums that the pass over the data adds up."""

    layers: LayerSums
    classes: ClassSums
    inputs: InputKeeper
    calls: dict[str, int]
    kind: str

    def add(
        self,
        batch: Batch,
        contributions: Contributions,
        likelihood: Likelihood,
        samples: int,
        generator: torch.Generator,
    ) -> None:
        """Predicts from the layers' sum, and adds the batch everywhere."""
        prediction = gaussian_prediction(
            likelihood,
            contributions.mean,
            contributions.cov,
            latent_var=contributions.var if contributions.cov is None else None,
            samples=samples,
            generator=generator,
        )
        self.kind, self.calls = prediction.kind, self.calls or contributions.calls
        self.layers.add(contributions)
        self.classes.add(contributions, prediction, batch.targets)
        self.inputs.add(batch, contributions, prediction)


def _inner(predictor: Any) -> PosteriorPredictor:
    """Returns the model with its posterior and likelihood, behind a facade or as it is."""
    inner = getattr(predictor, "predictor", None)
    if not isinstance(inner, PosteriorPredictor):
        raise InputError(
            f"where() needs a Gaussian posterior over weights, which a {type(predictor).__name__} does not have. Allowed are a "
            "fitted Laplace, an optimiser's posterior (opt.posterior()) and a PosteriorPredictor"
        )
    return inner


def _training_data(loader: Iterable[Any], calibration: Iterable[Any] | bool) -> Iterable[Any] | None:
    if calibration is False:
        return None
    data = loader if calibration is True else calibration
    return checks.repeatable("calibration", data, "the calibration test")


def _batches(inner: PosteriorPredictor, data: Iterable[Any], unpack: Unpack | None) -> Iterator[Batch]:
    device, dtype = check_device(inner.model)
    for batch in iterate(data, device=device, dtype=dtype, unpack=unpack):
        inner.inputs(batch.inputs)  # This checks weights, modes and values.
        yield batch


def _likelihood_weight(predictor: Any, inner: PosteriorPredictor) -> float:
    """Returns what multiplies the log-likelihood in the posterior: the data scale over the temperature."""
    weight = getattr(predictor, "likelihood_weight", None)
    if weight is not None:
        return float(weight)
    scale = float(torch.as_tensor(getattr(inner.posterior, "scale", 1.0)).detach())
    noise = inner.likelihood.noise if isinstance(inner.likelihood, Gaussian) else None
    trained = getattr(predictor, "method", None) is not None  # An optimiser's curvature holds the noise already.
    if noise is None or trained or torch.as_tensor(noise).dim():
        return scale
    return scale * float(noise) ** 2
