"""Towers of config.json: what is read of published ones, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megapack.config import parse_config
from megapack.cost.tower import TowerSizes
from megapack.errors import ConfigError
from megapack.job.config.critic import critic_model
from megapack.job.config.hf_config import read_hf_config
from megapack.job.config.hf_vision import VisionOptions
from megapack.job.config.model import ModelConfig
from megapack.job.config.sections import TrainConfig
from tests.unit.job.config.hybrid_configs import HYBRID
from tests.unit.job.config.published_configs import CONFIGS

pytestmark = pytest.mark.unit

FOLDERS = {
    "qwen3_vl": CONFIGS["Qwen3-VL-4B"],
    "qwen3_vl_moe": CONFIGS["Qwen3-VL-30B-A3B"],
    "qwen2_5_vl": CONFIGS["Qwen2.5-VL-7B"],
    "qwen3_5": HYBRID["qwen3_5"],
    "qwen3_5_moe": HYBRID["qwen3_5_moe"],
}


def folder(path: Path, keys: dict[str, Any]) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(keys))
    return str(path)


def tower(path: Path, keys: dict[str, Any]) -> VisionOptions:
    found = read_hf_config(folder(path, keys)).vision
    assert found is not None
    return found


def with_tower(name: str, **keys: Any) -> dict[str, Any]:
    """A published config with other keys of its tower; those that are None are left out."""
    own = {**FOLDERS[name]["vision_config"], **keys}
    own = {key: value for key, value in own.items() if value is not None}
    return {**FOLDERS[name], "vision_config": own}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_tower_of_a_published_model(name: str, tmp_path: Path) -> None:
    keys = FOLDERS[name]
    found = tower(tmp_path, keys)
    given = keys["vision_config"]
    numbers = 3 * given["temporal_patch_size"] * given["patch_size"] ** 2
    is_gated = name == "qwen2_5_vl"
    assert found.sizes == TowerSizes(
        depth=given["depth"],
        width=given["hidden_size"],
        mlp_width=given["intermediate_size"],
        is_gated=is_gated,
        patch_numbers=numbers,
        num_positions=given.get("num_position_embeddings", 0),
        merge=given["spatial_merge_size"],
        out_width=given["out_hidden_size"],
        num_levels=1 + len(given.get("deepstack_visual_indexes", [])),
        full_blocks=len(given["fullatt_block_indexes"]) if is_gated else given["depth"],
        window_patches=(given["window_size"] // given["patch_size"]) ** 2 if is_gated else 0,
    )
    assert (found.model_type, found.keys) == (f"{name}_vision", keys["vision_config"])
    assert found.image_token_id == keys["image_token_id"]
    sections = {"qwen2_5_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20)}
    assert found.mrope_section == sections.get(name.removesuffix("_moe"), (11, 11, 10))
    assert found.mrope_interleaved is (name != "qwen2_5_vl")
    ModelConfig.from_hf(folder(tmp_path, keys), vision="train")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_tower_as_transformers_5_writes_it(name: str, tmp_path: Path) -> None:
    """One class reads the published file, and writes all that it knows of it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys = json.loads(json.dumps(FOLDERS[name]))
    config = CONFIG_MAPPING[name](**keys)
    config.save_pretrained(tmp_path / "new")
    old, new = read_hf_config(folder(tmp_path / "old", keys)), read_hf_config(tmp_path / "new")
    assert new.values == old.values
    first, second = (dict(vars(found.vision), keys=None) for found in (old, new))
    assert first == second
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert written["vision_config"]["model_type"] == f"{name}_vision"


def test_qwen2_5_vl_as_transformers_4_wrote_it_later(tmp_path: Path) -> None:
    """All text keys twice, tokens of images as null, and the embedding of text under a new name."""
    flat = FOLDERS["qwen2_5_vl"]
    rope = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}
    beside = ("vision_config", "model_type", "tie_word_embeddings", "rope_scaling")
    text = {key: value for key, value in flat.items() if key not in beside}
    text |= {"model_type": "qwen2_5_vl_text", "rope_scaling": rope, "image_token_id": None}
    text |= {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_token_id": None}
    keys = {**flat, "rope_scaling": rope, "text_config": text}
    assert tower(tmp_path / "a", keys) == tower(tmp_path / "b", flat)
    both = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "mrope"}
    assert tower(tmp_path / "c", {**flat, "rope_scaling": both}) == tower(tmp_path / "b", flat)


@pytest.mark.parametrize(
    ("name", "top", "text", "is_tied"),
    [
        ("qwen3_vl", True, None, True),
        ("qwen3_vl", None, None, False),
        ("qwen3_vl", None, False, False),
        ("qwen3_vl", None, True, "text_config says otherwise"),
        ("qwen3_vl", False, True, "text_config says otherwise"),
        # What transformers writes of every model.
        ("qwen3_vl_moe", False, True, False),
        ("qwen3_vl_moe", True, False, "text_config says otherwise"),
        ("qwen3_5", True, False, True),
        ("qwen3_5", False, True, "text_config says otherwise"),
    ],
)
def test_embeddings_are_tied_by_the_top_level(
    name: str, top: bool | None, text: bool | None, is_tied: bool | str, tmp_path: Path
) -> None:
    keys = json.loads(json.dumps(FOLDERS[name]))
    for part, value in ((keys, top), (keys["text_config"], text)):
        part.pop("tie_word_embeddings", None)
        if value is not None:
            part["tie_word_embeddings"] = value
    path = folder(tmp_path, keys)
    if isinstance(is_tied, str):
        with pytest.raises(ConfigError, match=is_tied):
            read_hf_config(path)
    else:
        assert ModelConfig.from_hf(path).untie_embeddings is not is_tied


REFUSED = [
    (with_tower("qwen3_vl", depth=None), "has no vision_config.depth"),
    (with_tower("qwen3_vl", deepstack_visual_indexes=None), "has no vision_config.deepstack"),
    (with_tower("qwen3_vl", deepstack_visual_indexes=[5, 24]), "ascending numbers of the 24"),
    (with_tower("qwen3_vl", deepstack_visual_indexes=[11, 5]), "ascending numbers of the 24"),
    (with_tower("qwen3_vl", depth=64, deepstack_visual_indexes=[*range(37)]), "36 layers to add"),
    (with_tower("qwen3_5", deepstack_visual_indexes=[5]), r"indexes=.*trains \[\] only"),
    (with_tower("qwen3_vl", out_hidden_size=4096), "the decoder's hidden_size is 2560"),
    (with_tower("qwen3_vl", hidden_act="silu"), 'trains "gelu_pytorch_tanh" only'),
    (with_tower("qwen3_vl", num_heads=15), "hidden_size=1024; expected a multiple of 15"),
    (with_tower("qwen3_vl", num_position_embeddings=2300), "expected a square"),
    (with_tower("qwen3_vl", patch_size=[16, 16]), "expected a whole number"),
    (with_tower("qwen3_vl", rope_parameters={"rope_type": "axial"}), "rope_parameters=.*10000"),
    (with_tower("qwen3_vl", window_size=112), "window_size=112; megapack does not know this key"),
    (with_tower("qwen2_5_vl", window_size=100), "expected a multiple of 28"),
    (with_tower("qwen2_5_vl", in_chans=1), "in_chans=1"),
    ({**FOLDERS["qwen3_vl"], "vision_config": None}, "vision_config=null"),
    ({**FOLDERS["qwen3_vl"], "image_token_id": 151936}, "vocab_size is 151936"),
    ({**FOLDERS["qwen3_vl"], "image_token_id": None}, "image_token_id=null"),
    (
        {**FOLDERS["qwen2_5_vl"], "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 25]}},
        "in blocks, 64 together",
    ),
    ({**FOLDERS["qwen2_5_vl"], "rope_scaling": None}, "mrope_section=null"),
    (
        {
            **FOLDERS["qwen2_5_vl"],
            "rope_scaling": {
                "type": "mrope",
                "mrope_section": [16, 24, 24],
                "mrope_interleaved": True,
            },
        },
        "mrope_interleaved=true; transformers does not read it",
    ),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_other_towers_are_refused_where_images_are_trained(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = folder(tmp_path, keys)
    # The text part alone needs no tower.
    assert ModelConfig.from_hf(path).vision == "off"
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_hf(path, vision="frozen")
    assert str(caught.value).startswith(f"{path}: config.json ")
    assert "\n" not in str(caught.value)


def test_frames_need_pairs_between_those_of_rows(tmp_path: Path) -> None:
    keys = json.loads(json.dumps(FOLDERS["qwen3_vl"]))
    for section, is_legal in (([24, 20, 20], True), ([20, 22, 22], False), ([22, 21, 21], True)):
        keys["text_config"]["rope_scaling"]["mrope_section"] = section
        path = folder(tmp_path, keys)
        if is_legal:
            assert tower(tmp_path, keys).mrope_section == tuple(section)
        else:
            with pytest.raises(ConfigError, match="that alternate, 64 together"):
                _ = read_hf_config(path).vision


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("qwen3_vl", {"fp8": "tensorwise", "dtype": "bf16"}, "model.fp8=tensorwise"),
        ("qwen3_5", {"mtp_num_layers": 1}, "would embed image tokens as text"),
        ("gemma3", {}, "image tokens of Gemma attend in both directions; set model.vision=off"),
        ("qwen3", {}, "has no tower; set model.vision=off"),
    ],
)
def test_what_is_not_trained_with_images(
    name: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = FOLDERS.get(name) or CONFIGS[{"gemma3": "Gemma-3-12B", "qwen3": "Qwen3-4B"}[name]]
    path = folder(tmp_path, config)
    ModelConfig.from_hf(path, **keys)
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_hf(path, vision="train", **keys)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"model\.vision=train needs the tower"):
        ModelConfig(vision="train")


def test_globs_of_the_tower_and_of_the_decoder(tmp_path: Path) -> None:
    path = folder(tmp_path, FOLDERS["qwen3_vl"])
    globs = ("embedding.*", "visual.blocks.*", "decoder.*")
    model = ModelConfig.from_hf(path, vision="train", freeze=globs)
    assert model.freeze_of(tower=True) == ("visual.blocks.*",)
    assert model.freeze_of(tower=False) == ("embedding.*", "decoder.*")
    assert model.with_value_head().freeze == ("embedding.*", "decoder.*")
    assert critic_model(model).vision == critic_model(model, path).vision == "off"
    for vision in ("off", "frozen"):
        with pytest.raises(ConfigError, match=r"model\.freeze has 'visual\.blocks\.\*'"):
            ModelConfig.from_hf(path, vision=vision, freeze=globs)


def test_muon_has_no_towers(tmp_path: Path) -> None:
    path = folder(tmp_path, FOLDERS["qwen3_vl"])
    text = f"name: x\nplan: {{max_tokens_per_gpu: 99}}\nmodel: {{hf_path: {path}, vision: train}}"
    assert parse_config(text, [], TrainConfig).model.vision == "train"
    with pytest.raises(ConfigError, match=r"optim\.name=muon with model\.vision=train"):
        parse_config(text, ["optim.name=muon"], TrainConfig)
