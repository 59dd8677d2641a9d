"""Starts jobs of several processes, with a hard timeout; ends them by their process ids."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.child import python_path
from tests.dist.fork_server import TIMED_OUT, Job, request
from tests.te_python import VARIABLE, te_folder

ROOT = Path(__file__).resolve().parents[2]


def run_job(
    world: int,
    module: str,
    args: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path = ROOT,
    max_file_bytes: int | None = None,
    grace_s: float = 2.0,
    te: str | None = None,
    nccl_rules: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module args` on `world` ranks, with torchrun's exit codes; see `fork_server`.

    Args:
        te: a release of Transformer Engine, whose Python the ranks have on the CPU; "" for none.
            None: the one that `tests.te_python.VARIABLE` names, which tools set.
        nccl_rules: whether a job that ends well must also keep NCCL's rules (`tests/rehearsal`);
            the environment variable MEGAPACK_TEST_NCCL_RULES=0 says no for all jobs.

    Raises:
        TimeoutError: with the job's output. All its processes have ended.
    """
    te = os.environ.get(VARIABLE, "") if te is None else te
    server, outputs = _server(te)
    output = outputs / f"job{next(_NUMBERS)}.txt"
    assert server.stdin is not None
    assert server.stdout is not None
    job = Job(
        world=world,
        module=module,
        args=list(args),
        cwd=str(cwd),
        env={**os.environ, "PYTHONPATH": _path(te), VARIABLE: te},
        timeout_s=timeout_s,
        output=str(output),
        max_file_bytes=max_file_bytes,
        grace_s=grace_s,
        nccl_rules=nccl_rules and os.environ.get("MEGAPACK_TEST_NCCL_RULES") != "0",
    )
    server.stdin.write(request(job))
    server.stdin.flush()
    code = int(server.stdout.readline())
    text = output.read_text(errors="replace")
    if code == TIMED_OUT:
        raise TimeoutError(f"{module} ran past {timeout_s} s:\n{text[-4000:]}")
    return subprocess.CompletedProcess([module, *args], code, text, "")


def checked_job(
    world: int,
    module: str,
    args: Sequence[str],
    *,
    timeout_s: float,
    te: str | None = None,
    nccl_rules: bool = True,
) -> str:
    """`run_job` that must succeed; returns its output."""
    done = run_job(world, module, args, timeout_s=timeout_s, te=te, nccl_rules=nccl_rules)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_code(code: str, *, timeout_s: float = 180) -> dict[str, Any]:
    """Run the code on one rank, which has imported Megatron-Core; returns the JSON that it prints.

    `tests.child.child` takes seconds more, for code that must import by itself.
    """
    printed = checked_job(1, "tests.dist.run_code", [code], timeout_s=timeout_s, te="")
    found: dict[str, Any] = json.loads([x for x in printed.splitlines() if x.startswith("{")][-1])
    return found


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running_ranks(te: str = "") -> list[int]:
    """The processes of the ranks of the job that another thread runs now."""
    (launcher,) = children(_server(te)[0].pid)
    return children(launcher)


def rank_reports(folder: Path, world: int) -> list[Any]:
    """The JSON that each rank of a job wrote into the folder."""
    paths = [folder / f"rank{rank}.json" for rank in range(world)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


_NUMBERS = itertools.count()


def _path(te: str) -> str:
    return python_path(ROOT, *([te_folder(te)] if te else []))


@functools.cache
def _server(te: str) -> tuple[subprocess.Popen[str], Path]:
    """The session's server for a release of Transformer Engine, and a folder for its jobs' output.

    The server ends when its input is closed, at the latest when this process ends.
    """
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.dist.fork_server"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path(te)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    outputs = Path(tempfile.mkdtemp(prefix="megapack-jobs-"))
    atexit.register(shutil.rmtree, outputs, ignore_errors=True)
    return server, outputs
