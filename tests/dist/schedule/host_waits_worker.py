"""Counts where steps of cases would wait for a GPU, with some rows and with about twice as many.

torchrun --nproc-per-node 2 -m tests.dist.schedule.host_waits_worker OUT_DIR CASE ...
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import Policy, SharedPrefixes, build_dp_schedule, cpu, launch
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt.optimizer import build_optimizer
from megapack.job.gpt.settings import reduction_settings
from megapack.loss import ValueLoss
from megapack.model.attention import choice, varlen
from megapack.model.attention.paths import Paths
from megapack.model.attention.sdpa import path_causal_attention
from megapack.plan import Plan
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.rows.row_problem import make_samples
from tests.dist.rows.row_shapes import SHAPES
from tests.dist.schedule.wait_cases import ALL_CASES, MODELS, WaitCase
from tests.dist.setup import build_chunks
from tests.hand_made_orders import with_weights_later
from tests.rehearsal.device_ledger import DeviceLedger, Entry
from tests.rehearsal.pretended_cuda import rehearsed_gpu

NUM_LAYERS = 4
# Samples of the problem in the first step; the second has twice as many.
NUM_SAMPLES = 8
FAMILIES = {
    "shared": SHAPES["g8"].families,
    "pieces": SHAPES["split"].families,
    "wide": SHAPES["wide"].families,
}
POLICIES = {
    "shared": Policy(),
    "pieces": Policy(split_samples="auto", max_live_tokens_per_gpu=1000),
    "wide": Policy(context_parallel="dynamic"),
}
BUDGETS = {"plain": 64, "shared": 64, "pieces": 64, "wide": 48}


class Run:
    """A case's model on this rank, and its passes under the ledger."""

    def __init__(self, case: WaitCase, ledger: DeviceLedger) -> None:
        self.case = case
        self.ledger = ledger
        model = dataclasses.replace(
            MODELS[case.model],
            num_layers=NUM_LAYERS,
            attention=case.attention,
            dtype="fp32" if case.attention == "sdpa" else "bf16",
            recompute=case.recompute,
            untie_embeddings=case.value_head,
        )
        optim = OptimConfig(distributed_optimizer=case.distributed_optimizer)
        self.chunks = build_chunks(
            case.layout,
            model=model,
            distributed_optimizer=case.distributed_optimizer,
            value_head=case.value_head,
            reduction=reduction_settings(optim, case.layout),
            splits_backward=case.splits_backward,
        )
        self.optimizer = build_optimizer(optim, self.chunks, bf16=model.dtype == "bf16")
        self.adapter = ScheduleAdapter(
            self.chunks,
            layout=case.layout,
            logprob_chunk_tokens=16,
            head="value" if case.value_head else "vocabulary",
            executor=case.executor,
        )

    def step(self, times: int, name: str) -> Plan:
        """A forward pass, a step and an update over the samples `times` times; phases' names begin
        with `name`."""
        case = self.case
        plan, batch, routing = make_plan(case, times)
        phase = self.ledger.phase
        with phase(f"{name} forward"):
            self.adapter.forward(
                plan,
                batch,
                entropy=not case.value_head,
                routing=routing,
                record_routing=case.has_experts and routing is None,
            )
        objective: Any = ValueLoss() if case.value_head else problem.OBJECTIVE
        trained = with_weights_later(plan, 2) if case.splits_backward else plan
        with phase(f"{name} step"):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.adapter.step(trained, batch, objective=objective, routing=routing)
        with phase(f"{name} update"):
            self.optimizer.step()
        return plan


def make_plan(case: WaitCase, times: int) -> tuple[Plan, Any, list[Tensor] | None]:
    """The plan of the case's samples, repeated, with the batch and the experts to replay."""
    budget = BUDGETS[case.rows] // case.layout.cp
    if case.rows == "plain":
        count = NUM_SAMPLES * times
        batch = problem.make_batch(count)
        if case.value_head:
            for name in ValueLoss().required_fields:
                batch.set_field(name, [torch.zeros(n) for n in batch.lengths])
        plan = build_dp_schedule(batch.lengths, layout=case.layout, max_tokens_per_gpu=budget)
        choices = problem.choices()[:count] if case.model == "moe_replay" else None
        return plan, batch, choices and [routes[:, :NUM_LAYERS] for routes in choices]
    samples = make_samples(case.rows, FAMILIES[case.rows] * times)
    batch = samples.batch
    prefixes = None
    if case.rows == "shared":
        prefixes = SharedPrefixes.from_samples([batch.tokens(i) for i in range(len(batch))])
    plan = build_dp_schedule(
        batch.lengths,
        layout=case.layout,
        max_tokens_per_gpu=budget,
        policy=POLICIES[case.rows],
        prefixes=prefixes,
    )
    return plan, batch, None


def facts(plan: Plan) -> dict[str, int]:
    """Of the plan's only step: rows of DP rank 0, and what they hold besides whole samples."""
    (step,) = plan.steps
    rows = list(step.microbatches)
    return {
        "rows": len(step.ranks[0]),
        "shared": sum(row.shared_tokens for row in rows),
        "pieces": sum(bool(row.pieces) for row in rows),
        "wide": sum(row.width > 1 for row in rows),
    }


def count(case: WaitCase, ledger: DeviceLedger) -> dict[str, Any]:
    """What a case's steps of two sizes would do."""
    ledger.entries.clear()
    with ledger.phase("build"):
        run = Run(case, ledger)
    # Some things are made once.
    run.step(1, "first")
    plans = [run.step(times, f"x{times}") for times in (1, 2)]
    end_model_parallel()
    return {
        "facts": [facts(plan) for plan in plans],
        "entries": [written(entry, number) for entry, number in ledger.entries.items()],
    }


def written(entry: Entry, number: int) -> dict[str, Any]:
    """An entry as JSON."""
    return {
        "kind": entry.kind,
        "phase": entry.phase,
        "place": entry.place,
        "text": str(entry),
        "count": number,
    }


@contextmanager
def varlen_on_cpu(ledger: DeviceLedger) -> Iterator[None]:
    """Within the block, torch's varlen attention runs, as one kernel of the ledger."""

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        given = query, key, value, cu_seq_q, cu_seq_k
        counts = ledger.kernel("varlen_attn", _counts, given, {})
        paths = Paths(
            num_queries=counts[0],
            num_keys=counts[1],
            order_K=cu_seq_k,
            query_ends=cu_seq_q,
            key_ends=cu_seq_k,
        )
        return path_causal_attention(query, key, value, paths, scale)

    with (
        mock.patch.object(choice, "_varlen_obstacle", return_value=None),
        mock.patch.object(varlen, "varlen_kernel", return_value=varlen_attn),
    ):
        yield


def _counts(*tensors: Tensor) -> list[list[int]]:
    """Tokens of each sequence, of queries and of keys."""
    return [ends.diff().tolist() for ends in tensors[-2:]]


def main(out_dir: str, *names: str) -> None:
    """Each rank writes what it counted, by case."""
    cpu.enable((9, 0))
    with rehearsed_gpu() as ledger, varlen_on_cpu(ledger):
        launch.start("cuda")
        found = {name: count(ALL_CASES[name], ledger) for name in names}
        rank = dist.get_rank()
        launch.stop()
    (Path(out_dir) / f"rank{rank}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
