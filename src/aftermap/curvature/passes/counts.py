"""The counts of what passes by in a fit: data, loss, outputs, and which parameters were used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aftermap.curvature.passes.vectors import VECTOR_KINDS
from aftermap.distributed import all_reduce_

__all__ = ["DataCounts"]


@dataclass
class DataCounts:
    """The counts of what passed by in one pass over the data.

    Attributes:
        n_data: The number of data; weights count as copies.
        loss: The sum Σ −log p.
        n_outputs: The number of numbers that the network returns for one datum.
        kind: The kind of vectors.
        used: The parameters that some batch has used.
        probabilities: Whether the outputs of the first examples are probabilities where logits are needed.
    """

    n_data: float = 0.0
    loss: float = 0.0
    n_outputs: int = 0
    kind: str = ""
    used: frozenset[str] = frozenset()
    probabilities: bool = False

    def add(self, other: DataCounts) -> None:
        """Adds the counts of other data."""
        self.n_data, self.loss = self.n_data + other.n_data, self.loss + other.loss
        self.n_outputs, self.kind = self.n_outputs or other.n_outputs, self.kind or other.kind
        self.used, self.probabilities = self.used | other.used, self.probabilities or other.probabilities

    def agree_over_processes(self, names: Sequence[str]) -> None:
        """Takes over what other processes saw of outputs and parameters, since one without data saw nothing.

        Data and loss stay those of this process. All processes call it together.
        """
        has_data = self.n_outputs > 0
        kinds = torch.tensor([has_data and self.kind == kind for kind in VECTOR_KINDS], dtype=torch.int64)
        used = torch.tensor([name in self.used for name in names], dtype=torch.int64)
        seen = torch.tensor([has_data, self.n_outputs, self.probabilities], dtype=torch.int64)
        all_reduce_([kinds, used, seen])
        processes, outputs, probabilities = seen.tolist()
        if not has_data and processes:
            self.kind = VECTOR_KINDS[int(kinds.argmax())]
            self.n_outputs = outputs // processes
        self.used = frozenset(name for name, count in zip(names, used.tolist(), strict=True) if count)
        self.probabilities = probabilities > 0
