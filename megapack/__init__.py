"""Packed micro-batches for Megatron-Core pipelines: plan, pack, run.

The names here are for planning and need neither torch nor Megatron. Each is imported at its first
use, so that the command line starts without the planner's compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megapack import moved, te_finder

if TYPE_CHECKING:
    from megapack.cost.fit import Measurement as Measurement
    from megapack.cost.model import CostModel as CostModel
    from megapack.cost.sizes import ModelSizes as ModelSizes
    from megapack.dp_schedule import build_dp_schedule as build_dp_schedule
    from megapack.errors import CheckpointError as CheckpointError
    from megapack.errors import ConfigError as ConfigError
    from megapack.errors import DataError as DataError
    from megapack.errors import MegapackError as MegapackError
    from megapack.errors import PatchError as PatchError
    from megapack.errors import PlanError as PlanError
    from megapack.errors import ScheduleError as ScheduleError
    from megapack.images import ImageRef as ImageRef
    from megapack.layout import Layout as Layout
    from megapack.outlook.stats import PlanReport as PlanReport
    from megapack.outlook.stats import StepReport as StepReport
    from megapack.outlook.stats import plan_report as plan_report
    from megapack.pipeline.simulator import simulate as simulate
    from megapack.plan.check import check_plan as check_plan
    from megapack.plan.plan import MicroBatch as MicroBatch
    from megapack.plan.plan import Plan as Plan
    from megapack.plan.plan import StepPlan as StepPlan
    from megapack.policy import Policy as Policy
    from megapack.prefixes import SharedPrefixes as SharedPrefixes

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
__all__ = list(_MODULE_OF)


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
