"""A stub framework for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.stub import Host


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """The package `stubhost`; its patches and modules are removed afterwards."""
    stub = Host(tmp_path, monkeypatch)
    yield stub
    stub.remove()
