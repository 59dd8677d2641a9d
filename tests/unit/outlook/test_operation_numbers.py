"""Numbers of plans with pieces of samples and split backwards."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megapack import CostModel, ModelSizes, plan_report
from megapack.cost.memory import NOTHING_CARRIED, Carried, MemoryModel
from megapack.job.train.metrics import plan_line
from megapack.outlook.stats import carried
from megapack.plan.facts import step_metrics
from tests.hand_made_orders import LAYOUT, LENGTHS, NUM_SPLIT_BACKWARDS, TOKENS, split_plan
from tests.hand_made_plan import wide_plan

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


def test_a_split_sample_counts_once() -> None:
    report = plan_report(split_plan(), LENGTHS, COST)
    assert report.seconds >= report.equal_work_seconds
    assert (report.num_rows, report.num_samples, report.tokens) == (9, 10, TOKENS)
    assert (report.num_pieces, report.num_split_samples, report.piece_tokens) == (3, 1, 7000)
    assert report.num_split_backwards == NUM_SPLIT_BACKWARDS
    read = json.loads(json.dumps(report.totals()))
    assert read["piece_fraction"] == 7000 / TOKENS


def test_what_a_step_carries() -> None:
    # All of a chain's forwards run before its first backward, so the keys of its first two pieces
    # are kept, and the second and the third piece read 2,800 and 5,200 earlier tokens.
    held = carried(split_plan())
    assert held.tokens == 2800 + 2400
    assert held.earlier_tokens == 2800 + 5200
    assert held.states == 2
    # 2B0 1B0 come before 2W0 on stage 1 of rank 0: rows of 2,300 and 2,400 tokens; then 1 and 0.
    assert held.put_off_tokens == 2400 + 2800
    forward = replace(split_plan(), forward_only=True)
    steps = tuple(replace(step, orders=()) for step in forward.steps)
    held = carried(replace(forward, steps=steps))
    assert held == Carried(5200, 5200, 0, states=1)
    assert carried(wide_plan()) == NOTHING_CARRIED


def test_memory_counts_keys_and_what_waits_for_weight_gradients() -> None:
    model = MemoryModel(sizes=SIZES)
    tokens = {"live_tokens": 6000.0, "row_tokens": 3000.0}
    plain = [model.stage(LAYOUT, stage, **tokens) for stage in range(2)]
    keys = Carried(tokens=1000.0)
    found = [model.stage(LAYOUT, stage, **tokens, carried=keys) for stage in range(2)]
    # 2 layers of a stage, keys and values of 2 * 16 channels in bf16, and their gradients.
    assert found[0].activations - plain[0].activations == 2 * 1000 * 2 * 2 * 32 * 2
    # In an order of its own the last stage may hold as much as the first.
    assert found[1].activations > 1.5 * plain[1].activations
    full = MemoryModel(sizes=replace(SIZES, recompute="full"))
    put_off = Carried(put_off_tokens=1000.0)
    grown = full.stage(LAYOUT, 0, **tokens, carried=put_off).activations
    # All of a layer instead of its input alone.
    more = 2 * 1000 * full.saved(LAYOUT).recomputed_layer
    assert grown - full.stage(LAYOUT, 0, **tokens).activations == more


def test_metrics_name_pieces_and_split_backwards() -> None:
    plan = split_plan()
    (step,) = plan_report(plan, cost=COST).steps
    metrics = step_metrics(step)
    assert (metrics["num_pieces"], metrics["num_split_backwards"]) == (3, NUM_SPLIT_BACKWARDS)
    assert metrics["piece_tokens_fraction"] == 7000 / TOKENS
    assert plan_line(plan).endswith("(44.6% of the tokens), split backwards: 20")
