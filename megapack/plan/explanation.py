"""What each freedom of a plan gains, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megapack.base.tables import format_table


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One freedom of the policy, and the time of the plan's steps with it and without it.

    Seconds follow the cost model; without one, they are times of row tokens.
    """

    name: str
    setting: str
    """The field of `Policy`."""
    value: str
    """Its value in the plan's policy."""
    is_on: bool
    used: str
    """How much of it the plan has, for people; "" if it has nothing of it."""
    seconds_with: float | None
    """None if the planner refuses the freedom here."""
    seconds_without: float | None
    """None if the planner refuses to plan without it."""
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
    """What each freedom gained, or would gain if it were on, the others as they are."""

    gains: tuple[Gain, ...]

    def __str__(self) -> str:
        head = ("freedom", "setting", "time without", "time with", "gain", "in this plan")
        columns = zip(head, *map(_cells, self.gains), strict=True)
        names, settings, *numbers, notes = columns
        return format_table(list(zip(names, _left(settings), *numbers, _left(notes), strict=True)))

    def to_payload(self) -> list[dict[str, Any]]:
        """The gains as JSON types."""
        return [asdict(gain) | {"gain": gain.gain} for gain in self.gains]


def _cells(gain: Gain) -> tuple[str, ...]:
    return (
        gain.name,
        f"{gain.setting}={gain.value}",
        _number(gain.seconds_without, ".4g"),
        _number(gain.seconds_with, ".4g"),
        _number(gain.gain, ".1%"),
        gain.refusal or gain.used or ("none" if gain.is_on else "off"),
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _left(column: Sequence[str]) -> list[str]:
    """The texts of a column, filled up to its width."""
    widest = max(map(len, column))
    return [text.ljust(widest) for text in column]
