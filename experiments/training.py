"""Classifiers that experiments train themselves, and keep beside the results of their jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["kept", "made", "train_epochs"]

BATCH = 128


def made(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A new network with the first weights of this seed; other random numbers go on as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def train_epochs(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    epochs: int,
    seed: int,
    energy: Callable[[], Tensor] | None = None,
) -> list[float]:
    """Trains a classifier with a rate that falls to zero along a cosine, and returns the mean loss of each epoch.

    Args:
        model: The network.
        optimiser: Its optimiser, at the first rate.
        data: Inputs and labels.
        epochs: Passes over them, in batches of 128 in a new order each.
        seed: The seed of the orders.
        energy: What is added to the loss of all data together, such as that of a prior.
    """
    x, y = data
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * len(x.split(BATCH)))
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for index in torch.randperm(len(x), generator=generator).split(BATCH):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(x[index]), y[index])
            (loss if energy is None else loss + energy() / len(x)).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(index)
        losses.append(total / len(x))
    return losses


def kept(model: nn.Module, path: Path) -> nn.Module:
    """The network with the weights that were kept in a file, in evaluation mode."""
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()
