"""Trains a tiny model for many steps of random lengths.

python -m tools.nccl.on_ranks.steps OUT STEPS SECONDS
"""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from megapack import Policy, build_dp_schedule, launch
from megapack.job.config.sections import ModelConfig, OptimConfig
from megapack.job.gpt import initialize_parallel
from megapack.job.gpt.optimizer import build_optimizer
from megapack.loss import SFT
from megapack.samples import SampleBatch
from tests.dist.problem import SEED, VOCAB_SIZE
from tests.gpu.compare import build_adapter
from tools.nccl.layouts import busy_layout, layout_name
from tools.nccl.on_ranks.progress import note, write

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=96,
    attention="sdpa",
)
_ROW_TOKENS = 256
_MAX_SAMPLES = 12
# Plans of few simulations: these steps are about what ranks issue, not about good plans.
_SEARCH = 32
# Ranks agree on the end, over gloo, once in so many steps.
_INTERVAL = 10


def make_batch(generator: np.random.Generator) -> SampleBatch:
    """A random number of samples of random lengths, some longer than a row of one rank."""
    count = int(generator.integers(4, _MAX_SAMPLES + 1))
    lengths = np.minimum(generator.lognormal(4.0, 0.9, count).astype(int) + 2, 2 * _ROW_TOKENS - 8)
    tokens = [torch.from_numpy(generator.integers(0, VOCAB_SIZE, n)) for n in lengths]
    return SampleBatch(
        tokens, {"response_mask": [torch.ones(n, dtype=torch.bool) for n in lengths]}
    )


def main(out: str, steps: str, seconds: str) -> None:
    """Train; rank 0 writes what was done after each interval."""
    started = time.monotonic()
    launch.start("cuda")
    world, rank = dist.get_world_size(), dist.get_rank()
    agreed = dist.new_group(backend="gloo")
    layout = busy_layout(world)
    initialize_parallel(layout, SEED)
    adapter = build_adapter(MODEL, layout, distributed_optimizer=True)
    optim = OptimConfig(lr=1e-3, distributed_optimizer=True)
    optimizer = build_optimizer(optim, adapter.chunks, bf16=False)
    # Rows over several ranks where there are some; else long samples lie in several rows.
    own = {"context_parallel": "dynamic"} if layout.dp > 1 else {"split_samples": "auto"}
    policy = Policy(search=_SEARCH, **own)
    generator = np.random.default_rng(SEED)
    counts: list[int] = []
    differences: list[int] = []
    for number in range(1, int(steps) + 1):
        batch = make_batch(generator)
        plan = build_dp_schedule(
            batch.lengths, layout=layout, max_tokens_per_gpu=_ROW_TOKENS, policy=policy
        )
        for chunk in adapter.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = adapter.step(plan, batch, objective=SFT()).loss
        _, norm, _ = optimizer.step()
        counts.append(plan.steps[0].num_microbatches)
        note(f"step {number}")
        seen: list[tuple[float, float]] = [(0.0, 0.0)] * world
        dist.all_gather_object(seen, (loss, float(norm)), group=agreed)
        if len(set(seen)) > 1 or not all(map(math.isfinite, seen[0])):
            differences.append(number)
        if number % _INTERVAL and number < int(steps):
            continue
        is_over = torch.tensor([time.monotonic() - started > float(seconds)])
        dist.all_reduce(is_over, op=dist.ReduceOp.MAX, group=agreed)
        if rank == 0:
            done = {"steps": number, "layout": layout_name(layout), "differences": differences}
            done |= {"fewest": min(counts), "most": max(counts), "loss": loss}
            done["seconds"] = round(time.monotonic() - started, 1)
            write(out, done)
        if is_over:
            break
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
