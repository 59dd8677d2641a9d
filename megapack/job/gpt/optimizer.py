"""Megatron-Core's optimizer and learning-rate schedule from the config of the main job."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import megatron.core
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megapack.errors import ConfigError, ScheduleError, of_all_ranks
from megapack.job.config.sections import OptimConfig
from megapack.model.head import unwrapped

# Options that Megatron's config has under the same names.
_FIELDS = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")


def check_optimizer(optim: OptimConfig) -> None:
    """Raise ConfigError if the installed Megatron-Core does not have the optimizer."""
    if optim.name == "adam":
        return
    try:
        from megatron.core.optimizer import emerging_optimizers as emerging
    except ImportError:
        raise ConfigError(
            f"optim.name={optim.name} needs Megatron-Core 0.18 or later, this is "
            f"{megatron.core.__version__}; install that, or set optim.name=adam"
        ) from None
    if not emerging.HAVE_EMERGING_OPTIMIZERS:
        raise ConfigError(
            f"optim.name={optim.name} needs the package emerging-optimizers (Python 3.12 or "
            "later); pip install emerging-optimizers, or set optim.name=adam"
        )


def build_optimizer(
    optim: OptimConfig,
    chunks: list[DistributedDataParallel],
    bf16: bool,
    vision: DistributedDataParallel | None = None,
) -> Any:
    """Megatron's Adam or Muon with gradient clipping, for chunks that `build_model` made.

    A tower is trained with the same settings, and its gradients count in the same norm.

    Args:
        optim: the options, as in a config's section `optim`.
        chunks: this rank's chunks in DDP.
        bf16: whether the weights are bf16; the optimizer then keeps them in fp32.
        vision: the tower that `build_vision` made.

    Raises:
        ConfigError: options that this Megatron-Core does not have, or Muon for a tower.
    """
    check_optimizer(optim)
    names = [*_FIELDS]
    if optim.name == "muon":
        fields = (field.name for field in dataclasses.fields(optim))
        names += filter(lambda name: name.startswith("muon_"), fields)
    config = OptimizerConfig(
        optimizer=optim.name,
        **{name: getattr(optim, name) for name in names},
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=optim.distributed_optimizer,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
    )
    first = get_megatron_optimizer(config, chunks)
    tower = unwrapped(vision)
    if tower is None or not tower.is_trained:
        return first
    if optim.name == "muon":
        raise ConfigError("optim.name=muon trains no towers; set optim.name=adam, or freeze it")
    second = get_megatron_optimizer(
        config, [vision], use_gloo_process_groups=False, pg_collection=tower.groups
    )
    return ChainedOptimizer([*first.chained_optimizers, *second.chained_optimizers])


def build_lr_schedule(
    optim: OptimConfig, optimizer: Any, total_steps: int
) -> OptimizerParamScheduler:
    """Megatron's learning-rate schedule for a run of `total_steps` optimizer steps."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.lr if optim.decay == "constant" else optim.min_lr,
        lr_warmup_steps=optim.warmup_steps,
        lr_decay_steps=max(total_steps, optim.warmup_steps + 1),
        lr_decay_style=optim.decay,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def check_norm(grad_norm: float) -> None:
    """Raise ScheduleError if the gradient norm is not finite.

    The norm is equal on all ranks, so all of them raise. Each rank's own gradients were checked
    before.
    """
    if not math.isfinite(grad_norm):
        raise of_all_ranks(
            ScheduleError(
                f"the gradient norm is {grad_norm}, though every rank's own gradients are finite; "
                "resume from the last checkpoint, with a lower optim.lr"
            )
        )
