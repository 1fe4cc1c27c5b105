"""KFRA in the stream: input factors as in KFAC, output factors by the backward recursion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from aftermap.curvature.accumulate import Accumulator
from aftermap.curvature.factors import Block
from aftermap.curvature.kfra import kfra_factors
from aftermap.curvature.kron import KronAccumulator, KronBlock
from aftermap.curvature.sites import ROOT, Sites
from aftermap.curvature.step import BatchStep, VectorStep
from aftermap.errors import UnsupportedError
from aftermap.likelihoods import Likelihood

__all__ = ["KfraAccumulator"]


class KfraAccumulator(Accumulator):
    """Sums the factors of all layers with a weight matrix; one recursion per batch serves them all."""

    needs = ()

    def __init__(self, parts: Sequence[KronAccumulator], sites: Sites, likelihood: Likelihood):
        self.parts, self.likelihood = list(parts), likelihood
        self.names = [sites.sites[p.site].name for p in self.parts]

    def on_batch(self, step: BatchStep) -> None:
        if step.batch.weight is not None:
            raise UnsupportedError(
                "KFRA averages one matrix over the examples of a batch and cannot weigh them; "
                "use structure='kron' with example weights"
            )
        model, names = step.model, self.names
        if names == [ROOT]:  # the recursion walks over the children of a model
            model, names = nn.Sequential(model), ["0"]
        found = kfra_factors(model, step.batch.inputs, self.likelihood, step.batch.targets, names)
        for part, name in zip(self.parts, names, strict=True):
            part.on_batch(step)
            part.outputs.add_products(found[name].to(part.outputs.dtype).expand(part.outputs.groups, -1, -1))

    def on_vectors(self, step: VectorStep) -> None:
        """Nothing: the recursion needs no vectors."""

    def results(self) -> list[Block]:
        return [replace(b, kind="kfra") for p in self.parts for b in p.results() if isinstance(b, KronBlock)]
