"""Writes docs/where_is_the_uncertainty.md from results.json; no number on it is typed by hand.

python -m experiments.kniebel2020.page
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.framework import FAILS, HOLDS, IN_PART, NOT_RUN, ROOT, Results, Verdict
from experiments.kniebel2020 import images, moves
from experiments.kniebel2020.layers import PRIORS
from experiments.kniebel2020.settings import BUDGETS

__all__ = ["PAGE", "main", "page_of"]

PAGE = ROOT / "docs" / "where_is_the_uncertainty.md"
SAID = {
    HOLDS: "on every data set and for both priors",
    IN_PART: "not everywhere",
    FAILS: "nowhere clearly",
}

HEAD = """# Where is the uncertainty?

A trained network gives an answer. A posterior over its weights says how far that answer can be trusted. But a network has layers, filters and thousands of
weights: *where* does the doubt come from? A bachelor's thesis asked this in 2020 (Kniebel, *Where is the uncertainty in Bayesian neural networks*) and left the
chapters for the answers empty. This page fills them.

The tool is three lines long, and the [tutorial](tutorials/where.md) explains what it prints:

    la = am.Laplace(model, "classification").fit(train_loader)
    found = la.where(test_loader)
    print(found)

It splits the epistemic uncertainty of the predictions into one share for each layer. The shares add up to one exactly. To follow the uncertainty with a
single number, call its **centre** the mean place of these shares: 0 if all of it comes from the first layer, 1 if all comes from the last.

What counts as a finding was decided before anything was run: the same direction on every data set, for two ways to choose the prior (the one of training, or precisions
tuned by layer). Where it fails somewhere, the counterexample stands beside it. Every number comes from `experiments/kniebel2020/results.json`."""


def page_of(content: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    results = Results(content["values"], BUDGETS["stated"])
    verdicts = {v["id"]: Verdict(**v) for v in content["verdicts"]}
    figures = content["figures"]
    parts = [HEAD]
    for title, ids, text, pictures in (
        ("The pixels that are never lit", (), _pixels, ("pixels.png",)),
        ("How it moves", ("W8", "W9", "W10", "W11"), _moves, ("moves.svg",)),
        ("Unusual images", ("W12",), _unusual, ("shares.svg",)),
        ("Convolutions and linear layers", ("W13",), _kinds, ("filters.png",)),
        ("Curvature is not uncertainty", ("W1", "W2"), _curvature, ()),
        ("May the map be drawn cheaply?", ("W4", "W5"), _cheap, ("iris.svg",)),
        ("Sure of what it has never seen", ("W3", "W6", "W7"), _sure, ("confidence.svg",)),
    ):
        missing = [i for i in ids if i not in verdicts or verdicts[i].verdict == NOT_RUN]
        shown = [p for p in pictures if p in figures]
        if missing or len(shown) < len(pictures):
            parts.append(f"## {title}\n\nNot run yet.")
            continue
        lines = [f"## {title}", "", text(results, verdicts)]
        for file in shown:
            lines += ["", f"![{figures[file]}](images/reproduction/kniebel2020-{file})", "", f"*{figures[file]}*"]
        parts.append("\n".join(lines))
    parts.append(_end(results, content))
    return "\n\n".join(parts) + "\n"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _rows(results: Results, pair: str) -> list[dict[str, Any]]:
    return [value for _, value in sorted(results.among(f"images/{pair}/*").items())]


def _pixels(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    pairs = results.settings.images.perceptrons
    found = {p: [r["layers"]["trained"]["test"] for r in _rows(results, p)] for p in pairs}
    known = ", ".join(
        f"{100 * _mean([f['effective'][0] / f['parameters'][0] for f in rows]):.1f} % on {p.split('/')[0]}"
        for p, rows in found.items()
    )
    wide, first, last = (
        [_mean([f[key][place] for f in rows]) for rows in found.values()]
        for key, place in (("posterior_shares", 0), ("shares", 0), ("logit_shares", -1))
    )
    return f"""The first layer of a perceptron on images has a weight for every pixel and hidden unit, and the data say nothing about most of them: they determine
{known}. A corner that is black in every training image leaves its weights exactly where the prior put them; no prediction for such images
notices, since these weights are multiplied by zero.

So there are three maps, and they differ. Of the variance of the *weights*, {_range(wide)} sits in the first layer. Of the variance of the *logits*, {_range(last)}
comes from the **last** layer: it can move all ten logits together, which the data do not forbid, since the answer does not change. And of the epistemic uncertainty of
the *answers*, which such a move leaves alone, {_range(first)} comes from the **first** layer. "Where is the uncertainty?" has no answer before one says: the uncertainty of what?
From here on it is that of the answers."""


def _range(shares: list[float]) -> str:
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"


def _finding(verdict: Verdict, statement: str) -> str:
    text = f"**{statement[0].upper()}{statement[1:]}** – {SAID[verdict.verdict]}."
    return text if verdict.verdict == HOLDS else f"{text} {verdict.reason[0].upper()}{verdict.reason[1:]}."


def _moves(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    lines = [
        "One thing is varied at a time in a perceptron with two hidden layers, on three data sets, three networks for each point.",
        "",
    ]
    for axis, about in moves.AXES.items():
        lines.append(f"- {_finding(verdicts[about.id], moves.statement(results, axis))}")
    sets = results.settings.moves.sets
    lines += [
        "",
        "| rank correlation of the centre with | " + " | ".join(f"{s}, {p} prior" for s in sets for p in PRIORS) + " |",
    ]
    lines += ["|---" * (1 + len(sets) * len(PRIORS)) + "|"]
    for axis, about in moves.AXES.items():
        cells = [f"{moves.correlation(results, axis, s, f'centre_{p}'):+.2f}" for s in sets for p in PRIORS]
        lines.append(f"| {about.unit} | " + " | ".join(cells) + " |")
    amounts = []
    for axis, about in moves.AXES.items():
        found = [moves.correlation(results, axis, s, "nats_trained") for s in sets]
        word = "grows" if min(found) > 0 else "falls" if max(found) < 0 else "goes different ways"
        amounts.append(f"{word} with {about.grows} (rank correlation {min(found):+.2f} to {max(found):+.2f})")
    lines += [
        "",
        "Where it sits is one thing, how much there is another. The amount, with the prior of training, "
        + "; it ".join(amounts)
        + ".",
    ]
    return "\n".join(lines)


def _unusual(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    more = []
    for pair in images.complete(results):
        for row in _rows(results, pair):
            layers = row["layers"]["trained"]
            more += [layers[g]["nats"] / layers["test"]["nats"] for g in layers if g != "test"]
    above = sum(m > 1 for m in more)
    return f"""Show the network something that it was not trained for: clothes instead of digits, house numbers instead of animals. There is more epistemic uncertainty than on test
images in {above} of {len(more)} cases ({_median(more):.1f} times as much in the median). Does it come from other layers, too?

{_sentence(verdicts["W12"])}"""


def _sentence(verdict: Verdict) -> str:
    text = verdict.ours[0].upper() + verdict.ours[1:] + "."
    return (
        text
        if verdict.verdict == HOLDS
        else f"{text} Verdict: {verdict.verdict}. {verdict.reason[0].upper()}{verdict.reason[1:]}."
    )


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _kinds(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    return f"""A weight of a convolution is used at every place of every image, so that each image teaches it many times over; a weight of the linear layer behind it is used once.
One would expect the data to pin down convolutions. {_sentence(verdicts["W13"])}"""


def _curvature(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    return f"""Texts on the subject, the thesis among them, sometimes read the size of the curvature as the size of the uncertainty. It is the other way round: where the loss is steep the
data hold a weight fast. {_sentence(verdicts["W2"])}

And which curvature? For ReLU networks the Gauss-Newton matrix is often said to *be* the Hessian. {_sentence(verdicts["W1"])}"""


def _cheap(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    apart = []
    for pair in images.complete(results):
        for row in _rows(results, pair):
            kron = row["layers"]["trained"]["test"]["shares"]
            apart.append(0.5 * sum(abs(a - b) for a, b in zip(kron, row["diagonal_shares"], strict=True)))
    return f"""{_sentence(verdicts["W4"])}

So the map has to be drawn from an approximation. On Iris the truth can be computed. {_sentence(verdicts["W5"])}

On images, where it cannot, the diagonal and Kronecker factors at least can be held against each other: they attribute on average {100 * _mean(apart):.0f} % of the uncertainty to different
layers (at most {100 * max(apart):.0f} %)."""


def _sure(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    lower, count = 0, 0
    for pair in images.complete(results):
        rows = [r["methods"] for r in _rows(results, pair)]
        for other in rows[0]["network"]["others"]:
            network, kron = (_mean([r[m]["others"][other]["confidence"] for r in rows]) for m in ("network", "kron"))
            lower, count = lower + (kron < network), count + 1
    best = _best(results)
    return f"""Confronted with things of which it knows not a single class, a network should say so. That networks are overconfident then **{verdicts["W3"].verdict}**:
the figure shows their mean confidence, where one tenth would be honest. The Laplace approximation lowers it in {lower} of {count} cases. {best}

And mediocre networks in a group? {_sentence(verdicts["W6"])}"""


def _best(results: Results) -> str:
    """Which method finds unusual images best, by the entropy, over sets and networks."""
    wins: dict[str, int] = {}
    pairs = results.settings.images.perceptrons
    for pair in pairs:
        rows = [r["methods"] for r in _rows(results, pair)]
        areas = {m: _mean([r[m]["mean_auroc"] for r in rows]) for m in images.METHODS}
        first = max(areas, key=lambda m: areas[m])
        wins[first] = wins.get(first, 0) + 1
    total = len(pairs)
    words = ", ".join(f"{images.METHODS[m]} in {n}" for m, n in sorted(wins.items(), key=lambda item: -item[1]))
    return f"Of six methods the one that finds unusual images best, by entropy, over {total} data sets: {words}."


def _end(results: Results, content: Mapping[str, Any]) -> str:
    seeds = results.settings.images.seeds
    return f"""## How far to believe this

Networks of 25,000 to 90,000 weights on a few thousand images, {seeds} seeds for every number, {content["seconds"]:,} s on one processor core. No normalisation, no residual connections, no attention.
Shares are those of the linearised network under a block-diagonal posterior; they depend on the prior, which is why there are two. All claims, with criteria and
numbers, are in [what was reproduced](reproduction.md); the README of the experiment says what was scaled down. Run it again, or change it:

```bash
aftermap reproduce kniebel2020
```"""


def main() -> None:
    """Writes the page."""
    text = (Path(__file__).parent / "results.json").read_text(encoding="utf-8")
    PAGE.write_text(page_of(json.loads(text)), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
