"""Ranks that sleep at random before their operations meet in other orders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.schedule.test_operations import SAME_BITS, world_of
from tests.dist.spawn import checked_job
from tests.rehearsal.recorder import DELAY_SEED

pytestmark = [pytest.mark.rehearsal, pytest.mark.dist]

SEEDS = range(1, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_delays_change_neither_bits_nor_rules(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DELAY_SEED, str(seed))
    out = tmp_path / "bits.json"
    for world in sorted({world_of(name) for name in SAME_BITS} - {1}):
        own = [name for name in SAME_BITS if world_of(name) == world]
        checked_job(world, "tests.dist.schedule.operations_worker", [str(out), *own], timeout_s=400)
        assert all(not result["differ"] for result in json.loads(out.read_text()).values())


@pytest.mark.parametrize("seed", SEEDS)
def test_random_orders_run_with_delays(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DELAY_SEED, str(seed))
    out = tmp_path / "out.json"
    checked_job(4, "tests.dist.schedule.random_orders_worker", [str(out), "10"], timeout_s=400)
    assert all(result["error"] < 1e-6 for result in json.loads(out.read_text()).values())
