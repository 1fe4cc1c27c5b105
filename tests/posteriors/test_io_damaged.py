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
from aftermap.posteriors.files import sealed
from aftermap.posteriors.io import load_posterior, save_posterior
from tests.faults.sealing import edit, reseal
from tests.posteriors.cases import made, posterior_of


@pytest.fixture
def place(tmp_path: Path) -> Path:
    reference = {"quantiles": torch.linspace(0, 1, 7, dtype=torch.float64)}
    return save_posterior(tmp_path / "p", posterior_of("kron"), made("kron")[1], {"a": 1}, reference)


def test_a_device_that_torch_does_not_know(place: Path) -> None:
    with pytest.raises(InputError, match="device='tpu9x' is not a device of torch, such as 'cpu' or 'cuda:0'"):
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


def test_a_folder_around_the_posterior(place: Path) -> None:
    with pytest.raises(
        DataError, match=rf"config.json is missing; .* There is one in .*{place.name}: is that the folder"
    ):
        load_posterior(place.parent)


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
    with pytest.raises(DataError, match=rf"{name} is too long: 66,000 bytes instead of [\d,]+\. It is damaged or from"):
        load_posterior(place)
    reseal(place)
    with pytest.raises(DataError, match=rf"{name} is damaged or foreign: it is not a safetensors file"):
        load_posterior(place)


def test_one_flipped_bit(place: Path) -> None:
    file = place / "posterior.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"its checksum differs\. It is damaged or from another fit: copy it again"):
        load_posterior(place)


def test_tensors_of_another_fit(place: Path, tmp_path: Path) -> None:
    other = save_posterior(tmp_path / "q", posterior_of("kron", 5.0), made("kron")[1], {})
    (other / "posterior.safetensors").replace(place / "posterior.safetensors")
    with pytest.raises(DataError, match="its checksum differs"):
        load_posterior(place)


def test_tensors_of_another_structure(place: Path, tmp_path: Path) -> None:
    other = save_posterior(tmp_path / "q", posterior_of("kron mixed with full"), made("kron mixed with full")[1], {})
    (other / "posterior.safetensors").replace(place / "posterior.safetensors")
    reseal(place)
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
    reseal(place)
    with pytest.raises(DataError, match=message):
        load_posterior(place)


@pytest.mark.parametrize(
    "text, message",
    [
        (b"{", r"config.json is damaged: it is not JSON"),
        (b"", r"config.json is damaged: it is not JSON"),
        (b"\xff\xfe\x00", r"config.json is damaged: it is not JSON"),
        (b"[1, 2]", r"does not belong to a saved posterior: it has no entry \"format\": \"aftermap posterior\""),
        (b'{"model_type": "bert"}', r"does not belong to a saved posterior"),
        (
            b'{"format": "aftermap posterior", "schema": 2}',
            r"config.json: lacks versions, weights_hash, parameters",
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
    with pytest.raises(DataError, match="config.json is damaged: it is not JSON"):
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
    (_change("schema", to=99), r"has schema version 99, written by aftermap .*; aftermap .* reads versions 1, 2, 3"),
    (_drop("schema"), r"has schema version null"),
    (_drop("tensors"), r"config.json: lacks tensors\."),
    (_change("laplace", to=[1]), r"config.json: laplace should be an object, got a list of 1"),
    (_change(*BLOCK, "$class", to="ToeplitzBlockPosterior"), r"posterior.blocks.0 is a 'ToeplitzBlockPosterior', a kind that"),
    (_change(*BLOCK, "source_block", "kind", to="toeplitz"), r"a KronBlock of the unknown kind 'toeplitz'; known are 'kron', 'kfra'"),
    (_drop(*BLOCK, "damping"), r"posterior.blocks.0 \(KronBlockPosterior\) lacks \['damping'\] and has unknown nothing"),
    (_change(*BLOCK, "extra", to=1), r"lacks nothing and has unknown \['extra'\]"),
    (_change(*BLOCK, "basis", "outputs", to=None), r"posterior.blocks.0.basis.outputs should be a tensor, got null"),
    (_change(*BLOCK, "basis", "outputs", to={"$tensor": "gone"}), r"outputs refers to the tensor 'gone', which is not in the file"),
    (_change(*BLOCK, "basis", "outputs", to={"a": 1, "b": 2}), r"posterior.blocks.0.basis.outputs should be a tensor, got an object with 2 entries"),
    (_change(*BLOCK, "layout", to={"$layout": {"name": "x"}}), r"posterior.blocks.0.layout lacks groups, out, in, pieces"),
    (_change("posterior", "mean", to={"$map": [1]}), r"posterior.mean should be an object, got a list of 1"),
    (_change("posterior", to={"$map": {}}), r"posterior should be an object with a \$class, got an object with 1 entries"),
    (_change("factors", "blocks", to=[]), r"the blocks of the factors do not fit the parameters: 0.bias"),
    (_change("posterior", "blocks", to=[]), r"the blocks of the posterior do not fit the parameters"),
    (_change("parameters", "0.bias", "shape", to=[6]), r"the mean does not fit the list of parameters: 0.bias"),
    (_change("posterior", to={"$class": "Treatment", "block": "a", "rule": "b", "note": ""}), r"posterior should be a GaussianPosterior, got a Treatment"),
    (_change("posterior", "damping", to=[[[[[]]]]]), r"posterior.damping should be a text, got a list of 1"),
    (_change("posterior", "damping", to="much"), r"posterior.damping is 'much', not one of 'exact'"),
    (_change("factors", "n_data", to="11"), r"factors.n_data should be a finite number, got the text '11'"),
    (_change("factors", "n_data", to=True), r"factors.n_data should be a finite number, got true"),
    (_change("factors", "n_data", to=-3), r"factors.n_data is -3 and must be positive"),
    (_change("factors", "names", to=["2.bias"]), r"factors.names does not name each parameter once"),
    (_change("factors", "treatment", to={"$map": {}}), r"factors.treatment does not name each parameter once"),
    (_change(*BLOCK, "layout", "$layout", "groups", to=2), r"posterior.blocks.0.layout is not a layout of a block: its piece '0.weight'"),
    (_change(*BLOCK, "layout", "$layout", "in", to=5), r"is not a layout of a block: its pieces do not fill it"),
    (_change(*BLOCK, "layout", "$layout", "pieces", 0, 1, to=[-5, 3]), r"pieces.0.shape.0 should be a whole number of at least 0"),
    (_change(*BLOCK, "basis", "outputs", to={"$tensor": "posterior.mean.0.weight"}), r"posterior.blocks.0.basis.outputs is torch.float64 \[5, 3\], but should be floating point \[g, o, o\] with g = 1, o = 5"),
    (_change(*BLOCK, "eigen", "outputs", to=None), r"eigen must have either a table, or both of outputs and inputs"),
    (_change("tensors", "posterior.mean.0.bias", "dtype", to="nn"), r"dtype should be one of 'float64'"),
    (_change("tensors", "posterior.mean.0.bias", "shape", to=[10**15]), r"the mean does not fit the list of parameters: 0.bias"),
    (_change("files", "../../secret", to={"bytes": 1, "sha256": "0" * 64}), r"files has the unknown entries '../../secret'"),
    (_change("files", "posterior.safetensors", "sha256", to="abc"), r"sha256 should be a SHA-256 checksum in 64 hexadecimal digits"),
    (_drop("files", "reference.safetensors"), r"files names posterior.safetensors, but should name posterior.safetensors, reference"),
    (_change("surprise", to=1), r"has the unknown entries 'surprise'; .* update aftermap"),
    (_change("versions", "torch", to=2), r"versions.torch should be a text, got 2"),
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
    with pytest.raises(DataError, match=r"the order \[0, 0, 1\] of .* is not an order of 3 dimensions"):
        load_posterior(place)


def test_a_dtype_that_torch_does_not_know(tmp_path: Path) -> None:
    place = save_posterior(tmp_path / "p", posterior_of("diagonal"), made("diagonal")[1], {})
    edit(place, _change("posterior", "blocks", 0, "dtype", to={"$dtype": "nn"}))
    with pytest.raises(DataError, match="is the dtype 'nn', which torch does not know"):
        load_posterior(place)


# Checksums, links and bounds.


@pytest.mark.parametrize(
    "change",
    [
        _change("laplace", "a", to=2),
        _change("factors", "n_data", to=12.0),
        _drop("checksum"),
        _change("checksum", to=None),
        _change("checksum", to="0" * 64),
        lambda c: c.update(parameters=dict(reversed(c["parameters"].items()))),
    ],
)
def test_a_configuration_that_is_not_what_was_saved(place: Path, change: Any) -> None:
    edit(place, change, seal=False)
    with pytest.raises(
        DataError,
        match=r"config.json is not what was saved: its checksum (is missing|differs)\. .*load it, and save it",
    ):
        load_posterior(place)


def test_spaces_do_not_count(place: Path) -> None:
    edit(place, lambda c: None, seal=False)
    assert load_posterior(place).config == {"a": 1}


@pytest.mark.parametrize("schema", [1, 2])
def test_a_folder_of_an_earlier_version_has_no_checksum_and_is_read_as_strictly(place: Path, schema: int) -> None:
    edit(place, _change("schema", to=schema))
    with pytest.raises(DataError, match="has the unknown entries 'checksum'"):
        load_posterior(place)
    edit(place, _drop("checksum"), seal=False)
    if schema == 2:
        assert load_posterior(place).config == {"a": 1}
    edit(place, _change("factors", "loss", to="low"), seal=False)
    with pytest.raises(DataError, match="factors.loss should be a finite number"):
        load_posterior(place)


@pytest.mark.parametrize("name", ["config.json", "posterior.safetensors", "reference.safetensors"])
def test_links_are_refused(place: Path, name: str, tmp_path: Path) -> None:
    (place / name).replace(tmp_path / name)
    (place / name).symlink_to(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name} is a link to another place; .*\(cp -rL\), and load the copy"):
        load_posterior(place)
    (place / name).unlink()
    (place / name).mkdir()
    with pytest.raises(DataError, match=f"{name} is not a plain file"):
        load_posterior(place)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 100_000, "nested deeper than 64 levels"),
        ('{"a": 1, "a": 2}', "the name 'a' stands twice in one object"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": 1e999}', "the number 1e999 is not finite"),
        ('{"a": 1' + 5_000 * "0" + "}", "is too large"),
        ('{"a": 99999999999999999999}', "is too large"),
    ],
)
def test_json_within_bounds(place: Path, text: str, message: str) -> None:
    (place / "config.json").write_text(text)
    with pytest.raises(DataError, match=message):
        load_posterior(place)


@pytest.mark.parametrize("name", ["config.json", "posterior.safetensors", "reference.safetensors"])
def test_a_giant_file_is_refused_by_its_size(place: Path, name: str) -> None:
    with (place / name).open("r+b") as stream:
        stream.truncate(1 << 42)  # It is sparse: nothing is written.
    with pytest.raises(DataError, match=rf"{name} (has 4,398,046,511,104 bytes|is too long: 4,398,046,511,104 bytes)"):
        load_posterior(place)
    if name != "config.json":
        edit(place, lambda c: c["files"][name].update(bytes=1 << 42), seal=False)
        edit_checksum_only(place)
        with pytest.raises(DataError, match=rf"{name} needs 4,398,046,511,104 bytes, more than the"):
            load_posterior(place)


def edit_checksum_only(place: Path) -> None:
    """Without the checksums of files, which take long for a giant one."""
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(sealed({k: v for k, v in config.items() if k != "checksum"})))


def test_numbers_that_no_fit_gives(place: Path) -> None:
    file = place / "posterior.safetensors"
    whole = file.read_bytes()
    scale = json.loads((place / "config.json").read_text())["posterior"]["scale"]["$tensor"]
    weight = "posterior.mean.0.weight"
    cases = [(weight, float("nan"), f"the tensor {weight} has entries that are not finite")]
    cases += [(scale, float("inf"), "not finite"), (scale, -1.0, "posterior.scale must be positive")]
    for key, bad, message in cases:
        tensors = {k: v.clone() for k, v in load_file(file).items()}
        tensors[key].view(-1)[0] = bad
        save_file(tensors, file)
        reseal(place)
        with pytest.raises(DataError, match=message):
            load_posterior(place)
        file.write_bytes(whole)
        reseal(place)


def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for config in ({"deep": deep}, {"large": 10**30}):
        with pytest.raises(InputError, match="the configuration must be of plain JSON values"):
            save_posterior(tmp_path / "p", posterior_of("kron"), made("kron")[1], config)
    assert not (tmp_path / "p").exists()
