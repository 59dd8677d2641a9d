"""What a rank is doing, for the messages of the watchdog."""

from __future__ import annotations

from typing import Literal

Phase = Literal[
    "idle", "compile", "plan", "pack", "groups", "images", "schedule", "forward", "backward",
    "weight gradients", "reduction", "output", "optimizer", "calibration", "checkpoint", "export",
]  # fmt: skip
"""The last thing that began. `schedule` is the time between forwards and backwards."""


class Place:
    """Phase, micro-batch and last exchange of this rank; its main thread writes, any thread reads.

    Attributes:
        step: the step's name, as its caller gives it; "" outside of steps.
        phase: the phase that began last.
        chunk, microbatch: of a forward, backward or weight gradients, numbered on this rank; None
            in other phases.
        exchange: the last exchange with other pipeline stages; "" before the first.
    """

    def __init__(self) -> None:
        self.step = ""
        self.enter("idle")

    def enter(self, phase: Phase, chunk: int | None = None, microbatch: int | None = None) -> None:
        """Record that a phase begins."""
        self.phase = phase
        self.chunk = chunk
        self.microbatch = microbatch
        if phase not in ("forward", "backward", "weight gradients", "reduction"):
            self.exchange = ""

    @property
    def within(self) -> str:
        """The place as part of a sentence: " in step 4, pack"; "" if the rank is idle."""
        return "" if str(self) == "idle" else f" in {self}"

    def __str__(self) -> str:
        text = f"{self.step}, {self.phase}" if self.step else self.phase
        if self.microbatch is not None:
            text += f" of micro-batch {self.microbatch}"
        if self.chunk:
            text += f" on chunk {self.chunk}"
        return f"{text}, which {self.exchange}" if self.exchange else text
