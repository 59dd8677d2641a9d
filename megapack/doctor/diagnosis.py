"""Find out what of this machine's software and settings a run would trip over.

Probes that import torch and what stands upon it run in one child process, because such an import
can crash or hang. The first probe that the child did not answer is the fault, and those behind it
are not probed. A package comes before those that import it, so that the right one is blamed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from megapack.doctor.probes import Diagnosis, not_probed, run_probe

__all__ = ["DEFAULT_TIMEOUT_S", "Diagnosis", "diagnose"]

HERE = ("python", "numba", "environment")
IN_CHILD = ("torch", "cuda", "transformer_engine", "apex", "megatron", "patches")

DEFAULT_TIMEOUT_S = 120.0

# The child gets this process's sys.path, however this process was started.
_CHILD = (
    "import sys; sys.path[:] = sys.argv[2:]; from megapack.doctor.probes import main; "
    "main(sys.argv[1].split())"
)
_MAX_CHARS = 200


def diagnose(timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Diagnosis]:
    """Run all probes.

    Args:
        timeout_s: seconds after which the child counts as hung.
    """
    return [*map(run_probe, HERE), *_run_child(timeout_s)]


def _run_child(timeout_s: float) -> list[Diagnosis]:
    child = _start_child()
    try:
        answers, log = child.communicate(timeout=timeout_s)
        ending = _ending(child.returncode, log)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        answers, _ = child.communicate()
        ending = f"hangs: no answer within {timeout_s:g} s"
    found = [Diagnosis(**json.loads(line)) for line in answers.splitlines()]
    unanswered = IN_CHILD[len(found) :]
    if unanswered:
        faulty = unanswered[0]
        found.append(Diagnosis(probe=faulty, broken=True, faults=[f"its probe {ending}"]))
        found += [not_probed(name, faulty) for name in unanswered[1:]]
    return found


def _start_child() -> subprocess.Popen[str]:
    paths = [path or os.getcwd() for path in sys.path]
    return subprocess.Popen(
        [sys.executable, *_isolation(), "-c", _CHILD, " ".join(IN_CHILD), *paths],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Its own process group, so that whatever the child starts can be ended with it.
        start_new_session=True,
    )


def _isolation() -> list[str]:
    """The child ignores what this Python ignores: variables can name code to run."""
    if sys.flags.isolated:
        return ["-I"]
    return ["-E"] if sys.flags.ignore_environment else []


def _ending(code: int, log: str) -> str:
    """How the child ended, with the last line that it logged."""
    how = f"ended with code {code} and no answer"
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    said = [line.strip() for line in log.splitlines() if line.strip()]
    return f"{how}: {said[-1][:_MAX_CHARS]}" if said else how
