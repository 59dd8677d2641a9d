"""What megapack raises: one base class, subclasses that are also the builtin a caller expects.

A message is one line: what is wrong, the numbers, what to set.
"""

from __future__ import annotations

from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

_MAX_CHARS = 60


def brief(value: object) -> str:
    """A value for a message: its repr on one line, cut short.

    >>> brief([0] * 99)
    '[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,...'
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # The message matters more than why this value cannot be printed.
        text = f"an unprintable {type(value).__name__}"
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def first_line(error: BaseException) -> str:
    """What another library says, for a message: its first line, cut short."""
    return str(error).partition("\n")[0][:120]


def of_all_ranks(error: E) -> E:
    """The error, marked as one that every rank raises: none of them need tell the others."""
    marked: Any = error
    marked.on_all_ranks = True
    return error


class MegapackError(Exception):
    """Base of all errors that megapack raises on purpose."""

    exit_code = 2
    """What the `megapack` command ends with."""

    on_all_ranks = False
    """Whether every rank raises this same error, so that one of them may speak for all."""

    printed_by = 0
    """The rank that prints an error of all ranks."""


class ConfigError(MegapackError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class PlanError(MegapackError, ValueError):
    """Lengths that no legal plan serves, or a plan that breaks an invariant."""


class HostAssertionError(PlanError, AssertionError):
    """A refusal that the host itself makes with a bare assertion; handlers of either kind catch
    it."""


class DataError(MegapackError, ValueError):
    """Input data (samples, files, batches) that cannot be used."""


class ScheduleError(MegapackError, RuntimeError):
    """A step that cannot be run, or that ranks do not agree on."""


class RankError(ScheduleError):
    """A rank failed, or is gone; every rank raises this with the same text and has to end.

    Its notes hold the traceback of the rank that failed. That rank's error is the cause.
    """

    exit_code = 1
    on_all_ranks = True


class StepOutOfMemory(ScheduleError):
    """A GPU ran out of memory in a step that was carried to its end: process groups are sound, the
    gradients are of no use, and the step may be tried again with smaller rows."""

    exit_code = 1
    on_all_ranks = True


class RunInterrupted(MegapackError, RuntimeError):
    """A signal ended the run before its last step; it is saved, and resuming goes on with it."""

    on_all_ranks = True
    exit_code = 75
    """EX_TEMPFAIL of sysexits.h: try again later."""


class CheckpointError(MegapackError, RuntimeError):
    """A checkpoint that cannot be written, or that does not fit the run that would resume it."""


class PatchError(MegapackError, RuntimeError):
    """A name of another framework that cannot be replaced, since it is not what was expected."""
