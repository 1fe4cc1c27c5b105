"""A Laplace approximation as `print` and a notebook show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from aftermap.predictive.display import html_table

if TYPE_CHECKING:
    from aftermap.laplace.laplace import Laplace

__all__ = ["NotebookView"]


class NotebookView:
    """Gives `Laplace` a table of what it is: network, likelihood, structure, data, prior, tuning and report."""

    def __str__(self) -> str:
        facts = _facts(cast("Laplace", self))
        state = facts.pop("state", "")
        size = state or f"{facts.pop('data')} data, {facts.pop('uncertain parameters')} uncertain parameters"
        wide = max(map(len, facts))
        indent = "\n" + " " * (wide + 4)
        lines = [f"  {name:{wide}}  {text.replace(chr(10), indent)}" for name, text in facts.items()]
        return "\n".join([f"Laplace: {size}", *lines])

    def _repr_html_(self) -> str:
        facts = _facts(cast("Laplace", self))
        return html_table("Laplace", {"": list(facts), " ": list(facts.values())}, left=["", " "])


def _facts(laplace: Laplace) -> dict[str, str]:
    facts: dict[str, Any] = {
        "network": type(laplace.model).__name__,
        "likelihood": laplace.likelihood.kind,
        "structure": laplace.structure,
    }
    if laplace._fitted is None:
        return {**facts, "state": "not fitted"}
    facts["data"] = f"{laplace.n_data:,g}"
    facts["uncertain parameters"] = f"{laplace.posterior.n_params:,}"
    facts["prior precision"] = _range(list(laplace.prior_precision.values()))
    if laplace.has_noise:
        facts["noise σ"] = _range([torch.as_tensor(laplace.likelihood.config()["noise"])])
    if laplace.report is not None:
        facts["report"] = str(laplace.report)
    elif laplace.tuning is not None:
        facts["tuning"] = str(laplace.tuning)
    return {name: str(value) for name, value in facts.items()}


def _range(values: list[Tensor]) -> str:
    least, most = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
