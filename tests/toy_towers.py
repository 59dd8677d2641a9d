"""Tiny models with towers, of each family that megapack trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megapack.job.data import toy_images
from megapack.job.data.toy_images import DECODER, TOWER

_POSITIONS = {key: value for key, value in TOWER.items() if key != "deepstack_visual_indexes"}
_WINDOWS = {
    **{key: value for key, value in _POSITIONS.items() if key != "num_position_embeddings"},
    "window_size": 16,
    "fullatt_block_indexes": [1, 3],
}


def _rope(*sections: int, **others: Any) -> dict[str, Any]:
    settings = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    return {"rope_parameters": {**settings, **others}}


_QWEN2_5 = {key: value for key, value in DECODER.items() if key != "head_dim"}
_QWEN3_5 = {
    **DECODER,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    **_rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5),
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# By family: the beginning of its classes' names in transformers, the decoder, the tower.
_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ("Qwen3VL", DECODER, TOWER),
    "qwen3_vl_moe": ("Qwen3VLMoe", {**DECODER, **_EXPERTS}, TOWER),
    "qwen2_5_vl": ("Qwen2_5_VL", {**_QWEN2_5, **_rope(4, 2, 2)}, _WINDOWS),
    "qwen3_5": ("Qwen3_5", _QWEN3_5, _POSITIONS),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 48},
        _POSITIONS,
    ),
}
FAMILIES = tuple(_FAMILIES)
"""Those that `write_image_model` makes."""


def write_image_model(folder: str | Path, family: str = "qwen3_vl") -> None:
    """Write the family's model, as `megapack data toy --images` writes a Qwen3-VL."""
    toy_images.write_image_model(folder, *_FAMILIES[family])
