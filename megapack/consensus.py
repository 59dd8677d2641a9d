"""Ranks agree before they communicate: a difference, or one rank's error, raises on every rank.

A rank that raises alone leaves the others waiting in a send or receive for ever. So what can fail
on one rank (its plan, its samples) is done first, and one small collective tells all of them how
it went: the largest of each number and of its negative, which are the same where all are alike.
Only where they are not, a second one tells who differs, in what, and how.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megapack.errors import ScheduleError, of_all_ranks

T = TypeVar("T")

_MESSAGE_BYTES = 448
# Of each thing that differs this much is told; more than that is a digest's or a list's.
_VALUE_BYTES = 80
_PATIENCE = datetime.timedelta(days=7)


def agree(
    work: Callable[[], T],
    *,
    device: torch.device,
    same: Mapping[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Run `work` on every rank and return its result, if it succeeds on all of them.

    Args:
        work: local work without communication.
        device: where the group's backend takes its tensors.
        same: what has to be equal on all ranks, by name; the names are the same in every call
            that ranks may mix up.
        group: the ranks that call; None for all. Errors number them within the group.

    Raises:
        ScheduleError: on every rank, naming the ranks whose work failed and how, or the first
            thing that differs and the ranks that differ in it. The rank that failed chains its
            own error. Where all ranks fail alike, each raises its own error as it is.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as caught:  # every local failure must reach the other ranks
        error = caught
    same = same or {}
    if not _are_alike(list(same.values()), error, device, group):
        _tell_apart(same, error, _exchange(list(same.values()), error, device, group))
    return result  # type: ignore[no-any-return]


def on_any_rank(flags: Sequence[bool], *, device: torch.device) -> list[bool]:
    """For each flag whether it is set on any rank; a collective of all ranks."""
    if not dist.is_initialized() or not flags:
        return list(flags)
    found = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def agree_with_flags(
    work: Callable[[], object], flags: Sequence[bool], *, device: torch.device
) -> list[bool]:
    """`agree` and `on_any_rank` in one small collective, where nothing fails; for every step.

    Args:
        work: local work without communication, of some ranks or all.
        flags: as many on every rank.

    Returns:
        For each flag whether it is set on any rank.

    Raises:
        ScheduleError: as `agree` does.
    """
    error: Exception | None = None
    try:
        work()
    except Exception as caught:  # raised below, where all ranks hear of it
        error = caught
    failed, *found = on_any_rank([error is not None, *flags], device=device)

    def tell() -> None:
        if error is not None:
            raise error

    if failed:
        agree(tell, device=device)
    return found


def agree_one_per_node_first(work: Callable[[], T], *, device: torch.device) -> T:
    """`agree`, where each node's first rank works alone before the others.

    For work that leaves a file which makes it cheap for the others. It may take as long as it
    needs: the others wait without the process group's timeout.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return agree(work, device=device)
    done: list[T] = []
    error: Exception | None = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            done.append(work())
        except Exception as caught:  # raised below, where all ranks hear of it
            error = caught
    waiting = dist.new_group(backend="gloo", timeout=_PATIENCE)
    dist.barrier(group=waiting)
    dist.destroy_process_group(waiting)

    def finish() -> T:
        if error is not None:
            raise error
        return done[0] if done else work()

    return agree(finish, device=device)


def _are_alike(
    values: list[str],
    error: Exception | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> bool:
    """Whether no rank has an error and all have the same values."""
    if not dist.is_initialized():
        return error is None
    numbers = [_number(value) for value in values]
    most = torch.tensor(
        [int(error is not None), *numbers, *(-number for number in numbers)],
        dtype=torch.int64,
        device=device,
    )
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    failed, *found = most.tolist()
    largest, negatives = found[: len(values)], found[len(values) :]
    return not failed and all(a == -b for a, b in zip(largest, negatives, strict=True))


def _number(value: str) -> int:
    """A digest that a signed 64-bit number and its negative can hold."""
    return int.from_bytes(hashlib.sha256(_encoded(value)).digest()[:7], "big")


def _tell_apart(
    same: Mapping[str, str], error: Exception | None, ranks: list[tuple[str, list[str]]]
) -> None:
    """Raise what went wrong, the same on every rank, from the message and values of each."""
    failed = [f"rank {rank}: {message}" for rank, (message, _) in enumerate(ranks) if message]
    if error is not None and len({message for message, _ in ranks}) == 1:
        raise of_all_ranks(error)
    if failed:
        told = f"{len(failed)} of {len(ranks)} ranks failed: {'; '.join(failed)}"
        raise of_all_ranks(ScheduleError(told)) from error
    for part, name in enumerate(same):
        _refuse_difference(name, [values[part] for _, values in ranks])
    raise AssertionError("ranks differ, and what they tell does not")


def _exchange(
    values: list[str],
    error: Exception | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> list[tuple[str, list[str]]]:
    """Per rank its error message and its values."""
    message = "" if error is None else f"{type(error).__name__}: {error}"
    if not dist.is_initialized():
        return [(message, values)]
    row = _packed(message, _MESSAGE_BYTES) + b"".join(
        _packed(_shortened(value), _VALUE_BYTES) for value in values
    )
    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [_unpacked(bytes(other.tolist()), len(values)) for other in everyone]


def _shortened(value: str) -> str:
    """A value that is short, or a digest of it."""
    encoded = _encoded(value)
    if len(encoded) <= _VALUE_BYTES:
        return value
    return f"sha256 {hashlib.sha256(encoded).hexdigest()[:16]}"


def _packed(text: str, num_bytes: int) -> bytes:
    return _encoded(text)[:num_bytes].ljust(num_bytes, b"\0")


def _encoded(text: str) -> bytes:
    # Paths may hold what is no character; a rank that failed to tell of one would fail alone.
    return text.encode(errors="backslashreplace")


def _unpacked(row: bytes, num_values: int) -> tuple[str, list[str]]:
    starts = [_MESSAGE_BYTES + _VALUE_BYTES * part for part in range(num_values)]
    parts = [row[:_MESSAGE_BYTES], *(row[start : start + _VALUE_BYTES] for start in starts)]
    message, *values = (part.rstrip(b"\0").decode(errors="replace") for part in parts)
    return message, values


def _refuse_difference(name: str, values: list[str]) -> None:
    (common, count), *others = Counter(values).most_common()
    if not others:
        return
    odd = [rank for rank, value in enumerate(values) if value != common]
    raise of_all_ranks(
        ScheduleError(
            f"ranks {odd} differ from the other {count} in {name} (rank {odd[0]}: "
            f"{values[odd[0]]!r}, most: {common!r}); every rank must plan from the same lengths, "
            "rollouts, layout, budget, policy and cost model, and make the same call"
        )
    )
