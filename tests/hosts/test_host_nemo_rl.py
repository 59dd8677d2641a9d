"""megapack.hosts.nemo_rl through NeMo-RL's own signatures."""

from __future__ import annotations

import logging
import types
from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack import ConfigError, CostModel, Layout, patching
from megapack.hosts import nemo_rl
from tests.hosts.partitions import HostPacker, sharded

pytestmark = pytest.mark.hosts


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


OWN = "nemo_rl.distributed.batched_data_dict.BatchedDataDict.shard_by_batch_size"


@pytest.fixture(autouse=True)
def packer(originals: dict[str, Any]) -> dict[str, Any]:
    """NeMo-RL's own functions are stand-ins; returns what `get_packer` was called with."""
    called: dict[str, Any] = {}

    def own(
        algorithm: Any,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> HostPacker:
        called.update(algorithm=algorithm, metrics=collect_metrics)
        return HostPacker(bin_capacity, min_bin_count, bin_count_multiple)

    originals["nemo_rl.data.packing.algorithms.get_packer"] = own
    originals[OWN] = sharded
    return called


def test_missing_bins_are_split_off_the_heaviest(packer: dict[str, Any]) -> None:
    made = nemo_rl.get_packer("concatenative", 100, True, bin_count_multiple=4)
    assert packer == {"algorithm": "concatenative", "metrics": True}
    assert isinstance(made, HostPacker)
    # NeMo-RL would move one sequence each: 5, 1, 1, 1.
    assert sorted(map(len, made.pack([10] * 8))) == [2, 2, 2, 2]
    assert made.pack([60, 60, 60, 60]) == [[0], [1], [2], [3]]
    with pytest.raises(ValueError, match="Cannot create 4 bins with only 3 sequences"):
        made.pack([10] * 3)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=40),
    shards=st.integers(1, 4),
    unit=st.sampled_from([1, 4, 16]),
)
def test_packed_shards(lengths: list[int], shards: int, unit: int) -> None:
    step_rows = 2 * shards
    lengths = lengths[: len(lengths) // step_rows * step_rows]
    nemo_rl.configure(layout=Layout(dp=shards))
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
    few = batch_of([90] * 10)
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


class Model(torch.nn.Module):
    def __init__(self, num_stages: int = 2, **config: Any) -> None:
        super().__init__()
        sizes = {"pipeline_model_parallel_size": num_stages, "variable_seq_lengths": False}
        self.config = types.SimpleNamespace(**sizes, **config)


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
    own = {"nemo_rl.models.megatron.train.megatron_forward_backward": lambda *_: "ran"}
    originals.update(own)
    assert nemo_rl.megatron_forward_backward(Model(1, **config), iter(())) == "ran"
    with pytest.raises(ConfigError, match=says):
        nemo_rl.megatron_forward_backward(Model(**config), iter(()))


@pytest.mark.parametrize("key", ["draft", "router_replay"])
def test_what_looks_at_one_chunk_is_refused_with_virtual_stages(key: str) -> None:
    def read(vpp: int | None) -> None:
        overrides = {"virtual_pipeline_model_parallel_size": vpp}
        nemo_rl.read_settings(
            {"megatron_cfg": {"model_overrides": overrides}, key: {"enabled": True}}
        )

    read(None)
    with pytest.raises(ConfigError, match=rf"policy.{key} does not run with vpp=2"):
        read(2)
    nemo_rl.read_settings({"megatron_cfg": {}, key: None})


@pytest.mark.parametrize(
    ("layout", "vpp", "says"),
    [
        (None, 2, "has pp=4 and vpp=2, policy.megapack.layout pp=1 and vpp=1; set"),
        ({"pp": 4}, 2, "policy.megapack.layout pp=4 and vpp=1"),
        ({"pp": 2, "vpp": 2}, 2, "policy.megapack.layout pp=2 and vpp=2"),
        ({"pp": 4, "vpp": 2}, 1, "has pp=4 and vpp=1, policy.megapack.layout pp=4 and vpp=2"),
        ({"pp": 4, "vpp": 2}, 2, None),
        ({"pp": 4}, None, None),
        (None, 1, None),
    ],
)
def test_virtual_stages_that_the_layout_does_not_have_are_refused(
    layout: dict[str, int] | None,
    vpp: int | None,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver says so at its start, and not a worker's schedule at some later step."""
    asked = [types.SimpleNamespace(host="nemo_rl_vpp")]
    monkeypatch.setattr(nemo_rl.patching, "status", lambda: asked)
    overrides = {"virtual_pipeline_model_parallel_size": vpp}
    config = {
        "megapack": {"layout": layout},
        "megatron_cfg": {"pipeline_model_parallel_size": 4, "model_overrides": overrides},
        "sequence_packing": {"enabled": True},
    }
    if says is None:
        nemo_rl.read_settings(config)
        return
    with pytest.raises(ConfigError, match=says):
        nemo_rl.read_settings(config)


@pytest.mark.parametrize(("vpp", "says"), [(2, "needs the patch nemo_rl_vpp"), ("2", "='2'; set")])
def test_virtual_stages_need_their_patch(vpp: object, says: str) -> None:
    overrides = {"virtual_pipeline_model_parallel_size": vpp}
    with pytest.raises(ConfigError, match=says):
        nemo_rl.read_settings({"megatron_cfg": {"model_overrides": overrides}})


class Chunk(torch.nn.Linear):
    """What `OneModel` reads of a chunk in Megatron's DDP."""

    def __init__(self, number: int) -> None:
        super().__init__(1, 1, bias=False)
        self.config = self.ddp_config = types.SimpleNamespace()
        self.remove_forward_pre_hook_handles: dict[Any, Any] = {}
        self.module = torch.nn.Identity()
        self.called: list[Any] = []
        vars(self).update(buffers=[number], expert_parallel_buffers=[-number])

    def zero_grad_buffer(self) -> None:
        self.called.append("zero")

    def enable_forward_pre_hook(self) -> None:
        self.called.append("enable")

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        self.called.append(param_sync)


def test_one_model_is_all_chunks_of_a_rank() -> None:
    from megapack.hosts.shared.chunks import OneModel, in_lists

    chunks = [Chunk(1), Chunk(2)]
    model = OneModel(list(chunks))
    assert in_lists([model]) == in_lists(chunks) == in_lists(model) == chunks
    assert in_lists(chunks[0]) == chunks[:1]
    model.zero_grad_buffer()
    model.disable_forward_pre_hook(param_sync=False)
    assert [chunk.called for chunk in chunks] == [["zero", False]] * 2
    assert (model.buffers, model.expert_parallel_buffers) == ([1, 2], [-1, -2])
    assert model.state_dict().keys() == {"0.weight", "1.weight"}
    assert model.module is chunks[0].module
    assert len(list(model.parameters())) == 2
    assert not model.eval().chunks[1].training
    for call in (model, model.no_sync):
        with pytest.raises(ConfigError, match="2 chunks run in Megatron's schedule only"):
            call()
