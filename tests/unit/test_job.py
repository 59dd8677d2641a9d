"""A process joins its job once, and leaves nothing behind."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from megapack.job import current_job, join_job, leave_job
from megapack.watchdog import Watchdog
from tests.job_in_process import job_of_one

pytestmark = pytest.mark.unit


def own_threads() -> list[str]:
    """Of a job of one, which has no board."""
    names = ("megapack-agreements", "megapack-watchdog")
    return [thread.name for thread in threading.enumerate() if thread.name in names]


def test_a_job_is_joined_once() -> None:
    assert own_threads() == []
    with job_of_one():
        job = current_job()
        assert current_job() is job
        assert sorted(own_threads()) == ["megapack-agreements", "megapack-watchdog"]
        leave_job()
        leave_job()
    assert own_threads() == []


def test_another_process_group_is_another_job() -> None:
    with job_of_one():
        first = current_job()
    with job_of_one():
        second = current_job()
        assert second is not first
        assert len(own_threads()) == 2
        leave_job()
    assert own_threads() == []


def test_the_job_is_the_one_that_was_joined() -> None:
    with job_of_one():
        watchdog = Watchdog()
        job = join_job(watchdog)
        assert current_job() is job
        assert job.watchdog is watchdog
        leave_job()
    assert own_threads() == []


def test_a_job_that_was_left_before_its_group_ended_can_be_joined_again() -> None:
    with job_of_one():
        first = current_job()
        leave_job()
        second = current_job()
        assert second is not first
        assert second.agreements.start(lambda: 5, dict).result() == 5
        leave_job()
    assert not dist.is_initialized()
