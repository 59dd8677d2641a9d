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

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapack.cost.options import ModelOptions
from megapack.errors import ConfigError
from megapack.job.config.hf_families import FAMILIES
from megapack.job.config.hf_tensors import COMMON, EMBEDDING, TOWER, VISION, Mtp
from megapack.model.parameters import local_name


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a Hugging Face tensor; of a vector, its elements."""

    name: str
    start: int
    count: int
    expert: int | None = None
    """The expert's number, if the tensor stacks those of a layer; its rows are the expert's."""
    num_stacked: int = 0
    """Of how many the tensor is a stack."""
    swaps_halves: bool = False
    """Whether its columns are the second half of Megatron's, then the first."""
    step: int = 1
    """From one row to the next."""
    is_transposed: bool = False
    """Whether what is a row of Megatron's is a column there."""


Places = dict[str, list[Rows]]
"""Megatron's name of a part in a layer -> its rows in a tensor of the folder's layer."""

HEAD = "output_layer.weight"
"""Megatron's name of the output layer."""
LM_HEAD = "lm_head.weight"
"""The folder's."""
ADAPTER = ".adapter."
"""What names of Megatron-Bridge's adapters have in them."""
VALUE_HEAD = "score.weight"
"""The tensor of a value head, whose output layer has one row."""


# Folders of embedding models have no beginning.
_PREFIXES = {
    "model.language_model.": "model.language_model.",
    "language_model.model.": "language_model.model.",
    "backbone.": "backbone.",
    "layers.": "",
}
_ROTARY_TABLE = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# The layer of a depth; in a HybridModel a depth has several.
_DEPTH = re.compile(
    r"mtp\.layers\.(\d+)\.(?:(?:transformer_layer|mtp_model_layer\.layers\.(\d+))\.(.*)|(.*)\.weight)"
)


def _parts(key: str, name: str, parts: Mapping[str, int], repeats: int = 1) -> Places:
    """Places of parts that are one above the other in a tensor, `repeats` times."""
    starts = itertools.accumulate(parts.values(), initial=0)
    end = repeats * sum(parts.values())
    return {
        f"{key}.{part}": [Rows(name, at, count) for at in range(start, end, end // repeats)]
        for (part, count), start in zip(parts.items(), starts, strict=False)
    }


def _gated_delta_places(values: Mapping[str, Any], *, by_key_head: bool) -> Places:
    """The parts of a gated delta net's input projection and convolution."""
    heads = values["linear_num_key_heads"]
    value_heads = values["linear_num_value_heads"]
    keys = heads * values["linear_key_head_dim"]
    width = value_heads * values["linear_value_head_dim"]
    projection = "self_attention.in_proj.weight"
    qkv = {"query": keys, "key": keys, "value": width}
    conv = _parts("self_attention.conv1d.weight", "linear_attn.conv1d.weight", qkv)
    if not by_key_head:
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


def _mamba_places(values: Mapping[str, Any]) -> Places:
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
        num_mtp_layers: depths of multi-token prediction that config.json counts.
        has_expert_columns: whether stacked experts have Megatron's rows as columns.

    Attributes:
        tower: how the names of a vision tower's tensors begin.
        depths: how the names of these depths' layers begin, of those that the folder has.
    """

    def __init__(
        self,
        model_type: str,
        values: Mapping[str, Any],
        stored: Iterable[str] = (),
        keys: Iterable[str] = (),
        *,
        is_value_model: bool = False,
        num_mtp_layers: int = 0,
        has_expert_columns: bool = False,
    ) -> None:
        self.model_type = model_type
        self._family = family = FAMILIES[model_type]
        self._layers = {**COMMON, **family.tensors}
        self._kept = (*family.kept, *(VISION if family.in_text_config else ()))
        self._model = model = ModelOptions(**values)
        self._places: Places = {}
        if model.linear_num_key_heads:
            self._places |= _gated_delta_places(values, by_key_head=family.by_key_head)
        if model.mamba_num_heads:
            self._places |= _mamba_places(values)
        is_split = model.layer_pattern is not None or _has_split_blocks(keys)
        # Megatron's layers in a layer of the folder.
        self._split = 2 if is_split and family.has_blocks else 1
        in_block = self._split if model.layer_pattern is not None else 1
        self.num_layers = model.num_layers // in_block
        names = list(stored)
        begins = (b for b in _PREFIXES if any(name.startswith(b) for name in names))
        self._prefix = _PREFIXES.get(next(begins, ""), "model.")
        self.tower = TOWER if any(name.startswith(TOWER) for name in names) else f"model.{TOWER}"
        self._mtp = family.mtp
        # Layers of the folder in a depth.
        self._depth_layers = max(1, len(family.mtp.pattern)) if family.mtp else 1
        self._is_value_model = is_value_model
        self._stored = set(names)
        # A layer without the projection is one of the model's.
        self.depths = [
            tuple(self._of_depth(self._mtp.layer, depth, i) for i in range(self._depth_layers))
            for depth in range(num_mtp_layers)
            if self._mtp is not None and self._of_depth(self._mtp.eh_proj, depth) in self._stored
        ]
        ends = tuple(family.stacked.values())
        self._stacks_experts = any(name.endswith(ends) for name in names)
        self._has_expert_columns = has_expert_columns or family.has_expert_columns

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
            if match[3] is None:
                return [self._mtp_rows(self._mtp, int(match[1]), match[4], key, num_rows)]
            prefix = self._of_depth(self._mtp.layer, int(match[1]), int(match[2] or 0))
            name = local_name(match[3])
        elif key.startswith(TOWER) and self._family.tower is not None:
            return [Rows(self.tower + key.removeprefix(TOWER), 0, num_rows)]
        else:
            return [self._outer_rows(local_name(key), num_rows)]
        if name in self._places:
            return [replace(rows, name=prefix + rows.name) for rows in self._places[name]]
        expert = index[0] if index else None
        if expert is not None and (self._stacks_experts or self._family.has_expert_columns):
            return self._stacked_rows(prefix, name, expert, num_rows)
        if name not in self._layers:
            raise self._unknown(key)
        names = [prefix + one.format(expert=expert) for one in self._layers[name]]
        if name in self._family.single_rows:
            return [Rows(names[0], 0, num_rows, expert=0, num_stacked=1)]
        if name.startswith("self_attention.linear_qkv."):
            is_global = False
            if layer := _LAYER.fullmatch(key):
                is_global = not self._model.local_layers[int(layer[1]) // self._split]
            return self._by_group(names, is_global)
        count = num_rows // len(names)
        return [Rows(one, 0, count) for one in names]

    def _stacked_rows(self, prefix: str, name: str, expert: int, num_rows: int) -> list[Rows]:
        """An expert's rows in the tensor of all."""
        stacked = prefix + self._family.stacked[name]
        count = self._model.num_experts or 0
        if not self._has_expert_columns:
            return [Rows(stacked, 0, num_rows, expert, count)]
        step = 2 if self._family.has_expert_columns and "linear_fc1" in name else 1
        is_matrix = name.endswith("weight")
        return [
            Rows(
                stacked, first, num_rows // step, expert, count, step=step, is_transposed=is_matrix
            )
            for first in range(step)
        ]

    def _outer_rows(self, key: str, num_rows: int) -> Rows:
        if key == HEAD:
            name = VALUE_HEAD if num_rows == 1 else LM_HEAD
        elif key in self._family.outer:
            name = self._prefix + self._family.outer[key]
        else:
            raise self._unknown(key)
        is_padded = key in (EMBEDDING, HEAD)
        return Rows(name, 0, min(self._model.num_ids, num_rows) if is_padded else num_rows)

    def _of_depth(self, name: str, depth: int, layer: int = 0) -> str:
        first, layers = depth * self._depth_layers, self._depth_layers
        numbers = {"depth": depth, "own": first + layer, "last": first + layers - 1}
        return name.format(prefix=self._prefix, layer=self.num_layers + depth, **numbers)

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
        if ADAPTER in key:
            return ConfigError(
                f"the model has adapters, such as {key}; load its weights before they are added, "
                "export them by megapack.job.hf.export_adapters, and merge both by peft"
            )
        return ConfigError(
            f"the model has a tensor {key}, which a folder of a {self.model_type} model does not "
            "have; leave out the keys of model that add it, such as mtp_num_layers"
        )

    def _by_group(self, names: Sequence[str], is_global: bool) -> list[Rows]:
        """Queries, gates if there are any, keys and values of each group of heads in turn.

        The gate of a head's output is below its queries. Values that are the keys are left out.
        """
        queries, *others = names
        model = self._model
        width, groups = model.head_width, model.query_groups
        if is_global:
            width, groups = model.global_heads
        heads = model.num_attention_heads // groups
        # Where keys and values begin, if they are below the queries in one tensor.
        starts = [0] * len(others)
        if not others:
            others = [queries] * 2
            starts = [groups * heads * width, groups * (heads + 1) * width]
        if is_global and model.global_keys_as_values:
            del others[1], starts[1]
        found = []
        for group in range(groups):
            if model.attention_output_gate:
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

    def why_unknown(self, name: str) -> str:
        """What to do about a tensor that a folder may not have."""
        layer = re.match(re.escape(self._prefix) + r"layers\.(\d+)\.", name)
        if (layer and int(layer[1]) >= self.num_layers) or name.removeprefix(
            self._prefix
        ).startswith("mtp"):
            return (
                f"config.json counts {self.num_layers} layers, and of multi-token prediction "
                f"{len(self.depths)} that the folder has: correct it (num_hidden_layers, "
                "num_nextn_predict_layers), or remove the tensors"
            )
        return "its config.json is of another model, or keys of model leave them out"

    def is_kept(self, name: str) -> bool:
        """Whether an export copies a tensor from the folder if the model does not have it: those
        of the vision model, and of multi-token prediction that is not trained."""
        if self.depth_of(name) is not None:
            return not self._is_value_model
        return name.startswith(self._kept)

    def is_rotary_table(self, name: str) -> bool:
        """Whether it is the rotary angles of old folders, which transformers does not read."""
        return re.fullmatch(_ROTARY_TABLE, name.removeprefix(self._prefix)) is not None

    def depth_of(self, name: str) -> tuple[str, ...] | None:
        """How the names of a depth of multi-token prediction begin, if config.json counts it and
        the tensor is of it."""
        for depth, begin in enumerate(self.depths):
            assert self._mtp is not None
            parts = self._mtp.enorm, self._mtp.hnorm, self._mtp.eh_proj, self._mtp.final_layernorm
            if name.startswith(begin) or name in [self._of_depth(part, depth) for part in parts]:
                return begin
        return None

    @property
    def shared(self) -> dict[str, str]:
        """Tensors of the folder that are copies of one of the model: copy -> the model's."""
        embedding = self._prefix + self._family.outer[EMBEDDING]
        own = (LM_HEAD, embedding)
        return {LM_HEAD: embedding, **{copy: one for one in own for copy in self.copies(one)}}


def _has_split_blocks(keys: Iterable[str]) -> bool:
    """Whether layers are attention or an MLP alone, as in a HybridModel."""
    found: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        if match := _LAYER.fullmatch(key):
            found[match[1]].add(match[2].split(".")[0])
    return any(not {"self_attention", "mlp"} <= names for names in found.values())
