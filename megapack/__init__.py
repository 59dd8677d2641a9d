"""Packed micro-batches for Megatron-Core pipelines: plan, pack, run.

The names here plan; they need neither torch nor Megatron.
"""

from megapack.cost import CostModel
from megapack.cost_fit import Measurement
from megapack.cost_sizes import ModelSizes
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MegapackError,
    PlanError,
    ScheduleError,
)
from megapack.layout import Layout
from megapack.pipeline import simulate
from megapack.plan import MicroBatch, Plan, StepPlan, check_plan
from megapack.plan_report import PlanReport, StepReport, plan_report
from megapack.policy import Policy

__all__ = [
    "Layout",
    "CostModel",
    "ModelSizes",
    "Measurement",
    "Policy",
    "build_dp_schedule",
    "Plan",
    "StepPlan",
    "MicroBatch",
    "check_plan",
    "simulate",
    "plan_report",
    "PlanReport",
    "StepReport",
    "MegapackError",
    "ConfigError",
    "PlanError",
    "DataError",
    "ScheduleError",
    "CheckpointError",
]

__version__ = "0.1.0"
