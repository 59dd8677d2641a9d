"""Run a script or module as python does, with patches for its framework, or on the CPU."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable
from types import TracebackType

from megapack.base.known_warnings import quiet_known_warnings
from megapack.errors import ConfigError
from megapack.hosts.patching import apply
from megapack.hosts.patching.files import names_in, shipped_hosts
from megapack.hosts.startup import CPU_VARIABLE, VARIABLE, log_to_stderr

EXAMPLE = """torchrun --nproc-per-node 8 -m megapack run --patch slime train.py ARGS
torchrun --nproc-per-node 8 -m megapack run --cpu pretrain_gpt.py ARGS"""
IS_OTHERS_PROGRAM = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the patches, and after them python's own arguments."""
    parser.add_argument(
        "--patch",
        action="append",
        default=[],
        metavar="HOST",
        help="frameworks (see `megapack patch list`) or patch files, *.yaml, with commas; "
        "slime,-megatron_core leaves out what slime brings. "
        "Child processes inherit frameworks, by MEGAPACK_PATCH, but no files",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="run a Megatron recipe without CUDA, over gloo. Child processes inherit it, by "
        "MEGAPACK_CPU",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE ARGS",
        help="run a module in place of a script, as python -m does",
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="the script's own arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Run the program to its end; its exit code is the command's."""
    # As in python, -- ends the options.
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    command = args.module or script
    if not command:
        raise ConfigError("nothing to run; give a script, or -m and a module, after the options")
    if not args.module and not os.path.exists(command[0]):
        raise ConfigError(f"{command[0]}: no such script; give its path, or -m and a module")
    log_to_stderr()
    quiet_known_warnings()
    if args.cpu:
        # Imported here: without --cpu the command needs no torch.
        from megapack import cpu

        cpu.enable()
        os.environ[CPU_VARIABLE] = "1"
    hosts = names_in(",".join(args.patch), where="--patch ") if args.patch else []
    apply(*hosts)
    _patch_children(hosts)
    sys.argv[:] = command
    # Python itself puts this folder first, except under -P and -I (`safe_path`).
    if args.module:
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        return _exit_code(lambda: runpy.run_module(command[0], run_name="__main__", alter_sys=True))
    if os.path.isfile(command[0]) and not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(command[0]))
    return _exit_code(lambda: runpy.run_path(command[0], run_name="__main__"))


def _patch_children(hosts: list[str]) -> None:
    """Add the shipped hosts to the variable that child processes read at their start."""
    inherited = os.environ.get(VARIABLE, "").split(",")
    shipped = [host for host in hosts if host.removeprefix("-") in shipped_hosts()]
    names = dict.fromkeys(filter(None, [*inherited, *shipped]))
    if names:
        os.environ[VARIABLE] = ",".join(names)


def _exit_code(program: Callable[[], object]) -> int:
    """Run the program: 0, or 1 after printing its traceback. `sys.exit` and Ctrl-C pass through."""
    try:
        program()
    except Exception as error:
        traceback = _programs_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return 1
    return 0


def _programs_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this module and runpy, if any others are left."""
    whole = traceback
    while traceback and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        traceback = traceback.tb_next
    return traceback or whole
