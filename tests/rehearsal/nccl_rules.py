"""NCCL's rules of matching, on the notes of all ranks.

NCCL matches operations by nothing but their order on a communicator. The k-th collective must be
the same on all ranks, and the k-th send of a pair of ranks belongs to the k-th receive. Otherwise
NCCL hangs or delivers wrong data; gloo matches p2p by tags and keeps what is sent early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.rehearsal import progress
from tests.rehearsal.communicators import P2P_MODELS, Communicator, P2PModel
from tests.rehearsal.notes import ALL_TO_ALL, SEND, Group, Notes, Op, all_groups, read

# torch's ProcessGroupNCCL refuses all others, such as int16 (ncclDataType in NCCLUtils.hpp).
_DTYPES = {
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "bool", "int32", "int64", ""),
}
_REDUCTIONS = {"", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"}
_MAX_ERRORS = 5


def report(folder: Path, world: int, *, has_ended: bool) -> str:
    """What breaks NCCL's rules in a job's notes, as a text; "" if nothing does."""
    errors = check(read(folder, world), has_ended=has_ended)
    if not errors:
        return ""
    part = "" if has_ended else " (notes of a job that did not end well: only what they hold)"
    more = [f"... and {len(errors) - _MAX_ERRORS} more"] if len(errors) > _MAX_ERRORS else []
    lines = [f"* {error}" for error in errors[:_MAX_ERRORS]] + more
    return "\n".join([f"NCCL's rules are broken, though gloo allows it{part}:", *lines, ""])


def check(ranks: Sequence[Notes], *, has_ended: bool = True) -> list[str]:
    """What breaks NCCL's rules.

    Args:
        has_ended: whether every rank has ended well. If not, operations without a counterpart are
            no error.
    """
    if errors := [*_alone(ranks)]:
        return errors
    for model in P2P_MODELS:
        errors = [*_mismatches(ranks, model, has_ended)]
        errors = errors or progress.check(ranks, model, has_ended=has_ended)
        if errors:
            return [f"with {model.text}: {error}" for error in errors]
    return []


def _alone(ranks: Sequence[Notes]) -> Iterator[str]:
    """Operations that NCCL refuses by themselves."""
    for notes in ranks:
        for op in notes.events:
            if not isinstance(op, Op):
                continue
            dtypes = set(op.dtype.split("+")) - _DTYPES
            fault = op.fault or "".join(f"dtype {dtype}" for dtype in sorted(dtypes))
            if op.reduction not in _REDUCTIONS:
                fault = f"reduction {op.reduction}"
            if fault:
                yield f"{notes.groups[op.group].text}: NCCL has no {fault}: {_said(notes.rank, op)}"


def _mismatches(ranks: Sequence[Notes], model: P2PModel, has_ended: bool) -> Iterator[str]:
    """The first difference of each communicator, and of each pair and direction on it."""
    groups = all_groups(ranks)
    collectives: dict[str, dict[int, list[Op]]] = defaultdict(lambda: defaultdict(list))
    # By communicator, sending and receiving rank: the sends, the receives.
    pairs: dict[tuple[Communicator, int, int], tuple[list[Op], list[Op]]]
    pairs = defaultdict(lambda: ([], []))
    for notes in ranks:
        for op in notes.events:
            if not isinstance(op, Op):
                continue
            if op.is_p2p:
                is_send = op.kind == SEND
                ends = (notes.rank, op.peer) if is_send else (op.peer, notes.rank)
                pairs[model.communicator(notes.rank, op), *ends][not is_send].append(op)
            else:
                collectives[op.group][notes.rank].append(op)
    for name, by_rank in collectives.items():
        yield from _first_difference(groups[name], by_rank, has_ended)
    for (communicator, source, target), (sends, receives) in pairs.items():
        where = f"{groups[communicator.group].text}, rank {source} to {target}"
        for number, (send, receive) in enumerate(zip(sends, receives, strict=False), 1):
            if (sum(send.sizes), send.dtype) != (sum(receive.sizes), receive.dtype):
                both = f"{_said(source, send)}; {_said(target, receive)}"
                yield f"{where}: number {number} differs: {both}"
                break
        else:
            shorter = min(len(sends), len(receives))
            if has_ended and len(sends) > shorter:
                yield f"{where}: never received: {_said(source, sends[shorter])}"
            if has_ended and len(receives) > shorter:
                yield f"{where}: never sent: {_said(target, receives[shorter])}"


def _first_difference(group: Group, by_rank: dict[int, list[Op]], has_ended: bool) -> Iterator[str]:
    counts = {rank: len(by_rank.get(rank, ())) for rank in group.ranks}
    shortest = min(counts.values())
    first = group.ranks[0]
    for index in range(shortest):
        expected = by_rank[first][index]
        for rank in group.ranks[1:]:
            if _must_agree(by_rank[rank][index]) != _must_agree(expected):
                both = f"{_said(first, expected)}; {_said(rank, by_rank[rank][index])}"
                yield f"{group.text}: collective {index + 1} differs: {both}"
                return
        if expected.kind == ALL_TO_ALL:
            for error in _split_errors(group, {rank: by_rank[rank][index] for rank in group.ranks}):
                yield f"{group.text}: collective {index + 1}: {error}"
                return
    if has_ended and shortest < max(counts.values()):
        rank = max(counts, key=counts.__getitem__)
        missing = [other for other in group.ranks if counts[other] == shortest]
        op = _said(rank, by_rank[rank][shortest])
        yield f"{group.text}: collective {shortest + 1} is missing on ranks {missing}: {op}"


def _must_agree(op: Op) -> tuple[object, ...]:
    sizes = () if op.kind == ALL_TO_ALL else op.sizes
    return op.kind, op.dtype, sizes, op.peer, op.reduction


def _split_errors(group: Group, ops: dict[int, Op]) -> Iterator[str]:
    for i, source in enumerate(group.ranks):
        for j, target in enumerate(group.ranks):
            sent, received = ops[source].sizes[j], ops[target].received[i]
            if sent != received:
                yield (
                    f"rank {source} sends {sent} elements to rank {target}, which receives "
                    f"{received}: {_said(source, ops[source])}; {_said(target, ops[target])}"
                )


def _said(rank: int, op: Op) -> str:
    return f"rank {rank}: {op.text}"
