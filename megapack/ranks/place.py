"""Where a rank is in its work: what a watchdog tells when a step does not end."""

from __future__ import annotations

from typing import Literal

Phase = Literal[
    "idle", "plan", "pack", "schedule", "forward", "backward", "reduction", "output",
    "optimizer", "checkpoint",
]  # fmt: skip
"""The last thing that began. `schedule` is the time between forwards and backwards."""


class Place:
    """Phase, micro-batch and last exchange of this rank; written by its main thread, read by any.

    Attributes:
        step: the step in the words of who runs it; "" for none.
        phase: what began last.
        chunk, microbatch: of a forward or backward, counted on this rank; None elsewhere.
        exchange: the last exchange with other pipeline stages; "" before the first.
    """

    def __init__(self) -> None:
        self.step = ""
        self.enter("idle")

    def enter(self, phase: Phase, chunk: int | None = None, microbatch: int | None = None) -> None:
        """Note what begins."""
        self.phase, self.chunk, self.microbatch = phase, chunk, microbatch
        if phase not in ("forward", "backward", "reduction"):
            self.exchange = ""

    @property
    def within(self) -> str:
        """In a sentence: " in step 4, pack"; "" where nothing that has a name goes on."""
        return "" if str(self) == "idle" else f" in {self}"

    def __str__(self) -> str:
        text = f"{self.step}, {self.phase}" if self.step else self.phase
        if self.microbatch is not None:
            text += f" of micro-batch {self.microbatch}"
        if self.chunk:
            text += f" on chunk {self.chunk}"
        return f"{text}, which {self.exchange}" if self.exchange else text
