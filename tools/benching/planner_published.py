"""Inputs that others have published, planned by their code and by ours."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megapack import CostModel, Layout, MicroBatch, Policy, StepPlan, build_dp_schedule, simulate
from megapack.cost.sizes import ModelSizes
from tools.benching.planner_cases import (
    OURS,
    Case,
    as_step,
    cases,
    h100_cost,
    mean,
    plan_of,
    run_ours,
    runs_of,
)
from tools.benching.planner_peer_code import megatron_scheduler
from tools.benching.planner_peers import BASELINES

# GPUs -> milliseconds of a step with fixed and with dynamic CP: trimmed means in the README of
# Megatron-LM's examples/dynamic_context_parallel (dev), and what its script sets.
NVIDIA_MS = {
    4: (195.3, 151.9),
    8: (220.1, 155.9),
    16: (226.8, 187.1),
    32: (286.2, 208.1),
    64: (272.0, 181.9),
}
NVIDIA_SIZES = ModelSizes(
    num_layers=12,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_attention_heads=16,
    vocab_size=131072,
)
NVIDIA_CP = 4
NVIDIA_BUDGET = 2048
# Samples of a step per GPU: 8 micro-batches of one sample, on every fourth GPU.
NVIDIA_SAMPLES = 2
NVIDIA_STEPS = 20

# Rows and samples of a step of documents, and its layouts.
DOCUMENT_BUDGET = 131_072
DOCUMENTS = 512
DOCUMENT_LAYOUTS = {
    "dp8": Layout(dp=8),
    "dp4 pp4": Layout(dp=4, pp=4),
    "dp4 pp4 vpp2": Layout(dp=4, pp=4, vpp=2),
}

# Layers, micro-batches and seconds of a layer's forward in DynaPipe's
# scripts/simulation/schedule_under_dynamic_mb.py; a backward takes twice as long.
DYNAPIPE_LAYERS = 16
DYNAPIPE_MICROBATCHES = 16
DYNAPIPE_LAYER_S = 4e-3
DYNAPIPE_SPREADS = (0.1, 0.2, 0.4, 0.8, 1.6)
DYNAPIPE_STAGES = 4
# Tokens of a micro-batch of mean size here.
_MEAN_TOKENS = 10_000

# radixark/miles#1766: a step of one sample per slot on TP8 x PP8 x CP2.
MILES_TOKENS = 7_385_297
MILES_SAMPLES = 128
MILES_SLOT = 131_072
MILES_LAYOUT = Layout(tp=8, pp=8, cp=2)


def nvidia_table(megatron: Path) -> Iterator[str]:
    """Yield the lines of Megatron-LM's example of dynamic CP: measured, simulated, our plans."""
    rng = np.random.RandomState(0)
    drawn = rng.lognormal(np.log(1024) - 1.5**2 / 2, 1.5, 1_000_000)
    lengths = np.clip(drawn, 128, 8192).astype(int)
    schedulers = megatron_scheduler(megatron)
    names = "| GPUs | measured, ms | fixed over dynamic, measured | simulated, ms | simulated"
    yield f"{names} | megapack, ms | megapack over their dynamic CP |"
    yield "|---" * 7 + "|"
    speedups = []
    for num_gpus, (fixed_ms, dynamic_ms) in NVIDIA_MS.items():
        layout = Layout(dp=num_gpus)
        size = NVIDIA_SAMPLES * num_gpus
        seconds: dict[str, list[float]] = {"fixed": [], "dynamic": [], "ours": []}
        for k in range(NVIDIA_STEPS):
            step = lengths[k * size : (k + 1) * size]
            cost = h100_cost(NVIDIA_SIZES, layout, step, "none")
            case = Case("", step, NVIDIA_BUDGET, "", layout, "", cost)
            for name, scheduler, cp in (
                ("fixed", "DpBalancedScheduler", NVIDIA_CP),
                ("dynamic", "DefaultDynamicCPScheduler", 1),
            ):
                ranks = schedulers(scheduler, NVIDIA_BUDGET, cp, num_gpus // cp, None)(step)
                seconds[name].append(_seconds(case, as_step(case, ranks)))
            seconds["ours"].append(_seconds(case, plan_of(case, OURS["dynamic CP"]).steps[0]))
        fixed, dynamic, ours = (1e3 * float(np.mean(own)) for own in seconds.values())
        speedups.append(ours / dynamic)
        yield (
            f"| {num_gpus} | {fixed_ms:.0f}, {dynamic_ms:.0f} | {fixed_ms / dynamic_ms:.2f} | "
            f"{fixed:.0f}, {dynamic:.0f} | {fixed / dynamic:.2f} | {ours:.0f} | "
            f"{ours / dynamic:.2f} |"
        )
    yield f"| geometric mean | | | | | | **{mean(speedups):.2f}** |"


def _seconds(case: Case, step: StepPlan) -> float:
    return simulate(step, layout=case.layout, cost=case.cost).makespan


def documents_table(distca: Path) -> Iterator[str]:
    """Yield the lines of WLB-LLM's and ProLong's documents, as DistCA publishes their lengths."""
    data = {}
    for name, file in (("WLB-LLM", "dist_wlbllm.json"), ("ProLong", "dist_prolong.json")):
        text = (distca / "distca" / "simulator" / "data" / file).read_text(encoding="utf-8")
        lengths = np.array(json.loads(text), dtype=np.int64)
        data[name] = (lengths[lengths <= DOCUMENT_BUDGET][:DOCUMENTS], DOCUMENT_BUDGET)
    runs = runs_of(BASELINES, OURS)
    yield f"| documents | layout | model | {' | '.join(runs)} |"
    yield "|---" * (3 + len(runs)) + "|"
    for case in cases(data, DOCUMENT_LAYOUTS):
        results = [run(case) for run in runs.values()]
        cells = " | ".join(f"{r.ratio:.3f}{'*' * bool(r.num_over)}" for r in results)
        yield f"| {case.data} | {case.layout_name} | {case.model} | {cells} |"


def makespan_table(dynapipe: Path) -> Iterator[str]:
    """Yield the lines of DynaPipe's simulation: its 16 micro-batches, whose sizes spread more and
    more around their mean, by its two schedules and by ours."""
    for folder in (dynapipe, dynapipe / "scripts" / "simulation"):
        sys.path.insert(0, str(folder.resolve()))
    theirs: Any = importlib.import_module("schedule_under_dynamic_mb")
    layout = Layout(pp=DYNAPIPE_STAGES)
    whole_s = DYNAPIPE_LAYERS * DYNAPIPE_LAYER_S
    cost = CostModel(per_token=whole_s / _MEAN_TOKENS)
    equal_s = 3 * DYNAPIPE_MICROBATCHES * whole_s / DYNAPIPE_STAGES
    ours = {"1F1B, our order": Policy(), "split backward": Policy(backward="split")}
    names = ["1F1B", "wait-free cyclic", "1F1B in our simulator", *ours]
    yield f"| spread | {' | '.join(names)} |"
    yield "|---" * (1 + len(names)) + "|"
    for spread in DYNAPIPE_SPREADS:
        sizes = next(theirs.gen_micro_batch_multipliers(1, DYNAPIPE_MICROBATCHES, spread))
        cells = [
            float(theirs.schedule_minibatch(DYNAPIPE_STAGES, kind, 1, std=spread)) / 1e3
            for kind in ("1F1B", "wait-free-cyclic")
        ]
        tokens = np.round(sizes * _MEAN_TOKENS).astype(int).tolist()
        rows = tuple(MicroBatch((i,), n, n, n * n, n) for i, n in enumerate(tokens))
        given = StepPlan((rows,), len(rows), None, (), ())
        cells.append(simulate(given, layout=layout, cost=cost).makespan)
        for policy in ours.values():
            plan = build_dp_schedule(
                tokens, layout=layout, micro_batch_size=1, cost=cost, policy=policy
            )
            cells.append(simulate(plan.steps[0], layout=layout, cost=cost).makespan)
        yield f"| {spread} | " + " | ".join(f"{seconds / equal_s:.3f}" for seconds in cells) + " |"


def slots_table(costs: Mapping[str, CostModel]) -> Iterator[str]:
    """Yield the lines of miles#1766: 128 samples in padded slots, and in our rows.

    Only the sum of the lengths is published. These are lognormal with it and with no sample longer
    than its slot.
    """
    drawn = np.random.RandomState(0).lognormal(0.0, 0.8, MILES_SAMPLES)
    least, most = 1.0, float(MILES_SLOT)
    for _ in range(60):
        scale = (least + most) / 2
        if np.minimum(drawn * scale, MILES_SLOT).sum() < MILES_TOKENS:
            least = scale
        else:
            most = scale
    lengths = np.minimum(drawn * least, MILES_SLOT).astype(np.int64)
    policies = {
        "fixed": Policy(),
        "split samples": Policy(split_samples="auto"),
        "and backwards": Policy(split_samples="auto", backward="split"),
    }
    yield f"| model | padded slots | {' | '.join(policies)} |"
    yield "|---" * (2 + len(policies)) + "|"
    slot = MicroBatch((0,), MILES_SLOT, MILES_SLOT, MILES_SLOT**2, MILES_SLOT)
    for model, cost in costs.items():
        budget = MILES_SLOT // MILES_LAYOUT.cp
        case = Case("", lengths, budget, "", MILES_LAYOUT, model, cost)
        padded = StepPlan(((slot,) * MILES_SAMPLES,), MILES_SAMPLES, None, (), ())
        padded_s = _seconds(case, padded)
        cells = [f"{padded_s / case.equal_seconds:.2f}"]
        for policy in policies.values():
            ratio = run_ours(case, policy).ratio
            part = ratio * case.equal_seconds / padded_s
            cells.append(f"{ratio:.2f}, {part:.2f} of the padded time")
        yield f"| {model} | {' | '.join(cells)} |"
