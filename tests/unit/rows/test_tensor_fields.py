from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megapack import ConfigError, DataError, Layout, MicroBatch
from megapack.rows.packed import PackedRow
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch, TensorField
from megapack.schedule.forward import accepted_inputs

pytestmark = pytest.mark.unit

TOKENS = [[1, 2, 3], [4], [5, 6]]
PIXELS = [torch.arange(12.0).reshape(2, 2, 3), None, np.full((1, 2, 3), 7.0)]
GRIDS = [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(0), torch.ones(4)]


def batch(**tensors: Any) -> SampleBatch:
    return SampleBatch(TOKENS, tensors=tensors)


def row_of(data: SampleBatch, samples: tuple[int, ...]) -> PackedRow:
    sizes = [data.length(i) for i in samples]
    micro_batch = MicroBatch(
        samples, sum(sizes) or 1, sum(sizes), sum(n * n for n in sizes), sum(sizes)
    )
    return pack_row(data, micro_batch, Layout())


def test_tensors_follow_their_sample_in_row_order() -> None:
    data = batch(pixels=TensorField(PIXELS), grids=TensorField(GRIDS, combine="list"))
    row = row_of(data, (2, 1, 0))
    pixels = row.tensors["pixels"]
    grids = row.tensors["grids"]
    assert isinstance(pixels, torch.Tensor)
    assert pixels.shape == (3, 2, 3)
    assert pixels.dtype == torch.float32
    assert pixels[0].eq(7).all()
    assert torch.equal(pixels[1:], torch.arange(12.0).reshape(2, 2, 3))
    assert isinstance(grids, tuple)
    assert [tuple(grid.shape) for grid in grids] == [(4,), (0,), (2, 3)]
    moved = row.to("meta")
    assert moved.tensors["pixels"].device.type == "meta"  # type: ignore[union-attr]
    assert {grid.device.type for grid in moved.tensors["grids"]} == {"meta"}


def test_a_padding_micro_batch_has_empty_tensors() -> None:
    pixels = TensorField([torch.zeros(1, 2, 3, dtype=torch.bfloat16), None, None])
    row = row_of(batch(pixels=pixels, grids=TensorField(GRIDS, combine="list")), ())
    assert row.tensors["pixels"].shape == (0, 2, 3)  # type: ignore[union-attr]
    assert row.tensors["pixels"].dtype == torch.bfloat16  # type: ignore[union-attr]
    assert row.tensors["grids"] == ()
    assert row_of(SampleBatch(TOKENS), (0,)).tensors == {}


@pytest.mark.parametrize(
    ("field", "match"),
    [
        (TensorField(PIXELS[:2]), "2 values for 3 samples"),
        (TensorField([None] * 3), "3 samples have None"),
        (TensorField([*GRIDS[:2], None], combine="list"), "1 samples have None"),
        (TensorField([torch.zeros(1, 2), torch.zeros(1, 3), None]), "sample 1: .*combine='list'"),
        (TensorField([1.0, 2.0, 3.0]), "is one number"),
        (TensorField([["a"], None, None]), "cannot be a tensor"),
    ],
)
def test_tensors_that_do_not_combine_are_refused(field: TensorField, match: str) -> None:
    with pytest.raises(DataError, match=match):
        batch(pixels=field)


def test_names_and_combine_are_checked() -> None:
    with pytest.raises(DataError, match="set another name"):
        batch(input_ids=TensorField(PIXELS))
    with pytest.raises(ConfigError, match="set one of"):
        TensorField(PIXELS, combine="stack")  # type: ignore[arg-type]


def test_signatures_differ_by_name_shape_dtype_and_combine() -> None:
    one = torch.zeros(1, 2)
    fields = [
        {},
        {"a": TensorField([one, one, None])},
        {"b": TensorField([one, one, None])},
        {"a": TensorField([one, None, one])},
        {"a": TensorField([one.int(), one.int(), None])},
        {"a": TensorField([one, one, one[:0]], combine="list")},
    ]
    assert len({batch(**tensors).tensor_signature for tensors in fields}) == len(fields)
    assert batch(**fields[1]).tensor_signature == batch(**fields[1]).tensor_signature


def test_a_chunk_gets_the_tensors_its_forward_accepts() -> None:
    class ModelWithPixels(torch.nn.Module):
        def forward(self, input_ids: Any, pixels: Any = None, **more: Any) -> None: ...

    names = ("pixels", "grids")
    assert accepted_inputs(ModelWithPixels(), names) == ("pixels",)
    assert accepted_inputs(torch.nn.Sequential(ModelWithPixels()), names) == ()
    assert accepted_inputs(torch.nn.Linear(1, 1), names) == ()
