"""Tensors of samples that share their first tokens: a row gets those of the prefix once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megapack import Layout, MicroBatch, SharedPrefixes
from megapack.errors import DataError
from megapack.prefixes import PrefixTable
from megapack.rows.packed import PackedRow
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch, TensorField

pytestmark = pytest.mark.unit

# A tree of depth 2 (samples 0, 2 and 3), a pair (1 and 5), and a sample by itself.
SAMPLES = [
    [5, 6, 7, 8, 1],
    [1, 2, 3, 4],
    [5, 6, 7, 8, 2, 2],
    [5, 6, 9],
    [7, 7],
    [1, 2, 3, 5],
]


def images(*values: int) -> list[Any]:
    """Per sample one image of two pixels that hold a value; None for 0."""
    return [torch.full((1, 2), float(value)) if value else None for value in values]


def row_of(field: TensorField, samples: list[int] | None = None) -> PackedRow:
    batch = SampleBatch(SAMPLES, tensors={"pixels": field})
    order = tuple(range(len(SAMPLES)) if samples is None else samples)
    table = PrefixTable(SharedPrefixes.from_samples(SAMPLES), batch.lengths, Layout())
    tokens = sum(len(SAMPLES[i]) for i in order)
    micro_batch = MicroBatch(order, tokens, tokens, 0, tokens)
    return pack_row(batch, micro_batch, Layout(), prefixes=table)


def test_a_tree_gets_its_tensor_once() -> None:
    row = row_of(TensorField(images(3, 4, 3, 3, 9, 4), of_prefix=True))
    pixels = row.tensors["pixels"]
    assert isinstance(pixels, torch.Tensor)
    assert pixels[:, 0].tolist() == [3, 4, 9]


def test_a_list_has_one_tensor_per_tree() -> None:
    field = TensorField(images(3, 4, 3, 3, 9, 4), combine="list", of_prefix=True)
    pixels = row_of(field).tensors["pixels"]
    assert [tensor[0, 0].item() for tensor in pixels] == [3, 4, 9]


def test_samples_that_meet_no_relative_keep_their_tensors() -> None:
    pixels = row_of(TensorField(images(3, 4, 3, 3, 9, 4)), [0, 1, 4]).tensors["pixels"]
    assert isinstance(pixels, torch.Tensor)
    assert pixels[:, 0].tolist() == [3, 4, 9]


def test_different_tensors_of_one_prefix_are_refused() -> None:
    with pytest.raises(DataError, match=r"samples 0 and 3 share .*'pixels' differ; give equal"):
        row_of(TensorField(images(3, 4, 3, 8, 9, 4), of_prefix=True))


def test_tensors_that_are_not_declared_as_the_prefix_s_are_refused() -> None:
    with pytest.raises(DataError, match=r"samples 1 and 5 share .*'pixels'; set .*of_prefix=True"):
        row_of(TensorField(images(0, 4, 0, 0, 9, 0)))
    row = row_of(TensorField(images(0, 0, 0, 0, 9, 0)))
    assert [tensor.tolist() for tensor in row.tensors["pixels"]] == [[9, 9]]


def test_the_declaration_is_part_of_what_ranks_agree_on() -> None:
    signatures = {
        SampleBatch(
            SAMPLES, tensors={"pixels": TensorField(images(3, 4, 3, 3, 9, 4), of_prefix=of_prefix)}
        ).tensor_signature
        for of_prefix in (False, True)
    }
    assert len(signatures) == 2
