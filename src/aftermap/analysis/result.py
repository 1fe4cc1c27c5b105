"""What `where` found: tables, figures, numbers for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aftermap import checks
from aftermap.analysis.layers import LayerResult
from aftermap.analysis.levels import ClassResult, InputResult
from aftermap.analysis.perturbation import Perturbation
from aftermap.analysis.weights import CONTRACTION_EDGES, SNR_EDGES, WeightMap
from aftermap.errors import InputError
from aftermap.evaluation.results import Table, to_plain, write_json

__all__ = ["LEVELS", "Where"]

LEVELS = ("layer", "filter", "weight", "class", "input", "calibration")
SCHEMA = 1


@dataclass(frozen=True, eq=False)
class Where:
    """Where the uncertainty of a network sits.

    Attributes:
        structure: The structure of the posterior.
        kind: The kind of task.
        n_data: The number of inputs that were looked at.
        layers: The results by layer, in the order of the network.
        information: The nats that the data gave to all weights together. This is more than the sum over layers where
            layers depend on each other, since part of it is about several at once.
        classes: The results by class, or by output of a regression.
        inputs: The most uncertain inputs.
        calibration: The results of the calibration test by layer, if it was asked for (docs/mathematics/where.md).
        certain: The parameters of the model that are not in the posterior, and so add no uncertainty.
    """

    structure: str
    kind: str
    n_data: int
    layers: tuple[LayerResult, ...]
    information: float
    classes: ClassResult
    inputs: InputResult
    calibration: tuple[Perturbation, ...] = ()
    certain: tuple[str, ...] = ()
    weights_of: Callable[[str], Iterator[WeightMap]] | None = field(default=None, repr=False)

    @property
    def crosses(self) -> bool:
        """Whether layers depend on each other, so that there is a cross term."""
        return any(layer.cross_share is not None for layer in self.layers)

    @property
    def own_shares(self) -> tuple[float, ...]:
        """Each layer's share of the layers' own variances, in the order of the network.

        The own variance of a layer is that of the outputs when only its weights are uncertain as the posterior says. The shares add up
        to one and none is negative, whatever the layers have in common.
        """
        total = math.fsum(layer.predictive_share for layer in self.layers)
        return tuple(layer.predictive_share / total for layer in self.layers)

    @property
    def in_common(self) -> float:
        """What the covariance between layers adds to the variance of the outputs, as a share of it; mostly negative, and 0 for independent layers."""
        return math.fsum(layer.cross_share or 0.0 for layer in self.layers)

    def in_common_in_words(self) -> str:
        """Says what is to be known about shares of layers that depend on each other."""
        before = 1 - self.in_common
        return (
            "In this posterior layers depend on each other. Shares are those of the variances that each layer causes alone; these add up to "
            f"{before:.3g} times the variance of the outputs, because what layers have in common "
            + ("takes away the rest." if self.in_common < 0 else "adds the rest.")
            + (" Most of it cancels between layers, so that no layer is uncertain by itself." if before > 2 else "")
        )

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The names of the layers, in the order of the network."""
        return tuple(layer.name for layer in self.layers)

    def __getitem__(self, name: str) -> LayerResult:
        """Returns the results of a layer, by its name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise InputError(f"there is no layer {name!r} in the posterior; there are: {', '.join(self.layer_names)}")

    def weights(self, layer: str | None = None) -> Iterator[WeightMap]:
        """Yields variance, signal-to-noise ratio and contraction of every weight, made parameter by parameter when asked for.

        Args:
            layer: The name of one layer. None means all, one after the other, so that only one layer's maps are alive
                at a time.
        """
        names = self.layer_names if layer is None else (self[layer].name,)
        if self.weights_of is None:
            raise InputError("this result holds no posterior any more, so there are no maps of single weights")
        for name in names:
            yield from self.weights_of(name)

    # Tables

    def table(self, level: str = "layer") -> Table:
        """Returns a table as a dict of lists, which ``str`` draws.

        Args:
            level: The rows of the table: "layer", "filter" (filters, neurons, channels or tokens of every layer),
                "weight" (quantiles over the weights of each parameter; `weights` gives every single one), "class",
                "input" (the most uncertain ones) or "calibration".

        Raises:
            InputError: The level is unknown, or a calibration was not asked for.
        """
        checks.choice("level", level, LEVELS)
        if level == "layer":
            return self._layer_table()
        if level == "filter":
            return self._filter_table()
        if level == "weight":
            rows = [row for layer in self.layers for row in layer.weights.parameters]
            return Table({k: [row[k] for row in rows] for k in rows[0]})
        if level == "class":
            return self.classes.table(self.layer_names)
        if level == "input":
            return self.inputs.table(self.layer_names)
        return self._calibration_table()

    def _layer_table(self) -> Table:
        layers = self.layers
        table = Table(
            {
                "layer": [k.name for k in layers],
                "kind": [k.layer.kind + ("" if len(k.layer.modules) < 2 else " (tied)") for k in layers],
                "parameters": [k.n_parameters for k in layers],
                "effective": [k.effective for k in layers],
                "information": [k.information for k in layers],
                "posterior share": [k.posterior_share for k in layers],
                "predictive share": [k.predictive_share for k in layers],
            }
        )
        if self.crosses:
            table["cross share"] = [k.cross_share for k in layers]
        if any(k.conditional_share is not None for k in layers):
            table["conditional share"] = [k.conditional_share for k in layers]
        if all(k.epistemic_share is not None for k in layers) and self.kind != "regression":
            table["epistemic share"] = [k.epistemic_share for k in layers]
            if self.crosses:
                table["epistemic cross share"] = [k.epistemic_cross_share for k in layers]
        return table

    def readable_layers(self) -> Table:
        """Returns the table of layers with shares between 0 and 100 %.

        Where layers depend on each other, the share of the layers' own variances (`own_shares`) stands for the predictive and the cross
        share, and shares of nats, of which large ones cancel each other, are left out.
        """
        if not self.crosses:
            return self._layer_table()
        left_out = ("cross share", "epistemic share", "epistemic cross share")
        columns = {name: values for name, values in self._layer_table().items() if name not in left_out}
        own_shares = {"own share": list(self.own_shares)}
        return Table(
            {
                k: v
                for name, values in columns.items()
                for k, v in (own_shares if name == "predictive share" else {name: values}).items()
            }
        )

    def _filter_table(self) -> Table:
        columns = ("layer", "unit", "weights", "variance", "sd", "snr", "contraction", "effective")
        table = Table({k: [] for k in columns})
        for layer in self.layers:
            for units in layer.weights.units:
                count = len(units.count)
                table["layer"] += [layer.name] * count
                table["unit"] += list(range(count))
                table["weights"] += units.count.tolist()
                table["variance"] += units.variance.tolist()
                table["sd"] += units.variance.sqrt().tolist()
                table["snr"] += units.snr.tolist()
                table["contraction"] += units.contraction.tolist()
                table["effective"] += units.effective.tolist()
        return table

    def _calibration_table(self) -> Table:
        if not self.calibration:
            raise InputError(
                "the calibration test was not asked for: where(predictor, loader, calibration=train_loader), or calibration=True "
                "if the loader holds the training data"
            )
        rows = self.calibration
        return Table(
            {
                "layer": [r.layer for r in rows],
                "measured": [r.measured for r in rows],
                "standard error": [r.standard_error for r in rows],
                "linearised": [r.linearised for r in rows],
                "½γ": [r.expected for r in rows],
                "measured / ½γ": [r.ratio for r in rows],
            }
        )

    def __str__(self) -> str:
        """Returns the table of layers, and says what the other tables would show."""
        total = math.fsum(k.effective for k in self.layers)
        count = sum(k.n_parameters for k in self.layers)
        lines = [
            f"where the uncertainty sits: {self.structure} posterior, {self.kind}, {self.n_data:,} inputs",
            f"the data determine {total:,.1f} of {count:,} uncertain weights and gave {self.information:,.1f} nats",
            "",
            str(self.readable_layers()),
        ]
        if self.crosses:
            lines += ["", self.in_common_in_words()]
        tied = [f"{k.name} ({', '.join(k.layer.modules)})" for k in self.layers if len(k.layer.modules) > 1]
        if tied:
            lines += ["", f"tied weights, counted once: {'; '.join(tied)}"]
        if self.certain:
            more = f" and {len(self.certain) - 6} more" if len(self.certain) > 6 else ""
            lines += ["", f"not in the posterior, so certain: {', '.join(self.certain[:6])}{more}"]
        if self.calibration:
            lines += ["", "drawing one layer raises the training loss by (nats):", str(self.table("calibration"))]
        return "\n".join(lines)

    # Numbers

    def to_dict(self, *, inputs: bool = False) -> dict[str, Any]:
        """Returns plain values for JSON; maps of single weights are left out.

        Args:
            inputs: Whether to include the most uncertain inputs and their saliency, number by number.
        """
        content: dict[str, Any] = {
            "schema": SCHEMA,
            "structure": self.structure,
            "kind": self.kind,
            "n_data": self.n_data,
            "information": self.information,
            "certain": self.certain,
            **{level: dict(self.table(level)) for level in LEVELS[:5]},
            "calibration": dict(self.table("calibration")) if self.calibration else {},
            "modules": {k.name: k.layer.modules for k in self.layers},
            "structures": {k.name: k.layer.structure for k in self.layers},
            "calls": {k.name: k.calls for k in self.layers},
            "by_output": {k.name: k.by_output for k in self.layers},
            "covariance": self.classes.covariance,
            "covariance_by_class": self.classes.by_class,
            "pairs": self.classes.pairs,
            "pair_counts": self.classes.pair_counts,
            "histograms": {
                "contraction_edges": CONTRACTION_EDGES,
                "log10_snr_edges": SNR_EDGES,
                "contraction": {k.name: k.weights.contraction_counts for k in self.layers},
                "log10_snr": {k.name: k.weights.snr_counts for k in self.layers},
            },
        }
        if inputs:
            content["inputs"] = self.inputs.inputs
            content["saliency"] = self.inputs.saliency
        return dict(to_plain(content))

    def to_json(self, path: str | Path | None = None, *, inputs: bool = False) -> str:
        """Returns the JSON text of `to_dict`, and writes it to ``path`` if given (at once, by moving a finished file into place)."""
        return write_json(self.to_dict(inputs=inputs), path)

    # Figures

    def figure(self, name: str, **options: Any) -> Any:
        """Draws one of the figures and returns the matplotlib Figure.

        Args:
            name: The figure: "layers" (shares), "filters" (weights and their deviations; option ``layer``), "weights"
                (histograms), "classes" (covariance of the outputs), "pairs" (uncertainty by true and predicted class),
                "inputs" (the most uncertain ones), "saliency" or "calibration".
            options: Options of the drawing function in `aftermap.analysis.figures.where`.

        Raises:
            InputError: The name is unknown, or the figure needs something that was not computed.
        """
        from aftermap.analysis.figures.where import FIGURES, draw

        checks.choice("figure", name, FIGURES)
        return draw(name, self, **options)
