"""Packed micro-batches for Megatron-Core pipelines: plan, pack, run.

The names here plan; they need neither torch nor Megatron. Each is imported when it is first asked
for: the command line starts without the planner's compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megapack.cost import CostModel
    from megapack.cost_fit import Measurement
    from megapack.cost_sizes import ModelSizes
    from megapack.dp_schedule import build_dp_schedule
    from megapack.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        MegapackError,
        PatchError,
        PlanError,
        ScheduleError,
    )
    from megapack.layout import Layout
    from megapack.pipeline import simulate
    from megapack.plan import MicroBatch, Plan, StepPlan
    from megapack.plan_check import check_plan
    from megapack.policy import Policy
    from megapack.stats import PlanReport, StepReport, plan_report

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
    "PatchError",
]

__version__ = "0.1.0"

_MODULES = {
    "cost": "CostModel",
    "cost_fit": "Measurement",
    "cost_sizes": "ModelSizes",
    "dp_schedule": "build_dp_schedule",
    "errors": "CheckpointError ConfigError DataError MegapackError PatchError PlanError "
    "ScheduleError",
    "layout": "Layout",
    "pipeline": "simulate",
    "plan": "MicroBatch Plan StepPlan",
    "plan_check": "check_plan",
    "policy": "Policy",
    "stats": "PlanReport StepReport plan_report",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"megapack.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
