"""Compares pipelines whose two stages share one GPU with the one-sample reference.

torchrun --nproc-per-node 2 -m tests.gpu.pipeline_worker DEVICE ATTENTION REFERENCE OUT
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer

from megapack import Layout, cpu, launch
from megapack.job.gpt import initialize_parallel
from tests.dist.exactness.staged import StagedAdapter
from tests.dist.problem import SEED
from tests.gpu import problem
from tests.gpu.compare import Samples, build_adapter, exactness

LAYOUTS = {"pp2": Layout(pp=2), "pp2_vpp2": Layout(pp=2, vpp=2)}


def start(device: Literal["cuda", "cpu"]) -> None:
    """Join over gloo with every rank on the first device; NCCL refuses to share a device."""
    launch.quiet_known_warnings()
    if device == "cpu":
        cpu.enable()
    else:
        torch.cuda.set_device(0)
    dist.init_process_group("gloo")


@contextlib.contextmanager
def one_by_one(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Collectives in place of one coalesced call, which gloo does not have for CUDA tensors."""
    yield


def run_case(
    layout: Layout, attention: str, dtype: Literal["fp32", "bf16"], samples: dict[str, Samples]
) -> dict[str, Any]:
    """Errors of one pipeline. An exception that all ranks raise is recorded; the others go on."""
    try:
        adapter = build_adapter(problem.model(attention, dtype), layout, StagedAdapter)
        own = None if dtype == "fp32" else samples[dtype]
        return exactness(adapter, samples["fp32"], own)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error)[:1000]}"}


def main(device: Literal["cuda", "cpu"], attention: str, reference: str, out: str) -> None:
    """Run every layout in both precisions; rank 0 writes `out` after each."""
    start(device)
    param_and_grad_buffer._coalescing_manager = one_by_one
    samples = torch.load(reference, map_location="cpu")
    found = {}
    for name, layout in LAYOUTS.items():
        initialize_parallel(layout, SEED)
        for dtype in ("bf16", "fp32"):
            found[f"{name}_{dtype}"] = run_case(layout, attention, dtype, samples)
            if os.environ["RANK"] == "0":
                with open(out, "w", encoding="utf-8") as file:
                    json.dump(found, file, indent=1)
        parallel_state.destroy_model_parallel()
    launch.stop()


if __name__ == "__main__":
    main(cast(Literal["cuda", "cpu"], sys.argv[1]), *sys.argv[2:])
