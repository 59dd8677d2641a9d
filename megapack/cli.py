"""The `megapack` command. Exit codes: 0 done, 1 found a problem, 2 bad input (one line, and what to
set) or a full disk behind standard output, 75 a signal ended a run that is saved (start it again),
130 Ctrl-C, 141 nobody read to the end.

Each command is a module of `megapack.commands` with `add_arguments(parser)` and `run(args)`, which
returns the exit code. Only the module of the command that is asked for is imported. One that runs
another's program (`IS_OTHERS_PROGRAM`) leaves logging as it is.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megapack import __version__
from megapack.errors import MegapackError, ScheduleError

COMMANDS = {
    "plan": "plan a file of lengths, compare with simple packing, write plan.json",
    "check": "hold a plan against its invariants",
    "show": "print a plan as a grid of steps, ranks and micro-batches",
    "simulate": "predict the steps of a plan",
    "diff": "tell in what two plans differ",
    "tune": "rank layouts, budgets and rules for a number of GPUs",
    "trace": "write a plan's or a run's timeline for Perfetto",
    "plot": "draw a step of a plan",
    "report": "write a page about a plan or a run",
    "doctor": "look for what of this machine's software and settings a run would trip over",
    "train": "train on rollouts; start it with torchrun, or --dry-run world=N alone",
    "run": "run a script of another framework with megapack's patches",
    "patch": "what the patches for a framework replace, and whether they fit",
}
"""Name of each command, its module's too, and what `--help` says of it."""


# What a shell tells of a program that SIGPIPE ended.
_NOT_READ_TO_THE_END = 141


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, like every other bad input."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"megapack: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parse(_parser(argv[:1]), argv)
    on_first_rank = os.environ.get("RANK", "0") == "0"
    if not args.is_others_program:
        logging.basicConfig(
            format="%(levelname)s %(name)s: %(message)s",
            level=logging.WARNING if on_first_rank else logging.ERROR,
        )
    code = _NOT_READ_TO_THE_END
    try:
        code = int(args.run(args))
        print(end="", flush=True)
        return code
    except MegapackError as error:
        if os.environ.get("RANK", "0") == str(error.printed_by):
            # The notes of a rank's error are the traceback of the rank that failed.
            print(
                "\n".join([f"megapack: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr
            )
        elif isinstance(error, ScheduleError) and not error.on_all_ranks:
            print(f"megapack: rank {os.environ['RANK']}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if args.is_others_program:
            raise
        if on_first_rank:
            print("megapack: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if not _stdout_is_lost():
            raise
        # `megapack diff A B | head`: what was found is told by the code, if it was all found.
        if isinstance(error, BrokenPipeError):
            return code
        print(
            f"megapack: standard output: {error.strerror}; make room, or send it elsewhere",
            file=sys.stderr,
        )
        return 2


def _stdout_is_lost() -> bool:
    """Whether nothing can be printed any more; the exit's own flush must not fail then."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Also `CONFIG --option a.b=c`: argparse takes no more of a `*` that options stand before."""
    args, rest = parser.parse_known_args(argv)
    if rest and (any(text.startswith("-") for text in rest) or not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _parser(asked: Sequence[str]) -> argparse.ArgumentParser:
    """A parser that knows the options of the command that is asked for."""
    parser = _Parser(
        prog="megapack", description="Packed, VPP-aligned training steps for Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=f"megapack {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        if name in asked:
            module = importlib.import_module(f"megapack.commands.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            others = getattr(module, "IS_OTHERS_PROGRAM", False)
            command.set_defaults(run=module.run, is_others_program=others)
    return parser
