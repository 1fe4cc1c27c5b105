"""What the processes of the distributed tests run; started by torchrun-like spawning from the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from aftermap.distributed import process_group
from aftermap.optim import IVON, KFAC, OGN, VOGN, NoisyKFAC
from tests.optim.problems import classifier, make_regression

__all__ = ["PRESETS", "UNEVEN", "Branched", "Gated", "flat", "reparametrised_mean", "steps", "uneven_data", "work"]


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(5)


PRESETS: dict[str, Any] = {
    "vogn": lambda net, **o: VOGN(net, lr=0.02, n_data=11, generator=seed(), **o),
    "vogn, two samples": lambda net, **o: VOGN(net, lr=0.02, n_data=11, mc_samples=2, generator=seed(), **o),
    "ivon": lambda net, **o: IVON(net, lr=0.2, n_data=11, new_curvature_weight=0.1, generator=seed(), **o),
    "kfac": lambda net, **o: KFAC(net, lr=0.02, n_data=11),
    "noisy kfac": lambda net, **o: NoisyKFAC(net, lr=0.02, n_data=11, generator=seed(), **o),
}


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def steps(opt: Any, net: nn.Module, x: Tensor, y: Tensor, count: int, *, own: bool = False) -> list[float]:
    losses = []
    for _ in range(count):

        def closure() -> Tensor:
            loss = F.cross_entropy(net(x), y)
            if own:
                loss.backward()
            return loss

        losses.append(float(opt.step(closure)))
    return losses


def reparametrised_mean(draws: int, **options: Any) -> Tensor:
    """The mean of IVON's estimate of the Hessian's diagonal over many draws, at a mean that stays where it is."""
    problem = make_regression(orthogonal=False)
    net = problem.model()
    opt = IVON(
        net,
        lr=0.0,
        n_data=problem.n_data,
        new_curvature_weight=1e-9,
        initial_curvature=4.0,
        generator=seed(),
        **options,
    )
    with torch.no_grad():
        net.weight.copy_(problem.mean())  # far from the optimum the estimate is just as unbiased, but noisier
    total = torch.zeros_like(net.weight)
    root = ((4.0 + 1.0 / problem.n_data) * problem.n_data) ** 0.5  # 1/σ
    for _ in range(draws):
        part, _ = opt._run(lambda: problem.loss(net), 0, None)
        part.all_reduce(opt._trained(), [])
        total += part.curvature["weight"] * part.curvature_scale / part.size * root / draws
        opt.steps += 1
    return total.detach()


class Branched(nn.Module):
    """A layer in the middle is used only by batches with a positive first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if bool((x[:, 0] > 0).any()):
            hidden = hidden + torch.tanh(self.middle(hidden))
        out: Tensor = self.last(hidden)
        return out


class Gated(nn.Module):
    """A weight is used a second time, outside its layer, by examples with a positive first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        gate = (x[:, :1] > 0).to(x)
        out: Tensor = self.last(torch.tanh(self.first(x)) + gate * (x @ self.first.weight))
        return out


UNEVEN: dict[str, Any] = {
    "ogn": lambda net: OGN(net, lr=0.02, n_data=12),
    "vogn": lambda net: VOGN(net, lr=0.02, n_data=12, generator=seed()),
    "ivon": lambda net: IVON(net, lr=0.02, n_data=12, generator=seed()),
    "kfac": lambda net: KFAC(net, lr=0.02, n_data=12),
    "noisy kfac": lambda net: NoisyKFAC(net, lr=0.02, n_data=12, generator=seed()),
}


def uneven_data(kind: type[nn.Module]) -> tuple[nn.Module, list[Tensor], Tensor]:
    """A network, inputs with a negative and with a positive first feature, and targets for either."""
    generator = torch.Generator().manual_seed(4)
    net = kind().to(torch.float64)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    below, above = (torch.randn(6, 3, generator=generator, dtype=torch.float64).abs() for _ in range(2))
    return net, [-below, above], torch.arange(6) % 3


def work(rank: int, world: int, port: int, folder: str) -> None:
    """Runs every case of two processes and saves what rank ``rank`` ends with, and which threads are left."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    assert "torch.distributed.nn.functional" not in sys.modules  # else `process_group` would have nothing to do
    with process_group():
        found = cases(rank)
        dist.barrier()
    threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    found["threads of gloo"] = {"weights": torch.tensor(sum("gloo" in name for name in threads)), "losses": []}
    torch.save(found, Path(folder) / f"rank{rank}.pt")


def cases(rank: int) -> dict[str, Any]:
    """What rank ``rank`` of two processes ends with in every case."""
    found: dict[str, Any] = {}
    for name, make in PRESETS.items():
        for wrapped in ("plain", "ddp", "ddp, own backward"):
            net, x, y = classifier(seed=rank)  # other weights on each process: the first one's are taken
            _, x, y = classifier()
            x, y = (x[:4], y[:4]) if rank == 0 else (x[4:], y[4:])
            model = net if wrapped == "plain" else DistributedDataParallel(net)
            opt = make(model)
            losses = steps(opt, model, x, y, 3, own=wrapped.endswith("backward"))
            found[f"{name} | {wrapped}"] = {"weights": flat(net), "losses": losses}
    for name in ("vogn", "ivon", "noisy kfac"):  # the same data, different noise
        net, x, y = classifier()
        opt = PRESETS[name](net, sample_groups=2)
        losses = steps(opt, net, x, y, 3)
        found[f"{name} | samples"] = {"weights": flat(net), "losses": losses}
    net, x, y = classifier()  # a layer that only process 1 uses
    extra = nn.Linear(4, 3, dtype=torch.float64)
    with torch.no_grad():
        extra.weight.fill_(0.1)
        extra.bias.fill_(0.2)
    both = nn.ModuleList([net, extra])
    opt = IVON(both, lr=0.2, n_data=11, generator=seed())
    for _ in range(2):
        opt.step(lambda: F.cross_entropy(net(x), y) + (extra(net(x)).square().mean() if rank else 0.0))
    found["unused"] = {"weights": flat(both), "losses": []}
    for kind in (Branched, Gated):
        for name, make in UNEVEN.items():
            net, inputs, y = uneven_data(kind)
            opt = make(net)
            losses = steps(opt, net, inputs[rank], y, 1)
            momentum = torch.cat([opt.state[p]["momentum"].flatten() for p in net.parameters()])
            losses += steps(opt, net, inputs[rank], y, 3)
            factored = [n for n, p in net.named_parameters() if "factor_inputs" in opt.state[p]]
            case = {"weights": flat(net), "losses": losses, "momentum": momentum, "factored": factored}
            found[f"{kind.__name__} | {name}"] = case
    half = nn.Linear(3, 2).to(torch.bfloat16)
    opt = IVON(half, lr=0.1, n_data=1000, generator=seed())
    part, _ = opt._run(lambda: half(torch.ones(130 + rank, 3, dtype=torch.bfloat16)).square().mean(), 0, None)
    part.all_reduce(opt._trained(), [])
    found["half"] = {"weights": torch.tensor(part.size, dtype=torch.float64), "losses": []}
    found["reparametrised"] = {"weights": reparametrised_mean(1500, sample_groups=2), "losses": []}
    return found


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
