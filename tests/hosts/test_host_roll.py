"""megapack.hosts.roll through ROLL's own signatures, on one rank."""

from __future__ import annotations

import itertools
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

    def __getitem__(self, rows: slice) -> Proto:
        return Proto({name: value[rows] for name, value in self.batch.items()}, self.meta_info)

    def slice(self) -> Proto:
        return Proto(dict(self.batch), dict(self.meta_info))

    def reorder(self, order: torch.Tensor) -> None:
        self.batch = {name: value[order] for name, value in self.batch.items()}

    def select_idxs(self, rows: list[int]) -> Proto:
        found = Proto(dict(self.batch), {})
        found.reorder(torch.tensor(rows))
        return found

    @staticmethod
    def concat(parts: list[Proto]) -> Proto:
        names = parts[0].batch
        batch = {name: torch.cat([part.batch[name] for part in parts]) for name in names}
        return Proto(batch, parts[0].meta_info)

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in self.batch["attention_mask"].sum(-1)]


def proto(lengths: list[int]) -> Proto:
    mask = (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).long()
    return Proto({"attention_mask": mask, "id": torch.arange(len(lengths))}, {"step": 3})


def dealt(
    origin: Proto, dp: int, budget: int, unit: int, *, log_prefix: str | None
) -> tuple[Proto, dict[str, float]]:
    """Stands in for ROLL's own function: samples sorted and dealt out, its ranges left out."""
    assert max(-(-length // unit) * unit for length in origin.lengths) <= budget, "an input over it"
    batch = origin.slice()
    batch.reorder(torch.argsort(torch.tensor(origin.lengths), stable=True))
    name = "dynamic_batching" + (f"/{log_prefix}" if log_prefix else "")
    tokens = {"valid_tokens": sum(origin.lengths), "actual_tokens_origin": len(origin) * WIDTH}
    parts = [batch[rank::dp] for rank in range(dp)]  # type: ignore[misc]
    return Proto.concat(parts), {f"{name}/{key}": value for key, value in tokens.items()}


@pytest.fixture(autouse=True)
def _own_shards(originals: dict[str, Any]) -> None:
    originals["roll.utils.dynamic_batching.dynamic_batching_shard"] = dealt


def shard(lengths: list[int], dp: int, budget: int, **pipeline: int) -> tuple[Proto, Any]:
    found, metrics = roll.dynamic_batching_shard(proto(lengths), dp, budget, 4, **pipeline)
    return found, metrics


def padded_tokens(found: Proto) -> int:
    ranges = found.meta_info["micro_batch_indices"]
    widths = found.meta_info["micro_batch_lengths"]
    return sum((end - start) * width for (start, end), width in zip(ranges, widths, strict=True))


BATCHES = st.lists(st.integers(1, 30), min_size=2, max_size=8).map(lambda own: own + own[::-1])


@settings(deadline=None, max_examples=30)
@given(lengths=BATCHES, budget=st.integers(32, 100), dp=st.sampled_from([1, 2]))
def test_ranges_cover_all_samples_within_the_budget(
    lengths: list[int], budget: int, dp: int
) -> None:
    found, metrics = shard(lengths, dp, budget)
    assert sorted(found.batch["id"].tolist()) == list(range(len(lengths)))
    ranges = found.meta_info["global_micro_batch_indices"]
    own = len(lengths) // dp
    assert [i for start, end in ranges for i in range(start, end)] == list(range(own))
    for (start, end), width in zip(ranges, found.meta_info["micro_batch_lengths"], strict=True):
        assert (end - start) * width <= budget
        for rank in range(dp):
            assert max(found.lengths[rank * own + start : rank * own + end]) <= width
    assert found.meta_info["num_micro_batchs"] == len(ranges)
    assert metrics["dynamic_batching/actual_tokens"] == dp * padded_tokens(found)
    assert metrics["dynamic_batching/valid_tokens"] == sum(lengths)


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), budget=st.integers(32, 100))
def test_no_split_into_as_many_micro_batches_has_fewer_tokens(
    lengths: list[int], budget: int
) -> None:
    found, _ = shard(lengths, 1, budget)
    count = found.meta_info["num_micro_batchs"]
    widths = sorted(-(-length // 4) * 4 for length in lengths)
    sums: dict[int, list[int]] = {}
    for parts in range(1, count + 1):
        for cuts in itertools.combinations(range(1, len(widths)), parts - 1):
            ends = [*cuts, len(widths)]
            sizes = [
                (end - start) * widths[end - 1] for start, end in zip([0, *cuts], ends, strict=True)
            ]
            if max(sizes) <= budget:
                sums.setdefault(parts, []).append(sum(sizes))
    assert min(sums) == count
    assert min(sums[count]) == padded_tokens(found)


def test_the_example_of_the_docstring() -> None:
    found, _ = roll.dynamic_batching_shard(proto([4, 1, 1, 4]), 1, 12, 1)
    assert found.meta_info["micro_batch_indices"] == [[0, 2], [2, 4]]
    assert padded_tokens(found) == 10


def test_an_interleaved_pipeline_gets_a_count_that_it_runs() -> None:
    # Without interleaving 3 micro-batches are enough: 12 samples of 8 tokens, 4 in each.
    lengths = [8] * 12
    assert shard(lengths, 1, 32)[0].meta_info["num_micro_batchs"] == 3
    pipeline = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    assert shard(lengths, 1, 32, **pipeline)[0].meta_info["num_micro_batchs"] == 4
    with pytest.raises(HostAssertionError, match="more micro-batches are needed with pp=4, vpp=2"):
        shard([8] * 3, 1, 32, **pipeline)


def test_padded_batches_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(HostAssertionError, match="5 samples % dp_size=2"):
        shard([1] * 5, 2, 32)
    # ROLL's own refusal of a sample over the budget.
    with pytest.raises(AssertionError, match="an input over it"):
        shard([1, 29], 1, 28)


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
