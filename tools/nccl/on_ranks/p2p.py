"""Times exchanges between ranks; rank 0 writes microseconds and GB/s after each.

    python -m tools.nccl.on_ranks.p2p TASK OUT

Operations are issued back to back, as in a step, and the seconds are over their number. GB/s are of
the bytes that a rank receives: of an all-reduce 2 (n - 1) / n times its size, as in a ring.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megapack import launch
from tests.rehearsal import recorder
from tools.nccl.measured import read_task
from tools.nccl.on_ranks.measured import Together
from tools.nccl.on_ranks.progress import note, write

Operation = Callable[[], None]
_DTYPE = torch.bfloat16
# Bytes that the operations of one measurement move at most, but for the first few.
_MOST_BYTES = 1 << 30
_LEAST = 5
_WARM_UP = 3


def operation(kind: str, size: int, group: Any, device: torch.device) -> tuple[Operation, float]:
    """A kind of exchange of so many bytes, and the part of them that a rank receives.

    Args:
        group: of all ranks, for lone sends.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    numel = size // _DTYPE.itemsize
    sent, received = (torch.ones(numel, dtype=_DTYPE, device=device) for _ in range(2))
    after, before = (rank + 1) % world, (rank - 1) % world

    def batched() -> None:
        both = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def lone() -> None:
        if rank % 2 == 0:
            work = dist.isend(sent, after, group=group)
        else:
            work = dist.irecv(received, before, group=group)
        assert work is not None
        work.wait()

    def all_reduce() -> None:
        dist.all_reduce(received)

    def all_to_all() -> None:
        dist.all_to_all_single(received, sent)

    others = (world - 1) / world
    kinds = {
        "batched": (batched, 1.0),
        "lone": (lone, 1.0),
        "all_reduce": (all_reduce, 2 * others),
        "all_to_all": (all_to_all, others),
    }
    return kinds[kind]


def main(path: str, out: str) -> None:
    """Measure all kinds, the small sizes first, until the time is over."""
    task = read_task(path)
    device = launch.start("cuda")
    together = Together(task["end"])
    group = dist.new_group()
    found: dict[str, Any] = {}
    for size in task["sizes"]:
        for kind in task["kinds"]:
            note(f"{kind} {size}")
            if together.is_over():
                break
            run, received = operation(kind, size, group, device)
            repeats = max(_LEAST, min(task["repeats"], _MOST_BYTES // size))

            def repeat(times: int, run: Operation = run) -> None:
                for _ in range(times):
                    run()

            repeat(_WARM_UP)
            seconds = together.seconds(lambda repeats=repeats: repeat(repeats)) / repeats
            rate = received * size / seconds / 1e9
            found[f"{kind} {size // 1024} KiB"] = {"us": 1e6 * seconds, "gb_s": rate}
            write(out, found)
    launch.stop()


if __name__ == "__main__":
    with recorder.unchecked():
        main(*sys.argv[1:])
