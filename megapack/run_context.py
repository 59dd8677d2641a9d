"""What stands around one run of Megatron's schedule: its process groups, settings and modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection


def process_groups() -> ProcessGroupCollection:
    """The groups that a schedule with a communicator of its own asks for."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    # Megatron-Core 0.19 asks for these two as well.
    groups.dp = parallel_state.get_data_parallel_group()
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return groups


@contextlib.contextmanager
def config_for(config: Any, overrides: dict[str, Any]) -> Iterator[None]:
    """Set the step's settings on Megatron's config and put the user's back."""
    before = {name: getattr(config, name) for name in overrides}
    for name, value in overrides.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@contextlib.contextmanager
def evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block the chunks are in evaluation mode."""
    # Per module: a user may have frozen some of them in evaluation mode.
    modes = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
