"""Tables: of which rows of which Hugging Face tensors each of Megatron's tensors is made.

Megatron stacks what belongs together. Query, key and value projections are one tensor, in which
each group of heads has its queries, its keys and its values; so are a gate and an up projection,
one above the other. With 2 groups, 4 heads of width 16, the 128 rows of `linear_qkv` are

    q_proj 0-32, k_proj 0-16, v_proj 0-16, q_proj 32-64, k_proj 16-32, v_proj 16-32

The input projection and the convolution of a gated delta net or a Mamba layer have several parts,
each of which Megatron saves as a tensor of its own, such as `in_proj.weight.query`. A part's rows
may be in several places: Qwen3-Next stacks the parts of each key head.

A block of attention and an MLP is one layer of a folder and of a GPTModel, and two of a
HybridModel. Nemotron-H counts layers as a HybridModel does.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
    expert: int | None = None
    """The expert's number, if the tensor stacks those of a layer; its rows are the expert's."""
    swaps_halves: bool = False
    """Whether its columns are the second half of Megatron's, then the first."""
    step: int = 1
    """From one row to the next."""
    is_transposed: bool = False
    """Whether what is a row of Megatron's is a column there."""


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


@dataclass(frozen=True)
class Place:
    """Where the rows of a part are: `repeats` runs of `count` rows, `stride` rows apart."""

    name: str
    start: int
    count: int
    repeats: int = 1
    stride: int = 0


HEAD = "output_layer.weight"
"""Megatron's name of the output layer."""
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTER = {
    _EMBEDDING: "embed_tokens.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "decoder.final_norm.weight": "norm.weight",  # in a HybridModel
}
_NEMOTRON_OUTER = {_EMBEDDING: "embeddings.weight", "decoder.final_norm.weight": "norm_f.weight"}
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

LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "mixtral": _MIXTRAL,
    "qwen2": _DENSE,
    "qwen2_moe": {**_DENSE, **_EXPERTS, **_GATED_SHARED_EXPERT},
    "qwen3": _DENSE,
    "qwen3_moe": {**_DENSE, **_EXPERTS},
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v32": {**_DEEPSEEK, **_INDEXER},
    "glm4_moe": {**_DENSE, **_EXPERTS, **_SHARED_EXPERTS},
    "glm4_moe_lite": _DEEPSEEK,
    "glm4": {
        **_DENSE,
        **_mlp("mlp", "mlp", "gate_up_proj", "down_proj"),
        "post_self_attn_layernorm.weight": ("post_self_attn_layernorm.weight",),
        "post_mlp_layernorm.weight": ("post_mlp_layernorm.weight",),
    },
    "minimax_m2": {
        **_MIXTRAL,
        "mlp.router.expert_bias": ("block_sparse_moe.e_score_correction_bias",),
    },
    "glm_moe_dsa": {**_DEEPSEEK, **_INDEXER},
    "seed_oss": _DENSE,
    "ernie4_5": _DENSE,
    "mimo": _DENSE,
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _GATED_DELTA
    ),
    "gpt_oss": _GPT_OSS,
    "nemotron_h": _NEMOTRON,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "phi3": _PHI,
    "gemma3_text": _GEMMA,
    "gemma3": _GEMMA,
}
"""By `model_type` of config.json: Megatron's name in a layer -> tensors in `model.layers.N`."""
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
MTP: Mapping[str, Mtp] = {
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k2", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        _LAYER_MTP,
    ),
    "mimo": _MIMO_MTP,
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN_MTP
    ),
}
"""By `model_type`: multi-token prediction of a folder, which transformers does not have."""
# Published folders of Qwen3.5 stack a layer's experts: [experts, rows, columns].
_STACKED_EXPERTS = {
    "mlp.experts.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.experts.linear_fc2.weight": "mlp.experts.down_proj",
}
# In folders of gpt-oss columns of Megatron's are rows, gates and what they multiply alternate.
_STACKED_COLUMNS = {
    "mlp.experts.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.experts.linear_fc1.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.experts.linear_fc2.weight": "mlp.experts.down_proj",
    "mlp.experts.experts.linear_fc2.bias": "mlp.experts.down_proj_bias",
}
# Folders of embedding models have no beginning.
_PREFIXES = {
    "model.language_model.": "model.language_model.",
    "language_model.model.": "language_model.model.",
    "backbone.": "backbone.",
    "layers.": "",
}
# Tensors of the vision model.
_KEPT = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ("model.visual.",)),
    "gemma3": tuple(
        f"{prefix}{part}."
        for prefix in ("", "model.")
        for part in ("vision_tower", "multi_modal_projector")
    ),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# The layer of a depth; in a HybridModel a depth has several.
_DEPTH = re.compile(
    r"mtp\.layers\.(\d+)\.(?:(?:transformer_layer|mtp_model_layer\.layers\.\d+)\.(.*)|(.*)\.weight)"
)


def _parts(key: str, name: str, parts: Mapping[str, int], repeats: int = 1) -> dict[str, Place]:
    """Places of parts that are one above the other in a tensor, `repeats` times."""
    found = {}
    start = 0
    for part, count in parts.items():
        found[f"{key}.{part}"] = Place(name, start, count, repeats, sum(parts.values()))
        start += count
    return found


def _gated_delta_places(model_type: str, values: Mapping[str, Any]) -> dict[str, Place]:
    """The parts of a gated delta net's input projection and convolution."""
    heads = values["linear_num_key_heads"]
    value_heads = values["linear_num_value_heads"]
    keys = heads * values["linear_key_head_dim"]
    width = value_heads * values["linear_value_head_dim"]
    projection = "self_attention.in_proj.weight"
    qkv = {"query": keys, "key": keys, "value": width}
    conv = _parts("self_attention.conv1d.weight", "linear_attn.conv1d.weight", qkv)
    if model_type != "qwen3_next":
        by_tensor = {"qkv": qkv, "z": {"z": width}, "b": {"beta": value_heads}}
        by_tensor["a"] = {"alpha": value_heads}
        for tensor, parts in by_tensor.items():
            conv |= _parts(projection, f"linear_attn.in_proj_{tensor}.weight", parts)
        return conv
    # By key head: its query, its key, and what its value heads have.
    own = {name: count // heads for name, count in (qkv | {"z": width}).items()}
    gates = dict.fromkeys(("beta", "alpha"), value_heads // heads)
    return {
        **conv,
        **_parts(projection, "linear_attn.in_proj_qkvz.weight", own, heads),
        **_parts(projection, "linear_attn.in_proj_ba.weight", gates, heads),
    }


def _mamba_places(values: Mapping[str, Any]) -> dict[str, Place]:
    """The parts of a Mamba mixer's input projection and convolution."""
    inner = values["mamba_num_heads"] * values["mamba_head_dim"]
    states = values["mamba_num_groups"] * values["mamba_state_dim"]
    conv = {"x": inner, "B": states, "C": states}
    projection = {"z": inner, **conv, "dt": values["mamba_num_heads"]}
    return {
        **_parts("mixer.in_proj.weight", "mixer.in_proj.weight", projection),
        **_parts("mixer.conv1d.weight", "mixer.conv1d.weight", conv),
        **_parts("mixer.conv1d.bias", "mixer.conv1d.bias", conv),
    }


class TensorNames:
    """The Hugging Face names of a model's tensors.

    Args:
        model_type: of config.json.
        values: the architecture keys of `ModelConfig`, from config.json.
        stored: the folder's tensors. They say how the names begin, and whether a layer's experts
            are one tensor.
        keys: Megatron's tensors, all or those of a rank. They say whether a layer is a block.
        is_value_model: whether the model has a value head. It has no multi-token prediction.

    Raises:
        ConfigError: there is no table for this kind of model.
    """

    def __init__(
        self,
        model_type: str,
        values: Mapping[str, Any],
        stored: Iterable[str] = (),
        keys: Iterable[str] = (),
        *,
        is_value_model: bool = False,
    ) -> None:
        if model_type not in LAYERS:
            raise ConfigError(
                f"model_type {model_type!r} has no table of tensors; the known ones are "
                f"{', '.join(LAYERS)}"
            )
        self.model_type = model_type
        self.vocab_size = int(values["vocab_size"])
        self.num_experts = values.get("num_experts") or 0
        heads = values["num_attention_heads"]
        self._groups = values.get("num_query_groups") or heads
        self._heads_per_group = heads // self._groups
        self._head_width = values.get("kv_channels") or values["hidden_size"] // heads
        self._has_gate = bool(values.get("attention_output_gate"))
        self._layers = LAYERS[model_type]
        self._outer = _NEMOTRON_OUTER if model_type == "nemotron_h" else _OUTER
        self._places: dict[str, Place] = {}
        if values.get("linear_num_key_heads"):
            self._places |= _gated_delta_places(model_type, values)
        if values.get("mamba_num_heads"):
            self._places |= _mamba_places(values)
        is_split = bool(values.get("hybrid_layer_pattern")) or _has_split_blocks(keys)
        # Megatron's layers in a layer of the folder.
        self._split = 2 if is_split and model_type != "nemotron_h" else 1
        pattern = values.get("hybrid_layer_pattern")
        self.num_layers = len(pattern) // self._split if pattern else int(values["num_layers"])
        names = list(stored)
        self._prefix = next(
            (
                prefix
                for begin, prefix in _PREFIXES.items()
                if any(name.startswith(begin) for name in names)
            ),
            "model.",
        )
        self._mtp = MTP.get(model_type)
        self._is_value_model = is_value_model
        self._stored = set(names)
        ends = tuple(_STACKED_EXPERTS.values())
        self._stacks_experts = any(name.endswith(ends) for name in names)

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
        if match := _LAYER.fullmatch(key):
            prefix = f"{self._prefix}layers.{int(match[1]) // self._split}."
            name = local_name(match[2])
        elif self._mtp is not None and (match := _DEPTH.fullmatch(key)):
            if match[2] is None:
                return [self._mtp_rows(self._mtp, int(match[1]), match[3], key, num_rows)]
            prefix = self._of_depth(self._mtp.layer, int(match[1]))
            name = local_name(match[2])
        else:
            return [self._outer_rows(key, num_rows)]
        place = self._places.get(name)
        if place is not None:
            return [
                Rows(prefix + place.name, place.start + i * place.stride, place.count)
                for i in range(place.repeats)
            ]
        expert = index[0] if index else None
        if expert is not None and self.model_type == "gpt_oss":
            return _stacked_columns(prefix, name, expert, num_rows)
        if expert is not None and self._stacks_experts:
            return [Rows(prefix + _STACKED_EXPERTS[name], 0, num_rows, expert)]
        if name not in self._layers:
            raise self._unknown(key)
        names = [prefix + one.format(expert=expert) for one in self._layers[name]]
        if name.startswith("self_attention.linear_qkv."):
            return self._by_group(names)
        count = num_rows // len(names)
        return [Rows(one, 0, count) for one in names]

    def _outer_rows(self, key: str, num_rows: int) -> Rows:
        if key == HEAD:
            name = VALUE_HEAD if num_rows == 1 else "lm_head.weight"
        elif key in self._outer:
            name = self._prefix + self._outer[key]
        else:
            raise self._unknown(key)
        is_padded = key in (_EMBEDDING, HEAD)
        return Rows(name, 0, min(self.vocab_size, num_rows) if is_padded else num_rows)

    def _of_depth(self, name: str, depth: int) -> str:
        return name.format(prefix=self._prefix, layer=self.num_layers + depth, depth=depth)

    def _mtp_rows(self, mtp: Mtp, depth: int, part: str, key: str, num_rows: int) -> Rows:
        name = getattr(mtp, part, None)
        if not isinstance(name, str):
            raise self._unknown(key)
        swaps = part == "eh_proj" and mtp.swaps_halves
        return Rows(self._of_depth(name, depth), 0, num_rows, swaps_halves=swaps)

    def copies(self, name: str) -> list[str]:
        """The folder's further tensors with the values of this one: those that depths of
        multi-token prediction share with the model."""
        if self._mtp is None or self._is_value_model:
            return []
        copy = self._mtp.copies.get(name.removeprefix(self._prefix))
        if copy is None:
            return []
        of_depths = (self._of_depth(copy, depth) for depth in itertools.count())
        return list(itertools.takewhile(self._stored.__contains__, of_depths))

    def _unknown(self, key: str) -> ConfigError:
        return ConfigError(
            f"the model has a tensor {key}, which a folder of a {self.model_type} model does not "
            "have; leave out the keys of model that add it, such as mtp_num_layers"
        )

    def _by_group(self, names: Sequence[str]) -> list[Rows]:
        """Queries, gates if there are any, keys and values of each group of heads in turn.

        The gate of a head's output is below its queries.
        """
        queries, *others = names
        width = self._head_width
        heads = self._heads_per_group
        # Where keys and values begin, if they are below the queries in one tensor.
        starts = [0] * len(others)
        if not others:
            others = [queries] * 2
            starts = [self._groups * heads * width, self._groups * (heads + 1) * width]
        found = []
        for group in range(self._groups):
            if self._has_gate:
                own = range(group * heads, (group + 1) * heads)
                found += [Rows(queries, 2 * head * width, width) for head in own]
                found += [Rows(queries, (2 * head + 1) * width, width) for head in own]
            else:
                found.append(Rows(queries, group * heads * width, heads * width))
            found += [
                Rows(name, start + group * width, width)
                for name, start in zip(others, starts, strict=True)
            ]
        return found

    def is_ignorable(self, name: str, *, has_own_head: bool) -> bool:
        """Whether a folder may hold a tensor that the model does not have.

        Args:
            has_own_head: whether the model uses the folder's `lm_head.weight`. A tied model does
                not, and a value head replaces it.
        """
        if name == "lm_head.weight":
            return not has_own_head
        return self._is_mtp(name) or name.endswith("rotary_emb.inv_freq") or self.is_kept(name)

    def is_kept(self, name: str) -> bool:
        """Whether an export copies a tensor from the folder if the model does not have it: those
        of the vision model, and of multi-token prediction that is not trained."""
        if self._is_mtp(name):
            return self._mtp is not None and not self._is_value_model
        return name.startswith(_KEPT.get(self.model_type, ()))

    def _is_mtp(self, name: str) -> bool:
        layer = re.match(re.escape(self._prefix) + r"layers\.(\d+)\.", name)
        if layer:
            return int(layer[1]) >= self.num_layers
        return name.startswith(("mtp.", f"{self._prefix}mtp_layers."))


def _stacked_columns(prefix: str, name: str, expert: int, num_rows: int) -> list[Rows]:
    """An expert's rows in a folder of gpt-oss."""
    stacked = prefix + _STACKED_COLUMNS[name]
    is_matrix = name.endswith("weight")
    step = 2 if "linear_fc1" in name else 1
    return [
        Rows(stacked, first, num_rows // step, expert, step=step, is_transposed=is_matrix)
        for first in range(step)
    ]


def _has_split_blocks(keys: Iterable[str]) -> bool:
    """Whether layers are attention or an MLP alone, as in a HybridModel."""
    found: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        if match := _LAYER.fullmatch(key):
            found[match[1]].add(match[2].split(".")[0])
    return any(not {"self_attention", "mlp"} <= names for names in found.values())
