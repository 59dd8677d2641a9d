"""Commands on samples with images: LENGTHS with patches, and what is said of plans."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megapack import Plan
from megapack.plan.file import write_plan

pytestmark = pytest.mark.unit

Call = Callable[..., tuple[int, str, str]]

COLUMNS = ("--patches-column", "patches", "--group-column", "q")
PLAN = ("plan", "l.jsonl", "--dp", "2", "--pp", "2", "--max-tokens-per-gpu", "8192", *COLUMNS)
MODEL = ("--model", "Qwen3-VL-8B")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file of lengths and patches."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt_len": 300 + 80 * q, "response_len": 50 + 9 * k, "q": q, "patches": [1024, 64 * q]}
        for q in range(1, 9)
        for k in range(4)
    ]
    Path("l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_plan_has_its_images(call: Call) -> None:
    code, out, err = call(*PLAN, *MODEL, "--compare", "verl")
    assert (code, err) == (0, "")
    assert "images: 16 of 64 are encoded, 10496 patches, " in out
    assert "images before and after rows: " in out
    assert "\nimages in rows " in out
    # The rows of others encode an image for each sample that uses it.
    for name in ("next-fit", "verl "):
        assert (
            float(next(line for line in out.splitlines() if line.startswith(name)).split()[-1]) > 1
        )
    plan = Plan.from_json(Path("plan.json").read_text())
    assert len(plan.steps[0].images) == 16
    assert call("check", "plan.json", "l.jsonl", *COLUMNS)[0] == 0
    code, out, _ = call("check", "plan.json", "l.jsonl", *COLUMNS[:2])
    assert code == 1
    assert "16 images, its samples 64, or others" in out
    assert "images: 16 of 64 are encoded" in call("show", "plan.json")[1]
    # The model's tower is priced where a plan has images.
    with_tower = json.loads(call("simulate", "plan.json", *MODEL, "--json")[1])["steps"]["0"]
    assert with_tower["most_patches"] == plan.counts.most_patches
    steps = tuple(dataclasses.replace(step, images=()) for step in plan.steps)
    write_plan(dataclasses.replace(plan, steps=steps), "text.json")
    text = json.loads(call("simulate", "text.json", *MODEL, "--json")[1])["steps"]["0"]
    assert with_tower["makespan"] > 1.02 * text["makespan"]


def test_tune_counts_images(call: Call) -> None:
    tune = ("tune", "l.jsonl", "--gpus", "8", *MODEL, "--tp", "2", "--pp", "1,2", "--vpp", "1")
    fast = ("--cp", "1", "--recompute", "full", "--context-parallel", "fixed")
    fast += ("--split-samples", "off", "--backward", "joint", "--search", "64")
    code, out, err = call(*tune, *fast, *COLUMNS)
    assert (code, err) == (0, "")
    assert "first, images: 16 of 64 are encoded" in out
    assert ", tower " in out
    code, out, _ = call(*tune, *fast)
    assert code == 0
    assert "images" not in out
    assert "tower" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "Qwen3-4B"), "--model Qwen3-4B no tower that megapack trains"),
        (("--config", "qwen3_4b_dp4_tp2_gpu8"), "has model.vision=off; set --model"),
        (("--images", "row", "--split-samples", "auto"), "set --split-samples=off"),
        (("--max-patches-per-gpu", "64"), "set no --max-patches-per-gpu, or --images=row"),
        (("--patches-column", "length"), "no column 'length'"),
    ],
)
def test_other_options_are_refused(call: Call, options: tuple[str, ...], message: str) -> None:
    code, _, err = call(*PLAN, *options)
    assert code != 0
    assert message in err
    assert err.count("\n") == 1
