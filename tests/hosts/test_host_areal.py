"""megapack.hosts.areal through AReaL's own signatures, on one rank."""

from __future__ import annotations

import types
from typing import Any

import pytest

from megapack import Layout
from megapack.hosts import areal

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures("partitions")]


def spec(max_tokens: int, n_mbs: int = 1, divisor: int = 1) -> Any:
    """AReaL's MicroBatchSpec."""
    return types.SimpleNamespace(
        max_tokens_per_mb=max_tokens, n_mbs=n_mbs, n_mbs_divisor=divisor, granularity=1
    )


def sums(values: list[int], groups: list[list[int]]) -> list[int]:
    return [sum(values[i] for i in group) for group in groups]


def test_counts_are_multiples() -> None:
    assert len(areal.allocate_balanced_mbs_synced(spec(30, divisor=4), [10] * 9)) == 4
    with pytest.raises(RuntimeError, match=r"8 micro-batches .*in multiples of 4.* can fill 5"):
        areal.allocate_balanced_mbs_synced(spec(10, divisor=4), [10] * 5)


def test_with_a_layout_m_is_one_that_megatron_runs() -> None:
    # G=4 and vpp=2: AReaL's multiples of pp=2 give M=6 as well as 4 and 8.
    areal.configure(layout=Layout(pp=2, vpp=2, microbatch_group_size=4))
    rows = areal.allocate_balanced_mbs_synced(spec(10, divisor=2), [10] * 5 + [2, 3, 4])
    assert Layout(pp=2, vpp=2, microbatch_group_size=4).is_legal_count(len(rows))
    assert max(sums([10] * 5 + [2, 3, 4], rows)) <= 10


def test_too_long_and_too_few_are_refused_together() -> None:
    with pytest.raises(RuntimeError, match="over max_tokens_per_mb=10"):
        areal.allocate_balanced_mbs_synced(spec(10), [11, 1])
    with pytest.raises(RuntimeError, match="a rank can fill 2"):
        areal.allocate_balanced_mbs_synced(spec(10, n_mbs=4), [5, 5])
