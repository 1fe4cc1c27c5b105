"""Evaluations for the tests of the report: a small network with its Laplace approximation, and a regression."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from aftermap.baselines import Deterministic
from aftermap.evaluation import FGSM, Results, evaluate
from aftermap.laplace import Laplace

__all__ = ["EVIL", "classification", "images", "regression"]

EVIL = "<script>alert('x')</script>"  # a name that must never run
N = 120


def _trained(model: nn.Module, x: Tensor, y: Tensor, loss: nn.Module) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    return model.eval()


def _points(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three overlapping clouds of inputs that are small pictures of 2 by 3 pixels."""
    y = torch.arange(n) % 3
    centres = torch.tensor([[2.0, 0, 0, 1, 0, 0], [0, 2.0, 0, 0, 1, 0], [0, 0, 2.0, 0, 0, 1]])
    return centres[y] + 1.1 * torch.randn(n, 6, generator=generator), y


def images() -> Tensor:
    """The test inputs as pictures [N, 1, 2, 3]."""
    return _class_data()[1][0].reshape(N, 1, 2, 3)


@lru_cache
def _class_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    return _points(90, generator), _points(N, generator), 6 * torch.randn(70, 6, generator=generator)


@lru_cache
def classification() -> tuple[Results, Results, Laplace]:
    """Bayesian and plain results with two other sets and an attack, and the Laplace approximation itself."""
    train, test, far = _class_data()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    model = _trained(model, *train, nn.CrossEntropyLoss())
    laplace = Laplace(model, "classification", prior_precision=1.0).fit([train])
    others = {EVIL: [(far, torch.zeros(len(far), dtype=torch.long))], "near $x$ & co": [(test[0] + 1.0, test[1])]}
    attack = [FGSM(steps=(0.0, 0.2, 0.4))]
    plain = evaluate(Deterministic(model), [test], ood=others, attacks=attack, name="MAP", n_resamples=40)
    bayes = evaluate(laplace, [test], ood=others, attacks=attack, name=f"Laplace {EVIL}", n_resamples=40)
    return bayes, plain, laplace


@lru_cache
def regression() -> tuple[Results, Results, Laplace]:
    """The same for a regression with one target."""
    generator = torch.Generator().manual_seed(5)
    x = 4 * torch.rand(160, 1, generator=generator) - 2
    y = torch.sin(2 * x) + 0.2 * torch.randn(160, 1, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
    model = _trained(model, x[:80], y[:80], nn.MSELoss())
    laplace = Laplace(model, "regression").fit([(x[:80], y[:80])])
    laplace.tune()
    test, others = [(x[80:], y[80:])], {"far away": [(x[80:] + 5, y[80:])]}
    from aftermap.likelihoods import Gaussian

    plain = evaluate(Deterministic(model, Gaussian(0.2)), test, ood=others, name="MAP", n_resamples=40)
    return evaluate(laplace, test, ood=others, name="Laplace", n_resamples=40), plain, laplace
