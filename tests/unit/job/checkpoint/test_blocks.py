"""Slices of a flattened tensor as blocks: they cover it exactly, in order."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megapack.errors import CheckpointError
from megapack.job.checkpoint.blocks import flat_blocks, own_blocks

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2, 2)])
def test_the_blocks_of_every_slice_hold_its_elements_in_order(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    whole = torch.arange(numel).view(shape)
    for start in range(numel):
        for end in range(start, numel + 1):
            found = []
            for offsets, sizes in flat_blocks(shape, start, end):
                index = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                assert whole[index].shape == torch.Size(sizes)
                found += whole[index].flatten().tolist()
            assert found == list(range(start, end))


def test_a_slice_has_few_blocks() -> None:
    assert flat_blocks((3, 4), 2, 12) == [((0, 2), (1, 2)), ((1, 0), (2, 4))]
    assert flat_blocks((3, 4), 5, 7) == [((1, 1), (1, 2))]
    assert len(flat_blocks((100, 100), 50, 9950)) == 3


class _Optimizer:
    """Holds elements 3 to 9 of one parameter, as Megatron's distributed optimizer does."""

    def __init__(self, param: torch.Tensor) -> None:
        of_param = type("Range", (), {"start": 3, "end": 9})
        self.gbuf_ranges = [{"dtype": [{"param_map": {param: {"param": of_param}}}]}]
        main = torch.arange(3.0, 9.0)
        self.model_float16_groups: list[list[torch.Tensor]] = [[]]
        self.shard_fp32_from_float16_groups: list[list[torch.Tensor]] = [[]]
        self.model_fp32_groups = [[param]]
        self.shard_fp32_groups = [[main]]
        self.optimizer = type("Adam", (), {"state": {main: {"step": torch.tensor(1.0)}}})


def _halves(param: torch.Tensor, axis: int) -> ShardedTensorFactory:
    """A parameter that is saved as two tensors, like SwiGLU's two projections."""

    def build(key: str, data: torch.Tensor, replica_id: object, _: object) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                (axis, index, 2),
                replica_id=replica_id,  # type: ignore[arg-type]
            )
            for index, half in enumerate(torch.chunk(data, 2, dim=axis))
        ]

    return ShardedTensorFactory("w", param, build, lambda state: state, (0, 1, 2))


def test_a_parameter_saved_as_two_tensors() -> None:
    param = torch.empty(4, 3)
    blocks = list(own_blocks(_Optimizer(param), {"model0": {"w": _halves(param, 0)}}))
    assert {block.key for block in blocks} == {"optimizer.state.param.w"}
    assert [block.global_offset for block in blocks] == [(1, 0), (2, 0)]
    assert [block.data.tolist() for block in blocks] == [[[3, 4, 5]], [[6, 7, 8]]]
    # Replicas over tp do not write; those over dp hold other slices.
    assert {block.replica_id for block in blocks} == {(0, 1, 0)}


def test_a_parameter_whose_parts_are_no_slices_is_refused() -> None:
    param = torch.empty(3, 4)
    with pytest.raises(CheckpointError, match=r"of w cannot be saved in slices; set optim"):
        list(own_blocks(_Optimizer(param), {"model0": {"w": _halves(param, 1)}}))
