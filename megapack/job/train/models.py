"""The models of a run: the policy and the critic, built from one config."""

from __future__ import annotations

from typing import Any

from megapack.job.config.sections import ModelConfig, TrainConfig
from megapack.job.data.tokenizer import ByteTokenizer
from megapack.job.gpt.build import build_model
from megapack.job.gpt.settings import Settings
from megapack.layout import Layout


def build_run_model(
    config: TrainConfig,
    model: ModelConfig,
    layout: Layout,
    reduction: Settings,
    *,
    value_head: bool,
    draws_weights: bool,
) -> list[Any]:
    """This rank's chunks of a model of the run. A collective.

    Args:
        model: of the policy or the critic, with the kernel that ranks agreed on.
        layout: the resolved layout.
        reduction, value_head, draws_weights: see `build_model`.
    """
    has_same_layers = model.num_stage_layers == config.model.num_stage_layers
    return build_model(
        model,
        layout,
        vocab_size=config.model.vocab_size or ByteTokenizer().vocab_size,
        seed=config.seed,
        distributed_optimizer=config.optim.distributed_optimizer,
        reduction=reduction,
        stage_layers=config.stage_layers if has_same_layers else None,
        draws_weights=draws_weights,
        value_head=value_head,
        splits_backward=config.plan.backward == "split",
    )
