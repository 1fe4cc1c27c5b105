"""Monte Carlo dropout: the dropout of training stays on for predictions, and nothing else does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.baselines.base import Baseline, private_randomness
from aftermap.errors import InputError, StatisticalWarning
from aftermap.likelihoods import Likelihood
from aftermap.models import call_model, check_device, evaluating

__all__ = ["MCDropout", "dropout_modules", "insert_dropout"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@final
class MCDropout(Baseline):
    """Averages the predictions of S random dropout masks.

    Only modules that drop something are switched to training mode: BatchNorm keeps its running statistics, and every
    module gets its own mode back. Dropout by ``torch.nn.functional.dropout`` in a ``forward`` cannot be switched alone:
    make it a module.

    Args:
        model: A network with dropout. It is never changed.
        likelihood: How targets depend on outputs: "classification", "binary", "regression", "counts" or an object from `aftermap.likelihoods`.
        samples: The number S of masks that a prediction averages over, unless `predict` is told otherwise.
        insert: The probability of dropping in a copy of the model that has dropout before every linear and convolutional layer
            but the first. None takes the model as it is.

    Warns:
        StatisticalWarning: The model drops nothing, so that all samples are the same.

    References:
        Gal, Ghahramani 2016, Dropout as a Bayesian approximation, eq. (6).

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
    >>> MCDropout(net, samples=7).predict(torch.ones(5, 3)).samples.shape
    torch.Size([7, 5, 4])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        *,
        samples: int = 100,
        insert: float | None = None,
    ):
        super().__init__(model, likelihood)
        self.samples = checks.count("samples", samples)
        if insert is not None:
            self.model = insert_dropout(model, insert)
        self._check()

    def _check(self) -> None:
        if not dropout_modules(self.model):
            warnings.warn(
                f"{type(self.model).__name__} has no dropout module with p > 0, so that MC dropout predicts as the plain network. "
                "Train with dropout, or pass insert=0.1",
                StatisticalWarning,
                stacklevel=3,
            )

    def outputs(self, inputs: Any, samples: int | None, generator: torch.Generator | None) -> Tensor:
        count = self.samples if samples is None else samples
        # Dropout takes no generator, so it draws from the default one.
        with _dropping(self.model), private_randomness(generator, check_device(self.model)[0]):
            return torch.stack([call_model(self.model, inputs) for _ in range(count)])


def dropout_modules(model: nn.Module) -> list[nn.Module]:
    """Returns every module that drops something in training mode: dropout layers, recurrent layers and attention with dropout.

    >>> dropout_modules(nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.3)))
    [Dropout(p=0.3, inplace=False)]
    """
    modules: list[nn.Module] = []
    for module in model.modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        inside = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
        if is_dropout or inside:
            modules.append(module)
    return modules


@contextmanager
def _dropping(model: nn.Module) -> Iterator[None]:
    """Puts the model in eval mode, except for the modules that drop."""
    with evaluating(model):
        dropping = dropout_modules(model)
        for module in dropping:
            module.training = True
        # In eval mode these take a fused path that leaves out the dropout of their parts. The flag itself does nothing else.
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoderLayer) and dropout_modules(module):
                module.training = True
        yield


def insert_dropout(model: nn.Module, p: float) -> nn.Module:
    """Returns a copy of the model with dropout before every linear and convolutional layer but the first.

    Args:
        model: Any module. Layers inside attention stay as they are.
        p: The probability of dropping, in (0, 1).

    Returns:
        The copy. A layer ``name`` becomes ``name.1``, after the dropout ``name.0``.

    Raises:
        InputError: The probability lies outside (0, 1), or there are fewer than two such layers.

    >>> insert_dropout(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), 0.1)[1][0]
    Dropout(p=0.1, inplace=False)
    """
    p = checks.fraction("insert", p, advice="Pass the probability of dropping, for instance insert=0.1")
    changed = copy.deepcopy(model)
    attention = tuple(n for n, m in changed.named_modules() if isinstance(m, nn.MultiheadAttention))
    places = [
        name
        for name, module in changed.named_modules()
        if isinstance(module, (nn.Linear, *_CONVOLUTIONS)) and not name.startswith(tuple(f"{a}." for a in attention))
    ]
    if len(places) < 2:
        raise InputError(
            f"insert= puts dropout between layers, but the model has {len(places)} linear or convolutional layer"
        )
    for name in places[1:]:
        layer = changed.get_submodule(name)
        channelwise = {nn.Conv1d: nn.Dropout1d, nn.Conv2d: nn.Dropout2d, nn.Conv3d: nn.Dropout3d}
        kind = next((drop for conv, drop in channelwise.items() if isinstance(layer, conv)), nn.Dropout)
        changed.set_submodule(name, nn.Sequential(kind(p), layer))
    return changed
