"""What the networks on CIFAR-10 say about claims V1 to V13."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median

from experiments.framework import NOT_TESTABLE, Paired, Results, Verdict, judged, mean_and_error, not_met, paired
from experiments.osawa2019.settings import TRIALS, VARIANTS
from experiments.osawa2019.training import NAMES

__all__ = ["LABELS", "NETWORKS", "epochs_to", "ranking", "ratios", "verdicts"]

NETWORKS = {"lenet": "LeNet-5", "wide": "wide network", "residual": "residual network"}
LABELS = {**NETWORKS, "large": "LeNet-5, more images"}
JUDGED = {"large": "LeNet-5", "wide": "wide network", "residual": "residual network"}
# Adam's epochs that VOGN's epoch takes, with so many draws, in the published table.
PUBLISHED_COST = {"lenet": 2.63, "wide": 3.2, "residual": 4.44}
PUBLISHED_OTHERS = {"vogn_1": 1.71, "ogn": 1.42, "kfac": 3.0, "noisy_kfac": 4.0}
TIE = 1e-3  # the published table ranks numbers with three digits


def verdicts(results: Results) -> list[Verdict]:
    """V1 to V13."""
    pictures = {p.network: p for p in results.settings.all_pictures()}

    def need(network: str, *methods: str) -> dict[str, int]:
        return {f"{network}/{m}/*": pictures[network].seeds for m in methods or pictures[network].methods}

    def both(network: str) -> dict[str, int]:
        return need(network, "adam", "vogn")

    def lenets(*methods: str) -> dict[str, int]:
        return need("large", *methods) | need("lenet", *methods)

    every = lenets() | need("wide") | need("residual")
    costs = {f"cost/{part.network}/*": part.seeds for part in results.settings.pictures()}
    slow = need("residual", "vogn", "no_momentum", "no_momentum_scaled", "no_norm")
    return [
        *judged(results, lenets("adam", "vogn"), ("V1", "V2"), lambda r: [_convergence(r), _likelihood(r)]),
        *judged(results, both("wide"), ("V3",), lambda r: [_overfitting(r)]),
        *judged(results, lenets("vogn", "bbb"), ("V4",), lambda r: [_backprop(r)]),
        *judged(results, every, ("V5", "V6"), lambda r: [_dropout(r), _ranks(r)]),
        *judged(results, both("residual"), ("V7",), lambda r: [_residual(r)]),
        *judged(results, slow, ("V8",), lambda r: [_speed(r)]),
        *judged(results, need("residual", "vogn", "rho1", "rho5"), ("V9",), lambda r: [_augmentation(r)]),
        *judged(results, costs, ("V10",), lambda r: [_cost(r)]),
        *judged(results, lenets("vogn", "ogn"), ("V11",), lambda r: [_no_noise(r)]),
        *judged(results, lenets("kfac", "noisy_kfac"), ("V12",), lambda r: [_kronecker(r)]),
        *judged(
            results,
            lenets("adam", "vogn") | both("wide") | both("residual"),
            ("V13",),
            lambda r: [_other_data(r)],
        ),
    ]


def _numbers(results: Results, network: str, method: str, name: str) -> list[float]:
    return results.numbers(f"{network}/{method}/*", name)


def _difference(results: Results, network: str, first: str, second: str, name: str) -> Paired:
    return paired(_numbers(results, network, first, name), _numbers(results, network, second, name))


def _text(results: Results, network: str, methods: Sequence[str], name: str) -> str:
    words = {**NAMES, **VARIANTS}
    return ", ".join(f"{words[m]} {mean_and_error(_numbers(results, network, m, name))}" for m in methods)


def _beside(results: Results, told: Callable[[str], str]) -> str:
    """What LeNet-5 gives on as many images as there are, which claims are judged on, and on fewer."""
    large, few = results.settings.large, results.settings.lenet
    return f"{large.train:,} images: {told('large')}. {few.train:,} images: {told('lenet')}"


def _accuracies(results: Results, network: str, method: str) -> list[list[float]]:
    """Accuracy on held-out images after each epoch, seed by seed."""
    runs = sorted(results.among(f"{network}/{method}/*").items())
    return [[float(e["accuracy"]) for e in value["epochs"]] for _, value in runs]


def _gaps(results: Results, network: str) -> list[float]:
    """VOGN's accuracy less Adam's on held-out images in points, mean over seeds, epoch by epoch."""
    means = (
        [mean(epoch) for epoch in zip(*_accuracies(results, network, method), strict=True)]
        for method in ("vogn", "adam")
    )
    return [100 * (v - a) for v, a in zip(*means, strict=True)]


def _convergence(results: Results) -> Verdict:
    """On as many images as there are; what fewer give stands beside."""
    gaps = _gaps(results, "large")
    test = 100 * _difference(results, "large", "vogn", "adam", "accuracy").mean
    conditions = {
        "within 2 points in every epoch of the second half": max(map(abs, gaps[len(gaps) // 2 :])) <= 2,
        "within 2 points at the end, on test images": abs(test) <= 2,
    }
    large, few = results.settings.large, results.settings.lenet
    ours = (
        f"{large.train:,} images: test accuracy {_text(results, 'large', ('adam', 'vogn'), 'accuracy')}; VOGN less Adam on held-out images, "
        f"epoch by epoch: {_signed(gaps)} points. {few.train:,} images: {_text(results, 'lenet', ('adam', 'vogn'), 'accuracy')}; {_signed(_gaps(results, 'lenet'))} points"
    )
    return Verdict.of("V1", list(conditions.values()), ours, not_met(conditions), large.seeds)


def _signed(values: Sequence[float]) -> str:
    return ", ".join(f"{v:+.1f}" for v in values)


def _likelihood(results: Results) -> Verdict:
    """On as many images as there are; what fewer give stands beside."""
    parts, higher = [], {}
    for part in (results.settings.large, results.settings.lenet):
        adam, vogn = (mean(_numbers(results, part.network, m, "nll")) for m in ("adam", "vogn"))
        higher[part.network] = vogn / adam - 1
        told = _text(results, part.network, ("adam", "vogn"), "nll")
        parts.append(f"{part.train:,} images: {told} ({100 * higher[part.network]:+.1f} %)")
    conditions = {
        "at most 5 % higher than Adam's": higher["large"] <= 0.05,
        "at most 5 % lower": higher["large"] >= -0.05,
    }
    return Verdict.of(
        "V2", list(conditions.values()), f"NLL: {'; '.join(parts)}", not_met(conditions), results.settings.large.seeds
    )


def _overfitting(results: Results) -> Verdict:
    trained = mean(_numbers(results, "wide", "adam", "train_accuracy"))
    conditions = {}
    for name in ("nll", "ece"):
        adam, vogn = (mean(_numbers(results, "wide", m, name)) for m in ("adam", "vogn"))
        conditions[f"{name.upper()} at most half"] = vogn <= adam / 2
    parts = [
        f"{title}: {_text(results, 'wide', ('adam', 'vogn'), name)}"
        for name, title in (
            ("train_accuracy", "training accuracy"),
            ("accuracy", "test accuracy"),
            ("nll", "NLL"),
            ("ece", "ECE"),
        )
    ]
    ours, seeds = "; ".join(parts), results.settings.wide.seeds
    if trained < 0.99:
        return Verdict("V3", NOT_TESTABLE, ours, "Adam does not reach 99 % of the training images", seeds)
    reason = f"{not_met(conditions)}. {_trials(results, 'wide', ('adam', 'vogn'))}"
    return Verdict.of("V3", list(conditions.values()), ours, reason, seeds)


def _trials(results: Results, network: str, methods: Sequence[str]) -> str:
    """What each setting gave on held-out images."""
    told = []
    for method in methods:
        tuned = results.values[f"{network}/tune_{method}"]
        rows = zip(TRIALS[network][method], tuned["nll"], tuned["accuracy"], strict=True)
        for values, nll, accuracy in rows:
            setting = ", ".join(f"{k} {v:g}" for k, v in values.items())
            told.append(f"{NAMES[method]} with {setting} {'∞' if nll is None else f'{nll:.2f}'} and {accuracy:.2f}")
    return f"NLL and accuracy on held-out images: {'; '.join(told)}"


def _sooner(results: Results, network: str) -> tuple[bool, str]:
    """Whether VOGN is sooner at the held-out accuracy that Bayes by backprop ends with, and when it is there."""
    taken, whole, seeds = [], [], getattr(results.settings, network).seeds
    for seed in range(seeds):
        vogn, bbb = (results.values[f"{network}/{m}/seed{seed}"]["epochs"] for m in ("vogn", "bbb"))
        there = [e["seconds"] for e in vogn if e["accuracy"] >= bbb[-1]["accuracy"]]
        if there:
            taken.append(float(there[0]))
            whole.append(float(bbb[-1]["seconds"]))
    there_after = f"after {mean_and_error(taken, 1)} s of {mean_and_error(whole, 1)} s" if taken else ""
    never = f"never with {seeds - len(taken)} of {seeds} seeds" if len(taken) < seeds else ""
    reached = ", and ".join(filter(None, [there_after, never]))
    return len(taken) == seeds and paired(taken, whole).lower, f"VOGN is where Bayes by backprop ends {reached}"


def _backprop(results: Results) -> Verdict:
    conditions = {
        "accuracy higher": _difference(results, "large", "vogn", "bbb", "accuracy").higher,
        "NLL lower": _difference(results, "large", "vogn", "bbb", "nll").lower,
        "sooner at the accuracy that Bayes by backprop ends with": _sooner(results, "large")[0],
    }

    def told(network: str) -> str:
        parts = [
            f"{title}: {_text(results, network, ('bbb', 'vogn'), n)}"
            for n, title in (("accuracy", "accuracy"), ("nll", "NLL"))
        ]
        return "; ".join([*parts, _sooner(results, network)[1]])

    bbb, vogn = (mean(_numbers(results, "large", method, "deviation")) for method in ("bbb", "vogn"))
    reason = (
        f"{not_met(conditions)}. The median standard deviation of a weight is {bbb:.4f} with Bayes by backprop, which starts at .001, and {vogn:.4f} with VOGN. "
        "Each step of Adam widens it as far as the learning rate allows, and they end before it has come to rest: it learns with less noise than its posterior has, likely unlike the paper's"
    )
    return Verdict.of("V4", list(conditions.values()), _beside(results, told), reason, results.settings.large.seeds)


def _dropout(results: Results) -> Verdict:
    conditions = {
        f"lower on the {title}": _difference(results, network, "vogn", "dropout", "ece").lower
        for network, title in JUDGED.items()
    }

    def told(network: str) -> str:
        return _text(results, network, ("dropout", "vogn"), "ece")

    others = "; ".join(f"{NETWORKS[n]}: {told(n)}" for n in ("wide", "residual"))
    ours = f"ECE; LeNet-5, {_beside(results, told)}; {others}"
    reason = not_met(conditions) + " by two standard errors"
    return Verdict.of("V5", list(conditions.values()), ours, reason, results.settings.large.seeds)


def ranking(results: Results, lenet: str) -> dict[tuple[str, str], int]:
    """VOGN's rank for each row of the table and each of NLL, ECE and AUROC; what is within .001 of a better one ties with it.

    Args:
        results: The results.
        lenet: Which set of images the rows of LeNet-5 are of: "large" or "lenet".
    """
    methods = next(part.methods for part in results.settings.all_pictures() if part.network == lenet)
    rows = {
        "LeNet-5": (lenet, tuple(m for m in methods if m in ("adam", "bbb", "dropout", "vogn"))),
        "LeNet-5, other optimisers": (lenet, tuple(m for m in methods if m != "bbb")),
        "wide": ("wide", results.settings.wide.methods),
        "residual": ("residual", results.settings.residual.methods),
    }
    found = {}
    for row, (network, methods) in rows.items():
        for name, sign in (("nll", 1), ("ece", 1), ("auroc", -1)):
            means = {m: sign * mean(_numbers(results, network, m, name)) for m in methods}
            found[row, name] = 1 + sum(v < means["vogn"] - TIE for v in means.values())
    return found


def _ranks(results: Results) -> Verdict:
    found = ranking(results, "large")
    best, second = (sum(r == k for r in found.values()) for k in (1, 2))
    conditions = {
        f"first on two thirds of the {len(found)} metrics": best >= 2 / 3 * len(found),
        "first or second on all": best + second == len(found),
    }
    few = {key: rank for key, rank in ranking(results, "lenet").items() if key[0].startswith("LeNet-5")}
    ours = (
        f"first or tied on {best} of {len(found)}, second on {second}; rank by row: {_by_row(found)}. "
        f"LeNet-5 on {results.settings.lenet.train:,} images: {_by_row(few)}"
    )
    return Verdict.of("V6", list(conditions.values()), ours, not_met(conditions), results.settings.large.seeds)


def _by_row(ranks: Mapping[tuple[str, str], int]) -> str:
    rows: dict[str, list[str]] = {}
    for (row, name), rank in ranks.items():
        rows.setdefault(row, []).append(f"{name.upper()} {rank}")
    return "; ".join(f"{row}: {', '.join(parts)}" for row, parts in rows.items())


def _residual(results: Results) -> Verdict:
    points = 100 * _difference(results, "residual", "vogn", "adam", "accuracy").mean
    conditions = {
        "ECE lower": _difference(results, "residual", "vogn", "adam", "ece").lower,
        "accuracy within 2 points": abs(points) <= 2,
    }
    parts = [
        f"{title}: {_text(results, 'residual', ('adam', 'vogn'), name)}"
        for name, title in (("ece", "ECE"), ("accuracy", "accuracy"), ("nll", "NLL"))
    ]
    reason = f"{not_met(conditions)} (accuracy {points:+.1f} points)"
    return Verdict.of("V7", list(conditions.values()), "; ".join(parts), reason, results.settings.residual.seeds)


def epochs_to(results: Results, method: str) -> list[float]:
    """Epochs until nine tenths of the accuracy that VOGN with everything in place ends with; one more than all where never."""
    final = mean(run[-1] for run in _accuracies(results, "residual", "vogn"))
    found = []
    for run in _accuracies(results, "residual", method):
        there = [k + 1 for k, accuracy in enumerate(run) if accuracy >= 0.9 * final]
        found.append(float(there[0] if there else len(run) + 1))
    return found


def _speed(results: Results) -> Verdict:
    whole = epochs_to(results, "vogn")
    others = {v: epochs_to(results, v) for v in ("no_momentum", "no_momentum_scaled", "no_norm")}
    conditions = {f"sooner than {VARIANTS[v]}": paired(whole, found).lower for v, found in others.items()}
    words = [
        f"with both {mean_and_error(whole, 1)}",
        *(f"{VARIANTS[v]} {mean_and_error(f, 1)}" for v, f in others.items()),
    ]
    most = results.settings.residual.epochs
    ours = f"epochs to nine tenths of the final accuracy, of {most} ({most + 1} means never): " + "; ".join(words)
    return Verdict.of("V8", list(conditions.values()), ours, not_met(conditions), len(whole))


def _augmentation(results: Results) -> Verdict:
    conditions = {}
    for name in ("ece", "nll"):
        difference = _difference(results, "residual", "rho1", "vogn", name)
        conditions[f"{name.upper()} of ρ = 1 differs from that of ρ = 10"] = difference.higher or difference.lower
    parts = []
    for name in ("ece", "nll", "accuracy"):
        found = {1: "rho1", 5: "rho5", 10: "vogn"}
        told = [f"{mean_and_error(_numbers(results, 'residual', m, name))} (ρ = {rho})" for rho, m in found.items()]
        parts.append(f"{name.upper() if name != 'accuracy' else name}: {', '.join(told)}")
    reason = not_met(conditions) + " by two standard errors"
    return Verdict.of("V9", list(conditions.values()), "; ".join(parts), reason, results.settings.residual.seeds)


def ratios(results: Results, network: str) -> dict[str, list[float]]:
    """Processor time of a step in steps of Adam: the median over the rounds of each seed."""
    found: dict[str, list[float]] = {}
    for _, value in sorted(results.among(f"cost/{network}/*").items()):
        for kind, times in value.items():
            if isinstance(times, list):
                each = [a / b for a, b in zip(times, value["adam"], strict=True)]
                found.setdefault(kind, []).append(median(each))
    return found


def _cost(results: Results) -> Verdict:
    conditions, parts, passes = {}, [], []
    for network, title in NETWORKS.items():
        draws = int(results.numbers(f"cost/{network}/*", "draws")[0])
        ours = ratios(results, network)[f"vogn_{draws}"]
        passes.append(mean(ours) / draws)
        conditions[f"lower on the {title}"] = paired(ours, [PUBLISHED_COST[network]] * len(ours)).lower
        parts.append(f"{title}: {mean_and_error(ours, 2)} with {draws} draws (published {PUBLISHED_COST[network]})")
    lenet, names = ratios(results, "lenet"), {**NAMES, "vogn_1": "VOGN with one draw"}
    others = [f"{names[k]} {mean_and_error(lenet[k], 2)} ({theirs})" for k, theirs in PUBLISHED_OTHERS.items()]
    reason = (
        f"{not_met(conditions)}. A draw is a pass, and K passes cost K times {min(passes):.2f} to {max(passes):.2f} steps of Adam on a "
        "processor that is always full. A published ratio below K suggests that graphics cards were not full, or that draws were shared out"
    )
    ours_text = "; ".join([*parts, f"LeNet-5 (published for ResNet-18 on ImageNet): {', '.join(others)}"])
    return Verdict.of("V10", list(conditions.values()), ours_text, reason, results.settings.lenet.seeds)


def _gap(results: Results, network: str, method: str) -> list[float]:
    trained, tested = (_numbers(results, network, method, n) for n in ("train_accuracy", "accuracy"))
    return [a - b for a, b in zip(trained, tested, strict=True)]


def _no_noise(results: Results) -> Verdict:
    ogn, vogn = (_gap(results, "large", m) for m in ("ogn", "vogn"))
    conditions = {
        "ECE lower": _difference(results, "large", "vogn", "ogn", "ece").lower,
        "gap between training and test accuracy lower": paired(vogn, ogn).lower,
    }

    def told(network: str) -> str:
        gaps = ", ".join(f"{NAMES[m]} {mean_and_error(_gap(results, network, m))}" for m in ("ogn", "vogn"))
        ece = _text(results, network, ("ogn", "vogn"), "ece")
        return f"ECE: {ece}; gap between training and test accuracy: {gaps}"

    return Verdict.of("V11", list(conditions.values()), _beside(results, told), not_met(conditions), len(vogn))


def _kronecker(results: Results) -> Verdict:
    conditions = {
        f"{n.upper()} lower": _difference(results, "large", "noisy_kfac", "kfac", n).lower for n in ("ece", "nll")
    }

    def told(network: str) -> str:
        return "; ".join(f"{n.upper()}: {_text(results, network, ('kfac', 'noisy_kfac'), n)}" for n in ("ece", "nll"))

    ours, seeds = _beside(results, told), results.settings.large.seeds
    return Verdict.of("V12", list(conditions.values()), ours, not_met(conditions), seeds)


def _other_data(results: Results) -> Verdict:
    measures = (("equal_entropy_svhn", "entropy on SVHN"), ("auroc_svhn", "AUROC"))
    conditions = {
        f"{what} higher on the {title}": _difference(results, network, "vogn", "adam", name).higher
        for network, title in JUDGED.items()
        for name, what in measures
    }

    def told(network: str) -> str:
        return "; ".join(f"{what} {_text(results, network, ('adam', 'vogn'), name)}" for name, what in measures)

    ours = (
        f"predictions tempered to a mean entropy of 1.15 nats on test images. LeNet-5, {_beside(results, told)}. "
        + ". ".join(f"{NETWORKS[n]}: {told(n)}" for n in ("wide", "residual"))
    )
    reason = not_met(conditions) + " by two standard errors"
    return Verdict.of("V13", list(conditions.values()), ours, reason, results.settings.large.seeds)
