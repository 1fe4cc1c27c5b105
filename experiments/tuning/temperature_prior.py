"""Thirty labels: can the rule without labels tell the rule with labels where the temperature lies?

    python -m experiments.tuning.temperature_prior --data-dir DATA [--tasks digits_mlp,satellite_mlp] [--seeds 0,1]

With few labels nearly all of the loss is the temperature, whose prior N(.2, .5²) of log T is the same for every network. The posterior that is found
without labels is an estimate of the calibrated predictive, too: here the prior is centred on the temperature whose softmax is nearest to it on the
validation inputs, with the deviation .35. Beside it: the deviation .5, and a predictive that is averaged over the posterior of T instead of one T.

Written down before the first run: a variant is taken if, over these development networks, it lowers the mean of d with 30 labels by at least
3 thousandths of a nat, raises it on no task by more than 3, and does not raise the mean with 100 labels by more than 1. Only
development tasks are looked at. Writes temperature_prior.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import aftermap as am
from aftermap.laplace import ValidationResult, validation
from aftermap.laplace.golden import golden_section
from aftermap.likelihoods import at_temperature, parse_likelihood
from aftermap.predictive import gaussian_prediction
from benchmarks.quality.kept import KeptOutputs
from benchmarks.quality.measure import hindsight
from benchmarks.quality.training import CACHE, DATA, Batches, Prepared, load_task

HERE = Path(__file__).resolve().parent
TASKS = ("banana_logit", "breast_cancer_logit", "digits_mlp", "satellite_mlp", "satellite1k_bn", "mnist2k_mlp")
SIZES = (30, 100)
RESPLITS = 10


def outputs_of(task: Prepared, x: Tensor) -> Tensor:
    with torch.no_grad():
        return task.model(x)


def believed_temperature(la: am.Laplace, task: Prepared, x: Tensor) -> float:
    """The logarithm of the temperature whose probabilities are nearest to those of the posterior that was found without labels."""
    p, f = la.predict(x).mean.double(), outputs_of(task, x).double()

    def loss(log_t: float) -> float:
        z = f / math.exp(log_t)
        if task.likelihood == "binary":
            return float(torch.nn.functional.binary_cross_entropy_with_logits(z, p))
        return float(-(p * torch.log_softmax(z, -1)).sum(-1).mean())

    return golden_section(loss, math.log(0.1), math.log(10.0), 24)


def nll_at(kept: KeptOutputs, found: ValidationResult, task: Prepared) -> float:
    x, y = task.test
    return -float(kept.predict(x, found).log_prob(y).double().mean())


def averaged_nll(kept: KeptOutputs, found: ValidationResult, task: Prepared, data: Batches) -> float:
    """The same point with its temperature spread as the posterior of the temperature is."""
    x, y = task.test
    f, labels = outputs_of(task, torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])
    likelihood: Any = parse_likelihood(task.likelihood)
    log_t = torch.tensor(validation._TEMPERATURES).log()
    fits = torch.stack([-likelihood.nll(f / t.exp(), labels).double().sum() for t in log_t])
    prior = -0.5 * ((log_t - validation._LOG_TEMPERATURE) / validation._LOG_DEVIATION).square()
    belief = torch.softmax(fits + prior, 0)
    mean, covariances = kept.outputs(x)
    cov = covariances[:, validation.RATIOS.index(found.ratio)] / found.data_scale
    total = torch.zeros(len(x), mean.shape[-1], dtype=torch.float64)
    for share, t in zip(belief, log_t.exp(), strict=True):
        if share > 1e-4:
            # Width and ratio stay as they are in the logits over T.
            factor = float(t) / found.temperature
            warm = at_temperature(kept.laplace.base_likelihood, found.output_temperature * factor)
            total += share * gaussian_prediction(warm, mean, cov * factor**2).mean.double()
    p = total / belief[belief > 1e-4].sum()
    if task.likelihood == "binary":
        one = y.reshape(p.shape).double()
        return -float((one * p.log() + (1 - one) * (1 - p).log()).mean())
    return -float(p.gather(1, y[:, None]).log().mean())


def measure(name: str, seed: int, data_dir: Path, cache: Path) -> dict[str, Any]:
    task = load_task(name, seed, data_dir=data_dir, cache=cache)
    unlabelled = am.fit(task.model, task.likelihood, task.train, None, verbose=False, **task.task.options())
    fitted = am.fit(
        task.model, task.likelihood, task.train, task.validation(100, 0), verbose=False, **task.task.options()
    )
    kept, best = KeptOutputs(fitted), hindsight(task)
    found: dict[str, Any] = {"curvature": unlabelled.tuning.curvature}
    found["possible"] = (
        -float(fitted.predictor.map_prediction(task.test[0]).log_prob(task.test[1]).double().mean()) - best
    )
    found["hindsight log T"] = _hindsight_temperature(task)
    centres = []
    for n in SIZES:
        rows: dict[str, list[float]] = {}
        for split in range(RESPLITS):
            data = task.validation(n, split)
            centre = believed_temperature(unlabelled, task, torch.cat([x for x, _ in data]))
            centres.append(centre)
            for rule, where, deviation in (
                ("the rule", 0.2, 0.5),
                ("centred, .35", centre, 0.35),
                ("centred, .5", centre, 0.5),
            ):
                with (
                    patch.object(validation, "_LOG_TEMPERATURE", where),
                    patch.object(validation, "_LOG_DEVIATION", deviation),
                ):
                    point = kept.tune(data)
                    rows.setdefault(rule, []).append(nll_at(kept, point, task) - best)
                    if rule == "the rule":
                        averaged = averaged_nll(kept, point, task, data)
                        rows.setdefault("averaged over T", []).append(averaged - best)
        found[str(n)] = {rule: 1000 * statistics.fmean(values) for rule, values in rows.items()}
    found["believed log T"] = statistics.fmean(centres)
    return found


def _hindsight_temperature(task: Prepared) -> float:
    x, y = task.test
    f, likelihood = outputs_of(task, x), parse_likelihood(task.likelihood)
    return golden_section(lambda s: float(likelihood.nll(f / math.exp(s), y).double().mean()), -4.0, 4.0, 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=DATA)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument(
        "--output", type=Path, default=HERE, help="the folder for temperature_prior.json, to which results are added"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = options.output / "temperature_prior.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for name in options.tasks.split(","):
        for seed in map(int, options.seeds.split(",")):
            results[f"{name}/{seed}"] = measure(name, seed, options.data_dir, options.cache)
            print(name, seed, json.dumps(results[f"{name}/{seed}"]), flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(_rounded(results), indent=1) + "\n", encoding="utf-8")
    for n in map(str, SIZES):
        for rule in next(iter(results.values()))[n]:
            values = [row[n][rule] for row in results.values()]
            over = [row[n][rule] - row[n]["the rule"] for row in results.values()]
            print(f"{n:>4} labels  {rule:20} d {statistics.fmean(values):+.1f}, at most {max(over):+.1f} over the rule")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
