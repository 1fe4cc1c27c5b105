"""Local reparametrisation for any module: linear maps of vectors draw their outputs instead of their weights.

A linear map h = W a + b with independent Gaussian weights has, for one example, h ~ N(M a + m, S a² + s) exactly. Drawing h
for every example gives gradients of far lower variance than one draw of W for the whole batch (Kingma et al. 2015). With
shared weights (convolutions, tokens, a layer used twice) the outputs of one example are correlated, so that weights are drawn there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aftermap.curvature.functional import functional_outputs
from aftermap.likelihoods.draws import normal_like
from aftermap.params import Params

__all__ = ["LocalNoise", "local_layers"]


class _Uses(TorchFunctionMode):
    """Counts in which functions every parameter is used."""

    def __init__(self, params: Params):
        super().__init__()
        self.names = {id(value): name for name, value in params.items()}
        self.uses: Counter[str] = Counter()
        self.pairs: list[tuple[str, str | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        held = [self.names[id(a)] for a in (*args, *kwargs.values()) if id(a) in self.names]
        reads_only = getattr(func, "__name__", "") in ("__get__", "dim", "size", "numel", "is_floating_point")
        if not reads_only:
            self.uses.update(held)
        if func is F.linear:
            inputs, weight, bias = _linear_arguments(args, kwargs)
            if id(weight) in self.names and inputs.dim() == 2:
                self.pairs.append((self.names[id(weight)], self.names.get(id(bias)) if bias is not None else None))
        return func(*args, **kwargs)


def _linear_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Any, Any]:
    named = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    return named["input"], named["weight"], named.get("bias")


def local_layers(model: nn.Module, params: Params, inputs: Any) -> dict[str, str | None]:
    """Weight -> bias of every linear map of vectors [N, D] whose parameters are used nowhere else.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4, bias=False))
    >>> local_layers(net, dict(net.named_parameters()), torch.ones(5, 2))
    {'0.weight': '0.bias', '2.weight': None}
    """
    values = {n: v.detach().clone() for n, v in params.items()}
    with torch.no_grad(), _Uses(values) as seen:
        functional_outputs(model, values, inputs)
    once = {n for n, count in seen.uses.items() if count == 1}
    return {w: b for w, b in seen.pairs if w in once and (b is None or b in once)}


class LocalNoise(TorchFunctionMode):
    """While active, linear maps with the given mean weights add the noise that random weights would give.

    Args:
        means: name -> mean; the tensors that the model is called with.
        deviations: name -> standard deviation.
        layers: weight -> bias, from :func:`local_layers`.
        generator: for the noise.
    """

    def __init__(
        self,
        means: Params,
        deviations: Params,
        layers: Mapping[str, str | None],
        generator: torch.Generator | None,
    ):
        super().__init__()
        self.variances = {id(means[w]): deviations[w].square() for w in layers}
        self.bias_variances = {id(means[w]): None if b is None else deviations[b].square() for w, b in layers.items()}
        self.generator = generator

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func is not F.linear:
            return found
        inputs, weight, _ = _linear_arguments(args, kwargs)
        if id(weight) not in self.variances:
            return found
        variance = F.linear(inputs.square(), self.variances[id(weight)], self.bias_variances[id(weight)])
        # The floor keeps the gradient of the root finite where every input is zero.
        return found + variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt() * normal_like(found, self.generator)
