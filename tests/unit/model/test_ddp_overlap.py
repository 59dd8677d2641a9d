"""The functions that the schedule gets for DDP's overlapping communication."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megapack.model.overlap import dropping_reductions, not_counting, sync_functions

pytestmark = pytest.mark.unit


def chunk(**ddp: bool) -> Any:
    group = SimpleNamespace(
        grad_reduce_handle="reduction", param_gather_handle=None, param_gather_dispatched=True
    )
    return SimpleNamespace(
        ddp_config=SimpleNamespace(**ddp),
        no_sync="no_sync",
        start_grad_sync="start_grad_sync",
        start_param_sync="start_param_sync",
        bucket_groups=[group],
        expert_parallel_bucket_groups=[],
    )


def config(**settings: Any) -> Any:
    names = ("no_sync_func", "grad_sync_func", "param_sync_func")
    return SimpleNamespace(**{**dict.fromkeys(names), **settings})


ALIGNED = {"overlap_param_gather": True, "align_param_gather": True}


@pytest.mark.parametrize(
    ("num_chunks", "ddp", "functions"),
    [
        (1, {}, {}),
        (2, {"overlap_grad_reduce": False}, {}),
        (1, {"overlap_grad_reduce": True}, {"no_sync_func": "no_sync"}),
        (2, {"overlap_grad_reduce": True}, {"no_sync_func": ["no_sync"] * 2}),
        (1, ALIGNED, {}),
        (2, ALIGNED, {"param_sync_func": ["start_param_sync"] * 2}),
        (2, {"overlap_param_gather": True}, {}),
        (2, {"align_param_gather": True}, {}),
    ],
)
def test_functions_that_the_schedule_calls(
    num_chunks: int, ddp: dict[str, bool], functions: dict[str, Any]
) -> None:
    assert sync_functions([chunk(**ddp) for _ in range(num_chunks)], config()) == functions


def test_the_users_own_function_stays() -> None:
    assert sync_functions([chunk(overlap_grad_reduce=True)], config(no_sync_func=print)) == {}


def test_a_module_without_ddp_has_no_functions() -> None:
    assert sync_functions([SimpleNamespace()], config()) == {}


def test_an_error_drops_the_reductions_that_run() -> None:
    one = chunk(overlap_grad_reduce=True)
    with dropping_reductions([one]):
        pass
    assert one.bucket_groups[0].grad_reduce_handle == "reduction"
    with pytest.raises(InterruptedError), dropping_reductions([one]):
        raise InterruptedError
    assert one.bucket_groups[0].grad_reduce_handle is None


def test_ddp_overlaps_again_after_the_block() -> None:
    one = chunk(overlap_grad_reduce=True)
    other = chunk(overlap_grad_reduce=False)
    with not_counting([one, other]):
        assert not one.ddp_config.overlap_grad_reduce
    assert one.ddp_config.overlap_grad_reduce
    assert not other.ddp_config.overlap_grad_reduce
