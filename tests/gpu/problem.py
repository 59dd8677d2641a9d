"""The GPU tests' problem: a small GPT with grouped queries, samples of up to 400 tokens."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megapack import Layout, Plan, build_dp_schedule
from megapack.config.sections import ModelConfig
from megapack.samples import SampleBatch
from tests.dist import problem

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=512,
    init_std=0.05,
)
# Auxiliary losses have tests of their own on a CPU.
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 256,
    "moe_balance_loss_coef": 0.0,
    "moe_z_loss_coef": 0.0,
}
BUDGET = 512

# (prompt, response) tokens; a row of the budget holds one to seven of these samples.
PAIRS = [
    *[(5, 120), (0, 64), (33, 200), (1, 0), (0, 1), (100, 300), (12, 37)],
    *[(7, 0), (64, 128), (3, 15), (20, 220), (1, 9), (40, 90), (8, 30)],
]


def model(attention: str, dtype: Literal["fp32", "bf16"], fp8: str | None = None) -> ModelConfig:
    """The model with the given attention and precision."""
    changes = {"attention": attention, "dtype": dtype}
    return dataclasses.replace(MODEL, **changes, **({} if fp8 is None else {"fp8": fp8}))


def make_batch() -> SampleBatch:
    """The samples as a batch."""
    return problem.make_batch(len(PAIRS), PAIRS)


def moe_model(attention: str) -> ModelConfig:
    """The model with experts, in fp32: in bf16 a rounding error may choose another expert."""
    return dataclasses.replace(model(attention, "fp32"), **EXPERTS)


def make_plan(layout: Layout, budget: int = BUDGET) -> Plan:
    """One step with all samples."""
    return build_dp_schedule(make_batch().lengths, layout=layout, max_tokens_per_gpu=budget)
