"""Every fault of a saved posterior is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aftermap.errors import DataError, InputError
from aftermap.posteriors.io import load_posterior, save_posterior
from tests.posteriors.cases import made, posterior_of


@pytest.fixture
def place(tmp_path: Path) -> Path:
    reference = {"quantiles": torch.linspace(0, 1, 7, dtype=torch.float64)}
    return save_posterior(tmp_path / "p", posterior_of("kron"), made("kron")[1], {"a": 1}, reference)


def edit(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = place / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    change(config)
    file.write_text(json.dumps(config), encoding="utf-8")


def test_a_device_that_torch_does_not_know(place: Path) -> None:
    with pytest.raises(InputError, match="device='tpu9x' is no device of torch, such as 'cpu' or 'cuda:0'"):
        load_posterior(place, "tpu9x")
    for device in ("cpu", torch.device("cpu"), None):
        assert load_posterior(place, device).posterior.scale.device == torch.device("cpu")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no posterior at .*nowhere: no such folder"):
        load_posterior(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="it is a file"):
        load_posterior(tmp_path / "file")


@pytest.mark.parametrize("name", ["config.json", "posterior.safetensors", "reference.safetensors"])
def test_a_missing_file(place: Path, name: str) -> None:
    (place / name).unlink()
    with pytest.raises(DataError, match=rf"{name} is missing"):
        load_posterior(place)


@pytest.mark.parametrize("name", ["posterior.safetensors", "reference.safetensors"])
@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_file(place: Path, name: str, keep: int) -> None:
    data = (place / name).read_bytes()
    (place / name).write_bytes(data[:keep])
    with pytest.raises(DataError, match=rf"{name} is truncated: [\d,]+ bytes instead of {len(data):,}"):
        load_posterior(place)


@pytest.mark.parametrize("name", ["posterior.safetensors", "reference.safetensors"])
def test_a_foreign_file(place: Path, name: str) -> None:
    (place / name).write_bytes(b"\x80\x04 this is a pickle or a picture " * 2_000)
    with pytest.raises(DataError, match=rf"{name} is damaged or foreign: it is no safetensors file"):
        load_posterior(place)


def test_one_flipped_bit(place: Path) -> None:
    file = place / "posterior.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"its checksum differs\. It is damaged or from another fit"):
        load_posterior(place)


def test_tensors_of_another_fit(place: Path, tmp_path: Path) -> None:
    other = save_posterior(tmp_path / "q", posterior_of("kron", 5.0), made("kron")[1], {})
    (other / "posterior.safetensors").replace(place / "posterior.safetensors")
    with pytest.raises(DataError, match="its checksum differs"):
        load_posterior(place)


def test_tensors_of_another_structure(place: Path, tmp_path: Path) -> None:
    other = save_posterior(tmp_path / "q", posterior_of("kron mixed with full"), made("kron mixed with full")[1], {})
    (other / "posterior.safetensors").replace(place / "posterior.safetensors")
    with pytest.raises(
        DataError, match=r"does not fit config.json: it lacks \['posterior.blocks.1.*\] and has unknown \['"
    ):
        load_posterior(place)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t[:, :2], r"posterior.mean.0.weight is float64 \[5, 2\], should be float64 \[5, 3\]"),
        (lambda t: t.float(), r"posterior.mean.0.weight is float32 \[5, 3\], should be float64 \[5, 3\]"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype(place: Path, change: Any, message: str) -> None:
    file = place / "posterior.safetensors"
    tensors = load_file(file)
    tensors["posterior.mean.0.weight"] = change(tensors["posterior.mean.0.weight"]).contiguous()
    tensors["posterior.mean.0.bias"] = tensors["posterior.mean.0.bias"].clone()
    save_file(tensors, file)
    edit(place, lambda c: c["files"]["posterior.safetensors"].update(bytes=file.stat().st_size))
    with pytest.raises(DataError, match=message):
        load_posterior(place)


@pytest.mark.parametrize(
    "text, message",
    [
        (b"{", r"config.json is damaged: it is no JSON"),
        (b"", r"config.json is damaged: it is no JSON"),
        (b"\xff\xfe\x00", r"config.json is damaged: it is no JSON"),
        (b"[1, 2]", r"does not belong to a saved posterior: it has no entry \"format\": \"aftermap posterior\""),
        (b'{"model_type": "bert"}', r"does not belong to a saved posterior"),
        (
            b'{"format": "aftermap posterior", "schema": 2}',
            r"damaged: missing or of the wrong type are versions, weights_hash",
        ),
    ],
)
def test_a_foreign_or_broken_configuration(place: Path, text: bytes, message: str) -> None:
    (place / "config.json").write_bytes(text)
    with pytest.raises(DataError, match=message):
        load_posterior(place)


def test_a_truncated_configuration(place: Path) -> None:
    data = (place / "config.json").read_bytes()
    (place / "config.json").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="config.json is damaged: it is no JSON"):
        load_posterior(place)


def _change(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: Any) -> None:
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = to

    return change


def _drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: Any) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return change


BLOCK = ("posterior", "blocks", 0)
DAMAGES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (_change("schema", to=99), r"has schema version 99, written by .*; aftermap .* reads versions 1 and 2"),
    (_drop("schema"), r"has schema version None"),
    (_drop("tensors"), r"missing or of the wrong type are tensors"),
    (_change("laplace", to=[1]), r"missing or of the wrong type are laplace"),
    (_change(*BLOCK, "$class", to="ToeplitzBlockPosterior"), r"posterior.blocks.0 is a 'ToeplitzBlockPosterior', a kind that"),
    (_change(*BLOCK, "source_block", "kind", to="toeplitz"), r"a KronBlock of the unknown kind 'toeplitz'; known are 'kron', 'kfra'"),
    (_drop(*BLOCK, "damping"), r"posterior.blocks.0 \(KronBlockPosterior\) lacks \['damping'\] and has unknown nothing"),
    (_change(*BLOCK, "extra", to=1), r"lacks nothing and has unknown \['extra'\]"),
    (_change(*BLOCK, "basis", "outputs", to=None), r"posterior.blocks.0.basis.outputs should be a tensor, got None"),
    (_change(*BLOCK, "basis", "outputs", to={"$tensor": "gone"}), r"outputs refers to the tensor 'gone', which is not in the file"),
    (_change(*BLOCK, "basis", "outputs", to={"a": 1, "b": 2}), r"posterior.blocks.0.basis.outputs is an object without a known tag"),
    (_change(*BLOCK, "layout", to={"$layout": {"name": "x"}}), r"posterior.blocks.0.layout is no layout of a block"),
    (_change("posterior", "mean", to={"$map": [1]}), r"posterior.mean should be a mapping, got list"),
    (_change("posterior", to={"$map": {}}), r"posterior should be a GaussianPosterior, got a dict"),
    (_change("factors", "blocks", to=[]), r"the blocks of the factors do not fit the parameters: 0.bias"),
    (_change("posterior", "blocks", to=[]), r"the blocks of the posterior do not fit the parameters"),
    (_change("parameters", "0.bias", "shape", to=[6]), r"the mean does not fit the list of parameters: 0.bias"),
]  # fmt: skip


@pytest.mark.parametrize("damage, message", DAMAGES, ids=range(len(DAMAGES)))
def test_a_configuration_that_was_edited(place: Path, damage: Any, message: str) -> None:
    edit(place, damage)
    with pytest.raises(DataError, match=message):
        load_posterior(place)


def test_an_order_that_is_none(place: Path) -> None:
    def spoil(config: dict[str, Any]) -> None:
        key = next(k for k, v in config["tensors"].items() if "order" in v)
        config["tensors"][key]["order"] = [0, 0, 1]

    edit(place, spoil)
    with pytest.raises(DataError, match=r"the order \[0, 0, 1\] of .* is no order of 3 dimensions"):
        load_posterior(place)


def test_a_dtype_that_torch_does_not_know(tmp_path: Path) -> None:
    place = save_posterior(tmp_path / "p", posterior_of("diagonal"), made("diagonal")[1], {})
    edit(place, _change("posterior", "blocks", 0, "dtype", to={"$dtype": "nn"}))
    with pytest.raises(DataError, match="is the dtype 'nn', which torch does not know"):
        load_posterior(place)
