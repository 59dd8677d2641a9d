"""Row lengths come from the stage that has the embedding: others may get ids of another shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.schedule.planned import common_shapes
from megapack.schedule.reading import read_row_shapes


class Chunk(torch.nn.Module):
    def __init__(self, pre_process: bool) -> None:
        super().__init__()
        self.pre_process = pre_process


class Wrapper(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def forward_step(data_iterator: Iterator[Tensor], model: Any) -> Any:
    """Packs [2, 4] into [1, 6] where the model has an embedding, as SkyRL does."""
    ids = next(data_iterator)
    return model(ids.reshape(1, -1)[:, :6] if model.module.pre_process else ids), None


@pytest.mark.parametrize(("pre_process", "shape"), [(True, (6, 1)), (False, None)])
def test_only_ids_of_an_embedding_give_lengths(
    pre_process: bool, shape: tuple[int, int] | None
) -> None:
    chunk = Wrapper(Chunk(pre_process))
    shapes, iterator = read_row_shapes(
        forward_step, iter([torch.zeros(2, 4)]), [chunk], 1, sequence_shards=1
    )
    assert shapes == [shape]
    assert next(iterator).shape == (2, 4)


def test_one_stage_that_knows_is_enough() -> None:
    assert common_shapes([[(6, 1)], [None]]) == [(6, 1)]
