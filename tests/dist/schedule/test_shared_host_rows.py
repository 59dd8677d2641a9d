"""A host's own step with shared prefixes: equal gradients, outputs and logged losses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megapack import Layout
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist

ONE_RANK = Layout()
PP2 = Layout(pp=2)
VPP2 = Layout(pp=2, vpp=2)
TP2 = Layout(tp=2, sequence_parallel=True)
CP2 = Layout(cp=2)
PP2_TP2 = Layout(tp=2, pp=2, sequence_parallel=True)
MUTATION = "moe_mutation"
"""Losses of experts that count a prompt once, for which the routers' part is there."""
EXPERTS = "moe,moe_kinds,moe_full,moe_alone_recomputed,bias"

# Tokens that layers run, as a share of the host's: 4 answers of 12 to 20 tokens to prompts of 24,
# of which they share 23; with cp=2, which cuts prefixes into four parts, 20.
TOKENS = {"alone": 0.69, "tree": 0.56, "different": 1.0}


def weekly(layout: Layout, cases: str) -> object:
    return pytest.param(layout, cases, marks=pytest.mark.weekly)


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (ONE_RANK, f"dense,different,moe_kinds,{MUTATION}"),
        (VPP2, "alone,moe_alone_recomputed"),
        weekly(ONE_RANK, f"tree,alone,full,values,labels,{EXPERTS}"),
        weekly(PP2, f"dense,tree,different,full,values,{EXPERTS}"),
        weekly(VPP2, f"dense,full,labels,{EXPERTS}"),
        weekly(TP2, f"dense,tree,full,values,labels,{EXPERTS}"),
        weekly(CP2, f"dense,full,values,{EXPERTS}"),
        weekly(PP2_TP2, f"tree,full,{EXPERTS}"),
    ],
)
def test_a_hosts_step_is_what_it_was(layout: Layout, cases: str, tmp_path: Path) -> None:
    world = layout.tp * layout.pp * layout.cp
    args = [str(tmp_path), json.dumps(dataclasses.asdict(layout)), cases]
    checked_job(world, "tests.dist.schedule.sharing_worker", args, timeout_s=600)
    for rank in rank_reports(tmp_path, world):
        assert list(rank) == cases.split(",")
        for case, numbers in rank.items():
            assert "fault" not in numbers, numbers
            expected = TOKENS.get(case, 0.66 if layout.cp > 1 else 0.61)
            for name in ("tokens", "forward_tokens"):
                assert numbers[name] == pytest.approx(expected, abs=0.01), case
            for name in ("values", "forward_values"):
                assert numbers[name] < 2e-5, case
            if case == MUTATION:
                assert min(numbers["gradients"], numbers["balance"]) > 0.1
                continue
            assert numbers["gradients"] < 1e-5, case
            assert numbers.get("one_sample", 0.0) < 1e-5, case
            assert numbers["balance"] < 1e-5, case
