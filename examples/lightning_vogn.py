"""VOGN under Lightning: one line in configure_optimizers, and the posterior is saved when training ends.

The same module is trained with Adam and a LaplaceCallback, and with VOGN, gradient accumulation and a PosteriorCallback.
VOGN's lr and damping are the best of six settings on the validation part (20 epochs, no accumulation, seed 0).

python examples/lightning_vogn.py [--epochs 40] [--seed 0]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import aftermap as am
from aftermap import metrics
from aftermap.integrations.lightning import AccumulateDraws, LaplaceCallback, PosteriorCallback


class Digits(L.LightningModule):
    def __init__(self, method: str, n_data: int, seed: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.method, self.n_data, self.seed = method, n_data, seed

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("validation loss", self.training_step(batch, number))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.method == "vogn":
            noise = torch.Generator().manual_seed(self.seed)
            return am.optim.VOGN(self, lr=5e-3, n_data=self.n_data, damping=1e-3, generator=noise)
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def data(seed: int) -> tuple[DataLoader[list[Tensor]], DataLoader[list[Tensor]], Tensor, Tensor]:
    bunch = load_digits()
    x, y = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, validation, test = order[:1000], order[1000:1200], order[1200:]
    shuffle = torch.Generator().manual_seed(seed)
    return (
        DataLoader(TensorDataset(x[train], y[train]), batch_size=50, shuffle=True, generator=shuffle),
        DataLoader(TensorDataset(x[validation], y[validation]), batch_size=200),
        x[test],
        y[test],
    )


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    results: dict[str, float] = {}
    print(f"{'':20}{'accuracy':>10}{'NLL':>8}{'ECE':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for method in ("adam", "vogn"):
            loader, held_out, x, y = data(options.seed)
            torch.manual_seed(options.seed)
            module = Digits(method, n_data=1000, seed=options.seed)
            place = Path(folder, method)
            laplace, trained = LaplaceCallback(folder=place, module="net"), PosteriorCallback("classification", place)
            trainer = L.Trainer(
                max_epochs=options.epochs,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                accumulate_grad_batches=2 if method == "vogn" else 1,
                plugins=[AccumulateDraws()] if method == "vogn" else None,
                callbacks=[trained if method == "vogn" else laplace],
            )
            trainer.fit(module, loader, held_out)
            module.eval()
            rows = {f"{method}, network": module(x).detach().softmax(-1)}
            if laplace.laplace is not None:
                rows["adam, Laplace"] = laplace.laplace.predict(x).mean
            if trained.posterior is not None:
                noise = torch.Generator().manual_seed(options.seed)
                rows["vogn, posterior"] = trained.posterior.predict(x, samples=20, generator=noise).mean
            for name, mean in rows.items():
                results[name] = metrics.nll(mean, y)
                print(f"{name:20}{metrics.accuracy(mean, y):10.3f}{results[name]:8.3f}{metrics.ece(mean, y):8.3f}")
            print(f"{'':20}saved in {place.name}/: {', '.join(sorted(p.name for p in place.iterdir()))}")
    return results


if __name__ == "__main__":
    main()
