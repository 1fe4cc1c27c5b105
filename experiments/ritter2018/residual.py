"""Section 5.4: a residual network with BatchNorm, and its mistakes (claims R16 to R18).

The paper trains wide residual networks on CIFAR-100, with and without dropout. Here one pretrained ResNet-20 on CIFAR-10 stands for them; its
dropout is put in afterwards, with the probability that validation likes best. Seeds are of images, weight samples and masks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import aftermap as am
from aftermap import metrics
from aftermap.analysis.figures import finish, save_svg
from aftermap.baselines import Baseline, Deterministic, Particles
from examples.resnet20_cifar10 import ResNet20
from examples.resnet20_cifar10 import images as tiles
from experiments.framework import Job, Results, Verdict, judged, mean_and_error, result_of, work_folder
from experiments.ritter2018.notmnist import COLOURS, batches, probabilities, tuned_in_stages, undecided
from experiments.ritter2018.settings import Residual

__all__ = ["figures", "jobs", "verdicts"]

NAMES = {
    "deterministic": "deterministic",
    "dropout": "MC dropout",
    "kron": "Kronecker-factored Laplace",
    "diagonal": "diagonal Laplace",
}
STRUCTURES: dict[str, dict[str, str]] = {
    "kron": {"structure": "kron", "curvature": "sampled", "damping": "factored"},
    "diagonal": {"structure": "diagonal", "curvature": "sampled"},
}
COMPARED = ("deterministic", "dropout", "kron")
Pair = tuple[Tensor, Tensor]


@cache
def _images(data_dir: Path, part: str, first: int, count: int) -> Pair:
    """Some images of the training or of the test set, from the first one on."""
    folder = data_dir / "cifar10"
    file, name = {
        "train": ("train_00000_09999.webp", "train_labels_all"),
        "test": ("test_10k.webp", "test_labels"),
    }[part]
    labels = np.load(folder / "labels.npz")[name][first : first + count]
    return tiles(folder / file, first + count)[first:], torch.from_numpy(labels).long()


@dataclass(frozen=True)
class Moved:
    """Batches under the augmentation of training: random crops of the padded image, and reflections.

    Attributes:
        x: The images.
        y: The labels.
        generator: The source of crops and reflections.
    """

    x: Tensor
    y: Tensor
    generator: torch.Generator

    def __iter__(self) -> Iterator[Pair]:
        for x, y in zip(self.x.split(100), self.y.split(100), strict=True):
            padded = F.pad(x, (4, 4, 4, 4))
            places = torch.randint(9, (len(x), 2), generator=self.generator).tolist()
            cut = torch.stack([image[:, a : a + 32, b : b + 32] for image, (a, b) in zip(padded, places, strict=True)])
            turned = torch.rand(len(x), generator=self.generator) < 0.5
            yield torch.where(turned[:, None, None, None], cut.flip(-1), cut), y


def _network(data_dir: Path) -> ResNet20:
    weights = np.load(data_dir / "models" / "cifar10_resnet20.npz")
    model = ResNet20()
    model.load_state_dict({k: torch.from_numpy(weights[k]) for k in weights.files})
    return model.eval()


@dataclass(frozen=True)
class Network:
    """What belongs to one seed.

    Attributes:
        settings: The settings of the part.
        data_dir: The folder with the data sets and the pretrained network.
        seed: The seed.
    """

    settings: Residual
    data_dir: Path
    seed: int

    def generator(self, place: int) -> torch.Generator:
        """A source of random numbers for one purpose."""
        return torch.Generator().manual_seed(1000 * self.seed + place)

    def tuning(self, count: int) -> Pair:
        """Images of the first half of the test set, others for every seed as long as there are."""
        return _images(self.data_dir, "test", self.seed * count % 5000, count)

    def tune(self, method: str) -> dict[str, Any]:
        """Curvature under augmentation, then the grid on images of the first half of the test set."""
        settings = self.settings
        la = am.Laplace(_network(self.data_dir), "classification", **STRUCTURES[method])
        data = Moved(*_images(self.data_dir, "train", self.seed * settings.fit, settings.fit), self.generator(0))
        la.fit(data, passes=settings.passes, generator=self.generator(1), progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", am.errors.StatisticalWarning)  # The edge of the grid is in the numbers.
            tables = tuned_in_stages(
                la,
                [batches(self.tuning(count), 500) for count in settings.tuning],
                settings.tuning_samples,
                settings.kept,
                precisions=settings.ratios,
                scales=settings.scales,
            )
        la.save(work_folder("residual") / f"{method}{self.seed}", overwrite=True)
        deviation = torch.cat([v.flatten() for v in la.posterior.marginal_variance().values()]).sqrt()
        size = torch.cat([p.detach().flatten() for p in la.model.parameters()]).abs()
        scale, precision, nll = min(tables[-1], key=lambda row: row[2])
        return {
            "scale": scale,
            "count": scale * la.n_data,
            "precision": precision,
            "median_deviation": float(deviation.median()),
            "relative_deviation": float((deviation / size.clamp_min(1e-8)).median()),
            "validation_nll": nll,
            "tables": tables,
        }

    def choose_drop(self) -> dict[str, Any]:
        """The likelihood of validation images for each probability of dropping."""
        x, y = self.tuning(self.settings.tuning[0])
        scores = {}
        for p in self.settings.drops:
            masks = am.MCDropout(_network(self.data_dir), samples=self.settings.samples, insert=p)
            scores[p] = metrics.nll(probabilities(masks, x, self.seed, 250), y)
        best = min(scores, key=lambda p: scores[p])
        self._drop.write_text(f"{best}\n", encoding="utf-8")
        return {"drop": best, "scores": list(scores.values())}

    @property
    def _drop(self) -> Path:
        return work_folder("residual") / f"drop{self.seed}.txt"

    def predictor(self, method: str) -> Baseline:
        """What predicts."""
        model, settings = _network(self.data_dir), self.settings
        if method == "deterministic":
            return Deterministic(model)
        if method == "dropout":
            if not self._drop.is_file():
                self.choose_drop()
            return am.MCDropout(model, samples=settings.samples, insert=float(self._drop.read_text()))
        if not (work_folder("residual") / f"{method}{self.seed}").exists():
            self.tune(method)
        la = am.load(work_folder("residual") / f"{method}{self.seed}", model)
        assert isinstance(la, am.Laplace)
        return Particles(model, la.ensemble(settings.samples, self.generator(2)))

    def evaluate(self, method: str) -> dict[str, Any]:
        """Accuracy, and the entropy of right and of wrong answers."""
        if method == "deterministic" and self.seed:
            return result_of("residual/deterministic/seed0")  # one network, the same images: nothing is drawn
        x, y = _images(self.data_dir, "test", 5000, self.settings.test)
        p = probabilities(self.predictor(method), x, self.seed, 250)
        entropy, wrong = metrics.entropy(p), metrics.misclassified(p, y)
        levels = torch.linspace(0, 1, 101, dtype=entropy.dtype)
        return {
            "accuracy": metrics.accuracy(p, y),
            "nll": metrics.nll(p, y),
            "ece": metrics.ece(p, y),
            "error_auroc": metrics.auroc(entropy, wrong) if 0 < int(wrong.sum()) < len(y) else math.nan,
            "entropy_wrong": float(entropy[wrong].mean()) if bool(wrong.any()) else math.nan,
            "entropy_right": float(entropy[~wrong].mean()),
            "curves": {
                "right": entropy[~wrong].quantile(levels).tolist(),
                "wrong": entropy[wrong].quantile(levels).tolist() if bool(wrong.any()) else [],
            },
        }


def jobs(settings: Residual, data_dir: Path) -> Iterator[Job]:
    """Both posteriors and what four methods say, for every seed."""
    for seed in range(settings.seeds):
        network = Network(settings, data_dir, seed)
        for method in STRUCTURES:
            yield Job(f"residual/tune_{method}/seed{seed}", partial(network.tune, method))
        yield Job(f"residual/drop/seed{seed}", network.choose_drop)
        for method in NAMES:
            yield Job(f"residual/{method}/seed{seed}", partial(network.evaluate, method))


# Verdicts


def verdicts(results: Results) -> list[Verdict]:
    """R16 to R18."""
    count = results.settings.residual.seeds
    every = {f"residual/{m}/*": count for m in COMPARED}
    tuned = {
        **{f"residual/tune_{m}/*": count for m in STRUCTURES},
        "notmnist/tune_kron/*": results.settings.images.seeds,
    }
    return [
        *judged(results, every, ("R16", "R17"), lambda r: [_accuracy(r), _mistakes(r)]),
        *judged(results, tuned, ("R18",), lambda r: [_stronger(r)]),
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _accuracy(results: Results) -> Verdict:
    found = {m: [100 * v for v in results.numbers(f"residual/{m}/*", "accuracy")] for m in COMPARED}
    difference = _mean(found["kron"]) - _mean(found["deterministic"])
    ours = ", ".join(f"{NAMES[m]} {mean_and_error(v, 2)} %" for m, v in found.items())
    reason = f"the accuracy differs by {difference:+.2f} points"
    return Verdict.of("R16", abs(difference) <= 0.5, ours, reason, len(found["kron"]))


def _mistakes(results: Results) -> Verdict:
    def numbers(name: str) -> dict[str, list[float]]:
        values = {m: results.among(f"residual/{m}/*").values() for m in COMPARED}
        return {m: [float(v[name]) for v in rows if v[name] is not None] for m, rows in values.items()}

    scores, wrong, right = numbers("error_auroc"), numbers("entropy_wrong"), numbers("entropy_right")
    means = [_mean(v) for v in scores.values()]
    conditions = [
        all(_mean(wrong[m]) > _mean(right[m]) for m in COMPARED),
        all(_mean(part[m]) > _mean(part["deterministic"]) for part in (wrong, right) for m in ("dropout", "kron")),
        max(means) - min(means) <= 0.02,
    ]
    ours = "; ".join(
        f"{NAMES[m]}: AUROC {mean_and_error(scores[m])}, entropy {_mean(wrong[m]):.2f} wrong, {_mean(right[m]):.2f} right"
        for m in COMPARED
    )
    parts = ("errors more uncertain", "both raised", "AUROC within 0.02")
    reason = ", ".join(f"{name} {'yes' if held else 'no'}" for name, held in zip(parts, conditions, strict=True))
    accuracy = {m: 100 * _mean(results.numbers(f"residual/{m}/*", "accuracy")) for m in COMPARED}
    gap = _mean(scores["kron"]) - _mean(scores["deterministic"])
    why = (
        f"Kronecker-factored Laplace differs from the network by {gap:+.3f}. The network was not trained with dropout, and masks that are put in afterwards "
        f"change its accuracy by {accuracy['dropout'] - accuracy['deterministic']:+.1f} points"
    )
    return Verdict.of("R17", conditions, ours, f"{reason}. {why}", len(scores["kron"]))


def _stronger(results: Results) -> Verdict:
    def geometric(pattern: str, name: str) -> float:
        return math.exp(_mean([math.log(v) for v in results.numbers(pattern, name)]))

    scale, precision = (geometric("residual/tune_kron/*", n) for n in ("scale", "precision"))
    digits_scale, digits_precision = (geometric("notmnist/tune_kron/*", n) for n in ("scale", "precision"))
    relative = _mean(results.numbers("residual/tune_diagonal/*", "relative_deviation"))
    conditions = [scale >= 10 * digits_scale, precision >= 10 * digits_precision, relative <= 0.01]
    median = _mean(results.numbers("residual/tune_diagonal/*", "median_deviation"))
    ours = (
        f"N × {scale:.3g} against {digits_scale:.3g} on MNIST (N {geometric('residual/tune_kron/*', 'count'):.3g} against "
        f"{digits_scale * results.settings.images.fit:.3g}), τ {precision:.3g} against {digits_precision:.3g}; "
        f"median standard deviation of the diagonal posterior {median:.2g}, {relative:.2g} of the weight's size"
    )
    parts = ("N ten times larger", "τ ten times larger", "diagonal below a hundredth of the weights")
    reason = ", ".join(f"{name} {'yes' if held else 'no'}" for name, held in zip(parts, conditions, strict=True))
    each = ", ".join(f"{v:.2g}" for v in results.numbers("residual/tune_diagonal/*", "relative_deviation"))
    why = f"Within 0.001 nats of the best are {undecided(results, 'residual/tune_kron/*')} (on MNIST {undecided(results, 'notmnist/tune_kron/*')}); the diagonal posterior has {each} of the weight's size in the seeds"
    return Verdict.of("R18", conditions, ours, f"{reason}. {why}", len(results.among("residual/tune_kron/*")))


# Figures


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Figure 5: the share of right and of wrong answers with at least so much entropy, first seed; returns its caption."""
    found = {m: results.values.get(f"residual/{m}/seed0") for m in NAMES}
    if any(value is None for value in found.values()):
        return {}
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for ax, (part, title) in zip(panels, (("wrong", "misclassified"), ("right", "correct")), strict=True):
        for method, value in found.items():
            assert value is not None
            levels = value["curves"][part]
            share = [1 - k / 100 for k in range(len(levels))]
            ax.plot(levels, share, color=COLOURS[method], lw=1.2, label=NAMES[method])
        ax.set(xlim=(0, math.log(10)), ylim=(0, 1))
        finish(
            ax, title=title, x="entropy (nats)", y="share with more" if ax is panels[0] else "", legend=part == "right"
        )
    (folder / "figure5.svg").write_text(save_svg(figure), encoding="utf-8")
    return {"figure5.svg": "Figure 5: entropy of wrong and of right answers of the residual network; first seed."}
