"""Settings that Megatron-Core accepts and then hangs, crashes or trains wrongly with.

All of them are refused when the adapter is built, on every rank alike and before any collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state

from megapack.attention import refuse_unpacked_attention
from megapack.errors import ScheduleError
from megapack.layout import Layout


def check_layout(layout: Layout, num_chunks: int) -> None:
    """Raise ScheduleError unless the layout is the one that Megatron's groups were made with."""
    found = {
        "dp": parallel_state.get_data_parallel_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }
    for name, size in found.items():
        if getattr(layout, name) != size:
            raise ScheduleError(
                f"the layout has {name}={getattr(layout, name)}, Megatron's process groups have "
                f"{size}; set Layout({name}={size}) or initialize_model_parallel to match"
            )
    if num_chunks != layout.vpp:
        raise ScheduleError(
            f"the model has {num_chunks} chunk(s) on this rank, the layout has vpp={layout.vpp}; "
            "build one chunk per virtual stage"
        )


def check_config(config: Any, layout: Layout) -> None:
    """Raise ScheduleError naming the first setting that would go wrong, and what to set."""
    if config.sequence_parallel != layout.sequence_parallel:
        raise ScheduleError(
            f"config.sequence_parallel={config.sequence_parallel} and the layout's "
            f"{layout.sequence_parallel} differ; set both alike"
        )
    if not config.calculate_per_token_loss:
        raise ScheduleError(
            "config.calculate_per_token_loss is False: Megatron would divide each micro-batch's "
            "loss by M, and the gradient would depend on the packing; set it to True"
        )
    if layout.vpp > 1 and (config.batch_p2p_comm or not config.overlap_p2p_comm):
        raise ScheduleError(
            f"vpp={layout.vpp} with overlap_p2p_comm={config.overlap_p2p_comm}, batch_p2p_comm="
            f"{config.batch_p2p_comm} gives wrong gradients or hangs; set overlap_p2p_comm=True "
            "and batch_p2p_comm=False"
        )
    if layout.vpp == 1 and config.virtual_pipeline_model_parallel_size is not None:
        raise ScheduleError(
            f"virtual_pipeline_model_parallel_size={config.virtual_pipeline_model_parallel_size} "
            "selects the interleaved schedule; set it to None where vpp=1"
        )
    if layout.cp > 1:
        raise ScheduleError(
            f"rows are not sliced over context-parallel ranks: cp={layout.cp}; set cp=1"
        )
    balancing = getattr(config, "moe_router_load_balancing_type", None)
    if config.num_moe_experts and "seq_aux_loss" in (balancing or ()):
        raise ScheduleError(
            "moe_router_load_balancing_type='seq_aux_loss' takes a packed row for one sequence; "
            "set 'aux_loss'"
        )
    _check_features(config)


def _check_features(config: Any) -> None:
    unsupported = {
        "mtp_num_layers": "multi-token prediction needs labels inside the model; set it to None",
        "num_microbatches_with_partial_activation_checkpoints": "set it to None",
        "overlap_moe_expert_parallel_comm": "it runs another schedule; set it to False",
        "hybrid_context_parallel": "it runs another schedule; set it to False",
        "mtp_standalone": "set it to False",
    }
    for name, advice in unsupported.items():
        if getattr(config, name, None):
            raise ScheduleError(f"config.{name}={getattr(config, name)} is not supported: {advice}")


def check_planned_rows(config: Any) -> None:
    """Raise ScheduleError where rows of different lengths would be wrong or stuck."""
    if config.num_moe_experts and config.moe_token_dispatcher_type == "allgather":
        raise ScheduleError(
            "moe_token_dispatcher_type='allgather' needs equal rows on all ranks; set 'alltoall', "
            "or plan with Policy(row_shape='uniform')"
        )
    if getattr(config, "cuda_graph_impl", "none") != "none":
        raise ScheduleError(
            f"cuda_graph_impl={config.cuda_graph_impl!r} needs rows of one shape; set it to "
            "'none', or plan with Policy(row_shape='uniform')"
        )


def check_model(chunks: Sequence[Any]) -> None:
    """Raise ScheduleError where a chunk would let packed samples attend to each other."""
    for chunk in chunks:
        refuse_unpacked_attention(chunk)
