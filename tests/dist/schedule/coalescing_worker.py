"""Collectives that one handle waits for, as in Megatron's DDP, with a rank that comes late.

torchrun --nproc-per-node 2 -m tests.dist.schedule.coalescing_worker OUT_DIR
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megapack import launch


def main(out_dir: str) -> None:
    """Write the sums over ranks that each rank has after its wait."""
    launch.start("cpu")
    group = dist.group.WORLD
    found = {}
    for name, device in {"ddp": None, "fp8 rows": torch.device("cpu")}.items():
        sums = [torch.full((1000,), float(dist.get_rank() + 1)) for _ in range(2)]
        if dist.get_rank() == 1:
            time.sleep(0.3)
        with dist._coalescing_manager(group, device=device, async_ops=True) as handle:
            for tensor in sums:
                # As Megatron's and Transformer Engine's own calls.
                dist.all_reduce(tensor, group=group, async_op=device is None)
        handle.wait()
        found[name] = [tensor.unique().tolist() for tensor in sums]
    (Path(out_dir) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
