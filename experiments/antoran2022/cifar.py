"""Can a posterior over all layers of a network with BatchNorm be scaled without a single validation label?

    AFTERMAP_DATA=path/to/data python -m experiments.antoran2022.cifar [--fit-images 2000] [--test-images 1000]

The pretrained ResNet-20 of the data folder, Kronecker factors of its layers from some training images, and five ways to set the
prior and the width of the posterior. Writes cifar.json and cifar.svg into this folder; cifar.md explains them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aftermap as am
from aftermap import metrics
from aftermap.batches import iterate
from aftermap.curvature.passes.products import GGNOperator
from aftermap.laplace.dimension import match_dimension
from aftermap.laplace.examples import informative_examples
from aftermap.likelihoods import Categorical
from aftermap.params import unflatten
from aftermap.predictive import gaussian_prediction, latent_gaussians
from examples.resnet20_cifar10 import ResNet20, batches, images
from experiments.antoran2022.kernel import FullMatrix
from experiments.framework import default_data_dir

DATA = default_data_dir()
TRAINED_ON = 50_000  # images that the network was trained on; the data folder holds 20,000 of them
STRUCTURES = {
    "KFAC expand": {"structure": "kron", "approach": "expand"},
    "KFAC reduce": {"structure": "kron", "approach": "reduce"},
    "EKFAC": {"structure": "ekfac"},
}
Row = dict[str, Any]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def checked(data: list[tuple[Tensor, Tensor]]) -> Any:
    return iterate(data, device=torch.device("cpu"), dtype=torch.float32)


def numbers(method: str, probabilities: Tensor, labels: Tensor, **more: Any) -> Row:
    row = {
        "method": method,
        "accuracy": metrics.accuracy(probabilities, labels),
        "nll": metrics.nll(probabilities, labels),
        "ece": metrics.ece(probabilities, labels),
        **more,
    }
    print(f"{method:58} NLL {row['nll']:.4f}  ECE {row['ece']:.4f}  {more}", flush=True)
    return row


def predicted(la: am.Laplace, variants: list[tuple[Any, float]], x: Tensor, y: Tensor) -> list[Tensor]:
    """Probabilities of several posteriors (the covariance of each divided by its number), one pass through the network."""
    posteriors = [p for p, _ in variants]
    found: list[list[Tensor]] = [[] for _ in variants]
    for batch in checked(batches(x, y)):
        latents = latent_gaussians(la.model, la.posterior, batch, la.predictor.probe(batch), variants=posteriors)
        for place, (latent, (_, divisor)) in enumerate(zip(latents, variants, strict=True)):
            made = gaussian_prediction(
                Categorical(), latent.mean, latent.cov / divisor, link="mc", samples=256, generator=generator()
            )
            found[place].append(made.mean)
    return [torch.cat(parts) for parts in found]


def structure_rows(
    name: str, model: nn.Module, train: Any, tune: Any, x: Tensor, y: Tensor, examples: int
) -> list[Row]:
    """One structure under every way to choose its width."""
    start = time.perf_counter()
    la = am.Laplace(model, "classification", **STRUCTURES[name]).fit(train, progress=False)
    fitted = time.perf_counter() - start
    la.tune(method="evidence")
    print(f"{name}: fitted in {fitted:.0f} s", flush=True)
    mackay = la.posterior
    chosen = [("evidence", mackay, 1.0, {})]
    scale = TRAINED_ON / la.n_data
    for label, s in (("evidence, γ matched", 1.0), ("evidence, γ matched, pseudo-count 50,000", scale)):
        moved = mackay.with_prior(scale=s)
        start = time.perf_counter()
        found = match_dimension(model, checked(train), Categorical(), moved, examples=examples, generator=generator(1))
        more = {
            "gamma": found.gamma.value,
            "gamma_bounds": found.bounds,
            "blocks": found.before.value,
            "factor": found.factor,
            "data_scale": found.data_scale * s,
            "steps": found.steps,
            "seconds": time.perf_counter() - start,
        }
        chosen.append((label, moved, found.factor, more))
    probabilities = predicted(la, [(p, c) for _, p, c, _ in chosen], x, y)
    rows = [
        numbers(f"{name}: {label}", p, y, fit_seconds=fitted, **more)
        for (label, _, _, more), p in zip(chosen, probabilities, strict=True)
    ]
    if tune is not None:
        la.tune(tune, precisions=[3.0, 30.0, 300.0, 3000.0], scales=[2.0**k for k in range(13)])
        more = {"data_scale": la.tuning.data_scale, "precision": la.tuning.precision}
        (p,) = predicted(la, [(la.posterior, 1.0)], x, y)
        rows.append(numbers(f"{name}: validation labels", p, y, **more))
    return rows


def full_rows(model: nn.Module, train: Any, x: Tensor, y: Tensor, examples: int, steps: int, samples: int) -> list[Row]:
    """One prior precision by the evidence of the full Gauss-Newton matrix, and its predictive by sample-then-optimise.

    Lanczos from draws g ~ N(0, G) gives γ(τ) for every τ at once; from b = Gθ* − ∇ it gives the norm of the linear model's
    mode v*(τ) = (G + τ)⁻¹b (one Newton step). MacKay's τ = γ/‖θ‖² and τ = γ/‖v*‖² are then solved on a line.
    """
    count = sum(len(b) for _, b in train)
    chosen = informative_examples(model, checked(train), Categorical(), examples, generator(1))
    operator = GGNOperator(model, [(b.inputs, b.targets, b.weight) for b in chosen], Categorical())
    parameters = list(model.parameters())
    theta = torch.cat([p.detach().reshape(-1) for p in parameters]).double()
    gradient = torch.zeros_like(theta)
    for images_, labels in train:
        loss = F.cross_entropy(model(images_), labels, reduction="sum")
        gradient += torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]).double()
    rows = []
    for label, s in (("", 1.0), (", pseudo-count 50,000", TRAINED_ON / count)):
        noise = math.sqrt(s) * operator.noise(samples, generator(2))
        starts = torch.cat([noise[:, :2], (s * (operator.mv(theta) - gradient))[:, None]], 1)
        T, size = lanczos(lambda v, s=s: s * operator.mv(v), starts, steps)
        values, vectors = torch.linalg.eigh(T)
        weights = size.square()[:, None] * vectors[:, 0].square()

        def gamma(tau: float, values: Tensor = values, weights: Tensor = weights) -> float:
            return float((weights / (values.clamp_min(0) + tau))[:2].sum(1).mean())

        def norm(tau: float, values: Tensor = values, weights: Tensor = weights) -> float:
            return float((weights / (values.clamp_min(0) + tau).square())[2].sum())

        squares = float(theta @ theta)
        for which, distance in (("θ*", lambda tau, squares=squares: squares), ("v* of the linear model", norm)):
            tau = fixed_point(lambda t, distance=distance, gamma=gamma: gamma(t) / distance(t))
            drawn = optimised(operator, noise, tau, s, steps)
            p = sampled(model, drawn, x)
            more = {"precision": tau, "gamma_lower": gamma(tau), "squared_norm": distance(tau), "data_scale": s}
            rows.append(numbers(f"full GGN: evidence at {which}{label}", p, y, **more))
    return rows


def exact_rows(
    model: nn.Module, train: Any, tune: tuple[Tensor, Tensor] | None, x: Tensor, y: Tensor, keep: Any
) -> list[Row]:
    """The same with all fit images and no iteration: every solve is exact (kernel.py)."""
    fit_x, fit_y = (torch.cat(parts) for parts in zip(*train, strict=True))
    full = FullMatrix(model, fit_x, fit_y, x if tune is None else torch.cat([x, tune[0]]))
    rows: list[Row] = []

    def probabilities(tau: float, s: float) -> Tensor:
        made = gaussian_prediction(
            Categorical(), full.outputs.double(), full.covariance(tau, s), link="mc", samples=256, generator=generator()
        )
        return made.mean

    for label, s in (("", 1.0), (", pseudo-count 50,000", TRAINED_ON / len(fit_x))):
        theta = lambda tau: full.theta_squared  # noqa: E731
        mode = lambda tau, s=s: full.mode_squared(tau, s)  # noqa: E731
        for which, distance in (("θ*", theta), ("v* of the linear model", mode)):
            tau = fixed_point(lambda t, s=s, distance=distance: full.gamma(t, s) / distance(t))
            more = {"precision": tau, "gamma": full.gamma(tau, s), "squared_norm": distance(tau), "data_scale": s}
            p = probabilities(tau, s)[: len(x)]
            rows.append(numbers(f"full GGN, all images: evidence at {which}{label}", p, y, **more))
            keep(rows)
        if tune is not None:
            grid = [10.0**k for k in range(-1, 7)]
            scored = {t: metrics.nll(probabilities(t, s)[len(x) :], tune[1]) for t in grid}
            tau = min(scored, key=lambda t: scored[t])
            more = {"precision": tau, "gamma": full.gamma(tau, s), "data_scale": s, "grid": scored}
            p = probabilities(tau, s)[: len(x)]
            rows.append(numbers(f"full GGN, all images: validation labels{label}", p, y, **more))
            keep(rows)
    return rows


def fixed_point(image: Any) -> float:
    tau = 1.0
    for _ in range(100):
        tau = math.sqrt(tau * min(max(image(tau), 1e-6), 1e9))
    return tau


def lanczos(product: Any, starts: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Tridiagonal matrices [k, steps, steps] of every start, and the norms of the starts."""
    size = starts.norm(dim=0)
    q = starts / size
    basis, diagonal, side = [q], [], []
    for step in range(steps):
        r = product(q)
        diagonal.append((q * r).sum(0))
        for _ in range(2):
            for b in basis:
                r = r - b * (b * r).sum(0)
        beta = r.norm(dim=0)
        q = r / beta
        basis.append(q)
        if step < steps - 1:
            side.append(beta)
    off = torch.stack(side, 1)
    return torch.diag_embed(torch.stack(diagonal, 1)) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1), size


def optimised(operator: GGNOperator, noise: Tensor, tau: float, s: float, steps: int) -> Tensor:
    """Samples w = (sG + τ)⁻¹(√s JᵀSε + √τ z) [P, S]; the part of √τ z that the data do not move is w = z/√τ."""
    z = torch.randn(noise.shape, generator=generator(3), dtype=torch.float64)
    start = z / math.sqrt(tau)
    x = start.clone()
    r = noise - s * operator.mv(x)
    p, square = r.clone(), (r * r).sum(0)
    for _ in range(steps):
        moved = s * operator.mv(p) + tau * p
        length = square / (p * moved).sum(0)
        x, r = x + length * p, r - length * moved
        new = (r * r).sum(0)
        p, square = r + new / square * p, new
    return x


def sampled(model: nn.Module, deviations: Tensor, x: Tensor) -> Tensor:
    """Mean probabilities of f + Jw over samples w."""
    own = {n: p.detach() for n, p in model.named_parameters()}
    total = torch.zeros(len(x), 10)
    for part in range(deviations.shape[1]):
        tangent = unflatten(deviations[:, part].float(), own)
        for place in torch.arange(len(x)).split(100):
            with torch.no_grad():
                f, u = torch.func.jvp(
                    lambda w, place=place: torch.func.functional_call(model, w, (x[place],)), (own,), (tangent,)
                )
            total[place] += (f + u).softmax(-1)
    return total / deviations.shape[1]


def draw(rows: list[Row], path: Path) -> None:
    from aftermap.analysis.figures.style import CATEGORIES, axes, finish

    ax = axes(width=7.0, height=0.24 * len(rows) + 0.9)
    colours = [
        CATEGORIES[6] if ":" not in r["method"] else CATEGORIES[1] if "validation" in r["method"] else CATEGORIES[0]
        for r in rows
    ]
    places = range(len(rows))[::-1]
    ax.barh(list(places), [r["nll"] for r in rows], color=colours, height=0.65)
    ax.set_yticks(list(places), [r["method"] for r in rows])
    ax.axvline(rows[0]["nll"], color=CATEGORIES[6], linewidth=0.6, linestyle=":")
    for place, row in zip(places, rows, strict=True):
        ax.text(row["nll"] + 0.01, place, f"{row['nll']:.3f}", va="center", fontsize=6)
    finish(ax, title="Test NLL; blue: no validation label", x="negative log-likelihood")
    ax.figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit-images", type=int, default=2000)
    parser.add_argument("--test-images", type=int, default=1000)
    parser.add_argument("--examples", type=int, default=200, help="informative examples for γ and the full matrix")
    parser.add_argument("--steps", type=int, default=20, help="Lanczos and conjugate-gradient steps of the full matrix")
    parser.add_argument("--samples", type=int, default=8, help="of sample-then-optimise; 0 leaves the full matrix out")
    parser.add_argument(
        "--all-images",
        action="store_true",
        help="the full matrix from all fit images, exactly, instead of the examples",
    )
    parser.add_argument("--structures", default=",".join(STRUCTURES))
    parser.add_argument("--no-validation", action="store_true", help="leave out the comparison with validation labels")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    options = parser.parse_args(arguments)
    if not (DATA / "models" / "cifar10_resnet20.npz").exists():
        sys.exit(f"no data in {DATA}: set AFTERMAP_DATA to the folder with cifar10/ and models/")
    weights = np.load(DATA / "models" / "cifar10_resnet20.npz")
    model = ResNet20()
    model.load_state_dict({k: torch.from_numpy(weights[k]) for k in weights.files})
    model.eval()
    labels = np.load(DATA / "cifar10" / "labels.npz")
    n, m = options.fit_images, options.test_images
    train_x = images(DATA / "cifar10" / "train_00000_09999.webp", n)
    train = batches(train_x, torch.from_numpy(labels["train_labels_all"][: len(train_x)]).long())
    every_x, every_y = (
        images(DATA / "cifar10" / "test_10k.webp", 10_000),
        torch.from_numpy(labels["test_labels"]).long(),
    )
    x, y = every_x[5_000 : 5_000 + m], every_y[5_000 : 5_000 + m]
    tune = None if options.no_validation else batches(every_x[:m], every_y[:m])
    with torch.no_grad():
        plain = torch.cat([model(part) for part in x.split(500)]).softmax(-1)
    rows = [numbers("network (MAP)", plain, y)]
    settings = {"fit_images": len(train_x), "test_images": m, "examples": options.examples, "steps": options.steps}
    settings = {**settings, "samples": options.samples}
    if options.all_images:
        settings = {"fit_images": len(train_x), "test_images": m, "tune_images": m // 2, "all_images": True}
    found = {"settings": settings, "rows": rows}

    def keep() -> None:
        name = "cifar_all_images.json" if options.all_images else "cifar.json"
        (options.output / name).write_text(json.dumps(found, indent=1) + "\n")
        if not options.all_images:
            draw(rows, options.output / "cifar.svg")

    for name in filter(None, options.structures.split(",")):
        rows += structure_rows(name, model, train, tune, x, y, options.examples)
        keep()
    if options.all_images:
        before = list(rows)

        def keep_exact(more: list[Row]) -> None:
            rows[:] = before + more
            keep()

        exact_rows(model, train, None if tune is None else (every_x[: m // 2], every_y[: m // 2]), x, y, keep_exact)
    elif options.samples:
        rows += full_rows(model, train, x, y, options.examples, options.steps, options.samples)
        keep()
    return found


if __name__ == "__main__":
    main()
