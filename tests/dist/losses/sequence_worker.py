"""Runs sequence-level objectives on one layout, or trains critics.

torchrun --nproc-per-node 2 -m tests.dist.losses.sequence_worker REFERENCE OUT LAYOUT KINDS...

LAYOUT is critics for these, and extremes for log-probs that are far apart.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import ConfigError, ScheduleError, launch
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt.optimizer import build_optimizer
from megapack.layout import Layout
from megapack.loss import GRPO, GSPO, PPO, ValueLoss
from megapack.model.head import unwrapped
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.exactness.worker import gradient_errors
from tests.dist.groups import end_model_parallel
from tests.dist.losses.sequence_problem import (
    CASES,
    KINDS,
    LAYOUTS,
    SPLITS,
    SPOT,
    Kind,
    make_batch,
    make_plan,
)
from tests.dist.setup import build_chunks


def run_kind(place: str, kind: Kind, reference: dict[str, Any]) -> dict[str, Any]:
    """Run one step; returns its errors against the reference."""
    layout = LAYOUTS[place]
    model = problem.shallow(problem.OTHER_MODEL if kind.value_head else problem.MODEL)
    chunks = build_chunks(layout, model=model, split=SPLITS.get(place), value_head=kind.value_head)
    head = "value" if kind.value_head else "vocabulary"
    adapter = ScheduleAdapter(chunks, layout=layout, logprob_chunk_tokens=16, head=head)
    batch = make_batch()
    plan = make_plan(layout)
    result = adapter.step(plan, batch, objective=kind.objective, weighting=kind.weighting)
    worst = 0.0
    if kind.value_head:
        worst = output_error(adapter.forward(plan, batch), reference["values"], batch)
    rows = [row for rank in plan.steps[0].ranks for row in rank]
    return {
        "loss": result.loss,
        "expected_loss": reference["loss"],
        "metrics": result.metrics,
        "output_error": worst,
        "sets_packed": max(len(row.samples) for row in rows) // 2,
        "num_rows": len(rows),
        "num_padding_rows": sum(not row.samples for row in rows),
        **gradient_errors(chunks, reference["grads"]),
    }


def train_critic(layout: Layout, dtype: Any, distributed_optimizer: bool) -> dict[str, Any]:
    """Run five optimizer steps of a value model; returns losses and facts about its head."""
    model = dataclasses.replace(problem.OTHER_MODEL, dtype=dtype)
    chunks = build_chunks(
        layout, model=model, distributed_optimizer=distributed_optimizer, value_head=True
    )
    optim = OptimConfig(distributed_optimizer=distributed_optimizer)
    optimizer = build_optimizer(optim, chunks, dtype == "bf16")
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    adapter = ScheduleAdapter(chunks, layout=layout, head="value")
    batch = make_batch()
    plan = make_plan(layout)
    losses = []
    for _ in range(5):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(adapter.step(plan, batch, objective=ValueLoss()).loss)
        optimizer.step()
    last = unwrapped(chunks[-1])
    facts: dict[str, Any] = {"losses": losses}
    if last.post_process:
        facts["dtype"] = str(last.output_layer.weight.dtype)
        facts["in_checkpoint"] = "output_layer.weight" in last.sharded_state_dict()
    return facts


def extremes(layout: Layout) -> dict[str, Any]:
    """A step with a token whose old (or reference) log-prob is far from the new one; by name its
    loss and how its gradients differ from those 20 nats nearer, or its error."""
    chunks = build_chunks(layout, model=problem.shallow(problem.MODEL))
    adapter = ScheduleAdapter(chunks, layout=layout)
    batch = make_batch()
    plan = make_plan(layout)
    old = adapter.forward(plan, batch)["logprobs"]
    sample, token = SPOT
    found: dict[str, Any] = {"id": int(batch.tokens(sample)[token])}
    for name, advantage, far, objective in (
        ("clipped", 1.0, "old_logprobs", GSPO(clip_low=0.2, clip_high=0.2, token_level=True)),
        ("without advantage", 0.0, "old_logprobs", PPO()),
        ("dual clip", -1.0, "old_logprobs", PPO(dual_clip=3.0)),
        ("unbounded", -1.0, "old_logprobs", PPO()),
        ("reference", 0.0, "ref_logprobs", GRPO(kl_coef=0.1)),
    ):
        losses, gradients = [], []
        batch.set_field("advantages", [torch.tensor(advantage)] * len(batch))
        for shift in (2000.0, 2020.0):
            moved = [one.clone() for one in old]
            moved[sample][token] += shift * (1 if far == "ref_logprobs" else -1)
            for field in ("old_logprobs", "ref_logprobs"):
                batch.set_field(field, moved if field == far else old)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            try:
                result = adapter.step(plan, batch, objective=objective)
            except ScheduleError as error:
                found[name] = str(error)
                break
            losses.append(result.loss)
            assert all(map(math.isfinite, result.metrics.values()))
            buffers = [b.grad_data for chunk in chunks for b in chunk.buffers]
            gradients.append(torch.cat([b.double().flatten() for b in buffers]))
        else:
            norm = float(gradients[0].norm())
            assert norm > 0 or advantage == 0
            found[name] = [*losses, float((gradients[1] - gradients[0]).norm())]
    return found


def _error_of_tied_embeddings(layout: Layout) -> str:
    try:
        build_chunks(layout, model=problem.MODEL, value_head=True)
    except ConfigError as error:
        return str(error)
    return ""


def _critics(layout: Layout) -> dict[str, Any]:
    results: dict[str, Any] = {"tied": _error_of_tied_embeddings(layout)}
    end_model_parallel()
    for dtype in ("fp32", "bf16"):
        for distributed in (False, True):
            results[f"{dtype} {distributed}"] = train_critic(layout, dtype, distributed)
            end_model_parallel()
    return results


def output_error(outputs: dict[str, Any], values: list[Tensor], batch: Any) -> float:
    worst = 0.0
    for i, value in enumerate(values):
        mask = batch.response_mask(i)[1:]
        own = outputs["values"][i]
        assert not own[1:][~mask].any()
        assert outputs["scores"][i].shape == (1,)
        score = outputs["scores"][i] - value[-1]
        errors = torch.cat([(own[1:] - value[:-1])[mask], score])
        worst = max(worst, float(errors.abs().max()))
    return worst


def main(reference: str, out: str, layout: str, *kinds: str) -> None:
    """Run objectives on one layout, or critics on all ranks; rank 0 writes."""
    launch.start("cpu")
    results: dict[str, Any] = {}
    if layout == "extremes":
        world = dist.get_world_size()
        results[f"extremes {world}"] = extremes(Layout(cp=world))
    elif layout == "critics":
        results[f"critics {dist.get_world_size()}"] = _critics(Layout(dp=dist.get_world_size()))
    else:
        expected = torch.load(reference)
        for name in (name for place, name in CASES if place == layout and name in kinds):
            result = run_kind(layout, KINDS[name], expected[name])
            results[f"{layout} {name}"] = _worst_of_ranks(result)
            end_model_parallel()
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    launch.stop()


def _worst_of_ranks(result: dict[str, Any]) -> dict[str, Any]:
    names = ("worst_parameter", "output_error")
    worst = torch.tensor([result[name] for name in names])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return result | dict(zip(names, worst.tolist(), strict=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
