"""How large each part of the experiment is."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BUDGETS", "Far", "Images", "Occam", "Settings", "Svhn", "Uci"]

SETS = ("australian", "breast_cancer", "glass", "ionosphere", "satellite", "vehicle", "waveform", "digits")


@dataclass(frozen=True)
class Uci:
    """Classification of tables (L3, L4, L5, L8).

    Attributes:
        sets: The data sets.
        seeds: The seeds of splits and weights, the first ones of the paper.
        width: The units of every hidden layer.
        depths: The numbers of hidden layers, 1 first.
        steps: Steps of Adam over all data.
        precisions: The grid of prior precisions.
        samples: Weight samples, and draws of the linearised predictive.
        subset: The size of the subset of data.
        rows: Rows of a set at most.
    """

    sets: tuple[str, ...] = SETS
    seeds: tuple[int, ...] = (711, 1, 75)
    width: int = 50
    depths: tuple[int, ...] = (1,)
    steps: int = 1500
    precisions: tuple[float, ...] = (0.1, 1.0, 10.0, 100.0)
    samples: int = 300
    subset: int = 100
    rows: int = 2000


@dataclass(frozen=True)
class Images:
    """Digits and clothes (L3, L6, L7, L8).

    Attributes:
        seeds: The number of seeds.
        train: Training images of digits.
        epochs: Passes over them.
        validation: Held-out images of the official training set that choose the precision.
        test: Test images.
        other: Images of the other data set.
        precisions: The grid of prior precisions.
        clothes_train: The same for clothes, others for every seed.
        clothes_epochs: Passes over them.
        clothes_precisions: Their grid of prior precisions.
        clothes_validation: Their held-out images.
        clothes_test: Their test images, and the digits that are shown to their network.
        widths: The hidden layers of the perceptron.
        channels: The channels of the convolutional network.
        dense: The units of its dense layer.
        samples: Weight samples.
        subset: The size of the subset of data, for the convolutional network.
        subset_test: Test images, and images of the other set, that the subset's predictive is asked about.
    """

    seeds: int = 3
    train: int = 54_000
    epochs: int = 30
    validation: int = 1000
    test: int = 10_000
    other: int = 10_000
    precisions: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
    clothes_train: int = 10_000
    clothes_epochs: int = 12
    clothes_precisions: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0)
    clothes_validation: int = 500
    clothes_test: int = 1000
    widths: tuple[int, ...] = (256, 128, 64, 32)
    channels: tuple[int, int] = (8, 16)
    dense: int = 64
    samples: int = 50
    subset: int = 100
    subset_test: int = 500


@dataclass(frozen=True)
class Far:
    """Inputs far away (L9).

    Attributes:
        seeds: The number of seeds.
        rows: Training rows.
        width: The units of both hidden layers.
        steps: Steps of Adam.
        precision: The prior precision.
        scales: What test inputs are multiplied by.
    """

    seeds: int = 3
    rows: int = 500
    width: int = 50
    steps: int = 1000
    precision: float = 1.0
    scales: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@dataclass(frozen=True)
class Occam:
    """One, five and twenty hidden layers (L2).

    Attributes:
        seeds: The number of seeds, of data and weights.
        depths: The numbers of hidden layers.
        width: Their units.
        epochs: Epochs of training by evidence.
        test: Test data.
    """

    seeds: int = 3
    depths: tuple[int, ...] = (1, 5, 20)
    width: int = 30
    epochs: int = 2000
    test: int = 800


@dataclass(frozen=True)
class Svhn:
    """House numbers shown to a network that was trained on CIFAR-10 (L1).

    Attributes:
        seeds: The number of seeds, of the images.
        fit: Training images of the curvature, others for every seed.
        tuning: Images of the first half of the test set, others for every seed.
        test: Images of the second half, others for every seed.
        other: House numbers, others for every seed.
    """

    seeds: int = 3
    fit: int = 1000
    tuning: int = 500
    test: int = 1000
    other: int = 1000


@dataclass(frozen=True)
class Settings:
    """All parts.

    Attributes:
        uci: Classification of tables.
        images: Digits and clothes.
        far: Inputs far away.
        occam: Depths by the evidence.
        svhn: House numbers.
    """

    uci: Uci = field(default_factory=Uci)
    images: Images = field(default_factory=Images)
    far: Far = field(default_factory=Far)
    occam: Occam = field(default_factory=Occam)
    svhn: Svhn = field(default_factory=Svhn)


BUDGETS = {
    "stated": Settings(),
    "small": Settings(
        uci=Uci(
            seeds=(711,), width=4, depths=(1, 2), steps=50, precisions=(0.1, 10.0), samples=20, subset=20, rows=120
        ),
        images=Images(
            seeds=1,
            train=300,
            epochs=2,
            validation=100,
            test=100,
            other=100,
            precisions=(1.0, 100.0),
            clothes_train=300,
            clothes_epochs=2,
            clothes_precisions=(1.0, 100.0),
            clothes_validation=100,
            clothes_test=100,
            widths=(16, 8),
            channels=(2, 3),
            dense=8,
            samples=5,
            subset=10,
            subset_test=50,
        ),
        far=Far(seeds=1, rows=60, width=6, steps=50, scales=(1.0, 100.0)),
        occam=Occam(seeds=1, depths=(1, 2), width=5, epochs=60, test=50),
        svhn=Svhn(seeds=1, fit=40, tuning=40, test=40, other=40),
    ),
}
