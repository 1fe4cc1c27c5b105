"""Data by what was typed."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from aftermap.cli.fit import build_for, resolve_task
from aftermap.cli.sources import Batches, DataFormat, first_batch, open_source, parse_ood, parse_size
from aftermap.data import Examples
from aftermap.errors import DataError, InputError
from tests.cli.common import Files

HOW = DataFormat(batch_size=64)


def test_files_and_parts(files: Files) -> None:
    source = open_source(str(files.train), "train", HOW)
    assert source.name == "train"
    assert [len(x) for x, _ in source.batches] == [64, 64, 64, 8]
    assert len(source.batches) == 4
    train, test = open_source("builtin:iris", "train", HOW), open_source("builtin:iris:test", "train", HOW)
    assert train.examples is not None
    assert test.examples is not None
    assert (len(train.examples), len(test.examples)) == (90, 30)
    limited = open_source("toy:moons:all", "train", DataFormat(limit=10))
    assert limited.examples is not None
    assert len(limited.examples) == 10


def test_code(files: Files) -> None:
    place = files.model.removesuffix(":build")
    loader = open_source(f"{place}:batches", "train", HOW)
    assert loader.examples is None
    assert [len(x) for x, _ in loader.batches] == [7, 7, 7]
    pair = open_source(f"{place}:pair", "train", HOW)
    assert pair.examples is not None
    stream = open_source(f"{place}:stream", "train", HOW)
    assert [sum(1 for _ in stream.batches) for _ in range(2)] == [3, 3]  # a generator is kept
    with pytest.raises(InputError, match="failed: OSError: the tape is torn"):
        open_source(f"{place}:fails", "train", HOW)
    with pytest.raises(InputError, match="gave a int"):
        open_source(f"{place}:number", "train", HOW)


def test_code_whose_name_is_that_of_a_part(tmp_path: Path) -> None:
    code = tmp_path / "loaders.py"
    code.write_text("import torch\n\n\ndef test():\n    return torch.ones(4, 2), torch.arange(4) % 2\n")
    source = open_source(f"{code}:test", "train", HOW)
    assert source.examples is not None
    assert len(source.examples) == 4


def test_a_part_that_a_file_does_not_have(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text("a,y\n1,0\n2,1\n")
    for name in ("val", "Train", ""):
        with pytest.raises(InputError, match=f"has no part '{name}'; its parts are train, validation, test, all"):
            open_source(f"{file}:{name}", "train", HOW, what="--data")


def test_notes_of_tables(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    for target, expected in (("y", True), ("same", False)):
        rows = "".join(f"{i},{i / 3},{i % 2},5\n" for i in range(40))
        file.write_text("my id,a,y,same\n" + rows)
        source = open_source(
            f"{file}:train", "train", DataFormat(target=target, drop=("same",) if expected else ("y",))
        )
        assert "column 'my id' of" in source.notes()[0]
        assert source.notes()[0].endswith("leave it out with --drop 'my id'")
        assert expected is not any("are the same: a network learns nothing" in note for note in source.notes())


def test_words_of_which_a_class_is_missing_may_be_numbered_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text("a,y\n1,pear\n2,apple\n")
    source = open_source(str(file), "train", DataFormat(target="y"))
    assert source.note_of_outputs(2) is None
    note = source.note_of_outputs(3)
    assert note is not None
    assert "no example of class 2" in note
    assert "from 0 for 'apple': if the network was trained with more classes, its numbers may be others" in note


def test_idx_with_labels_beside(tmp_path: Path) -> None:
    for name, shape, values in (("images-idx3", (4, 2, 3), bytes(24)), ("labels-idx1", (4,), bytes([3, 1, 2, 0]))):
        raw = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values
        (tmp_path / f"mine-{name}-ubyte.gz").write_bytes(gzip.compress(raw))
    source = open_source(str(tmp_path / "mine-images-idx3-ubyte.gz"), "train", HOW)
    assert source.examples is not None
    assert source.examples.inputs.shape == (4, 1, 2, 3)
    assert source.examples.targets is not None
    assert source.examples.targets.tolist() == [3, 1, 2, 0]
    (tmp_path / "mine-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="there are no labels beside it"):
        open_source(str(tmp_path / "mine-images-idx3-ubyte.gz"), "train", HOW)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--train none.npz: there is no such file or folder. Data are .npz"):
        open_source("none.npz", "train", HOW, what="--train")
    (tmp_path / "data.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match="unknown format"):
        open_source(str(tmp_path / "data.parquet"), "train", HOW)


def test_an_input_without_a_name_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(",a,y\n0,5,0\n1,6,1\n")
    source = open_source(str(tmp_path / "table.csv"), "train", DataFormat(target="y"))
    assert any("has no name" in note and "--drop 1" in note for note in source.notes())
    dropped = open_source(str(tmp_path / "table.csv"), "train", DataFormat(target="y", drop=("1",)))
    assert dropped.notes() == []


def test_targets_of_the_task(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("a,y\n1,0\n2,3\n")
    as_numbers = open_source(str(file), "train", DataFormat(target="y", task="regression"))
    assert as_numbers.examples is not None
    assert as_numbers.examples.targets is not None
    assert as_numbers.examples.targets.dtype == torch.float32
    file.write_text("a,y\n1,0.0\n2,3.5\n")
    with pytest.raises(InputError, match=r"needs class indices, but targets such as 3.5"):
        open_source(str(file), "train", DataFormat(target="y", task="classification"))


def test_each_process_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Examples(torch.arange(11.0)[:, None], None, "eleven")
    parts = []
    for rank in range(3):
        monkeypatch.setattr("aftermap.cli.sources.rank", lambda rank=rank: rank)
        monkeypatch.setattr("aftermap.cli.sources.world_size", lambda: 3)
        mine = Batches(data, 2, shared=True)
        assert len(mine) == len(list(mine))
        parts += [v for x, _ in mine for v in x.flatten().tolist()]
        stream = Batches([1, 2, 3, 4], 2, shared=True)
        assert list(stream) == [[1, 4], [2], [3]][rank]
    assert sorted(parts) == list(range(11))


def test_names_and_sizes() -> None:
    assert parse_ood(["a=x.npz", "sub/other.npz", "builtin:wine"]) == {
        "a": "x.npz",
        "other": "sub/other.npz",
        "wine": "builtin:wine",
    }
    for bad, message in (
        (["=x"], "must be written name=data"),
        (["a=x", "a=y"], "the name 'a' is taken"),
        (["test=x"], "taken"),
    ):
        with pytest.raises(InputError, match=message):
            parse_ood(bad)
    assert parse_size(None, "--x") is None
    assert parse_size("3,32,32", "--x") == (3, 32, 32)
    for bad_size in ("big", "3x0"):
        with pytest.raises(InputError, match="--x"):
            parse_size(bad_size, "--x")


def test_the_task_follows_from_targets_and_outputs(files: Files) -> None:
    device = torch.device("cpu")
    cases = [("builtin:iris", "classification"), ("builtin:diabetes", "regression")]
    for spec, expected in cases:
        source = open_source(spec, "train", HOW)
        model, model_config = build_for("builtin:mlp", None, source, HOW, device, 0)
        assert resolve_task("auto", model, source) == expected
        assert model_config["options"]["rescale"] == (expected == "regression")
    place = files.model.removesuffix(":build")
    moons, blobs = open_source("toy:moons", "train", HOW), open_source("toy:blobs", "train", HOW)
    one, _ = build_for(f"{place}:one", None, moons, HOW, device, 0)
    assert resolve_task("auto", one, moons) == "binary"
    with pytest.raises(InputError, match="say --task regression, --task counts or --task binary"):
        resolve_task("auto", one, blobs)
    with pytest.raises(InputError, match=r"does not take the data builtin:iris: a batch of shape \[64, 4\]"):
        resolve_task("auto", one, open_source("builtin:iris", "train", HOW))
    with pytest.raises(InputError, match="is a stream of batches"):
        build_for("builtin:mlp", None, open_source(f"{place}:batches", "train", HOW), HOW, device, 0)


def test_an_empty_stream() -> None:
    source = open_source("toy:moons", "train", HOW)
    with pytest.raises(DataError, match="holds no batch"):
        first_batch(type(source)("nothing", "nothing", Batches([], 2), None))
