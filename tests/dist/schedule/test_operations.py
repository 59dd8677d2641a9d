"""Steps as lists of operations: Megatron's order bit for bit, and any other legal order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.exactness.cases import ALL_CASES
from tests.dist.run_cases import selected_names
from tests.dist.schedule.operations_worker import OVERLAP, OVERLAP_CASES
from tests.dist.schedule.random_orders_worker import LAYOUTS
from tests.dist.spawn import checked_job

pytestmark = pytest.mark.dist

# All other cases: `python tools/exactness.py --executor operations`.
SAME_BITS = [
    "single",
    "pp2_vpp2_forward_plan",
    "pp2_frozen_stage",
    "mtp_pp2_vpp2",
    "moe_dp2_ep2",
    "pp4",
    "tp2_sp_pp2_recompute",
    "moe_dp2_pp2_vpp2_ep2_pad",
    f"{OVERLAP}dp2_pp2_vpp2",
    f"{OVERLAP}sharded_dp2_pp2",
]

WEEKLY_CASES = {
    *("pp4", "moe_dp2_pp2_vpp2_ep2_pad", "mtp_pp2_vpp2", "moe_dp2_ep2"),
    *("pp2_frozen_stage", f"{OVERLAP}sharded_dp2_pp2"),
}

# On each of six layouts. The worker runs any number by torchrun; tests/unit/plan/test_order.py
# checks random orders without ranks.
ORDERS_PER_LAYOUT = 2


def world_of(name: str) -> int:
    if name.startswith(OVERLAP):
        return OVERLAP_CASES[name.removeprefix(OVERLAP)].layout.world_size
    return ALL_CASES[name].world


@pytest.fixture(scope="module")
def bits(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What differs between the executors, by case, for the cases of the selected tests."""
    wanted = selected_names(request)
    folder = tmp_path_factory.mktemp("bits")
    results: dict[str, Any] = {}
    for world in sorted({world_of(name) for name in wanted}):
        out = folder / f"{world}.json"
        own = [name for name in SAME_BITS if name in wanted and world_of(name) == world]
        checked_job(world, "tests.dist.schedule.operations_worker", [str(out), *own], timeout_s=240)
        results |= json.loads(out.read_text())
    return results


@pytest.mark.parametrize("name", SAME_BITS)
def test_megatrons_order_has_the_bits_of_its_schedules(name: str, bits: dict[str, Any]) -> None:
    result = bits[name]
    assert result["differ"] == []
    assert result["compared"] > 20
    assert result["gradient_norm"] > 1e-2


def test_random_legal_orders_run_and_agree(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = [str(out), str(ORDERS_PER_LAYOUT)]
    # Without a hang this takes about 20 s on two free cores.
    checked_job(4, "tests.dist.schedule.random_orders_worker", args, timeout_s=240)
    results = json.loads(out.read_text())
    assert set(results) == set(LAYOUTS)
    for name, result in results.items():
        assert result["microbatches"] >= 4, name
        assert result["error"] < 1e-6, name
