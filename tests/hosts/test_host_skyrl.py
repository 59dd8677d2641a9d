"""megapack.hosts.skyrl through SkyRL's own signatures, on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack import DataError, Layout
from megapack.hosts import skyrl
from tests.hosts.rollouts import first_fit_count

pytestmark = pytest.mark.hosts

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=30)
WIDTH = 32
NUM_ACTIONS = 4


class TensorList:
    """One tensor per sample, of unequal shapes; indexed by integers and slices only."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return TensorList(self.tensors[index])
        assert type(index) is int
        return self.tensors[index]


class PackedTensor:
    """Rows of all samples in one tensor, with bounds: SkyRL 0.4's. Not made from a list."""

    def __init__(self, values: torch.Tensor, bounds: list[int]) -> None:
        assert values.shape[0] == bounds[-1]
        self.values = values
        self.bounds = bounds

    @classmethod
    def from_segments(cls, segments: list[torch.Tensor]) -> PackedTensor:
        bounds = [0, *itertools.accumulate(map(len, segments))]
        return cls(torch.cat(segments), bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.from_segments([self[i] for i in range(len(self))[index]])
        return self.values[self.bounds[index] : self.bounds[index + 1]]


class Batch(dict[str, Any]):
    """A dict of fields with metadata."""

    metadata: dict[str, Any] | None = None

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        sizes = {len(value) for value in fields.values() if value is not None}
        assert len(sizes) <= 1, f"unequal numbers of samples: {sizes}"


@pytest.fixture(autouse=True)
def default_options() -> Iterator[None]:
    yield
    skyrl.configure()


def batch_of(lengths: list[int], **more: Any) -> Batch:
    """Left-padded sequences; token j of sample i is 1000 i + j."""
    num = len(lengths)
    mask = (torch.arange(WIDTH) >= WIDTH - torch.tensor(lengths)[:, None]).long()
    fields: dict[str, Any] = {
        "sequences": torch.arange(num)[:, None] * 1000 + torch.arange(WIDTH),
        "attention_mask": mask,
        "action_log_probs": torch.arange(num * NUM_ACTIONS).reshape(num, -1) / 7,
        "loss_mask": torch.ones(num, NUM_ACTIONS),
        "response_mask": torch.ones(num, NUM_ACTIONS, dtype=torch.long),
        "values": None,
    }
    data = Batch({**fields, **more})
    data.metadata = {"response_length": NUM_ACTIONS}
    return data


def samples_of(batch: Batch) -> list[int]:
    """The samples of a micro-batch that have a loss."""
    real = batch["loss_mask"].sum(dim=1) > 0
    return (batch["sequences"][real][:, 0] // 1000).tolist()


@settings(max_examples=50)
@given(lengths=LENGTHS, budget=st.integers(10, 60))
def test_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    data = batch_of(lengths)
    iterator = skyrl.TokenBasedBatchIterator(data, max_tokens_per_microbatch=budget)
    batches = list(iterator)
    assert len(batches) == len(iterator)
    assert iterator.num_padding_microbatches == 0
    seen = [samples_of(mb) for mb in batches]
    assert sorted(i for row in seen for i in row) == list(range(len(lengths)))
    for row in seen:
        assert sum(lengths[i] for i in row) <= budget or len(row) == 1
    # First-fit-decreasing, 11/9 of the fewest and 6/9 more at most.
    assert len(batches) <= first_fit_count(sorted(lengths, reverse=True), budget)
    restored = iterator.reorder_and_combine_batches(batches)
    for name in ("sequences", "action_log_probs", "loss_mask"):
        assert torch.equal(restored[name], data[name])
    assert restored["values"] is None
    assert restored.metadata == data.metadata


@pytest.mark.parametrize(
    ("lengths", "budget", "num"),
    [([10, 10, 5, 5], 15, 2), ([10, 1, 1, 1, 1, 1], 10, 2), ([5, 5, 5, 5], 10, 2), ([10], 15, 1)],
)
def test_token_based_micro_batches_are_the_fewest(
    lengths: list[int], budget: int, num: int
) -> None:
    assert len(skyrl.TokenBasedBatchIterator(batch_of(lengths), budget)) == num


def test_a_sample_over_the_budget_is_alone() -> None:
    iterator = skyrl.TokenBasedBatchIterator(batch_of([30, 5, 5]), 12)
    assert sorted(map(samples_of, iterator)) == [[0], [1, 2]]


class HostIterator:
    """SkyRL's own class, whose method makes a padding micro-batch."""

    def _create_padding_microbatch(self) -> Batch:
        data: Any = self.data  # type: ignore[attr-defined]
        batch = Batch({name: data[name][:1] * 0 for name in ("sequences", "loss_mask")})
        batch.metadata = {"is_padding_batch": True}
        return batch


@pytest.fixture(autouse=True)
def _own_iterator(originals: dict[str, Any]) -> None:
    originals[skyrl._ITERATOR] = HostIterator


def test_padding_micro_batches_are_skyrls_own_and_left_out_of_outputs() -> None:
    data = batch_of([9, 8, 7])
    skyrl.configure(layout=Layout(pp=2, vpp=2, microbatch_group_size=4))
    iterator = skyrl.TokenBasedBatchIterator(data, 30)
    *real, padding = iterator
    assert (len(real), iterator.num_padding_microbatches) == (3, 1)
    assert padding["sequences"].shape == (1, WIDTH)
    assert padding["loss_mask"].sum() == 0
    restored = iterator.reorder_and_combine_batches([*real, padding])
    assert torch.equal(restored["sequences"], data["sequences"])


def test_tensors_of_unequal_shapes_follow_their_samples() -> None:
    pixels = TensorList([torch.full((2 + i, 8), float(i)) for i in range(5)])
    data = batch_of([10, 10, 5, 5, 3], pixel_values=pixels)
    iterator = skyrl.TokenBasedBatchIterator(data, 15)
    batches = list(iterator)
    for mb in batches:
        for position, i in enumerate(samples_of(mb)):
            assert torch.equal(mb["pixel_values"][position], pixels[i])
    restored = iterator.reorder_and_combine_batches(batches)["pixel_values"]
    assert [len(t) for t in restored.tensors] == [2, 3, 4, 5, 6]


def packed_batch(lengths: list[int]) -> Batch:
    """Experts of each token, which are the sample's number, and candidates of response tokens."""
    experts = [torch.full((n, 2, 3), i, dtype=torch.int16) for i, n in enumerate(lengths)]
    support = [torch.full((i + 1, 5), i) for i in range(len(lengths))]
    return batch_of(
        lengths,
        rollout_expert_indices=PackedTensor.from_segments(experts),
        rollout_sample_support=PackedTensor.from_segments(support),
    )


def test_packed_fields_follow_their_samples() -> None:
    lengths = [10, 9, 5, 5, 3]
    data = packed_batch(lengths)
    iterator = skyrl.TokenBasedBatchIterator(data, 15)
    batches = list(iterator)
    for mb in batches:
        samples = samples_of(mb)
        for position, i in enumerate(samples):
            assert torch.equal(
                mb["rollout_expert_indices"][position], data["rollout_expert_indices"][i]
            )
    restored = iterator.reorder_and_combine_batches(batches)["rollout_expert_indices"]
    assert torch.equal(restored.values, data["rollout_expert_indices"].values)
    assert restored.bounds == data["rollout_expert_indices"].bounds


def test_items_come_back_in_the_order_of_the_samples() -> None:
    """One item a sample, more for padding samples, none for padding micro-batches."""
    iterator = skyrl.TokenBasedBatchIterator(batch_of([10, 10, 5, 5, 3]), 15)
    items = [[*map(str, samples_of(mb)), "padding"] for mb in iterator]
    assert iterator.reorder_and_combine_items([*items, []]) == ["0", "1", "2", "3", "4"]
    with pytest.raises(DataError, match="items for 5 samples"):
        iterator.reorder_and_combine_items([row[:-2] for row in items])


@settings(max_examples=30)
@given(lengths=LENGTHS, group=st.integers(2, 5))
def test_a_layout_makes_legal_counts(lengths: list[int], group: int) -> None:
    layout = Layout(pp=2, vpp=2, microbatch_group_size=group)
    skyrl.configure(layout=layout)
    iterator = skyrl.TokenBasedBatchIterator(batch_of(lengths), 30)
    batches = list(iterator)
    assert layout.is_legal_count(len(batches))
    assert sorted(i for mb in batches for i in samples_of(mb)) == list(range(len(lengths)))
    padding = [mb for mb in batches if (mb.metadata or {}).get("is_padding_batch")]
    assert len(padding) == iterator.num_padding_microbatches
    # Rows are split before padding is added.
    assert not padding or len(batches) - len(padding) == len(lengths)


def test_missing_outputs_are_refused() -> None:
    iterator = skyrl.TokenBasedBatchIterator(batch_of([9, 9, 9]), 10)
    for outputs in ([], list(iterator)[:2]):
        with pytest.raises(DataError, match="3 micro-batches"):
            iterator.reorder_and_combine_batches(outputs)


class HostPacker:
    """What the replacement needs of SkyRL's packers; all samples are in one bin."""

    min_bin_count = None
    bin_count_multiple = 4

    def _pack_implementation(self, lengths: list[int]) -> list[list[int]]:
        return [list(range(len(lengths)))]


def test_missing_bins_are_split_off_the_heaviest(originals: dict[str, Any]) -> None:
    name = "skyrl.train.dataset.bin_packing.make_seq_packer"
    originals[name] = lambda *given: HostPacker()
    packer = skyrl.make_seq_packer("balanced", 100, bin_count_multiple=4)
    assert isinstance(packer, HostPacker)
    # SkyRL would move one sample each: 5, 1, 1, 1.
    assert sorted(map(len, packer._pack_implementation([10] * 8))) == [2, 2, 2, 2]
