"""Padded vocabularies over tensor-parallel ranks: rows of padding never count.

torchrun --nproc-per-node 4 -m tests.dist.model.vocabulary_worker OUT_DIR
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
import torch.distributed as dist

from megapack import Layout, launch
from megapack.dp_schedule import build_dp_schedule
from megapack.model.head import unwrapped
from megapack.model.logprobs import VocabHead, vocab_parallel_logprobs
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.setup import build_chunks, error_of, write_report

R, H, V = 12, 8, 20
IDS = 45
"""Of 80 rows on 4 ranks: 20, 20, 5 and 0."""


def head_errors() -> list[float]:
    """Differences from one rank without padding: log-probs, entropies, both gradients."""
    generator = torch.Generator().manual_seed(3)
    rank = dist.get_rank()
    hidden_RH = torch.randn(R, H, generator=generator)
    whole_VH = torch.randn(4 * V, H, generator=generator)
    labels_R = torch.randint(0, IDS, (R,), generator=generator)
    factors_R = torch.linspace(-1.0, 2.0, R)

    def results(weight_VH: torch.Tensor, **settings: Any) -> list[torch.Tensor]:
        own_RH = hidden_RH.clone().requires_grad_()
        own_VH = weight_VH.clone().requires_grad_()
        head = VocabHead(
            weight_VH=own_VH, temperature=0.7, chunk_tokens=5, with_entropy=True, **settings
        )
        logprobs_R, entropy_R = vocab_parallel_logprobs(own_RH, labels_R, head)
        assert entropy_R is not None
        loss = (factors_R * logprobs_R + factors_R.flip(0) * entropy_R).sum()
        return [logprobs_R, entropy_R, *torch.autograd.grad(loss, (own_RH, own_VH))]

    want = results(whole_VH[:IDS])
    want[3] = torch.cat([want[3], torch.zeros(4 * V - IDS, H)])[rank * V : (rank + 1) * V]
    part_VH = whole_VH[rank * V : (rank + 1) * V]
    got = results(part_VH, num_ids=IDS, tp_group=dist.group.WORLD)
    return [float((a - b).abs().max()) for a, b in zip(got, want, strict=True)]


def adapter_facts() -> dict[str, Any]:
    """What the adapter's `vocab_size` does with a model that `build_model` did not mark."""
    layout = Layout(tp=4)
    chunks = build_chunks(layout, model=dataclasses.replace(problem.MODEL, num_query_groups=4))
    batch = problem.make_batch()
    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=64)
    found: dict[str, torch.Tensor] = {}

    def run(name: str, vocab_size: int | None = None) -> None:
        adapter = ScheduleAdapter(chunks, layout=layout, vocab_size=vocab_size)
        values = adapter.forward(plan, batch)["logprobs"]
        found[name] = torch.cat([value for value in values if value is not None])

    run("marked")
    del unwrapped(chunks[0]).num_ids
    run("given", problem.VOCAB_SIZE)
    run("unknown")
    return {
        "given_equals_marked": torch.equal(found["given"], found["marked"]),
        "padding_that_counts": float((found["unknown"] - found["marked"]).abs().max()),
        "an_id_that_is_padding": error_of(lambda: run("refused", 50)),
        "too_many_ids": error_of(lambda: run("refused", 129)),
    }


def main(out_dir: str) -> None:
    """Write what this rank found."""
    launch.start("cpu")
    report = {"errors": head_errors(), **adapter_facts()}
    write_report(out_dir, report)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
