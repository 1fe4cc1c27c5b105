"""Three lines on a trained network: digits beside noise, and what the network does not know.

python examples/first_look.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import aftermap as am


def trained_network(x: Tensor, y: Tensor) -> nn.Module:
    """Any trained network will do; this one takes a second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def main() -> tuple[am.Prediction, Tensor]:
    parts = am.data.split(am.data.builtin("digits"), validation=0.2, test=0.2)
    train, validation, test = (list(part.batches(256)) for part in parts.values())
    model = trained_network(parts["train"].inputs, parts["train"].targets)
    noise = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    x = torch.cat([test[0][0][:3], noise])

    la = am.fit(model, train, validation)
    pred = la.predict(x, generator=torch.Generator().manual_seed(0))
    print(pred)

    alone = model(x).softmax(-1).amax(-1).detach()
    print("the network alone:", ", ".join(f"{p:.3f}" for p in alone.tolist()))
    return pred, alone


if __name__ == "__main__":
    main()
