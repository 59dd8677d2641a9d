"""The pipeline simulator: how long a step takes under Megatron's schedules.

Modules:
    kernels: the compiled recurrence over them
    images: seconds of images, ahead of the rows or in them
    simulator: simulate(step) -> Simulation: makespan, bubble, activations, events
"""

from megapack.pipeline.simulator import Event, Runner, Simulation, simulate, simulate_planned

__all__ = ["Event", "Simulation", "simulate", "simulate_planned", "Runner"]
