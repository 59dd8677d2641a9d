"""Dry runs and sweeps with split samples, split backwards and rows over several DP ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megapack import CostModel, Layout, ModelSizes, Policy
from megapack.config.load import load_config
from megapack.cost.memory import MemoryModel
from megapack.job.config.sections import TrainConfig
from megapack.job.dry_run import Batch, check_start, predict
from megapack.outlook.tune import Workload, tune
from megapack.outlook.tune_space import Kind, Space

pytestmark = pytest.mark.unit

CONFIG = "configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
SIZES = ModelSizes(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    vocab_size=512,
    dtype="bf16",
    untie_embeddings=True,
)
# One sample as long as 20 others.
LENGTHS = np.array([4000, *([200] * 40)])
WORK = Workload(
    lengths=LENGTHS,
    rollout_ids=None,
    colocate_ids=None,
    global_batch_size=None,
    num_steps=None,
    policy=Policy(search=64),
    memory=MemoryModel(sizes=SIZES),
    memory_bytes=2**40,
    cost_of=lambda setup: CostModel(per_token=1.0),
)
SPACE = Space(
    num_gpus=4,
    tp=(1,),
    pp=(2,),
    vpp=(1,),
    budgets=(4000,),
    context_parallel=("fixed", "dynamic"),
    split_samples=("off", "auto"),
    backward=("joint", "split"),
)


# One sample as long as 40 others.
WIDE_WORK = replace(WORK, lengths=np.array([8000, *([200] * 40)]))
WIDE_SPACE = Space(
    num_gpus=4,
    tp=(1,),
    pp=(1,),
    context_parallel=("fixed", "dynamic"),
)


def test_a_sweep_has_a_candidate_of_each_kind() -> None:
    tuning = tune(WORK, SPACE)
    best = {candidate.kind: candidate for candidate in tuning.best_of_layouts}
    plain = best[Kind()]
    assert Kind(split_samples="auto") in best
    both = best[Kind(split_samples="auto", backward="split")]
    assert both.report.num_pieces > 1
    assert both.report.num_split_backwards > 0
    assert both.report.seconds < 0.8 * plain.report.seconds
    # No step has rows over several ranks and pieces.
    assert not any(
        kind.context_parallel == "dynamic" and kind.split_samples == "auto" for kind in best
    )
    for kind, candidate in best.items():
        assert kind == Kind() or candidate.report.seconds <= plain.report.seconds


def test_pieces_are_tried_where_ranks_exchange_tokens_of_experts() -> None:
    sizes = replace(SIZES, num_experts=4, moe_top_k=1)
    work = replace(WORK, memory=MemoryModel(sizes=sizes), policy=Policy(search=0))
    tuning = tune(work, replace(SPACE, ep=(2,), context_parallel=("fixed",)))
    assert {candidate.policy.split_samples for candidate in tuning.ranked} == {"auto", "off"}


def test_a_dry_run_has_the_orders_of_the_first_batch() -> None:
    overrides = ["plan.max_tokens_per_gpu=4096", "plan.global_batch_size=null"]
    overrides += ["layout.pp=2", "layout.vpp=1", "model.max_position_embeddings=4096"]
    batch = Batch(
        lengths=LENGTHS, rollout_ids=list(range(41)), pair_ids=None, source="made by hand"
    )
    found = {}
    for backward, pieces in (("joint", "off"), ("split", "auto")):
        free = [f"plan.backward={backward}", f"plan.split_samples={pieces}"]
        config = load_config(CONFIG, [*overrides, *free], TrainConfig)
        layout = check_start(config, 4)
        assert layout == Layout(dp=2, pp=2)
        found[backward] = predict(config, layout, batch, config.cost_model(layout))
    joint, split = found["joint"], found["split"]
    assert joint.plan.counts.num_split_backwards == joint.plan.counts.num_pieces == 0
    assert split.plan.counts.num_split_backwards > 0
    assert split.steps.seconds < joint.steps.seconds
    assert split.steps.peak_live_tokens <= split.plan.live_cap(split.plan.steps[0])
    # A pass for log-probs over the same rows has no backwards.
    assert split.logprobs is not None
    assert split.logprobs.seconds < 0.6 * split.steps.seconds
    # The last stage may hold as much as the first.
    assert split.memory[1].activations > joint.memory[1].activations


def test_a_sweep_has_wide_rows_where_they_are_faster() -> None:
    tuning = tune(WIDE_WORK, WIDE_SPACE)
    dynamic, fixed = tuning.best_of_layouts
    assert (dynamic.policy.context_parallel, fixed.policy.context_parallel) == ("dynamic", "fixed")
    assert dynamic.layout == fixed.layout == Layout(dp=4)
    assert dynamic.report.wide_fraction >= 0.5
    assert fixed.report.wide_fraction == 0
    assert dynamic.report.seconds < 0.6 * fixed.report.seconds


def test_budgets_below_the_longest_sample_are_for_rows_over_several_ranks() -> None:
    tuning = tune(WIDE_WORK, WIDE_SPACE)
    budgets = {
        kind: {c.max_tokens_per_gpu for c in tuning.ranked if c.policy.context_parallel == kind}
        for kind in ("fixed", "dynamic")
    }
    assert min(budgets["fixed"]) == 8000
    assert min(budgets["dynamic"]) == 2000
    least = min(tuning.ranked, key=lambda candidate: candidate.memory.activations)
    assert least.policy.context_parallel == "dynamic"
    # A row of the budget in flight, and what attention gathers of it.
    longest = MemoryModel(sizes=SIZES).stage(Layout(dp=4), 0, live_tokens=8000, row_tokens=8000)
    assert least.memory.activations < 0.5 * longest.activations


def test_a_dry_run_counts_the_tokens_on_each_gpu() -> None:
    lengths = np.array([2000, *([100] * 30)])
    batch = Batch(lengths=lengths, rollout_ids=list(range(31)), pair_ids=None, source="a test")
    budget = "plan.max_tokens_per_gpu=1000"
    activations = {}
    for kind in ("fixed", "dynamic"):
        overrides = [budget, f"plan.context_parallel={kind}", "plan.global_batch_size=31"]
        config = load_config(CONFIG, overrides, TrainConfig)
        layout = check_start(config, 4)
        found = predict(config, layout, batch, config.cost_model(layout))
        activations[kind] = found.fullest_stage.activations
        assert found.steps.widest == (2 if kind == "dynamic" else 1)
    # 2000 tokens are on one GPU, or 1000 on each of two.
    assert activations["dynamic"] < 0.75 * activations["fixed"]
