"""The watchdog's limits, without torch: the section `watchdog` of the main job's config."""

from __future__ import annotations

from dataclasses import dataclass

from megapack.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """When a step counts as late, and when the job is aborted."""

    slow_factor: float = 5.0
    """A step is late after this many times its predicted seconds, but not before `slow_after_s`;
    every rank then logs its phase, micro-batch and last exchange."""
    slow_after_s: float = 60.0
    """Seconds before which no step is late; the only limit for a step without a prediction."""
    abort_after_s: float | None = None
    """Seconds after which a step, a pass for log-probs or a checkpoint is aborted and the job ends
    with an error on every rank; null = never, except for the timeouts of the process groups."""

    def __post_init__(self) -> None:
        for name in ("slow_factor", "slow_after_s", "abort_after_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"watchdog.{name}={value} must be above 0 and finite; set 60")
