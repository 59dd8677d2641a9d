"""Ends Megatron's process groups between the cases of a job."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d


def end_model_parallel() -> None:
    """Forget Megatron's groups, on all ranks, and end them.

    `destroy_model_parallel` only forgets them. Each of gloo's groups keeps two threads that poll:
    after 40 cases 3,000 threads took four fifths of a job's CPU seconds.
    """
    groups = list(_groups(list(vars(parallel_state).values())))
    parallel_state.destroy_model_parallel()
    if dist.get_world_size() > 1:
        # A rank that is late in a collective would lose its peers.
        dist.barrier()
    while groups:
        _end(groups.pop())
    # Threads end with the last reference to their group, and modules in cycles hold some.
    gc.collect()


def _end(group: dist.ProcessGroup) -> None:
    """Megatron has some groups under several names, and the job's own."""
    if group is not dist.group.WORLD and group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def _groups(values: list[Any]) -> Iterator[dist.ProcessGroup]:
    for value in values:
        if isinstance(value, dist.ProcessGroup):
            yield value
        elif isinstance(value, list | tuple):
            yield from _groups(list(value))
