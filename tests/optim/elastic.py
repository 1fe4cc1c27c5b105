"""A training run under torchrun that loses a process by SIGKILL and goes on from its checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aftermap.distributed import process_group
from tests.optim.problems import classifier
from tests.optim.ranks import PRESETS, flat, steps

__all__ = ["STEPS", "train"]

STEPS = 9


def train(folder: Path, preset: str) -> None:
    """Trains to ``STEPS``, saving after every step; process 1 is killed in step 5 of the first attempt."""
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    torch.set_num_threads(1)
    with process_group():
        net, x, y = classifier()
        x, y = (x[:4], y[:4]) if rank == "0" else (x[4:], y[4:])
        opt = PRESETS[preset](net)
        checkpoint = folder / "checkpoint.pt"
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            net.load_state_dict(saved["net"])
            opt.load_state_dict(saved["opt"])
            (folder / f"resumed{rank}").write_text(str(opt.steps))
        while opt.steps < STEPS:
            if rank == "1" and opt.steps == 5 and attempt == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            steps(opt, net, x, y, 1)
            if rank == "0":
                part = folder / "checkpoint.tmp"
                torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, part)
                part.replace(checkpoint)
            dist.barrier()
        torch.save(flat(net), folder / f"final{rank}.pt")
        dist.barrier()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
