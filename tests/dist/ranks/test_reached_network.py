"""Commands and a run use no network, and files respect the umask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks.network_worker import COMMANDS
from tests.dist.spawn import checked_job

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the commands."""
    folder = tmp_path_factory.mktemp("network")
    checked_job(1, "tests.dist.ranks.network_worker", [str(folder)], timeout_s=300)
    results: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return results


def test_no_command_reaches_anything(ran: dict[str, Any]) -> None:
    """As root, the commands run without any network but a loopback."""
    assert ran["codes"] == dict.fromkeys(COMMANDS, 0), ran["output"][-4000:]
    assert any("127.0.0.1" in event for event in ran["control"])
    assert ran["reached"] == []


def test_files_have_no_more_rights_than_the_umask_leaves(ran: dict[str, Any]) -> None:
    written = {Path(name).name for name in ran["modes"]}
    assert written >= {"plan.json", "run.html", "metrics.jsonl", "rank0.pt", ".metadata"}
    assert [name for name, mode in ran["modes"].items() if mode & 0o077] == []
