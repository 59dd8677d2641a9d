"""One step on the same samples with the rows of other schedulers and with ours, by our adapter.

Before anything is measured, the seconds and bytes of each way are predicted and written. Then the
ways of a layout run in turn, the layouts one after another in one job: to start it takes as long as
to measure a layout. A way that ends the job is left out of the next one.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megapack import CostModel, Layout, Plan, Policy, StepPlan, build_dp_schedule
from megapack.base.arrays import Ints
from megapack.config.cost_file import read_cost
from megapack.config.load import load_config
from megapack.cost.calibration import Calibration
from megapack.errors import PlanError
from megapack.job.config.sections import TrainConfig
from megapack.outlook.baselines import Ranks, sample_work
from megapack.outlook.stats import carried, gathered_tokens
from megapack.pipeline.simulator import simulate_planned
from tests.made_rows import made_row
from tools.benching.gpu_ways import Sample
from tools.benching.planner_cases import OURS
from tools.benching.planner_peers import BASELINES
from tools.nccl.exact import progress_of
from tools.nccl.found import FAILED, NOT_RUN, PASSED, Found
from tools.nccl.layouts import layout_name
from tools.nccl.measured import read_config, read_results, samples, settings, trace, write_task
from tools.nccl.session import Session
from tools.nccl.widths import cost_file

MODULE = "tools.nccl.on_ranks.race"
PEERS = {"Megatron-LM": "next_fit", "slime": "first_fit_flops", "verl": "kk_per_rank"}
"""Whose rows, and the strategy that makes them."""
FIRST = "Megatron-LM"
"""The way that the line compares with."""
PREDICTIONS = "race_predictions.json"
_TOKENS_PER_RANK, _TINY_TOKENS_PER_RANK = 16384, 512
_ROUNDS = 7
# Seconds before the part's end in which the last steps may still run, and those of a job that
# would measure nothing.
_END_S, _LEAST_S = 8.0, 40.0
# Relative, of the gradient's norm in bf16: rows differ, and with them the roundings.
_LIMIT = 0.02
_GIB = 2**30


class Way(NamedTuple):
    """How the samples run, and what is predicted of that."""

    plan: Plan
    seconds: float
    """Of the simulated schedule: not the reduction of gradients, nor packing."""
    bytes: int
    """Of weights, gradients, activations and head on the fullest GPU."""


def layouts(ranks: int) -> list[Layout]:
    """Data parallelism alone; long pipelines; two stages of two chunks."""
    found = [Layout(dp=ranks)]
    if ranks >= 4:
        found.append(Layout(dp=ranks // 4, pp=4))
    return [*found, Layout(dp=ranks // 2, pp=2, vpp=2)]


def cost_of(config: TrainConfig, layout: Layout, measured: Path) -> CostModel:
    """The cost model of a layout: measured on this GPU on one stage, or from sizes.

    Args:
        measured: the file of `widths`; it counts if it is of such a GPU.
    """
    from_sizes = config.cost_from_sizes(layout)
    if not is_measured(measured):
        return from_sizes
    whole = read_cost(measured, Layout(dp=layout.world_size))
    return replace(
        whole,
        fixed=whole.fixed / layout.num_chunks,
        cp_fixed=whole.cp_fixed / layout.num_chunks,
        stage_weights=from_sizes.stage_weights,
        square_factors=from_sizes.square_factors,
    )


def is_measured(path: Path) -> bool:
    """Whether the file of `widths` is there, and of such a GPU."""
    if not path.exists():
        return False
    origin = load_config(path, [], Calibration).origin
    return origin is not None and origin.device == torch.cuda.get_device_name()


def ways(config: TrainConfig, lengths: Ints, layout: Layout, cost: CostModel) -> dict[str, Way]:
    """The plans of the peers' rows and ours, with what is predicted of each."""
    budget = config.plan.max_tokens_per_gpu
    assert budget is not None
    work = sample_work(lengths, cost)
    plans = {
        f"{name} ({strategy})": plan_of(
            BASELINES[strategy](lengths, work, layout, budget), lengths, layout, budget
        )
        for name, strategy in PEERS.items()
    }
    for name, policy in OURS.items():
        if name == "dynamic CP" and layout.dp == 1:
            continue  # there is no second rank to share a row with
        plans[name] = build_dp_schedule(
            lengths, layout=layout, max_tokens_per_gpu=budget, cost=cost, policy=policy
        )
    return {name: predicted(config, plan, cost) for name, plan in plans.items()}


def plan_of(ranks: Ranks, lengths: Ints, layout: Layout, budget: int) -> Plan:
    """The plan of a peer's rows. A soft budget that it exceeds is as large as its largest row."""
    tokens = lengths.tolist()
    rows = tuple(tuple(made_row(row, tokens, layout) for row in rank) for rank in ranks)
    several = [mb.padded_tokens for rank in rows for mb in rank if len(mb.samples) > 1]
    group = layout.group_size if layout.vpp > 1 else None
    return Plan(
        steps=(StepPlan(rows, len(rows[0]), group, tuple(range(len(tokens))), ()),),
        layout=layout,
        policy=Policy(),
        max_tokens_per_gpu=max([budget, *several]),
        micro_batch_size=None,
        num_samples=len(tokens),
        rollout_ids=None,
    )


def predicted(config: TrainConfig, plan: Plan, cost: CostModel) -> Way:
    """A plan with its seconds and bytes."""
    layout, (step,) = plan.layout, plan.steps
    simulation = simulate_planned(plan, step, cost)
    held = {
        "live_tokens": simulation.peak_live_tokens,
        "row_tokens": max(mb.row_tokens / (layout.cp * mb.width) for mb in step.microbatches),
        "gathered_tokens": gathered_tokens(plan),
        "carried": carried(plan),
        "wide_sizes": len(plan.counts.wide_rows),
    }
    model = config.memory_model()
    stages = (model.stage(layout, stage, **held) for stage in range(layout.pp))
    # NCCL's buffers are not torch's, and a race has no optimizer.
    sums = (one.parameters + one.gradients + one.activations + one.head for one in stages)
    return Way(plan, simulation.makespan, max(sums))


def run(session: Session) -> Found:
    """Predict, then measure each layout."""
    overrides = settings(session)
    config = read_config(overrides)
    per_rank = _TINY_TOKENS_PER_RANK if session.rehearsed else _TOKENS_PER_RANK
    # Two ranks get more each: the trace's samples are long.
    picked = samples(config, max(session.ranks, 4) * per_rank)
    lengths = np.array([sum(sample) for sample in picked])
    found = Found()
    races: dict[str, dict[str, Way]] = {}
    for layout in layouts(session.ranks):
        cost = cost_of(config, layout, cost_file(session))
        try:
            races[layout_name(layout)] = ways(config, lengths, layout, cost)
        except PlanError as error:
            found.failures.append(f"{layout_name(layout)}: {error}")
    basis = f"of {cost_file(session).name}" if is_measured(cost_file(session)) else "from sizes"
    predictions = {
        name: {way: {"seconds": one.seconds, "bytes": one.bytes} for way, one in race.items()}
        for name, race in races.items()
    }
    (session.out / PREDICTIONS).write_text(json.dumps(predictions, indent=1), encoding="utf-8")
    done = _measure(session, races, overrides, picked, found)
    notes = []
    for name, race in races.items():
        own = {way: done[f"{name} {way}"] for way in race if f"{name} {way}" in done}
        for way, case in judged(race, own, int(lengths.sum())).items():
            found.cases[f"{name} {way}"] = case
            if case["status"] == FAILED:
                found.failures.append(f"{name} {way}: {case['line']}")
        notes += _compared(name, own)
    found.figures = {"samples": len(picked), "tokens": int(lengths.sum())}
    source = "generated lengths" if (path := trace()) is None else path.stem
    found.line = "; ".join(
        [
            f"tokens/s over {FIRST}'s: {', '.join(notes) or 'none'}",
            f"{len(picked)} samples of {source}",
            f"predicted before by the cost model {basis} ({PREDICTIONS})",
        ]
    )
    return found


def _measure(
    session: Session,
    races: dict[str, dict[str, Way]],
    overrides: list[str],
    picked: Sequence[Sample],
    found: Found,
) -> dict[str, dict[str, Any]]:
    """Figures by layout and way; of a way that ended a job its "error"."""
    done: dict[str, dict[str, Any]] = {}
    names = [f"{name} {way}" for name, race in races.items() for way in race]
    number = 0
    while (missing := set(names) - set(done)) and (not number or session.left_s > _LEAST_S):
        number += 1
        out = session.out / "ranks" / f"race{number}_found.json"
        out.unlink(missing_ok=True)
        plans = {
            name: {
                way: one.plan.to_json() for way, one in race.items() if f"{name} {way}" in missing
            }
            for name, race in races.items()
        }
        task = write_task(
            session,
            f"job{number}",
            time.monotonic() + max(1.0, session.left_s - _END_S),
            settings=overrides,
            samples=picked,
            plans={name: own for name, own in plans.items() if own},
            rounds=2 if session.rehearsed else _ROUNDS,
        )
        ended = session.job(f"job{number}", MODULE, task, out).ended
        done |= {name: own for name, own in read_results(out).items() if own["seconds"]}
        if ended.is_good:
            break
        at = progress_of(ended.logs)
        if at not in missing or ended.limit.startswith("ran past"):
            found.failures.append(ended.reason)
            break
        done[at] = {"error": ended.reason}
    return done


def judged(
    race: dict[str, Way], done: dict[str, dict[str, Any]], tokens: int
) -> dict[str, dict[str, Any]]:
    """Each way's predictions beside what was measured, and whether its gradient is the others'."""
    norms = [own["gradient_norm"] for own in done.values() if "error" not in own]
    middle = statistics.median(norms) if norms else 0.0
    cases: dict[str, dict[str, Any]] = {}
    for name, way in race.items():
        own = done.get(name, {})
        case = {"predicted_s": way.seconds, "predicted_gib": way.bytes / _GIB, "status": NOT_RUN}
        if "error" in own:
            case |= {"status": FAILED, "line": own["error"]}
        elif own:
            seconds = statistics.median(own["seconds"])
            case |= {
                "measured_s": seconds,
                "measured_of_predicted": seconds / way.seconds,
                "tokens_per_s": round(tokens / seconds),
                "measured_gib": own["bytes"] / _GIB,
                "rounds": len(own["seconds"]),
                "gradient_norm": own["gradient_norm"],
                "status": PASSED,
            }
            if not abs(own["gradient_norm"] - middle) <= _LIMIT * middle:
                text = f"gradient norm {own['gradient_norm']:.4g}, of the ways {middle:.4g}"
                case |= {"status": FAILED, "line": text}
        cases[name] = case
    return cases


def _compared(name: str, done: dict[str, dict[str, Any]]) -> list[str]:
    """Our tokens per second over the first peer's."""
    seconds = {
        way.partition(" (")[0]: statistics.median(own["seconds"])
        for way, own in done.items()
        if "error" not in own
    }
    ours = [way for way in OURS if way in seconds]
    if FIRST not in seconds:
        return []
    return [f"{name} {way} {seconds[FIRST] / seconds[way]:.2f}" for way in ours]
