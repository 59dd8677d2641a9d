"""Exports of hybrid families: tensors of several parts, stacked experts, and a vision model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megapack.errors import ConfigError
from megapack.job.hf import output
from megapack.job.hf.blocks import Block
from megapack.job.hf.export_plan import plan_export
from megapack.job.hf.names import TensorNames
from tests.unit.job.config.hybrid_configs import HYBRID
from tests.unit.job.hf.test_hf_hybrid_names import PROJECTION, QWEN, STACKED

pytestmark = pytest.mark.unit

PARTS = {"query": 6, "key": 6, "value": 20, "z": 20}


def block(key: str, rows: int, *index: int) -> Block:
    """A whole tensor of 32 columns."""
    return Block(f"decoder.layers.{key}", index, (0, 0), (rows, 32), (rows, 32), torch.float32)


def test_a_tensor_of_several_parts_is_written_once() -> None:
    blocks = [block(f"0.{PROJECTION}.{part}", rows) for part, rows in PARTS.items()]
    names = TensorNames("qwen3_next", QWEN)
    (target,) = plan_export([blocks, blocks], names, lambda _, own: own, 10**9).targets
    assert target.shape == (52, 32)
    rows = sorted(row for part in target.parts for row in range(52)[part.span.place[0]])
    assert rows == list(range(52))


def test_stacked_experts_of_all_ranks_are_written_once() -> None:
    """Each of two expert-parallel ranks has two of four."""
    key = "1.mlp.experts.experts.linear_fc1.weight"
    by_rank = [[block(key, 6, expert) for expert in own] for own in ((0, 1), (2, 3))]
    names = TensorNames("qwen3_5_moe", QWEN, STACKED)
    (target,) = plan_export(by_rank, names, lambda _, own: own, 10**9).targets
    assert (target.name, target.shape) == (STACKED[0], (4, 6, 32))
    assert [(part.holder, part.span.place[0]) for part in target.parts] == [
        *((0, 0), (0, 1), (1, 2), (1, 3))
    ]


def test_a_half_of_a_part_is_missed() -> None:
    names = TensorNames("qwen3_next", QWEN)
    half = Block(f"decoder.layers.0.{PROJECTION}.z", (), (0, 0), (10, 32), (20, 32), torch.float32)
    with pytest.raises(ConfigError, match=r"hold 320 of the 640 numbers of .*in_proj.weight.z"):
        plan_export([[half]], names, lambda _, own: own, 10**9)


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
