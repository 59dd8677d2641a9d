"""Loss masks of a file reach the gradient: it equals that of one unpadded sample at a time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.dist.problem import VOCAB_SIZE
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


def rows() -> list[dict[str, Any]]:
    """Rollouts with outputs of tools in between; some without a mask, one without a prompt."""
    rng = random.Random(5)
    lines: list[dict[str, Any]] = []
    for number in range(12):
        num_prompt = rng.randrange(1, 6) if number else 0
        mask = [1] * rng.randrange(1, 5) + [0] * rng.randrange(1, 9) + [1] * rng.randrange(1, 5)
        ids = [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt + len(mask))]
        line = {"prompt_ids": ids[:num_prompt], "response_ids": ids[num_prompt:]}
        lines.append(line if number % 4 == 3 else {**line, "response_mask": mask})
    return lines


def test_gradients_with_masks_equal_the_one_sample_reference(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    args = [str(path), str(tmp_path)]
    checked_job(2, "tests.dist.rows.masks_worker", args, timeout_s=200)
    for rank in rank_reports(tmp_path, 2):
        assert rank["num_rows"] > 2
        assert rank["gradient_norm"] > 1e-3
        assert rank["gradient_error"] < 1e-5
        assert rank["loss"] == pytest.approx(rank["expected_loss"], rel=1e-5)
