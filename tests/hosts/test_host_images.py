"""Work of images in hosts' micro-batches: samples with images are spread, all others stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapack.cost.tower import TowerSizes
from megapack.hosts import miles, skyrl, verl
from megapack.hosts.shared.images import image_tokens, patches_of
from tests.hosts.test_host_verl import padded

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures("partitions")]


def grids(*sizes: tuple[int, int, int]) -> dict[str, Any]:
    """What Qwen's processor makes of a sample's images, without pixels."""
    return {"image_grid_thw": torch.tensor(sizes)}


def test_images_count_as_the_tokens_whose_work_they_take() -> None:
    sizes = TowerSizes(
        depth=27,
        width=1152,
        mlp_width=4304,
        is_gated=False,
        patch_numbers=1536,
        num_positions=2304,
        merge=2,
        out_width=4096,
        num_levels=4,
        full_blocks=27,
    )
    found = image_tokens([[1024], [], [4096, 256]], 3, flops_per_token=1e9)
    flops = [sizes.forward_flops(n) / 1e9 for n in (1024, 4096, 256)]
    assert found == pytest.approx([flops[0], 0, flops[1] + flops[2]], rel=0.01)
    assert image_tokens(None, 2).tolist() == [0, 0]


def test_patches_of_images_and_frames() -> None:
    video = {"video_grid_thw": torch.tensor([[3, 2, 4]])}
    kimi = {"grid_thws": torch.tensor([[1, 6, 2]]), "pixel_values": torch.zeros(12, 3)}
    found = patches_of([grids((1, 4, 6), (1, 2, 2)), None, {}, video, kimi])
    assert found == [[24, 4], [], [], [8, 8, 8], [12]]
    assert patches_of([None, {}, {"image_grid_thw": None}]) is None
    assert patches_of([]) is None


def test_verls_images_are_spread_over_micro_batches() -> None:
    def rows(*inputs: Any) -> list[list[int]]:
        batch = padded([10, 10, 10, 10])
        if inputs:
            batch["multi_modal_inputs"] = list(inputs)
        return verl.rearrange_micro_batches(batch, 20)[1]

    text = rows()
    assert rows({}, {}, {}, {}) == text
    assert rows({}, None, {}, {}) == text
    for pair in ((0, 1), (1, 3), (2, 3)):
        inputs = [grids((1, 64, 64)) if i in pair else {} for i in range(4)]
        assert [len(set(row) & set(pair)) for row in rows(*inputs)] == [1, 1]


def test_skyrls_missing_micro_batches_are_those_with_images() -> None:
    def iterator(images: list[Any] | None) -> SimpleNamespace:
        made = SimpleNamespace()
        data = {"attention_mask": torch.ones(4, 10, dtype=torch.long), "image_grid_thw": images}
        skyrl.init_iterator(made, data, 20)
        return made

    without = iterator(None)._microbatches
    assert iterator([torch.zeros(0, 3)] * 4)._microbatches == without
    heavy = skyrl._RankRows(
        {
            "attention_mask": torch.ones(2, 10, dtype=torch.long),
            "image_grid_thw": [torch.tensor([[1, 64, 64]]), torch.zeros(0, 3)],
        },
        20,
        skyrl._OPTIONS.current,
    )
    assert heavy.work[1] == 10
    assert heavy.work[0] > 400


@pytest.mark.parametrize(
    ("images", "is_planned"),
    [
        (None, True),
        ([None, grids((1, 4, 4))], True),
        ([None, {"grid_thws": torch.tensor([[1, 4, 4]])}], False),
        ([{"mm_audio_num_tokens": [3]}, None], False),
    ],
    ids=["text", "qwen", "kimi", "inkling"],
)
def test_miles_plans_steps_with_images_whose_tokens_are_there(
    images: list[Any] | None, is_planned: bool, originals: dict[str, Any]
) -> None:
    def own(args: Any, data: dict[str, Any], config: Any) -> bool:
        return "multimodal_train_inputs" not in data and config["dp_size"] == 2

    originals["miles.ray.rollout.train_data_conversion.can_schedule_on_rollout_side"] = own
    data: dict[str, Any] = {"tokens": [[1, 2], [3]]}
    if images is not None:
        data["multimodal_train_inputs"] = images
    assert miles.can_schedule_on_rollout_side(None, data, {"dp_size": 2}) is is_planned
    assert not miles.can_schedule_on_rollout_side(None, data, {"dp_size": 1})
    assert ("multimodal_train_inputs" in data) is (images is not None)
