"""`aftermap doctor`: how each layer will be treated, what every structure costs, and where digits may be lost."""

from __future__ import annotations

import importlib.util
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, ClassVar

import torch
from rich.table import Table
from torch import Tensor, nn

from aftermap.cli import options as o
from aftermap.cli.console import GOOD, Reporter, plain_table
from aftermap.cli.fit import build_for, resolve_task
from aftermap.cli.models import make_model
from aftermap.cli.sources import Batches, Source, first_batch, open_source, parse_size
from aftermap.curvature import Factors, fit_curvature
from aftermap.curvature.structures.rounding import digits_tolerance, unit_roundoff
from aftermap.data import Examples
from aftermap.errors import InputError
from aftermap.laplace import Cost, estimate_costs
from aftermap.likelihoods import parse_likelihood
from aftermap.models import call_model

__all__ = ["doctor"]

_EXTRAS = {
    "cli": ("typer", "rich"),
    "plot": ("matplotlib", "jinja2", "PIL"),
    "sklearn": ("sklearn",),
    "hf": ("transformers", "peft"),
    "lightning": ("lightning",),
    "hmc": ("pyro",),
}
_SINGLE_DIGITS = round(-math.log10(torch.finfo(torch.float32).eps))
_SIDES = (32, 28, 224, 64, 8, 16, 96)


@dataclass(frozen=True)
class ExaminedModel:
    """The network that the doctor looks at, if there is one."""

    panel: ClassVar[str] = "Model"
    model: Annotated[
        str | None,
        o.option(f"How to build the network: {o.FACTORY}. Without it there is none.", metavar="SPEC"),
    ] = None
    weights: o.Weights = None
    task: o.Task = "auto"
    input_shape: Annotated[str | None, o.option("The shape of one input, if there are no data.", metavar="CxHxW")] = (
        None
    )
    n_data: Annotated[
        int,
        o.option("The number of training examples to assume, if there are no data.", min=1),
    ] = 10_000


@o.command(without=("val", "force"))
def doctor(examined: ExaminedModel, sets: o.TrainData, data: o.DataOptions, run: o.RunOptions) -> int:
    """Look at a network before any work: its layers, how each will be treated, the cost of every structure, and numerical risks.

    Without a model: versions and what is installed. Without data the shape of an input is guessed from the first layer.
    """
    reporter = run.reporter
    facts = _environment()
    reporter.line(", ".join(f"{k} {v}" for k, v in facts["versions"].items()) + f"; {facts['devices']}")
    missing = [k for k, there in facts["extras"].items() if not there]
    if missing:
        reporter.line(f"extras that are not installed: {', '.join(missing)} (pip install 'aftermap[{missing[0]}]')")
    model, device = examined.model, run.checked_device()
    if model is None:
        reporter.line("add --model pkg.module:factory to look at a network")
        reporter.result(facts)
        return GOOD
    data_format = data.format(task=examined.task)
    spec = sets.train or sets.data
    if spec is not None:
        source = open_source(spec, "train", data_format)
        network, _ = build_for(model, examined.weights, source, data_format, device, run.seed)
        task = resolve_task(examined.task, network, source)
    else:
        shape = parse_size(examined.input_shape, "--input-shape")
        network = make_model(
            model, options=_options(model, shape), weights=examined.weights, device=device, seed=run.seed
        )
        source, task = _random(network, shape, examined.task, examined.n_data, data.batch_size, run.seed)
        advice = "" if examined.input_shape else "; say --train DATA or --input-shape for the real ones"
        reporter.note(f"no data: random inputs of shape {_shape(source)}{advice}")
    reporter.result({**facts, "model": model, "task": task, **_examine(network, source, task, reporter)})
    return GOOD


def _examine(network: nn.Module, source: Source, task: str, reporter: Reporter) -> dict[str, Any]:
    """Reports how each layer is treated, what every structure costs, and the risks."""
    likelihood = parse_likelihood(task)
    some = _first(source)
    factors = fit_curvature(network, [some], likelihood, structure="kron")
    reporter.line()
    reporter.line(f"{type(network).__name__}, {task}: {factors.n_params:,} parameters in {len(factors.blocks)} blocks")
    reporter.table(_layers(factors))
    frozen = [n for n, p in network.named_parameters() if n not in factors.names]
    if frozen:
        reporter.line(f"left out (frozen, or no numbers): {', '.join(frozen[:8])}")
    costs = estimate_costs(network, source.batches, likelihood)
    reporter.line()
    reporter.table(_costs(costs))
    reporter.line("time on this machine for " + _count(source) + " examples; memory of the posterior alone")
    risks = _risks(network, factors, costs)
    reporter.line()
    for risk in risks:
        reporter.line(f"{risk['risk']}: {risk['text']}")
    treatment = {n: {"block": t.block, "rule": t.rule, "note": t.note} for n, t in factors.treatment.items()}
    described = [
        {"structure": c.structure, "params": c.params, "n_params": c.n_params, "seconds": c.seconds, "bytes": c.bytes}
        for c in costs
    ]
    return {"treatment": treatment, "costs": described, "risks": risks}


def _risks(network: nn.Module, factors: Factors, costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """Says what rounding or few data will do to a posterior, as far as a few examples tell.

    The curvature of all data is taken as that of the examples times their number. Its trace bounds its largest eigenvalue.
    """
    dtype = next(p.dtype for n, p in network.named_parameters() if n in factors.names)
    name, unit = str(dtype).removeprefix("torch."), unit_roundoff(dtype)
    risks: list[dict[str, Any]] = []
    if dtype.itemsize < 4:
        digits = -math.log10(torch.finfo(dtype).eps)
        text = f"gradients and predictions have {digits:.0f} digits; model.float() gives {_SINGLE_DIGITS}"
        risks.append({"risk": "half precision", "dtype": name, "text": text})
    n_data = max((c.n_data for c in costs), default=0)
    times = max(1.0, n_data / factors.n_data)
    by_block = [
        sum(float(v.sum()) for v in block.diagonal().values()) for block in factors.blocks if block.kind == "kron"
    ]
    # Kronecker factors are summed in the network's precision, but at least in single precision; the others in double precision.
    kron = unit_roundoff(torch.promote_types(dtype, torch.float32)) * times * max(by_block, default=0.0)
    exact = (unit**2 + unit_roundoff(torch.float64)) * times * factors.trace() / digits_tolerance(dtype)
    text = (
        f"in {name} a prior precision below {kron:.0e} may be lost in rounding for kron, and one below {exact:.0e} for full and low_rank; "
        "ekfac and diagonal keep any. The default is 1"
    )
    risks.append({"risk": "weak priors", "kron": kron, "full": exact, "text": text})
    rows = max((c.n_rows for c in costs), default=0)
    if 0 < rows < factors.n_params:
        text = (
            f"{n_data:,} data with their outputs inform at most {rows:,} of {factors.n_params:,} directions; all others keep the prior, so "
            "tune it (aftermap tune)"
        )
        risks.append({"risk": "fewer data than weights", "rows": rows, "parameters": factors.n_params, "text": text})
    return risks


def _environment() -> dict[str, Any]:
    versions = {}
    for name in ("aftermap", "torch", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    versions["python"] = platform.python_version()
    extras = {k: all(importlib.util.find_spec(m) is not None for m in names) for k, names in _EXTRAS.items()}
    cards = torch.cuda.device_count()
    threads = torch.get_num_threads()
    devices = f"{threads} {'thread' if threads == 1 else 'threads'}" + (
        f", {cards} graphics cards" if cards else ", no graphics card"
    )
    return {"versions": versions, "extras": extras, "devices": devices}


def _options(model: str, shape: tuple[int, ...] | None) -> dict[str, Any]:
    if not model.startswith("builtin:"):
        return {}
    usual = {
        "builtin:lenet": (1, 28, 28),
        "builtin:resnet20": (3, 32, 32),
        "builtin:cnn": (1, 8, 8),
        "builtin:mlp": (4,),
    }
    return {"shape": list(shape or usual.get(model, (3, 32, 32))), "outputs": 10}


def _random(
    network: nn.Module, input_shape: tuple[int, ...] | None, task: str, n_data: int, batch_size: int, seed: int
) -> tuple[Source, str]:
    """Draws inputs of the right shape with targets of the right kind."""
    shape, outputs = _guess(network, input_shape)
    wide = int(outputs.shape[-1])
    chosen_task = ("classification" if wide > 1 else "regression") if task == "auto" else task
    generator = torch.Generator().manual_seed(seed)
    size = min(batch_size, n_data)
    if shape is None:
        raise InputError("say the shape of one input: --input-shape 3x32x32")
    x = torch.randn(size, *shape, generator=generator).to(next(network.parameters()).dtype)
    where = tuple(outputs.shape[1:-1])
    if chosen_task == "classification":
        y = torch.randint(wide, (size, *where), generator=generator)
    else:
        y = torch.randint(2, (size, *where, wide), generator=generator).float()
    examples = Examples(x, y, "random inputs")

    class Repeated:
        """As many batches as the real data would have, all the same."""

        def __len__(self) -> int:
            return math.ceil(n_data / size)

        def __iter__(self) -> Any:
            return (batch for _ in range(len(self)) for batch in examples.batches(size))

    return Source("random", "random inputs", Batches(Repeated(), size), examples), chosen_task


def _guess(network: nn.Module, shape: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, Tensor]:
    candidates: list[tuple[int, ...]] = [] if shape is None else [shape]
    if shape is None:
        first = next((m for m in network.modules() if any(True for _ in m.parameters(recurse=False))), None)
        if isinstance(first, nn.Linear):
            candidates = [(first.in_features,)]
        elif isinstance(first, nn.Conv2d):
            candidates = [(first.in_channels, side, side) for side in _SIDES]
        elif isinstance(first, nn.Conv1d):
            candidates = [(first.in_channels, side) for side in _SIDES]
    dtype = next((p.dtype for p in network.parameters()), torch.float32)
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    reason = ""
    for candidate in candidates:
        try:
            with torch.no_grad():
                return candidate, call_model(network, torch.zeros(2, *candidate, dtype=dtype, device=device))
        except Exception as error:  # whatever a network raises on a shape that is not its own
            reason = f": {type(error).__name__}: {str(error).splitlines()[0]}"
    problem = (
        "the shape of an input cannot be guessed"
        if shape is None
        else f"the network does not take inputs of shape {list(shape)}"
    )
    raise InputError(f"{problem}{reason}. Say --input-shape 3x32x32, or give data with --train")


def _first(source: Source) -> Any:
    """Returns a few examples, enough to see every layer at work."""
    batch = first_batch(source)
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], Tensor) and isinstance(batch[1], Tensor):
        return batch[0][:8], batch[1][:8]
    return batch


def _shape(source: Source) -> str:
    return "×".join(map(str, source.examples.inputs.shape[1:])) if source.examples is not None else "?"


def _count(source: Source) -> str:
    data = source.batches.data
    if isinstance(data, Examples):
        return f"{len(data):,}"
    try:
        return f"about {len(source.batches) * source.batches.size:,}"
    except TypeError:
        return "one batch of"


def _layers(factors: Factors) -> Table:
    table = plain_table("layer", "parameters", "curvature", "treated by", right=("parameters",))
    for block in factors.blocks:
        first = factors.treatment[next(iter(block.shapes))]
        note = f" ({first.note})" if first.note else ""
        style = "yellow" if block.kind != "kron" else None
        table.add_row(block.name, f"{block.size:,}", block.kind, first.rule.removesuffix("Rule") + note, style=style)
    return table


def _costs(costs: list[Cost]) -> Table:
    table = plain_table("structure", "parameters", "time", "memory", right=("parameters", "time", "memory"))
    for cost in costs:
        _, _, estimate = str(cost).rpartition(": about ")
        seconds, _, memory = estimate.partition(" and ")
        table.add_row(
            cost.structure + ("" if cost.params == "all" else ", last layer"), f"{cost.n_params:,}", seconds, memory
        )
    return table
