"""Packing and unpacking are inverses, and only response tokens have loss weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.layout import Layout
from megapack.plan import MicroBatch
from megapack.prefixes import DUMMY_TOKENS
from megapack.rows.packed import PackedRow, unpack_row
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch, TensorField, to_padded

pytestmark = pytest.mark.property

LAYOUTS = [
    Layout(),
    Layout(cp=2),
    Layout(cp=4),
    Layout(tp=4, sequence_parallel=True),
    Layout(cp=2, tp=2, sequence_parallel=True, fp8=True),
]


@dataclass(frozen=True)
class Case:
    """Samples as (prompt, response) token counts, and the micro-batch that holds some of them."""

    pairs: list[tuple[int, int]]
    samples: tuple[int, ...]
    layout: Layout
    tail_units: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pair = st.tuples(st.integers(0, 12), st.integers(0, 12)).filter(lambda p: sum(p) > 0)
    pairs = draw(st.lists(pair, min_size=1, max_size=8))
    order = draw(st.permutations(range(len(pairs))))
    kept = draw(st.integers(0, len(pairs)))
    layout = draw(st.sampled_from(LAYOUTS))
    return Case(pairs, tuple(order[:kept]), layout, draw(st.integers(0 if kept else 1, 30)))


def data(case: Case) -> SampleBatch:
    """Token ids, old log-probs and rewards that are all different."""
    total = sum(sum(pair) for pair in case.pairs)
    ids = (torch.arange(total) + 1000).split([sum(pair) for pair in case.pairs])
    old = [x.float() / 7 for x in ids]
    mask = [torch.arange(p + r) >= p for p, r in case.pairs]
    reward = torch.arange(len(ids)).float() + 0.5
    # Sample i has i % 3 images, each filled with its number.
    images = [torch.full((i % 3, 2), i, dtype=torch.int16) for i in range(len(ids))]
    tensors = {
        "images": TensorField(images),
        "sizes": TensorField([torch.ones(i, 1 + i) for i in range(len(ids))], combine="list"),
    }
    fields = {"response_mask": mask, "old": old, "reward": reward}
    return SampleBatch(ids, fields, tensors=tensors)


def pack(case: Case, batch: SampleBatch) -> PackedRow:
    lengths = [batch.length(i) for i in case.samples]
    row_tokens = case.layout.padded_tokens(lengths) + case.tail_units * case.layout.row_alignment
    micro_batch = MicroBatch(case.samples, row_tokens, sum(lengths), 0, row_tokens)
    weights = [1.0 / (i + 2) for i in range(len(batch))]
    return pack_row(batch, micro_batch, case.layout, weights)


def starts(row: PackedRow) -> list[int]:
    """The position of each sample's first token; no samples share positions."""
    assert [branch.samples for branch in row.branches] == [(k,) for k in range(len(row.samples))]
    return [branch.start for branch in row.branches]


@settings(deadline=None)  # a loaded machine must not fail a test
@given(cases())
def test_unpacking_undoes_packing(case: Case) -> None:
    batch = data(case)
    row = pack(case, batch)
    assert row.samples == case.samples
    old = unpack_row(row, row.losses.fields["old"])
    reward = unpack_row(row, row.losses.fields["reward"])
    for k, i in enumerate(case.samples):
        start = starts(row)[k]
        tokens = row.tokens_T[start : start + row.lengths[k]]
        assert torch.equal(tokens, batch.tokens(i))
        counts = batch.response_mask(i).clone()
        counts[0] = False
        assert torch.equal(old[k], batch.field("old", i) * counts)
        assert torch.equal(reward[k], batch.field("reward", i) * counts)


@settings(deadline=None)
@given(cases())
def test_tensors_and_per_sample_fields_follow_their_samples(case: Case) -> None:
    batch = data(case)
    row = pack(case, batch)
    images = row.tensors["images"]
    sizes = row.tensors["sizes"]
    assert isinstance(images, torch.Tensor)
    assert (images.dtype, images.shape[1:]) == (torch.int16, (2,))
    assert images[:, 0].tolist() == [i for i in case.samples for _ in range(i % 3)]
    assert [tuple(size.shape) for size in sizes] == [(i, 1 + i) for i in case.samples]
    assert torch.bincount(row.branch_of_T + 1, minlength=len(case.samples) + 1).tolist() == [
        row.row_tokens - sum(row.lengths),
        *row.lengths,
    ]
    lasts = [int(batch.tokens(i)[-1]) for i in case.samples]
    assert row.tokens_T[row.end_positions_E].tolist() == lasts
    assert torch.equal(row.branch_of_T[row.losses.positions_R], row.losses.sample_of_R)
    assert row.sample_fields["reward"].tolist() == [i + 0.5 for i in case.samples]


@settings(deadline=None)
@given(cases())
def test_positions_restart_at_every_sample_and_dummy(case: Case) -> None:
    row = pack(case, data(case))
    cu_seqlens = row.cu_seqlens_S1.tolist()
    assert cu_seqlens[0] == 0
    assert cu_seqlens[-1] == row.row_tokens == row.position_ids_T.numel()
    spans = torch.diff(row.cu_seqlens_S1).tolist()
    assert row.position_ids_T.tolist() == [t for span in spans for t in range(span)]
    assert row.max_seqlen == max(spans)
    assert cu_seqlens[: len(case.samples)] == starts(row)
    assert min(spans) > 0
    assert all(span % case.layout.sample_alignment == 0 for span in spans)


@settings(deadline=None)
@given(cases())
def test_each_label_is_the_next_token_of_the_same_sample(case: Case) -> None:
    batch = data(case)
    row = pack(case, batch)
    expected = torch.zeros(row.row_tokens, dtype=torch.int64)
    for start, i in zip(starts(row), case.samples, strict=True):
        for t in range(1, batch.length(i)):
            expected[start + t - 1] = batch.tokens(i)[t]
    assert torch.equal(row.labels_T, expected)


@settings(deadline=None)
@given(cases())
def test_only_response_tokens_have_weights(case: Case) -> None:
    batch = data(case)
    row = pack(case, batch)
    expected = torch.zeros(row.row_tokens)
    for start, i in zip(starts(row), case.samples, strict=True):
        prompt, response = case.pairs[i]
        # Without a prompt the first response token is not predicted by any position.
        first = max(prompt, 1)
        expected[start + first - 1 : start + prompt + response - 1] = 1.0 / (i + 2)
    found = torch.zeros(row.row_tokens)
    found[row.losses.positions_R] = row.losses.weights_R
    assert torch.equal(found, expected)
    counts = [batch.num_loss_tokens[i] for i in case.samples]
    assert row.losses.positions_R.numel() == sum(counts)
    assert counts == [max(0, r - (p == 0)) for p, r in (case.pairs[i] for i in case.samples)]


@settings(deadline=None)
@given(cases())
def test_attention_cost_of_a_tail_is_bounded_by_its_length(case: Case) -> None:
    row = pack(case, data(case))
    tail = torch.diff(row.cu_seqlens_S1)[len(case.samples) :]
    assert tail.square().sum() <= max(DUMMY_TOKENS, case.layout.sample_alignment) * tail.sum()
    assert (row.branch_of_T[row.row_tokens - int(tail.sum()) :] == -1).all()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(0, 5),
)
def test_to_padded_undoes_from_padded(spans: list[tuple[int, int]], right: int) -> None:
    columns = max(start + length for start, length in spans) + right
    mask = torch.zeros(len(spans), columns, dtype=torch.int64)
    for b, (start, length) in enumerate(spans):
        mask[b, start : start + length] = 1
    ids = torch.arange(mask.numel()).view_as(mask) * mask
    batch = SampleBatch.from_padded(ids, mask, {"old": ids.float() / 3})
    assert batch.lengths == [length for _, length in spans]
    samples = range(len(batch))
    assert torch.equal(to_padded([batch.tokens(i) for i in samples], mask), ids)
    assert torch.equal(to_padded([batch.field("old", i) for i in samples], mask), ids.float() / 3)
