"""The ways of running the same samples that `bench_gpu.py` compares.

A packed way goes through `ScheduleAdapter`. A dense way is a plain loop over [B, S] batches which
are on the device beforehand, with the model's causal attention and no `cu_seqlens`; its vocabulary
head is the adapter's, at response positions alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapack import Layout, Plan, build_dp_schedule
from megapack.loss import SFT
from megapack.model.attention.packed import packed_seq_params
from megapack.model.head import deferred_head
from megapack.model.logprobs import VocabHead, vocab_parallel_logprobs
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from megapack.schedule import runner as schedule_run
from megapack.schedule.runner import evaluating

Sample = tuple[int, int]
"""Tokens of a prompt and of its response."""

MODES = ("train", "forward", "logprobs")
"""Forward and backward; a forward of the same rows without gradients; log-probs and entropies by
a plan with the budget of passes that store no activations."""


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(run: Any) -> float:
    """Wall-clock seconds of a call with all that it starts on the device."""
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


def make_batch(samples: Sequence[Sample], vocab_size: int) -> SampleBatch:
    """Samples of random tokens."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:
        return torch.randint(vocab_size, (count,), generator=generator)

    prompts, responses = zip(*[(tokens(p), tokens(r)) for p, r in samples], strict=True)
    return SampleBatch.from_prompt_response(list(prompts), list(responses))


class PackedWay:
    """Rows of a plan, through the adapter."""

    def __init__(
        self,
        name: str,
        chunks: list[Any],
        samples: Sequence[Sample],
        *,
        vocab_size: int,
        chunk_tokens: int,
        budget: dict[str, int],
        forward_budget: dict[str, int],
    ) -> None:
        self.name, self.samples, self.chunks = name, list(samples), chunks
        self.batch = make_batch(samples, vocab_size)
        self.adapter = ScheduleAdapter(chunks, layout=Layout(), logprob_chunk_tokens=chunk_tokens)
        self._budget = budget
        self.plan = self.make_plan()
        self.forward_plan = build_dp_schedule(
            self.batch.lengths, layout=Layout(), forward_only=True, **forward_budget
        )

    def make_plan(self) -> Plan:
        """Of the training step."""
        return build_dp_schedule(self.batch.lengths, layout=Layout(), **self._budget)

    @property
    def num_microbatches(self) -> int:
        """Rows of the training step."""
        return len(self.plan.steps[0].ranks[0])

    @property
    def row_tokens(self) -> int:
        """Of all rows together, padding included."""
        return sum(row.row_tokens for row in self.plan.steps[0].ranks[0])

    def train(self) -> None:
        """Forward and backward into the main gradients."""
        zero_gradients(self.chunks)
        self.step()

    def step(self) -> None:
        """The adapter's step alone."""
        self.adapter.step(self.plan, self.batch, objective=SFT())

    def forward(self) -> None:
        """Log-probs by the training step's rows."""
        self.adapter.forward(self.plan, self.batch)

    def logprobs(self) -> None:
        """Log-probs and entropies by rows of the forward budget."""
        self.adapter.forward(self.forward_plan, self.batch, entropy=True)


@dataclass(frozen=True)
class DenseBatch:
    """Samples of one length in memory, on the device."""

    tokens_BS: Tensor
    positions_BS: Tensor
    loss_positions_R: Tensor
    """Into the flattened [B, S], of tokens that predict a response token."""
    labels_R: Tensor


class DenseWay:
    """Batches whose samples are padded to the longest of them.

    Args:
        unpacked: the model's attention takes batches of sequences; else each batch goes in as one
            row of samples of equal length.
        batches: samples of each training batch.
        forward_batches: samples of each batch of the log-prob pass.
    """

    def __init__(
        self,
        name: str,
        chunks: list[Any],
        *,
        unpacked: bool,
        vocab_size: int,
        chunk_tokens: int,
        batches: Sequence[Sequence[Sample]],
        forward_batches: Sequence[Sequence[Sample]],
    ) -> None:
        self.name, self.chunks = name, chunks
        self.samples = [sample for batch in batches for sample in batch]
        self._unpacked, self._chunk_tokens = unpacked, chunk_tokens
        device = next(chunks[0].parameters()).device
        self._batches, self._forward_batches = (
            [dense_batch(batch, vocab_size, device) for batch in which]
            for which in (batches, forward_batches)
        )

    @property
    def num_microbatches(self) -> int:
        """Batches of the training step."""
        return len(self._batches)

    @property
    def row_tokens(self) -> int:
        """Of all batches together, padding included."""
        return sum(batch.tokens_BS.numel() for batch in self._batches)

    def train(self) -> None:
        """Forward and backward into the main gradients."""
        zero_gradients(self.chunks)
        for batch in self._batches:
            self._logprobs(batch, with_entropy=False)[0].mean().neg().backward()

    def forward(self) -> None:
        """Log-probs by the training step's batches."""
        with torch.no_grad(), evaluating(self.chunks):
            for batch in self._batches:
                self._logprobs(batch, with_entropy=False)[0].cpu()

    def logprobs(self) -> None:
        """Log-probs and entropies by batches of the forward budget."""
        with torch.no_grad(), evaluating(self.chunks):
            for batch in self._forward_batches:
                for values_R in self._logprobs(batch, with_entropy=True):
                    values_R.cpu()  # type: ignore[union-attr]

    def _logprobs(self, batch: DenseBatch, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        (model,) = self.chunks
        tokens_BS, positions_BS, params = batch.tokens_BS, batch.positions_BS, None
        if not self._unpacked:
            count, length = tokens_BS.shape
            ends = torch.arange(count + 1, dtype=torch.int32, device=tokens_BS.device) * length
            params = packed_seq_params(ends, length, count * length)
            tokens_BS, positions_BS = tokens_BS.view(1, -1), positions_BS.view(1, -1)
        with deferred_head(model) as head:
            hidden = model(tokens_BS, positions_BS, None, packed_seq_params=params)
        hidden_RH = hidden.flatten(0, 1)[batch.loss_positions_R].to(head.weight_VH.dtype)
        vocab = VocabHead(
            weight_VH=head.weight_VH, chunk_tokens=self._chunk_tokens, with_entropy=with_entropy
        )
        return vocab_parallel_logprobs(hidden_RH, batch.labels_R, vocab)


def dense_batch(samples: Sequence[Sample], vocab_size: int, device: torch.device) -> DenseBatch:
    """Random tokens, each sample at the start of its line."""
    batch = make_batch(samples, vocab_size)
    longest = max(batch.lengths)
    tokens_BS = torch.zeros(len(samples), longest, dtype=torch.int64)
    places = []
    for i, (prompt, response) in enumerate(samples):
        tokens_BS[i, : prompt + response] = batch.tokens(i)
        # Nothing predicts a sample's first token.
        first = max(prompt, 1) - 1
        places.append(torch.arange(first, prompt + response - 1) + i * longest)
    positions_R = torch.cat(places)
    return DenseBatch(
        tokens_BS.to(device),
        torch.arange(longest, device=device).repeat(len(samples), 1),
        positions_R.to(device),
        tokens_BS.flatten()[positions_R + 1].to(device),
    )


def padded_batches(samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
    """Samples in their order; a batch ends where one more would pad it past the budget.

    >>> padded_batches([(1, 2), (1, 3), (2, 6), (1, 1)], budget=8)
    [[(1, 2), (1, 3)], [(2, 6)], [(1, 1)]]
    """
    batches: list[list[Sample]] = []
    for sample in samples:
        longest = max(sum(s) for s in [*(batches[-1] if batches else []), sample])
        if batches and longest * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


def equal_batches(samples: Sequence[Sample], budget: int, unit: int = 64) -> list[list[Sample]]:
    """Full batches of equal samples: about the same tokens, mean length and share of response.

    >>> equal_batches([(10, 54), (20, 236), (10, 54)], budget=256, unit=64)
    [[(13, 115), (13, 115)], [(13, 115), (13, 115)]]
    """
    tokens = sum(map(sum, samples))
    mean = tokens / len(samples)
    length = min(max(unit, round(mean / unit) * unit), budget)
    prompt = min(length - 1, round(length * sum(p for p, _ in samples) / tokens))
    batch = [(prompt, length - prompt)] * (budget // length)
    return [batch] * max(1, round(tokens / (len(batch) * length)))


def zero_gradients(chunks: Sequence[Any]) -> None:
    """What a step begins with."""
    for chunk in chunks:
        chunk.zero_grad_buffer()


def host_seconds(way: PackedWay) -> tuple[float, float]:
    """Seconds of planning a step, and of all else that the adapter does outside Megatron's call.

    The device is waited for on both sides of the call, so none of its work counts as the host's.
    """
    inside, original = [], schedule_run.get_forward_backward_func

    def timed() -> Any:
        def call(**kwargs: Any) -> None:
            inside.append(seconds_of(lambda: original()(**kwargs)))

        return call

    zero_gradients(way.chunks)
    planning = seconds_of(way.make_plan)
    with mock.patch.object(schedule_run, "get_forward_backward_func", timed):
        whole = seconds_of(way.step)
    return planning, whole - sum(inside)
