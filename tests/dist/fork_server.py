"""Starts ranks by forking a process that has already imported torch and Megatron-Core.

The imports alone would take each rank longer than most tests run. One server serves a test session:

    spawn.run_job -> (a line of JSON) server -> fork: launcher of one job -> fork: its ranks

The server only runs imports and small plans, so that it has one thread when it forks. A rank
runs its module as `python -m` does, in a job like torchrun's: the launcher holds the store, and
when a rank fails it ends the others. A job of several ranks is a rehearsal of NCCL's rules
(`tests/rehearsal`): its ranks note what they issue, and the launcher fails the job if that breaks
a rule.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import json
import os
import resource
import runpy
import shutil
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

TIMED_OUT = 124


@dataclass(frozen=True, kw_only=True)
class Job:
    """A module, and the ranks to run it on."""

    world: int
    module: str
    args: list[str]
    cwd: str
    env: dict[str, str]
    timeout_s: float
    output: str
    """A file that gets the output of all ranks."""
    max_file_bytes: int | None = None
    """A limit on the size of files that ranks write; it simulates a full disk."""
    grace_s: float = 2.0
    """Seconds that the other ranks have to report errors after one failed; then they are ended."""
    nccl_rules: bool = True
    """Whether a job of several ranks must keep NCCL's rules."""

    @property
    def notes(self) -> Path | None:
        """The folder of what the ranks issue; None without a check."""
        return Path(f"{self.output}.notes") if self.nccl_rules and self.world > 1 else None


def serve() -> int:
    """Run the jobs that arrive on stdin, one per line; answer each with its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    import megapack.job.train  # noqa: F401
    from megapack.outlook.warm_up import compile_planner
    from tests.rehearsal import nccl_rules, recorder  # noqa: F401

    if not os.environ.get("NUMBA_DISABLE_JIT"):
        # Load the planner's kernels here. Each rank would take up to a second to load them.
        compile_planner()
    # A rank's collections visit only what it makes itself: 0.2 s less each.
    gc.collect()
    gc.freeze()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        launcher = os.fork()
        if launcher == 0:
            _leave(_launch(Job(**json.loads(line))))
        _, status = os.waitpid(launcher, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    return 0


def request(job: Job) -> str:
    """The line that requests a job."""
    return json.dumps(asdict(job)) + "\n"


def _launch(job: Job) -> int:
    """The launcher: fork the ranks, hold their store, wait for them."""
    os.setsid()
    output = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if job.notes:
        job.notes.mkdir()
    read, write = os.pipe()
    ranks = []
    for rank in range(job.world):
        pid = os.fork()
        if pid == 0:
            os.close(write)
            _leave(_rank(job, rank, read))
        ranks.append(pid)
    store = _store(job.world) if job.world > 1 else None
    os.write(write, b"%06d" % (store.port if store else 0) * job.world)
    code = _wait(ranks, time.monotonic() + job.timeout_s, job.grace_s)
    return _rehearsed(job.notes, job.world, code) if job.notes else code


def _rehearsed(notes: Path, world: int, code: int) -> int:
    """The exit code, 1 if a job that ended well broke NCCL's rules; prints what broke them."""
    from tests.rehearsal import nccl_rules

    # This process ends soon, and a collection would visit all that torch and Megatron have made.
    gc.disable()
    broken = nccl_rules.report(notes, world, has_ended=code == 0)
    shutil.rmtree(notes)
    print(broken, end="", flush=True)
    return code or int(bool(broken))


def _store(world: int) -> Any:
    from torch.distributed import TCPStore

    # Port 0: the system chooses a free port and reserves it while the job runs.
    wait = datetime.timedelta(seconds=60)
    return TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False, timeout=wait)


def _rank(job: Job, rank: int, port: int) -> int:
    env = {**job.env, "OMP_NUM_THREADS": "1"}
    if job.world > 1:
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world)}
        env |= {"LOCAL_WORLD_SIZE": str(job.world), "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(int(os.read(port, 6))), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.clear()
    os.environ.update(env)
    os.chdir(job.cwd)
    if job.max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job.max_file_bytes, resource.RLIM_INFINITY))
    sys.argv = [job.module, *job.args]
    if job.notes:
        from tests.rehearsal import recorder

        recorder.install(job.notes, rank)
    try:
        runpy.run_module(job.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        # The interpreter sets it too; megapack's exit hook reads it.
        sys.last_value = error
        traceback.print_exc()
        return 1
    return 0


def _leave(code: int) -> NoReturn:
    """Exit without shutting the interpreter down, which would touch and so copy all memory."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(ranks: list[int], deadline: float, grace_s: float) -> int:
    """The exit code: a single rank's own; of several ranks 1 if any failed, as with torchrun."""
    running = set(ranks)
    failed = 0
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            if code and not failed:
                failed = code if len(ranks) == 1 else 1
                deadline = min(deadline, time.monotonic() + grace_s)
        elif time.monotonic() > deadline:
            for rank in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            failed = failed or TIMED_OUT
            deadline = float("inf")
        else:
            time.sleep(0.01)
    return failed


if __name__ == "__main__":
    sys.exit(serve())
