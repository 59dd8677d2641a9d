"""train.sbatch under Slurm itself: two nodes on this machine, with slurmctld, slurmd and munge."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.weekly

NODES = ("n0", "n1")
CONFIG = "configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
SETTINGS = [
    *("name=run", "data.num_generated=64", "data.prompts_per_batch=4", "plan.global_batch_size=8"),
    *("layout.dp=2", "layout.pp=1", "layout.vpp=1"),
]
# What is not said is Slurm's default. A node that does not answer for 10 s is down.
SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.sock
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
NodeName=n[0-1] NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=1
PartitionName=main Nodes=n[0-1] Default=YES State=UP
"""


def free_ports(count: int) -> list[int]:
    """Ports in a row that nobody listens on, below those that the system gives away."""
    for first in range(17_000 + os.getpid() % 5000, 30_000, count):
        ports = range(first, first + count)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in ports:
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(ports)
    raise AssertionError("no free ports")


class Cluster:
    """Slurm on this machine."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self.env = {
            **{name: value for name, value in os.environ.items() if name != "PYTHON"},
            **{"SLURM_CONF": str(folder / "slurm.conf"), "NPROC_PER_NODE": "1"},
        }

    def start(self) -> None:
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        text = SLURM_CONF.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            folder=self.folder,
            ports=free_ports(3),
        )
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = {"key": "key", "socket": "sock", "pid": "pid", "log": "log", "seed": "seed"}
        options = [
            f"--{kind}{'' if kind == 'socket' else '-file'}={self.folder}/munge.{end}"
            for kind, end in files.items()
        ]
        self.call("munged", "--force", *options)
        self.call("slurmctld")
        for node in NODES:
            self.call("slurmd", "-N", node)
        wait_until(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", 60)

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=60, env=self.env
        )
        return done.stdout.strip()

    def submit(self, *settings: str, options: tuple[str, ...] = ()) -> str:
        """The id of a job on both nodes."""
        script = self.root / "tools/launch/train.sbatch"
        command = ["sbatch", "--parsable", "--nodes", "2", "-o", str(self.folder / "log"), *options]
        arguments = [*SETTINGS, f"runs_dir={self.folder}/runs", *settings]
        return self.call(*command, f"--chdir={self.root}", str(script), CONFIG, *arguments)

    def job(self, job_id: str) -> dict[str, str]:
        """What Slurm tells of a job."""
        words = self.call("scontrol", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def kill(self, name: str) -> None:
        """Kill a daemon; nothing if it does not run."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGKILL)

    def steps(self) -> list[int]:
        """The steps that the run has done, in order."""
        path = self.folder / "runs/run/metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found: list[Any] = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line["step"] for line in found]

    def stop(self) -> None:
        # A daemon that does not answer is killed all the same.
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.call("scancel", "--user", getpass.getuser())
            wait_until(lambda: not self.call("squeue", "-h"), 60)
        for name in ("slurmctld", *NODES, "munge"):
            self.kill(name)


def wait_until(condition: Callable[[], object], timeout_s: float) -> None:
    """Poll; a command of Slurm's that is late or fails, as on a busy machine, is asked again."""
    end = time.monotonic() + timeout_s
    problem = ""
    while True:
        try:
            if condition():
                return
        except subprocess.SubprocessError as error:
            problem = f": {error}"
        assert time.monotonic() < end, f"not within {timeout_s} s{problem}"
        time.sleep(0.5)


@pytest.fixture
def cluster(repo_root: Path, tmp_path: Path) -> Iterator[Cluster]:
    for program in ("slurmctld", "slurmd", "munged"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}: install slurmctld, slurmd and munge")
    for node in NODES:
        try:
            socket.gethostbyname(node)
        except OSError:
            pytest.skip(f"no host {node}: add `127.0.0.1 {' '.join(NODES)}` to /etc/hosts")
    own = Cluster(repo_root, tmp_path)
    try:
        own.start()
        yield own
    finally:
        own.stop()


def test_a_poll_outlasts_commands_that_fail_or_are_late() -> None:
    errors = [subprocess.CalledProcessError(1, "squeue"), subprocess.TimeoutExpired("squeue", 60)]

    def answered() -> bool:
        if errors:
            raise errors.pop()
        return True

    wait_until(answered, 60)
    assert not errors
    errors.append(subprocess.TimeoutExpired("squeue", 60))
    with pytest.raises(AssertionError, match="not within 0 s: Command 'squeue' timed out"):
        wait_until(answered, 0)


def test_a_time_limit_saves_queues_again_and_resumes_and_scancel_ends(cluster: Cluster) -> None:
    """The job gets 5 minutes, and the signal 2 or 3 minutes before their end."""
    endless = ("train.epochs=100000", "train.save_interval=100000")
    job = cluster.submit(*endless, options=("--time=5", "--signal=B:USR1@120"))
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", 400)
    done = cluster.steps()
    assert done == list(range(1, len(done) + 1))
    assert done
    # Slurm waits two minutes before it starts a job again.
    wait_until(lambda: len(cluster.steps()) > len(done) + 2, 500)
    # It goes on from the step after the last one, and repeats none.
    assert cluster.steps()[len(done)] == done[-1] + 1
    cluster.call("scancel", job)
    wait_until(lambda: cluster.job(job)["JobState"] == "CANCELLED", 60)


def test_a_node_that_dies_has_the_job_queued_again_and_resumed(cluster: Cluster) -> None:
    job = cluster.submit("train.epochs=100000", "train.save_interval=2")
    wait_until(lambda: len(cluster.steps()) > 4, 300)
    cluster.kill(NODES[1])
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", 120)
    done = cluster.steps()
    cluster.call("slurmd", "-N", NODES[1])
    wait_until(lambda: len(cluster.steps()) > len(done) + 2, 500)
    # From the last checkpoint: at most two steps are done again.
    assert done[-1] - 2 <= cluster.steps()[len(done)] - 1 <= done[-1]
