"""megapack.hosts.nemo_rl through NeMo-RL's own signatures."""

from __future__ import annotations

import enum
import logging
import sys
import types
from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack import ConfigError, CostModel, Layout, patching
from megapack.hosts import nemo_rl

pytestmark = pytest.mark.hosts

NAMES = [
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
]
LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=40)


class BatchedDataDict(UserDict[str, Any]):
    """The parts of NeMo-RL's class that the replacement uses."""

    def select_indices(self, indices: list[int]) -> BatchedDataDict:
        return BatchedDataDict(
            {
                name: value[indices] if torch.is_tensor(value) else [value[i] for i in indices]
                for name, value in self.data.items()
            }
        )

    def slice(self, start: int, end: int) -> SlicedDataDict:
        return SlicedDataDict({name: value[start:end] for name, value in self.data.items()})


class SlicedDataDict(BatchedDataDict):
    """A slice of a batch."""


class Images:
    """Packed media like NeMo-RL's: a slice of it cannot be empty."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        rows = self.rows[index]
        assert rows != [], "no rows"
        return Images(rows) if isinstance(rows, list) else rows

    @classmethod
    def empty_rows_like(cls, other: Images, num_rows: int) -> Images:
        return Images(other.rows[:num_rows])


@pytest.fixture(autouse=True)
def default_options() -> Iterator[None]:
    yield
    nemo_rl.configure()


def batch_of(lengths: list[int], width: int = 128) -> BatchedDataDict:
    num = len(lengths)
    return BatchedDataDict(
        {
            "input_ids": torch.arange(num * width).reshape(num, width),
            "input_lengths": torch.tensor(lengths),
            "row": list(range(num)),
        }
    )


def packing_args(**changes: Any) -> dict[str, Any]:
    args = {
        "max_tokens_per_microbatch": 100,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 1,
    }
    return {**args, **changes}


def microbatches(shard: Any) -> list[list[list[int]]]:
    """The rows of each micro-batch of each step, from the boundaries and counts in a shard."""
    steps, first = [], 0
    for boundaries, count in zip(shard.micro_batch_indices, shard.elem_counts_per_gb, strict=True):
        rows = shard["row"][first : first + count]
        assert [boundaries[0][0], boundaries[-1][1]] == [0, count]
        steps.append([rows[start:end] for start, end in boundaries])
        first += count
    return steps


@pytest.mark.parametrize(
    ("name", "lengths", "bins"),
    [
        ("concatenative", [40, 10, 30, 20, 10, 30, 40, 50], [[0, 1, 2, 3], [4, 5, 6], [7]]),
        ("first_fit_decreasing", [30, 70, 50, 50, 20, 80], [[5, 4], [1, 0], [3, 2]]),
        # 88 gets 11, 73 gets 14, 55 gets two small ones and a tiny one, 46 is left.
        (
            "modified_first_fit_decreasing",
            [46, 24, 55, 88, 11, 14, 73, 17],
            [[3, 4], [6, 5], [2, 7, 1], [0]],
        ),
    ],
)
def test_packers_keep_their_rules(name: str, lengths: list[int], bins: list[list[int]]) -> None:
    assert nemo_rl.get_packer(name, 100).pack(lengths) == bins


@given(lengths=LENGTHS, name=st.sampled_from(NAMES), multiple=st.integers(1, 5))
def test_every_sequence_once_within_the_capacity(
    lengths: list[int], name: str, multiple: int
) -> None:
    bins = nemo_rl.get_packer(name, 100).pack(lengths)
    assert bins == nemo_rl.get_packer(name.upper(), 100).pack(lengths)
    wanted = -(-len(bins) // multiple) * multiple
    packer = nemo_rl.get_packer(name, 100, bin_count_multiple=multiple)
    if wanted > len(lengths):
        with pytest.raises(ValueError, match=f"Cannot create {wanted} bins with only"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert len(bins) == wanted
    assert all(bins)
    assert sorted(i for row in bins for i in row) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in row) for row in bins) <= 100


@pytest.mark.parametrize("name", NAMES)
def test_bad_sequences_and_counts_are_refused(name: str) -> None:
    assert nemo_rl.get_packer(name, 100).pack([]) == []
    with pytest.raises(ValueError, match="Sequence length 150 exceeds bin capacity 100"):
        nemo_rl.get_packer(name, 100).pack([50, 150, 70])
    with pytest.raises(ValueError, match="nonnegative"):
        nemo_rl.get_packer(name, 100, min_bin_count=-1)
    with pytest.raises(ValueError, match="positive"):
        nemo_rl.get_packer(name, 100, bin_count_multiple=0)


def test_packers_are_found_by_enum() -> None:
    host = enum.Enum("PackingAlgorithm", {"CONCATENATIVE": "concatenative", "OTHER": "other"})
    assert nemo_rl.get_packer(host.CONCATENATIVE, 10).pack([5, 6]) == [[0], [1]]
    for unknown in (host.OTHER, object(), "best_fit"):
        with pytest.raises(ValueError, match="Unknown packing algorithm"):
            nemo_rl.get_packer(unknown, 10)  # type: ignore[arg-type]


def test_metrics() -> None:
    packer = nemo_rl.get_packer("concatenative", 10, collect_metrics=True)
    packer.pack([6, 4, 5])
    packer.pack([8])
    found = packer.get_aggregated_metrics()
    assert found["total_sequences"] == 4
    assert found["total_bins"] == 3
    assert found["average_utilization"] == pytest.approx(23 / 30)
    assert (found["min_utilization"], found["max_utilization"]) == (0.75, 0.8)
    assert found["average_bin_count"] == 1.5
    assert found["bin_efficiency"] == 1.0
    one = packer.compute_metrics([6, 4, 5], [[0, 1], [2]])
    assert (one["num_bins"], one["total_waste"], one["theoretical_min_bins"]) == (2, 5, 2)
    # Bins of 10 and 5 tokens: utilizations 1 and 0.5, standard deviation 0.3536, mean 0.75.
    assert one["bin_balance"] == pytest.approx(1 - 0.35355 / 0.75, abs=1e-4)
    assert packer.compute_metrics([], [])["waste_ratio"] == 0.0
    packer.reset_metrics()
    assert packer.get_aggregated_metrics() == {}
    assert nemo_rl.get_packer("concatenative", 10).get_aggregated_metrics() == {}


def test_shards_without_packing() -> None:
    data = batch_of([1] * 8)
    shards = nemo_rl.shard_by_batch_size(data, 2)
    assert [shard["row"] for shard in shards] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(type(shard) is SlicedDataDict for shard in shards)
    shards = nemo_rl.shard_by_batch_size(data, 2, batch_size=4)
    assert [shard["row"] for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    shards = nemo_rl.shard_by_batch_size(batch_of([1] * 5), 2, allow_uneven_shards=True)
    assert [shard["row"] for shard in shards] == [[0, 1, 2], [3, 4]]


def test_an_empty_shard_has_every_field() -> None:
    data = batch_of([1, 1])
    data["images"] = Images([1, 2])
    *_, empty = nemo_rl.shard_by_batch_size(data, 4, allow_uneven_shards=True)
    assert type(empty) is SlicedDataDict
    assert empty["input_ids"].shape == (0, 128)
    assert (empty["row"], empty["images"].rows) == ([], [])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"shards": 2, "batch_size": 3}, "Total batch size .* is not a multiple of batch_size"),
        ({"shards": 3, "batch_size": 4}, "Batch size .* is not a multiple of shards"),
        ({"shards": 2, "batch_size": 4, "allow_uneven_shards": True}, "batch_size must be None"),
        (
            {"shards": 2, "dynamic_batching_args": {}, "sequence_packing_args": {}},
            "cannot be passed together",
        ),
    ],
)
def test_bad_shard_arguments_are_refused(arguments: dict[str, Any], says: str) -> None:
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match=says):
            nemo_rl.shard_by_batch_size(batch_of([1] * 8), **arguments)


def test_fields_of_unequal_sizes_are_refused() -> None:
    data = BatchedDataDict({"a": [1, 2], "b": [1, 2, 3]})
    with pytest.raises(AssertionError, match="Batch sizes are not the same across the rollout"):
        nemo_rl.shard_by_batch_size(data, 1)


def test_shards_get_bins_in_turn_largest_first_on_request() -> None:
    data = batch_of([46, 24, 55, 88, 11, 14, 73, 17])
    args = packing_args(microbatch_order="largest_first")
    shards, indices = nemo_rl.shard_by_batch_size(data, 2, sequence_packing_args=args)
    assert [shard.micro_batch_lengths for shard in shards] == [[[99, 96]], [[87, 46]]]
    assert indices == shards[0]["row"] + shards[1]["row"] == [3, 4, 2, 7, 1, 6, 5, 0]
    with pytest.raises(ValueError, match="microbatch_order"):
        nemo_rl.shard_by_batch_size(
            data, 2, sequence_packing_args=packing_args(microbatch_order="unknown")
        )


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=40),
    shards=st.integers(1, 4),
    unit=st.sampled_from([1, 4, 16]),
    planned=st.booleans(),
)
def test_packed_shards(lengths: list[int], shards: int, unit: int, planned: bool) -> None:
    step_rows = 2 * shards
    lengths = lengths[: len(lengths) // step_rows * step_rows]
    nemo_rl.configure(layout=Layout(dp=shards) if planned else None)
    args = packing_args(sequence_length_pad_multiple=unit)
    made, indices = nemo_rl.shard_by_batch_size(
        batch_of(lengths), shards, batch_size=step_rows, sequence_packing_args=args
    )
    steps = [microbatches(shard) for shard in made]
    assert indices == [i for shard in steps for step in shard for row in step for i in row]
    assert sorted(indices) == list(range(len(lengths)))
    for number in range(len(lengths) // step_rows):
        # Every shard has the same count, and no row is in another optimizer step.
        assert len({len(shard[number]) for shard in steps}) == 1
        rows = [i for shard in steps for row in shard[number] for i in row]
        assert {i // step_rows for i in rows} == {number}
    for shard, found in zip(made, steps, strict=True):
        widths = [[sum(-(-lengths[i] // unit) * unit for i in r) for r in step] for step in found]
        assert shard.micro_batch_lengths == widths
        assert max(map(max, widths)) <= 100


LAYOUT = Layout(dp=2, pp=2, vpp=2, microbatch_group_size=4)


def test_a_layout_makes_legal_counts() -> None:
    lengths = [90] * 10 + [40] * 4
    data = batch_of(lengths)
    own, _ = nemo_rl.shard_by_batch_size(data, 2, sequence_packing_args=packing_args())
    # Of twelve bins each shard gets 6, legal with G=4, as 6 % 4 >= pp. Of ten bins it gets 5.
    assert [len(microbatches(shard)[0]) for shard in own] == [6, 6]
    few = batch_of([90] * 10)
    own, _ = nemo_rl.shard_by_batch_size(few, 2, sequence_packing_args=packing_args())
    assert not LAYOUT.is_legal_count(len(microbatches(own[0])[0]))
    nemo_rl.configure(layout=LAYOUT, cost=CostModel(fixed=1.0, per_token=1.0))
    made, _ = nemo_rl.shard_by_batch_size(data, 2, sequence_packing_args=packing_args())
    counts = {len(microbatches(shard)[0]) for shard in made}
    assert len(counts) == 1
    assert LAYOUT.is_legal_count(counts.pop())
    with pytest.raises(ValueError, match="10 samples cannot fill 12 micro-batches"):
        nemo_rl.shard_by_batch_size(few, 2, sequence_packing_args=packing_args())


def test_a_layout_with_another_dp_is_refused() -> None:
    nemo_rl.configure(layout=LAYOUT)
    with pytest.raises(ConfigError, match="dp=2, the batch 4 shards"):
        nemo_rl.shard_by_batch_size(batch_of([9] * 8), 4, sequence_packing_args=packing_args())


@pytest.mark.parametrize("planned", [False, True])
def test_alignment_counts_against_the_budget(planned: bool) -> None:
    nemo_rl.configure(layout=Layout(dp=1) if planned else None)
    args = packing_args(max_tokens_per_microbatch=1000, sequence_length_pad_multiple=64)
    with pytest.raises(ValueError, match="1024"):
        nemo_rl.shard_by_batch_size(batch_of([1000], 1000), 1, sequence_packing_args=args)


def test_dynamic_rectangles_are_the_same_on_every_shard() -> None:
    data = batch_of([2, 8, 4, 16, 28, 32, 2, 32])
    args = {
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "sequence_length_round": 4,
        "max_tokens_per_microbatch": 32,
    }
    shards, indices = nemo_rl.shard_by_batch_size(data, 2, dynamic_batching_args=args)
    # By length, rows 0 6 | 2 1 | 3 4 | 5 7: each shard gets one of each pair.
    assert [shard["row"] for shard in shards] == [[0, 2, 3, 5], [6, 1, 4, 7]]
    assert indices == [0, 2, 3, 5, 6, 1, 4, 7]
    for shard in shards:
        assert shard.micro_batch_indices == [[[0, 2], [2, 3], [3, 4]]]
        assert shard.micro_batch_lengths == [[8, 28, 32]]
    args["max_tokens_per_microbatch"] = 31
    with pytest.raises(AssertionError, match="32 padded tokens"):
        nemo_rl.shard_by_batch_size(data, 2, dynamic_batching_args=args)


class HostPacker(ABC):
    """NeMo-RL's base class, whose `__init__` megapack must not need."""

    def __init__(self) -> None:
        raise AssertionError("initialized")

    @abstractmethod
    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        """The host's rule."""


class ConcatenativePacker(HostPacker):
    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        return [["the host's"]]  # type: ignore[list-item]


def test_packers_are_of_the_hosts_class_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("nemo_rl.data.packing.algorithms")
    module.ConcatenativePacker = ConcatenativePacker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    packer = nemo_rl.get_packer("concatenative", 10, collect_metrics=True)
    assert isinstance(packer, HostPacker)
    assert isinstance(packer, ConcatenativePacker)
    assert packer.pack([5, 6]) == packer._pack_implementation([5, 6]) == [[0], [1]]
    assert packer.get_aggregated_metrics()["total_bins"] == 2
    assert type(nemo_rl.get_packer("concatenative", 10)) is type(packer)
    # The stub has no class for this algorithm.
    other = nemo_rl.get_packer("first_fit_decreasing", 10)
    assert not isinstance(other, HostPacker)
    monkeypatch.delitem(sys.modules, module.__name__)
    assert not isinstance(nemo_rl.get_packer("concatenative", 10), HostPacker)


def test_plans_for_a_pipeline_warn_of_rows_that_are_padded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warnings(layout: Layout) -> list[str]:
        nemo_rl._warn_of_padding.cache_clear()
        nemo_rl.configure(layout=layout)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            nemo_rl.shard_by_batch_size(batch_of([9] * 8), 2, sequence_packing_args=packing_args())
        return [record.message for record in caplog.records if "nemo_rl_rows" in record.message]

    assert len(warnings(Layout(dp=2, pp=2))) == 1
    assert not warnings(Layout(dp=2))
    monkeypatch.setattr(patching, "status", lambda: [types.SimpleNamespace(host="nemo_rl_rows")])
    assert not warnings(Layout(dp=2, pp=2))


@pytest.fixture
def originals(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the host's own functions, which the patches have replaced."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(patching, "original", lambda name: found[name])
    return found


def test_rows_are_padded_as_without_a_pipeline(originals: dict[str, Any]) -> None:
    name = "nemo_rl.models.megatron.data._get_pack_sequence_parameters_for_megatron"
    originals[name] = lambda *args: args
    given = {"pipeline_model_parallel_size": 4, "context_parallel_size": 2}
    config, *others = nemo_rl.pack_sequence_parameters(given, 8, 96)
    assert config == {"pipeline_model_parallel_size": 1, "context_parallel_size": 2}  # type: ignore[comparison-overlap]
    assert others == [8, 96]
    assert given["pipeline_model_parallel_size"] == 4


class Model(torch.nn.Module):
    def __init__(self, num_stages: int = 2, **config: Any) -> None:
        super().__init__()
        sizes = {"pipeline_model_parallel_size": num_stages, "variable_seq_lengths": False}
        self.config = types.SimpleNamespace(**sizes, **config)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_stages_take_any_length_within_a_step(originals: dict[str, Any], num_stages: int) -> None:
    model = Model(num_stages)

    def own(given: Model, *args: Any, **kwargs: Any) -> Any:
        return given.config.variable_seq_lengths, args, kwargs

    originals["nemo_rl.models.megatron.train.megatron_forward_backward"] = own
    varies = num_stages > 1
    assert nemo_rl.megatron_forward_backward(model, 1, mbs=2) == (varies, (1,), {"mbs": 2})
    assert model.config.variable_seq_lengths is False


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_moe_experts": 4, "moe_token_dispatcher_type": "allgather"}, "alltoall"),
        ({"enable_cuda_graph": True, "cuda_graph_impl": "local"}, "CUDA graphs"),
        ({"cuda_graph_impl": "local"}, "CUDA graphs"),
    ],
)
def test_models_that_need_rows_of_one_length_are_refused(
    originals: dict[str, Any], config: dict[str, Any], says: str
) -> None:
    originals["nemo_rl.models.megatron.train.megatron_forward_backward"] = lambda model: "ran"
    assert nemo_rl.megatron_forward_backward(Model(1, **config)) == "ran"
    with pytest.raises(ConfigError, match=says):
        nemo_rl.megatron_forward_backward(Model(**config))
