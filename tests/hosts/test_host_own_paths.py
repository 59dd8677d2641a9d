"""Where a host goes on with its own micro-batches although its patch is on, one line says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megapack.hosts import miles, ms_swift, nemo_rl, patching, slime, unirl, verl
from megapack.hosts.shared.rank_rows import log_own

pytestmark = pytest.mark.hosts

STATIC = SimpleNamespace(use_dynamic_batch_size=False, global_batch_size=4)
ROLLOUTS = {"global_batch_size": 4, "rollout_indices": [0]}


@pytest.fixture(autouse=True)
def hosts_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What patches replace, which has nothing to plan."""
    monkeypatch.setattr(patching, "original", lambda name: lambda *args, **kwargs: None)
    log_own.cache_clear()
    yield
    log_own.cache_clear()


def unirl_stack() -> None:
    unirl.init_stack(
        SimpleNamespace(),
        fsdp_backend=None,
        algorithm=None,
        micro_batch_size=2,
        max_grad_norm=1.0,
    )


def grown(data: dict[str, Any]) -> None:
    args = SimpleNamespace(use_dynamic_batch_size=True, global_batch_size=4)
    assert not miles.can_schedule_on_rollout_side(args, data, {"dp_size": 2})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: slime.build_dp_schedule(STATIC, {}, [5], **ROLLOUTS),
            "slime: micro-batches are slime's own, not planned: set --use-dynamic-batch-size and",
        ),
        (
            lambda: miles.build_dp_schedule(STATIC, {}, [5], **ROLLOUTS),
            "miles: micro-batches are miles's own, not planned: set --use-dynamic-batch-size and",
        ),
        (
            lambda: miles.can_schedule_on_rollout_side(STATIC, {"adapter_slots": [1, 0]}, {}),
            "miles: micro-batches are miles's own, not planned: set --use-dynamic-batch-size and",
        ),
        (
            lambda: grown({"rollout_ids": [0, 0, 1]}),
            "fewer rollouts than global_batch_size=4; lower it, or make more",
        ),
        (
            lambda: grown({"rollout_ids": [0, 1], "dynamic_global_batch_size": 3}),
            "fewer rollouts than global_batch_size=3",
        ),
        (
            lambda: grown({"multimodal_train_inputs": [{"grid_thws": 1}]}),
            "samples with images of Kimi or Inkling grow after they are split",
        ),
        (
            lambda: verl.read_settings({"actor": {"use_dynamic_bsz": False}}),
            "set actor_rollout_ref.actor.use_dynamic_bsz=True",
        ),
        (
            lambda: nemo_rl.read_settings({"sequence_packing": {"enabled": False}}),
            "set policy.sequence_packing.enabled=true",
        ),
        (
            lambda: ms_swift.calculate_matched_group([], 8, strategy="sequential"),
            "packing_strategy=sequential; set binpack",
        ),
        (
            lambda: unirl.plan_micro_batches(None, num_samples=2, micro_token_budget=9),
            "UniRL: micro-batches are UniRL's own, not planned: a rank's track has no lengths",
        ),
        (unirl_stack, "set micro_token_budget in the recipe's stack"),
    ],
)
def test_one_line_says_why_and_what_to_set(
    caplog: pytest.LogCaptureFixture, call: Callable[[], Any], says: str
) -> None:
    with caplog.at_level(logging.WARNING):
        call()
        call()
    (line,) = [record.getMessage() for record in caplog.records]
    assert says in line
    assert "own, not planned" in line


@pytest.mark.parametrize(
    "call",
    [
        lambda: verl.read_settings({"actor": {"use_dynamic_bsz": True}}),
        lambda: nemo_rl.read_settings({"sequence_packing": {"enabled": True}}),
        # All rollouts of a step are there, so miles has another reason.
        lambda: grown({"rollout_ids": [0, 1, 2, 3]}),
    ],
)
def test_no_line_where_nothing_needs_to_be_set(
    caplog: pytest.LogCaptureFixture, call: Callable[[], Any]
) -> None:
    call()
    assert not caplog.records
