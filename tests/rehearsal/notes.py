"""What a rank has issued: one line of JSON per event, so that a killed rank leaves its notes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SEND = "send"
RECEIVE = "receive"
ALL_TO_ALL = "all_to_all"
RANK_FILE = "rank{}.jsonl"
_WAIT = -1


class Group(NamedTuple):
    """A process group that a GPU run makes with NCCL."""

    name: str
    """The same on all ranks, and never used for another group of the job."""
    ranks: tuple[int, ...]
    about: str = ""

    @property
    def text(self) -> str:
        about = f" ({self.about})" if self.about else ""
        return f"group {self.name}{about} of ranks {list(self.ranks)}"


class Op(NamedTuple):
    """One operation of a process group."""

    site: str
    """The lines of code that issued it, the innermost first."""
    group: str
    kind: str
    is_batched: bool = False
    """Issued by `batch_isend_irecv`."""
    peer: int = -1
    """The other rank of a send or receive, the root of a broadcast and the like; else -1."""
    dtype: str = ""
    sizes: tuple[int, ...] = ()
    """Elements of the tensors; of an all-to-all those sent to each rank of the group."""
    received: tuple[int, ...] = ()
    """Elements that an all-to-all receives from each rank of the group."""
    reduction: str = ""
    fault: str = ""
    """Why NCCL refuses the operation by itself."""
    unit: int = 0
    """Operations of one rank with the same number are one launch: a batch, or a lone operation."""

    @property
    def is_p2p(self) -> bool:
        return self.kind in (SEND, RECEIVE)

    @property
    def text(self) -> str:
        sizes = ", ".join(map(str, self.sizes[:8])) + (", ..." if len(self.sizes) > 8 else "")
        words = [self.kind, f"{self.dtype}[{sizes}]" if self.dtype else "", self.reduction]
        if self.peer >= 0:
            words.append(f"{'rank' if self.is_p2p else 'root'} {self.peer}")
        return " ".join(filter(None, words)) + (f" at {self.site}" if self.site else "")


class Wait(NamedTuple):
    """The rank waits for a launch: on a GPU, later work of its stream does."""

    unit: int


@dataclass
class Notes:
    """What one rank has issued, in order."""

    rank: int
    groups: dict[str, Group] = field(default_factory=dict)
    events: list[Op | Wait] = field(default_factory=list)


def read(folder: Path, world: int) -> list[Notes]:
    """The notes of a job's ranks; those of a rank that issued nothing are empty."""
    return [_read(folder / RANK_FILE.format(rank), rank) for rank in range(world)]


def _read(path: Path, rank: int) -> Notes:
    notes = Notes(rank)
    ops: list[Op] = []
    # What follows the last end of a line is a line within which the rank was killed.
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for word, *values in json.loads(b"[" + b",".join(lines) + b"]"):
        if word == _WAIT:
            notes.events.append(Wait(*values))
        elif word == "op":
            ops.append(
                Op(*(tuple(value) if isinstance(value, list) else value for value in values))
            )
        elif word == "group":
            name, ranks, about = values
            notes.groups[name] = Group(name, tuple(ranks), about)
        else:
            notes.events.append(ops[word]._replace(unit=values[0]))
    return notes


def line(word: str, *values: object) -> bytes:
    """A line that describes a group or an operation; operations are numbered from 0."""
    return json.dumps([word, *values], separators=(",", ":")).encode() + b"\n"


def issued(op: int, unit: int) -> bytes:
    """The line of an operation that is issued."""
    return b"[%d,%d]\n" % (op, unit)


def waited(unit: int) -> bytes:
    """The line of a wait."""
    return b"[%d,%d]\n" % (_WAIT, unit)


def all_groups(ranks: Sequence[Notes]) -> dict[str, Group]:
    """The groups that any rank has used, by name."""
    return {name: group for notes in ranks for name, group in notes.groups.items()}
