"""Readers of npz, csv and image folders: what is read, and every mistake named."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from aftermap.data import (
    Examples,
    builtin,
    csv_rows,
    part_of,
    photograph_patches,
    read_csv,
    read_idx,
    read_image_folder,
    read_npz,
    split,
    toy,
)
from aftermap.errors import DataError, InputError, ShapeError


def write(folder: Path, text: str, name: str = "table.csv") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


# npz


def test_npz_layouts(tmp_path: Path) -> None:
    np.savez(tmp_path / "bytes.npz", images=np.full((3, 5, 4, 3), 51, np.uint8), labels=np.arange(3, dtype=np.uint8))
    found = read_npz(tmp_path / "bytes.npz")
    assert found.inputs.shape == (3, 3, 5, 4)
    torch.testing.assert_close(found.inputs, torch.full((3, 3, 5, 4), 0.2))
    assert found.targets is not None
    assert found.targets.dtype == torch.int64
    np.savez(tmp_path / "grey.npz", x=np.zeros((2, 5, 4), np.uint8), y=np.zeros((2, 1)))
    grey = read_npz(tmp_path / "grey.npz")
    assert grey.inputs.shape == (2, 1, 5, 4)
    assert grey.targets is not None
    assert (grey.targets.shape, grey.targets.dtype) == ((2,), torch.float32)
    np.savez(tmp_path / "tokens.npz", x=np.zeros((2, 7), np.int32))
    assert read_npz(tmp_path / "tokens.npz", need_targets=False).inputs.dtype == torch.int64


def test_npz_parts(tmp_path: Path) -> None:
    np.savez(tmp_path / "parts.npz", X_tr=np.zeros((4, 2)), y_tr=np.zeros(4), x_test=np.ones((3, 2)), y_test=np.ones(3))
    assert len(read_npz(tmp_path / "parts.npz", part="train")) == 4
    assert float(read_npz(tmp_path / "parts.npz", part="test").inputs.mean()) == 1.0


def test_npz_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        read_npz(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(DataError, match="cannot be read as an .npz file"):
        read_npz(tmp_path / "text.npz")
    np.savez(tmp_path / "names.npz", a=np.zeros(3), b=np.zeros(3))
    with pytest.raises(DataError, match="no array of inputs: it holds a, b"):
        read_npz(tmp_path / "names.npz")
    np.savez(tmp_path / "only_x.npz", x=np.zeros((3, 2)))
    with pytest.raises(DataError, match="no array of targets"):
        read_npz(tmp_path / "only_x.npz")
    np.savez(tmp_path / "objects.npz", x=np.array([{}, {}], dtype=object), y=np.zeros(2))
    with pytest.raises(DataError, match="cannot be read"):
        read_npz(tmp_path / "objects.npz")
    np.savez(tmp_path / "lengths.npz", x=np.zeros((3, 2)), y=np.zeros(4))
    with pytest.raises(ShapeError, match="3 inputs, but 4 targets"):
        read_npz(tmp_path / "lengths.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match="holds one array"):
        read_npz(tmp_path / "one.npy")


# csv


def test_csv_numbers_and_classes(tmp_path: Path) -> None:
    file = write(tmp_path, "id,a,b,kind\nx1,1,2.5,rose\nx2,3,-4e1,iris\n")
    found = read_csv(file, target="kind", drop=["id"])
    assert found.columns == ("a", "b")
    assert found.classes == ("iris", "rose")
    torch.testing.assert_close(found.inputs, torch.tensor([[1.0, 2.5], [3.0, -40.0]]))
    assert found.targets is not None
    assert found.targets.tolist() == [1, 0]
    # By number, and with the order of columns and classes of earlier data.
    again = read_csv(file, target="-1", columns=["b", "a"], classes=["rose", "iris"])
    assert again.inputs[0].tolist() == [2.5, 1.0]
    assert again.targets is not None
    assert again.targets.tolist() == [0, 1]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_csv_delimiters_and_no_header(tmp_path: Path, delimiter: str) -> None:
    file = write(tmp_path, "\n".join(delimiter.join(row) for row in (["1", "2", "0.5"], ["3", "4", "1.5"])))
    found = read_csv(file, target="3")
    assert found.columns == ("column_1", "column_2")
    assert found.targets is not None
    assert found.targets.tolist() == [0.5, 1.5]


CELLS = (
    "1",
    " -2.5e-3 ",
    "0.1",
    "1_000",
    "٣",
    "1e39",
    "3.4028235e38",
    "inf",
    "nan",
    "",
    " ",
    "x",
    "0x10",
    "1e400",
    "+7",
    ".5",
)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_quotes_change_nothing(tmp_path: Path, delimiter: str) -> None:
    """Cells in quotes are read one by one, others by NumPy: values, line numbers and messages are the same."""
    rng = np.random.default_rng(3)

    def answer(rows: list[list[str]], quote: str) -> object:
        text = "\n".join(delimiter.join(f"{quote}{cell}{quote}" for cell in row) for row in rows)
        try:
            found = read_csv(write(tmp_path, text + "\n\n"), target="kind", drop=["id"])
        except DataError as error:
            return str(error)
        assert found.targets is not None
        return found.inputs.tolist(), found.targets.tolist(), found.classes

    answers = []
    for trial in range(60):
        good = trial % 2 == 0
        table = rng.choice(CELLS[:5] if good else CELLS, (6, 3)).tolist()
        rows = [["id", "a", "kind", "b"], *([f"n{i}", r[0], str(i % 2), r[1]] for i, r in enumerate(table))]
        if trial % 5 == 1:
            rows[4] = [" "] * 4  # skipped
        if trial % 7 == 3:
            rows[5] = rows[5][:3]
        plain, quoted = answer(rows, ""), answer(rows, '"')
        assert plain == quoted, rows
        answers.append(plain)
    assert {type(a) for a in answers} == {str, tuple}


def test_csv_names_a_number_that_is_too_large(tmp_path: Path) -> None:
    file = write(tmp_path, "a,b,y\n1,2,0\n\n3,-1e39,1\n")
    with pytest.raises(DataError, match="row 4, column 'b': '-1e39' is too large for a number of 32 bits"):
        read_csv(file, target="y")


def test_csv_kinds_of_targets(tmp_path: Path) -> None:
    whole = read_csv(write(tmp_path, "a,y\n1,0\n2,3\n"), target="y")
    assert whole.is_classes
    assert not read_csv(write(tmp_path, "a,y\n1,0.0\n2,3.0\n"), target="y").is_classes
    without = read_csv(write(tmp_path, "a,b\n1,2\n"), need_targets=False)
    assert without.targets is None
    missing = read_csv(write(tmp_path, "a,b\n1,2\n"), target="y", columns=["a"], need_targets=False)
    assert (missing.targets, missing.columns) == (None, ("a",))


@pytest.mark.parametrize(
    "text, message",
    [
        ("a,b,y\n1,2,0\n3,n/a,1\n", r"row 3, column 'b': 'n/a' is not a finite number"),
        ("a,b,y\n\n1,2,0\n\n3,,1\n", r"row 5, column 'b': the cell is empty"),
        ("a,b,y\n1,inf,0\n", r"row 2, column 'b': 'inf' is not a finite number"),
        ('a,b,y\n1,"2\n",0\n3,x,1\n', r"row 4, column 'b'"),
        ("a,b,y\n1,2\n", r"row 2: 2 cells, but there are 3 columns"),
        ("a,a,y\n1,2,3\n", "two columns called 'a'"),
        ("a,b,y\n", "has a header, but no rows"),
        ("", "is empty"),
        ("y\n1\n", "no input column beside the target"),
        ("a,b,z\n1,2,3\n", "has no column 'y'; it has a, b, z"),
        ("a,y\n1,1\n2,2\n3,3\n4,4\n5,?\n", r"row 6, column 'y': '\?' is not a finite number"),
        # A missing target is no class of its own, and does not make classes of the numbers beside it.
        (
            "a,y\n1,.5\n2,nan\n3,.7\n",
            r"row 3, column 'y': 'nan' is not a finite number. Targets are numbers or classes",
        ),
        ("a,y\n1,1\n2,inf\n", r"row 3, column 'y': 'inf' is not a finite number"),
        ("a,y\n1,cat\n2,\n3,dog\n", r"row 3, column 'y': the cell is empty"),
        ("a,y\n1,1\n2, \n", r"row 3, column 'y': the cell is empty"),
        # Numbers as people write them are no words.
        (
            "a;y\n0,125;1\n",
            r"row 2, column 'a': '0,125' is not a finite number. Numbers have a decimal point, nothing between",
        ),
        ("a;y\n1.234,5;1\n", r"'1.234,5' is not a finite number. Numbers have a decimal point"),
        ('a,y\n"65,295",1\n', r"'65,295' is not a finite number. Numbers have a decimal point"),
        (
            "a,y\n€6.53,1\n",
            r"'€6.53' is not a finite number. Numbers have a decimal point, .* and no unit: write them like 1234.5",
        ),
        ("a,y\n6.5%,1\n", r"'6.5%' is not a finite number. Numbers have a decimal point"),
        ("a,y\n2024-01-31,1\n", r"'2024-01-31' is not a finite number. Inputs are numbers: .* words and dates"),
        (
            "a;y\n" + "".join(f"{i};{i},5\n" for i in range(30)),
            r"row 2, column 'y': '0,5' is not a finite number. Numbers have",
        ),
        (
            "a,y\n" + "".join(f"{i},w{i}\n" for i in range(30)),
            r"column 'y': 30 different words in 30 rows, such as 'w0', are hardly",
        ),
        # Spreadsheets leave empty columns at the right, and a first line that is no header.
        ("a,y,\n1,2,\n", "row 2, column 3, which has no name: the cell is empty"),
        ("# exported\na,b,y\n", "row 2: 3 cells, but the first line has one, '# exported'"),
        ("a b y\n1 2 3\n", "has no column 'y'; it has only one, 'a b y': cells are separated by commas, semicolons"),
        ('a,y\n"one\ntwo",1\n', r"row 2, column 'a': 'one.ntwo' is not"),
    ],
)
def test_csv_mistakes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_csv(write(tmp_path, text), target="y")


def test_csv_classes_may_hold_digits(tmp_path: Path) -> None:
    rows = "".join(f"{i / 7},{'<50' if i % 2 else '>50'}\n" for i in range(40))
    assert read_csv(write(tmp_path, "a,y\n" + rows), target="y").classes == ("<50", ">50")
    words = "".join(f"{i},w{i % 30}\n" for i in range(60))  # as many as there can be, with two examples each
    assert len(read_csv(write(tmp_path, "a,y\n" + words), target="y").classes or ()) == 30


@pytest.mark.parametrize("start, step", [(10**12, 1), (2**24 * 1000, 3), (1e30, 1e20), (0.0, 1e-50)])
def test_csv_refuses_numbers_whose_differences_32_bits_lose(tmp_path: Path, start: float, step: float) -> None:
    file = write(tmp_path, "id,a,y\n" + "".join(f"{start + step * i!r},{i / 3},{i % 2}\n" for i in range(30)))
    with pytest.raises(
        DataError, match=r"column 'id': its numbers, from .* to .*, would change by up to .* in 32 bits"
    ):
        read_csv(file, target="y")
    assert read_csv(file, target="y", drop=["id"]).columns == ("a",)
    # What later data are read with was judged when the network was made.
    assert read_csv(file, target="y", columns=["id", "a"]).columns == ("id", "a")


def test_csv_keeps_numbers_that_32_bits_tell_apart(tmp_path: Path) -> None:
    columns = {
        "seconds": [1_700_000_000 + 86_400 * i for i in range(30)],
        "constant": [10**12 + 1] * 30,
        "third": [i / 3 for i in range(30)],
        "wide": [(-1.0) ** i * 10.0**i for i in range(30)],
    }
    text = ",".join([*columns, "y"]) + "\n"
    text += "".join(
        ",".join(map(repr, row)) + f",{i % 2}\n" for i, row in enumerate(zip(*columns.values(), strict=True))
    )
    found = read_csv(write(tmp_path, text), target="y")
    exact = torch.tensor(list(columns.values()), dtype=torch.float64).T
    torch.testing.assert_close(found.inputs, exact.float(), rtol=0, atol=0)


def test_csv_tells_what_may_number_the_rows(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(30)
    rows = [(5 * i, 100 + order[i], 31 - i, i % 7, i / 2, 3, i % 2) for i in range(30)]
    text = "rising,shuffled,falling,repeats,halves,one,y\n" + "".join(",".join(map(str, r)) + "\n" for r in rows)
    assert read_csv(write(tmp_path, text), target="y").counting == ("rising", "shuffled", "falling")
    few = write(tmp_path, "\n".join(text.split("\n")[:11]) + "\n")
    assert read_csv(few, target="y").counting == ()


def test_csv_columns_by_number(tmp_path: Path) -> None:
    file = write(tmp_path, ",a,y\n0,5,0\n1,6,1\n")  # as a table with an unnamed index is written
    assert read_csv(file, target="-1", drop=["1"]).columns == ("a",)
    assert read_csv(file, target="y", drop=["-2"]).columns == ("",)


def test_csv_delimiter_outside_quotes(tmp_path: Path) -> None:
    file = write(tmp_path, '"length, cm";"width, cm";y\n1;2;0\n')
    assert read_csv(file, target="y").columns == ("length, cm", "width, cm")


def test_csv_more_mistakes(tmp_path: Path) -> None:
    file = write(tmp_path, "a,kind\n1,rose\n2,tulip\n")
    with pytest.raises(DataError, match="which column holds the targets.*there are a, kind"):
        read_csv(file)
    with pytest.raises(DataError, match=r"row 3, column 'kind': the class 'tulip' is not one of iris, rose"):
        read_csv(file, target="kind", classes=["iris", "rose"])
    with pytest.raises(DataError, match="lacks the column b"):
        read_csv(file, target="kind", columns=["a", "b"])
    (tmp_path / "latin.csv").write_bytes("größe,y\n1,2\n".encode("latin-1"))
    with pytest.raises(
        DataError, match="not text in UTF-8 .*; save it in this encoding, which spreadsheets call CSV UTF-8"
    ):
        csv_rows(tmp_path / "latin.csv")


# Images


def test_image_folder(tmp_path: Path) -> None:
    for name, value in (("cat", 255), ("ant", 51)):
        (tmp_path / "grey" / name).mkdir(parents=True)
        Image.new("L", (4, 3), value).save(tmp_path / "grey" / name / "one.png")
    found = read_image_folder(tmp_path / "grey")
    assert found.classes == ("ant", "cat")
    assert found.inputs.shape == (2, 1, 3, 4)
    torch.testing.assert_close(found.inputs[:, 0, 0, 0], torch.tensor([0.2, 1.0]))
    assert found.targets is not None
    assert found.targets.tolist() == [0, 1]
    colours = read_image_folder(tmp_path / "grey", channels=3, size=(6, 8), classes=["cat", "ant"])
    assert colours.inputs.shape == (2, 3, 6, 8)
    assert float(colours.inputs[0].mean()) == 1.0
    assert read_image_folder(tmp_path / "grey" / "cat", need_targets=False).targets is None


@pytest.mark.parametrize("size", [None, (2, 2)])
def test_grey_images_of_16_bits(tmp_path: Path, size: tuple[int, int] | None) -> None:
    (tmp_path / "scan").mkdir()
    for name, value in (("a.png", 0x4000), ("b.tif", 0xFFFF), ("c.pgm", 0x8000)):
        Image.fromarray(np.full((3, 4), value, np.uint16)).save(tmp_path / "scan" / name)
    found = read_image_folder(tmp_path, size=size)
    assert found.inputs.shape[1] == 1
    assert [round(255 * float(v)) for v in found.inputs.amax((1, 2, 3))] == [0x40, 0xFF, 0x80]


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_images_without_a_known_scale(tmp_path: Path, kind: type[np.generic]) -> None:
    (tmp_path / "depth").mkdir()
    Image.fromarray(np.ones((3, 4), kind)).save(tmp_path / "depth" / "a.tif")
    with pytest.raises(DataError, match="a.tif has pixels of 32 bits, of which it is not known what is white"):
        read_image_folder(tmp_path)


def test_image_folder_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        read_image_folder(tmp_path / "none")
    with pytest.raises(DataError, match="holds no images"):
        read_image_folder(tmp_path)
    Image.new("L", (4, 3)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="no subfolder per class"):
        read_image_folder(tmp_path)
    Image.new("L", (5, 3)).save(tmp_path / "b.png")
    with pytest.raises(DataError, match=r"b.png is 3×5 pixels, but .*a.png is 3×4"):
        read_image_folder(tmp_path, need_targets=False)
    (tmp_path / "c.png").write_text("no image")
    with pytest.raises(DataError, match="c.png cannot be read as an image"):
        read_image_folder(tmp_path, need_targets=False)
    (tmp_path / "dog").mkdir()
    Image.new("L", (4, 3)).save(tmp_path / "dog" / "d.png")
    with pytest.raises(DataError, match="subfolder 'dog', which is not one of the classes cat"):
        read_image_folder(tmp_path, classes=["cat"])


# What needs no files


def test_builtin_sets() -> None:
    assert builtin("iris").columns is not None
    assert builtin("breast-cancer").classes == ("malignant", "benign")
    assert not builtin("diabetes").is_classes
    with pytest.raises(InputError, match="no built-in data set 'cats'; there are digits"):
        builtin("cats")
    patches = photograph_patches(20, 8)
    assert float(patches.inputs.min()) == 0.0
    assert float(patches.inputs.max()) == pytest.approx(1.0)
    assert torch.equal(patches.inputs, photograph_patches(20, 8).inputs)


def test_toys() -> None:
    cubic = toy("cubic", 400)
    residual = cubic.targets - cubic.inputs**3
    assert float(residual.std()) == pytest.approx(3.0, rel=0.15)
    gap = toy("gap", 300).inputs
    assert not bool(((gap > -0.75) & (gap < 0.75)).any())
    assert torch.equal(toy("moons").inputs, toy("moons").inputs)
    with pytest.raises(InputError, match="no toy problem 'spirals'"):
        toy("spirals")
    with pytest.raises(InputError, match="at least 1"):
        toy("moons", 0)


def test_parts_never_overlap() -> None:
    data = Examples(torch.arange(103.0)[:, None], None, "numbers")
    parts = split(data, validation=0.2, test=0.3)
    seen = torch.cat([p.inputs for p in parts.values()]).flatten().sort().values
    assert torch.equal(seen, torch.arange(103.0))
    for name in parts:
        assert torch.equal(part_of(data, name, validation=0.2, test=0.3).inputs, parts[name].inputs)
    assert part_of(data, "all") is data
    with pytest.raises(InputError, match="part='dev' is not known"):
        part_of(data, "dev")
    with pytest.raises(InputError, match="together below 1"):
        split(data, validation=0.5, test=0.5)
    with pytest.raises(DataError, match="too few to be split"):
        split(data.take(slice(0, 2)), validation=0.1, test=0.1)


def test_examples_must_agree() -> None:
    with pytest.raises(DataError, match="holds no example"):
        Examples(torch.zeros(0, 2), None, "nothing")
    assert [len(x) for x, _ in Examples(torch.zeros(5, 2), None, "five").batches(2)] == [2, 2, 1]


# What a damaged file says about its size is judged before memory is taken.


def archive(file: Path, header: str, content: bytes = bytes(48), compression: int = zipfile.ZIP_STORED) -> Path:
    """An .npz file whose x has a header of its own."""
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n"
    stream = io.BytesIO()
    np.save(stream, np.zeros(2))
    with zipfile.ZipFile(file, "w", compression) as made:
        made.writestr("x.npy", start + content)
        made.writestr("y.npy", stream.getvalue())
    return file


@pytest.mark.parametrize(
    "header, message",
    [
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3)}", None),
        (
            "{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776, 3)}",
            "shape .1099511627776, 3., but what is in",
        ),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -3)}", "has a negative number"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (6,)}", "Python objects, which could run code"),
        ("{'descr': '<c16', 'fortran_order': False, 'shape': (3,)}", "complex128, which are not numbers"),
        ("__import__('os').abort()", "cannot be read as an .npz file: ValueError"),
    ],
)
def test_npz_headers(tmp_path: Path, header: str, message: str | None) -> None:
    file = archive(tmp_path / "data.npz", header)
    if message is None:
        assert read_npz(file).inputs.shape == (2, 3)
        return
    with pytest.raises(DataError, match=message) as found:
        read_npz(file)
    assert str(file) in str(found.value)


def test_npz_that_claims_more_than_it_can_hold(tmp_path: Path) -> None:
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3)}"
    file = archive(tmp_path / "data.npz", header, compression=zipfile.ZIP_DEFLATED)
    whole = file.read_bytes()
    for place in range(len(whole) - 200, len(whole)):  # the directory at the end, with sizes and checksums
        data = bytearray(whole)
        data[place] ^= 0x41
        file.write_bytes(bytes(data))
        with contextlib.suppress(DataError):  # Any other error fails.
            assert read_npz(file).inputs.shape == (2, 3)


def test_numbers_that_do_not_fit(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.full((2, 3), 1e300), y=np.zeros(2))
    with pytest.raises(DataError, match=r"a.npz: x holds 1e\+300, a number too large for float32; scale the numbers"):
        read_npz(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 3)), y=np.full(2, 2**64 - 1, np.uint64))
    with pytest.raises(DataError, match=r"b.npz: y holds 1.84467e\+19, a number too large for int64"):
        read_npz(tmp_path / "b.npz")
    for text in ("a,y\n1e300,0\n", "a,y\n1,1e300\n", "a,y\n1,-9" + "0" * 40 + "\n"):
        with pytest.raises(DataError, match="row 2, column '[ay]': '.*' is too large for a number of 32 bits"):
            read_csv(write(tmp_path, text), target="y")
    large = read_csv(write(tmp_path, "a,y\n1,123456789012345678\n"), target="y")
    assert large.targets is not None
    assert large.targets.is_floating_point()  # no class has such an index, and float64 does not hold it


def test_cells_that_csv_refuses(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"table.csv, row \d: it is not a table of cells: field larger than field limit"
    ):
        read_csv(write(tmp_path, 'a,y\n"' + "1" * 200_000 + '",0\n'), target="y")
    # Without quotes the line is read by NumPy, and the cell is named.
    with pytest.raises(DataError, match=r"row 2, column 'a': '1+' is not a finite number"):
        read_csv(write(tmp_path, "a,y\n" + "1" * 200_000 + ",0\n"), target="y")


def test_inputs_without_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 0)), y=np.zeros(3))
    with pytest.raises(DataError, match=r"a holds inputs of shape \[3, 0\]: there is no number in them"):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["giant.csv", "giant.npz", "giant-idx"])
def test_a_giant_file(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as stream:
        stream.truncate(1 << 42)  # It is sparse: nothing is written.
    readers = {"giant.csv": read_csv, "giant.npz": read_npz, "giant-idx": read_idx}
    with pytest.raises(DataError, match=f"{name} needs 4,398,046,511,104 bytes, more than the"):
        readers[name](tmp_path / name)


def test_an_image_with_far_more_pixels_than_bytes(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    for side, word in ((13_000, "DecompressionBombWarning"), (20_000, "DecompressionBombError")):
        header = f"P5 {side} {side} 255\n"  # a .pgm file without its pixels
        (tmp_path / "cat" / "a.pgm").write_text(header)
        with pytest.raises(DataError, match=f"a.pgm cannot be read as an image: {word}"):
            read_image_folder(tmp_path)


def test_pixels_in_bytes_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("aftermap.data.readers.announce", said.append)
    for dtype in (np.uint8, np.float32):
        np.savez(tmp_path / "images.npz", x=np.ones((3, 4, 4), dtype=dtype), y=np.arange(3))
        read_npz(tmp_path / "images.npz")
    assert len(said) == 1
    assert "images.npz holds bytes, which are taken as pixels and divided by 255" in said[0]
