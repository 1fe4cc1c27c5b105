"""Ensembles (claim W6), and how much memory a curvature takes (claim W4)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aftermap as am
from benchmarks.quality.datasets import Images as ImageData
from benchmarks.quality.networks import MLP, ConvNet, LeNet, NetworkSpec
from benchmarks.quality.training import cut
from experiments.framework import Job, Results, Verdict, judged, mean_and_error, paired
from experiments.kniebel2020.images import measured, trained
from experiments.kniebel2020.settings import OTHERS, Settings

__all__ = ["KINDS", "NETWORKS", "jobs", "tables", "verdicts"]

KINDS = {"narrow": "narrow networks", "few": "networks that saw few data"}
TERABYTE = 1e12
# The thesis names kinds of networks, not their sizes: these are of the usual ones.
NETWORKS: dict[str, tuple[NetworkSpec, tuple[int, ...], int]] = {
    "perceptron on Iris": (MLP(()), (4,), 3),
    "MLP on Iris, 4-8-3": (MLP((8,)), (4,), 3),
    "LeNet-5 on MNIST": (LeNet(), (1, 28, 28), 10),
    "two convolutions of 32 and 64, 128 units, on MNIST": (ConvNet((32, 64), 128), (1, 28, 28), 10),
    "MLP on MNIST, 784-1024-1024-10": (MLP((1024, 1024)), (784,), 10),
}


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """Weak against strong, seed by seed; and the bytes of the thesis' networks."""
    yield Job("bytes/all", _bytes)
    for name in settings.weak.sets:
        for seed in range(settings.weak.seeds):
            yield Job(f"weak/{name}/seed{seed}", partial(_weak, settings, data_dir, name, seed))


def _build(widths: tuple[int, ...], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MLP(widths).build((784,), 10)


def _weak(settings: Settings, data_dir: Path, name: str, seed: int) -> dict[str, Any]:
    weak, images = settings.weak, settings.images
    data = ImageData((name,), "flat", images.train, 0, images.test, OTHERS[name], images.unusual)
    splits = data.load(data_dir, seed)
    x, y = splits.train
    strong = trained(_build((weak.strong, weak.strong), 10_000 * (seed + 1)), splits.train, images, seed)
    numbers: dict[str, Any] = {"strong": measured(am.baselines.Deterministic(strong), splits)}
    for kind in KINDS:
        members = []
        for m in range(weak.members):
            start = 10_000 * (seed + 1) + 1 + m
            chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(start))
            if kind == "narrow":
                members.append(trained(_build((weak.narrow,), start), (x, y), images, start))
            else:
                some = chosen[: weak.few]
                members.append(trained(_build(images.widths, start), (x[some], y[some]), images, start))
        with torch.no_grad():
            alone = [float((m(splits.test[0]).argmax(1) == splits.test[1]).double().mean()) for m in members]
        numbers[kind] = measured(am.Ensemble(members), splits) | {"alone": sum(alone) / len(alone)}
    return numbers


def _bytes() -> dict[str, Any]:
    """Bytes of the full matrix by formula, of Kronecker factors and the diagonal by formula and as stored."""
    rows: dict[str, Any] = {}
    for name, (spec, shape, outputs) in NETWORKS.items():
        model = spec.build(shape, outputs).eval()
        weights = sum(p.numel() for p in model.parameters())
        kron = 0
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                kron += (module.weight[0].numel() + 1) ** 2 + len(module.weight) ** 2
        x = torch.rand(8, *shape, generator=torch.Generator().manual_seed(0))
        row: dict[str, Any] = {"weights": weights, "full": 4 * weights**2, "kron": 4 * kron, "diagonal": 4 * weights}
        for structure in ("kron", "diagonal"):
            data, likelihood = cut(x, torch.arange(8) % outputs), am.likelihoods.parse_likelihood("classification")
            factors = am.curvature.fit_curvature(model, data, likelihood, structure=structure)
            stored = [t for block in factors.blocks for t in block.tensors().values()]
            row["layers"] = len(factors.blocks)
            row[f"{structure}_numbers"] = sum(t.numel() for t in stored)
            row[f"{structure}_stored"] = sum(t.numel() * t.element_size() for t in stored)
        rows[name] = row
    return {"networks": rows}


# What came out


def verdicts(results: Results) -> list[Verdict]:
    """W4 and W6."""
    settings = results.settings
    needs = {f"weak/{name}/*": settings.weak.seeds for name in settings.weak.sets}
    needs |= {f"images/{pair}/*": settings.images.seeds for pair in settings.images.perceptrons}
    return [
        *judged(results, {"bytes/all": 1}, ["W4"], lambda r: [_memory(r)]),
        *judged(results, needs, ["W6"], lambda r: [_together(r)]),
    ]


def _memory(results: Results) -> Verdict:
    rows = results.values["bytes/all"]["networks"]
    large = {n: r for n, r in rows.items() if r["weights"] >= 1e6}
    small = {n: r for n, r in rows.items() if n not in large}
    # Kronecker factors come with one counter for each layer.
    exact = all(0 <= r[f"{s}_numbers"] - r[s] // 4 <= r["layers"] for r in rows.values() for s in ("kron", "diagonal"))
    texts = [
        f"{n}: {r['weights']:,} weights, full {_size(r['full'])}, Kronecker factors {_size(r['kron_stored'])} stored, diagonal {_size(r['diagonal_stored'])}"
        for n, r in rows.items()
    ]
    return Verdict.of(
        "W4",
        [
            all(r["full"] >= TERABYTE for r in large.values()) and bool(large),
            all(r["kron_stored"] <= 1e-3 * r["full"] for r in large.values()),
            exact,
        ],
        "; ".join(texts)
        + (
            ". As many numbers are stored as the formula says, and a counter for each layer"
            if exact
            else ". Stored numbers differ from the formula"
        )
        + f". Below a million weights the full matrix takes {_size(max(r['full'] for r in small.values()))} at most",
        "see the bytes",
    )


def _size(count: float) -> str:
    for unit, word in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {word}"
    return f"{count:.0f} bytes"


def _together(results: Results) -> Verdict:
    conditions, against, texts = [], [], []
    for name in results.settings.weak.sets:
        rows = [v for _, v in sorted(results.among(f"weak/{name}/*").items())]
        for kind, label in KINDS.items():
            for key, word in (("accuracy", "accuracy"), ("mean_auroc", "AUROC")):
                difference = paired([r[kind][key] for r in rows], [r["strong"][key] for r in rows])
                conditions.append(difference.higher)
                if not difference.higher:
                    against.append(f"{label} on {name}, {word} {difference}")
            accuracy = [mean_and_error([r[kind][k] for r in rows], 3) for k in ("alone", "accuracy")]
            area = mean_and_error([r[kind]["mean_auroc"] for r in rows], 3)
            texts.append(f"{name}, {label}: {accuracy[0]} alone, {accuracy[1]} together, AUROC {area}")
        strong = [mean_and_error([r["strong"][k] for r in rows], 3) for k in ("accuracy", "mean_auroc")]
        texts.append(f"{name}, strong: {strong[0]}, AUROC {strong[1]}")
    better, pairs = [], results.settings.images.perceptrons
    for pair in pairs:
        rows = [v["methods"] for _, v in sorted(results.among(f"images/{pair}/*").items())]
        difference = paired([r["ensemble"]["mean_auroc"] for r in rows], [r["network"]["mean_auroc"] for r in rows])
        conditions.append(difference.higher)
        better.append(difference.higher)
        if not difference.higher:
            against.append(f"five equal members on {pair}, AUROC {difference}")
    return Verdict.of(
        "W6",
        conditions,
        f"{results.settings.weak.members} weak against one strong network: "
        + "; ".join(texts)
        + f". Five members against one of them: AUROC higher in {sum(better)} of {len(better)} settings",
        "not higher by two standard errors: " + "; ".join(against),
        results.settings.weak.seeds,
    )


def tables(results: Results) -> str:
    """W4's table of bytes."""
    if "bytes/all" not in results.values:
        return ""
    lines = ["### Bytes of a curvature in single precision, by formula (W4)", ""]
    lines += ["| network | weights | full matrix | Kronecker factors | diagonal |", "|---|---|---|---|---|"]
    for name, r in results.values["bytes/all"]["networks"].items():
        sizes = " | ".join(_size(r[k]) for k in ("full", "kron", "diagonal"))
        lines.append(f"| {name} | {r['weights']:,} | {sizes} |")
    return "\n".join(lines)
