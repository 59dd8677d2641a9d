"""Whether a job's operations come to an end on NCCL's queues.

A launch starts when the launch before it on the same communicator has ended, and all that its rank
waited for before; it ends when its counterparts on the other ranks have started. So nothing is
buffered: a send holds up its communicator until the receive starts. Where torch makes communicators
at their first use, the host waits there for the other ranks. The launches are nodes of a graph, in
which a cycle is a deadlock.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.rehearsal.communicators import Communicator, P2PModel
from tests.rehearsal.notes import SEND, Group, Notes, Op, Wait, all_groups


class Rule(enum.Enum):
    """From the weakest to the strictest; each holds with those before it."""

    STREAMS = "a deadlock"
    """Each communicator runs beside the others."""
    CONNECTION = "a deadlock with CUDA_DEVICE_MAX_CONNECTIONS=1"
    """Launches of a rank start in the order of issue: one that cannot start holds up all later
    ones, also on other streams."""
    COLLECTIVES = "collectives in different orders on the communicators of several ranks"
    """NCCL guarantees progress of communicators at the same time only if operations are issued in
    the same order on all ranks. Checked by letting a rank run one collective at a time. Sends and
    receives are left out: one in each direction at a time, and beside collectives, is how
    Megatron's schedules overlap them, with few thread blocks each."""


class _Launch:
    """The operations of one unit of a rank."""

    __slots__ = ("communicator", "number", "ops", "rank")

    def __init__(self, rank: int, communicator: Communicator) -> None:
        self.rank = rank
        self.communicator = communicator
        self.ops: list[Op] = []
        self.number = -1

    @property
    def is_collective(self) -> bool:
        return not self.ops[0].is_p2p

    @property
    def text(self) -> str:
        return f"rank {self.rank}: " + " and ".join(op.text for op in self.ops)


def check(ranks: Sequence[Notes], model: P2PModel, *, has_ended: bool = True) -> list[str]:
    """The first deadlock, under the weakest rule that has one; [] if there is none.

    The notes must hold `nccl_rules`'s rules of matching. If the job has not ended, launches whose
    counterparts are absent are left out.
    """
    if not _Graph(ranks, model, Rule.COLLECTIVES, has_ended).stuck():
        return []
    for rule in Rule:
        graph = _Graph(ranks, model, rule, has_ended)
        if graph.stuck():
            return [f"{rule.value}, in which each waits for the next:{graph.cycle()}"]
    raise AssertionError("a stricter rule has the edges of a weaker one")


class _Graph:
    def __init__(
        self, ranks: Sequence[Notes], model: P2PModel, rule: Rule, has_ended: bool
    ) -> None:
        self._rule = rule
        self._model = model
        self._has_ended = has_ended
        self._groups = all_groups(ranks)
        # What a node stands for, in an error.
        self._what: list[_Launch | Communicator | None] = []
        self._after: list[list[int]] = []
        self._num_before: list[int] = []
        # By communicator: for each rank, the node of its host at the first use.
        self._first_uses: dict[Communicator, dict[int, tuple[int, int]]] = defaultdict(dict)
        self._collectives: dict[Communicator, dict[int, list[_Launch]]]
        self._collectives = defaultdict(lambda: defaultdict(list))
        self._pairs: dict[tuple[Communicator, int, int], tuple[list[_Launch], list[_Launch]]]
        self._pairs = defaultdict(lambda: ([], []))
        for notes in ranks:
            self._add_rank(notes)
        self._join_first_uses()
        self._join_launches()

    def stuck(self) -> list[int]:
        """The nodes that never happen."""
        left = self._num_before.copy()
        ready = [node for node, count in enumerate(left) if count == 0]
        for node in ready:
            for later in self._after[node]:
                left[later] -= 1
                if left[later] == 0:
                    ready.append(later)
        return [node for node, count in enumerate(left) if count]

    def cycle(self) -> str:
        """What waits in a cycle, each for the next."""
        before: dict[int, int] = {}
        stuck = self.stuck()
        for node in stuck:
            for later in self._after[node]:
                before.setdefault(later, node)
        node = stuck[0]
        path: dict[int, None] = {}
        while node not in path:
            path[node] = None
            node = before[node]
        nodes = list(path)
        texts = map(self._text, nodes[nodes.index(node) :])
        return "".join(f"\n    {text}" for text in dict.fromkeys(filter(None, texts)))

    def _text(self, node: int) -> str:
        what = self._what[node]
        if what is None:
            return ""
        if isinstance(what, Communicator):
            ranks = list(what.ranks(self._groups[what.group]))
            return f"the first use of the communicator of ranks {ranks} of group {what.group}"
        return f"{what.text} on {self._groups[what.communicator.group].text}"

    def _node(self, what: _Launch | Communicator | None = None) -> int:
        self._what.append(what)
        self._after.append([])
        self._num_before.append(0)
        return len(self._what) - 1

    def _edge(self, node: int, later: int) -> None:
        self._after[node].append(later)
        self._num_before[later] += 1

    def _add_rank(self, notes: Notes) -> None:
        """The nodes of a rank. A launch's start is node n, its end n + 1."""
        host = self._node()
        launches: dict[int, _Launch] = {}
        last_of: dict[Communicator, _Launch] = {}
        last: _Launch | None = None
        last_collective: _Launch | None = None
        for event in notes.events:
            if isinstance(event, Wait):
                awaited = launches[event.unit]
                now = self._node()
                self._edge(host, now)
                self._edge(awaited.number + 1, now)
                host = now
                continue
            launch = launches.get(event.unit)
            if launch is not None:
                self._add_op(launch, event)
                continue
            communicator = self._model.communicator(notes.rank, event)
            launch = launches[event.unit] = _Launch(notes.rank, communicator)
            if not self._model.has_device_id and communicator not in last_of:
                made = self._node(communicator)
                self._first_uses[communicator][notes.rank] = host, made
                self._edge(host, made)
                host = made
            start = self._node(launch)
            end = self._node(launch)
            launch.number = start
            self._edge(host, start)
            self._edge(start, end)
            if communicator in last_of:
                self._edge(last_of[communicator].number + 1, start)
            if self._rule is not Rule.STREAMS and last is not None:
                self._edge(last.number, start)
            self._add_op(launch, event)
            if launch.is_collective:
                if self._rule is Rule.COLLECTIVES and last_collective is not None:
                    self._edge(last_collective.number + 1, start)
                last_collective = launch
            last = last_of[communicator] = launch

    def _add_op(self, launch: _Launch, op: Op) -> None:
        launch.ops.append(op)
        if not op.is_p2p:
            self._collectives[launch.communicator][launch.rank].append(launch)
        elif op.kind == SEND:
            self._pairs[launch.communicator, launch.rank, op.peer][0].append(launch)
        else:
            self._pairs[launch.communicator, op.peer, launch.rank][1].append(launch)

    def _join_first_uses(self) -> None:
        for communicator, by_rank in self._first_uses.items():
            members = communicator.ranks(self._groups[communicator.group])
            if len(by_rank) < len(members) and not self._has_ended:
                continue
            joined = self._node(communicator)
            for host, made in by_rank.values():
                self._edge(host, joined)
                self._edge(joined, made)
            if len(by_rank) < len(members):
                self._edge(joined, joined)  # it is never made

    def _join_launches(self) -> None:
        for communicator, by_rank in self._collectives.items():
            for launches in _columns(by_rank, self._groups[communicator.group]):
                started = self._node()
                for launch in launches:
                    self._edge(launch.number, started)
                    self._edge(started, launch.number + 1)
        for sends, receives in self._pairs.values():
            for send, receive in zip(sends, receives, strict=False):
                self._edge(send.number, receive.number + 1)
                self._edge(receive.number, send.number + 1)


def _columns(by_rank: dict[int, list[_Launch]], group: Group) -> Iterator[tuple[_Launch, ...]]:
    """The launches of each collective that all ranks have issued."""
    return zip(*(by_rank.get(rank, ()) for rank in group.ranks), strict=False)
