"""A GPTModel that a user has built, with a tower; and what is refused of images, before a step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.dist.spawn import checked_job

pytestmark = pytest.mark.dist


def found(world: int, *mode: str) -> dict[str, Any]:
    printed = checked_job(
        world, "tests.dist.vision.own_model_worker", [str(world), *mode], timeout_s=200, te=""
    )
    lines = [line for line in printed.splitlines() if line.startswith("FOUND ")]
    return dict(json.loads(lines[0].removeprefix("FOUND ")))


@pytest.fixture(scope="module")
def of_two() -> dict[str, Any]:
    return found(2)


def test_gradients_do_not_depend_on_the_layout(of_two: dict[str, Any]) -> None:
    alone = found(1)
    assert alone["norm"] > 0.01
    assert of_two["norm"] == pytest.approx(alone["norm"], rel=1e-5)
    assert of_two["loss"] == pytest.approx(alone["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no tower", "give ScheduleAdapter(vision=...)"),
        ("no DDP", "wrap both, the tower with pg_collection=tower.groups"),
        ("not a tower", "vision is Linear; give a VisionTower"),
        ("pixels", "has pixels of shape (3, 96)"),
        ("array", "has pixels of type list, the tower reads a tensor of"),
        ("disk", "its pixels cannot be made (OSError: no such disk)"),
        ("offset", "stands at the ids [259, 261, 261, 261"),
        ("thawed", "was frozen when it was wrapped in Megatron's DDP"),
        ("groups", "adds gradients times 1.0 over 1 of 2 ranks"),
        ("turned", "images with rotary_interleaved"),
        ("pairs", "mrope_section=[3, 2, 2] has 7 pairs of channels"),
        ("far", "the last of those that alternate is 8, and the rotary embedding turns pairs 0"),
        ("gather", "wrap the tower with overlap_param_gather=False"),
        ("no pixels", "has no pixels on the rank that encodes it"),
        ("tensors", "the batch has images and the tensor 'other'; give one of them"),
        ("mtp", "images with multi-token prediction"),
        ("letters", "1 levels of DeepStack for 0 layers of attention and an MLP; give the decoder"),
        ("rows", "the plan has images='row', and this adapter encodes images ahead"),
    ],
)
def test_refused(what: str, message: str, of_two: dict[str, Any]) -> None:
    assert message in of_two["messages"][what]


def test_a_call_is_made_again_after_pixels_failed(of_two: dict[str, Any]) -> None:
    assert of_two["retried"]


def test_features_of_a_frozen_tower_are_of_its_weights(of_two: dict[str, Any]) -> None:
    assert of_two["kept"]["change"] > 1e-3
    assert of_two["kept"]["error"] == 0


def test_a_frozen_tower_encodes_the_images_of_a_batch_once(of_two: dict[str, Any]) -> None:
    first, second, few, again = of_two["once"]
    assert second == few == 0
    # The few samples' features were kept, and no others.
    assert first - 1 <= again <= first
    assert again > 1


def test_ranks_agree_on_owners_after_one_of_them_failed(of_two: dict[str, Any]) -> None:
    assert of_two["failed"] == 0


def test_gradients_of_two_steps_add_up_without_ddp() -> None:
    one, two = found(2, "without-ddp")["norms"]
    assert two == pytest.approx(2 * one, rel=1e-5)


def test_rotary_frequencies_stay_fp32(of_two: dict[str, Any]) -> None:
    assert of_two["types"] == "[torch.bfloat16, torch.float32]"
