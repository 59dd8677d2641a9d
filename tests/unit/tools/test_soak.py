"""The soak's checks of two runs; tests/slow runs the soak itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.soaking import judge
from tools.soaking.job import Sample

pytestmark = pytest.mark.unit

LINE = {"loss": 0.1, "tokens": 7, "step_measured_s": 1.0, "tokens_per_second": 5.0}


def run_folder(folder: Path, lines: list[dict[str, Any]]) -> Path:
    (folder / "runs/run").mkdir(parents=True)
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "runs/run/metrics.jsonl").write_text(text)
    return folder


def steps(*numbers: int, **changed: float) -> list[dict[str, Any]]:
    return [{"step": number, **LINE, **changed} for number in numbers]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (steps(1, 2, 3, step_measured_s=9.0, tokens_per_second=1.0), None),
        (steps(1, 3), "wild: 2 lines of metrics are not steps 1 to 3"),
        (steps(1, 2) + steps(3, loss=0.1 + 2**-56), "step 3: loss is 0.10000000000000002"),
        ([*steps(1, 2), {"step": 3, "tokens": 7}], "step 3: loss is None, undisturbed 0.1"),
    ],
)
def test_steps_are_compared_digit_by_digit(
    found: list[dict[str, Any]], says: str | None, tmp_path: Path
) -> None:
    calm = run_folder(tmp_path / "calm", steps(1, 2, 3))
    wild = run_folder(tmp_path / "wild", found)
    failed = judge.judge_steps(calm, wild, 3)
    assert [says in text for text in failed] == ([] if says is None else [True])


def samples(**ways: Any) -> list[Any]:
    """Two ranks at 100 times; `ways` maps a field to its value on rank 1 as a function of time."""
    held = {"rss_mib": 500.0, "pss_mib": 400.0, "uss_mib": 300.0}
    held |= {"threads": 60, "fds": 100, "groups": 20}
    return [
        Sample(
            life=0,
            step=10 * time,
            rank=rank,
            **held | {name: way(time) for name, way in ways.items() if rank == 1},
        )
        for time in range(100)
        for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("name", "way", "grew"),
    [
        ("fds", lambda time: 100 + (time % 10 == 0), False),
        ("fds", lambda time: 100 + (time >= 70), True),
        ("uss_mib", lambda time: 300 + 0.07 * time, False),
        ("uss_mib", lambda time: 300 + 0.1 * time, True),
        # Growth within the first 200 steps is warm-up.
        ("rss_mib", lambda time: 500 + 100 * (time >= 20), False),
    ],
)
def test_growth_is_reported_with_its_rank(name: str, way: Any, grew: bool) -> None:
    found = samples(**{name: way})
    failed = judge.judge_counts("calm", found) + judge.judge_memory(found, 1000)
    assert len(failed) == grew
    assert all("rank 1" in text and name in text for text in failed)


def test_the_summary_has_the_faults_and_the_growth() -> None:
    struck = [
        {"kind": "kill_rank", "step": 40, "resumed": 25},
        {"kind": "suspend", "step": 60},
        {"kind": "kill_rank", "step": 80, "resumed": 75},
    ]
    rows = dict(judge.summary(struck, samples(rss_mib=lambda time: 500.0 + time / 10), 1000))
    assert rows["faults"] == "3 of 2 kinds: kill_rank, suspend"
    assert rows["most steps run again after a fault"] == "15"
    assert rows["growth of RSS of a rank after the warm-up"] == "+0.00% to +1.57%"
