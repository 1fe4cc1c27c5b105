"""A cost model of a fit on a cluster, checked against 1, 2 and 4 processes: `python -m benchmarks.cluster`, then the section in docs/scaling.md.

The model has three parts: the passes over data, which are shared out; the eigendecompositions, which are shared out by cost; and what is sent. Times are
processor times, because processes that share the cores of one machine would otherwise measure each other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aftermap.curvature import fit_curvature
from aftermap.distributed import rank, world_size
from aftermap.posteriors import GaussianPosterior

__all__ = ["PAGE", "RESULTS", "extrapolated", "main", "predicted", "section_of", "shapes_of", "shared", "written"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cluster.json"
PAGE = ROOT / "docs" / "scaling.md"
START, END = "<!-- written by python -m benchmarks.cluster -->\n", "<!-- end of what it wrote -->\n"
WORLDS = (1, 2, 4)
N_DATA, BATCH = 1024, 64
WIDTHS = (128, 384, 320, 256, 10)

# What a cluster is taken to do; everything that is extrapolated rests on these numbers, none of which was measured here.
FLOPS = 40e12  # sustained by one card in passes over data, per second
DECOMPOSING = 0.3e12  # sustained by one card in symmetric eigendecompositions in float64, per second
BANDWIDTH = 20e9  # bytes per second that a process sends, while it receives as many
START_UP = 30e-6  # seconds of one message between two processes


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).eval()


def shapes_of() -> list[tuple[int, int]]:
    """(in with bias, out) of every layer."""
    return [(before + 1, after) for before, after in pairwise(WIDTHS)]


def shared(costs: list[float], world: int) -> float:
    """The part of all work that falls to the process with the most, when jobs go to the least loaded, dearest first."""
    load = [0.0] * world
    for cost in sorted(costs, reverse=True):
        load[load.index(min(load))] += cost
    return max(load) / sum(costs)


def work() -> dict[str, Any]:
    """One process: its processor time for the passes and for the decompositions, the bytes it gave to messages, and its share of the data."""
    sent: Counter[str] = Counter()
    if world_size() > 1:
        for kind in ("all_reduce", "broadcast"):
            plain = getattr(dist, kind)

            def counting(tensor: Tensor, *args: Any, plain: Any = plain, kind: str = kind, **options: Any) -> Any:
                if tensor.is_floating_point():  # Notes about errors and counts of processes are whole numbers.
                    sent[f"{kind} {tensor.element_size()}"] += tensor.numel() * tensor.element_size()
                return plain(tensor, *args, **options)

            setattr(dist, kind, counting)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N_DATA, WIDTHS[0], generator=generator), torch.arange(N_DATA) % WIDTHS[-1]
    mine = slice(rank(), None, world_size())
    batches = list(zip(x[mine].split(BATCH), y[mine].split(BATCH), strict=True))
    model = network()
    fit_curvature(model, batches[:1], "classification", progress=False)  # What is done once, such as imports.
    sent.clear()
    begun = time.process_time()
    factors = fit_curvature(model, batches, "classification", progress=False)
    passed = time.process_time()
    GaussianPosterior.from_factors(factors, {n: p.detach() for n, p in model.named_parameters()})
    ended = time.process_time()
    return {"passes": passed - begun, "decompositions": ended - passed, "sent": dict(sent), "data": len(y[mine])}


def predicted(alone: dict[str, float], world: int) -> dict[str, float]:
    """What the model says of several processes, from the times of one."""
    costs = [float(side) ** 3 for shape in shapes_of() for side in shape]
    share = -(-N_DATA // world) / N_DATA
    return {"passes": alone["passes"] * share, "decompositions": alone["decompositions"] * shared(costs, world)}


def sent_by_formula() -> dict[str, int]:
    """Bytes of a fit: factors in float32, rows, data and loss in float64; eigenvectors and eigenvalues in float64."""
    shapes = shapes_of()
    numbers = sum(i * i + o * o for i, o in shapes)
    return {
        "all_reduce 4": 4 * numbers,
        "all_reduce 8": 8 * (len(shapes) + 2),
        "broadcast 8": 8 * (numbers + sum(i + o for i, o in shapes)),
    }


def measured(repeats: int) -> dict[str, Any]:
    """The median over repeats, which are interleaved, of the slowest process's times."""
    from tests.processes import from_processes

    found: dict[int, list[list[dict[str, Any]]]] = {world: [] for world in WORLDS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            for world in WORLDS:
                found[world].append(from_processes(work, world, Path(folder) / f"{repeat} {world}"))
                sys.stderr.write(f"{world} processes: {found[world][-1]}\n")
    rows: dict[str, Any] = {}
    for world, runs in found.items():
        slowest = {key: [max(p[key] for p in run) for run in runs] for key in ("passes", "decompositions")}
        rows[str(world)] = {key: sorted(values)[len(values) // 2] for key, values in slowest.items()}
        rows[str(world)]["sent"] = runs[0][0]["sent"]
    return {"repeats": repeats, "n_data": N_DATA, "widths": WIDTHS, "formula": sent_by_formula(), "processes": rows}


def _resnet50() -> list[tuple[int, int, int]]:
    """(in, out, positions) of every layer with a weight matrix, for 224×224 images."""
    layers, width_in, side = [(3 * 49, 64, 112**2)], 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            before = side
            side = side // 2 if stage and not block else side
            layers += [(width_in, width, before**2), (width * 9, width, side**2), (width, 4 * width, side**2)]
            layers += [(width_in, 4 * width, side**2)] if not block else []
            width_in = 4 * width
    return [*layers, (2049, 1000, 1)]


def _times(flops: float, jobs: list[float], summed: float, given: float, messages: int, world: int) -> dict[str, float]:
    """Seconds of the three parts on a cluster: ring sums move 2(w−1)/w of what is summed, a pipelined broadcast moves all once."""
    return {
        "passes over data": flops / (world * FLOPS),
        "decompositions": 10 * sum(jobs) * shared(jobs, world) / DECOMPOSING if jobs else 0.0,
        "sending": (2 * (world - 1) / world * summed + given) / BANDWIDTH + START_UP * messages * world
        if world > 1
        else 0.0,
    }


def extrapolated() -> dict[str, dict[str, dict[str, float]]]:
    """Seconds of a fit by task and number of cards."""
    layers = _resnet50()
    forward = 2.0 * sum(i * o * t for i, o, t in layers)
    r_a, r_b = (2.0 * sum(t * side[k] ** 2 for *side, t in layers) / forward for k in (0, 1))
    flops = (
        1.28e6 * forward * (1 + 1 + r_a / 2 + r_b / 2)
    )  # The formula of docs/scaling.md: one random vector per image.
    jobs = [float(s) ** 3 for i, o, _ in layers for s in (i, o)]
    kron = sum(i * i + o * o for i, o, _ in layers)
    weights = 128 * 2 * 4096 * 16
    tokens = 1e8
    adapters = tokens * (2 + 2) * 6.7e9  # Forward, and one random vector back through the activations.
    return {
        "ResNet-50 on ImageNet, Kronecker factors": {
            str(w): _times(flops, jobs, 4 * kron, 8 * kron, 1 + len(jobs), w) for w in (1, 8, 128)
        },
        "7B model, adapters of rank 16, diagonal, 100 million tokens": {
            str(w): _times(adapters, [], 4 * weights, 0.0, 1, w) for w in (1, 8, 128)
        },
    }


def _said(seconds: float) -> str:
    for limit, unit, size in ((1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def section_of(found: dict[str, Any]) -> str:
    """The section of docs/scaling.md."""
    rows, alone = found["processes"], found["processes"]["1"]
    lines = []
    for world, row in rows.items():
        said = predicted(alone, int(world))
        parts = [f"{1e3 * row[k]:.0f} ms / {1e3 * said[k]:.0f} ms ({row[k] / said[k]:.2f})" for k in said]
        equal = "–" if world == "1" else "equal" if row["sent"] == found["formula"] else "**not equal**"
        lines.append(f"| {world} | {' | '.join(parts)} | {sum(row['sent'].values()):,} | {equal} |")
    table = "\n".join(lines)
    text = f"""
A network of widths {" × ".join(map(str, found["widths"]))} is fitted with Kronecker factors to {found["n_data"]:,} examples on 1, 2 and 4 processes of one machine (gloo; the median of {found["repeats"]} interleaved repeats of the slowest process's
processor time, in float32, one thread each). The model takes the times of one process, gives each its share of the data, and shares out the decompositions by the cubes of their sizes, dearest first.

| processes | passes: measured / model (ratio) | decompositions: measured / model (ratio) | bytes of messages | against the formula |
|---|---|---|---|---|
{table}

Processor time does not count waiting for others, and counts what a process does to send. The machine was busy with other work. The model leaves out what every process does however few its data are
(looking at the network, checking its rules, sending), which is the likely reason why it promises too much for four processes; the parts were not measured one by one.

What the model says of a cluster rests on these assumptions, none of which was measured here: a card sustains {FLOPS / 1e12:g} Tflop/s in passes over data and {DECOMPOSING / 1e12:g} Tflop/s in
eigendecompositions in float64, a process sends {BANDWIDTH / 1e9:g} GB/s, a message between two takes {1e6 * START_UP:g} µs, data arrive as fast as they are used, and messages wait for the end of the passes (they do).

| fit | cards | passes over data | decompositions | sending | in all | most of it |
|---|---|---|---|---|---|---|
"""
    for name, by_world in extrapolated().items():
        for world, times in by_world.items():
            most = max(times, key=times.__getitem__)
            cells = " | ".join(_said(v) if v else "–" for v in (*times.values(), sum(times.values())))
            text += f"| {name} | {world} | {cells} | {most} |\n"
    return text + "\n"


def written(page: str, found: dict[str, Any]) -> str:
    """The page with the section in its place."""
    before, rest = page.split(START)
    return before + START + section_of(found) + END + rest.split(END)[1]


def main(arguments: list[str] | None = None) -> None:
    """Measures, keeps the numbers and writes the section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page-only", action="store_true", help="write the section from numbers that are there")
    options = parser.parse_args(arguments)
    if not options.page_only:
        torch.set_num_threads(1)
        RESULTS.write_text(json.dumps(measured(options.repeats), indent=1) + "\n", encoding="utf-8")
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
