from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.hosts.shared.balancing import first_fit_decreasing_pack
from megapack.hosts.xtuner import PackedIndices, RLDataPacker

pytestmark = pytest.mark.hosts


def checked(
    lengths: list[int], *, pack_max_length: int, dp: int, steps: int, **fields: Any
) -> PackedIndices:
    packer = RLDataPacker(pack_max_length, dp, 1, steps, **fields)
    packs, padding = packer.pack(lengths)
    assert packer.seconds > 0
    assert [len(rank) for rank in packs] == [steps] * dp
    counts = [[len(step) for step in rank] for rank in packs]
    assert all(rank == counts[0] for rank in counts)
    flat = [pack for rank in packs for step in rank for pack in step]
    assert sorted(i for pack in flat for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= pack_max_length for pack in flat)
    assert padding == len(flat) * pack_max_length - sum(lengths)
    return packs


def test_the_number_of_steps_is_exact() -> None:
    """44 full packs in 16 steps: 3 at a time would be 15 steps."""
    packs = checked([100] * 44, pack_max_length=100, dp=1, steps=16)
    assert sorted(len(step) for step in packs[0]) == [2] * 4 + [3] * 12


def test_every_worker_gets_samples() -> None:
    """8 samples that would fit into one pack, at dp=4."""
    packs = checked([10] * 8, pack_max_length=100, dp=4, steps=1)
    assert [[len(pack) for pack in rank[0]] for rank in packs] == [[2]] * 4


def test_fewer_samples_than_workers_make_an_empty_pack() -> None:
    packs = checked([500], pack_max_length=3072, dp=2, steps=1)
    assert sorted(packs) == [[[[]]], [[[0]]]]


def test_the_hosts_example_needs_the_fewest_packs() -> None:
    """The host's packers pad these 15700 tokens to 8 packs at best, with 8876 tokens."""
    lengths = [1500, 1000, 2800, 3000, 1500, 2000, 2100, 1000, 800]
    packs = checked(lengths, pack_max_length=3072, dp=2, steps=2)
    assert sum(len(step) for rank in packs for step in rank) == 8


def test_workers_of_a_replica_share_packs() -> None:
    packs, _ = RLDataPacker(100, 8, 4, 2).pack([60] * 8)
    assert len(packs) == 2


def test_native_packing_keeps_the_input_order() -> None:
    packs = checked([10] * 12, pack_max_length=20, dp=1, steps=3, pack_strategy="native")
    found = [sorted(i for pack in step for i in pack) for step in packs[0]]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_the_packing_time_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megapack.hosts")
    checked([10] * 8, pack_max_length=40, dp=2, steps=1, pack_strategy="legacy")
    assert "planned as 'balance'" in caplog.text
    assert re.search(r"8 samples in 1 steps of \[1\] packs .* packed in \d+\.\d+ s", caplog.text)


def test_no_samples_make_no_packs() -> None:
    assert RLDataPacker(100, 2, 1, 4).pack([]) == ([], 0)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [([5, 101], "sample 1 of 101 tokens exceeds pack_max_length=100"), ([5], "optimizer_steps=2")],
)
def test_bad_samples_are_refused(lengths: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RLDataPacker(100, 2, 1, 2).pack(lengths)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"pack_strategy": "best"}, "Unknown packing strategy"), ({"data_replicate_size": 3}, "=3")],
)
def test_settings_are_checked(change: dict[str, Any], says: str) -> None:
    fields = {"data_replicate_size": 1, **change}
    with pytest.raises(ValueError, match=says):
        RLDataPacker(100, 8, optimizer_steps=1, **fields)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=4, max_size=60),
    dp=st.sampled_from([1, 2, 4]),
    steps=st.integers(1, 4),
    strategy=st.sampled_from(["balance", "native"]),
)
def test_packs_of_any_lengths(lengths: list[int], dp: int, steps: int, strategy: str) -> None:
    fields = {"pack_max_length": 64, "dp": dp, "steps": steps, "pack_strategy": strategy}
    packs = checked(lengths, **fields)
    assert packs == checked(lengths, **fields)
    for step in range(steps):
        samples = [lengths[i] for rank in packs for pack in rank[step] for i in pack]
        fewest = len(first_fit_decreasing_pack(samples, 64))
        assert len(packs[0][step]) == -(-fewest // dp)
    if strategy == "balance":
        tokens = [
            sum(lengths[i] for rank in packs for pack in rank[step] for i in pack)
            for step in range(steps)
        ]
        assert max(tokens) - min(tokens) <= max(lengths)
