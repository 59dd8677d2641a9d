"""Settings of split samples, split backwards and the executor."""

from __future__ import annotations

from typing import Any

import pytest

from megapack import Policy
from megapack.config import load_config
from megapack.errors import ConfigError
from megapack.job.config.sections import TrainConfig
from megapack.job.dry_run import check_start
from megapack.plan.executor import choose_executor

pytestmark = pytest.mark.unit

CONFIG = "configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml"


def config_of(*overrides: str) -> TrainConfig:
    return load_config(CONFIG, list(overrides), TrainConfig)


@pytest.mark.parametrize(
    ("policy", "needed"),
    [
        ({}, "megatron"),
        ({"split_samples": "auto"}, "operations"),
        ({"backward": "split"}, "operations"),
        ({"context_parallel": "dynamic"}, "megatron"),
    ],
)
def test_the_policy_decides_the_executor(policy: dict[str, Any], needed: str) -> None:
    assert choose_executor(Policy(**policy)) == needed
    assert choose_executor(Policy(**policy), "operations") == "operations"
    overrides = [f"plan.{name}={value}" for name, value in policy.items()]
    assert config_of(*overrides).executor == needed


@pytest.mark.parametrize("setting", ["split_samples=auto", "backward=split"])
def test_megatrons_schedules_run_no_other_order(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf": train: executor=megatron with {setting}: .*; set "):
        config_of("train.executor=megatron", f"plan.{setting}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.row_shape=uniform"], r": plan: split_samples='auto' with row_shape='uniform'"),
        (
            ["model.mtp_num_layers=1"],
            r": plan: split_samples='auto' with mtp_num_layers=1: .* to 0, or ",
        ),
    ],
)
def test_pieces_are_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        config_of("plan.split_samples=auto", *overrides)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("more", "world"), [([], 4), (["layout.tp=2", "layout.sequence_parallel=true"], 8)]
)
def test_experts_within_a_rank_and_over_ranks_allow_pieces(more: list[str], world: int) -> None:
    overrides = ["model.num_experts=4", "layout.ep=2", "layout.etp=1", *more]
    config = config_of("plan.split_samples=auto", "plan.backward=split", *overrides)
    check_start(config, world)
