"""The plan as data: `StepPlan` and `Plan`, made of `MicroBatch`es.

    lengths -> build_dp_schedule -> Plan -> (check_plan, packed rows, simulate)

A plan is frozen and compares by value. Its JSON has an exact inverse, and the digest is computed
from it; its text is for people.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from megapack.base.arrays import Ints, read_budget
from megapack.errors import PlanError
from megapack.layout import Layout
from megapack.plan.explanation import Explanation
from megapack.plan.facts import Counts
from megapack.plan.images import PlannedImage
from megapack.plan.microbatch import MicroBatch, Part
from megapack.plan.order import StepOrder, step_order
from megapack.plan.order_text import read_order
from megapack.plan.text import format_plan, parse_json
from megapack.policy import Policy
from megapack.prefixes import PrefixTable, SharedPrefixes

__all__ = ["MicroBatch", "Part", "Plan", "Policy", "RolloutId", "StepPlan"]

RolloutId = int | str


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step of a plan: the micro-batches of each DP rank."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    """Micro-batches of each DP rank, in the order in which the pipeline runs them. One that several
    ranks share stands at the same place of each."""
    num_microbatches: int
    """M, the same on every rank."""
    group_size: int | None
    """G of the interleaved schedule in this step; None with vpp=1."""
    kept_rollouts: tuple[RolloutId, ...]
    """Ids of the rollouts that the step trains on, in order of first appearance."""
    dropped_rollouts: tuple[RolloutId, ...]
    """Ids that unreachable="drop" left out, in order of first appearance."""
    orders: tuple[tuple[str, ...], ...] = ()
    """Per DP rank, what each of its stages runs, as `StepOrder.lines`; () is Megatron's order."""
    images: tuple[PlannedImage, ...] = ()
    """The different images of its samples, see `build_dp_schedule`."""

    @cached_property
    def kept_samples(self) -> tuple[int, ...]:
        """Sample indices of the step, ascending."""
        return tuple(sorted(i for mb in self.microbatches for i in mb.begun_samples))

    @cached_property
    def images_of(self) -> dict[int, list[int]]:
        """By sample: the numbers of its images in `images`, once for each use."""
        found: dict[int, list[int]] = {}
        for number, image in enumerate(self.images):
            for sample in image.samples:
                found.setdefault(sample, []).append(number)
        return found

    def images_in(self, mb: MicroBatch) -> list[int]:
        """The numbers of the images of a row's samples, once for each use."""
        return [number for i in mb.samples for number in self.images_of.get(i, ())]

    @property
    def rank_images(self) -> list[list[int]]:
        """Per DP rank: the numbers of the images that its rows read, ascending."""
        return [sorted({n for mb in own for n in self.images_in(mb)}) for own in self.ranks]

    def chains(self, rank: int) -> list[range]:
        """The micro-batches of a DP rank that have the pieces of one sample or of one family, chain
        after chain: neighbours, of which the first begins the samples."""
        chains: list[range] = []
        for k, mb in enumerate(self.ranks[rank]):
            if not mb.pieces:
                continue
            if chains and chains[-1].stop == k and all(part.begin > 0 for part in mb.pieces):
                chains[-1] = range(chains[-1].start, k + 1)
            else:
                chains.append(range(k, k + 1))
        return chains

    def order(self, rank: int, layout: Layout, *, forward_only: bool = False) -> StepOrder:
        """What a DP rank runs: the order of the plan, or Megatron's.

        Args:
            layout: that of the plan.
            forward_only: no backwards; such steps run in Megatron's order.

        Raises:
            PlanError: the plan's order cannot run.
        """
        count = len(self.ranks[rank])
        if forward_only or not self.orders:
            group = self.group_size or 1
            return step_order(layout.pp, layout.vpp, count, group, forward_only)
        if (rank, layout.vpp) not in self._read_orders:
            lines, chains = self.orders[rank], self.chains(rank)
            order = read_order(lines, vpp=layout.vpp, num_microbatches=count, chains=chains)
            self._read_orders[rank, layout.vpp] = order
        return self._read_orders[rank, layout.vpp]

    @cached_property
    def _read_orders(self) -> dict[tuple[int, int], StepOrder]:
        """By rank and vpp. Of 64 stages and 600 micro-batches one takes 0.05 s to read."""
        return {}

    def meeting_ranks(self, layout: Layout) -> list[range]:
        """The DP ranks, in blocks that run their forwards and backwards in one order each. Ranks of
        a block meet inside of these: they share rows, also with a third rank, or all ranks exchange
        tokens of experts."""
        if layout.ep_spans_dp:
            return [range(len(self.ranks))]
        blocks: list[range] = []
        stop = 0
        for rank, row in enumerate(self.ranks):
            start = blocks.pop().start if rank < stop else rank
            stop = max(stop, rank + 1, *(mb.ranks(rank)[-1] + 1 for mb in row))
            blocks.append(range(start, stop))
        return blocks

    @property
    def microbatches(self) -> Iterator[MicroBatch]:
        """Micro-batches of all ranks, rank after rank; a shared one once, at its first rank."""
        for rank, row in enumerate(self.ranks):
            for mb in row:
                if mb.ranks(rank)[0] == rank:
                    yield mb

    @property
    def counts(self) -> Counts:
        """Rows, samples and tokens of the step."""
        return count_steps([self])


@dataclass(frozen=True, repr=False)
class Plan:
    """Steps of packed micro-batches, as `build_dp_schedule` returns them; `print(plan)` shows them.

    for step in plan.steps:
        own_rows = step.ranks[adapter.dp_rank]
    """

    steps: tuple[StepPlan, ...]
    layout: Layout
    policy: Policy
    max_tokens_per_gpu: int | None
    """The budget per GPU, after CP; None for a count-based plan."""
    micro_batch_size: int | None
    """Samples per micro-batch of a count-based plan."""
    num_samples: int
    """Samples in the input, dropped ones included."""
    rollout_ids: tuple[RolloutId, ...] | None
    """Rollout id of each sample; None: every sample is one rollout, its index is the id."""
    colocate_ids: tuple[RolloutId, ...] | None = None
    """Id of each sample's colocated set, which shares a micro-batch; None: no sets."""
    forward_only: bool = False
    """Planned for forward passes without a backward."""
    prefixes: SharedPrefixes | None = None
    """What the samples of a row share: each row holds it once. None: nothing is shared."""
    row_lengths: tuple[int, ...] = ()
    """Tokens per GPU that rows have under `Policy.row_shapes`, ascending; (): any."""
    adapter_ids: tuple[RolloutId, ...] | None = None
    """Id of each sample's adapter; None: all have one, or none."""
    _explainer: Callable[[Plan], Explanation] | None = field(default=None, compare=False)
    """Plans the samples again, under other policies. None in a plan that was read from text."""

    def __repr__(self) -> str:
        counts = [step.num_microbatches for step in self.steps]
        return f"Plan(num_samples={self.num_samples}, num_microbatches={counts}, {self.layout})"

    def __str__(self) -> str:
        return format_plan(self._payload)

    def to_json(self) -> str:
        """Canonical JSON: one line, no spaces, fields in a fixed order."""
        return json.dumps(self._payload, separators=(",", ":"))

    def digest(self) -> str:
        """SHA-256 of `to_json`, in hex: equal plans have equal digests on any machine."""
        return self._digest

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The exact inverse of `to_json`.

        Raises:
            PlanError: the text is not the JSON of a plan; the message says where.
        """
        return parse_json(text, _build)

    def explain(self) -> Explanation:
        """Say what each planning option gains, compared with a plan that differs in it alone.

            print(plan.explain())

        The options are shared prefixes, rows over several ranks, samples in pieces and split
        backwards. Each comparison takes as long as planning.

        Raises:
            PlanError: the plan was read from a file or a text, without lengths and cost model.
        """
        if self._explainer is None:
            raise PlanError(
                "a plan that was read has no lengths and no cost model to plan with; call "
                "explain() of the plan that build_dp_schedule returns"
            )
        return self._explainer(self)

    @property
    def counts(self) -> Counts:
        """Rows, samples and tokens of all steps."""
        return count_steps(self.steps)

    def live_cap(self, step: StepPlan) -> float:
        """Row tokens per GPU that the orders of a step may hold at once.

        That is `Policy.max_live_tokens_per_gpu`; without it as many micro-batches as the first
        stage holds in Megatron's order, each as long as the budget or the longest row. With pp=4
        and a budget of 8192 tokens it is 32768. Under oversize="alone" the longest sample over the
        budget that is in pieces is added: without pieces it would be a row by itself.
        """
        cap = self.policy.max_live_tokens_per_gpu
        if cap is not None:
            return cap
        layout = self.layout
        longest = max(mb.row_tokens / (layout.cp * mb.width) for mb in step.microbatches)
        over = 0
        if self.policy.oversize == "alone" and self.capacity is not None:
            ends = [part.end for mb in step.microbatches for part in mb.pieces]
            aligned = layout.aligned_sample_tokens(max(ends, default=0))
            over = aligned if aligned > self.capacity else 0
        most = max(map(len, step.ranks))
        order = step_order(layout.pp, layout.vpp, most, step.group_size or 1, self.forward_only)
        in_flight = float(order.peak_live(np.ones(most)).max())
        held = in_flight * max(longest, self.max_tokens_per_gpu or 0)
        # Divided at last, as the peak that is compared with it is: 11 / 3 * 100 is below 1100 / 3.
        return (held + layout.vpp * over / layout.cp) / layout.vpp

    def prefix_table(self, lengths: Sequence[int] | Ints) -> PrefixTable | None:
        """`prefixes` on the layout; None if nothing is shared. They must fit the lengths."""
        if self.prefixes is None:
            return None
        return PrefixTable(self.prefixes, lengths, self.layout)

    @property
    def capacity(self) -> int | None:
        """Padded tokens that a row may hold per DP rank; None for a count-based plan. A row over
        several DP ranks may hold as many times this."""
        return read_budget(self.row_layout, self.max_tokens_per_gpu, self.micro_batch_size)

    @property
    def row_layout(self) -> Layout:
        """The layout with the lengths that its rows may have."""
        return self.layout.rounding(self.policy.round_row_tokens, self.row_lengths)

    @property
    def microbatches(self) -> Iterator[MicroBatch]:
        """Those of all steps; a shared one once."""
        return (mb for step in self.steps for mb in step.microbatches)

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def _payload(self) -> dict[str, Any]:
        # Left out if None, so that plans without them keep their digests.
        optional: dict[str, Any] = {
            "colocate_ids": self.colocate_ids,
            "prefixes": None if self.prefixes is None else asdict(self.prefixes),
            "row_lengths": self.row_lengths or None,
            "adapter_ids": self.adapter_ids,
        }
        return {
            "layout": self.layout.to_payload(),
            "policy": self.policy.to_payload(),
            "max_tokens_per_gpu": self.max_tokens_per_gpu,
            "micro_batch_size": self.micro_batch_size,
            "forward_only": self.forward_only,
            "num_samples": self.num_samples,
            "rollout_ids": self.rollout_ids,
            **{name: value for name, value in optional.items() if value is not None},
            "steps": [_step_payload(step) for step in self.steps],
        }


def count_steps(steps: Sequence[StepPlan]) -> Counts:
    """Sum rows, samples and tokens over steps."""
    microbatches = [mb for step in steps for mb in step.microbatches]
    wide = [mb for mb in microbatches if mb.width > 1]
    pieces = [part for mb in microbatches for part in mb.pieces]
    per_rank = [len(rank) for step in steps for rank in step.ranks]
    num_rows = sum(bool(mb.samples) for mb in microbatches)
    lines = [line for step in steps for stages in step.orders for line in stages]
    images = [image for step in steps for image in step.images]
    return Counts(
        num_steps=len(steps),
        num_microbatches=(min(per_rank, default=0), max(per_rank, default=0)),
        num_rows=num_rows,
        num_padding_rows=len(microbatches) - num_rows,
        num_samples=sum(len(mb.begun_samples) for mb in microbatches),
        num_rollouts=sum(len(step.kept_rollouts) for step in steps),
        num_dropped_rollouts=sum(len(step.dropped_rollouts) for step in steps),
        tokens=sum(mb.tokens for mb in microbatches),
        row_tokens=sum(mb.row_tokens for mb in microbatches),
        shared_tokens=sum(mb.shared_tokens for mb in microbatches),
        wide_rows=dict(sorted(Counter(mb.width for mb in wide).items())),
        wide_tokens=sum(mb.tokens for mb in wide),
        num_pieces=len(pieces),
        num_split_samples=sum(part.begin == 0 for part in pieces),
        piece_tokens=sum(part.tokens for part in pieces),
        num_split_backwards=sum(line.count("W") for line in lines),
        num_ordered_steps=sum(bool(step.orders) for step in steps),
        num_images=len(images),
        num_image_uses=sum(len(image.samples) for image in images),
        image_patches=sum(image.patches for image in images),
        image_tokens=sum(image.tokens * len(image.samples) for image in images),
        most_patches=max(map(_most_patches, steps), default=0),
    )


def _most_patches(step: StepPlan) -> int:
    """Patches that the busiest GPU encodes ahead of the schedule."""
    patches: Counter[int] = Counter()
    for image in step.images:
        if image.owner is not None:
            patches[image.owner] += image.patches
    return max(patches.values(), default=0)


def own_samples(plans: Sequence[Plan], dp_rank: int) -> list[int]:
    """Indices of the samples that a DP rank runs in any of the plans, ascending; those that it runs
    a part of are among them."""
    steps = [step for plan in plans for step in plan.steps]
    return sorted({i for step in steps for mb in step.ranks[dp_rank] for i in mb.samples})


def _step_payload(step: StepPlan) -> dict[str, Any]:
    return {
        "num_microbatches": step.num_microbatches,
        "group_size": step.group_size,
        "kept_rollouts": step.kept_rollouts,
        "dropped_rollouts": step.dropped_rollouts,
        "ranks": [[mb.cell() for mb in rank] for rank in step.ranks],
        **({"orders": step.orders} if step.orders else {}),
        **({"images": step.images} if step.images else {}),
    }


def _build(payload: dict[str, Any]) -> Plan:
    """Build a plan from a payload whose types were checked."""
    rollout_ids = payload["rollout_ids"]
    colocate_ids = payload.get("colocate_ids")
    adapter_ids = payload.get("adapter_ids")
    prefixes = payload.get("prefixes")
    return Plan(
        steps=tuple(_build_step(step) for step in payload["steps"]),
        layout=Layout.from_payload(payload["layout"]),
        policy=Policy(**payload["policy"]),
        max_tokens_per_gpu=payload["max_tokens_per_gpu"],
        micro_batch_size=payload["micro_batch_size"],
        forward_only=payload["forward_only"],
        num_samples=payload["num_samples"],
        rollout_ids=None if rollout_ids is None else tuple(rollout_ids),
        colocate_ids=None if colocate_ids is None else tuple(colocate_ids),
        prefixes=None if prefixes is None else _build_prefixes(prefixes),
        row_lengths=tuple(payload.get("row_lengths", ())),
        adapter_ids=None if adapter_ids is None else tuple(adapter_ids),
    )


def _build_prefixes(payload: dict[str, Any]) -> SharedPrefixes:
    return SharedPrefixes(tuple(payload["order"]), tuple(payload["common"]), payload["own_tokens"])


def _build_step(step: dict[str, Any]) -> StepPlan:
    return StepPlan(
        ranks=tuple(
            tuple(MicroBatch.from_cell(number, cell) for cell in rank)
            for number, rank in enumerate(step["ranks"])
        ),
        num_microbatches=step["num_microbatches"],
        group_size=step["group_size"],
        kept_rollouts=tuple(step["kept_rollouts"]),
        dropped_rollouts=tuple(step["dropped_rollouts"]),
        orders=tuple(map(tuple, step.get("orders", ()))),
        images=tuple(map(PlannedImage.from_cell, step.get("images", ()))),
    )
