"""What somebody does who writes a hostile folder: everything is changed, and then the checksums are made to fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aftermap.posteriors.files import CHECKSUM, file_record, sealed

__all__ = ["edit", "reseal"]


def reseal(folder: Path) -> None:
    """Makes the checksums of a folder those of what it holds now."""
    edit(folder, lambda config: None)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], *, seal: bool = True) -> None:
    """Changes config.json, and makes the checksums fit unless told otherwise."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if seal and isinstance(config.get("files"), dict):
        for name in config["files"]:
            if isinstance(config["files"][name], dict) and (folder / name).is_file():
                config["files"][name].update(file_record(folder / name))
    change(config)
    if seal and CHECKSUM in config:
        config = sealed({k: v for k, v in config.items() if k != CHECKSUM})
    file.write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
