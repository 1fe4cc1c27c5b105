"""A Laplace approximation in a folder, and back: everything but the network itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Unpack
from aftermap.curvature.structures.eigenbasis import DAMPINGS
from aftermap.errors import AftermapError, DataError, InputError, NumericalWarning, UnsupportedError
from aftermap.laplace.laplace import Laplace
from aftermap.likelihoods import Likelihood, likelihood_from_config
from aftermap.models import check_is_network
from aftermap.params import named_parameters, weights_hash
from aftermap.posteriors import GaussianPosterior
from aftermap.posteriors.base import Hyperparameters
from aftermap.posteriors.encoding import described
from aftermap.posteriors.io import LoadedPosterior, load_posterior, read_parameters, read_saved_config, save_posterior
from aftermap.posteriors.records import ADVICE, Anything, Flag, ListOf, MapOf, Number, OrNone, Record, Text, Whole
from aftermap.predictive import TrainedPosterior

__all__ = ["load", "load_laplace", "read_extras", "save_laplace"]

_EXTRAS = {"extras": MapOf(Anything())}
_LAPLACE = Record(
    {
        "method": Text(("laplace",)),
        "likelihood": MapOf(Anything()),
        "noise_level": Number(above=0),
        "structure": Text(),
        "params": ListOf(Text()),
        "curvature": Text(),
        "data_scale": Number(above=0),
        "temperature": Number(above=0),
        "damping": Text(DAMPINGS),
        "approach": Text(("expand", "reduce")),
        "rank": OrNone(Whole(1)),
        "strict": Flag(),
    },
    {  # Folders of former versions do not have these.
        "output_temperature": Number(above=0),
        "narrowing": Number(above=0),
        "subset_size": Whole(1),
        **_EXTRAS,
    },
)
_TRAINED = Record(
    {
        "method": Text(pattern=r"[A-Za-z_]\w*", example="the name of an optimiser"),
        "likelihood": OrNone(MapOf(Anything())),
    },
    {"damping": MapOf(Number(least=0)), "output_temperature": Number(above=0), **_EXTRAS},
)


def save_laplace(
    laplace: Laplace,
    folder: str | Path,
    *,
    overwrite: bool = False,
    extras: Mapping[str, Any] | None = None,
    reference: Mapping[str, Tensor] | None = None,
    with_model: bool = False,
) -> Path:
    """Writes a fitted Laplace approximation: json and safetensors in a folder, whole or not at all.

    Args:
        laplace: A fitted approximation.
        folder: The folder to write.
        overwrite: Whether to replace what is there; on a failure it stays.
        extras: The caller's own plain JSON values, such as thresholds; `read_extras` reads them back.
        reference: Tensors by name to compare new inputs with, such as quantiles of scores.
        with_model: Whether to keep the network's weights and buffers in the folder, too.
    """
    if not isinstance(laplace.posterior, GaussianPosterior):
        raise UnsupportedError(
            f"a posterior with structure={laplace.structure!r} lives on its data and cannot be saved; "
            "use structure='low_rank', 'full' or 'kron', or draw weights with la.ensemble(n) and save those"
        )
    config = {
        "method": "laplace",
        "likelihood": laplace.base_likelihood.config(),
        "noise_level": float(laplace.hyperparameters.noise),
        "structure": laplace.structure,
        "params": list(laplace.posterior.names),
        "curvature": laplace.curvature,
        "data_scale": laplace.data_scale,
        "temperature": laplace.temperature,
        "output_temperature": laplace.output_temperature,
        "narrowing": laplace.fitted.narrowing,
        "damping": laplace.damping,
        "approach": laplace.approach,
        "rank": laplace.rank,
        "subset_size": laplace.subset_size,
        "strict": laplace.strict,
        "extras": dict(extras or {}),
    }
    return save_posterior(
        folder,
        laplace.posterior,
        laplace.factors,
        config,
        reference,
        weights=_state(laplace.model),
        model_state=laplace.model.state_dict() if with_model else None,
        overwrite=overwrite,
    )


def read_extras(folder: str | Path) -> dict[str, Any]:
    """Returns the ``extras`` that were saved with a posterior; empty if there were none. The posterior itself is not read.

    Raises:
        DataError: No saved posterior is there.
    """
    return dict(MapOf(Anything()).read(read_saved_config(folder).get("extras", {}), f"{folder}: extras"))


def load(
    folder: str | Path,
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    train_loader: Iterable[Any] | None = None,
    unpack: Unpack | None = None,
) -> Laplace | TrainedPosterior:
    """Reads a saved posterior for a model with the same architecture and weights.

    Args:
        folder: A folder that `Laplace.save` wrote, or `save` of an optimiser's posterior.
        model: The network, with the weights of the fit; it is not changed.
        device: The device that the posterior goes to. None means the model's.
        train_loader: The data of the fit, which a folder does not hold. Tuning without labels, and that of every regression, passes over them
            again; without them `Laplace.tune` says that it takes another method.
        unpack: What turns a batch of these data, or of later ones, of an unusual form into (inputs, targets).

    Returns:
        A `Laplace`, or the `TrainedPosterior` of the optimiser that built it.

    Raises:
        InputError: The model has other parameters, shapes, dtypes or weights; every mismatch is named. Or the training data are a generator, or
            for a posterior that cannot be tuned.
        DataError: The folder is damaged or foreign.
    """
    check_is_network(model, "load(folder, model)", "second")
    parameters = named_parameters(model)
    if device is None:
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
    _check_parameters(parameters, read_parameters(folder), folder)
    loaded = load_posterior(folder, device=device)
    method = loaded.config.get("method")
    if not isinstance(method, str):
        raise DataError(f"{folder} does not say which method made its posterior; aftermap writes this as 'method'")
    config = (_LAPLACE if method == "laplace" else _TRAINED).read(loaded.config, f"{folder}:")
    _check_model(model, loaded, folder)
    likelihood = _likelihood(config["likelihood"], folder)
    if likelihood is None or method != "laplace":
        damping = config.get("damping", {})
        if damping and set(damping) != set(loaded.posterior.names):
            raise DataError(f"{folder}: damping does not have one entry for each parameter. {ADVICE}")
        if train_loader is not None:
            raise InputError(
                f"{folder} holds a posterior that {method} built in training, which is tuned on validation data alone: leave out train_loader="
            )
        temperature = config.get("output_temperature")  # folders of former versions have none
        return TrainedPosterior(model, loaded.posterior, loaded.factors, likelihood, method, damping, temperature)
    if config["params"] != list(loaded.posterior.names):
        raise DataError(f"{folder}: params are not the parameters of the posterior. {ADVICE}")
    try:
        laplace = _restored(model, loaded, config, likelihood, folder)
    except InputError as error:
        raise DataError(f"{folder} holds what cannot be: {error}. {ADVICE}") from error
    laplace.fitted = replace(laplace.fitted.with_data(train_loader), unpack=unpack)
    return laplace


def _likelihood(config: Mapping[str, Any] | None, folder: str | Path) -> Likelihood | None:
    try:
        return None if config is None else likelihood_from_config(config)
    except (AftermapError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(f"{folder}: likelihood cannot be made from what is saved: {error}. {ADVICE}") from error


def _restored(
    model: nn.Module, loaded: LoadedPosterior, config: Mapping[str, Any], likelihood: Likelihood, folder: str | Path
) -> Laplace:
    """Makes the approximation as it was, from its parts."""
    noise = torch.tensor(config["noise_level"], dtype=torch.float64)
    laplace = Laplace(
        model,
        likelihood,
        structure=config["structure"],
        params=config["params"],
        curvature=config["curvature"],
        prior_precision=dict(loaded.posterior.prior.precision),
        prior_mean={n: m.expand(loaded.posterior.shapes[n]) for n, m in loaded.posterior.prior.mean.items()},
        data_scale=config["data_scale"],
        temperature=config["temperature"],
        damping=config["damping"],
        approach=config["approach"],
        rank=config["rank"],
        subset_size=config.get("subset_size", 300),  # folders of former versions have none
        strict=config["strict"],
    )
    hyperparameters = Hyperparameters(
        loaded.posterior.prior,
        noise,
        config["data_scale"],
        config["temperature"],
        # Folders of the first version do not have it: outputs were divided by the temperature of the likelihood alone.
        float(config.get("output_temperature", laplace.output_temperature)),
    )
    posterior = _with_right_scale(loaded.posterior, hyperparameters, loaded.factors.curvature, folder)
    # Folders of the first version do not say whether the covariance was divided to match the effective dimension.
    return laplace.restore(loaded.factors, posterior, hyperparameters, float(config.get("narrowing", 1.0)))


def _with_right_scale(
    posterior: GaussianPosterior, hyperparameters: Hyperparameters, curvature: str, folder: str | Path
) -> GaussianPosterior:
    """Returns the posterior itself, but for empirical Fisher matrices of regressions that were saved with 1/σ² in the place of 1/σ⁴.

    Warns:
        NumericalWarning: The saved posterior was too wide or too narrow and has been mended.
    """
    scale = hyperparameters.curvature_scale(curvature)
    if curvature != "empirical" or math.isclose(float(scale), float(posterior.scale), rel_tol=1e-9):
        return posterior
    warnings.warn(
        f"the posterior in {folder} was saved by a version that scaled the empirical Fisher matrix of a regression by "
        f"{float(posterior.scale):.3g} where the noise {float(hyperparameters.noise):.3g} asks for {float(scale):.3g}. It is loaded with the "
        "right scale; tune it again, and save it, to be rid of this warning",
        NumericalWarning,
        stacklevel=3,
    )
    return hyperparameters.applied_to(posterior, curvature)


def load_laplace(folder: str | Path, model: nn.Module, *, device: torch.device | str | None = None) -> Laplace:
    """Loads a folder like `load`, where nothing but a Laplace approximation will do.

    Raises:
        DataError: Another method made the posterior, or one of the faults that `load` names.
    """
    loaded = load(folder, model, device=device)
    if not isinstance(loaded, Laplace):
        raise DataError(
            f"{folder} holds a posterior that {loaded.method} built, not a Laplace approximation; aftermap.load reads both"
        )
    return loaded


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Returns everything that shapes the outputs: parameters and buffers."""
    tensors: dict[str, Any] = dict(named_parameters(model))
    tensors.update(dict(model.named_buffers()))
    return tensors


def _check_parameters(
    parameters: Mapping[str, Tensor], saved: Mapping[str, Mapping[str, Any]], folder: str | Path
) -> None:
    """Checks names, shapes and dtypes, before anything large is read."""
    problems = []
    for name, entry in saved.items():
        shape, dtype = tuple(entry["shape"]), f"torch.{entry['dtype']}"
        if name not in parameters:
            problems.append(f"{name} {shape} is missing in the model")
        elif tuple(parameters[name].shape) != shape:
            problems.append(f"{name} is {tuple(parameters[name].shape)} in the model, {shape} in the file")
        elif described(parameters[name])["dtype"] != entry["dtype"]:
            problems.append(f"{name} is {parameters[name].dtype} in the model, {dtype} in the file")
    if problems:
        more = [f"… and {len(problems) - 20} more"] if len(problems) > 20 else []
        listed = "\n".join(f"  {p}" for p in [*problems[:20], *more])
        wrapped = not any(name in parameters for name in saved) and all(
            n.removeprefix("module.") in parameters for n in saved
        )
        advice = (
            "It was fitted around a DataParallel or DistributedDataParallel wrapper: pass torch.nn.DataParallel(model), whose weights have these names"
            if wrapped
            else "Build the model that it was fitted for"
        )
        raise InputError(f"the model does not fit the posterior in {folder}:\n{listed}\n{advice}")


def _check_model(model: nn.Module, loaded: LoadedPosterior, folder: str | Path) -> None:
    parameters = named_parameters(model)
    changed = [n for n, v in loaded.posterior.mean.items() if not torch.equal(parameters[n].detach().cpu(), v.cpu())]
    if changed or weights_hash(_state(model)) != loaded.weights_hash:
        which = (
            f"other values in {', '.join(changed[:5])}"
            if changed
            else "other values outside the posterior's parameters"
        )
        raise InputError(
            f"the model's weights are not those that {folder} was fitted around ({which}). "
            "Load the trained weights into the model first"
        )
