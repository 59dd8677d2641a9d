"""The main job as a function: the threads and handlers that it leaves in the process.

torchrun --nproc-per-node 2 -m tests.dist.ranks.leftovers_worker OUT_DIR [overrides]
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import warnings
from typing import Any

import torch.distributed as dist

from megapack.config import load_config
from megapack.errors import MegapackError
from megapack.job.config.sections import TrainConfig
from megapack.job.train import train
from megapack.ranks.interrupt import Interrupt
from tests.dist.ranks.rank_fault_worker import CONFIG, SETTINGS
from tests.dist.setup import write_report


def state() -> dict[str, Any]:
    """Threads, handlers and groups that a job could leave behind."""
    names = sorted(t.name for t in threading.enumerate() if t.name.startswith("megapack-"))
    before = signal.set_wakeup_fd(-1)
    return {
        "threads": names,
        "wakeup_fd": before,
        "handler": str(signal.getsignal(signal.SIGTERM)),
        "process_group": dist.is_initialized(),
    }


def main(out_dir: str, *overrides: str) -> None:
    """Run the job, and record the state before and after."""
    layout = ("layout.pp=1", "layout.vpp=1", "train.num_batches=1")
    settings = [*SETTINGS, *layout, f"runs_dir={out_dir}/runs", *overrides]
    results: dict[str, Any] = {"error": "", "before": state()}
    warnings.simplefilter("always", ResourceWarning)
    try:
        with Interrupt(saves=False) as interrupt:
            train(load_config(CONFIG, settings, TrainConfig), interrupt)
    except MegapackError as error:
        results["error"] = str(error)
    # Python warns of unclosed sockets and files when it frees them.
    gc.collect()
    results["after"] = state()
    write_report(out_dir, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
