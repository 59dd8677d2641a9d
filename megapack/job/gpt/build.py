"""A Megatron-Core GPT for packed rows: its config, model chunks and data parallelism."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import megatron.core
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.utils import is_te_min_version

from megapack import cpu
from megapack.base.choices import Kernel
from megapack.base.known_warnings import LOGGED
from megapack.cost.sizes import FLASH_WIDTH, VOCAB_MULTIPLE
from megapack.cost.stages import StageLayers, stage_layers_of
from megapack.errors import ConfigError
from megapack.job.config.architecture import RECURRENT
from megapack.job.config.model_checks import check_sizes
from megapack.job.config.sections import ModelConfig, OptimConfig
from megapack.job.gpt.init import freeze, initialize_by_name
from megapack.job.gpt.rope import set_rope
from megapack.job.gpt.settings import Settings, layer_settings, reduction_settings
from megapack.job.gpt.specs import block_spec, mtp_spec, packed_norm
from megapack.layout import Layout, round_up
from megapack.model.attention.choice import choose_attention, has_rope_fusion
from megapack.model.attention.indexer import Indexer
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.attention.te_backend import AttentionSizes
from megapack.model.experts.latent import whole_projections
from megapack.model.experts.router import PackedRouter
from megapack.model.fp32 import in_bf16
from megapack.model.head import mark_head, replace_output_layer
from megapack.model.parameters import mark_experts, mark_splits
from megapack.model.replaced import replaced


def _same(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


# Fields of Megatron's TransformerConfig -> the option, or property, of a model that gives each.
_FIELDS: Mapping[str, str] = {
    **_same("num_layers", "hidden_size", "num_attention_heads", "normalization", "qk_layernorm"),
    **_same("rotary_interleaved", "gated_linear_unit", "glu_linear_offset"),
    **_same("layernorm_zero_centered_gamma"),
    "num_query_groups": "query_groups",
    "kv_channels": "head_width",
    "ffn_hidden_size": "dense_width",
    "layernorm_epsilon": "norm_epsilon",
    "softmax_scale": "attention_scale",
    "add_qkv_bias": "qkv_bias",
    "add_bias_linear": "linear_bias",
    "activation_func_clamp_value": "activation_clamp",
    "init_method_std": "init_std",
    "mtp_loss_scaling_factor": "mtp_loss_coef",
}
_EXPERT_FIELDS: Mapping[str, str] = {
    "num_moe_experts": "num_experts",
    "moe_router_topk": "moe_top_k",
    "moe_ffn_hidden_size": "expert_width",
    "moe_shared_expert_intermediate_size": "moe_shared_ffn_hidden_size",
    "moe_shared_expert_gate": "moe_shared_gate",
    "moe_router_num_groups": "moe_num_groups",
    "moe_router_group_topk": "moe_group_top_k",
    "moe_router_topk_scaling_factor": "moe_route_scale",
    "moe_router_score_function": "moe_score_function",
    "moe_aux_loss_coeff": "moe_balance_loss_coef",
    "moe_router_bias_update_rate": "moe_bias_update_rate",
    **_same("moe_latent_size"),
}
_LATENT_FIELDS: Mapping[str, str] = {
    **_same("q_lora_rank", "kv_lora_rank", "v_head_dim", "rotary_base"),
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    # Not Megatron's experimental_attention_variant, whose layers these replace.
    "dsa_indexer_n_heads": "indexer_num_heads",
    "dsa_indexer_head_dim": "indexer_head_dim",
    "dsa_indexer_topk": "indexer_top_k",
    "dsa_indexer_loss_coeff": "indexer_loss_coef",
}
_HYBRID_FIELDS = _same(*RECURRENT, "attention_output_gate")
# The same from a model's `rope_scaling`, for multi-latent attention, and from a layout.
_ROPE_FIELDS = {
    **_same("original_max_position_embeddings", "beta_fast", "beta_slow"),
    **_same("mscale", "mscale_all_dim"),
}
_LAYOUT_FIELDS: Mapping[str, str] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}


def _read(source: object, table: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a table, with their values in a model, a layout or a scaling."""
    return {field: getattr(source, name) for field, name in table.items()}


def transformer_config(
    model: ModelConfig, layout: Layout, stage_layers: StageLayers | None = None
) -> TransformerConfig:
    """Megatron's config for a model and a layout, with the settings that packed rows need.

    Args:
        stage_layers: layers of each pipeline chunk; None = equally many.

    Raises:
        ConfigError: the attention, FP8 recipe or a setting cannot run on this machine, or layers or
            sizes do not divide. This needs no process groups.
    """
    check_sizes(model, layout)
    gpt_class(model)
    split = stage_layers_of(model.num_layers, layout, stage_layers)
    kernel = choose_attention(model.attention, model.dtype, attention_sizes(model, layout))
    dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
    pipelined, interleaved = layout.pp > 1, layout.vpp > 1
    config = (MLATransformerConfig if model.uses_mla else TransformerConfig)(
        **_read(model, _FIELDS),
        **_read(layout, _LAYOUT_FIELDS),
        activation_func=_activation(model),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # With it Megatron replaces biases of Transformer Engine's layers, which lose what the layer
        # has marked them with (see `weight_gradients.check`).
        use_cpu_initialization=kernel != "te" and not cpu.uses_cuda(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=model.dtype == "bf16",
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        # Any split of Megatron's keys in the one form that can express all of them.
        pipeline_model_parallel_layout=None
        if split.is_even or model.layer_pattern
        else split.to_text(model.mtp_num_layers),
        microbatch_group_size_per_vp_stage=layout.group_size if interleaved else None,
        sequence_parallel=layout.sequence_parallel,
        # The interleaved schedule is correct only with overlap; see schedule.checks.check_config.
        overlap_p2p_comm=pipelined and interleaved,
        batch_p2p_comm=not interleaved,
        # A stage's output is freed once it is sent: pp micro-batches of them would stay otherwise.
        # Not under interleaving, see schedule.runner.
        deallocate_pipeline_outputs=pipelined and not interleaved,
        calculate_per_token_loss=True,
        # Megatron's fused kernels of multi-latent attention take yarn only, others have no scale.
        apply_rope_fusion=has_rope_fusion()
        and not model.uses_mla
        and model.rope_scaling.rotation_scale == 1,
        transformer_impl="transformer_engine" if kernel == "te" else "local",
        mtp_num_layers=model.mtp_num_layers or None,
        **_latent_attention(model),
        **_windows_and_sinks(model),
        **(_read(model, _HYBRID_FIELDS) if model.layer_pattern is not None else {}),
        **_experts(model),
        **_fp8(model, kernel),
        **_faster(model, kernel),
        **without_cuda_graphs(),
    )
    # Megatron refuses a bias of softmax scores, which `PackedRouter` adds.
    config.moe_router_enable_expert_bias = model.has_expert_bias
    if kernel != "te":
        packed_norm(config)
    return config


def attention_sizes(
    model: ModelConfig, layout: Layout, *, has_wide_rows: bool = False
) -> AttentionSizes:
    """The attention of one tensor-parallel rank.

    Args:
        has_wide_rows: rows may lie over several DP ranks.
    """
    is_local = model.local_layers if model.has_global_heads else [True] * model.num_layers
    windows = dict.fromkeys(zip(is_local, model.windows, strict=True))
    sizes = AttentionSizes(
        heads=model.num_attention_heads // layout.tp,
        groups=max(1, model.query_groups // layout.tp),
        head_width=model.head_width,
        value_width=model.v_head_dim,
        cp=layout.cp,
        most_cp=layout.cp * layout.widths[-1] if has_wide_rows else None,
        windows=tuple(window for local, window in windows if local),
        softmax_type=_softmax_type(model),
        is_sparse=model.indexer_top_k is not None,
        is_capped=model.attention_score_cap is not None,
    )
    width, groups = model.global_heads
    if not model.has_global_heads or width > FLASH_WIDTH:
        return sizes
    own = dataclasses.replace(
        sizes,
        head_width=width,
        groups=max(1, groups // layout.tp),
        windows=tuple(window for local, window in windows if not local),
    )
    return dataclasses.replace(sizes, others=own.kinds)


def _windows_and_sinks(model: ModelConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {"softmax_type": _softmax_type(model)}
    if model.attention_window is not None:
        # Megatron counts the tokens before a token's own.
        settings["window_size"] = (model.attention_window - 1, 0)
        settings["window_attn_skip_freq"] = [int(window is not None) for window in model.windows]
    return settings


def _softmax_type(model: ModelConfig) -> Literal["vanilla", "learnable"]:
    return "learnable" if model.attention_sinks else "vanilla"


def _latent_attention(model: ModelConfig) -> dict[str, Any]:
    if not model.uses_mla:
        return {}
    rope = model.rope_scaling
    return {
        **_read(model, _LATENT_FIELDS),
        **_read(rope, _ROPE_FIELDS),
        "multi_latent_attention": True,
        "rope_type": "yarn" if rope.kind == "yarn" else "rope",
        # Also without yarn Megatron scales the scores by the logarithm of this factor.
        "rotary_scaling_factor": rope.factor if rope.kind == "yarn" else 1.0,
    }


def _experts(model: ModelConfig) -> dict[str, Any]:
    if model.num_experts is None:
        return {}
    return {
        **_read(model, _EXPERT_FIELDS),
        # Softmax over all experts instead of the chosen ones, whose scores then do not sum to 1. A
        # softmax over a single chosen expert would always be 1.
        "moe_router_pre_softmax": model.moe_score_function == "softmax"
        and (model.moe_top_k == 1 or not model.moe_norm_top_k),
        "moe_layer_freq": [int(letter == "E") for letter in model.mlp_letters],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_z_loss_coeff": model.moe_z_loss_coef or None,
        # The default, allgather, needs rows of equal length on all ranks.
        "moe_token_dispatcher_type": "alltoall",
    }


def _activation(model: ModelConfig) -> Any:
    functional = torch.nn.functional
    functions = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": gelu_tanh,
        "squared_relu": squared_relu,
        "quick_gelu": quick_gelu,
    }
    return functions[model.activation or ("silu" if model.gated_linear_unit else "gelu")]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU with a tanh in place of the error function."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def _fp8(model: ModelConfig, kernel: Kernel) -> dict[str, Any]:
    if model.fp8 is None:
        return {}
    if not cpu.uses_cuda():
        raise ConfigError(f"model.fp8={model.fp8} needs a GPU; set model.fp8=null on a CPU")
    if kernel != "te":
        raise ConfigError(
            f"model.fp8={model.fp8} needs Transformer Engine's layers, but attention is {kernel}; "
            "set model.attention=te to see what is missing, or model.fp8=null"
        )
    if model.fp8 == "nvfp4":
        if not is_te_min_version("2.7.0.dev0"):
            raise ConfigError(
                "model.fp8=nvfp4 needs Transformer Engine 2.7; install a later one, or set another "
                "recipe"
            )
        return {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
    # Gradients have a wider range than E4M3 covers: E5M2 is used for them, except with scales per
    # block, which make E4M3 sufficient.
    by_block = model.fp8 in ("blockwise", "mxfp8")
    return {"fp8": "e4m3" if by_block else "hybrid", "fp8_recipe": model.fp8}


def without_cuda_graphs() -> dict[str, Any]:
    """An empty scope: Megatron-Core 0.16.1 warns about its own default; 0.19 renamed the field."""
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    known = ("cuda_graph_modules", "cuda_graph_scope")
    return next(({name: []} for name in known if name in names), {})


def _faster(model: ModelConfig, kernel: Kernel) -> dict[str, Any]:
    """The settings that choose faster kernels, and what is recomputed to save memory."""
    chosen = dict(layer_settings(model, kernel))
    if model.recompute == "none":
        return chosen
    if model.recompute == "full":
        whole = {"recompute_method": "uniform", "recompute_num_layers": 1}
        return {**chosen, "recompute_granularity": "full", **whole}
    modules = list(model.recompute_modules)
    needs_te = [name for name in modules if name in ("layernorm", "moe_act")]
    if needs_te and kernel != "te":
        raise ConfigError(
            f"model.recompute_modules has {needs_te[0]}, which Megatron recomputes only with "
            f"Transformer Engine's layers, but attention is {kernel}; leave it out"
        )
    if "moe_act" in modules and not chosen["moe_grouped_gemm"]:
        raise ConfigError(
            "model.recompute_modules has moe_act, which needs moe_grouped_gemm; set it to true, or "
            "leave moe_act out"
        )
    return {**chosen, "recompute_granularity": "selective", "recompute_modules": modules}


def initialize_parallel(layout: Layout, seed: int) -> None:
    """Create Megatron's process groups and random states for a layout."""
    parallel_state.initialize_model_parallel(
        **_read(layout, _LAYOUT_FIELDS),
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
    )
    model_parallel_cuda_manual_seed(seed)


def build_model(
    model: ModelConfig,
    layout: Layout,
    *,
    vocab_size: int,
    seed: int,
    distributed_optimizer: bool,
    stage_layers: StageLayers | None = None,
    value_head: bool = False,
    model_class: type[torch.nn.Module] | None = None,
    reduction: Settings | None = None,
    draws_weights: bool = True,
    splits_backward: bool = False,
    before_wrapping: Callable[[list[Any]], object] | None = None,
) -> list[DistributedDataParallel]:
    """Build this rank's GPT chunks for packed rows, wrapped in Megatron's DDP.

        model = ModelConfig.from_hf("models/Qwen3-0.6B", dtype="bf16")
        chunks = build_model(
            model, layout, vocab_size=model.vocab_size, seed=0, distributed_optimizer=True
        )

    Args:
        model: the model's options, of a folder or of a config's section `model`.
        layout: the sizes of Megatron's process groups.
        vocab_size: number of the tokenizer's ids; rows are padded to a multiple of 128. The padding
            gets neither probability nor gradient.
        seed: initial weights depend on it alone, not on the layout.
        distributed_optimizer: shard gradients and optimizer state over data-parallel ranks.
        stage_layers: layers of each pipeline chunk; None: equally many.
        value_head: one fp32 value per token instead of logits; needs untied embeddings.
        model_class: a subclass of GPTModel, such as one whose forward has more inputs.
        reduction: settings of DDP; None: the defaults, without overlap of parameter gathers.
        draws_weights: False leaves matrices as they were allocated, for weights that you load next.
            Drawing 4 billion numbers takes minutes.
        splits_backward: Transformer Engine's layers put off their weight gradients. That is what
            Policy(backward="split") needs, and Megatron's own schedules never compute them.
        before_wrapping: called with the chunks before DDP wraps them, to load weights or add
            adapters. DDP must know by then what is frozen.

    Raises:
        ConfigError: options that Megatron or packed rows do not allow, or a value head with tied
            embeddings.
    """
    own_class = gpt_class(model, model_class)
    config = transformer_config(model, layout, stage_layers)
    # Set later: Megatron refuses it in the constructor without its own schedule that uses it.
    config.delay_wgrad_compute = splits_backward
    if not draws_weights:
        _draw_nothing(config)
    padded_vocab = round_up(vocab_size, VOCAB_MULTIPLE)
    chunks = [
        _chunk(own_class, model, layout, config, v, padded_vocab, stage_layers)
        for v in range(layout.vpp)
    ]
    for chunk in chunks:
        mark_head(chunk, num_ids=vocab_size, logit_cap=model.logit_cap)
        if model.latent_norm_epsilon is not None:
            _set_latent_epsilon(chunk, model.latent_norm_epsilon)
        for module in chunk.modules():
            # Megatron's config has no field for these, before 0.19 or at all.
            if isinstance(module, Indexer):
                module.turns_pairs = model.indexer_rope_interleaved
            if isinstance(module, PackedSDPA):
                module.score_cap = model.attention_score_cap
            if isinstance(module, PackedRouter):
                module.group_best = model.moe_group_best
    if value_head:
        for chunk in chunks:
            replace_output_layer(chunk)
    if draws_weights:
        initialize_by_name(
            chunks,
            seed=seed,
            std=model.init_std,
            # Letters of a pattern are half blocks.
            num_layers=model.num_layers / (1 if model.layer_pattern is None else 2),
            zero_centered_norms=model.layernorm_zero_centered_gamma,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            expert_tp_group=parallel_state.get_expert_tensor_parallel_group(),
        )
    if layout.etp != layout.tp:
        mark_experts(chunks)
    freeze(chunks, model.freeze_of(tower=False))
    if before_wrapping is not None:
        before_wrapping(chunks)
    if reduction is None:
        # Gathers that overlap leave old values in the weights after an optimizer step, so they
        # are for loops that know of it; see `overlap.finish_param_gathers`.
        optim = OptimConfig(distributed_optimizer=distributed_optimizer, overlap_param_gather=False)
        reduction = reduction_settings(optim, layout)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        delay_wgrad_compute=splits_backward,
        **reduction,
    )
    wrapped = [
        DistributedDataParallel(
            config,
            ddp,
            (in_bf16(config, chunk) if config.bf16 else chunk).cuda(),
            disable_bucketing=v > 0,
        )
        for v, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def gpt_class(model: ModelConfig, given: Any = None) -> Any:
    """GPTModel or a subclass, or None for a HybridModel; the same on all ranks.

    Args:
        given: the subclass that the caller wants.

    Raises:
        ConfigError: the model must be a HybridModel, and cannot.
    """
    if model.layer_pattern is not None or model.megatron_class == "hybrid":
        needs = "model.hybrid_layer_pattern and megatron_class=hybrid need"
        if importlib.util.find_spec("megatron.core.models.hybrid") is None:
            version = megatron.core.__version__
            raise ConfigError(f"{needs} Megatron-Core 0.18 or later; {version} has no HybridModel")
        if given is not None:
            raise ConfigError(f"{needs} a HybridModel, and model_class is {given.__name__}")
        return None
    if given is not None:
        return given
    try:
        from megatron.core.models.gpt import GPTModel
    except ImportError:
        # The same model, where there is no other class any more.
        return None
    source = inspect.getsource(sys.modules[GPTModel.__module__])
    is_ending = LOGGED["megatron.core.models.gpt.gpt_model"] in source
    return None if is_ending and model.megatron_class != "gpt" else GPTModel


def _set_latent_epsilon(chunk: Any, epsilon: float) -> None:
    """Set what the norms of compressed queries and keys add; Megatron's config has one for all.

    A norm is a module, or part of Transformer Engine's projection after it.
    """
    norms = {"q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"}
    for name, module in chunk.named_modules():
        if name.rpartition(".")[2] in norms and hasattr(module, "eps"):
            module.eps = epsilon


def _draw_nothing(config: TransformerConfig) -> None:
    """Let Megatron's layers allocate their weights without drawing them.

    `perform_initialization=False` would also leave out the marks of tensor-parallel weights.
    """
    for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
        if hasattr(config, name):
            setattr(config, name, _as_allocated)


def _as_allocated(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _chunk(
    own_class: Any,
    model: ModelConfig,
    layout: Layout,
    config: TransformerConfig,
    vp: int,
    vocab_size: int,
    stage_layers: StageLayers | None = None,
) -> Any:
    vp_stage = vp if layout.vpp > 1 else None
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    kernel = choose_attention(model.attention, model.dtype, attention_sizes(model, layout))
    arguments = {
        "config": config,
        "vocab_size": vocab_size,
        "max_sequence_length": model.max_position_embeddings,
        "pre_process": parallel_state.is_pipeline_first_stage(**stage),
        "post_process": parallel_state.is_pipeline_last_stage(**stage),
        "share_embeddings_and_output_weights": not model.untie_embeddings,
        "position_embedding_type": model.position_embedding_type,
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "vp_stage": vp_stage,
    }
    if own_class is None:
        # Not at the top: Megatron-Core before 0.18 has no such model.
        from megapack.job.gpt.hybrid import hybrid_chunk
    with _plain_output_layer(), whole_projections(kernel):
        if own_class is None:
            split = stage_layers_of(model.num_layers, layout, stage_layers)
            chunk = hybrid_chunk(kernel, model, split, arguments)
        else:
            chunk = own_class(
                transformer_layer_spec=block_spec(kernel, config, vp_stage, model),
                mtp_block_spec=mtp_spec(kernel, config, vp_stage, model),
                **arguments,
            )
    set_rope(chunk, model)
    if model.scale_embeddings:
        _scale_embeddings(chunk, model.hidden_size, config.params_dtype)
    _drop_unused_weight(chunk)
    mark_splits(chunk, etp=layout.etp, gated=model.gated_linear_unit)
    return chunk


def _scale_embeddings(chunk: Any, hidden_size: int, dtype: torch.dtype) -> None:
    embedding = getattr(chunk, "embedding", None)
    if embedding is None:
        return
    scale = float(torch.tensor(hidden_size**0.5, dtype=dtype, device="cpu"))
    embedding.word_embeddings.register_forward_hook(lambda module, inputs, output: output * scale)


@contextlib.contextmanager
def _plain_output_layer() -> Iterator[None]:
    """Within the block models build their output layer without gradient accumulation fusion.

    That layer is Megatron's own and refuses the fusion without apex, also if all other layers are
    Transformer Engine's. Its forward never runs: log-probs read its weight (see `head`).
    """
    layer = tensor_parallel.ColumnParallelLinear

    def plain(*args: Any, config: TransformerConfig, **kwargs: Any) -> Any:
        own = copy.copy(config)
        own.gradient_accumulation_fusion = False
        return layer(*args, config=own, **kwargs)

    with replaced(tensor_parallel, ColumnParallelLinear=plain):
        yield


def _drop_unused_weight(chunk: Any) -> None:
    """Remove the unused output weight of a last stage with MTP layers and tied weights.

    That stage projects with its own embedding, but Megatron still allocates an output weight. It is
    never trained and breaks checkpoints.
    """
    tied_to_own = chunk.share_embeddings_and_output_weights and hasattr(chunk, "embedding")
    if tied_to_own and chunk.post_process and chunk.output_layer.weight is not None:
        chunk.output_layer.register_parameter("weight", None)
