"""Runs a module on this rank, with what each rank of the check needs.

    python -m tools.nccl.on_ranks.start MODULE ARGUMENTS

Its operations are noted for the model of NCCL's rules, SIGUSR2 prints where it stands, and a fault
that a rehearsal asks for is put into its collectives.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
from pathlib import Path

from tests.rehearsal import recorder
from tools.nccl.on_ranks import faked

NOTES = "MEGAPACK_CHECK_NOTES"
"""The variable with the folder of the ranks' notes."""


def main(module: str, *arguments: str) -> None:
    """Run the module as `python -m` does."""
    # Not SIGUSR1, on which a job saves itself and ends.
    faulthandler.register(signal.SIGUSR2)
    if NOTES in os.environ:
        recorder.install(Path(os.environ[NOTES]), int(os.environ.get("RANK", "0")))
    faked.install(os.environ.get(faked.FAULT, ""))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
