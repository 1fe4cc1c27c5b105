"""What the two scikit-learn estimators share: settings, checks, the rounds of training and evidence, prediction."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from aftermap.batches import check_device
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.integrations.network import Standardised, Table, mlp, moments, train
from aftermap.laplace import Laplace
from aftermap.late import optional
from aftermap.likelihoods import Likelihood
from aftermap.params import Selection, named_parameters
from aftermap.predictive import Prediction

_PURPOSE = "the scikit-learn estimators"
_BaseEstimator: Any = optional("sklearn.base", "sklearn", _PURPOSE).BaseEstimator
_check_random_state = optional("sklearn.utils", "sklearn", _PURPOSE).check_random_state
_validation = optional("sklearn.utils.validation", "sklearn", _PURPOSE)

__all__ = ["PIECE", "STRUCTURES", "Array", "BayesianEstimator", "Factory"]

Array = npt.NDArray[Any]
Factory = Callable[[int, int], nn.Module]

STRUCTURES = ("diagonal", "ekfac", "full", "kron")
PIECE = 1024  # examples in one pass of a fit or a prediction
_PATIENCE = 3  # rounds without a higher evidence, after which there are no more
_SMALL = 1500  # up to this many weights their full covariance is cheap


class BayesianEstimator(_BaseEstimator, ABC):  # type: ignore[misc]
    """What both estimators share; abstract."""

    def __init__(
        self,
        module: nn.Module | Factory | None = None,
        *,
        hidden: Sequence[int] = (50,),
        activation: str = "tanh",
        rounds: int = 10,
        epochs: int = 100,
        batch_size: int = 200,
        lr: float = 0.02,
        structure: str | None = None,
        params: Selection | None = None,
        prior_precision: str | float = "evidence",
        standardise: bool = True,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
    ):
        self.module = module
        self.hidden = hidden
        self.activation = activation
        self.rounds = rounds
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.structure = structure
        self.params = params
        self.prior_precision = prior_precision
        self.standardise = standardise
        self.device = device
        self.random_state = random_state

    # What a task adds

    _numeric_targets: bool
    _default_params: str

    @abstractmethod
    def _encoded(self, y: Array, keep: Array) -> tuple[Array, int]:
        """Targets as the network sees them, of the examples that count; and the number of outputs."""

    @abstractmethod
    def _scaling(self, data: Table) -> tuple[Tensor, Tensor] | None:
        """Mean and scale of the network's outputs."""

    @abstractmethod
    def _likelihood(self, model: nn.Module, data: Table, *, trained: bool) -> Likelihood:
        """The likelihood at the start, or at the present weights."""

    # Fitting

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Trains the network and the posterior over its weights.

        Args:
            X: inputs [N, features].
            y: labels [N], or the targets [N] or [N, outputs] of a regression.
            sample_weight: [N]: how many data each stands for; None: one.

        Returns:
            self.
        """
        self._check_settings()
        X, y = _validation.validate_data(
            self,
            X,
            y,
            dtype=np.float64,
            allow_nd=self.module is not None,
            multi_output=self._numeric_targets,
            y_numeric=self._numeric_targets,
        )
        weight = _validation._check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        keep = weight > 0  # a datum that stands for none is not there
        if not keep.any():
            raise DataError("every sample_weight is 0, so no datum is left to fit")
        targets, outputs = self._encoded(y, keep)
        seed = int(_check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        generator = torch.Generator().manual_seed(seed)
        with _forked(seed, self.module is not None):
            network, dtype = self._network(X.shape[1], outputs, generator)
            data = Table(
                torch.as_tensor(np.ascontiguousarray(X[keep])).to(self.device, dtype),
                torch.as_tensor(targets).to(self.device, dtype if self._numeric_targets else torch.long),
                torch.as_tensor(weight[keep]).to(self.device, dtype),
            )
            inputs = moments(data.x, data.weight) if self.standardise else None
            model = Standardised(network, inputs, self._scaling(data)).to(self.device)
            _check_outputs(model, data, outputs)
            self.laplace_ = self._rounds(model, data, generator)
        self.model_ = self.laplace_.model
        return self

    def _check_settings(self) -> None:
        for name in ("rounds", "epochs", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise InputError(f"{name}={value!r} must be a whole number above 0")
        prior = self.prior_precision
        number = isinstance(prior, int | float | np.number) and not isinstance(prior, bool)
        if prior != "evidence" and not (number and 0 < float(prior) < float("inf")):
            raise InputError(f"prior_precision={prior!r} must be 'evidence' or a positive and finite number")
        if self.structure is not None and self.structure not in STRUCTURES:
            allowed = ", ".join(map(repr, STRUCTURES))
            raise InputError(f"structure={self.structure!r} is not known; allowed are None (by size), {allowed}")

    def _network(self, features: int, outputs: int, generator: torch.Generator) -> tuple[nn.Module, torch.dtype]:
        """The network at its start, and its dtype: float64 for the default one."""
        if self.module is None:
            return mlp(features, self.hidden, outputs, self.activation, generator, torch.float64), torch.float64
        if isinstance(self.module, nn.Module):
            made = copy.deepcopy(self.module)
        elif callable(self.module):
            made = self.module(features, outputs)
        else:
            made = self.module
        if not isinstance(made, nn.Module):
            raise InputError(
                f"module={self.module!r} must be None, a torch module, or a function of (features, outputs) that makes one; "
                f"this gave a {type(made).__name__}"
            )
        return made, check_device(made)[1]

    def _rounds(self, model: nn.Module, data: Table, generator: torch.Generator) -> Laplace:
        """Training and evidence in turn; the round with the highest evidence is kept."""
        evidence = self.prior_precision == "evidence"
        start = 1.0 if evidence else float(self.prior_precision)
        precision: dict[str, Any] = dict.fromkeys(named_parameters(model), start)
        likelihood = self._likelihood(model, data, trained=False)
        small = sum(p.numel() for p in model.parameters()) <= _SMALL
        structure = self.structure or ("full" if small else "kron")
        params = self._default_params if self.params is None else self.params
        found: list[tuple[float, Laplace]] = []
        for left in reversed(range(int(self.rounds))):
            train(
                model,
                data,
                likelihood.nll,
                precision,
                epochs=int(self.epochs),
                batch_size=int(self.batch_size),
                lr=float(self.lr),
                generator=generator,
            )
            likelihood = self._likelihood(model, data, trained=True)
            if not evidence and left:
                continue
            # A copy, because training goes on with the weights that the posterior stands around.
            laplace = Laplace(
                copy.deepcopy(model), likelihood, structure=structure, params=params, prior_precision=start
            ).fit(data.batches(PIECE), progress=False)
            if evidence:
                laplace.tune()
                precision |= laplace.posterior.prior.precision
                likelihood = laplace.likelihood
            found.append((float(laplace.log_evidence()), laplace))
            if len(found) > _PATIENCE and max(found, key=_value) not in found[-_PATIENCE:]:
                break
        return max(found, key=_value)[1]

    # Prediction

    def predictive(self, X: Any) -> Prediction:
        """The whole predictive distribution: mean, epistemic and aleatoric parts, intervals.

        Args:
            X: inputs [N, features].

        Returns:
            A `Prediction`, in the units of the targets.
        """
        model, laplace = self._fitted()
        # The same points for every piece: what is said of an input does not depend on its neighbours.
        parts = [
            laplace.predict(x, generator=torch.Generator().manual_seed(0)) for x in self._inputs(X, model).split(PIECE)
        ]
        return Prediction.concatenate(parts)

    def _fitted(self) -> tuple[nn.Module, Laplace]:
        _validation.check_is_fitted(self, "laplace_")
        return self.model_, self.laplace_

    def _inputs(self, X: Any, model: nn.Module) -> Tensor:
        X = _validation.validate_data(self, X, reset=False, dtype=np.float64, allow_nd=self.module is not None)
        device, dtype = check_device(model)
        return torch.as_tensor(np.ascontiguousarray(X)).to(device, dtype)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = self.module is not None
        return tags


def _value(pair: tuple[float, Laplace]) -> float:
    return pair[0]


@contextmanager
def _forked(seed: int, needed: bool) -> Iterator[None]:
    """PyTorch's own randomness, where a foreign module draws from it: seeded inside, and as before outside."""
    if not needed:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _check_outputs(model: nn.Module, data: Table, outputs: int) -> None:
    with torch.no_grad():
        found = model.eval()(data.x[:2])
    expected = (len(data.x[:2]), outputs)
    if not isinstance(found, Tensor) or found.shape != expected:
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ShapeError(f"the module gave {got} for {expected[0]} examples; these targets need {expected}")
