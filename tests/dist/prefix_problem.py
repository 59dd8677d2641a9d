"""The problem of the cases with shared prefixes: families of samples, objectives, and cases.

Tokens, log-probs and routes are drawn per node of a family's tree, so samples have in common what
their nodes have in common. Where a response is shared too, one position has a loss for several
samples, with different advantages and old log-probs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megapack.config.sections import ModelConfig
from megapack.dp_schedule import build_dp_schedule
from megapack.layout import Layout
from megapack.loss.preference import DPO, PairwiseReward
from megapack.loss.sequence import ValueLoss
from megapack.loss.token import SFT
from megapack.plan import Plan
from megapack.policy import Policy
from megapack.prefixes import PrefixTable, SharedPrefixes, row_branches
from megapack.samples import SampleBatch
from tests.dist import problem
from tests.dist.sequence_problem import KINDS as SEQUENCE_KINDS
from tests.dist.sequence_problem import Kind

Tree = int | tuple[int, Sequence["Tree"]]
"""Tokens of a leaf, or tokens of a node and what continues it. A leaf of 0 tokens ends a sample
with its node."""
Family = tuple[int, Sequence[Tree]]
"""Tokens of a prompt, and its responses."""

_GROUP: Family = (13, [7, 1, 22, 0, 12])
_DEEP: Family = (9, [(6, [(4, [5, 3]), 7]), (5, [2, 4]), 3])
# 24 shared tokens and 63 of responses: more than a row of 64, and each half less.
_LONG: Family = (24, [9, 12, 10, 11, 8, 13])
_TWICE: Family = (5, [(6, [0, 0])])
_SMALL: Family = (8, [4, 6])

SHAPES: dict[str, list[Family]] = {
    "mixed": [_GROUP, _DEEP, (1, [6, 11]), _LONG, _TWICE, _SMALL, (3, [14]), (1, [25])],
    "pairs": [
        *[_LONG, (13, [7, 1, 22, 5]), (9, [(6, [(4, [5, 3]), 7]), 10])],
        *[(8, [4, 6]), (1, [6, 11]), (16, [5, 3])],
    ],
    "g1": [(p, [r]) for p, r in [(9, 14), (4, 21), (12, 3), (7, 7), (15, 11), (2, 30)]],
    "g2": [(p, [r, r + 3]) for p, r in [(9, 11), (4, 15), (12, 3), (7, 7), (15, 8), (20, 2)]],
    "g8": [(10, [3, 9, 1, 5, 6, 2, 7, 4]), (6, [4, 2, 8, 3, 1, 6, 5, 7])],
    "one-token prompts": [(1, [6, 11]), (1, [(9, [4, 5]), 7]), (1, [9, 2, 8])],
    "no responses": [(13, [7, 0, 12]), (6, [0, 0]), (9, [(4, [0, 5]), 3])],
    "depth 3": [_DEEP, (5, [(3, [(4, [(2, [3, 1]), 6]), 5]), 4])],
    "cut in two": [_LONG],
    "equal samples": [_TWICE, (9, [4, 7]), (3, [(8, [0, 0, 0])])],
}
"""Families by name. `mixed` has all of the others' features; `pairs` has a pair in every two
leaves."""

SHARING: dict[str, dict[str, int]] = {
    "mixed": {"families_in_a_row": 2, "depth": 3, "cut_families": 1, "shared_losses": 20},
    "pairs": {"cut_families": 1, "shared_losses": 20},
    "g1": {},
    "g2": {"families_in_a_row": 2},
    "g8": {"cut_families": 1},
    "one-token prompts": {"shared_losses": 10},
    "no responses": {"shared_losses": 5},
    "depth 3": {"depth": 3, "shared_losses": 40},
    "cut in two": {"cut_families": 1},
    "equal samples": {"shared_losses": 30},
}
"""What plans of each shape must have at least, see `sharing_facts`; all but `g1` share tokens."""

KINDS = {
    "sft": Kind(objective=SFT(), weighting="token-mean"),
    "sft_all": Kind(objective=SFT(), weighting="token-mean"),
    "grpo": Kind(objective=problem.OBJECTIVE, weighting="token-mean"),
    "gspo": SEQUENCE_KINDS["gspo"],
    "dpo": Kind(objective=DPO(beta=0.2, label_smoothing=0.1)),
    "value": Kind(objective=ValueLoss(clip=0.4), weighting="token-mean", value_head=True),
    "reward": Kind(objective=PairwiseReward(), value_head=True),
}
"""`sft_all` trains on all tokens, also those of prompts."""
PAIRED = ("dpo", "reward")
"""Objectives of pairs, which run on the shape `pairs`."""

MODELS: dict[str, ModelConfig] = {
    "plain": problem.MODEL,
    "other": problem.OTHER_MODEL,
    "bf16": problem.BF16_MODEL,
    "moe": problem.MOE_MODEL,
    "moe_replay": problem.MOE_MODEL,
    # A value head has no vocabulary, on which the reference's losses of experts run.
    "moe_value": dataclasses.replace(
        problem.MOE_MODEL,
        untie_embeddings=True,
        moe_balance_loss_coef=0.0,
        moe_z_loss_coef=0.0,
    ),
    "mla": problem.MLA_MODEL,
    "mtp": problem.MTP_MODEL,
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


def make_samples(shape: str, *, all_tokens: bool = False) -> Samples:
    """Samples with random fields; equal in every process.

    Args:
        all_tokens: every token but a sample's first counts in the loss.
    """
    generator = torch.Generator().manual_seed(problem.SEED)
    tokens: list[torch.Tensor] = []
    routing: list[torch.Tensor] = []
    family_of: list[int] = []
    prompt_tokens: list[int] = []
    for number, (prompt, responses) in enumerate(SHAPES[shape]):
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
    fields = {
        "advantages": list(torch.randn(count, generator=generator)),
        "old_logprobs": noise(0.5, -math.log(problem.VOCAB_SIZE)),
        "ref_logprobs": noise(0.5, -math.log(problem.VOCAB_SIZE)),
        "returns": noise(1.0, 0.3),
        "old_values": noise(1.0, 0.0),
        "pair_sign": list(torch.tensor([1.0, -1.0]).repeat(count)[:count]),
    }
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
    sizes = (num_tokens, problem.NUM_LAYERS, problem.MOE_MODEL.num_experts)
    order = torch.rand(sizes, generator=generator).argsort(-1)
    return order[..., : problem.MOE_MODEL.moe_top_k]


@dataclass(frozen=True, kw_only=True)
class PrefixCase:
    """One layout, and the objectives that run on it."""

    title: str = ""
    """The shape of the samples or the feature that it is about."""
    layout: Layout
    shape: str = "mixed"
    kinds: tuple[str, ...] = ("sft", "grpo", "gspo", "dpo", "value")
    recompute: str = "none"
    model: str = "plain"
    """The name of one of `MODELS`."""
    value_model: str = "other"
    """The model of the objectives with a value head."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained, as in `ModelConfig.freeze`."""
    policy: Policy = field(default_factory=Policy)
    row_tokens: int = 64
    """The budget of a row, before it is cut over context-parallel ranks."""
    expect: dict[str, int] = field(default_factory=dict)
    """What the plans must have at least, besides what `SHARING` says."""

    @property
    def world(self) -> int:
        """Processes that the case needs."""
        return self.layout.world_size

    def model_of(self, kind: str) -> str:
        """The model that an objective trains."""
        return self.value_model if KINDS[kind].value_head else self.model

    def shape_of(self, kind: str) -> str:
        """The shape that an objective runs on."""
        return "pairs" if kind in PAIRED else self.shape

    def samples_of(self, kind: str) -> Samples:
        """The samples that an objective runs on."""
        return make_samples(self.shape_of(kind), all_tokens=kind == "sft_all")

    def plan(self, samples: Samples, *, shared: bool) -> Plan:
        """The plan of a shape, with each pair of `pairs` in one row."""
        batch = samples.batch
        settings = MODELS[self.model]
        prefixes = SharedPrefixes.from_samples(
            [batch.tokens(i) for i in range(len(batch))],
            routing=samples.routing if self.model == "moe_replay" else None,
            mtp_num_layers=settings.mtp_num_layers,
        )
        policy = self.policy
        if not shared:
            policy = dataclasses.replace(policy, share_prefixes="off")
        return build_dp_schedule(
            batch.lengths,
            layout=self.layout,
            max_tokens_per_gpu=self.row_tokens // self.layout.cp,
            colocate_ids=_sets(samples),
            policy=policy,
            prefixes=prefixes,
        )


def _sets(samples: Samples) -> list[int] | None:
    """Colocated sets: the pairs of `pairs`; in `mixed` two families, which then meet in a row."""
    if samples.shape == "pairs":
        return [i // 2 for i in range(len(samples.family_of))]
    if samples.shape != "mixed":
        return None
    together = (_TWICE, _SMALL)
    first = samples.family_of.index(SHAPES["mixed"].index(_TWICE))
    return [
        first if SHAPES["mixed"][family] in together else i
        for i, family in enumerate(samples.family_of)
    ]


def sharing_facts(samples: Samples, plan: Plan) -> dict[str, Any]:
    """What the rows of a plan share.

    Returns:
        tokens, shared_tokens: real tokens of the samples, and positions that rows save.
        families_in_a_row: most families that share in one row.
        depth: most prefixes on top of one another.
        cut_families: families that share in each of several rows.
        shared_losses: losses at positions that have one for several samples.
        padding_rows, dummy_rows: padding micro-batches, and rows longer than their samples.
    """
    batch = samples.batch
    table = None
    if plan.prefixes is not None:
        table = PrefixTable(plan.prefixes, len(batch), plan.layout)
    rows_of: dict[int, int] = {}
    most = 0
    depth = 0
    shared_losses = 0
    rows = list(plan.steps[0].microbatches)
    for row in rows:
        lengths = [batch.length(i) for i in row.samples]
        branches = row_branches(row.samples, lengths, plan.layout, table)
        families = set()
        depths = []
        for branch in branches:
            above = depths[branch.parent] if branch.parent >= 0 else 0
            depths.append(above + (len(branch.samples) > 1))
            if len(branch.samples) == 1:
                continue
            families.add(samples.family_of[row.samples[branch.samples[0]]])
            for k in branch.samples:
                mask = batch.response_mask(row.samples[k])
                labels = mask[branch.offset + 1 : branch.offset + branch.tokens + 1]
                shared_losses += int(labels.sum())
        for family in families:
            rows_of[family] = rows_of.get(family, 0) + 1
        most = max(most, len(families))
        depth = max([depth, *depths])
    return {
        "tokens": sum(row.tokens for row in rows),
        "shared_tokens": sum(row.shared_tokens for row in rows),
        "families_in_a_row": most,
        "depth": depth,
        "cut_families": sum(count > 1 for count in rows_of.values()),
        "shared_losses": shared_losses,
        "padding_rows": sum(not row.samples for row in rows),
        "dummy_rows": sum(bool(row.samples) and row.row_tokens > row.padded_tokens for row in rows),
        "rows": len(rows),
        "row_lengths": len({row.row_tokens for row in rows}),
    }
