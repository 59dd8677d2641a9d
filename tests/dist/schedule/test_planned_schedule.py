"""A host's own step on `PlannedSchedule`: equal gradients, no exchanges, faults on all ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megapack import Layout
from tests.dist.spawn import checked_job, rank_reports, run_job

pytestmark = pytest.mark.dist

# Others have the same parts.
WEEKLY_CASES = {"dp2", "cp2_pp2", "tp2_pp2_sp", "fewer micro-batches", "data", "nan", "wider"}

LAYOUTS = {
    "dp2": Layout(dp=2),
    "pp2": Layout(pp=2),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "tp2_pp2_sp": Layout(tp=2, pp=2, sequence_parallel=True),
    "cp2_pp2": Layout(cp=2, pp=2),
}
# What goes wrong -> what every rank's error says.
FAULTS = {
    "unequal lengths": "the ranks of one pipeline have read (tokens, batch size)",
    "fewer micro-batches": "the ranks of one pipeline have M=6 and M=7 micro-batches",
    "wider": "have (tokens, batch size, width) (",
    "error": "ValueError: the host's own loss failed",
    "nan": "the loss of micro-batch 1",
    "data": "rank 0 failed in step 1, pack: ValueError: a bad sample",
}
# Layouts on which lengths are read by several ranks: the first stage's tensor-parallel ranks.
SHARED_READING = Layout(tp=2, pp=2)


def run(folder: Path, layout: Layout, fault: str = "") -> list[dict[str, Any]]:
    """The reports of a job's ranks."""
    world = layout.dp * layout.tp * layout.pp * layout.cp
    args = [str(folder), json.dumps(dataclasses.asdict(layout)), fault]
    # After a fault ranks leave the pipeline's exchanges where they are.
    worker = "tests.dist.schedule.planned_worker"
    checked_job(world, worker, args, timeout_s=180, nccl_rules=not fault)
    return rank_reports(folder, world)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_hosts_step_has_the_adapters_gradients(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    ranks = run(tmp_path, layout)
    for rank in ranks:
        assert rank["fault"] == ""
        assert rank["error"] < 3e-6
        # The settings of the call are gone after it.
        assert rank["settings"] == [False, True]
    if layout.pp > 1 and layout.vpp == 1:
        assert all(rank["host_exchanges"] > 0 for rank in ranks), "the host exchanges no shapes"
        assert all(rank["host_error"] < 1e-5 for rank in ranks)
    assert all(rank["exchanges"] == 0 for rank in ranks)
    if name == "pp2":
        assert_costs(ranks)
    last = ranks[-1]
    assert len(last["losses"]) == last["num_microbatches"]
    assert last["forward_losses"] == pytest.approx(last["losses"], rel=1e-6)


def assert_costs(ranks: list[dict[str, Any]]) -> None:
    """The stage that reads row lengths calls the host's step twice per micro-batch, the others
    once. A call copies and reads no tensor per micro-batch that Megatron's own does not: two for
    the check of NaNs, and in the first call four for the ranks of its replica."""
    for number, rank in enumerate(ranks):
        host, planned, forward = rank["costs"]
        count = rank["num_microbatches"]
        assert host["calls"] == count
        assert planned["calls"] == forward["calls"] == (2 if number == 0 else 1) * count
        assert count > 6
        assert planned["reads"] <= host["reads"] + 6


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_every_ranks(fault: str, tmp_path: Path) -> None:
    layout = SHARED_READING if fault in ("unequal lengths", "data") else Layout(pp=2)
    for rank in run(tmp_path, layout, fault):
        assert FAULTS[fault] in rank["fault"], rank["fault"]


def test_a_nan_is_a_warning_where_it_began_and_the_step_goes_on(tmp_path: Path) -> None:
    first, last = run(tmp_path, Layout(pp=2), "nan warned")
    assert (first["fault"], last["fault"]) == ("", "")
    assert not any("NaN" in message for message in first["warnings"])
    assert any("the loss of micro-batch 1" in message for message in last["warnings"])
    assert len(last["losses"]) == last["num_microbatches"]


def test_the_death_of_a_rank_is_an_error_of_the_others(tmp_path: Path) -> None:
    args = [str(tmp_path), json.dumps(dataclasses.asdict(Layout(pp=2))), "death"]
    assert run_job(2, "tests.dist.schedule.planned_worker", args, timeout_s=120).returncode
    (survivor,) = tmp_path.glob("rank*.json")
    assert "rank 1" in json.loads(survivor.read_text())["fault"]
