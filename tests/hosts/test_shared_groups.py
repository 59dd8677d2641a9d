"""Planners that see token ids put the answers to one prompt into one row, if prefixes are shared.

Slime's and miles' are in test_host_slime.py and test_host_miles.py.
"""

from __future__ import annotations

import types
from collections import Counter, UserDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megapack import Layout
from megapack.hosts import areal, nemo_rl, roll, skyrl, verl
from tests.hosts.partitions import HostPacker, sharded

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures("partitions")]

PROMPT, ANSWER = 30, 20
WIDTH = PROMPT + ANSWER + 4
Rows = list[list[int]]


class Batch(UserDict[str, Any]):
    """What hosts' batches have in common."""

    def __init__(self, fields: Any, batch_size: Any = None) -> None:
        super().__init__(fields)
        self.batch_size = batch_size
        self.metadata: dict[str, Any] = {}

    def select_indices(self, indices: list[int]) -> Batch:
        return Batch({name: value[indices] for name, value in self.data.items()})

    def slice(self, start: int, end: int) -> Batch:
        return Batch({name: value[start:end] for name, value in self.data.items()})


class Proto:
    """The parts of ROLL's DataProto that its packer uses."""

    def __init__(self, batch: Batch, samples: Sequence[int] = ()) -> None:
        self.batch = batch
        self.samples = list(samples)
        self.meta_info: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.batch["sample"])

    def select_idxs(self, rows: list[int]) -> Proto:
        return Proto(self.batch, rows)


def group_of(sample: int, num_groups: int) -> int:
    """Samples of all groups in turns that begin with another group each, so that neither equal
    strides nor neighbours are of one group."""
    return (sample + sample // num_groups) % num_groups


def padded(num_groups: int, num_samples: int, *, left: bool = False) -> Batch:
    """Answers of 20 tokens, padded in batches as wide as 54."""
    ids = torch.zeros(num_samples, WIDTH, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i in range(num_samples):
        tokens = [1 + group_of(i, num_groups)] * PROMPT + [50 + i] * ANSWER
        place = slice(WIDTH - len(tokens), WIDTH) if left else slice(0, len(tokens))
        ids[i, place] = torch.tensor(tokens)
        mask[i, place] = 1
    return Batch({"input_ids": ids, "attention_mask": mask, "sample": torch.arange(num_samples)})


def verl_rows(batch: Batch, budget: int, multiple: int = 1) -> Rows:
    return verl.rearrange_micro_batches(batch, budget, num_batches_divided_by=multiple)[1]


def verl_nested_rows(batch: Batch, budget: int, multiple: int = 1) -> Rows:
    masks = batch["attention_mask"].bool()
    samples = [ids[mask] for ids, mask in zip(batch["input_ids"], masks, strict=True)]
    nested = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
    return verl_rows(Batch({"input_ids": nested}, [len(samples)]), budget, multiple)


def roll_rows(batch: Batch, budget: int, multiple: int = 1) -> Rows:
    """ROLL has no `configure`: its patch reads the environment."""
    config = types.SimpleNamespace(
        max_packed_sequence_length_forward=budget, min_num_micro_batches_forward=multiple
    )
    packer = types.SimpleNamespace(config=config, get_pad_factor=lambda cp, tp: 1)
    proto = Proto(batch)
    return [
        part.samples
        for part in roll.make_micro_batch_iter_for_sequence_packing(packer, proto, 1, 1, 1)
    ]


def skyrl_rows(batch: Batch, budget: int, multiple: int = 1) -> Rows:
    if multiple > 1:
        skyrl.configure(layout=Layout(pp=multiple, vpp=2))
    iterator = types.SimpleNamespace()
    skyrl.init_iterator(iterator, {**batch.data, "sequences": batch["input_ids"]}, budget)
    rows: Rows = iterator._microbatches
    return rows


def areal_rows(data: Any, budget: int, multiple: int = 1) -> Rows:
    data = dict(data)
    lens = data["attention_mask"].sum(1).numpy()
    spec = types.SimpleNamespace(max_tokens_per_mb=budget, n_mbs=1, n_mbs_divisor=multiple)
    return areal.allocate_balanced_mbs_synced(spec, lens)


@pytest.fixture(autouse=True)
def _own_packer(originals: dict[str, Any]) -> None:
    originals["nemo_rl.data.packing.algorithms.get_packer"] = (
        lambda _, capacity, *__, min_bin_count, bin_count_multiple, **___: HostPacker(
            capacity, min_bin_count, bin_count_multiple
        )
    )
    originals["nemo_rl.distributed.batched_data_dict.BatchedDataDict.shard_by_batch_size"] = sharded


def nemo_rows(batch: Batch, budget: int, multiple: int = 1) -> Rows:
    """With as many shards as `multiple`, each of which has at least one row."""
    batch = Batch({**batch.data, "input_lengths": batch["attention_mask"].sum(1)})
    args = {
        "max_tokens_per_microbatch": budget,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 1,
    }
    shards, _ = nemo_rl.shard_by_batch_size(batch, multiple, sequence_packing_args=args)
    return [
        shard["sample"][start:end].tolist()
        for shard in shards
        for start, end in shard.micro_batch_indices[0]
    ]


def nemo_planned_rows(batch: Batch, budget: int, multiple: int = 1) -> Rows:
    nemo_rl.configure(layout=Layout(dp=multiple))
    return nemo_rows(batch, budget, multiple)


HOSTS: dict[Callable[..., Rows], Any] = {
    verl_rows: verl,
    verl_nested_rows: verl,
    skyrl_rows: skyrl,
    roll_rows: roll,
    areal_rows: areal,
    nemo_rows: nemo_rl,
    nemo_planned_rows: nemo_rl,
}


def groups_of(rows: Rows, num_groups: int) -> list[Counter[int]]:
    return [Counter(group_of(sample, num_groups) for sample in row) for row in rows]


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Switches sharing on for a host."""

    def switch(host: Any) -> None:
        if host is roll:
            monkeypatch.setenv("MEGAPACK_SHARE_PREFIXES", "1")
        else:
            host.configure(share_prefixes=True)

    return switch


def batch_for(host: Any, num_groups: int, num_samples: int) -> Batch:
    return padded(num_groups, num_samples, left=host is skyrl)


@pytest.mark.parametrize("rows_of", HOSTS)
def test_groups_meet_in_a_row_where_prefixes_are_shared(
    rows_of: Callable[..., Rows], share: Callable[[Any], None]
) -> None:
    host = HOSTS[rows_of]
    batch = batch_for(host, 4, 16)
    # Without sharing and without a layout, NeMo-RL's rows are its own.
    if rows_of is not nemo_rows:
        assert any(len(groups) > 1 for groups in groups_of(rows_of(batch, 200), 4))
    share(host)
    rows = rows_of(batch, 200)
    assert sorted(sample for row in rows for sample in row) == list(range(16))
    assert [set(groups.values()) for groups in groups_of(rows, 4)] == [{4}] * 4
    # The budget counts every copy: five samples of a group are 250 tokens.
    rows = rows_of(batch_for(host, 2, 10), 150)
    assert sorted(sorted(groups.values()) for groups in groups_of(rows, 2)) == [[2], [2], [3], [3]]


@pytest.mark.parametrize("rows_of", HOSTS)
def test_groups_that_are_too_few_rows_are_cut(
    rows_of: Callable[..., Rows], share: Callable[[Any], None]
) -> None:
    """One group of four samples, and at least two rows (skyrl: stages that want two)."""
    host = HOSTS[rows_of]
    share(host)
    rows = rows_of(batch_for(host, 1, 4), 400, multiple=2)
    assert sorted(map(len, rows)) == [2, 2]


def test_placeholders_of_nemo_rl_are_not_taken_for_tokens() -> None:
    """Where its driver has no tokens, each sample has one, 0."""
    batch = padded(4, 16)
    batch["input_ids"] = torch.zeros(16, 1, dtype=torch.long)
    nemo_rl.configure(share_prefixes=True)
    own = HostPacker(200, None, None)
    assert nemo_rows(batch, 200) == own.pack([PROMPT + ANSWER] * 16)


def test_areal_reads_the_tokens_of_its_own_caller_only() -> None:
    areal.configure(share_prefixes=True)
    batch = padded(4, 16)
    lens = batch["attention_mask"].sum(1).numpy()
    spec = types.SimpleNamespace(max_tokens_per_mb=200, n_mbs=1, n_mbs_divisor=1)
    rows = areal.allocate_balanced_mbs_synced(spec, lens)
    assert any(len(groups) > 1 for groups in groups_of(rows, 4))
