r"""Bayesian model averaging: several Laplace approximations predict as one.

Index legend: K components, S samples, N examples, ... positions, C outputs, D targets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.errors import DataError, InputError, NumericalError, ShapeError, UnsupportedError
from aftermap.laplace.laplace import Laplace
from aftermap.laplace.saving import load_laplace, save_laplace
from aftermap.likelihoods import Likelihood
from aftermap.posteriors.files import existing_folder, plain_file, read_json, sealed, unsealed
from aftermap.posteriors.io import replaced_folder
from aftermap.posteriors.records import ADVICE, ListOf, Number, OrNone, Record, Text, Whole
from aftermap.predictive import Prediction
from aftermap.predictive.quadrature import poisson_lognormal_rates

__all__ = ["WEIGHTS", "Mixture", "load_mixture", "mix"]

WEIGHTS = ("evidence", "uniform")
_CONFIG = "mixture.json"
_SCHEMA = 2
_READABLE = (1, 2)  # The first has no checksum.
_RECORD = Record(
    {
        "schema": Whole(),
        "method": Text(),
        "components": ListOf(
            Text(pattern=r"component_\d{1,6}", example="the name of a component, such as component_0")
        ),
        "weights": ListOf(Number(least=0, most=1)),
        "log_evidences": OrNone(ListOf(Number())),
    }
)


@final
class Mixture:
    r"""The mixture Σ_k w_k p_k(y | x, D) of fitted Laplace approximations.

    ``weights="evidence"`` is Bayesian model averaging under equal prior probabilities of the components,

    .. math::
        w_k = \frac{\exp \log q_k(D)}{\sum_j \exp \log q_j(D)},

    for approximations of **different models** of the same data (architectures, priors, likelihoods' noise).
    ``weights="uniform"`` is the ensemble of Laplace approximations, for networks that were trained from different starts: there
    the evidence would choose one of several equally good modes by small errors of the approximation.

    Networks may have any architectures as long as their outputs agree. The weights are taken when the mixture is made.

    Args:
        components: Fitted Laplace approximations of one kind of task, which are never changed.
        weights: The weights of the components: "evidence", "uniform", or K numbers that are not negative, which are
            scaled to sum to one.

    Raises:
        InputError: There are no components, one is no Laplace approximation, kinds differ, weights are bad, or
            evidences are of different data.
        NotFittedError: A component has no posterior.
        NumericalError: An evidence is not finite.

    References:
        MacKay 1992, Bayesian interpolation, section 2; Hoeting et al. 1999, Bayesian model averaging: a tutorial, eq. (1)-(3);
        Eschenhagen et al. 2021, Mixtures of Laplace approximations for improved post-hoc uncertainty in deep learning.

    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> parts = [Laplace(nn.Linear(1, 1), "regression").fit([(x, x)]) for _ in range(3)]
    >>> Mixture(parts, weights="uniform").predict(x).epistemic.shape
    torch.Size([20, 1])
    """

    def __init__(self, components: Sequence[Laplace], weights: str | Sequence[float] | Tensor = "evidence"):
        self.components = _check_components(components)
        self.log_evidences: Tensor | None = None
        if isinstance(weights, str):
            if weights not in WEIGHTS:
                allowed = ", ".join(map(repr, WEIGHTS))
                raise InputError(
                    f"weights={weights!r} is not known; allowed are {allowed}, or one number per component"
                )
            if weights == "evidence":
                self.log_evidences = _log_evidences(self.components)
                self.weights = self.log_evidences.softmax(0)  # The softmax is a log-sum-exp in float64.
            else:
                self.weights = torch.full((len(self),), 1 / len(self), dtype=torch.float64)
        else:
            self.weights = _check_weights(weights, len(self))

    def __len__(self) -> int:
        return len(self.components)

    @property
    def models(self) -> list[nn.Module]:
        """The networks of the components."""
        return [part.model for part in self.components]

    @property
    def model(self) -> nn.Module:
        """The first network, which tells where the inputs go, and in which dtype."""
        return self.components[0].model

    @property
    def likelihood(self) -> Likelihood:
        """The components' likelihood, where it is the same in all of them.

        Raises:
            UnsupportedError: The components have different noise or temperatures, and so no common likelihood.
        """
        first = self.components[0].likelihood
        if any(part.likelihood.config() != first.config() for part in self.components):
            raise UnsupportedError(
                "the components of this mixture have different likelihoods (their noise or temperature was tuned); ask them one by one"
            )
        return first

    @property
    def effective_number(self) -> float:
        """The number exp H[w], which is K for equal weights and 1 if one component has all weight."""
        return float(torch.special.entr(self.weights).sum().exp())

    def log_evidence(self) -> Tensor:
        """Returns log (1/K) Σ_k exp log q_k(D), the evidence of components that are equally probable before (0-d, float64)."""
        evidences = _log_evidences(self.components) if self.log_evidences is None else self.log_evidences
        return torch.logsumexp(evidences, 0) - torch.tensor(float(len(self)), dtype=torch.float64).log()

    def _used(self) -> list[tuple[Laplace, float]]:
        """Returns the components that count; one of weight zero is not run."""
        return [(part, float(w)) for part, w in zip(self.components, self.weights, strict=True) if w > 0]

    def predict(
        self,
        x: Any,
        *,
        kind: str = "linearised",
        link: str = "auto",
        samples: int = 100,
        diagonal: bool = False,
        outputs: Sequence[int] | None = None,
        weights: None = None,
        local: bool = False,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Predicts with uncertainty; see `mix` for how the components' predictions become one.

        Args:
            x: The inputs as the models take them.
            kind: The predictive of every component, "linearised" or "sampling"; see `Laplace.predict`, also for the others.
            link: How a linearised predictive turns the Gaussian over logits into probabilities.
            samples: The number of draws of every component.
            diagonal: Whether to compute only the variances of the outputs, without their covariances.
            outputs: Which of the outputs of a regression to predict.
            weights: Not possible here: samples are of one network's weights, and a mixture has several networks.
            local: Whether kind="sampling" draws the outputs of linear layers instead of weights.
            differentiable: Whether to keep the gradient in x.
            generator: The source of the random draws, used by one component after the other.

        Raises:
            InputError: Weights were given.
        """
        if weights is not None:
            raise InputError("weights= are samples of one network's weights; a mixture has several networks")
        used = self._used()
        predictions = [
            part.predict(
                x,
                kind=kind,
                link=link,
                samples=samples,
                diagonal=diagonal,
                outputs=outputs,
                local=local,
                differentiable=differentiable,
                generator=generator,
            )
            for part, _ in used
        ]
        return mix(predictions, [w for _, w in used])

    def joint(self, x: Any) -> tuple[Tensor, Tensor]:
        """Returns mean [N, C] and covariance [N, C, N, C] of the outputs of several inputs together."""
        used = self._used()
        moments = [part.joint(x) for part, _ in used]
        _check_shapes([mean for mean, _ in moments], "outputs")
        share = torch.tensor([w for _, w in used], dtype=torch.float64, device=moments[0][0].device)
        means = torch.stack([mean for mean, _ in moments]).double()
        mean = torch.einsum("k,knc->nc", share, means)
        cov = sum(w * cov.double() for w, (_, cov) in zip(share, moments, strict=True))
        cov = cov + torch.einsum("k,knc,kmd->ncmd", share, means - mean, means - mean)
        return mean.to(moments[0][0].dtype), cov.to(moments[0][0].dtype)

    def function_samples(self, x: Any, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns joint samples [count, N, ..., C] of linearised outputs, each of a component drawn by its weight."""
        count = checks.count("count", count)
        device = torch.device("cpu") if generator is None else generator.device
        drawn = torch.multinomial(self.weights.to(device), count, replacement=True, generator=generator).cpu()
        drawn_samples: list[Tensor | None] = [None] * count
        for k in drawn.unique().tolist():
            places = (drawn == k).nonzero().squeeze(1).tolist()
            for place, sample in zip(
                places, self.components[k].function_samples(x, len(places), generator), strict=True
            ):
                drawn_samples[place] = sample
        samples = [sample for sample in drawn_samples if sample is not None]
        _check_shapes(samples, "outputs")
        return torch.stack(samples)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Writes a folder of folders, one per component; the networks themselves are not in it.

        Args:
            folder: The folder to write.
            overwrite: Whether to replace what is there; on a failure it stays.
        """
        place = Path(folder)
        names = [f"component_{k}" for k in range(len(self))]
        there = [p.name for p in place.iterdir()] if place.is_dir() else []
        known = [_CONFIG, *names, *(n for n in there if re.fullmatch(r"component_\d+", n))]
        evidences = None if self.log_evidences is None else self.log_evidences.tolist()
        config = {
            "schema": _SCHEMA,
            "method": "laplace_mixture",
            "components": names,
            "weights": self.weights.tolist(),
            "log_evidences": evidences,
        }
        with replaced_folder(place, overwrite=overwrite, known=known) as temporary:
            for name, part in zip(names, self.components, strict=True):
                save_laplace(part, temporary / name)
            (temporary / _CONFIG).write_text(json.dumps(sealed(config), indent=2, allow_nan=False) + "\n")
        return place

    def __repr__(self) -> str:
        shown = ", ".join(f"{w:.3g}" for w in self.weights.tolist())
        return f"Mixture({len(self)} components, weights=[{shown}])"


def load_mixture(
    folder: str | Path, models: Sequence[nn.Module], *, device: torch.device | str | None = None
) -> Mixture:
    """Reads a saved mixture for its networks.

    Args:
        folder: A folder that `Mixture.save` wrote.
        models: The networks in the order of the components, with the weights of the fit; they are not changed.
        device: The device that the posteriors go to. None means the models'.

    Raises:
        InputError: The number of networks is another one, or a network does not fit.
        DataError: The folder is damaged or foreign.
    """
    place = existing_folder(folder, "mixture")
    file = plain_file(place, _CONFIG, "a mixture's folder has it")
    config = read_json(file)
    if (
        not isinstance(config, dict)
        or config.get("method") != "laplace_mixture"
        or config.get("schema") not in _READABLE
    ):
        described = {k: config.get(k) for k in ("method", "schema")} if isinstance(config, dict) else {}
        raise DataError(
            f"{folder} does not hold a saved mixture: {file.name} says method {str(described.get('method'))[:40]!r} and schema "
            f"{str(described.get('schema'))[:40]!r}; read are 'laplace_mixture' and {', '.join(map(str, _READABLE))}"
        )
    config = _RECORD.read(config if config["schema"] == 1 else unsealed(config, file), f"{file}:")
    names, weights, evidences = config["components"], config["weights"], config["log_evidences"]
    if len(set(names)) != len(names) or not len(names) == len(weights) == len(evidences or names):
        raise DataError(f"{file}: components, weights and log_evidences must be equally many. {ADVICE}")
    networks = list(models) if isinstance(models, Sequence | nn.ModuleList) else [models]
    if len(networks) != len(names):
        raise InputError(
            f"{folder} holds {len(names)} components, but {len(networks)} models were given; pass one for each, in order"
        )
    parts = [load_laplace(place / name, model, device=device) for name, model in zip(names, networks, strict=True)]
    try:
        mixture = Mixture(parts, weights)
    except InputError as error:
        raise DataError(f"{file} does not fit its components: {error}. {ADVICE}") from error
    mixture.weights = torch.tensor(weights, dtype=torch.float64)  # Scaling them again would move the last bit.
    if evidences is not None:
        mixture.log_evidences = torch.tensor(evidences, dtype=torch.float64)
    return mixture


def mix(predictions: Sequence[Prediction], weights: Sequence[float]) -> Prediction:
    r"""Makes one prediction of a mixture from those of its components, exactly.

    Means are averaged: probabilities, rates, regression means. With p_k the mean probabilities of component k, the entropies of
    classes are

    .. math::
        \text{epistemic} = \sum_k w_k\, I_k[y; f] + \sum_k w_k\, \mathrm{KL}(p_k \,\|\, \bar p), \qquad
        \text{aleatoric} = \sum_k w_k\, E_k H[y \mid f],

    These are the information within and between components, and their sum is H[p̄]. Variances follow from the law of
    total variance: epistemic Σ w_k (v_k + (μ_k − μ̄)²), aleatoric Σ w_k E_k Var[y | f].

    The samples of the components are kept together with their weights. A regression without samples keeps the components in
    their place, μ_k with **total** variance, so that `log_prob` and `distribution` are the exact mixture of Gaussians; counts
    without samples keep 128 equally probable rates of each component.

    Args:
        predictions: The K predictions of one kind, of the same inputs.
        weights: The K positive weights, summing to one.

    Returns:
        The prediction, with link "mixture" and without a latent Gaussian, which a mixture does not have.

    Raises:
        ShapeError: The outputs have different shapes.

    >>> one, two = (
    ...     Prediction("regression", m * torch.ones(1, 1), *(torch.ones(1, 1) for _ in "ea"), torch.full((1, 1), 2.0))
    ...     for m in (0, 2)
    ... )
    >>> found = mix([one, two], [0.5, 0.5])
    >>> found.mean.item(), found.epistemic.item(), found.aleatoric.item()
    (1.0, 2.0, 1.0)
    """
    parts = list(predictions)
    kind, dtype = parts[0].kind, parts[0].mean.dtype
    _check_shapes([part.mean for part in parts], "predictions")
    share = torch.tensor(list(weights), dtype=torch.float64, device=parts[0].mean.device)

    def averaged(values: list[Tensor]) -> Tensor:
        return torch.einsum("k,k...->...", share, torch.stack(values).double())

    means = torch.stack([part.mean for part in parts]).double()
    mean = averaged([part.mean for part in parts])
    within = averaged([part.epistemic for part in parts])
    aleatoric = averaged([part.aleatoric for part in parts])
    if kind in ("classification", "binary"):
        tiny = torch.finfo(torch.float64).tiny
        divergence = means * (means.clamp_min(tiny).log() - mean.clamp_min(tiny).log())
        if kind == "binary":
            others, other = 1 - means, 1 - mean
            divergence = divergence + others * (others.clamp_min(tiny).log() - other.clamp_min(tiny).log())
        else:
            divergence = divergence.sum(-1)
        between = torch.einsum("k,k...->...", share, divergence).clamp_min(0.0)
    else:
        between = torch.einsum("k,k...->...", share, (means - mean).square())
    epistemic, aleatoric = (within + between).to(dtype), aleatoric.to(dtype)
    samples, variances, sample_weights = _samples(parts, share)
    return Prediction(
        kind,
        mean.to(dtype),
        epistemic,
        aleatoric,
        epistemic + aleatoric,
        samples=samples,
        sample_variance=variances,
        weights=sample_weights,
        link="mixture",
        ignore_index=parts[0].ignore_index,
    )


def _samples(parts: list[Prediction], share: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the samples [S, N, ..., D] of all components, their variances, and their weights [S]."""
    kind, dtype = parts[0].kind, parts[0].mean.dtype
    values, variances, weights = [], [], []
    for part, w in zip(parts, share, strict=True):
        samples, of_samples = part.samples, part.weights
        spread = part.sample_variance
        if samples is None and kind == "counts" and part.latent_mean is not None and part.latent_var is not None:
            samples = poisson_lognormal_rates(part.latent_mean, part.latent_var)
        elif samples is None and kind in ("regression", "custom"):
            samples, spread, of_samples = part.mean.unsqueeze(0), part.total.unsqueeze(0), None
        if samples is None:
            return None, None, None
        if spread is None and kind in ("regression", "custom"):
            spread = part.aleatoric.expand(samples.shape)
        values.append(samples.to(dtype))
        variances.append(spread)
        of = (
            samples.new_full((len(samples),), 1 / len(samples), dtype=torch.float64)
            if of_samples is None
            else of_samples.double()
        )
        weights.append(w * of)
    own_variances = [v.to(dtype) for v in variances if v is not None]
    return (
        torch.cat(values),
        torch.cat(own_variances) if len(own_variances) == len(values) else None,
        torch.cat(weights).to(dtype),
    )


def _check_components(components: object) -> list[Laplace]:
    candidates: list[Any] = list(components) if isinstance(components, Sequence) else [components]
    if not candidates:
        raise InputError("a mixture needs at least one Laplace approximation, got none")
    for place, part in enumerate(candidates):
        if not isinstance(part, Laplace):
            raise InputError(
                f"component {place} of a mixture is {type(part).__name__}, not a Laplace approximation; "
                "for plain networks use aftermap.Ensemble"
            )
        _ = part.posterior  # This raises before a fit.
    parts: list[Laplace] = candidates
    kinds = sorted({part.likelihood.kind for part in parts})
    if len(kinds) > 1:
        raise InputError(f"the components of a mixture must be of one kind of task, got {', '.join(kinds)}")
    return parts


def _check_weights(weights: Sequence[float] | Tensor, count: int) -> Tensor:
    try:
        numbers = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"weights must be {count} numbers, one per component, got {weights!r}") from None
    if (
        numbers.shape != (count,)
        or not bool((numbers.isfinite() & (numbers >= 0)).all())
        or not bool(numbers.sum() > 0)
    ):
        raise InputError(
            f"weights must be {count} finite numbers that are not negative and not all zero, one per component, "
            f"got {numbers.tolist()}"
        )
    return numbers / numbers.sum()


def _log_evidences(components: list[Laplace]) -> Tensor:
    for what, values in (
        ("numbers of data", sorted({part.n_data for part in components})),
        ("data scales / temperatures", sorted({_evidence_weight(part) for part in components})),
    ):
        if len(values) > 1:
            shown = ", ".join(f"{v:g}" for v in values)
            raise InputError(
                f"evidences compare models of the same data, but the components have different {what}: {shown}. "
                'Fit all of them to the same data, or pass weights="uniform"'
            )
    evidences = torch.stack([part.log_evidence().detach().double().cpu() for part in components])
    if not bool(evidences.isfinite().all()):
        raise NumericalError(
            f"a log evidence is not finite: {evidences.tolist()}; look at the components' priors, or use weights='uniform'"
        )
    return evidences


def _evidence_weight(laplace: Laplace) -> float:
    """Returns what multiplies the log-likelihood in the evidence: without the factor that the covariance was divided by."""
    return float(f"{laplace.likelihood_weight / laplace.fitted.narrowing:.12g}")


def _check_shapes(values: list[Tensor], what: str) -> None:
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) > 1:
        raise ShapeError(f"the components of a mixture must have {what} of one shape, got {shapes}")
