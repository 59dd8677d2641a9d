"""Trains critics, and runs objectives on log-probs that are far apart.

torchrun --nproc-per-node 2 -m tests.dist.losses.sequence_worker OUT_DIR
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import torch
import torch.distributed as dist

from megapack import ConfigError, ScheduleError, launch
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt.optimizer import build_optimizer
from megapack.layout import Layout
from megapack.loss import GRPO, GSPO, PPO, ValueLoss
from megapack.model.head import unwrapped
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.losses.sequence_problem import SPOT, make_batch, make_plan
from tests.dist.setup import build_chunks, write_report


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


def main(out_dir: str) -> None:
    """Train critics and run the steps of extremes on all ranks; each rank writes what it found."""
    launch.start("cpu")
    world = dist.get_world_size()
    found = _critics(Layout(dp=world)) | {"extremes": extremes(Layout(cp=world))}
    write_report(out_dir, found)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
