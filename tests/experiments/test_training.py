"""Networks that experiments train themselves: as by hand, with an energy, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.training import BATCH, kept, made, train_epochs


def build() -> nn.Module:
    return nn.Linear(3, 2)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH + 40, 3, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def test_a_new_network_leaves_other_random_numbers_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(2)
    torch.manual_seed(5)
    first, second = made(build, 0), made(build, 0)
    assert torch.equal(torch.rand(2), wanted)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_one_epoch_is_the_steps_by_hand_at_the_rates_of_a_cosine() -> None:
    (x, y), model, own = data(), made(build, 0), made(build, 0)
    losses = train_epochs(model, torch.optim.SGD(model.parameters(), lr=0.5), (x, y), 1, seed=3)
    seen = []
    for rate, index in zip(
        (0.5, 0.25), torch.randperm(len(x), generator=torch.Generator().manual_seed(3)).split(BATCH), strict=True
    ):
        loss = F.cross_entropy(own(x[index]), y[index])
        slopes = torch.autograd.grad(loss, list(own.parameters()))
        with torch.no_grad():
            for p, slope in zip(own.parameters(), slopes, strict=True):
                p -= rate * slope
        seen.append(float(loss.detach()) * len(index))
    assert losses == pytest.approx([sum(seen) / len(x)])
    for p, q in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_an_energy_counts_once_for_all_data() -> None:
    model, (x, y) = made(build, 0), (part[:50] for part in data())
    before = [p.detach().clone() for p in model.parameters()]
    slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))

    def energy() -> torch.Tensor:
        return 0.5 * 40.0 * torch.stack([p.square().sum() for p in model.parameters()]).sum()

    train_epochs(model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y), 1, seed=0, energy=energy)
    for p, old, slope in zip(model.parameters(), before, slopes, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * (slope + 40.0 / 50 * old))


def test_weights_are_kept(tmp_path: Path) -> None:
    model = made(build, 4)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    found = kept(build(), tmp_path / "w.pt")
    assert not found.training
    assert torch.equal(found(data()[0]), model(data()[0]))
