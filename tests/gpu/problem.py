"""The GPU tests' problem: a small GPT with grouped queries, samples of up to 400 tokens."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from megapack import Layout, Plan, Policy, SharedPrefixes, build_dp_schedule
from megapack.job.config.sections import ModelConfig
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
# In every other layer, shorter than most samples.
WINDOWS = {"attention_window": 40, "attention_window_pattern": "LG"}
BUDGET = 512
# Of another plan of the same samples, with as many in a row.
OTHER_BUDGET = 768

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


def choices() -> list[torch.Tensor]:
    """Experts of each sample that no router chose: [tokens, layers, top k]."""
    generator = torch.Generator().manual_seed(problem.SEED)
    sizes = (MODEL.num_layers, EXPERTS["num_experts"])
    noise = [torch.rand(p + r, *sizes, generator=generator) for p, r in PAIRS]
    return [values.argsort(-1)[..., : MODEL.moe_top_k] for values in noise]


def window_model(
    attention: str, dtype: Literal["fp32", "bf16"], *, sinks: bool = True
) -> ModelConfig:
    """The model with sliding windows, and sinks in all layers, as gpt-oss has them."""
    return dataclasses.replace(model(attention, dtype), **WINDOWS, attention_sinks=sinks)


def mamba_model(attention: str, dtype: Literal["fp32", "bf16"]) -> ModelConfig:
    """Mamba-2 and attention without positions, as in Nemotron; see `hybrid_model`."""
    return dataclasses.replace(
        model(attention, dtype),
        num_layers=8,
        hybrid_layer_pattern="M-*-M-*-",
        position_embedding_type="none",
        mamba_num_heads=8,
        mamba_head_dim=64,
        mamba_state_dim=64,
        mamba_num_groups=2,
    )


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


def family_plan(layout: Layout) -> Plan:
    """One step of the families' answers, each with a prompt of its own in the row."""
    lengths = make_family_batch().lengths
    return build_dp_schedule(lengths, layout=layout, max_tokens_per_gpu=BUDGET)


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
