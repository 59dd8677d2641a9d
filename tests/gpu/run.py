"""Runs the GPU tests' jobs, each in its own process: a device fault ends only one of them.

    python -m tests.gpu.run OUT.json [cuda|cpu]

Measures the figures without pytest; the tests read its results.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.gpu.rehearsed import REHEARSED, SAMPLED
from tools.nccl.launch import run_ranks

# Transformer Engine asks cuBLAS for TF32 in fp32 products, but these tests need true fp32. gloo
# uses the loopback interface, so that it does not look up the machine's name.
_ENVIRONMENT = {"NVIDIA_TF32_OVERRIDE": "0", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
# Read when CUDA and NCCL start: cuBLAS adds up in one order, and graphs run beside expandable
# segments.
_FEATURES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_GRAPH_REGISTER": "0"}
# Limits of one job and of all jobs. The first job with SwiGLU in one kernel compiles it.
# tools/gpu_check.sh kills pytest after 270 s, which would leave a running job behind, and the
# kernels' tests run first. A rehearsal may run beside other work on a few cores.
_PATIENCE = 10 if REHEARSED else 1
JOB_S = 90 * _PATIENCE
TOTAL_S = 180 * _PATIENCE
# When a rank has failed, so long the other one may write its own error.
_GRACE_S = 5

Results = dict[str, dict[str, dict[str, Any]]]
"""Results by job and part; a part that failed has an "error"."""


def job_names(device: str) -> list[str]:
    """Jobs that can run here: each attention alone, the best one in pipelines, and features that
    need more than plain rows. A limit of time cuts the last ones."""
    own = attentions(device)
    pipeline = [] if SAMPLED else [f"pipeline_{'te' if 'te' in own else 'sdpa'}"]
    return [*own, *pipeline, "features"]


def attentions(device: str) -> list[str]:
    """Those that can run here."""
    if device == "cpu":
        return ["sdpa"]
    if SAMPLED:
        return ["varlen"]
    te = ["te"] if find_spec("transformer_engine") else []
    varlen = ["varlen"] if find_spec("torch.nn.attention.varlen") else []
    return [*te, *varlen, "sdpa"]


def run(device: str, out: Path, *, job_s: float = JOB_S, total_s: float = TOTAL_S) -> Results:
    """Run all jobs, one after the other; `out` is rewritten after each."""
    results: Results = {}
    limits = job_s, time.monotonic() + total_s
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.pt"
        failed = _job(1, "tests.gpu.reference", [device, str(reference)], limits)
        names = [] if failed else job_names(device)
        if failed:
            results["reference"] = {"job": {"error": failed}}
        for name in names:
            own = Path(folder) / f"{name}.json"
            results[name] = _run_one(name, device, reference, own, limits)
            out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return results


def _run_one(
    name: str, device: str, reference: Path, out: Path, limits: tuple[float, float]
) -> dict[str, dict[str, Any]]:
    if name == "features":
        args = [device, ",".join(attentions(device)), str(out)]
        failed = _job(1, "tests.gpu.features", args, limits, _FEATURES)
    else:
        attention = name.removeprefix("pipeline_")
        world, module = (1, "worker") if name == attention else (2, "pipeline_worker")
        args = [device, attention, str(reference), str(out)]
        failed = _job(world, f"tests.gpu.{module}", args, limits)
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    return {**found, "job": {"error": failed}} if failed else found


def _job(
    world: int,
    module: str,
    args: list[str],
    limits: tuple[float, float],
    env: Mapping[str, str] | None = None,
) -> str | None:
    """Run a job; if it fails, the reason and the end of its output, else None."""
    job_s, end = limits
    limit = min(job_s, end - time.monotonic())
    if limit <= 0:
        return "not run: earlier jobs used up the time limit"
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(
            ["-m", module, *args],
            world=world,
            environment=lambda _: {**_ENVIRONMENT, **(env or {})},
            folder=Path(folder),
            limit_s=limit,
            stall_s=limit,
            grace_s=_GRACE_S,
        )
        if ended.is_good:
            return None
        failed = next((rank for rank in range(world) if ended.codes[rank]), 0)
        how = ended.limit or f"exit {ended.codes[failed]}"
        return f"{how}: {ended.text(failed)[-2000:]}"


def main(out: str, device: str = "cuda") -> None:
    """Print one line per part."""
    for name, parts in run(device, Path(out)).items():
        for part, found in parts.items():
            print(name, part, json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
