"""A tower's parameters, FLOPs and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megapack import CostModel, Layout
from megapack.cost.assumed import GpuSpeed, with_image_costs
from megapack.cost.tower import TowerSizes
from megapack.job.config.hf_config import read_hf_config
from tests.toy_towers import FAMILIES, write_image_model

pytestmark = pytest.mark.unit

QWEN3: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
QWEN2_5: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def sizes(**changes: Any) -> TowerSizes:
    given: dict[str, Any] = {
        "depth": 27,
        "width": 1152,
        "mlp_width": 4304,
        "is_gated": False,
        "patch_numbers": 1536,
        "num_positions": 2304,
        "merge": 2,
        "out_width": 4096,
        "num_levels": 4,
        "full_blocks": 27,
    }
    return TowerSizes(**{**given, **changes})


@pytest.mark.parametrize(
    ("kind", "keys", "made"),
    [
        (
            "qwen3_vl_vision",
            {**QWEN3, "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
            sizes(),
        ),
        (
            "qwen3_5_vision",
            {**QWEN3, "out_hidden_size": 2048},
            sizes(out_width=2048, num_levels=1),
        ),
        (
            "qwen2_5_vl_vision",
            {**QWEN2_5, "out_hidden_size": 3584},
            sizes(
                depth=32,
                width=1280,
                mlp_width=3420,
                is_gated=True,
                patch_numbers=1176,
                num_positions=0,
                out_width=3584,
                num_levels=1,
                full_blocks=4,
                window_patches=64,
            ),
        ),
    ],
)
def test_parameters_of_published_towers(kind: str, keys: Any, made: TowerSizes) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **keys)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    assert made.parameters == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_folders(family: str, tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    from safetensors import safe_open

    write_image_model(tmp_path / family, family)
    with safe_open(tmp_path / family / "model.safetensors", framework="pt") as tensors:
        names = [name for name in tensors.keys() if "visual." in name]  # noqa: SIM118
        count = sum(tensors.get_tensor(name).numel() for name in names)
    tower = read_hf_config(tmp_path / family).vision
    assert tower is not None
    assert tower.sizes.parameters == count


def test_windows_bound_attention() -> None:
    whole, windows = sizes(), sizes(full_blocks=0, window_patches=64)
    per_patch, per_patch_sq = whole.coefficients(2.0, 1.0)
    in_windows, none = windows.coefficients(2.0, 1.0)
    assert none == 0
    # An image of one window; attention is not divided by the speed of products.
    assert in_windows == pytest.approx(per_patch + 64 * per_patch_sq)
    assert per_patch_sq == 4 * 1152 * 27
    products = 27 * (4 * 1152**2 + 2 * 1152 * 4304) + 1536 * 1152
    merger = (4 * 1152) ** 2 + 4 * 1152 * 4096
    assert per_patch == pytest.approx((2 * products + 2 * 4 * merger / 4) / 2.0)


def test_recomputed_blocks_keep_their_inputs() -> None:
    kept, recomputed = (sizes().kept_bytes(4096, recompute=r) for r in (False, True))
    # 3.4 GiB, and 0.3 GiB with all of one block.
    assert 3.3 < kept / 2**30 < 3.5
    assert 0.24 < recomputed / 2**30 < 0.4


def test_a_backward_takes_two_forwards_and_one_more_if_it_recomputes() -> None:
    speed = GpuSpeed.of("cuda", "bf16")
    ratios = [
        with_image_costs(
            CostModel(per_token=1.0), sizes(), Layout(), speed, trained=trained, recompute=recompute
        ).tower_ratio
        for trained, recompute in ((True, False), (True, True), (False, True))
    ]
    assert ratios == [2.0, 3.0, 0.0]
