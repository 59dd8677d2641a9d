"""From a plan to gradients: the adapter around Megatron's `forward_backward_func`.

Modules:
    adapter: ScheduleAdapter.step and .forward
    call: StepCall: the arguments of one call, and what all ranks must agree on
    checks: refuses settings with which Megatron would hang or train wrongly
    runner: one run of Megatron's schedule over the packed rows
    operations: runs a step as a list of operations in any legal order
    channels: exchanges between stages with receives posted early
    forward: Megatron's forward step, and the loss on the last stage
    chains: the losses of rows with pieces of one sample
    listeners: who is told of each forward and backward
    megatron_call: what surrounds a call of Megatron's schedule: settings, communicator, checks
    row_groups: the ranks that hold the slices of one row
    p2p: sends rows between stages with the lengths that the plan knows
    faults: a step that runs out of memory or has a NaN
    planned: PlannedSchedule: a framework's own step on planned shapes
    reading: the shapes of a framework's rows, read from its batches
"""

from megapack.schedule.adapter import ScheduleAdapter, StepResult
from megapack.schedule.planned import PlannedSchedule

__all__ = ["PlannedSchedule", "ScheduleAdapter", "StepResult"]
