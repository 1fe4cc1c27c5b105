"""Networks on images: every method beside every other, and where the uncertainty sits on usual and unusual images.

Claims W2 (in part), W3, W7, W12 and W13; the networks are trained with the weight decay of their prior.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.predictive import Prediction
from benchmarks.quality.datasets import Images as ImageData
from benchmarks.quality.datasets import Splits
from benchmarks.quality.measure import predict_all
from benchmarks.quality.networks import MLP, ConvNet
from benchmarks.quality.tasks import Training
from benchmarks.quality.training import cut, train_network
from experiments.framework import Job, Results, Verdict, judged, mean_and_error, paired
from experiments.kniebel2020.iris import pushed_losses
from experiments.kniebel2020.layers import PRIORS, by_layer, fitted, generator, tuned
from experiments.kniebel2020.settings import OTHERS, Images

__all__ = [
    "LAPLACE",
    "METHODS",
    "OVERCONFIDENT",
    "complete",
    "detection",
    "jobs",
    "measured",
    "tables",
    "trained",
    "verdicts",
]

METHODS = {
    "network": "network",
    "kron": "Laplace, Kronecker",
    "diagonal": "Laplace, diagonal",
    "dropout": "MC dropout",
    "field": "mean-field variational",
    "ensemble": "ensemble",
}
LAPLACE = ("kron", "diagonal")
LEAST_RANK = 0.5
OVERCONFIDENT = 0.5  # with ten classes of which none is right, a calibrated confidence is near .1


def jobs(settings: Images, data_dir: Path) -> Iterator[Job]:
    """Each set and network, seed by seed."""
    for pair in settings.sets:
        for seed in range(settings.seeds):
            yield Job(f"images/{pair}/seed{seed}", partial(_job, settings, data_dir, pair, seed))


def _splits(settings: Images, data_dir: Path, name: str, network: str, seed: int) -> Splits:
    colour = name == "cifar10"
    form = "flat" if network == "mlp" else "colour" if colour else "grey"
    count = settings.train_colour if colour else settings.train
    data = ImageData((name,), form, count, 0, settings.test, OTHERS[name], settings.unusual)
    return data.load(data_dir, seed)


def _build(settings: Images, name: str, network: str, shape: tuple[int, ...], seed: int) -> nn.Module:
    channels = settings.colour_channels if name == "cifar10" else settings.channels
    spec = MLP(settings.widths) if network == "mlp" else ConvNet(channels, settings.hidden)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return spec.build(shape, 10)


def trained(model: nn.Module, data: tuple[Tensor, Tensor], settings: Images, seed: int) -> nn.Module:
    """Trains a network in place, with the weight decay of the prior, and returns it."""
    training = Training(settings.epochs, settings.rate, 64, settings.prior / len(data[0]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # of dropout
        train_network(model, data, training, "classification", generator(seed))
    return model.eval()


def _predict(predictor: Any, x: Tensor) -> Prediction:
    return predict_all(lambda piece: predictor.predict(piece, generator=generator()), x)


def detection(usual: Prediction, unusual: Prediction, score: str) -> float:
    """AUROC of a score, unusual against usual inputs."""
    outside = torch.cat([torch.zeros(len(usual)), torch.ones(len(unusual))]).bool()
    return am.metrics.auroc(torch.cat([usual.score(score), unusual.score(score)]), outside)


def measured(predictor: Any, splits: Splits) -> dict[str, Any]:
    """The table of a method: accuracy, NLL, ECE and confidence on test images, confidence and detection on others."""
    x, y = splits.test
    usual = _predict(predictor, x)
    probabilities = usual.mean.double() / usual.mean.double().sum(-1, keepdim=True)
    numbers: dict[str, Any] = {
        "accuracy": am.metrics.accuracy(probabilities, y),
        "nll": -float(usual.log_prob(y).double().mean()),
        "ece": am.metrics.ece(probabilities, y),
        "confidence": float(usual.confidence.mean()),
        "epistemic": float(usual.epistemic.mean()),
        "others": {},
    }
    for name, inputs in splits.ood.items():
        other = _predict(predictor, inputs)
        row = {
            "confidence": float(other.confidence.mean()),
            "auroc": detection(usual, other, "entropy"),
            "epistemic": float(other.epistemic.mean()),
        }
        if bool(usual.epistemic.any()):
            row["auroc_epistemic"] = detection(usual, other, "mutual_information")
        numbers["others"][name] = row
    numbers["mean_auroc"] = sum(row["auroc"] for row in numbers["others"].values()) / len(numbers["others"])
    return numbers


def _job(settings: Images, data_dir: Path, pair: str, seed: int) -> dict[str, Any]:
    name, network = pair.split("/")
    splits = _splits(settings, data_dir, name, network, seed)
    shape = tuple(splits.train[0].shape[1:])
    count = settings.members if network == "mlp" else 1
    members = [
        trained(_build(settings, name, network, shape, 1000 * (seed + 1) + m), splits.train, settings, m)
        for m in range(count)
    ]
    model = members[0]
    la = fitted(model, splits.train, settings.prior)
    diagonal = fitted(model, splits.train, settings.prior, "diagonal")
    numbers: dict[str, Any] = {"weights": sum(p.numel() for p in model.parameters())}
    if network == "mlp":
        numbers |= _pushed(settings, model, splits.train, diagonal, la, seed)
    parts: dict[str, Any] = {}
    for prior in PRIORS:
        la = la if prior == "trained" else tuned(la)
        groups = {"test": splits.test[0][: settings.seen]} | {k: v[: settings.seen] for k, v in splits.ood.items()}
        parts[prior] = {group: by_layer(la, x) for group, x in groups.items()}
    numbers["layers"] = parts
    numbers["diagonal_shares"] = by_layer(diagonal, splits.test[0][: settings.seen])["shares"]
    predictors: dict[str, Any] = {
        "network": am.baselines.Deterministic(model),
        "kron": la,
        "diagonal": tuned(diagonal),
    }
    if network == "mlp":
        predictors |= _other_methods(
            settings, members, splits, _build(settings, name, network, shape, 1000 * (seed + 1)), seed
        )
    numbers["methods"] = {method: measured(predictor, splits) for method, predictor in predictors.items()}
    if seed == 0:
        numbers["curves"] = _maps(la, splits)
    return numbers


def _other_methods(
    settings: Images, members: list[nn.Module], splits: Splits, fresh: nn.Module, seed: int
) -> dict[str, Any]:
    """What is trained anew, or on from the network: dropout, mean-field inference, an ensemble."""
    dropping = am.MCDropout(fresh, insert=settings.dropping, samples=settings.samples)
    trained(dropping.model, splits.train, settings, 0)
    field = am.MeanField(members[0], prior_precision=settings.prior, samples=settings.samples)
    field.fit(cut(*splits.train, 64), epochs=settings.field_epochs, generator=generator(seed), progress=False)
    return {"dropout": dropping, "field": field, "ensemble": am.Ensemble(members)}


def _pushed(
    settings: Images, model: nn.Module, data: tuple[Tensor, Tensor], diagonal: am.Laplace, la: am.Laplace, seed: int
) -> dict[str, float]:
    """Rank correlations of the curvature of single weights, of those that the data touch, with their variance and with the loss of moving them."""
    curvature = {n: v.reshape(-1) for block in diagonal.factors.blocks for n, v in block.diagonal().items()}
    variance = {n: v.reshape(-1) for n, v in la.posterior.marginal_variance().items()}
    total = sum(v.numel() for v in curvature.values())
    places = {}
    for name, values in curvature.items():
        touched = values.nonzero()[:, 0]
        count = max(2, round(settings.pushed * len(values) / total))
        places[name] = touched[torch.randperm(len(touched), generator=generator(seed))[:count]]
    names = [n for n, _ in model.named_parameters() if n in places]
    chosen = torch.cat([curvature[n][places[n]] for n in names])
    rises = pushed_losses(model, data, places, settings.push)
    return {
        "rank_variance": am.metrics.rank_correlation(chosen, torch.cat([variance[n][places[n]] for n in names])),
        "rank_loss": am.metrics.rank_correlation(chosen, rises),
    }


def _maps(la: am.Laplace, splits: Splits) -> dict[str, Any]:
    """What the pictures need: the first layer, weight by weight or filter by filter, and the mean image."""
    found = la.where([(splits.test[0][:8], None)], top=1, saliency=False)
    first = next(iter(found.weights(found.layer_names[0])))
    if first.value.dim() == 2:
        return {"contraction": first.contraction.mean(0).tolist(), "image": splits.train[0].mean(0).tolist()}
    units = found.layers[0].weights.units[0]
    return {
        "weight": first.value.tolist(),
        "deviation": first.deviation.tolist(),
        "contraction": units.contraction.tolist(),
    }


# What came out


def _values(results: Results, pair: str) -> list[dict[str, Any]]:
    return [value for _, value in sorted(results.among(f"images/{pair}/*").items())]


def complete(results: Results) -> list[str]:
    """The sets and networks whose jobs are done for every seed."""
    settings = results.settings.images
    return [pair for pair in settings.sets if len(_values(results, pair)) == settings.seeds]


def _missing(results: Results) -> str:
    absent = [pair for pair in results.settings.images.sets if pair not in complete(results)]
    return f". Not run yet: {', '.join(absent)}" if absent else ""


def verdicts(results: Results) -> list[Verdict]:
    """W2, W3, W7, W12 and W13; a third convolutional network joins in when its jobs are done."""
    settings = results.settings.images
    needs = {pair: {f"images/{pair}/*": settings.seeds} for pair in settings.sets}

    def of(pairs: list[str]) -> dict[str, int]:
        return {pattern: count for pair in pairs for pattern, count in needs[pair].items()}

    with_iris = {"iris/mlp/*": results.settings.iris.seeds, **of(settings.perceptrons)}
    convolutional = [pair for pair in settings.sets if pair not in settings.perceptrons]
    return [
        *judged(results, with_iris, ["W2"], lambda r: [_magnitude(r)]),
        *judged(results, of(settings.perceptrons), ["W7"], lambda r: [_distribution(r)]),
        *judged(
            results,
            of([*settings.perceptrons, *convolutional[:2]]),
            ["W3", "W12", "W13"],
            lambda r: [_overconfident(r), _unusual(r), _kinds(r)],
        ),
    ]


def _magnitude(results: Results) -> Verdict:
    found = {"Iris": {k: results.numbers("iris/mlp/*", k) for k in ("rank_variance", "rank_loss")}}
    for pair in results.settings.images.perceptrons:
        rows = _values(results, pair)
        found[pair.split("/")[0]] = {k: [r[k] for r in rows] for k in ("rank_variance", "rank_loss")}
    conditions = [
        c
        for row in found.values()
        for c in (fmean(row["rank_variance"]) <= -LEAST_RANK, fmean(row["rank_loss"]) >= LEAST_RANK)
    ]
    weak = [
        n
        for n, row in found.items()
        if fmean(row["rank_variance"]) > -LEAST_RANK or fmean(row["rank_loss"]) < LEAST_RANK
    ]
    ours = "; ".join(
        f"{n} {mean_and_error(row['rank_variance'], 2)} with the variance, {mean_and_error(row['rank_loss'], 2)} with the loss"
        for n, row in found.items()
    )
    return Verdict.of(
        "W2",
        conditions,
        "the sign is the reverse of a naive reading: large curvature, small variance. Rank correlation of curvature: "
        + ours,
        f"smaller than {LEAST_RANK} on " + ", ".join(weak),
        results.settings.images.seeds,
    )


def _overconfident(results: Results) -> Verdict:
    conditions, low, texts = [], [], []
    for pair in complete(results):
        rows = [value["methods"] for value in _values(results, pair)]
        words = []
        for other in rows[0]["network"]["others"]:
            network, kron = ([r[m]["others"][other]["confidence"] for r in rows] for m in ("network", "kron"))
            conditions.append(fmean(network) > OVERCONFIDENT)
            words.append(f"{other} {fmean(network):.2f} → {fmean(kron):.2f}")
            if not conditions[-1]:
                low.append(f"{pair} on {other} ({fmean(network):.2f})")
        texts.append(f"{pair}: " + ", ".join(words))
    return Verdict.of(
        "W3",
        conditions,
        "mean confidence of the network → of tuned Kronecker Laplace: " + "; ".join(texts) + _missing(results),
        f"at most {OVERCONFIDENT} on average: " + "; ".join(low),
        results.settings.images.seeds,
    )


def _distribution(results: Results) -> Verdict:
    conditions, texts, blind = [], [], []
    for method in ("dropout", "field"):
        areas = []
        for pair in results.settings.images.perceptrons:
            rows = [value["methods"][method] for value in _values(results, pair)]
            spread = all(r["epistemic"] > 0 for r in rows)
            area = fmean(
                [o["auroc_epistemic"] for r in rows for o in r["others"].values() if "auroc_epistemic" in o] or [0.0]
            )
            areas.append(area)
            conditions.append(spread and area > 0.5)
            if not conditions[-1]:
                blind.append(f"{METHODS[method]} on {pair} ({area:.2f})")
        texts.append(f"{METHODS[method]} {min(areas):.2f} to {max(areas):.2f}")
    return Verdict.of(
        "W7",
        conditions,
        "samples differ on every set, and their disagreement finds unusual images with an AUROC, by set, of "
        + ", ".join(texts),
        "the disagreement of samples does not tell unusual images: " + "; ".join(blind),
        results.settings.images.seeds,
    )


def _unusual(results: Results) -> Verdict:
    """W12: the centre on unusual images less that on test images, for each set, network, other set and prior."""
    differences = {}
    for pair in complete(results):
        rows = _values(results, pair)
        for prior in PRIORS:
            usual = [r["layers"][prior]["test"]["centre"] for r in rows]
            for other in rows[0]["methods"]["network"]["others"]:
                unusual = [r["layers"][prior][other]["centre"] for r in rows]
                differences[f"{pair} on {other}, {prior} prior"] = paired(unusual, usual)
    sign = 1.0 if sum(d.mean for d in differences.values()) >= 0 else -1.0
    # With one seed there is no error to compare with.
    with_sign = {k: (d.higher if sign > 0 else d.lower) for k, d in differences.items()}
    reverse = [f"{k} ({d})" for k, d in differences.items() if (d.lower if sign > 0 else d.higher)]
    where = "output" if sign > 0 else "input"
    means = [d.mean for d in differences.values()]
    return Verdict.of(
        "W12",
        list(with_sign.values()),
        f"on unusual images the uncertainty sits nearer to the {where}: so in {sum(with_sign.values())} of {len(with_sign)} cases by more than two standard "
        f"errors, the reverse in {len(reverse)}; the centre differs by {min(means):+.2f} to {max(means):+.2f}, {fmean(means):+.2f} on average"
        + _missing(results),
        ("counterexamples: " + "; ".join(reverse)) if reverse else "no counterexample, but not clear everywhere",
        results.settings.images.seeds,
    )


def _by_kind(layers: dict[str, Any], kind: str) -> tuple[float, float]:
    """What share of the weights of this kind of layer the data determine, and the share of the uncertainty that comes from them."""
    places = [i for i, k in enumerate(layers["kinds"]) if k == kind]
    determined = sum(layers["effective"][i] for i in places) / sum(layers["parameters"][i] for i in places)
    return determined, sum(layers["shares"][i] for i in places)


def _kinds(results: Results) -> Verdict:
    """W13: what the data determine of convolutions and of linear layers, for both priors."""
    pairs = [p for p in complete(results) if p not in results.settings.images.perceptrons]
    conditions, against, texts = [], [], []
    for pair in pairs:
        rows = _values(results, pair)
        words = ""
        for prior in PRIORS:
            conv, linear = ([_by_kind(r["layers"][prior]["test"], k) for r in rows] for k in ("Conv2d", "Linear"))
            difference = paired([c[0] for c in conv], [v[0] for v in linear])
            conditions.append(difference.higher)
            if not difference.higher:
                against.append(f"{pair} with the {prior} prior ({difference})")
            if prior == "trained":
                share = mean_and_error([c[1] for c in conv], 2)
                words = f"{fmean([c[0] for c in conv]):.2f} against {fmean([v[0] for v in linear]):.2f}, share of the uncertainty {share}"
        texts.append(f"{pair.split('/')[0]} {words}")
    last = _last_layer(results, pairs)
    return Verdict.of(
        "W13",
        conditions,
        "the data determine a larger part of the weights of convolutions than of linear layers: "
        + "; ".join(texts)
        + ". "
        + last
        + _missing(results),
        "counterexamples: " + "; ".join(against),
        results.settings.images.seeds,
    )


def _last_layer(results: Results, pairs: list[str]) -> str:
    """The output layer is linear, but small: how it compares with the convolutions."""
    above, count = 0, 0
    for pair in pairs:
        for row in _values(results, pair):
            layers = row["layers"]["trained"]["test"]
            ratio = [e / p for e, p in zip(layers["effective"], layers["parameters"], strict=True)]
            above += ratio[-1] > min(r for r, k in zip(ratio, layers["kinds"], strict=True) if k == "Conv2d")
            count += 1
    return f"The output layer alone, linear as well, is more determined than one of the convolutions in {above} of {count} networks"


def tables(results: Results) -> str:
    """W7's tables: every method on every set."""
    lines: list[str] = []
    for pair in results.settings.images.sets:
        rows = [value["methods"] for value in _values(results, pair)]
        if not rows:
            continue
        others = list(rows[0]["network"]["others"])
        lines += [f"### {pair.replace('/', ', ')}: every method (W3, W7)", ""]
        lines += [
            "| method | accuracy | NLL | ECE | "
            + " | ".join(f"{o}: confidence, AUROC (entropy), AUROC (epistemic)" for o in others)
            + " |",
            "|---" * (4 + len(others)) + "|",
        ]
        for method, label in METHODS.items():
            if any(method not in row for row in rows):
                continue
            cells = [mean_and_error([r[method][k] for r in rows], 3) for k in ("accuracy", "nll", "ece")]
            for other in others:
                found = [r[method]["others"][other] for r in rows]
                words = [
                    mean_and_error([f[k] for f in found if k in f], 2)
                    for k in ("confidence", "auroc", "auroc_epistemic")
                ]
                cells.append(", ".join(words))
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)
