"""Ranks agree before they communicate: a difference, or one rank's error, raises on every rank.

A rank that raises alone leaves the others waiting in a send or receive for ever. So what can fail
on one rank (its plan, its samples) is done first, and one small collective tells all of them how
it went.
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

from megapack.errors import ScheduleError

T = TypeVar("T")

_DIGEST_BYTES = 16
_MESSAGE_BYTES = 448
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
    ranks = _exchange(list(same.values()), error, device, group)
    failed = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(ranks) if message]
    if error is not None and len({message for _, message in ranks}) == 1:
        raise error
    if failed:
        raise _shared(f"{len(failed)} of {len(ranks)} ranks failed: {'; '.join(failed)}") from error
    for part, name in enumerate(same):
        _refuse_difference(name, [digests[part] for digests, _ in ranks])
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


def _exchange(
    values: list[str],
    error: Exception | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> list[tuple[list[bytes], str]]:
    """Per rank the digests of its values and its error message."""
    message = "" if error is None else f"{type(error).__name__}: {error}"
    digests = [hashlib.sha256(value.encode()).digest()[:_DIGEST_BYTES] for value in values]
    if not dist.is_initialized():
        return [(digests, message)]
    payload = b"".join(digests) + message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [_unpacked(bytes(row.tolist()), len(values)) for row in everyone]


def _unpacked(row: bytes, num_values: int) -> tuple[list[bytes], str]:
    end = num_values * _DIGEST_BYTES
    digests = [row[start : start + _DIGEST_BYTES] for start in range(0, end, _DIGEST_BYTES)]
    return digests, row[end:].rstrip(b"\0").decode(errors="replace")


def _shared(message: str) -> ScheduleError:
    error = ScheduleError(message)
    error.on_all_ranks = True
    return error


def _refuse_difference(name: str, digests: list[bytes]) -> None:
    (common, count), *others = Counter(digests).most_common()
    if others:
        odd = [rank for rank, digest in enumerate(digests) if digest != common]
        raise _shared(
            f"ranks {odd} have another {name} than the other {count}; every rank must plan from "
            "the same lengths, rollouts, layout, budget, policy and cost model, and make the same "
            "call"
        )
