"""From the launcher's environment to a joined process group and a device."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from megapack import cpu
from megapack.base.choices import Device
from megapack.base.known_warnings import quiet_known_warnings
from megapack.errors import ConfigError
from megapack.ranks.links import close_all
from megapack.ranks.watchdog import abort_nccl

# A rank that waits longer than this for another one is stuck: compiling and reading files take
# less time.
_TIMEOUT = datetime.timedelta(minutes=10)


def world_size() -> int:
    """Ranks of the job that torchrun started, or 1, before they meet.

    Raises:
        ConfigError: the environment is incomplete.
    """
    _check_environment()
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


def start(device: Device) -> torch.device:
    """Join the job that torchrun started, or a job of one process; call it first.

        device = launch.start("cpu")
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        ...
        launch.stop()

    Args:
        device: "cuda" (NCCL), or "cpu" (gloo, with CPU stand-ins for what Megatron-Core does on
            CUDA).

    Returns:
        This rank's device.

    Raises:
        ConfigError: no GPU, fewer GPUs than ranks, or an incomplete environment.
    """
    # Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without RANK the job has one
    # rank and needs no port. Also silences the warnings that Megatron-Core gives at every import.
    _check_environment()
    quiet_known_warnings()
    if device == "cpu":
        cpu.enable()
    elif not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no CUDA device; set device=cpu")
    else:
        index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= count:
            raise ConfigError(
                f"LOCAL_RANK={index}, but this process sees {count} GPU(s); start a rank for each "
                f"GPU of a node (torchrun --nproc-per-node={count})"
            )
        torch.cuda.set_device(index)
    backend = "gloo" if device == "cpu" else "nccl"
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=_TIMEOUT, **alone)
    return torch.device("cpu" if device == "cpu" else f"cuda:{torch.cuda.current_device()}")


def stop(*, broken: bool = False) -> None:
    """Leave the job: end megapack's threads and torch's process groups.

    Args:
        broken: a rank failed, so do not wait for the others.
    """
    # After a failure others may be in a collective that this rank will not join, and destroying
    # process groups could wait for them. So NCCL's groups are aborted, and the end of the process,
    # which the watchdog ensures, does the rest.
    if not broken:
        close_all()
        if dist.is_initialized():
            dist.destroy_process_group()
    else:
        abort_nccl()


def _check_environment() -> None:
    if "RANK" in os.environ:
        names = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ConfigError(f"RANK is set but {', '.join(missing)} is not; start with torchrun")
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        tasks = os.environ["SLURM_STEP_NUM_TASKS"]
        raise ConfigError(
            f"srun started {tasks} tasks without RANK in their environment: each would train "
            "alone; let srun start one torchrun per node"
        )
