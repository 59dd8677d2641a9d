"""What a stage runs and receives for an order: messages, early receives, DDP's communication."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megapack.errors import ConfigError
from megapack.plan.order import StepOrder, step_order
from megapack.plan.order_text import read_order
from megapack.schedule.channels import DIRECTIONS, Direction, StageOrder, link_sets
from megapack.schedule.checks import check_operations
from megapack.schedule.operations import _Communication
from tests.random_orders import random_order, with_random_weights

pytestmark = pytest.mark.unit


def drawn(seed: int) -> tuple[StepOrder, int]:
    """A random legal order, and its chunks per stage."""
    rng = random.Random(seed)
    pp = rng.choice([2, 3, 4])
    vpp = rng.choice([1, 2])
    count = rng.randint(1, 7)
    lines = random_order(rng, pp=pp, vpp=vpp, num_microbatches=count, split=rng.random())
    return read_order(lines, vpp=vpp, num_microbatches=count), vpp


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("wraps", [False, True])
def test_no_stage_has_two_links_of_a_set(pp: int, wraps: bool) -> None:
    sets = link_sets(pp, wraps=wraps)
    assert sorted(link for links in sets for link in links) == list(range(pp if wraps else pp - 1))
    for links in sets:
        ends = [stage for link in links for stage in (link, (link + 1) % pp)]
        assert len(ends) == len(set(ends))


def test_messages_of_megatrons_order() -> None:
    order = step_order(2, 2, 4, 2, False)
    first, second = (StageOrder(order, stage, 2) for stage in range(2))
    chunks = [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert [m for m in second.messages["activations"] if m[1] == 0] == chunks
    # The first chunk has no activations to receive, the last one no gradients.
    assert {chunk for _, chunk in first.messages["activations"]} == {1}
    assert {chunk for _, chunk in second.messages["gradients"]} == {0}
    assert {chunk for _, chunk in first.messages["gradients"]} == {0, 1}


def test_a_pass_without_backwards_has_no_gradients() -> None:
    order = StageOrder(step_order(2, 1, 8, 1, True), 1, 1)
    assert order.messages["gradients"] == []
    # The first stage is at most one forward ahead by levels, so few receives wait.
    assert order.posted["activations"] == [2, 3, 4, 5, 6, 7, 8, 8]


class Queue:
    """A GPU with one hardware queue: a command that cannot start holds up all that come later."""

    def __init__(self, order: StageOrder, stage: int, pp: int, chunks: int) -> None:
        self.commands: list[tuple[Any, ...]] = []
        posted: dict[Direction, int] = dict.fromkeys(DIRECTIONS, 0)
        for index, op in enumerate(order.operations):
            for direction in DIRECTIONS:
                while posted[direction] < order.posted[direction][index]:
                    message = order.messages[direction][posted[direction]]
                    self.commands.append(("receive", direction, message, stage))
                    posted[direction] += 1
            direction = DIRECTIONS[op.kind == "B"]
            message = (op.microbatch, op.chunk)
            if op.kind != "W" and message in order.messages[direction]:
                self.commands.append(("wait", direction, message, stage))
            step = {"F": 1, "B": -1, "W": 0}[op.kind]
            target = op.chunk * pp + stage + step
            if step and 0 <= target < chunks:
                sent = (op.microbatch, target // pp)
                self.commands.append(("send", direction, sent, target % pp))


@pytest.mark.parametrize("seed", range(200))
def test_one_hardware_queue_does_not_hang(seed: int) -> None:
    order, vpp = drawn(seed)
    pp = order.pp
    stages = [StageOrder(order, stage, vpp) for stage in range(pp)]
    queues = [Queue(own, stage, pp, pp * vpp).commands for stage, own in enumerate(stages)]
    begun: dict[str, set[Any]] = {"send": set(), "receive": set()}

    def has_come(key: Any) -> bool:
        return key in begun["send"] and key in begun["receive"]

    def starts(command: tuple[Any, ...]) -> bool:
        kind, direction, message, target = command
        if kind == "wait":
            return has_come((direction, message, target))
        # Exchanges of one channel run one after the other.
        own = stages[target].messages[direction]
        before = own[: own.index(message)]
        if not all(has_come((direction, other, target)) for other in before):
            return False
        begun[kind].add((direction, message, target))
        return True

    while any(queues):
        before = sum(map(len, queues))
        for queue in queues:
            while queue and starts(queue[0]):
                queue.pop(0)
        assert sum(map(len, queues)) < before, [queue[:2] for queue in queues]


def joint_commands(order: StageOrder, stage: int, vpp: int, shared: set[int]) -> list[str]:
    """What a rank joins, operation after operation: shared forwards and backwards, reductions."""
    recorded = Recorded(vpp)
    communication = _Communication(
        recorded.chunks, recorded.config, order, is_first_stage=stage == 0, reduces_after=True
    )
    with communication:
        for index, op in enumerate(order.operations):
            communication.before(index)
            if op.kind != "W" and op.microbatch in shared:
                recorded.calls.append(str(op))
            communication.after(index)
    return [call for call in recorded.calls if not call.startswith("o")]


def joined_by_ranks(seed: int, *, knows_all_ranks: bool) -> Iterator[list[list[str]]]:
    """What each of three ranks joins on a stage, stage after stage; their orders differ in weight
    gradients."""
    rng = random.Random(seed)
    pp, vpp, count = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.randint(2, 6)
    base = random_order(rng, pp=pp, vpp=vpp, num_microbatches=count, split=0.0)
    ranks = [with_random_weights(rng, base) for _ in range(3)]
    shared = set(range(count)) if rng.random() < 0.5 else {rng.randrange(count)}
    known = ranks if knows_all_ranks else ()
    for stage in range(pp):
        joined = []
        for lines in ranks:
            order = read_order(lines, vpp=vpp, num_microbatches=count)
            joined.append(joint_commands(StageOrder(order, stage, vpp, known), stage, vpp, shared))
        yield joined


@pytest.mark.parametrize("seed", range(100))
def test_ranks_that_meet_join_everything_in_one_order(seed: int) -> None:
    for first, *others in joined_by_ranks(seed, knows_all_ranks=True):
        assert "start 0" in first
        assert all(joined == first for joined in others)


def test_ranks_that_know_only_their_own_order_would_not() -> None:
    differ = [
        any(first != other for first, *others in stages for other in others)
        for stages in (joined_by_ranks(seed, knows_all_ranks=False) for seed in range(100))
    ]
    assert sum(differ) > 20


class Recorded:
    """Chunks and a config whose functions record their calls."""

    def __init__(self, vpp: int, **functions: bool) -> None:
        self.calls: list[str] = []
        self.chunks = [self._chunk(chunk) for chunk in range(vpp)]
        self.config = SimpleNamespace(
            no_sync_func=[lambda c=c: self._no_sync(c) for c in range(vpp)],
            grad_sync_func=self._functions("reduce", vpp, functions),
            param_sync_func=self._functions("gather", vpp, functions),
        )

    def _chunk(self, chunk: int) -> Any:
        return SimpleNamespace(
            parameters=lambda: iter(()),
            ddp_config=SimpleNamespace(overlap_grad_reduce=True),
            start_grad_sync=lambda: self.calls.append(f"start {chunk}"),
        )

    def _functions(self, name: str, vpp: int, wanted: dict[str, bool]) -> Any:
        if not wanted.get(name):
            return None
        return [lambda _, c=c: self.calls.append(f"{name} {c}") for c in range(vpp)]

    @contextlib.contextmanager
    def _no_sync(self, chunk: int) -> Iterator[None]:
        self.calls.append(f"off {chunk}")
        yield
        self.calls.append(f"on {chunk}")

    def run(self, order: StepOrder, stage: int, *, reduces_after: bool = False) -> list[str]:
        own = StageOrder(order, stage, len(self.chunks))
        communication = _Communication(
            self.chunks,
            self.config,
            own,
            is_first_stage=stage == 0,
            reduces_after=reduces_after,
        )
        with communication:
            for index, op in enumerate(own.operations):
                communication.before(index)
                self.calls.append(str(op))
                communication.after(index)
        return self.calls


def test_ddp_reduces_inside_the_last_backward() -> None:
    calls = Recorded(1).run(step_order(2, 1, 2, 1, False), 0)
    assert calls == ["off 0", "0F0", "1F0", "0B0", "on 0", "1B0", "off 0", "on 0"]


def test_each_chunk_reduces_inside_its_last_backward() -> None:
    calls = Recorded(2).run(step_order(2, 2, 2, 2, False), 1)
    begin = calls.index("1B1")
    # All are on in it, and off again until the other chunk's last one.
    assert calls[begin - 2 : begin + 3] == ["on 1", "on 0", "1B1", "off 0", "off 1"]
    begin = calls.index("1B0")
    assert calls[begin - 2 : begin + 3] == ["on 1", "on 0", "1B0", "off 0", "off 1"]


def test_chunks_are_reduced_in_one_order_if_weight_gradients_come_later() -> None:
    lines = ["0F0 0F1 0B1 0B0 0W0 0W1", "0F0 0F1 0B1 0B0 0W1 0W0"]
    order = read_order(lines, vpp=2, num_microbatches=1)
    for stage in range(2):
        calls = Recorded(2).run(order, stage, reduces_after=True)
        reductions = [call for call in calls if call.startswith("start")]
        # The first stage has ended chunk 0 earlier.
        assert reductions == ["start 1", "start 0"]
        assert calls.index("start 1") > calls.index("0W1")


def test_the_configs_functions_are_called_as_by_megatrons_interleaved_schedule() -> None:
    order = step_order(2, 2, 4, 2, False)
    for stage in range(2):
        calls = Recorded(2, gather=True, reduce=True).run(order, stage)
        assert calls[2:4] == ["gather 0", "gather 1"]
        assert [call for call in calls if call.startswith("reduce")] == ["reduce 1", "reduce 0"]
        # All stages start when the first one, the latest, has ended the chunk.
        assert calls.index("reduce 1") > calls.index("3B1")
        assert not any(call.startswith("start") for call in calls)


def test_without_interleaving_the_first_stage_reduces_inside_its_last_backward() -> None:
    order = step_order(2, 1, 2, 1, False)
    first, second = (Recorded(1, reduce=True).run(order, stage) for stage in range(2))
    assert "reduce 0" not in first
    assert first[first.index("1B0") - 1] == "on 0"
    assert second.index("reduce 0") > second.index("1B0")
    assert second.index("on 0") > second.index("1B0")


@pytest.mark.parametrize(
    "name", ["cuda_graph_impl", "fine_grained_activation_offloading", "moe_paged_stash"]
)
def test_what_follows_megatrons_order_is_refused(name: str) -> None:
    config = SimpleNamespace(**{name: "local" if name == "cuda_graph_impl" else True})
    with pytest.raises(ConfigError, match=f"config.{name}=.*set executor='auto'"):
        check_operations(config)
    check_operations(SimpleNamespace())
