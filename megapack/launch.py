"""From the launcher's environment to a joined process group and a device."""

from __future__ import annotations

import datetime
import functools
import logging
import os
import warnings

import torch
import torch.distributed as dist

from megapack import cpu
from megapack.base.choices import Device
from megapack.errors import ConfigError
from megapack.ranks.links import close_all
from megapack.ranks.watchdog import abort_nccl

# A rank that waits longer than this for another one is stuck: compiling and reading files take
# less time.
_TIMEOUT = datetime.timedelta(minutes=10)

# Module of Megatron-Core -> start of a warning that it logs since 0.19, for every model. GPTModel
# gets no new features; and DDP computes a layout that Megatron-LM's training loop passes in.
_LOGGED = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param",
}


def start(device: Device) -> torch.device:
    """Join the job that torchrun started, or a job of one.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without RANK the job has one
    rank and needs no port.

    Raises:
        ConfigError: the device is cuda and torch finds none, or the environment is incomplete.
    """
    _check_environment()
    if device == "cpu":
        cpu.enable()
    elif not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no CUDA device; set device=cpu")
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "gloo" if device == "cpu" else "nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT
        )
    return torch.device("cpu" if device == "cpu" else f"cuda:{torch.cuda.current_device()}")


def quiet_known_warnings() -> None:
    """Silence harmless warnings of Megatron-Core and torch, which every rank would print at import.

    They are about optional packages, deprecated names that Megatron-Core still uses, and its plans.
    """
    for message in (
        r"(Transformer Engine and )?Apex (is|are) not installed",
        r"full scope is deprecated",
        r"The \.grad attribute of a Tensor that is not a leaf",
        r"`torch\.distributed\.\w+_tensor` is deprecated",
        r"If you are using transformer_engine as the transformer implementation",
        r"The following imports from `dynamic_context\.py`",
        r"The 'megatron\.core\.transformer\.custom_layers",
        r"Using deprecated internal API from Transformer Engine",
        r"transformer_engine\.[\w.]+ is deprecated",
        r"absl\.logging is not installed",
        r"MimoModelConfig is experimental",
    ):
        warnings.filterwarnings("ignore", message=message)
    for module, start in _LOGGED.items():
        logging.getLogger(module).addFilter(functools.partial(_starts_otherwise, start))


def _starts_otherwise(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)


def stop(*, broken: bool = False) -> None:
    """Leave the job.

    Args:
        broken: whether a rank failed. Others may then be in a collective that this rank will not
            join, and destroying process groups could wait for them. So NCCL's groups are aborted,
            and the end of the process, which the watchdog ensures, does the rest.
    """
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
