"""`megapack data toy --images`: a model with a tower, its processor, and data that it can read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megapack.job.data.toy_images import write_images
from tests.toy_towers import FAMILIES, write_image_model

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.unit

Call = Callable[..., tuple[int, str, str]]
IMAGE = 261


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_runs_a_model_on_a_rollout(family: str, tmp_path: Path) -> None:
    import torch

    model_folder = tmp_path / "model"
    write_image_model(model_folder, family)
    write_images(tmp_path, num_chats=1, num_groups=2)
    row = json.loads((tmp_path / "rollouts.jsonl").read_text().splitlines()[4])
    ids = row["prompt_ids"] + row["response_ids"]
    processor = transformers.AutoImageProcessor.from_pretrained(model_folder)
    images = [Image.open(tmp_path / name) for name in row["images"]]
    given = processor(images=images, return_tensors="pt")
    assert given["image_grid_thw"].prod(1).sum() // 4 == ids.count(IMAGE)
    model = transformers.AutoModelForImageTextToText.from_pretrained(model_folder)
    assert model.config.image_token_id == IMAGE
    tokens = torch.tensor([ids])
    kinds = {"mm_token_type_ids": (tokens == IMAGE).int()}
    seen, other = (
        model(input_ids=tokens, **{**given, "pixel_values": pixels}, **kinds).logits
        for pixels in (given["pixel_values"], -given["pixel_values"])
    )
    # What an image shows must matter, or tests would not see errors.
    assert (seen - other)[0, -1].abs().max() > 0.05


def test_a_toy_with_images_is_the_same_each_time(call: Call, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        code, out, _ = call("data", "toy", str(folder), "--images")
        assert (code, "rollouts.jsonl" in out) == (0, True)
    one, other = (
        {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")}
        for folder in folders
    )
    assert one == other
    assert json.loads(one["config.json"])["model_type"] == "qwen3_vl"
    code, _, err = call("data", "toy", str(folders[0]), "--images")
    assert (code, "set a folder that does not exist" in err) == (2, True)
