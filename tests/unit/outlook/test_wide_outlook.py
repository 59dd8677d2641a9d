"""Dry runs and sweeps with micro-batches over several DP ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megapack import CostModel, Layout, ModelSizes, Policy
from megapack.config.load import load_config
from megapack.cost.memory import MemoryModel
from megapack.job.config.sections import TrainConfig
from megapack.job.dry_run import Batch, check_start, predict
from megapack.outlook.tune import Workload, tune
from megapack.outlook.tune_space import Space

pytestmark = pytest.mark.unit

SIZES = ModelSizes(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    vocab_size=512,
    dtype="bf16",
    untie_embeddings=True,
)
# One sample as long as 40 others.
LENGTHS = np.array([8000, *([200] * 40)])
WORK = Workload(
    lengths=LENGTHS,
    rollout_ids=None,
    colocate_ids=None,
    global_batch_size=None,
    num_steps=None,
    policy=Policy(search=64),
    memory=MemoryModel(sizes=SIZES),
    memory_bytes=2**40,
    cost_of=lambda layout, split: CostModel(per_token=1.0),
)
SPACE = Space(
    num_gpus=4,
    pp=(1,),
    count_rule=("legal", "multiple"),
    context_parallel=("fixed", "dynamic"),
)


def test_a_sweep_has_a_candidate_of_each_kind() -> None:
    tuning = tune(WORK, SPACE)
    dynamic, fixed = tuning.best_of_layouts
    assert (dynamic.policy.context_parallel, fixed.policy.context_parallel) == ("dynamic", "fixed")
    assert dynamic.layout == fixed.layout == Layout(dp=4)
    assert dynamic.report.wide_fraction >= 0.5
    assert fixed.report.wide_fraction == 0
    assert dynamic.report.seconds < 0.6 * fixed.report.seconds
    assert all(
        candidate.policy.count_rule == "legal"
        for candidate in tuning.ranked
        if candidate.policy.context_parallel == "dynamic"
    )


def test_budgets_below_the_longest_sample_are_for_rows_over_several_ranks() -> None:
    tuning = tune(WORK, SPACE)
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


def config_of(*changes: str) -> TrainConfig:
    """The config of a dry run on two DP ranks."""
    path = Path(__file__).resolve().parents[3] / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
    return load_config(path, changes, TrainConfig)


def test_a_dry_run_counts_the_tokens_on_each_gpu() -> None:
    lengths = np.array([2000, *([100] * 30)])
    batch = Batch(lengths=lengths, rollout_ids=list(range(31)), pair_ids=None, source="a test")
    budget = "plan.max_tokens_per_gpu=1000"
    activations = {}
    for kind in ("fixed", "dynamic"):
        config = config_of(budget, f"plan.context_parallel={kind}", "plan.global_batch_size=31")
        layout = check_start(config, 4)
        found = predict(config, layout, batch, config.cost_model(layout))
        activations[kind] = found.fullest_stage.activations
        assert found.steps.widest == (2 if kind == "dynamic" else 1)
    # 2000 tokens are on one GPU, or 1000 on each of two.
    assert activations["dynamic"] < 0.75 * activations["fixed"]
