"""Uncertainty by input: the most uncertain ones, and where in them it sits (MATH W6, W7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aftermap.analysis.layers import Contributions
from aftermap.analysis.tables import Table
from aftermap.batches import Batch, take, tensors_of
from aftermap.errors import DataError, UnsupportedError
from aftermap.predictive import Prediction
from aftermap.predictive.predictor import PosteriorPredictor

__all__ = ["InputKeeper", "InputResult", "saliency_of"]

_JACOBIAN_NUMBERS = 5 * 10**7  # of the Jacobians that a saliency map holds at once


@dataclass(frozen=True, eq=False)
class InputResult:
    """The most uncertain inputs, most uncertain first; and two numbers for every input.

    Uncertainties are means over positions and outputs: nats for classes, variances for a regression.

    Attributes:
        indices: places in the data, in the order they came [T].
        inputs: the inputs themselves, each a batch of one, on the CPU.
        targets: of them, each a batch of one, or None.
        predictions: of them, on the CPU.
        epistemic: [T].
        aleatoric: [T].
        layer_shares: each layer's share of the variance of its outputs, cross terms included [T, L].
        all_epistemic: of every input [N].
        all_aleatoric: of every input [N].
        saliency: gradients of the epistemic uncertainty in the inputs, of their shape [T, ...]; None if not asked for.
    """

    indices: Tensor
    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    predictions: Prediction
    epistemic: Tensor
    aleatoric: Tensor
    layer_shares: Tensor
    all_epistemic: Tensor
    all_aleatoric: Tensor
    saliency: Tensor | None = None

    def table(self, layers: Sequence[str]) -> Table:
        """One row per input."""
        found = Table({"index": self.indices.tolist()})
        one = self.predictions.mean.dim() == 2
        if one and all(isinstance(t, Tensor) and t.numel() == 1 for t in self.targets):
            found["target"] = [t.item() for t in self.targets]
        if one and self.predictions.kind == "classification":
            found["prediction"] = self.predictions.labels.tolist()
            found["confidence"] = self.predictions.confidence.tolist()
        elif one and self.predictions.mean.shape[1] == 1:
            found["prediction"] = self.predictions.mean[:, 0].tolist()
        found["epistemic"], found["aleatoric"] = self.epistemic.tolist(), self.aleatoric.tolist()
        found["epistemic share"] = (self.epistemic / (self.epistemic + self.aleatoric)).tolist()
        for i, layer in enumerate(layers):
            found[f"{layer} share"] = self.layer_shares[:, i].tolist()
        return found


class InputKeeper:
    """Keeps the most uncertain inputs of a stream; what is not among them is forgotten.

    Args:
        top: how many.
    """

    def __init__(self, top: int):
        self.top, self.seen = top, 0
        self.epistemic: list[Tensor] = []
        self.aleatoric: list[Tensor] = []
        self.kept: list[tuple[float, int, Any, Any, Prediction, Tensor]] = []

    def add(self, batch: Batch, found: Contributions, prediction: Prediction) -> None:
        """Adds a batch."""
        light = _light(prediction)
        epistemic, aleatoric = _by_example(light.epistemic), _by_example(light.aleatoric)
        self.epistemic.append(epistemic)
        self.aleatoric.append(aleatoric)
        layers = found.whole.sum((2, 3)).T.cpu()  # [n, L]
        shares = layers / layers.sum(1, keepdim=True)
        for i in epistemic.argsort(descending=True, stable=True)[: self.top].tolist():
            if len(self.kept) == self.top and float(epistemic[i]) <= self.kept[-1][0]:
                break
            index = torch.tensor([i])
            example = _on_cpu(take(batch.inputs, index, batch.size))
            target = _on_cpu(take(batch.targets, index, batch.size))
            self.kept.append((float(epistemic[i]), self.seen + i, example, target, light[i], shares[i]))
            self.kept = sorted(self.kept, key=lambda k: (-k[0], k[1]))[: self.top]
        self.seen += batch.size

    def result(self, predictor: PosteriorPredictor, saliency: bool | None, generator: Any) -> InputResult:
        """What was kept, with saliency maps if asked for."""
        kept = self.kept
        if not kept:
            raise DataError("the data hold no example")
        predictions = Prediction.concatenate([k[4] for k in kept])
        inputs = tuple(k[2] for k in kept)
        size = predictor.posterior.n_params * predictions.mean.shape[-1]
        # A map is of one uncertainty per example: outputs [N, C], not one for every pixel or token.
        possible = predictions.mean.dim() == 2 and _is_plain(inputs) and size <= _JACOBIAN_NUMBERS
        wanted = possible if saliency is None else saliency
        maps = saliency_of(predictor, inputs, generator) if wanted else None
        return InputResult(
            torch.tensor([k[1] for k in kept]),
            inputs,
            tuple(k[3] for k in kept),
            predictions,
            _by_example(predictions.epistemic),
            _by_example(predictions.aleatoric),
            torch.stack([k[5] for k in kept]),
            torch.cat(self.epistemic),
            torch.cat(self.aleatoric),
            maps,
        )


def _light(prediction: Prediction) -> Prediction:
    """Without samples and covariances, on the CPU."""
    light = replace(prediction.detach(), samples=None, sample_variance=None, weights=None, latent_cov=None)
    return light.cpu()


def _by_example(values: Tensor) -> Tensor:
    return values.detach().reshape(len(values), -1).double().mean(1).cpu()


def _on_cpu(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().cpu()
    if isinstance(tree, dict):
        return {k: _on_cpu(v) for k, v in tree.items()}
    return tuple(_on_cpu(v) for v in tree) if isinstance(tree, tuple | list) else tree


def _is_plain(inputs: Sequence[Any]) -> bool:
    """Whether every input is one floating-point tensor, all of one shape."""
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in inputs):
        return False
    return len({tuple(x.shape) for x in inputs}) == 1


def saliency_of(
    predictor: PosteriorPredictor, inputs: Sequence[Any], generator: torch.Generator | None = None
) -> Tensor:
    """The gradient of the epistemic uncertainty in each input: which pixels or features it hangs on (MATH W6).

    For classes of the mutual information, for a regression of the variance summed over outputs; linearised predictive.

    Args:
        predictor: model, posterior and likelihood.
        inputs: batches of one.
        generator: for the samples of the link.

    Returns:
        [T, ...], the inputs' shape.

    Raises:
        UnsupportedError: inputs that are not single floating-point tensors of one shape have no such gradient.
    """
    if not _is_plain(inputs):
        shapes = [[tuple(t.shape) for t in tensors_of(x)] for x in inputs[:2]]
        raise UnsupportedError(
            f"a saliency map needs single floating-point inputs of one shape, got {shapes}…; pass saliency=False"
        )
    seed = None if generator is None else int(torch.randint(2**31, (), generator=generator))
    device = next(predictor.model.parameters()).device
    found = []
    # One at a time: a Jacobian per example is formed.
    for each in inputs:
        x = each.to(device).clone().requires_grad_()
        own = None if seed is None else torch.Generator().manual_seed(seed)
        with torch.enable_grad():
            prediction = predictor.predict(x, differentiable=True, generator=own)
            (gradient,) = torch.autograd.grad(prediction.epistemic.sum(), x)
        found.append(gradient.detach().cpu())
    return torch.cat(found)
