"""The examples run on a small budget and show what they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn")


def test_training_example(tmp_path: Path) -> None:
    from examples.train_vogn import main

    found = main(
        [
            "--data",
            "digits",
            "--epochs",
            "2",
            "--optimizers",
            "adam,vogn,ivon,noisy_kfac",
            "--json",
            str(tmp_path / "r.json"),
        ]
    )
    assert found.keys() == {"adam", "vogn", "ivon", "noisy_kfac"}
    assert all(0 < f["nll"] < 3 and len(f["curve"]) == 2 for f in found.values())
    assert (tmp_path / "r.json").exists()


def test_toy_example() -> None:
    from examples.vogn_toy import main

    found = main(["--epochs", "15"])
    assert found["vogn accuracy"] > 0.6
    assert found["vogn entropy far away"] > found["adam entropy far away"]


def test_continual_learning_example() -> None:
    from examples.permuted_mnist import main

    found = main(["--data", "digits", "--tasks", "2", "--epochs", "8", "--batch", "64"])
    assert found["vogn"] > 0.5
