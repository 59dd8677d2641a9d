"""megapack.hosts.roll through ROLL's own signatures, on one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.errors import ConfigError, HostAssertionError
from megapack.hosts import roll

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures("partitions")]

WIDTH = 32


class Proto:
    """The parts of a DataProto that the replacements use."""

    def __init__(self, batch: dict[str, torch.Tensor], meta_info: dict[str, Any]) -> None:
        self.batch = batch
        self.meta_info = meta_info

    def __len__(self) -> int:
        return len(self.batch["attention_mask"])

    def select_idxs(self, rows: list[int]) -> Proto:
        return Proto({name: value[rows] for name, value in self.batch.items()}, {})

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in self.batch["attention_mask"].sum(-1)]


def proto(lengths: list[int]) -> Proto:
    mask = (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).long()
    return Proto({"attention_mask": mask, "id": torch.arange(len(lengths))}, {"step": 3})


BATCHES = st.lists(st.integers(1, 30), min_size=2, max_size=8).map(lambda own: own + own[::-1])


def packer(budget: int | None, least: int = 1) -> SimpleNamespace:
    config = SimpleNamespace(
        max_packed_sequence_length_train=budget,
        max_packed_sequence_length_forward=1000,
        min_num_micro_batches_train=least,
        min_num_micro_batches_forward=1,
    )
    return SimpleNamespace(config=config, get_pad_factor=lambda cp_size, tp_size: 4)


def pack(
    lengths: list[int], budget: int | None, *, least: int = 1, train: bool = True
) -> tuple[Proto, list[Proto]]:
    batch = proto(lengths)
    found = roll.make_micro_batch_iter_for_sequence_packing(
        packer(budget, least), batch, 1, 1, 1, is_train=train
    )
    return batch, list(found)


@settings(deadline=None, max_examples=30)
@given(lengths=BATCHES, budget=st.integers(32, 100))
def test_packed_micro_batches_are_within_the_budget(lengths: list[int], budget: int) -> None:
    batch, found = pack(lengths, budget)
    order = [i for row in batch.meta_info["partition_indices_list"] for i in row]
    assert [int(i) for part in found for i in part.batch["id"]] == order
    assert sorted(order) == list(range(len(lengths)))
    assert all(sum(-(-n // 4) * 4 for n in part.lengths) <= budget for part in found)


def test_micro_batches_have_the_meta_info_of_the_host() -> None:
    _, found = pack([10, 20, 30], 32)
    assert [part.meta_info["micro_batch_idx"] for part in found] == [0, 1]
    for part in found:
        assert part.meta_info["step"] == 3
        assert part.meta_info["num_micro_batchs"] == 2
        assert part.meta_info["mini_batch_size"] == 3
        assert part.meta_info["partition_indices"] == part.batch["id"].tolist()


def test_least_counts_and_the_lengths_of_forward_passes() -> None:
    assert len(pack([4, 4, 4], 32)[1]) == 1
    assert len(pack([4, 4, 4], 32, least=3)[1]) == 3
    assert len(pack([30, 30, 30], 32, train=False)[1]) == 1


def test_an_interleaved_stage_count_is_a_multiple_of_pp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll, "_pipeline_size", lambda: 4)
    batch = proto([30] * 6)
    found = roll.make_micro_batch_iter_for_sequence_packing(
        packer(64), batch, 1, 1, 2, is_train=True
    )
    # Pairs make 3 micro-batches, and ROLL rounds to 4 with vp_size=2; so does pp=4. With five
    # samples more, 6 pairs would become 6 in multiples of vp_size, which pp=4 does not run.
    assert len(list(found)) == 4
    batch = proto([30] * 11)
    found = roll.make_micro_batch_iter_for_sequence_packing(
        packer(64), batch, 1, 1, 2, is_train=True
    )
    assert len(list(found)) == 8


def test_packed_batches_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(HostAssertionError, match=r"32 tokens.*train=28; set it to 32"):
        pack([1, 30], 28)
    with pytest.raises(HostAssertionError, match=r"3 micro-batches .* a rank can fill 2"):
        pack([1, 1], 28, least=3)
    with pytest.raises(ConfigError, match="max_packed_sequence_length_train is not set"):
        pack([1, 1], None)
