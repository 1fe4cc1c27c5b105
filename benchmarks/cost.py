"""Is the cost line true? The estimate of every structure, network and command beside what it took.

    python -m benchmarks.cost                             # all cases; writes results/cost.json
    python -m benchmarks.cost --networks lenet,table      # these anew, the others as they were
    python -m benchmarks.cost --quick                     # small data, two networks; nothing is written
    python -m benchmarks.cost --networks ""               # nothing anew: the table of benchmarks/README.md from the results

Times are of the processor, with one thread, so that other work on the machine does not count; the estimate's own measurement uses the same clock.
The estimate was worked on with the networks of `CHOSEN_WITH`; those of `KEPT_APART` were measured once, afterwards.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import aftermap as am
from aftermap.batches import unpack_batch
from aftermap.cli import cost as command_costs
from aftermap.cli.app import app
from aftermap.cli.builtin import build_network
from aftermap.errors import AftermapError
from aftermap.laplace import cost as cost_module
from aftermap.laplace import estimate_cost
from aftermap.laplace import rehearsal as rehearsal_module
from aftermap.laplace.auto import predictions_after_fit
from aftermap.laplace.rehearsal import seconds_per_input
from aftermap.likelihoods import Categorical, Gaussian, Likelihood
from benchmarks.models import Batch, make
from benchmarks.timing import machine

__all__ = ["main", "measure", "table"]

FACTOR, SHARE = 1.5, 0.9  # what is to be reached: within this factor in this share of the cases
CHOSEN_WITH = ("mlp", "lenet", "resnet20", "transformer", "table", "classes")
KEPT_APART = ("recurrent", "wrn16_2", "mobile", "gpt")
# Structures of all parameters that are fitted: others take hours, or more memory than there is.
LARGE = ("kron", "ekfac", "diagonal")
SMALL = (*LARGE, "kfra", "full", "low_rank", "subset", "matrix_free")
# Networks of the command line, with the numbers of data to fit, to tune with, and to evaluate and predict.
COMMAND_LINE = {"lenet": (512, 1000, 1500), "resnet20": (128, 200, 200)}
RESULTS = Path(__file__).resolve().parent / "results" / "cost.json"
Entry = dict[str, Any]
Case = tuple[nn.Module, list[Batch], Likelihood]


class _ProcessorTime:
    """Stands for the module `time` in the estimate: its clock is that of the processor."""

    perf_counter = staticmethod(time.process_time)


class Recurrent(nn.Module):
    """Tokens, a gated recurrent layer, and a head on its last state."""

    def __init__(self, vocabulary: int = 500, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(tokens))
        return self.head(states[:, -1])


class Inverted(nn.Sequential):
    """A residual block with its wide side inside: 1×1 to four times the channels, 3×3 on each channel alone, 1×1 back."""

    def __init__(self, width: int):
        wide = 4 * width
        activations = [nn.BatchNorm2d(wide), nn.ReLU6()]
        outer, back = nn.Conv2d(width, wide, 1, bias=False), nn.Conv2d(wide, width, 1, bias=False)
        alone = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        super().__init__(outer, *activations, alone, nn.BatchNorm2d(wide), nn.ReLU6(), back, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def _mobile() -> nn.Module:
    """A small MobileNet for 24×24: two stages of two inverted blocks, 16 and 32 channels wide."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    layers += [Inverted(16), Inverted(16), nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32)]
    layers += [nn.ReLU6(), Inverted(32), Inverted(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*layers)


class Causal(nn.Module):
    """A block of a GPT: attention to earlier tokens and two layers on each token, both with a norm before and a sum after."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.packed, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.tokens = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.packed(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).flatten(2))
        return x + self.tokens(self.norm2(x))


class SmallGPT(nn.Module):
    """Tokens and their places, two causal blocks, and the next token after the last one."""

    def __init__(self, vocabulary: int = 40, length: int = 16, width: int = 64):
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(Causal(width, 4), Causal(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.places))[:, -1])


def _network(name: str, quick: bool) -> Case:
    """A network with random weights, and data for a fit of some seconds."""
    plans = {"mlp": (8, 128), "lenet": (48, 64), "resnet20": (3, 64), "transformer": (6, 32), "wrn16_2": (3, 32)}
    if name in plans:
        batches, size = plans[name]
        model, data = make(name, batches=2 if quick else batches, size=size)
        return model.eval(), data, Categorical()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 8, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "recurrent":
            tokens = torch.randint(500, (512, 12), generator=generator)
            labels = torch.randint(5, (512,), generator=generator)
            return Recurrent().eval(), list(zip(tokens.split(64), labels.split(64), strict=True)), Categorical()
        if name == "mobile":
            images, labels = (
                torch.randn(256, 3, 24, 24, generator=generator),
                torch.randint(10, (256,), generator=generator),
            )
            return _mobile().eval(), list(zip(images.split(64), labels.split(64), strict=True)), Categorical()
        if name == "gpt":
            tokens = torch.randint(40, (256, 17), generator=generator)
            pairs = zip(tokens[:, :-1].split(64), tokens[:, -1].split(64), strict=True)
            return SmallGPT().eval(), list(pairs), Categorical()
        if name == "table":
            small = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1)).eval()
            return small, list(zip(x.split(200), x[:, :1].sin().split(200), strict=True)), Gaussian()
        model = nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 4)).eval()
    return model, list(zip(x.split(200), x[:, :4].argmax(1).split(200), strict=True)), Categorical()


def _seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def _row(network: str, command: str, estimate: float, took: float, spent: float) -> Entry:
    """A case: the estimate, the truth, and what the estimate itself took."""
    numbers = {"estimate": estimate, "took": took, "spent": spent}
    ratio = {"ratio": round(estimate / max(took, 1e-9), 3)}
    return {"network": network, "command": command, **{k: round(v, 4) for k, v in numbers.items()}, **ratio}


def _fits(name: str, case: Case) -> list[Entry]:
    """Every structure: the estimate before its fit, and the fit."""
    model, data, likelihood = case
    small = sum(p.numel() for p in model.parameters()) < 2000
    blocks = ("last_block",) if name in ("resnet20", "wrn16_2", "transformer", "mobile", "gpt") else ()
    rows = []
    for structure, params in [(s, "all") for s in (SMALL if small else LARGE)] + [
        ("kron", p) for p in (*blocks, "last_layer")
    ]:
        laplace = am.Laplace(model, likelihood, structure=structure, params=params)
        before = time.process_time()
        estimate = estimate_cost(laplace, data, tuned=False).seconds
        spent = time.process_time() - before
        took = _seconds(lambda laplace=laplace: laplace.fit(data, progress=False))  # type: ignore[misc]
        rows.append(_row(name, f"fit {structure} {params}", estimate, took, spent))
    return rows


def _note_time(times: list[float], line: str) -> None:
    times.append(time.process_time())


def _commands(name: str, case: Case) -> list[Entry]:
    """The one call with its tuning and its check, with and without validation data, and predictions of both kinds."""
    model, data, likelihood = case
    rows = []
    made: am.Laplace | None = None
    for held_out in (data[:2], None):
        came: list[float] = []  # when the cost line was there
        start = time.process_time()
        say = functools.partial(_note_time, came)
        made = am.fit(model, likelihood, data, held_out, verbose=False, on_cost=say)
        end = time.process_time()
        assert made.report is not None
        chosen = made.report.chosen
        words = f"am.fit{'' if held_out else ' without validation'}: {chosen.structure} {chosen.params}"
        estimate = chosen.total(predictions_after_fit(held_out))
        rows.append(_row(name, words, estimate, end - came[0], came[0] - start))
    assert made is not None
    x = torch.cat([x for x, _ in data])[:384]
    kinds = ("linearised", "margin") if isinstance(likelihood, Categorical) else ("linearised",)
    for kind in kinds:
        before = time.process_time()
        each = seconds_per_input(made, unpack_batch((x[:256], x[:256])), {"kind": kind})
        spent = time.process_time() - before
        took = _seconds(lambda made=made, kind=kind: made.predict(x, kind=kind, progress=False))  # type: ignore[misc]
        rows.append(_row(name, f"predict {kind}", each * len(x), took, spent))
    return rows


def _command_line(name: str) -> list[Entry]:
    """`aftermap tune`, `evaluate` and `predict` of a built-in network with random weights: what each says, and what it takes from then on."""
    sizes = dict(zip(("train", "val", "test"), COMMAND_LINE[name], strict=True))
    _, data = make(name, size=sum(sizes.values()))
    rows: list[Entry] = []
    said: list[tuple[float, float]] = []  # the seconds that were said, and when

    def say(seconds: float) -> str:
        said.append((seconds, time.process_time()))
        return "some time"

    for member, value in (("time", _ProcessorTime), ("in_seconds", say), ("_SAID", 0.0), ("_LONG", float("inf"))):
        setattr(command_costs, member, value)
    with tempfile.TemporaryDirectory() as place:
        folder, posterior = Path(place), f"{place}/posterior"
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = build_network(name, tuple(data[0][0].shape[1:]), 10)
        torch.save(network.state_dict(), folder / "weights.pt")
        parts = zip(*(t.split(list(sizes.values())) for t in data[0]), strict=True)
        for part, (x, y) in zip(sizes, parts, strict=True):
            np.savez(folder / f"{part}.npz", x=x.numpy(), y=y.numpy())
        train, val, test = (f"{place}/{part}.npz" for part in sizes)
        model = ["--model", f"builtin:{name}", "--weights", f"{place}/weights.pt"]
        _invoke("fit", *model, "--train", train, "--no-tune", "-o", posterior)
        for command, *rest in (
            ["tune", posterior, "--val", val, "--force"],
            ["evaluate", posterior, "--test", test],
            ["predict", posterior, test, "-o", f"{place}/predicted.csv"],
        ):
            said.clear()
            start = time.process_time()
            _invoke(command, *rest)
            estimate, since = said[0]
            rows.append(_row(name, f"aftermap {command}", estimate, time.process_time() - since, since - start))
    return rows


def _invoke(*words: str) -> None:
    result = CliRunner().invoke(app, list(words))
    if result.exit_code not in (0, 3):  # With random weights a check may fail.
        raise RuntimeError(f"aftermap {' '.join(words)} ended with {result.exit_code}: {result.output}")


def measure(name: str, *, quick: bool = False) -> list[Entry]:
    """All cases of a network: the estimate, and what it took."""
    for module in (cost_module, rehearsal_module):
        module.time = _ProcessorTime  # type: ignore[attr-defined]
    case = _network(name, quick)
    by_command_line = _command_line(name) if name in COMMAND_LINE and not quick else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = _fits(name, case)
        try:
            return [*rows, *_commands(name, case), *by_command_line]
        except AftermapError as error:
            return [*rows, *by_command_line, {"network": name, "command": "am.fit", "error": str(error)[:200]}]


def _is_good(row: Entry) -> bool:
    return 1 / FACTOR <= row["ratio"] <= FACTOR or max(row["estimate"], row["took"]) < 1.0


def summary(rows: Sequence[Entry]) -> Entry:
    """The share of good cases: of the networks that the estimate was worked on with, and of those that were kept apart."""
    shares: Entry = {"reach": SHARE}
    for key, names in (("within", CHOSEN_WITH), ("within_kept_apart", KEPT_APART)):
        own = [r for r in rows if r["network"] in names and "ratio" in r]
        long = [r for r in own if max(r["estimate"], r["took"]) >= 1.0]
        if own:
            shares[key] = round(sum(map(_is_good, own)) / len(own), 3)
        if long:
            shares[f"{key}_above_a_second"] = round(sum(map(_is_good, long)) / len(long), 3)
    return shares


def table(results: Entry) -> str:
    """The cases as text."""
    lines = [f"{'network':12} {'command':40} {'estimate':>9} {'took':>9} {'ratio':>6} {'spent':>6}"]
    for row in results["rows"]:
        if "error" in row:
            lines.append(f"{row['network']:12} {row['command']:40} {row['error']}")
            continue
        numbers = f"{row['estimate']:9.2f} {row['took']:9.2f} {row['ratio']:6.2f} {row['spent']:6.2f}"
        lines.append(f"{row['network']:12} {row['command']:40} {numbers}{'' if _is_good(row) else '  off'}")
    for key in ("within", "within_kept_apart"):
        if key in results:
            above = results.get(f"{key}_above_a_second")
            share = f"{100 * results[key]:.0f} % within a factor of {FACTOR:g} or below a second"
            lines.append(f"{key}: {share}; to reach: {100 * SHARE:.0f} %")
            if above is not None:
                lines.append(f"{key}, cases above a second: {100 * above:.0f} %")
    return "\n".join(lines)


def markdown(results: Entry) -> str:
    """The ratios as the table of benchmarks/README.md, with what each case took."""
    rows = [r for r in results["rows"] if "ratio" in r]
    names = [n for n in (*CHOSEN_WITH, *KEPT_APART) if any(r["network"] == n for r in rows)]
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        command = row["command"].partition(":")[0]  # am.fit has the structure that it chose behind it
        cells.setdefault(command, {})[row["network"]] = f"{row['ratio']:.2f} ({row['took']:.1f} s)"
    head = f"| | {' | '.join(names)} |\n|---|{'---:|' * len(names)}"
    return "\n".join([head, *(f"| {c} | {' | '.join(of.get(n, '–') for n in names)} |" for c, of in cells.items())])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join((*CHOSEN_WITH, *KEPT_APART)), help="names, with commas")
    parser.add_argument("--quick", action="store_true", help="two networks, small data, nothing written")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = ["lenet", "classes"] if chosen.quick else [n for n in chosen.networks.split(",") if n]
    known: Entry = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() and not chosen.quick else {}
    rows = known.get("rows", [])
    for name in names:
        own = measure(name, quick=chosen.quick)
        print(table({"rows": own}), file=sys.stderr, flush=True)
        rows = [r for r in rows if r["network"] != name] + own
        if not chosen.quick:
            results = {"machine": machine(), "rows": rows, **summary(rows)}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table({"rows": rows, **summary(rows)}) if names else markdown(known))
    return 0


if __name__ == "__main__":
    sys.exit(main())
