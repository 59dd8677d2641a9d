"""megapack.hosts.megatron_bridge: rows as samples, the forward step's way in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megapack.errors import ConfigError, ScheduleError
from megapack.hosts import megatron_bridge, megatron_lm
from megapack.hosts.megatron_lm.data import read_item

pytestmark = pytest.mark.hosts


def packed_row() -> dict[str, Any]:
    """A row of Bridge's data set: samples of 3 and 2 tokens, padded to 8."""
    tokens = [5, 6, 7, 8, 9, 2, 2, 2]
    return {
        "tokens": torch.tensor([tokens]),
        "labels": torch.tensor([[6, 7, 1, 9, 4, 2, 2, 2]]),
        "loss_mask": torch.tensor([[0, 1, 1, 0, 1, 0, 0, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]]),
        "cu_seqlens": torch.tensor([[0, 3, 5, 8, -1]], dtype=torch.int32),
        "token_count": [5],
    }


def test_a_row_is_cut_into_its_samples_without_padding() -> None:
    samples = read_item(megatron_bridge.without_fill(packed_row()))
    assert [sample["tokens"].tolist() for sample in samples] == [[5, 6, 7, 1], [8, 9, 4]]
    masks = [sample["response_mask"].tolist() for sample in samples]
    assert masks == [[False, False, True, True], [False, False, True]]


def test_bounds_of_megatron_core_are_read() -> None:
    """0.6 fills up with the last bound; `cu_seqlens_q` is not the samples' places if they have
    padding of their own."""
    row = packed_row()
    del row["cu_seqlens"]
    row["cu_seqlens_q"] = torch.tensor([[0, 3, 5, 8, 8]], dtype=torch.int32)
    expected = [[5, 6, 7, 1], [8, 9, 4]]
    samples = read_item(megatron_bridge.without_fill(row))
    assert [sample["tokens"].tolist() for sample in samples] == expected
    row["cu_seqlens_q_padded"] = row["cu_seqlens_q"]
    row["cu_seqlens_q"] = torch.tensor([[0, 2, 4, 4, 4]], dtype=torch.int32)
    samples = read_item(megatron_bridge.without_fill(row))
    assert [sample["tokens"].tolist() for sample in samples] == expected


def test_a_planned_step_without_the_patch_is_refused() -> None:
    with pytest.raises(ScheduleError, match='apply\\("megatron_bridge"\\)'):
        megatron_bridge.PlannedStep(max_tokens_per_gpu=8)(None, None)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"adjust_tensor_shapes_fn": len}, "adjust_tensor_shapes_fn"),
        ({"collect_non_loss_data": True}, "collect_non_loss_data"),
        ({}, "use_decentralized_pg=True"),
    ],
)
def test_what_a_planned_step_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, argument: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(
        "megatron.core.pipeline_parallel.get_forward_backward_func", lambda: lambda **step: None
    )
    schedule = megatron_lm.get_forward_backward_func()
    step = megatron_bridge.PlannedStep(max_tokens_per_gpu=8)
    with pytest.raises(ConfigError, match=message):
        schedule(
            forward_step_func=step,
            data_iterator=None,
            model=None,
            num_microbatches=1,
            **argument,
        )
