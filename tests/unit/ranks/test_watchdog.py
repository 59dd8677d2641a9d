"""The watchdog's thread learns of failures, names ranks that are gone, and times steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch.distributed as dist

from megapack.ranks import board, watchdog
from megapack.ranks.board import Board, Failure
from megapack.ranks.interrupt import Interrupt
from megapack.ranks.watchdog import Peers, Watchdog
from megapack.ranks.watchdog_config import WatchdogConfig
from tests.job_in_process import Clock, job_of_one, pid_is, sleeper, until

pytestmark = pytest.mark.unit

Make = Callable[..., Watchdog]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_TICK_S", 0.02)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(watchdog, "time", fake)
    return fake


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes watchdogs of ranks of one job."""
    store = dist.HashStore()
    with ExitStack() as stack:

        def one(rank: int = 0, *, world: int = 2, config: Any = None, **options: Any) -> Watchdog:
            own = Board(options.pop("store", store), rank, world)
            made = Watchdog(config, board=own, **options)
            stack.callback(made.stop)
            return made

        yield one


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [message for message in caplog.messages if text in message]


def wait_for_a_round(one: Watchdog) -> None:
    """Wait until its thread has run its loop once; the loop begins with a beat."""
    assert one.board is not None
    before = one.board.num_beats(one.rank)
    until(lambda: one.board.num_beats(one.rank) >= before + 2)


def test_the_wait_does_not_include_ranks_that_are_gone(make: Make) -> None:
    first = make(0)
    first.report(Failure(text="a", gone=(1,)))
    started = time.monotonic()
    first.wait_until_acknowledged(30.0)
    assert time.monotonic() - started < 10


def test_outside_of_a_block_a_dead_rank_is_not_a_failure(make: Make) -> None:
    with sleeper() as child, pid_is(child.pid):
        make(1)
    first = make(0)
    wait_for_a_round(first)
    assert first.failure is None


def test_a_rank_that_ended_normally_is_not_a_failure(make: Make) -> None:
    with sleeper() as child, pid_is(child.pid):
        make(1).stop()
    first = make(0)
    with first.watching(timed=False):
        wait_for_a_round(first)
    assert first.failure is None


def test_a_rank_that_ends_with_an_error_reports_it(make: Make) -> None:
    first = make(0)
    second = make(1)
    second.stop(Failure(text="rank 1 ended with ValueError: a"))
    until(lambda: first.failure)
    assert first.failure == Failure(text="rank 1 ended with ValueError: a")


def test_a_stopped_rank_is_logged_once_per_stop(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with sleeper() as child:
        with pid_is(child.pid):
            make(1)
        first = make(0)
        with first.watching(timed=False):
            for times in (1, 2):
                os.kill(child.pid, signal.SIGSTOP)
                until(lambda: 1 in first.peers.silent)
                wait_for_a_round(first)
                assert len(lines(caplog, "is stopped (SIGSTOP, or a debugger)")) == times
                os.kill(child.pid, signal.SIGCONT)
                until(lambda: not first.peers.silent)
    assert first.failure is None


def test_a_late_step_is_logged_at_the_limit_and_each_doubling(
    make: Make, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    one = make()
    one.place.step = "step 4"
    with one.watching():
        for elapsed_s, num_logged in [(59, 0), (61, 1), (120, 1), (125, 2), (249, 2), (251, 3)]:
            clock.now = 100.0 + elapsed_s
            wait_for_a_round(one)
            assert len(lines(caplog, "has run for")) == num_logged
    assert lines(caplog, "has run for")[0].startswith("rank 0: step 4, idle has run for 61 s")
    clock.now += 1000
    wait_for_a_round(one)
    assert len(lines(caplog, "has run for")) == 3
    assert one.failure is None


def test_a_prediction_only_raises_the_limit(
    make: Make, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    one = make()
    with one.watching(30.0):
        clock.now += 149
        wait_for_a_round(one)
        assert lines(caplog, "has run for") == []
        clock.now += 2
        until(lambda: lines(caplog, "has run for 151 s, 30.0 s were predicted"))
    caplog.clear()
    with one.watching(0.1):
        clock.now += 59
        wait_for_a_round(one)
        assert lines(caplog, "has run for") == []


def test_a_block_inside_another_is_not_timed(
    make: Make, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    one = make()
    with one.watching(30.0):
        clock.now += 100
        with one.watching(1.0):
            clock.now += 49
            wait_for_a_round(one)
            assert lines(caplog, "has run for") == []
        clock.now += 2
        until(lambda: lines(caplog, "has run for 151 s"))


def test_without_the_store_late_steps_and_dead_ranks_are_found(
    clock: Clock, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    with sleeper() as child:
        with pid_is(child.pid):
            Board(store, 1, 2).close()
        first = make(0, store=store)
        with first.watching():
            wait_for_a_round(first)
            del server
            until(lambda: lines(caplog, "has lost the store, its link to other ranks ("))
            clock.now += 61
            until(lambda: lines(caplog, "has run for 61 s"))
            child.kill()
            until(lambda: first.failure)
        assert first.failure is not None
        assert first.failure.gone == (1,)
    assert len(lines(caplog, "has lost the store")) == 1


HOLDS_STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_store_on_a_frozen_host_blocks_no_rank(
    clock: Clock,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a launcher, rank 0 holds the store. The client's own timeout does not help."""
    args = [sys.executable, "-c", HOLDS_STORE]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            with pid_is(child.pid):
                Board(store, 0, 2).close()
            one = make(1, store=store, config=WatchdogConfig(abort_after_s=90.0))
            with one.watching():
                wait_for_a_round(one)
                monkeypatch.setattr(board, "_ANSWER_S", 0.3)
                os.kill(child.pid, signal.SIGSTOP)
                until(lambda: lines(caplog, "has lost the store, its link to other ranks (no ans"))
                until(lambda: lines(caplog, "is stopped (SIGSTOP, or a debugger)"))
                clock.now += 91
                until(lambda: one.failure)
            one.wait_until_acknowledged(30.0)
            one.stop()
        finally:
            child.kill()
    assert one.failure is not None
    assert one.failure.gone == (0,)


def test_a_store_that_ends_after_the_last_step_is_not_logged(
    make: Make, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = make(store=dist.TCPStore("127.0.0.1", server.port, is_master=False))
    del server
    clock.wait_for_reads()
    one.stop()
    assert lines(caplog, "has lost the store") == []


def test_a_process_stuck_after_a_failure_is_ended(
    make: Make,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    stays = make(0)
    ends = make(1, ends_process=True)
    stays.report(Failure(text="rank 0 failed"))
    until(lambda: ends.failure)
    stays.stop()
    clock.now += 7
    clock.wait_for_reads()
    assert codes == []
    clock.now += 2
    until(lambda: codes)
    assert set(codes) == {1}
    ends.stop()
    assert "megapack: rank 1: rank 0 failed\n" in capsys.readouterr().err


def test_sigterm_ends_a_stuck_process_sooner(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with Interrupt(saves=True) as interrupt:
        interrupt.begin()
        one = make(ends_process=True, interrupt=interrupt)
        one.report(Failure(text="rank 1 failed"))
        signal.raise_signal(signal.SIGTERM)
        clock.now += 3
        until(lambda: codes)
        one.stop()
    assert set(codes) == {1}


@pytest.mark.parametrize(
    ("saves", "number", "code"),
    [(True, signal.SIGTERM, 75), (True, signal.SIGUSR1, 75), (False, signal.SIGTERM, 143)],
)
def test_a_signal_before_the_first_step_ends_a_stuck_process(
    make: Make,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    saves: bool,
    number: signal.Signals,
    code: int,
) -> None:
    """The main thread waits in a collective and never runs Python's handler."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with Interrupt(saves=saves) as interrupt:
        signal.signal(number, lambda *_: None)
        one = make(ends_process=True, interrupt=interrupt)
        signal.raise_signal(number)
        until(lambda: one._terminated_at < float("inf"))
        assert codes == []
        clock.now += 3
        until(lambda: codes)
        one.stop()
    assert set(codes) == {code}


def test_a_job_of_one_rank_needs_no_store(make: Make, clock: Clock) -> None:
    with job_of_one():
        one = Watchdog(WatchdogConfig(abort_after_s=5.0))
        assert (one.rank, one.world, one.board) == (0, 1, None)
        with one.watching():
            clock.now += 6
            until(lambda: one.failure)
        one.stop()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Board]]:
    """Four ranks, two on each of two hosts."""
    store = dist.HashStore()
    made = []
    for rank in range(4):
        monkeypatch.setattr(os, "readlink", lambda path, host=rank // 2: f"pid:[{host}]")
        made.append(Board(store, rank, 4))
    yield made
    for one in made:
        one.close()


def test_a_silent_rank_of_another_host_is_named(
    hosts: list[Board], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    peers = Peers(hosts[1])
    assert peers.check(in_step=True) == {}
    clock.now += 14
    assert peers.check(in_step=True) == peers.silent == {}
    clock.now += 2
    assert peers.check(in_step=True) == {}
    assert peers.silent == {2: "rank 2 has shown no sign of life for 16 s"}
    clock.now += 10
    peers.check(in_step=True)
    assert peers.silent == {2: "rank 2 has shown no sign of life for 26 s"}
    assert caplog.messages == ["rank 2 has shown no sign of life for 16 s"]
    hosts[2].beat_and_read()
    peers.check(in_step=True)
    assert peers.silent == {}


def test_beats_of_ranks_on_the_same_host_are_not_used(hosts: list[Board], clock: Clock) -> None:
    """Their processes are looked up: a rank may compile for a minute without a beat."""
    peers = Peers(hosts[0])
    peers.check(in_step=True)
    clock.now += 60
    peers.check(in_step=True)
    assert peers.silent == {}
