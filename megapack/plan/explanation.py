"""What each planning option of a plan gains, in a line each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# Smaller changes would print as 0.0 %.
_LEAST_SHOWN = 0.0005
_NEEDS = {"backward": "Transformer Engine 2.7, or Megatron's own layers"}


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One planning option, and the time of the plan's steps with it and without it.

    Seconds follow the cost model; without one, their unit is the forward of one token.
    """

    name: str
    setting: str
    """The field of `Policy`."""
    value: str
    """Its value in the plan's policy."""
    on: str
    """The value that turns it on."""
    is_on: bool
    used: str
    """How much of it the plan has, for people; "" if it has nothing of it."""
    seconds_with: float | None
    """None if the planner refuses the option here."""
    seconds_without: float | None
    """None if the planner refuses to plan without it."""
    live_with: float | None = None
    """Peak of the row tokens whose activations a GPU holds, as `Simulation.peak_live_tokens`."""
    live_without: float | None = None
    gain_range: tuple[float, float] | None = None
    """The least and the most of `gain` over the speeds that attention's kernels may have; None if
    the speeds are measured, or there is no gain."""
    refusal: str = ""
    """Why one of the two is None."""

    @property
    def gain(self) -> float | None:
        """Share of the time without it that it saves: 9 s in place of 12 s are 0.25. It is below 0
        where the search ends in a slower plan because it has more to try."""
        if self.seconds_with is None or self.seconds_without is None:
            return None
        return 1 - self.seconds_with / self.seconds_without if self.seconds_without else 0.0


@dataclass(frozen=True)
class Explanation:
    """What each planning option gained, or would gain if it were on, the others as they are."""

    gains: tuple[Gain, ...]

    def __str__(self) -> str:
        """A line for each planning option that changes the time, the largest change first."""
        shown = [gain for gain in self.gains if abs(gain.gain or 0.0) >= _LEAST_SHOWN]
        lines = [_line(gain) for gain in sorted(shown, key=lambda gain: -abs(gain.gain or 0.0))]
        same = [_set(gain) for gain in self.gains if gain not in shown and not gain.refusal]
        if same:
            lines.append(f"no difference: {', '.join(same)}")
        lines += [f"not possible: {_set(g)}: {g.refusal}" for g in self.gains if g.refusal]
        return "\n".join(lines)

    def to_payload(self) -> list[dict[str, Any]]:
        """The gains as JSON types."""
        return [asdict(gain) | {"gain": gain.gain} for gain in self.gains]


def _set(gain: Gain) -> str:
    """The setting with the value that turns the option on."""
    return f"{gain.setting}={gain.on}"


def _line(gain: Gain) -> str:
    saved = gain.gain or 0.0
    verbs = ("saves", "costs") if gain.is_on else ("would save", "would cost")
    needs = f" (needs {_NEEDS[gain.setting]})" if gain.setting in _NEEDS else ""
    surely = ""
    if gain.gain_range is not None:
        least, most = gain.gain_range
        surely = f", {least:.1%} to {most:.1%} by the speed of attention"
    used = f": {gain.used}" if gain.used else ""
    live = ""
    if gain.live_with is not None and gain.live_without is not None:
        live = f"; live tokens of a GPU {gain.live_without:.0f} -> {gain.live_with:.0f}"
    return (
        f"{_set(gain)} {verbs[saved < 0]} {abs(saved):.1%} of the time{surely}{needs}{used}{live}"
    )
