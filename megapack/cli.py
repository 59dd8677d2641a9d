"""The `megapack` command.

Exit codes:
    0    done
    1    found a problem
    2    bad input (one line that says what to set), or standard output cannot be written
    75   a signal ended a run, which is saved: start it again
    130  Ctrl-C
    141  standard output was closed before the end

Each command is a module of `megapack.commands` with an `EXAMPLE` for its help,
`add_arguments(parser)`, and `run(args)`, which returns the exit code. Only the module of the given
command is imported. A command that runs a user's program (`IS_OTHERS_PROGRAM`) leaves logging as
it is.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from megapack import __version__
from megapack.commands.parser import OwnWords, Parser, message_of
from megapack.errors import MegapackError, ScheduleError

COMMANDS = {
    "plan": "plan a file of lengths, compare with simple packing, write plan.json",
    "check": "check the invariants of a plan",
    "show": "print a plan as a grid of steps, ranks and micro-batches",
    "simulate": "predict the steps of a plan",
    "diff": "show what differs between two plans",
    "tune": "rank layouts, budgets and rules for a number of GPUs",
    "plot": "draw a step of a plan",
    "report": "write a page about a plan or a run",
    "data": "show a sample of a data file as it will be trained, or make toy data",
    "warm-up": "compile the planner for this machine, ahead of the first plan",
    "doctor": "check this machine's software and settings for what would break a run",
    "train": "train on rollouts; start it with torchrun, or --dry-run world=N alone",
    "export": "write a run's weights as a Hugging Face folder",
    "run": "run a script of another framework with megapack's patches",
    "patch": "show what the patches for a framework replace, and whether they fit",
}
"""Name of each command, which is its module's with - for _, and its line in `--help`."""


# The exit code that a shell reports for a program ended by SIGPIPE: 128 + 13.
_STDOUT_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    if argv is not None or sys.argv[1:2] != ["plan"]:
        return _run(sys.argv[1:] if argv is None else argv)
    from megapack.base.garbage import no_collections

    # The process makes this plan only, so searching for garbage would not pay.
    with no_collections():
        return _run(sys.argv[1:])


def _run(argv: Sequence[str]) -> int:
    code, is_others_program = _STDOUT_CLOSED, False
    # For an error that comes before the arguments are known: numba cannot be imported.
    args = argparse.Namespace(parser=Parser())
    on_first_rank = os.environ.get("RANK", "0") == "0"
    try:
        try:
            args = _parse(_parser(argv[:1]), argv)
        except SystemExit:  # `megapack train --list | head` and helps have printed here
            sys.stdout.flush()
            raise
        is_others_program = getattr(args.command_module, "IS_OTHERS_PROGRAM", False)
        if not is_others_program:
            handler = logging.StreamHandler()
            handler.setFormatter(OwnWords(args.parser))
            level = logging.WARNING if on_first_rank else logging.ERROR
            logging.basicConfig(level=level, handlers=[handler])
        code = int(args.command_module.run(args))
        print(end="", flush=True)
        return code
    except MegapackError as error:
        if os.environ.get("RANK", "0") == str(error.printed_by):
            # The notes of a rank's error are the traceback of the rank that failed.
            message = message_of(error, args.parser)
            notes = getattr(error, "__notes__", ())
            print("\n".join([f"megapack: {message}", *notes]), file=sys.stderr)
        elif isinstance(error, ScheduleError) and not error.on_all_ranks:
            print(f"megapack: rank {os.environ['RANK']}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        if is_others_program:
            raise
        if on_first_rank:
            print(f"megapack: {error if error.args else 'interrupted'}", file=sys.stderr)
        return getattr(error, "exit_code", 130)
    except OSError as error:
        if not _stdout_is_lost():
            raise
        # `megapack diff A B | head`: if the command was done, its own exit code says what it found.
        if isinstance(error, BrokenPipeError):
            return code
        print(
            f"megapack: standard output: {error.strerror}; make room, or send it elsewhere",
            file=sys.stderr,
        )
        return 2


def _stdout_is_lost() -> bool:
    """Whether stdout cannot be written. If so, point it to /dev/null: Python flushes it at exit."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse, and also accept `CONFIG --option a.b=c`.

    argparse does not add values behind an option to a positional with nargs="*".
    """
    args, rest = parser.parse_known_args(argv)
    if rest and (any(text.startswith("-") for text in rest) or not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with the options of the given command."""
    parser = Parser(
        prog="megapack", description="Packed, VPP-aligned training steps for Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=f"megapack {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in given:
            module = importlib.import_module(f"megapack.commands.{name.replace('-', '_')}")
            command.description = f"{module.EXAMPLE}\n\n{str(module.__doc__).strip()}"
            module.add_arguments(command)
            command.set_defaults(command_module=module, parser=command)
    return parser
