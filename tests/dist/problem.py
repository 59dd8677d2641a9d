"""The problem that every distributed case solves: one tiny GPT, one batch, one objective."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from megapack.cost.model import CostModel
from megapack.cost.rope import RopeScaling
from megapack.job.config.sections import ModelConfig
from megapack.loss import GRPO
from megapack.samples import SampleBatch
from tests.dist.streams import ModelWithStreams
from tests.toy import few_layers_of, width_of

SEED = 11
COST = CostModel(fixed=0.5, per_token=1.0)
"""Of plans: rows have several samples, and there are several rows. The default's 256 tokens per
micro-batch would put samples of so few into one row."""
VOCAB_SIZE = 100
NUM_LAYERS = 8
FEW_LAYERS = few_layers_of(NUM_LAYERS // 2)
"""One layer per chunk of most layouts, in half of the time; `tools/exactness.py` sets 8 for all."""

WIDTH = width_of(32)
MODEL = ModelConfig(
    num_layers=NUM_LAYERS,
    hidden_size=WIDTH,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=WIDTH * 3 // 2,
    # Hidden states of any width are as large.
    init_std=0.2 * math.sqrt(32 / WIDTH),
)

# HybridModel has no hyper-connections.
STREAMS_MODEL = ModelWithStreams(**{**vars(MODEL), "megatron_class": "gpt"})

# Differs from MODEL in every architectural option; the reference runs both.
OTHER_MODEL = dataclasses.replace(
    MODEL,
    untie_embeddings=True,
    normalization="LayerNorm",
    gated_linear_unit=False,
    kv_channels=12,
    qk_layernorm=True,
    norm_epsilon=1e-3,
)
BF16_MODEL = dataclasses.replace(MODEL, dtype="bf16")

MOE_MODEL = dataclasses.replace(
    MODEL,
    num_experts=4,
    moe_top_k=2,
    moe_ffn_hidden_size=24,
    moe_balance_loss_coef=0.3,
    moe_z_loss_coef=0.03,
)
MOE_BIAS_MODEL = dataclasses.replace(
    MOE_MODEL,
    moe_score_function="sigmoid",
    moe_balance_loss_coef=0.2,
    moe_z_loss_coef=0.0,
    moe_bias_update_rate=0.01,
)
# What Hugging Face's families have and MOE_BIAS_MODEL lacks (Qwen2, DeepSeek-V3, GLM-4.5).
MOE_SHARED_MODEL = dataclasses.replace(
    MOE_BIAS_MODEL,
    qkv_bias=True,
    rotary_percent=0.5,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0),
    moe_balance_loss_coef=0.6,
    num_experts=8,
    moe_top_k=4,
    moe_num_groups=4,
    moe_group_top_k=2,
    moe_route_scale=2.5,
    moe_first_dense_layers=3,
    moe_shared_ffn_hidden_size=20,
    moe_shared_gate=True,
)
MLA_MODEL = dataclasses.replace(
    MODEL,
    num_query_groups=None,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    qk_layernorm=True,
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16),
)
# Many heads: where all of them give 0, scores of keys are equal, and the choice is by rounding.
DSA_MODEL = dataclasses.replace(
    MLA_MODEL,
    indexer_top_k=6,
    indexer_num_heads=12,
    indexer_head_dim=8,
    indexer_loss_coef=5.0,
)
# Gated delta nets and attention with a gate, and experts, as in Qwen3-Next.
GATED_DELTA_MODEL = dataclasses.replace(
    MOE_MODEL,
    init_std=0.1,
    hybrid_layer_pattern="GEGE*EG-",
    attention_output_gate=True,
    layernorm_zero_centered_gamma=True,
    qk_layernorm=True,
    rotary_percent=0.5,
    kv_channels=8,
    untie_embeddings=True,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    moe_shared_ffn_hidden_size=20,
    moe_shared_gate=True,
)
# Mamba-2, attention without positions, and experts without a gate, as in Nemotron-3.
MAMBA_MODEL = dataclasses.replace(
    MOE_BIAS_MODEL,
    hybrid_layer_pattern="M-ME*EM-",
    gated_linear_unit=False,
    activation="squared_relu",
    position_embedding_type="none",
    mamba_num_heads=8,
    mamba_head_dim=8,
    mamba_state_dim=16,
    mamba_num_groups=2,
    moe_shared_ffn_hidden_size=20,
)
# Experts at a latent width and multi-token prediction, as in Nemotron-3 Super.
MAMBA_LATENT_MODEL = dataclasses.replace(
    MAMBA_MODEL,
    hybrid_layer_pattern="M-ME*EM-/*E",
    moe_latent_size=12,
    mtp_num_layers=1,
    mtp_loss_coef=0.6,
)
# Both, without experts, which tensor parallelism without sequence parallelism does not run.
HYBRID_MODEL = dataclasses.replace(
    GATED_DELTA_MODEL,
    hybrid_layer_pattern="G-M-*-M-",
    num_experts=None,
    moe_shared_ffn_hidden_size=None,
    moe_shared_gate=False,
    moe_balance_loss_coef=0.0,
    moe_z_loss_coef=0.0,
    mamba_num_heads=8,
    mamba_head_dim=8,
    mamba_state_dim=16,
    mamba_num_groups=2,
)
# Sliding windows in every other layer and sinks, as in gpt-oss.
WINDOW_MODEL = dataclasses.replace(
    MODEL, attention_window=6, attention_window_pattern="LG", attention_sinks=True
)
GPT_OSS_MODEL = dataclasses.replace(
    WINDOW_MODEL,
    num_experts=4,
    moe_top_k=2,
    moe_ffn_hidden_size=24,
    linear_bias=True,
    qkv_bias=True,
)
MTP_MODEL = dataclasses.replace(MODEL, mtp_num_layers=2, mtp_loss_coef=0.6)
MODELS = {
    "plain": (MODEL, 1.0),
    "other": (OTHER_MODEL, 0.7),
    "bf16": (BF16_MODEL, 1.0),
    "moe": (MOE_MODEL, 1.0),
    "moe_bias": (MOE_BIAS_MODEL, 1.0),
    "moe_replay": (MOE_MODEL, 1.0),
    "moe_shared": (MOE_SHARED_MODEL, 1.0),
    "moe_latent": (dataclasses.replace(MOE_SHARED_MODEL, moe_latent_size=12), 1.0),
    "mla": (MLA_MODEL, 0.9),
    "window": (WINDOW_MODEL, 1.0),
    # DeepSeek-V2-Lite without norms.
    "mla_plain": (dataclasses.replace(MLA_MODEL, qk_layernorm=False, q_lora_rank=None), 0.9),
    "gpt_oss": (GPT_OSS_MODEL, 1.0),
    "dsa": (DSA_MODEL, 0.9),
    "mtp": (MTP_MODEL, 0.8),
    "mtp_other": (dataclasses.replace(MTP_MODEL, untie_embeddings=True), 0.8),
    "gated_delta": (GATED_DELTA_MODEL, 1.0),
    "mamba": (MAMBA_MODEL, 0.9),
    "mamba_latent": (MAMBA_LATENT_MODEL, 0.9),
    "hybrid": (HYBRID_MODEL, 1.0),
    "gpt_as_hybrid": (
        dataclasses.replace(MOE_SHARED_MODEL, megatron_class="hybrid"),
        1.0,
    ),
    "mla_as_hybrid": (dataclasses.replace(MLA_MODEL, hybrid_layer_pattern="+-+-+-+-"), 0.9),
    "dsa_as_hybrid": (dataclasses.replace(DSA_MODEL, hybrid_layer_pattern="D-D-D-D-"), 0.9),
    "mtp_hybrid": (
        dataclasses.replace(
            GATED_DELTA_MODEL,
            hybrid_layer_pattern="GEGE*EG-/*-GE/*-GE",
            mtp_num_layers=2,
            mtp_loss_coef=0.6,
        ),
        0.8,
    ),
    "streams": (STREAMS_MODEL, 0.9),
    "mtp_moe": (dataclasses.replace(MOE_MODEL, mtp_num_layers=1), 1.0),
}
"""Model and temperature by variant; `moe_replay` uses `choices` instead of the routers' experts."""
PRECISE = {"bf16": "plain"}
"""Variants in lower precision, each with the fp32 variant that it approximates."""

OBJECTIVE = GRPO(
    clip_low=0.2, clip_high=0.28, dual_clip=1.5, entropy_coef=0.03, kl_coef=0.1, kl_kind="k3"
)

# (prompt, response) tokens, including no prompt, no response, and a single token.
PAIRS = [
    *[(5, 20), (0, 9), (4, 11), (1, 0), (0, 1), (3, 41), (12, 6), (2, 2)],
    *[(7, 0), (9, 30), (6, 1), (1, 25), (8, 8), (10, 17), (2, 33), (5, 5)],
]
ROLLOUT_IDS = [0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12]
NUM_SAMPLES = len(PAIRS)


# By the pattern of a hybrid model: every kind of its layers.
_FEW_HYBRID_LAYERS = {
    **{"GEGE*EG-": "GE*-", "M-ME*EM-": "ME*-", "G-M-*-M-": "GM*-"},
    **{"+-+-+-+-": "+-+-", "D-D-D-D-": "D-D-"},
}


def shallow(model: ModelConfig) -> ModelConfig:
    """A model with `FEW_LAYERS`, for at most as many chunks of equal layers."""
    pattern = model.hybrid_layer_pattern
    if pattern and FEW_LAYERS < NUM_LAYERS:
        decoder, *depths = pattern.split("/")
        pattern = "/".join([_FEW_HYBRID_LAYERS[decoder], *depths])
    return dataclasses.replace(model, num_layers=FEW_LAYERS, hybrid_layer_pattern=pattern)


def slow_decays(model: torch.nn.Module) -> None:
    """Let recurrent layers remember, in place.

    With the first weights, gated delta nets forget all but a few percent with each token, so that
    a state that is missing would hardly show. Here A is 20 times smaller.
    """
    for name, param in model.named_parameters():
        if name.endswith("A_log"):
            param.data -= 3


def choices(num_layers: int = NUM_LAYERS) -> list[torch.Tensor]:
    """Random experts for each sample: [tokens, layers, top k]."""
    generator = torch.Generator().manual_seed(SEED)
    assert MOE_MODEL.num_experts is not None
    sizes = (NUM_LAYERS, MOE_MODEL.num_experts)
    noise = [torch.rand(p + r, *sizes, generator=generator) for p, r in PAIRS]
    return [value.argsort(-1)[:, :num_layers, : MOE_MODEL.moe_top_k] for value in noise]


def make_batch(
    num_samples: int = NUM_SAMPLES, pairs: Sequence[tuple[int, int]] = PAIRS
) -> SampleBatch:
    """The first samples of `pairs`, with random log-prob fields near those of a small model."""
    generator = torch.Generator().manual_seed(SEED)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, VOCAB_SIZE, (count,), generator=generator)

    def anchors() -> list[torch.Tensor]:
        noise = (torch.randn(r, generator=generator) * 0.5 for _, r in pairs)
        return [n - math.log(VOCAB_SIZE) for n in noise]

    prompts = [tokens(p) for p, _ in pairs]
    responses = [tokens(r) for _, r in pairs]
    fields = {
        "advantages": list(torch.randn(len(pairs), generator=generator)),
        "old_logprobs": anchors(),
        "ref_logprobs": anchors(),
    }
    # Draw for all pairs, so that the first samples do not depend on `num_samples`.
    first = {name: values[:num_samples] for name, values in fields.items()}
    return SampleBatch.from_prompt_response(prompts[:num_samples], responses[:num_samples], first)
