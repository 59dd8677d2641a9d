"""`check_plan`: the invariants of a plan, numbered as in the documentation.

1. Megatron accepts every rank's M, and all ranks of a step have the same M.
2. Every kept sample is in exactly one micro-batch; kept and dropped samples partition the input;
   each step keeps at least one sample.
3. A rollout is kept whole in one step or dropped whole; unreachable="drop" drops only the trailing
   rollouts of a step.
4. No row holds more padded tokens than the budget; tokens that its samples share count once. The
   one exception is a sample that is over the budget by itself, under oversize="alone": it is alone
   in its row.
5. Under row_shape="uniform" all rows of a step have one length. Under "planned" a row is as long as
   its padded tokens, and a padding micro-batch is one aligned unit long.
6. Equal inputs give an equal digest (checked by tests).
7. Samples that share a colocate id are in one micro-batch. Invariant 4 counts them as one sample.
8. `Plan.prefixes` fit the lengths, and each row holds what they say that its samples have in common
   once: `MicroBatch.shared_tokens` are the positions that it saves by that. Pieces share with the
   other pieces of the row, whole samples with the other whole ones. Without prefixes, and under
   share_prefixes="off", no row shares anything.
9. A row that several DP ranks share lies over an aligned block of 2, 4, 8, ... of them and stands
   at the same place of each; only under context_parallel="dynamic". Invariants 4 and 5 hold with
   the alignment and the budget of all its ranks, and no row is over that budget.
10. Pieces are in consecutive micro-batches of a DP rank, only under split_samples="auto": those of
   one sample, one in each, or those of a family, two of each sample. The first pieces of a family
   are in the first of these micro-batches, end at one position, and share all their positions; the
   second pieces are in the others. Pieces have their sample from its first token to its last, and
   all but the last one are aligned. In a row they are the first samples, and the others are whole.
   A row with pieces is within the budget. With vpp > 1 the micro-batches are in one group of G. A
   colocated set is whole, or all of its samples are in pieces of one family. All of the rows lie
   over the same ranks. Without a budget samples are whole.
11. Orders of operations can run: they are complete, without a circle, and run the backwards of
   pieces in reverse. They hold no more tokens than `Plan.live_cap`. Weight gradients are apart only
   under backward="split". A training step with pieces has orders, a pass without backwards none.
   Ranks that share rows, or exchange tokens of experts, have their forwards and backwards in one
   order. Weight gradients may be at other places of each.
12. Under row_shapes each row has one of so many lengths at most, `Plan.row_lengths`. Invariant 5
   then says that it is the shortest one that holds the row's padded tokens.
13. A step has each different image of its samples once, with the samples that use it. Under
   images="ahead" a GPU of the layout encodes it; under images="row" no row of several items has
   more patches than `max_patches_per_gpu`.
14. In a row the samples of an adapter are side by side, and under adapters="one" there is only one.
   Samples of different adapters have no prefix in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from megapack.base.arrays import Ints, read_lengths
from megapack.errors import PlanError, brief
from megapack.images import Images, checked_images
from megapack.plan.checks.images import check_images
from megapack.plan.checks.orders import check_orders
from megapack.plan.checks.pieces import check_pieces
from megapack.plan.checks.prefixes import check_prefixes
from megapack.plan.checks.reading import Reading, broken
from megapack.plan.checks.row_lengths import check_row_lengths
from megapack.plan.checks.wide import check_wide_rows
from megapack.prefixes import Spans

if TYPE_CHECKING:
    from megapack.plan.plan import MicroBatch, Plan, RolloutId


def check_plan(
    plan: Plan, lengths: Sequence[int] | Ints, images: Sequence[Images] | None = None
) -> None:
    """Check a plan, such as one read from a file, against its invariants; raise if one is broken.

    Args:
        plan: any plan.
        lengths: real tokens of each sample, as they were planned.
        images: of each sample, as they were planned; None: those of the plan are not compared.

    Raises:
        PlanError: an invariant is broken; the message says which and where.
        DataError: `lengths` is not a sequence of integers of at least 1, or invalid images.
    """
    sizes = read_lengths(lengths)
    if sizes.size != plan.num_samples:
        raise PlanError(
            f"{sizes.size} lengths for a plan of {plan.num_samples} samples; give those that it "
            "was made for"
        )
    own = None if images is None else checked_images(images, sizes.tolist())
    read = Reading(plan, sizes, own)
    for check in CHECKS:
        check(read)


def check_counts(read: Reading) -> None:
    """Invariant 1: every rank has a legal M."""
    layout = read.plan.row_layout
    is_multiple = read.plan.policy.count_rule == "multiple" and layout.vpp > 1
    for where, step in read.steps:
        if len(step.ranks) != layout.dp:
            raise broken(1, f"{where} has {len(step.ranks)} ranks, the layout has dp={layout.dp}")
        group = step.group_size
        if (group is None) != (layout.vpp == 1):
            raise broken(1, f"{where} has group_size={group} with vpp={layout.vpp}")
        if group not in (None, layout.group_size):
            raise broken(1, f"{where} has group_size={group}, the layout has {layout.group_size}")
        counts = [len(rank) for rank in step.ranks]
        for rank, count in enumerate(counts):
            wrong = is_multiple and count % layout.group_size
            if wrong or not layout.is_legal_count(count, group):
                raise broken(1, f"{where} rank {rank} has M={count}, illegal for {layout}")
        if set(counts) != {step.num_microbatches}:
            raise broken(1, f"{where} has M={counts}, not {step.num_microbatches} on every rank")


def check_partition(read: Reading) -> None:
    """Invariant 2: every sample is planned once, or dropped once."""
    times = np.zeros(read.lengths.size, dtype=np.int64)
    numbers = read.rollout_numbers
    dropped = np.zeros(len(numbers), dtype=np.int64)
    for where, step in read.steps:
        samples = np.array(step.kept_samples, dtype=np.int64)
        if not samples.size:
            raise broken(2, f"{where} keeps no sample")
        if samples[0] < 0 or samples[-1] >= times.size:
            raise broken(2, f"samples {samples[0]} to {samples[-1]} of {times.size}")
        np.add.at(times, samples, 1)
        for rollout in step.dropped_rollouts:
            if rollout not in numbers:
                raise broken(2, f"dropped rollout {rollout!r} is not in the input")
            dropped[numbers[rollout]] += 1
    times += dropped[read.rollout_of]
    bad = np.flatnonzero(times != 1)
    if bad.size:
        raise broken(2, f"sample {bad[0]} is planned or dropped {times[bad[0]]} times")


def check_rollouts(read: Reading) -> None:
    """Invariant 3: rollouts are kept whole or dropped whole."""
    numbers = read.rollout_numbers
    for where, step in read.steps:
        if any(rollout not in numbers for rollout in step.kept_rollouts):
            raise broken(3, f"{where} keeps a rollout that is not in the input")
        kept = [numbers[rollout] for rollout in step.kept_rollouts]
        dropped = [numbers[rollout] for rollout in step.dropped_rollouts]
        if kept != sorted(set(kept)) or dropped != sorted(set(dropped)):
            raise broken(3, f"{where}: rollouts are not in order of first appearance")
        whole = np.flatnonzero(np.isin(read.rollout_of, kept))
        if not np.array_equal(whole, step.kept_samples):
            raise broken(3, f"{where}: its samples are not those of its kept rollouts")
        if dropped and read.plan.policy.unreachable != "drop":
            raise broken(3, f"{where} drops under unreachable={read.plan.policy.unreachable!r}")
        if dropped and kept and dropped[0] < kept[-1]:
            raise broken(3, f"{where} drops {read.rollouts[dropped[0]]!r}, which is not trailing")


def check_rows(read: Reading) -> None:
    """Invariants 4 and 5, and what rows save by shared prefixes (8)."""
    for where, _, _, _, mb in read.rows:
        _check_row(read, mb, where)
    for where, step in read.steps:
        lengths = sorted({mb.row_tokens for mb in step.microbatches})
        if read.plan.policy.row_shape == "uniform" and len(lengths) > 1:
            raise broken(5, f"{where} has rows of {lengths[:4]} tokens, not one length")


def check_colocated(read: Reading) -> None:
    """Invariant 7: colocated sets are whole."""
    ids = read.plan.colocate_ids
    if ids is None:
        return
    microbatch_of = {i: where for where, *_, mb in read.rows for i in mb.begun_samples}
    first: dict[RolloutId, int] = {}
    for i, name in enumerate(ids):
        other = first.setdefault(name, i)
        places = microbatch_of.get(other, ""), microbatch_of.get(i, "")
        if places[0] != places[1]:
            raise broken(
                7,
                f"samples {other} and {i} share the colocate id {name!r} and are in {places[0]} "
                f"and in {places[1]}",
            )


def check_adapters(read: Reading) -> None:
    """Invariant 14: adapters are side by side in rows, and share nothing."""
    ids, prefixes = read.plan.adapter_ids, read.plan.prefixes
    if ids is None:
        return
    if len(ids) != read.lengths.size:
        raise broken(14, f"{len(ids)} adapter_ids for {read.lengths.size} samples")
    for where, *_, mb in read.rows:
        runs = [name for name, _ in groupby(ids[i] for i in mb.samples)]
        if len(runs) > len(set(runs)):
            raise broken(14, f"{where} has adapters in turns: {brief(runs)}")
        if len(runs) > 1 and read.plan.policy.adapters == "one":
            raise broken(14, f"{where} has {len(runs)} adapters under adapters='one'")
    order, common = ((), ()) if prefixes is None else (prefixes.order, prefixes.common)
    for i, j, tokens in zip(order, order[1:], common[1:], strict=False):
        if tokens and ids[i] != ids[j]:
            raise broken(14, f"samples {i} and {j} of two adapters have a prefix in common")


CHECKS: tuple[Callable[[Reading], None], ...] = (
    check_prefixes,
    check_counts,
    check_wide_rows,
    check_pieces,
    check_orders,
    check_partition,
    check_rollouts,
    check_rows,
    check_colocated,
    check_adapters,
    check_row_lengths,
    check_images,
)
"""In this order: later ones rely on what earlier ones have checked, such as known samples."""


def _check_row(read: Reading, mb: MicroBatch, where: str) -> None:
    layout = read.plan.row_layout.over(mb.width)
    samples = list(mb.samples)
    spans = Spans.of(samples, mb.pieces)
    ends = np.where(spans.is_piece, spans.end, read.lengths[samples])
    aligned = layout.aligned_sample_tokens(ends)
    shared, shared_sq = read.saved(samples, mb.width, spans)
    padded = layout.aligned_row_tokens(int((aligned - spans.begin).sum()) - shared)
    # A piece attends to the tokens before it, too.
    tokens_sq = int((aligned * aligned - spans.begin * spans.begin).sum()) - shared_sq
    if mb.shared_tokens != shared:
        raise broken(8, f"{where}: shared_tokens {mb.shared_tokens}, not {shared}")
    planned = (mb.tokens, mb.tokens_sq, mb.padded_tokens)
    actual = (int((ends - spans.begin).sum()), tokens_sq, padded)
    if planned != actual:
        raise broken(4, f"{where}: tokens, tokens_sq, padded_tokens {planned}, not {actual}")
    _check_budget(read, mb, where)
    least = padded or layout.aligned_row_tokens(1)
    if mb.row_tokens % layout.row_alignment or mb.row_tokens < least:
        raise broken(5, f"{where}: a row of {mb.row_tokens} for {padded} padded tokens")
    if read.plan.policy.row_shape == "planned" and mb.row_tokens != least:
        raise broken(5, f"{where}: a planned row of {mb.row_tokens}, not {least}")


def _check_budget(read: Reading, mb: MicroBatch, where: str) -> None:
    size, policy = read.plan.micro_batch_size, read.plan.policy
    if size is not None and len(mb.samples) > size:
        raise broken(4, f"{where} holds {len(mb.samples)} samples, micro_batch_size={size}")
    if read.budget is None or mb.padded_tokens <= read.budget * mb.width:
        return
    may_be_over = policy.oversize == "alone" and policy.context_parallel == "fixed"
    is_alone = np.unique(read.set_of[list(mb.samples)]).size == 1 and not mb.pieces
    if not (may_be_over and is_alone):
        ranks = f" * {mb.width} ranks" if mb.width > 1 else ""
        raise broken(
            4,
            f"{where} holds {mb.padded_tokens} padded tokens of {len(mb.samples)} samples, the "
            f"budget is {read.budget * mb.width} (max_tokens_per_gpu="
            f"{read.plan.max_tokens_per_gpu} * cp{ranks})",
        )
