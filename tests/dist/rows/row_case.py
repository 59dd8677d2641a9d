"""A case of rows that are made in a special way: a layout, its samples and plans, and their facts.

What is special is a feature of the case: prefixes that samples share, rows over several DP ranks,
samples in pieces, split backwards. A cell that combines some is a line of data.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np

from megapack.cost import LayerSplit
from megapack.dp_schedule import build_dp_schedule
from megapack.layout import Layout
from megapack.plan import MicroBatch, Plan, check_plan
from megapack.plan.order import chain_order
from megapack.policy import Policy
from megapack.prefixes import PrefixTable, SharedPrefixes, row_branches
from tests.dist import problem
from tests.dist.rows.row_problem import KINDS, MODEL_TEXTS, MODELS, PAIRED, Samples, make_samples
from tests.dist.rows.row_shapes import SHAPES, MadeRows
from tests.hand_made_orders import joined_chains, with_weights_later
from tests.made_rows import made_ranks

LIVE_TOKENS = 400
"""Row tokens that a stage may hold at once. A chain is held whole, also without a pipeline."""


_HALF = problem.FEW_LAYERS // 2
ENDS_ALONE = LayerSplit(pipeline_model_parallel_layout=f"E|t*{_HALF}|t*{_HALF}|L")
"""Chunks without layers at both ends, on pp2 x vpp2."""


def layout_of(place: str) -> Layout:
    """The layout of a name such as dp2_tp2_sp_pp2_vpp2_g4, where g is G, or "single"."""
    sizes: dict[str, Any] = {}
    for part in place.removeprefix("single").split("_"):
        if part == "sp":
            sizes["sequence_parallel"] = True
        elif part:
            name, size = re.fullmatch(r"([a-z]+)(\d+)", part).groups()
            sizes["microbatch_group_size" if name == "g" else name] = int(size)
    return Layout(**sizes)


@dataclass(frozen=True)
class RowCase:
    """One layout, and the objectives that run on it."""

    place: str
    """The name of the layout, see `layout_of`."""
    _: KW_ONLY
    title: str = ""
    """What it is about, besides its model and recompute."""
    shape: str
    """The name of one of `SHAPES`."""
    kinds: tuple[str, ...] = ("sft", "grpo", "gspo")
    recompute: str = "none"
    model: str = "plain"
    """The name of one of `MODELS`."""
    value_model: str = "other"
    """The model of the objectives with a value head."""
    stock: bool = False
    """Whether recurrent layers are Megatron's own classes."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained, as in `ModelConfig.freeze`."""
    split: LayerSplit = field(default_factory=LayerSplit)
    """The layers of each chunk."""
    shares: bool = False
    """Whether rows share the prefixes of their samples."""
    policy: Policy = field(default_factory=Policy)
    """The policy of plans of the planner."""
    is_planned: bool = False
    """Whether the planner makes the rows of a shape that has some made by hand."""
    lag: int | None = None
    """Weight gradients run this many backwards later; None: backwards are joint."""
    mutation: str = ""
    """What the case does wrong, see `row_worker`; it must be seen."""
    expect: Mapping[str, Any] = field(default_factory=dict)
    """What the plans hold, besides what their shape says."""

    @functools.cached_property
    def layout(self) -> Layout:
        return layout_of(self.place)

    @property
    def world(self) -> int:
        """Processes that the case needs."""
        return self.layout.world_size

    @property
    def features(self) -> str:
        """What the case is about, in words."""
        parts = [
            self.title,
            MODEL_TEXTS.get(self.model, ""),
            "Megatron's own layers" if self.stock else "",
            "" if self.recompute == "none" else f"recompute {self.recompute}",
            "frozen " + ", ".join(f"`{name}`" for name in self.frozen) if self.frozen else "",
            "" if self.lag is None else "split backward",
            "ends alone" if self.split == ENDS_ALONE else "",
        ]
        return ", ".join(filter(None, parts))

    def model_of(self, kind: str) -> str:
        """The model that an objective trains."""
        return self.value_model if KINDS[kind].value_head else self.model

    def has_experts(self, kind: str) -> bool:
        """Whether the choices of experts are compared."""
        return bool(MODELS[self.model_of(kind)].num_experts) and not KINDS[kind].value_head

    def shape_of(self, kind: str) -> str:
        """The shape that an objective runs on."""
        return SHAPES[self.shape].pairs if kind in PAIRED else self.shape

    def samples_of(self, kind: str) -> Samples:
        """The samples that an objective runs on."""
        shape = self.shape_of(kind)
        return make_samples(shape, SHAPES[shape].families, all_tokens=kind == "sft_all")

    def made_rows(self, shape: str) -> MadeRows | None:
        """The rows made by hand; None where they are the planner's."""
        return None if self.is_planned else SHAPES[shape].made.get(self.layout.dp)

    def expected(self, shape: str) -> dict[str, Any]:
        """What plans of a shape hold."""
        made = self.made_rows(shape)
        return {**(made.expect if made else SHAPES[shape].expect), **self.expect}

    def plans(self, samples: Samples) -> tuple[Plan, Plan]:
        """The plan that the case is about, and one of plain rows, whose step must be the same."""
        shape = SHAPES[samples.shape]
        cp = self.layout.cp
        build = functools.partial(
            build_dp_schedule,
            samples.batch.lengths,
            layout=self.layout,
            colocate_ids=shape.sets(samples),
            # The default cuts the samples of the cases that have pieces more evenly.
            cost=None if self.policy.split_samples == "auto" else problem.COST,
        )
        policy = replace(
            self.policy,
            share_prefixes="off",
            context_parallel="fixed",
            split_samples="off",
            backward="joint",
            row_shapes=None,
        )
        plain = build(max_tokens_per_gpu=shape.plain_row_tokens // cp, policy=policy)
        made = self.made_rows(samples.shape)
        prefixes = self._prefixes(samples) if self.shares else None
        if made:
            plan = plan_by_hand(samples, replace(plain, policy=self.policy), made, prefixes)
        else:
            plan = build(
                max_tokens_per_gpu=shape.row_tokens // cp, policy=self.policy, prefixes=prefixes
            )
        if self.lag is not None:
            plan = with_weights_later(plan, self.lag)
        check_plan(plan, samples.batch.lengths)
        return plan, plain

    def _prefixes(self, samples: Samples) -> SharedPrefixes:
        batch = samples.batch
        return SharedPrefixes.from_samples(
            [batch.tokens(i) for i in range(len(batch))],
            routing=samples.routing if self.model == "moe_replay" else None,
            mtp_num_layers=MODELS[self.model].mtp_num_layers,
        )


def plan_by_hand(
    samples: Samples, plain: Plan, made: MadeRows, prefixes: SharedPrefixes | None
) -> Plan:
    """The plan of rows made by hand, for the layout and the samples of a plain plan."""
    layout = plain.layout
    lengths = samples.batch.lengths
    table = None
    if prefixes is not None:
        table = PrefixTable(prefixes, lengths, layout)
    ranks = made_ranks(made.slots, lengths, layout, table)
    count = len(made.slots)
    group = layout.group_size if layout.vpp > 1 else None
    step = replace(plain.steps[0], ranks=ranks, num_microbatches=count, group_size=group)
    policy = plain.policy
    if any(row.width > 1 for row in step.microbatches):
        policy = replace(policy, context_parallel="dynamic")
    if any(row.pieces for row in step.microbatches):
        live = LIVE_TOKENS // layout.cp
        policy = replace(policy, split_samples="auto", max_live_tokens_per_gpu=live)
        make = functools.partial(chain_order, layout.pp, layout.vpp, count, group or 1)
        chains = [step.chains(rank) for rank in range(layout.dp)]
        for block in step.meeting_ranks(layout):
            joined = joined_chains(itertools.chain(*(chains[rank] for rank in block)))
            chains[block.start : block.stop] = [joined] * len(block)
        step = replace(step, orders=tuple(make(own).lines() for own in chains))
    return replace(
        plain,
        steps=(step,),
        policy=policy,
        max_tokens_per_gpu=made.row_tokens // layout.cp,
        prefixes=prefixes,
    )


def row_facts(samples: Samples, plan: Plan) -> dict[str, Any]:
    """What the rows of a plan have.

    Returns:
        rows, tokens: micro-batches, and real tokens of their samples.
        longest_row: row tokens of the longest.
        padding_rows, dummy_rows: padding micro-batches, and rows longer than their samples.
        shared_tokens: positions that rows save; shared_1, shared_2, ...: those of rows of a width.
        families_in_a_row: most families that share in one row.
        depth: most prefixes on top of one another.
        cut_families: families that share in each of several rows.
        shared_losses: losses at positions that have one for several samples.
        rows_1, rows_2, rows_4: rows with samples, by their width.
        gpus: GPUs that rows are cut over.
        mixed_slots: places in the ranks' order with rows of several widths.
        padding_beside: padding micro-batches at the place of a wide row of other ranks.
        later_blocks: wide rows that do not begin at DP rank 0.
        packed_wide: wide rows of several samples.
        short_in_wide: samples that leave some GPU of their row without a token.
        chains, pieces: micro-batches of each chain, and pieces of each sample in pieces.
        weight_operations: weight gradients that run apart from their backwards.
        orders: different orders of ranks.
    """
    step = plan.steps[0]
    layout = plan.layout
    lengths = samples.batch.lengths
    rows = list(step.microbatches)
    full = [row for row in rows if row.samples]
    wide = [row for row in full if row.width > 1]
    slots = list(zip(*step.ranks, strict=True))
    beside = [row for slot in slots for row in slot if any(other.width > 1 for other in slot)]
    gpus = [layout.cp * row.width for row in full]
    parts = Counter(part.sample for row in rows for part in row.pieces)
    facts: dict[str, Any] = {
        "rows": len(rows),
        "tokens": sum(row.tokens for row in rows),
        "longest_row": max(row.row_tokens for row in rows),
        "padding_rows": sum(not row.samples for row in rows),
        "dummy_rows": sum(row.row_tokens > row.padded_tokens for row in full),
        "shared_tokens": sum(row.shared_tokens for row in rows),
        "gpus": sorted(set(gpus)),
        "mixed_slots": sum(len({row.width for row in slot}) > 1 for slot in slots),
        "padding_beside": sum(not row.samples for row in beside),
        "later_blocks": sum(row.dp_ranks[0] > 0 for row in wide),
        "packed_wide": sum(len(row.samples) > 1 for row in wide),
        "short_in_wide": sum(
            lengths[i] < layout.cp * row.width for row in wide for i in row.samples
        ),
        "chains": sorted(len(c) for rank in range(layout.dp) for c in step.chains(rank)),
        "pieces": sorted(parts.values()),
        "orders": len(set(step.orders)),
        "weight_operations": sum(line.count("W") for rank in step.orders for line in rank),
        **_sharing_facts(samples, plan, rows),
    }
    for width in (1, 2, 4):
        own = [row for row in full if row.width == width]
        facts[f"rows_{width}"] = len(own)
        facts[f"shared_{width}"] = sum(row.shared_tokens for row in own)
    return facts


def _sharing_facts(samples: Samples, plan: Plan, rows: list[MicroBatch]) -> dict[str, Any]:
    batch = samples.batch
    table = None
    if plan.prefixes is not None:
        table = PrefixTable(plan.prefixes, batch.lengths, plan.layout)
    rows_of: Counter[int] = Counter()
    most = depth = shared_losses = 0
    for row in rows:
        lengths = [batch.length(i) for i in row.samples]
        own_table = None if table is None else table.over(row.width)
        families = set()
        depths: list[int] = []
        layout = plan.layout.over(row.width)
        for branch in row_branches(row.samples, lengths, layout, own_table, row.pieces):
            above = depths[branch.parent] if branch.parent >= 0 else 0
            depths.append(above + (len(branch.samples) > 1))
            if len(branch.samples) == 1:
                continue
            families.add(samples.family_of[row.samples[branch.samples[0]]])
            for k in branch.samples:
                mask = batch.response_mask(row.samples[k])
                labels = mask[branch.offset + 1 : branch.offset + branch.tokens + 1]
                shared_losses += int(labels.sum())
        rows_of.update(families)
        most = max(most, len(families))
        depth = max([depth, *depths])
    return {
        "families_in_a_row": most,
        "depth": depth,
        "cut_families": sum(count > 1 for count in rows_of.values()),
        "shared_losses": shared_losses,
    }


def peak_live_tokens(plan: Plan) -> float:
    """The most row tokens that a stage holds at a time."""
    step = plan.steps[0]
    peaks = []
    for rank, rows in enumerate(step.ranks):
        amounts = np.array([float(row.row_tokens) for row in rows])
        peaks.append(step.order(rank, plan.layout).peak_live(amounts).max())
    return float(max(peaks))
