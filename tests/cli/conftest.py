"""Files are made once, and one posterior is fitted once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.common import Files, invoke, make_files


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="session")
def fitted(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fitted") / "posterior"
    invoke(*files.fit(place))
    return place


@pytest.fixture
def posterior(fitted: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(fitted, tmp_path / "posterior"))
