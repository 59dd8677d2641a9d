"""The keys that attention gathers for each path of a row."""

from __future__ import annotations

import pytest

from megapack.layout import Layout
from megapack.model.attention.packed import row_params
from megapack.model.attention.paths import key_paths
from megapack.model.attention.row import row_view
from megapack.plan import MicroBatch
from megapack.prefixes import Branch, PrefixTable, SharedPrefixes
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


def test_layers_share_the_paths_of_a_row() -> None:
    params = random_forest(1).params()
    assert row_view(params).paths() is row_view(params).paths()


def test_the_description_of_a_row_has_branches_only_if_samples_share() -> None:
    batch = SampleBatch([[1, 2, 3, 4], [1, 2, 3, 5, 6]])
    table = PrefixTable(SharedPrefixes.from_samples([[1, 2, 3, 4], [1, 2, 3, 5, 6]]), 2, Layout())

    def branches(row_tokens: int, prefixes: PrefixTable | None) -> tuple[Branch, ...]:
        micro_batch = MicroBatch(
            (0, 1), row_tokens=row_tokens, tokens=9, tokens_sq=41, padded_tokens=row_tokens
        )
        row = pack_row(batch, micro_batch, Layout(), prefixes=prefixes)
        return row_view(row_params(row)).branches

    assert branches(9, None) == ()
    assert [branch.tokens for branch in branches(7, table)] == [2, 2, 3]
