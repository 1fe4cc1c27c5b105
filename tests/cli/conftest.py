"""Files are made once, and one posterior is fitted once; what is remembered of them stays in a folder of the tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.common import Files, invoke, make_files


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the command line remembers the posteriors of its user."""
    place = tmp_path_factory.mktemp("state") / "aftermap"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AFTERMAP_STATE", str(place))
        yield place


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="session")
def fitted(files: Files, state_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fitted") / "posterior"
    invoke(*files.fit(place))
    return place


@pytest.fixture
def posterior(fitted: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(fitted, tmp_path / "posterior"))
