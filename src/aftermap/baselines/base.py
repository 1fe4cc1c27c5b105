"""What all baselines share: reading inputs, running a network under other weights, and the form of `predict`.

`Particles` is a fixed set of weights as an ensemble: samples of any posterior, drawn once and used for every input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.batches import Batch, Unpack, check_inputs, iterate, unpack_inputs
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.models import check_device, evaluating, functional_outputs
from aftermap.params import Params
from aftermap.posteriors import Posterior
from aftermap.predictive import Prediction, draw_weights, samples_prediction
from aftermap.predictive.sampling import with_padding

__all__ = [
    "Baseline",
    "Particles",
    "batches_of",
    "eval_outputs",
    "mean_nll",
    "private_randomness",
    "private_seed",
    "read_inputs",
    "targets_of",
]


class Baseline(ABC):
    """A predictor whose answer is a mixture over the outputs of S networks.

    Args:
        model: The network. It is never changed.
        likelihood: How targets depend on outputs: "classification", "binary", "regression", "counts" or an object from `aftermap.likelihoods`.
    """

    def __init__(self, model: nn.Module, likelihood: str | Likelihood = "classification"):
        self.model = checks.module(type(self).__name__, model)
        self.likelihood = parse_likelihood(likelihood)

    @abstractmethod
    def outputs(self, inputs: Any, samples: int | None, generator: torch.Generator | None) -> Tensor:
        """Returns network outputs [S, N, ..., C] for checked inputs; they are differentiable in the inputs."""

    def predict(
        self,
        x: Any,
        *,
        samples: int | None = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Predicts with uncertainty, as a mixture of several networks.

        Args:
            x: Inputs as the model takes them: a tensor, a tuple of positional or a mapping of keyword arguments.
            samples: How many networks are averaged over. None takes the baseline's own number; a fixed set of networks gives its
                first ones.
            differentiable: Whether the prediction keeps its gradient in x.
            generator: The source of the samples. A generator with the same seed gives the same samples; None is PyTorch's own.

        Returns:
            The mixture of the networks. Probabilities are averaged, never logits.

        Raises:
            InputError: The inputs are not finite or of another dtype, or there are fewer networks than samples.
        """
        inputs = read_inputs(self.model, x)
        if samples is not None:
            samples = checks.count("samples", samples)
        with torch.set_grad_enabled(differentiable):
            values = self.outputs(inputs, samples, generator)
        return self.prediction(values)

    def prediction(self, outputs: Tensor) -> Prediction:
        """Makes the prediction of network outputs [S, N, ..., C]: their mixture, with equal weights."""
        return samples_prediction(self.likelihood, outputs)


def read_inputs(model: nn.Module, x: Any) -> Any:
    """Returns the inputs, checked and moved to the model's device."""
    device, dtype = _place(model)
    batch = unpack_inputs(x, dtype).to(device)
    check_inputs(batch.inputs, dtype)
    return batch.inputs


def _place(model: nn.Module) -> tuple[torch.device, torch.dtype | None]:
    """Returns the device and dtype that inputs must have; a model without parameters takes any dtype."""
    device, dtype = check_device(model)
    return device, dtype if any(p.is_floating_point() for p in model.parameters()) else None


def eval_outputs(model: nn.Module, weights: Params, inputs: Any) -> Tensor:
    """Returns outputs [N, ..., C] in eval mode with other weights (and buffers), which nothing writes to.

    This is a functional call and not a swap of values: autograd looks a convolution's weight up again in the backward
    pass, when swapped values would be gone.
    """
    with evaluating(model):
        outputs = functional_outputs(model, weights, inputs)
    if outputs.dim() < 2:
        raise ShapeError(
            f"the model returned shape {list(outputs.shape)}; it must be [N, ..., C]. For one output per example "
            "keep the last dimension: outputs.unsqueeze(-1)"
        )
    return outputs


def batches_of(model: nn.Module, data: Iterable[Any], unpack: Unpack | None = None) -> Iterable[Batch]:
    """Yields checked batches of the data on the model's device."""
    device, dtype = _place(model)
    return iterate(data, device=device, dtype=dtype, unpack=unpack)


def targets_of(batch: Batch) -> Tensor:
    """Returns the targets of a batch, which training needs."""
    if not isinstance(batch.targets, Tensor):
        raise DataError("a batch has no tensor of targets; fitting needs (x, y) batches")
    return batch.targets


def mean_nll(likelihood: Likelihood, outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
    """Returns the weighted mean of −log p(y | f) over a batch, and the number of data it stands for."""
    values = likelihood.nll(outputs, targets_of(batch))
    if batch.weight is None:
        return values.mean(), float(batch.size)
    weight = batch.weight.to(values.dtype)
    count = float(weight.sum())
    return (values * weight).sum() / max(count, 1e-300), count


def private_seed(generator: torch.Generator | None) -> int:
    """Returns a seed for code that cannot be given a generator, drawn from one (or from torch's default one)."""
    device = torch.device("cpu") if generator is None else generator.device
    return int(torch.randint(2**62, (1,), generator=generator, device=device).item())


@contextmanager
def private_randomness(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Lets ``generator`` govern the code inside that draws from torch's default generator (dropout).

    The default generator is put back as it was. Without a generator it is used as it is.
    """
    if generator is None:
        yield
        return
    seed = private_seed(generator)
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@final
class Particles(Baseline):
    """Predicts with a fixed set of weight samples, so that every input meets the same networks.

    Args:
        model: The network. It is never changed.
        weights: A sequence of S dictionaries from names of parameters (or buffers) to values. What is missing keeps the
            model's own value.
        likelihood: How targets depend on outputs: "classification", "binary", "regression", "counts" or an object from `aftermap.likelihoods`.
        mixture: How much each set counts [S]. None lets all count the same.

    Raises:
        InputError: There are no weights, a name is not in the model, or shapes differ.

    References:
        Ritter, Botev, Barber 2018, appendix D.

    >>> net = nn.Linear(2, 3)
    >>> own = {n: p.detach() for n, p in net.named_parameters()}
    >>> other = {n: -p for n, p in own.items()}
    >>> Particles(net, [own, other]).predict(torch.ones(4, 2)).samples.shape
    torch.Size([2, 4, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[Params],
        likelihood: str | Likelihood = "classification",
        *,
        mixture: Tensor | Sequence[float] | None = None,
    ):
        super().__init__(model, likelihood)
        self.weights = [_checked(model, particle, i) for i, particle in enumerate(weights)]
        if not self.weights:
            raise InputError("Particles needs at least one set of weights, got none")
        self.mixture = None if mixture is None else torch.as_tensor(mixture)
        if self.mixture is not None and self.mixture.shape != (len(self.weights),):
            raise InputError(
                f"mixture has shape {list(self.mixture.shape)}, but there are {len(self.weights)} sets of weights"
            )

    @staticmethod
    def from_posterior(
        model: nn.Module,
        posterior: Posterior,
        count: int = 30,
        likelihood: str | Likelihood = "classification",
        *,
        generator: torch.Generator | None = None,
    ) -> Particles:
        """Draws ``count`` sets of weights from a posterior, once; the padding of an embedding stays that of the model."""
        drawn = draw_weights(posterior, checks.count("count", count), generator)
        return Particles(model, [with_padding(model, weights) for weights in drawn], likelihood)

    def __len__(self) -> int:
        return len(self.weights)

    def outputs(self, inputs: Any, samples: int | None, generator: torch.Generator | None) -> Tensor:
        count = len(self) if samples is None else samples
        if count > len(self):
            raise InputError(f"samples={count}, but there are only {len(self)} sets of weights")
        return torch.stack([eval_outputs(self.model, particle, inputs) for particle in self.weights[:count]])

    def prediction(self, outputs: Tensor) -> Prediction:
        if self.mixture is None:
            return super().prediction(outputs)
        prediction = samples_prediction(self.likelihood, outputs, weights=self.mixture[: len(outputs)])
        return replace(prediction, link="samples")


def _checked(model: nn.Module, weights: Params, index: int) -> Params:
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in weights.items():
        if name not in known:
            raise InputError(f"weights[{index}] names {name!r}, which the model does not have")
        if value.shape != known[name].shape:
            raise InputError(
                f"weights[{index}][{name!r}] has shape {list(value.shape)}, the model's has {list(known[name].shape)}"
            )
    return {n: v.detach().to(known[n]) for n, v in weights.items()}
