"""`check_plan`: the invariants of a plan, numbered as in the documentation.

1. Megatron accepts every rank's M, and all ranks of a step have the same M. count_rule="per_rank"
   allows different M, each at least 1, on layouts whose DP ranks exchange no tokens of experts.
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
12. Under row_shapes each row has one of so many shapes at most, `Plan.row_shapes`: its length, as
   many segments as it needs, and as long ones. Invariant 5 then says that a row has the shortest
   length that holds its padded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from megapack.base.arrays import Ints, read_lengths, read_sets
from megapack.errors import ConfigError, DataError, PlanError
from megapack.layout import block_ranks
from megapack.plan.order import without_weights
from megapack.prefixes import SharedPrefixes, Spans

if TYPE_CHECKING:
    from megapack.plan.plan import MicroBatch, Part, Plan, StepPlan


def check_plan(plan: Plan, lengths: Sequence[int] | Ints) -> None:
    """Check a plan against its invariants.

    Args:
        plan: any plan, for example one read from a file.
        lengths: real tokens of each sample, as they were planned.

    Raises:
        PlanError: an invariant is broken; the message says which and where.
        DataError: `lengths` is not a sequence of integers of at least 1.
    """
    _Checker(plan, read_lengths(lengths)).run()


class _Checker:
    def __init__(self, plan: Plan, lengths: Ints) -> None:
        if lengths.size != plan.num_samples:
            raise PlanError(
                f"{lengths.size} lengths for a plan of {plan.num_samples} samples; give those that "
                "it was made for"
            )
        self.plan = plan
        self.layout = plan.row_layout
        self.policy = plan.policy
        self.lengths = lengths
        self.aligned = self.layout.aligned_sample_tokens(lengths)
        self.budget = _budget(plan)
        sets = read_sets(plan.rollout_ids, plan.colocate_ids, plan.num_samples)
        self.rollout_of, ids, self.set_of, _ = sets
        self.set_sizes = np.bincount(self.set_of)
        self.ids = tuple(dict.fromkeys(ids)) if ids is not None else tuple(range(lengths.size))
        if plan.prefixes is not None:
            self._check_prefixes(plan.prefixes)
        self.table = plan.prefix_table

    def run(self) -> None:
        for number, step in enumerate(self.plan.steps):
            self._check_counts(step, f"step {number}")
            self._check_sharers(step, f"step {number}")
            self._check_pieces(step, f"step {number}")
            self._check_orders(step, f"step {number}")
        self._check_partition()
        for number, step in enumerate(self.plan.steps):
            self._check_rollouts(step, f"step {number}")
            self._check_rows(step, f"step {number}")
        self._check_colocated()
        self._check_shapes()

    def _check_prefixes(self, prefixes: SharedPrefixes) -> None:
        if self.policy.share_prefixes == "off":
            raise _broken(
                8, f"prefixes of {len(prefixes.order)} samples under share_prefixes='off'"
            )
        try:
            prefixes.check(self.lengths)
        except DataError as error:
            raise _broken(8, str(error)) from None

    def _check_counts(self, step: StepPlan, where: str) -> None:
        layout = self.layout
        rule = self.policy.count_rule
        if len(step.ranks) != layout.dp:
            raise _broken(1, f"{where} has {len(step.ranks)} ranks, the layout has dp={layout.dp}")
        self._check_group_size(step, where)
        counts = [len(rank) for rank in step.ranks]
        for rank, count in enumerate(counts):
            multiple = rule == "multiple" and layout.vpp > 1 and step.group_size
            if not layout.is_legal_count(count, step.group_size) or (multiple and count % multiple):
                raise _broken(1, f"{where} rank {rank} has M={count}, illegal for {layout}")
        if rule == "per_rank":
            if layout.ep_spans_dp or step.num_microbatches is not None:
                raise _broken(
                    1, f"{where}: per_rank needs experts within a DP rank and num_microbatches=None"
                )
        elif set(counts) != {step.num_microbatches}:
            raise _broken(1, f"{where} has M={counts}, not {step.num_microbatches} on every rank")

    def _check_group_size(self, step: StepPlan, where: str) -> None:
        layout = self.layout
        group = step.group_size
        if (group is None) != (layout.vpp == 1):
            raise _broken(1, f"{where} has group_size={group} with vpp={layout.vpp}")
        if group not in (None, layout.group_size):
            raise _broken(1, f"{where} has group_size={group}, the layout has {layout.group_size}")

    def _check_sharers(self, step: StepPlan, where: str) -> None:
        for rank, row in enumerate(step.ranks):
            for k, mb in enumerate(row):
                if not mb.dp_ranks:
                    continue
                here = f"{where} rank {rank} micro-batch {k}"
                width = len(mb.dp_ranks)
                if self.policy.context_parallel != "dynamic":
                    raise _broken(9, f"{here} lies over {width} ranks, context_parallel='fixed'")
                if width > (self.policy.max_width or width):
                    raise _broken(
                        9, f"{here} lies over {width} ranks, max_width={self.policy.max_width}"
                    )
                is_block = width in self.layout.widths and mb.dp_ranks == block_ranks(rank, width)
                if not is_block or mb.dp_ranks[-1] >= len(step.ranks):
                    raise _broken(
                        9, f"{here} lies over the ranks {mb.dp_ranks}; these are no aligned block"
                    )
                others = [r for r in mb.dp_ranks if step.ranks[r][k : k + 1] != (mb,)]
                if others:
                    raise _broken(
                        9,
                        f"{here} lies over the ranks {mb.dp_ranks}, and rank {others[0]} "
                        "runs another row there",
                    )

    def _check_pieces(self, step: StepPlan, where: str) -> None:
        for rank, row in enumerate(step.ranks):
            if any(mb.pieces for mb in row):
                self._check_may_split(f"{where} rank {rank}")
            for chain in step.chains(rank):
                here = f"{where} rank {rank} micro-batches {chain.start} to {chain.stop - 1}"
                self._check_chain([row[k] for k in chain], here)
                group = step.group_size
                if group is not None and chain.start // group != (chain.stop - 1) // group:
                    raise _broken(10, f"{here} are not in one group of G={group}")

    def _check_may_split(self, where: str) -> None:
        reasons = {
            "split_samples='off'": self.policy.split_samples == "off",
            "no budget": self.budget is None,
        }
        for reason, holds in reasons.items():
            if holds:
                raise _broken(10, f"{where} has pieces of samples with {reason}")

    def _check_chain(self, rows: list[MicroBatch], where: str) -> None:
        pieces: dict[int, list[tuple[int, int]]] = {}
        for mb in rows:
            if [part.sample for part in mb.pieces] != list(mb.samples[: len(mb.pieces)]):
                raise _broken(10, f"{where} have pieces that are not the first of their row")
            for sample, begin, end in mb.pieces:
                if not 0 <= sample < self.lengths.size:
                    raise _broken(
                        10, f"{where} have pieces of sample {sample} of {self.lengths.size}"
                    )
                pieces.setdefault(sample, []).append((begin, end))
        unit = self.layout.over(rows[0].width).sample_alignment
        for sample, spans in pieces.items():
            self._check_spans(sample, spans, unit, where)
        if len(pieces) > 1:
            self._check_family(rows[0].pieces, max(map(len, pieces.values())), where)
        for sample in pieces:
            own_set = self.set_of[sample]
            size = int(self.set_sizes[own_set])
            if size > 1 and not pieces.keys() >= set(
                np.flatnonzero(self.set_of == own_set).tolist()
            ):
                raise _broken(
                    10, f"{where} split sample {sample}, one of {size} in a colocated set"
                )
        over = {mb.dp_ranks for mb in rows}
        if len(over) > 1:
            raise _broken(10, f"{where} are a chain, and lie over the DP ranks {sorted(over)}")

    def _check_spans(
        self, sample: int, spans: list[tuple[int, int]], unit: int, where: str
    ) -> None:
        ends = [0, *(end for _, end in spans)]
        if [start for start, _ in spans] != ends[:-1] or ends[-1] != self.lengths[sample]:
            raise _broken(
                10,
                f"{where} have the pieces {spans} of sample {sample}, which has "
                f"{self.lengths[sample]} tokens",
            )
        if any(end % unit for end in ends[:-1]) or sorted(set(ends)) != ends:
            raise _broken(10, f"{where}: pieces end at {ends[1:]}, not at multiples of {unit}")

    def _check_family(self, first: tuple[Part, ...], most: int, where: str) -> None:
        """Check a chain of several samples.

        Args:
            first: the pieces of its first row, which begin all of the samples.
            most: pieces of a sample.
        """
        end = first[0].end
        if most > 2:
            raise _broken(10, f"{where} have {most} pieces of a sample of a family, not 2")
        members = [part.sample for part in first]
        saved, _ = self._saved(members, 1, Spans.of(members, first))
        if any(part.end != end for part in first) or saved != (len(first) - 1) * end:
            raise _broken(
                10,
                f"{where} begin with {len(first)} pieces that end at "
                f"{sorted({part.end for part in first})}, and share {saved} tokens instead of all",
            )

    def _check_orders(self, step: StepPlan, where: str) -> None:
        if not step.orders:
            if any(mb.pieces for mb in step.microbatches) and not self.plan.forward_only:
                raise _broken(11, f"{where} has pieces of samples and no order")
            return
        if self.plan.forward_only or len(step.orders) != len(step.ranks):
            raise _broken(
                11,
                f"{where} has orders of {len(step.orders)} ranks, forward_only="
                f"{self.plan.forward_only}",
            )
        cap = self.plan.live_cap(step)
        for rank, row in enumerate(step.ranks):
            here = f"{where} rank {rank}"
            if len(step.orders[rank]) != self.layout.pp:
                raise _broken(11, f"{here} has orders of {len(step.orders[rank])} stages")
            try:
                order = step.order(rank, self.layout)
            except PlanError as error:
                raise _broken(11, f"{here}: {error}") from None
            if order.has_weights and self.policy.backward != "split":
                raise _broken(11, f"{here} puts weight gradients off under backward='joint'")
            tokens = np.array([mb.row_tokens / (self.layout.cp * mb.width) for mb in row])
            live = order.peak_live(tokens) / self.layout.vpp
            if live.max() > cap:
                raise _broken(
                    11,
                    f"{here} holds {live.max():.0f} tokens per GPU on stage {live.argmax()}, the "
                    f"cap is {cap:.0f}",
                )
        for block in step.meeting_ranks(self.layout):
            difference = _first_difference(step, block)
            if difference:
                raise _broken(11, f"{where}: {difference}")

    def _check_partition(self) -> None:
        times = np.zeros(self.plan.num_samples, dtype=np.int64)
        for number, step in enumerate(self.plan.steps):
            samples = np.array(step.kept_samples, dtype=np.int64)
            if not samples.size:
                raise _broken(2, f"step {number} keeps no sample")
            if samples[0] < 0 or samples[-1] >= times.size:
                raise _broken(2, f"samples {samples[0]} to {samples[-1]} of {times.size}")
            np.add.at(times, samples, 1)
        numbers = {rollout: k for k, rollout in enumerate(self.ids)}
        dropped = np.zeros(len(self.ids), dtype=np.int64)
        for step in self.plan.steps:
            for rollout in step.dropped_rollouts:
                if rollout not in numbers:
                    raise _broken(2, f"dropped rollout {rollout!r} is not in the input")
                dropped[numbers[rollout]] += 1
        times += dropped[self.rollout_of]
        bad = np.flatnonzero(times != 1)
        if bad.size:
            raise _broken(2, f"sample {bad[0]} is planned or dropped {times[bad[0]]} times")

    def _check_rollouts(self, step: StepPlan, where: str) -> None:
        numbers = {rollout: k for k, rollout in enumerate(self.ids)}
        if any(rollout not in numbers for rollout in step.kept_rollouts):
            raise _broken(3, f"{where} keeps a rollout that is not in the input")
        kept = [numbers[rollout] for rollout in step.kept_rollouts]
        dropped = [numbers[rollout] for rollout in step.dropped_rollouts]
        if kept != sorted(set(kept)) or dropped != sorted(set(dropped)):
            raise _broken(3, f"{where}: rollouts are not in order of first appearance")
        whole = np.flatnonzero(np.isin(self.rollout_of, kept))
        if not np.array_equal(whole, step.kept_samples):
            raise _broken(3, f"{where}: its samples are not those of its kept rollouts")
        if dropped and self.policy.unreachable != "drop":
            raise _broken(3, f"{where} drops under unreachable={self.policy.unreachable!r}")
        if dropped and kept and dropped[0] < kept[-1]:
            raise _broken(3, f"{where} drops {self.ids[dropped[0]]!r}, which is not trailing")

    def _check_rows(self, step: StepPlan, where: str) -> None:
        row_lengths = set()
        for rank, row in enumerate(step.ranks):
            for k, mb in enumerate(row):
                self._check_row(mb, f"{where} rank {rank} micro-batch {k}")
                row_lengths.add(mb.row_tokens)
        if self.policy.row_shape == "uniform" and len(row_lengths) > 1:
            raise _broken(
                5, f"{where} has rows of {sorted(row_lengths)[:4]} tokens, not one length"
            )

    def _check_row(self, mb: MicroBatch, where: str) -> None:
        layout = self.layout.over(mb.width)
        samples = list(mb.samples)
        lengths = self.lengths[samples]
        aligned = self.aligned[samples]
        if mb.width > 1:
            aligned = layout.aligned_sample_tokens(lengths)
        spans = Spans.of(samples, mb.pieces)
        lengths = np.where(spans.is_piece, spans.end, lengths) - spans.begin
        aligned = np.where(spans.is_piece, layout.aligned_sample_tokens(spans.end), aligned)
        # A piece attends to the tokens before it, too.
        tokens_sq = int((aligned * aligned - spans.begin * spans.begin).sum())
        shared, shared_sq = self._saved(samples, mb.width, spans)
        padded = layout.aligned_row_tokens(int((aligned - spans.begin).sum()) - shared)
        tokens_sq -= shared_sq
        if mb.shared_tokens != shared:
            raise _broken(8, f"{where}: shared_tokens {mb.shared_tokens}, not {shared}")
        planned = (mb.tokens, mb.tokens_sq, mb.padded_tokens)
        actual = (int(lengths.sum()), tokens_sq, padded)
        if planned != actual:
            raise _broken(4, f"{where}: tokens, tokens_sq, padded_tokens {planned}, not {actual}")
        self._check_budget(mb, where)
        least = padded or layout.aligned_row_tokens(1)
        if mb.row_tokens % layout.row_alignment or mb.row_tokens < least:
            raise _broken(5, f"{where}: a row of {mb.row_tokens} for {padded} padded tokens")
        if self.policy.row_shape == "planned" and mb.row_tokens != least:
            raise _broken(5, f"{where}: a planned row of {mb.row_tokens}, not {least}")

    def _check_shapes(self) -> None:
        shapes, most = self.plan.row_shapes, self.policy.row_shapes
        if shapes is None and most is None:
            return
        if shapes is None or most is None or len(shapes.shapes) > most:
            raise _broken(12, f"row shapes {shapes and shapes.tokens} under row_shapes={most}")
        try:
            needed = self.plan.holding_shapes(shapes, self.lengths)
        except PlanError as error:
            raise _broken(12, str(error)) from None
        if needed != shapes:
            raise _broken(12, f"rows need the shapes {needed.shapes}, the plan has {shapes.shapes}")

    def _saved(self, samples: list[int], width: int, spans: Spans) -> tuple[int, int]:
        """Tokens and squared tokens that a row of these samples saves."""
        if self.table is None or len(samples) < 2:
            return 0, 0
        return self.table.over(width).saved_in_row(np.array(samples), spans)

    def _check_colocated(self) -> None:
        ids = self.plan.colocate_ids
        if ids is None:
            return
        microbatch_of = [""] * self.plan.num_samples
        for number, step in enumerate(self.plan.steps):
            for rank, row in enumerate(step.ranks):
                for k, mb in enumerate(row):
                    for i in mb.begun_samples:
                        microbatch_of[i] = f"step {number} rank {rank} micro-batch {k}"
        first: dict[int | str, int] = {}
        for i, name in enumerate(ids):
            other = first.setdefault(name, i)
            if microbatch_of[i] != microbatch_of[other]:
                raise _broken(
                    7,
                    f"samples {other} and {i} share the colocate id {name!r} and are in "
                    f"{microbatch_of[other]} and in {microbatch_of[i]}",
                )

    def _check_budget(self, mb: MicroBatch, where: str) -> None:
        samples = list(mb.samples)
        size = self.plan.micro_batch_size
        if size is not None and len(samples) > size:
            raise _broken(4, f"{where} holds {len(samples)} samples, micro_batch_size={size}")
        if self.budget is None or mb.padded_tokens <= self.budget * mb.width:
            return
        alone = np.unique(self.set_of[samples]).size == 1
        wide = self.policy.context_parallel == "dynamic"
        if wide or mb.pieces or not alone or self.policy.oversize == "error":
            ranks = f" * {mb.width} ranks" if mb.width > 1 else ""
            raise _broken(
                4,
                f"{where} holds {mb.padded_tokens} padded tokens of {len(samples)} samples, the "
                f"budget is {self.budget * mb.width} (max_tokens_per_gpu="
                f"{self.plan.max_tokens_per_gpu} * cp{ranks})",
            )


def _first_difference(step: StepPlan, block: range) -> str:
    """Where the forwards and backwards of a rank first differ from those of the first rank of the
    block; "" if they do not."""
    first = block[0]
    lines = [without_weights(line) for line in step.orders[first]]
    for rank in block[1:]:
        for stage, line in enumerate(step.orders[rank]):
            if without_weights(line) == lines[stage]:
                continue
            pairs = zip_longest(lines[stage].split(), without_weights(line).split())
            one, other = next(pair for pair in pairs if pair[0] != pair[1])
            return (
                f"ranks {first} to {block[-1]} share rows or exchange tokens of experts, and stage "
                f"{stage} of rank {first} runs {one} where that of rank {rank} runs {other}; give "
                "them one order, that of `joined_chains`"
            )
    return ""


def _budget(plan: Plan) -> int | None:
    try:
        return plan.capacity
    except ConfigError as error:
        raise _broken(4, str(error)) from None


def _broken(number: int, what: str) -> PlanError:
    return PlanError(f"invariant {number} is broken: {what}")
