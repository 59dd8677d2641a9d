"""Errors of megapack: one base class; subclasses are also the builtin that a caller expects.

A message is one line: what is wrong, the numbers, what to set.
"""

from __future__ import annotations

from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

_MAX_CHARS = 60


def brief(value: object) -> str:
    """A value for a message: its repr on one line, cut to 60 characters.

    >>> brief([0] * 99)
    '[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,...'
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # The message matters more than why this value cannot be printed.
        text = f"an unprintable {type(value).__name__}"
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def first_line(error: BaseException) -> str:
    """Another library's error for a message: its first line, cut to 120 characters."""
    return str(error).partition("\n")[0][:120]


def reason_of(error: BaseException) -> str:
    """Why a file cannot be read or written: the system's words, or the error's own."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def one_line(error: BaseException) -> str:
    """Another library's error for a message: all of its lines as one."""
    return " ".join(str(error).split())


def of_all_ranks(error: E) -> E:
    """The error, marked as one that every rank raises, so that no rank reports it to the others."""
    marked: Any = error
    marked.on_all_ranks = True
    return error


class MegapackError(Exception):
    """Base of all errors that megapack raises on purpose."""

    exit_code = 2
    """Exit code of the `megapack` command."""

    on_all_ranks = False
    """Whether every rank raises this same error, so that only one rank prints it."""

    printed_by = 0
    """The rank that prints an error of all ranks."""


class ConfigError(MegapackError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class PlanError(MegapackError, ValueError):
    """Lengths for which no legal plan exists, or a plan that breaks an invariant."""


class HostAssertionError(PlanError, AssertionError):
    """An input that the host itself refuses with a bare `assert`. Handlers of PlanError and of
    AssertionError both catch it."""


class HostRuntimeError(PlanError, RuntimeError):
    """An input that the host itself refuses with a RuntimeError. Handlers of PlanError and of
    RuntimeError both catch it."""


class DataError(MegapackError, ValueError):
    """Input data (samples, files, batches) that cannot be used."""


class ScheduleError(MegapackError, RuntimeError):
    """A step that cannot be run, or on which ranks do not agree."""


class RankError(ScheduleError):
    """A rank failed or is gone. Every rank raises this with the same text and has to end.

    Its note is the traceback of the rank that failed. On that rank, its own error is the cause.
    """

    exit_code = 1
    on_all_ranks = True


class RunInterrupted(MegapackError, RuntimeError):
    """A signal ended the run before its last step. The run is saved and can be resumed."""

    on_all_ranks = True
    exit_code = 75
    """EX_TEMPFAIL of sysexits.h: try again later."""


class CheckpointError(MegapackError, RuntimeError):
    """A checkpoint that cannot be written, or does not fit the run that would resume it."""


class PatchError(MegapackError, RuntimeError):
    """A name of another framework that cannot be replaced, because it is not what was expected."""
