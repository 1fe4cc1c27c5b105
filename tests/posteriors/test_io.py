"""Saving and loading: bit-identical, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from aftermap.curvature import fit_curvature
from aftermap.errors import InputError
from aftermap.params import weights_hash
from aftermap.posteriors import GaussianPosterior, io
from aftermap.posteriors.encoding import StateWriter
from aftermap.posteriors.io import load_posterior, save_posterior
from tests.posteriors.cases import CASES, build, generator, made, mean_of, normal, posterior_of

CONFIG = {"likelihood": "classification", "noise": 0.1, "thresholds": [0.25, 1e-17], "nested": {"a": None, "b": True}}


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Equal bit by bit, through dataclasses, mappings and sequences, strides included."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        wide = [d for d in range(one.dim()) if one.shape[d] > 1]
        if one.numel() == one.untyped_storage().nbytes() // one.element_size():
            assert [one.stride(d) for d in wide] == [other.stride(d) for d in wide], path
    elif is_dataclass(one):
        assert type(one) is type(other), path
        for each in fields(one):
            assert_same(getattr(one, each.name), getattr(other, each.name), f"{path}.{each.name}")
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}.{place}")
    else:
        assert one == other, path


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_round_trip(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    _, factors = made(case, dtype)
    layers = len(posterior_of(case, dtype=dtype).layers)
    priors = [0.4 + i for i in range(layers)]
    posterior = posterior_of(case, priors, dtype, prior_mean=0.3, scale=1.7).with_prior([2 * p for p in priors])
    reference = {"entropy": normal(9), "labels": torch.arange(4)}
    place = save_posterior(tmp_path / "deep" / "posterior", posterior, factors, CONFIG, reference)
    loaded = load_posterior(place)
    assert_same(posterior, loaded.posterior)
    assert_same(factors, loaded.factors)
    assert_same(reference, loaded.reference)
    assert loaded.config == CONFIG
    assert loaded.weights_hash == weights_hash(posterior.mean)
    assert_same(posterior.sample(3, generator()), loaded.posterior.sample(3, generator()))
    values = {n: normal(2, *s).to(dtype) for n, s in posterior.shapes.items()}
    assert_same(posterior.covariance_mv(values), loaded.posterior.covariance_mv(values))
    assert_same(posterior.log_prob(values), loaded.posterior.log_prob(values))
    assert_same(posterior.log_det_ratio(), loaded.posterior.log_det_ratio())
    assert sorted(os.listdir(place)) == ["config.json", "posterior.safetensors", "reference.safetensors"]
    assert os.listdir(place.parent) == ["posterior"]


@pytest.mark.parametrize("damping", ["factored", "pi"])
def test_round_trip_of_damping(damping: str, tmp_path: Path) -> None:
    posterior = posterior_of("kron", damping=damping)
    save_posterior(tmp_path / "p", posterior, made("kron")[1], {})
    loaded = load_posterior(tmp_path / "p")
    assert loaded.posterior.damping == damping
    assert loaded.reference is None
    assert_same(posterior.marginal_variance(), loaded.posterior.marginal_variance())


@pytest.mark.parametrize("case", ["kron", "diagonal odd", "full", "low_rank"])
def test_a_fit_goes_on_after_loading(case: str, tmp_path: Path) -> None:
    net, options = CASES[case]
    model, data = build(net)
    first, second = (
        fit_curvature(model, [batch], "classification", generator=generator(), progress=False, **options)
        for batch in data
    )
    save_posterior(tmp_path / "p", GaussianPosterior.from_factors(first, mean_of(model)), first, {})
    updated = load_posterior(tmp_path / "p").factors + second
    whole = first + second
    assert updated.n_data == 11
    assert updated.loss == whole.loss
    torch.testing.assert_close(updated.to_dense(), whole.to_dense(), rtol=0, atol=0)


@pytest.mark.parametrize("case", ["kron", "full", "low_rank"])
def test_a_loaded_posterior_takes_another_prior_and_its_gradient(case: str, tmp_path: Path) -> None:
    posterior = posterior_of(case)
    save_posterior(tmp_path / "p", posterior, made(case)[1], {})
    loaded = load_posterior(tmp_path / "p").posterior
    results = []
    for each in (posterior, loaded):
        prior = torch.tensor([0.7, 0.7], dtype=torch.float64, requires_grad=True)
        each.with_prior(prior).log_det_ratio().backward()
        results.append(prior.grad)
    assert_same(results[0], results[1])


def test_the_configuration_can_be_read_by_people(tmp_path: Path) -> None:
    posterior, (_, factors) = posterior_of("kron mixed with full"), made("kron mixed with full")
    weights = {"all": normal(3)}
    save_posterior(tmp_path / "p", posterior, factors, CONFIG, weights=weights)
    config = json.loads((tmp_path / "p" / "config.json").read_text(encoding="utf-8"))
    assert config["schema"] == 3
    assert config["versions"]["torch"] == torch.__version__
    assert config["weights_hash"] == weights_hash(weights)
    assert config["parameters"]["first.weight"] == {"shape": [5, 3], "dtype": "float64"}
    assert config["factors"]["n_data"] == 11
    assert {b["kind"] for b in config["factors"]["blocks"]} == {"kron", "full"}
    layout = config["factors"]["blocks"][0]["layout"]["$layout"]
    assert layout == factors.blocks[0].layout.to_config()
    assert config["factors"]["treatment"]["$map"]["gain"]["rule"] == "per-example"
    assert config["laplace"] == CONFIG


def test_a_tensor_is_stored_once(tmp_path: Path) -> None:
    posterior, (_, factors) = posterior_of("full"), made("full")
    save_posterior(tmp_path / "p", posterior, factors, {})
    loaded = load_posterior(tmp_path / "p")
    assert loaded.posterior.blocks[0].source.matrix is loaded.factors.blocks[0].matrix
    size, count = (tmp_path / "p" / "posterior.safetensors").stat().st_size, posterior.n_params
    assert size < 8 * (2 * count**2 + 10 * count) + 4_000


def test_nothing_refers_to_the_file_after_loading(tmp_path: Path) -> None:
    posterior = posterior_of("kron")
    save_posterior(tmp_path / "p", posterior, made("kron")[1], {})
    loaded = load_posterior(tmp_path / "p")
    file = tmp_path / "p" / "posterior.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert_same(posterior, loaded.posterior)


# Weights.


def test_weights_hash_sees_everything_but_order() -> None:
    weights = {
        "a": normal(2, 3),
        "b": normal(4, seed=1),
        "c": torch.tensor(1.5),
        "d": torch.ones(3, dtype=torch.bfloat16),
    }
    known = weights_hash(weights)
    assert known == weights_hash(dict(reversed(weights.items())))
    assert known == weights_hash({**weights, "a": weights["a"].T.contiguous().T})
    bumped = weights["a"].clone()
    bumped[1, 2] = torch.nextafter(bumped[1, 2], torch.tensor(9.0, dtype=torch.float64))
    changes: list[dict[str, torch.Tensor]] = [
        {**weights, "a": bumped},
        {**weights, "a": weights["a"].reshape(3, 2)},
        {**weights, "b": weights["b"].view(torch.int64)},
        {("x" if n == "b" else n): v for n, v in weights.items()},
        {n: v for n, v in weights.items() if n != "c"},
    ]
    assert len({known, *(weights_hash(c) for c in changes)}) == 6


# Whole or not at all.


def saved(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    place = save_posterior(tmp_path / "p", posterior_of("kron"), made("kron")[1], CONFIG)
    return place, contents(place)


def contents(place: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in place.iterdir()}


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    place, before = saved(tmp_path)
    with pytest.raises(InputError, match=r"exists and is not empty; choose another folder, or pass overwrite=True"):
        save_posterior(place, posterior_of("full"), made("full")[1], {})
    assert contents(place) == before
    assert os.listdir(tmp_path) == ["p"]


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    place, _ = saved(tmp_path)
    if not exchange:
        monkeypatch.setattr(io, "_exchange", lambda *_: False)
    (place / "reference.safetensors").write_text("old")
    save_posterior(place, posterior_of("full"), made("full")[1], {}, overwrite=True)
    assert load_posterior(place).factors.structure == "full"
    assert sorted(os.listdir(place)) == ["config.json", "posterior.safetensors"]
    assert os.listdir(tmp_path) == ["p"]


def test_overwrite_never_deletes_what_is_not_a_posterior(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"holds files that do not belong to a saved posterior \(thesis.tex\)"):
        save_posterior(tmp_path / "p", posterior_of("kron"), made("kron")[1], {}, overwrite=True)
    assert (tmp_path / "p" / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_is_filled_and_a_file_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save_posterior(tmp_path / "empty", posterior_of("kron"), made("kron")[1], {})
    assert load_posterior(tmp_path / "empty").config == {}
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file; a posterior is saved as a folder"):
        save_posterior(tmp_path / "file", posterior_of("kron"), made("kron")[1], {}, overwrite=True)


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    place, _ = saved(tmp_path)
    (tmp_path / "link").symlink_to(place)
    save_posterior(tmp_path / "link", posterior_of("full"), made("full")[1], {}, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert load_posterior(place).factors.structure == "full"


def _disk_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _disk_full_in_safetensors(*_: Any, **__: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device")


def _interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt("by the user")


FAULTS = [
    (
        io,
        "save_file",
        _disk_full_in_safetensors,
        OSError,
        "posterior.safetensors could not be written: .*No space left",
    ),
    (io, "save_file", _interrupted, KeyboardInterrupt, "by the user"),
    (io.os, "fsync", _disk_full, OSError, "No space left"),
    (io, "_move", _disk_full, OSError, "No space left"),
    (io.json, "dumps", _interrupted, KeyboardInterrupt, "by the user"),
]


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("owner, name, fault, error, message", FAULTS)
def test_a_fault_leaves_the_old_one_and_no_rest(
    owner: Any, name: str, fault: Any, error: Any, message: str, exists: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    before = saved(tmp_path)[1] if exists else {}
    posterior, factors = posterior_of("full"), made("full")[1]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fault)
        with pytest.raises(error, match=message):
            save_posterior(tmp_path / "p", posterior, factors, {}, overwrite=True)
    assert os.listdir(tmp_path) == (["p"] if exists else [])
    if exists:
        assert contents(tmp_path / "p") == before
        assert load_posterior(tmp_path / "p").config == CONFIG


def test_a_failed_second_rename_brings_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, before = saved(tmp_path)
    rename = os.rename

    def second_fails(source: Any, target: Any) -> None:
        if str(source).endswith(".tmp"):
            _disk_full()
        rename(source, target)

    monkeypatch.setattr(io, "_exchange", lambda *_: False)
    with monkeypatch.context() as patched:
        patched.setattr(io.os, "rename", second_fails)
        with pytest.raises(OSError, match="No space left"):
            save_posterior(place, posterior_of("full"), made("full")[1], {}, overwrite=True)
    assert contents(place) == before
    assert os.listdir(tmp_path) == ["p"]


# What cannot be saved.


@pytest.mark.parametrize("config", [{"f": print}, {"x": float("nan")}, {"t": torch.zeros(2)}])
def test_a_configuration_that_is_not_plain(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the configuration must be of plain JSON values"):
        save_posterior(tmp_path / "p", posterior_of("kron"), made("kron")[1], config)
    assert os.listdir(tmp_path) == []


def test_factors_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="save a posterior with the factors that it was made from"):
        save_posterior(tmp_path / "p", posterior_of("kron"), made("kron embedding")[1], {})
    assert os.listdir(tmp_path) == []


def test_a_class_outside_the_registry() -> None:
    with pytest.raises(InputError, match="x.a is a .*Path, which cannot be saved; allowed are GaussianPosterior"):
        StateWriter().encode({"a": Path(".")}, "x")
    with pytest.raises(InputError, match="x is nan, which cannot be saved"):
        StateWriter().encode(float("nan"), "x")
