"""Lightning: callbacks that turn a finished training into a saved posterior, and gradient accumulation for the optimisers.

The optimisers of `aftermap.optim` drop into ``configure_optimizers`` with automatic optimisation: Lightning hands them a
closure that runs ``training_step`` and the backward pass, and they run it under drawn weights; clipping by the Trainer acts
on the gradient, and checkpoints hold their whole state. In manual optimisation call ``self.optimizers().step(closure)``.
One thing needs help: with ``accumulate_grad_batches`` Lightning runs all but the last micro-batch outside the optimiser,
where no weights are drawn and no curvature is seen. `AccumulateDraws` puts each micro-batch under a draw of its own.

A ``training_step`` that returns None leaves its batch out, as with other optimisers, where `PosteriorCallback` or
`AccumulateDraws` is used with one process and one micro-batch per step: Lightning warns of it, ``opt.skipped_steps`` counts
it. Without them it is an error, since a closure that forgets its ``return`` looks the same.
"""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from aftermap.batches import Unpack
from aftermap.errors import InputError, StatisticalWarning
from aftermap.laplace import Laplace, fit, load_laplace
from aftermap.lazy import optional
from aftermap.likelihoods import Likelihood
from aftermap.models import evaluation_mode
from aftermap.optim import TrainedPosterior
from aftermap.optim.base import VariationalOptimizer
from aftermap.params import Selection

_PURPOSE = "the Lightning callbacks"
_Callback: Any = optional("lightning.pytorch.callbacks", "lightning", _PURPOSE).Callback
_Precision: Any = optional("lightning.pytorch.plugins.precision", "lightning", _PURPOSE).Precision

__all__ = ["AccumulateDraws", "LaplaceCallback", "PosteriorCallback"]


class _SavingCallback(_Callback, ABC):  # type: ignore[misc]
    """An abstract callback that makes something at the end of training and saves it.

    Args:
        folder: The folder to save to. None means "posterior" in the logger's folder, or in ``default_root_dir``.
        overwrite: Whether to replace a posterior that is already there.
    """

    def __init__(self, folder: str | Path | None, overwrite: bool):
        super().__init__()
        self.folder, self.overwrite = folder, overwrite

    def place(self, trainer: Any) -> Path:
        """Returns the folder of this run."""
        return Path(
            self.folder if self.folder is not None else Path(trainer.log_dir or trainer.default_root_dir, "posterior")
        )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Complains about an existing folder before the training, not after it."""
        place = self.place(trainer)
        if place.exists() and (not place.is_dir() or (any(place.iterdir()) and not self.overwrite)):
            raise InputError(f"{place} exists already; choose another folder=, or pass overwrite=True to replace it")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Makes and saves the posterior, while the model is still on its device and other processes are still there."""
        if trainer.fast_dev_run:
            return
        if trainer.interrupted:
            warnings.warn(
                f"training was interrupted, so {type(self).__name__} made no posterior",
                StatisticalWarning,
                stacklevel=2,
            )
            return
        posterior = self.make(trainer, pl_module)
        if trainer.is_global_zero:
            posterior.save(self.place(trainer), overwrite=self.overwrite)

    @abstractmethod
    def make(self, trainer: Any, pl_module: Any) -> Any:
        """Returns the object that is saved."""


class LaplaceCallback(_SavingCallback):
    """Fits a Laplace approximation when training has ended, tunes it, checks it and saves it.

    It is fitted around the weights as they are then, to the Trainer's training data. Afterwards ``laplace`` predicts; the
    folder is read by ``aftermap.load(folder, model)`` into a model with the same weights.

    Args:
        likelihood: The likelihood, as for `Laplace`.
        folder: The folder that it is saved in. None means "posterior" in the logger's folder, or in
            ``default_root_dir``.
        module: The path of the network inside the LightningModule, such as "net". None means the LightningModule
            itself, whose ``forward`` must give the outputs.
        validation: Whether to tune on the Trainer's (first) validation data if there are any; False tunes on
            the training data.
        structure: The structure of the posterior. None chooses by the cost; see `fit`.
        params: The weights that are uncertain; see `Laplace`.
        unpack: A function that turns a batch of another form into (inputs, targets).
        overwrite: Whether to replace a posterior that is already there.
        options: Options that are passed to `Laplace`.

    Attributes:
        laplace: The fitted approximation; None before the end of training.

    >>> LaplaceCallback("regression", "run/posterior", module="net").laplace is None
    True
    """

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        folder: str | Path | None = None,
        *,
        module: str | None = None,
        validation: bool = True,
        structure: str | None = None,
        params: Selection = "all",
        unpack: Unpack | None = None,
        overwrite: bool = False,
        **options: Any,
    ):
        super().__init__(folder, overwrite)
        self.likelihood, self.module, self.validation = likelihood, module, validation
        self.structure, self.params, self.unpack, self.options = structure, params, unpack, options
        self.laplace: Laplace | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        self.network(pl_module)

    def network(self, pl_module: nn.Module) -> nn.Module:
        """Returns the module that is made Bayesian."""
        if self.module is None:
            return pl_module
        network = dict(pl_module.named_modules()).get(self.module)
        if network is None:
            known = ", ".join(n for n, _ in pl_module.named_children())
            raise InputError(f"the LightningModule has no module {self.module!r}; its children are {known}")
        return network

    def make(self, trainer: Any, pl_module: Any) -> Laplace:
        """Fits in evaluation mode and returns the approximation; afterwards the modes are as before."""
        network = self.network(pl_module)
        held_out = trainer.val_dataloaders if self.validation else None
        if isinstance(held_out, list | tuple):
            held_out = held_out[0] if held_out else None
        with evaluation_mode(network):
            self.laplace = fit(
                network,
                self.likelihood,
                trainer.train_dataloader,
                held_out,
                structure=self.structure,
                params=self.params,
                unpack=self.unpack,
                verbose=False,
                **self.options,
            )
        return self.laplace

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Moves the posterior to where Lightning has moved the model, off an accelerator."""
        if self.laplace is not None:
            network = self.network(pl_module)
            device = next(network.parameters()).device
            if any(m.device != device for m in self.laplace.posterior.mean.values()):
                self.laplace = load_laplace(self.place(trainer), network)


class PosteriorCallback(_SavingCallback):
    """Saves the posterior that an optimiser of `aftermap.optim` has built during training.

    Args:
        likelihood: The likelihood for predictions. None means the one given to the optimiser. (Lightning's closure
            hides the loss.)
        folder: The folder that it is saved in. None means "posterior" in the logger's folder, or in
            ``default_root_dir``.
        overwrite: Whether to replace a posterior that is already there.

    Attributes:
        posterior: A `TrainedPosterior`; None before the end of training.

    >>> PosteriorCallback("classification").posterior is None
    True
    """

    def __init__(
        self, likelihood: str | Likelihood | None = None, folder: str | Path | None = None, *, overwrite: bool = False
    ):
        super().__init__(folder, overwrite)
        self.likelihood = likelihood
        self.posterior: TrainedPosterior | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses what would train wrongly without a word, and lets ``training_step`` return None to leave a batch out."""
        optimizer = _optimizer_of(trainer)
        optimizer.skip_without_loss = pl_module.automatic_optimization
        groups = optimizer.settings.sample_groups
        if trainer.world_size > 1 and groups > 1:
            raise InputError(
                f"sample_groups={groups}: Lightning averages gradients over processes before the optimiser sees which draw "
                "they belong to; set sample_groups=1, so that all processes draw the same weights"
            )
        alone = not isinstance(trainer.precision_plugin, AccumulateDraws)
        if trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization and alone:
            raise InputError(
                f"with accumulate_grad_batches={trainer.accumulate_grad_batches} Lightning runs micro-batches outside the "
                "optimiser, where no weights are drawn. Pass Trainer(plugins=[AccumulateDraws()])"
            )

    def make(self, trainer: Any, pl_module: Any) -> TrainedPosterior:
        """Returns the optimiser's posterior at the end."""
        self.posterior = _optimizer_of(trainer).posterior(self.likelihood)
        return self.posterior


def _optimizer_of(trainer: Any) -> VariationalOptimizer:
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, VariationalOptimizer):
            return optimizer
    names = ", ".join(type(o).__name__ for o in trainer.optimizers) or "none"
    raise InputError(
        f"no optimiser of aftermap.optim is in use (but {names}); return one from configure_optimizers, or use LaplaceCallback"
    )


class AccumulateDraws(_Precision):  # type: ignore[misc]
    """A Trainer plugin (full precision): ``accumulate_grad_batches`` with the optimisers of `aftermap.optim`.

    Every micro-batch is a block of `VariationalOptimizer.sampled_params`: its own draw of the weights, its own squares, and
    the mean over the examples of all micro-batches in the step, also where the last ones are fewer. Without accumulation,
    and for other optimisers, it changes nothing.

    >>> AccumulateDraws().precision
    '32-true'
    """

    def __init__(self) -> None:
        super().__init__()
        self._module: Any = None
        self._optimizer: VariationalOptimizer | None = None
        self._block: ExitStack | None = None

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Looks at the optimisers of a new training, and returns what it got."""
        variational = [o for o in optimizers if isinstance(o, VariationalOptimizer)]
        self._module, self._optimizer = model, variational[0] if variational else None
        for optimizer in variational:
            optimizer.skip_without_loss = model.automatic_optimization
        return super().connect(model, optimizers, lr_schedulers)

    def _drawing(self) -> tuple[VariationalOptimizer, int] | None:
        """Returns the optimiser and the number of micro-batches, where this plugin has something to do."""
        optimizer = self._optimizer
        count = 1 if self._module is None else self._module.trainer.accumulate_grad_batches
        if optimizer is None or count == 1:
            return None
        if optimizer.settings.mc_samples > 1:
            raise InputError(
                f"with accumulated gradients every micro-batch has one draw, but mc_samples={optimizer.settings.mc_samples}; "
                "set mc_samples=1: the micro-batches are draws already"
            )
        return optimizer, count

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Opens a block around ``training_step``, which the backward pass closes."""
        drawing = self._drawing()
        if drawing is None:
            with super().train_step_context():
                yield
            return
        self._refuse_open_block()
        self._block = ExitStack()
        self._block.enter_context(drawing[0].sampled_params())
        with self._closing_on_error(), super().train_step_context():
            yield

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        """Runs around ``validation_step``, which must see the mean."""
        self._refuse_open_block()
        with super().val_step_context():
            yield

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            block, self._block = self._block, None
            if block is not None:
                block.__exit__(*sys.exc_info())
            raise

    def _refuse_open_block(self) -> None:
        if self._block is None:
            return
        with self._closing_on_error():
            raise InputError(
                "training_step returned no loss for a micro-batch; with accumulated draws return a loss every time "
                "(0 times an output leaves a micro-batch out)"
            )

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Runs the backward pass of a micro-batch, after which the weights are the mean again."""
        drawing = self._drawing()
        # Lightning has divided the loss by the number of micro-batches; the blocks average on their own.
        loss = tensor if drawing is None else tensor * drawing[1]
        with self._closing_on_error():
            super().backward(loss, model, optimizer, *args, **kwargs)
        block, self._block = self._block, None
        if block is not None:
            block.close()

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs the last micro-batch, then takes a step from all of them."""
        drawing = self._drawing()
        if drawing is None or drawing[0] is not optimizer:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        self._refuse_open_block()
        self._after_closure(model, optimizer)  # This runs the hooks before a step, and clipping.
        optimizer.step()
        return result
