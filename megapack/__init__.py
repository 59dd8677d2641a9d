"""Packed micro-batches for Megatron-Core pipelines: plan, pack, run.

The names here plan; they need neither torch nor Megatron.
"""

from megapack.cost import CostModel
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import ConfigError, DataError, MegapackError, PlanError, ScheduleError
from megapack.layout import Layout
from megapack.pipeline import simulate
from megapack.plan import MicroBatch, Plan, StepPlan, check_plan
from megapack.policy import Policy

__all__ = [
    "Layout",
    "CostModel",
    "Policy",
    "build_dp_schedule",
    "Plan",
    "StepPlan",
    "MicroBatch",
    "check_plan",
    "simulate",
    "MegapackError",
    "ConfigError",
    "PlanError",
    "DataError",
    "ScheduleError",
]

__version__ = "0.1.0"
