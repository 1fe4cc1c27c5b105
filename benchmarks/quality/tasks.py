"""The table of tasks: which data, which network, how it is trained, and whether it is for development or held out.

Settings of the library are chosen on development tasks only. Which task is which was fixed before anything was measured, and stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.quality.datasets import Images, Pairs, Regression, Table
from benchmarks.quality.networks import MLP, Attention, ConvNet, LeNet, NetworkSpec, ResNet20

__all__ = ["QUICK", "SIZES", "TASKS", "Task", "Training"]

SIZES = (30, 100, 300, 1000)  # of validation sets


@dataclass(frozen=True)
class Training:
    """How a network is trained: Adam, the rate falling to zero as a cosine.

    Attributes:
        epochs: How often the data are gone through; 0 is a pretrained network.
        rate: The first learning rate.
        batch: How many data in a step.
        decay: The weight decay, as a penalty.
    """

    epochs: int
    rate: float = 1e-3
    batch: int = 64
    decay: float = 0.0


@dataclass(frozen=True)
class Task:
    """A data set with a network.

    Attributes:
        name: What it is called.
        part: "development" or "held-out".
        group: "image", "table" or "regression".
        data: The data, ready to be cut by a seed.
        network: The network.
        training: How it is trained.
        about: A few words for tables.
        overfitted: Whether it is trained until it knows its data by heart.
        ensemble: Whether its training is cheap enough for four more members.
        resplits: How many validation sets are drawn at each size.
        sizes: The sizes of these; None takes all that the pool allows.
        trained_on: How many data the weights have seen, where those at hand are only some of them.
    """

    name: str
    part: str
    group: str
    data: Images | Pairs | Table | Regression
    network: NetworkSpec
    training: Training
    about: str
    overfitted: bool = False
    ensemble: bool = True
    resplits: int = 5
    sizes: tuple[int, ...] | None = None
    trained_on: int | None = None

    @property
    def likelihood(self) -> str:
        """The name of its likelihood."""
        if self.group == "regression":
            return "regression"
        return "binary" if isinstance(self.data, Table) and self.data.binary else "classification"

    @property
    def cheap(self) -> bool:
        """Whether a prediction needs no pass of gradients through convolutions or attention."""
        return isinstance(self.network, MLP)

    def validation_sizes(self) -> tuple[int, ...]:
        """Sizes of validation sets; a pool is larger than what is drawn from it, so that draws differ."""
        allowed = SIZES if self.sizes is None else self.sizes
        return tuple(n for n in allowed if n <= 0.8 * self.data.pool)

    def options(self) -> dict[str, Any]:
        """Further arguments of a fit: how many data each datum at hand stands for."""
        return {} if self.trained_on is None else {"data_scale": self.trained_on / self.data.train}


D, H = "development", "held-out"
GREY3 = ("fashion-mnist", "kmnist", "notmnist")
CLOTHES3 = ("mnist", "kmnist", "notmnist")


def _classifications() -> list[Task]:
    kept, heart = Training(8, decay=1e-4), Training(60)
    return [
        Task(
            "mnist2k_mlp",
            D,
            "image",
            Images(("mnist",), "flat", 2000, ood=GREY3),
            MLP((256, 256)),
            heart,
            "784-256-256-10 ReLU",
            True,
        ),
        Task(
            "fashion_lenet",
            D,
            "image",
            Images(("fashion-mnist",), "grey", 20000, ood=CLOTHES3),
            LeNet(),
            Training(6, 2e-3),
            "LeNet-5",
            ensemble=False,
        ),
        Task(
            "svhn_groupnorm",
            D,
            "image",
            Images(("svhn",), "colour", 6000, ood=("cifar10", "fashion-mnist")),
            ConvNet((16, 32, 32), 64, "group"),
            Training(10, 2e-3),
            "3 convolutions, GroupNorm",
            ensemble=False,
            resplits=3,
        ),
        Task(
            "grey30_cnn",
            D,
            "image",
            Images(("mnist", "fashion-mnist", "kmnist"), "grey", 12000, test=600, ood=("notmnist",), unusual=300),
            ConvNet((16, 32), 64, "batch"),
            Training(5, 2e-3),
            "2 convolutions, BatchNorm, 30 classes",
            ensemble=False,
            resplits=3,
        ),
        Task(
            "cifar10_resnet20",
            D,
            "image",
            Images(("cifar10",), "colour", 2000, pool=1250, test=300, ood=("svhn", "fashion-mnist"), unusual=150),
            ResNet20(),
            Training(0),
            "pretrained ResNet-20, BatchNorm",
            ensemble=False,
            resplits=2,
            sizes=(100, 300),
            trained_on=50000,
        ),
        Task(
            "digits_mlp",
            D,
            "table",
            Table("digits", 500, 400, ood=("unseen", "kmnist", "notmnist"), unseen=(8, 9)),
            MLP((100, 100)),
            Training(150),
            "64-100-100-8 ReLU",
            True,
        ),
        Task(
            "digits_attention",
            D,
            "table",
            Table("digits", 900, 400, ood=("kmnist", "notmnist")),
            Attention(2),
            Training(60, 2e-3),
            "transformer, 2 layers, LayerNorm",
            ensemble=False,
        ),
        Task(
            "satellite_mlp",
            D,
            "table",
            Table("satellite", 3000, 1300, unseen=(1,), ood=("unseen", "scaled", "shuffled")),
            MLP((50,), "tanh"),
            Training(20, 2e-3, decay=1e-4),
            "36-50-5 tanh",
        ),
        Task(
            "satellite1k_bn",
            D,
            "table",
            Table("satellite", 1000, 1300, unseen=(3,), ood=("unseen", "scaled", "shuffled")),
            MLP((64, 64), norm=True),
            Training(60),
            "36-64-64-5 ReLU, BatchNorm",
            True,
        ),
        Task(
            "breast_cancer_logit",
            D,
            "table",
            Table("breast_cancer", 230, 140, binary=True),
            MLP((50, 50)),
            Training(150),
            "30-50-50-1 ReLU, one logit",
            True,
        ),
        Task(
            "banana_logit",
            D,
            "table",
            Table("banana", 400, 1300, ood=("scaled", "box"), binary=True),
            MLP((50,), "tanh"),
            Training(150, 5e-3, decay=1e-4),
            "2-50-1 tanh, one logit",
        ),
        Task(
            "mnist20k_mlp",
            H,
            "image",
            Images(("mnist",), "flat", 20000, ood=GREY3),
            MLP((100, 100), "tanh"),
            kept,
            "784-100-100-10 tanh",
        ),
        Task(
            "notmnist_mlp",
            H,
            "image",
            Images(("notmnist",), "flat", 3000, ood=("mnist", "fashion-mnist", "kmnist")),
            MLP((128, 128)),
            Training(40),
            "784-128-128-10 ReLU",
            True,
        ),
        Task(
            "fashion_attention",
            H,
            "image",
            Images(("fashion-mnist",), "grey", 10000, ood=CLOTHES3),
            Attention(7),
            Training(10, 2e-3),
            "transformer, 2 layers, LayerNorm",
            ensemble=False,
        ),
        Task(
            "kmnist_bn",
            H,
            "image",
            Images(("kmnist",), "grey", 6000, ood=("mnist", "fashion-mnist", "notmnist")),
            ConvNet((16, 32), 64, "batch"),
            Training(8, 2e-3),
            "2 convolutions, BatchNorm",
            ensemble=False,
        ),
        Task(
            "cifar10_cnn",
            H,
            "image",
            Images(("cifar10",), "colour", 6000, ood=("svhn", "fashion-mnist")),
            ConvNet((16, 32, 32), 64),
            Training(10, 2e-3),
            "3 convolutions",
            ensemble=False,
            resplits=3,
        ),
        Task(
            "mnist_pairs",
            H,
            "image",
            Pairs(12000, test=600),
            MLP((100,)),
            Training(20),
            "392-100-100 ReLU, 100 classes",
            ensemble=False,
            resplits=3,
        ),
        Task("wine_mlp", H, "table", Table("wine", 60, 50), MLP((50,)), Training(300), "13-50-3 ReLU", True),
        Task(
            "australian_logit",
            H,
            "table",
            Table("australian", 250, 180, binary=True),
            MLP((50,), "tanh"),
            Training(40, decay=1e-3),
            "14-50-1 tanh, one logit",
        ),
        Task(
            "vehicle_mlp",
            H,
            "table",
            Table("vehicle", 250, 180, unseen=(3,), ood=("unseen", "scaled", "shuffled")),
            MLP((50, 50)),
            Training(200),
            "18-50-50-3 ReLU",
            True,
        ),
        Task(
            "waveform_mlp",
            H,
            "table",
            Table("waveform", 300, 380),
            MLP((50,), "tanh"),
            Training(40, decay=1e-3),
            "21-50-3 tanh",
        ),
        Task(
            "ionosphere_logit",
            H,
            "table",
            Table("ionosphere", 120, 130, binary=True),
            MLP((50, 50)),
            Training(150),
            "34-50-50-1 ReLU, one logit",
            True,
        ),
    ]


def _regressions() -> list[Task]:
    """Each set with three networks: a small one, a larger one, and a larger one that was trained too long."""
    sets = [
        (D, "boston", Regression("bostonHousing", 330, 125)),
        (D, "energy", Regression("energy", 500, 190)),
        (D, "kin8nm", Regression("kin8nm", 4000, 400)),
        (D, "naval", Regression("naval-propulsion-plant", 1000, 400)),
        (D, "wine_red", Regression("wine-quality-red", 1000, 400)),
        (H, "concrete", Regression("concrete", 700, 200)),
        (H, "diabetes", Regression("diabetes", 270, 125)),
        (H, "power", Regression("power-plant", 4000, 400)),
        (H, "protein", Regression("protein-tertiary-structure", 1000, 400)),
        (H, "yacht", Regression("yacht", 200, 75)),
    ]
    tasks = []
    for part, name, data in sets:
        epochs = max(15, 40000 // data.train)  # about as many steps for every set
        networks = {
            "small": (MLP((50,), "tanh"), Training(epochs, 1e-2, 32, 1e-3), "one layer of 50, tanh"),
            "large": (MLP((50, 50)), Training(epochs, 5e-3, 32, 1e-4), "two layers of 50, ReLU"),
            "overfit": (
                MLP((50, 50)),
                Training(4 * epochs, 5e-3, 32),
                "two layers of 50, ReLU, four times as long, no decay",
            ),
        }
        for kind, (network, training, about) in networks.items():
            tasks.append(
                Task(
                    f"{name}_{kind}",
                    part,
                    "regression",
                    data,
                    network,
                    training,
                    about,
                    kind == "overfit",
                    ensemble=kind != "overfit",
                    sizes=(30, 100),
                )
            )
    return tasks


TASKS: dict[str, Task] = {task.name: task for task in (*_classifications(), *_regressions())}

# Small enough to try everything in a minute; no one's numbers, and they need nothing but scikit-learn.
QUICK: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "quick_wine",
            D,
            "table",
            Table("wine", 80, 50, test=40),
            MLP((20,)),
            Training(40, 5e-3, 16),
            "13-20-3 ReLU",
            resplits=2,
        ),
        Task(
            "quick_breast_cancer",
            D,
            "table",
            Table("breast_cancer", 200, 140, test=100, binary=True),
            MLP((20,)),
            Training(30, 5e-3, 16),
            "30-20-1 ReLU, one logit",
            resplits=2,
        ),
        Task(
            "quick_diabetes",
            D,
            "regression",
            Regression("diabetes", 150, 60, 100),
            MLP((10,), "tanh"),
            Training(60, 1e-2, 16),
            "10-10-1 tanh",
            resplits=2,
        ),
    )
}
