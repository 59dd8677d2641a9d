"""Tables: of which rows of which Hugging Face tensors each of Megatron's tensors is made.

Megatron stacks what belongs together. Query, key and value projections are one tensor, in which
each group of heads has its queries, its keys and its values; so are a gate and an up projection,
one above the other. With 2 groups, 4 heads of width 16, the 128 rows of `linear_qkv` are

    q_proj 0-32, k_proj 0-16, v_proj 0-16, q_proj 32-64, k_proj 16-32, v_proj 16-32
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megapack.errors import ConfigError
from megapack.model.parameters import local_name


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a Hugging Face tensor; of a vector, its elements."""

    name: str
    start: int
    count: int


_OUTER = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
VALUE_HEAD = "score.weight"
"""The tensor of a value head, whose output layer has one row."""


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
_DEEPSEEK = {**_DENSE, **_EXPERTS, **_SHARED_EXPERTS, **_LATENT_ATTENTION}

LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "mixtral": {
        **_DENSE,
        "mlp.router.weight": ("block_sparse_moe.gate.weight",),
        **_mlp("mlp.experts.experts", "block_sparse_moe.experts.{expert}", "w1", "w3", "w2"),
    },
    "qwen2": _DENSE,
    "qwen2_moe": {
        **_DENSE,
        **_EXPERTS,
        **_mlp("mlp.shared_experts", "mlp.shared_expert", *_PROJECTIONS),
        "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
    },
    "qwen3": _DENSE,
    "qwen3_moe": {**_DENSE, **_EXPERTS},
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": {**_DENSE, **_EXPERTS, **_SHARED_EXPERTS},
}
"""By `model_type` of config.json: Megatron's name in a layer -> tensors in `model.layers.N`."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


class TensorNames:
    """The Hugging Face names of a model's tensors.

    Args:
        model_type: of config.json.
        values: the architecture keys of `ModelConfig`, from config.json.

    Raises:
        ConfigError: there is no table for this kind of model.
    """

    def __init__(self, model_type: str, values: Mapping[str, Any]) -> None:
        if model_type not in LAYERS:
            raise ConfigError(
                f"model_type {model_type!r} has no table of tensors; the known ones are "
                f"{', '.join(LAYERS)}"
            )
        self.model_type = model_type
        self.num_layers = int(values["num_layers"])
        self.vocab_size = int(values["vocab_size"])
        heads = values["num_attention_heads"]
        self._groups = values.get("num_query_groups") or heads
        self._heads_per_group = heads // self._groups
        self._head_width = values.get("kv_channels") or values["hidden_size"] // heads

    def rows(self, key: str, index: Sequence[int], num_rows: int) -> list[Rows]:
        """The rows that make up one of Megatron's tensors, from its first one on.

        Args:
            key: its name in the whole model.
            index: the expert's number, if it is one of a layer's experts; else empty.
            num_rows: rows of the whole tensor. Those of an embedding may be more than returned:
                the padded vocabulary's.

        Raises:
            ConfigError: this kind of model has no such tensor.
        """
        if key == "output_layer.weight" and num_rows == 1:
            return [Rows(VALUE_HEAD, 0, 1)]
        if key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return [Rows(_OUTER[key][0], 0, min(self.vocab_size, num_rows))]
        names = self._names(key, index)
        if key.endswith(("linear_qkv.weight", "linear_qkv.bias")):
            return self._by_group(names)
        count = num_rows // len(names)
        return [Rows(name, 0, count) for name in names]

    def _names(self, key: str, index: Sequence[int]) -> tuple[str, ...]:
        match = _LAYER.fullmatch(key)
        layer = LAYERS[self.model_type]
        names = layer.get(local_name(match[2])) if match else _OUTER.get(key)
        if names is None:
            raise ConfigError(
                f"the model has a tensor {key}, which a folder of a {self.model_type} model does "
                "not have; leave out the keys of model that add it, such as mtp_num_layers"
            )
        if match is None:
            return names
        expert = index[0] if index else None
        prefix = f"model.layers.{match[1]}."
        return tuple(prefix + name.format(expert=expert) for name in names)

    def _by_group(self, names: Sequence[str]) -> list[Rows]:
        """Queries, keys and values of each group of heads in turn."""
        counts = (self._heads_per_group * self._head_width, self._head_width, self._head_width)
        return [
            Rows(name, group * count, count)
            for group in range(self._groups)
            for name, count in zip(names, counts, strict=True)
        ]

    def is_ignorable(self, name: str, *, has_own_head: bool) -> bool:
        """Whether a folder may hold a tensor that the model does not have.

        Args:
            has_own_head: whether the model uses the folder's `lm_head.weight`. A tied model does
                not, and a value head replaces it.
        """
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= self.num_layers:  # multi-token prediction
            return True
        if name == "lm_head.weight":
            return not has_own_head
        return name.endswith("rotary_emb.inv_freq")
