"""The rules on notes made by hand; `tests/dist/ranks/test_nccl_rules.py` breaks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.rehearsal.nccl_rules import check
from tests.rehearsal.notes import ALL_TO_ALL, RECEIVE, SEND, Group, Notes, Op, Wait

pytestmark = pytest.mark.unit

Launch = Op | list[Op] | Wait


def op(kind: str, peer: int = -1, *, size: int = 4, **values: Any) -> Op:
    """An operation of all ranks; `unit` is set by `ranks`."""
    return Op("", "world", kind, peer=peer, sizes=(size,), dtype="float32")._replace(**values)


def send(to: int, **values: Any) -> Op:
    return op(SEND, to, **values)


def receive(source: int, **values: Any) -> Op:
    return op(RECEIVE, source, **values)


def reduce(group: str = "world", **values: Any) -> Op:
    return op("all_reduce", **{"group": group, "reduction": "SUM", **values})


def ranks(*launches: Sequence[Launch]) -> list[Notes]:
    """Notes of ranks: lists are batches, and Wait(n) is a wait for the rank's n-th launch."""
    every = tuple(range(len(launches)))
    groups = {name: Group(name, every) for name in ("world", "other")}
    found = []
    for rank, own in enumerate(launches):
        notes = Notes(rank, groups)
        unit = 0
        for launch in own:
            if isinstance(launch, Wait):
                notes.events.append(launch)
                continue
            is_batched = isinstance(launch, list)
            for one in launch if isinstance(launch, list) else [launch]:
                notes.events.append(one._replace(unit=unit, is_batched=is_batched))
            unit += 1
        found.append(notes)
    return found


def error(*launches: Sequence[Launch], **values: Any) -> str:
    return "\n".join(check(ranks(*launches), **values))


def test_a_ring_of_batches_is_legal() -> None:
    steps = [[[send((r + 1) % 3), receive((r - 1) % 3)]] * 3 for r in range(3)]
    assert error(*steps) == ""


def test_swapped_collectives_are_named_with_their_lines() -> None:
    first, second = reduce(site="a.py:1"), reduce(size=2, site="b.py:2")
    found = error([first, second], [second, first])
    assert "collective 1 differs: rank 0: all_reduce float32[4] SUM at a.py:1" in found
    assert "rank 1: all_reduce float32[2] SUM at b.py:2" in found
    assert "group world of ranks [0, 1]" in found


@pytest.mark.parametrize(
    "other",
    [
        reduce(size=5),
        reduce(dtype="bfloat16"),
        reduce(reduction="MAX"),
        op("broadcast", 0),
        op("broadcast", 1),
    ],
)
def test_a_collective_that_differs_on_one_rank_is_found(other: Op) -> None:
    want = op("broadcast", 0) if other.peer == 1 else reduce()
    assert (error([want], [other]) == "") == (other == want)
    assert "collective 1 differs" in error([want], [want], [other._replace(site="x")])


def test_a_collective_that_a_rank_leaves_out_is_found() -> None:
    assert "collective 2 is missing on ranks [1]" in error([reduce(), reduce()], [reduce()])


def test_splits_of_an_all_to_all_must_fit() -> None:
    def rank(sent: tuple[int, int], received: tuple[int, int]) -> list[Launch]:
        return [op(ALL_TO_ALL)._replace(sizes=sent, received=received)]

    assert error(rank((1, 2), (1, 3)), rank((3, 4), (2, 4))) == ""
    found = error(rank((1, 2), (1, 3)), rank((5, 4), (2, 4)))
    assert "rank 1 sends 5 elements to rank 0, which receives 3" in found


def test_a_receive_of_another_size_is_found() -> None:
    found = error([send(1, size=4)], [receive(0, size=8)])
    assert "rank 0 to 1: number 1 differs" in found


def test_two_swapped_sends_are_found() -> None:
    found = error([send(1, size=2), send(1)], [receive(0), receive(0, size=2)])
    assert "number 1 differs: rank 0: send float32[2] rank 1" in found


def test_sends_swapped_between_ranks_deadlock() -> None:
    def own(first: int, second: int) -> list[list[Launch]]:
        waits = [send(first), Wait(0), send(second), Wait(1)]
        return [waits, [receive(0), Wait(0), send(2), Wait(1)], [receive(1), Wait(0), receive(0)]]

    assert error(*own(1, 2)) == ""
    assert "a deadlock" in error(*own(2, 1))


def test_a_send_is_not_buffered() -> None:
    steps = [[send(1), receive(1)], [send(0), receive(0)]]
    assert "a deadlock, in which each waits for the next:\n" in error(*steps)
    assert error(*[[batch] for batch in steps]) == ""


def test_a_batch_split_in_two_on_one_rank_deadlocks() -> None:
    other = [[receive(0)], [send(0)]]
    assert error([[send(1), receive(1)]], other) == ""
    assert "a deadlock, in" in error([[receive(1)], [send(1)]], other)


def test_a_receive_holds_up_later_sends_of_its_communicator_only() -> None:
    def own(group: str) -> list[list[Launch]]:
        first = [receive(1, group=group), send(1)]
        return [first, [receive(0), Wait(0), send(0, group=group)]]

    made = [[reduce(), reduce("other"), *steps] for steps in own("other")]
    assert "a deadlock, in" in error(*own("world"))
    # Both ranks connect the two of "other" and of "world" first, in one order.
    used = [send(1), Wait(2), send(1, group="other"), Wait(3)]
    met = [receive(0), Wait(2), receive(0, group="other"), Wait(3)]
    with_use = [[*made[0][:2], *used, *made[0][2:]], [*made[1][:2], *met, *_shifted(made[1][2:])]]
    assert error(*with_use) == ""


def _shifted(launches: Sequence[Launch]) -> list[Launch]:
    return [Wait(launch.unit + 4) if isinstance(launch, Wait) else launch for launch in launches]


def test_communicators_in_opposite_orders_are_found() -> None:
    one, other = reduce(), reduce("other")
    made: list[Launch] = [one, Wait(0), other, Wait(1)]
    assert error([*made, one, other], [*made, one, other]) == ""
    found = error([*made, one, other], [*made, other, one])
    assert "collectives in different orders on the communicators" in found


def test_a_wait_on_both_ranks_between_opposite_orders_is_a_deadlock() -> None:
    one, other = reduce(), reduce("other")
    made: list[Launch] = [one, Wait(0), other, Wait(1)]
    assert "a deadlock, in" in error([*made, one, Wait(2), other], [*made, other, Wait(2), one])


def test_a_send_that_cannot_start_holds_up_all_streams_with_one_connection() -> None:
    # Rank 0's second send on "world" waits in its stream for the first; its send on "other" is
    # behind it, but rank 1 receives that one first.
    made: list[Launch] = [reduce(), Wait(0), reduce("other"), Wait(1)]
    sends = [send(1), [send(1)], [send(1)], [send(1, group="other")]]
    first = [*made, *sends[1:]]
    receives: list[Launch] = [[receive(0, group="other")], Wait(2), [receive(0)], [receive(0)]]
    assert "a deadlock with CUDA_DEVICE_MAX_CONNECTIONS=1" in error(first, [*made, *receives])


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (reduce(dtype="int16"), "NCCL has no dtype int16"),
        (reduce(reduction="BOR"), "NCCL has no reduction BOR"),
        (send(1, fault="tag 3"), "NCCL has no tag 3"),
    ],
)
def test_what_nccl_does_not_have_is_found(bad: Op, text: str) -> None:
    assert text in error([bad], [bad])


def test_a_job_that_failed_is_judged_by_what_it_did() -> None:
    steps = [reduce(), Wait(0), [send(1)]], [reduce()]
    assert error(*steps, has_ended=False) == ""
    assert "never received" in error(*steps)
    swapped = [reduce(), Wait(0)], [reduce(size=2)]
    assert "collective 1 differs" in error(*swapped, has_ended=False)
