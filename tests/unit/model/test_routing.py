"""Rows as routers see them: auxiliary losses, replayed and recorded choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapack import Layout, MicroBatch
from megapack.errors import DataError
from megapack.model.experts.rows import (
    RoutingShape,
    balance_loss,
    routing_row,
    z_loss,
)
from megapack.rows.packed import PackedRow, RoutingRow
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch

pytestmark = pytest.mark.unit

SHAPE = RoutingShape(num_layers=2, num_experts=4, top_k=2)
BATCH = SampleBatch([[5, 6, 7], [8], [1, 2, 3, 4]])


def packed(samples: tuple[int, ...], row_tokens: int) -> PackedRow:
    tokens = sum(BATCH.length(i) for i in samples)
    micro_batch = MicroBatch(samples, row_tokens, tokens, tokens_sq=0, padded_tokens=tokens)
    return pack_row(BATCH, micro_batch, Layout())


def whole(row: PackedRow, choices: list[Tensor | None] | None = None) -> RoutingRow:
    return routing_row(row, torch.arange(row.row_tokens), choices, SHAPE)


def some_choices(seed: int = 0) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.rand(BATCH.length(i), 2, 4, generator=generator) for i in range(len(BATCH))]
    return [value.argsort(-1)[..., :2] for value in noise]


def routed(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.randn(num_tokens, 4, generator=torch.Generator().manual_seed(1))
    scores = logits.softmax(-1)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(2).indices, True)
    return logits, scores, chosen


def test_padding_has_no_loss_and_no_gradient() -> None:
    logits, _, chosen = routed(12)
    logits.requires_grad_()
    row = whole(packed((2, 0), 12))
    loss = balance_loss(logits.softmax(-1), chosen, row, 2) + z_loss(logits, row)
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad[:7].abs().min() > 0
    assert not grad[7:].any()
    shorter = whole(packed((2, 0), 7))
    assert z_loss(logits[:7], shorter).item() == pytest.approx(z_loss(logits, row).item())


def test_choices_are_at_their_tokens_padding_round_robin() -> None:
    choices = some_choices()
    row = whole(packed((2, 0), 9), choices)
    assert row.choices_tLK is not None
    assert torch.equal(row.choices_tLK[:4].long(), choices[2])
    assert torch.equal(row.choices_tLK[4:7].long(), choices[0])
    assert row.choices_tLK[7:, 0].tolist() == [[2, 3], [0, 1]]


def test_the_last_token_may_be_missing() -> None:
    choices = some_choices()
    assert choices[2] is not None
    choices[2] = choices[2][:-1]
    row = whole(packed((2,), 4), choices)
    assert row.choices_tLK is not None
    assert torch.equal(row.choices_tLK[:3].long(), choices[2])
    assert row.choices_tLK[3, 0].tolist() == [2, 3]


def test_a_slice_has_the_choices_of_its_tokens() -> None:
    row = packed((2, 0), 8)
    part = routing_row(row, torch.arange(4, 8), some_choices(), SHAPE)
    full = whole(row, some_choices())
    assert part.branches_t.tolist() == [1, 1, 1, 2]
    assert part.choices_tLK is not None
    assert full.choices_tLK is not None
    assert torch.equal(part.choices_tLK, full.choices_tLK[4:])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (None, r"sample 0 has routing None, not \(3, 2, 2\)"),
        (torch.zeros(2, 1, 2, dtype=torch.int64), r"routing \(2, 1, 2\), not \(3, 2, 2\)"),
        (torch.tensor([[[0, 4]] * 2] * 3), r"not integers in \[0, 4\)"),
        (torch.tensor([[[0, -1]] * 2] * 3), r"not integers in \[0, 4\)"),
        (torch.tensor([[[0.0, 1.0]] * 2] * 3), "not integers"),
        (torch.tensor([[[3, 3]] * 2] * 3), "names an expert twice"),
    ],
)
def test_choices_that_do_not_fit_are_refused(broken: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        whole(packed((0,), 3), [broken, None, None])
