"""How exact a matrix-free posterior is, and at what price."""

from __future__ import annotations

from dataclasses import dataclass

from aftermap.errors import InputError

__all__ = ["FUNCTIONAL_KINDS", "MatrixFreeSettings"]

FUNCTIONAL_KINDS = ("cg", "samples")


@dataclass(frozen=True)
class MatrixFreeSettings:
    """How exact a matrix-free posterior is, and at what price.

    Attributes:
        tolerance: of a solve, ‖b − Px‖ / ‖b‖; None: 1e-8 for a float64 network, 1e-4 for others.
        max_iterations: of a solve; each is one pass over the data for all right-hand sides.
        kind: of the predictive covariance: "cg" solves for every output of every input, exact up to the tolerance;
            "samples" uses the fixed samples, with relative standard deviation √(2/S), and no pass over the data.
        samples: S, the size of the fixed set, and the number of random signs of other estimates.
        probes: of the log determinant.
        steps: Lanczos steps of the log determinant, each one pass over the data.
        dense_limit: up to so many parameters the log determinant, the marginal variances and the effective parameters
            are exact, from the dense matrix.
        seed: of the fixed samples and of the probes: the same for every prior, so that priors are compared fairly.
    """

    tolerance: float | None = None
    max_iterations: int = 1000
    kind: str = "cg"
    samples: int = 64
    probes: int = 16
    steps: int = 50
    dense_limit: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FUNCTIONAL_KINDS:
            raise InputError(f"kind={self.kind!r} is not known; allowed are {', '.join(map(repr, FUNCTIONAL_KINDS))}")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise InputError(f"the tolerance must be between 0 and 1, or None, got {self.tolerance!r}")
        for name in ("max_iterations", "samples", "probes", "steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
