"""Ranks agree before they communicate; here the ranks are threads of one process."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapack.errors import DataError, MegapackError, RankError, ScheduleError
from megapack.ranks.agree import Agreements, agree, on_any_rank
from megapack.ranks.board import Failure
from megapack.ranks.watchdog import Watchdog
from tests.job_in_process import LIMIT_S, job_of_one

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
Work = Callable[[], object]


class ThreadRanks:
    """Replaces `torch.distributed`; each thread is a rank.

    If a rank misses a collective, the others raise BrokenBarrierError and do not hang.
    """

    ReduceOp = dist.ReduceOp

    def __init__(self, world: int) -> None:
        self._thread = threading.local()
        self._sent: list[Any] = [None] * world
        self._barrier = threading.Barrier(world, timeout=LIMIT_S)

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self, group: object = None) -> int:
        return len(self._sent)

    def all_reduce(self, tensor: torch.Tensor, op: object, group: object = None) -> None:
        assert op == dist.ReduceOp.MAX
        tensor.copy_(torch.stack(self._exchange(tensor.clone())).amax(0))

    def all_gather_object(self, received: list[Any], mine: object, group: object = None) -> None:
        received[:] = map(pickle.loads, self._exchange(pickle.dumps(mine)))

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The result of each rank's call, or its error."""
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(self._run, range(len(calls)), calls))

    def _run(self, rank: int, call: Callable[[], Any]) -> Any:
        self._thread.rank = rank
        try:
            return call()
        except Exception as error:
            return error

    def _exchange(self, mine: Any) -> list[Any]:
        self._sent[self._thread.rank] = mine
        self._barrier.wait()
        sent = list(self._sent)
        self._barrier.wait()
        return sent


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs one call per rank, given in order."""

    def on_ranks(*calls: Callable[[], Any]) -> list[Any]:
        ranks = ThreadRanks(len(calls))
        monkeypatch.setattr("megapack.ranks.agree.dist", ranks)
        return ranks.run(calls)

    return on_ranks


Run = Callable[..., list[Any]]


def refuse(*args: object, **kwargs: object) -> None:
    """NCCL's answer to a tensor of the host."""
    raise RuntimeError("No backend type associated with device type cpu")


def call(work: Work = lambda: None, **same: str) -> Callable[[], object]:
    """The call of one rank."""
    return lambda: agree(work, device=CPU, same=same)


def fail(error: BaseException) -> Work:
    """Work that raises."""

    def work() -> None:
        raise error

    return work


def error_of_all(results: list[Any]) -> str:
    """The text of the ScheduleError that every rank raised."""
    assert [type(result) for result in results] == [ScheduleError] * len(results), results
    assert all(result.on_all_ranks for result in results)
    (text,) = {str(result) for result in results}
    return text


def test_a_job_of_one_process_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only process group is NCCL's on a GPU."""
    with job_of_one():
        for name in ("all_reduce", "all_gather_object"):
            monkeypatch.setattr(dist, name, refuse)
        agreements = Agreements(None)
        assert agreements.start(lambda: [3], lambda: {"plan": "a"}).result() == [3]
        with pytest.raises(DataError, match="the lengths"):
            agreements.start(fail(DataError("the lengths")), dict).result()
        agreements.stop()
        assert on_any_rank([True, False], device=CPU) == [True, False]


def test_the_error_names_the_rank_and_chains_its_error(run: Run) -> None:
    failed, fine = run(call(fail(DataError("sample 3 has no tokens"))), call())
    text = error_of_all([failed, fine])
    assert text == "1 of 2 ranks failed: rank 0: DataError: sample 3 has no tokens"
    assert isinstance(failed, MegapackError)
    assert isinstance(failed.__cause__, DataError)
    assert fine.__cause__ is None


def test_the_error_names_several_ranks(run: Run) -> None:
    results = run(call(), call(fail(DataError("a"))), call(), call(fail(OSError("b"))))
    assert error_of_all(results) == "2 of 4 ranks failed: rank 1: DataError: a; rank 3: OSError: b"


def test_a_message_of_several_ranks_is_printed_once(run: Run) -> None:
    results = run(call(fail(DataError("a"))), call(), *[call(fail(DataError("a")))] * 9)
    ranks = "ranks 0, 2, 3, 4, 5, 6, 7, 8 and 2 more"
    assert error_of_all(results) == f"10 of 11 ranks failed: {ranks}: DataError: a"


def test_an_error_of_all_ranks_is_raised_unchanged(run: Run) -> None:
    errors = [DataError("bad line") for _ in range(3)]
    results = run(*[call(fail(error)) for error in errors])
    assert all(result is error for result, error in zip(results, errors, strict=True))
    assert all(result.on_all_ranks for result in results)


def test_a_flag_of_any_rank_is_set_on_all(run: Run) -> None:
    flags = [[True, False, False], [False, False, True]]
    results = run(*[lambda f=f: on_any_rank(f, device=CPU) for f in flags])
    assert results == [[True, False, True]] * 2


def test_a_failure_is_raised_before_a_difference(run: Run) -> None:
    assert "disk" in error_of_all(run(call(plan="a"), call(fail(OSError("disk")), plan="b")))


def test_the_error_names_the_ranks_that_differ(run: Run) -> None:
    results = run(*[call(plan="same", call=text) for text in ("a", "b", "a", "c", "a")])
    assert error_of_all(results).startswith(
        "ranks [1, 3] differ from the other 3 in call (rank 1: 'b', "
    )


def test_long_values_are_shown_as_digests(run: Run) -> None:
    one, other = ("x" * 100_000 + end for end in "12")
    text = error_of_all(run(call(plan=one), call(plan=other), call(plan=one)))
    assert "ranks [1] differ from the other 2 in plan (rank 1: 'sha256 " in text
    assert len(text) < 300


def test_a_path_that_is_not_utf_8_can_be_reported(run: Run) -> None:
    path = "runs/\udcff"
    text = error_of_all(run(call(fail(DataError(f"{path}: no such file"))), call()))
    assert text.endswith("rank 0: DataError: runs/\\udcff: no such file")
    text = error_of_all(run(call(runs_dir=path), call(runs_dir=path), call(runs_dir="runs")))
    assert "most: 'runs/\\\\udcff'" in text


def test_an_error_that_cannot_be_printed_can_be_reported(run: Run) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise UnicodeError("no text")

    text = error_of_all(run(call(fail(Unprintable())), call()))
    assert text.endswith("rank 0: Unprintable, whose message cannot be printed")


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    with job_of_one():
        made = Watchdog()
        yield made
        made.stop()


@pytest.fixture
def agreements(watchdog: Watchdog) -> Iterator[Agreements]:
    made = Agreements(watchdog)
    yield made
    made.stop()


@pytest.mark.parametrize("error", [ValueError("bad"), TimeoutError("slow disk"), SystemExit(3)])
def test_errors_of_the_work_are_raised_by_its_result(
    agreements: Agreements, error: BaseException
) -> None:
    failed = agreements.start(fail(error), dict)
    fine = agreements.start(lambda: 1, dict)
    with pytest.raises(type(error), match=str(error)):
        failed.result()
    assert fine.result() == 1


def test_the_wait_lasts_longer_than_one_poll(
    agreements: Agreements, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megapack.ranks.agree._POLL_S", 0.001)
    for number in range(50):
        done = threading.Event()
        threading.Timer(0.002, done.set).start()
        assert agreements.start(lambda n=number, e=done: e.wait() and n, dict).result() == number


def test_the_wait_for_other_ranks_has_a_limit(agreements: Agreements) -> None:
    release = threading.Event()
    waits = agreements.start(release.wait, dict)
    with pytest.raises(TimeoutError, match=r"the other ranks did not join in 0\.01 s"):
        waits.result(0.01)
    release.set()
    assert waits.result()


def test_a_failure_of_another_rank_ends_the_wait(
    watchdog: Watchdog, agreements: Agreements
) -> None:
    release = threading.Event()
    waits = agreements.start(release.wait, dict)
    watchdog.report(Failure(text="rank 1 is gone"))
    with pytest.raises(RankError, match="rank 1 is gone"):
        waits.result()
    release.set()
    assert waits.result()
