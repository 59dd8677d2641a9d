"""The tower of a config.json's model with images: its sizes, and what the decoder must know of it.

It is read apart from the decoder, and only where images are trained: a run of the text part alone
needs no tower that megapack knows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megapack.cost.tower import TowerSizes
from megapack.job.config.hf_reader import UNUSED, Family, Reader, Values

_SIZES = (
    *("depth", "hidden_size", "num_heads", "intermediate_size", "patch_size"),
    *("temporal_patch_size", "in_channels", "spatial_merge_size", "out_hidden_size"),
)
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
# What all classes of transformers assume if a key is missing.
_ASSUMED: Values = {
    "temporal_patch_size": 2,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "rope_parameters": None,
}
# As transformers 5 writes it; before, the tower had no other.
_ROPE = {"rope_type": "axial", "rope_theta": 10000.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """A tower, as transformers builds it, and how the decoder reads images."""

    model_type: str
    """Of the tower's config class, such as qwen3_vl_vision."""
    sizes: TowerSizes
    """What the tower costs, with weights of 2 bytes."""
    mrope_section: tuple[int, int, int]
    """Pairs of channels that turn by frame, row and column."""
    mrope_interleaved: bool
    """Whether these alternate."""
    image_token_id: int
    video_token_id: int
    keys: Mapping[str, Any]
    """`vision_config` as the file has it."""


def read_vision(
    folder: str, keys: Mapping[str, Any], family: Family, decoder: Mapping[str, Any]
) -> VisionOptions | None:
    """The tower of a model; None of a family whose images are not trained.

    Args:
        keys: of config.json, with those of its text part at the top level.
        decoder: the decoder's values, see `HfConfig`.

    Raises:
        ConfigError: a key is missing or unknown, or a value is not one that megapack trains.
    """
    tower = family.tower
    if tower is None:
        return None
    outer = Reader(folder, keys, family)
    given = keys.get("vision_config")
    if not isinstance(given, dict):
        raise outer.error("vision_config", given, "expected an object of keys")
    assumed = dataclasses.replace(family, defaults={**_ASSUMED, "hidden_act": tower.activation})
    reader = Reader(folder, given, assumed, part="vision_config.")
    values: Values = reader.counts(*_SIZES, *tower.sizes)
    values |= {name: _blocks(reader, name, values["depth"]) for name in tower.blocks}
    _check_values(reader, values, decoder)
    tokens = {name: outer.count(name) for name in _TOKENS}
    for name, token in tokens.items():
        if token >= decoder["vocab_size"]:
            raise outer.error(name, token, f"vocab_size is {decoder['vocab_size']}: correct one")
    return VisionOptions(
        model_type=f"{keys['model_type']}_vision",
        sizes=_sizes(values),
        mrope_section=_mrope_section(outer, decoder, is_interleaved=tower.is_interleaved),
        mrope_interleaved=tower.is_interleaved,
        image_token_id=tokens["image_token_id"],
        video_token_id=tokens["video_token_id"],
        keys=given,
    )


def _sizes(values: Values) -> TowerSizes:
    side, window = values["patch_size"], values.get("window_size")
    return TowerSizes(
        depth=values["depth"],
        width=values["hidden_size"],
        mlp_width=values["intermediate_size"],
        is_gated=window is not None,
        patch_numbers=values["in_channels"] * values["temporal_patch_size"] * side**2,
        num_positions=values.get("num_position_embeddings", 0),
        merge=values["spatial_merge_size"],
        out_width=values["out_hidden_size"],
        num_levels=1 + len(values.get("deepstack_visual_indexes", ())),
        full_blocks=len(values.get("fullatt_block_indexes", range(values["depth"]))),
        window_patches=((window or 0) // side) ** 2,
    )


def _blocks(reader: Reader, key: str, depth: int) -> tuple[int, ...]:
    """Numbers of blocks, ascending."""
    numbers = reader.get(key)
    is_list = isinstance(numbers, list) and all(type(one) is int for one in numbers)
    if not is_list or numbers != sorted({one for one in numbers if 0 <= one < depth}):
        raise reader.error(key, numbers, f"expected ascending numbers of the {depth} blocks")
    return tuple(numbers)


def _check_values(reader: Reader, values: Values, decoder: Mapping[str, Any]) -> None:
    """Check values that must fit others, and that no key is unknown."""
    reader.require("hidden_act", reader.family.defaults["hidden_act"])
    # Other names in published folders of Qwen2.5-VL.
    reader.require("in_chans", values["in_channels"])
    reader.require("spatial_patch_size", values["patch_size"])
    if "deepstack_visual_indexes" not in values:
        reader.require("deepstack_visual_indexes", [])
    rope = reader.get("rope_parameters")
    if rope not in (None, _ROPE):
        raise reader.error("rope_parameters", rope, f"megapack trains {_ROPE} only")
    for name, unit in (
        ("hidden_size", values["num_heads"]),
        ("window_size", values["patch_size"] * values["spatial_merge_size"]),
    ):
        if values.get(name, 0) % unit:
            raise reader.error(name, values[name], f"expected a multiple of {unit}")
    positions = values.get("num_position_embeddings", 1)
    if math.isqrt(positions) ** 2 != positions:
        raise reader.error("num_position_embeddings", positions, "expected a square")
    width = decoder["hidden_size"]
    if values["out_hidden_size"] != width:
        why = f"the decoder's hidden_size is {width}: correct one"
        raise reader.error("out_hidden_size", values["out_hidden_size"], why)
    levels = values.get("deepstack_visual_indexes", ())
    if len(levels) > decoder["num_layers"]:
        why = f"the decoder has {decoder['num_layers']} layers to add {len(levels)} levels to"
        raise reader.error("deepstack_visual_indexes", list(levels), why)
    for key, value in reader.keys.items():
        # Of the tokens of videos.
        if key not in (*reader.known, *UNUSED, "model_type", "tokens_per_second"):
            raise reader.error(
                key,
                value,
                "megapack does not know this key of a tower: remove it if it has no effect, or set "
                "model.vision=off",
            )


def _mrope_section(
    reader: Reader, decoder: Mapping[str, Any], *, is_interleaved: bool
) -> tuple[int, int, int]:
    """The pairs of channels of the decoder's heads that turn by frame, row and column."""
    rope = reader.get("rope_parameters") or reader.get("rope_scaling") or {}
    section = rope.get("mrope_section")
    if not isinstance(section, list) or not all(type(one) is int and one > 0 for one in section):
        section = []
    pairs = int(decoder["kv_channels"] * decoder["rotary_percent"]) // 2
    # Rows turn the pairs 1, 4, 7, ..., columns 2, 5, 8, ..., and frames the others.
    lasts = [3 * one - 3 + axis for axis, one in enumerate(section)][1:]
    is_far = is_interleaved and any(last >= pairs for last in lasts)
    if len(section) != 3 or sum(section) != pairs or is_far:
        what = "that alternate" if is_interleaved else "in blocks"
        why = f"expected three numbers of pairs {what}, {pairs} together"
        raise reader.error("mrope_section", rope.get("mrope_section"), why)
    # transformers does it by the family, whatever the key says.
    found = rope.get("mrope_interleaved", is_interleaved)
    if found is not is_interleaved:
        raise reader.error("mrope_interleaved", found, "transformers does not read it: remove it")
    frames, rows, columns = section
    return frames, rows, columns
