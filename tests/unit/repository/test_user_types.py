"""`mypy --strict` accepts a user's file, from megapack in site-packages: its py.typed is found."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

USER = """
from collections.abc import Sequence

from megapack import CostModel, Layout, Plan, Policy, build_dp_schedule, check_plan, simulate
from megapack.loss import GRPO, SFT, AnyObjective
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter, StepResult


def plan_of(lengths: Sequence[int], layout: Layout) -> Plan:
    policy = Policy(search=0)
    plan = build_dp_schedule(lengths, layout=layout, max_tokens_per_gpu=16384, policy=policy)
    check_plan(plan, lengths)
    step = plan.steps[0]
    seconds: float = simulate(step, layout=layout, cost=CostModel(per_token=1e-6)).makespan
    print(seconds, step.num_microbatches)
    return plan


def train(adapter: ScheduleAdapter, plan: Plan, batch: SampleBatch, grpo: bool) -> StepResult:
    batch.set_field("old_logprobs", adapter.forward(plan, batch)["logprobs"])
    objective: AnyObjective = GRPO(clip_high=0.28) if grpo else SFT()
    return adapter.step(plan, batch, objective=objective)
"""
WRONG = """
from megapack import Layout
from megapack.schedule import StepResult

layout = Layout(dp="2")


def loss(result: StepResult) -> str:
    return result.loss
"""
# Their types are not ours, and reading torch takes a minute.
CONFIG = """
[mypy-torch.*,megatron.*,numba.*,llvmlite.*,scipy.*]
follow_imports = skip
"""


@pytest.mark.weekly
def test_mypy_strict_accepts_a_users_file(repo_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    # Not the editable install: type checkers do not run its finder.
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "megapack").symlink_to(repo_root / "megapack")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "mypy.ini").write_text("[mypy]\n" + CONFIG)
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    python = tmp_path / "venv" / "bin" / "python"
    options = ["--strict", "--config-file", "mypy.ini", "--python-executable", str(python)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "user.py", "wrong.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    # Without py.typed every name of megapack would be Any, and nothing in it wrong.
    assert [line.split(": ")[0] for line in errors] == ["wrong.py:5", "wrong.py:9"], done.stdout
    assert "arg-type" in errors[0]
    assert "return-value" in errors[1]
