"""The main job, which counts the communicators that NCCL would make; each rank writes its number.

torchrun --nproc-per-node 2 -m tests.dist.ranks.communicators_worker OUT_DIR CONFIG KEY=VALUE ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megapack import cli, launch

# Without those that are absent in this version of torch.
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "alltoall", "alltoall_base"),
    *("all_to_all_single", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
)


class Counter:
    """Groups, and pairs of ranks in groups, that this process has used."""

    def __init__(self) -> None:
        self.used: set[tuple[Any, ...]] = set()
        self._only_gloo: set[int] = set()
        self._is_batch = False
        # Kept, so that no two groups have one id.
        self._groups: list[Any] = []
        for name in COLLECTIVES:
            if hasattr(dist.ProcessGroup, name):
                self._count(name, lambda group, args: ())
        for name in ("send", "recv"):
            self._count(name, self._pair)
        self._watch_batches()
        self._watch_gloo()

    @property
    def number(self) -> int:
        """Communicators: those used, but of groups that are not NCCL's on GPUs either."""
        return len({key for key in self.used if key[0] not in self._only_gloo})

    def _count(self, name: str, more: Callable[[Any, Any], tuple[int, ...]]) -> None:
        run = getattr(dist.ProcessGroup, name)

        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._groups.append(group)
            self.used.add((id(group), *more(group, args)))
            return run(group, *args, **kwargs)

        setattr(dist.ProcessGroup, name, counted)

    def _pair(self, group: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        # NCCL batches run on the group's own communicator.
        return () if self._is_batch else tuple(sorted((group.rank(), args[1])))

    def _watch_batches(self) -> None:
        run = dist.batch_isend_irecv

        def batch(*args: Any) -> Any:
            self._is_batch = True
            try:
                return run(*args)
            finally:
                self._is_batch = False

        dist.batch_isend_irecv = batch

    def _watch_gloo(self) -> None:
        make = dist.distributed_c10d.new_group

        def new_group(*args: Any, **kwargs: Any) -> Any:
            group = make(*args, **kwargs)
            if kwargs.get("backend") == "gloo":
                self._only_gloo.add(id(group))
                self._groups.append(group)
            return group

        dist.new_group = dist.distributed_c10d.new_group = new_group


def main(out_dir: str, *args: str) -> int:
    """Run the job, and count until it leaves its groups."""
    counter = Counter()
    stop = launch.stop

    def write_and_stop(**kwargs: Any) -> None:
        path = Path(out_dir) / f"rank{dist.get_rank()}.json"
        path.write_text(json.dumps(counter.number), encoding="utf-8")
        stop(**kwargs)

    launch.stop = write_and_stop
    return cli.main(["train", *args, f"runs_dir={out_dir}", "train.num_batches=1"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
