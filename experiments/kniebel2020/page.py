"""Writes docs/where_is_the_uncertainty.md from results.json; no number on it is typed by hand.

python -m experiments.kniebel2020.page
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from experiments.framework import FAILS, HOLDS, IN_PART, NOT_RUN, ROOT, Results, Verdict, paired
from experiments.kniebel2020 import images, moves, weak
from experiments.kniebel2020.layers import PRIORS
from experiments.kniebel2020.settings import BUDGETS

__all__ = ["PAGE", "main", "page_of"]

PAGE = ROOT / "docs" / "where_is_the_uncertainty.md"
SAID = {HOLDS: "This holds on every data set and for both priors", IN_PART: "Not everywhere", FAILS: "Nowhere clearly"}
SETS = {
    "mnist": "digits",
    "fashion-mnist": "clothes",
    "kmnist": "Japanese letters",
    "notmnist": "letters A to J",
    "cifar10": "CIFAR-10",
    "svhn": "house numbers",
}
KINDS = {"mlp": "perceptron", "cnn": "convolutions"}

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
tuned by layer). Where it fails somewhere, the page says so. Every number comes from `experiments/kniebel2020/results.json`.

The sets go by what they show: digits (MNIST), clothes (Fashion-MNIST), Japanese letters (KMNIST), letters A to J (notMNIST), house numbers (SVHN)."""


def page_of(content: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    results = Results(content["values"], BUDGETS["stated"])
    verdicts = {v["id"]: Verdict(**v) for v in content["verdicts"]}
    figures = content["figures"]
    parts = [HEAD]
    for title, ids, text, pictures in (
        ("The short answer", ("W12", "W13"), _answer, ()),
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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _rows(results: Results, pair: str) -> list[dict[str, Any]]:
    return [value for _, value in sorted(results.among(f"images/{pair}/*").items())]


def _named(pair: str) -> str:
    name, kind = pair.split("/")
    return f"{SETS[name]}, {KINDS[kind]}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _range(shares: list[float]) -> str:
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"


def _least_determined(layers: Mapping[str, Any]) -> int:
    """The layer of whose weights the data determine the smallest part."""
    parts = [e / p for e, p in zip(layers["effective"], layers["parameters"], strict=True)]
    return parts.index(min(parts))


def _answer(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    counts = {}
    for prior in PRIORS:
        found = [r["layers"][prior]["test"] for pair in images.complete(results) for r in _rows(results, pair)]
        counts[prior] = sum(f["shares"].index(max(f["shares"])) == _least_determined(f) for f in found), len(found)
    (hits, total), (tuned, _) = counts["trained"], counts["tuned"]
    return f"""**The uncertainty sits where the data say least.** A layer has so many weights, and the data determine so many of them (its effective parameters). In {hits} of {total}
networks the layer that contributes most uncertainty is the one of whose weights the data determine the smallest part; in {tuned} of {total} when each layer has a prior of its own. In a perceptron this
is the first layer, which reads the pixels. In a convolutional network it is the first linear layer behind the convolutions. It is no law of the first or the last layer:
it is where the many weights are that training images leave alone.

This rule was seen in the numbers afterwards; it was not among the findings that were looked for (those are below, with their counterexamples). Take it as a
suggestion that fits everything here, and print `la.where(...)` for your own network."""


def _pixels(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    pairs = results.settings.images.perceptrons
    found = {p: [r["layers"]["trained"]["test"] for r in _rows(results, p)] for p in pairs}
    known = ", ".join(
        f"{100 * mean(f['effective'][0] / f['parameters'][0] for f in rows):.1f} % on {SETS[p.split('/')[0]]}"
        for p, rows in found.items()
    )
    wide, first, last = (
        [mean(f[key][place] for f in rows) for rows in found.values()]
        for key, place in (("posterior_shares", 0), ("shares", 0), ("logit_shares", -1))
    )
    return f"""The first layer of a perceptron on images has a weight for every pixel and hidden unit, and the data say nothing about most of them: they determine
{known}. A corner that is black in every training image leaves its weights exactly where the prior put them; no prediction for such images
notices, since these weights are multiplied by zero.

So there are three maps, and they differ. Of the variance of the *weights*, {_range(wide)} sits in the first layer. Of the variance of the *logits*, {_range(last)}
comes from the **last** layer: it can move all ten logits together, which the data do not forbid, since the answer does not change. And of the epistemic uncertainty of
the *answers*, which such a move leaves alone, {_range(first)} comes from the **first** layer. "Where is the uncertainty?" has no answer before one says: the uncertainty of what?
From here on it is that of the answers."""


def _moves(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    sets, lines, rows, amounts = results.settings.moves.sets, [], [], []
    for axis, about in moves.AXES.items():
        said = SAID[verdicts[about.id].verdict]
        lines.append(f"- **{_capital(moves.statement(results, axis))}.** {said}.")
        sign = moves.direction(results, axis)
        found = [moves.correlation(results, axis, s, f"centre_{p}") for s in sets for p in PRIORS]
        rows.append([about.unit, *(f"**{v:+.2f}**" if sign * v >= moves.LEAST else f"{v:+.2f}" for v in found)])
        nats = [moves.correlation(results, axis, s, "nats_trained") for s in sets]
        word = "grows" if min(nats) > 0 else "falls" if max(nats) < 0 else "goes different ways"
        amounts.append(f"{word} with {about.grows} ({min(nats):+.2f} to {max(nats):+.2f})")
    head = ["rank correlation of the centre with", *(f"{SETS[s]}, {p} prior" for s in sets for p in PRIORS)]
    return f"""One thing is varied at a time in a perceptron with two hidden layers, on three data sets, with three networks for each point.

{chr(10).join(lines)}

The table has the evidence, as rank correlations over all values and networks; in bold what supports the sentence above.

{_table(head, rows)}

The two priors disagree about more data, and this is no mistake. Under the prior of training all layers are equally free, and more images
take doubt from the first layer sooner than from the others. Tuning gives each layer a precision of its own: it holds the first layer fast while images are few, and lets it go when there are more.

Where the uncertainty sits is one thing, how much there is another. The amount, with the prior of training, {"; it ".join(amounts)}; in brackets the rank correlations."""


def _unusual(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    more, rows, to_output, to_input, grown, cases = [], [], 0, 0, 0, 0
    for pair in images.complete(results):
        found = [r["layers"] for r in _rows(results, pair)]
        least = _least_determined(found[0]["trained"]["test"])
        for other in (g for g in found[0]["trained"] if g != "test"):
            more += [f["trained"][other]["nats"] / f["trained"]["test"]["nats"] for f in found]
            cells = []
            for prior in PRIORS:
                moved = paired(*([f[prior][group]["centre"] for f in found] for group in (other, "test")))
                to_output, to_input = to_output + moved.higher, to_input + moved.lower
                cells.append(f"**{moved.mean:+.2f}**" if moved.higher or moved.lower else f"{moved.mean:+.2f}")
            shares = [mean(f["trained"][group]["shares"][least] for f in found) for group in ("test", other)]
            grown, cases = grown + (shares[1] > shares[0]), cases + 1
            rows.append([_named(pair), SETS[other], *cells, f"{shares[0]:.2f} → {shares[1]:.2f}"])
    head = ["network", "sees", "centre moves, trained prior", "tuned prior", "share of the least determined layer"]
    return f"""Show the network something that it was not trained for: clothes instead of digits, house numbers instead of animals. There is more epistemic uncertainty than on test
images in {sum(m > 1 for m in more)} of {len(more)} cases ({median(more):.1f} times as much in the median). Does it come from other layers, too?

Yes, but not from the same ones in every network. By more than two standard errors the centre moves towards the output in {to_output} cases and towards the input in {to_input} (bold in the table; the rest is
within chance). There is a pattern. The perceptrons on digits and clothes answer unusual images with their **first** layer: likely because new pictures
light pixels, or combinations of pixels, that training images leave alone (letters A to J shown to the network for clothes are the exception). Japanese letters fill the whole picture, and their
perceptron has fewer weights without a task. And a convolutional network on grey images answers with its
first **linear** layer. In {grown} of {cases} rows the layer that was least determined to begin with takes a larger share.

{_table(head, rows)}"""


def _kinds(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    rows, above, count = [], 0, 0
    for pair in (p for p in images.complete(results) if p.endswith("/cnn")):
        found = [r["layers"]["trained"]["test"] for r in _rows(results, pair)]
        parts = [[e / p for e, p in zip(f["effective"], f["parameters"], strict=True)] for f in found]
        kinds = found[0]["kinds"]
        cells = []
        for kind in ("Conv2d", "Linear"):
            places = [i for i, k in enumerate(kinds) if k == kind]
            cells.append(
                mean(sum(f["effective"][i] for i in places) / sum(f["parameters"][i] for i in places) for f in found)
            )
            cells.append(mean(sum(f["shares"][i] for i in places) for f in found))
        rows.append([SETS[pair.split("/")[0]], *(f"{cells[k]:.2f}" for k in (0, 2, 1, 3))])
        for part in parts:
            above += part[-1] > min(v for v, k in zip(part, kinds, strict=True) if k == "Conv2d")
            count += 1
    head = [
        "set",
        "convolutions: determined",
        "linear layers: determined",
        "convolutions: share of the uncertainty",
        "linear layers: share",
    ]
    return f"""A weight of a convolution is used at every place of every image, so that each image teaches it many times over; a weight of the linear layer behind it is used once.
One would expect the data to pin down convolutions, and so it is: they determine a larger part of their weights than of those of linear layers (this finding {verdicts["W13"].verdict}).

{_table(head, rows)}

It is a matter of how many weights there are more than of their kind: the output layer is linear, too, but small, and it is more determined than one of the convolutions in
{above} of {count} networks. And with more convolutions, as on CIFAR-10, most of the uncertainty can come from them all the same."""


def _curvature(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    def row(label: str, pattern: str) -> list[str]:
        return [label, *(results.text(pattern, f"rank_{what}", 2) for what in ("variance", "loss"))]

    rows = [row("Iris, perceptron with a hidden layer", "iris/mlp/*")]
    rows += [row(_named(p), f"images/{p}/*") for p in results.settings.images.perceptrons]
    blocks, whole, tanh = (
        f(results.numbers("iris/curvature/*", key))
        for f, key in ((max, "relu_blocks"), (min, "relu_whole"), (max, "tanh_blocks"))
    )
    return f"""Texts on the subject, the thesis among them, sometimes read the size of the curvature as the size of the uncertainty. It is the other way round: where the loss is steep, the
data hold a weight fast, and its posterior variance is small. What a large curvature does tell is how much the loss rises when that weight alone is moved.

{_table(["rank correlation of the curvature of a weight with", "its posterior variance", "the rise of the loss"], rows)}

And which curvature? For ReLU networks the Gauss-Newton matrix is often said to *be* the Hessian. Within the block of each layer this is right, to {blocks:.0e} of the
largest entry: a ReLU network is linear piece by piece in the weights of one layer. Between layers it is wrong, by {whole:.1g} of the largest entry or more, since
products of weights of two layers bend the output. (A tanh network differs by up to {tanh:.1g} within the blocks already.) The diagonal that the thesis uses lies inside the blocks, so it is right there."""


def _cheap(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    apart = []
    for pair in images.complete(results):
        for row in _rows(results, pair):
            kron = row["layers"]["trained"]["test"]["shares"]
            apart.append(0.5 * sum(abs(a - b) for a, b in zip(kron, row["diagonal_shares"], strict=True)))
    ratios = []
    wrong = [mean(results.numbers(f"iris/{n}/*", "variance_diagonal_full")) for n in ("perceptron", "mlp")]
    for network, label in (("perceptron", "no hidden layer"), ("mlp", "one hidden layer")):
        for name, structure in (("kron", "Kronecker factors"), ("diagonal", "diagonal")):
            keys = (f"{kind}_{name}_{truth}" for kind in ("sd", "variance") for truth in ("full", "hmc"))
            ratios.append([f"{label}, {structure}", *(results.text(f"iris/{network}/*", key, 2) for key in keys)])
    head = ["Iris", "deviation of a weight / full matrix", "/ HMC", "variance of a prediction / full matrix", "/ HMC"]
    return f"""A Hessian has as many entries as there are pairs of weights. Kronecker factors have one small matrix for the inputs and one for the outputs of each layer, and the diagonal has one number for
each weight:

{weak.tables(results).split(chr(10), 2)[2]}

So the map has to be drawn from an approximation. On Iris the truth can be computed, and an approximation held against it; 1 would be right.

{_table(head, ratios)}

Kronecker factors stand in well for the full matrix, the diagonal does not: leaving out what weights do together makes the variance of a prediction {min(wrong):.1f} to {max(wrong):.1f} times as large. Against HMC, which knows
that the posterior is no Gaussian, even the full matrix is too wide with a hidden layer.

On images, where the truth cannot be computed, the diagonal and Kronecker factors at least can be held against each other: they attribute on average {100 * mean(apart):.0f} % of the uncertainty to different
layers (at most {100 * max(apart):.0f} %)."""


def _sure(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    lower, sure, count = 0, 0, 0
    for pair in images.complete(results):
        rows = [r["methods"] for r in _rows(results, pair)]
        for other in rows[0]["network"]["others"]:
            network, kron = (mean(r[m]["others"][other]["confidence"] for r in rows) for m in ("network", "kron"))
            sure, lower, count = sure + (network > images.OVERCONFIDENT), lower + (kron < network), count + 1
    groups = []
    for name in results.settings.weak.sets:
        found = [v for _, v in sorted(results.among(f"weak/{name}/*").items())]
        for kind, label in (*weak.KINDS.items(), ("strong", "one strong network")):
            alone = f"{mean(f[kind]['alone'] for f in found):.2f}" if kind != "strong" else "–"
            groups.append(
                [
                    SETS[name],
                    label,
                    alone,
                    *(f"{mean(f[kind][k] for f in found):.2f}" for k in ("accuracy", "mean_auroc")),
                ]
            )
    members = results.settings.weak.members
    return f"""Confronted with things of which it knows not a single class, a network should say so; one tenth would be the honest confidence. Its mean confidence is above one half in {sure} of {count} cases
(the claim that networks are overconfident {verdicts["W3"].verdict}: those that stay below are a perceptron on clothes, and the network on CIFAR-10, which has learned too little to be sure of
anything). The Laplace approximation lowers the confidence in {lower} of {count} cases. {_best(results)}

And do mediocre networks together know more than one good one? Here are {members} weak ones, narrow or with few data, against a strong one:

{_table(["set", "networks", "accuracy alone", "accuracy together", "AUROC for unusual images"], groups)}

Together they are better than each alone, but less often right than the strong one (the claim {verdicts["W6"].verdict}). What a group is good for is the last column: narrow networks that disagree find unusual images
better than the strong network does."""


def _best(results: Results) -> str:
    """Which method finds unusual images best, by the entropy, over sets and networks."""
    wins: dict[str, int] = {}
    pairs = results.settings.images.perceptrons
    for pair in pairs:
        rows = [r["methods"] for r in _rows(results, pair)]
        areas = {m: mean(r[m]["mean_auroc"] for r in rows) for m in images.METHODS}
        first = max(areas, key=lambda m: areas[m])
        wins[first] = wins.get(first, 0) + 1
    words = " and ".join(f"{images.METHODS[m]} on {n}" for m, n in sorted(wins.items(), key=lambda item: -item[1]))
    return f"Of six methods the one that finds unusual images best by the entropy of its prediction is {words} of {len(pairs)} sets."


def _end(results: Results, content: Mapping[str, Any]) -> str:
    seeds = results.settings.images.seeds
    sizes = [r["weights"] for pair in images.complete(results) for r in _rows(results, pair)]
    return f"""## How far to believe this

Networks of {min(sizes):,} to {max(sizes):,} weights (and wider ones where the width is varied) on {results.settings.images.train:,} images at most, {seeds} seeds for every number, {content["seconds"]:,} s on one processor core. No normalisation, no residual connections, no attention.
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
