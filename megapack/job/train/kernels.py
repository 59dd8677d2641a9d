"""The model's kernels, which all ranks agree on before they build it."""

from __future__ import annotations

import dataclasses

import torch

from megapack.job.config.sections import TrainConfig
from megapack.job.gpt.build import attention_sizes, transformer_config
from megapack.job.gpt.settings import describe, layer_settings
from megapack.layout import Layout
from megapack.model.attention.choice import Kernels, find_kernels
from megapack.ranks.agree import agree


def agreed_kernels(config: TrainConfig, layout: Layout, *, device: torch.device) -> Kernels:
    """The kernels of a run, the same on all ranks. A collective.

    Layers of different libraries order their parameters differently: data-parallel ranks would add
    up gradients of different ones.

    Args:
        layout: the resolved layout.
        device: see `agree`.

    Raises:
        ConfigError: what the config asks for cannot run here.
        ScheduleError: ranks found different ones; the message names the ranks.
    """
    model = config.model
    is_dynamic = config.row_plan.context_parallel == "dynamic"
    sizes = attention_sizes(model, layout, has_wide_rows=is_dynamic)
    kernels = agree(
        lambda: find_kernels(
            model.attention, model.dtype, sizes, layer_pattern=model.layer_pattern
        ),
        device=device,
    )
    settings = agree(lambda: layer_settings(model, kernels.attention), device=device)
    models = [model, config.critic_model] if config.critic.hf_path else [model]

    def check() -> None:
        """Raise what `build_model` would, before there are groups."""
        for one in models:
            chosen = dataclasses.replace(one, attention=kernels.attention)
            has_same_layers = one.num_layers == model.num_layers
            transformer_config(chosen, layout, config.stage_layers if has_same_layers else None)

    agree(check, device=device)
    same = {"kernels": str(kernels), "settings": describe(settings)}
    agree(lambda: None, device=device, same=same)
    return kernels
