"""Run the probes of `doctor`.

Probes that import torch, or packages built on it, run in one child process, because such an import
can crash or hang. The first probe that the child does not answer gets the fault, and the probes
after it are skipped. A package is probed before those that import it, so that the right one is
blamed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess

from megapack.base.processes import python_command
from megapack.doctor.probes import Diagnosis, not_probed, refused_patches, run_probe
from megapack.hosts.startup import VARIABLE

HERE = ("python", "numba", "environment")
IN_CHILD = ("torch", "cuda", "transformer_engine", "apex", "megatron", "attention", "patches")

_CHILD = "import sys; from megapack.doctor.probes import main; main(sys.argv[1].split())"
_MAX_CHARS = 200


def diagnose(timeout_s: float = 120.0) -> list[Diagnosis]:
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
    diagnoses = [Diagnosis(**json.loads(line)) for line in answers.splitlines()]
    unanswered = IN_CHILD[len(diagnoses) :]
    if unanswered:
        faulty = unanswered[0]
        diagnoses.append(Diagnosis(probe=faulty, broken=True, faults=[f"its probe {ending}"]))
        diagnoses += [not_probed(name, faulty) for name in unanswered[1:]]
    return diagnoses


def _start_child() -> subprocess.Popen[str]:
    return subprocess.Popen(
        python_command(_CHILD, " ".join(IN_CHILD)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # A value that ends the child at its first import of a host is a fault of its own.
        env={**os.environ, **({VARIABLE: ""} if refused_patches() else {})},
        # Its own process group, so that processes which the child starts can be killed with it.
        start_new_session=True,
    )


def _ending(code: int, log: str) -> str:
    """How the child ended, with the last line that it logged."""
    ending = f"ended with code {code} and no answer"
    if code < 0:
        ending = f"was ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f"{ending}: {lines[-1][:_MAX_CHARS]}" if lines else ending
