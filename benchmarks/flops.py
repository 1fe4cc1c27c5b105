"""What the exact covariance of all outputs costs beside its multiplications, both in forward passes.

    python -m benchmarks.flops                        # four networks; writes results/flops.json
    python -m benchmarks.flops --networks lenet,mlp   # these anew, the others as they were

The count is that of a Kronecker posterior over all layers with weights, for one input and C outputs. With T positions, i inputs (with the
bias) and o outputs of a layer, each of its g groups takes

    forward     T i o,
    backward    C T i o, but for the first layer,
    products    C T i o where T > 1: the gradients of an example,
    rotations   of the outer side C o² min(T, i), of the inner side i² min(T, C o); without positions C o² and i²,
    contraction C² i o where T > 1; without positions i o + C² o.

An embedding has no forward pass and no inner rotation, and only its T tokens count. Activations, norms and attention itself are left out of both. Times are
of the processor, with one thread, at the number of inputs that `predict` takes at a time, which is larger for the cheap kind; the forward pass is that of the network alone without gradients.
Of networks that are made of blocks the predictions of their last block are timed too, which is what `am.fit` makes uncertain there by default.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import aftermap as am
from aftermap.batches import unpack_inputs
from aftermap.curvature.passes.plan import find_layers
from aftermap.curvature.passes.record import record_calls
from aftermap.models import only_require_grad
from aftermap.predictive.linearised import latent_gaussians
from benchmarks.models import make
from benchmarks.timing import least_processor_times, machine

__all__ = ["NETWORKS", "count", "main", "measure", "table"]

NETWORKS = ("mlp", "lenet", "resnet20", "transformer")
BLOCKS = ("resnet20", "transformer")  # networks that are made of blocks
REACH = 1.5  # times the count
RESULTS = Path(__file__).resolve().parent / "results" / "flops.json"
Entry = dict[str, Any]


def count(model: torch.nn.Module, x: torch.Tensor) -> dict[str, float]:
    """The multiplications for one input, by kind, in forward passes."""
    names = [n for n, p in model.named_parameters() if p.is_floating_point()]
    plan = find_layers(model, names)
    with only_require_grad(model, names), record_calls(plan) as calls:
        outputs = model(x[:1]).shape[-1]
    work = dict.fromkeys(("forward", "backward", "products", "rotations", "contraction"), 0.0)
    is_first = True
    for call in calls:
        layer = plan.layers[call.layer]
        if not layer.rule.matrix:
            continue
        o, i, g = layer.layout.out, layer.layout.in_, layer.layout.groups
        t = math.prod(call.out_shape) // (o * g)
        one_hot = layer.rule.one_hot
        work["forward"] += 0 if one_hot else g * t * i * o
        work["backward"] += 0 if one_hot or is_first else g * outputs * t * i * o
        work["products"] += g * outputs * t * i * o if t > 1 and not one_hot else 0
        if not one_hot:
            work["rotations"] += g * i**2 * (min(t, outputs * o) if t > 1 else 1)
        work["rotations"] += g * outputs * o**2 * (min(t, i) if t > 1 else 1)
        features = t if one_hot else i
        work["contraction"] += g * (outputs**2 * o * features if t > 1 else i * o + outputs**2 * o)
        is_first = False
    return {kind: value / work["forward"] for kind, value in work.items()}


def measure(name: str, repeats: int = 5) -> Entry:
    """One network: the count, and the covariances and predictions that were timed."""
    model, data = make(name, size=1024)
    x = data[0][0]
    data_of_fit = (
        256 if name in ("mlp", "lenet") else 16
    )  # fits of the others take long, and only the margin depends on it
    fit = [(x[:data_of_fit], data[0][1][:data_of_fit])]

    def fitted(params: str) -> am.Laplace:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return am.Laplace(model, "classification", curvature="rademacher", params=params).fit(
                fit, generator=torch.Generator().manual_seed(0), progress=False
            )

    laplace = fitted("all")
    inputs = unpack_inputs(x, torch.float32)
    size, size_of_margin = (laplace.predictor._piece(inputs, kind) for kind in ("linearised", "margin"))
    x, more = x[:size], x[:size_of_margin]
    batch = unpack_inputs(x, torch.float32)
    plan = laplace.predictor.plan(batch)

    def forward(some: torch.Tensor) -> None:
        with torch.no_grad():
            model(some)

    functions: dict[str, Callable[[], Any]] = {
        "forward": lambda: forward(x),
        "forward of many": lambda: forward(more),
        "covariance": lambda: latent_gaussians(plan, laplace.posterior, batch),
        "predict": lambda: laplace.predict(x, progress=False),
        "margin": lambda: laplace.predict(more, kind="margin", progress=False),
    }
    if name in BLOCKS:
        block = fitted("last_block")
        functions["last_block predict"] = lambda: block.predict(x, progress=False)
        functions["last_block margin"] = lambda: block.predict(more, kind="margin", progress=False)
    seconds = least_processor_times(functions, repeats)
    forwards = {kind: seconds["forward of many" if "margin" in kind else "forward"] for kind in functions}
    parts = count(model, x)
    counted = sum(parts.values())
    measured = seconds["covariance"] / seconds["forward"]
    return {
        "inputs": size,
        "forward_ms_per_input": round(1000 * seconds["forward"] / size, 4),
        "counted": round(counted, 1),
        "parts": {kind: round(value, 2) for kind, value in parts.items()},
        "measured": round(measured, 1),
        "ratio": round(measured / counted, 2),
        "inputs of the margin": size_of_margin,
        **{k: round(seconds[k] / forwards[k], 1) for k in functions if k.split()[-1] in ("predict", "margin")},
    }


def table(results: Entry) -> str:
    """The results for people, in forward passes."""
    lines = [f"{'network':12} {'inputs':>6} {'counted':>8} {'measured':>9} {'ratio':>6} {'predict':>8} {'margin':>7}"]
    for name, row in results.items():
        if name != "machine":
            numbers = f"{row['counted']:8.1f} {row['measured']:9.1f} {row['ratio']:6.2f} {row['predict']:8.1f} {row['margin']:7.1f}"
            block = (
                f"; last block {row['last_block predict']}, {row['last_block margin']}"
                if "last_block predict" in row
                else ""
            )
            lines.append(
                f"{name:12} {row['inputs']:6} {numbers}  {'reached' if row['ratio'] <= REACH else 'missed'}{block}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS), help="names, with commas")
    parser.add_argument("--repeats", type=int, default=5, help="turns; the least time counts")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: Entry = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for name in chosen.networks.split(","):
        results[name] = measure(name, chosen.repeats)
        results["machine"] = machine()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(table({name: results[name]}), file=sys.stderr, flush=True)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
