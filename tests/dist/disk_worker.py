"""One rank after the other cannot write one file of a checkpoint; notes what each rank was told.

torchrun --nproc-per-node 2 -m tests.dist.disk_worker OUT_DIR
"""

from __future__ import annotations

import builtins
import errno
import io
import json
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
from megapack.checkpoint import Checkpoints
from megapack.checkpoint.folders import Position
from megapack.checkpoint.state import RunState
from megapack.config import load_config
from megapack.config.sections import OptimConfig, TrainConfig
from megapack.model.optimizer import build_optimizer
from tests.dist import problem
from tests.dist.setup import build_chunks, told
from tests.dist.spawn import ROOT

LAYOUT = Layout(pp=2)
CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
FIELDS = ("old_logprobs",)
# Rank that fails, file that it cannot write.
FAULTS = [
    (0, "common.pt"),
    (0, "__0_0.distcp"),
    (1, "__1_0.distcp"),
    (0, ".metadata"),
    (0, "metadata.json"),
    (0, "rank0.pt"),
    (1, "rank1.pt"),
    (0, "batch.pt"),
    (0, "checkpoint.json"),
]


@contextmanager
def full_disk(name: str) -> Iterator[None]:
    """Files of this name cannot be written on this rank, by Python or by torch."""
    opened, saved = io.open, torch.save

    def is_it(file: Any) -> bool:
        return isinstance(file, str | Path) and Path(file).name.startswith(name)

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if is_it(file) and mode.startswith("w"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return opened(file, mode, *args, **kwargs)

    def save(values: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if is_it(file):
            # As torch's writer in C++ tells it.
            raise RuntimeError("PytorchStreamWriter failed writing file data.pkl\nframe #0")
        saved(values, file, *args, **kwargs)

    with (
        mock.patch.object(io, "open", open_),
        mock.patch.object(builtins, "open", open_),
        mock.patch.object(torch, "save", save),
    ):
        yield


def main(out_dir: str) -> None:
    """Save, fail to save in every way, save again, and load that."""
    device = launch.start("cpu")
    chunks = build_chunks(LAYOUT, distributed_optimizer=True)
    optimizer = build_optimizer(OptimConfig(distributed_optimizer=True), chunks, bf16=False)
    # Makes Adam's state, which a checkpoint holds.
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.step()
    settings = ["name=run", f"runs_dir={out_dir}", "train.resume=auto"]
    config = load_config(CONFIG, settings, TrainConfig)
    checkpoints = Checkpoints(
        config,
        LAYOUT,
        RunState(chunks, optimizer),
        has_reference=False,
        data_digest="",
        device=device,
    )
    batch = problem.make_batch()
    plan = build_dp_schedule(batch.lengths, layout=LAYOUT, max_tokens_per_gpu=64, num_steps=2)

    def save(num_steps: int) -> None:
        position = Position(num_steps=num_steps, step_in_batch=1)
        checkpoints.save(position, plan, batch, FIELDS)

    save(1)
    found: list[dict[str, Any]] = []
    for rank, name in FAULTS:
        with full_disk(name) if dist.get_rank() == rank else nullcontext():
            error = told(lambda: save(2))
        # The first rank removes what was written, which it need not wait for.
        dist.barrier()
        found.append({"error": error, "left": sorted(os.listdir(checkpoints.folder))})
        dist.barrier()
    save(3)
    checkpoint = checkpoints.find()
    assert checkpoint is not None
    position = checkpoints.load(checkpoint, FIELDS)
    found.append({"error": "", "left": [position.num_steps]})
    Path(out_dir, f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1])
