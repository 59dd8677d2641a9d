"""The pipeline simulator: what a step's micro-batches take in Megatron's schedules.

order      the operations of 1F1B and interleaving, in Megatron's order
kernels    the compiled recurrence over them
simulator  simulate(step) -> Simulation: makespan, bubble, events
"""

from megapack.pipeline.simulator import Event, Simulation, simulate, simulate_planned

__all__ = [
    "Event",
    "Simulation",
    "simulate",
    "simulate_planned",
]
