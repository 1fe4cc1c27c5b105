"""Training that can be killed: a checkpoint every few seconds, from which the same command goes on.

The order of the data follows from seed and epoch, dropout from seed, step and process, the optimiser's noise from its own state: a
run that was interrupted ends where an uninterrupted one ends. A batch is shared out over the processes, and the optimiser sums
over them, so that one process and several do the same steps (BatchNorm sees only its process's part).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.cli.models import read_torch_file
from aftermap.data import Examples
from aftermap.distributed import (
    all_reduce_,
    broadcast_,
    broadcast_number,
    fail_together,
    from_any_process,
    rank,
    world_size,
)
from aftermap.errors import DataError, InputError, NumericalError
from aftermap.likelihoods import Likelihood
from aftermap.models import evaluation_mode
from aftermap.optim import IVON, KFAC, OGN, VOGN, NoisyKFAC, warmup
from aftermap.optim.base import VariationalOptimizer
from aftermap.progress import progress
from aftermap.writing import replaced_file

__all__ = [
    "CHECKPOINT",
    "DAMPINGS",
    "HISTORY",
    "RATES",
    "Optimizer",
    "Recipe",
    "Run",
    "enough_epochs",
    "make_optimizer",
    "train_network",
    "usual_rate",
    "validation_numbers",
]

Optimizer = VariationalOptimizer | torch.optim.Adam
_LEAST_STEPS = 500  # that small data are trained for, where nobody said how long
CHECKPOINT, HISTORY = "checkpoint.pt", "history.json"
RATES = {"vogn": 3e-3, "ogn": 3e-3, "ivon": 0.5, "kfac": 3e-3, "noisy_kfac": 3e-3, "adam": 1e-3}
# Of regressions, whose loss curves about 16 times as much as that of classes in the outputs of the built-in networks: the rates above diverged on three tables.
_REGRESSION_RATES = {"ivon": 0.1, "noisy_kfac": 1e-3}
DAMPINGS = {"vogn": 1e-2, "ogn": 1e-2, "ivon": 0.0, "kfac": 3e-2, "noisy_kfac": 3e-2, "adam": 0.0}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run computes.

    Attributes:
        model: How the network is built.
        options: The options of a built-in network.
        data: The training data, as the user typed them.
        n_data: The number of training examples.
        task: The task, which decides the likelihood.
        noise: The noise of a regression, or of each of its outputs.
        optimizer: The name of the optimiser.
        epochs: The number of passes over the data.
        batch_size: The number of examples in a batch, over all processes.
        lr: The learning rate at the start; it falls to 0 along a cosine.
        prior_precision: The prior precision δ; with Adam it is a weight decay of δ/N.
        damping: The damping γ.
        mc_samples: The number of draws of the weights in a step.
        temperature: The temperature τ that a variational optimiser warms up to.
        seed: The seed of order, weights and noise.
    """

    model: str
    options: Mapping[str, Any]
    data: str
    n_data: int
    task: str
    noise: float | list[float] | None
    optimizer: str
    epochs: int
    batch_size: int
    lr: float
    prior_precision: float
    damping: float
    mc_samples: int
    temperature: float
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches, of nearly equal size, in an epoch."""
        return max(1, math.ceil(self.n_data / self.batch_size))

    @property
    def steps(self) -> int:
        """The number of steps of the whole run."""
        return self.epochs * self.steps_per_epoch


def usual_rate(optimizer: str, task: str) -> float:
    """Returns the learning rate of an optimiser for a task where none was said.

    >>> usual_rate("ivon", "classification"), usual_rate("ivon", "regression")
    (0.5, 0.1)
    """
    return _REGRESSION_RATES.get(optimizer, RATES[optimizer]) if task == "regression" else RATES[optimizer]


def enough_epochs(n_data: int, batch_size: int) -> int:
    """Returns the number of epochs where it was not said: 10, or as many as make 500 steps.

    >>> enough_epochs(60_000, 128), enough_epochs(1000, 128)
    (10, 63)
    """
    return max(10, math.ceil(_LEAST_STEPS / max(1, math.ceil(n_data / batch_size))))


def make_optimizer(recipe: Recipe, model: nn.Module, likelihood: Likelihood) -> Optimizer:
    """Makes the optimiser of a recipe; variational ones warm their temperature up during the first half."""
    common: dict[str, Any] = {"lr": recipe.lr, "n_data": recipe.n_data, "prior_precision": recipe.prior_precision}
    common["damping"] = recipe.damping
    noise: dict[str, Any] = {
        "mc_samples": recipe.mc_samples,
        "temperature": warmup(max(1, recipe.steps // 2), 0.1 * recipe.temperature, recipe.temperature),
        "generator": torch.Generator().manual_seed(recipe.seed),
    }
    if recipe.optimizer == "adam":
        decay = recipe.prior_precision / recipe.n_data
        return torch.optim.Adam(model.parameters(), lr=recipe.lr, weight_decay=decay)
    if recipe.optimizer == "vogn":
        return VOGN(model, **common, **noise)
    if recipe.optimizer == "ogn":
        return OGN(model, **common)
    if recipe.optimizer == "ivon":
        return IVON(model, initial_curvature=0.1, **common, **noise)
    if recipe.optimizer == "kfac":
        return KFAC(model, factor_every=5, inverse_every=50, **common)
    if recipe.optimizer == "noisy_kfac":
        return NoisyKFAC(model, factor_every=5, inverse_every=50, **common, **noise)
    raise InputError(f"--optimizer {recipe.optimizer!r} is not known; allowed are {', '.join(RATES)}")


class Run:
    """A run's folder: what was done so far.

    Args:
        folder: The folder of the run.
        recipe: What is to be done.
    """

    def __init__(self, folder: Path, recipe: Recipe):
        self.folder, self.recipe = folder, recipe
        self.step = 0
        self.losses: list[float] = []  # of the steps of the epoch that has begun
        self.history: list[dict[str, float]] = []

    def resume(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Takes up a checkpoint, if there is one of the same recipe.

        Process 0, which wrote it, reads it for all: processes on other machines may have no such folder, and would begin anew.

        Raises:
            InputError: The folder belongs to another recipe.
            DataError: The checkpoint is damaged, or process 0 failed to read it.
        """
        with fail_together("reading the checkpoint"):
            saved = self._read() if rank() == 0 else None
        saved = from_any_process(saved)
        if saved is None:
            return False
        with fail_together("going on with the checkpoint"):
            self._take_up(saved, model, optimizer)
        return True

    def _take_up(self, saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
        """Puts what a checkpoint holds into its places."""
        try:
            step, history = int(saved["step"]), [dict(numbers) for numbers in saved["history"]]
            if not 0 <= step <= self.recipe.steps:
                raise ValueError(f"it stands at step {step} of {self.recipe.steps}")
            losses = [float(loss) for loss in saved.get("losses", [])]  # Earlier versions kept none.
            model.load_state_dict(saved["model"])
            _load_optimizer(optimizer, saved["optimizer"])
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise DataError(
                f"{self.folder / CHECKPOINT} does not fit this run: {error}. Remove it, or start again with --force"
            ) from error
        self.step, self.losses, self.history = step, losses, history

    def _read(self) -> dict[str, Any] | None:
        """Returns what the checkpoint holds; None where there is none."""
        file = self.folder / CHECKPOINT
        if not file.is_file():
            return None
        try:
            saved = read_torch_file(file)
            # Before there was a choice, every run had the temperature 1.
            old, new = {"temperature": 1.0, **saved["recipe"]}, json.loads(json.dumps(asdict(self.recipe)))
        except Exception as error:  # torch raises many kinds for a file that is not its own
            raise DataError(f"{file} is damaged: {error}. Remove it, or start again with --force") from error
        different = [f"{k}: {old.get(k)!r} there, {new[k]!r} now" for k in new if old.get(k) != new[k]]
        if different:
            raise InputError(
                f"{self.folder} holds a run with other settings ({'; '.join(different[:4])}). "
                "Continue with the old ones, choose another folder, or start again with --force"
            )
        record: dict[str, Any] = saved
        return record

    def save(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Writes a checkpoint beside the old one, then takes its place; process 0 does it for all."""
        broadcast_(list(model.buffers()))
        with fail_together("saving a checkpoint"):
            if rank() == 0:
                content = {
                    "recipe": json.loads(json.dumps(asdict(self.recipe))),
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": self.step,
                    "losses": self.losses,
                    "history": self.history,
                }
                # The checkpoint comes last: what a kill leaves undone is done again by the run that goes on from the one before.
                with replaced_file(self.folder / HISTORY) as part:
                    part.write_text(json.dumps(self.history, indent=1) + "\n", encoding="utf-8")
                with replaced_file(self.folder / CHECKPOINT) as part:
                    torch.save(content, part)


def _load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restores a state; its settings are those of the recipe.

    PyTorch's optimisers take moments of any shape, and fail in the next step.
    """
    optimizer.load_state_dict({**saved, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(optimizer, torch.optim.Adam) and value.shape != (() if name == "step" else parameter.shape):
                raise ValueError(f"its {name} has shape {tuple(value.shape)}, and the weights {tuple(parameter.shape)}")


def _rest(recipe: Recipe, step: int) -> Iterator[Tensor]:
    """Yields this process's numbers of the examples of every batch that comes after ``step`` steps."""
    number, first = divmod(step, recipe.steps_per_epoch)
    for epoch in range(number, recipe.epochs):
        order = torch.randperm(recipe.n_data, generator=torch.Generator().manual_seed(1_000_003 * recipe.seed + epoch))
        for index in list(order.tensor_split(recipe.steps_per_epoch))[first if epoch == number else 0 :]:
            yield index[rank() :: world_size()]


def train_network(
    run: Run,
    model: nn.Module,
    optimizer: Optimizer,
    data: Examples,
    likelihood: Likelihood,
    *,
    validation: Examples | None = None,
    on_epoch: Callable[[Mapping[str, float]], None] | None = None,
    every: float = 30.0,
) -> None:
    """Trains on to the end of the recipe.

    Args:
        run: Where it stands; it is moved on.
        model: The network.
        optimizer: The optimiser of the recipe.
        data: The training data.
        likelihood: The likelihood, whose negative logarithm is the loss.
        validation: Held-out data, on which the network is looked at after every epoch.
        on_epoch: A function that is told what the history says about each epoch that ends.
        every: The seconds between checkpoints; one is written after every epoch anyway, but not more than one a second.

    Raises:
        NumericalError: The loss is no longer finite.
    """
    recipe = run.recipe
    if data.targets is None:
        raise DataError("training needs targets")
    smallest = len(data) // recipe.steps_per_epoch
    if smallest < world_size():
        raise DataError(
            f"batches of {smallest} of the {len(data)} examples cannot be shared out over {world_size()} processes, each of which needs one of every batch. "
            "Raise --batch-size, or start fewer processes"
        )
    device = next(model.parameters()).device
    saved = time.monotonic()
    model.train()
    for index in progress(_rest(recipe, run.step), description="training", total=recipe.steps - run.step):
        x, y = data.inputs[index].to(device), data.targets[index].to(device)
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * recipe.lr * (1 + math.cos(math.pi * run.step / recipe.steps))
        torch.manual_seed((recipe.seed * 1_000_003 + run.step) * 4099 + rank())  # of dropout
        run.losses.append(_step(model, optimizer, x, y, likelihood))
        if not math.isfinite(run.losses[-1]):
            raise NumericalError(f"the loss became {run.losses[-1]} at step {run.step}: lower --lr, or raise --damping")
        run.step += 1
        epochs, steps = divmod(run.step, recipe.steps_per_epoch)
        if not steps:
            numbers = {"epoch": epochs, "loss": sum(run.losses) / len(run.losses)}
            run.history.append({**numbers, **validation_numbers(model, validation, likelihood)})
            run.losses = []
            if on_epoch is not None:
                on_epoch(run.history[-1])
        due = time.monotonic() - saved > (every if steps else min(every, 1.0))
        if world_size() > 1:  # all processes save together: process 0 looks at its clock now and then
            due = (not steps or run.step % 20 == 0) and bool(broadcast_number(int(due)))
        if due or run.step >= recipe.steps:
            run.save(model, optimizer)
            saved = time.monotonic()
    model.eval()


def validation_numbers(
    model: nn.Module, data: Examples | None, likelihood: Likelihood, most: int = 5000
) -> dict[str, float]:
    """Returns the loss of the network on held-out data, and its accuracy or error; the same on every process.

    Args:
        model: The network at the mean of its weights. Its modes come back.
        data: The held-out data; None gives nothing.
        likelihood: The likelihood.
        most: The most examples that are looked at; the first ones are taken.
    """
    if data is None or data.targets is None:
        return {}
    loss = right = squares = count = 0.0
    device, data = next(model.parameters()).device, data.take(slice(0, most))
    with evaluation_mode(model), torch.no_grad():
        for x, y in data.batches(512):
            outputs, targets = model(x.to(device)), y.to(device)  # type: ignore[union-attr]
            loss += float(likelihood.nll(outputs, targets).double().sum())
            if likelihood.kind == "classification":
                right += float((outputs.argmax(-1) == targets).double().mean()) * len(x)
            elif likelihood.kind == "binary":
                right += float(((outputs > 0).reshape(targets.shape) == (targets > 0.5)).double().mean()) * len(x)
            else:
                means = likelihood.mean(outputs)
                squares += float((means - targets.reshape(means.shape)).double().square().mean()) * len(x)
            count += len(x)
    numbers = {"validation_loss": loss / count}
    if likelihood.kind in ("classification", "binary"):
        return {**numbers, "validation_accuracy": right / count}
    return {**numbers, "validation_rmse": math.sqrt(squares / count)}


def _step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, likelihood: Likelihood) -> float:
    """Makes one step on the mean negative log-likelihood of a batch that is shared out over the processes."""
    if isinstance(optimizer, VariationalOptimizer):
        # The optimiser sums gradients and curvatures over processes by itself.
        return float(optimizer.step(lambda: likelihood.nll(model(x), y).mean()))
    optimizer.zero_grad()
    total = likelihood.nll(model(x), y).sum()
    total.backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    numbers = torch.tensor([float(total.detach()), float(len(x))], dtype=torch.float64)
    all_reduce_([numbers])
    all_reduce_([p.grad for p in parameters if p.grad is not None])
    for p in parameters:
        if p.grad is not None:
            p.grad /= float(numbers[1])
    optimizer.step()
    return float(numbers[0] / numbers[1])
