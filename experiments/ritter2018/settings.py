"""How large each part is: "small" for the tests, "stated" for what is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BUDGETS", "Images", "Outlook", "Residual", "Settings", "Toy"]


def _decades(low: int, high: int, parts: int = 1) -> tuple[float, ...]:
    return tuple(10 ** (k / parts) for k in range(low * parts, high * parts + 1))


@dataclass(frozen=True)
class Toy:
    """The cubic.

    Attributes:
        priors: The precisions of the prior; verdicts are about the first.
        seeds: How many data sets and networks under the first prior.
        other_seeds: How many under each other prior.
        hmc_seeds: The first of them are sampled by HMC, too.
        restarts: How many starts the training takes the best of.
        steps: The number of Adam steps.
        samples: The number of weight samples of a prediction.
        tuning_samples: The number of weight samples at a grid point.
        temperatures: The number of tempered replicas of each of the four chains.
        hottest: The least inverse temperature of the likelihood.
        warmup: The number of transitions that a chain adapts in.
        draws: The number of kept draws of each chain.
        thin: The number of transitions for each of them.
        leapfrogs: The number of leapfrog steps of a transition.
        scales: The data scales N / 20 of the grid.
        ratios: The ratios τ · 20 / N of the grid.
    """

    priors: tuple[float, ...] = (0.1, 1.0)
    seeds: int = 10
    other_seeds: int = 3
    hmc_seeds: int = 3
    restarts: int = 6
    steps: int = 4000
    samples: int = 1000
    tuning_samples: int = 100
    temperatures: int = 12
    hottest: float = 1e-4
    warmup: int = 1000
    draws: int = 1000
    thin: int = 12
    leapfrogs: int = 16
    scales: tuple[float, ...] = _decades(0, 4)
    ratios: tuple[float, ...] = _decades(-5, 3, 2)

    def seeds_under(self, prior: float) -> int:
        """The number of data sets and networks under a prior."""
        return self.seeds if prior == self.priors[0] else self.other_seeds


@dataclass(frozen=True)
class Images:
    """The network on MNIST: sections 5.2 and 5.3, appendices C and D.

    Attributes:
        seeds: How many networks.
        width: The number of units of both hidden layers.
        train: How many images of the training part are trained on.
        train_batch: The size of batches in training.
        epochs: The number of epochs.
        rates: The first rates that are tried; the first one with every decay.
        decays: The weight decays that are tried; the first one with every rate.
        trial_epochs: The number of epochs of a trial.
        field_epochs: The number of epochs of mean-field inference, which begins at the trained network.
        fit: How many images the curvature is of.
        passes: How many random binarisations of each image it is of.
        batch: The size of batches of the KFRA recursion.
        validation: How many held-out images each stage of the grid uses.
        tuning_samples: The number of weight samples at a grid point of each stage.
        kept: How many grid points go on from each stage but the last.
        scales: The data scales of the grid.
        ratios: The ratios precision / data scale of the grid.
        wide: How many nats the widest posterior that is shown beside the tuned one may cost held-out images.
        samples: The number of weight samples of a prediction.
        test: How many test images.
        letters: How many images of notMNIST.
        attacked: How many images the untargeted attack moves.
        aimed: How many images the targeted attack moves.
        compared: How many images both attacks move where ways to compute the curvature are compared.
        attack_samples: The number of weight samples that are attacked.
        iterations: The number of steps of the targeted attack.
        exact_fit: How many images the comparison of minibatches with single data uses.
    """

    seeds: int = 3
    width: int = 1024
    train: int = 50_000
    train_batch: int = 250
    epochs: int = 15
    rates: tuple[float, ...] = (0.1, 0.03)
    decays: tuple[float, ...] = (1e-4, 1e-5, 1e-2)
    trial_epochs: int = 2
    field_epochs: int = 1
    fit: int = 10_000
    passes: int = 2
    batch: int = 500
    validation: tuple[int, ...] = (500, 2000, 5000)
    tuning_samples: tuple[int, ...] = (8, 16, 20)
    kept: tuple[int, ...] = (5, 2)
    scales: tuple[float, ...] = _decades(-1, 4)
    ratios: tuple[float, ...] = _decades(-1, 4)
    wide: float = 0.02
    samples: int = 20
    test: int = 10_000
    letters: int = 2000
    attacked: int = 1000
    aimed: int = 1000
    compared: int = 250
    attack_samples: int = 4
    iterations: int = 40
    exact_fit: int = 1000


@dataclass(frozen=True)
class Residual:
    """The residual network on CIFAR-10: section 5.4.

    Attributes:
        seeds: How often images, samples and masks are drawn; there is one network.
        fit: How many training images the curvature is of.
        passes: How many random crops and reflections of each.
        tuning: How many of the first 5,000 test images each stage of the grid uses; dropout is chosen with those of the first.
        tuning_samples: The number of weight samples at a grid point of each stage.
        kept: How many grid points go on from each stage but the last.
        scales: The data scales of the grid.
        ratios: The ratios precision / data scale of the grid.
        samples: The number of weight samples of a prediction.
        test: How many of the last 5,000 test images are measured on.
        drops: The probabilities of dropping that are tried.
    """

    seeds: int = 3
    fit: int = 300
    passes: int = 1
    tuning: tuple[int, ...] = (500, 5000)
    tuning_samples: tuple[int, ...] = (2, 2)
    kept: tuple[int, ...] = (2,)
    scales: tuple[float, ...] = _decades(0, 6)
    ratios: tuple[float, ...] = (1.0, 100.0, 1e4)
    samples: int = 3
    test: int = 5000
    drops: tuple[float, ...] = (0.02, 0.05, 0.1)


@dataclass(frozen=True)
class Outlook:
    """What the conclusion of the paper hopes for, on small networks and a part of MNIST.

    Attributes:
        seeds: How often everything is done.
        width: The number of hidden units.
        train: How many images are trained on.
        steps: The number of steps of Adam, whatever the number of images.
        members: How many networks are averaged.
        test: How many test images.
        pool: How many images active learning may ask about.
        labels: How many labels it may ask for.
        scales: The data scales of the grid.
        ratios: The ratios precision / data scale of the grid.
    """

    seeds: int = 3
    width: int = 64
    train: int = 1000
    steps: int = 500
    members: int = 5
    test: int = 2000
    pool: int = 1000
    labels: int = 150
    scales: tuple[float, ...] = _decades(-1, 4)
    ratios: tuple[float, ...] = _decades(-3, 4)


@dataclass(frozen=True)
class Settings:
    """All parts."""

    toy: Toy = field(default_factory=Toy)
    images: Images = field(default_factory=Images)
    residual: Residual = field(default_factory=Residual)
    outlook: Outlook = field(default_factory=Outlook)


BUDGETS = {
    "stated": Settings(),
    "small": Settings(
        toy=Toy(
            priors=(0.1,),
            seeds=1,
            hmc_seeds=1,
            restarts=2,
            steps=100,
            samples=50,
            tuning_samples=10,
            temperatures=3,
            warmup=12,
            draws=8,
            thin=1,
            leapfrogs=2,
            scales=(1.0, 100.0),
            ratios=(0.01, 1.0),
        ),
        images=Images(
            seeds=1,
            width=16,
            train=400,
            epochs=1,
            rates=(0.1,),
            decays=(1e-4,),
            trial_epochs=1,
            field_epochs=1,
            fit=100,
            passes=2,
            batch=50,
            validation=(30, 50),
            tuning_samples=(2, 3),
            kept=(2,),
            scales=(1.0, 100.0),
            ratios=(1.0, 100.0),
            samples=3,
            test=100,
            letters=100,
            attacked=20,
            aimed=20,
            compared=20,
            attack_samples=3,
            iterations=3,
            exact_fit=20,
        ),
        residual=Residual(
            seeds=1,
            fit=4,
            passes=1,
            tuning=(10, 20),
            tuning_samples=(2, 3),
            kept=(1,),
            scales=(1e2, 1e4),
            ratios=(1.0,),
            samples=2,
            test=20,
            drops=(0.05,),
        ),
        outlook=Outlook(
            seeds=1, width=8, train=60, steps=5, members=2, test=50, pool=60, labels=30, scales=(1.0,), ratios=(1.0,)
        ),
    ),
}
