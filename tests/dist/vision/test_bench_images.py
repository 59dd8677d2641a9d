"""tools/bench_images.py runs, with the gradients of a single process both ways."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tools import bench_images
from tools.benching.image_steps import Paced, Steps

pytestmark = pytest.mark.dist

TINY = Steps("photos", "Qwen3-VL-8B", prompts=2, group=2, budget=4096, slow=0.5, rounds=1)


def test_a_tiny_step_both_ways(tmp_path: Path) -> None:
    # Raises if gradients differ.
    (reports,) = bench_images.run([TINY], ["pp4", "dp2_pp2_vpp2"], tmp_path)
    assert list(reports) == ["pp4", "dp2_pp2_vpp2"]
    for found in reports.values():
        assert len(found["errors"]) == 3
        assert (found["images"], found["uses"]) == (2, 4)
        assert found["simulated"]["row"] > found["simulated"]["ahead"] > 0
        # In rows nothing is simulated but operations, each of which takes at least its seconds.
        assert found["seconds"]["row"] > 0.99 * found["given"]["row"]
    for line in bench_images.rows(TINY, reports):
        assert len(line) == len(bench_images.HEAD)


def test_gradients_that_differ_are_refused() -> None:
    for wrong in (2e-5, float("nan")):
        with pytest.raises(SystemExit, match="pp4: gradients differ by"):
            bench_images.check("pp4", {"row, ahead": 1e-7, "row, single": wrong})


def test_an_operation_takes_the_seconds_that_it_is_given() -> None:
    pace = Paced({("F", 0, 3): 0.05})
    started = time.perf_counter()
    pace.on_begin("F", 0, 3)
    pace.on_end("F", 0, 3)
    assert time.perf_counter() - started >= 0.05
    assert pace.late == 0.0
    pace.on_begin("B", 0, 3)
    time.sleep(0.01)
    pace.on_end("B", 0, 3)
    assert pace.late >= 0.01
