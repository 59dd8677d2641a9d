"""Megatron-Core's schedule, for every framework that asks `get_forward_backward_func` for it.

MEGAPACK_PATCH=slime                        # the planner's patch brings this one
MEGAPACK_SHARE_PREFIXES=1                   # samples of a row share their common beginnings
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from megapack.hosts.shared.options import HostOptions, shares_prefixes
from megapack.hosts.shared.towers import warning_of_towers

if TYPE_CHECKING:
    from megapack.schedule.planned import PlannedSchedule


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options of the schedule; see `PlannedSchedule`."""

    lengths: Literal["read", "exchange"] = "read"
    non_finite: Literal["warn", "error", "ignore"] = "warn"
    share_prefixes: bool = field(default_factory=shares_prefixes)

    def __post_init__(self) -> None:
        if (self.lengths, self.non_finite) != ("read", "warn"):
            # Imported here: a process that sets no options need not have torch.
            from megapack.schedule.planned import check_options

            check_options(self.lengths, self.non_finite)


OPTIONS = HostOptions(ScheduleOptions())
configure = OPTIONS.configure


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
) -> PlannedSchedule:
    """Megatron's schedule for these sizes as a `PlannedSchedule`."""
    # Megatron's own function stays in the module that defines it.
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func as megatron_func

    from megapack.schedule.planned import PlannedSchedule

    given = {
        "pp_size": pp_size,
        "vp_size": vp_size,
        "schedule_pg_collection": schedule_pg_collection,
    }
    # Megatron-Core before 0.17 takes no arguments.
    schedule = megatron_func(**{name: value for name, value in given.items() if value is not None})
    options = OPTIONS.current
    return PlannedSchedule(
        warning_of_towers(schedule),
        lengths=options.lengths,
        non_finite=options.non_finite,
        share_prefixes=options.share_prefixes,
        keeping=_same_replay_stages,
    )


@contextlib.contextmanager
def _same_replay_stages() -> Iterator[None]:
    """Keep the stages of miles' routing replays, if miles is loaded.

    Its forward step sets them before the model, and resets them after it.
    """
    replays = sys.modules.get("miles.utils.replay_base")
    managers = getattr(replays, "all_replay_managers", ())
    stages = [manager.stage for manager in managers]
    try:
        yield
    finally:
        for manager, stage in zip(managers, stages, strict=True):
            manager.stage = stage
