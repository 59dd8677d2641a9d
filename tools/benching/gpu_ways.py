"""The ways of running the same samples that `bench_gpu.py` compares.

A packed way runs through `ScheduleAdapter`. A dense way is a plain loop over [B, S] batches that
are already on the device, with the model's causal attention and no `cu_seqlens`. It uses the
adapter's vocabulary head, at response positions only.
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
from megapack.schedule import ScheduleAdapter, runner
from megapack.schedule.runner import evaluating

Sample = tuple[int, int]
"""Tokens of the prompt and of the response."""

MODES = ("train", "forward", "logprobs")
"""train: forward and backward. forward: the same rows without gradients. logprobs: log-probs and
entropies, planned with the budget of passes that store no activations."""


def synchronize() -> None:
    """Wait for the CUDA device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(run: Any) -> float:
    """Wall-clock seconds of a call, including the work that it starts on the device."""
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
    """Packed rows of a plan, run by the adapter."""

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
        self.name = name
        self.samples = list(samples)
        self.chunks = chunks
        self.batch = make_batch(samples, vocab_size)
        self.adapter = ScheduleAdapter(chunks, layout=Layout(), logprob_chunk_tokens=chunk_tokens)
        self._budget = budget
        self.plan = self.make_plan()
        self.forward_plan = build_dp_schedule(
            self.batch.lengths, layout=Layout(), forward_only=True, **forward_budget
        )

    def make_plan(self) -> Plan:
        """The plan of the training step."""
        return build_dp_schedule(self.batch.lengths, layout=Layout(), **self._budget)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the training step."""
        return len(self.plan.steps[0].ranks[0])

    @property
    def row_tokens(self) -> int:
        """Sum over all rows, with padding."""
        return sum(row.row_tokens for row in self.plan.steps[0].ranks[0])

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row of the training step."""
        return max(row.row_tokens for row in self.plan.steps[0].ranks[0])

    def train(self) -> None:
        """Forward and backward into the main gradients."""
        zero_gradients(self.chunks)
        self.step()

    def step(self) -> None:
        """The adapter's step, without zeroing the gradients first."""
        self.adapter.step(self.plan, self.batch, objective=SFT())

    def forward(self) -> None:
        """Log-probs with the training step's rows."""
        self.adapter.forward(self.plan, self.batch)

    def logprobs(self) -> None:
        """Log-probs and entropies with rows of the forward budget."""
        self.adapter.forward(self.forward_plan, self.batch, entropy=True)


@dataclass(frozen=True)
class DenseBatch:
    """Samples padded to one length, on the device."""

    tokens_BS: Tensor
    positions_BS: Tensor
    loss_positions_R: Tensor
    """Positions in the flattened [B, S] of the tokens that predict a response token."""
    labels_R: Tensor


class DenseWay:
    """Batches whose samples are padded to the longest sample of the batch.

    Args:
        unpacked: whether the model's attention accepts batches of sequences. If not, each batch
            runs as one row of samples of equal length.
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
        self.name = name
        self.chunks = chunks
        self.samples = [sample for batch in batches for sample in batch]
        self._unpacked = unpacked
        self._chunk_tokens = chunk_tokens
        device = next(chunks[0].parameters()).device
        self._batches = [dense_batch(batch, vocab_size, device) for batch in batches]
        self._forward_batches = [
            dense_batch(batch, vocab_size, device) for batch in forward_batches
        ]

    @property
    def num_microbatches(self) -> int:
        """Batches of the training step."""
        return len(self._batches)

    @property
    def row_tokens(self) -> int:
        """Sum over all batches, with padding."""
        return sum(batch.tokens_BS.numel() for batch in self._batches)

    def train(self) -> None:
        """Forward and backward into the main gradients."""
        zero_gradients(self.chunks)
        for batch in self._batches:
            self._logprobs(batch, with_entropy=False)[0].mean().neg().backward()

    def forward(self) -> None:
        """Log-probs with the training step's batches."""
        with torch.no_grad(), evaluating(self.chunks):
            for batch in self._batches:
                self._logprobs(batch, with_entropy=False)[0].cpu()

    def logprobs(self) -> None:
        """Log-probs and entropies with batches of the forward budget."""
        with torch.no_grad(), evaluating(self.chunks):
            for batch in self._forward_batches:
                for values_R in self._logprobs(batch, with_entropy=True):
                    values_R.cpu()  # type: ignore[union-attr]

    def _logprobs(self, batch: DenseBatch, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        (model,) = self.chunks
        tokens_BS = batch.tokens_BS
        positions_BS = batch.positions_BS
        params = None
        if not self._unpacked:
            count, length = tokens_BS.shape
            ends = torch.arange(count + 1, dtype=torch.int32, device=tokens_BS.device) * length
            params = packed_seq_params(ends, length, count * length)
            tokens_BS = tokens_BS.view(1, -1)
            positions_BS = positions_BS.view(1, -1)
        with deferred_head(model) as head:
            hidden = model(tokens_BS, positions_BS, None, packed_seq_params=params)
        hidden_RH = hidden.flatten(0, 1)[batch.loss_positions_R].to(head.weight_VH.dtype)
        vocab = VocabHead(
            weight_VH=head.weight_VH, chunk_tokens=self._chunk_tokens, with_entropy=with_entropy
        )
        return vocab_parallel_logprobs(hidden_RH, batch.labels_R, vocab)


def dense_batch(samples: Sequence[Sample], vocab_size: int, device: torch.device) -> DenseBatch:
    """A batch of random tokens; each sample is left-aligned in its line."""
    batch = make_batch(samples, vocab_size)
    longest = max(batch.lengths)
    tokens_BS = torch.zeros(len(samples), longest, dtype=torch.int64)
    positions = []
    for i, (prompt, response) in enumerate(samples):
        tokens_BS[i, : prompt + response] = batch.tokens(i)
        # No token predicts a sample's first token.
        first = max(prompt, 1) - 1
        positions.append(torch.arange(first, prompt + response - 1) + i * longest)
    positions_R = torch.cat(positions)
    return DenseBatch(
        tokens_BS.to(device),
        torch.arange(longest, device=device).repeat(len(samples), 1),
        positions_R.to(device),
        tokens_BS.flatten()[positions_R + 1].to(device),
    )


def padded_batches(samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
    """Batches of samples in order; a batch ends where one more would pad it past the budget.

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
    """Full batches of equal samples, with about the same tokens, mean length and response share.

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
    """Zero the gradient buffers, as before every step."""
    for chunk in chunks:
        chunk.zero_grad_buffer()


def host_seconds(way: PackedWay) -> tuple[float, float]:
    """Seconds of planning a step, and of the adapter's work outside Megatron's call.

    The device is synchronized before and after the call, so device work is not counted.
    """
    inside = []
    original = runner.get_forward_backward_func

    def timed() -> Any:
        def call(**kwargs: Any) -> None:
            inside.append(seconds_of(lambda: original()(**kwargs)))

        return call

    zero_gradients(way.chunks)
    planning = seconds_of(way.make_plan)
    with mock.patch.object(runner, "get_forward_backward_func", timed):
        whole = seconds_of(way.step)
    return planning, whole - sum(inside)
