"""What cases of rows that are made in a special way have in common: samples, objectives, models.

Samples are leaves of trees. Tokens, log-probs and routes are drawn per node of a tree, so samples
have in common what their nodes have in common. Where a response is shared too, one position has a
loss for several samples, with different advantages and old log-probs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megapack.job.config.sections import ModelConfig
from megapack.loss.token import SFT
from megapack.samples import SampleBatch
from tests.dist import problem
from tests.dist.losses.sequence_problem import KINDS as SEQUENCE_KINDS
from tests.dist.losses.sequence_problem import TOPK, Kind
from tests.dist.problem import shallow

Tree = int | tuple[int, Sequence["Tree"]]
"""Tokens of a leaf, or tokens of a node and what continues it. A leaf of 0 tokens ends a sample
with its node."""
Family = tuple[int, Sequence[Tree]]
"""Tokens of a prompt, and its responses."""

KINDS = {
    "sft": Kind(objective=SFT(), weighting="token-mean"),
    "sft_all": Kind(objective=SFT(), weighting="token-mean"),
    "grpo": Kind(objective=problem.OBJECTIVE, weighting="token-mean"),
    **SEQUENCE_KINDS,
}
"""`sft_all` trains on all tokens, also those of prompts."""
PAIRED = ("dpo", "reward")
"""Objectives of pairs, which run on a shape of their own."""
TAUGHT = ("tis_sequence", "distill_forward", "distill_reverse", "teacher_kl")
"""Objectives that read what an engine or a teacher says of each token."""
CORRECTED = ("gspo_token", "tis", "seq_mask_tis")
"""Further ones of tokens, and corrections for an engine."""

FROZEN = ("embedding.*", f"decoder.layers.[0-{problem.FEW_LAYERS // 2 - 1}].*")
"""The first half of a model."""

MODELS: dict[str, ModelConfig] = {
    "plain": shallow(problem.MODEL),
    "other": shallow(problem.OTHER_MODEL),
    "bf16": shallow(problem.BF16_MODEL),
    "moe": shallow(problem.MOE_MODEL),
    "moe_bias": dataclasses.replace(shallow(problem.MOE_BIAS_MODEL), moe_z_loss_coef=0.03),
    "moe_replay": shallow(problem.MOE_MODEL),
    # A value head has no vocabulary, on which the reference's losses of experts run.
    "moe_value": dataclasses.replace(
        shallow(problem.MOE_MODEL),
        untie_embeddings=True,
        moe_balance_loss_coef=0.0,
        moe_z_loss_coef=0.0,
    ),
    "mla": shallow(problem.MLA_MODEL),
    "window": shallow(problem.WINDOW_MODEL),
    "local": dataclasses.replace(shallow(problem.WINDOW_MODEL), attention_sinks=False),
    "dsa": shallow(problem.DSA_MODEL),
    "mtp": shallow(problem.MTP_MODEL),
    "gated_delta": shallow(problem.GATED_DELTA_MODEL),
    "mamba": shallow(problem.MAMBA_MODEL),
    "hybrid": shallow(problem.HYBRID_MODEL),
    "streams": shallow(problem.STREAMS_MODEL),
}
MODEL_TEXTS = {
    "other": "untied, LayerNorm, GELU, wide heads, query norms",
    "moe": "4 experts, balance and z-loss",
    "moe_bias": "4 experts, sigmoid scores, expert bias, balance and z-loss",
    "moe_replay": "routes replayed",
    "mla": "multi-latent attention",
    "window": "sliding windows and sinks",
    "local": "sliding windows",
    "dsa": "sparse attention, loss of indexers",
    "gated_delta": "gated delta nets, attention with a gate, experts",
    "mamba": "Mamba-2, attention without positions, experts",
    "hybrid": "gated delta nets, Mamba-2 and attention",
    "mtp": "multi-token prediction, 2 depths",
    "streams": "hyper-connections",
}
PRECISE = {"bf16": "plain"}
"""Models in lower precision, each with the fp32 model that it approximates."""


@dataclass(frozen=True)
class Samples:
    """The samples of a shape."""

    shape: str
    batch: SampleBatch
    family_of: list[int]
    prompt_tokens: list[int]
    routing: list[torch.Tensor]
    """Per sample the experts of a replay, [tokens, layers, top k]."""
    pairs: list[tuple[int, int]]
    """(preferred, other): neighbours of one family."""


def make_samples(shape: str, families: Sequence[Family], *, all_tokens: bool = False) -> Samples:
    """Samples with random fields; equal in every process.

    Args:
        all_tokens: every token but a sample's first counts in the loss.
    """
    generator = torch.Generator().manual_seed(problem.SEED)
    tokens: list[torch.Tensor] = []
    routing: list[torch.Tensor] = []
    family_of: list[int] = []
    prompt_tokens: list[int] = []
    for number, (prompt, responses) in enumerate(families):
        for ids, routes in _leaves((prompt, responses), generator):
            tokens.append(ids)
            routing.append(routes)
            family_of.append(number)
            prompt_tokens.append(prompt)
    # Half of the first sample's routes differ from those of its family, so less is shared there.
    cut = prompt_tokens[0] // 2
    routing[0] = torch.cat([routing[0][:cut], _routes(len(tokens[0]) - cut, generator)])
    sizes = [ids.numel() - prompt for ids, prompt in zip(tokens, prompt_tokens, strict=True)]

    def noise(scale: float, mean: float) -> list[torch.Tensor]:
        return [torch.randn(size, generator=generator) * scale + mean for size in sizes]

    count = len(tokens)
    fields: dict[str, Any] = {
        "advantages": list(torch.randn(count, generator=generator)),
        "old_logprobs": noise(0.5, -math.log(problem.VOCAB_SIZE)),
        "ref_logprobs": noise(0.5, -math.log(problem.VOCAB_SIZE)),
        "returns": noise(1.0, 0.3),
        "old_values": noise(1.0, 0.0),
        "pair_sign": list(torch.tensor([1.0, -1.0]).repeat(count)[:count]),
    }
    old = fields["old_logprobs"]
    engine = zip(old, noise(0.2, 0.0), strict=True)
    fields["rollout_logprobs"] = [logprobs + other for logprobs, other in engine]
    # Samples that share a position have different ids of a teacher there.
    drawn = (torch.randn(size, problem.VOCAB_SIZE, generator=generator) * 3 for size in sizes)
    topk = [logits.log_softmax(1).topk(TOPK) for logits in drawn]
    fields["teacher_topk_ids"] = [indices for _, indices in topk]
    fields["teacher_topk_logprobs"] = [values for values, _ in topk]
    apart = zip(old, noise(0.3, 0.0), strict=True)
    fields["teacher_logprobs"] = [logprobs + other for logprobs, other in apart]
    batch = SampleBatch.from_prompt_response(
        [ids[:prompt] for ids, prompt in zip(tokens, prompt_tokens, strict=True)],
        [ids[prompt:] for ids, prompt in zip(tokens, prompt_tokens, strict=True)],
        fields,
    )
    if all_tokens:
        batch.set_field("response_mask", [torch.ones(len(ids)) for ids in tokens])
    return Samples(
        shape=shape,
        batch=batch,
        family_of=family_of,
        prompt_tokens=prompt_tokens,
        routing=routing,
        pairs=[(i, i + 1) for i in range(0, count - 1, 2)],
    )


def result_name(model: str, samples: Samples, kind: str) -> str:
    """The name of a result of the reference."""
    return f"{model} {samples.shape} {kind}"


def _leaves(tree: Tree, generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and routes of every sample of a tree, depth first."""
    size, children = (tree, ()) if isinstance(tree, int) else tree
    ids = torch.randint(0, problem.VOCAB_SIZE, (size,), generator=generator)
    routes = _routes(size, generator)
    if not children:
        yield ids, routes
    for child in children:
        for more, more_routes in _leaves(child, generator):
            yield torch.cat([ids, more]), torch.cat([routes, more_routes])


def _routes(num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    assert problem.MOE_MODEL.num_experts is not None
    sizes = (num_tokens, problem.FEW_LAYERS, problem.MOE_MODEL.num_experts)
    order = torch.rand(sizes, generator=generator).argsort(-1)
    return order[..., : problem.MOE_MODEL.moe_top_k]
