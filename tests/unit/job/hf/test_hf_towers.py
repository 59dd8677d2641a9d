"""Names of a tower's tensors, and the two forms of stacked experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megapack.errors import ConfigError
from megapack.job.hf.folder import HfFolder
from megapack.job.hf.load import names_of
from megapack.job.hf.names import Rows, TensorNames
from megapack.job.hf.unused import LeftOut
from tests.unit.job.config.published_configs import CONFIGS

pytestmark = pytest.mark.unit

VALUES = {"num_layers": 1, "hidden_size": 8, "vocab_size": 5, "num_attention_heads": 4}
LAYER = "model.language_model.layers.0.mlp.experts."
FC1, FC2 = (f"decoder.layers.0.mlp.experts.experts.linear_fc{i}.weight" for i in (1, 2))


def folder(path: Path, hidden: int, width: int, shapes: list[tuple[int, int]]) -> HfFolder:
    """A folder with stacked experts of these shapes, of which there are two."""
    text = CONFIGS["Qwen3-VL-30B-A3B"]["text_config"]
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "num_experts": 2}
    path.mkdir(exist_ok=True)
    keys = {**CONFIGS["Qwen3-VL-30B-A3B"], "text_config": {**text, **sizes}}
    (path / "config.json").write_text(json.dumps(keys))
    names = [f"{LAYER}gate_up_proj", f"{LAYER}down_proj"]
    tensors = {name: torch.zeros(2, *shape) for name, shape in zip(names, shapes, strict=True)}
    save_file(tensors, path / "model.safetensors")
    return HfFolder(path)


@pytest.mark.parametrize(
    ("hidden", "width", "shapes", "has_columns"),
    [
        (8, 6, [(12, 8), (8, 6)], False),
        (8, 6, [(8, 12), (6, 8)], True),
        # One of the two is square.
        (8, 4, [(8, 8), (8, 4)], False),
        (8, 4, [(8, 8), (4, 8)], True),
        (8, 8, [(16, 8), (8, 8)], False),
        (8, 8, [(8, 16), (8, 8)], True),
    ],
)
def test_stacked_experts_are_told_by_shape(
    hidden: int, width: int, shapes: list[Any], has_columns: bool, tmp_path: Path
) -> None:
    names = names_of(folder(tmp_path, hidden, width, shapes))
    both = {"expert": 1, "num_stacked": 2, "is_transposed": has_columns}
    gate_up = Rows(f"{LAYER}gate_up_proj", 0, 2 * width, **both)
    assert names.rows(FC1, (1,), 2 * width) == [gate_up]
    assert names.rows(FC2, (1,), hidden) == [Rows(f"{LAYER}down_proj", 0, hidden, **both)]


def test_experts_of_both_forms_are_refused(tmp_path: Path) -> None:
    stored = folder(tmp_path, 8, 6, [(12, 8), (6, 8)])
    with pytest.raises(ConfigError, match=r"\[experts, columns, rows\]; download the folder again"):
        names_of(stored)


@pytest.mark.parametrize("begin", ["visual.", "model.visual."])
def test_a_tower_has_the_folders_names(begin: str) -> None:
    names = TensorNames("qwen2_5_vl", VALUES, [f"{begin}merger.ln_q.weight"])
    assert names.rows("visual.merger.ln_q.weight", (), 8) == [
        Rows(f"{begin}merger.ln_q.weight", 0, 8)
    ]
    # Copied if the model has no tower, and otherwise one of its tensors.
    assert names.is_kept(f"{begin}blocks.9.norm1.weight")
    assert LeftOut(names, ["lm_head.weight"]).may_be(f"{begin}blocks.9.norm1.weight")
    trained = LeftOut(names, [f"{begin}merger.ln_q.weight"])
    assert not trained.may_be(f"{begin}blocks.9.norm1.weight")
    with pytest.raises(ConfigError, match=r"visual\.merger\.ln_q"):
        TensorNames("gemma3", VALUES).rows("visual.merger.ln_q.weight", (), 8)
