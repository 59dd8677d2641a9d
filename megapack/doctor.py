"""What of this machine's software a run would trip over: each part probed in a process of its own.

    PROBES -> one child each (`doctor_probes`) -> Diagnosis

A part that crashes, hangs or raises when it is imported is a fault that is told, and takes nothing
else down. Probes that need a broken part are not run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

PROBES: dict[str, tuple[str, ...]] = {
    "python": (),
    "torch": (),
    "cuda": ("torch",),
    "nccl": ("torch",),
    "megatron": ("torch",),
    "transformer_engine": ("torch",),
    "apex": ("torch",),
    "numba": (),
    "patches": (),
    "environment": (),
}
"""Names, which `doctor_probes` has too, and the probes without whose part each cannot work."""

DEFAULT_TIMEOUT_S = 120.0

# The child sees modules where this process does, whatever it was started with.
_CHILD = (
    "import sys; sys.path[:] = sys.argv[2:]; from megapack.doctor_probes import main; "
    "main(sys.argv[1])"
)
_MAX_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What one probe found."""

    probe: str
    found: str
    """Versions and the like; one line."""
    broken: bool = False
    """It does not import, or its probe ended without an answer."""
    faults: tuple[str, ...] = ()
    """What is wrong and what to do."""
    notes: tuple[str, ...] = ()
    """What is right for some runs only."""


def diagnose(timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Diagnosis]:
    """All probes, one after the other.

    Args:
        timeout_s: seconds after which a probe counts as hung.
    """
    done: dict[str, Diagnosis] = {}
    for probe, needs in PROBES.items():
        broken = [name for name in needs if done[name].broken]
        if broken:
            done[probe] = Diagnosis(probe=probe, found=f"not probed, {broken[0]} is broken")
        else:
            done[probe] = _probe(probe, timeout_s)
    return list(done.values())


def _probe(probe: str, timeout_s: float) -> Diagnosis:
    paths = [path or os.getcwd() for path in sys.path]
    command = [sys.executable, *_isolation(), "-c", _CHILD, probe, *paths]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # A group of its own: what the child starts ends with it.
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return _broken(probe, f"hangs: no answer within {timeout_s:g} s")
    try:
        told = json.loads(out)
    except ValueError:
        return _broken(probe, f"{_ending(child.returncode)}{_last_line(err.splitlines())}")
    return Diagnosis(
        probe=probe,
        found=told["found"],
        broken=told["broken"],
        faults=tuple(told["faults"]),
        notes=tuple(told["notes"]),
    )


def _isolation() -> list[str]:
    """What this Python ignores its children ignore too: variables name code that would run."""
    if sys.flags.isolated:
        return ["-I"]
    return ["-E"] if sys.flags.ignore_environment else []


def _broken(probe: str, how: str) -> Diagnosis:
    return Diagnosis(probe=probe, found="", broken=True, faults=(f"its probe {how}",))


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code} and no answer"


def _last_line(lines: Sequence[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:_MAX_CHARS]}" if said else ""
