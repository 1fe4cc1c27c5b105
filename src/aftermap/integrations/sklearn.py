"""Bayesian networks as scikit-learn estimators: `fit`, `predict(return_std=True)`, `predict_proba`, in pipelines and searches.

Training and evidence take turns (MacKay 1992): the network is trained towards the maximum of the posterior, a Laplace
approximation there gives the prior precision of every layer and the noise that fit best, and training goes on with them.
Of all rounds the one with the highest evidence is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aftermap.errors import DataError, InputError
from aftermap.integrations.estimator import PIECE, Array, BayesianEstimator
from aftermap.integrations.network import Table, moments
from aftermap.late import optional
from aftermap.likelihoods import Categorical, Gaussian, Likelihood

_base = optional("sklearn.base", "sklearn", "the scikit-learn estimators")
_ClassifierMixin: Any = _base.ClassifierMixin
_RegressorMixin: Any = _base.RegressorMixin
_multiclass = optional("sklearn.utils.multiclass", "sklearn", "the scikit-learn estimators")

__all__ = ["BayesianClassifier", "BayesianRegressor"]

_FIRST_NOISE = 0.3  # of the targets' deviation, before anything is known
_LEAST_NOISE = 1e-3  # where the residuals vanish


class BayesianClassifier(_ClassifierMixin, BayesianEstimator):  # type: ignore[misc]
    """A network with a posterior over its weights, as a scikit-learn classifier.

    Probabilities are those of the linearised network under the posterior, with fixed points for the link: the same input
    always gets the same answer. `predictive(X)` has the epistemic and the aleatoric part apart. Only the last layer is
    uncertain unless ``params`` says otherwise: with a prior from the evidence alone, all layers together are underconfident
    on small sets of data. On one split each of iris, wine, breast cancer, digits and two moons the held-out log loss was
    lower with the last layer than with all layers (0.15, 0.11, 0.06, 0.17, 0.19 against 0.19, 0.20, 0.08, 0.36, 0.21), and
    that of the network without a posterior lower still on four of the five (0.11, 0.06, 0.07, 0.10, 0.19): the posterior
    tells where the network is unsure; it need not improve probabilities that the evidence has already regularised.

    Args:
        module: a torch module (copied; trained from its weights), a function (features, outputs) -> module, or None for a
            fully connected network in float64. It takes [N, features] and gives [N, outputs].
        hidden: widths of the default network's hidden layers.
        activation: of the default network: tanh, relu, gelu or silu.
        rounds: how often at most training and evidence take turns; the round with the highest evidence is kept, and three
            without a higher one are the last.
        epochs: passes through the data in each round.
        batch_size: data in a step of training.
        lr: Adam's learning rate at the start of a round.
        structure: of the posterior: kron, ekfac, diagonal or full; None: full for small networks, kron for others.
        params: which weights are uncertain; see `Laplace`. None: the last layer of a classifier, all of a regressor.
        prior_precision: "evidence", or one fixed number for all weights.
        standardise: bring inputs (and the targets of a regression) to mean 0 and deviation 1 inside.
        device: where it runs.
        random_state: start, order of the data, and whatever a foreign module draws; None: numpy's.

    Attributes:
        classes_: the labels.
        n_features_in_: columns of X.
        laplace_: the fitted `Laplace` approximation.
        model_: the trained network with its standardisation.

    >>> X, y = np.array([[0.0], [0.2], [0.8], [1.0]]), np.array(["no", "no", "yes", "yes"])
    >>> BayesianClassifier(epochs=20, random_state=0).fit(X, y).predict([[0.1], [0.9]])
    array(['no', 'yes'], dtype='<U3')

    References:
        MacKay 1992, "A practical Bayesian framework for backpropagation networks"; Immer et al. 2021 (linearised predictive).
    """

    _numeric_targets = False
    _default_params = "last_layer"

    def _encoded(self, y: Array, keep: Array) -> tuple[Array, int]:
        _multiclass.check_classification_targets(y)
        self.classes_, numbers = np.unique(y[keep], return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                f"the targets hold one class only ({self.classes_[0]!r}); a classifier needs at least two classes"
            )
        return numbers, len(self.classes_)

    def _scaling(self, data: Table) -> tuple[Tensor, Tensor] | None:
        return None

    def _likelihood(self, model: nn.Module, data: Table, *, trained: bool) -> Likelihood:
        return Categorical()

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes: [N, classes], in the order of ``classes_``."""
        mean = self.predictive(X).mean.to(torch.float64)
        return (mean / mean.sum(-1, keepdim=True)).cpu().numpy()

    def predict(self, X: Any) -> Array:
        """The most probable label of each input: [N]."""
        chosen = self.predict_proba(X).argmax(1)
        return self.classes_[chosen]


class BayesianRegressor(_RegressorMixin, BayesianEstimator):  # type: ignore[misc]
    """A network with a posterior over its weights, as a scikit-learn regressor.

    ``predict(X, return_std=True)`` gives the deviation of a new target: the uncertainty of the function and the noise, both
    learnt. Conformal methods that divide by it (MAPIE's ``StdConformityScore``) give intervals that widen far from the data.

    Args:
        module: a torch module (copied; trained from its weights), a function (features, outputs) -> module, or None for a
            fully connected network in float64. It takes [N, features] and gives [N, outputs].
        hidden: widths of the default network's hidden layers.
        activation: of the default network: tanh, relu, gelu or silu.
        rounds: how often at most training and evidence take turns; the round with the highest evidence is kept, and three
            without a higher one are the last.
        epochs: passes through the data in each round.
        batch_size: data in a step of training.
        lr: Adam's learning rate at the start of a round.
        structure: of the posterior: kron, ekfac, diagonal or full; None: full for small networks, kron for others.
        params: which weights are uncertain; see `Laplace`. None: the last layer of a classifier, all of a regressor.
        prior_precision: "evidence", or one fixed number for all weights.
        standardise: bring inputs (and the targets of a regression) to mean 0 and deviation 1 inside.
        device: where it runs.
        random_state: start, order of the data, and whatever a foreign module draws; None: numpy's.

    Attributes:
        n_features_in_: columns of X.
        noise_: deviation of the observation noise of each output, in the units of y.
        laplace_: the fitted `Laplace` approximation.
        model_: the trained network with its standardisation.

    >>> X = np.linspace(-1, 1, 20)[:, None]
    >>> regressor = BayesianRegressor(epochs=20, random_state=0).fit(X, X[:, 0] ** 3)
    >>> mean, std = regressor.predict([[0.0], [5.0]], return_std=True)
    >>> bool(std[1] > 2 * std[0])
    True

    References:
        MacKay 1992, "A practical Bayesian framework for backpropagation networks".
    """

    _numeric_targets = True
    _default_params = "all"

    def _encoded(self, y: Array, keep: Array) -> tuple[Array, int]:
        self._flat = y.ndim == 1
        targets = y[keep].reshape(int(keep.sum()), -1).astype(np.float64)
        return targets, targets.shape[1]

    def _scaling(self, data: Table) -> tuple[Tensor, Tensor] | None:
        return moments(data.y, data.weight) if self.standardise else None

    def _likelihood(self, model: nn.Module, data: Table, *, trained: bool) -> Likelihood:
        deviation = moments(data.y, data.weight)[1].to(torch.float64)
        noise = _FIRST_NOISE * deviation
        if trained:
            with torch.no_grad():
                squares = torch.cat([(model(x) - y).square() for x, y, _ in data.batches(PIECE)])
            share = (data.weight / data.weight.sum())[:, None]
            noise = (share * squares).sum(0).sqrt().to(torch.float64).maximum(_LEAST_NOISE * deviation)
        return Gaussian(float(noise) if len(noise) == 1 else noise.cpu())

    @property
    def noise_(self) -> Array:
        """Deviation of the observation noise, of each output."""
        likelihood = self._fitted()[1].likelihood
        assert isinstance(likelihood, Gaussian)  # the regressor's own
        return torch.as_tensor(likelihood.noise, dtype=torch.float64).reshape(-1).numpy()

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """Means, and on request how uncertain new targets are.

        Args:
            X: inputs [N, features].
            return_std: also the deviation of a new target, [N] or [N, outputs].
            return_cov: also the covariance of new targets at all inputs together, [N, N] or [N, N, outputs].

        Returns:
            The mean [N] or [N, outputs], alone or in a tuple.
        """
        if return_std and return_cov:
            raise InputError(
                "ask for return_std=True or return_cov=True, not for both: a covariance holds the deviations"
            )
        if return_cov:
            return self._joint(X)
        found = self.predictive(X)
        mean, std = (self._shaped(t) for t in (found.mean, found.total.sqrt()))
        return (mean, std) if return_std else mean

    def _joint(self, X: Any) -> tuple[Array, Array]:
        model, laplace = self._fitted()
        mean, covariance = laplace.joint(self._inputs(X, model))
        each = covariance.diagonal(dim1=1, dim2=3)  # [N, N, outputs]
        noise = torch.as_tensor(self.noise_, dtype=each.dtype, device=each.device).square()
        each = each + torch.eye(len(each), dtype=each.dtype, device=each.device)[..., None] * noise
        return self._shaped(mean), self._shaped(each)

    def _shaped(self, values: Tensor) -> Array:
        found = values.detach().to(torch.float64).cpu().numpy()
        return found[..., 0] if self._flat else found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
