"""Runs random legal orders on one tiny model; rank 0 writes how far gradients are from Megatron's.

torchrun --nproc-per-node 4 -m tests.dist.schedule.random_orders_worker OUT ORDERS_PER_LAYOUT
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import Layout, Plan, Policy, build_dp_schedule, launch
from megapack.job.config.sections import ModelConfig
from megapack.loss import SFT
from megapack.model.parameters import global_parameters
from megapack.plan import check_plan
from megapack.rows.packed import PackedRow
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from megapack.schedule.call import StepCall
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.setup import build_chunks
from tests.made_rows import with_shared_rows
from tests.random_orders import random_order, with_random_weights

MODEL = ModelConfig(hidden_size=8, num_attention_heads=2, ffn_hidden_size=8)
LAYOUTS = {
    "pp4": Layout(pp=4),
    "pp4_vpp2": Layout(pp=4, vpp=2),
    "dp2_pp2": Layout(dp=2, pp=2),
    "dp2_pp2_vpp2": Layout(dp=2, pp=2, vpp=2),
    "wide_dp2_pp2_vpp2": Layout(dp=2, pp=2, vpp=2),
    "experts_dp2_pp2_vpp2": Layout(dp=2, pp=2, vpp=2, ep=2),
}
"""Of the last two, DP ranks meet in layers."""
LENGTHS = [3, 9, 5, 17, 2, 11, 7, 4, 12, 6]
# Tokens of a row by chunks per stage: 4 to 6 micro-batches per DP rank.
BUDGETS = {1: 20, 2: 34}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 500}
MAX_LIVE_TOKENS = 10_000


def run_layout(name: str, num_orders: int) -> dict[str, Any]:
    """The largest relative error of the gradients over random orders, against Megatron's."""
    layout = LAYOUTS[name]
    model = dataclasses.replace(MODEL, num_layers=layout.pp * layout.vpp)
    if layout.ep > 1:
        model = dataclasses.replace(model, num_experts=2, moe_top_k=1, moe_ffn_hidden_size=8)
    # Reductions that overlap: DP ranks must start them in one order, whatever they run.
    chunks = build_chunks(layout, model=model, reduction=OVERLAP if layout.dp > 1 else None)
    generator = torch.Generator().manual_seed(problem.SEED)
    lengths = LENGTHS * layout.dp
    tokens = [torch.randint(0, 100, (n,), generator=generator).tolist() for n in lengths]
    batch = SampleBatch(tokens)
    plan = build_dp_schedule(
        lengths, layout=layout, max_tokens_per_gpu=BUDGETS[layout.vpp], cost=problem.COST
    )
    if name.startswith("wide"):
        plan = dataclasses.replace(plan, policy=Policy(context_parallel="dynamic"))
        plan = with_shared_rows(with_shared_rows(plan, lengths, 1), lengths, 3)
        assert plan.counts.num_wide_rows > 1
    call = StepCall(
        plan=plan,
        batch=batch,
        step=0,
        revision=batch.revision,
        entropy=False,
        routing=None,
        objective=SFT(),
    )
    megatron = ScheduleAdapter(chunks, layout=layout)
    rows = megatron._agreed_rows(call).rows
    want = _gradients(megatron, call, rows)
    adapter = ScheduleAdapter(chunks, layout=layout, executor="operations")
    call = dataclasses.replace(call, executor_choice="operations")
    rows = adapter._agreed_rows(call).rows
    rng = random.Random(problem.SEED)
    begin = time.monotonic()
    errors = []
    for number in range(num_orders):
        # Every third order has joint backwards only.
        split = (0.0, 0.5, 1.0)[number % 3]
        ordered = _with_orders(plan, rng, split)
        if number == 0:
            check_plan(ordered, lengths)
        # Only what runs an order: packing and agreeing take longer than these rows.
        values = _gradients(adapter, dataclasses.replace(call, plan=ordered), rows)
        errors.append(_error(values, want))
    worst = torch.tensor(max(errors))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {
        "error": float(worst),
        "microbatches": plan.steps[0].num_microbatches,
        "seconds": time.monotonic() - begin,
    }


def _with_orders(plan: Plan, rng: random.Random, split: float) -> Plan:
    """The plan with a random order for each DP rank."""
    (step,) = plan.steps
    layout = plan.layout
    orders = [
        random_order(rng, pp=layout.pp, vpp=layout.vpp, num_microbatches=len(row), split=split)
        for row in step.ranks
    ]
    for block in step.meeting_ranks(layout):
        for rank in block[1:]:
            first = orders[block.start]
            orders[rank] = with_random_weights(rng, first) if split else first
    policy = dataclasses.replace(
        plan.policy, backward="split", max_live_tokens_per_gpu=MAX_LIVE_TOKENS
    )
    steps = (dataclasses.replace(step, orders=tuple(orders)),)
    return dataclasses.replace(plan, policy=policy, steps=steps)


def _gradients(
    adapter: ScheduleAdapter, call: StepCall, rows: list[PackedRow]
) -> dict[str, Tensor]:
    for chunk in adapter.chunks:
        chunk.zero_grad_buffer()
    adapter.runner.run(call, rows)
    return {
        name: param.main_grad.double()
        for chunk in adapter.chunks
        for name, param in global_parameters(chunk)
    }


def _error(values: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    error = torch.stack([(value - wanted[name]).norm() for name, value in values.items()]).norm()
    return float(error / torch.stack([value.norm() for value in wanted.values()]).norm())


def main(out: str, num_orders: str) -> None:
    """Run all layouts; rank 0 writes `out`."""
    launch.start("cpu")
    results = {}
    for name in LAYOUTS:
        results[name] = run_layout(name, int(num_orders))
        end_model_parallel()
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
