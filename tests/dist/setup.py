"""What workers begin with: the problem's model on a layout, and what an attempt was told."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.distributed import DistributedDataParallel

from megapack import Layout, MegapackError
from megapack.config.sections import ModelConfig
from megapack.model import build_model, initialize_parallel
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


def told(attempt: Callable[[], None]) -> str:
    """The error's class and message; "" where there was none."""
    try:
        attempt()
    except MegapackError as error:
        return f"{type(error).__name__}: {error}"
    return ""
