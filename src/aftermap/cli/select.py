"""`aftermap select`: which of several networks the data themselves prefer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from rich.table import Table
from torch import nn

from aftermap.cli import options as o
from aftermap.cli.console import GOOD, confirmed, plain_table
from aftermap.cli.fit import StructureName, build_for, check_structure_name, likelihood_of, resolve_task
from aftermap.cli.models import save_weights
from aftermap.cli.sources import DataFormat, Source, open_source
from aftermap.cli.train import half_deviation, standardise
from aftermap.errors import InputError
from aftermap.laplace.selection import Ranking
from aftermap.laplace.selection import select as rank_by_evidence

__all__ = ["SelectOptions", "select"]


@dataclass(frozen=True)
class SelectOptions:
    """How the candidates are trained and compared."""

    panel: ClassVar[str] = "Training"
    epochs: Annotated[int, o.option("The number of passes that train each candidate.", min=1)] = 500
    lr: Annotated[float | None, o.option("The learning rate at the start.")] = None
    structure: Annotated[str, o.option("The approximation of the curvature."), StructureName()] = "kron"
    restarts: Annotated[
        int, o.option("How often each candidate is trained from new initial weights; its best training counts.", min=1)
    ] = 1


@o.command(without=("val", "ood"))
def select(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...", help="The candidates: builtin:mlp, pkg.module:factory, or name=pkg.module:factory."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        o.option("Another candidate, in the same form. The option may be given several times.", metavar="MODEL"),
    ] = None,
    output: Annotated[
        Path | None, o.option("The safetensors file for the weights of the best candidate.", "--output", "-o")
    ] = None,
    task: o.Task = "auto",
    *,
    sets: o.TrainData,
    tests: o.TestData,
    data: o.DataOptions,
    training: SelectOptions,
    run: o.RunOptions,
) -> int:
    """Train several networks by the evidence and rank them: Occam's razor, without validation data.

    The log evidence is that of the training data under each model; 2.3 nats more are ten times more probable. Test data,
    where given, have no part in the ranking.
    """
    reporter, device = run.reporter, run.checked_device()
    check_structure_name(training.structure)
    chosen_models = [*(models or []), *(model or [])]
    if not chosen_models:
        raise InputError(
            "which networks are to be compared? Name them: aftermap select small=pkg.nets:small big=pkg.nets:big"
        )
    confirmed(output, force=run.force, what="select", file_name="best.safetensors")
    if (sets.train is None) == (sets.data is None):
        raise InputError("say which data: --train, or --data for a set that is split into parts")
    data_format = data.format(task=task)
    what = "--train" if sets.train else "--data"
    source = open_source(sets.train or str(sets.data), "train", data_format, what=what)
    test = tests.test or sets.data
    candidates = _candidates(chosen_models, source, data_format, device)
    chosen_task = resolve_task(task, next(iter(candidates.values()))(), source)
    options: dict[str, Any] = {} if training.lr is None else {"lr": training.lr}
    ranking = rank_by_evidence(
        candidates,
        source.batches,
        likelihood_of(chosen_task, None, lambda: half_deviation(source)),
        test=None if test is None else open_source(test, "test", data_format).batches,
        restarts=training.restarts,
        generator=run.generator(),
        epochs=training.epochs,
        structure=training.structure,
        **options,
    )
    reporter.table(_table(ranking))
    best = ranking.best
    if len(candidates) > 1:
        reporter.line(
            f"the data prefer {best.name}: probability {ranking.probabilities[best.name]:.3g} if all were equally likely before",
            style="bold green",
        )
    else:
        reporter.line(f"{best.name} alone is no comparison: name a second network to compare it with")
    if output is not None:
        save_weights(best.training.model, output)
        reporter.line(f"its weights are in {output}")
    reporter.result({"best": best.name, "probabilities": ranking.probabilities, "table": ranking.table})
    return GOOD


def _candidates(
    models: list[str], training: Source, data_format: DataFormat, device: torch.device
) -> dict[str, Callable[[], nn.Module]]:
    candidates: dict[str, Callable[[], nn.Module]] = {}
    for entry in models:
        name, equals, spec = entry.partition("=")
        name, spec = (name, spec) if equals else (entry.removeprefix("builtin:").rpartition(":")[2], entry)
        if name in candidates:
            raise InputError(f"two candidates are called {name!r}; name them: small=pkg.nets:small big=pkg.nets:big")

        def make(spec: str = spec) -> nn.Module:
            # Every restart shall begin elsewhere: the seed is drawn from the generator that is set around this call.
            drawn = int(torch.randint(2**31, (1,)))
            network, _ = build_for(spec, None, training, data_format, device, drawn)
            standardise(network, training)
            return network

        candidates[name] = make
    return candidates


def _table(ranking: Ranking) -> Table:
    tested = ranking.best.test_log_likelihood is not None
    numbers = ["log evidence", "difference", "test log-lik.", "parameters", "effective", "at a mode"]
    numbers = [name for name in numbers if tested or name != "test log-lik."]
    table = plain_table("model", *numbers, right=numbers)
    for row in ranking.table:
        cells: list[Any] = [row["name"], f"{row['log_evidence']:.1f}", f"{row['difference']:.1f}"]
        cells += [f"{row['test_log_likelihood']:.3f}"] if tested else []
        cells += [f"{row['n_params']:,}", f"{row['effective_parameters']:.1f}", "yes" if row["stationary"] else "no"]
        table.add_row(*cells)
    return table
