"""xtuner's own RL step with megapack's packs, and without; see tests/hosts/steps/xtuner.py."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hosts.steps.job import Report, run_step

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

CASES = {
    "whole": "patched=0",
    "whole, patched": "patched=1",
    "whole, short packs": "patched=1,multiple=8",
    "3 steps": "patched=0,optimizer_steps=3",
    "3 steps, patched": "patched=1,optimizer_steps=3",
    "3 steps, short packs": "patched=1,optimizer_steps=3,multiple=8",
    "first of 3": "patched=0,first=1,planned_steps=3",
    "5 steps": "patched=0,optimizer_steps=5",
    "5 steps, patched": "patched=1,optimizer_steps=5",
}
NEEDS = (
    *("ray", "datasets", "loguru", "cyclopts", "xxhash"),
    *("mmengine", "addict", "cv2", "httpx", "aiohttp"),
)


def reports(folder: Path, layout: str) -> dict[str, Report]:
    """The reports of all cases, which one driver runs on the same workers."""
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"xtuner's step needs {', '.join(absent)}")
    # Ray starts xtuner's workers itself.
    case = ";".join(CASES.values())
    run_step("xtuner", folder, layout=layout, world=1, steps=1, case=case, timeout_s=1500)
    found = json.loads((folder / "cases.json").read_text())
    return {name: Report(**report) for name, report in zip(CASES, found, strict=True)}


@pytest.fixture(scope="module", params=["dp=2", "dp=1,cp=2"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return reports(tmp_path_factory.mktemp("xtuner"), request.param)


def packs(report: Report) -> list[int]:
    return report.num_microbatches


def assert_same_gradients(one: Report, other: Report) -> None:
    """Of every optimizer step, each gradient as one vector."""
    assert len(one.more["gradients"]) == len(other.more["gradients"])
    for ours, theirs in zip(one.more["gradients"], other.more["gradients"], strict=True):
        distance = np.linalg.norm(np.subtract(ours, theirs))
        assert distance < 1e-5 * np.linalg.norm(theirs)


def test_gradients_are_those_of_the_host_and_of_one_sample_at_a_time(
    runs: dict[str, Report],
) -> None:
    own = runs["whole"]
    for name in ("whole, patched", "whole, short packs"):
        assert_same_gradients(runs[name], own)
        assert runs[name].logprobs == own.logprobs
    for name in ("whole", "whole, patched", "whole, short packs"):
        expected = runs[name].more["reference_grad_norm"]
        assert runs[name].grad_norms == pytest.approx([expected], rel=1e-4)


def test_packs_are_fewer_and_need_no_padding_to_the_length(runs: dict[str, Report]) -> None:
    assert packs(runs["whole, patched"]) < packs(runs["whole"])
    short, own = (sum(runs[name].row_tokens[0]) for name in ("whole, short packs", "whole"))
    assert short < own


def test_a_step_of_several_is_that_of_its_samples_alone(runs: dict[str, Report]) -> None:
    """Without the patch, each sample in a pack of its own; padding changes no step."""
    (alone,) = runs["first of 3"].more["gradients"]
    for name in ("3 steps, patched", "3 steps, short packs"):
        first = runs[name].more["gradients"][0]
        assert np.linalg.norm(np.subtract(first, alone)) < 1e-5 * np.linalg.norm(alone)
    assert_same_gradients(runs["3 steps, short packs"], runs["3 steps, patched"])


def test_there_are_as_many_steps_as_were_asked_for(runs: dict[str, Report]) -> None:
    patched = packs(runs["5 steps, patched"])
    assert len(patched) == 5
    assert len(set(patched)) == 1
    assert len(packs(runs["5 steps"])) < 5


def test_the_time_of_planning_is_in_the_hosts_log(runs: dict[str, Report]) -> None:
    (line,) = runs["3 steps, patched"].more["lines"]
    assert re.search(r"megapack: 24 samples in 3 steps of .*; planned in \d+\.\d+ s", line)
    assert runs["3 steps"].more["lines"] == []
    assert runs["3 steps"].patched == []
