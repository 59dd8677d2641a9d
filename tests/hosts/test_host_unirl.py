from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack import ConfigError, PlanError, patching
from megapack.hosts import unirl
from megapack.hosts.unirl import MicroPlan, plan_micro_batches
from tests.dist.spawn import checked_job

pytestmark = pytest.mark.hosts


def planned(response: list[int], **fields: Any) -> MicroPlan:
    plan = plan_micro_batches(response, num_samples=len(response), **fields)
    assert plan is not None
    return plan


def micros(plan: MicroPlan) -> list[list[list[int]]]:
    """The micro-batches of each update, as track indices."""
    return [[plan.order[start:end] for start, end in update] for update in plan.updates]


def test_budgets_are_of_rectangles() -> None:
    """Samples of 50 and 10 tokens: a mixed rectangle wastes 40."""
    plan = planned([50, 10, 50, 10], micro_token_budget=120)
    assert micros(plan) == [[[0, 2], [1, 3]]]
    assert plan.computed_tokens == 2 * 50 + 2 * 10
    assert plan.efficiency == 1


def test_budgets_of_sums_are_of_real_tokens() -> None:
    plan = planned([50, 10, 50, 10], micro_token_budget=120, micro_cost_model="sum")
    assert micros(plan) == [[[0, 2, 1, 3]]]
    assert plan.computed_tokens == 120
    with pytest.raises(ConfigError, match="micro_cost_model='max'; set one of"):
        planned([1], micro_token_budget=9, micro_cost_model="max")


def test_without_a_budget_plans_are_by_count() -> None:
    plan = planned([5] * 6, num_updates=2, micro_batch_size=2)
    assert micros(plan) == [[[0, 1], [2]], [[3, 4], [5]]]
    assert (plan.efficiency, plan.sample_shares(0)) == (1, [2 / 3, 1 / 3])
    with pytest.raises(PlanError, match="plans by count know no tokens; set micro_token_budget"):
        plan.token_shares(0)


@settings(max_examples=40)
@given(
    response=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    copies=st.integers(1, 3),
    budget=st.integers(10, 150),
    data=st.data(),
)
def test_micro_batches_of_any_track(
    response: list[int], copies: int, budget: int, data: st.DataObject
) -> None:
    response = response * copies
    n = len(response)
    prompt = data.draw(st.none() | st.lists(st.integers(0, 40), min_size=n, max_size=n))
    fields = {"num_updates": copies, "prompt_lengths": prompt}
    plan = planned(response, micro_token_budget=budget, **fields)
    assert plan == planned(response, micro_token_budget=budget, **fields)
    size = n // copies
    own = [sorted(chain(*update)) for update in micros(plan)]
    assert own == [[*range(start, start + size)] for start in range(0, n, size)]
    prompts = prompt or [0] * n
    for members in chain(*micros(plan)):
        longest = max(prompts[i] for i in members) + max(max(1, response[i]) for i in members)
        assert longest * len(members) <= budget or len(members) == 1
    assert sum(plan.sample_shares(0)) == pytest.approx(1)
    assert plan.tokens == sum(prompts) + sum(response)
    assert 0 <= plan.efficiency <= 1


def test_ranks_agree_or_raise_together() -> None:
    """Two gloo processes; a rank that waited for the other would time out."""
    output = checked_job(2, "tests.hosts.unirl_worker", [], timeout_s=120)
    line = next(line for line in output.splitlines() if line.startswith("RESULT"))
    ranks = json.loads(line.removeprefix("RESULT "))
    # 4 samples of 30 tokens fill 2 micro-batches of 100; 4 of 90 tokens need 4.
    assert [[len(update) for update in rank["unequal"][1]] for rank in ranks] == [[4, 2]] * 2
    # 120 tokens per update on rank 0; 360 and 40 on rank 1. Each rank's mean is 240 and 80.
    shares = [[sum(update) for update in rank["unequal"][2]] for rank in ranks]
    assert shares == [[120 / 240, 120 / 80], [360 / 240, 40 / 80]]
    assert [rank["no lengths on rank 1"] for rank in ranks] == [None] * 2
    for rank in ranks:
        assert "1 of 2 ranks failed: rank 1: PlanError: 7 samples" in rank["rank 1 cannot divide"]
        assert "rank 1: ValueError" in rank["rank 1 has garbage"]
        assert "ranks [1] differ from the other 1 in batching options" in rank["budgets differ"]
        assert "rank 1: ConfigError: micro_token_budget=0" in rank["no budget of rank 1"]
        assert "needs 4 micro-batches in an update, another has 1" in rank["too few on rank 0"]


@pytest.mark.parametrize(
    "change",
    [
        {"num_updates": 0},
        {"micro_token_budget": 0},
        {"num_updates": 3},
    ],
)
def test_settings_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"set (an integer|a divisor)"):
        planned([5, 5], **{"micro_token_budget": 9, **change})


@dataclass
class Part:
    """A micro-batch's prompts, as UniRL's track has them."""

    conditions: dict[str, Any]
    batch_size: int = 2


@dataclass
class Prompts:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


@pytest.mark.parametrize(
    ("mask", "width"),
    [
        ([[1, 0, 0, 0], [1, 1, 0, 0]], 2),
        ([[1, 1, 1, 1], [1, 1, 0, 0]], 4),
        # Padding on the left is no column that all prompts pad.
        ([[0, 0, 1, 1], [0, 1, 1, 0]], 4),
        ([[0, 0, 0, 0], [0, 0, 0, 0]], 1),
    ],
)
def test_columns_that_are_padding_in_all_prompts_are_cut_off(
    mask: list[list[int]], width: int
) -> None:
    ids = torch.arange(8).reshape(2, 4)
    for kind in (torch.long, torch.bool):
        part = Part({"prompt": Prompts(ids, torch.tensor(mask, dtype=kind)), "image": "kept"})
        found = unirl.trimmed(part)
        assert found.conditions["prompt"].input_ids.equal(ids[:, :width])
        assert found.conditions["prompt"].attention_mask.equal(
            torch.tensor(mask)[:, :width].to(kind)
        )
        assert found.conditions["image"] == "kept"
        assert part.conditions["prompt"].input_ids.shape == (2, 4), "the track's own is untouched"


def test_prompts_without_a_mask_stay() -> None:
    for conditions in (
        {},
        {"prompt": None},
        {"prompt": Prompts(torch.ones(2, 0), torch.ones(2, 0))},
    ):
        part = Part(conditions)
        assert unirl.trimmed(part) is part


def test_an_empty_response_is_a_computed_token_and_no_real_one() -> None:
    plan = planned([0, 4], prompt_lengths=[5, 5], micro_token_budget=10)
    assert (plan.tokens, plan.computed_tokens) == (14, 6 + 9)


class DRPO(SimpleNamespace):
    """An algorithm with the name of UniRL's."""


def made_stack(monkeypatch: pytest.MonkeyPatch, algorithm: Any, **options: Any) -> None:
    """A stack by the patch's constructor."""
    monkeypatch.setattr(patching, "original", lambda name: lambda self, **kw: None)
    unirl.init_stack(
        SimpleNamespace(),
        fsdp_backend=None,
        algorithm=algorithm,
        micro_batch_size=2,
        max_grad_norm=1.0,
        **options,
    )


@pytest.mark.parametrize(
    ("algorithm", "options", "says"),
    [
        (SimpleNamespace(loss_agg_mode=None), {}, "no mean over sequences or tokens"),
        (DRPO(loss_agg_mode="seq-mean-token-mean"), {}, "DRPO does not know it"),
        (SimpleNamespace(loss_agg_mode="token-mean"), {"micro_token_budget": 0}, "token_budget"),
    ],
)
def test_a_stack_refuses_what_would_not_be_exact_or_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, algorithm: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        made_stack(monkeypatch, algorithm, **{"micro_token_budget": 64, **options})
