"""megapack.hosts.areal through AReaL's own signatures, on one rank."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack import Layout
from megapack.hosts import areal

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures("partitions")]

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@pytest.fixture(autouse=True)
def default_options() -> Iterator[None]:
    yield
    areal.configure()


def spec(max_tokens: int, n_mbs: int = 1, divisor: int = 1) -> Any:
    """AReaL's MicroBatchSpec."""
    return types.SimpleNamespace(
        max_tokens_per_mb=max_tokens, n_mbs=n_mbs, n_mbs_divisor=divisor, granularity=1
    )


def sums(values: list[int], groups: list[list[int]]) -> list[int]:
    return [sum(values[i] for i in group) for group in groups]


def test_the_import_loads_neither_torch_nor_areal() -> None:
    code = "import sys, megapack.hosts.areal; print({'torch', 'areal'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@given(values=LENGTHS, capacity=st.integers(60, 200), least=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_micro_batches_hold_every_sequence_once_within_the_budget(
    values: list[int], capacity: int, least: int
) -> None:
    least = min(least, len(values))
    rows = areal.allocate_balanced_mbs_synced(spec(capacity, least), values)
    assert sorted(i for row in rows for i in row) == list(range(len(values)))
    assert max(sums(values, rows)) <= capacity
    assert len(rows) >= least
    assert all(rows)


def test_counts_are_multiples() -> None:
    assert len(areal.allocate_balanced_mbs_synced(spec(30, divisor=4), [10] * 9)) == 4
    with pytest.raises(RuntimeError, match=r"8 micro-batches .*in multiples of 4.* can fill 5"):
        areal.allocate_balanced_mbs_synced(spec(10, divisor=4), [10] * 5)


def test_micro_batches_are_ordered_by_their_first_sequence() -> None:
    rows = areal.allocate_balanced_mbs_synced(spec(10), [6, 4, 5, 5])
    assert rows == sorted(sorted(row) for row in rows)
    assert sums([6, 4, 5, 5], rows) == [10, 10]


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
