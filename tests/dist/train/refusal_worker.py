"""Runs `megapack train` with a config that this machine cannot run.

torchrun --nproc-per-node N -m tests.dist.train.refusal_worker OUT_DIR OVERRIDE ...
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from megatron.core import parallel_state

from megapack.cli import main as megapack
from tests.dist.setup import write_report

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "dapo_tiny_cpu.yaml"


def main(out_dir: str, *overrides: str) -> None:
    """Write `OUT_DIR/rank<r>.json`: exit code, lines, and whether Megatron had groups."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = megapack(["train", str(CONFIG), *overrides, f"runs_dir={out_dir}"])
    had_groups = parallel_state.model_parallel_is_initialized()
    found = {"code": code, "text": stderr.getvalue(), "had_groups": had_groups}
    write_report(out_dir, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
