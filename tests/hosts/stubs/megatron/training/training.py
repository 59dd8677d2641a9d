"""How train_step and evaluate of Megatron-LM call the schedule: same names and keywords."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func


def train_step(
    forward_step_func: Any, data_iterator: Any, model: list[Any], num_microbatches: int
) -> dict[str, float]:
    """Gradients of one step; the reported losses as Megatron-LM reduces them."""
    forward_backward_func = get_forward_backward_func()
    for chunk in model:
        chunk.zero_grad_buffer()
    reports = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=64,
        micro_batch_size=2,
        decoder_seq_length=64,
        forward_only=False,
        adjust_tensor_shapes_fn=None,
        force_all_reduce=False,
        p2p_communicator=None,
        pg_collection=None,
    )
    names = reports[0] if reports else {}
    return {name: float(torch.cat([r[name].view(-1) for r in reports]).mean()) for name in names}


def evaluate(
    forward_step_func: Any, data_iterator: Any, model: list[Any], num_microbatches: int
) -> dict[str, float]:
    """One evaluation step."""
    with torch.no_grad():
        reports = get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=64,
            micro_batch_size=2,
            decoder_seq_length=64,
            forward_only=True,
            adjust_tensor_shapes_fn=None,
            p2p_communicator=None,
            pg_collection=None,
        )
    return {name: float(sum(r[name] for r in reports)) / len(reports) for name in reports[0]}
