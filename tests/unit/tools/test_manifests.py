"""The commands of the manifests for SkyPilot and Kubernetes start torchrun."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.unit


def manifest(root: Path, name: str) -> dict[str, Any]:
    return yaml.safe_load((root / "tools/launch" / name).read_text())


def started(root: Path, tmp_path: Path, script: str, **env: str) -> str:
    """What the script of a node starts: an interpreter that prints its arguments."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && exit\nenv | grep -E "^(RANK|WORLD_SIZE)="\necho "$@"'
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=root,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python), "CONFIG": "c.yaml", **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def torchrun(rendezvous: str, is_host: str, address: str) -> str:
    return (
        f"-m torch.distributed.run --nnodes 8 --rdzv-backend c10d {rendezvous} "
        f"--rdzv-conf is_host={is_host} --local-addr {address} --nproc-per-node gpu "
        "-m megapack train c.yaml train.resume=auto\n"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_of_skypilot_starts_torchrun(repo_root: Path, tmp_path: Path, rank: int) -> None:
    output = started(
        repo_root,
        tmp_path,
        manifest(repo_root, "train.sky.yaml")["run"],
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
        SKYPILOT_NODE_RANK=str(rank),
        SKYPILOT_NUM_NODES="8",
        SKYPILOT_TASK_ID="sky-1",
    )
    rendezvous = "--rdzv-endpoint 10.0.0.1:29400 --rdzv-id sky-1"
    is_host = "true" if rank == 0 else "false"
    assert output == torchrun(rendezvous, is_host, f"10.0.0.{rank + 1}")


@pytest.mark.parametrize(("rank", "role"), [(0, "Master"), (1, "Worker")])
def test_a_pod_starts_torchrun(repo_root: Path, tmp_path: Path, rank: int, role: str) -> None:
    replicas = manifest(repo_root, "train.k8s.yaml")["spec"]["pytorchReplicaSpecs"]
    (container,) = replicas[role]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    output = started(
        repo_root,
        tmp_path,
        *container["args"],
        MASTER_ADDR="megapack-master-0",
        MASTER_PORT="23456",
        RANK=str(rank),
        WORLD_SIZE=str(sum(spec["replicas"] for spec in replicas.values())),
        LOCAL_ADDR="10.0.0.7",
    )
    rendezvous = "--rdzv-endpoint megapack-master-0:23456 --rdzv-id megapack"
    assert output == torchrun(rendezvous, "true" if rank == 0 else "false", "10.0.0.7")
