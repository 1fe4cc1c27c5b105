"""Writes docs/reproduction.md, and the figures beside it, from the register and the results; no number on it is typed by hand.

python -m experiments.page
"""

from __future__ import annotations

import argparse
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.framework import (
    FAILS,
    HOLDS,
    IN_PART,
    NOT_RUN,
    NOT_TESTABLE,
    ROOT,
    Claim,
    Verdict,
    read_claims,
)

__all__ = ["IMAGES", "LARGEST", "PAGE", "figures_of", "main", "page_of", "read_results"]

PAGE, IMAGES = ROOT / "docs" / "reproduction.md", ROOT / "docs" / "images" / "reproduction"
LARGEST = 150_000  # bytes of a figure that is shown on the page

HEAD = """# What was reproduced

This library grew out of a few documents, and they make claims. Each claim was written down together with a criterion, before anything was run, and then put to the test. This is what
came of it:
"""
NOTES = """
**How to read this page.** Every document has a section. It begins with a line on how much smaller things are here, and a table of its claims with their verdicts. Then comes the
evidence, claim by claim: the criterion, what the document reports, what came out here, and the reason where a claim does not simply hold. "Higher" and "lower" mean by more
than two standard errors of the paired difference over seeds; ± is a standard error.

- **Holds**: every condition of the criterion was met.
- **Holds in part**: the criterion has several conditions, and some of them were met.
- **Does not hold**: none was met, at this size. Nearly everything is smaller than in the documents, because it had to run on one processor core in minutes, and a claim may well hold at
  the size of its document. An unwelcome verdict is a result like any other, and no criterion was changed after a run.

Settings, sizes and choices are told in the README.md of each experiment. Seconds are those of one processor core. This page is written by `python -m experiments.page` from
`experiments/claims.toml` and the `results.json` of each experiment, so that no number on it was typed by hand.
"""


def read_results(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """The committed results of the experiments that judge claims, by name."""
    known = {claim.experiment for claim in read_claims()}
    files = sorted((root / "experiments").glob("*/results.json"))
    return {f.parent.name: json.loads(f.read_text(encoding="utf-8")) for f in files if f.parent.name in known}


def figures_of(results: Mapping[str, Mapping[str, Any]], root: Path = ROOT) -> dict[str, Path]:
    """The figures that are shown, by their name beside the page: those that are small enough."""
    found = {}
    for name, content in results.items():
        for file in content.get("figures", {}):
            source = root / "experiments" / name / file
            if source.stat().st_size <= LARGEST:
                found[f"{name}-{file}"] = source
    return found


def page_of(claims: Sequence[Claim], results: Mapping[str, Mapping[str, Any]], shown: Mapping[str, Path]) -> str:
    """The page as Markdown."""
    verdicts = {v["id"]: Verdict(**v) for content in results.values() for v in content["verdicts"]}
    parts = [HEAD, _counts(claims, verdicts), NOTES]
    for document in dict.fromkeys(claim.document for claim in claims):
        own = [claim for claim in claims if claim.document == document]
        parts.append(f"## {document}\n")
        names = list(dict.fromkeys(claim.experiment for claim in own))
        scales = [results[name].get("scale", "") for name in names if name in results]
        parts += [f"Smaller here: {scale}\n" for scale in scales if scale]
        parts.append(_table(own, verdicts))
        parts += [_details(claim, verdicts.get(claim.id)) for claim in own]
        parts += [_experiment(name, results.get(name), shown) for name in names]
    return "\n".join(parts)


def _table(claims: Sequence[Claim], verdicts: Mapping[str, Verdict]) -> str:
    """Claims and verdicts alone, to be read at a glance."""
    lines = ["| | claim | verdict |", "|---|---|---|"]
    for claim in claims:
        verdict = verdicts[claim.id].verdict if claim.id in verdicts else NOT_RUN
        lines.append(f"| {claim.id} | {_text(claim.claim).replace('|', chr(92) + '|')} | {verdict} |")
    return "\n".join(lines) + "\n"


def _details(claim: Claim, verdict: Verdict | None) -> str:
    """The evidence for one claim."""
    place = f" ({claim.place})" if claim.place != "–" else ""
    lines = [f"**{claim.id}**{_text(place)}: **{NOT_RUN if verdict is None else verdict.verdict}**", ""]
    parts = {"Criterion": claim.criterion, "Published": claim.published}
    if verdict is not None:
        parts |= {"Here": verdict.ours if verdict.ours != "–" else "", "Why": verdict.reason}
    lines += [f"- *{name}:* {_text(words)}" for name, words in parts.items() if words]
    return "\n".join(lines) + "\n"


def _text(words: str) -> str:
    """Words that Markdown shows as they are."""
    return words.replace("*", "\\*").replace("<", "&lt;")


def _counts(claims: Sequence[Claim], verdicts: Mapping[str, Verdict]) -> str:
    kinds = (HOLDS, IN_PART, FAILS, NOT_TESTABLE, NOT_RUN)

    def row(label: str, some: Sequence[Claim]) -> str:
        count = Counter(verdicts[c.id].verdict if c.id in verdicts else NOT_RUN for c in some)
        return f"| {label} | {len(some)} | " + " | ".join(str(count[kind]) for kind in kinds) + " |"

    lines = ["| document | claims | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 2) + "|"]
    for document in dict.fromkeys(claim.document for claim in claims):
        lines.append(row(f"[{document}](#{_anchor(document)})", [c for c in claims if c.document == document]))
    return "\n".join([*lines, row("**all**", claims)]) + "\n"


def _anchor(title: str) -> str:
    """The anchor that a heading has on the built page."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _experiment(name: str, content: Mapping[str, Any] | None, shown: Mapping[str, Path]) -> str:
    """How to run it, what it took, and its figures."""
    if content is None:
        return f"`experiments/{name}` has no results yet.\n"
    seeds = sorted({v["seeds"] for v in content["verdicts"] if v["seeds"]})
    counted = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seeds" if seeds else "no seeds"
    lines = [
        "```bash",
        f"aftermap reproduce {name}",
        "```",
        "",
        f'Budget "{content["budget"]["name"]}", {counted}, {content["seconds"]:,} s, torch {content["torch"]}, commit {content["commit"]}. '
        f"What was done, and what was scaled down, is told in `experiments/{name}/README.md`.",
        "",
    ]
    for file, caption in content.get("figures", {}).items():
        if f"{name}-{file}" in shown:
            lines += [f"![{caption}](images/reproduction/{name}-{file})", "", f"*{caption}*", ""]
        else:
            lines += [f"`experiments/{name}/{file}`: {caption}", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the page and the figures that it shows; figures that it no longer shows go."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    results = read_results()
    shown = figures_of(results)
    PAGE.write_text(page_of(read_claims(), results, shown), encoding="utf-8")
    if shown:
        IMAGES.mkdir(parents=True, exist_ok=True)
    for old in IMAGES.glob("*"):
        if old.name not in shown:
            old.unlink()
    for name, source in shown.items():
        (IMAGES / name).write_bytes(source.read_bytes())
    print(f"{PAGE.relative_to(ROOT)}: {len(results)} experiments, {len(shown)} figures")


if __name__ == "__main__":
    main()
