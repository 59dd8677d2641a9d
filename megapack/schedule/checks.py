"""Settings that Megatron-Core accepts and then hangs, crashes or trains wrongly with.

Every rank refuses them before any collective: the model when the adapter is made, its settings
again at each step, since a training loop may change them, and settings of a plan when its step
begins.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import megatron.core
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config, get_te_version
from packaging.version import Version

from megapack.base.megatron import newer_than_tested
from megapack.errors import ConfigError
from megapack.layout import Layout, config_rows
from megapack.loss.distillation import TOPK_LOGPROBS
from megapack.model.attention.packed import refuse_unpacked_attention
from megapack.model.experts.model import check_experts
from megapack.model.head import ValueHead, marked, unwrapped
from megapack.model.mtp import check_mtp, num_depths
from megapack.model.parameters import is_expert
from megapack.model.settings import refuse_set
from megapack.plan.plan import Plan
from megapack.policy import Policy, check_policy

logger = logging.getLogger(__name__)

Head = Literal["vocabulary", "value"]
"""The last chunk turns hidden states into log-probs, or into one value per token."""


@functools.cache
def warn_of_newer_version() -> None:
    """Log one line per job if Megatron-Core is newer than what the tests have run with."""
    text = newer_than_tested(megatron.core.__version__)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if text and is_first:
        logger.warning("%s", text)


def group_sizes(*, has_experts: bool) -> dict[str, int]:
    """Sizes of Megatron's process groups, by the names that a layout has for them.

    Args:
        has_experts: with expert tensor parallelism; a dense model has the groups, unused.
    """
    sizes = {
        "dp": parallel_state.get_data_parallel_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }
    if has_experts:
        sizes["etp"] = parallel_state.get_expert_tensor_parallel_world_size()
    return sizes


def check_layout(layout: Layout, num_chunks: int, *, has_experts: bool) -> None:
    """Raise ConfigError unless Megatron's groups were made with this layout.

    Args:
        has_experts: compare expert tensor parallelism too; a dense model has the groups, unused.
    """
    sizes = group_sizes(has_experts=has_experts)
    for name, size in sizes.items():
        if getattr(layout, name) != size:
            raise ConfigError(
                f"the layout has {name}={getattr(layout, name)}, Megatron's process groups have "
                f"{size}; set Layout({name}={size}) or initialize_model_parallel to match"
            )
    if num_chunks != layout.vpp:
        raise ConfigError(
            f"the model has {num_chunks} chunk(s) on this rank, the layout has vpp={layout.vpp}; "
            "build one chunk per virtual stage"
        )
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if virtual != (layout.vpp if layout.vpp > 1 else None):
        raise ConfigError(
            f"Megatron's virtual_pipeline_model_parallel_size is {virtual}, the layout has "
            f"vpp={layout.vpp}; pass it to initialize_model_parallel, None if vpp=1"
        )


def check_config(config: Any, layout: Layout) -> None:
    """Raise ConfigError naming the settings that would go wrong, and what to set."""
    raise_together(*config_checks(config, layout))


def config_checks(config: Any, layout: Layout) -> list[str | Callable[[], object]]:
    """What `check_config` raises or runs, one by one."""
    checks: list[str | Callable[[], object]] = [*_wrong_settings(config, layout)]
    if config.num_moe_experts:
        checks += [lambda: check_experts(config, layout)]
    return [*checks, lambda: check_mtp(config), lambda: _check_features(config)]


def raise_together(*checks: str | Callable[[], object]) -> None:
    """Run all checks, and raise the ConfigErrors of those that fail, and further ones, as one.

    Whoever brings a model of one's own learns at once all that is wrong with it.
    """
    texts: list[str] = []
    for check in checks:
        if isinstance(check, str):
            texts.append(check)
            continue
        try:
            check()
        except ConfigError as error:
            texts.append(str(error))
    if len(texts) == 1:
        raise ConfigError(texts[0])
    if texts:
        listed = "; ".join(f"({i}) {text}" for i, text in enumerate(texts, 1))
        raise ConfigError(f"{len(texts)} settings are wrong: {listed}")


def _wrong_settings(config: Any, layout: Layout) -> Iterator[str]:
    for name, size in (("sequence_parallel", "sequence_parallel"), ("context_parallel_size", "cp")):
        given, own = getattr(config, name), getattr(layout, size)
        if given != own:
            yield (
                f"config.{name}={given} and the layout's {size}={own} differ; set both to the same "
                "value"
            )
    if not config.calculate_per_token_loss:
        yield (
            "config.calculate_per_token_loss is False: Megatron would divide each micro-batch's "
            "loss by M, and the gradient would depend on the packing; set it to True "
            "before the model is wrapped in DDP"
        )
    if layout.vpp > 1 and (config.batch_p2p_comm or not config.overlap_p2p_comm):
        yield (
            f"vpp={layout.vpp} with overlap_p2p_comm={config.overlap_p2p_comm}, batch_p2p_comm="
            f"{config.batch_p2p_comm} gives wrong gradients or hangs; set overlap_p2p_comm=True "
            "and batch_p2p_comm=False"
        )
    if layout.vpp == 1 and config.virtual_pipeline_model_parallel_size is not None:
        yield (
            f"virtual_pipeline_model_parallel_size={config.virtual_pipeline_model_parallel_size} "
            "selects the interleaved schedule; set it to None if vpp=1"
        )
    # A row of a length that FP8 products do not support fails in the kernel, on some ranks only.
    fp8 = config_rows(config)
    needed = Layout(fp8=fp8).fp8_unit_tokens
    if layout.fp8_unit_tokens % needed:
        kind = "fp8" if getattr(config, "fp8", None) else "fp4"
        recipe = getattr(config, f"{kind}_recipe", None)
        yield (
            f"config.{kind}={getattr(config, kind)!r} with {kind}_recipe={recipe!r} needs rows of "
            f"a multiple of {needed} tokens per GPU, the layout's fp8={layout.fp8!r} gives a "
            f"multiple of {layout.fp8_unit_tokens}; set Layout(fp8={fp8!r})"
        )
    yield from _wrong_graphs(config)


def _wrong_graphs(config: Any) -> Iterator[str]:
    """What is wrong with CUDA graphs of modules that see a row's samples.

    A graph replays a module with tensors of the captured shapes and without its Python code.
    Megatron's layers refuse packed rows in graphs of the attention: `cu_seqlens` is as long as the
    row has samples. A graph of a router would keep the samples of the captured row. "local" takes
    'mlp' for whole layers without experts (TransformerLayer.create_mcore_cudagraph_manager).
    """
    if not has_graphs(config):
        return
    scope, impl = _graph_scope(config), getattr(config, "cuda_graph_impl", "none")
    if impl == "local" and scope == {"mlp"}:
        scope = set()
    if scope != {"mlp"}:
        yield (
            f"CUDA graphs (cuda_graph_impl={impl!r}) of "
            f"{', '.join(sorted(scope)) or 'whole layers'}: each packed row has other samples; set "
            "cuda_graph_impl='none', or 'transformer_engine' to capture 'mlp' alone"
        )


def has_graphs(config: Any) -> bool:
    """Whether CUDA graphs are captured.

    Megatron-Core turns its older settings into this one when a config is made.
    """
    return getattr(config, "cuda_graph_impl", "none") != "none"


def _graph_scope(config: Any) -> set[str]:
    """What is captured; empty for whole layers or iterations.

    Megatron-Core 0.19 has `cuda_graph_modules` for the `cuda_graph_scope` of earlier versions.
    """
    scope = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None)
    if isinstance(scope, str):
        scope = scope.split(",")
    return {getattr(part, "name", part) for part in scope or ()} - {"full"}


def captures_whole_iterations(config: Any) -> bool:
    """Whether Megatron-LM captures whole iterations, whose replays skip all Python code."""
    return getattr(config, "cuda_graph_impl", "none") == "full_iteration" or (
        has_graphs(config) and "full_iteration" in _graph_scope(config)
    )


def _check_features(config: Any) -> None:
    unsupported = {
        "num_microbatches_with_partial_activation_checkpoints": "set it to None",
        "overlap_moe_expert_parallel_comm": "it runs another schedule; set it to False",
        "hybrid_context_parallel": "it runs another schedule; set it to False",
        "mtp_standalone": "set it to False",
        "defer_embedding_wgrad_compute": "the vocabulary projection runs outside its layer; set it "
        "to False",
        "overlap_dispatch_backward_with_experts_wgrad": "weight gradients of experts would run "
        "outside of the backward that the adapter follows; set it to False",
    }
    refuse_set(config, unsupported)
    # Both are 1 without, and Megatron-Core before 0.19 does not have them.
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if getattr(config, name, 1) > 1:
            raise ConfigError(
                f"config.{name}={getattr(config, name)}: ranks that share weights would count as "
                "data-parallel ranks of the plan; set it to 1"
            )


def check_operations(config: Any) -> None:
    """Raise ConfigError for what a list of operations cannot follow.

    CUDA graphs are captured and replayed in the order of Megatron's schedules, and so are tensors
    offloaded or stashed.
    """
    names = ["cuda_graph_impl"] if has_graphs(config) else []
    names += ["fine_grained_activation_offloading", "moe_paged_stash"]
    for name in names:
        if getattr(config, name, None):
            raise ConfigError(
                f"config.{name}={getattr(config, name)!r} follows the order of Megatron's "
                "schedules; unset it, or set executor='auto' and plan with "
                "Policy(split_samples='off', backward='joint')"
            )


def check_counts(plan: Plan, config: Any) -> None:
    """Raise ConfigError if the plan's policy contradicts its layout, or the FP8 scales on which
    ranks agree in every micro-batch."""
    check_policy(plan.policy, plan.layout, shares_fp8_scales=shares_fp8_scales(config))


def shares_fp8_scales(config: Any) -> bool:
    """Whether data-parallel ranks agree on FP8 scales after each forward and backward."""
    delayed = bool(getattr(config, "fp8", None)) and config.fp8_recipe == "delayed"
    return delayed and not config.tp_only_amax_red


def meets_in_every_microbatch(config: Any, chunks: Sequence[Any]) -> bool:
    """Whether data-parallel ranks communicate in each forward, so that all need the same M."""
    kinds = getattr(config, "moe_router_load_balancing_type", None) or ()
    wrappers = (getattr(chunk, "ddp_config", None) for chunk in chunks)
    ep = parallel_state.get_expert_model_parallel_world_size() if config.num_moe_experts else 1
    return (
        ep > 1
        or any(getattr(wrapper, "use_megatron_fsdp", False) for wrapper in wrappers)
        or shares_fp8_scales(config)
        or "global_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds)
    )


def check_planned_rows(config: Any, policy: Policy) -> None:
    """Raise ConfigError if rows of different lengths would hang or give wrong results."""
    if policy.row_shapes == 1:
        return
    if config.num_moe_experts and config.moe_token_dispatcher_type == "allgather":
        raise ConfigError(
            "moe_token_dispatcher_type='allgather' needs equal rows on all ranks; set 'alltoall', "
            "or plan with Policy(row_shape='uniform') or Policy(row_shapes=1)"
        )
    if has_graphs(config):
        raise ConfigError(
            f"CUDA graphs (cuda_graph_impl={config.cuda_graph_impl!r}) need rows of one length; "
            "set cuda_graph_impl='none', or plan with Policy(row_shapes=1)"
        )


# Version of Transformer Engine -> ways of context parallelism that run packed rows since then. Read
# from the assertions of its releases 2.9 to 2.20; 'a2a+p2p' refuses packed rows in all of them.
_CP_COMM_TYPES = {"0": "p2p", "2.10": "a2a", "2.18": "all_gather"}


def check_cp_comm(chunks: Sequence[Any], config: Any) -> None:
    """Raise ConfigError if Transformer Engine's attention would refuse the rows' communication.

    The attention of megapack.model checks its own.
    """
    modules = (module for chunk in chunks for module in chunk.modules())
    if not any(type(module).__name__ == "TEDotProductAttention" for module in modules):
        return
    given = config.cp_comm_type
    kinds = set(given) if isinstance(given, list) else {given}
    version = get_te_version()
    known = {kind for since, kind in _CP_COMM_TYPES.items() if version >= Version(since)}
    unknown = sorted(kinds - known - {None})
    if config.context_parallel_size > 1 and unknown:
        raise ConfigError(
            f"cp_comm_type={unknown[0]!r}: Transformer Engine {version} does not run packed rows "
            f"with it; set {' or '.join(map(repr, sorted(known, reverse=True)))}"
        )


def check_chunks(chunks: Sequence[Any]) -> None:
    """Raise ConfigError if samples of a row attend to each other, or DDP scales gradients."""
    for chunk in chunks:
        refuse_unpacked_attention(chunk)
        for buffer in gradient_buffers(chunk):
            if buffer.gradient_scaling_factor != 1.0:
                raise ConfigError(
                    "DDP was built without calculate_per_token_loss and scales gradients by "
                    f"{buffer.gradient_scaling_factor}; set it to True before wrapping the model"
                )


def check_expert_gradients(chunks: Sequence[Any], layout: Layout) -> None:
    """Raise ConfigError if DDP would not add experts' gradients over tensor-parallel ranks.

    See `mark_experts`.
    """
    if layout.etp == layout.tp:
        return
    for chunk in map(unwrapped, chunks):
        for name, param in chunk.named_parameters():
            if is_expert(name) and getattr(param, "allreduce", True):
                raise ConfigError(
                    f"Megatron would not add {name}'s gradients over tensor-parallel ranks: tp="
                    f"{layout.tp}, etp={layout.etp}, ep={layout.ep}; set etp={layout.tp} or ep > "
                    "1, or call megapack.model.parameters.mark_experts before wrapping the model"
                )


def check_head(chunks: Sequence[Any], head: Head) -> None:
    """Raise ConfigError if the last chunk does not have the head that the adapter was made for."""
    for chunk in map(unwrapped, chunks):
        if getattr(chunk, "post_process", False):
            layer = getattr(chunk, "output_layer", None)
            own: Head = "value" if isinstance(layer, ValueHead) else "vocabulary"
            if own != head:
                raise ConfigError(
                    f"the model has a {own} head, the adapter was made for a {head} head; set "
                    f"ScheduleAdapter(head={own!r})"
                )
            if head == "value" and num_depths(get_model_config(chunk)):
                raise ConfigError(
                    "a value head predicts no tokens, so multi-token prediction has no loss; set "
                    "mtp_num_layers=None"
                )


def checked_vocab_size(chunks: Sequence[Any], vocab_size: int | None) -> int | None:
    """The number of ids of the model's vocabulary, without padding; None if it is not known.

    Args:
        vocab_size: None = what `build_model` noted, else all rows of the model's vocabulary.

    Raises:
        ConfigError: the model has fewer rows.
    """
    rows: int | None = getattr(unwrapped(chunks[0]), "vocab_size", None)
    if vocab_size is None:
        num_ids: int | None = marked(chunks[0], "num_ids")
        return rows if num_ids is None else num_ids
    if not 1 <= vocab_size <= (rows or vocab_size):
        raise ConfigError(
            f"vocab_size={vocab_size}, the model's vocabulary has {rows} rows; pass the number of "
            "the tokenizer's ids, which is at most that"
        )
    return vocab_size


def check_objective(objective: object, head: Head) -> None:
    """Raise ConfigError if the objective does not read what the head computes."""
    reads = getattr(objective, "reads", "logprobs")
    gives = {"vocabulary": ("logprobs", TOPK_LOGPROBS), "value": ("values",)}[head]
    if reads not in gives:
        raise ConfigError(
            f"{type(objective).__name__} reads {reads}, a {head} head gives {gives[0]}; set "
            "another objective or another head"
        )


def check_entropy(with_entropy: bool, head: Head) -> None:
    """Raise ConfigError if the call asks for the entropy of a value head."""
    if with_entropy and head == "value":
        raise ConfigError("a value head has no entropy; set entropy=False")


def gradient_buffers(chunk: Any) -> list[Any]:
    """DDP's gradient buffers; empty for a module without DDP, where `buffers` is a method."""
    lists = (getattr(chunk, name, None) for name in ("buffers", "expert_parallel_buffers"))
    return [buffer for buffers in lists if isinstance(buffers, list) for buffer in buffers]


def reduces(chunks: Sequence[Any]) -> bool:
    """Whether the chunks are wrapped in a DDP whose gradients Megatron can reduce."""
    return all(hasattr(chunk, "finish_grad_sync") for chunk in chunks)


def check_reduction(config: Any, chunks: Sequence[Any], layout: Layout) -> None:
    """Raise ConfigError if gradients must be added over ranks and nothing does it."""
    is_one_rank = layout.dp == layout.cp == layout.pp == 1 and not layout.sequence_parallel
    if config.finalize_model_grads_func is None and not reduces(chunks) and not is_one_rank:
        raise ConfigError(
            f"{type(chunks[0]).__name__} does not reduce gradients over dp={layout.dp}, "
            f"cp={layout.cp}, pp={layout.pp}; wrap each chunk in Megatron's "
            "DistributedDataParallel, or set config.finalize_model_grads_func"
        )
