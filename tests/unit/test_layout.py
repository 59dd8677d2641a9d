from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megapack import Layout
from megapack.layout import config_rows

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("sizes", "sample", "row"),
    [
        ({}, 1, 1),
        ({"cp": 2}, 4, 4),
        ({"cp": 8}, 16, 16),
        ({"tp": 8, "sequence_parallel": True}, 1, 8),
        ({"tp": 8}, 1, 1),
        ({"cp": 3, "tp": 2, "sequence_parallel": True}, 6, 6),
        ({"cp": 2, "tp": 8, "sequence_parallel": True, "fp8": True}, 4, 256),
        ({"cp": 4, "fp8": "mxfp8"}, 8, 128),
        ({"fp8": "blockwise"}, 1, 128),
        ({"tp": 3, "sequence_parallel": True, "fp8": True}, 1, 48),
        ({"cp": 2, "fp8": "nvfp4"}, 4, 64),
        ({"tp": 4, "sequence_parallel": True, "fp8": "nvfp4"}, 1, 128),
    ],
)
def test_alignment(sizes: dict[str, object], sample: int, row: int) -> None:
    layout = Layout(**sizes)  # type: ignore[arg-type]
    assert (layout.sample_alignment, layout.row_alignment) == (sample, row)
    local = layout.row_alignment // layout.cp
    assert local * layout.cp == layout.row_alignment
    assert not layout.sequence_parallel or local % layout.tp == 0
    shards = layout.tp if layout.sequence_parallel else 1
    assert local // shards % layout.fp8_unit_tokens == 0


def test_rounded_rows_keep_the_alignment_and_the_widths() -> None:
    layout = Layout(dp=4, cp=2, fp8=True)
    assert layout.rounding(None) is layout
    rounded = layout.rounding(96)
    assert rounded.row_alignment == 96
    assert layout.rounding(100).row_alignment == 800
    assert rounded.over(2).row_alignment == 192
    assert rounded.over(2) != layout.over(2)
    assert (rounded.sample_alignment, rounded.dp) == (4, 4)


def test_an_empty_row_has_no_padded_tokens_whatever_lengths_there_are() -> None:
    few = Layout(cp=2).rounding(None, (300, 800))
    assert [few.aligned_row_tokens(tokens) for tokens in (0, 1, 601, 1700)] == [0, 600, 1600, 1700]
    assert few.aligned_row_tokens(np.array([0, 4, 601])).tolist() == [0, 600, 1600]
    assert few.padded_tokens([]) == Layout().padded_tokens([]) == 0


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({}, False),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, True),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp4": None}, "mxfp8"),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, "nvfp4"),
    ],
)
def test_rows_of_a_config_of_megatron(config: dict[str, str], rows: object) -> None:
    assert config_rows(SimpleNamespace(**config)) == rows


def test_padded_tokens_have_both_alignments() -> None:
    layout = Layout(cp=8, fp8=True)
    assert layout.aligned_sample_tokens(17) == 32
    assert layout.aligned_sample_tokens(np.array([1, 16, 17])).tolist() == [16, 16, 32]
    assert layout.aligned_row_tokens(64) == 128
    assert layout.aligned_row_tokens(np.array([0, 1, 129])).tolist() == [0, 128, 256]
    assert layout.padded_tokens([17, 17]) == 128
    assert layout.padded_tokens([]) == 0


@pytest.mark.parametrize(
    ("pp", "vpp", "group", "legal"),
    [
        (4, 1, None, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),
        (4, 2, None, [4, 8, 12]),
        (2, 2, 3, [3, 5, 6, 8, 9, 11, 12]),
        (4, 2, 8, [8, 12, 13]),
    ],
)
def test_legal_counts(pp: int, vpp: int, group: int | None, legal: list[int]) -> None:
    layout = Layout(pp=pp, vpp=vpp, microbatch_group_size=group)
    assert [m for m in range(14) if layout.is_legal_count(m)] == legal
    for m in range(legal[-1] + 1):
        assert layout.next_legal_count(m) == min(n for n in legal if n >= m)
        assert layout.next_legal_count(m, "per_rank") == layout.next_legal_count(m)
        rounded = layout.next_legal_count(m, "multiple")
        assert rounded >= m
        assert vpp == 1 or rounded % layout.group_size == 0


def test_sizes() -> None:
    layout = Layout(dp=2, tp=2, pp=4, vpp=2, cp=2, ep=4)
    assert (layout.world_size, layout.num_chunks, layout.group_size) == (32, 8, 4)
    assert (layout.etp, layout.expert_dp) == (1, 2)
    assert not layout.ep_spans_dp
    assert not Layout(dp=2, cp=2, ep=2).ep_spans_dp
    assert Layout(dp=2, tp=2, cp=2, ep=4, etp=2).ep_spans_dp
    assert Layout(dp=2, tp=2, ep=2, etp=2).label == "dp=2 tp=2 pp=1 vpp=1 cp=1 ep=2 etp=2"


def test_etp_of_none_is_tp() -> None:
    assert Layout(tp=4, etp=None) == Layout(tp=4, etp=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "stored"),
    [
        (Layout(), None),
        (Layout(dp=2, tp=2), None),
        (Layout(dp=2, ep=2), None),
        (Layout(dp=2, tp=2, etp=2), 2),
        (Layout(dp=2, tp=2, ep=2, etp=2), None),
        (Layout(dp=2, tp=2, ep=2), 1),
        (Layout(tp=2, ep=2), None),
        (Layout(dp=2, tp=4, ep=2, etp=2), 2),
    ],
)
def test_plans_store_etp_only_where_older_plans_had_another(
    layout: Layout, stored: int | None
) -> None:
    """Older plans had etp=tp with EP, Megatron's default, or 1 where EP spans TP."""
    payload = layout.to_payload()
    assert payload.get("etp") == stored
    assert Layout.from_payload(payload) == layout
