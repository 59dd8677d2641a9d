"""Packed micro-batches for Megatron-Core pipelines: plan, pack, run.

The names here are for planning and need neither torch nor Megatron. Each is imported at its first
use, so that the command line starts without the planner's compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megapack import moved, te_finder

if TYPE_CHECKING:
    from megapack.cost.fit import Measurement
    from megapack.cost.model import CostModel
    from megapack.cost.sizes import ModelSizes
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
    from megapack.images import ImageRef
    from megapack.layout import Layout
    from megapack.outlook.stats import PlanReport, StepReport, plan_report
    from megapack.pipeline.simulator import simulate
    from megapack.plan.check import check_plan
    from megapack.plan.plan import MicroBatch, Plan, StepPlan
    from megapack.policy import Policy
    from megapack.prefixes import SharedPrefixes

__all__ = [
    "Layout",
    "CostModel",
    "ModelSizes",
    "Measurement",
    "Policy",
    "build_dp_schedule",
    "SharedPrefixes",
    "ImageRef",
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
    "cost.fit": "Measurement",
    "cost.model": "CostModel",
    "cost.sizes": "ModelSizes",
    "dp_schedule": "build_dp_schedule",
    "errors": (
        "MegapackError ConfigError PlanError DataError ScheduleError CheckpointError PatchError"
    ),
    "images": "ImageRef",
    "layout": "Layout",
    "outlook.stats": "plan_report PlanReport StepReport",
    "pipeline": "simulate",
    "plan": "Plan StepPlan MicroBatch check_plan",
    "policy": "Policy",
    "prefixes": "SharedPrefixes",
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


te_finder.register()
moved.register()
