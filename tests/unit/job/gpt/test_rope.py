"""Frequencies of rotary embeddings equal transformers', which reads the same config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megapack.cost.rope import RopeScaling
from megapack.errors import ConfigError
from megapack.job.config.model import ModelConfig
from megapack.job.gpt.rope import inverse_frequencies

pytestmark = pytest.mark.unit

PAIRS = 8
POSITIONS = 512
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    # gpt-oss does not round.
    "yarn_exact": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
    "yarn_weights": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + i / 10 for i in range(PAIRS)],
        "long_factor": [1.5 + i * i for i in range(PAIRS)],
    },
}


def rope_key() -> str:
    """Where the installed transformers keeps a rope's scaling; from 5 on, with its base."""
    from transformers import LlamaConfig

    return "rope_parameters" if hasattr(LlamaConfig(), "rope_parameters") else "rope_scaling"


def folder(path: Path, scaling: dict[str, Any], base: int) -> tuple[Any, ModelConfig]:
    """transformers' config, and the one that is read from its folder."""
    from transformers import LlamaConfig

    rope = {rope_key(): scaling, "rope_theta": base}
    if rope_key() == "rope_parameters":
        rope = {rope_key(): {**scaling, "rope_theta": base}}
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        **rope,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(path)
    return config, ModelConfig.from_hf(str(path))


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_scale_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope_key() == "rope_scaling" and SCALINGS[name]["rope_type"] in ("yarn", "longrope"):
        pytest.skip("transformers 4 takes max_position_embeddings for the original length")
    config, model = folder(tmp_path, SCALINGS[name], 500000)
    scaling = model.rope_scaling
    compute = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]]
    for long in (False, True):
        tokens = POSITIONS if long else None
        expected, scale = compute(config, "cpu", seq_len=tokens)
        found = inverse_frequencies(scaling, model.rotary_base, 2 * PAIRS, long=long)
        assert torch.equal(found, expected)
        assert scaling.rotation_scale == pytest.approx(scale, rel=1e-15)
    assert scaling.depends_on_length == (name == "longrope")
    plain = inverse_frequencies(RopeScaling(), 500000, 2 * PAIRS)
    assert not torch.equal(found, plain)


def test_short_waves_alone_rotate_in_proportion(tmp_path: Path) -> None:
    """Gemma 4's heads of two widths have a table each."""
    from transformers import Gemma4TextConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    config = Gemma4TextConfig(
        num_hidden_layers=6,
        global_head_dim=4 * PAIRS,
        hidden_size_per_layer_input=0,
        rope_parameters={
            "full_attention": {**rope, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        architectures=["Gemma4ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    model = ModelConfig.from_hf(str(tmp_path))
    compute = ROPE_INIT_FUNCTIONS["proportional"]
    expected, _ = compute(config, "cpu", layer_type="full_attention")
    found = inverse_frequencies(model.rope_scaling, model.rotary_base, 4 * PAIRS)
    assert torch.equal(found, expected)
    assert found.count_nonzero() == PAIRS / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": [1.0] * 3}, "3 numbers in short_factor and 8 in long_factor"),
        ({"short_factor": [1.0] * 3, "long_factor": [1.0] * 3}, "for 8 pairs of rotated"),
        ({"long_factor": [0.0] * 8}, "all above 0"),
        ({"long_factor": 2.0}, "expected a list of numbers"),
        ({"long_factor": None}, "long_factor=null"),
    ],
)
def test_wrong_factors_are_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder(tmp_path, SCALINGS["longrope"], 10000)
    path = tmp_path / "config.json"
    keys = json.loads(path.read_text())
    keys[rope_key()] |= changes
    path.write_text(json.dumps(keys))
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(str(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
