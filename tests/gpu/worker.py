"""Runs one attention on one device: each part that it supports, with its results or its error.

python -m tests.gpu.worker DEVICE ATTENTION REFERENCE OUT
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import torch

from megapack import Layout, Plan, launch
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import initialize_parallel
from megapack.model.recurrent.choice import recurrent_kernels
from megapack.model.weight_gradients import WeightGradients
from megapack.rows.slices import slice_positions
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from megapack.schedule.forward import ForwardStep
from tests.dist.problem import OBJECTIVE, SEED, VOCAB_SIZE
from tests.gpu import problem
from tests.gpu.compare import Samples, build_adapter, exactness
from tests.gpu.rehearsed import REHEARSED
from tests.hand_made_orders import with_weights_later
from tests.megatron import HAS_HYBRID
from tools import logit_precision
from tools.bench_head_memory import measure

Found = dict[str, Any]
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def in_fp32(attention: str, reference: dict[str, Samples]) -> Found:
    """Errors in fp32."""
    adapter = build_adapter(problem.model(attention, "fp32"), Layout())
    return exactness(adapter, reference["fp32"])


def in_bf16(attention: str, reference: dict[str, Samples]) -> Found:
    """Errors in bf16, beside those of one sample at a time in bf16."""
    adapter = build_adapter(problem.model(attention, "bf16"), Layout())
    return exactness(adapter, reference["fp32"], reference["bf16"])


def shared_prefixes(attention: str, reference: dict[str, Samples]) -> Found:
    """Errors of rows that hold the beginnings of samples once."""
    plan = problem.shared_plan(Layout())
    found = _of_families(attention, reference, plan)
    shared = sum(row.shared_tokens for row in plan.steps[0].ranks[0])
    return {**found, "shared_tokens": shared}


def split_samples(attention: str, reference: dict[str, Samples]) -> Found:
    """Errors of samples in several rows."""
    plan = problem.split_plan(Layout())
    found = _of_families(attention, reference, plan)
    return {**found, "rows_with_pieces": sum(bool(row.pieces) for row in plan.steps[0].ranks[0])}


def hybrid(attention: str, reference: dict[str, Samples]) -> Found:
    """Errors of a model with gated delta nets, in rows that share prefixes and with pieces."""
    if not HAS_HYBRID:
        return {"skipped": "Megatron-Core has hybrid models since 0.18"}
    found = recurrent(problem.hybrid_model(attention, "bf16"), reference["hybrid_fp32"])
    return {**found, "kernels": recurrent_kernels("G")}


def recurrent(settings: ModelConfig, exact: Samples) -> Found:
    """Errors of a bf16 model in rows that share prefixes and with pieces, beside those of its own
    rows of one sample."""
    batch = problem.make_family_batch()
    alone, shared, split = (
        exactness(build_adapter(settings, Layout()), exact, plan=make(Layout()), batch=batch)
        for make in (problem.one_sample_plan, problem.shared_plan, problem.split_plan)
    )
    errors = ("gradient_error", "logprob_mean_error")
    limits = {f"one_sample_{name}": alone[name] for name in errors}
    return {**shared, **limits, "split": {**split, **limits}}


def _of_families(attention: str, reference: dict[str, Samples], plan: Plan) -> Found:
    """In bf16 by the kernels, in fp32 by SDPA."""
    dtype: Literal["fp32", "bf16"] = "fp32" if attention == "sdpa" else "bf16"
    adapter = build_adapter(problem.model(attention, dtype), Layout())
    own = None if dtype == "fp32" else reference["families_bf16"]
    batch = problem.make_family_batch()
    found: Found = exactness(adapter, reference["families_fp32"], own, plan=plan, batch=batch)
    return found


def experts(attention: str, reference: dict[str, Samples]) -> Found:
    """Errors in fp32 with experts, grouped where Transformer Engine is."""
    adapter = build_adapter(problem.moe_model(attention), Layout())
    found: Found = exactness(adapter, reference["moe_fp32"])
    return {**found, "grouped": bool(adapter.config.moe_grouped_gemm)}


def overlap(attention: str, reference: dict[str, Samples]) -> Found:
    """Errors in fp32 of a step with more micro-batches than the step before it.

    DDP reduces gradients in buckets during backwards.
    """
    reduction = {
        "overlap_grad_reduce": True,
        "bucket_size": 100_000,
    }
    adapter = build_adapter(
        problem.model(attention, "fp32"),
        Layout(),
        distributed_optimizer=True,
        reduction=reduction,
    )
    first = exactness(adapter, reference["fp32"], budget=4 * problem.BUDGET)
    for chunk in adapter.chunks:
        chunk.zero_grad_buffer()
    second = exactness(adapter, reference["fp32"])
    return {**second, "num_microbatches_before": first["num_microbatches"]}


def split_backward(attention: str, reference: dict[str, Samples]) -> Found:
    """Errors in fp32 of a step whose weight gradients come up to three micro-batches later."""
    adapter = build_adapter(
        problem.model(attention, "fp32"),
        Layout(),
        functools.partial(ScheduleAdapter, executor="operations"),
        splits_backward=True,
    )
    products = []

    def counting(self: WeightGradients, chunk: int, microbatch: int) -> None:
        products.append(sum(map(len, self._kept[chunk, microbatch])))
        original(self, chunk, microbatch)

    original = WeightGradients.run
    WeightGradients.run = counting  # type: ignore[method-assign]
    try:
        plan = with_weights_later(problem.make_plan(Layout()), 3)
        found: Found = exactness(adapter, reference["fp32"], plan=plan)
    finally:
        WeightGradients.run = original  # type: ignore[method-assign]
    return {**found, "products_put_off": products}


def waits(attention: str, reference: dict[str, Samples]) -> Found:
    """Whether the forward of a micro-batch waits for the device; CUDA raises where it does."""
    adapter = build_adapter(problem.model(attention, "bf16"), Layout())
    batch = problem.make_batch()
    plan = problem.make_plan(Layout())
    adapter.step(plan, batch, objective=OBJECTIVE)  # compiles and caches

    def strict(self: ForwardStep, *args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    original = ForwardStep._forward
    ForwardStep._forward = strict  # type: ignore[method-assign]
    try:
        adapter.step(plan, batch, objective=OBJECTIVE)
    finally:
        ForwardStep._forward = original  # type: ignore[method-assign]
    return {"num_microbatches": plan.steps[0].num_microbatches}


def head_precision(attention: str, reference: dict[str, Samples]) -> Found:
    """Largest errors in nats of log-probs of bf16 factors, by way of making logits."""
    found, _ = logit_precision.measure("cuda")
    return {name: largest for name, (_, largest) in found.items()}


def isolation(attention: str, reference: dict[str, Samples]) -> Found:
    """The largest change of entropies when one sample's tokens change, and when nothing changes."""
    adapter = build_adapter(problem.model(attention, "bf16"), Layout())
    batch = problem.make_batch()
    plan = problem.make_plan(Layout())
    row = max(plan.steps[0].ranks[0], key=lambda micro_batch: len(micro_batch.samples))
    # Change an early sample: causal attention can only leak into later ones.
    changed = next(i for i in row.samples if batch.num_loss_tokens[i] > 1)
    tokens = [batch.tokens(i) for i in range(len(batch))]
    tokens[changed] = (tokens[changed] + 1) % VOCAB_SIZE
    masks = [batch.response_mask(i) for i in range(len(batch))]
    other = SampleBatch(tokens, {"response_mask": masks})
    first, again, moved = (
        adapter.forward(plan, which, entropy=True)["entropy"] for which in (batch, batch, other)
    )

    def largest(one: list[Any], two: list[Any], samples: list[int]) -> float:
        return max(float((one[i] - two[i]).abs().max()) for i in samples)

    others = [i for i in range(len(batch)) if i != changed]
    return {
        "samples_in_the_row": len(row.samples),
        "repeated": largest(first, again, others),
        "others": largest(first, moved, others),
        "changed": largest(first, moved, [changed]),
    }


def fp8(recipe: str) -> Callable[[str, dict[str, Samples]], Found]:
    """Log-prob errors with linear layers in FP8, and of one sample at a time in bf16."""

    def run(attention: str, reference: dict[str, Samples]) -> Found:
        reason = fp8_obstacle(recipe)
        if reason is not None:
            return {"skipped": reason}
        settings = problem.model(attention, "bf16", fp8=recipe)
        layout = Layout(fp8=settings.fp8_rows)
        adapter = build_adapter(settings, layout)
        plan = problem.make_plan(layout)
        batch = problem.make_batch()
        logprobs = adapter.forward(plan, batch)["logprobs"]
        rows = [row.row_tokens for row in plan.steps[0].ranks[0]]
        unit = {True: 16, "mxfp8": 32, "blockwise": 128}[settings.fp8_rows]
        return {
            "unaligned_rows": sum(tokens % unit > 0 for tokens in rows),
            "fp8_logprob_mean_error": _mean_error(logprobs, batch, reference["fp32"]),
            "bf16_logprob_mean_error": _mean_error(
                [torch.cat([torch.zeros(1), s["logprobs"]]) for s in reference["bf16"]],
                batch,
                reference["fp32"],
            ),
        }

    return run


def _mean_error(logprobs: list[Any], batch: SampleBatch, samples: Samples) -> float:
    masks = [batch.response_mask(i)[1:].bool() for i in range(len(batch))]
    differences = [
        (logprobs[i][1:] - sample["logprobs"])[masks[i]].abs() for i, sample in enumerate(samples)
    ]
    return float(torch.cat(differences).mean())


def cp_slices(attention: str, reference: dict[str, Samples]) -> Found:
    """Number of positions that Transformer Engine assigns to another CP rank than we do."""
    import transformer_engine_torch as tex

    different = 0
    for cp in (2, 4, 8):
        spans = [2 * cp * n for n in (1, 7, 3, 16)]
        ends = torch.tensor([0, *spans], device="cuda").cumsum(0).to(torch.int32)
        for rank in range(cp):
            theirs = tex.thd_get_partitioned_indices(ends, sum(spans), cp, rank).cpu()
            different += int((theirs != slice_positions(spans, cp, rank)).sum())
    return {"different_positions": different}


def head_memory(attention: str, reference: dict[str, Samples]) -> Found:
    """Peak MiB of the vocabulary head, forward and backward, with whole and with chunked logits."""
    import argparse

    sizes = {"tokens": 8192, "hidden": 1024, "vocab": 65536, "chunk_tokens": 512}
    if REHEARSED:
        sizes = {"tokens": 2048, "hidden": 64, "vocab": 32768, "chunk_tokens": 128}
    found = {}
    for way in ("whole", "chunks"):
        options = argparse.Namespace(
            device="cuda", dtype="bfloat16", way=way, response=1.0, **sizes
        )
        found[way] = measure(way, options)
        torch.cuda.empty_cache()
    return found


def fp8_obstacle(recipe: str) -> str | None:
    """Why Transformer Engine does not support a recipe on this device; None if it does."""
    if REHEARSED:
        return "stand-ins on a CPU do not round to FP8"
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as State

    checks = {"blockwise": State.is_fp8_block_scaling_available, "mxfp8": State.is_mxfp8_available}
    available, reason = checks.get(recipe, State.is_fp8_available)()
    return None if available else reason or f"no {recipe} on this device"


def parts(device: str, attention: str) -> dict[str, Callable[[str, dict[str, Samples]], Found]]:
    """Parts that this attention supports on this device."""
    found = {"bf16": in_bf16, "isolation": isolation}
    found |= {"shared_prefixes": shared_prefixes, "split_samples": split_samples}
    # torch's varlen attention supports half precision only.
    if attention != "varlen":
        found["fp32"] = in_fp32
        found |= {"experts": experts, "overlap": overlap, "split_backward": split_backward}
    if attention != "sdpa":
        found |= {"waits": waits, "hybrid": hybrid}
    if attention == "te":
        found |= {"cp_slices": cp_slices, "head_memory": head_memory}
        found["head_precision"] = head_precision
        found |= {f"fp8_{recipe}": fp8(recipe) for recipe in FP8_RECIPES}
    return found


def run_parts(parts: Mapping[str, Callable[[], Found]], out: str) -> None:
    """Run all parts and write `out` after each; if one fails, the others still run."""
    found: dict[str, Found] = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:  # recorded; the test of this part fails with it
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


def main(device: Literal["cuda", "cpu"], attention: str, reference: str, out: str) -> None:
    """Run the parts of one attention."""
    launch.quiet_known_warnings()
    launch.start(device)
    initialize_parallel(Layout(), SEED)
    samples = torch.load(reference, map_location="cpu")
    run_parts(
        {
            name: functools.partial(part, attention, samples)
            for name, part in parts(device, attention).items()
        },
        out,
    )
    launch.stop()


if __name__ == "__main__":
    main(cast(Literal["cuda", "cpu"], sys.argv[1]), *sys.argv[2:])
