"""Starts a job with torchrun in its own process group, which is killed on a timeout.

`tests.dist.spawn` forks its ranks instead, but CUDA does not work after a fork.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def launch_job(
    world: int,
    module: str,
    args: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module args` on `world` ranks, on a free port.

    Args:
        env: variables added to this process's environment.

    Raises:
        TimeoutError: with the job's output; all of its processes have been killed.
    """
    command = [sys.executable, "-m"]
    if world > 1:
        command += ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(world), "-m"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **(env or {}), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    job = subprocess.Popen(
        [*command, module, *args],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        raise TimeoutError(f"{module} ran past {timeout_s} s:\n{output[-4000:]}") from None
    return subprocess.CompletedProcess(job.args, job.returncode, output, "")
