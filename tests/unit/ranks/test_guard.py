"""One rank's error becomes every rank's; here two ranks in one process, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megapack.errors import DataError, RankError
from megapack.ranks import links, watchdog
from megapack.ranks.board import Board, Failure
from megapack.ranks.links import Ranks
from megapack.ranks.watchdog import Watchdog
from tests.job_in_process import boards, pid_is, sleeper, until

pytestmark = pytest.mark.unit

Pair = tuple[Watchdog, Watchdog]
GLOO = "[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:5"


def guarded(watchdog: Watchdog, step: str = "") -> contextlib.AbstractContextManager[None]:
    return Ranks(watchdog, None).guarded(step)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(watchdog, "_TICK_S", 0.02)
    with boards(2) as (first, second):
        made = Watchdog(board=first), Watchdog(board=second)
        yield made
        for one in made:
            one.stop()


def fail_in_forward(watchdog: Watchdog) -> None:
    with guarded(watchdog, "step 4"):
        watchdog.place.enter("forward", 1, 2)
        raise ValueError("bad\nsecond line")


def test_an_error_is_raised_on_both_ranks(pair: Pair) -> None:
    first, second = pair
    with pytest.raises(RankError) as origin:
        fail_in_forward(second)
    text = "rank 1 failed in step 4, forward of micro-batch 2 on chunk 1: ValueError: bad"
    assert str(origin.value) == text
    assert isinstance(origin.value.__cause__, ValueError)
    until(lambda: first.failure)
    with pytest.raises(RankError) as other, guarded(first):
        pytest.fail("the block was entered")
    assert str(other.value) == text
    assert 'raise ValueError("bad' in other.value.__notes__[0]


def test_an_error_of_every_rank_is_not_changed(pair: Pair) -> None:
    first, second = pair
    error = DataError("all have it")
    error.on_all_ranks = True
    for one in pair:
        with pytest.raises(DataError, match="all have it"), guarded(one):
            raise error
    assert first.failure is second.failure is None


def test_ctrl_c_is_not_changed_and_reaches_the_others(pair: Pair) -> None:
    first, second = pair
    with pytest.raises(KeyboardInterrupt), guarded(first, "step 4"):
        raise KeyboardInterrupt
    until(lambda: second.failure)
    with pytest.raises(RankError, match="rank 0 was interrupted in step 4, idle"):
        second.raise_failure()


def test_leaving_the_process_within_a_step_is_a_failure(pair: Pair) -> None:
    first, second = pair
    with pytest.raises(RankError, match=r"^rank 0 failed: SystemExit: 0"), guarded(first):
        raise SystemExit(0)
    until(lambda: second.failure)


def test_the_name_of_the_outer_block_stays(pair: Pair) -> None:
    place = pair[0].place
    with guarded(pair[0]):
        assert place.step == ""
        with guarded(pair[0], "step 4"):
            place.enter("pack")
            with guarded(pair[0], "step 0 of plan a"):
                assert str(place) == "step 4, pack"
            assert str(place) == "step 4, pack"
        assert str(place) == "idle"


def test_the_cause_of_a_broken_collective_is_the_error(pair: Pair) -> None:
    first, second = pair

    def collective() -> None:
        second.report(Failure(text="rank 1 failed"))
        raise RuntimeError(GLOO)

    with pytest.raises(RankError, match=r"^rank 1 failed$"), guarded(first):
        collective()


def test_the_rank_that_broke_a_collective_is_named() -> None:
    store = dist.HashStore()
    with sleeper() as child:
        with pid_is(child.pid):
            other = Board(store, 1, 2)
        first = Watchdog(board=Board(store, 0, 2))
        child.kill()
        with pytest.raises(RankError, match=rf"rank 1 \(process {child.pid} on "), guarded(first):
            raise RuntimeError(GLOO)
        first.stop()
        other.close()


def test_a_broken_collective_of_unknown_cause_names_no_rank(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_CAUSE_S", 0.05)
    message = "rank 0 lost its connection to another rank: DistNetworkError: reset"
    with pytest.raises(RankError, match=message), guarded(pair[0]):
        raise dist.DistNetworkError("reset")


def test_a_call_that_nccl_refuses_is_the_failure_of_its_rank(pair: Pair) -> None:
    said = "NCCL error: invalid usage, Duplicate GPU detected : rank 0 and rank 1"
    message = rf"^rank 0 failed: DistBackendError: {said}"
    with pytest.raises(RankError, match=message), guarded(pair[0]):
        raise dist.DistBackendError(said)
