"""A process starts its links to other ranks once, and leaves nothing behind."""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from megapack.errors import ConfigError, DataError
from megapack.ranks import links
from megapack.ranks.links import Ranks, close_all, process_ranks
from tests.job_in_process import job_of_one

pytestmark = pytest.mark.unit


def own_threads() -> list[str]:
    """megapack's threads in a job of one process, which has no board."""
    names = ("megapack-agreements", "megapack-watchdog")
    return sorted(thread.name for thread in threading.enumerate() if thread.name in names)


def same() -> dict[str, str]:
    return {"plan": "a"}


def test_a_job_of_one_process_starts_nothing() -> None:
    with job_of_one():
        ranks = process_ranks()
        assert own_threads() == []
        assert ranks.watchdog is None
        assert not ranks.has_failed
        assert ranks.prepare(lambda: 5, same).result() == 5
        ranks.place.enter("pack")
        with ranks.guarded("step 4"):
            assert own_threads() == []
        ranks.close()


def test_errors_in_a_job_of_one_process_are_not_changed() -> None:
    def work() -> None:
        raise DataError("sample 3 is empty")

    prepared = Ranks.alone().prepare(work, same)
    with pytest.raises(DataError, match=r"^sample 3 is empty$"):
        prepared.result()
    with pytest.raises(SystemExit), Ranks.alone().guarded():
        raise SystemExit(3)


def test_started_threads_run_until_ranks_are_closed() -> None:
    with job_of_one():
        ranks = Ranks.start()
        assert own_threads() == ["megapack-agreements", "megapack-watchdog"]
        assert ranks.watchdog is not None
        assert ranks.place is ranks.watchdog.place
        assert ranks.prepare(lambda: 5, same).result() == 5
        ranks.close()
        ranks.close()
        assert own_threads() == []


def test_alone_is_refused_in_a_job_of_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    made_before_the_group = Ranks.alone()
    with job_of_one():
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        for refused in (Ranks.alone, made_before_the_group.check):
            with pytest.raises(ConfigError, match=r"job of 2 processes; use Ranks\.start\(\)"):
                refused()


class CountedStart:
    """Replaces `Ranks.start`, as if the job had two processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        start: Callable[..., Ranks] = Ranks.start
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)

        def counted(*args: Any) -> Ranks:
            self.num += 1
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "get_world_size", lambda: 1)
                return start(*args)

        monkeypatch.setattr(Ranks, "start", counted)


def test_all_adapters_of_a_process_share_their_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with job_of_one():
        started = CountedStart(monkeypatch)
        ranks = process_ranks()
        assert process_ranks() is ranks
        assert started.num == 1
        close_all()
        assert own_threads() == []
        assert process_ranks() is not ranks
        close_all()
    assert own_threads() == []


def test_a_new_process_group_gets_new_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_of_one(), monkeypatch.context() as patch:
        CountedStart(patch)
        first = process_ranks()
    with job_of_one(), monkeypatch.context() as patch:
        CountedStart(patch)
        assert process_ranks() is not first
        assert len(own_threads()) == 2
        close_all()
    assert own_threads() == []


def test_started_ranks_are_closed_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    monkeypatch.setattr(atexit, "register", hooks.append)
    monkeypatch.setattr(atexit, "unregister", hooks.remove)
    with job_of_one():
        ranks = Ranks.start()
        assert hooks == [links._leave_if_broken, links._close_at_exit]
        monkeypatch.setattr(sys, "last_value", ValueError("bad"), raising=False)
        links._close_at_exit()
        # It failed, but no thread waits: the process ends as ever.
        assert hooks == [links._leave_if_broken]
        assert own_threads() == []
        links._leave_if_broken()
        links._broken.clear()
        assert ranks.watchdog is not None


def test_a_broken_job_ends_with_its_code_though_a_thread_waits() -> None:
    code = (
        "import atexit, sys, torch.distributed as dist\n"
        "from megapack.errors import RankError\n"
        "from megapack.ranks import links\n"
        "from megapack.ranks.board import Failure\n"
        "from megapack.ranks.threads import DaemonThread\n"
        "atexit.register(print, 'an earlier hook is left out')\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "ranks = links.Ranks.start(ends_process=True)\n"
        "atexit.register(print, 'a later hook runs')\n"
        "waiting = DaemonThread('megapack-waits')\n"
        "waiting.submit(lambda: dist.HashStore().wait(['never']))\n"
        "ranks.watchdog.report(Failure(text='rank 1 is gone'))\n"
        "sys.exit(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "a later hook runs\n"), done.stderr
