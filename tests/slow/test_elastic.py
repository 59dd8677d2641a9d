"""Elastic torchrun: two agents as two nodes; one is killed and comes back, and the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.weekly

CONFIG = "configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
SETTINGS = (
    *("name=run", "data.num_generated=128", "data.prompts_per_batch=4", "plan.global_batch_size=8"),
    *("layout.dp=2", "layout.pp=1", "layout.vpp=1", "train.save_interval=2", "train.resume=auto"),
)
ROOT = Path(__file__).resolve().parents[2]
COMPARED = ("loss", "grad_norm", "lr")


class Nodes:
    """Two nodes of one job on this machine, each with its script, its agent and its rank."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        environment = {
            **os.environ,
            **{"PYTHON": sys.executable, "NPROC_PER_NODE": "1", "MAX_RESTARTS": "3"},
            **{"RDZV_ENDPOINT": f"127.0.0.1:{self.port}", "RDZV_ID": "elastic", "NNODES": "2"},
            **{"NODE_RANK": str(node), "LOCAL_ADDR": "127.0.0.1"},
        }
        command = ["tools/launch/torchrun.sh", CONFIG, *SETTINGS, f"runs_dir={self.folder}"]
        with (self.folder / f"node-{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=environment
            )

    def kill(self, node: int) -> None:
        """Kill the script, its agent and the ranks, as if the machine had lost power."""
        script = self.agents.pop(node)
        for pid in descendants(script.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        script.wait()

    def wait(self, seconds: float) -> list[int]:
        """Exit codes of the agents."""
        return [agent.wait(timeout=seconds) for agent in self.agents.values()]

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("node-*.log")))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[str], Nodes]]:
    started: list[Nodes] = []

    def make(name: str) -> Nodes:
        folder = tmp_path / name
        folder.mkdir()
        started.append(Nodes(folder))
        return started[-1]

    yield make
    for job in started:
        for node in list(job.agents):
            if job.agents[node].poll() is None:
                job.kill(node)


def test_a_node_that_dies_and_comes_back(nodes: Callable[[str], Nodes]) -> None:
    whole = nodes("whole")
    for node in (0, 1):
        whole.start(node)
    assert whole.wait(400) == [0, 0], whole.logs()

    killed = nodes("killed")
    for node in (0, 1):
        killed.start(node)
    wait_until(lambda: len(steps_of(killed)) >= 5, 300, killed.logs)
    killed.kill(1)
    killed.start(1)
    assert killed.wait(500) == [0, 0], killed.logs()

    assert "resumed" in killed.logs(), killed.logs()
    assert steps_of(killed) == steps_of(whole)
    assert len(steps_of(whole)) > 8


def descendants(pid: int) -> list[int]:
    """A process and those that it started, itself first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for path in Path(f"/proc/{parent}/task").glob("*/children"):
                found += map(int, path.read_text().split())
    return found


def steps_of(job: Nodes) -> list[dict[str, Any]]:
    """What is compared of each step, in order."""
    file = job.folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in ("step", *COMPARED)} for row in rows if "step" in row]


def wait_until(done: Callable[[], bool], seconds: float, logs: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, logs()
        time.sleep(0.2)
