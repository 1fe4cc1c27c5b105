"""Small networks at the minimum of their negative log posterior, with the dense Hessian beside them; float64."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature import reference
from aftermap.curvature.structures.hessian import full_hessian
from aftermap.likelihoods import Categorical, Gaussian, Likelihood
from tests.laplace.problems import classes, gaussian_nll, mlp, normal, regression, trained

__all__ = ["PRIOR", "Problem", "classification", "curve", "fresh"]

PRIOR = 1.3


@dataclass(frozen=True)
class Problem:
    """A trained network, its data, and inputs to ask about."""

    model: nn.Module
    data: list[tuple[Tensor, Tensor]]
    likelihood: Likelihood
    asked: Tensor
    prior: float = PRIOR

    def hessian(self) -> Tensor:
        """The exact Hessian with the prior [P, P]."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the data alone it is indefinite
            matrix = full_hessian(self.model, self.data, self.likelihood).matrix
        return matrix + self.prior * torch.eye(len(matrix), dtype=torch.float64)

    def ggn(self) -> Tensor:
        x, y = (torch.cat(parts) for parts in zip(*self.data, strict=True))
        matrix = reference.ggn(self.model, x, self.likelihood, y)
        return matrix + self.prior * torch.eye(len(matrix), dtype=torch.float64)

    def jacobian(self) -> Tensor:
        """[N, C, P] of the inputs asked about."""
        return reference.jacobian(self.model, self.asked)

    def truth(self, gradient: Tensor, precision: Tensor | None = None) -> Tensor:
        """G P⁻¹ Gᵀ for gradients [Q, P]."""
        return gradient @ torch.linalg.solve(self.hessian() if precision is None else precision, gradient.T)

    def gradients(self, *functionals: Any) -> Tensor:
        """dψ/dθ [Q, P] of functions of the network."""
        names = [n for n, _ in self.model.named_parameters()]
        rows = []
        for functional in functionals:
            leaves = {n: p.detach().clone().requires_grad_() for n, p in self.model.named_parameters()}
            value = functional(lambda x, leaves=leaves: torch.func.functional_call(self.model, leaves, (x,)))
            slopes = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True, allow_unused=True)
            rows.append(torch.cat([dict(zip(names, slopes, strict=True))[n].reshape(-1) for n in names]))
        return torch.stack(rows)


@cache
def curve() -> Problem:
    """A noisy sine, 19 parameters; far from linear beyond its data."""
    data = regression(40, noise=0.3)
    model = trained(mlp(1, 6, 1), data, gaussian_nll(0.3), decay=PRIOR, steps=3000)
    asked = torch.tensor([[-2.8], [-0.4], [0.9], [2.6]], dtype=torch.float64)
    return Problem(model, data, Gaussian(0.3), asked)


@cache
def classification() -> Problem:
    """Four classes, three inputs."""
    data = classes()
    loss = nn.CrossEntropyLoss(reduction="sum")
    model = trained(mlp(), data, loss, decay=PRIOR, steps=3000)
    return Problem(model, data, Categorical(), normal(3, 3, seed=8))


def fresh(problem: Problem) -> nn.Module:
    """A copy of a problem's network, to be moved."""
    import copy

    return copy.deepcopy(problem.model)
