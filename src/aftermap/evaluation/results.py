"""What an evaluation found: numbers with intervals, a table of inputs, curves for figures, and where it all comes from."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aftermap.errors import DataError, InputError, UnsupportedError
from aftermap.lazy import lazy_attribute
from aftermap.predictive.display import html_table, text_table
from aftermap.writing import replaced_file

__all__ = ["SCHEMA", "Comparison", "Metric", "Results", "Table", "compare", "provenance", "to_plain", "write_json"]

SCHEMA = 1
_HIGHER = (
    "accuracy",
    "auroc",
    "aupr",
    "coverage",
    "detected",
)  # For metrics whose names begin so, a higher value is better.


class Table(dict[str, list[Any]]):
    """A table of columns of equal length: a plain dict of lists, which ``str`` draws.

    >>> print(Table({"layer": ["0", "2"], "share": [0.25, 0.75]}))
    layer  share
    ------------
    0      25.0%
    2      75.0%
    """

    @property
    def n_rows(self) -> int:
        """The number of rows of the table."""
        return len(next(iter(self.values()), []))

    def __str__(self) -> str:
        """Returns the table as text with aligned columns; columns whose name ends in "share" are shown in per cent."""
        cells = {k: [_shown(k, v) for v in values] for k, values in self.items()}
        if not cells:
            return "(nothing)"
        return text_table(cells, self._words)

    def _repr_html_(self) -> str:
        cells = {k: [_shown(k, v) for v in values] for k, values in self.items()}
        return html_table("", cells, left=self._words)

    @property
    def _words(self) -> set[str]:
        return {k for k, values in self.items() if any(isinstance(v, str) for v in values)}


def _shown(column: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.1%}" if column.endswith("share") else f"{value:.4g}"
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def to_plain(thing: Any) -> Any:
    """Returns plain values for JSON; a number that is not finite becomes null, which every reader understands.

    >>> to_plain({"a": (1.0, float("nan"))})
    {'a': [1.0, None]}
    """
    if isinstance(thing, Metric):
        return to_plain({"value": thing.value, "lower": thing.lower, "upper": thing.upper})
    if isinstance(thing, Mapping):
        return {str(k): to_plain(v) for k, v in thing.items()}
    if isinstance(thing, Tensor | np.ndarray):
        return to_plain(thing.tolist())
    if isinstance(thing, list | tuple):
        return [to_plain(v) for v in thing]
    if isinstance(thing, float):
        return thing if math.isfinite(thing) else None
    if thing is None or isinstance(thing, bool | int | str):
        return thing
    return repr(thing)


def write_json(content: Mapping[str, Any], path: str | Path | None) -> str:
    """Returns JSON text, and writes it to ``path`` if given (first to a neighbouring file, which is then moved into place)."""
    text = json.dumps(content, indent=2, allow_nan=False)
    if path is not None:
        with replaced_file(path) as part:
            part.write_text(text + "\n", encoding="utf-8")
    return text


@dataclass(frozen=True)
class Metric:
    """A number with a confidence interval; where no interval was asked for, both its ends are the number itself."""

    value: float
    lower: float
    upper: float

    def __str__(self) -> str:
        if self.lower == self.upper:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.lower:.4g}, {self.upper:.4g}]"


@dataclass(frozen=True)
class Results:
    """The evaluation of one predictor.

    Attributes:
        name: The name of the predictor.
        kind: The kind of task.
        n_data: The number of test examples.
        metrics: The metrics by name.
        ood: The metrics of detection, by data set, score and name.
        attacks: For each attack the lists of its curve, by name.
        table: One column per fact and one row per input of the test data and of every OOD set (the column "set" tells
            which).
        curves: The columns of numbers that figures draw, by curve and column.
        provenance: Where the numbers come from: versions, seeds, hashes of the data, settings and time.
    """

    name: str
    kind: str
    n_data: int
    metrics: Mapping[str, Metric]
    ood: Mapping[str, Mapping[str, Mapping[str, Metric]]] = field(default_factory=dict)
    attacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    table: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    curves: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        """Returns the value of a metric, as in ``results["nll"]``, or of a detection, as in ``results["kmnist/entropy/auroc"]``."""
        flat = self.flat()
        if name not in flat:
            raise InputError(f"there is no number called {name!r}; there are: {', '.join(flat)}")
        return flat[name].value

    def flat(self) -> dict[str, Metric]:
        """Returns every number: metrics by name, and detections as set/score/metric."""
        flat = dict(self.metrics)
        for data, scores in self.ood.items():
            for score, numbers in scores.items():
                flat.update({f"{data}/{score}/{n}": m for n, m in numbers.items()})
        return flat

    def to_dict(self, *, table: bool = True) -> dict[str, Any]:
        """Returns the results as plain values for JSON."""
        content: dict[str, Any] = {
            "schema": SCHEMA,
            "name": self.name,
            "kind": self.kind,
            "n_data": self.n_data,
            "metrics": to_plain(self.metrics),
            "ood": to_plain(self.ood),
            "attacks": to_plain(self.attacks),
            "curves": to_plain(self.curves),
            "provenance": to_plain(self.provenance),
        }
        if table:
            content["table"] = to_plain(self.table)
        return content

    def to_json(self, path: str | Path | None = None, *, table: bool = True) -> str:
        """Returns JSON text, and writes it to ``path`` if given (first to a neighbouring file, which is then moved into place)."""
        return write_json(self.to_dict(table=table), path)

    @staticmethod
    def from_json(source: str | Path) -> Results:
        """Reads what :meth:`to_json` wrote, from a path or from the text itself."""
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"these results are not JSON: {error}") from error
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise DataError(f"these results have another schema than {SCHEMA}; write them again")
        return Results(
            content["name"],
            content["kind"],
            content["n_data"],
            {n: _metric(m) for n, m in content["metrics"].items()},
            {
                d: {s: {n: _metric(m) for n, m in numbers.items()} for s, numbers in scores.items()}
                for d, scores in content["ood"].items()
            },
            content["attacks"],
            content.get("table", {}),
            content["curves"],
            content["provenance"],
        )

    def to_frame(self) -> Any:
        """Returns the table of inputs as a pandas data frame.

        Raises:
            UnsupportedError: The package pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise UnsupportedError("to_frame needs pandas: pip install pandas. The columns are in .table") from error
        return pandas.DataFrame(dict(self.table))

    def report(self, path: str | Path, *, map: Results | None = None, **options: Any) -> Path:
        """Writes these results as one self-contained HTML file (needs ``pip install 'aftermap[plot]'``).

        Args:
            path: The file to write.
            map: The evaluation of the network alone on the same data, to compare with.
            options: Options of `aftermap.analysis.report.write_report`: where, title, settings, images, classes,
                threshold, figures.

        Returns:
            The path of the file.
        """
        write = lazy_attribute("aftermap.analysis.report", "write_report")
        return Path(write(path, bayesian=self, map=map, **options))

    def __str__(self) -> str:
        lines = [self._title]
        width = max(map(len, self.flat()), default=0)
        lines += [f"  {name:<{width}}  {metric}" for name, metric in self.flat().items()]
        return "\n".join(lines)

    @property
    def _title(self) -> str:
        return f"{self.name}: {self.kind}, {self.n_data:,} examples"

    def _repr_html_(self) -> str:
        flat = self.flat()
        columns = {"metric": list(flat), "value": [f"{m.value:.4g}" for m in flat.values()]}
        if any(m.lower != m.upper for m in flat.values()):
            columns["interval"] = [
                "" if m.lower == m.upper else f"[{m.lower:.4g}, {m.upper:.4g}]" for m in flat.values()
            ]
        return html_table(self._title, columns, left=["metric"])


def _metric(content: Mapping[str, Any]) -> Metric:
    return Metric(*(math.nan if content[k] is None else float(content[k]) for k in ("value", "lower", "upper")))


def provenance(**facts: Any) -> dict[str, Any]:
    """Returns the versions of what computed the numbers, the time, and the given facts.

    >>> sorted(provenance(seed=3))
    ['aftermap', 'numpy', 'platform', 'python', 'seed', 'time', 'torch']
    """
    try:
        installed = version("aftermap")
    except PackageNotFoundError:
        installed = "unknown"
    return {
        "aftermap": installed,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }


@dataclass(frozen=True)
class Comparison:
    """Several predictors side by side, with one row each.

    Attributes:
        columns: The names of the numbers that are compared.
        rows: For each predictor its numbers by name; missing ones are left out.
        extras: For each predictor more facts, such as seconds and megabytes.
    """

    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Metric]]
    extras: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns plain values: for each predictor and number a dict of value, lower and upper."""
        return {name: {**to_plain(row), **to_plain(self.extras.get(name, {}))} for name, row in self.rows.items()}

    def best(self, column: str) -> str:
        """Returns the predictor with the best value: the highest for an accuracy or AUROC, the lowest for anything else."""
        values = {n: row[column].value for n, row in self.rows.items() if column in row}
        if not values:
            raise InputError(f"no predictor has a number called {column!r}; there are: {', '.join(self.columns)}")
        choose = max if column.rpartition("/")[2].startswith(_HIGHER) else min
        return choose(values, key=lambda n: values[n])

    def _cells(self) -> dict[str, list[str]]:
        """Returns the columns of the table, as text; the best of a column has a star."""
        names = list(self.rows)
        cells = {"method": names}
        for column in self.columns:
            best = self.best(column) if names else ""
            cells[column] = [
                f"{self.rows[n][column].value:.4f}{'*' if n == best else ' '}" if column in self.rows[n] else "- "
                for n in names
            ]
        for column in dict.fromkeys(k for row in self.extras.values() for k in row):
            more = [self.extras.get(n, {}) for n in names]
            cells[column] = [f"{m[column]:.1f}" if column in m else "-" for m in more]
        return cells

    def __str__(self) -> str:
        return f"{text_table(self._cells(), left=['method'])}\n* best of its column"

    def _repr_html_(self) -> str:
        return html_table("", self._cells(), left=["method"], note="* best of its column")


def compare(
    results: Sequence[Results] | Mapping[str, Results],
    columns: Sequence[str] | None = None,
    *,
    extras: Mapping[str, Mapping[str, float]] | None = None,
) -> Comparison:
    """Puts several evaluations on the same data into one table.

    Args:
        results: The results of several predictors; a mapping gives them new names.
        columns: The names of numbers, as in ``Results.flat``. None means all metrics, and the AUROC of every detection.
        extras: More numbers to show, for each predictor by name.

    Returns:
        The table; ``str`` draws it, and ``to_dict`` gives its numbers.

    Raises:
        InputError: There is nothing to compare, a name stands twice, the evaluations are on different data, or a column
            is unknown.
    """
    named = dict(results) if isinstance(results, Mapping) else {r.name: r for r in results}
    if not named or len(named) != len(results):
        raise InputError(f"compare needs results with different names, got {len(results)} with {len(named)} names")
    hashes = {str(r.provenance.get("data_hash")) for r in named.values()}
    if len(hashes) > 1:
        raise InputError("these results belong to different data, so that their numbers cannot be compared")
    flats = {name: r.flat() for name, r in named.items()}
    known = list(dict.fromkeys(c for flat in flats.values() for c in flat))
    if columns is None:
        columns = [c for c in known if "/" not in c or c.endswith("/auroc")]
    unknown = [c for c in columns if c not in known]
    if unknown:
        raise InputError(f"no result has {', '.join(unknown)}; there are: {', '.join(known)}")
    rows = {name: {c: flat[c] for c in columns if c in flat} for name, flat in flats.items()}
    return Comparison(tuple(columns), rows, dict(extras or {}))
