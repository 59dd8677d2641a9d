"""What ranks tell each other through the store; here all of them in one process."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch.distributed as dist

from megapack.board import Board, Failure, Process
from megapack.errors import RankError
from tests.job_in_process import boards, pid_is, sleeper, until

pytestmark = pytest.mark.unit

FAILURE = Failure(text='rank 1 failed: "é"', traceback="a\nb\n", gone=(1, 2))


def test_the_first_failure_wins_on_every_rank() -> None:
    with boards(3) as (first, second, third):
        assert third.failure() is None
        assert second.post(FAILURE) == FAILURE
        assert first.post(Failure(text="later")) == FAILURE
        assert [board.failure() for board in (first, second, third)] == [FAILURE] * 3


def test_a_failure_is_an_error_of_every_rank() -> None:
    error = FAILURE.error()
    assert isinstance(error, RankError)
    assert error.on_all_ranks
    assert (str(error), error.__notes__) == (FAILURE.text, [FAILURE.traceback])
    assert not hasattr(Failure(text="a").error(), "__notes__")


def test_a_rank_that_joined_later_hears_of_it() -> None:
    store = dist.HashStore()
    with boards(1, store) as (first,):
        first.post(FAILURE)
        late = Board(store, 1, 2)
        assert late.failure() == FAILURE
        late.close()


def test_the_next_job_on_a_store_begins_anew() -> None:
    store = dist.HashStore()
    with boards(2, store) as (first, second):
        first.post(FAILURE)
        first.leave()
        with boards(2, store) as (again, other):
            assert again.failure() is None
            assert not other.has_left(0)
            other.post(Failure(text="of the second job"))
            assert second.failure() == FAILURE


def test_beats_are_counted() -> None:
    with boards(2) as (first, second):
        before = first.beats([0, 1, 2])
        second.beat()
        assert first.beats([0, 1, 2]) == [before[0], before[1] + 1, 0]
        assert before[2] == 0


def test_a_rank_leaves_in_good_order() -> None:
    with boards(2) as (first, second):
        assert not first.has_left(1)
        second.leave()
        assert (first.has_left(1), first.has_left(0)) == (True, False)


def test_who_has_heard_is_counted() -> None:
    with boards(2) as (first, second):
        assert first.num_heard() == 0
        assert [second.hear(), first.hear()] == [1, 2]
        assert second.num_heard() == 2


def test_ranks_of_this_host_are_known() -> None:
    with boards(3) as (_, second, _):
        found = second.processes_on_host()
    assert [process.rank for process in found] == [0, 2]
    assert {process.pid for process in found} == {os.getpid()}


def test_a_container_with_process_ids_of_its_own_is_another_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two that share the host's name, as with Docker's --network=host."""
    store = dist.HashStore()
    here = Board(store, 0, 3)
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
    there, beside = Board(store, 1, 3), Board(store, 2, 3)
    assert here.processes_on_host() == []
    assert [process.rank for process in there.processes_on_host()] == [2]
    for board in (here, there, beside):
        board.close()


def test_a_process_runs_is_stopped_and_is_gone() -> None:
    with sleeper() as child:
        process = Process.of(1, child.pid)
        assert process.state() == "running"
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: process.state() == "stopped")
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: process.state() == "running")
        child.kill()
        # Nobody has waited for it yet: it is a zombie.
        until(lambda: process.state() == "gone")
        child.wait()
        assert process.state() == "gone"


def test_a_later_process_of_the_same_number_is_not_the_rank() -> None:
    mine = Process.of(0, os.getpid())
    assert mine.state() == "running"
    assert replace(mine, started="1").state() == "gone"


def test_a_process_passes_for_a_rank() -> None:
    with sleeper() as child, pid_is(child.pid), boards(2) as (first, _):
        assert first.processes_on_host() == [Process.of(1, child.pid)]
