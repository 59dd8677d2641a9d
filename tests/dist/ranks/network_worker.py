"""Runs every command and records in found.json what the process tries to reach.

As root, it runs in a network namespace that only has a loopback. Calls that torch makes in C++ are
not recorded; without a network they could only fail.

python -m tests.dist.ranks.network_worker FOLDER
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
ALONE = ["layout.dp=1", "layout.pp=1", "layout.vpp=1", "train.trace_steps=1", "name=run"]
SMALL = ["data.num_generated=16", "data.prompts_per_batch=2", "train.save_interval=1"]
COMMANDS = {
    "plan": "plan lengths.txt --pp 2 --vpp 2 --max-tokens-per-gpu 1024 -o plan.json",
    "check": "check plan.json lengths.txt",
    "show": "show plan.json",
    "simulate": "simulate plan.json",
    "diff": "diff plan.json plan.json",
    "tune": f"tune lengths.txt --gpus 2 --gpu-memory-gib 80 --config {CONFIG}",
    "plot": "plot plan.json -o plan.svg",
    "report": "report plan.json lengths.txt -o plan.html",
    "patch list": "patch list",
    "dry run": f"train {CONFIG} --dry-run world=4",
    "train": " ".join(["train", str(CONFIG), *ALONE, *SMALL]),
    "report of a run": "report runs/run -o run.html",
}

# Audit events of socket and of modules that use it. Making or binding a socket reaches nothing.
HARMLESS = ("socket.__new__", "socket.bind", "socket.gethostname")
NETWORK = ("socket.", "urllib.", "http.", "ftplib.", "smtplib.", "poplib.", "imaplib.", "nntplib.")
NETWORK += ("webbrowser.", "telnetlib.", "ssl.")

# CLONE_NEWNET, SIOCSIFFLAGS and IFF_UP of Linux.
_NEW_NETWORK = 0x40000000
_SET_FLAGS = 0x8914
_UP = 1


def leave_network() -> bool:
    """Move to a network namespace with only a loopback; returns whether that is allowed here."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    return True


def main(folder: str) -> None:
    """Record exit codes, what was reached, and the modes of written files."""
    from megapack import cli
    from megapack.doctor import probes, runner

    os.chdir(folder)
    os.umask(0o077)
    Path("lengths.txt").write_text("".join(f"{100 + 37 * i % 700}\n" for i in range(64)))
    is_alone = leave_network()
    reached: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(NETWORK) and event not in HARMLESS:
            reached.append(f"{event}{args[1:] if event.startswith('socket.') else args}")

    sys.addaudithook(hook)
    # A control: the hook must also see a connection that nobody answers.
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", 9), timeout=1).close()
    num_control = len(reached)
    codes: dict[str, int] = {}
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        for name, line in COMMANDS.items():
            codes[name] = cli.main(line.split())
    # `doctor` runs most probes in a child process, which has no hook.
    for probe in (*runner.HERE, *runner.IN_CHILD):
        probes.run_probe(probe)
    results = {
        "codes": codes,
        "output": output.getvalue(),
        "control": reached[:num_control],
        "reached": reached[num_control:],
        "is_alone": is_alone,
        "modes": {str(path): path.stat().st_mode & 0o777 for path in Path().rglob("*")},
    }
    Path(folder, "found.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
