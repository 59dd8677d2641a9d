"""StepCall: what ranks must agree on, and when rows packed ahead can be used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megapack import Layout, build_dp_schedule
from megapack.errors import ConfigError, DataError
from megapack.loss import PPO, SFT
from megapack.plan import Plan
from megapack.policy import Policy
from megapack.samples import SampleBatch
from megapack.schedule.call import StepCall

pytestmark = pytest.mark.unit

TOKENS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2], [3, 4, 5], [6, 7]]


def batch() -> SampleBatch:
    return SampleBatch(TOKENS)


def plan(num_steps: int = 2, budget: int = 8) -> Plan:
    lengths = [len(ids) for ids in TOKENS]
    return build_dp_schedule(
        lengths, layout=Layout(), max_tokens_per_gpu=budget, num_steps=num_steps
    )


def shared_options() -> dict[str, Any]:
    return {
        "plan": plan(),
        "batch": batch(),
        "step": 0,
        "revision": 0,
        "routing": None,
        "entropy": False,
    }


def training(**changes: Any) -> StepCall:
    options = {"objective": SFT(), "weighting": "token-mean", "norm_constant": None}
    return StepCall(**{**shared_options(), **options, **changes})


def forward(**changes: Any) -> StepCall:
    options = {"scope": "all", "record_routing": False}
    return StepCall(**{**shared_options(), **options, **changes})


def test_the_executor_follows_the_plan() -> None:
    split = replace(plan(), policy=Policy(backward="split"))
    assert (training().executor, training(plan=split).executor) == ("megatron", "operations")
    assert training(executor_choice="operations").executor == "operations"
    with pytest.raises(ConfigError, match=r"executor=megatron with backward=split: .* set ex"):
        _ = training(plan=split, executor_choice="megatron").executor


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("plan", training(plan=plan(budget=9))),
        ("step number", training(step=1)),
        ("field names", training(batch=SampleBatch(TOKENS, {"advantages": [1.0] * 6}))),
        ("call", training(objective=PPO())),
        ("call", training(weighting="seq-mean-token-mean")),
        ("call", training(norm_constant=3.0)),
        ("call", training(entropy=True)),
        ("call", training(routing=[None] * 6)),
        ("call", forward()),
        ("executor", training(executor_choice="operations")),
        (
            "counts of loss tokens",
            training(
                batch=SampleBatch(
                    TOKENS, {"response_mask": [[i == 1 for i in range(len(t))] for t in TOKENS]}
                )
            ),
        ),
    ],
)
def test_the_first_difference_is_named(name: str, other: StepCall) -> None:
    mine = training().same()
    theirs = other.same()
    assert list(mine) == list(theirs)
    assert next(key for key in mine if mine[key] != theirs[key]) == name


def test_packing_refuses_a_step_that_the_plan_lacks() -> None:
    call = training(step=2)
    with pytest.raises(DataError, match=r"step=2 of a plan of 2 steps; pass one of 0 to 1"):
        call.rows(0)
    with pytest.raises(DataError, match="step=-1"):
        training(step=-1).rows(0)
    assert training().rows(0) == plan().steps[0].ranks[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 1},
        {"revision": 1},
        {"batch": batch()},
        {"plan": plan()},
        {"objective": PPO()},
        {"entropy": True},
        {"routing": [None] * 6},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_different_calls_have_different_keys(changes: dict[str, Any]) -> None:
    call = training()
    assert replace(call, **changes).key != call.key


def test_the_text_of_an_objective_holds_no_address() -> None:
    class Mine(SFT):
        __repr__ = object.__repr__

    first = Mine()
    second = Mine()
    assert repr(first) != repr(second)
    assert training(objective=first).text == training(objective=second).text


def test_the_error_names_missing_fields() -> None:
    call = training(objective=PPO())
    with pytest.raises(DataError, match=r"PPO reads \['.*advantages.*add them to the batch"):
        call.check("vocabulary")
    training().check("vocabulary")


def test_a_field_of_several_numbers_per_token_is_refused_where_one_is_read() -> None:
    call = training(objective=PPO())
    tokens = [len(call.batch.tokens(i)) for i in range(call.plan.num_samples)]
    call.batch.set_field("old_logprobs", [torch.zeros(count) for count in tokens])
    call.batch.set_field("advantages", [torch.zeros(count, 1) for count in tokens])
    with pytest.raises(DataError, match=r"PPO reads one number of 'advantages' per token"):
        call.check("vocabulary")


def test_weights_that_are_not_finite_are_refused() -> None:
    call = training(weighting="seq-mean-token-sum-norm", norm_constant=1e-310)
    with pytest.raises(DataError, match="hold a NaN or an infinity; check norm_constant=1e-310"):
        _ = call.sample_weights


def test_a_forward_pass_packs_no_fields() -> None:
    call = forward(record_routing=True)
    assert call.record_routing
    assert not call.is_training
    assert training().is_training
    assert list(call.field_names) == []
    assert forward(scope="dp").text != forward().text


def test_the_entropy_is_computed_if_asked_for_or_needed() -> None:
    assert not training().with_entropy
    assert training(entropy=True).with_entropy
    assert training(objective=PPO(entropy_coef=0.1)).with_entropy
    assert forward(entropy=True).with_entropy
