"""`aftermap tune`: another prior for a fitted posterior, without a new fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from aftermap.cli import options as o
from aftermap.cli.console import CHECK_FAILED, GOOD, Speaker, confirmed, guarded
from aftermap.cli.fitting import prior_in_words, self_check
from aftermap.cli.models import check_device
from aftermap.cli.sources import open_source
from aftermap.cli.store import calibrate, load_fitted, save_fitted
from aftermap.errors import InputError
from aftermap.laplace import Laplace

__all__ = ["tune"]


@guarded
def tune(
    posterior: o.Posterior,
    val: o.Validation = None,
    method: Annotated[str, typer.Option("--method", help="auto, evidence, lbfgs or validation.")] = "auto",
    prior_precision: Annotated[
        float | None, typer.Option("--prior-precision", help="Set it instead of searching for it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the result; without it the posterior is replaced.")
    ] = None,
    false_alarms: Annotated[
        float, typer.Option("--false-alarms", help="Share of usual inputs that may be flagged.")
    ] = 0.05,
    model: o.OptionalModel = None,
    weights: o.Weights = None,
    kind: o.Kind = "auto",
    samples: o.Samples = 100,
    target: o.Target = None,
    data_dir: o.DataDir = None,
    limit: o.Limit = None,
    batch_size: o.BatchSize = 256,
    seed: o.Seed = 0,
    device: o.Device = "cpu",
    force: o.Force = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> int:
    """Find the prior precision (and noise) of a fitted posterior: by the evidence, or on held-out data.

    No pass over the training data and no new decomposition: seconds.
    """
    speaker = Speaker(as_json)
    o.one_of("--method", method, ("auto", "evidence", "lbfgs", "validation"))
    if output is not None:
        confirmed(output, force=force, what="tune")
    fitted = load_fitted(posterior, model=model, weights=weights, device=check_device(device))
    laplace = fitted.predictor
    if not isinstance(laplace, Laplace):
        raise InputError(
            f"{posterior} was made by training with {laplace.method}; its prior cannot be tuned afterwards"
        )
    before = prior_in_words(laplace)
    reading = fitted.data_options(o.data_options(target=target, data_dir=data_dir, limit=limit, batch_size=batch_size))
    held = None if val is None else open_source(val, "validation", reading, what="--val")
    options = fitted.predict_options(kind, samples)
    if prior_precision is not None:
        laplace.with_prior(prior_precision)
    else:
        laplace.tune(
            None if held is None or method in ("evidence", "lbfgs") else held.batches,
            method=None if method == "auto" else method,
            kind=options["kind"],
        )
    extras = dict(fitted.extras)
    reference: dict[str, Tensor] = {}
    extras.pop("thresholds", None)  # they belonged to another posterior
    if held is not None:
        checked = self_check(laplace, held, options)
        extras["self_check"] = {"passed": not checked.collapsed, "on": "validation data", "message": checked.message}
        extras["thresholds"], reference = calibrate(
            laplace, held.batches.named("thresholds"), options, false_alarms, seed
        )
    place = output or posterior
    save_fitted(laplace, place, extras, reference, overwrite=True)
    return _say(laplace, before, place, extras, held is not None, speaker)


def _say(laplace: Laplace, before: str, place: Path, extras: dict[str, Any], checked: bool, speaker: Speaker) -> int:
    """What changed; the exit code."""
    passed = not checked or extras["self_check"]["passed"]
    speaker.line(f"{before} → {prior_in_words(laplace)}")
    if checked:
        state = "passed" if passed else "FAILED"
        said = f"self-check on validation data {state}: {extras['self_check']['message']}"
        speaker.line(said, style=None if passed else "bold red")
    else:
        speaker.line("thresholds for flagging are gone: they belong to the old prior. Add --val to choose new ones")
    speaker.line(f"saved in {place}")
    speaker.result(
        {
            "posterior": str(place),
            "prior_precision": {n: float(v.mean()) for n, v in laplace.prior_precision.items()},
            "data_scale": laplace.data_scale,
            "log_evidence": float(laplace.log_evidence()),
            "self_check": extras.get("self_check"),
            "thresholds": extras.get("thresholds"),
        }
    )
    return GOOD if passed else CHECK_FAILED
