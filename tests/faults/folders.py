"""Damaged and hostile posterior folders: each loads as it was saved, or is refused with a clear error.

`python -m tests.faults.folders` makes thousands of them and counts what happens.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import aftermap as am
from aftermap.cli.sources import DataFormat
from aftermap.cli.store import load_fitted
from aftermap.evaluation import Reference
from aftermap.laplace import read_extras
from aftermap.posteriors.io import read_model_state, read_reference
from tests.faults.damages import BYTES, FILES, damage_json
from tests.faults.harness import Outcome, Trial, judged, main
from tests.faults.sealing import edit, reseal
from tests.laplace.problems import classes, generator, mlp, regression

__all__ = ["STRUCTURES", "TRIAL", "FolderTrial"]

LAPLACE: dict[str, dict[str, Any]] = {
    **{s: {"structure": s} for s in ("kron", "ekfac", "kfra", "diagonal", "full", "subset")},
    "hessian": {"structure": "hessian", "prior_precision": 300.0},
    "low_rank": {"structure": "low_rank", "rank": 9},
    "subnetwork": {"params": am.Subnetwork(size=6)},
}
STRUCTURES = (*LAPLACE, "regression", "VOGN", "KFAC", "command line")
GROUPS = ("damaged", "damaged", "forged", "forged", "earlier")


def _network(name: str) -> nn.Module:
    return mlp(1, 6, 1) if name == "regression" else mlp()


def _save(name: str, place: Path) -> None:
    """A folder as it is saved, with everything that can be in one."""
    reference: dict[str, Tensor] = {"entropy": torch.linspace(0, 1, 7, dtype=torch.float64)}
    kept: dict[str, Any] = {"extras": {"note": "ß", "seed": 3}, "reference": reference, "with_model": True}
    if name in ("VOGN", "KFAC"):
        model, (x, y) = mlp(), classes()[0]
        optimizer = getattr(am.optim, name)(model, n_data=60, lr=0.01, damping=0.1)
        for _ in range(3):
            optimizer.step(lambda: nn.functional.cross_entropy(model(x), y))
        optimizer.posterior("classification").save(place, **kept)
    elif name == "regression":
        am.Laplace(_network(name), "regression").fit(regression(), progress=False).tune().save(place, **kept)
    elif name == "command line":
        _save_by_command(place)
    else:
        made = am.Laplace(mlp(), "classification", **LAPLACE[name])
        made.fit(classes(), generator=generator(), progress=False).save(place, **kept)


def _save_by_command(place: Path) -> None:
    from aftermap.cli.builtin import build_network

    torch.manual_seed(0)
    model, data = build_network("mlp", [3], 4).eval(), [(x.float(), y) for x, y in classes()]
    laplace = am.Laplace(model, "classification", params="last_layer").fit(data, progress=False)
    found = Reference.from_predictions(laplace.predict(data[0][0], link="probit"), false_alarm_rate=0.1)
    extras = {
        "model": {"spec": "builtin:mlp", "options": {"shape": [3], "outputs": 4, "rescale": False}},
        "data": {"train": "toy:blobs", "columns": None, "classes": ["a", "b", "c", "d"], "shape": [3]},
        "task": "classification",
        "seed": 0,
        "predict": {"kind": "linearised", "samples": 20},
        "thresholds": found.to_dict(),
    }
    laplace.save(place, extras=extras, reference=found.to_tensors(), with_model=True)


def _load(name: str, folder: Path, model: nn.Module | None) -> tuple[dict[str, Any], Any]:
    """All that is read from a folder, and the predictor."""
    found: dict[str, Any] = {"extras": read_extras(folder)}
    if model is None:
        fitted = load_fitted(folder)
        predictor: Any = fitted.predictor
        score = fitted.score_name("auto")
        found["threshold"], found["scores"] = fitted.threshold(score), repr(fitted.scores())
        found["format"], found["options"] = repr(fitted.complete(DataFormat())), fitted.predict_options("auto", 10)
    else:
        predictor = am.load(folder, model)
    for part, tensors in (("reference", read_reference(folder)), ("model", read_model_state(folder))):
        found.update({f"{part}.{k}": v for k, v in (tensors or {}).items()})
    return found, predictor


def _compute(name: str, predictor: Any) -> dict[str, Any]:
    """All that a predictor says."""
    found: dict[str, Any] = {}
    x = regression()[0][0][:5] if name == "regression" else classes()[0][0][:5]
    x = x.to(next(predictor.model.parameters()).dtype)
    options = {} if name == "regression" else {"link": "probit"}
    prediction = predictor.predict(x, kind="linearised", **options)
    found.update(mean=prediction.mean, covariance=prediction.latent_cov, likelihood=repr(predictor.likelihood))
    found.update({f"draw.{k}": v for k, v in predictor.sample(2, generator(2)).items()})
    found.update({f"variance.{k}": v for k, v in predictor.posterior.marginal_variance().items()})
    found["determinant"] = predictor.posterior.log_det_precision()
    names = ("structure", "curvature", "damping", "approach", "rank", "subset_size", "strict", "temperature", "method")
    names += ("data_scale", "output_temperature", "n_data")
    found.update({n: getattr(predictor, n, None) for n in names})
    if isinstance(predictor, am.Laplace):
        found.update(noise=predictor.hyperparameters.noise, evidence=predictor.log_evidence())
        found.update({f"prior.{k}": v for k, v in predictor.prior_precision.items()})
        found["narrowing"] = predictor.fitted.narrowing
    else:
        found.update({f"as_prior.{k}": v for k, v in predictor.as_prior()[1].items()})
    found["loss"] = predictor.factors.loss
    return found


def _content(name: str, folder: Path, model: nn.Module | None) -> dict[str, Any]:
    found, predictor = _load(name, folder, model)
    return {**found, **_compute(name, predictor)}


def _same(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first entry that differs; empty if none does."""
    for key in {**one, **other}:
        a, b = one.get(key), other.get(key)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a, b):
                return key
        elif type(a) is not type(b) or a != b:
            return key
    return ""


class FolderTrial(Trial):
    """Damaged folders of every structure."""

    def __init__(self, seed: int, place: Path):
        super().__init__(seed, place)
        self.origins, self.models, self.contents = {}, {}, {}
        for name in STRUCTURES:
            origin = place / "origins" / name.replace(" ", "_")
            _save(name, origin)
            self.origins[name] = origin
            model = None if name == "command line" else _network(name)
            if model is not None:
                model.load_state_dict(load_file(origin / "model.safetensors"))
            self.models[name], self.contents[name] = model, _content(name, origin, model)
        again = [n for n in STRUCTURES if _same(_content(n, self.origins[n], self.models[n]), self.contents[n])]
        if again:
            raise AssertionError(
                f"the content of {again} is not the same each time, so nothing can be compared with it"
            )

    def attempt(self, number: int) -> Outcome:
        chance = Random(f"{self.seed} {number}")
        name, group = STRUCTURES[number % len(STRUCTURES)], chance.choice(GROUPS)
        folder = self.place / f"case_{number}"
        shutil.copytree(self.origins[name], folder)
        if group == "earlier":
            edit(folder, lambda c: (c.update(schema=2), c.pop("checksum")), seal=False)
        damage = self._damage(folder, group, chance)
        result, detail = self._tried(name, folder, group)
        shutil.rmtree(folder)
        return Outcome(number, group, name, damage, result, detail)

    def _tried(self, name: str, folder: Path, group: str) -> tuple[str, str]:
        try:
            found, predictor = _load(name, folder, self.models[name])
        except Exception as error:
            return judged(error, [str(folder)])
        try:
            changed = _same({**found, **_compute(name, predictor)}, self.contents[name])
        except (
            Exception
        ) as error:  # Of numbers that were forged, predictions say what is wrong with them; they know no folder.
            return judged(error, [str(folder), "finite", "0 or more"] if group == "forged" else [str(folder)])
        if not changed:
            return "identical content", ""
        return ("other content" if group == "damaged" else "as written"), changed

    def _damage(self, folder: Path, group: str, chance: Random) -> str:
        files = sorted(f for f in folder.iterdir() if f.is_file())
        kinds: dict[str, Callable[[], str]] = {
            "bytes": lambda: self._bytes(chance.choice(files), chance),
            "file": lambda: self._file(chance.choice(files), files, chance),
            "json": lambda: self._json(folder, chance),
            "tensors": lambda: self._tensors(folder, chance),
            "header": lambda: self._header(chance.choice([f for f in files if f.suffix != ".json"]), chance),
        }
        mixes = {
            "damaged": ["bytes"] * 4 + ["file"] * 2 + ["json"] * 3,
            "forged": ["json"] * 6 + ["tensors"] * 2 + ["header"],
        }
        damage = kinds[chance.choice(mixes.get(group, ["json"]))]()
        if group == "forged":
            # What is no JSON any more can have no checksum.
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                reseal(folder)
        return damage

    def _bytes(self, file: Path, chance: Random) -> str:
        name, data = chance.choice(list(BYTES)), bytearray(file.read_bytes())
        BYTES[name](data, chance)
        file.write_bytes(bytes(data))
        return name

    def _file(self, file: Path, files: list[Path], chance: Random) -> str:
        name = chance.choice(list(FILES))
        foreign = [o / file.name for o in self.origins.values() if (o / file.name).read_bytes() != file.read_bytes()]
        FILES[name](file, [*(f for f in files if f != file), *foreign], chance)
        return name

    def _json(self, folder: Path, chance: Random) -> str:
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        name, written = damage_json(config, chance)
        file.write_text(written(json.dumps(config, ensure_ascii=False)), encoding="utf-8", errors="replace")
        return name

    def _tensors(self, folder: Path, chance: Random) -> str:
        file = chance.choice(sorted(folder.glob("*.safetensors")))
        tensors = {k: v.clone() for k, v in load_file(file).items()}
        key = chance.choice(sorted(tensors))
        value = tensors[key]
        changes: dict[str, Callable[[], Tensor]] = {
            "a tensor with NaN": lambda: value.double().fill_(float("nan")).to(value.dtype),
            "a tensor with infinity": lambda: value.double().fill_(float("inf")).to(value.dtype),
            "a negative tensor": lambda: -value if value.is_floating_point() else value,
            "a tensor of zeros": lambda: torch.zeros_like(value),
            "a huge tensor": lambda: value * 1e30 if value.is_floating_point() else value + 10**12,
            "a tensor of another type": lambda: value.to(chance.choice([torch.float16, torch.int32, torch.bool])),
            "a tensor of another shape": lambda: value[None].repeat(2, *[1] * value.dim()),
            "a flat tensor": lambda: value.reshape(-1)[:0],
        }
        name = chance.choice(list(changes))
        tensors[key] = changes[name]().contiguous()
        save_file(tensors, file)
        if chance.random() < 0.7:  # The forger says so in config.json, too.
            described = {"shape": list(tensors[key].shape), "dtype": str(tensors[key].dtype).removeprefix("torch.")}
            for table in ("tensors", "reference"):
                edit(folder, lambda c, t=table: c[t].get(key, {}).update(described))
        return name

    def _header(self, file: Path, chance: Random) -> str:
        data = bytearray(file.read_bytes())
        length = int.from_bytes(data[:8], "little")
        if chance.random() < 0.3:
            data[:8] = chance.choice([0, 1, length + 8, 2**40, 2**64 - 1]).to_bytes(8, "little")
        elif chance.random() < 0.5:
            part = data[8 : 8 + length]
            BYTES[chance.choice(["one bit flipped", "one byte set", "a part of zeros"])](part, chance)
            data[8 : 8 + length] = part
        else:
            header = json.loads(data[8 : 8 + length])
            written = damage_json(header, chance)[1](json.dumps(header)).encode("utf-8", "replace")
            data = bytearray(len(written).to_bytes(8, "little") + written + data[8 + length :])
        file.write_bytes(bytes(data))
        return "a damaged header"


TRIAL = FolderTrial

if __name__ == "__main__":
    sys.exit(main("tests.faults.folders", 3000, "benchmarks/results/faults_folders.json"))
