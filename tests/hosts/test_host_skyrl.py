"""megapack.hosts.skyrl through SkyRL's own signatures, on one rank."""

from __future__ import annotations

import enum
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack import DataError, Layout
from megapack.hosts import skyrl

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
    balanced = skyrl.make_seq_packer("balanced", budget).pack(lengths)
    # First-fit-decreasing, 11/9 of the fewest and 6/9 more at most. Another packer may have fewer:
    # 18 18 16 11 6 5 5 5 5 5 fill three bins of 33, and it makes four.
    assert 9 * len(batches) <= 11 * len(balanced) + 6
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
    assert len(skyrl.make_seq_packer("balanced", budget).pack(lengths)) == num


def test_a_sample_over_the_budget_is_alone() -> None:
    iterator = skyrl.TokenBasedBatchIterator(batch_of([30, 5, 5]), 12)
    assert sorted(map(samples_of, iterator)) == [[0], [1, 2]]


def test_padding_micro_batches_have_full_width_and_no_loss() -> None:
    routes = torch.full((3, WIDTH, 2, 3), 7, dtype=torch.int16)
    unrouted = torch.zeros(3, WIDTH, dtype=torch.bool)
    pixels = TensorList([torch.randn(2 + i, 8) for i in range(3)])
    data = batch_of(
        [9, 8, 7],
        rollout_expert_indices=routes,
        router_padding_mask=unrouted,
        pixel_values=pixels,
    )
    skyrl.configure(layout=Layout(pp=2, vpp=2, microbatch_group_size=4))
    iterator = skyrl.TokenBasedBatchIterator(data, 30)
    *real, padding = iterator
    assert (len(real), iterator.num_padding_microbatches) == (3, 1)
    assert padding.metadata == {"response_length": NUM_ACTIONS, "is_padding_batch": True}
    assert padding["sequences"].shape == (1, WIDTH)
    assert padding["attention_mask"].tolist() == [[1] + [0] * (WIDTH - 1)]
    assert padding["loss_mask"].tolist() == [[0.0] * NUM_ACTIONS]
    assert padding["response_mask"].tolist() == [[1] * NUM_ACTIONS]
    assert padding["action_log_probs"].shape == (1, NUM_ACTIONS)
    assert padding["rollout_expert_indices"][0, 5].tolist() == [[0, 1, 2]] * 2
    assert padding["rollout_expert_indices"].dtype == torch.int16
    assert bool(padding["router_padding_mask"].all())
    assert "pixel_values" not in padding
    assert padding["values"] is None
    restored = iterator.reorder_and_combine_batches([*real, padding])
    assert torch.equal(restored["sequences"], data["sequences"])


def test_tensors_of_unequal_shapes_follow_their_samples() -> None:
    pixels = TensorList([torch.full((2 + i, 8), float(i)) for i in range(5)])
    data = batch_of([10, 10, 5, 5, 3], pixel_values=pixels)
    skyrl.configure(uniform_micro_batch_size=True)
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
    skyrl.configure(uniform_micro_batch_size=True)
    iterator = skyrl.TokenBasedBatchIterator(data, 15)
    batches = list(iterator)
    for mb in batches:
        samples = samples_of(mb)
        for position, i in enumerate(samples):
            assert torch.equal(
                mb["rollout_expert_indices"][position], data["rollout_expert_indices"][i]
            )
        for position in range(len(samples), len(mb["sequences"])):
            assert mb["rollout_expert_indices"][position].tolist() == [[[0, 1, 2]] * 2]
            assert mb["rollout_sample_support"][position].shape == (0, 5)
    assert any(len(samples_of(mb)) < len(mb["sequences"]) for mb in batches)
    restored = iterator.reorder_and_combine_batches(batches)["rollout_expert_indices"]
    assert torch.equal(restored.values, data["rollout_expert_indices"].values)
    assert restored.bounds == data["rollout_expert_indices"].bounds


def test_padding_micro_batches_have_rows_of_packed_fields() -> None:
    data = packed_batch([9, 8, 7])
    skyrl.configure(layout=Layout(pp=2, vpp=2, microbatch_group_size=4))
    *_, padding = skyrl.TokenBasedBatchIterator(data, 30)
    assert padding["rollout_expert_indices"].bounds == [0, 1]
    assert padding["rollout_expert_indices"].values.dtype == torch.int16
    assert padding["rollout_sample_support"].bounds == [0, 0]


def test_a_packed_field_that_padding_has_no_value_for_is_refused() -> None:
    data = batch_of([9, 8, 7], new_field=PackedTensor.from_segments([torch.zeros(2)] * 3))
    skyrl.configure(layout=Layout(pp=2, vpp=2, microbatch_group_size=4))
    with pytest.raises(DataError, match="new_field"):
        list(skyrl.TokenBasedBatchIterator(data, 30))


def test_items_come_back_in_the_order_of_the_samples() -> None:
    """One item a sample, more for padding samples, none for padding micro-batches."""
    iterator = skyrl.TokenBasedBatchIterator(batch_of([10, 10, 5, 5, 3]), 15)
    items = [[*map(str, samples_of(mb)), "padding"] for mb in iterator]
    assert iterator.reorder_and_combine_items([*items, []]) == ["0", "1", "2", "3", "4"]
    with pytest.raises(DataError, match="items for 5 samples"):
        iterator.reorder_and_combine_items([row[:-2] for row in items])


def test_micro_batches_can_have_a_uniform_size() -> None:
    lengths = [20, 6, 5, 4, 3, 2]
    data = batch_of(lengths)
    skyrl.configure(uniform_micro_batch_size=True)
    iterator = skyrl.TokenBasedBatchIterator(data, 20)
    batches = list(iterator)
    assert {len(mb["sequences"]) for mb in batches} == {5}
    assert sorted(map(len, map(samples_of, batches))) == [1, 5]
    short = next(mb for mb in batches if len(samples_of(mb)) == 1)
    assert short["attention_mask"].sum(dim=1).tolist() == [20, 1, 1, 1, 1]
    # Means over responses leave out the padding samples.
    assert short["response_mask"].sum().item() == NUM_ACTIONS
    restored = iterator.reorder_and_combine_batches(batches)
    assert torch.equal(restored["sequences"], data["sequences"])


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


class PackingStrategy(enum.Enum):
    """The host's enum."""

    FIRST_FIT_DECREASING = "first_fit_decreasing"
    BALANCED = "balanced"


def test_packers_are_found_by_name() -> None:
    lengths = [30, 70, 50, 50, 20, 80]
    for name in (
        "first_fit_decreasing",
        "FIRST_FIT_DECREASING",
        PackingStrategy("first_fit_decreasing"),
    ):
        packer = skyrl.make_seq_packer(name, 100)
        assert packer.pack(lengths) == [[5, 4], [1, 0], [3, 2]]
    balanced = skyrl.make_seq_packer(PackingStrategy.BALANCED, 100)
    assert balanced.pack([60, 30, 20, 150]) == [[3], [0, 1], [2]]
    with pytest.raises(ValueError, match="Unknown packing algorithm: nonexistent"):
        skyrl.make_seq_packer("nonexistent", 100)


@pytest.mark.parametrize(
    ("lengths", "settings", "says"),
    [
        ([150], {}, "exceeds bin capacity"),
        ([10, 20], {"min_bin_count": 5}, "Cannot create 5 bins with only 2 sequences"),
        ([10, 0], {}, "must be positive"),
    ],
)
def test_bad_samples_are_refused(lengths: list[int], settings: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        skyrl.make_seq_packer("first_fit_decreasing", 100, **settings).pack(lengths)


@given(
    lengths=LENGTHS,
    least=st.none() | st.integers(0, 6),
    multiple=st.none() | st.integers(1, 6),
    name=st.sampled_from(["balanced", "first_fit_decreasing"]),
)
def test_bin_counts_follow_the_limits(
    lengths: list[int], least: int | None, multiple: int | None, name: str
) -> None:
    natural = len(skyrl.make_seq_packer(name, 40).pack(lengths))
    packer = skyrl.make_seq_packer(name, 40, min_bin_count=least, bin_count_multiple=multiple)
    wanted = next(n for n in range(max(natural, least or 0), 1000) if n % (multiple or 1) == 0)
    if wanted > len(lengths):
        with pytest.raises(ValueError, match="Cannot create"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert len(bins) == wanted
    assert all(bins)
    assert sorted(i for row in bins for i in row) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in row) for row in bins) <= 40


def test_one_bin_is_split_evenly_over_four_ranks() -> None:
    packer = skyrl.make_seq_packer("balanced", 100, bin_count_multiple=4)
    assert sorted(map(len, packer.pack([10] * 8))) == [2, 2, 2, 2]


def test_packers_are_of_the_hosts_class_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("skyrl.train.dataset.bin_packing")
    balanced = type("Balanced", (), {"pack": lambda self, lengths: "the host's"})
    module.Balanced = balanced  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    packer = skyrl.make_seq_packer("balanced", 100)
    assert isinstance(packer, balanced)
    assert packer.pack([60, 60]) == [[0], [1]]
    # The stub has no class for this algorithm.
    assert not isinstance(skyrl.make_seq_packer("first_fit_decreasing", 100), balanced)
