"""Linear algebra with a symmetric matrix known only through products: eigenpairs, solves, log determinants.

Nothing here knows about networks. A `matvec` takes [P] or [P, k] and returns the same shape.
"""

from __future__ import annotations

from aftermap.krylov.conjugate_gradient import CGResult, conjugate_gradient
from aftermap.krylov.eigen import Eigenpairs, lanczos_eigh, randomised_eigh
from aftermap.krylov.lanczos import LanczosResult, TraceEstimate, lanczos, stochastic_lanczos_quadrature

__all__ = [
    "CGResult",
    "Eigenpairs",
    "LanczosResult",
    "TraceEstimate",
    "conjugate_gradient",
    "lanczos",
    "lanczos_eigh",
    "randomised_eigh",
    "stochastic_lanczos_quadrature",
]
