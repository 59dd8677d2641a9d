"""The problem's model on a layout, as every worker builds it."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megapack import Layout
from megapack.model import build_model, initialize_parallel
from megapack.train_config import ModelConfig
from tests.dist import problem


def build_chunks(
    layout: Layout,
    *,
    model: ModelConfig = problem.MODEL,
    distributed_optimizer: bool = False,
    value_head: bool = False,
) -> list[DistributedDataParallel]:
    """Make Megatron's groups for a layout, and this rank's chunks."""
    initialize_parallel(layout, problem.SEED)
    return build_model(
        model,
        layout,
        vocab_size=problem.VOCAB_SIZE,
        seed=problem.SEED,
        distributed_optimizer=distributed_optimizer,
        value_head=value_head,
    )


def forget_groups() -> None:
    """Destroy Megatron's groups. It only forgets them itself: hundreds of gloo threads per case
    would stay, and slow down all that follow. Four ranks were seen to wait for each other in it."""
    parallel_state.destroy_model_parallel()
    if dist.get_world_size() > 2:
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
