"""What ranks report to each other through the store; here all ranks are in one process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from megapack.errors import RankError
from megapack.ranks.board import Board, Failure, Process
from tests.job_in_process import LIMIT_S, boards, sleeper, until

pytestmark = pytest.mark.unit

FAILURE = Failure(text='rank 1 failed: "é"', traceback="a\nb\n", gone=(1, 2))


def test_the_first_failure_wins_on_every_rank() -> None:
    with boards(3) as (first, second, third):
        assert third.beat_and_read() is None
        assert second.post(FAILURE) == FAILURE
        assert first.post(Failure(text="later")) == FAILURE
        assert [board.beat_and_read() for board in (first, second, third)] == [FAILURE] * 3


def test_a_failure_becomes_an_error_of_all_ranks() -> None:
    error = FAILURE.error()
    assert isinstance(error, RankError)
    assert error.on_all_ranks
    assert (str(error), error.__notes__) == (FAILURE.text, [FAILURE.traceback])
    assert not hasattr(Failure(text="a").error(), "__notes__")


def test_the_next_job_on_a_store_starts_empty() -> None:
    store = dist.HashStore()
    with boards(2, store) as (first, second):
        first.post(FAILURE)
        first.leave()
        with boards(2, store) as (again, other):
            assert again.beat_and_read() is None
            assert not other.has_left(0)
            other.post(Failure(text="of the second job"))
            assert second.beat_and_read() == FAILURE


def test_a_container_with_its_own_process_ids_is_another_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Containers can share the host's name, as with Docker's --network=host."""
    store = dist.HashStore()
    here = Board(store, 0, 3)
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
    there = Board(store, 1, 3)
    beside = Board(store, 2, 3)
    assert here.processes_on_host() == []
    assert [process.rank for process in there.processes_on_host()] == [2]
    for board in (here, there, beside):
        board.close()


def test_a_process_is_running_stopped_or_gone() -> None:
    with sleeper() as child:
        process = Process.of(1, child.pid)
        assert process.state() == "running"
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: process.state() == "stopped")
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: process.state() == "running")
        child.kill()
        # Nobody has waited for it yet, so it is a zombie.
        until(lambda: process.state() == "gone")
        child.wait()
        assert process.state() == "gone"


def test_a_later_process_with_the_same_pid_is_not_the_rank() -> None:
    mine = Process.of(0, os.getpid())
    assert mine.state() == "running"
    assert replace(mine, started="1").state() == "gone"


class FrozenStore:
    """A store whose host is frozen: calls return only after `release` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.release.wait()

    def get(self, key: str) -> bytes:
        return b"-"


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Board, FrozenStore]]:
    """A board whose store froze after it was made."""
    store = FrozenStore()
    board = Board(dist.HashStore(), 0, 2)
    monkeypatch.setattr(board, "_store", store)
    monkeypatch.setattr("megapack.ranks.board._ANSWER_S", 0.05)
    yield board, store
    store.release.set()
    board.close()
    until(lambda: threads() == [])


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "megapack-board"]


def test_only_the_first_caller_waits_for_a_blocked_call(
    frozen: tuple[Board, FrozenStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    board, store = frozen
    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        board.beat_and_read()
    with pytest.raises(TimeoutError, match=r"an earlier call has not returned in 0\.05 s"):
        board.beat_and_read()
    monkeypatch.setattr("megapack.ranks.board._ANSWER_S", LIMIT_S)
    store.release.set()

    def answers() -> bool:
        try:
            return board.beat_and_read() is None
        except TimeoutError:
            return False

    until(answers)
