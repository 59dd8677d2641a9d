"""The toy model's chunks with the settings that a host gives Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer import TransformerConfig

from megapack import Layout
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import build
from tests.dist import problem
from tests.dist.setup import on_kernels_of_job


def host_chunks(
    layout: Layout,
    settings: dict[str, Any],
    *,
    model: ModelConfig = problem.MODEL,
    before_wrapping: Callable[[list[Any]], object] | None = None,
) -> list[DistributedDataParallel]:
    """This rank's chunks; the host has made Megatron's groups.

    Args:
        settings: of the config; they are there before DDP reads `calculate_per_token_loss`, by
            which it averages gradients over data-parallel ranks or sums them.
        before_wrapping: see `build_model`.
    """

    def configured(*args: Any, **kwargs: Any) -> TransformerConfig:
        config = transformer_config(*args, **kwargs)
        for name, value in settings.items():
            setattr(config, name, value)
        return config

    transformer_config = build.transformer_config
    with mock.patch.object(build, "transformer_config", configured):
        return build.build_model(
            on_kernels_of_job(model),
            layout,
            vocab_size=problem.VOCAB_SIZE,
            seed=problem.SEED,
            distributed_optimizer=False,
            before_wrapping=before_wrapping,
        )


def bridge_settings(layout: Layout) -> dict[str, Any]:
    """What AReaL and verl set of Megatron's config, with Megatron-Bridge's providers."""
    return {
        "variable_seq_lengths": True,
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
        "calculate_per_token_loss": False,
    }
