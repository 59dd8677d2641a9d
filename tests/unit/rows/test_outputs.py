"""Per-token results in sample order, with the numbers of the docstrings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megapack import MicroBatch
from megapack.plan import StepPlan
from megapack.rows.outputs import reduce_metrics, scatter_to_samples
from tests.groups import RankOf

pytestmark = pytest.mark.unit


def test_the_docstring_example_is_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    other_rank = torch.tensor([0.0, 2.0, 3.0, 0.0, 6.0])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, op, group: x.add_(other_rank))
    row = MicroBatch((2, 0), row_tokens=5, tokens=5, tokens_sq=13, padded_tokens=5)
    found = scatter_to_samples(
        {2: torch.tensor([5.0, 0.0]), 0: torch.tensor([1.0, 0.0, 0.0])},
        [3, 1, 2],
        StepPlan(((row,),), 1, None, (), ()),
        dp_rank=0,
        dp_cp_group=None,
        cp_group=RankOf(0, 2),
        pp_group=RankOf(0, 1),
        scope="dp_rank",
        device=torch.device("cpu"),
    )
    assert [None if x is None else x.tolist() for x in found] == [[1, 2, 3], None, [5, 6]]


def test_of_maxima_the_largest_of_the_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {torch.distributed.ReduceOp.SUM: [1.0], torch.distributed.ReduceOp.MAX: [2.0, 0.0]}

    def all_reduce(x: torch.Tensor, op: Any, group: None) -> None:
        is_sum = op == torch.distributed.ReduceOp.SUM
        theirs = torch.tensor(other[op], dtype=x.dtype)
        x.copy_(x + theirs if is_sum else torch.maximum(x, theirs))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    found = reduce_metrics(
        {"loss": torch.tensor(0.5), "b_max": torch.tensor(1.5)},
        ["a_max", "loss", "b_max"],
        dp_cp_group=None,
        pp_group=RankOf(0, 1),
        device=torch.device("cpu"),
    )
    assert found == {"a_max": 2.0, "loss": 1.5, "b_max": 1.5}
    assert list(found) == ["a_max", "loss", "b_max"]
