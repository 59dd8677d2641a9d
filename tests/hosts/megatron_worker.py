"""Planned steps inside Megatron-LM's train_step, compared with the adapter's on the same samples.

torchrun --nproc-per-node 2 -m tests.hosts.megatron_worker OUT
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megapack import Layout, Policy, SharedPrefixes, build_dp_schedule, launch, patching
from megapack.errors import MegapackError, RankError
from megapack.hosts import megatron_lm
from megapack.hosts.megatron_lm import data as megatron_lm_data
from megapack.loss import GRPO, SFT
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.setup import build_chunks
from tests.rehearsal.recorder import unchecked

STUBS = Path(__file__).parent / "stubs"
BUDGET = 70
# Samples have up to 63 tokens: some of them lie over two ranks, or are cut into pieces.
SMALL_BUDGET = 40
ITEM_ROWS = 2
SEQ_LENGTH = 64
NUM_ITEMS = 4
LAYOUTS = {
    "dp2": Layout(dp=2),
    "pp2_vpp2": Layout(pp=2, vpp=2),
}
HYBRID = "hybrid_"
"""Results of a model with Megatron's own recurrent layers begin with it."""
FIELDS = ("advantages", "old_logprobs")


def draw_samples(dp_rank: int) -> list[dict[str, Tensor]]:
    """Ragged samples of one data-parallel rank: tokens, their loss mask, and fields per token.

    Each begins with one of two prompts, as far as it goes.
    """
    generator = torch.Generator().manual_seed(100 + dp_rank)
    prompts = torch.arange(24).view(2, 12)
    samples = []
    for i in range(NUM_ITEMS * ITEM_ROWS):
        length = int(torch.randint(2, SEQ_LENGTH, (), generator=generator))
        has_loss = torch.rand(length, generator=generator) < 0.6
        # The last token of a sample has a loss; sample 0 has no token with a loss.
        has_loss[0] = False
        has_loss[-1] = i > 0
        tokens = torch.randint(0, problem.VOCAB_SIZE, (length,), generator=generator)
        tokens[:12] = prompts[i % 2][:length]
        samples.append(
            {
                "tokens": tokens,
                "response_mask": has_loss if i else torch.zeros(length, dtype=torch.bool),
                "advantages": torch.randn(length, generator=generator),
                "old_logprobs": torch.randn(length, generator=generator) - 4.6,
            }
        )
    return samples


def items(samples: list[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The samples as items of Megatron-LM's data sets: padded, shifted, two samples per item."""
    for start in range(0, len(samples), ITEM_ROWS):
        rows = samples[start : start + ITEM_ROWS]
        named = {name: torch.stack([_padded(row[name]) for row in rows]) for name in rows[0]}
        labels = named["tokens"][:, 1:].clone()
        loss_mask = named.pop("response_mask")[:, 1:].float()
        labels[loss_mask == 0] = -100
        shifted = {name: values[:, 1:] for name, values in named.items() if name != "tokens"}
        tokens = named["tokens"][:, :-1]
        yield {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, **shifted}


def _padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, SEQ_LENGTH + 1 - len(values)))


def gradients(chunks: list[Any]) -> list[Tensor]:
    return [param.main_grad.clone() for chunk in chunks for param in chunk.parameters()]


def run_hybrid(layout: Layout, training: Any) -> dict[str, Any]:
    """Compare planned steps of a model with Megatron's own recurrent layers."""
    from tests import stock_mixers

    with stock_mixers.of_hybrids():
        chunks = build_chunks(layout, model=problem.HYBRID_MODEL)
    adapter, batch = _adapter_and_batch(layout, chunks)
    return _freedoms(training, adapter, batch)


def run_layout(layout: Layout, training: Any) -> dict[str, Any]:
    """Compare planned steps with the adapter's on one layout; returns what the test checks."""
    chunks = build_chunks(layout)
    adapter, batch = _adapter_and_batch(layout, chunks)
    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=BUDGET)
    found: dict[str, Any] = {}
    # GRPO's fields are sent between data-parallel ranks.
    for objective in (SFT(), GRPO()) if layout.dp > 1 else (SFT(),):
        step = megatron_lm.PlannedStep(
            max_tokens_per_gpu=BUDGET, objective=objective, policy=Policy(share_prefixes="off")
        )
        data = _iterators(layout, adapter.dp_rank)
        report = training.train_step(step, data, chunks, NUM_ITEMS)
        grads = gradients(chunks)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        want = adapter.step(plan, batch, objective=objective)
        errors = [_distance(*pair) for pair in zip(grads, gradients(chunks), strict=True)]
        name = type(objective).__name__
        found[name] = {
            "gradient_error": max(errors),
            "gradient_norm": sum(float(g.norm()) for g in grads),
            "loss": report.pop("lm loss" if name == "SFT" else "loss"),
            "expected_loss": want.loss,
            "metrics": sorted(report) == sorted(want.metrics),
        }
        data = _iterators(layout, adapter.dp_rank)
        found[name]["evaluated"] = training.evaluate(step, data, chunks, NUM_ITEMS)["lm loss"]
    found |= _freedoms(training, adapter, batch)
    found["refused"] = _run_out_of_data(training, chunks, layout, adapter.dp_rank)
    return found


def _adapter_and_batch(layout: Layout, chunks: list[Any]) -> tuple[ScheduleAdapter, SampleBatch]:
    every = [sample for rank in range(layout.dp) for sample in draw_samples(rank)]
    batch = SampleBatch(
        [s["tokens"] for s in every],
        {name: [s[name] for s in every] for name in ("response_mask", *FIELDS)},
    )
    return ScheduleAdapter(chunks, layout=layout), batch


def _freedoms(training: Any, adapter: ScheduleAdapter, batch: SampleBatch) -> dict[str, Any]:
    """Steps whose rows share tokens or ranks, or have pieces, against the adapter's plain ones."""
    layout = adapter.layout
    found: dict[str, Any] = {}
    prefixes = SharedPrefixes.from_samples([batch.tokens(i) for i in range(len(batch))])
    found["shared"] = _variant(
        training,
        adapter,
        batch,
        megatron_lm.PlannedStep(max_tokens_per_gpu=BUDGET),
        max_tokens_per_gpu=BUDGET,
        prefixes=prefixes,
    )
    if layout.dp > 1:
        policy = Policy(context_parallel="dynamic")
        found["wide"] = _variant(
            training,
            adapter,
            batch,
            megatron_lm.PlannedStep(max_tokens_per_gpu=SMALL_BUDGET, policy=policy),
            max_tokens_per_gpu=SMALL_BUDGET,
            policy=policy,
        )
    if layout.pp > 1:
        policy = Policy(split_samples="auto", backward="split", max_live_tokens_per_gpu=400)
        found["ordered"] = _variant(
            training,
            adapter,
            batch,
            megatron_lm.PlannedStep(max_tokens_per_gpu=SMALL_BUDGET, policy=policy),
            max_tokens_per_gpu=SMALL_BUDGET,
            policy=policy,
        )
    return found


def _variant(
    training: Any, adapter: ScheduleAdapter, batch: SampleBatch, step: Any, **settings: Any
) -> dict[str, float]:
    """Compare a planned step with the adapter's on rows that share neither tokens nor ranks.

    Args:
        settings: of the plan that the step makes.
    """
    layout = adapter.layout
    for chunk in adapter.chunks:
        chunk.zero_grad_buffer()
    data = _iterators(layout, adapter.dp_rank)
    report = training.train_step(step, data, adapter.chunks, NUM_ITEMS)
    grads = gradients(adapter.chunks)
    for chunk in adapter.chunks:
        chunk.zero_grad_buffer()
    plain = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=BUDGET)
    want = adapter.step(plain, batch, objective=SFT())
    errors = [_distance(*pair) for pair in zip(grads, gradients(adapter.chunks), strict=True)]
    counts = build_dp_schedule(batch.lengths, layout=layout, **settings).counts
    return {
        "shared_tokens": counts.shared_tokens,
        "wide_tokens": counts.wide_tokens,
        "num_pieces": counts.num_pieces,
        "num_split_backwards": counts.num_split_backwards,
        "gradient_error": max(errors),
        "loss_error": abs(report["lm loss"] - want.loss),
    }


def _iterators(layout: Layout, dp_rank: int, num_items: int = NUM_ITEMS) -> Any:
    """The data, on the first stage's first tensor-parallel rank; None on other ranks."""
    if parallel_state.get_model_parallel_group().rank() > 0:
        return [None] * layout.vpp if layout.vpp > 1 else None
    samples = draw_samples(dp_rank)[: num_items * ITEM_ROWS]
    return [items(samples) for _ in range(layout.vpp)] if layout.vpp > 1 else items(samples)


def _run_out_of_data(training: Any, chunks: list[Any], layout: Layout, dp_rank: int) -> str:
    """The error of a step in which the last data-parallel rank runs out of data."""
    step = megatron_lm.PlannedStep(max_tokens_per_gpu=BUDGET)
    data = _iterators(layout, dp_rank, NUM_ITEMS - (dp_rank == layout.dp - 1))
    try:
        training.train_step(step, data, chunks, NUM_ITEMS)
    except MegapackError as error:
        return str(error)
    return ""


def _fails_alone(training: Any) -> str:
    """The error of a step whose second rank fails while the first waits for its samples."""
    layout = LAYOUTS["dp2"]
    chunks = build_chunks(layout)
    data = _iterators(layout, parallel_state.get_data_parallel_rank())
    if dist.get_rank() == 1:
        megatron_lm_data.draw_batch = _broken
    try:
        training.train_step(
            megatron_lm.PlannedStep(max_tokens_per_gpu=BUDGET), data, chunks, NUM_ITEMS
        )
    except RankError as error:
        return str(error)
    return ""


def _broken(*_: Any) -> None:
    raise ValueError("no sample fits")


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-9))


def main(out: str) -> None:
    """Run every layout; each rank writes its results."""
    launch.start("cpu")
    sys.path.insert(0, str(STUBS))
    patching.apply("megatron_lm")
    from megatron.training import training

    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        found[name] = run_layout(layout, training)
        end_model_parallel()
        if all(map(importlib.util.find_spec, ("triton", "megatron.core.models.hybrid"))):
            found[HYBRID + name] = run_hybrid(layout, training)
            end_model_parallel()
    with unchecked():
        found["fails_alone"] = _fails_alone(training)
    Path(out, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    launch.stop(broken=True)


if __name__ == "__main__":
    main(sys.argv[1])
