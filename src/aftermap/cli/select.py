"""`aftermap select`: which of several networks the data themselves prefer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from aftermap.cli import options as o
from aftermap.cli.console import GOOD, Speaker, confirmed, guarded
from aftermap.cli.fit import build_for, resolve_task
from aftermap.cli.models import check_device, save_weights
from aftermap.cli.sources import DataOptions, Source, open_source
from aftermap.cli.train import likelihood_of, standardise
from aftermap.errors import InputError
from aftermap.laplace.selection import Ranking
from aftermap.laplace.selection import select as rank_by_evidence

__all__ = ["select"]


@guarded
def select(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Candidates: builtin:mlp, pkg.module:factory, or name=pkg.module:factory."
        ),
    ],
    train: o.Train = None,
    data: o.DataSet = None,
    test: o.Test = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Of training each candidate.")] = 500,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate.")] = None,
    structure: Annotated[
        str, typer.Option("--structure", help="Of the curvature: kron, diagonal, full, ekfac.")
    ] = "kron",
    restarts: Annotated[
        int, typer.Option("--restarts", min=1, help="How often each is trained anew; the best counts.")
    ] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the weights of the best as safetensors.")
    ] = None,
    task: o.Task = "auto",
    target: o.Target = None,
    drop: o.Drop = None,
    data_dir: o.DataDir = None,
    limit: o.Limit = None,
    batch_size: o.BatchSize = 256,
    seed: o.Seed = 0,
    device: o.Device = "cpu",
    force: o.Force = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> int:
    """Train several networks by the evidence and rank them: Occam's razor, without validation data.

    The log evidence is that of the training data under each model; 2.3 nats more are ten times more probable. Test data,
    where given, have no part in the ranking.
    """
    speaker = Speaker(as_json)
    o.one_of("--structure", structure, ("auto", "kron", "diagonal", "full", "ekfac"))
    if output is not None:
        confirmed(output, force=force, what="select")
    if (train is None) == (data is None):
        raise InputError("say which data: --train, or --data for a set that is cut into parts")
    reading = o.data_options(target=target, drop=drop, data_dir=data_dir, limit=limit, batch_size=batch_size, task=task)
    training = open_source(train or str(data), "train", reading)
    tested = open_source(test or str(data), "test", reading) if test or data else None
    where = check_device(device)
    candidates = _candidates(models, training, reading, where)
    network = next(iter(candidates.values()))()
    resolved = resolve_task(task, network, training)
    chosen: dict[str, Any] = {} if lr is None else {"lr": lr}
    ranking = rank_by_evidence(
        candidates,
        training.batches,
        likelihood_of(resolved, None, training),
        test=None if tested is None else tested.batches,
        restarts=restarts,
        generator=torch.Generator().manual_seed(seed),
        epochs=epochs,
        structure=structure,
        **chosen,
    )
    speaker.table(_table(ranking))
    best = ranking.best
    chance = ranking.probabilities[best.name]
    speaker.line(
        f"the data prefer {best.name}: probability {chance:.3g} if all were equally likely before", style="bold green"
    )
    if output is not None:
        save_weights(best.training.model, output)
        speaker.line(f"its weights are in {output}")
    speaker.result({"best": best.name, "probabilities": ranking.probabilities, "table": ranking.table})
    return GOOD


def _candidates(
    models: list[str], training: Source, reading: DataOptions, device: torch.device
) -> dict[str, Callable[[], nn.Module]]:
    found: dict[str, Callable[[], nn.Module]] = {}
    for entry in models:
        name, equals, spec = entry.partition("=")
        name, spec = (name, spec) if equals else (entry.removeprefix("builtin:").rpartition(":")[2], entry)
        if name in found:
            raise InputError(f"two candidates are called {name!r}; name them: small=pkg.nets:small big=pkg.nets:big")

        def make(spec: str = spec) -> nn.Module:
            # Every restart shall begin elsewhere: the seed is drawn from the generator that is set around this call.
            drawn = int(torch.randint(2**31, (1,)))
            network, _ = build_for(spec, None, training, reading, device, drawn)
            standardise(network, training)
            return network

        found[name] = make
    return found


def _table(ranking: Ranking) -> Table:
    table = Table(header_style="bold", pad_edge=False, box=None)
    tested = ranking.best.test_log_likelihood is not None
    table.add_column("model")
    for name in (
        "log evidence",
        "difference",
        *(["test log-lik."] if tested else []),
        "parameters",
        "effective",
        "at a mode",
    ):
        table.add_column(name, justify="right")
    for row in ranking.table:
        cells: list[Any] = [row["name"], f"{row['log_evidence']:.1f}", f"{row['difference']:.1f}"]
        cells += [f"{row['test_log_likelihood']:.3f}"] if tested else []
        cells += [f"{row['n_params']:,}", f"{row['effective_parameters']:.1f}", "yes" if row["stationary"] else "no"]
        table.add_row(*cells)
    return table
