"""Damaged data files: each is read as it was, or as what it says now, or refused with a clear error.

A table or an array has no checksum (but for .npz, whose members have one), so a digit that was changed is another number and nothing
can tell. `python -m tests.faults.data_files` makes many such files and counts what happens.
"""

from __future__ import annotations

import gzip
import io
import shutil
import struct
import sys
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image

from aftermap.cli.sources import DataFormat, open_source
from tests.faults.damages import BYTES, FILES
from tests.faults.harness import Outcome, Trial, judged, main

__all__ = ["FORMATS", "TRIAL", "DataTrial"]

FORMATS = ("csv", "tsv with words", "npz", "compressed npz", "idx", "gzipped idx", "images")
_CELLS = (
    "",
    "nan",
    "inf",
    "1e999",
    "1e300",
    "-",
    "0x10",
    '"',
    "1,2",
    "1;2",
    "\x00",
    "9" * 5000,
    "x" * 200_000,
    "٣",
    "1_0",
    "\r",
    "\n",
    " ",
)
_HEADERS = (
    "{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776, 3), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 3), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (20, 99), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (20,), }",
    "{'descr': '<U5', 'fortran_order': False, 'shape': (20, 3), }",
    "{'descr': '<c16', 'fortran_order': True, 'shape': (20, 3), }",
    "{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (20, 3), }",
    "{'descr': '<M8[s]', 'fortran_order': False, 'shape': (20, 3), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': 3, }",
    "{'descr': '<f8', 'shape': (20, 3), }",
    "__import__('os').system('touch hacked')",
    "(" * 5000,
    "[" * 60,
)


def _make(name: str, folder: Path) -> Path:
    """A whole file of a format, or a folder."""
    rows = np.random.default_rng(0).normal(size=(20, 3))
    labels = np.arange(20) % 4
    if name == "csv":
        lines = [f"{a:.5f},{b:.5f},{c:.5f},{y}" for (a, b, c), y in zip(rows, labels, strict=True)]
        (folder / "table.csv").write_text("\n".join(["a,b,c,y", *lines]) + "\n")
        return folder / "table.csv"
    if name == "tsv with words":
        words = np.array(["ant", "bee", "größe", "dog"])[labels]
        lines = [f'{a:.5f}\t{b:.5f}\t"{c:.5f}"\t{y}' for (a, b, c), y in zip(rows, words, strict=True)]
        (folder / "table.tsv").write_text("\n".join(["a\tb\tc\ty", *lines]) + "\n", encoding="utf-8")
        return folder / "table.tsv"
    if name.endswith("npz"):
        save = np.savez_compressed if name.startswith("compressed") else np.savez
        save(folder / "data.npz", x=rows, y=labels)
        return folder / "data.npz"
    if name.endswith("idx"):
        pack = gzip.compress if name.startswith("gzipped") else bytes
        ending = ".gz" if name.startswith("gzipped") else ""
        pixels = (np.arange(20 * 6 * 5) % 256).astype(np.uint8)
        images = bytes([0, 0, 8, 3]) + struct.pack(">3I", 20, 6, 5) + pixels.tobytes()
        (folder / f"t-labels-idx1-ubyte{ending}").write_bytes(
            pack(bytes([0, 0, 8, 1]) + struct.pack(">I", 20) + bytes(labels.tolist()))
        )
        file = folder / f"t-images-idx3-ubyte{ending}"
        file.write_bytes(pack(images))
        return file
    endings = ("png", "jpg", "bmp", "gif", "webp", "tif", "pgm", "ppm")
    for i, ending in enumerate(endings):
        place = folder / "images" / ("cat" if i % 2 else "ant")
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 255, (9, 7, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert("L" if ending == "pgm" else "RGB").save(place / f"{i}.{ending}")
    return folder / "images"


def _content(path: Path) -> dict[str, Any]:
    """Everything that is read."""
    source = open_source(str(path), "train", DataFormat(target="y"))
    data = source.examples
    assert data is not None
    return {"x": data.inputs, "y": data.targets, "classes": data.classes, "columns": data.columns, "name": data.name}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in ((one["x"], other["x"]), (one["y"], other["y"])))
    return tensors and all(one[k] == other[k] for k in ("classes", "columns", "name"))


class DataTrial(Trial):
    """Damaged files of every format."""

    def __init__(self, seed: int, place: Path):
        super().__init__(seed, place)
        self.origins, self.contents = {}, {}
        for name in FORMATS:
            folder = place / "origins" / name.replace(" ", "_")
            folder.mkdir(parents=True)
            self.origins[name] = _make(name, folder)
            self.contents[name] = _content(self.origins[name])

    def attempt(self, number: int) -> Outcome:
        chance = Random(f"{self.seed} {number}")
        name = FORMATS[number % len(FORMATS)]
        folder = self.place / f"case_{number}"
        shutil.copytree(self.origins[name].parent, folder)
        files = sorted(f for f in folder.rglob("*") if f.is_file())
        file = chance.choice(files)
        damage = self._damage(name, file, files, chance)
        path = folder / self.origins[name].name
        try:
            same = _same(_content(path), self.contents[name])
            result, detail = ("identical content" if same else "as written"), ""
        except Exception as error:
            # Some messages name the data set: the file without its ending.
            result, detail = judged(error, [str(folder), path.stem, path.name.split("-images")[0] + " holds"])
        shutil.rmtree(folder)
        return Outcome(number, "data", name, damage, result, detail)

    def _damage(self, name: str, file: Path, files: list[Path], chance: Random) -> str:
        kind = chance.choice(["bytes", "bytes", "file", "own"])
        if kind == "file":
            way = chance.choice(list(FILES))
            foreign = [f for o in self.origins.values() for f in ([o] if o.is_file() else o.rglob("*.*"))]
            FILES[way](file, [*(f for f in files if f != file), *foreign], chance)
            return way
        if kind == "own" and file.suffix in (".csv", ".tsv"):
            return self._table(file, chance)
        if kind == "own" and file.suffix == ".npz":
            return self._archive(file, chance)
        if kind == "own" and "idx" in file.name:
            return self._idx(file, chance)
        way, data = chance.choice(list(BYTES)), bytearray(file.read_bytes())
        BYTES[way](data, chance)
        file.write_bytes(bytes(data))
        return way

    def _table(self, file: Path, chance: Random) -> str:
        delimiter = "," if file.suffix == ".csv" else "\t"
        rows = [line.split(delimiter) for line in file.read_text(encoding="utf-8").splitlines()]
        row = chance.choice(rows)
        way = chance.choice(["a cell", "a cell", "a row", "a column", "no line breaks"])
        if way == "a cell":
            row[chance.randrange(len(row))] = chance.choice(_CELLS)
        elif way == "a row":
            row[:] = chance.choice([[], row[:-1], [*row, "1"], [""] * len(row)])
        elif way == "a column":
            rows = [r[:-1] for r in rows]
        text = "\n".join(delimiter.join(r) for r in rows)
        file.write_text(
            text.replace("\n", delimiter) if way == "no line breaks" else text, encoding="utf-8", newline=""
        )
        return f"{way} changed"

    def _archive(self, file: Path, chance: Random) -> str:
        """An archive that is whole, with an array that is not."""
        with zipfile.ZipFile(file) as archive:
            members = {n: archive.read(n) for n in archive.namelist()}
        name = chance.choice(sorted(members))
        way = chance.choice(["a header", "a header", "bytes of an array", "a bomb", "another name", "other numbers"])
        if way == "a header":
            stream, header = io.BytesIO(members[name]), chance.choice(_HEADERS).encode("latin-1")
            np.lib.format.read_magic(stream)
            np.lib.format.read_array_header_1_0(stream)
            values = stream.read()
            members[name] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + values
        elif way == "bytes of an array":
            data = bytearray(members[name])
            BYTES[chance.choice(list(BYTES))](data, chance)
            members[name] = bytes(data)
        elif way == "a bomb":
            members["bomb.npy"] = members[name][:128] + bytes(chance.choice([10**6, 10**8]))
        elif way == "another name":
            members[chance.choice(["z.npy", "../../y.npy", "/x.npy", "y", " ", "x/y.npy"])] = members.pop(name)
        else:
            stream = io.BytesIO()
            values = [np.full((20, 3), 1e300), np.full(20, 2**64 - 1, np.uint64), np.float64(3), np.zeros((20, 0)), np.zeros((0, 3)), np.full((20, 3), np.nan)]  # fmt: skip
            np.save(stream, chance.choice(values))
            members[name] = stream.getvalue()
        compression = chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
        with zipfile.ZipFile(file, "w", compression) as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        return f"an archive with {way}"

    def _idx(self, file: Path, chance: Random) -> str:
        packed = file.suffix == ".gz"
        data = bytearray(gzip.decompress(file.read_bytes()) if packed else file.read_bytes())
        where = chance.choice([2, 3, 4, 5, 6, 7, *range(8, min(16, len(data)))])
        data[where] = chance.choice([0, 1, 8, 9, 11, 13, 14, 127, 255])
        if chance.random() < 0.2:
            data.extend(bytes(chance.choice([1, 10**7])))
        file.write_bytes(gzip.compress(bytes(data)) if packed else bytes(data))
        return "an idx header"


TRIAL = DataTrial

if __name__ == "__main__":
    sys.exit(main("tests.faults.data_files", 1500, "benchmarks/results/faults_data.json"))
