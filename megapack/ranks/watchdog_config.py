"""The watchdog's limits, without torch: the section `watchdog` of the main job's config."""

from __future__ import annotations

from dataclasses import dataclass

from megapack.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """When a step counts as late, and when the job is aborted."""

    slow_factor: float = 5.0
    """A step is late after this many times its predicted seconds; ranks then log where they are."""
    slow_after_s: float = 60.0
    """Seconds before which no step is late."""
    abort_after_s: float | None = None
    """Seconds after which a step, pass or checkpoint ends the job on all ranks; null = never, but
    for process groups' timeouts."""

    def __post_init__(self) -> None:
        for name in ("slow_factor", "slow_after_s", "abort_after_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"watchdog.{name}={value} must be above 0 and finite; set 60")
