"""Compile the planner for this machine, ahead of the first plan. Run it once per node or image."""

from __future__ import annotations

import argparse
import logging
import threading
import time

from megapack.base.jit import cache_folder, can_store, compiles
from megapack.errors import ConfigError

EXAMPLE = "megapack warm-up"

# Seconds from one line about progress to the next.
_LINE_S = 10.0


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

    if not compiles():
        raise ConfigError("MEGAPACK_COMPILE=off, or numba is missing: nothing can be compiled")
    if not can_store():
        raise ConfigError("compiled code cannot be stored, so there is nothing to compile ahead")
    logging.getLogger("megapack").setLevel(logging.WARNING)
    began = time.perf_counter()
    is_done = threading.Event()

    def show() -> None:
        usual = "" if args.all else f" of about {COMPILE_S:.0f}"
        while not is_done.wait(_LINE_S):
            print(f"compiling: {time.perf_counter() - began:.0f} s{usual}", flush=True)

    threading.Thread(target=show, daemon=True).start()
    compile_planner(ALL if args.all else USUAL)
    is_done.set()
    seconds = time.perf_counter() - began
    print(f"the planner is compiled ({seconds:.1f} s): {cache_folder()}")
    return 0
