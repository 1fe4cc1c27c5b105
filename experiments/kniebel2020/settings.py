"""How large each part is: "small" for the tests, "stated" for what is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BUDGETS", "OTHERS", "Images", "Iris", "Moves", "Settings", "Weak"]

# The sets of unusual images for each set that a network is trained on.
OTHERS = {
    "mnist": ("fashion-mnist", "kmnist", "notmnist"),
    "fashion-mnist": ("mnist", "kmnist", "notmnist"),
    "kmnist": ("mnist", "fashion-mnist", "notmnist"),
    "cifar10": ("svhn", "fashion-mnist"),
}
GREY = ("mnist", "fashion-mnist", "kmnist")


@dataclass(frozen=True)
class Iris:
    """The perceptron and the multilayer perceptron on Iris.

    Attributes:
        seeds: How many splits and starts.
        hidden: Hidden units of the multilayer perceptron.
        prior: The precision of the prior of every weight.
        steps: Steps of L-BFGS at most.
        push: How far single weights are moved.
        chains, warmup, draws: Chains of HMC, transitions that each adapts in, and draws that are kept of each.
        samples: Draws of a Laplace prediction.
    """

    seeds: int = 3
    hidden: int = 8
    prior: float = 1.0
    steps: int = 2000
    push: float = 0.1
    chains: int = 2
    warmup: int = 200
    draws: int = 200
    samples: int = 1000


@dataclass(frozen=True)
class Images:
    """The networks on images: a multilayer perceptron on three grey sets, a convolutional network on two of them and on CIFAR-10.

    Attributes:
        sets: Set and network, such as "mnist/mlp".
        seeds: How many cuts of the data and starts.
        train, train_colour: Training images of a grey set and of CIFAR-10.
        test, unusual: Test images, and images of each other set.
        widths: Hidden units of the multilayer perceptron.
        channels, colour_channels: Channels of the convolutions.
        hidden: Units of the hidden layer behind convolutions.
        epochs: Epochs of training.
        rate: The first learning rate.
        prior: The precision of the prior of every weight; training has the weight decay that belongs to it.
        members: Networks of an ensemble.
        dropping: The probability of dropping.
        field_epochs: Epochs of mean-field inference, from the trained network on.
        samples: Draws of a prediction.
        seen: Inputs of each set whose uncertainty is taken apart by layer.
        pushed: How many single weights are moved.
        push: How far they are moved.
    """

    sets: tuple[str, ...] = (*(f"{s}/mlp" for s in GREY), "mnist/cnn", "fashion-mnist/cnn", "cifar10/cnn")
    seeds: int = 3
    train: int = 2000
    train_colour: int = 1500
    test: int = 400
    unusual: int = 200
    widths: tuple[int, ...] = (64, 64)
    channels: tuple[int, ...] = (8, 16)
    colour_channels: tuple[int, ...] = (8, 16, 16)
    hidden: int = 32
    epochs: int = 10
    rate: float = 2e-3
    prior: float = 1.0
    members: int = 5
    dropping: float = 0.2
    field_epochs: int = 6
    samples: int = 30
    seen: int = 100
    pushed: int = 200
    push: float = 0.05

    @property
    def perceptrons(self) -> list[str]:
        """The sets with a multilayer perceptron, where there are the methods that have to be trained as well."""
        return [pair for pair in self.sets if pair.endswith("/mlp")]


@dataclass(frozen=True)
class Moves:
    """How the uncertainty moves: multilayer perceptrons of which one thing is varied at a time.

    Attributes:
        sets: The data sets.
        seeds: How many cuts of the data and starts.
        train: Training images, unless they are varied.
        test: Test images.
        seen: Test images whose uncertainty is taken apart by layer.
        width: Hidden units of each of the two hidden layers, unless these are varied.
        steps: Steps of Adam with batches of 64, unless they are varied.
        rate: The first learning rate.
        prior: The precision of the prior of every weight; training has the weight decay that belongs to it.
        depth, widths, lengths, sizes: Numbers of hidden layers, their widths, epochs and training images that are tried.
    """

    sets: tuple[str, ...] = GREY
    seeds: int = 3
    train: int = 2000
    test: int = 500
    seen: int = 100
    width: int = 64
    steps: int = 400
    rate: float = 2e-3
    prior: float = 1.0
    depth: tuple[int, ...] = (1, 2, 4, 6)
    widths: tuple[int, ...] = (16, 32, 64, 128)
    lengths: tuple[int, ...] = (1, 3, 10, 30)
    sizes: tuple[int, ...] = (250, 500, 1000, 2000)


@dataclass(frozen=True)
class Weak:
    """Twenty weak networks against a strong one.

    Attributes:
        sets: The data sets.
        seeds: How often.
        members: How many weak networks.
        narrow: Hidden units of a weak network that sees all data.
        few: Training images of a weak network of the usual width, drawn anew for each.
        strong: Hidden units of each of the two layers of the strong network, which sees all data.
    """

    sets: tuple[str, ...] = ("mnist", "fashion-mnist")
    seeds: int = 3
    members: int = 20
    narrow: int = 8
    few: int = 200
    strong: int = 256


@dataclass(frozen=True)
class Settings:
    """All parts."""

    iris: Iris = field(default_factory=Iris)
    images: Images = field(default_factory=Images)
    moves: Moves = field(default_factory=Moves)
    weak: Weak = field(default_factory=Weak)


BUDGETS = {
    "stated": Settings(),
    "small": Settings(
        iris=Iris(seeds=1, hidden=3, steps=50, chains=1, warmup=5, draws=8, samples=50),
        images=Images(
            sets=("mnist/mlp", "mnist/cnn", "fashion-mnist/cnn"),
            seeds=1,
            train=120,
            test=60,
            unusual=30,
            widths=(8, 8),
            channels=(2, 2),
            hidden=4,
            epochs=1,
            members=2,
            field_epochs=1,
            samples=4,
            seen=20,
            pushed=10,
        ),
        moves=Moves(
            sets=("mnist", "fashion-mnist"),
            seeds=1,
            train=100,
            test=50,
            seen=20,
            width=6,
            steps=6,
            depth=(1, 2),
            widths=(4, 8),
            lengths=(1, 2),
            sizes=(60, 100),
        ),
        weak=Weak(sets=("mnist",), seeds=1, members=3, narrow=3, few=40, strong=8),
    ),
}
