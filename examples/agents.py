"""GRPO on agents' rollouts that finish while others are still running: a loop of one's own.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/agents.py

A rollout has one sample for each turn: all that the model read, and what it wrote. A thread of the
first rank stands for the engine and its environments. docs/agents.md explains the rest.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megapack import Layout, SharedPrefixes, build_dp_schedule, launch
from megapack.job.data.advantages import SampleReward, group_advantages
from megapack.job.gpt.specs import local_layer_spec
from megapack.loss import GRPO
from megapack.samples import RolloutQueue, SampleBatch
from megapack.schedule import ScheduleAdapter

VOCABULARY = 256
GROUPS = 5
GROUP_SIZE = 4


class Turn(NamedTuple):
    """A sample: one turn of a rollout."""

    context: list[int]
    response: list[int]
    advantage: float


def rollout(task: list[int], rng: random.Random) -> list[tuple[list[int], list[int]]]:
    """One to five turns: contexts and responses."""

    def tokens(most: int) -> list[int]:
        return [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(2, most))]

    turns = []
    context = task
    for number in range(rng.randint(1, 5)):
        if number == 3:  # Compaction: a summary takes the place of all turns so far.
            context = task[:20] + tokens(12)
        turns.append((context, tokens(16)))
        said = turns[-1][1]
        if rng.random() < 0.2:  # The next turn tokenizes the end of the text anew.
            said = [*said[:-1], 0]
        context = context + said + tokens(16)
    return turns


def produce(finished: queue.Queue[Any]) -> None:
    """Put groups of rollouts, in the order in which they finish."""
    rng = random.Random(0)
    system = [rng.randrange(1, VOCABULARY) for _ in range(20)]
    groups = list(range(GROUPS))
    rng.shuffle(groups)
    for group in groups:
        task = system + [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(10, 40))]
        rollouts = [rollout(task, rng) for _ in range(GROUP_SIZE)]
        rewards = [rng.random() for _ in rollouts]
        records = [
            SampleReward(group=group, rollout=k, reward=rewards[k])
            for k, turns in enumerate(rollouts)
            for _ in turns
        ]
        # Each rollout counts once in its group's mean, however many turns it has.
        advantages = iter(group_advantages(records, "group-std").tolist())
        for k, turns in enumerate(rollouts):
            samples = [Turn(context, response, next(advantages)) for context, response in turns]
            finished.put((f"{group}-{k}", samples))
    finished.put(None)


def steps(global_batch_size: int) -> Iterator[list[tuple[int | str, Turn]]]:
    """The samples of each step with their rollouts, the same on all ranks."""
    waiting: RolloutQueue[Turn] = RolloutQueue(global_batch_size)
    finished: queue.Queue[Any] = queue.Queue()
    is_producing = dist.get_rank() == 0
    if is_producing:
        threading.Thread(target=produce, args=[finished], daemon=True).start()
    while True:
        while (step := waiting.take(allow_partial=not is_producing)) is None and is_producing:
            arrived = finished.get()
            if arrived is None:
                is_producing = False
            else:
                waiting.add(*arrived)
        # The order of arrival is the first rank's; the others learn it with the samples.
        sent = [step]
        dist.broadcast_object_list(sent)
        if sent[0] is None:
            return
        yield sent[0]


def build(layout: Layout) -> tuple[list[Any], Any]:
    """A small model and its optimizer."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=layout.pp)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
    )
    model = GPTModel(
        config,
        local_layer_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=4096,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
    chunks = [DistributedDataParallel(config, ddp, model)]
    return chunks, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), chunks)


def train(layout: Layout, *, share: bool = True, **limits: Any) -> None:
    """Train on all rollouts, 8 in a step.

    Args:
        share: rows hold the common beginnings of turns once.
        limits: of `build_dp_schedule`.
    """
    chunks, optimizer = build(layout)
    adapter = ScheduleAdapter(chunks, layout=layout)
    for step in steps(global_batch_size=8):
        turns = [turn for _, turn in step]
        rollout_ids = [name for name, _ in step]
        tokens = [turn.context + turn.response for turn in turns]
        batch = SampleBatch.from_prompt_response(
            [turn.context for turn in turns],
            [turn.response for turn in turns],
            {"advantages": [turn.advantage for turn in turns]},
        )
        plan = build_dp_schedule(
            batch.lengths,
            layout=layout,
            rollout_ids=rollout_ids,
            prefixes=SharedPrefixes.from_samples(tokens) if share else None,
            **limits,
        )
        batch.set_field("old_logprobs", adapter.forward(plan, batch)["logprobs"])
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        adapter.step(plan, batch, objective=GRPO(), weighting="rollout-mean")
        _, norm, _ = optimizer.step()
        if dist.get_rank() == 0:
            held = plan.counts.tokens - plan.counts.shared_tokens
            print(
                f"{len(set(rollout_ids))} rollouts, {len(turns)} turns: rows hold {held} of "
                f"{plan.counts.tokens} tokens; norm {norm:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    launch.start("cpu")
    train(Layout(dp=2, pp=2), max_tokens_per_gpu=512)
    launch.stop()
