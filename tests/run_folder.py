"""A made-up run folder, for tests of code that reads run folders."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from megapack import CostModel, Layout, Plan, build_dp_schedule, simulate

LENGTHS = [700, 300, 500, 900, 100, 250, 800, 640, 120, 333, 90, 410, 60, 70, 80, 510]
LAYOUT = Layout(dp=2, pp=2, vpp=2)


def make_plan(num_steps: int = 2) -> Plan:
    """A plan of the lengths above."""
    return build_dp_schedule(LENGTHS, layout=LAYOUT, max_tokens_per_gpu=1024, num_steps=num_steps)


def write_run(folder: Path, *, cost: CostModel | None = None, is_calibrated: bool = True) -> Path:
    """A run of four steps; 2 and 3 were traced. Each took 1.5 times the predicted seconds."""
    folder.mkdir(parents=True)
    plan = make_plan()
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "lengths.txt").write_text("".join(f"{length}\n" for length in LENGTHS))
    (folder / "metrics.jsonl").write_text(_lines(_metrics(step) for step in (1, 2, 3, 4)))
    (folder / "trace.jsonl").write_text(
        _lines(_trace(plan, step, cost, is_calibrated) for step in (2, 3))
    )
    return folder


def _lines(payloads: Any) -> str:
    return "".join(json.dumps(payload) + "\n" for payload in payloads)


def _metrics(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "plan_digest": make_plan().digest()[:12],
        "loss": "nan" if step == 4 else 1 / step,
        "grad_norm": 0.5 * step,
        "step_predicted_s": None if step == 1 else 2.0,
        "step_measured_s": 3.0,
        "tokens_per_second": 1000.0 * step,
        "fill": 0.8 + 0.04 * step,
    }


def _trace(plan: Plan, step: int, cost: CostModel | None, is_calibrated: bool) -> dict[str, Any]:
    one_step = replace(plan, steps=(plan.steps[step - 2],))
    run = simulate(one_step.steps[0], layout=LAYOUT)
    scale = 3.0 / run.makespan
    events = [
        replace(event, start=event.start * scale, end=event.end * scale) for event in run.events
    ]
    return {
        "step": step,
        "plan": json.loads(one_step.to_json()),
        "cost": None if cost is None else cost.__dict__,
        "is_calibrated": cost is not None and is_calibrated,
        "events": [list(astuple(event)) for event in events],
    }
