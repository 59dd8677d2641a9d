"""train.sbatch on two simulated nodes: stopped by a signal, queued again, and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megapack.errors import RunInterrupted

pytestmark = pytest.mark.slow

NUM_STEPS = 32
SETTINGS = [
    *("name=run", "data.num_generated=64", "data.prompts_per_batch=4", "plan.global_batch_size=8"),
    *("layout.dp=2", "layout.pp=1", "layout.vpp=1", "train.epochs=4", "train.save_interval=1000"),
]

SCONTROL = """#!/usr/bin/env bash
echo "$@" >>"$CALLS"
if [[ $1 == show ]]; then printf 'localhost\\nlocalhost\\n'; fi
"""

# Like Slurm, this srun passes a signal to every process of every node.
SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do
    [[ $1 == *=* ]] || shift
    shift
done
set -m
for node in 0 1; do
    SLURM_NODEID=$node SLURMD_NODENAME=localhost "$@" &
    tasks+=($!)
done
forward() {
    for task in "${tasks[@]}"; do
        torchrun=$(cat /proc/$task/task/*/children)
        kill -USR1 $task $torchrun $(cat /proc/$torchrun/task/*/children)
    done
}
trap forward USR1
worst=0
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2>/dev/null; do wait "$task"; done
    wait "$task"
    code=$?
    if ((code > worst)); then worst=$code; fi
done
exit "$worst"
"""


def free_job_id() -> int:
    """A job id whose rendezvous port is free."""
    for job_id in range(os.getpid() % 10_000, 17_000):
        with socket.socket() as probe:
            try:
                probe.bind(("", 15_000 + job_id))
            except OSError:
                continue
        return job_id
    raise AssertionError("no free port")


class Cluster:
    """Two simulated nodes on this machine."""

    def __init__(self, repo_root: Path, folder: Path) -> None:
        self.root = repo_root
        self.folder = folder
        self.job_id = free_job_id()
        self.calls = folder / "calls"
        for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def start(self) -> subprocess.Popen[str]:
        """Run the batch script, as Slurm does on the first node."""
        env = {
            **os.environ,
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(self.root),
            "OMP_NUM_THREADS": "1",
            "NPROC_PER_NODE": "1",
            "SLURM_JOB_ID": str(self.job_id),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "localhost[1-2]",
            "SLURM_SUBMIT_DIR": str(self.root),
        }
        config = "configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
        script = self.root / "tools/launch/train.sbatch"
        with open(self.folder / "log", "w") as log:
            return subprocess.Popen(
                [str(script), config, *SETTINGS, f"runs_dir={self.folder}/runs"],
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "runs/run/metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def requeued(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith("requeue")]


def wait_for(batch: subprocess.Popen[str], timeout_s: float) -> int:
    """Wait for the exit code; afterwards SIGTERM makes any launcher left end its ranks."""
    try:
        return batch.wait(timeout_s)
    finally:
        for pid in session_processes(batch.pid):
            os.kill(pid, signal.SIGTERM)


def session_processes(session: int) -> list[int]:
    """Processes of a session: the launchers, but not their ranks, which have their own sessions."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(path.parent.name))
    return found


@pytest.mark.weekly
def test_a_job_is_saved_queued_again_and_resumed(repo_root: Path, tmp_path: Path) -> None:
    cluster = Cluster(repo_root, tmp_path)
    batch = cluster.start()
    deadline = time.monotonic() + 200
    while not cluster.metrics() and batch.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    batch.send_signal(signal.SIGUSR1)
    assert wait_for(batch, 100) == RunInterrupted.exit_code, (tmp_path / "log").read_text()[-5000:]
    done = len(cluster.metrics())
    assert 0 < done < NUM_STEPS
    assert (tmp_path / f"runs/run/checkpoints/step-{done:08d}").is_dir()
    assert cluster.requeued() == [f"requeue {cluster.job_id}"]

    assert wait_for(cluster.start(), 300) == 0, (tmp_path / "log").read_text()[-5000:]
    assert f"resumed after step {done}" in (tmp_path / "log").read_text()
    assert [line["step"] for line in cluster.metrics()] == list(range(1, NUM_STEPS + 1))
    assert len(cluster.requeued()) == 1
