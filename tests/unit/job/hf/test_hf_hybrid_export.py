"""Exports of hybrid families: tensors of several parts, stacked experts, and a vision model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megapack.errors import ConfigError
from megapack.job.hf import output
from megapack.job.hf.export_plan import plan_export
from megapack.job.hf.names import TensorNames
from megapack.job.hf.unused import LeftOut
from tests.unit.job.config.hybrid_configs import HYBRID

pytestmark = pytest.mark.unit

# 2 key heads of 3, 4 value heads of 5; 4 heads of 8 in 2 groups; experts.
QWEN = {
    "num_layers": 6,
    "hybrid_layer_pattern": "GE*EGE",
    "hidden_size": 32,
    "vocab_size": 5,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "attention_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "num_experts": 4,
}
STACKED = ("model.language_model.layers.0.mlp.experts.gate_up_proj",)


def test_tensors_that_are_copied_are_spread_over_the_ranks() -> None:
    kept = {f"model.visual.{i}": ((8, 8), torch.bfloat16) for i in range(4)}
    names = TensorNames("qwen3_5", QWEN)
    plan = plan_export([[], []], names, lambda _, own: own, 10**9, kept)
    assert {target.name: target.parts for target in plan.targets} == dict.fromkeys(kept, ())
    assert [target.writer for target in plan.targets].count(1) == 2


@pytest.mark.parametrize("is_value_model", [False, True])
def test_the_config_of_a_text_part(is_value_model: bool, tmp_path: Path) -> None:
    """A value model has no multi-token prediction; types are written where each part has them."""
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text(json.dumps(HYBRID["qwen3_5"]))
    out = tmp_path / "out"
    output.open_part(out)
    output.write_config(like, out, dtype="float32", is_value_model=is_value_model)
    written = json.loads((output.part_path(out) / "config.json").read_text())
    text = HYBRID["qwen3_5"]["text_config"]
    depths = {"mtp_num_hidden_layers": 0} if is_value_model else {}
    assert written["text_config"] == {**text, **depths, "dtype": "float32"}
    assert written["vision_config"] == HYBRID["qwen3_5"]["vision_config"]
    head = "SequenceClassification" if is_value_model else "ConditionalGeneration"
    assert written["architectures"] == [f"Qwen3_5For{head}"]


def test_what_a_folder_may_have_in_addition() -> None:
    names = TensorNames("qwen3_5_moe", QWEN, [*STACKED, "mtp.fc.weight"], num_mtp_layers=1)
    for name, is_kept in (
        ("mtp.layers.0.input_layernorm.weight", True),
        ("model.visual.patch_embed.proj.weight", True),
    ):
        assert LeftOut(names, ()).may_be(name)
        assert names.is_kept(name) == is_kept
    own = "model.language_model.layers.2.input_layernorm.weight"
    assert not LeftOut(names, ()).may_be(own)
    text = TensorNames("qwen3_5_moe_text", QWEN, STACKED)
    assert not LeftOut(text, ()).may_be("model.visual.patch_embed.proj.weight")


def test_a_part_that_a_family_does_not_have_is_refused() -> None:
    key = "decoder.layers.0.self_attention.in_proj.weight.gamma"
    with pytest.raises(ConfigError, match=r"in_proj\.weight\.gamma"):
        TensorNames("qwen3_next", QWEN).rows(key, (), 4)
