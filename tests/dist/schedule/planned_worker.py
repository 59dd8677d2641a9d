"""A host's own step on Megatron's schedule and on `PlannedSchedule`; each rank writes what it saw.

torchrun --nproc-per-node N -m tests.dist.schedule.planned_worker OUT LAYOUT FAULT

The host draws batches, packs them in its forward step, sums its own loss, and lets Megatron divide
by the tokens of the step. LAYOUT is JSON. FAULT is what goes wrong, "" for nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapack import Layout, build_dp_schedule, launch
from megapack.loss import SFT
from megapack.model.attention.packed import row_params
from megapack.model.head import unwrapped
from megapack.rows.packed import PackedRow
from megapack.rows.packing import pack_row
from megapack.rows.slices import slice_row
from megapack.schedule import PlannedSchedule, ScheduleAdapter
from tests.dist import problem
from tests.dist.setup import build_chunks, error_of, write_report
from tests.hosts.steps.job import Report, count_shape_exchanges

BUDGET = 64


class Reads(TorchDispatchMode):
    """Counts copies of tensors and reads of their values, for which a host would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("aten::_local_scalar_dense", "aten::_to_copy", "aten::nonzero", "aten::equal")
        self.count += func.name() in names
        return func(*args, **kwargs or {})


class HostStep:
    """A host's forward step: it takes a row out of each batch, and removes it from the batch."""

    def __init__(self, chunks: list[Any], fault: str) -> None:
        self._chunks = chunks
        self._fault = fault
        self._num_losses = 0
        self.num_calls = 0

    def __call__(self, batches: Iterator[dict[str, PackedRow]], model: Any) -> Any:
        self.num_calls += 1
        if self._fault == "data":
            _receive_batch()
        if self._fault == "death" and dist.get_rank() == 1:
            os._exit(1)
        row = next(batches).pop("row")
        inputs: dict[str, Any] = {
            "input_ids": row.tokens_T[None],
            "position_ids": row.position_ids_T[None],
            "attention_mask": None,
            "packed_seq_params": row_params(row),
            "labels": row.labels_T[None],
        }
        if self._fault == "unequal lengths" and dist.get_rank() == 1:
            inputs["input_ids"] = row.tokens_T.repeat(1, 2)
        mask_T = torch.zeros_like(row.labels_T, dtype=torch.float32)
        mask_T[row.losses.positions_R] = 1.0
        output = model(**inputs)
        if self._fault == "wider" and not unwrapped(model).post_process:
            # As with streams of which the config says nothing.
            output = output.repeat(1, 1, 2)
        return output, partial(self._loss, mask_T)

    def _loss(self, mask_T: Tensor, losses: Tensor) -> Any:
        if self._fault == "error" and dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("the host's own loss failed")
        self._num_losses += 1
        loss = (losses.view(-1) * mask_T).sum()
        if self._fault.startswith("nan") and self._num_losses == 2:
            loss = loss * math.nan
        return loss, mask_T.sum().int(), {"loss": loss.detach().clone()}


def _receive_batch() -> None:
    """Megatron-LM's way: the first tensor-parallel rank draws, and sends to the others."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.rank() == 0:
        raise ValueError("a bad sample")
    source = dist.get_global_rank(group, 0)
    dist.broadcast(torch.zeros(1), src=source, group=group)


def main(folder: str, layout_text: str, fault: str) -> None:
    """Run the host's step on each schedule, and the adapter's on the same plan."""
    launch.start("cpu")
    layout = Layout(**json.loads(layout_text))
    chunks = build_chunks(layout)
    # The host's loss knows nothing of rows that pad the vocabulary.
    adapter = ScheduleAdapter(chunks, layout=layout, vocab_size=unwrapped(chunks[0]).vocab_size)
    batch = problem.make_batch()
    plan = build_dp_schedule(
        batch.lengths, layout=layout, max_tokens_per_gpu=BUDGET, cost=problem.COST
    )
    cp = parallel_state.get_context_parallel_rank()

    def batches() -> Any:
        rows = [
            slice_row(
                pack_row(batch, microbatch, layout, None, (), None, None),
                layout.cp,
                cp,
            )
            for microbatch in plan.steps[0].ranks[adapter.dp_rank]
        ]
        if fault == "fewer micro-batches" and dist.get_rank() == 1:
            rows.pop()
        iterators = [iter([{"row": row} for row in rows]) for _ in chunks]
        return iterators, len(rows)

    costs: list[dict[str, int]] = []

    def run(schedule: Callable[..., Any], forward_only: bool = False) -> list[Any]:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        step = HostStep(chunks, fault)
        with Reads() as reads:
            result = run_step(schedule, step, forward_only)
        costs.append({"calls": step.num_calls, "reads": reads.count})
        return result

    def run_step(schedule: Callable[..., Any], step: HostStep, forward_only: bool) -> list[Any]:
        iterators, count = batches()
        result: list[Any] = schedule(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return result

    config = get_model_config(chunks[0])
    adapter.step(plan, batch, objective=SFT())
    expected = gradients(chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.variable_seq_lengths = layout.pp > 1
    counter = Report()
    count_shape_exchanges(counter)
    report: dict[str, Any] = {"fault": ""}
    if not fault and layout.vpp == 1:
        run(get_forward_backward_func())
        report["host_error"] = distance(gradients(chunks), expected)
        report["host_exchanges"] = counter.num_shape_exchanges
    counter.num_shape_exchanges = 0
    # What Megatron's config has if nobody sets it.
    config.overlap_p2p_comm = False
    config.batch_p2p_comm = True
    config.deallocate_pipeline_outputs = True
    warnings = collect_warnings()
    schedule = PlannedSchedule(non_finite="error" if fault == "nan" else "warn")
    results: list[Any] = []
    # As Megatron's fp32 optimizer leaves them.
    for param in (param for chunk in chunks for param in chunk.parameters()):
        param.grad = param.main_grad
    report["fault"] = error_of(lambda: results.extend(run(schedule)))
    if not report["fault"]:
        report["error"] = distance(gradients(chunks), expected)
        report["losses"] = [float(result["loss"]) for result in results]
        forward = run(schedule, forward_only=True)
        report["forward_losses"] = [float(result["loss"]) for result in forward]
        report["warnings"] = warnings
        report["settings"] = [config.overlap_p2p_comm, config.deallocate_pipeline_outputs]
        report["costs"] = costs
        report["num_microbatches"] = len(plan.steps[0].ranks[adapter.dp_rank])
    report["exchanges"] = counter.num_shape_exchanges
    write_report(folder, report)
    launch.stop(broken=bool(fault))


def gradients(chunks: list[Any]) -> list[Tensor]:
    """This rank's reduced gradients."""
    return [p.main_grad.clone() for chunk in chunks for p in chunk.parameters()]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest gradient."""
    largest = max(float(grad.abs().max()) for grad in expected)
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


def collect_warnings() -> list[str]:
    """What the schedule warns of, from here on."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megapack.schedule").addHandler(handler)
    return messages


if __name__ == "__main__":
    main(*sys.argv[1:])
