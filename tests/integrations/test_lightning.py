"""Lightning: the optimisers give what a plain loop gives, also when accumulating and resuming; posteriors are saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import aftermap as am
from aftermap.errors import InputError, StatisticalWarning, UnsupportedError
from aftermap.integrations.lightning import AccumulateDraws, LaplaceCallback, PosteriorCallback
from aftermap.posteriors.io import load_posterior

lightning = pytest.importorskip("lightning")

# Lightning's own: advice that has no bearing on a test of a second, and its use of what torch has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]

G = torch.Generator().manual_seed(0)
X = torch.randn(22, 3, generator=G, dtype=torch.float64)
Y = (X.sum(1) > 0).long()
N, BATCH = len(X), 4


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMISERS: dict[str, Make] = {
    "VOGN": lambda m: am.optim.VOGN(m, lr=0.05, n_data=N, generator=generator()),
    "VOGN, two draws": lambda m: am.optim.VOGN(m, lr=0.05, n_data=N, mc_samples=2, generator=generator()),
    "IVON": lambda m: am.optim.IVON(m, lr=0.05, n_data=N, generator=generator()),
    "OGN": lambda m: am.optim.OGN(m, lr=0.05, n_data=N),
    "KFAC": lambda m: am.optim.KFAC(m, lr=0.05, n_data=N),
    "NoisyKFAC": lambda m: am.optim.NoisyKFAC(m, lr=0.05, n_data=N, generator=generator()),
}


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


class Module(lightning.LightningModule):
    """As a user writes it."""

    def __init__(self, make: Make):
        super().__init__()
        self.net, self.make = network(), make
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.seen.append(self.net[0].weight.detach().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self)


class Manual(Module):
    def __init__(self, make: Make):
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], number: int) -> None:
        x, y = batch
        self.optimizers().step(lambda: F.cross_entropy(self(x), y))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=BATCH)


def held_out() -> DataLoader[Any]:
    """Less sharply divided than the training data."""
    x = torch.randn(40, 3, generator=generator(), dtype=torch.float64)
    y = (x.sum(1) + 1.5 * x[:, 0].roll(1) > 0).long()
    return DataLoader(TensorDataset(x, y), batch_size=len(x))


def trainer(root: Path, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"max_epochs": 2, "accelerator": "cpu", "enable_checkpointing": False, "default_root_dir": root}
    return lightning.Trainer(**{**quiet, **defaults, **options})


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def check_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=1e-14)


def plain_loop(make: Make, epochs: int = 2, clip: float | None = None) -> nn.Module:
    model = network()
    optimiser = make(model)
    for _ in range(epochs):
        for x, y in loader():

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                loss = F.cross_entropy(model(x), y)
                if clip is not None:
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                return loss

            optimiser.step(closure)
    return model


@pytest.mark.parametrize("name", OPTIMISERS)
def test_automatic_optimisation_is_the_plain_loop(name: str, tmp_path: Path) -> None:
    module = Module(OPTIMISERS[name])
    run = trainer(tmp_path)
    run.fit(module, loader())
    check_same(module.net, plain_loop(OPTIMISERS[name]))
    assert run.global_step == 12


@pytest.mark.parametrize("name", ["VOGN", "IVON"])
def test_manual_optimisation_is_the_plain_loop(name: str, tmp_path: Path) -> None:
    module = Manual(OPTIMISERS[name])
    run = trainer(tmp_path)
    run.fit(module, loader())
    check_same(module.net, plain_loop(OPTIMISERS[name]))
    assert run.global_step == 12


def test_the_trainers_clipping_acts_on_the_gradient(tmp_path: Path) -> None:
    module = Module(OPTIMISERS["VOGN"])
    trainer(tmp_path, gradient_clip_val=0.05).fit(module, loader())
    clipped, free = plain_loop(OPTIMISERS["VOGN"], clip=0.05), plain_loop(OPTIMISERS["VOGN"])
    check_same(module.net, clipped)
    assert not torch.allclose(weights(clipped)[0], weights(free)[0])


def test_the_ggn_needs_the_graph_and_says_so(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return am.optim.VOGN(model, n_data=N, curvature="ggn", likelihood="classification", generator=generator())

    with pytest.raises(UnsupportedError, match="without calling backward in the closure"):
        trainer(tmp_path).fit(Module(make), loader())
    module = Manual(make)  # whose closure leaves the backward pass to the optimiser
    trainer(tmp_path).fit(module, loader())
    check_same(module.net, plain_loop(make))


@pytest.mark.parametrize("name", ["VOGN", "IVON", "OGN", "KFAC", "NoisyKFAC"])
def test_accumulated_micro_batches_are_blocks(name: str, tmp_path: Path) -> None:
    module = Module(OPTIMISERS[name])
    # Eight batches, the last of two examples: the last step of an epoch has fewer micro-batches than the others.
    batches = DataLoader(TensorDataset(torch.cat([X, X[:8]]), torch.cat([Y, 1 - Y[:8]])), batch_size=BATCH)
    run = trainer(tmp_path, accumulate_grad_batches=3, plugins=[AccumulateDraws()], gradient_clip_val=0.3)
    run.fit(module, batches, loader())
    model = network()
    optimiser = OPTIMISERS[name](model)
    for _ in range(2):
        for start in range(0, 8, 3):
            optimiser.zero_grad()
            for x, y in list(batches)[start : start + 3]:
                with optimiser.sampled_params():
                    F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimiser.step()
    check_same(module.net, model)
    assert run.global_step == 6
    torch.testing.assert_close(module.seen[-1], module.net[0].weight.detach())  # validation sees the mean


def test_the_plugin_changes_nothing_else(tmp_path: Path) -> None:
    module = Module(OPTIMISERS["VOGN"])
    trainer(tmp_path, plugins=[AccumulateDraws()]).fit(module, loader())
    check_same(module.net, plain_loop(OPTIMISERS["VOGN"]))
    adam: list[nn.Module] = []
    for plugins in ([], [AccumulateDraws()]):
        adam.append(Module(lambda m: torch.optim.Adam(m.parameters())))
        trainer(tmp_path, plugins=plugins, accumulate_grad_batches=3).fit(adam[-1], loader())
    check_same(*adam)


class Failing(Module):
    """Goes wrong at the fourth micro-batch, under drawn weights: in the step, in the backward pass, or by giving no loss."""

    def __init__(self, make: Make, where: str):
        super().__init__(make)
        self.where = where
        self.before: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, number: int) -> None:
        self.before = weights(self)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor | None:
        loss = super().training_step(batch, number)
        if number == 4 and self.where == "step":
            raise ArithmeticError("in the step")
        return None if number == 4 and self.where == "none" else loss

    def backward(self, loss: Tensor) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx == 4 and self.where == "backward":
            raise ArithmeticError("in the backward pass")
        super().backward(loss)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    "where, error", [("step", ArithmeticError), ("backward", ArithmeticError), ("none", InputError)]
)
def test_after_a_failure_the_weights_are_the_mean(where: str, error: type[Exception], tmp_path: Path) -> None:
    module = Failing(OPTIMISERS["VOGN"], where)
    with pytest.raises(error):
        trainer(tmp_path, accumulate_grad_batches=3, plugins=[AccumulateDraws()]).fit(module, loader())
    if where == "none":  # noticed when the next micro-batch begins, whose hook has seen the draw
        assert not torch.equal(module.before[0], weights(module)[0])
    else:
        torch.testing.assert_close(weights(module), module.before, rtol=0, atol=0)


def test_accumulation_without_the_plugin_or_with_many_draws_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"accumulate_grad_batches=3 .*plugins=\[AccumulateDraws"):
        trainer(tmp_path, accumulate_grad_batches=3, callbacks=[PosteriorCallback("classification")]).fit(
            Module(OPTIMISERS["VOGN"]), loader()
        )
    with pytest.raises(InputError, match="mc_samples=2; set mc_samples=1"):
        trainer(tmp_path, accumulate_grad_batches=3, plugins=[AccumulateDraws()]).fit(
            Module(OPTIMISERS["VOGN, two draws"]), loader()
        )


class LeavesOut(Module):
    """Gives no loss for the third batch: before the network has run, or after."""

    def __init__(self, make: Make, early: bool):
        super().__init__(make)
        self.early = early

    def training_step(self, batch: list[Tensor], number: int) -> Tensor | None:
        if number == 2 and self.early:
            return None
        loss = super().training_step(batch, number)
        return None if number == 2 else loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", ["VOGN", "VOGN, two draws", "IVON", "KFAC"])
def test_a_training_step_without_a_loss_leaves_its_batch_out(name: str, early: bool, tmp_path: Path) -> None:
    expected = network()
    optimiser = OPTIMISERS[name](expected)
    for _ in range(2):
        for number, (x, y) in enumerate(loader()):
            if number != 2:
                optimiser.step(lambda x=x, y=y: F.cross_entropy(expected(x), y))
    helpers: list[dict[str, Any]] = [
        {"callbacks": [PosteriorCallback("classification", tmp_path / "posterior")]},
        {"plugins": [AccumulateDraws()]},
    ]
    for help_ in helpers:
        module = LeavesOut(OPTIMISERS[name], early)
        run = trainer(tmp_path, **help_)
        run.fit(module, loader())
        check_same(module.net, expected)
        assert (run.optimizers[0].steps, run.optimizers[0].skipped_steps) == (10, 2)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_forgotten_loss_is_an_error_where_nobody_spoke_for_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="returned NoneType, which holds no loss"):
        trainer(tmp_path).fit(LeavesOut(OPTIMISERS["VOGN"], early=False), loader())

    class Forgets(Manual):
        def training_step(self, batch: list[Tensor], number: int) -> None:
            self.optimizers().step(lambda: None)

    callback = PosteriorCallback("classification", tmp_path / "posterior")
    with pytest.raises(InputError, match="returned NoneType, which holds no loss"):
        trainer(tmp_path, callbacks=[callback]).fit(Forgets(OPTIMISERS["VOGN"]), loader())


def test_micro_batches_outside_the_optimiser_are_reported(tmp_path: Path) -> None:
    module = Module(OPTIMISERS["VOGN"])
    with pytest.warns(
        StatisticalWarning, match="does not use the gradients that were in .grad of 4 parameters"
    ) as seen:
        trainer(tmp_path, accumulate_grad_batches=3).fit(module, loader())
    assert len([w for w in seen if w.category is StatisticalWarning]) == 1


@pytest.mark.parametrize("name", ["VOGN", "IVON", "NoisyKFAC"])
def test_a_resumed_run_is_the_same_run(name: str, tmp_path: Path) -> None:
    whole = Module(OPTIMISERS[name])
    trainer(tmp_path, max_epochs=4).fit(whole, loader())
    half = Module(OPTIMISERS[name])
    first = trainer(tmp_path, max_epochs=2)
    first.fit(half, loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Module(OPTIMISERS[name])
    run = trainer(tmp_path, max_epochs=4)
    run.fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    check_same(resumed, whole)
    assert run.optimizers[0].steps == 24


def test_laplace_is_fitted_and_saved_after_training(tmp_path: Path) -> None:
    callback = LaplaceCallback("classification", tmp_path / "la", module="net")
    module = Module(lambda m: torch.optim.Adam(m.parameters(), lr=0.05))
    trainer(tmp_path, callbacks=[callback], max_epochs=10).fit(module, loader(), held_out())
    assert module.net.training
    module.eval()
    assert callback.laplace is not None
    assert callback.laplace.n_data == N
    assert isinstance(callback.laplace.tuning, am.laplace.ValidationResult)
    loaded = am.load(tmp_path / "la", module.net)
    torch.testing.assert_close(
        loaded.predict(X, link="pairwise").mean, callback.laplace.predict(X, link="pairwise").mean
    )


@pytest.mark.filterwarnings("ignore:the posterior that was found without held-out labels")  # The data are few.
def test_laplace_of_the_whole_module_by_the_evidence(tmp_path: Path) -> None:
    callback = LaplaceCallback(validation=False, structure="kron", prior_precision=3.0)
    module = Module(lambda m: torch.optim.Adam(m.parameters(), lr=0.05))
    trainer(tmp_path, callbacks=[callback], max_epochs=10).fit(module, loader(), loader())
    expected = am.fit(module.eval(), loader(), None, structure="kron", prior_precision=3.0)
    assert callback.laplace is not None
    torch.testing.assert_close(callback.laplace.predict(X, link="probit").mean, expected.predict(X, link="probit").mean)
    assert (tmp_path / "posterior" / "config.json").exists()


def test_the_optimisers_posterior_is_saved(tmp_path: Path) -> None:
    callback = PosteriorCallback("classification")
    module = Module(OPTIMISERS["VOGN"])
    trainer(tmp_path, callbacks=[callback]).fit(module, loader())
    assert callback.posterior is not None
    saved = load_posterior(tmp_path / "posterior").posterior
    for name, value in callback.posterior.posterior.marginal_variance().items():
        torch.testing.assert_close(saved.marginal_variance()[name], value)
    assert callback.posterior.predict(X, generator=generator()).mean.shape == (N, 2)


def test_bad_input_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    module = Module(lambda m: torch.optim.Adam(m.parameters()))
    before = weights(module)
    for callback, message in (
        (LaplaceCallback(folder=tmp_path / "full"), "full exists already.*overwrite=True"),
        (LaplaceCallback(folder=tmp_path / "new", module="body"), "no module 'body'; its children are net"),
        (PosteriorCallback(folder=tmp_path / "new"), r"no optimiser of aftermap.optim is in use \(but Adam\)"),
    ):
        with pytest.raises(InputError, match=message):
            trainer(tmp_path, callbacks=[callback]).fit(module, loader())
    torch.testing.assert_close(weights(module), before, rtol=0, atol=0)
    LaplaceCallback(folder=tmp_path / "full", overwrite=True).on_fit_start(trainer(tmp_path), module)


def test_nothing_is_fitted_for_a_trial_or_after_an_interruption(tmp_path: Path) -> None:
    callback = LaplaceCallback(folder=tmp_path / "la")
    module = Module(lambda m: torch.optim.Adam(m.parameters()))
    trainer(tmp_path, callbacks=[callback], fast_dev_run=True).fit(module, loader(), loader())
    assert callback.laplace is None

    class Stopped:
        fast_dev_run, interrupted = False, True

    with pytest.warns(StatisticalWarning, match="training was interrupted, so LaplaceCallback made no posterior"):
        callback.on_train_end(Stopped(), module)
    assert not (tmp_path / "la").exists()
