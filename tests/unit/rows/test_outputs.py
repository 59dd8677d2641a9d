"""Per-token results in sample order, with the numbers of the docstrings."""

from __future__ import annotations

import doctest

import pytest
import torch

import megapack.rows.outputs
from megapack import MicroBatch
from megapack.plan import StepPlan
from megapack.rows.outputs import scatter_to_samples, sum_metrics
from tests.groups import RankOf

pytestmark = pytest.mark.unit


def test_doctests_of_the_module() -> None:
    result = doctest.testmod(megapack.rows.outputs)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_docstring_example_is_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    other_rank = torch.tensor([0.0, 2.0, 3.0, 0.0, 6.0])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: x.add_(other_rank))
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


def test_metrics_missing_on_a_rank_count_as_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: x.add_(1))
    sums = sum_metrics(
        {"loss": torch.tensor(0.5)},
        ["loss", "entropy"],
        dp_cp_group=None,
        pp_group=RankOf(0, 1),
        device=torch.device("cpu"),
    )
    assert sums == {"loss": 1.5, "entropy": 1.0}
