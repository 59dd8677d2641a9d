"""Context-parallel slices together are the whole row, split as Transformer Engine does."""

from __future__ import annotations

import bisect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.layout import Layout
from megapack.plan import MicroBatch
from megapack.rows.packed import PackedRow
from megapack.rows.packing import pack_row
from megapack.rows.slices import assembly_order, slice_positions, slice_row
from megapack.samples import SampleBatch

pytestmark = pytest.mark.property

RANKS = st.sampled_from([1, 2, 3, 4, 8])


def te_positions(spans: list[int], cp: int, rank: int) -> list[int]:
    """Transformer Engine's index arithmetic for one rank, token by token.

    Follows the kernel of `thd_get_partitioned_indices`: `cu_seqlens` divided by cp give the sample
    of a local token. The first half of a local sample is shifted by `rank` halves, the second half
    by 2 * (cp - 1) - rank halves.
    """
    starts = [0, *itertools.accumulate(spans)]
    local_starts = [start // cp for start in starts]
    found = []
    for token in range(starts[-1] // cp):
        sample = bisect.bisect_right(local_starts, token) - 1
        local_length = local_starts[sample + 1] - local_starts[sample]
        index = token - local_starts[sample]
        halves = rank if index < local_length // 2 else 2 * (cp - 1) - rank
        found.append(starts[sample] + index + halves * (local_length // 2))
    return found


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), RANKS)
def test_slice_positions_equal_transformer_engines(units: list[int], cp: int) -> None:
    spans = [2 * cp * unit for unit in units]
    for rank in range(cp):
        assert slice_positions(spans, cp, rank).tolist() == te_positions(spans, cp, rank)


@st.composite
def rows(draw: st.DrawFn) -> tuple[PackedRow, int]:
    """A whole row with a different value at each token, and the number of CP ranks."""
    cp = draw(RANKS)
    pair = st.tuples(st.integers(0, 30), st.integers(0, 30)).filter(lambda p: sum(p) > 0)
    pairs = draw(st.lists(pair, max_size=5))
    layout = Layout(cp=cp, tp=2, sequence_parallel=draw(st.booleans()))
    lengths = [p + r for p, r in pairs]
    ids = (torch.arange(sum(lengths)) + 1).split(lengths)
    mask = [torch.arange(p + r) >= p for p, r in pairs]
    # A batch cannot be empty, so one more sample is added that no row holds.
    values = [x / 7 for x in [*ids, torch.ones(1)]]
    masks = [*mask, torch.ones(1, dtype=torch.bool)]
    batch = SampleBatch([*ids, torch.ones(1).long()], {"response_mask": masks, "old": values})
    tail = draw(st.integers(0 if pairs else 1, 20)) * layout.row_alignment
    tokens = layout.padded_tokens(lengths) + tail
    micro_batch = MicroBatch(tuple(range(len(pairs))), tokens, sum(lengths), 0, tokens)
    return pack_row(batch, micro_batch, layout, [1 / (i + 2) for i in range(len(batch))]), cp


@settings(deadline=None)
@given(rows())
def test_the_slices_of_all_ranks_make_the_whole_row(row_and_cp: tuple[PackedRow, int]) -> None:
    row, cp = row_and_cp
    parts = [slice_row(row, cp, rank) for rank in range(cp)]
    order = assembly_order(row.cu_seqlens_S1.diff().tolist(), cp)
    # Without images a row has no features.
    names = [name for name, value in vars(row).items() if name.endswith("_T") and value is not None]
    assert {"tokens_T", "position_ids_T", "labels_T", "branch_of_T"} <= set(names)
    for name in names:
        sliced = [getattr(part, name) for part in parts]
        assert {len(x) for x in sliced} == {row.row_tokens // cp}
        assert torch.equal(torch.cat(sliced)[order], getattr(row, name)), name


@settings(deadline=None)
@given(rows())
def test_each_loss_position_is_on_exactly_one_rank(row_and_cp: tuple[PackedRow, int]) -> None:
    row, cp = row_and_cp
    parts = [slice_row(row, cp, rank) for rank in range(cp)]
    found = torch.cat([part.row_positions_T[part.losses.positions_R] for part in parts])
    in_order = found.argsort()
    assert torch.equal(found[in_order], row.losses.positions_R)
    for name in ("label_index_R", "sample_of_R", "weights_R"):
        values_R = torch.cat([getattr(part.losses, name) for part in parts])
        assert torch.equal(values_R[in_order], getattr(row.losses, name)), name
    for name, expected_R in row.losses.fields.items():
        values_R = torch.cat([part.losses.fields[name] for part in parts])
        assert torch.equal(values_R[in_order], expected_R), name
