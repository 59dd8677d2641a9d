"""The keys that attention gathers for each path of a row."""

from __future__ import annotations

import pytest
import torch

from megapack.layout import Layout
from megapack.model.attention.packed import packed_seq_params, row_params
from megapack.model.attention.paths import key_paths
from megapack.model.attention.row import RowView, row_view
from megapack.model.attention.te_rows import gathered_params
from megapack.plan import MicroBatch
from megapack.prefixes import EARLIER, Branch, PrefixTable, SharedPrefixes
from megapack.rows.chain import Chain, Link, Piece
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch
from tests.forests import forest, random_forest

pytestmark = pytest.mark.unit


def test_a_key_is_gathered_once_per_path() -> None:
    row = forest([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7, 8]])
    paths = key_paths(row.spans, row.branches)
    assert paths.num_queries == [1, 2, 2, 2, 3, *row.spans[5:]]
    assert paths.num_keys == [1, 3, 5, 5, 4, *row.spans[5:]]
    keys = [own.tolist() for own in paths.order_K.split(paths.num_keys)]
    assert keys[:5] == [[0], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 7, 8, 9]]


def test_a_piece_sees_the_keys_of_earlier_ones() -> None:
    ends = torch.tensor([0, 4, 10], dtype=torch.int32)
    pieces = (Piece(continues=False, start=0, kept_tokens=8), Piece(True, 0, 0))
    link = Link(Chain(pieces, 1, keeps_gradients=True), 1, torch.tensor([0]))
    branch = Branch(start=0, tokens=4, offset=9, parent=EARLIER, samples=(0,), end=4)
    row = RowView(ends, 12, lengths=[4, 6], branches=(branch,), link=link)
    # As Transformer Engine gets it.
    gathered = gathered_params(packed_seq_params(ends, 12, 10), row.paths())
    assert gathered.cu_seqlens_q.tolist() == [0, 4, 10]
    assert gathered.cu_seqlens_kv.tolist() == [0, 12, 18]
    assert row.paths().order_K.tolist() == list(range(18))


def test_layers_share_the_paths_of_a_row() -> None:
    params = random_forest(1).params()
    assert row_view(params).paths() is row_view(params).paths()


def test_the_description_of_a_row_has_branches_only_if_samples_share() -> None:
    batch = SampleBatch([[1, 2, 3, 4], [1, 2, 3, 5, 6]])
    table = PrefixTable(SharedPrefixes((0, 1), (0, 3)), batch.lengths, Layout())

    def branches(row_tokens: int, prefixes: PrefixTable | None) -> tuple[Branch, ...]:
        micro_batch = MicroBatch(
            (0, 1), row_tokens=row_tokens, tokens=9, tokens_sq=41, padded_tokens=row_tokens
        )
        row = pack_row(batch, micro_batch, Layout(), prefixes=prefixes)
        return row_view(row_params(row)).branches

    assert branches(9, None) == ()
    assert [branch.tokens for branch in branches(7, table)] == [2, 2, 3]
