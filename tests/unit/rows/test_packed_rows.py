"""Packed rows with small numbers that can be checked by eye."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter
from typing import Any

import pytest
import torch

from megapack.errors import DataError
from megapack.layout import Layout
from megapack.model.attention.packed import row_params
from megapack.model.attention.row import row_view
from megapack.plan import MicroBatch, Part
from megapack.prefixes import Branch, PrefixTable, SharedPrefixes, row_branches
from megapack.rows.packed import PackedRow, unpack_row
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch

pytestmark = pytest.mark.unit

TOKENS = [[5, 6, 7], [8, 9], [4], [1, 2, 3, 4]]


def batch(**fields: list[Any]) -> SampleBatch:
    return SampleBatch(TOKENS, fields)


def row_of(
    samples: tuple[int, ...],
    row_tokens: int,
    layout: Layout | None = None,
    data: SampleBatch | None = None,
    **kwargs: Any,
) -> PackedRow:
    layout = layout or Layout()
    data = data or batch()
    aligned = [layout.aligned_sample_tokens(data.length(i)) for i in samples]
    micro_batch = MicroBatch(
        samples,
        row_tokens,
        sum(data.length(i) for i in samples),
        sum(n * n for n in aligned),
        layout.padded_tokens(data.length(i) for i in samples),
    )
    return pack_row(data, micro_batch, layout, **kwargs)


def shared_row(
    tokens: list[list[int]] | None = None, order: tuple[int, ...] | None = None, **kwargs: Any
) -> PackedRow:
    """A row of all samples, which shares what they have in common."""
    tokens = tokens or [[5, 6, 7], [5, 6, 8]]
    data = kwargs.pop("data", None) or SampleBatch(tokens)
    layout = kwargs.pop("layout", Layout())
    table = PrefixTable(SharedPrefixes.from_samples(tokens), data.lengths, layout)
    samples = order or tuple(range(len(tokens)))
    num_tokens = sum(map(len, tokens))
    held = sum(branch.tokens for branch in branches_of(samples, tokens, layout, table))
    micro_batch = MicroBatch(samples, held, num_tokens, 0, held)
    return pack_row(data, micro_batch, layout, prefixes=table, **kwargs)


def branches_of(
    samples: tuple[int, ...], tokens: list[list[int]], layout: Layout, table: PrefixTable
) -> list[Branch]:
    return row_branches(samples, [len(tokens[i]) for i in samples], layout, table)


def test_the_docstring_example_is_correct() -> None:
    example = inspect.getdoc(PackedRow)
    assert example is not None
    lines = re.findall(r"^\s+([\w.]+)\s+((?:-?\d+ )*-?\d+)$", example, re.MULTILINE)
    names = [
        "tokens_T",
        "position_ids_T",
        "labels_T",
        "branch_of_T",
        "positions_N",
        "losses.positions_R",
        "losses.label_index_R",
        "losses.sample_of_R",
        "end_positions_E",
        "cu_seqlens_S1",
    ]
    without = [name for name in names if name != "positions_N"]
    assert [name for name, _ in lines] in ([*names, *names, *names], [*without, *names, *names])
    piece = pack_row(batch(), MicroBatch((3,), 2, 2, 0, 2, pieces=(Part(3, 2, 4),)), Layout())
    count = len(names)
    rows = [row_of((0, 1), 6)] * (len(lines) - 2 * count) + [shared_row()] * count + [piece] * count
    for row, (name, numbers) in zip(rows, lines, strict=True):
        assert attrgetter(name)(row).tolist() == [int(number) for number in numbers.split()], name


def test_alignment_pads_inside_each_sample() -> None:
    # cp=2: each sample is padded to a multiple of 4 tokens.
    row = row_of((0, 1, 2), 12, Layout(cp=2))
    assert row.tokens_T.tolist() == [5, 6, 7, 0, 8, 9, 0, 0, 4, 0, 0, 0]
    assert row.position_ids_T.tolist() == [0, 1, 2, 3] * 3
    assert row.labels_T.tolist() == [6, 7, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]
    assert row.branch_of_T.tolist() == [0, 0, 0, -1, 1, 1, -1, -1, 2, -1, -1, -1]
    assert row.losses.positions_R.tolist() == [0, 1, 4]
    assert row.cu_seqlens_S1.tolist() == [0, 4, 8, 12]
    assert row.max_seqlen == 4


@pytest.mark.parametrize("cp", [1, 2])
def test_a_turn_that_the_next_one_begins_with_has_no_tokens_of_its_own(cp: int) -> None:
    turns = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 1, 2], [5, 6, 7]]
    masks = [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1], [0, 0, 1]]
    row = shared_row(turns, data=SampleBatch(turns, {"response_mask": masks}), layout=Layout(cp=cp))
    end = [0] if cp == 2 else []
    assert row.tokens_T.tolist() == [5, 6, 7, 8, 9, 1, 2, *end]
    assert row.labels_T.tolist() == [6, 7, 8, 9, 1, 2, 0, *end]
    # Layers see one sequence, and no branches.
    assert row.cu_seqlens_S1.tolist() == [0, 7 + len(end)]
    assert row_view(row_params(row)).branches == ()
    # The loss of a turn stands where its own tokens are predicted; its end is inside of the row.
    pairs = zip(row.losses.sample_of_R.tolist(), row.losses.positions_R.tolist(), strict=True)
    assert list(pairs) == [(0, 2), (0, 3), (1, 5), (2, 1)]
    assert row.end_positions_E.tolist() == [4, 6, 2]
    assert row.branch_of_T.tolist() == [0, 0, 0, 1, 1, 2, 2, *([-1] if end else [])]
    samples_of = [branch.samples for branch in row.branches]
    assert samples_of == [(0, 1, 2), (0, 1), (1,)]


def test_response_tokens_have_the_weight_of_their_sample() -> None:
    data = batch(response_mask=[[0, 0, 1], [1, 1], [1], [0, 1, 0, 1]])
    row = row_of((0, 1, 2, 3), 10, data=data, sample_weights=[0.5, 0.25, 8.0, 2.0])
    assert row.labels_T[row.losses.positions_R].tolist() == [7, 9, 2, 4]
    assert row.losses.positions_R.tolist() == [1, 3, 6, 8]
    assert row.losses.weights_R.tolist() == [0.5, 0.25, 2.0, 2.0]
    assert row.losses.sample_of_R.tolist() == [0, 1, 3, 3]


def test_a_sample_of_weight_0_has_no_loss_positions() -> None:
    row = row_of((0, 1), 5, sample_weights=[0.0, 1.0, 1.0, 1.0])
    assert row.losses.positions_R.tolist() == [3]


def test_fields_have_the_values_of_the_labels() -> None:
    data = batch(old=[[9, 1.5, 2.5], [9, 3.5], [9], [9, 4, 5, 6]], advantage=[1, -2, 3, 0.5])
    row = row_of((0, 1, 2), 8, data=data)
    assert row.losses.fields["old"].tolist() == [1.5, 2.5, 3.5]
    assert row.losses.fields["advantage"].tolist() == [1, 1, -2]


def test_a_row_has_only_the_requested_fields() -> None:
    data = batch(old=[1, 2, 3, 4], ref=[1, 2, 3, 4])
    assert set(row_of((0,), 3, data=data).losses.fields) == {"old", "ref"}
    assert set(row_of((0,), 3, data=data, field_names=["ref"]).losses.fields) == {"ref"}
    assert not row_of((0,), 3, data=data, field_names=()).losses.fields


def test_a_padding_micro_batch_is_all_dummies() -> None:
    row = row_of((), 8, Layout(cp=2), batch(old=[1.0, 2.0, 3.0, 4.0]))
    assert row.samples == row.lengths == row.branches == ()
    losses = row.losses
    empty = [row.positions_N, row.set_of_n, row.end_positions_E, row.end_samples_E]
    empty += [losses.positions_R, losses.label_index_R, losses.sample_of_R]
    for value in (*empty, losses.head_positions_U):
        assert (value.shape, value.dtype) == ((0,), torch.int64)
    assert (row.losses.weights_R.shape, row.losses.weights_R.dtype) == ((0,), torch.float32)
    assert (row.losses.fields["old"].shape, row.losses.fields["old"].dtype) == ((0,), torch.float32)
    assert row.branch_of_T.tolist() == [-1] * 8
    assert row.cu_seqlens_S1.tolist() == [0, 8]
    assert unpack_row(row, row.losses.weights_R) == []


@pytest.mark.parametrize(
    ("layout", "row_tokens", "spans"),
    [
        (Layout(), 3, [3]),
        (Layout(), 3 + 22, [3, 22]),
        (Layout(), 3 + 1100, [3, 512, 512, 76]),
        (Layout(cp=3), 6 + 1050, [6, *[510] * 2, 30]),
        (Layout(cp=512), 1024 * 3, [1024] * 3),
    ],
)
def test_a_tail_is_divided_into_short_dummies(
    layout: Layout, row_tokens: int, spans: list[int]
) -> None:
    row = row_of((0,), row_tokens, layout)
    assert torch.diff(row.cu_seqlens_S1).tolist() == spans == list(row.padded_lengths)
    assert row.losses.positions_R.tolist() == [0, 1]
    assert (row.branch_of_T[3:] == -1).all()
    assert not row.labels_T[3:].any()


@pytest.mark.parametrize(("layout", "padded"), [(Layout(), 5), (Layout(cp=2), 8)])
def test_a_row_too_short_for_its_samples_is_refused(layout: Layout, padded: int) -> None:
    # As with a plan for another layout: tokens are right, but this alignment needs more.
    with pytest.raises(DataError, match=rf"samples \(0, 1\).*{padded}.*{padded - 1}"):
        row_of((0, 1), padded - 1, layout)
    assert row_of((0, 1), padded, layout).row_tokens == padded


def test_a_moved_row_has_all_attributes() -> None:
    row = row_of((0, 1), 6, data=batch(old=[1.0, 2.0, 3.0, 4.0]))
    moved = row.to("meta")
    assert moved.samples == row.samples
    assert moved.max_seqlen == row.max_seqlen
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    # All but positions_N, which stays on the host.
    assert len(tensors) == len([v for v in vars(row).values() if isinstance(v, torch.Tensor)])
    on_device = [t for t in tensors if t is not moved.positions_N]
    assert {t.device.type for t in [*on_device, *moved.losses.fields.values()]} == {"meta"}
    assert moved.positions_N is row.positions_N
    assert moved.branches is row.branches
    assert row.tokens_T.device.type == row.losses.fields["old"].device.type == "cpu"


def test_colocated_samples_share_a_set_number() -> None:
    data = SampleBatch([[1, 2]] * 4)
    row = row_of((0, 1, 2, 3), 8, data=data, colocate_ids=["b", "a", "b", 7])
    assert row.set_of_n.tolist() == [0, 1, 0, 2]
    assert row_of((), 1, data=data, colocate_ids=["b", "a", "b", 7]).set_of_n.tolist() == []


def test_per_sample_fields_are_also_stored_per_sample() -> None:
    data = SampleBatch([[1, 2], [3], [4, 5, 6]], {"sign": [1, -1, 1], "token": [[1, 2], [3], [4]]})
    row = row_of((2, 1), 4, data=data)
    assert set(row.sample_fields) == {"sign"}
    assert row.sample_fields["sign"].tolist() == [1, -1]
    assert row.to("cpu").sample_fields["sign"].tolist() == [1, -1]
    padding = row_of((), 1, data=data)
    assert padding.sample_fields["sign"].shape == (0,)
    assert padding.sample_fields["sign"].dtype == torch.int64
