"""Runs every command in a process that notes what it tries to reach, in found.json.

As root it runs where there is no network but a loopback of its own. What torch does in C++ is not
noted: there it could only fail.

python -m tests.dist.network_worker FOLDER
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

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
ALONE = ["layout.dp=1", "layout.pp=1", "layout.vpp=1", "train.trace_steps=1", "name=run"]
SMALL = ["data.num_generated=16", "data.prompts_per_batch=2", "train.save_interval=1"]
MODEL = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4"
MODEL += " --vocab-size 256"
COMMANDS = {
    "plan": "plan lengths.txt --pp 2 --vpp 2 --max-tokens-per-gpu 1024 -o plan.json",
    "check": "check plan.json lengths.txt",
    "show": "show plan.json",
    "simulate": "simulate plan.json",
    "diff": "diff plan.json plan.json",
    "tune": f"tune lengths.txt --gpus 2 --gpu-memory-gib 80 --peak-tflops 100 {MODEL}",
    "trace": "trace plan.json -o trace.json",
    "plot": "plot plan.json -o plan.svg",
    "report": "report plan.json lengths.txt -o plan.html",
    "patch list": "patch list",
    "dry run": f"train {CONFIG} --dry-run world=4",
    "train": " ".join(["train", str(CONFIG), *ALONE, *SMALL]),
    "report of a run": "report runs/run -o run.html",
    "trace of a run": "trace runs/run -o run.json",
}

# Of socket and what stands upon it. Making a socket, or looking at its name, reaches nothing.
HARMLESS = ("socket.__new__", "socket.bind", "socket.gethostname")
NETWORK = ("socket.", "urllib.", "http.", "ftplib.", "smtplib.", "poplib.", "imaplib.", "nntplib.")
NETWORK += ("webbrowser.", "telnetlib.", "ssl.")

_NEW_NETWORK, _SET_FLAGS, _UP = 0x40000000, 0x8914, 1


def leave_network() -> bool:
    """Move to a network of nothing but a loopback; whether that is allowed here."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    return True


def main(folder: str) -> None:
    """Note exit codes, what was reached, and who may read the files that were written."""
    from megapack import cli
    from megapack.doctor.probes import run_probe
    from megapack.doctor.runner import HERE, IN_CHILD

    os.chdir(folder)
    os.umask(0o077)
    Path("lengths.txt").write_text("".join(f"{100 + 37 * i % 700}\n" for i in range(64)))
    is_alone, reached = leave_network(), list[str]()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(NETWORK) and event not in HARMLESS:
            reached.append(f"{event}{args[1:] if event.startswith('socket.') else args}")

    sys.addaudithook(hook)
    # The hook must see what nobody answers, too.
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", 9), timeout=1).close()
    control, codes, said = len(reached), dict[str, int](), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        for name, line in COMMANDS.items():
            codes[name] = cli.main(line.split())
    # `doctor` runs most of them in a child, which has no hook.
    for probe in (*HERE, *IN_CHILD):
        run_probe(probe)
    found = {
        "codes": codes,
        "said": said.getvalue(),
        "control": reached[:control],
        "reached": reached[control:],
        "is_alone": is_alone,
        "modes": {str(path): path.stat().st_mode & 0o777 for path in Path().rglob("*")},
    }
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
