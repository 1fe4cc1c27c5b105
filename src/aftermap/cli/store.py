"""A posterior folder of the command line: how it is checked, written with all that prediction needs, and read."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import iterate
from aftermap.cli.console import CHECK_FAILED, GOOD, Reporter
from aftermap.cli.models import make_model
from aftermap.cli.sources import Batches, DataFormat, Source
from aftermap.cli.trust import check_factory, memory_file, remember
from aftermap.distributed import rank, world_size
from aftermap.errors import AftermapError, DataError, InputError
from aftermap.evaluation import Reference, Threshold, default_score
from aftermap.evaluation.predictor import predict_all
from aftermap.evaluation.reference import FLAG_SCORES
from aftermap.evaluation.selective import EITHER
from aftermap.laplace import CavityCheck, Laplace, SelfCheck, check_predictive, load
from aftermap.models import check_device as device_of_model
from aftermap.optim import TrainedPosterior
from aftermap.posteriors.io import read_model_state, read_reference, read_saved_config
from aftermap.posteriors.records import ADVICE, Anything, Flag, ListOf, MapOf, Number, OrNone, Record, Text, Whole
from aftermap.predictive.prediction import SCORES

__all__ = ["Fitted", "calibrate", "describe_fit", "finish", "load_fitted", "save_fitted", "self_check"]


# What the commands read of what they saved; entries of other callers are left alone.
_WORDS = ListOf(Text())
_THRESHOLD = Record(
    {
        "value": OrNone(Number()),
        "score": Text(FLAG_SCORES),
        "false_alarm_rate": Number(above=0, most=1),
        "confidence": OrNone(Number(above=0, most=1)),
        "n_data": Whole(1),
    }
)
_MODEL = Record(
    {},
    {
        "spec": Text(pattern=r"[^\x00-\x1f\x7f]{1,1000}", example="one line, such as builtin:cnn or mypkg.nets:build"),
        "options": OrNone(Record({}, {"shape": ListOf(Whole(1)), "outputs": Whole(1), "rescale": Flag()}, open=True)),
    },
    open=True,
)
_DATA = Record(
    {},
    {
        "train": OrNone(Text()),
        "target": OrNone(Text()),
        "columns": OrNone(_WORDS),
        "classes": OrNone(_WORDS),
        "shape": OrNone(ListOf(Whole())),
        "folder": OrNone(Text()),
        "image_size": OrNone(ListOf(Whole(1), length=2)),
        "channels": OrNone(Whole(1)),
    },
    open=True,
)
_EXTRAS = Record(
    {},
    {
        "model": _MODEL,
        "data": _DATA,
        "task": Text(),
        "seed": Whole(-(2**63), 2**64 - 1),
        "thresholds": OrNone(MapOf(_THRESHOLD)),
        "predict": OrNone(Record({}, {"kind": Text(), "samples": Whole(1)}, open=True)),
        "self_check": OrNone(MapOf(Anything())),
        "tuning": OrNone(Text()),
    },
    open=True,
)


@dataclass(frozen=True)
class Fitted:
    """What a folder holds, ready to predict.

    Attributes:
        predictor: A `Laplace`, or a `TrainedPosterior`.
        model: The network.
        extras: All that the command line saves with a posterior: model, data, task, thresholds and checks.
        reference: The scores on validation data, as `Reference.to_tensors` gives them; older folders hold 201 quantiles.
    """

    predictor: Laplace | TrainedPosterior
    model: nn.Module
    extras: dict[str, Any]
    reference: dict[str, Tensor]

    def threshold(self, score: str) -> Threshold | None:
        """Returns the threshold of a score, if one was chosen."""
        threshold = self.extras.get("thresholds", {}).get(score)
        return None if threshold is None else Threshold.from_dict(threshold)

    def scores(self, score: str = "auto") -> Reference | None:
        """Returns what new inputs are compared with, if the folder holds it; by default they are flagged by the given score."""
        if "positions" not in self.reference or not self.extras.get("thresholds"):
            return None
        reference = Reference.from_saved(self.reference, self.extras["thresholds"])
        return reference if score == "auto" else reference.by(score)

    def score_name(self, score: str) -> str:
        """Returns the score by which inputs are flagged, where "auto" is what suits the folder.

        Raises:
            InputError: The task has no such score, or it needs a threshold that the folder does not hold.
        """
        kind, known = self.predictor.likelihood.kind, self.extras.get("thresholds") or {}
        if score == "auto":
            if not known:
                return {"counts": "variance", "custom": "variance", "regression": "mutual_information"}.get(
                    kind, "entropy"
                )
            return default_score({s: Threshold.from_dict(t) for s, t in known.items()})
        defined = {"counts": ("variance",), "custom": ("variance",), "regression": SCORES[:3]}.get(kind, FLAG_SCORES)
        if score not in defined:
            raise InputError(f"--score {score} is not defined for the task {kind}; allowed are {', '.join(defined)}")
        if score == EITHER and EITHER not in known:
            raise InputError(
                "--score either compares inputs with validation data, and this folder holds no scores of any, or those of an "
                "older version. Add them with `aftermap tune FOLDER --val DATA`, or take --score entropy"
            )
        return score

    def promise_lost(self, options: Mapping[str, Any]) -> str | None:
        """Returns a warning if predictions are made in another way than those by which the thresholds were chosen."""
        chosen = (self.extras.get("predict") or {}).get("kind")
        if not self.extras.get("thresholds") or chosen in (None, options["kind"]):
            return None
        return f"the thresholds were chosen with --kind {chosen}; with --kind {options['kind']} the rate of false alarms may be another"

    def predict_options(self, kind: str, samples: int) -> dict[str, Any]:
        """Returns the options of `predict`, where the kind "auto" is what suits the posterior."""
        method = None if isinstance(self.predictor, Laplace) else self.predictor.method
        # Only these have tried out draws of the weights in training; around other weights the network is as good as its linear model.
        suitable = "sampling" if method in ("VOGN", "IVON", "NoisyKFAC") else "linearised"
        return {"kind": suitable if kind == "auto" else kind, "samples": samples}

    def complete(self, data_format: DataFormat) -> DataFormat:
        """Returns how data are read, filled up with what the training data were like."""
        data = self.extras.get("data", {})
        columns, classes, size = (
            None if data.get(k) is None else tuple(data[k]) for k in ("columns", "classes", "image_size")
        )
        return replace(
            data_format,
            target=data_format.target or data.get("target"),
            columns=columns,
            classes=classes,
            folder=data_format.folder or data.get("folder"),
            image_size=data_format.image_size or size,
            channels=data_format.channels or data.get("channels"),
            task=self.extras.get("task", data_format.task) if data_format.task == "auto" else data_format.task,
        )


def calibrate(
    predictor: Laplace | TrainedPosterior, batches: Batches, options: Mapping[str, Any], rate: float, seed: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the thresholds of every score as plain values, and the scores on held-out data as tensors (see `Reference`)."""
    with_generator = {**options, "generator": torch.Generator().manual_seed(seed)}
    prediction = predict_all(predictor, batches, options=with_generator, need_targets=False).prediction
    reference = Reference.from_predictions(prediction, false_alarm_rate=rate)
    return reference.to_dict(), reference.to_tensors()


def self_check(
    predictor: Laplace | TrainedPosterior, validation: Source | None, options: Mapping[str, Any]
) -> SelfCheck | CavityCheck | None:
    """Compares the network with the Bayesian predictive: on at most 1,000 held-out examples, or as far as tuning could judge without them."""
    if validation is None:
        return getattr(getattr(predictor, "tuning", None), "check", None)
    check = getattr(getattr(predictor, "report", None), "check", None)
    if isinstance(check, SelfCheck) and dict(options) == {"kind": "linearised", "samples": 100}:
        return check  # `aftermap.fit` has compared the same predictive on the same data
    device, dtype = device_of_model(predictor.model)
    batches = iterate(validation.batches.named(""), device=device, dtype=dtype)
    known = validation.batches.n_examples() is not None
    return check_predictive(predictor, batches, total=len(validation.batches) if known else None, **options)


def finish(
    fitted: Fitted,
    folder: Path,
    *,
    validation: Source | None,
    options: Mapping[str, Any],
    false_alarms: float = 0.05,
    seed: int,
    overwrite: bool,
    reporter: Reporter,
) -> tuple[int, dict[str, Any]]:
    """Checks a posterior, chooses its thresholds, saves it and says so: the common end of fit, tune and train.

    Args:
        fitted: The posterior with its network.
        folder: Where it is saved.
        validation: Held-out data, on which the posterior is checked and its thresholds are chosen.
        options: The options of `predict`.
        false_alarms: The share of usual inputs that may be flagged.
        seed: The seed of the predictions.
        overwrite: Whether the folder may be replaced.
        reporter: What says the results.

    Returns:
        The exit code, and what every one of these commands tells machines.
    """
    predictor = fitted.predictor
    # Check, thresholds and words that an old folder holds belong to another prior.
    old = {k: v for k, v in fitted.extras.items() if k not in ("self_check", "thresholds", "tuning")}
    extras: dict[str, Any] = {**old, "predict": dict(options), "processes": world_size()}
    tuning = getattr(predictor, "tuning", None)
    if tuning is not None:
        extras["tuning"] = str(tuning)
    reference: dict[str, Tensor] = {}
    code = GOOD
    check, data = (
        self_check(predictor, validation, options),
        "training data" if validation is None else "validation data",
    )
    if check is not None:
        extras["self_check"] = {"passed": check.passed, "on": data, "message": check.message}
        code = GOOD if check.passed else CHECK_FAILED
        style = "bold red" if code else "yellow" if getattr(check, "adds_nothing", False) else None
        reporter.line(f"self-check on {data} {check.state}: {check.message}", style=style)
    else:
        reporter.line("no self-check: there are no held-out data to compare with the network on; add --val")
    if validation is not None:
        batches = validation.batches.named("thresholds")
        extras["thresholds"], reference = calibrate(predictor, batches, options, false_alarms, seed)
    checked = replace(fitted, extras=extras, reference=reference)
    threshold = checked.threshold(checked.score_name("auto"))
    reporter.line(_when_flagged(threshold, None if validation is None else validation.name))
    if rank() == 0:
        save_fitted(predictor, folder, extras, reference, overwrite=overwrite)
    reporter.line(f"saved in {folder}; next: aftermap report {shlex.quote(str(folder))} --test DATA")
    return code, {"posterior": str(folder), **{k: extras.get(k) for k in ("self_check", "thresholds")}}


def _when_flagged(threshold: Threshold | None, data: str | None) -> str:
    """Returns which inputs will be flagged, and how many false alarms that gives."""
    if threshold is None or data is None:
        return "no threshold for flagging: add --val, held-out data to choose it on"
    rate, n = f"{100 * threshold.false_alarm_rate:g} %", f"{threshold.n_data:,}"
    if threshold.value == float("inf"):
        return f"nothing will be flagged: the {n} of {data} are too few to promise {rate} false alarms"
    return f"an input is flagged if {threshold.describe()}: {rate} false alarms on data like the {n} of {data}"


def save_fitted(
    predictor: Laplace | TrainedPosterior,
    folder: Path,
    extras: Mapping[str, Any],
    reference: Mapping[str, Tensor] | None,
    *,
    overwrite: bool,
) -> Path:
    """Writes everything that prediction needs, whole or not at all, and remembers that the user wrote it."""
    tensors = dict(reference) if reference else None
    saved = predictor.save(folder, overwrite=overwrite, extras=extras, reference=tensors, with_model=True)
    try:
        remember(str(extras["model"]["spec"]), saved)
    except OSError as error:
        warnings.warn(
            f"{memory_file()} cannot be written ({error.strerror or error}), so that later commands will ask for --model or "
            f"--trust-code before they build the network of {folder}",
            stacklevel=2,
        )
    return saved


def load_fitted(
    folder: Path,
    *,
    model: str | None = None,
    weights: Path | None = None,
    device: torch.device | None = None,
    trust_code: bool = False,
) -> Fitted:
    """Reads a folder and builds its network.

    Args:
        folder: A folder that fit or train, or `Laplace.save`, has written.
        model: Another way to build the network than the one that was saved.
        weights: Another place of its weights.
        device: Where everything goes.
        trust_code: Whether the factory that the folder names may run although nobody else vouches for it.

    Raises:
        DataError: There is no posterior, or a damaged one.
        InputError: The network cannot be built, does not fit, or is built by code that the user has not allowed.
    """
    config = read_saved_config(folder)
    extras = _EXTRAS.read(config.get("extras", {}), f"{folder}: extras")
    model_config = extras.get("model", {})
    spec = model or model_config.get("spec")
    if spec is None:
        raise InputError(f"{folder} does not say how its network is built; add --model and --weights")
    if model is None and not trust_code:
        check_factory(spec, folder)
    extras["model"] = {**model_config, "spec": spec}
    state = weights if weights is not None else read_model_state(folder)
    if state is None:
        raise InputError(f"{folder} does not hold the network's weights; add --weights")
    try:
        options, seed = model_config.get("options"), extras.get("seed", 0)
        network = make_model(spec, options=options, weights=state, device=device, seed=seed)
    except InputError as error:
        raise InputError(f"the network of {folder} cannot be built: {error}") from error
    predictor = load(folder, network, device=device)
    if isinstance(predictor, TrainedPosterior) and config.get("likelihood") is None:
        raise DataError(f"{folder} does not say its likelihood")
    return Fitted(predictor, network, extras, _checked_reference(folder, extras))


def _checked_reference(folder: Path, extras: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the scores on validation data, which `Fitted.scores` can read."""
    reference = read_reference(folder) or {}
    thresholds = extras.get("thresholds") or {}
    wrong = [n for n, v in thresholds.items() if v["score"] != n]
    if wrong:
        raise DataError(f"{folder}: extras.thresholds.{wrong[0]} is that of another score. {ADVICE}")
    if "positions" in reference and thresholds:
        try:
            Reference.from_saved(reference, thresholds)
        except (AftermapError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"{folder}: reference.safetensors does not fit its thresholds: {error}. {ADVICE}"
            ) from error
    return reference


def describe_fit(
    model_config: Mapping[str, Any], source: Source, data_format: DataFormat, task: str, seed: int
) -> dict[str, Any]:
    """Returns what later commands must know about the network and its training data."""
    examples = source.examples
    return {
        "model": dict(model_config),
        "data": {
            "train": source.spec,
            "target": data_format.target,
            "columns": None if examples is None or examples.columns is None else list(examples.columns),
            "classes": None if examples is None or examples.classes is None else list(examples.classes),
            "shape": None if examples is None else list(examples.inputs.shape[1:]),
            "folder": data_format.folder,
            "image_size": None if data_format.image_size is None else list(data_format.image_size),
            "channels": data_format.channels,
        },
        "task": task,
        "seed": seed,
    }
