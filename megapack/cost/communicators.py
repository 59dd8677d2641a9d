"""NCCL communicators on one GPU of the main job, and an estimate of their memory.

NCCL makes a communicator at the first use of a process group, also of a group of one rank. Without
a `device_id`, torch makes one more for each pair of ranks of a group that exchange tensors outside
of a batch. A test counts them in real runs over gloo; nothing here was measured on a GPU.
"""

from __future__ import annotations

from megapack.base.choices import Executor
from megapack.layout import Layout

BYTES = 2**29
"""Memory of one communicator, read and not measured by us. NCCL allocates a buffer per channel and
peer: 10 MiB, of which NCCL_BUFFSIZE is 4, on up to 32 channels. Its users saw 544 MB for a group of
two A100 (NVIDIA/nccl issue 964), 0.47 GB for each peer in an all-to-all of eight H100 (issue 1685)
and 388 MiB for a group of one RTX 3060 (sgl-project/sglang pull request 35538).
NCCL_MAX_NCHANNELS lowers it."""


def num_communicators(
    layout: Layout,
    stage: int,
    *,
    executor: Executor = "megatron",
    wide_sizes: int = 0,
    distributed_optimizer: bool = True,
    tied_embeddings: bool = False,
) -> int:
    """Communicators of a GPU of one pipeline stage.

    A GPU of 1,024 with tp=8, pp=8 and vpp=4 has five for groups, and pairs with two stages: two of
    Megatron's schedule, or four of a list of operations.

    >>> num_communicators(Layout(dp=16, tp=8, pp=8, vpp=4), 0)
    7
    >>> num_communicators(Layout(dp=16, tp=8, pp=8, vpp=4), 0, executor="operations")
    9
    >>> num_communicators(Layout(), 0)
    4

    Args:
        executor: Megatron's schedules or lists of operations.
        wide_sizes: numbers of data-parallel ranks above 1 that rows lie over.
        distributed_optimizer, tied_embeddings: see `MemoryModel`.
    """
    # All ranks; data with context parallelism; pipeline; the optimizer's sums. Megatron uses each
    # with one rank, too.
    count = 4 + int(layout.tp > 1) + int(layout.cp > 1)
    is_end = stage in (0, layout.pp - 1)
    count += int(tied_embeddings and layout.pp > 1 and is_end)
    if layout.ep > 1:
        # Expert parallelism, the experts' data parallelism and their own sums of the optimizer.
        count += 2 + int(not distributed_optimizer)
    # Expert tensor parallelism; both together.
    count += int(layout.etp > 1) + int(layout.ep * layout.etp > 1)
    return count + wide_sizes + _pairs(layout, is_end=is_end, executor=executor)


def _pairs(layout: Layout, *, is_end: bool, executor: Executor) -> int:
    """Pairs with the stages before and after: per direction in lists of operations."""
    if layout.pp == 1:
        return 0
    has_both = layout.vpp > 1 or not is_end
    if executor == "operations":
        return 4 if has_both else 2
    # Megatron's schedule batches its exchanges with vpp=1. With pp=2 its second pair is one of all
    # ranks.
    return 2 if layout.vpp > 1 else 0
