"""Work of images in hosts' micro-batches: samples with images are spread, all others stay."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapack import CostModel, Layout
from megapack.cost.tower import TowerSizes
from megapack.hosts import miles, nemo_rl, skyrl, slime, verl
from megapack.hosts.shared import rank_rows
from megapack.hosts.shared.images import DECODER_FLOPS, image_tokens, patches_of, with_images
from megapack.policy import Policy
from tests.hosts.partitions import HostPacker
from tests.hosts.rollouts import make_args, make_config, rows_of
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
    found = image_tokens([[1024], [], [4096, 256]], 3)
    each, square = sizes.coefficients(DECODER_FLOPS, DECODER_FLOPS)
    tokens = [each * n + square * n * n for n in (1024, 4096, 256)]
    assert found == pytest.approx([tokens[0], 0, tokens[1] + tokens[2]], rel=0.15)
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
    assert miles.can_schedule_on_rollout_side(make_args(), data, {"dp_size": 2}) is is_planned
    assert not miles.can_schedule_on_rollout_side(make_args(), data, {"dp_size": 1})
    assert ("multimodal_train_inputs" in data) is (images is not None)


HEAVY = {"image_grid_thw": torch.tensor([[1, 16, 16]])}
"""64 tokens."""


def pairs_in(rows: Any, pair: tuple[int, int]) -> list[int]:
    """How many of two samples each row has."""
    return sorted(len(set(row) & set(pair)) for row in rows)


def chained(rows: Any) -> list[int]:
    return list(itertools.chain.from_iterable(rows))


@pytest.mark.parametrize("host", [slime, miles])
@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 3)])
def test_planned_ranks_share_the_images(host: Any, pair: tuple[int, int]) -> None:
    def plan(data: dict[str, Any]) -> Any:
        # The replacement finds the images in its caller's `data`, as in the hosts.
        return host.build_dp_schedule(
            make_args(max_tokens_per_gpu=200, balance_data=True),
            make_config(dp=2),
            [len(tokens) for tokens in data["tokens"]],
            global_batch_size=4,
            rollout_indices=list(range(4)),
        )

    text = {"tokens": [[k] * 100 for k in range(4)]}
    inputs = [HEAVY if k in pair else None for k in range(4)]
    schedule = plan({**text, "multimodal_train_inputs": inputs})
    assert pairs_in(map(chained, rows_of(schedule)), pair) == [1, 1]
    assert plan({**text, "multimodal_train_inputs": [None] * 4}) == plan(text)


def test_a_rank_is_planned_with_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, asked = rank_rows.build_dp_schedule, []

    def noted(lengths: Any, **settings: Any) -> Any:
        asked.append(settings)
        return plan(lengths, **settings)

    monkeypatch.setattr(rank_rows, "build_dp_schedule", noted)
    verl.configure(layout=Layout(pp=2, tp=2))
    batch = padded([80, 80, 80, 80], width=128)
    batch["multi_modal_inputs"] = [{} for _ in range(4)]
    verl.rearrange_micro_batches(batch, 160)
    assert "images" not in asked[0]
    batch["multi_modal_inputs"][2] = HEAVY
    verl.rearrange_micro_batches(batch, 160)
    skyrl.configure(layout=Layout(pp=2, tp=2))
    none = torch.zeros(0, 3, dtype=torch.long)
    data = {
        "attention_mask": torch.ones(4, 80, dtype=torch.long),
        "image_grid_thw": [none, none, HEAVY["image_grid_thw"], none],
    }
    skyrl.init_iterator(SimpleNamespace(), data, 160)
    for settings in asked[1:]:
        assert settings["policy"].images == "row"
        assert settings["cost"].per_patch == pytest.approx(0.07)
        assert [sum(ref.patches for ref in own) for own in settings["images"]] == [0, 0, 256, 0]


class Packed:
    """NeMo-RL's PackedTensor, of one tensor or None per row."""

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def slice(self, rows: list[int]) -> Packed:
        return Packed([self.tensors[row] for row in rows])

    def as_tensor(self) -> Any:
        return self.tensors[0]


def test_nemo_rls_shards_share_the_images() -> None:
    grids = Packed([HEAVY["image_grid_thw"], HEAVY["image_grid_thw"], None, None])
    patches = nemo_rl._patches(SimpleNamespace(data={"image_grid_thw": grids}))
    assert patches == [[256], [256], [], []]
    assert nemo_rl._patches(SimpleNamespace(data={"input_ids": torch.zeros(4, 8)})) is None
    nemo_rl.configure(layout=Layout(dp=2))
    packer = nemo_rl._StepPacker(2, nemo_rl._OPTIONS.current, None, patches, HostPacker(200, 2, 2))
    rows = packer.pack([100, 100, 100, 100])
    # Bins of the shards are dealt out in turn.
    assert pairs_in((chained(rows[shard::2]) for shard in range(2)), (0, 1)) == [1, 1]


def given(
    patches: list[list[int]] | None, layout: Layout, cost: CostModel | None, **more: float
) -> dict[str, Any]:
    lengths = [2000] * 2
    return with_images(patches, lengths, layout=layout, cost=cost, policy=Policy(), **more)


def test_a_cost_that_was_measured_with_images_stays() -> None:
    layout = Layout(tp=4)
    measured = CostModel(per_token=1e-6, per_patch=1e-7)
    assert given([[64], []], layout, measured)["cost"] is measured
    # A patch is 0.07 tokens of a 7B decoder, all of it on one GPU, or on all that share a token.
    text = CostModel(per_token=1e-6)
    assert given([[64], []], layout, text)["cost"].per_patch == pytest.approx(7e-8)
    whole = given([[64], []], layout, text, scale=2.0)["cost"]
    assert whole.per_patch == pytest.approx(2 * 4 * 7e-8)
    assert given([[64], []], layout, None)["cost"].per_patch == pytest.approx(0.07)


def test_images_that_do_not_fit_into_their_samples_do_not_count() -> None:
    """Kimi's samples have one token per image before the host puts in the others."""
    layout = Layout()
    plain = {"layout": layout, "cost": None, "policy": Policy()}
    assert given(None, layout, None) == plain
    assert given([[8000], []], layout, None) == plain
    fits = given([[7996], [4, 4]], layout, None)
    assert fits["policy"].images == "row"
    assert [[ref.patches for ref in refs] for refs in fits["images"]] == [[7996], [4, 4]]
