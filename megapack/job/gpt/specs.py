"""Megatron-Core's layer specs with attention for packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from torch import Tensor

from megapack.base.choices import Kernel
from megapack.cost.options import ModelOptions
from megapack.cost.sizes import FLASH_WIDTH
from megapack.errors import ConfigError
from megapack.model.attention.choice import choose_attention
from megapack.model.attention.indexer import SparseLatentAttention
from megapack.model.attention.latent import LatentAttention, PlainQueries
from megapack.model.attention.own_heads import Heads, OwnHeads
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.attention.sparse import SparseAttention
from megapack.model.attention.varlen import PackedVarlen
from megapack.model.experts.inner_norms import NormedRouter, add_inner_norms
from megapack.model.experts.router import moe_layers, use_packed_router
from megapack.model.recurrent.scan import at_least_fp32


class _NormByConfig:
    """Makes torch's norm of the class beside it, as Megatron's layers ask for one.

    Megatron's own torch norm refuses sequence parallelism. With marked parameters Megatron sums
    their gradients over the tensor-parallel ranks, which see different tokens.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_: Any
    ) -> None:
        # Megatron-Core 0.18 gives none to the norms of Mamba layers.
        eps = config.layernorm_epsilon if eps is None else eps
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)  # type: ignore[call-arg]
        self._is_zero_centered = config.layernorm_zero_centered_gamma
        _mark_sequence_parallel(self, config)  # type: ignore[arg-type]


class PackedLayerNorm(_NormByConfig, torch.nn.LayerNorm):
    """torch's LayerNorm for the local spec."""


class PackedRMSNorm(_NormByConfig, torch.nn.RMSNorm):
    """torch's RMSNorm for the local spec.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight, in fp32 as transformers does.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        if not self._is_zero_centered:
            return super().forward(x)
        weight = 1 + at_least_fp32(self.weight)
        normed = torch.nn.functional.rms_norm(
            at_least_fp32(x), self.normalized_shape, weight, self.eps
        )
        return normed.to(x.dtype)


def _mark_sequence_parallel(norm: torch.nn.Module, config: TransformerConfig) -> None:
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _NormOverHeads(torch.nn.Module):
    """RMSNorm of the queries, or keys, of all heads together (OLMo-2).

    Tensor-parallel ranks sum the squares of their heads. Each has the weights of all heads: those
    of other ranks' get a gradient of 0, and Megatron sums the gradients of such norms over the
    ranks.
    """

    _heads: str
    """Megatron's setting of their number."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        width = getattr(config, self._heads) * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))
        self._eps = config.layernorm_epsilon if eps is None else eps
        self._ranks = config.tensor_model_parallel_size
        _mark_sequence_parallel(self, config)

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads of this rank, d] -> the same shape."""
        values = at_least_fp32(x)
        squares = values.square().sum((-2, -1), keepdim=True)
        weight = at_least_fp32(self.weight)
        if self._ranks > 1:
            # The sum of all ranks; its gradient is the sum of the ranks' gradients.
            squares = reduce_from_tensor_model_parallel_region(squares)
            squares = copy_to_tensor_model_parallel_region(squares)
            weight = weight.chunk(self._ranks)[parallel_state.get_tensor_model_parallel_rank()]
        scale = torch.rsqrt(squares / len(self.weight) + self._eps)
        return (values * scale * weight.view(x.shape[-2:])).to(x.dtype)


class QueryNorm(_NormOverHeads):
    """That of queries."""

    _heads = "num_attention_heads"


class KeyNorm(_NormOverHeads):
    """That of keys."""

    _heads = "num_query_groups"


class LateNorms(SelfAttention):  # type: ignore[misc]
    """Self attention that normalises queries and keys after their rotation (Hunyuan).

    Megatron's calls its norms before. Here they return what they get, and run on the queries and
    keys of core attention.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        norms = (self.q_layernorm, self.k_layernorm)
        self.core_attention.register_forward_pre_hook(
            partial(_normed_heads, [norm.forward for norm in norms])
        )
        for norm in norms:
            norm.forward = lambda x: x


def _normed_heads(norms: Sequence[Any], core: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    query, key, *others = args
    return norms[0](query), norms[1](key), *others


class PostNormLayer(TransformerLayer):  # type: ignore[misc]
    """A layer with norms of what attention and the MLP add to the residual stream.

    Args:
        norm: the class of these norms; the others are those of a TransformerLayer.
        norms_experts: whether experts and the shared expert have norms of their own.
        has_scalar: whether the layer's result is multiplied by `layer_scalar`, a buffer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        norm: Any,
        norms_experts: bool = False,
        has_scalar: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        new_norm = partial(norm, config=config, **sizes)
        self.post_self_attn_layernorm = new_norm()
        self.post_mlp_layernorm = new_norm()
        if norms_experts:
            add_inner_norms(self.mlp, new_norm)
        if has_scalar:
            self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))
        for post_norm, name, scaled in (
            (self.post_self_attn_layernorm, "self_attn_bda", None),
            (self.post_mlp_layernorm, "mlp_bda", self if has_scalar else None),
        ):
            setattr(self, name, partial(_normed, post_norm, scaled, getattr(self, name)))


def _normed(norm: torch.nn.Module, scaled: Any, add: Any, training: bool, fused: bool) -> Any:
    """Megatron's bias-dropout-add, behind a norm.

    Args:
        scaled: the layer whose scalar multiplies the sum; None = it is not multiplied.
    """

    def run(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        x, bias = output
        normed = norm(x if bias is None else x + bias)
        total: Tensor = add(training, fused)((normed, None), residual, dropout)
        return total if scaled is None else total * scaled.layer_scalar

    return run


PLAIN = ModelOptions()
"""A model whose layers have nothing that Megatron's specs do not have, as Llama's and Qwen's."""


def packed_norm(config: TransformerConfig) -> type[PackedLayerNorm] | type[PackedRMSNorm]:
    """The norm class of a config, for layer specs.

    Raises:
        ConfigError: the config asks for LayerNorms with weights around 0.
    """
    if config.layernorm_zero_centered_gamma and config.normalization == "LayerNorm":
        raise ConfigError(
            "layernorm_zero_centered_gamma=True: torch's LayerNorm has weights around 1; set it to "
            "False, or normalization='RMSNorm'"
        )
    return PackedRMSNorm if config.normalization == "RMSNorm" else PackedLayerNorm


def local_layer_spec(
    config: TransformerConfig,
    attention: Literal["varlen", "sdpa"] = "sdpa",
    *,
    experts: bool | None = None,
) -> ModuleSpec:
    """Megatron's local layer spec, with attention in which packed samples do not see each other.

    Args:
        config: Megatron's config of the model.
        attention: "varlen", torch's packed kernel, on GPUs; "sdpa", torch's attention, anywhere.
        experts: whether the layer has experts; None: if the model has.
    """
    has_experts = bool(config.num_moe_experts) if experts is None else experts
    latent = config.multi_latent_attention
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization=config.normalization,
    )
    parts = spec.submodules.self_attention.submodules
    parts.core_attention = PackedVarlen if attention == "varlen" else PackedSDPA
    if latent:
        spec.submodules.self_attention.module = LatentAttention
    if config.dsa_indexer_topk:
        parts.core_attention = SparseAttention
        spec.submodules.self_attention.module = SparseLatentAttention
    if has_experts:
        use_packed_router(spec.submodules.mlp)
    norm = packed_norm(config)
    spec.submodules.input_layernorm = norm
    spec.submodules.pre_mlp_layernorm = norm
    if config.qk_layernorm:
        # Queries that are not compressed have no norm.
        has_queries = not latent or config.q_lora_rank is not None
        parts.q_layernorm = norm if has_queries else IdentityOp
        setattr(parts, "kv_layernorm" if latent else "k_layernorm", norm)
    return spec


def layer_spec(
    kernel: Kernel,
    config: TransformerConfig,
    experts: bool,
    model: ModelOptions = PLAIN,
    *,
    is_global: bool = False,
) -> ModuleSpec:
    """One layer with this attention kernel.

    Args:
        model: gives what Megatron's specs do not have.
        is_global: whether it has the heads of global layers.
    """
    spec = _pre_norm_spec(kernel, config, experts)
    parts = spec.submodules
    attention = parts.self_attention
    if model.qk_layernorm_over_heads:
        attention.submodules.q_layernorm = QueryNorm
        attention.submodules.k_layernorm = KeyNorm
    if model.qk_layernorm_after_rotation:
        attention.module = LateNorms
    heads = Heads(*model.global_heads, model.global_keys_as_values) if is_global else None
    if heads is not None or model.value_layernorm:
        attention.module = OwnHeads
        own_params = {"heads": heads, "norms_values": model.value_layernorm}
        attention.params = {**(attention.params or {}), **own_params}
    if model.attention_score_cap is not None or (heads is not None and heads.width > FLASH_WIDTH):
        attention.submodules.core_attention = PackedSDPA
    if model.norm_placement == "pre":
        return spec
    if model.norm_placement == "post":
        parts.input_layernorm = IdentityOp
        parts.pre_mlp_layernorm = IdentityOp
        if kernel == "te":
            # In place of the projections that begin with a norm.
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            attention.submodules.linear_qkv = TEColumnParallelLinear
            parts.mlp.submodules.linear_fc1 = TEColumnParallelLinear
    norms_experts = model.moe_inner_norms and experts
    if norms_experts:
        parts.pre_mlp_layernorm = IdentityOp
        use_packed_router(parts.mlp, NormedRouter)
    params = {
        "norm": final_norm(kernel, config),
        "norms_experts": norms_experts,
        "has_scalar": model.layer_scalars,
    }
    return ModuleSpec(PostNormLayer, params=params, submodules=parts)


def _pre_norm_spec(kernel: Kernel, config: TransformerConfig, experts: bool) -> ModuleSpec:
    if kernel != "te":
        return local_layer_spec(config, kernel, experts=experts)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    if config.multi_latent_attention and config.q_lora_rank is None:
        spec.submodules.self_attention.module = PlainQueries
    if experts:
        use_packed_router(spec.submodules.mlp)
    return spec


def layer_specs(kernel: Kernel, config: TransformerConfig, model: ModelOptions) -> list[ModuleSpec]:
    """All layers of the model with this attention kernel, each with attention and an MLP."""
    # One spec for each kind of layer: the first ones may be dense, the others have experts.
    is_global = [False] * config.num_layers
    if model.has_global_heads:
        is_global = [not is_local for is_local in model.local_layers]
    kind_of = list(zip(_has_experts(config), is_global, strict=True))
    kinds = {
        kind: layer_spec(kernel, config, kind[0], model, is_global=kind[1]) for kind in set(kind_of)
    }
    return [kinds[kind] for kind in kind_of]


def block_spec(
    kernel: Kernel, config: TransformerConfig, vp_stage: int | None, model: ModelOptions = PLAIN
) -> Any:
    """The layers of a chunk with this attention kernel, as GPTModel expects them."""
    specs = layer_specs(kernel, config, model)
    layers = [specs[layer] for layer in _layers(config, vp_stage)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm(kernel, config))


class PackedTransformerLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that chooses its own parts by the config and the machine; see `packed_layer`."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any = None,
        layer_number: int = 1,
        **kwargs: Any,
    ) -> None:
        """Takes what a TransformerLayer takes; `submodules` is not read.

        Args:
            layer_number: counts from 1 within the chunk.
        """
        first = get_transformer_layer_offset(config, vp_stage=kwargs.get("vp_stage"))
        has_experts = _has_experts(config)[first + layer_number - 1]
        kernel = choose_attention("auto", "bf16" if config.bf16 else "fp32")
        parts = layer_spec(kernel, config, has_experts).submodules
        super().__init__(config, parts, layer_number, **kwargs)


packed_layer = ModuleSpec(module=PackedTransformerLayer)
"""A layer spec for packed rows without a config: `--spec megapack.job.gpt.specs packed_layer`."""


def _has_experts(config: TransformerConfig) -> list[bool]:
    """Of each layer of the whole model, whether it has experts."""
    with_experts = moe_layers(config)
    return [layer in with_experts for layer in range(config.num_layers)]


def _layers(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    """The layers of a chunk, numbered from 0 over the whole model."""
    split = config.pipeline_model_parallel_layout
    if split is not None:
        layers: list[int] = split.get_layer_id_list(LayerType.decoder, vp_stage=vp_stage)
        return layers
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


def final_norm(kernel: Kernel, config: TransformerConfig) -> Any:
    """The class of the norm after the last layer."""
    if kernel != "te":
        return packed_norm(config)
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def mtp_spec(
    kernel: Kernel, config: TransformerConfig, vp_stage: int | None, model: ModelOptions = PLAIN
) -> Any:
    """The layers of multi-token prediction; None if the model or the chunk has none."""
    if not config.mtp_num_layers:
        return None
    uses_te = kernel == "te"
    # The spec of a layer, not of the block: the last chunk may have no transformer layers.
    last_layer = layer_spec(kernel, config, _has_experts(config)[-1], model)
    block = get_gpt_mtp_block_spec(
        config, last_layer, use_transformer_engine=uses_te, vp_stage=vp_stage
    )
    if block is None or uses_te:
        return block
    norm = packed_norm(config)
    for layer in block.layer_specs:
        layer.submodules.enorm = norm
        layer.submodules.hnorm = norm
        layer.submodules.layer_norm = norm
    return block
