"""Runs the main job as on a GPU, and counts where it would wait.

torchrun --nproc-per-node 2 -m tests.dist.schedule.host_waits_job OUT_DIR CONFIG [OVERRIDE ...]
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megapack import cpu
from megapack.config.load import load_config
from megapack.job.config.sections import TrainConfig
from megapack.job.train import job
from megapack.job.train.passes import BatchPasses
from megapack.ranks.interrupt import Interrupt
from tests.dist.schedule.host_waits_worker import varlen_on_cpu, written
from tests.rehearsal.device_ledger import DeviceLedger
from tests.rehearsal.pretended_cuda import rehearsed_gpu

PHASES = {
    "build": (job.Trainer, "__init__"),
    "batch": (job.Trainer, "_train_on"),
    "log-probs": (BatchPasses, "add_logprobs"),
    "step": (job.Trainer, "_step"),
    "save": (job.Trainer, "_save"),
}
"""Phase -> what runs it. A phase within another one has its own entries."""


def main(out_dir: str, config: str, *overrides: str) -> None:
    """Train; each rank writes `rank<r>.json`: entries, and each step's number of micro-batches."""
    settings = load_config(config, list(overrides), TrainConfig)
    cpu.enable((9, 0))
    rows: list[int] = []
    with rehearsed_gpu() as ledger, varlen_on_cpu(ledger):
        for phase, (owner, name) in PHASES.items():
            method = _in_phase(ledger, phase, getattr(owner, name))
            mock.patch.object(owner, name, method).start()
        gradients = BatchPasses.gradients

        def counted(self: Any, batch: Any, index: int, *args: Any, **kwargs: Any) -> Any:
            rows.append(len(batch.plan.steps[index].ranks[0]))
            return gradients(self, batch, index, *args, **kwargs)

        mock.patch.object(BatchPasses, "gradients", counted).start()
        stop = job.launch.stop
        rank = 0

        def stopped(**kwargs: Any) -> None:
            nonlocal rank
            rank = dist.get_rank()
            stop(**kwargs)

        mock.patch.object(job.launch, "stop", stopped).start()
        with Interrupt(saves=False) as interrupt:
            job.train(settings, interrupt)
        mock.patch.stopall()
    entries = [written(entry, number) for entry, number in ledger.entries.items()]
    text = json.dumps({"rows": rows, "entries": entries}, indent=1)
    (Path(out_dir) / f"rank{rank}.json").write_text(text, encoding="utf-8")


def _in_phase(ledger: DeviceLedger, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ledger.phase(phase):
            return method(*args, **kwargs)

    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
