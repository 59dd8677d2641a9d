"""Tables of the families: what Hugging Face folders name the tensors of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

Names = Mapping[str, tuple[str, ...]]
"""Megatron's name in a layer -> the folder's tensors whose rows it has."""


@dataclass(frozen=True)
class Mtp:
    """Names of a depth of multi-token prediction, with `{prefix}` of the model's layers, the
    number `{layer}` of the depth among them, and `{depth}` from 0."""

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


# Experts that a layer's tensors stack: [experts, rows, columns] (published folders of Qwen3.5).
_STACKED = {
    "mlp.experts.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.experts.linear_fc2.weight": "mlp.experts.down_proj",
}
_STACKED_BESIDE_MLP = {name: own.removeprefix("mlp.") for name, own in _STACKED.items()}
EMBEDDING = "embedding.word_embeddings.weight"
"""Megatron's name of the embedding."""
_OUTER = {
    EMBEDDING: "embed_tokens.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "decoder.final_norm.weight": "norm.weight",  # in a HybridModel
}
_NEMOTRON_OUTER = {EMBEDDING: "embeddings.weight", "decoder.final_norm.weight": "norm_f.weight"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """The tensors of a family's folders, without the beginning of their names."""

    layers: Names
    outer: Mapping[str, str] = dataclasses.field(default_factory=lambda: _OUTER)
    """Megatron's name -> the folder's, of the embedding and the last norm."""
    stacked: Mapping[str, str] = dataclasses.field(default_factory=lambda: _STACKED)
    """Megatron's name in an expert -> the tensor of all of a layer's experts, in folders that stack
    them."""
    has_expert_columns: bool = False
    """Whether experts are always stacked, with Megatron's rows as columns, of which those of the
    gate and those of what it multiplies alternate."""
    by_key_head: bool = False
    """Whether a gated delta net's input projection has its parts of each key head in turn."""
    single_rows: frozenset[str] = frozenset()
    """Megatron's vectors that are a matrix of one row in the folder."""
    has_blocks: bool = True
    """Whether a layer is attention and an MLP, which are two layers of a HybridModel."""
    mtp: Mtp | None = None
    """Multi-token prediction, which transformers does not have."""
    kept: tuple[str, ...] = ()
    """How names of other tensors begin that an export copies, such as the vision model's."""


def _attention(*names: str, bias: bool = False) -> tuple[str, ...]:
    return tuple(f"self_attn.{name}.{'bias' if bias else 'weight'}" for name in names)


def _mlp(fc: str, module: str, *names: str) -> dict[str, tuple[str, ...]]:
    """The two matrix products of an MLP, Megatron's `fc`: the last name is the second product's."""
    *first, second = (f"{module}.{name}.weight" for name in names)
    return {f"{fc}.linear_fc1.weight": tuple(first), f"{fc}.linear_fc2.weight": (second,)}


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Norms have their names in Megatron's local layers, see `model.parameters.local_name`.
_DENSE: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": _attention("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_qkv.bias": _attention("q_proj", "k_proj", "v_proj", bias=True),
    "self_attention.q_layernorm.weight": _attention("q_norm"),
    "self_attention.k_layernorm.weight": _attention("k_norm"),
    "self_attention.linear_proj.weight": _attention("o_proj"),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    **_mlp("mlp", "mlp", *_PROJECTIONS),
}
_EXPERTS = {
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
    **_mlp("mlp.experts.experts", "mlp.experts.{expert}", *_PROJECTIONS),
}
_SHARED_EXPERTS = _mlp("mlp.shared_experts", "mlp.shared_experts", *_PROJECTIONS)
_LATENT_ATTENTION = {
    "self_attention.linear_q_proj.weight": _attention("q_proj"),
    "self_attention.linear_q_down_proj.weight": _attention("q_a_proj"),
    "self_attention.q_layernorm.weight": _attention("q_a_layernorm"),
    "self_attention.linear_q_up_proj.weight": _attention("q_b_proj"),
    "self_attention.linear_kv_down_proj.weight": _attention("kv_a_proj_with_mqa"),
    "self_attention.kv_layernorm.weight": _attention("kv_a_layernorm"),
    "self_attention.linear_kv_up_proj.weight": _attention("kv_b_proj"),
}
_AFTER_ATTENTION = {"post_self_attn_layernorm.weight": ("post_attention_layernorm.weight",)}
_AFTER_MLP = {"post_mlp_layernorm.weight": ("post_feedforward_layernorm.weight",)}
# Without norms before attention and MLP.
_OLMO = {
    **{name: own for name, own in _DENSE.items() if not name.startswith(("input_", "pre_mlp_"))},
    **_AFTER_ATTENTION,
    **_AFTER_MLP,
}
_GEMMA = {
    **_DENSE,
    **_AFTER_ATTENTION,
    "pre_mlp_layernorm.weight": ("pre_feedforward_layernorm.weight",),
    **_AFTER_MLP,
}
_GEMMA4 = {
    **_GEMMA,
    "layer_scalar": ("layer_scalar",),
    "mlp.router.weight": ("router.proj.weight",),
    "mlp.router.input_scale": ("router.scale",),
    "mlp.router.score_scale": ("router.per_expert_scale",),
    **_mlp("mlp.shared_experts", "mlp", *_PROJECTIONS),
    "mlp.pre_shared_layernorm.weight": ("pre_feedforward_layernorm.weight",),
    "mlp.post_shared_layernorm.weight": ("post_feedforward_layernorm_1.weight",),
    "mlp.pre_experts_layernorm.weight": ("pre_feedforward_layernorm_2.weight",),
    "mlp.post_experts_layernorm.weight": ("post_feedforward_layernorm_2.weight",),
}
_PHI = {
    **_DENSE,
    "self_attention.linear_qkv.weight": _attention("qkv_proj"),
    **_mlp("mlp", "mlp", "gate_up_proj", "down_proj"),
}
_MIXTRAL = {
    **_DENSE,
    "mlp.router.weight": ("block_sparse_moe.gate.weight",),
    **_mlp("mlp.experts.experts", "block_sparse_moe.experts.{expert}", "w1", "w3", "w2"),
}
_DEEPSEEK = {**_DENSE, **_EXPERTS, **_SHARED_EXPERTS, **_LATENT_ATTENTION}
_INDEXER = {
    f"self_attention.core_attention.indexer.{own}": (f"self_attn.indexer.{name}",)
    for own, name in {
        "linear_wq_b.weight": "wq_b.weight",
        "linear_wk.weight": "wk.weight",
        "k_norm.weight": "k_norm.weight",
        "k_norm.bias": "k_norm.bias",
        "linear_weights_proj.weight": "weights_proj.weight",
    }.items()
}

_GATED_SHARED_EXPERT = {
    **_mlp("mlp.shared_experts", "mlp.shared_expert", *_PROJECTIONS),
    "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
}
_GATED_DELTA = {
    **_DENSE,
    **_EXPERTS,
    **_GATED_SHARED_EXPERT,
    "self_attention.A_log": ("linear_attn.A_log",),
    "self_attention.dt_bias": ("linear_attn.dt_bias",),
    "self_attention.out_norm.weight": ("linear_attn.norm.weight",),
    "self_attention.out_proj.weight": ("linear_attn.out_proj.weight",),
}
_GPT_OSS = {
    **_DENSE,
    "self_attention.linear_proj.bias": _attention("o_proj", bias=True),
    "self_attention.core_attention.softmax_offset": ("self_attn.sinks",),
    "mlp.router.weight": ("mlp.router.weight",),
    "mlp.router.bias": ("mlp.router.bias",),
}
_GLM4 = {
    **_DENSE,
    **_mlp("mlp", "mlp", "gate_up_proj", "down_proj"),
    "post_self_attn_layernorm.weight": ("post_self_attn_layernorm.weight",),
    "post_mlp_layernorm.weight": ("post_mlp_layernorm.weight",),
}
_MINIMAX = {
    **_MIXTRAL,
    "mlp.router.expert_bias": ("block_sparse_moe.e_score_correction_bias",),
}
_NEMOTRON = {
    **{
        f"{norm}.weight": ("norm.weight",)
        for norm in ("norm", "input_layernorm", "pre_mlp_layernorm")
    },
    **{
        f"mixer.{name}": (f"mixer.{name}",)
        for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")
    },
    "self_attention.linear_qkv.weight": tuple(f"mixer.{name}_proj.weight" for name in "qkv"),
    "self_attention.linear_proj.weight": ("mixer.o_proj.weight",),
    **_mlp("mlp", "mixer", "up_proj", "down_proj"),
    "mlp.router.weight": ("mixer.gate.weight",),
    "mlp.router.expert_bias": ("mixer.gate.e_score_correction_bias",),
    **_mlp("mlp.experts.experts", "mixer.experts.{expert}", "up_proj", "down_proj"),
    **_mlp("mlp.shared_experts", "mixer.shared_experts", "up_proj", "down_proj"),
}

_LAYER_MTP = Mtp(
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
_MIMO_MTP = Mtp(
    layer="{prefix}mtp_layers.{depth}.",
    enorm="{prefix}mtp_layers.{depth}.token_layernorm.weight",
    hnorm="{prefix}mtp_layers.{depth}.hidden_layernorm.weight",
    eh_proj="{prefix}mtp_layers.{depth}.input_proj.weight",
    final_layernorm="{prefix}mtp_layers.{depth}.final_layernorm.weight",
    swaps_halves=True,
)
_QWEN_MTP = Mtp(
    layer="mtp.layers.{depth}.",
    enorm="mtp.pre_fc_norm_embedding.weight",
    hnorm="mtp.pre_fc_norm_hidden.weight",
    eh_proj="mtp.fc.weight",
    final_layernorm="mtp.norm.weight",
)
# In folders of gpt-oss columns of Megatron's are rows, gates and what they multiply alternate.
_STACKED_COLUMNS = {
    "mlp.experts.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.experts.linear_fc1.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.experts.linear_fc2.weight": "mlp.experts.down_proj",
    "mlp.experts.experts.linear_fc2.bias": "mlp.experts.down_proj_bias",
}
_QWEN_VISION = ("model.visual.",)
_GEMMA_VISION = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)
_GEMMA4_VISION = tuple(
    f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
)
_HUNYUAN = {
    **_DENSE,
    "self_attention.q_layernorm.weight": _attention("query_layernorm"),
    "self_attention.k_layernorm.weight": _attention("key_layernorm"),
}
_HUNYUAN_EXPERTS = {
    **_EXPERTS,
    "mlp.router.weight": ("mlp.gate.wg.weight",),
    **_mlp("mlp.shared_experts", "mlp.shared_mlp", *_PROJECTIONS),
}
_ERNIE_EXPERTS = {
    **_EXPERTS,
    **_SHARED_EXPERTS,
    "mlp.router.expert_bias": ("mlp.moe_statics.e_score_correction_bias",),
}
_DENSE_TABLE = Table(layers=_DENSE)
_DEEPSEEK_TABLE = Table(layers=_DEEPSEEK, mtp=_LAYER_MTP)
_SPARSE_TABLE = Table(layers={**_DEEPSEEK, **_INDEXER}, mtp=_LAYER_MTP)
_QWEN_TEXT = Table(layers=_GATED_DELTA, mtp=_QWEN_MTP)
_QWEN_MULTIMODAL = Table(layers=_GATED_DELTA, mtp=_QWEN_MTP, kept=_QWEN_VISION)

TABLES: Mapping[str, Table] = {
    "llama": _DENSE_TABLE,
    "mistral": _DENSE_TABLE,
    "mixtral": Table(layers=_MIXTRAL),
    "qwen2": _DENSE_TABLE,
    "qwen2_moe": Table(layers={**_DENSE, **_EXPERTS, **_GATED_SHARED_EXPERT}),
    "qwen3": _DENSE_TABLE,
    "qwen3_moe": Table(layers={**_DENSE, **_EXPERTS}),
    "deepseek_v3": _DEEPSEEK_TABLE,
    "kimi_k2": _DEEPSEEK_TABLE,
    "deepseek_v2": Table(layers=_DEEPSEEK),
    "deepseek_v32": _SPARSE_TABLE,
    "glm4_moe": Table(layers={**_DENSE, **_EXPERTS, **_SHARED_EXPERTS}, mtp=_LAYER_MTP),
    "glm4_moe_lite": _DEEPSEEK_TABLE,
    "glm4": Table(layers=_GLM4),
    "minimax_m2": Table(layers=_MINIMAX),
    "glm_moe_dsa": _SPARSE_TABLE,
    "seed_oss": _DENSE_TABLE,
    "ernie4_5": _DENSE_TABLE,
    "ernie4_5_moe": Table(
        layers={**_DENSE, **_ERNIE_EXPERTS},
        single_rows=frozenset({"mlp.router.expert_bias"}),
        # Of multi-token prediction.
        kept=("model.mtp_",),
    ),
    "hunyuan_v1_dense": Table(layers=_HUNYUAN),
    "hunyuan_v1_moe": Table(layers={**_HUNYUAN, **_HUNYUAN_EXPERTS}),
    "mimo": Table(layers=_DENSE, mtp=_MIMO_MTP),
    "qwen3_next": Table(layers=_GATED_DELTA, mtp=_QWEN_MTP, by_key_head=True),
    "qwen3_5": _QWEN_MULTIMODAL,
    "qwen3_5_text": _QWEN_TEXT,
    "qwen3_5_moe": _QWEN_MULTIMODAL,
    "qwen3_5_moe_text": _QWEN_TEXT,
    "gpt_oss": Table(layers=_GPT_OSS, stacked=_STACKED_COLUMNS, has_expert_columns=True),
    "nemotron_h": Table(
        layers=_NEMOTRON,
        outer=_NEMOTRON_OUTER,
        has_blocks=False,
        # Of multi-token prediction.
        kept=("mtp.",),
    ),
    "olmo2": Table(layers=_OLMO),
    "olmo3": Table(layers=_OLMO),
    "phi3": Table(layers=_PHI),
    "gemma2": Table(layers=_GEMMA),
    "gemma3_text": Table(layers=_GEMMA),
    "gemma3": Table(layers=_GEMMA, kept=_GEMMA_VISION),
    "gemma4_text": Table(layers=_GEMMA4, stacked=_STACKED_BESIDE_MLP),
    "gemma4": Table(layers=_GEMMA4, stacked=_STACKED_BESIDE_MLP, kept=_GEMMA4_VISION),
}
"""By `model_type` of config.json."""
