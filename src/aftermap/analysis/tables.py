"""Tables as columns: a dict of lists that also prints well, and plain values for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["Table", "plain", "write_json"]


class Table(dict[str, list[Any]]):
    """Columns of equal length: a plain dict of lists; ``str`` draws it.

    >>> print(Table({"layer": ["0", "2"], "share": [0.25, 0.75]}))
    layer  share
    ------------
    0      25.0%
    2      75.0%
    """

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return len(next(iter(self.values()), []))

    def __str__(self) -> str:
        """Text with aligned columns; columns whose name ends in "share" are per cent."""
        cells = {k: [_shown(k, v) for v in values] for k, values in self.items()}
        if not cells:
            return "(nothing)"
        widths = {k: max(len(k), *map(len, shown), 1) for k, shown in cells.items()}
        left = {k for k, values in self.items() if any(isinstance(v, str) for v in values)}

        def line(row: Mapping[str, str]) -> str:
            return "  ".join(row[k].ljust(widths[k]) if k in left else row[k].rjust(widths[k]) for k in self).rstrip()

        head = line({k: k for k in self})
        return "\n".join(
            [head, "-" * len(head), *(line({k: shown[i] for k, shown in cells.items()}) for i in range(self.n_rows))]
        )


def _shown(column: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.1%}" if column.endswith("share") else f"{value:.4g}"
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def plain(thing: Any) -> Any:
    """Values for JSON; a number that is not finite becomes null, which every reader understands.

    >>> plain({"a": (1.0, float("nan"))})
    {'a': [1.0, None]}
    """
    if isinstance(thing, Mapping):
        return {str(k): plain(v) for k, v in thing.items()}
    if isinstance(thing, Tensor | np.ndarray):
        return plain(thing.tolist())
    if isinstance(thing, list | tuple):
        return [plain(v) for v in thing]
    if isinstance(thing, float):
        return thing if math.isfinite(thing) else None
    if thing is None or isinstance(thing, bool | int | str):
        return thing
    return repr(thing)


def write_json(content: Mapping[str, Any], path: str | Path | None) -> str:
    """JSON text, also written to ``path`` if given (first to a neighbour, then moved into place)."""
    text = json.dumps(content, indent=2, allow_nan=False)
    if path is not None:
        target = Path(path)
        part = target.with_name(target.name + ".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(target)
    return text
