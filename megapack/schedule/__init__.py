"""From a plan to gradients: the adapter round Megatron's `forward_backward_func`.

adapter   ScheduleAdapter.step and .forward
call      one call's arguments, checked and packed
checks    settings that Megatron accepts and then hangs or trains wrongly with
runner, forward, p2p, faults   one run of the schedule, and what can go wrong in it
"""

from megapack.schedule.adapter import ScheduleAdapter, StepResult

__all__ = [
    "ScheduleAdapter",
    "StepResult",
]
