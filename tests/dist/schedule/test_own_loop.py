"""In a user's own loop around the adapter, too, one rank's error becomes every rank's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.schedule.own_loop_worker import LAYOUT, ODD_RANK
from tests.dist.spawn import run_job

pytestmark = pytest.mark.dist

LIMIT_S = 20.0


def run(fails: str, folder: Path) -> list[list[dict[str, Any]]]:
    """The outcome of each step, for each rank that did not end early."""
    world = LAYOUT.dp * LAYOUT.pp
    run_job(
        world,
        "tests.dist.schedule.own_loop_worker",
        [str(folder), fails],
        timeout_s=150,
        grace_s=LIMIT_S,
    )
    paths = [folder / f"rank{rank}.json" for rank in range(world)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("error", "ValueError: the user's own loss failed"),
        pytest.param("exit", "SystemExit: 0", marks=pytest.mark.weekly),
    ],
)
def test_an_error_within_a_step(fails: str, message: str, tmp_path: Path) -> None:
    ranks = run(fails, tmp_path)
    assert len(ranks) == 4
    for first, second, after in ranks:
        assert first["error"] == ""
        assert second["error"].startswith(f"RankError: rank {ODD_RANK} failed in step 0 of plan ")
        assert second["error"].endswith(message)
        assert "own_loop_worker.py" in second["notes"]
        assert second["seconds"] < LIMIT_S
        # A loop that catches the error and goes on gets the same error again, without waiting.
        assert after["error"] == second["error"]
        assert after["seconds"] < 1
    assert len({rank[1]["error"] for rank in ranks}) == 1


def test_an_error_between_steps(tmp_path: Path) -> None:
    """The rank ends, and its exit hook reports the error to the others."""
    ranks = run("between", tmp_path)
    assert len(ranks) == 3
    for _, second, after in ranks:
        message = f"RankError: rank {ODD_RANK} ended with ValueError: the user's own loop failed"
        assert second["error"] == after["error"] == message
        assert "own_loop_worker.py" in second["notes"]
        assert second["seconds"] < LIMIT_S
