"""The GPU tests' problem: a small GPT with grouped queries, samples of up to 400 tokens."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megapack import Layout, Plan, Policy, SharedPrefixes, build_dp_schedule
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

# (prompt, responses) of prompts with several answers; PIECE_BUDGET cuts most of them.
FAMILIES = [(97, (120, 30, 64, 9)), (40, (150, 200, 1)), (130, (33,))]
PIECE_BUDGET = 128


def model(attention: str, dtype: Literal["fp32", "bf16"], fp8: str | None = None) -> ModelConfig:
    """The model with the given attention and precision."""
    changes = {"attention": attention, "dtype": dtype}
    return dataclasses.replace(MODEL, **changes, **({} if fp8 is None else {"fp8": fp8}))


def make_batch() -> SampleBatch:
    """The samples as a batch."""
    return problem.make_batch(len(PAIRS), PAIRS)


def make_family_batch() -> SampleBatch:
    """The answers to `FAMILIES`' prompts; those of one prompt begin alike."""
    pairs = [(prompt, answer) for prompt, answers in FAMILIES for answer in answers]
    batch = problem.make_batch(len(pairs), pairs)
    sample = 0
    for prompt, answers in FAMILIES:
        tokens = batch.tokens(sample)[:prompt]
        for _ in answers:
            batch.set_tokens(sample, tokens, batch.tokens(sample)[prompt:])
            sample += 1
    return batch


def moe_model(attention: str) -> ModelConfig:
    """The model with experts, in fp32: in bf16 a rounding error may choose another expert."""
    return dataclasses.replace(model(attention, "fp32"), **EXPERTS)


def hybrid_model(attention: str, dtype: Literal["fp32", "bf16"]) -> ModelConfig:
    """Gated delta nets and attention; Megatron-Core has hybrid models since 0.18."""
    return dataclasses.replace(
        model(attention, dtype),
        num_layers=8,
        hybrid_layer_pattern="G-*-G-*-",
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
        qk_layernorm=True,
        untie_embeddings=True,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )


def make_plan(layout: Layout, budget: int = BUDGET) -> Plan:
    """One step with all samples."""
    return build_dp_schedule(make_batch().lengths, layout=layout, max_tokens_per_gpu=budget)


def shared_plan(layout: Layout) -> Plan:
    """One step whose rows hold a prompt once for all of its answers in them."""
    batch = make_family_batch()
    prefixes = SharedPrefixes.from_samples([batch.tokens(i) for i in range(len(batch))])
    return build_dp_schedule(
        batch.lengths, layout=layout, max_tokens_per_gpu=BUDGET, prefixes=prefixes
    )


def one_sample_plan(layout: Layout) -> Plan:
    """One step with each answer in a row of its own."""
    return build_dp_schedule(make_family_batch().lengths, layout=layout, micro_batch_size=1)


def split_plan(layout: Layout) -> Plan:
    """One step with samples in several rows."""
    return build_dp_schedule(
        make_family_batch().lengths,
        layout=layout,
        max_tokens_per_gpu=PIECE_BUDGET,
        policy=Policy(split_samples="auto"),
    )
