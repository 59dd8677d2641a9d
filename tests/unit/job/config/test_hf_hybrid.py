"""config.json of hybrid families: their patterns and sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megapack import ConfigError
from megapack.job.config.hf_config import read_hf_config
from megapack.job.config.model import ModelConfig
from tests.unit.job.config.hybrid_configs import HYBRID, LATENT

pytestmark = pytest.mark.unit

PATTERNS = {
    "qwen3_next": 12 * "GEGEGE*E",
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), 16 * "G-G-G-*-"),
    "nemotron_h": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}


def folder(path: Path, keys: dict[str, Any]) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(keys))
    return str(path)


def changed(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A published config with other values, those of the text part there."""
    keys = HYBRID[name]
    text = keys.get("text_config")
    if text is None or "text_config" in changes:
        return {**keys, **changes}
    inner = {key: value for key, value in changes.items() if key not in keys}
    outer = {key: value for key, value in changes.items() if key in keys}
    return {**keys, **outer, "text_config": {**text, **inner}}


@pytest.mark.parametrize("name", HYBRID)
def test_the_published_config_of_a_family(name: str, tmp_path: Path) -> None:
    path = folder(tmp_path, HYBRID[name])
    found = read_hf_config(path)
    assert (found.model_type, [found.architecture]) == (name, HYBRID[name]["architectures"])
    model = ModelConfig.from_hf(path, dtype="bf16")
    assert {key: getattr(model, key) for key in found.values} == dict(found.values)
    assert model.layer_pattern == PATTERNS.get(name, 10 * "GEGEGE*E")
    assert found.num_mtp_layers == (name != "nemotron_h")


def test_a_depth_of_multi_token_prediction_is_attention_and_the_last_mlp(tmp_path: Path) -> None:
    for name, depth in (("qwen3_next", "/*E"), ("qwen3_5", "/*-")):
        path = folder(tmp_path / name, HYBRID[name])
        model = ModelConfig.from_hf(path, mtp_num_layers=1)
        assert model.hybrid_layer_pattern == f"{model.layer_pattern}{depth}"
    path = folder(tmp_path / "nemotron_h", HYBRID["nemotron_h"])
    with pytest.raises(ConfigError, match="has 0 layers of multi-token prediction that megapack"):
        ModelConfig.from_hf(path, mtp_num_layers=1)


@pytest.mark.parametrize("name", LATENT)
def test_nemotron_super_and_ultra(name: str, tmp_path: Path) -> None:
    """Layers as letters or by kind; experts at a quarter of the hidden width; a depth of attention
    and experts, of which transformers 5 writes the kinds in other words."""
    keys = LATENT[name]
    model = ModelConfig.from_hf(folder(tmp_path, keys), mtp_num_layers=1)
    assert model.moe_latent_size == model.hidden_size / 4 == model.routed_width
    counts = {letter: (model.layer_pattern or "").count(letter) for letter in "ME*"}
    ultra = {"M": 48, "E": 48, "*": 12}
    assert counts == ({"M": 40, "E": 40, "*": 8} if "Super" in name else ultra)
    assert model.mtp_pattern == "*E"
    keys = {**keys, "mtp_layers_block_type": ["full_attention", "moe"]}
    assert ModelConfig.from_hf(folder(tmp_path, keys), mtp_num_layers=1) == model
    with pytest.raises(ConfigError, match=r"mtp_layers_block_type=.*moe.* trains"):
        read_hf_config(folder(tmp_path, {**keys, "mtp_layers_block_type": ["mamba", "moe"]}))
    # Without experts their width has no effect.
    dense = {**keys, "layers_block_type": ["mamba", "mlp"], "num_hidden_layers": 2}
    dense.pop("hybrid_override_pattern", None)
    assert ModelConfig.from_hf(folder(tmp_path, dense)).moe_latent_size is None


@pytest.mark.parametrize(
    ("name", "changes", "pattern"),
    [
        ("qwen3_next", {"layer_types": 24 * ["linear_attention", "full_attention"]}, 24 * "GE*E"),
        ("qwen3_next", {"full_attention_interval": 2}, 24 * "GE*E"),
        ("qwen3_next", {"mlp_only_layers": [1, 3]}, "GEG-GE*-" + 11 * "GEGEGE*E"),
        ("qwen3_next", {"decoder_sparse_step": 2}, 12 * "G-GEG-*E"),
        ("qwen3_next", {"num_experts": 0}, 12 * "G-G-G-*-"),
        ("qwen3_5_moe", {"layer_types": None}, 10 * "GEGEGE*E"),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*", "num_hidden_layers": 4}, "M-M*"),
    ],
)
def test_patterns(name: str, changes: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    model = ModelConfig.from_hf(folder(tmp_path, changed(name, changes)))
    assert model.hybrid_layer_pattern == pattern
    assert (model.num_experts is None) == ("E" not in pattern)


@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
@pytest.mark.parametrize(
    "kinds",
    [["linear_attention", "moe", "full_attention", "mlp"], ["mamba", "moe", "attention", "mlp"]],
)
def test_nemotron_as_transformers_5_writes_it(key: str, kinds: list[str], tmp_path: Path) -> None:
    """Layers by kind and no count of them; infinity as an object."""
    keys = {**HYBRID["nemotron_h"], key: kinds}
    del keys["hybrid_override_pattern"], keys["num_hidden_layers"]
    keys["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    assert ModelConfig.from_hf(folder(tmp_path, keys)).layer_pattern == "ME*-"
    keys["time_step_limit"] = [0.0, float("inf")]
    assert ModelConfig.from_hf(folder(tmp_path, keys)).num_layers == 4


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_rotary_keys_of_transformers_4_and_5(name: str, tmp_path: Path) -> None:
    """One object, or keys beside each other; a missing factor is a quarter."""
    published = read_hf_config(folder(tmp_path / "published", HYBRID[name])).values
    inside = {"rope_theta": 10000000, "rope_type": "default"}
    keys = {one: value for one, value in HYBRID[name].items() if "rot" not in one}
    keys = {one: value for one, value in keys.items() if "rope" not in one}
    for rope in ({"rope_parameters": inside}, {"rope_theta": 10000000, "rope_scaling": None}):
        path = folder(tmp_path / "other", {**keys, **rope})
        assert read_hf_config(path).values == published
        path = folder(tmp_path / "half", {**keys, **rope, "partial_rotary_factor": 0.5})
        assert read_hf_config(path).values == {**published, "rotary_percent": 0.5}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_next", {"layer_types": ["linear_attention"]}, "num_hidden_layers is 48"),
        ("qwen3_next", {"layer_types": 48 * ["sliding_attention"]}, "expected a list of"),
        ("qwen3_next", {"linear_num_key_heads": None}, "linear_num_key_heads=null"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate=false"),
        (
            "qwen3_next",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.original",
        ),
        ("qwen3_5", {"text_config": None}, "text_config=null; expected an object of keys"),
        ("qwen3_5", {"architectures": ["Qwen3_5ForCausalLM"]}, "megapack trains Qwen3_5ForCond"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob=false"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "expected letters of M*-E"),
        ("nemotron_h", {"hybrid_override_pattern": None}, "it is missing: write it"),
        ("nemotron_h", {"layers_block_type": ["moe"]}, "layers_block_type says otherwise"),
        ("nemotron_h", {"layer_types": ["gru"]}, "expected a list of linear_attention, mamba"),
        ("nemotron_h", {"num_hidden_layers": 51}, "num_hidden_layers=51"),
        ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, "kernels have no such limit"),
        ("nemotron_h", {"layer_norm_epsilon": 1e-6}, "inside a Mamba layer has 1e-05 only"),
        ("nemotron_h", {"conv_kernel": 3}, "conv_kernel=3"),
        ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size=0; expected a whole number"),
        ("nemotron_h", {"mtp_hybrid_override_pattern": "*-"}, 'pattern="*-"; megapack trains'),
        ("nemotron_h", {"attention_head_dim": 64}, "attention_head_dim=64"),
    ],
)
def test_what_is_not_exact_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = folder(tmp_path, changed(name, changes))
    with pytest.raises(ConfigError) as caught:
        read_hf_config(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: config.json")
    assert message in text
    assert "\n" not in text
