"""Section 5.2 and appendix F: a network that knows digits is shown letters (claims R6 to R9).

The network, its curvature and its tuned posteriors are kept in the work folder; sections 5.3 and the appendices use them, too. Where only the
numbers of a job are left (--resume on another machine), what it kept is made again from the same seeds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics
from aftermap.analysis.figures import CATEGORIES, axes, finish, save_svg
from aftermap.baselines import Baseline, Deterministic, Particles
from experiments.framework import (
    Job,
    Results,
    Verdict,
    judged,
    labelled,
    mean_and_error,
    paired,
    result_of,
    work_folder,
)
from experiments.ritter2018.settings import Images

__all__ = [
    "COLOURS",
    "METHODS",
    "NAMES",
    "Digits",
    "chosen",
    "figures",
    "jobs",
    "shown",
    "tables",
    "undecided",
    "verdicts",
]

NAMES = {
    "deterministic": "deterministic",
    "dropout": "MC dropout",
    "diagonal": "diagonal Laplace",
    "kron": "Kronecker-factored Laplace",
    "field": "mean-field VI",
}
COLOURS = dict(zip(NAMES, CATEGORIES, strict=False))
METHODS: dict[str, dict[str, str]] = {
    "kron": {"structure": "kfra", "damping": "factored"},
    "diagonal": {"structure": "diagonal", "curvature": "sampled"},
}
# Without augmentation (appendix C). KFRA with batches of one gives the Kronecker factors of the exact matrix.
PLAIN: dict[str, dict[str, str]] = {
    "plain": METHODS["kron"],
    "few": METHODS["kron"],
    "exact": {"structure": "kron", "curvature": "exact", "damping": "factored"},
}
_TRIAL_SEED = 100  # none of those in the table
Pair = tuple[Tensor, Tensor]


def images(data_dir: Path, name: str, part: str) -> Pair:
    """Images [N, 784] with values from 0 to 1, and labels."""
    inputs, labels = labelled(data_dir, name, part)
    return inputs.flatten(1), labels


@dataclass(frozen=True)
class Binarised:
    """Batches of images whose pixels are drawn anew, black or white by their intensity, at every pass.

    Attributes:
        x: The intensities.
        y: The labels.
        size: The size of a batch.
        generator: The source of pixels and order.
        shuffled: Whether the order is new at every pass.
    """

    x: Tensor
    y: Tensor
    size: int
    generator: torch.Generator
    shuffled: bool = False

    def __iter__(self) -> Iterator[Pair]:
        count = len(self.x)
        order = torch.randperm(count, generator=self.generator) if self.shuffled else torch.arange(count)
        for index in order.split(self.size):
            yield torch.bernoulli(self.x[index], generator=self.generator), self.y[index]


def batches(pair: Pair, size: int) -> list[Pair]:
    return list(zip(pair[0].split(size), pair[1].split(size), strict=True))


def network(width: int) -> nn.Sequential:
    """784-1024-1024-10 at full width, with dropout after both inner layers."""
    return nn.Sequential(
        nn.Linear(784, width),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(width, 10),
    )


@dataclass(frozen=True)
class Digits:
    """What belongs to one seed.

    Attributes:
        settings: The settings of the part.
        data_dir: The folder with the data sets.
        seed: The seed.
    """

    settings: Images
    data_dir: Path
    seed: int

    def generator(self, place: int = 0) -> torch.Generator:
        """A source of random numbers for one purpose."""
        return torch.Generator().manual_seed(1000 * self.seed + place)

    def data(self, part: str, count: int) -> Pair:
        """The first images of a part of MNIST."""
        x, y = images(self.data_dir, "mnist", part)
        return x[:count], y[:count]

    @property
    def test(self) -> Pair:
        """The test images."""
        return self.data("test", self.settings.test)

    @property
    def folder(self) -> Path:
        """Where weights and posteriors are kept."""
        return work_folder("digits")

    @property
    def weights(self) -> Path:
        """The file of the trained weights."""
        return self.folder / f"network{self.seed}.pt"

    def trained(self) -> nn.Sequential:
        """The trained network."""
        if not self.weights.is_file():
            print(f"notmnist/train/seed{self.seed} again: {self.train()}", flush=True)
        model = network(self.settings.width)
        model.load_state_dict(torch.load(self.weights, weights_only=True))
        return model.eval()

    def train(self) -> dict[str, Any]:
        """Trains the network with the rate and the weight decay that the trials liked best."""
        rate, decay = best_trial(self.settings)
        model = self._descend(rate, decay, self.settings.epochs)
        torch.save(model.state_dict(), self.weights)
        accuracy = _share(Deterministic(model), self.test)
        return {"accuracy": accuracy, "epochs": self.settings.epochs, "rate": rate, "decay": decay}

    def trial(self, rate: float, decay: float) -> dict[str, Any]:
        """A short training, and what held-out images of the training part say about it."""
        x, y = self.data("validation", self.settings.validation[-1])
        p = probabilities(Deterministic(self._descend(rate, decay, self.settings.trial_epochs)), x)
        return {"validation_nll": metrics.nll(p, y), "validation_accuracy": metrics.accuracy(p, y)}

    def _descend(self, rate: float, decay: float, epochs: int) -> nn.Sequential:
        """Stochastic gradient descent with momentum and a rate that falls to zero along a cosine; what was interrupted goes on after its last epoch."""
        settings, part = self.settings, self.folder / f"training{self.seed}_{rate:g}_{decay:g}.pt"
        x, y = self.data("train", settings.train)
        torch.manual_seed(self.seed)
        model = network(settings.width)
        optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
        first = 0
        if part.is_file():
            model_state, optimiser_state, schedule_state, first = torch.load(part, weights_only=True)
            model.load_state_dict(model_state)
            optimiser.load_state_dict(optimiser_state)
            schedule.load_state_dict(schedule_state)
        for epoch in range(first, epochs):
            torch.manual_seed(1000 * self.seed + epoch)  # of the dropout
            for inputs, labels in Binarised(x, y, settings.train_batch, self.generator(epoch), shuffled=True):
                optimiser.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimiser.step()
            schedule.step()
            torch.save((model.state_dict(), optimiser.state_dict(), schedule.state_dict(), epoch + 1), part)
        part.unlink(missing_ok=True)
        return model.eval()

    def fit(self, name: str) -> dict[str, Any]:
        """The curvature of the trained network by one of the methods, kept before it is tuned."""
        settings, passes = self.settings, 1
        count, size = (settings.fit, settings.batch) if name in (*METHODS, "plain") else (settings.exact_fit, 100)
        data: Any = batches(self.data("train", count), size)
        if name in METHODS:
            data, passes = Binarised(*self.data("train", count), size, self.generator(40)), settings.passes
        la = am.Laplace(self.trained(), "classification", **{**METHODS, **PLAIN}[name])
        la.fit(data, passes=passes, generator=self.generator(50), progress=False)
        la.save(self.folder / f"{name}{self.seed}_untuned", overwrite=True)
        return {"n_data": count, "passes": passes}

    def tune(self, name: str) -> dict[str, Any]:
        """The grid of the paper: scale and precision by the likelihood of held-out images under weight samples."""
        settings = self.settings
        la = self.untuned(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", am.errors.StatisticalWarning)  # The edge of the grid is in the numbers.
            tables = tuned_in_stages(
                la,
                [[self.data("validation", count)] for count in settings.validation],
                settings.tuning_samples,
                settings.kept,
                precisions=settings.ratios,
                scales=settings.scales,
            )
        la.save(self.folder / f"{name}{self.seed}", overwrite=True)
        deviations = _deviations(la)
        best = min(tables[-1], key=lambda row: row[2])
        return {
            "scale": best[0],
            "precision": best[1],
            "validation_nll": best[2],
            "mean_deviation": float(deviations.mean()),
            "median_deviation": float(deviations.median()),
            "tables": tables,
        }

    def widen(self) -> dict[str, Any]:
        """The widest Kronecker-factored posterior of the grid that costs held-out images at most ``wide`` nats; no claim is judged by it."""
        rows = result_of(f"notmnist/tune_kron/seed{self.seed}")["tables"][0]
        least, la = min(row[2] for row in rows), self.untuned("kron")
        sizes = []
        for row in rows:
            if row[2] <= least + self.settings.wide:
                _set_point(la, row)
                sizes.append((float(_deviations(la).mean()), row))
        size, widest = max(sizes)
        _set_point(la, widest)
        la.save(self.folder / f"wide{self.seed}", overwrite=True)
        return {"scale": widest[0], "precision": widest[1], "validation_nll": widest[2], "mean_deviation": size}

    def untuned(self, name: str) -> am.Laplace:
        """The posterior before tuning."""
        return self._kept(f"{name}{self.seed}_untuned", partial(self.fit, name))

    def laplace(self, name: str) -> am.Laplace:
        """The tuned posterior."""
        return self._kept(f"{name}{self.seed}", self.widen if name == "wide" else partial(self.tune, name))

    def _kept(self, folder: str, make: Callable[[], Any]) -> am.Laplace:
        if not (self.folder / folder).exists():
            make()
        la = am.load(self.folder / folder, self.trained())
        assert isinstance(la, am.Laplace)
        return la

    def predictor(self, method: str, samples: int) -> Baseline:
        """What predicts, with a fixed set of weight samples where it has such."""
        if method == "deterministic":
            return Deterministic(self.trained())
        if method == "dropout":
            return am.MCDropout(self.trained(), samples=samples)
        if method == "field":
            if not (self.folder / f"field{self.seed}.pt").is_file():
                self.field()
            states = torch.load(self.folder / f"field{self.seed}.pt", weights_only=True)
            return Particles(self.trained(), [_drawn(*states, self.generator(200 + k)) for k in range(samples)])
        la = self.laplace(method)
        return Particles(la.model, la.ensemble(samples, self.generator(60)))

    def field(self) -> dict[str, Any]:
        """Mean-field inference that begins at the trained network; means and deviations are kept."""
        settings = self.settings
        model = self.trained()
        field = am.MeanField(model, prior_precision=1.0, initial_scale=0.02)
        data = Binarised(*self.data("train", settings.train), settings.train_batch, self.generator(70), shuffled=True)
        field.fit(
            data, epochs=settings.field_epochs, n_data=settings.train, generator=self.generator(71), progress=False
        )
        torch.save((dict(field.mean), dict(field.deviation)), self.folder / f"field{self.seed}.pt")
        return {"objective": field.history}

    def evaluate(self, method: str) -> dict[str, Any]:
        """Accuracy and likelihood on digits, entropy on letters."""
        settings = self.settings
        predictor = self.predictor(method, settings.samples)
        letters, _ = images(self.data_dir, "notmnist", "test")
        inside = probabilities(predictor, self.test[0])
        outside = metrics.entropy(probabilities(predictor, letters[: settings.letters]))
        labels, own = self.test[1], metrics.entropy(inside)
        scores, positive = metrics.labelled_scores(own, outside)
        return {
            "accuracy": metrics.accuracy(inside, labels),
            "nll": metrics.nll(inside, labels),
            "ece": metrics.ece(inside, labels),
            "median_entropy": float(outside.median()),
            "mean_entropy": float(outside.mean()),
            "sure": float((outside < 0.1).double().mean()),
            "median_entropy_digits": float(own.median()),
            "auroc": metrics.auroc(scores, positive),
            "curves": {"entropy": outside.quantile(torch.linspace(0, 1, 101, dtype=outside.dtype)).tolist()},
        }


Table = list[tuple[float, float, float]]


def tuned_in_stages(
    la: am.Laplace,
    stages: Sequence[list[Pair]],
    samples: Sequence[int],
    kept: Sequence[int],
    *,
    precisions: Sequence[float],
    scales: Sequence[float],
) -> list[Table]:
    """The grid by stages: all points on the first images, the best of them on more, the last ones on all; returns the table of each stage.

    Args:
        la: The posterior; afterwards it has the best scale and precision of the last stage.
        stages: The batches of each stage.
        samples: The number of weight samples of each stage.
        kept: How many points go on from each stage but the last.
        precisions: The ratios precision / data scale of the first stage.
        scales: The data scales of the first stage.
    """
    points = [(scale, ratio) for ratio in precisions for scale in scales]
    tables: list[Table] = []
    for stage, count, keep in zip(stages, samples, (*kept, 1), strict=True):
        rows: dict[tuple[float, float], tuple[float, float, float]] = {}
        for ratio in dict.fromkeys(ratio for _, ratio in points):
            own = [scale for scale, of in points if of == ratio]  # these share their draws
            la.tune(stage, method="grid", kind="sampling", samples=count, precisions=[ratio], scales=own)
            result: Any = la.tuning
            rows |= {(row[0], ratio): row for row in result.table}
        tables.append(list(rows.values()))
        points = sorted(rows, key=lambda point: rows[point][2])[:keep]
    _set_point(la, rows[points[0]])
    return tables


def _set_point(la: am.Laplace, row: tuple[float, float, float]) -> None:
    """Gives a posterior the scale and the precision of a row of the grid."""
    factor = row[0] / la.data_scale
    la.with_prior(row[1] / factor).narrow(factor)


def _deviations(la: am.Laplace) -> Tensor:
    """The standard deviations of all weights."""
    return torch.cat([v.flatten() for v in la.posterior.marginal_variance().values()]).sqrt()


def _drawn(mean: dict[str, Tensor], deviation: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    return {n: m + deviation[n] * torch.randn(m.shape, generator=generator) for n, m in mean.items()}


def probabilities(predictor: Baseline, x: Tensor, seed: int = 0, size: int = 1000) -> Tensor:
    """Mean probabilities, by batches."""
    parts = [predictor.predict(part, generator=torch.Generator().manual_seed(seed)).mean for part in x.split(size)]
    return torch.cat(parts)


def _share(predictor: Baseline, pair: Pair) -> float:
    return metrics.accuracy(probabilities(predictor, pair[0]), pair[1])


def _trials(settings: Images) -> list[tuple[float, float]]:
    """Every rate with the first decay, then every other decay with the first rate."""
    rates, decays = settings.rates, settings.decays
    return [(rate, decays[0]) for rate in rates] + [(rates[0], decay) for decay in decays[1:]]


def _trial_key(rate: float, decay: float) -> str:
    return f"notmnist/trial/rate{rate:g}_decay{decay:g}"


def best_trial(settings: Images) -> tuple[float, float]:
    """The rate and the decay whose short training gave held-out images the highest likelihood, each at the first value of the other."""

    def loss(rate: float, decay: float) -> float:
        return float(result_of(_trial_key(rate, decay))["validation_nll"])

    return (
        min(settings.rates, key=lambda rate: loss(rate, settings.decays[0])),
        min(settings.decays, key=lambda decay: loss(settings.rates[0], decay)),
    )


def jobs(settings: Images, data_dir: Path) -> Iterator[Job]:
    """The trials; then for every seed the network, mean-field inference, two posteriors and what five methods say."""
    for rate, decay in _trials(settings):
        trial = Digits(settings, data_dir, _TRIAL_SEED)
        yield Job(_trial_key(rate, decay), partial(trial.trial, rate, decay))
    for seed in range(settings.seeds):
        digits = Digits(settings, data_dir, seed)
        yield Job(f"notmnist/train/seed{seed}", digits.train)
        for method in METHODS:
            yield Job(f"notmnist/fit_{method}/seed{seed}", partial(digits.fit, method))
            yield Job(f"notmnist/tune_{method}/seed{seed}", partial(digits.tune, method))
        yield Job(f"notmnist/fit_field/seed{seed}", digits.field)
        yield Job(f"notmnist/widen/seed{seed}", digits.widen)
        for method in (*NAMES, "wide"):
            yield Job(f"notmnist/{method}/seed{seed}", partial(digits.evaluate, method))


# Verdicts


def verdicts(results: Results) -> list[Verdict]:
    """R6 to R9."""
    count = results.settings.images.seeds
    every = {f"notmnist/{method}/*": count for method in (*NAMES, *(f"tune_{m}" for m in METHODS))}
    tuned = {f"notmnist/tune_{method}/*": count for method in METHODS}
    dropout = {f"notmnist/{method}/*": count for method in ("deterministic", "dropout")}
    return [
        *judged(results, every, ("R6",), lambda r: [_order(r)]),
        *judged(results, dropout, ("R7",), lambda r: [_dropout(r)]),
        *judged(results, tuned, ("R8",), lambda r: [_narrower(r)]),
        *judged(results, every, ("R9",), lambda r: [_accuracy(r)]),
    ]


def _numbers(results: Results, name: str) -> dict[str, list[float]]:
    return {method: results.numbers(f"notmnist/{method}/*", name) for method in NAMES}


def chosen(results: Results) -> str:
    """What the grid chose, and how calibrated the network was before: a reason for little uncertainty."""
    largest = max(results.settings.images.scales)
    words = []
    for method in METHODS:
        scales = results.numbers(f"notmnist/tune_{method}/*", "scale")
        size = results.text(f"notmnist/tune_{method}/*", "mean_deviation", 4)
        at_edge = sum(scale == largest for scale in scales)
        words.append(
            f"{NAMES[method]} has a mean standard deviation of {size} per weight and the largest N of the grid in {at_edge} of {len(scales)} seeds"
        )
    ece = results.text("notmnist/deterministic/*", "ece")
    return f"the network is calibrated before (ECE {ece} after {results.settings.images.epochs} epochs), which is likely why held-out images ask for little uncertainty: {'; '.join(words)}"


def undecided(results: Results, pattern: str) -> str:
    """How many points of a grid are within 0.001 nats of its best one, seed by seed: what its choice is worth."""
    rows = [value["tables"][0] for _, value in sorted(results.among(pattern).items())]
    counts = [sum(row[2] <= min(other[2] for other in table) + 0.001 for row in table) for table in rows]
    return f"{', '.join(map(str, counts))} of the grid's {len(rows[0])} points"


def _order(results: Results) -> Verdict:
    medians, sure = _numbers(results, "median_entropy"), _numbers(results, "sure")
    alike = paired(medians["dropout"], medians["diagonal"])
    mean_dropout = sum(medians["dropout"]) / len(medians["dropout"])
    others = [m for m in NAMES if m != "kron"]
    conditions = [
        paired(medians["kron"], medians["dropout"]).higher and paired(medians["kron"], medians["diagonal"]).higher,
        abs(alike.mean) <= 0.25 * mean_dropout,
        paired(medians["dropout"], medians["deterministic"]).higher
        and paired(medians["diagonal"], medians["deterministic"]).higher,
        all(paired(medians[m], medians["field"]).higher for m in ("kron", "dropout", "diagonal")),
        all(paired(sure[m], sure["kron"]).higher for m in others),
    ]
    words = ", ".join(f"{NAMES[m]} {mean_and_error(medians[m], 2)} ({mean_and_error(sure[m], 2)} sure)" for m in NAMES)
    reason = "parts of the order: " + ", ".join(
        f"{name} {'yes' if held else 'no'}"
        for name, held in zip(
            (
                "Kronecker highest",
                "dropout and diagonal within a quarter",
                "both above deterministic",
                "mean-field low",
                "Kronecker least often sure",
            ),
            conditions,
            strict=True,
        )
    )
    reason += f"; {chosen(results)}"
    return Verdict.of("R6", conditions, f"median entropy (share below 0.1): {words}", reason, len(medians["kron"]))


def _dropout(results: Results) -> Verdict:
    medians = _numbers(results, "median_entropy")
    found = paired(medians["dropout"], medians["deterministic"])
    ours = f"difference of medians {found}"
    return Verdict.of("R7", found.higher, ours, "the medians do not differ by two errors", len(medians["dropout"]))


def _narrower(results: Results) -> Verdict:
    sizes = {m: results.numbers(f"notmnist/tune_{m}/*", "mean_deviation") for m in METHODS}
    found = {m: results.among(f"notmnist/tune_{m}/*").items() for m in METHODS}
    pairs = "; ".join(
        f"{NAMES[m]}: (N, τ) of the seeds "
        + ", ".join(f"(× {v['scale']:g}, {v['precision']:.0e})" for _, v in sorted(rows))
        for m, rows in found.items()
    )
    ours = f"mean standard deviation {mean_and_error(sizes['diagonal'], 4)} against {mean_and_error(sizes['kron'], 4)}; {pairs}"
    each = ", ".join(f"{d:.2g} against {k:.2g}" for d, k in zip(sizes["diagonal"], sizes["kron"], strict=True))
    reason = f"the diagonal posterior is not narrower by two standard errors: {each} in the seeds"
    return Verdict.of("R8", paired(sizes["diagonal"], sizes["kron"]).lower, ours, reason, len(sizes["kron"]))


def _accuracy(results: Results) -> Verdict:
    found = {m: [100 * v for v in values] for m, values in _numbers(results, "accuracy").items()}
    means = {m: sum(v) / len(v) for m, v in found.items()}
    conditions = [abs(means[m] - means["deterministic"]) <= 0.3 and means[m] >= 98.3 for m in NAMES]
    ours = ", ".join(f"{NAMES[m]} {mean_and_error(found[m], 2)} %" for m in NAMES)
    near = ", ".join(NAMES[m] for m in NAMES if m != "deterministic" and abs(means[m] - means["deterministic"]) <= 0.3)
    reached = sum(mean >= 98.3 for mean in means.values())
    reason = (
        f"within 0.3 points of the deterministic network: {near or 'none'}; {reached} of {len(NAMES)} reach 98.3 %, and the network itself has "
        f"{means['deterministic']:.2f} % after {results.settings.images.epochs} epochs (the paper: 250)"
    )
    return Verdict.of("R9", conditions, ours, reason, len(found["kron"]))


# Figures and tables


def tables(results: Results) -> str:
    """Appendix F: what every method says about digits, and about letters."""
    if not all(results.among(f"notmnist/{method}/*") for method in NAMES):
        return ""
    columns = {
        "accuracy": "accuracy",
        "nll": "NLL",
        "ece": "ECE",
        "median_entropy_digits": "median entropy, digits",
        "median_entropy": "median entropy, letters",
        "sure": "letters with entropy below 0.1",
        "auroc": "AUROC of letters",
    }
    lines = ["MNIST and notMNIST (table 1 and figure 2):", "", "| | " + " | ".join(columns.values()) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for method, name in shown(results).items():
        cells = [results.text(f"notmnist/{method}/*", column, 4 if column == "accuracy" else 3) for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(results: Results) -> dict[str, str]:
    """The methods of tables: those of the paper, and the widest posterior, by which no claim is judged."""
    return NAMES | {"wide": f"Kronecker-factored, widest within {results.settings.images.wide:g} nats"}


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Figure 2: the share of letters with at least so much entropy, first seed; returns its caption."""
    found = {m: results.values.get(f"notmnist/{m}/seed0") for m in NAMES}
    if any(value is None for value in found.values()):
        return {}
    ax = axes(width=4.4, height=2.9)
    for method, value in found.items():
        assert value is not None
        share = [1 - k / 100 for k in range(101)]
        ax.plot(value["curves"]["entropy"], share, color=COLOURS[method], lw=1.2, label=NAMES[method])
    ax.set(xlim=(0, math.log(10)), ylim=(0, 1))
    finish(ax, x="entropy on notMNIST (nats)", y="share of letters with more", legend=True)
    (folder / "figure2.svg").write_text(save_svg(ax.figure), encoding="utf-8")
    return {"figure2.svg": "Figure 2: how uncertain each method is about letters, which it never saw; first seed."}
