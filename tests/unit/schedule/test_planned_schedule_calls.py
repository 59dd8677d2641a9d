"""What the ranks of a pipeline must agree on, and the options of the schedule."""

from __future__ import annotations

import logging
import sys
import types
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel import schedules

from megapack.errors import ConfigError, ScheduleError
from megapack.hosts import megatron_core
from megapack.schedule import PlannedSchedule, checks, planned, reading, sharing

pytestmark = pytest.mark.unit


def test_a_shape_that_one_rank_knows_is_every_ranks() -> None:
    assert reading.common_shapes([[(8, 1), None], [None, (6, 2)]]) == [(8, 1), (6, 2)]


def test_a_shape_that_no_rank_knows_leaves_the_exchange_to_megatron() -> None:
    assert reading.common_shapes([[(8, 1), None], [(8, 1), None]]) is None


def test_different_shapes_are_refused_with_both() -> None:
    with pytest.raises(ScheduleError, match=r"\(6, 1\) and \(8, 1\) of micro-batch 1"):
        reading.common_shapes([[(4, 1), (8, 1)], [(4, 1), (6, 1)]])


@pytest.mark.parametrize("option", [{"lengths": "guess"}, {"non_finite": "fatal"}])
def test_unknown_options_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="set one of"):
        PlannedSchedule(**option)  # type: ignore[arg-type]


def test_the_patch_reads_its_options_and_passes_sizes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**sizes: int) -> dict[str, int]:
        return sizes

    monkeypatch.setattr(schedules, "get_forward_backward_func", chosen)
    try:
        megatron_core.configure(lengths="exchange", non_finite="error")
        schedule = megatron_core.get_forward_backward_func(pp_size=2)
        assert (schedule.lengths, schedule.non_finite) == ("exchange", "error")
        # What warns of towers is around Megatron's own.
        assert schedule.schedule.__wrapped__ == {"pp_size": 2}
    finally:
        megatron_core.configure()


def test_wrong_settings_under_interleaving_are_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": False,
    }
    config = SimpleNamespace(**{**settings, "batch_p2p_comm": True})
    sharing.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        planned._warn_of(config)
        planned._warn_of(config)
        planned._warn_of(SimpleNamespace(**settings))
    assert [record.message for record in caplog.records] == [
        "batch_p2p_comm=True can give wrong gradients or hang with virtual pipeline stages; the "
        "call runs with batch_p2p_comm=False"
    ]


def test_the_stages_of_miles_replays_survive_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = types.SimpleNamespace(stage="replay_backward")
    replays = types.ModuleType("miles.utils.replay_base")
    replays.all_replay_managers = [manager]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "miles.utils.replay_base", replays)
    with megatron_core._same_replay_stages():
        manager.stage = "replay_forward"
    assert manager.stage == "replay_backward"


def test_calls_that_cannot_be_planned_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = planned.parallel_state
    monkeypatch.setattr(groups, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(groups, "get_pipeline_model_parallel_world_size", lambda: 2)
    plain = SimpleNamespace()
    assert planned.why_not_planned(plain, {}) == ""
    captured = SimpleNamespace(cuda_graph_impl="full_iteration")
    assert "CUDA graphs" in planned.why_not_planned(captured, {})
    combined = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    assert "overlap_moe_expert_parallel_comm" in planned.why_not_planned(combined, {})
    assert "adjust_tensor" in planned.why_not_planned(plain, {"adjust_tensor_shapes_fn": print})
    assert "passes one of" in planned.why_not_planned(plain, {"pg_collection": object()})
    own = {"p2p_communicator": object(), "pg_collection": object()}
    assert "passes a object" in planned.why_not_planned(plain, own)
    monkeypatch.setattr(groups, "model_parallel_is_initialized", lambda: False)
    assert "not set up" in planned.why_not_planned(plain, {})


@pytest.mark.parametrize(
    ("settings", "meets"),
    [
        ({}, False),
        ({"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}, True),
        ({"moe_router_load_balancing_type": "global_aux_loss"}, True),
        ({"moe_router_load_balancing_type": "aux_loss"}, False),
        ({"fp8": "e4m3", "fp8_recipe": "delayed", "tp_only_amax_red": False}, True),
    ],
)
def test_ranks_that_meet_in_each_forward_need_one_m(
    settings: dict[str, object], meets: bool
) -> None:
    config = SimpleNamespace(num_moe_experts=None, **settings)
    assert checks.meets_in_every_microbatch(config, []) == meets
