"""Runs every sequence-level objective on the layouts of one world size.

torchrun --nproc-per-node 2 -m tests.dist.sequence_worker REFERENCE OUT
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megapack import launch
from megapack.layout import Layout
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.sequence_problem import KINDS, LAYOUTS, Kind, make_batch, make_plan
from tests.dist.setup import build_chunks
from tests.dist.worker import _gradient_errors


def run_kind(layout: Layout, kind: Kind, want: dict[str, Any]) -> dict[str, Any]:
    """One step, held against the reference."""
    model = problem.OTHER_MODEL if kind.value_head else problem.MODEL
    chunks = build_chunks(layout, model=model, value_head=kind.value_head)
    head = "value" if kind.value_head else "vocabulary"
    adapter = ScheduleAdapter(chunks, layout=layout, logprob_chunk_tokens=16, head=head)
    batch, plan = make_batch(), make_plan(layout)
    result = adapter.step(plan, batch, objective=kind.objective, weighting=kind.weighting)
    worst = 0.0
    if kind.value_head:
        worst = _output_error(adapter.forward(plan, batch), want["values"], batch)
    rows = [mb for rank in plan.steps[0].ranks for mb in rank]
    return {
        "loss": result.loss,
        "expected_loss": want["loss"],
        "metrics": result.metrics,
        "output_error": worst,
        "sets_packed": max(len(mb.samples) for mb in rows) // 2,
        "num_rows": len(rows),
        **_gradient_errors(chunks, want["grads"]),
    }


def _output_error(outputs: dict[str, Any], values: list[Tensor], batch: Any) -> float:
    worst = 0.0
    for i, value in enumerate(values):
        mask = batch.response_mask(i)[1:]
        found = outputs["values"][i]
        assert not found[1:][~mask].any()
        assert outputs["scores"][i].shape == (1,)
        worst = max(worst, float((found[1:] - value[:-1])[mask].abs().max()))
        worst = max(worst, float((outputs["scores"][i] - value[-1]).abs()))
    return worst


def main(reference: str, out: str) -> None:
    """All layouts of this world size; rank 0 writes `out`."""
    launch.start("cpu")
    wanted, found = torch.load(reference), {}
    for place, layout in LAYOUTS.items():
        if layout.world_size != dist.get_world_size():
            continue
        for name, kind in KINDS.items():
            result = run_kind(layout, kind, wanted[name])
            worst = torch.tensor([result["worst_parameter"], result["output_error"]])
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            result["worst_parameter"], result["output_error"] = worst.tolist()
            found[f"{place} {name}"] = result
            parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
