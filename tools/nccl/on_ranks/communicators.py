"""Makes communicators of all ranks and uses each; rank 0 writes their seconds and bytes.

python -m tools.nccl.on_ranks.communicators OUT RANKS_PER_GPU
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from megapack import launch
from tools.nccl.on_ranks.progress import note, write

COUNTS = (1, 4, 16)


def main(out: str, ranks_per_gpu: str) -> None:
    """Measure after 1, 4 and 16 of them."""
    device = launch.start("cuda")
    value = torch.zeros(1, device=device)
    agreed = dist.new_group(backend="gloo")
    # The first one loads NCCL's kernels.
    dist.all_reduce(value)
    torch.cuda.synchronize()
    dist.barrier(group=agreed)
    free = torch.cuda.mem_get_info()[0]
    begin = time.perf_counter()
    groups = []
    found = {}
    for count in range(1, max(COUNTS) + 1):
        groups.append(dist.new_group())
        dist.all_reduce(value, group=groups[-1])
        torch.cuda.synchronize()
        note(f"communicator {count}")
        if count in COUNTS:
            seconds = time.perf_counter() - begin
            # All ranks of a GPU have made theirs.
            dist.barrier(group=agreed)
            used = free - torch.cuda.mem_get_info()[0]
            found[count] = {"seconds": seconds, "bytes": used / int(ranks_per_gpu)}
    write(out, found)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
