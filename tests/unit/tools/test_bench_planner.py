"""The planner's table of shared prefixes, on small steps: no cell is slower with prefixes."""

from __future__ import annotations

import pytest

from megapack import CostModel, Layout, Policy
from tools.benching.planner_families import compare, generated_steps

pytestmark = pytest.mark.unit

COST = CostModel(fixed=1e-4, per_token=1e-6, per_token_sq=1e-6 / 12288)


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(dp=2, pp=2, vpp=2)], ids=str)
@pytest.mark.parametrize("policy", [Policy(), Policy(search=0)], ids=["search", "search=0"])
def test_no_generated_step_is_slower_and_long_prompts_gain(layout: Layout, policy: Policy) -> None:
    speedups = {}
    for step in generated_steps(64):
        result = compare(step, layout, COST, policy)
        assert result.speedup >= 1
        assert result.tokens < 16
        speedups[step.name] = result.speedup
    assert speedups["agentic G=8"] > 1.5
    assert speedups["trees G=8"] > 1.1
