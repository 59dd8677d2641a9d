"""The adapter of each token of a row, as layers are told it."""

from __future__ import annotations

import dataclasses

import pytest

from megapack import (
    Layout,
    MicroBatch,
    Policy,
    ScheduleError,
    SharedPrefixes,
    build_dp_schedule,
)
from megapack.model import adapters
from megapack.rows.packed import PackedRow
from megapack.rows.packing import pack_row
from megapack.rows.slices import slice_row
from megapack.samples import SampleBatch

IDS = ["b", 7, "b", 3]


def packed(layout: Layout) -> PackedRow:
    batch = SampleBatch([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]])
    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=64, adapter_ids=IDS)
    (row,) = plan.microbatches
    assert row.samples == (3, 1, 0, 2)
    return pack_row(batch, row, layout, adapter_ids=plan.adapter_ids)


def told(row: PackedRow, ids: list[int | str]) -> list[int]:
    adapters.begin_row(row)
    return adapters.token_adapters(ids).tolist()


def test_indices_follow_the_layer_and_padding_the_sample_before_it() -> None:
    row = packed(Layout(tp=2, sequence_parallel=True, cp=2))
    assert row.padded_lengths[:4] == (8, 4, 4, 4)
    assert row.adapters == (3, 7, "b")
    whole = [0] * 8 + [1] * 4 + [2] * (row.row_tokens - 12)
    assert told(row, [3, 7, "b"]) == whole
    assert told(row, ["b", 5, 3, 7]) == [(2, 3, 0)[k] for k in whole]
    for rank in range(2):
        part = slice_row(row, 2, rank)
        assert told(part, [3, 7, "b"]) == [whole[k] for k in part.row_positions_T.tolist()]


@pytest.mark.parametrize("tail", [0, 512, 1024])
def test_turns_that_continue_each_other_have_the_adapter_of_their_sequence(tail: int) -> None:
    tokens = [[1, 2, 3], [1, 2, 3, 4, 5], [7, 8, 9, 6], [7, 8, 9, 6, 5, 4]]
    plan = build_dp_schedule(
        [*map(len, tokens)],
        layout=Layout(),
        max_tokens_per_gpu=64,
        adapter_ids=["a", "a", "b", "b"],
        prefixes=SharedPrefixes.from_samples(tokens),
        policy=Policy(share_prefixes="auto"),
    )
    (mb,) = plan.microbatches
    assert mb.row_tokens == 11
    row = pack_row(
        SampleBatch(tokens),
        dataclasses.replace(mb, row_tokens=11 + tail),
        Layout(),
        prefixes=plan.prefix_table([*map(len, tokens)]),
        adapter_ids=plan.adapter_ids,
    )
    assert told(row, ["a", "b"]) == [0] * 5 + [1] * (6 + tail)


def test_a_padding_micro_batch_has_the_first_adapter() -> None:
    layout = Layout()
    empty = MicroBatch((), 4, 0, 0, 0)
    row = pack_row(SampleBatch([[1]]), empty, layout, adapter_ids=["a"])
    assert told(row, ["x", "a"]) == [0] * 4


def test_a_row_without_adapters_and_a_layer_without_one_are_refused() -> None:
    row = packed(Layout())
    with pytest.raises(ScheduleError, match="are not in"):
        told(row, ["b", 7])
    batch = SampleBatch([[1, 2]])
    (plain,) = build_dp_schedule([2], layout=Layout(), max_tokens_per_gpu=8).microbatches
    adapters.begin_row(pack_row(batch, plain, Layout()))
    with pytest.raises(ScheduleError, match=r"build_dp_schedule\(adapter_ids=\)"):
        adapters.token_adapters(["b"])
    adapters.begin_row(None)
    with pytest.raises(ScheduleError, match="no row with adapters runs"):
        adapters.token_adapters(["b"])
