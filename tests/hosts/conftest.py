"""A stub framework for each test, and stand-ins of hosts' own functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megapack.hosts import (
    areal,
    megatron_core,
    miles,
    nemo_rl,
    patching,
    roll,
    skyrl,
    slime,
    verl,
    xtuner,
)
from tests.hosts.partitions import evenly, within
from tests.hosts.stub import Host


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """The package `stubhost`; its patches and modules are removed afterwards."""
    stub = Host(tmp_path, monkeypatch)
    yield stub
    stub.remove()


@pytest.fixture(autouse=True)
def _default_options() -> Iterator[None]:
    """What a test configures is not the next one's."""
    yield
    for module in (
        *(areal, megatron_core, miles),
        *(nemo_rl, skyrl, slime, verl, xtuner),
    ):
        module.configure()


@pytest.fixture
def originals(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Dotted name -> what stands in for the host's own function that a patch has replaced."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(patching, "original", lambda name: found[name])
    return found


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the partitions of verl, ROLL and AReaL."""
    for host in (verl, roll):
        monkeypatch.setattr(host, "_partition", evenly)
    monkeypatch.setattr(areal, "_partition", within)
