"""What a caller keeps beside a posterior: its own facts, reference tensors, the network's weights; and the line with the costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aftermap as am
from aftermap.errors import DataError, InputError
from aftermap.laplace import Laplace, read_extras
from aftermap.posteriors.io import load_posterior, read_model_state
from tests.laplace.problems import classes, mlp, untrained


def fitted() -> Laplace:
    return Laplace(mlp(), "classification").fit(classes(), progress=False)


def test_extras_reference_and_model_come_back(tmp_path: Path) -> None:
    laplace = fitted()
    extras = {"thresholds": {"entropy": {"value": 0.5}}, "note": "ß"}
    reference = {"entropy": torch.linspace(0, 1, 7, dtype=torch.float64)}
    place = laplace.save(tmp_path / "p", extras=extras, reference=reference, with_model=True)
    assert read_extras(place) == extras
    loaded = load_posterior(place)
    assert loaded.reference is not None
    assert torch.equal(loaded.reference["entropy"], reference["entropy"])
    state = read_model_state(place)
    assert state is not None
    torch.testing.assert_close(state, dict(laplace.model.state_dict()), rtol=0, atol=0)
    model = mlp()
    model.load_state_dict(state)
    assert am.load(place, model).n_data == laplace.n_data


def test_without_extras(tmp_path: Path) -> None:
    place = fitted().save(tmp_path / "p")
    assert read_extras(place) == {}
    assert read_model_state(place) is None
    assert load_posterior(place).reference is None


def test_damage_is_named(tmp_path: Path) -> None:
    place = fitted().save(tmp_path / "p", with_model=True)
    with (place / "model.safetensors").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(DataError, match="model.safetensors is too long"):
        read_model_state(place)
    (place / "model.safetensors").unlink()
    with pytest.raises(DataError, match="model.safetensors is missing"):
        read_model_state(place)
    with pytest.raises(DataError, match="there is no posterior at"):
        read_extras(tmp_path / "none")
    with pytest.raises(InputError, match="plain JSON values"):
        fitted().save(tmp_path / "q", extras={"bad": float("nan")})
    assert not (tmp_path / "q").exists()


def test_a_folder_with_its_network_can_be_replaced(tmp_path: Path) -> None:
    fitted().save(tmp_path / "p", with_model=True)
    place = fitted().save(tmp_path / "p", overwrite=True)
    assert read_model_state(place) is None


@untrained
def test_the_line_with_the_costs_comes_first() -> None:
    said: list[str] = []
    am.fit(mlp(), classes(), structure="kron", verbose=False, on_cost=said.append)
    assert len(said) == 1
    assert said[0].startswith("kron, ")
    assert "alternatives: ekfac" in said[0]
