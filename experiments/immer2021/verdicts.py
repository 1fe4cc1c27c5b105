"""What came out for the claims L1 to L9, from the results alone.

Thresholds that the criteria leave open were set before anything was run; README.md names them.
"""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

from experiments.framework import Paired, Results, Verdict, judged, mean_and_error, paired
from experiments.immer2021.confidence import ACTIVATIONS
from experiments.immer2021.images import METHODS
from experiments.immer2021.uci import DEPTHS

__all__ = ["claim_l4", "claim_l5", "claim_l8", "verdicts"]

_TIE = 0.05  # nats; the tolerance of the criterion of L2
_OFTEN = 0.1  # L1: the share of images that is more than an accident
_NEAR_PRIOR = 0.1  # L9: how far above one half a confidence still counts as that of the prior


def verdicts(results: Results) -> list[Verdict]:
    """L1 to L9; those whose jobs are missing are not run yet."""
    settings = results.settings
    seeds = {"uci": len(settings.uci.seeds), "images": settings.images.seeds}
    shallow = {f"uci/{name}/depth1/*": seeds["uci"] for name in settings.uci.sets}
    digits = {f"mnist/{group}/*": seeds["images"] for group in ("map", "kron", "damped")}
    clothes = {f"fashion-mnist/{group}/*": seeds["images"] for group in ("map", "kron", "diagonal")}
    subset = {"fashion-mnist/subset/*": seeds["images"]}
    depths = {f"occam/depth{depth}/*": settings.occam.seeds for depth in settings.occam.depths}
    far = {f"far/{name}/*": settings.far.seeds for name in ACTIVATIONS}
    kron = {f"{name}/kron/*": seeds["images"] for name in ("mnist", "fashion-mnist")}
    return [
        *judged(results, {"svhn/*": settings.svhn.seeds}, ("L1",), lambda r: [_l1(r)]),
        *judged(results, depths, ("L2",), lambda r: [_l2(r)]),
        *judged(results, shallow | kron, ("L3",), lambda r: [_l3(r)]),
        *judged(results, shallow, ("L4", "L5"), lambda r: [claim_l4(r, 1, "full"), claim_l5(r, 1, "full")]),
        *judged(results, digits, ("L6",), lambda r: [_l6(r)]),
        *judged(results, clothes, ("L7",), lambda r: [_l7(r)]),
        *judged(results, shallow | clothes | subset, ("L8",), lambda r: [claim_l8(r, 1)]),
        *judged(results, far, ("L9",), lambda r: [_l9(r)]),
    ]


def _difference(results: Results, pattern: str, first: str, second: str) -> Paired:
    return paired(results.numbers(pattern, first), results.numbers(pattern, second))


def _l1(results: Results) -> Verdict:
    share = {name: results.numbers("svhn/*", f"{name}_sure") for name in ("network", "linearised")}
    difference = paired(share["network"], share["linearised"])
    conditions = [fmean(share["network"]) >= _OFTEN, difference.higher]
    ours = "; ".join(
        f"{name}: {mean_and_error([100 * v for v in share[name]], 1)} % of house numbers above 0.99 "
        f"({results.text('svhn/*', f'{name}_sure_inside', 3)} of CIFAR-10), AUROC {results.text('svhn/*', f'{name}_auroc')}, "
        f"NLL {results.text('svhn/*', f'{name}_nll')}"
        for name in share
    )
    said = [
        f"the network is sure of {'more' if conditions[0] else 'less'} than a tenth",
        f"the posterior is {'less often' if conditions[1] else 'not clearly less often'} sure",
    ]
    return Verdict.of("L1", conditions, ours, "; ".join(said), results.settings.svhn.seeds)


def _l2(results: Results) -> Verdict:
    depths, agree, close, lines, turned = results.settings.occam.depths, [], [], [], []
    for seed in range(results.settings.occam.seeds):
        rows = {d: results.values[f"occam/depth{d}/seed{seed}"] for d in depths}
        evidence = {d: float(row["log_evidence"]) for d, row in rows.items()}
        test = {d: float(row["test_log_likelihood"]) for d, row in rows.items()}
        wrong = [
            (a, b)
            for a, b in combinations(depths, 2)
            if abs(test[a] - test[b]) > _TIE and (evidence[a] - evidence[b]) * (test[a] - test[b]) < 0
        ]
        agree.append(not wrong)
        turned += [f"{a} and {b} layers in seed {seed}" for a, b in wrong]
        close.append(max(test.values()) - test[max(evidence, key=lambda d: evidence[d])] <= _TIE)
        lines.append(", ".join(f"{d}: {evidence[d]:.1f} / {test[d]:.2f}" for d in depths))
    ours = "log evidence / test log-likelihood per datum by hidden layers, seed by seed: " + "; ".join(lines)
    reason = (
        f"ranks agree in {sum(agree)} of {len(agree)} seeds"
        + (f" (not for {', '.join(turned)})" if turned else "")
        + f"; the best by evidence is within {_TIE} nats of the best in {sum(close)} of {len(close)}; "
        + ", ".join(
            f"{sum(not v['stationary'] for v in results.among(f'occam/depth{d}/*').values())} of {len(agree)} networks with {d} layers are not at a mode"
            for d in depths
        )
    )
    return Verdict.of("L2", [all(agree), all(close)], ours, reason, len(agree))


def _l3(results: Results) -> Verdict:
    found: dict[str, list[float]] = {}
    for name in results.settings.uci.sets:
        pattern = f"uci/{name}/depth1/*"
        chosen, validated = (results.numbers(pattern, f"full_{rule}_nll") for rule in ("evidence", "linearised"))
        found[name] = [a - b for a, b in zip(chosen, validated, strict=True)]
    for name in ("mnist", "fashion-mnist"):
        chosen, validated = (
            results.numbers(f"{name}/kron/*", f"kron_{rule}_nll") for rule in ("evidence", "linearised")
        )
        found[name] = [a - b for a, b in zip(chosen, validated, strict=True)]
    failed = [name for name, values in found.items() if fmean(values) > 0.02]
    ours = "test NLL with the precision by evidence less that by validation: " + ", ".join(
        f"{name} {mean_and_error(values)}" for name, values in found.items()
    )
    reason = f"more than 0.02 worse on {', '.join(failed)}"
    return Verdict.of("L3", [name not in failed for name in found], ours, reason, len(results.settings.uci.seeds))


def claim_l4(results: Results, depth: int, structure: str) -> Verdict:
    """L4 for networks of one depth and one structure of the posterior."""
    gaps = {}
    for name in results.settings.uci.sets:
        pattern = f"uci/{name}/depth{depth}/*"
        gaps[name] = fmean(results.numbers(pattern, f"{structure}_sampling_nll")) - fmean(
            results.numbers(pattern, f"{structure}_linearised_nll")
        )
    small = [name for name, gap in gaps.items() if gap < 0.05]
    ours = "NLL of sampling less linearised: " + ", ".join(f"{name} {gap:+.3f}" for name, gap in gaps.items())
    reason = f"{len(gaps) - len(small)} of {len(gaps)} sets; less than 0.05 on {', '.join(small)}"
    return Verdict.of("L4", [name not in small for name in gaps], ours, reason, len(results.settings.uci.seeds))


def claim_l5(results: Results, depth: int, structure: str) -> Verdict:
    """L5 for networks of one depth and one structure of the posterior."""
    gaps = {
        name: _difference(results, f"uci/{name}/depth{depth}/*", f"{structure}_linearised_nll", "map_nll")
        for name in results.settings.uci.sets
    }
    far = [name for name, gap in gaps.items() if abs(gap.mean) > 0.1]
    lower = gaps["glass"].lower
    ours = "NLL of linearised less MAP: " + ", ".join(f"{name} {gap}" for name, gap in gaps.items())
    said = [f"more than 0.1 apart on {', '.join(far)}"] if far else []
    if not lower:
        said.append("glass is not lower by two standard errors")
    return Verdict.of("L5", [not far, lower], ours, "; ".join(said), len(results.settings.uci.seeds))


def _row(results: Results, name: str, method: str) -> str:
    group, label = METHODS[method]
    cells = [results.text(f"{name}/{group}/*", f"{method}_{what}") for what in ("nll", "ece", "auroc")]
    return f"{label} {' / '.join(cells)}"


def _l6(results: Results) -> Verdict:
    shown = ("map", "kron_sampling", "damped_sampling", "kron_linearised")
    nll = {m: results.numbers(f"mnist/{METHODS[m][0]}/*", f"{m}_nll") for m in shown}
    auroc = {m: results.numbers(f"mnist/{METHODS[m][0]}/*", f"{m}_auroc") for m in shown}
    gain = fmean(auroc["kron_linearised"]) - fmean(auroc["map"])
    conditions = [
        paired(nll["kron_sampling"], nll["damped_sampling"]).higher,
        paired(nll["damped_sampling"], nll["map"]).higher,
        fmean(nll["kron_linearised"]) <= fmean(nll["map"]),
        gain >= 0.1,
    ]
    parts = (
        "sampling worse than with Ritter's damping",
        "that worse than the MAP",
        "linearised NLL at most the MAP's",
        f"gain of AUROC at least 0.1 (it is {gain:+.3f})",
    )
    reason = "; ".join(f"{part}: {'yes' if held else 'no'}" for part, held in zip(parts, conditions, strict=True))
    ours = "NLL / ECE / AUROC: " + "; ".join(_row(results, "mnist", m) for m in shown)
    return Verdict.of("L6", conditions, ours, reason, results.settings.images.seeds)


def _l7(results: Results) -> Verdict:
    shown = ("map", "kron_sampling", "diagonal_sampling", "kron_linearised", "diagonal_linearised")
    name = "fashion-mnist"
    nll, auroc = (
        {m: fmean(results.numbers(f"{name}/{METHODS[m][0]}/*", f"{m}_{what}")) for m in shown}
        for what in ("nll", "auroc")
    )
    gain, loss = auroc["kron_linearised"] - auroc["map"], nll["kron_linearised"] - nll["map"]
    best = max(auroc, key=lambda m: auroc[m])
    conditions = [gain >= 0.05, loss <= 0.02]
    reason = f"gain of AUROC {gain:+.3f}, NLL {loss:+.3f}; the highest AUROC is that of {METHODS[best][1]}, at an NLL of {nll[best]:.3f}"
    ours = "NLL / ECE / AUROC: " + "; ".join(_row(results, name, m) for m in shown)
    return Verdict.of("L7", conditions, ours, reason, results.settings.images.seeds)


def claim_l8(results: Results, depth: int) -> Verdict:
    """L8 on clothes, where all are asked about the images that the subset is asked about, and on tables with networks of one depth."""
    clothes = {
        label: fmean(results.numbers(f"fashion-mnist/{group}/*", f"{method}_few_ece"))
        for method, (group, label) in METHODS.items()
        if method.endswith("linearised")
    }
    lowest = dict.fromkeys(DEPTHS[depth], 0)
    errors: dict[str, list[float]] = {structure: [] for structure in DEPTHS[depth]}
    for name in results.settings.uci.sets:
        found = {s: fmean(results.numbers(f"uci/{name}/depth{depth}/*", f"{s}_linearised_ece")) for s in errors}
        lowest[min(found, key=lambda s: found[s])] += 1
        for structure, value in found.items():
            errors[structure].append(value)
    tables = {s: fmean(v) for s, v in errors.items()}
    conditions = [
        min(clothes, key=lambda m: clothes[m]).endswith("subset of data"),
        min(tables, key=lambda s: tables[s]) == "subset",
    ]
    ours = (
        "ECE on clothes: "
        + ", ".join(f"{m} {v:.4f}" for m, v in clothes.items())
        + "; mean over tables: "
        + ", ".join(f"{s} {v:.4f} (lowest on {lowest[s]})" for s, v in tables.items())
    )
    places = ("clothes", "tables")
    reason = "; ".join(
        f"lowest on {place}: {'yes' if held else 'no'}" for place, held in zip(places, conditions, strict=True)
    )
    return Verdict.of("L8", conditions, ours, reason, results.settings.images.seeds)


def _l9(results: Results) -> Verdict:
    conditions, lines, failed = [], [], []
    for activation in ACTIVATIONS:
        rows = [value for _, value in sorted(results.among(f"far/{activation}/*").items())]
        network, linearised = ([float(row[name][-1]) for row in rows] for name in ("network", "linearised"))
        near = [float(row["linearised"][0]) for row in rows]
        checks = {
            "lower than the network's": paired(linearised, network).lower,
            "lower than near the data": paired(linearised, near).lower,
            "that of the prior": fmean(linearised) <= 0.5 + _NEAR_PRIOR,
        }
        conditions += checks.values()
        failed += [f"{activation}: not {name}" for name, held in checks.items() if not held]
        lines.append(
            f"{activation}: network {mean_and_error(network)}, linearised {mean_and_error(linearised)} (on the data {mean_and_error(near)})"
        )
    scale = results.settings.far.scales[-1]
    ours = f"mean confidence at {scale:g} times the inputs: " + "; ".join(lines)
    return Verdict.of("L9", conditions, ours, "; ".join(failed), results.settings.far.seeds)
