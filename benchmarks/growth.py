"""`python -m benchmarks.growth`: how the time and memory of each job grow with the size of the problem.

A fit, a tuning without labels, a prediction and a step of VOGN are done at growing sizes, everything else being fixed. The slope
of the logarithm of the processor time, and of the peak memory, over the logarithm of the size is the exponent of growth. It is
fitted to the upper half of the sizes, where what does not grow matters less. The exponent in theory is the largest power of the size in the number of
operations; where a fitted exponent is more than `SURPRISE` above it, the row is flagged. Smaller exponents are normal: constant
costs are still there at these sizes.

Results go to benchmarks/results/growth.json, and a table into docs/scaling.md. With ``--peers`` (in the benchmark environment) the fit and the
prediction of laplace-torch stand beside ours.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aftermap as am
from benchmarks.timing import ROOT, machine, source

__all__ = ["AXES", "JOBS", "OUTPUT", "SURPRISE", "Problem", "exponent", "main", "surprises", "table", "write_page"]

OUTPUT = ROOT / "benchmarks" / "results" / "growth.json"
PAGE = ROOT / "docs" / "scaling.md"
START, END = "<!-- growth: written by python -m benchmarks.growth -->", "<!-- end of growth -->"
SURPRISE = 0.3  # A fitted exponent so much above the one in theory is no noise of the measurement.
REPEATS = 3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt in glibc
LEAST_SECONDS = 0.05  # A job is repeated until it has taken so long.


@dataclass(frozen=True)
class Problem:
    """A classification by an MLP, with random weights and data.

    Attributes:
        n: The number of data of a fit.
        width: The width of the hidden layers.
        depth: Their number.
        outputs: The number of classes.
        batch: The number of inputs of a prediction or of a step.
    """

    n: int = 512
    width: int = 64
    depth: int = 2
    outputs: int = 10
    batch: int = 64

    def network(self) -> nn.Sequential:
        torch.manual_seed(0)
        widths = [self.width] * (self.depth + 1)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, self.outputs)).eval()

    def data(self) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.n, self.width, generator=generator)
        y = torch.randint(self.outputs, (self.n,), generator=generator)
        return list(zip(x.split(256), y.split(256), strict=True))

    def inputs(self) -> Tensor:
        return torch.randn(self.batch, self.width, generator=torch.Generator().manual_seed(2))


# The sizes of each axis. They are geometric, and the first ones show where constant costs end.
AXES: dict[str, tuple[int, ...]] = {
    "n": (1024, 2048, 4096, 8192),
    "width": (64, 128, 256, 512),
    "depth": (2, 4, 8, 16),
    "outputs": (4, 8, 16, 32),
    "batch": (128, 256, 512, 1024),
}


def _fit(structure: str) -> Callable[[Problem], Callable[[], Any]]:
    def make(problem: Problem) -> Callable[[], Any]:
        model, data = problem.network(), problem.data()
        options: dict[str, Any] = {"subset_size": 64} if structure == "subset" else {}
        return lambda: am.Laplace(model, "classification", structure=structure, curvature="exact", **options).fit(data)

    return make


def _predict(structure: str) -> Callable[[Problem], Callable[[], Any]]:
    def make(problem: Problem) -> Callable[[], Any]:
        la = am.Laplace(problem.network(), "classification", structure=structure).fit(problem.data()[:1])
        x = problem.inputs()
        return lambda: la.predict(x, link="probit")

    return make


def _tune(problem: Problem) -> Callable[[], Any]:
    la = am.Laplace(problem.network(), "classification").fit(problem.data())
    return lambda: la.tune(method="evidence")


def _step(problem: Problem) -> Callable[[], Any]:
    model = problem.network().train()
    x = problem.inputs()
    y = torch.arange(len(x)) % problem.outputs
    optimiser = am.optim.VOGN(model, lr=1e-3, n_data=max(problem.n, len(x)))
    return lambda: optimiser.step(lambda: nn.functional.cross_entropy(model(x), y))


def _peer_fit(problem: Problem) -> Callable[[], Any]:
    from laplace import Laplace

    model = problem.network()
    loader = [(x, y) for x, y in problem.data()]
    tensors = torch.utils.data.TensorDataset(*(torch.cat(t) for t in zip(*loader, strict=True)))
    batches = torch.utils.data.DataLoader(tensors, batch_size=256)

    def fit() -> Any:
        la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")
        la.fit(batches)
        return la

    return fit


def _peer_predict(problem: Problem) -> Callable[[], Any]:
    la, x = _peer_fit(replace(problem, n=256))(), problem.inputs()
    return lambda: la(x, pred_type="glm", link_approx="probit")


@dataclass(frozen=True)
class Job:
    """Something that is measured.

    Attributes:
        make: Makes the problem ready, and returns the function to measure.
        time: The exponents of time in theory, by axis; axes that are not named are not measured.
        memory: Those of peak memory beyond what was held before.
    """

    make: Callable[[Problem], Callable[[], Any]]
    time: dict[str, float]
    memory: dict[str, float]


# Per datum a layer costs width² for the pass and each of the C − 1 vectors, and as much for the Gram matrices; an eigendecomposition
# width³. The data pass in batches, so memory does not grow with n; factors and eigenvectors hold width² numbers for each layer.
JOBS: dict[str, Job] = {
    "fit, kron": Job(
        _fit("kron"),
        {"n": 1, "width": 3, "depth": 1, "outputs": 1},
        {"n": 0, "width": 2, "depth": 1, "outputs": 1},
    ),
    "fit, diagonal": Job(
        _fit("diagonal"),
        {"n": 1, "width": 2, "depth": 1, "outputs": 1},
        {"n": 0, "width": 2, "depth": 1, "outputs": 1},
    ),
    "fit, subset of 64": Job(_fit("subset"), {"n": 1, "depth": 1, "outputs": 3}, {"n": 0, "depth": 1, "outputs": 2}),
    "tune by evidence": Job(_tune, {"n": 0, "width": 2, "depth": 1, "outputs": 1}, {"n": 0, "width": 2, "depth": 1}),
    "predict, kron": Job(
        _predict("kron"),
        {"batch": 1, "width": 2, "depth": 1, "outputs": 2},
        {"batch": 1, "width": 2, "depth": 1, "outputs": 2},
    ),
    "predict, diagonal": Job(
        _predict("diagonal"),
        {"batch": 1, "width": 2, "depth": 1, "outputs": 2},
        {"batch": 1, "width": 2, "depth": 1, "outputs": 2},
    ),
    "step of VOGN": Job(
        _step,
        {"batch": 1, "width": 2, "depth": 1, "outputs": 1},
        {"batch": 1, "width": 2, "depth": 1, "outputs": 1},
    ),
}
PEERS: dict[str, Job] = {
    "fit, kron (laplace-torch)": Job(_peer_fit, {"n": 1, "width": 3, "depth": 1, "outputs": 1}, {}),
    "predict, kron (laplace-torch)": Job(_peer_predict, {"batch": 1, "width": 2, "depth": 1, "outputs": 2}, {}),
}


def exponent(sizes: Iterable[float], costs: Iterable[float]) -> float:
    """The slope of a straight line through the logarithms, over the upper half of the sizes.

    >>> round(exponent([1, 2, 4, 8], [5.0, 9.0, 16.0, 32.0]), 3)
    1.0
    """
    points = sorted(zip(sizes, costs, strict=True))
    upper = points[len(points) // 2 :]
    xs, ys = ([math.log(max(p[k], 1e-12)) for p in upper] for k in range(2))
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)


def _seconds(function: Callable[[], Any]) -> float:
    """The least processor time of a call over some rounds."""
    function()
    best = math.inf
    for _ in range(REPEATS):
        count, start = 0, time.process_time()
        while time.process_time() - start < LEAST_SECONDS:
            function()
            count += 1
        best = min(best, (time.process_time() - start) / count)
    return best


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux only")


def _megabytes(job: Job, problem: Problem) -> float:
    """What a call needs on top of what is held before, at its peak; in a forked process, whose memory is its own."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # Freed memory goes back to the system at once, so that the resident set is what is in use.
            libc = ctypes.CDLL(None)
            for setting in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
                libc.mallopt(setting, 65536)
            job.make(
                Problem(n=4, width=8, depth=1, outputs=3, batch=2)
            )()  # pages that any call touches are touched now
            function = job.make(problem)
            gc.collect()
            libc.malloc_trim(0)
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
            before = _status("VmRSS")
            kept = function()
            extra = max(0.0, _status("VmHWM") - before)
            del kept
            os.write(send, str(extra).encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        raise RuntimeError(f"the process that measured the memory of {problem} failed")
    return float(answer)


def _rows(jobs: dict[str, Job], memory: bool, report: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for name, job in jobs.items():
        for axis, theory in job.time.items():
            sizes = AXES[axis]
            problems = [replace(Problem(), **{axis: size}) for size in sizes]
            seconds = [_seconds(job.make(problem)) for problem in problems]
            row: dict[str, Any] = {
                "job": name,
                "axis": axis,
                "sizes": list(sizes),
                "seconds": seconds,
                "source": source(),
            }
            row |= {"exponent": round(exponent(sizes, seconds), 2), "theory": theory}
            if memory and axis in job.memory:
                peaks = [_megabytes(job, problem) for problem in problems]
                row |= {"megabytes": peaks, "memory_theory": job.memory[axis]}
                row["memory_exponent"] = round(exponent(sizes, peaks), 2)
            row["surprise"] = surprises(row)
            rows.append(row)
            report(f"{name}, {axis}: {row['exponent']} ({theory}) {row.get('memory_exponent', '')} {row['surprise']}")
    return rows


def surprises(row: dict[str, Any]) -> list[str]:
    found = ["time"] if row["exponent"] > row["theory"] + SURPRISE else []
    # Less than 2 MB moves with the allocator.
    if "megabytes" in row and max(row["megabytes"]) > 2 and row["memory_exponent"] > row["memory_theory"] + SURPRISE:
        found.append("memory")
    return found


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    labels = {"n": "data", "width": "width", "depth": "depth", "outputs": "outputs", "batch": "batch"}
    lines = [
        "| job | grows with | sizes | seconds of the largest | exponent of time (theory) | MB of the largest | exponent of memory (theory) | surprise |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        memory = ("–", "–")
        if "megabytes" in row:
            memory = f"{row['megabytes'][-1]:.1f}", f"{row['memory_exponent']:.2f} ({row['memory_theory']:g})"
        lines.append(
            f"| {row['job']} | {labels[row['axis']]} | {row['sizes'][0]} to {row['sizes'][-1]} | {row['seconds'][-1]:.3g} | "
            f"{row['exponent']:.2f} ({row['theory']:g}) | {memory[0]} | {memory[1]} | {', '.join(row['surprise']) or 'no'} |"
        )
    missing = [name for name in (*JOBS, *PEERS) if name not in {row["job"] for row in results["rows"]}]
    note = f"\n\nNot measured yet: {'; '.join(missing)}." if missing else ""
    return "\n".join(lines) + note


def write_page(results: dict[str, Any], page: Path = PAGE) -> None:
    """Puts the table between its marks on the page."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{START}\n\n{table(results)}\n\n{END}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Measures, and writes the results and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="measure laplace-torch, and add it to the stored results")
    parser.add_argument(
        "--only", action="append", choices=JOBS, help="measure this job again, and keep the stored others"
    )
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def report(line: str) -> None:
        print(line, flush=True)

    jobs = PEERS if chosen.peers else {name: JOBS[name] for name in chosen.only or JOBS}
    measured = _rows(jobs, not chosen.peers, report)
    stored = json.loads(OUTPUT.read_text(encoding="utf-8"))["rows"] if OUTPUT.exists() else []
    rows = [*(row for row in stored if row["job"] not in jobs), *measured]
    order = [*JOBS, *PEERS]
    results: dict[str, Any] = {"machine": machine(), "rows": sorted(rows, key=lambda row: order.index(row["job"]))}
    OUTPUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_page(results)


if __name__ == "__main__":
    main()
