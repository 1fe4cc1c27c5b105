"""What the cheap prediction of classes loses: `kind="margin"` beside the exact linearised predictive.

    python -m benchmarks.margin                          # the development tasks of benchmarks/quality; writes results/margin.json
    python -m benchmarks.margin --tasks digits_mlp,satellite_mlp --anew

Every network is fitted by `am.fit` with 300 validation data (or as many as the pool allows). Results of single tasks are kept, so that a run can go on.
What predictions take is given in forward passes of the network alone without gradients, for batches of several sizes: the least processor time
of interleaved repeats, with one thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import aftermap as am
from aftermap import metrics
from aftermap.evaluation import Reference
from aftermap.predictive import Prediction
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import CACHE, DATA, Prepared, load_task
from benchmarks.timing import least_processor_times

__all__ = ["main", "measure_task", "table"]

NLL, AUROC = 0.005, 0.02  # what is to be reached
SCORES = ("entropy", "mutual_information", "either")
RESULTS = Path(__file__).resolve().parent / "results" / "margin.json"
KINDS = ("linearised", "margin")
SIZES = (32, 250, 1000)  # inputs of a batch
FORWARDS = 3.0  # passes of the network alone that the cheap prediction may take, in batches of some hundred inputs
REPEATS = 7
Entry = dict[str, Any]


def _predict(laplace: am.Laplace, x: Tensor, kind: str) -> Prediction:
    """The prediction in pieces, with the same draws for every piece."""
    return Prediction.concatenate([laplace.predict(piece, kind=kind, progress=False) for piece in x.split(250)])


def _forwards(laplace: am.Laplace, inputs: Tensor) -> Entry:
    """What predictions of batches take, by size, in forward passes; and the milliseconds of these."""
    rows: Entry = {}
    for size in sorted({min(size, len(inputs)) for size in SIZES}):
        x = inputs[:size]

        def forward(x: Tensor = x) -> None:
            with torch.no_grad():
                laplace.model(x)

        functions: dict[str, Callable[[], Any]] = {"forward": forward}
        for kind in KINDS:
            functions[kind] = functools.partial(laplace.predict, x, kind=kind, progress=False)
        seconds = least_processor_times(functions, REPEATS)
        rows[str(size)] = {
            "forward_ms": round(1000 * seconds["forward"], 3),
            **{kind: round(seconds[kind] / seconds["forward"], 1) for kind in KINDS},
        }
    return rows


def _numbers(laplace: am.Laplace, prepared: Prepared, usual: Tensor, kind: str) -> Entry:
    test = _predict(laplace, prepared.test[0], kind)
    reference = Reference.from_predictions(_predict(laplace, usual, kind))
    row: Entry = {"nll": -float(test.log_prob(prepared.test[1]).double().mean())}
    for name, inputs in prepared.ood.items():
        other = _predict(laplace, inputs, kind)
        outside = torch.cat([torch.zeros(len(test)), torch.ones(len(other))]).bool()
        for score in SCORES:
            row[f"{name}/{score}"] = metrics.auroc(
                torch.cat([reference.score_of(p, score) for p in (test, other)]), outside
            )
    return row


def measure_task(name: str) -> Entry:
    """The differences of one task: margin less exact; and how many forward passes both take."""
    prepared = load_task(name, data_dir=DATA, cache=CACHE)
    held_out = prepared.validation(min(300, int(0.8 * prepared.task.data.pool)), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        laplace = am.fit(
            prepared.model, prepared.likelihood, prepared.train, held_out, verbose=False, **prepared.task.options()
        )
        usual = torch.cat([x for x, _ in held_out])
        exact, cheap = (_numbers(laplace, prepared, usual, kind) for kind in KINDS)
    areas = {k: cheap[k] - exact[k] for k in exact if "/" in k}
    return {
        "structure": laplace.structure,
        "params": str(laplace.params),
        "nll": round(cheap["nll"] - exact["nll"], 5),
        "auroc": {k: round(v, 4) for k, v in areas.items()},
        "forwards": _forwards(laplace, prepared.test[0]),
    }


def table(results: Entry) -> str:
    """One line for each task: the rise of the NLL, the worst loss of AUROC by score, and forward passes by the size of a batch."""
    lines = [
        f"{'task':20} {'ΔNLL':>8} " + " ".join(f"{s:>18}" for s in SCORES) + "  reached  forward passes: exact, margin"
    ]
    for name, row in results.items():
        worst = [min((v for k, v in row["auroc"].items() if k.endswith(f"/{s}")), default=0.0) for s in SCORES]
        reached = row["nll"] <= NLL and min(worst) >= -AUROC
        numbers = " ".join(f"{w:18.4f}" for w in worst)
        passes = "; ".join(
            f"{size} ({p['forward_ms']:.3g} ms): {p['linearised']:.1f}, {p['margin']:.1f}{'' if p['margin'] > FORWARDS else ' reached'}"
            for size, p in row["forwards"].items()
        )
        lines.append(f"{name:20} {row['nll']:8.4f} {numbers}  {'yes' if reached else 'no':7}  {passes}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the tasks that are not yet known, prints and writes the table."""
    development = [t.name for t in TASKS.values() if t.part == "development" and t.group != "regression"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(development), help="names, with commas")
    parser.add_argument("--anew", action="store_true", help="measure these tasks again, though their results are known")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: Entry = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for name in chosen.tasks.split(","):
        if chosen.anew or name not in results:
            results[name] = measure_task(name)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(table({name: results[name]}), file=sys.stderr, flush=True)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
