"""A host's own step on `PlannedSchedule`: equal gradients, no exchanges, faults on all ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megapack import Layout
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist

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
    "error": "ValueError: the host's own loss failed",
    "nan": "the loss of micro-batch 1",
}


def run(folder: Path, layout: Layout, fault: str = "") -> list[dict[str, Any]]:
    """The reports of a job's ranks."""
    world = layout.dp * layout.tp * layout.pp * layout.cp
    args = [str(folder), json.dumps(dataclasses.asdict(layout)), fault]
    checked_job(world, "tests.dist.planned_worker", args, timeout_s=180)
    return rank_reports(folder, world)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_hosts_step_has_the_adapters_gradients(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    ranks = run(tmp_path, layout)
    for rank in ranks:
        assert rank["fault"] == ""
        assert rank["error"] < 1e-5
        # The settings of the call are gone after it.
        assert rank["settings"] == [False, True]
    if layout.pp > 1 and layout.vpp == 1:
        assert all(rank["host_exchanges"] > 0 for rank in ranks), "the host exchanges no shapes"
        assert all(rank["host_error"] < 1e-5 for rank in ranks)
    assert all(rank["exchanges"] == 0 for rank in ranks)
    last = ranks[-1]
    assert len(last["losses"]) == last["num_microbatches"]
    assert last["forward_losses"] == pytest.approx(last["losses"], rel=1e-6)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_every_ranks(fault: str, tmp_path: Path) -> None:
    # Lengths are read on the first stage, whose tensor-parallel ranks must have the same ones.
    layout = Layout(tp=2, pp=2) if fault == "unequal lengths" else Layout(pp=2)
    for rank in run(tmp_path, layout, fault):
        assert FAULTS[fault] in rank["fault"], rank["fault"]
