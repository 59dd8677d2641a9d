"""Counts, in one process, where forwards of micro-batches would wait for a device.

torchrun --nproc-per-node 1 -m tests.dist.host_waits_worker OUT_DIR
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.overrides import TorchFunctionMode

import megapack
from megapack import Layout, build_dp_schedule, launch
from megapack.loss import ValueLoss
from megapack.schedule import ScheduleAdapter
from megapack.schedule.forward import ForwardStep
from tests.dist import problem
from tests.dist.setup import build_chunks

# Functions whose result the host needs: on a device it waits until all earlier work is done.
WAITS = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "equal", "allclose"),
    *("__bool__", "__int__", "__float__", "__index__", "is_nonzero", "argwhere", "bincount"),
}
FOLDERS = {
    Path(megapack.__file__).parent: "megapack",
    Path(megatron.core.__file__).parent: "megatron.core",
}


class CountWaits(TorchFunctionMode):
    """Counts calls that would wait, by the function of megapack or Megatron that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_index = name in ("__getitem__", "__setitem__")
        if name in WAITS or (is_index and _is_read_by_host(args[1])):
            self.places[f"{_caller()}: {name}"] += 1
        return func(*args, **(kwargs or {}))


def _is_read_by_host(index: Any) -> bool:
    """Whether an index has a mask, or a slice that ends at a number on the device."""
    for part in index if isinstance(index, tuple) else (index,):
        bounds = (part.start, part.stop) if isinstance(part, slice) else ()
        is_mask = isinstance(part, Tensor) and part.dtype == torch.bool
        if is_mask or any(isinstance(bound, Tensor) for bound in bounds):
            return True
    return False


def _caller() -> str:
    for frame in reversed(traceback.extract_stack()):
        for folder, package in FOLDERS.items():
            if Path(frame.filename).is_relative_to(folder):
                path = Path(frame.filename).relative_to(folder)
                return f"{package}/{path}:{frame.name}"
    return "elsewhere"


def waits(variant: str, head: str) -> dict[str, Any]:
    """The places of a training step and a forward pass of one model."""
    model, _ = problem.MODELS[variant]
    if head == "value":
        model = dataclasses.replace(model, untie_embeddings=True)
    chunks = build_chunks(Layout(), model=model, value_head=head == "value")
    adapter = ScheduleAdapter(chunks, layout=Layout(), head=head)
    batch = problem.make_batch()
    objective: Any = problem.OBJECTIVE
    if head == "value":
        objective = ValueLoss()
        for name in objective.required_fields:
            batch.set_field(name, [torch.zeros(n) for n in batch.lengths])
    plan = build_dp_schedule(batch.lengths, layout=Layout(), max_tokens_per_gpu=64)
    found = {}
    for name, run in {
        "step": lambda: adapter.step(plan, batch, objective=objective),
        "forward": lambda: adapter.forward(plan, batch),
    }.items():
        mode = CountWaits()
        originals = ForwardStep._forward, ForwardStep._loss
        ForwardStep._forward = _with_mode(originals[0], mode)
        ForwardStep._loss = _with_mode(originals[1], mode)
        run()
        ForwardStep._forward, ForwardStep._loss = originals
        found[name] = dict(mode.places)
    parallel_state.destroy_model_parallel()
    return {"rows": len(plan.steps[0].ranks[0]), **found}


def _with_mode(method: Callable[..., Any], mode: CountWaits) -> Any:
    def run(self: ForwardStep, *args: Any) -> Any:
        with mode:
            return method(self, *args)

    return run


CASES = {
    "dense": ("plain", "vocabulary"),
    "experts": ("moe_bias", "vocabulary"),
    "value head": ("plain", "value"),
    "multi-token prediction": ("mtp", "vocabulary"),
}


def main(out_dir: str) -> None:
    """Write `OUT_DIR/rank0.json`: by case, the places and how often each would wait."""
    launch.start("cpu")
    found = {name: waits(*case) for name, case in CASES.items()}
    text = json.dumps(found, indent=1)
    (Path(out_dir) / "rank0.json").write_text(text, encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1])
