"""Jobs that break NCCL's rules fail, also where gloo runs them to their end."""

from __future__ import annotations

import pytest

from tests.dist.spawn import checked_job, run_job

pytestmark = pytest.mark.dist

WORKER = "tests.dist.ranks.nccl_worker"
# tests/rehearsal/test_rules_on_notes.py has the rules themselves, on notes made by hand.
WEEKLY_CASES = {"receive_more", "use_groups_in_opposite_orders", "split_batches"}
# What a job does -> what is said of it.
BROKEN = {
    "swap_collectives": ("collective 1 differs: rank 0: all_reduce float32[3] SUM", WORKER),
    "receive_more": ("number 1 differs: rank 0: send float32[4] rank 1", "float32[8]"),
    "use_groups_in_opposite_orders": ("collectives in different orders", WORKER),
    "split_batches": ("a deadlock, in", "PIPELINE_MODEL_PARALLEL_GROUP", WORKER),
    "share_a_channel": ("a deadlock, in", "megapack stages", "megapack/schedule/channels.py:"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_fails_the_job(name: str) -> None:
    done = run_job(2, WORKER, [name], timeout_s=100)
    assert done.returncode == 1
    for text in BROKEN[name]:
        assert text.replace(WORKER, "tests/dist/ranks/nccl_worker.py:") in done.stdout
    assert "Traceback" not in done.stdout


def test_gloo_runs_it_to_its_end() -> None:
    checked_job(2, WORKER, ["share_a_channel"], timeout_s=100, nccl_rules=False)


@pytest.mark.weekly
def test_groups_of_the_cpu_keep_no_rule() -> None:
    checked_job(2, WORKER, ["use_cpu_groups_in_opposite_orders"], timeout_s=100)


def test_a_failed_job_says_its_own_error_and_the_first_difference() -> None:
    output = run_job(2, WORKER, ["fail_after_a_difference"], timeout_s=100).stdout
    assert output.index("a fault of the job's own") < output.index("collective 1 differs")
