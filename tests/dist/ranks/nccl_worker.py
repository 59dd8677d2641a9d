"""Breaks one of NCCL's rules in a way that gloo accepts.

torchrun --nproc-per-node 2 -m tests.dist.ranks.nccl_worker NAME
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megapack import Layout, build_dp_schedule, launch
from megapack.base.choices import Executor
from megapack.schedule import ScheduleAdapter
from megapack.schedule.channels import Channels
from tests.dist import problem
from tests.dist.setup import build_chunks


def swap_collectives() -> None:
    operations = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    for operation in operations if dist.get_rank() == 0 else reversed(operations):
        dist.all_reduce(torch.ones(3), op=operation)


def receive_more() -> None:
    _exchange(torch.ones(4), torch.ones(8))


def use_groups_in_opposite_orders(backend: str | None = None) -> None:
    groups = [dist.new_group(backend=backend) for _ in range(2)]
    for group in groups:
        dist.barrier(group=group)
    own = groups if dist.get_rank() == 0 else groups[::-1]
    for work in [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in own]:
        work.wait()


def use_cpu_groups_in_opposite_orders() -> None:
    """Legal: a GPU run has gloo for these groups too."""
    use_groups_in_opposite_orders("gloo")


def split_batches() -> None:
    """Megatron's exchanges with planned shapes, without ncclGroupStart around both directions."""
    batch = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: [work for op in ops for work in batch([op])]
    _step("megatron")


def share_a_channel() -> None:
    """The executor's receives, posted early, in one group with its sends."""
    make = Channels.make

    def make_one(self: Channels, device: torch.device) -> None:
        make(self, device)
        self._groups = dict.fromkeys(self._groups, next(iter(self._groups.values())))

    Channels.make = make_one  # type: ignore[method-assign]
    _step("operations")


def fail_after_a_difference() -> None:
    swap_collectives()
    raise RuntimeError("a fault of the job's own")


def _exchange(sent: Any, received: Any) -> None:
    if dist.get_rank() == 0:
        dist.send(sent, 1)
    else:
        dist.recv(received, 0)


def _step(executor: Executor) -> None:
    layout = Layout(pp=2)
    adapter = ScheduleAdapter(build_chunks(layout), layout=layout, executor=executor)
    batch = problem.make_batch(8)
    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=64)
    adapter.step(plan, batch, objective=problem.OBJECTIVE)


BREAKS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        *(swap_collectives, receive_more, use_groups_in_opposite_orders),
        *(use_cpu_groups_in_opposite_orders, split_batches, share_a_channel),
        fail_after_a_difference,
    )
}

if __name__ == "__main__":
    launch.quiet_known_warnings()
    launch.start("cpu")
    BREAKS[sys.argv[1]]()
    launch.stop()
