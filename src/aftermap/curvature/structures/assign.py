"""The choice of the accumulator that serves which parameters of a network."""

from __future__ import annotations

import math
from collections.abc import Callable

from aftermap.curvature.passes.backward import Accumulator, PerExampleAccumulator, PerExampleSum
from aftermap.curvature.passes.stream import CurvatureProblem
from aftermap.curvature.structures.diagonal import DiagonalAccumulator, DiagonalSum
from aftermap.curvature.structures.full import FullSum

__all__ = ["layer_accumulators"]


def layer_accumulators(
    problem: CurvatureProblem, for_matrix: Callable[[CurvatureProblem, int], Accumulator]
) -> list[Accumulator]:
    """Returns one accumulator for each layer, and one for the parameters that no layer accounts for.

    Args:
        problem: The problem that is fitted.
        for_matrix: A function that makes the accumulator of a layer with a weight matrix, from the problem and the
            layer's number. Norm layers and parameters without a rule get a full block up to ``problem.small_block``
            numbers, and a diagonal above.
    """
    plan, dtype, device = problem.plan, problem.sums_dtype, problem.device
    accumulators: list[Accumulator] = []
    for number in plan.whole_layers:
        layout = plan.layers[number].layout
        if plan.layers[number].rule.matrix:
            accumulators.append(for_matrix(problem, number))
        elif layout.size <= problem.small_block:
            block = FullSum(layout.name, layout.shapes, device)
            accumulators.append(PerExampleAccumulator([block], layout.size, layers=(number,)))
        else:
            accumulators.append(DiagonalAccumulator.of(problem, number))
    covered = {n for k in plan.whole_layers for n in plan.layers[k].layout.names}
    rest = {n: s for n, s in problem.shapes.items() if n not in covered}
    if rest:
        sums: list[PerExampleSum] = []
        for name, shape in rest.items():
            if math.prod(shape) <= problem.small_block:
                sums.append(FullSum(name, {name: shape}, device))
            else:
                sums.append(DiagonalSum({name: shape}, dtype, device))
        layers = tuple(sorted({k for n in rest for k in plan.layers_of_parameter.get(n, ())}))
        accumulators.append(PerExampleAccumulator(sums, sum(math.prod(s) for s in rest.values()), layers))
    return accumulators
