"""The wheel is built and installed once."""

from __future__ import annotations

import pytest

from tests.wheel.installed import Installed, install


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(tmp_path_factory.mktemp("wheel"))
