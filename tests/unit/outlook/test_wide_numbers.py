"""Numbers of plans whose micro-batches lie over several DP ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapack import CostModel, ModelSizes, build_dp_schedule, check_plan, plan_report
from megapack.cost.memory import MemoryModel
from megapack.job.train.metrics import plan_line
from megapack.outlook.stats import full_row, gathered_tokens, row_fill
from megapack.plan.facts import step_metrics
from tests.hand_made_plan import BUDGET, LENGTHS, TOKENS, WIDE_TOKENS, wide_plan

pytestmark = pytest.mark.unit

SIZES = ModelSizes(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=512,
    dtype="bf16",
    untie_embeddings=True,
)
COST = CostModel(fixed=20.0, per_token=1.0, per_token_sq=1e-4, p2p=0.5)


def test_a_wide_row_counts_once() -> None:
    plan = wide_plan()
    check_plan(plan, LENGTHS)
    report = plan_report(plan, LENGTHS, COST)
    assert (report.num_rows, report.num_samples, report.tokens) == (12, 12, TOKENS)
    assert report.wide_rows == {2: 1, 4: 1}
    assert (report.num_wide_rows, report.widest) == (2, 4)
    assert report.wide_fraction == WIDE_TOKENS / TOKENS
    assert report.fill == TOKENS / (16 * BUDGET)


def test_each_rank_has_its_part_of_the_work() -> None:
    plan = wide_plan()
    free = CostModel(per_token=1.0, cp_overhead=0.0)
    (step,) = plan_report(plan, cost=free).steps
    padded = sum(mb.row_tokens for mb in plan.steps[0].microbatches)
    mean = padded / plan.layout.num_chunks / plan.layout.dp
    last = 9000 / 4 + 4004 / 2 + 996 + 1033
    assert step.imbalance == pytest.approx(last / 4 / mean)


def test_the_fill_of_a_row_is_that_of_all_its_ranks() -> None:
    plan = wide_plan()
    full, _ = full_row(plan, plan.steps)
    fills = [row_fill(mb, full) for mb in plan.steps[0].ranks[3]]
    assert fills == [9000 / 12000, 4001 / 6000, 996 / 3000, 1033 / 3000]


def test_metrics_say_how_many_and_how_wide() -> None:
    plan = wide_plan()
    metrics = step_metrics(plan_report(plan, cost=COST).steps[0])
    assert metrics["num_wide_microbatches"] == 2
    assert metrics["widest_microbatch_ranks"] == 4
    assert metrics["wide_tokens_fraction"] == WIDE_TOKENS / TOKENS
    assert metrics["tokens"] == TOKENS
    assert plan_line(plan).endswith(
        "wide micro-batches: 1 over 2 ranks, 1 over 4 (60.0% of the tokens)"
    )


def test_gathered_tokens_are_those_of_the_other_ranks() -> None:
    plan = wide_plan()
    # Rank 3 holds both wide rows at once, in two chunks of which each counts half.
    both = 9000 * 3 / 4 + 4004 / 2
    assert both / 2 <= gathered_tokens(plan) <= both
    narrow = build_dp_schedule(LENGTHS, layout=plan.layout, max_tokens_per_gpu=9000)
    assert gathered_tokens(narrow) == 0


def test_memory_counts_gathered_keys_and_values() -> None:
    model = MemoryModel(sizes=SIZES, attention="varlen")
    tokens = {"live_tokens": 3000.0, "row_tokens": 3000.0}
    layout = wide_plan().layout
    own = model.stage(layout, 0, **tokens).activations
    more = model.stage(layout, 0, **tokens, gathered_tokens=1000.0).activations
    # Keys and values of 2 heads of 16 channels in bf16, in each of 2 layers of a stage.
    assert more - own == 1000 * (2 * 2 * 16 * 2) * 2
    ring = replace(model, attention="te")
    assert (
        ring.stage(layout, 0, **tokens, gathered_tokens=1000.0).activations
        == ring.stage(layout, 0, **tokens).activations
    )
