"""A host's own step with shared prefixes and without; each rank writes how far they are apart.

torchrun --nproc-per-node N -m tests.dist.schedule.sharing_worker OUT LAYOUT CASE[,CASE...]

The host packs rows of groups, a prompt with each of its answers, and reads log-probs and entropy of
the answers out of the row's logits, as slime does. LAYOUT is JSON; CASES are of `CASES`. The
reference is the same step, unshared; where a loss does not depend on the row, also with one sample
per row.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import get_model_config
from torch import Tensor

from megapack import Layout, launch
from megapack.layout import round_up
from megapack.model import host_rows
from megapack.model.head import unwrapped
from megapack.rows.slices import slice_positions
from megapack.schedule import PlannedSchedule
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.schedule.planned_worker import distance, gradients
from tests.dist.setup import build_chunks, error_of, write_report

MODELS = {
    "dense": problem.MODEL,
    "value": dataclasses.replace(problem.MODEL, untie_embeddings=True),
    "moe": problem.MOE_MODEL,
    "bias": problem.MOE_BIAS_MODEL,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a host's step is made of."""

    model: str = "dense"
    rows: str = "groups"
    """See `make_rows`."""
    output: str = "logits"
    """What the host's loss reads: logits, values of a value head, or the model's own losses."""
    recompute: tuple[str, ...] = ()
    """What Megatron recomputes: "full", or modules."""
    balancing: tuple[str, ...] = ("seq_aux_loss",)
    without_counts: bool = False
    """A mutation: routers see the shared row."""


CASES = {
    "dense": Case(),
    "tree": Case(rows="tree"),
    "alone": Case(rows="alone"),
    "different": Case(rows="different"),
    "full": Case(recompute=("full",)),
    "values": Case(model="value", output="values"),
    "labels": Case(output="losses"),
    "moe": Case(model="moe"),
    "moe_kinds": Case(model="moe", balancing=("aux_loss", "seq_aux_loss", "global_aux_loss")),
    "moe_full": Case(model="moe", recompute=("full",)),
    "moe_alone_recomputed": Case(model="moe", recompute=("moe",)),
    "bias": Case(model="bias"),
    "moe_mutation": Case(model="moe", without_counts=True),
}


@dataclass(frozen=True)
class Sample:
    """A prompt and an answer."""

    tokens: Tensor
    response: int
    advantage: float
    old: Tensor


def make_rows(kind: str) -> list[list[Sample]]:
    """A row per group of four answers.

    Args:
        kind: "groups"; "tree", with two groups in a row whose prompts begin alike; "alone", where
            every second row holds one sample; "different", where no prompts are equal.
    """
    rng = torch.Generator().manual_seed(3)

    def draw(count: int) -> Tensor:
        return torch.randint(1, problem.VOCAB_SIZE, (count,), generator=rng)

    system = draw(12)
    rows = []
    for group in range(4):
        prompt = torch.cat([system if kind == "tree" else draw(12), draw(12)])
        row = []
        for k in range(1 if kind == "alone" and group % 2 else 4):
            prompt = draw(24) if kind == "different" else prompt
            response = 20 - (k * 5) // 2
            old = torch.randn(response, generator=rng) * 0.3 - 4.6
            advantage = float(torch.randn((), generator=rng))
            row.append(Sample(torch.cat([prompt, draw(response)]), response, advantage, old))
        rows.append(row)
    if kind == "tree":
        return [rows[0] + rows[1], rows[2] + rows[3]]
    return rows


class HostStep:
    """A host's forward step and loss; the results are log-probs, values or losses of a row."""

    def __init__(self, output: str) -> None:
        self._output = output

    def __call__(self, batches: Iterator[dict[str, Any]], model: Any) -> Any:
        samples = next(batches).pop("samples")
        cp = parallel_state.get_context_parallel_world_size()
        rank = parallel_state.get_context_parallel_rank()
        spans = [round_up(s.tokens.numel(), 2 * cp if cp > 1 else 1) for s in samples]
        parts = [_padded(s.tokens, n) for s, n in zip(samples, spans, strict=True)]
        if tail := round_up(sum(spans), 16) - sum(spans):
            spans.append(tail)
            parts.append(torch.zeros(tail, dtype=torch.int64))
        held = slice_positions(spans, cp, rank)
        ends = torch.tensor([0, *spans]).cumsum(0).to(torch.int32)
        params = PackedSeqParams(
            "thd", ends, ends, max_seqlen_q=max(spans), max_seqlen_kv=max(spans)
        )
        ids = torch.cat(parts)[held]
        labels = torch.cat(parts).roll(-1)[held]
        # The first arguments by position, as some hosts do.
        output = model(
            ids[None],
            None,
            None,
            labels=labels[None] if self._output == "losses" else None,
            packed_seq_params=params,
        )
        return output, partial(self._loss, samples, spans, held)

    def _loss(self, samples: list[Sample], spans: list[int], held: Tensor, output: Tensor) -> Any:
        if self._output == "values" and output.shape[1] < held.numel():
            # The value head under sequence parallelism; hosts gather its values.
            output = tensor_parallel.gather_from_sequence_parallel_region(
                output[0], tensor_parallel_output_grad=False
            )[None]
        index = torch.full((sum(spans),), -1)
        index[held] = torch.arange(held.numel())
        loss, count, start, seen = output.new_zeros(()), 0, 0, []
        for sample, span in zip(samples, spans, strict=False):
            end = start + sample.tokens.numel()
            at = index[end - sample.response - 1 : end - 1]
            is_mine = at >= 0
            values = output[0, at[is_mine]]
            if self._output == "logits":
                labels = sample.tokens[-sample.response :][is_mine]
                own, values = values, _logprobs(values, labels)
                whole = tensor_parallel.gather_from_tensor_model_parallel_region(own)
                logs = whole.log_softmax(-1)
                loss = loss + 0.01 * (logs.exp() * logs).sum()
            # Log-probs are about -4.6.
            center = {"logits": 0.0, "losses": 0.0, "values": 4.6}[self._output]
            values = -values if self._output == "losses" else values.view(-1)
            ratio = (values - center - sample.old[is_mine]).clamp(max=3.0).exp()
            clipped = ratio.clamp(0.8, 1.28)
            loss = loss - torch.minimum(ratio * sample.advantage, clipped * sample.advantage).sum()
            count += int(is_mine.sum())
            seen.append(values.detach())
            start += span
        result = {"loss": loss.detach().clone(), "values": torch.cat(seen)}
        return loss, torch.tensor(count, dtype=torch.int), result


def _padded(tokens: Tensor, span: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, span - tokens.numel()))


def _logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    # Megatron's cross entropy writes into its input.
    entropy = tensor_parallel.vocab_parallel_cross_entropy(logits.clone()[:, None], labels[:, None])
    return -entropy[:, 0]


class Job:
    """One case on this rank."""

    def __init__(self, layout: Layout, case: Case) -> None:
        self.case = case
        model = MODELS[case.model]
        self.chunks = build_chunks(layout, model=model, value_head=case.model == "value")
        for chunk in map(unwrapped, self.chunks):
            if case.model == "value" and chunk.post_process:
                torch.nn.init.normal_(chunk.output_layer.weight, std=0.2)
                # Each rank's gradient is that of its tokens; so hosts mark their value heads.
                chunk.output_layer.weight.sequence_parallel = layout.sequence_parallel
        self.config = get_model_config(self.chunks[0])
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.variable_seq_lengths = layout.pp > 1
        self.routers = [
            module.router
            for chunk in self.chunks
            for module in chunk.modules()
            if hasattr(module, "router")
        ]
        if case.model == "moe":
            self.config.moe_aux_loss_coeff = [0.3] * len(case.balancing)
            for router in self.routers:
                router.routing_type = list(case.balancing)
                router.config.moe_aux_loss_coeff = [0.3] * len(case.balancing)
                counts = torch.zeros(router.num_experts)
                router.global_tokens_per_expert, router.ga_steps = counts, torch.zeros(())
        for chunk in self.chunks if case.recompute else ():
            recompute(chunk, case.recompute)
        self.tokens: list[int] = []
        for chunk in map(unwrapped, self.chunks):
            chunk.decoder.register_forward_hook(lambda *call: self.tokens.append(len(call[-1])))

    def run(self, rows: Sequence[Any], shares: bool, forward_only: bool = False) -> list[Any]:
        """The host's results, with its step's gradients in the buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for router in self.routers:
            router.reset_global_aux_loss_tracker()
        self.tokens.clear()
        moe_utils.clear_aux_losses_tracker()
        iterators = [iter([{"samples": row} for row in rows]) for _ in self.chunks]
        return PlannedSchedule(share_prefixes=shares)(
            forward_step_func=HostStep(self.case.output),
            data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(rows),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def balance(self) -> list[Tensor]:
        """What the host's logs and its experts' biases have after a step."""
        tracked = moe_utils.get_moe_layer_wise_logging_tracker().values()
        values = [entry["values"].clone() for entry in tracked]
        return values + [r.expert_bias.clone() for r in self.routers if r.expert_bias is not None]

    def reset_biases(self) -> None:
        for router in self.routers:
            if router.expert_bias is not None:
                router.expert_bias.zero_()

    def report(self) -> dict[str, float]:
        """Distances between the step with shared prefixes and without."""
        rows = make_rows(self.case.rows)
        expected = self.run(rows, shares=False)
        expected_gradients, expected_balance = gradients(self.chunks), self.balance()
        host_tokens = sum(self.tokens)
        self.reset_biases()
        mutation = (
            mock.patch.object(host_rows, "_routers_of_rows", return_value=())
            if self.case.without_counts
            else nullcontext()
        )
        with mutation:
            found = self.run(rows, shares=True)
        found_gradients, tokens = gradients(self.chunks), sum(self.tokens)
        numbers = {
            "gradients": distance(found_gradients, expected_gradients),
            "values": apart(found, expected),
            "balance": max(
                (
                    float((a - b).abs().max())
                    for a, b in zip(self.balance(), expected_balance, strict=True)
                ),
                default=0.0,
            ),
            "tokens": tokens / host_tokens,
        }
        self.reset_biases()
        forward = self.run(rows, shares=True, forward_only=True)
        numbers["forward_tokens"] = sum(self.tokens) / host_tokens
        self.reset_biases()
        numbers["forward_values"] = apart(forward, self.run(rows, False, forward_only=True))
        if self.case.model in ("dense", "value"):
            self.run([[sample] for row in rows for sample in row], shares=False)
            numbers["one_sample"] = distance(found_gradients, gradients(self.chunks))
        return numbers


def apart(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference of the host's results."""
    return max(
        (
            float((a[name] - b[name]).abs().max())
            for a, b in zip(found, expected, strict=True)
            for name in ("loss", "values")
            if a[name].numel()
        ),
        default=0.0,
    )


def recompute(chunk: Any, modules: tuple[str, ...]) -> None:
    """Switch recomputation on in a chunk that is built."""
    config = unwrapped(chunk).config
    if modules == ("full",):
        config.recompute_granularity, config.recompute_method = "full", "uniform"
        config.recompute_num_layers = 1
        return
    for module in chunk.modules():
        if hasattr(module, "moe_layer_recompute"):
            module.moe_layer_recompute = True


def main(folder: str, layout_text: str, cases: str) -> None:
    """Run the cases one after the other, and write their reports."""
    launch.start("cpu")
    torch.set_num_threads(1)
    reports: dict[str, Any] = {}
    for name in cases.split(","):
        run: Callable[[], None] = lambda: reports.update(  # noqa: E731
            {name: Job(Layout(**json.loads(layout_text)), CASES[name]).report()}  # noqa: B023
        )
        if fault := error_of(run):
            reports[name] = {"fault": fault}
        end_model_parallel()
    write_report(folder, reports)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
