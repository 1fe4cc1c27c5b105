"""Draws the pictures of the documentation from the library itself, into docs/images.

    python docs/make_images.py [NAME ...]      # report, layer_shares, gap, moons, evidence, filters; all by default

The picture of the report needs Chromium and its driver (see tests/analysis/browser.py); without them it is left as it is.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aftermap as am  # noqa: E402
from aftermap.analysis.figures import decision_grid, decision_map, finish, regression_band, save_svg  # noqa: E402
from aftermap.baselines import Deterministic  # noqa: E402
from aftermap.data import builtin, photograph_patches, split, toy  # noqa: E402
from aftermap.evaluation import Reference, evaluate, rotate  # noqa: E402
from aftermap.likelihoods import Gaussian  # noqa: E402

__all__ = ["IMAGES", "LIMIT", "main"]

IMAGES = Path(__file__).resolve().parent / "images"
LIMIT = 150_000  # bytes of one picture
Split = tuple[Tensor, Tensor]


def _digits(by_evidence: bool = False) -> tuple[nn.Sequential, am.Laplace, dict[str, Split]]:
    """A small convolutional network on digits, with its posterior tuned by the evidence or on validation data."""
    torch.manual_seed(0)
    parts = split(builtin("digits"), validation=0.2, test=0.25)
    data: dict[str, Split] = {}
    for name, part in parts.items():
        assert part.targets is not None
        data[name] = part.inputs, part.targets
    model = nn.Sequential()
    for name, layer in {
        "conv1": nn.Conv2d(1, 12, 3, padding=1),
        "relu1": nn.ReLU(),
        "pool": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(12, 24, 3, padding=1),
        "relu2": nn.ReLU(),
        "flat": nn.Flatten(),
        "hidden": nn.Linear(384, 48),
        "relu3": nn.ReLU(),
        "out": nn.Linear(48, 10),
    }.items():
        model.add_module(name, layer)
    x, y = data["train"]
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(40):
        for index in torch.randperm(len(x)).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimiser.step()
    la = am.Laplace(model.eval(), "classification").fit([data["train"]])
    return model, la.tune() if by_evidence else la.tune([data["validation"]]), data


def _svg(name: str, figure: Any) -> None:
    text = save_svg(figure)
    # Shown as a picture, an SVG has neither a stylesheet nor a background: dark letters need a light one.
    start = text.index(">", text.index("<svg")) + 1
    text = text[:start] + '<rect width="100%" height="100%" fill="#fff"/>' + text[start:]
    _write(name, text.encode())


def _write(name: str, content: bytes) -> None:
    if len(content) > LIMIT:
        raise SystemExit(f"{name} has {len(content):,} bytes, more than {LIMIT:,}")
    (IMAGES / name).write_bytes(content)
    sys.stdout.write(f"{name}: {len(content) / 1000:.0f} kB\n")


def layer_shares() -> None:
    """Shares of the predictive variance by layer."""
    _, la, data = _digits(by_evidence=True)
    _svg("layer_shares.svg", la.where([data["test"]], saliency=False).figure("layers"))


def filters() -> None:
    """Weights of the first layer's filters beside their deviations."""
    _, la, data = _digits(by_evidence=True)
    figure = la.where([data["test"]], saliency=False).figure("filters", layer="conv1")
    _png("filters.png", _drawn(figure))


def report() -> None:
    """The first screen of a report, in a browser."""
    from tests.analysis.browser import absent, browser

    reason = absent()
    if reason:
        sys.stdout.write(f"report.png is left as it is: {reason}\n")
        return
    model, la, data = _digits()
    x, y = data["test"]
    names = [str(k) for k in range(10)]
    unusual = {
        "turned digits": [(rotate(x, 90.0), None)],
        "photographs": [(photograph_patches(len(x), 8).inputs, None)],
    }
    plain = evaluate(Deterministic(model), [(x, y)], ood=unusual, name="MAP")
    reference = Reference.from_predictions(la.predict(data["validation"][0]))
    bayesian = evaluate(la, [(x, y)], ood=unusual, reference=reference, name="Laplace")
    where = la.where([(x, y)], classes=names)
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "report.html", Path(folder) / "shot.png"
        bayesian.report(
            page,
            map=plain,
            where=where,
            images=x,
            classes=names,
            threshold=reference.threshold(),
            title="Digits: what the network does not know",
        )
        with browser(Path(folder) / "profile") as window:
            window.open(page, width=1100, height=1000)
            window.screenshot(shot)
        _png("report.png", shot.read_bytes(), height=1188)


def _drawn(figure: Any) -> bytes:
    text = io.BytesIO()
    figure.savefig(text, format="png", dpi=160, metadata={"Software": None})
    return text.getvalue()


def _png(name: str, content: bytes, height: int | None = None) -> None:
    """With 128 colours, which is enough for a page and keeps the file small; cut at a height."""
    from PIL import Image

    picture = Image.open(io.BytesIO(content)).convert("RGB")
    if height is not None:
        picture = picture.crop((0, 0, picture.width, min(height, picture.height)))
    text = io.BytesIO()
    picture.quantize(128).save(text, format="png", optimize=True)
    _write(name, text.getvalue())


def gap() -> None:
    """Three posteriors on data with a gap."""
    from matplotlib.figure import Figure

    torch.manual_seed(0)
    data = toy("gap", 100)
    assert data.targets is not None
    x, y = data.inputs.double(), data.targets.double()
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=1500, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        penalty = 0.5 * torch.stack([p.square().sum() for p in model.parameters()]).sum()
        loss = (model(x) - y).square().sum() / (2 * 0.1**2) + penalty
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[arg-type]
    model.eval()
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    grid = torch.linspace(-3, 3, 61, dtype=torch.float64)[:, None]
    cases: dict[str, dict[str, str]] = {
        "full": {"structure": "full"},
        "Kronecker factors": {"structure": "kron"},
        "last layer": {"structure": "full", "params": "last_layer"},
    }
    for ax, (title, options) in zip(panels, cases.items(), strict=True):
        pred = am.Laplace(model, Gaussian(0.1), **options).fit([(x, y)]).predict(grid)  # type: ignore[arg-type]
        regression_band(
            grid[:, 0],
            pred.mean[:, 0],
            pred.total.sqrt()[:, 0],
            data=(x[:, 0], y[:, 0]),
            truth=torch.sin(2 * grid[:, 0]),
            title=title,
            ax=ax,
        )
        ax.set_ylim(-2.5, 2.5)
        if ax is not panels[0]:
            ax.get_legend().remove()
            finish(ax, title=title, x="x")
    _svg("gap.svg", figure)


def moons() -> None:
    """A decision map with sampled boundaries."""
    torch.manual_seed(0)
    data = toy("moons", 200)
    assert data.targets is not None
    x, y = data.inputs, data.targets
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(500):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    la = am.Laplace(model.eval(), "classification", structure="full").fit([(x, y)]).tune()
    across, up, grid = decision_grid((-3.0, -2.5), (4.0, 3.0), n=60)
    pred = la.predict(grid)
    curves = la.function_samples(grid, 20, generator=torch.Generator().manual_seed(0)).softmax(-1)
    ax = decision_map(across, up, pred.mean, samples=curves, points=x, labels=y)
    _png("moons.png", _drawn(ax.figure))


def evidence() -> None:
    """Noise and effective parameters while a network is trained by evidence."""
    from matplotlib.figure import Figure

    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 60)[:, None]
    y = torch.sin(3 * x) + 0.1 * torch.randn(60, 1)
    network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    found = am.train_by_evidence(network, [(x, y)], "regression", epochs=1000, lr=0.1, frequency=20)
    curves = found.curves
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    shown = {
        "log_evidence": "log evidence",
        "noise": "noise σ (true: 0.1)",
        "effective_parameters": "effective parameters",
    }
    for ax, (key, label) in zip(figure.subplots(1, 3), shown.items(), strict=True):
        ax.plot(curves["epoch"], curves[key], color="#0072B2", linewidth=1.2)
        ax.axvline(found.best.epoch, color="#D55E00", linewidth=0.8, linestyle=":")
        finish(ax, title=label, x="epoch")
    _svg("evidence.svg", figure)


DRAWN: dict[str, Callable[[], None]] = {
    "report": report,
    "layer_shares": layer_shares,
    "filters": filters,
    "gap": gap,
    "moons": moons,
    "evidence": evidence,
}


def main(arguments: list[str] | None = None) -> None:
    """Draws the pictures that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args(arguments)
    IMAGES.mkdir(exist_ok=True)
    unknown = set(options.names) - set(DRAWN)
    if unknown:
        parser.error(f"there is no picture {', '.join(sorted(unknown))}; there are {', '.join(DRAWN)}")
    for name in options.names or DRAWN:
        DRAWN[name]()


if __name__ == "__main__":
    main()
