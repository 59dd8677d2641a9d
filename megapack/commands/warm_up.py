"""Compile the planner for this machine, ahead of the first plan. Run it once per node or image."""

from __future__ import annotations

import argparse
import logging
import time

from megapack.base.jit import cache_folder, can_store
from megapack.errors import ConfigError

EXAMPLE = "megapack warm-up"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --all."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="also what context_parallel=dynamic, split_samples=auto and backward=split need",
    )


def run(args: argparse.Namespace) -> int:
    """Compile, or load what is compiled, and say where it is."""
    from megapack.outlook.warm_up import ALL, COMPILE_S, USUAL, compile_planner

    if not can_store():
        raise ConfigError("compiled code cannot be stored, so there is nothing to compile ahead")
    # The line about compiling names this command.
    logging.getLogger("megapack.base.jit").setLevel(logging.ERROR)
    began = time.perf_counter()
    usual = "" if args.all else f", which takes about {COMPILE_S:.0f} s the first time"
    print(f"compiling the planner{usual}", flush=True)
    compile_planner(ALL if args.all else USUAL)
    seconds = time.perf_counter() - began
    print(f"the planner is compiled ({seconds:.1f} s): {cache_folder()}")
    return 0
