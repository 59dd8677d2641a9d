"""Rows that hold common beginnings once have the tokens, losses and outputs of rows that do not."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.errors import DataError
from megapack.layout import Layout
from megapack.plan import MicroBatch
from megapack.prefixes import PrefixTable, SharedPrefixes, row_branches, sequences
from megapack.rows.packed import PackedRow, RowTokens, unpack_row
from megapack.rows.packing import pack_row
from megapack.rows.slices import slice_row
from megapack.samples import SampleBatch

pytestmark = pytest.mark.property

LAYOUTS = [
    Layout(),
    Layout(cp=2),
    Layout(cp=4),
    Layout(tp=4, sequence_parallel=True),
    Layout(cp=2, tp=2, sequence_parallel=True),
]
MAX_DEPTHS = 2


@dataclass(frozen=True)
class Case:
    """Samples, those of them that are in the row, and the layout."""

    tokens: list[list[int]]
    masks: list[list[int]]
    weights: list[float]
    samples: tuple[int, ...]
    layout: Layout
    num_depths: int
    tail_units: int

    def prefixes(self) -> SharedPrefixes:
        return SharedPrefixes.from_samples(self.tokens, mtp_num_layers=self.num_depths)


@st.composite
def cases(draw: st.DrawFn, *, always_shares: bool = False) -> Case:
    """Each sample continues a beginning of an earlier one, so there are deep trees, whole
    duplicates, samples that end inside of others, and samples of one token.

    Args:
        always_shares: two samples of the row have 20 tokens in common, of which they share 16 on
            any of the layouts.
    """
    ids = st.lists(st.integers(0, 2), max_size=24)
    tokens = [draw(ids) or [1]]
    if always_shares:
        tokens = [[*range(20), *tokens[0]], list(range(20))]
    for _ in range(draw(st.integers(0, 6))):
        other = draw(st.sampled_from(tokens))
        num_kept = draw(st.sampled_from([len(other), len(other) - 1, len(other) // 2, 0]))
        tokens.append(other[:num_kept] + draw(ids) or [0])
    masks = [
        draw(st.lists(st.integers(0, 1), min_size=len(own), max_size=len(own))) for own in tokens
    ]
    weights = draw(
        st.lists(st.sampled_from([0.0, 0.5, 1.5]), min_size=len(tokens), max_size=len(tokens))
    )
    order = draw(st.permutations(range(len(tokens))))
    kept = len(tokens)
    if not always_shares and draw(st.integers(0, 3)) == 3:
        kept = draw(st.integers(0, len(tokens)))
    layout = draw(st.sampled_from(LAYOUTS))
    depths = draw(st.integers(0, MAX_DEPTHS))
    tail = draw(st.integers(0 if kept else 1, 3))
    return Case(tokens, masks, weights, tuple(order[:kept]), layout, depths, tail)


def data(case: Case) -> SampleBatch:
    """Values that differ at every token of every sample."""
    numbers = torch.arange(sum(map(len, case.tokens))).split([len(own) for own in case.tokens])
    fields: dict[str, Any] = {
        "response_mask": case.masks,
        "old": [own.float() / 7 for own in numbers],
        "kind": list(numbers),
        "reward": [i + 0.5 for i in range(len(case.tokens))],
    }
    return SampleBatch(case.tokens, fields)


def pack(
    case: Case, *, shared: bool, batch: SampleBatch | None = None, depths: int = 0
) -> PackedRow:
    table = PrefixTable(case.prefixes(), [*map(len, case.tokens)], case.layout) if shared else None
    lengths = [len(case.tokens[i]) for i in case.samples]
    held = sum(b.tokens for b in row_branches(case.samples, lengths, case.layout, table))
    unit = case.layout.row_alignment
    row_tokens = -(-held // unit) * unit + case.tail_units * unit
    micro_batch = MicroBatch(case.samples, row_tokens, sum(lengths), 0, held)
    return pack_row(
        batch or data(case),
        micro_batch,
        case.layout,
        case.weights,
        prefixes=table,
        num_ahead=depths,
    )


def losses(row: RowTokens) -> list[tuple[Any, ...]]:
    """All that is known of each loss but its position."""
    columns = [
        row.losses.label_index_R,
        row.losses.sample_of_R,
        row.losses.weights_R,
        row.labels_T[row.losses.positions_R],
        row.tokens_T[row.losses.positions_R],
        row.position_ids_T[row.losses.positions_R],
        *(row.losses.fields[name] for name in sorted(row.losses.fields)),
    ]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def common(one: list[int], other: list[int]) -> int:
    return next(
        (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@settings(deadline=None)  # a loaded machine must not fail a test
@given(cases())
def test_each_token_of_each_sample_is_in_the_row(case: Case) -> None:
    row = pack(case, shared=True)
    positions = row.positions_N.split(list(row.lengths)) if row.lengths else ()
    for k, (i, own) in enumerate(zip(case.samples, positions, strict=True)):
        assert row.tokens_T[own].tolist() == case.tokens[i]
        assert row.position_ids_T[own].tolist() == list(range(len(case.tokens[i])))
        assert row.labels_T[own[:-1]].tolist() == case.tokens[i][1:]
        # Another sample may go on where this one ends.
        others = [own[-1] in other for other in positions if other is not own]
        assert row.labels_T[own[-1]] == 0 or any(others)
        # Context is to the left: a token comes after those that it attends to.
        assert own.tolist() == sorted(own.tolist())
        assert all(k in row.branches[b].samples for b in row.branch_of_T[own].tolist())
    held = row.branch_of_T >= 0
    assert set(row.positions_N.tolist()) == set(held.nonzero().squeeze(1).tolist())
    assert row.tokens_T[~held].eq(0).all()
    assert row.labels_T[~held].eq(0).all()
    lasts = [case.tokens[i][-1] for i in case.samples]
    assert row.tokens_T[row.end_positions_E].tolist() == lasts
    ends = [int(own[-1]) for own in positions]
    assert row.end_positions_E.tolist() == ends
    # Samples that end at one place are equal.
    pairs = {(end, tuple(case.tokens[i])) for end, i in zip(ends, case.samples, strict=True)}
    assert len(pairs) == len(set(ends))


@settings(deadline=None)
@given(cases())
def test_two_samples_share_just_the_positions_of_their_common_tokens(case: Case) -> None:
    """Samples that share c tokens share c - 1 - depths positions, aligned; counted pair by pair.
    One that another begins with may share all."""
    row = pack(case, shared=True)
    positions = row.positions_N.split(list(row.lengths)) if row.lengths else ()
    unit = case.layout.sample_alignment
    for (i, one), (j, other) in itertools.combinations(
        zip(case.samples, positions, strict=True), 2
    ):
        both = common(case.tokens[i], case.tokens[j])
        least = max(0, both - 1 - case.num_depths) // unit * unit
        is_whole = both == min(len(case.tokens[i]), len(case.tokens[j]))
        found = len(set(one.tolist()) & set(other.tolist()))
        assert least <= found <= (both if is_whole else least)


@settings(deadline=None)
@given(cases())
def test_branches_tile_the_row(case: Case) -> None:
    row = pack(case, shared=True)
    start = sum(branch.tokens for branch in row.branches)
    aligned = [case.layout.aligned_sample_tokens(len(case.tokens[i])) for i in case.samples]
    assert start <= sum(aligned)
    joined = [sequence.tokens for sequence in sequences(row.branches)]
    assert joined == [*row.padded_lengths[: len(joined)]]
    assert sum(joined) == start
    assert row.cu_seqlens_S1.diff().tolist() == list(row.padded_lengths)
    assert sum(row.padded_lengths) == row.row_tokens
    assert row.max_seqlen >= max(aligned, default=0)


@settings(deadline=None)
@given(cases())
def test_losses_and_outputs_equal_those_of_the_row_without_sharing(case: Case) -> None:
    shared = pack(case, shared=True)
    apart = pack(case, shared=False)
    assert losses(shared) == losses(apart)
    assert torch.equal(shared.set_of_n, apart.set_of_n)
    for name, values_n in apart.sample_fields.items():
        assert torch.equal(shared.sample_fields[name], values_n)
    values_R = torch.arange(apart.losses.weights_R.numel()) + 1.0
    found = unpack_row(shared, values_R)
    assert [x.tolist() for x in found] == [x.tolist() for x in unpack_row(apart, values_R)]
    for i, own in zip(case.samples, found, strict=True):
        counts = [bool(m) and k > 0 for k, m in enumerate(case.masks[i])]
        assert own.bool().tolist() == [case.weights[i] > 0 and c for c in counts]
    assert apart.losses.head_index_R is None


def check_head(row: RowTokens) -> None:
    unique_U = row.losses.head_positions_U
    assert unique_U.unique().numel() == unique_U.numel()
    index_R = row.losses.head_index_R
    if index_R is None:
        assert torch.equal(unique_U, row.losses.positions_R)
    else:
        assert unique_U.numel() < row.losses.positions_R.numel()
        assert torch.equal(unique_U[index_R], row.losses.positions_R)


@settings(deadline=None)
@given(cases())
def test_rows_ahead_have_the_losses_of_rows_without_sharing(case: Case) -> None:
    shared = pack(case, shared=True, depths=case.num_depths)
    apart = pack(case, shared=False, depths=case.num_depths)
    for row in (shared, *shared.ahead):
        check_head(row)
    for depth, (one, other) in enumerate(zip(shared.ahead, apart.ahead, strict=True), start=1):
        assert losses(one) == losses(other)
        # Where a sample has no token so far ahead, another one may go on.
        lengths = torch.tensor(shared.lengths, dtype=torch.int64)
        offset_N = shared.position_ids_T[shared.positions_N]
        aheads = {"tokens_T": depth, "labels_T": depth + 1, "position_ids_T": depth}
        for name, ahead in aheads.items():
            known_N = offset_N + ahead < lengths.repeat_interleave(lengths)
            values_N = getattr(one, name)[shared.positions_N]
            assert torch.equal(values_N[known_N], getattr(other, name)[apart.positions_N][known_N])
        ids_N = one.tokens_T[shared.positions_N].split(list(shared.lengths) or [0])
        for i, own in zip(case.samples, ids_N, strict=bool(case.samples)):
            tokens = case.tokens[i][depth:]
            assert own.tolist()[: len(tokens)] == tokens


@settings(deadline=None)
@given(cases())
def test_slices_divide_losses_and_ends(case: Case) -> None:
    cp = case.layout.cp
    row = pack(case, shared=True, depths=case.num_depths)
    parts = [slice_row(row, cp, rank) for rank in range(cp)]
    values_R = torch.arange(row.losses.weights_R.numel()) + 1.0
    whole = unpack_row(row, values_R)
    value_of = dict(zip(row.losses.label_index_R.tolist(), values_R.tolist(), strict=True))
    summed = [torch.zeros_like(own) for own in whole]
    for part in parts:
        own_R = torch.tensor([value_of[i] for i in part.losses.label_index_R.tolist()])
        for total, own in zip(summed, unpack_row(part, own_R), strict=True):
            total.add_(own)
    assert all(torch.equal(a, b) for a, b in zip(summed, whole, strict=True))
    ends = sorted(
        (k, int(part.row_positions_T[position]))
        for part in parts
        for k, position in zip(part.end_samples_E.tolist(), part.end_positions_E, strict=True)
    )
    assert ends == list(enumerate(row.end_positions_E.tolist()))
    for one, *own_parts in zip(
        (row, *row.ahead), *((part, *part.ahead) for part in parts), strict=True
    ):
        for part in own_parts:
            check_head(part)
            assert part.tokens_T.numel() == row.row_tokens // cp
        both = [loss for part in own_parts for loss in losses(part)]
        assert sorted(both) == losses(one)
        assert [part.losses.weights_R.dtype for part in own_parts] == [torch.float32] * cp


@settings(deadline=None)
@given(cases(always_shares=True), st.data())
def test_a_changed_token_of_a_shared_position_is_refused(case: Case, more: st.DataObject) -> None:
    whole = pack(case, shared=True)
    shared = [
        (k, branch.offset + t)
        for branch in whole.branches
        if len(branch.samples) > 1
        for k in branch.samples
        # The last position's label counts too, unless the sample ends there.
        for t in range(branch.tokens + 1)
        if branch.offset + t < whole.lengths[k]
    ]
    assert shared
    k, at = more.draw(st.sampled_from(shared))
    i = case.samples[k]
    tokens = [list(own) for own in case.tokens]
    tokens[i][at] += 7
    batch = data(dataclasses.replace(case, tokens=tokens))
    with pytest.raises(DataError, match=rf"samples .*\b{i}\b.* differ at token {at}; plan with"):
        pack(case, shared=True, batch=batch)


@settings(deadline=None)
@given(cases())
def test_depths_that_the_prefixes_do_not_know_of_are_refused(case: Case) -> None:
    """Prefixes for fewer depths work where the labels further ahead are equal by chance."""
    without = dataclasses.replace(case, num_depths=0)
    apart = pack(without, shared=False, depths=MAX_DEPTHS)
    for depth in range(1, MAX_DEPTHS + 1):
        with contextlib.suppress(DataError):
            row = pack(without, shared=True, depths=depth)
            assert losses(row.ahead[-1]) == losses(apart.ahead[depth - 1])


def test_samples_that_differ_right_after_their_shared_label_are_refused() -> None:
    tokens = [[5, 6, 7], [5, 6, 8]]
    ones = [[1] * 3] * 2
    case = Case(tokens, ones, [1.0, 1.0], (0, 1), Layout(), 0, 0)
    with pytest.raises(DataError, match=r"samples of \(0, 1\) .* 2 tokens ahead; make the prefix"):
        pack(case, shared=True, depths=1)
    known = pack(dataclasses.replace(case, num_depths=1), shared=True, depths=1)
    assert sum(branch.tokens for branch in known.branches) == 6
    assert known.ahead[0].labels_T.tolist() == [7, 0, 0, 8, 0, 0]
