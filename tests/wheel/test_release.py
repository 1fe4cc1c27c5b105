"""What goes with a release: hashes that fit, and a bill of materials that lists all that the wheel needs."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import aftermap
from tests.lowest import ranges
from tests.release import BILL, SUMS, main
from tests.wheel.installed import Installed


def test_the_bill_lists_everything_and_the_sums_fit(installed: Installed, tmp_path: Path) -> None:
    shutil.copy(installed.wheel, tmp_path)
    (tmp_path / f"aftermap-{aftermap.__version__}.tar.gz").write_bytes(b"a source distribution")
    main(tmp_path)
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / SUMS).read_text().splitlines())
    assert set(sums) == {p.name for p in tmp_path.iterdir()} - {SUMS}
    assert all(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest for name, digest in sums.items())

    bill = json.loads((tmp_path / BILL).read_text())
    parts = {entry["name"]: entry for entry in bill["components"]}
    required = {name for name, entry in parts.items() if entry["scope"] == "required"}
    assert set(ranges()) <= set(parts)
    assert {"torch", "numpy", "tqdm", "safetensors"} <= required
    assert not required & {"typer", "matplotlib", "transformers", "pytest"}
    assert "pytest" not in parts
    root = bill["metadata"]["component"]
    assert (root["name"], root["version"]) == ("aftermap", aftermap.__version__)
    hashes = {ref["url"]: ref["hashes"][0]["content"] for ref in root["externalReferences"]}
    assert hashes == {name: digest for name, digest in sums.items() if name != BILL}
    known = {root["bom-ref"], *(entry["bom-ref"] for entry in parts.values())}
    assert {row["ref"] for row in bill["dependencies"]} == known
    assert {below for row in bill["dependencies"] for below in row["dependsOn"]} <= known

    first = (tmp_path / BILL).read_bytes()
    main(tmp_path)
    assert (tmp_path / BILL).read_bytes() == first
