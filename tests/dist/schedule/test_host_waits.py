"""Steps wait for the GPU a few times each, not once per micro-batch, as the ledger counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.schedule.wait_cases import ALL_CASES, CASES
from tests.dist.schedule.wait_results import PASSES, SIZES, Counted, run_wait_cases, run_wait_job
from tests.marks import needs_te

pytestmark = pytest.mark.dist

# The most waits of one pass, apart from those of experts. docs/measured/waits.md has the
# places. Megatron-Core 0.19 takes the norm of experts' gradients apart, with one more copy and one
# more read.
LIMITS = {"forward": 4, "step": 6, "update": 4}
# The most waits of one place per step of the main job: ranks agree several times.
PLACE_LIMIT = 4
# Megatron reads the tokens of each expert, once per layer with experts and micro-batch.
EXPERTS = "megatron/core/transformer/moe/"


@pytest.fixture(scope="module", params=["local", pytest.param("te", marks=needs_te)])
def counted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Counted]:
    """Results of CI's cases, on Megatron's local layers or Transformer Engine's."""
    names = [n for n in CASES if (ALL_CASES[n].attention == "te") is (request.param == "te")]
    return run_wait_cases(names, tmp_path_factory.mktemp("waits"))


def test_waits_of_layers(counted: dict[str, Counted]) -> None:
    assert len(counted) >= 3
    for name, own in counted.items():
        check(name, own)


@pytest.mark.rehearsal
def test_waits_of_all_cases(tmp_path: Path) -> None:
    for name, counted in run_wait_cases(ALL_CASES, tmp_path).items():
        check(name, counted)


def check(name: str, counted: Counted) -> None:
    """Nothing is at a wrong place, and twice the rows wait as often as half of them."""
    case = ALL_CASES[name]
    few, many = counted.facts
    assert many["rows"] > few["rows"]
    assert case.rows == "plain" or few[case.rows] > 0
    assert not counted.faults, name
    for pass_ in PASSES:
        grown = {
            p for p in counted.grows(pass_) if not (case.has_experts and p.startswith(EXPERTS))
        }
        assert not grown, f"{pass_} of {name}"
        waits = counted.of("wait", f"{SIZES[1]} {pass_}")
        assert 0 < sum(n for p, n in waits.items() if not p.startswith(EXPERTS)) <= LIMITS[pass_]


@needs_te
def test_the_main_job_waits_a_few_times_per_step(tmp_path: Path) -> None:
    counted = run_wait_job(tmp_path, "plan.calibrate=online", "plan.calibrate_interval=1")
    assert not counted.faults
    # A place that waits once per row would be over the limit.
    assert min(step["rows"] for step in counted.facts) > PLACE_LIMIT
    for phase in ("step", "log-probs"):
        waits = counted.of("wait", phase)
        assert waits
        assert max(waits.values()) <= PLACE_LIMIT * len(counted.facts), waits
