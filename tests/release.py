"""What goes with a release: a bill of materials (CycloneDX) and the hashes of its files. `make release`, or `python -m tests.release dist`.

The bill lists what the wheel needs, with every extra that users install, in the versions of the running environment, which are those that the
tests were run with. The same files and the same environment give the same bill.
"""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
import zipfile
from collections import deque
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["BILL", "SUMS", "bill_of", "main"]

BILL, SUMS = "bill_of_materials.cdx.json", "SHA256SUMS"
_EXTRA = "all"


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _needed(described: Message, extras: frozenset[str]) -> list[Requirement]:
    """The requirements of a distribution that hold on this machine, with some of its extras."""
    asked = [Requirement(text) for text in described.get_all("Requires-Dist", [])]
    return [r for r in asked if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in (extras or {""}))]


def _reached(
    described: Message, extras: frozenset[str]
) -> tuple[dict[str, metadata.Distribution], dict[str, set[str]]]:
    """Everything that a distribution needs, directly or not, by name; and who needs what."""
    own = str(canonicalize_name(described["Name"]))
    found: dict[str, metadata.Distribution] = {}
    edges: dict[str, set[str]] = {own: set()}
    waiting = deque([(own, described, extras)])
    seen = {(own, extras)}
    while waiting:
        name, owner, wanted = waiting.popleft()
        for requirement in _needed(owner, wanted):
            below, more = str(canonicalize_name(requirement.name)), frozenset(requirement.extras)
            if below == own:  # An extra that is made of others.
                inner: tuple[str, Message, frozenset[str]] = (own, described, more)
            else:
                edges[name].add(below)
                try:
                    found[below] = metadata.distribution(below)
                except metadata.PackageNotFoundError:
                    raise SystemExit(f"{below} is not installed, which {name} needs: run `make setup` first") from None
                edges.setdefault(below, set())
                inner = (below, _message(found[below]), more)
            if (inner[0], more) not in seen:
                seen.add((inner[0], more))
                waiting.append(inner)
    return found, edges


def _message(distribution: metadata.Distribution) -> Message:
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
    if text is None:
        raise SystemExit(f"{distribution.name} is installed without a description of itself")
    return Parser().parsestr(text)


def _component(described: Message, kind: str) -> dict[str, Any]:
    name, version = str(canonicalize_name(described["Name"])), described["Version"]
    address = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    made: dict[str, Any] = {"type": kind, "bom-ref": address, "name": name, "version": version, "purl": address}
    if expression := described["License-Expression"]:
        made["licenses"] = [{"expression": expression}]
    else:
        classes = [c for c in described.get_all("Classifier", []) if c.startswith("License ::")]
        words = [c.rsplit(" :: ", 1)[-1] for c in classes] or [(described["License"] or "").strip().split("\n")[0]]
        made["licenses"] = [{"license": {"name": word}} for word in words if word]
    return made


def bill_of(wheel: Path, files: list[Path]) -> dict[str, Any]:
    """The bill of materials of a wheel, with the hashes of the files of the release, as CycloneDX 1.6."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        described = Parser().parsestr(archive.read(name).decode("utf-8"))
    found, edges = _reached(described, frozenset({_EXTRA}))
    required, _ = _reached(described, frozenset())
    root = _component(described, "library")
    root["externalReferences"] = [
        {"type": "distribution", "url": f.name, "hashes": [{"alg": "SHA-256", "content": _sha256(f)}]} for f in files
    ]
    parts = {n: _component(_message(d), "library") for n, d in sorted(found.items())}
    for part, entry in parts.items():
        entry["scope"] = "required" if part in required else "optional"
    address = {
        str(canonicalize_name(described["Name"])): root["bom-ref"],
        **{n: e["bom-ref"] for n, e in parts.items()},
    }
    graph = [{"ref": address[n], "dependsOn": sorted(address[b] for b in below)} for n, below in sorted(edges.items())]
    made = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": list(parts.values()),
        "dependencies": graph,
    }
    made["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(made, sort_keys=True)).urn
    return made


def main(folder: Path) -> None:
    """Writes the bill and the hashes beside the wheel and the source distribution of a folder."""
    wheels, sources = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        raise SystemExit(f"{folder} must hold one wheel and one source distribution, got {[*wheels, *sources]}")
    files = [*wheels, *sources]
    bill = folder / BILL
    bill.write_text(json.dumps(bill_of(wheels[0], files), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sums = "".join(f"{_sha256(file)}  {file.name}\n" for file in [*files, bill])
    (folder / SUMS).write_text(sums, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
