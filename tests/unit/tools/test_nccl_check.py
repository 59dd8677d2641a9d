"""The check of several ranks: how its jobs end, and what it says of their figures."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.nccl.exact import judged
from tools.nccl.found import FAILED, PASSED
from tools.nccl.launch import Ended, run_ranks
from tools.nccl.layouts import busy_layout, layout_name
from tools.nccl.problem import FEATURES, REFERENCES, cases
from tools.nccl.report import ON_ONE, markdown
from tools.nccl.ways import HOST_ID, MULTI_RANK, OWN_GPUS, ways
from tools.nccl_check import default_ranks
from tools.pages.measured import Head

pytestmark = pytest.mark.unit

HEAD = "import faulthandler, os, signal, sys, time\nfaulthandler.register(signal.SIGUSR2)\n"
FP32 = {"loss": 1.0, "expected_loss": 1.0, "logprob_mean_error": 1e-6, "gradient_error": 1e-6}
BF16 = {
    **FP32,
    "logprob_mean_error": 5e-3,
    "one_sample_logprob_mean_error": 4e-3,
    "gradient_error": 0.07,
    "one_sample_gradient_error": 0.06,
}


def job(
    folder: Path, code: str, *, limit_s: float = 20, stall_s: float = 20, grace_s: float = 0.2
) -> Ended:
    """A job of three ranks that run some code."""
    return run_ranks(
        ["-c", HEAD + code],
        world=3,
        environment=lambda rank: {"NUMBER": str(rank)},
        folder=folder,
        limit_s=limit_s,
        stall_s=stall_s,
        grace_s=grace_s,
    )


def test_after_a_fault_the_others_are_ended_and_the_error_is_named(tmp_path: Path) -> None:
    code = "if os.environ['RANK'] == '1': raise ValueError('no such row')\ntime.sleep(60)"
    ended = job(tmp_path, code, grace_s=3)
    assert (ended.codes, ended.killed) == ((-9, 1, -9), (0, 2))
    assert "rank 1: ValueError: no such row" in ended.reason
    assert ended.seconds < 15


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    # The others are given the time to end: on a busy machine they may only be starting.
    code = "if os.environ['RANK'] == '2': os.kill(os.getpid(), 11)"
    ended = job(tmp_path, code, grace_s=20)
    assert ended.codes == (0, 0, -11)
    assert "rank 2 was ended by SIGSEGV" in ended.reason


def test_a_job_without_progress_says_where_its_ranks_stood(tmp_path: Path) -> None:
    code = (
        "text = 'def wait():\\n    time.sleep(60)\\nwait()'\n"
        "exec(compile(text, os.path.join(os.getcwd(), 'tools', 'worker.py'), 'exec'))"
    )
    ended = job(tmp_path, code, stall_s=2)
    assert ended.killed == (0, 1, 2)
    assert ended.reason == "no progress for 2 s; ranks [0, 1, 2] stood in wait (tools/worker.py:2)"


def test_a_job_ends_at_its_limit(tmp_path: Path) -> None:
    ended = job(tmp_path, "time.sleep(60)", limit_s=0.5)
    assert ended.reason.startswith("ran past 0 s")
    assert ended.killed == (0, 1, 2)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, PASSED),
        ({"gradient_error": 2e-5}, FAILED),
        ({"gradient_error": math.nan}, FAILED),
        ({"loss": 1.1}, FAILED),
        ({"logprob_mean_error": 1e-4}, FAILED),
        ({"updated_logprob_error": 1e-2}, FAILED),
    ],
)
def test_fp32_has_fixed_limits(changes: dict[str, Any], status: str) -> None:
    found = judged(FP32 | changes)
    assert found["status"] == status
    assert all(name in found["line"] for name in changes if name != "loss" and status == FAILED)


def test_bf16_may_have_twice_the_error_of_one_sample_at_a_time() -> None:
    assert judged(BF16)["status"] == PASSED
    assert judged({**BF16, "gradient_error": 0.13})["status"] == FAILED
    assert judged({**BF16, "one_sample_gradient_error": math.nan})["status"] == FAILED


def test_a_case_must_be_about_its_feature() -> None:
    assert judged({**FP32, "pieces": 3}, "pieces")["status"] == PASSED
    assert "pieces 0" in judged({**FP32, "pieces": 0}, "pieces")["line"]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_cases_fill_the_ranks_and_have_references(ranks: int) -> None:
    found = list(cases(ranks))
    assert len({case.name for case in found}) == len(found) > 15
    assert {case.feature for case in found} == FEATURES.keys()
    for case in found:
        assert case.layout.world_size == ranks
        assert (case.samples, case.dtype) in REFERENCES
        assert case.settings.num_layers % (case.layout.pp * case.layout.vpp) == 0
    assert layout_name(busy_layout(ranks)) == f"dp{ranks // 2}_pp2_vpp2"


def test_ranks_share_a_gpu_only_where_they_must() -> None:
    assert ways(2, 2) == ways(2, 4) == (OWN_GPUS,)
    assert ways(4, 1) == ways(4, 2) == (MULTI_RANK, HOST_ID)
    ids = {HOST_ID.environment(rank)["NCCL_HOSTID"] for rank in range(4)}
    assert len(ids) == 4
    assert "NCCL_HOSTID" not in MULTI_RANK.environment(0)
    assert "NCCL_MAX_CTAS" not in OWN_GPUS.environment(0)
    assert [default_ranks(gpus) for gpus in (1, 2, 3, 4, 7, 8, 16)] == [4, 2, 2, 4, 4, 8, 8]


def test_jobs_on_a_gpu_need_no_packages_of_the_tests() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('pytest', 'hypothesis', 'wrapt')))\n"
        "import tools.nccl_check, tests.dist.ranks.rank_fault_worker\n"
        "import tests.gpu.run, tests.gpu.worker, tests.gpu.pipeline_worker, tests.gpu.features\n"
        "from tools.nccl.on_ranks import exact, overlap, p2p, race, start, steps, widths\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_report_is_a_file_of_measured_tables(tmp_path: Path) -> None:
    part = {
        "name": "probe",
        "shows": "a way",
        "status": PASSED,
        "line": "one | two",
        "seconds": 1.5,
    }
    report = {"command": "check", "date": "2026-01-02", "commit": "1234567", "rehearsed": False}
    report |= {
        "packages": {"torch": "2"},
        "ranks": 4,
        "num_gpus": 1,
        "device": "gpu",
        "way": "host",
    }
    path = tmp_path / "ranks_1.md"
    path.write_text(markdown(report | {"parts": [part | {"failures": [], "cases": {}}]}))
    head = Head.read(path)
    assert (head.title, head.commit) == ("Check of 4 ranks on 1 x gpu", "1234567")
    assert head.what.endswith(ON_ONE)
    assert "| probe | a way | passed | one / two | 1.5 |" in path.read_text()
