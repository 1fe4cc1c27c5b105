"""A Laplace approximation in a folder, and back: everything but the network itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.errors import DataError, InputError, UnsupportedError
from aftermap.laplace.laplace import Laplace
from aftermap.laplace.noise import Observation
from aftermap.likelihoods import likelihood_from_config
from aftermap.params import named_parameters, weights_hash
from aftermap.posteriors import GaussianPosterior
from aftermap.posteriors.io import LoadedPosterior, load_posterior, save_posterior

__all__ = ["load", "save_laplace"]


def save_laplace(laplace: Laplace, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Writes a fitted Laplace approximation: json and safetensors in a folder, whole or not at all.

    Args:
        laplace: fitted.
        folder: where.
        overwrite: replace what is there; on a failure it stays.
    """
    if not isinstance(laplace.posterior, GaussianPosterior):
        raise UnsupportedError(
            f"a posterior with structure={laplace.structure!r} lives on its data and cannot be saved; "
            "use structure='low_rank', 'full' or 'kron', or draw weights with la.ensemble(n) and save those"
        )
    config = {
        "method": "laplace",
        "likelihood": laplace.observation.base.config(),
        "noise_level": float(laplace.observation.level),
        "structure": laplace.structure,
        "params": list(laplace.posterior.names),
        "curvature": laplace.curvature,
        "data_scale": laplace.data_scale,
        "temperature": laplace.temperature,
        "damping": laplace.damping,
        "approach": laplace.approach,
        "rank": laplace.rank,
        "strict": laplace.strict,
    }
    state = _state(laplace.model)
    return save_posterior(folder, laplace.posterior, laplace.factors, config, weights=state, overwrite=overwrite)


def load(folder: str | Path, model: nn.Module, *, device: torch.device | str | None = None) -> Laplace:
    """Reads a saved approximation for a model with the same architecture and weights.

    Args:
        folder: written by `Laplace.save`.
        model: the network, with the weights of the fit; it is not changed.
        device: where the posterior goes; None: the model's.

    Raises:
        InputError: the model has other parameters, shapes, dtypes or weights; every mismatch is named.
        DataError: the folder is damaged or foreign.
    """
    parameters = named_parameters(model)
    if device is None:
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
    loaded = load_posterior(folder, device=device)
    config = loaded.config
    if config.get("method") != "laplace":
        raise DataError(
            f"{folder} holds a posterior of method {config.get('method')!r}, not of a Laplace approximation"
        )
    _check_model(model, loaded, folder)
    laplace = Laplace(
        model,
        likelihood_from_config(config["likelihood"]),
        structure=config["structure"],
        params=config["params"],
        curvature=config["curvature"],
        prior_mean={n: m.expand(loaded.posterior.shapes[n]) for n, m in loaded.posterior.prior.mean.items()},
        data_scale=config["data_scale"],
        temperature=config["temperature"],
        damping=config["damping"],
        approach=config["approach"],
        rank=config["rank"],
        strict=config["strict"],
    )
    level = torch.tensor(config["noise_level"], dtype=torch.float64)
    base = laplace.observation.base
    laplace.restore(Observation(base, level, laplace.observation.tunable), loaded.factors, loaded.posterior)
    return laplace


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Everything that shapes the outputs: parameters and buffers."""
    found: dict[str, Any] = dict(named_parameters(model))
    found.update(dict(model.named_buffers()))
    return found


def _check_model(model: nn.Module, loaded: LoadedPosterior, folder: str | Path) -> None:
    own = named_parameters(model)
    problems = []
    for name, value in loaded.posterior.mean.items():
        if name not in own:
            problems.append(f"{name} {tuple(value.shape)} is missing in the model")
        elif own[name].shape != value.shape:
            problems.append(f"{name} is {tuple(own[name].shape)} in the model, {tuple(value.shape)} in the file")
        elif own[name].dtype != value.dtype:
            problems.append(f"{name} is {own[name].dtype} in the model, {value.dtype} in the file")
    if problems:
        listed = "\n".join(f"  {p}" for p in problems)
        raise InputError(
            f"the model does not fit the posterior in {folder}:\n{listed}\nBuild the model that it was fitted for"
        )
    changed = [n for n, v in loaded.posterior.mean.items() if not torch.equal(own[n].detach().cpu(), v.cpu())]
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
