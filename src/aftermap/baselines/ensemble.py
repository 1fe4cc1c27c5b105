"""Deep ensembles: several networks trained apart, their predictions averaged."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aftermap import checks
from aftermap.baselines.base import Baseline, eval_outputs
from aftermap.errors import InputError, ShapeError
from aftermap.likelihoods import Likelihood

__all__ = ["Ensemble"]

Factory = Callable[[], nn.Module]
Train = Callable[[nn.Module, torch.Generator], Any]


@final
class Ensemble(Baseline):
    r"""A mixture of M networks that were trained apart.

    Classification averages probabilities; a regression has the moments of the mixture,

    .. math::
        \mu_* = \bar\mu, \qquad \sigma_*^2 = \overline{\sigma^2 + \mu^2} - \mu_*^2.

    Args:
        models: Trained networks with outputs of one shape. They are never changed.
        likelihood: How targets depend on outputs: "classification", "binary", "regression", "counts" or an object from `aftermap.likelihoods`.

    Raises:
        InputError: There are no models, or one is no module.

    References:
        Lakshminarayanan, Pritzel, Blundell 2017, Simple and scalable predictive uncertainty estimation, section 2.4.

    >>> Ensemble([nn.Linear(3, 4) for _ in range(5)]).predict(torch.ones(6, 3)).samples.shape
    torch.Size([5, 6, 4])
    """

    def __init__(self, models: Sequence[nn.Module], likelihood: str | Likelihood = "classification"):
        members = list(models) if isinstance(models, Sequence | nn.ModuleList) else [models]
        if not members:
            raise InputError("an ensemble needs at least one model, got none")
        super().__init__(members[0], likelihood)
        self.models = [checks.module("Ensemble", model) for model in members]

    @staticmethod
    def train(
        factory: Factory,
        train: Train,
        members: int = 5,
        likelihood: str | Likelihood = "classification",
        *,
        seed: int = 0,
        processes: int = 0,
    ) -> Ensemble:
        """Makes and trains networks that differ only by their seed.

        Member m is made under a private default seed derived from (seed, m), and trained with a generator of the same seed:
        it does not depend on the other members, nor on the number of processes.

        Args:
            factory: A function that makes a network.
            train: A function of (model, generator) that trains the model in place. Shuffle with this generator.
            members: The number M of networks.
            likelihood: The likelihood, as for the class.
            seed: The seed of the whole ensemble.
            processes: The number of networks to train at the same time, each in a process of its own; 0 trains one
                after the other, here. With processes, ``factory`` and ``train`` must be functions of a module (not
                lambdas), as must be the script that calls this (``if __name__ == "__main__"``).

        Returns:
            The ensemble, in eval mode.

        >>> Ensemble.train(lambda: nn.Linear(3, 4), lambda model, generator: None, 2).predict(torch.ones(6, 3)).kind
        'classification'
        """
        members, processes = checks.count("members", members), checks.count("processes", processes, 0)
        seeds = [_member_seed(seed, m) for m in range(members)]
        if processes == 0:
            return Ensemble([_trained(factory, train, member_seed) for member_seed in seeds], likelihood)
        threads = max(1, torch.get_num_threads() // processes)
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(Path(folder) / f"{m}.safetensors") for m in range(members)]
            with ProcessPoolExecutor(min(processes, members), mp_context=context) as pool:
                jobs = [
                    pool.submit(_train_to_file, factory, train, member_seed, path, threads)
                    for member_seed, path in zip(seeds, paths, strict=True)
                ]
                for job in jobs:
                    job.result()
            models = []
            for member_seed, path in zip(seeds, paths, strict=True):
                model = _make_network(factory, member_seed)
                model.load_state_dict(load_file(path))
                models.append(model.eval())
        return Ensemble(models, likelihood)

    def __len__(self) -> int:
        return len(self.models)

    def outputs(self, inputs: Any, samples: int | None, generator: torch.Generator | None) -> Tensor:
        count = len(self) if samples is None else samples
        if count > len(self):
            raise InputError(f"samples={count}, but the ensemble has {len(self)} networks")
        values = [eval_outputs(model, {}, inputs) for model in self.models[:count]]
        shapes = {tuple(v.shape) for v in values}
        if len(shapes) > 1:
            raise ShapeError(f"the networks of an ensemble must have outputs of one shape, got {sorted(shapes)}")
        return torch.stack(values)


def _member_seed(seed: int, member: int) -> int:
    generator = torch.Generator().manual_seed(seed)
    return int(torch.randint(2**62, (member + 1,), generator=generator)[member])


def _make_network(factory: Factory, seed: int) -> nn.Module:
    with torch.random.fork_rng():  # Layers draw their first weights from the default generator.
        torch.manual_seed(seed)
        return checks.module("Ensemble.train (from factory=)", factory())


def _trained(factory: Factory, train: Train, seed: int) -> nn.Module:
    model = _make_network(factory, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        train(model, torch.Generator().manual_seed(seed))
    return model.eval()


def _train_to_file(factory: Factory, train: Train, seed: int, path: str, threads: int) -> None:
    """Trains one member in a process of its own, and writes it to a file."""
    torch.set_num_threads(threads)
    model = _trained(factory, train, seed)
    # Tied weights share memory, which the format refuses, so every entry is a copy.
    save_file({n: t.detach().cpu().clone().contiguous() for n, t in model.state_dict().items()}, path)
