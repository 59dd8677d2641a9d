"""Which calls of a host run on planned shapes, and with which options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megapack.errors import ConfigError, ScheduleError
from megapack.schedule import checks

Lengths = Literal["read", "exchange"]
"""Where row lengths come from: the host's batches, or Megatron's exchange of shapes."""
NonFinite = Literal["warn", "error", "ignore"]
"""What happens on a NaN or an infinity in hidden states, losses or gradients."""

# Settings of Megatron's config under which its schedule takes other forward steps or sends other
# tensors than these calls can follow.
_OTHER_SCHEDULES = ("overlap_moe_expert_parallel_comm", "hybrid_context_parallel")


def why_not_planned(config: Any, others: Mapping[str, Any]) -> str:
    """Why a call of a host runs on Megatron's own schedule; "" if it is planned.

    Args:
        others: the call's arguments that `PlannedSchedule` does not name.
    """
    if not parallel_state.model_parallel_is_initialized():
        return "Megatron's global process groups are not set up"
    for name in _OTHER_SCHEDULES:
        if getattr(config, name, False):
            return f"config.{name} is set, which takes another forward step"
    if checks.exchanges_wider_states(config):
        return "its stages exchange the streams of hyper-connections, which are wider"
    if checks.captures_whole_iterations(config):
        return "CUDA graphs of whole iterations replay it without its Python code"
    if others.get("adjust_tensor_shapes_fn") is not None:
        return "its caller passes adjust_tensor_shapes_fn"
    communicator = others.get("p2p_communicator")
    if communicator is not None and type(communicator) is not P2PCommunicator:
        return f"its caller passes a {type(communicator).__name__}"
    has_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
    if has_stages and (communicator is None) != (others.get("pg_collection") is None):
        return "its caller passes one of p2p_communicator and pg_collection"
    return ""


def meets_in_every_microbatch(config: Any, chunks: Sequence[Any]) -> bool:
    """Whether data-parallel ranks communicate in each forward, so that all need the same M."""
    kinds = getattr(config, "moe_router_load_balancing_type", None) or ()
    shards_params = any(
        getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) for chunk in chunks
    )
    spreads_experts = (
        bool(config.num_moe_experts) and parallel_state.get_expert_model_parallel_world_size() > 1
    )
    return (
        spreads_experts
        or shards_params
        or checks.shares_fp8_scales(config)
        or "global_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds)
    )


def check_options(lengths: str, non_finite: str) -> None:
    """Raise ConfigError for unknown options of a `PlannedSchedule`."""
    for name, value, kinds in (
        ("lengths", lengths, Lengths),
        ("non_finite", non_finite, NonFinite),
    ):
        known = get_args(kinds)
        if value not in known:
            raise ConfigError(f"{name}={value!r}; set one of {', '.join(known)}")


def check_equal_counts(counts: Sequence[int]) -> None:
    """Raise ScheduleError if the ranks of a model replica have different M."""
    if len(set(counts)) > 1:
        raise ScheduleError(
            f"the ranks of one pipeline have M={min(counts)} and M={max(counts)} micro-batches; "
            "give all of them the same batches"
        )
