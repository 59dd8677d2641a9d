"""What Hugging Face folders name the tensors of a model: names that families share, and their own.

A table has Megatron's name in a layer -> the folder's tensors whose rows it has, without the
beginning of their names. Norms have their names in Megatron's local layers, see
`model.parameters.local_name`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

Names = Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Mtp:
    """Names of a depth of multi-token prediction, with `{prefix}` of the model's layers, the
    number `{layer}` of the depth among them, and `{depth}` from 0. `{own}` counts the layers of all
    depths from 0, `{last}` is a depth's last."""

    layer: str
    """How the names of its layer begin."""
    enorm: str
    """The norm of embeddings."""
    hnorm: str
    """The norm of hidden states."""
    eh_proj: str
    """The projection of both."""
    final_layernorm: str
    swaps_halves: bool = False
    """Whether the projection has hidden states before embeddings."""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Tensor of the model -> its copy in each depth."""
    assumed: int = 0
    """Depths if config.json does not count them."""
    pattern: str = ""
    """Letters of its layers, where each is one in the folder; "" = it has one."""


EMBEDDING = "embedding.word_embeddings.weight"
"""Megatron's name of the embedding."""
OUTER = {
    EMBEDDING: "embed_tokens.weight",
    "decoder.final_layernorm.weight": "norm.weight",
}
"""Names of the embedding and the last norm."""
NEMOTRON_OUTER = {EMBEDDING: "embeddings.weight", "decoder.final_layernorm.weight": "norm_f.weight"}
# Experts that a layer's tensors stack: [experts, rows, columns] (published folders of Qwen3.5).
STACKED = {
    "mlp.experts.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.experts.linear_fc2.weight": "mlp.experts.down_proj",
}
STACKED_BESIDE_MLP = {name: own.removeprefix("mlp.") for name, own in STACKED.items()}
# In folders of gpt-oss columns of Megatron's are rows, gates and what they multiply alternate.
STACKED_COLUMNS = STACKED | {
    "mlp.experts.experts.linear_fc1.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.experts.linear_fc2.bias": "mlp.experts.down_proj_bias",
}
TOWER = "visual."
"""How the names of a tower's tensors begin."""
# How names begin that an export copies from a folder of a multimodal model.
VISION = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in (
        *("visual", "vision_tower", "multi_modal_projector"),
        *("embed_vision", "audio_tower", "embed_audio"),
    )
)


def weights(**names: str) -> Names:
    """Weights of one tensor each: `a__b` stands for Megatron's `a.b`."""
    return {f"{own.replace('__', '.')}.weight": (f"{name}.weight",) for own, name in names.items()}


def attention(*names: str, bias: bool = False) -> tuple[str, ...]:
    """Tensors of `self_attn`."""
    return tuple(f"self_attn.{name}.{'bias' if bias else 'weight'}" for name in names)


def mlp(fc: str, module: str, *names: str) -> Names:
    """The two matrix products of an MLP, Megatron's `fc`: the last name is the second product's."""
    *first, second = (f"{module}.{name}.weight" for name in names)
    return {f"{fc}.linear_fc1.weight": tuple(first), f"{fc}.linear_fc2.weight": (second,)}


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
COMMON: Names = {
    **weights(input_layernorm="input_layernorm", pre_mlp_layernorm="post_attention_layernorm"),
    "self_attention.linear_qkv.weight": attention("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_qkv.bias": attention("q_proj", "k_proj", "v_proj", bias=True),
    **weights(
        self_attention__q_layernorm="self_attn.q_norm",
        self_attention__k_layernorm="self_attn.k_norm",
        self_attention__linear_proj="self_attn.o_proj",
        mlp__router="mlp.gate",
    ),
    **mlp("mlp", "mlp", *_PROJECTIONS),
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
    **mlp("mlp.experts.experts", "mlp.experts.{expert}", *_PROJECTIONS),
    **mlp("mlp.shared_experts", "mlp.shared_experts", *_PROJECTIONS),
}
"""Names of most families. A family has those of its own in addition, or in their place."""
LATENT_ATTENTION = weights(
    self_attention__linear_q_proj="self_attn.q_proj",
    self_attention__linear_q_down_proj="self_attn.q_a_proj",
    self_attention__q_layernorm="self_attn.q_a_layernorm",
    self_attention__linear_q_up_proj="self_attn.q_b_proj",
    self_attention__linear_kv_down_proj="self_attn.kv_a_proj_with_mqa",
    self_attention__kv_layernorm="self_attn.kv_a_layernorm",
    self_attention__linear_kv_up_proj="self_attn.kv_b_proj",
)
_INDEXER = "self_attention.core_attention.indexer"
SPARSE_ATTENTION = {
    **LATENT_ATTENTION,
    f"{_INDEXER}.linear_wq_b.weight": ("self_attn.indexer.wq_b.weight",),
    f"{_INDEXER}.linear_wk.weight": ("self_attn.indexer.wk.weight",),
    f"{_INDEXER}.k_norm.weight": ("self_attn.indexer.k_norm.weight",),
    f"{_INDEXER}.k_norm.bias": ("self_attn.indexer.k_norm.bias",),
    f"{_INDEXER}.linear_weights_proj.weight": ("self_attn.indexer.weights_proj.weight",),
}
FUSED_GATE = mlp("mlp", "mlp", "gate_up_proj", "down_proj")
NORMS_AFTER = weights(
    post_self_attn_layernorm="post_attention_layernorm",
    pre_mlp_layernorm="pre_feedforward_layernorm",
    post_mlp_layernorm="post_feedforward_layernorm",
)
GEMMA4 = {
    **NORMS_AFTER,
    "layer_scalar": ("layer_scalar",),
    "mlp.router.weight": ("router.proj.weight",),
    "mlp.router.input_scale": ("router.scale",),
    "mlp.router.score_scale": ("router.per_expert_scale",),
    **mlp("mlp.shared_experts", "mlp", *_PROJECTIONS),
    **weights(
        mlp__pre_shared_layernorm="pre_feedforward_layernorm",
        mlp__post_shared_layernorm="post_feedforward_layernorm_1",
        mlp__pre_experts_layernorm="pre_feedforward_layernorm_2",
        mlp__post_experts_layernorm="post_feedforward_layernorm_2",
    ),
}
MIXTRAL = {
    "mlp.router.weight": ("block_sparse_moe.gate.weight",),
    "mlp.router.expert_bias": ("block_sparse_moe.e_score_correction_bias",),
    **mlp("mlp.experts.experts", "block_sparse_moe.experts.{expert}", "w1", "w3", "w2"),
}
GATED_SHARED_EXPERT = {
    **mlp("mlp.shared_experts", "mlp.shared_expert", *_PROJECTIONS),
    "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
}
GATED_DELTA = {
    **GATED_SHARED_EXPERT,
    "self_attention.A_log": ("linear_attn.A_log",),
    "self_attention.dt_bias": ("linear_attn.dt_bias",),
    **weights(
        self_attention__out_norm="linear_attn.norm", self_attention__out_proj="linear_attn.out_proj"
    ),
}
GPT_OSS = {
    "self_attention.linear_proj.bias": attention("o_proj", bias=True),
    "self_attention.core_attention.softmax_offset": ("self_attn.sinks",),
    "mlp.router.weight": ("mlp.router.weight",),
    "mlp.router.bias": ("mlp.router.bias",),
}
GLM4 = {
    **FUSED_GATE,
    **weights(
        post_self_attn_layernorm="post_self_attn_layernorm", post_mlp_layernorm="post_mlp_layernorm"
    ),
}
HUNYUAN = {
    **weights(
        self_attention__q_layernorm="self_attn.query_layernorm",
        self_attention__k_layernorm="self_attn.key_layernorm",
        mlp__router="mlp.gate.wg",
    ),
    **mlp("mlp.shared_experts", "mlp.shared_mlp", *_PROJECTIONS),
}
ERNIE = {"mlp.router.expert_bias": ("mlp.moe_statics.e_score_correction_bias",)}
NEMOTRON = {
    **weights(norm="norm", input_layernorm="norm", pre_mlp_layernorm="norm"),
    **{
        f"mixer.{name}": (f"mixer.{name}",)
        for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")
    },
    "self_attention.linear_qkv.weight": tuple(f"mixer.{name}_proj.weight" for name in "qkv"),
    **weights(self_attention__linear_proj="mixer.o_proj", mlp__router="mixer.gate"),
    **mlp("mlp", "mixer", "up_proj", "down_proj"),
    "mlp.router.expert_bias": ("mixer.gate.e_score_correction_bias",),
    **mlp("mlp.experts.experts", "mixer.experts.{expert}", "up_proj", "down_proj"),
    **mlp("mlp.shared_experts", "mixer.shared_experts", "up_proj", "down_proj"),
    **weights(
        mlp__fc1_latent_proj="mixer.fc1_latent_proj", mlp__fc2_latent_proj="mixer.fc2_latent_proj"
    ),
}

LAYER_MTP = Mtp(
    layer="{prefix}layers.{layer}.",
    enorm="{prefix}layers.{layer}.enorm.weight",
    hnorm="{prefix}layers.{layer}.hnorm.weight",
    eh_proj="{prefix}layers.{layer}.eh_proj.weight",
    final_layernorm="{prefix}layers.{layer}.shared_head.norm.weight",
    copies={
        "embed_tokens.weight": "{prefix}layers.{layer}.embed_tokens.weight",
        "lm_head.weight": "{prefix}layers.{layer}.shared_head.head.weight",
    },
)
MIMO_MTP = Mtp(
    layer="{prefix}mtp_layers.{depth}.",
    enorm="{prefix}mtp_layers.{depth}.token_layernorm.weight",
    hnorm="{prefix}mtp_layers.{depth}.hidden_layernorm.weight",
    eh_proj="{prefix}mtp_layers.{depth}.input_proj.weight",
    final_layernorm="{prefix}mtp_layers.{depth}.final_layernorm.weight",
    swaps_halves=True,
)
QWEN_MTP = Mtp(
    layer="mtp.layers.{depth}.",
    enorm="mtp.pre_fc_norm_embedding.weight",
    hnorm="mtp.pre_fc_norm_hidden.weight",
    eh_proj="mtp.fc.weight",
    final_layernorm="mtp.norm.weight",
)
NEMOTRON_MTP = Mtp(
    layer="mtp.layers.{own}.",
    enorm="mtp.layers.{own}.enorm.weight",
    hnorm="mtp.layers.{own}.hnorm.weight",
    eh_proj="mtp.layers.{own}.eh_proj.weight",
    final_layernorm="mtp.layers.{last}.final_layernorm.weight",
    pattern="*E",
)
