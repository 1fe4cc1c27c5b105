"""Curvature fits beside the peers' on the same networks and batches, in units of one forward and backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.methods import METHODS, QUANTITIES, Method
from benchmarks.models import MODELS, Batch, make
from benchmarks.timing import compare, peak_memory, ratios, unit

__all__ = ["TARGETS", "best_peer", "measure", "scaling", "table"]

# A fit over this many batches, divided by their number: a fit's fixed costs (its look at the first batch) are spread as in a
# small data set. Real ones have hundreds of batches.
BATCHES = dict.fromkeys(MODELS, 16)

# What is to be reached, in u: (model, quantity) or, for every model, quantity alone.
TARGETS: dict[tuple[str, str], float] = {
    ("mlp", "kron_exact"): 6.8,
    ("lenet", "kron_exact"): 5.5,
    ("mlp", "kron_random"): 1.5,
    ("lenet", "kron_random"): 2.2,
    ("mlp", "diagonal_exact"): 4.5,
    ("lenet", "diagonal_exact"): 5.4,
    **{(model, "squared_gradients"): 1.6 for model in MODELS},
}
# Memory of a fit against a training step with Adam, both with the network and the batch.
MEMORY_TARGET = 1.5

Entry = dict[str, Any]


def _prepared(method: Method, model: nn.Module, data: Sequence[Batch]) -> tuple[Callable[[], Any], float]:
    """A fit that has run once, and what to multiply its time by."""
    scale = 1.0
    if method.examples is not None:
        total = sum(len(y) for _, y in data)
        data = [(x[: method.examples], y[: method.examples]) for x, y in data[:1]]
        scale = total / sum(len(y) for _, y in data)
    fit = method.make(model, data)
    fit()
    return fit, scale


def measure(name: str, *, repeats: int, memory: bool, methods: Sequence[str] | None = None) -> Entry:
    """All methods on one network.

    Args:
        name: a key of `MODELS`.
        repeats: interleaved rounds.
        memory: also the peak memory, in a fresh process for each method.
        methods: names; None: all.

    Returns:
        A dictionary for JSON: ratios to u and megabytes, or the reason why a method was skipped.
    """
    model, data = make(name, batches=BATCHES[name])
    units = [unit(model, batch) for batch in data]
    functions: dict[str, Callable[[], Any]] = {}
    scales, found = {}, {}
    chosen = {k: m for k, m in METHODS.items() if methods is None or k in methods}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key, method in chosen.items():
            try:
                functions[key], scales[key] = _prepared(method, model, data)
            except Exception as reason:  # whatever a peer raises is the reason why it is left out
                if method.library == "aftermap":
                    raise
                text = " ".join(f"{type(reason).__name__}: {reason}".split())
                found[key] = {"skipped": text[:160]}
        times, u = ratios(functions, lambda: [each() for each in units], repeats, budget=20)
    quantities: dict[str, dict[str, Entry]] = {q: {} for q in QUANTITIES}
    for key, method in chosen.items():
        entry: Entry = {"library": method.library}
        if key in times:
            entry["ratio"], entry["least"] = (round(r * scales[key], 3) for r in times[key])
            if method.note:
                entry["note"] = method.note
        quantities[method.quantity][key] = entry | found.get(key, {})
    result: Entry = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": MODELS[name].batch,
        "u_ms": round(1000 * u / BATCHES[name], 2),
        "quantities": {q: v for q, v in quantities.items() if v},
    }
    if memory:
        _add_memory(name, result)
    return result


def _add_memory(name: str, result: Entry) -> None:
    """Peak memory of ours and of the fastest peer for each quantity, and of training."""
    threads = torch.get_num_threads()
    for key in ("u", "training"):
        found = peak_memory(name, key, threads=threads)
        result[f"{key}_memory_mb"] = found["extra"]
        result["held_memory_mb"] = found["held"]
    for methods in result["quantities"].values():
        peer = best_peer(methods)
        for key, entry in methods.items():
            if entry["library"] == "aftermap" or (peer is not None and key == peer[0]):
                found = peak_memory(name, key, threads=threads)
                entry["memory_mb"] = found.get("extra", found.get("error"))


def best_peer(methods: dict[str, Entry]) -> tuple[str, float] | None:
    """The fastest method that is not ours."""
    timed = [(e["ratio"], k) for k, e in methods.items() if e["library"] != "aftermap" and "ratio" in e]
    return (min(timed)[1], min(timed)[0]) if timed else None


def scaling(*, repeats: int, quick: bool) -> Entry:
    """Milliseconds of a fit over the number of data and over the number of classes."""
    kinds = ("exact", "rademacher")
    sizes = (128, 256, 512) if quick else (128, 256, 512, 1024, 2048)
    classes = (2, 10, 50) if quick else (2, 5, 10, 20, 50, 100)
    functions: dict[str, Callable[[], Any]] = {}
    for size in sizes:
        model, data = make("lenet", batches=size // 64, size=64)
        for kind in kinds:
            functions[f"data {kind} {size}"] = METHODS[_OURS[kind]].make(model, data)
    for count in classes:
        model, data = make("lenet", batches=2, size=64, classes=count)
        for kind in kinds:
            functions[f"classes {kind} {count}"] = METHODS[_OURS[kind]].make(model, data)
    seconds = compare(functions, repeats)
    return {
        over: {
            "x": list(values),
            **{kind: [round(1000 * seconds[f"{over} {kind} {v}"], 2) for v in values] for kind in kinds},
        }
        for over, values in (("data", sizes), ("classes", classes))
    }


_OURS = {"exact": "aftermap kron", "rademacher": "aftermap kron rademacher"}


def _verdict(name: str, quantity: str, entry: Entry, peer: tuple[str, float] | None) -> str:
    """Whether a target is reached and no peer is faster, by medians: a minimum of ratios is fooled by one slow unit."""
    said = []
    target = TARGETS.get((name, quantity))
    if target is not None:
        said.append(f"target {target:g} {'met' if entry['ratio'] <= target else 'MISSED'}")
    if peer is not None and entry["ratio"] > peer[1]:
        said.append(f"SLOWER than {peer[0]}")
    return ", ".join(said)


def _memory_note(entry: Entry, found: Entry) -> str:
    """Memory with network and batch, against a step of Adam and against a bare forward and backward pass."""
    used = entry.get("memory_mb")
    if not isinstance(used, float) or "held_memory_mb" not in found:
        return ""
    held = found["held_memory_mb"]
    training = (held + used) / (held + found["training_memory_mb"])
    bare = (held + used) / (held + found["u_memory_mb"])
    return f"memory {training:.2f} of Adam{' (ABOVE)' if training > MEMORY_TARGET else ''}, {bare:.2f} of u"


def table(results: Entry) -> str:
    """The results for people: one line per method, ratios to u (median over rounds, in brackets the minimum)."""
    lines = []
    for name, found in results["models"].items():
        head = f"{name}: {found['parameters']:,} parameters, batches of {found['batch']}, u = {found['u_ms']} ms"
        if "u_memory_mb" in found:
            head += f"; MB: network and batch {found['held_memory_mb']}, u {found['u_memory_mb']}, "
            head += f"a step of Adam {found['training_memory_mb']}"
        lines.append(head)
        for quantity, methods in found["quantities"].items():
            lines.append(f"  {QUANTITIES[quantity]}")
            peer = best_peer(methods)
            for key, entry in methods.items():
                if "skipped" in entry:
                    lines.append(f"    {key:36}        –               {entry['skipped'][:90]}")
                    continue
                used = entry.get("memory_mb")
                cost = f"{used:8.1f} MB" if isinstance(used, float) else " " * 11
                said = [entry.get("note", "")]
                if entry["library"] == "aftermap":
                    said = [_verdict(name, quantity, entry, peer), _memory_note(entry, found)]
                note = "; ".join(s for s in said if s)
                least = f"({entry['least']:.2f})" if "least" in entry else ""
                lines.append(f"    {key:36} {entry['ratio']:8.2f} u {least:>9} {cost}  {note}".rstrip())
        lines.append("")
    return "\n".join(lines)
