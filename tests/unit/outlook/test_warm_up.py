"""The planner is compiled ahead for any policy, whatever limits it has for real samples."""

from __future__ import annotations

import logging

import pytest

from megapack.outlook.warm_up import compile_planner
from megapack.policy import Policy

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "policy",
    [Policy(round_row_tokens=4096), Policy(round_row_tokens=7, row_shapes=2)],
    ids=["longer than its rows", "not dividing them"],
)
def test_rounded_rows_are_no_obstacle(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compile_planner([policy])
    assert not [record for record in caplog.records if record.name != "megapack.base.jit"]
