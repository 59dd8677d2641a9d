"""`tools/gpu_check.sh --ranks` on a CPU, with an NCCL that refuses, dies or hangs.

One is a sample of a minute; the others take half an hour.
`REHEARSE=1 tools/gpu_check.sh --ranks` is the check itself, without a fault.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.marks import needs_te
from tools.nccl.found import FAILED, NOT_RUN, PASSED
from tools.nccl.on_ranks.faked import REFUSAL
from tools.nccl.parts import NAMES
from tools.nccl.ways import HOST_ID, MULTI_RANK

pytestmark = needs_te


def check(root: Path, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a check of two ranks, and its report."""
    done = subprocess.run(
        [root / "tools" / "gpu_check.sh", "--ranks", "2", *arguments],
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            **{"REHEARSE": "1", "PYTHON": sys.executable, "OUT": str(out)},
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (out / "ranks_report.json").exists(), (done.stdout + done.stderr)[-6000:]
    report: dict[str, Any] = json.loads((out / "ranks_report.json").read_text())
    assert report["rehearsed"]
    return done.returncode, report


@pytest.mark.rehearsal
def test_an_nccl_that_refuses_every_way_is_quoted_and_ends_the_check(
    repo_root: Path, tmp_path: Path
) -> None:
    arguments = ("--parts", "communicators", "--fault", "refuse:probe")
    code, report = check(repo_root, tmp_path, *arguments)
    probe, other = report["parts"]
    assert (code, probe["status"], other["status"]) == (1, FAILED, NOT_RUN)
    assert [text.partition(":")[0] for text in probe["failures"]] == [MULTI_RANK.name, HOST_ID.name]
    assert all(REFUSAL in text for text in probe["failures"])
    assert report["way"] == ""


@pytest.mark.slow
def test_the_death_of_a_rank_fails_its_part_and_leaves_the_logs(
    repo_root: Path, tmp_path: Path
) -> None:
    arguments = ("--parts", "communicators", "order", "--fault", "die:communicators")
    code, report = check(repo_root, tmp_path, *arguments)
    probe, part, order = report["parts"]
    assert code == 1
    assert [one["status"] for one in (probe, part, order)] == [PASSED, FAILED, PASSED]
    assert "rank 1 was ended by SIGKILL" in part["line"]
    assert (tmp_path / "ranks" / "communicators" / "job" / "rank1.log").exists()
    assert not (tmp_path / "ranks" / "probe").exists()
    text = (tmp_path / "ranks_report.md").read_text()
    assert "- communicators: " in text


# What a report says of each fault.
SAYS = {
    "refuse": re.escape(REFUSAL),
    "die": r"rank 1 was ended by SIGKILL",
    "hang": r"no progress for \d+ s|ran past \d+ s|rank 1 stood|ranks \[.*1.*\] stood in _strike",
}


@pytest.mark.rehearsal
@pytest.mark.parametrize("kind", SAYS)
@pytest.mark.parametrize("part", [name for name in NAMES if name not in ("probe", "order")])
def test_a_fault_in_a_part_is_said_and_the_next_part_runs(
    part: str, kind: str, repo_root: Path, tmp_path: Path
) -> None:
    arguments = ("--parts", part, "order", "--stall-s", "60", "--fault", f"{kind}:{part}")
    code, report = check(repo_root, tmp_path, *arguments)
    _, found, order = report["parts"]
    print(f"{part}, {kind}: {found['line']}")
    assert code == 1
    assert found["status"] == FAILED
    assert any(re.search(SAYS[kind], text) for text in found["failures"]), found["failures"]
    assert order["status"] == PASSED


@pytest.mark.rehearsal
def test_every_case_of_two_ranks_is_exact(repo_root: Path, tmp_path: Path) -> None:
    code, report = check(repo_root, tmp_path, "--parts", "exact", "resume", "order")
    assert code == 0, (tmp_path / "ranks_report.md").read_text()
    assert all(case["status"] == PASSED for case in report["parts"][1]["cases"].values())
