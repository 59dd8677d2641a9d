"""The pipeline simulator: how long a step takes under Megatron's schedules.

Modules:
    order: the operations of 1F1B and interleaving, in Megatron's order
    kernels: the compiled recurrence over them
    simulator: simulate(step) -> Simulation: makespan, bubble, activations, events
"""

from megapack.pipeline.simulator import Event, Runner, Simulation, simulate, simulate_planned

__all__ = [
    "Event",
    "Simulation",
    "simulate",
    "simulate_planned",
    "Runner",
]
