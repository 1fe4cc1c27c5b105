"""`python -m benchmarks.run`: takes the measurements and writes benchmarks/results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import optim, predictive
from benchmarks.curvature import measure, scaling, table
from benchmarks.methods import METHODS
from benchmarks.models import MODELS
from benchmarks.plots import plot_ratios, plot_scaling
from benchmarks.timing import machine, source

__all__ = ["main"]

RESULTS = Path(__file__).resolve().parent / "results"
BENCHMARKS = ("curvature", "scaling", "predictive", "optim")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--only", choices=BENCHMARKS, help="one benchmark instead of all")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--repeats", type=int, default=None, help="interleaved rounds (default 7)")
    parser.add_argument("--quick", action="store_true", help="two rounds, no memory: to see that everything runs")
    parser.add_argument(
        "--no-peers", action="store_true", help="curvature without other libraries: a fraction of the time"
    )
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (default: its own choice)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for JSON and pictures")
    found = parser.parse_args(arguments)
    found.models = found.models.split(",")
    unknown = [m for m in found.models if m not in MODELS]
    if unknown:
        parser.error(f"unknown models {', '.join(unknown)}; there are {', '.join(MODELS)}")
    found.repeats = found.repeats or (2 if found.quick else 7)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what was asked for; numbers of networks that were not asked for are kept."""
    asked, before = _parse(arguments), source()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    asked.output.mkdir(parents=True, exist_ok=True)
    path = asked.output / "curvature.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept = results.get("models", {})
    if asked.only in (None, "curvature"):
        for name in asked.models:
            ours = [key for key, method in METHODS.items() if method.library == "aftermap"]
            methods = ours if asked.no_peers else None
            memory = not (asked.quick or asked.no_memory)
            kept[name] = measure(name, repeats=asked.repeats, memory=memory, methods=methods)
            # Memory is taken in fresh processes, which import the code as it is by then.
            kept[name]["machine"] = machine() | {"repeats": asked.repeats, "source": before}
            if source() != before:
                kept[name]["warning"] = "the source changed during the run: time and memory may be of different code"
                print(f"{name}: {kept[name]['warning']}")
            print(table({"models": {name: kept[name]}}), flush=True)
            results["models"] = {m: kept[m] for m in MODELS if m in kept}
            path.write_text(json.dumps(results, indent=1) + "\n")
        plot_ratios(results, asked.output / "curvature.png")
    if asked.only in (None, "scaling"):
        results["scaling"] = scaling(repeats=asked.repeats, quick=asked.quick)
        path.write_text(json.dumps(results, indent=1) + "\n")
        plot_scaling(results, asked.output / "scaling.png")
        print(json.dumps(results["scaling"]))
    if asked.only in (None, "predictive"):
        found = predictive.measure(repeats=asked.repeats, memory=not (asked.quick or asked.no_memory))
        found["machine"] = machine() | {"repeats": asked.repeats, "source": before}
        (asked.output / "predictive.json").write_text(json.dumps(found, indent=1) + "\n")
        print(predictive.table(found))
    if asked.only in (None, "optim"):
        optim.run(
            [m for m in asked.models if m in optim.MODELS],
            2 * asked.repeats,
            threads=optim.thread_counts(asked.threads),
            slow=not asked.quick,
            peaks=not (asked.quick or asked.no_memory),
            output=asked.output,
        )


if __name__ == "__main__":
    main()
