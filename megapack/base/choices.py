"""The values that a setting may have: one list for the config, the code and `--help`.

The choices of `Layout` and `Policy` are defined in their own modules.
"""

from __future__ import annotations

from typing import Literal

Device = Literal["cuda", "cpu"]
Dtype = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
"""By the operations that they cost."""
RecomputeModule = Literal["core_attn", "mlp", "layernorm", "moe_act", "moe"]
"""A part of a layer, as Megatron-Core names it."""

Kernel = Literal["te", "varlen", "sdpa"]
"""The implementation of attention over packed rows."""
Attention = Literal["auto", "te", "varlen", "sdpa"]
"""A kernel, or "auto": the first that can run."""

Calibrate = Literal["auto", "off", "start", "online"]
"""What a run measures for its cost model: nothing, speeds at its start, or its own seconds too."""

Executor = Literal["megatron", "operations"]
"""What runs a step: Megatron's schedules, or a list of operations that a plan may order."""
ExecutorChoice = Literal["auto", "megatron", "operations"]
"""An executor, or "auto": the one that the policy needs."""

LossWeighting = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "rollout-mean",
]
KlKind = Literal["k1", "k2", "k3"]
KlLevel = Literal["token", "sequence"]
CorrectionKind = Literal["truncate", "mask"]
"""What happens to an importance ratio outside of its bounds: it is cut to them, or becomes 0."""
RatioLevel = Literal["token", "sequence", "geometric"]
"""The ratio of a token, the product of a sample's ratios, or their geometric mean."""
Tail = Literal["lump", "ignore", "renormalize"]
"""What a divergence over k ids does with the probability of all others: it counts them as one id,
leaves them out, or divides the probabilities of the k ids by their sum."""
AdvantageNorm = Literal["group", "group-std", "rloo", "reinforce++", "reinforce++-baseline", "none"]
RoutingReplay = Literal["none", "rollout", "old_logprobs"]
"""Whose choice of experts a step repeats: nobody's, the inference engine's in the rollouts, or that
of the pass for old log-probs."""
Overlong = Literal["error", "truncate", "skip"]
