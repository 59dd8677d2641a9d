"""One rank cannot write one file of a checkpoint, in turn; each rank writes its errors.

torchrun --nproc-per-node 2 -m tests.dist.checkpoint.disk_worker OUT_DIR ASYNC_SAVE
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megapack import Layout, build_dp_schedule, launch
from megapack.config import load_config
from megapack.job.checkpoint import Checkpoints
from megapack.job.checkpoint.folders import Position
from megapack.job.checkpoint.state import RunState
from megapack.job.config.sections import OptimConfig, TrainConfig
from megapack.job.gpt.optimizer import build_optimizer
from tests.dist import problem
from tests.dist.setup import build_chunks, error_of, write_report
from tests.dist.spawn import ROOT

LAYOUT = Layout(pp=2)
CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
FIELDS = ("old_logprobs",)
# The rank that fails, and the file that it cannot write.
FAULTS = [
    (0, "common.pt"),
    (0, "__0_0_0.distcp"),
    (1, "__1_0_0.distcp"),
    (0, ".metadata"),
    (0, "metadata.json"),
    (0, "rank0.pt"),
    (1, "rank1.pt"),
    (0, "batch.pt"),
    (0, "checkpoint.json"),
]


@contextmanager
def full_disk(name: str) -> Iterator[None]:
    """Within the block, neither Python nor torch can write files of this name on this rank."""
    original_open = io.open
    original_save = torch.save

    def is_affected(file: Any) -> bool:
        return isinstance(file, str | Path) and Path(file).name.startswith(name)

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if is_affected(file) and mode.startswith("w"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return original_open(file, mode, *args, **kwargs)

    def save(values: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if is_affected(file):
            # The error of torch's writer in C++.
            raise RuntimeError("PytorchStreamWriter failed writing file data.pkl\nframe #0")
        original_save(values, file, *args, **kwargs)

    with (
        mock.patch.object(io, "open", open_),
        mock.patch.object(builtins, "open", open_),
        mock.patch.object(torch, "save", save),
    ):
        yield


def main(out_dir: str, async_save: str) -> None:
    """Save, fail to save in every way, save again, and load the last checkpoint."""
    device = launch.start("cpu")
    chunks = build_chunks(LAYOUT, distributed_optimizer=True)
    optimizer = build_optimizer(OptimConfig(distributed_optimizer=True), chunks, bf16=False)
    # This step creates Adam's state, which a checkpoint contains.
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.step()
    settings = ["name=run", f"runs_dir={out_dir}", "train.resume=auto"]
    settings.append(f"train.async_save={async_save}")
    config = load_config(CONFIG, settings, TrainConfig)
    checkpoints = Checkpoints(
        config=config,
        layout=LAYOUT,
        state=RunState(chunks, optimizer),
        data_digest="",
        device=device,
    )
    batch = problem.make_batch()
    plan = build_dp_schedule(batch.lengths, layout=LAYOUT, max_tokens_per_gpu=64, num_steps=2)

    def save(num_steps: int) -> None:
        position = Position(num_steps=num_steps, step_in_batch=1)
        checkpoints.save(position, plan, batch, FIELDS)
        checkpoints.finish()

    save(1)
    results: list[dict[str, Any]] = []
    for rank, name in FAULTS:
        with full_disk(name) if dist.get_rank() == rank else nullcontext():
            error = error_of(lambda: save(2))
        # Rank 0 removes the written files, and other ranks do not wait for that.
        dist.barrier()
        results.append({"error": error, "left": sorted(os.listdir(checkpoints.folder))})
        dist.barrier()
    save(3)
    checkpoint = checkpoints.find()
    assert checkpoint is not None
    position = checkpoints.load(checkpoint, FIELDS)
    results.append({"error": "", "left": [position.num_steps]})
    write_report(out_dir, results)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
