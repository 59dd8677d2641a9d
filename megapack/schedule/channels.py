"""Connections between pipeline stages on which receives may be posted early.

Activations run from stage s to s + 1 and, between chunks, from the last stage to the first; this is
link s. Gradients run back along the same links. NCCL runs the sends and receives of one group in
the order in which they were posted: a receive that is posted early would hold up each send after
it. So every rank has at most one link, in one direction, in a group. With pp=4 and vpp=2 these are
four groups: links 0 and 2, links 1 and 3, each in both directions.

All pipelines share these groups, which have all ranks of the job. Groups of single pipelines would
be 512 at 1,024 GPUs with pp=8. Every rank takes part in making each of them, and with
TORCH_DIST_INIT_BARRIER=1 or a `device_id` all ranks meet there. Without a `device_id` torch makes
NCCL communicators of the two ranks of a link, and none of the group.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megapack.base.arrays import Ints
from megapack.base.jit import kernel
from megapack.plan.order import KINDS, Operation, StepOrder, chunk_ends
from megapack.ranks.groups import connecting
from megapack.ranks.place import Place

Direction = Literal["activations", "gradients"]
DIRECTIONS: tuple[Direction, ...] = ("activations", "gradients")

# Groups of a process by pipeline group and whether its last stage sends to the first, then by
# direction and link. The adapters of actor, critic and reference share them: NCCL communicators
# take memory of the GPU.
_MADE: dict[tuple[Any, bool], dict[tuple[Direction, int], Any]] = {}


class Channels:
    """This rank's connections with the pipeline stages before and after it.

    Args:
        pp_group: Megatron's pipeline group of this rank.
        vpp: chunks per stage; with more than one, the last stage sends to the first.
    """

    def __init__(self, pp_group: Any, vpp: int) -> None:
        self.stage: int = pp_group.rank()
        self.pp: int = pp_group.size()
        self.vpp = vpp
        self._ranks = dist.get_process_group_ranks(pp_group)
        self._key = pp_group, vpp > 1
        self._groups: dict[tuple[Direction, int], Any] = {}

    def make(self, device: torch.device) -> None:
        """Make the groups, unless the process has them. Collective of all ranks.

        Every rank takes part in making every group, in the same order, since torch numbers groups
        by those that a rank has seen. Then each link is used once, in one order: NCCL connects two
        ranks at their first exchange, and both wait there for each other.

        Raises:
            ScheduleError: a group cannot be made; the message names the ranks to connect.
        """
        if self.pp == 1:
            return
        if self._key not in _MADE:
            sets = link_sets(self.pp, wraps=self.vpp > 1)
            made: dict[tuple[Direction, int], Any] = {}
            for direction, links in product(DIRECTIONS, sets):
                with _connecting(self._ranks):
                    group = dist.new_group(group_desc="megapack stages")
                made |= {(direction, link): group for link in links}
            self._groups = made
            for direction, link in made:
                self._use(direction, link, device)
            _MADE[self._key] = made
        self._groups = _MADE[self._key]

    def send(self, direction: Direction, tensor: Tensor) -> Any:
        """Begin to send to the next stage of a direction; returns the work."""
        link = self.stage if direction == "activations" else (self.stage - 1) % self.pp
        to = self.target_rank(direction)
        return dist.isend(tensor, to, group=self._groups[direction, link])

    def receive(self, direction: Direction, tensor: Tensor) -> Any:
        """Begin to receive from the stage before in a direction; returns the work."""
        link = (self.stage - 1) % self.pp if direction == "activations" else self.stage
        source = self.source_rank(direction)
        return dist.irecv(tensor, source, group=self._groups[direction, link])

    def source_rank(self, direction: Direction) -> int:
        """The global rank from which this one receives."""
        return self._ranks[(self.stage + (-1 if direction == "activations" else 1)) % self.pp]

    def target_rank(self, direction: Direction) -> int:
        """The global rank to which this one sends."""
        return self._ranks[(self.stage + (1 if direction == "activations" else -1)) % self.pp]

    def _use(self, direction: Direction, link: int, device: torch.device) -> None:
        ends = (link, (link + 1) % self.pp)
        sender, receiver = ends if direction == "activations" else ends[::-1]
        if self.stage not in ends:
            return
        exchange = self.send if self.stage == sender else self.receive
        with _connecting([self._ranks[sender], self._ranks[receiver]]):
            exchange(direction, torch.zeros(1, device=device)).wait()


def link_sets(pp: int, *, wraps: bool) -> list[list[int]]:
    """The links of a pipeline in sets; no stage has two links of one set.

    Link s is from stage s to the next one.

    >>> link_sets(4, wraps=False)
    [[0, 2], [1]]
    >>> link_sets(2, wraps=True)
    [[0], [1]]
    >>> link_sets(3, wraps=True)
    [[0], [1], [2]]
    """
    links = range(pp if wraps else pp - 1)
    is_odd_circle = wraps and pp % 2 == 1
    inner = links[:-1] if is_odd_circle else links
    sets = [list(inner[0::2]), list(inner[1::2]), list(links[-1:]) if is_odd_circle else []]
    return [own for own in sets if own]


class StageOrder:
    """What one stage runs in a step, and what it receives for that.

    Messages of a direction arrive in the order in which the other stage sends them, and are kept
    until this one needs them. Forwards and backwards have levels: 1 + the higher one of the
    operation before it on its stage and of the one that it waits for. Weight gradients, for which
    nobody waits, have the level of the operation before. All messages of lower levels than an
    operation's are posted before it runs, and one more if the next one needs it. So no receive that
    is queued before an operation waits for something of a higher level, whatever holds up the
    queue: on GPUs with CUDA_DEVICE_MAX_CONNECTIONS=1 a kernel that cannot start holds up all
    streams.

    Ranks that run their forwards and backwards in one order have the same levels, wherever their
    weight gradients are. What all of them join between two operations goes by levels.

    Args:
        order: the operations of the DP rank.
        stage: this rank's pipeline stage.
        vpp: chunks per stage.
        ranks: the lines of the DP ranks that run forwards and backwards in one order, this one
            among them, see `StepOrder.lines`; () for a rank that runs its own.

    Attributes:
        operations: what the stage runs.
        levels: int64 [operations].
        messages: for each direction the (micro-batch, chunk of this stage) of the tensors that it
            receives, in the order in which they come.
        posted: for each direction the number of receives that are posted before each operation.
        first_levels: for each chunk the level of the first stage's first operation on it.
        last_levels: for each chunk the level of the first stage's last operation on it, on the
            rank of `ranks` where that is last.
        end_levels: the same of this stage.
    """

    def __init__(
        self, order: StepOrder, stage: int, vpp: int, ranks: Sequence[Sequence[str]] = ()
    ) -> None:
        pp = order.pp
        levels = _levels(order.stage, order.kind, order.waits_for, pp)
        own = order.stage == stage
        ranks = ranks or [order.lines()]
        self.end_levels = _end_levels(order, levels, stage, vpp, ranks)
        self.last_levels = _end_levels(order, levels, 0, vpp, ranks)
        self.operations: list[Operation] = order.operations(stage)
        self.levels: Ints = levels[own]
        # The next operation of a higher level.
        higher = np.searchsorted(self.levels, self.levels, side="right")
        self.messages: dict[Direction, list[tuple[int, int]]] = {}
        self.posted: dict[Direction, list[int]] = {}
        for direction, kind in zip(DIRECTIONS, "FB", strict=True):
            target = order.chunk + (1 if kind == "F" else -1)
            is_sent = (order.kind == KINDS.index(kind)) & (target >= 0) & (target < pp * vpp)
            is_own = is_sent & (target % pp == stage) & (pp > 1)
            chunks = (target[is_own] // pp).tolist()
            self.messages[direction] = list(
                zip(order.microbatch[is_own].tolist(), chunks, strict=True)
            )
            due = np.searchsorted(levels[is_own], self.levels)
            next_due = np.append(due, len(chunks))[higher]
            self.posted[direction] = np.minimum(due + 1, next_due).tolist()
        first = order.stage == 0
        self.first_levels = [int(levels[first & (order.chunk == c * pp)][0]) for c in range(vpp)]


def _end_levels(
    order: StepOrder, levels: Ints, stage: int, vpp: int, ranks: Sequence[Sequence[str]]
) -> list[int]:
    """The level at which a stage has ended each chunk on all of these DP ranks."""
    passes = levels[(order.stage == stage) & (order.kind != KINDS.index("W"))]
    return [int(passes[end - 1]) for end in chunk_ends([lines[stage] for lines in ranks], vpp)]


@kernel
def _levels(stage: Ints, kind: Ints, waits_for: Ints, pp: int) -> Ints:
    size = stage.size
    levels = np.zeros(size, dtype=np.int64)
    last = np.zeros(pp, dtype=np.int64)
    for op in range(size):
        level = last[stage[op]]
        if kind[op] != 2:
            if waits_for[op] < size:
                level = max(level, levels[waits_for[op]])
            level += 1
        levels[op] = level
        last[stage[op]] = level
    return levels


@dataclass(kw_only=True, eq=False)
class Exchange:
    """The sends and receives of one stage in one step."""

    channels: Channels
    """Of this rank."""
    order: StageOrder
    """What this stage runs."""
    shapes: Sequence[tuple[int, int, int]]
    """Of the hidden states of each micro-batch on this GPU: tokens, 1, hidden size."""
    dtype: torch.dtype | None
    device: torch.device
    place: Place
    """Gets the text of each exchange."""

    def __post_init__(self) -> None:
        self._num_posted: dict[Direction, int] = dict.fromkeys(DIRECTIONS, 0)
        self._coming: dict[tuple[Direction, int, int], tuple[Tensor, Any]] = {}
        # Sends hold their tensors until they have ended.
        self._going: deque[tuple[Direction, Tensor, Any]] = deque()

    def post(self, index: int) -> None:
        """Post receives for the operation of this index, and for the next one."""
        for direction in DIRECTIONS:
            messages = self.order.messages[direction]
            while self._num_posted[direction] < self.order.posted[direction][index]:
                microbatch, chunk = messages[self._num_posted[direction]]
                tensor = torch.empty(
                    self.shapes[microbatch],
                    dtype=self.dtype,
                    device=self.device,
                    requires_grad=True,
                )
                work = self.channels.receive(direction, tensor.detach())
                self._coming[direction, microbatch, chunk] = tensor, work
                self._num_posted[direction] += 1

    def receive(self, direction: Direction, microbatch: int, chunk: int) -> Tensor | None:
        """The tensor that came for an operation; None if it needs none."""
        coming = self._coming.pop((direction, microbatch, chunk), None)
        if coming is None:
            return None
        tensor, work = coming
        rank = self.channels.source_rank(direction)
        self.place.exchange = f"receives {direction} from rank {rank}"
        work.wait()
        return tensor

    def send(self, direction: Direction, tensor: Tensor) -> None:
        """Begin to send an operation's result to the stage that waits for it."""
        while self._going and self._going[0][2].is_completed():
            self._going.popleft()
        rank = self.channels.target_rank(direction)
        self.place.exchange = f"sends {direction} to rank {rank}"
        # The schedule may free the memory of its own tensor, whose storage stays with this one.
        tensor = tensor.detach().contiguous()
        self._going.append((direction, tensor, self.channels.send(direction, tensor)))

    def finish(self) -> None:
        """Wait for the sends."""
        assert not self._coming, "a planned receive was not used"
        while self._going:
            direction, _, work = self._going[0]
            rank = self.channels.target_rank(direction)
            self.place.exchange = f"sends {direction} to rank {rank}"
            work.wait()
            self._going.popleft()


def _connecting(ranks: Sequence[int]) -> contextlib.AbstractContextManager[None]:
    return connecting(ranks, "the pipeline stages of ranks", "set executor='megatron'")
