"""The shared contract over every preset and option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aftermap.optim import IVON, KFAC, OGN, VOGN, NoisyKFAC, warmup
from aftermap.testing import check_optimizer


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(5)


PRESETS: dict[str, Callable[[nn.Module, int], Any]] = {
    "vogn": lambda net, n: VOGN(net, lr=0.02, n_data=n, generator=seed()),
    "vogn, three samples": lambda net, n: VOGN(net, lr=0.02, n_data=n, mc_samples=3, generator=seed()),
    "vogn, normalised, warm-up": lambda net, n: VOGN(
        net, lr=0.2, n_data=n, momentum_form="normalised", temperature=warmup(50), generator=seed()
    ),
    "vogn, published": lambda net, n: VOGN(net, lr=0.02, n_data=n, form="published", temperature=0.5, generator=seed()),
    "vogn, initial curvature": lambda net, n: VOGN(net, lr=0.02, n_data=n, initial_curvature=1.0, generator=seed()),
    "vogn, micro-batch": lambda net, n: VOGN(net, lr=0.02, n_data=n, curvature="micro_batch", generator=seed()),
    "vogn, reparametrised": lambda net, n: VOGN(
        net, lr=0.02, n_data=n, curvature="reparametrised", initial_curvature=1.0, damping=1.0, generator=seed()
    ),
    "ogn": lambda net, n: OGN(net, lr=0.02, n_data=n),
    "ivon": lambda net, n: IVON(net, lr=0.5, n_data=n, initial_curvature=0.5, generator=seed()),
    "ivon, clipped": lambda net, n: IVON(
        net, lr=0.5, n_data=n, initial_curvature=0.5, clip_radius=1.0, generator=seed()
    ),
    "ivon of parameters": lambda net, n: IVON(
        net.parameters(), lr=0.5, n_data=n, initial_curvature=0.5, generator=seed()
    ),
    "kfac": lambda net, n: KFAC(net, lr=0.02, n_data=n),
    "kfac, lazy": lambda net, n: KFAC(net, lr=0.02, n_data=n, factor_every=2, inverse_every=4),
    "noisy kfac": lambda net, n: NoisyKFAC(net, lr=0.02, n_data=n, generator=seed()),
    "noisy kfac, pi": lambda net, n: NoisyKFAC(
        net, lr=0.02, n_data=n, damping_form="pi", mc_samples=2, generator=seed()
    ),
}


@pytest.mark.parametrize("name", PRESETS)
def test_contract(name: str) -> None:
    check_optimizer(PRESETS[name])
