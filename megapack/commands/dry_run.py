"""`megapack train CONFIG --dry-run world=N`: the run on paper, printed."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from megapack.commands.arguments import (
    add_fields,
    add_json,
    add_memory_limit,
    print_json,
    print_table,
    read_memory_limit,
)
from megapack.commands.costs import GpuSpeed, Pricing, price_by_sizes
from megapack.config.sections import TrainConfig
from megapack.cost.memory import GIB, GpuMemory
from megapack.errors import brief

if TYPE_CHECKING:
    from megapack.layout import Layout
    from megapack.outlook.dry_run import Batch, Prediction
    from megapack.outlook.stats import PlanReport

# Of an H100 SXM in bf16, without sparsity.
_PEAK_TFLOPS = 989.4
_SIZES = ("dp", "tp", "pp", "vpp", "cp", "ep")


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """--dry-run and what it assumes."""
    group = parser.add_argument_group("dry run: plan, simulate, predict memory; needs no GPU")
    group.add_argument("--dry-run", type=_world, metavar="world=N", help="as if on N GPUs")
    add_memory_limit(group)
    add_json(group)
    add_fields(group, GpuSpeed, peak_tflops=_PEAK_TFLOPS)


def run_dry(args: argparse.Namespace, config: TrainConfig) -> int:
    """Predict and tell; exit code 1 where a stage does not fit."""
    limit = read_memory_limit(args)
    # The planner's compiler takes a third of a second to import.
    from megapack.outlook.dry_run import check_start, first_batch, predict

    layout = check_start(config, args.dry_run)
    batch = first_batch(config)
    pricing = _pricing(args, config, layout, batch)
    found = predict(config, layout, batch, pricing.cost)
    fits = found.fullest_stage.total <= limit
    if args.json:
        print_json(_payload(config, batch, pricing, found) | {"fits": fits})
    else:
        _print(config, batch, pricing, found)
        _print_fit(found.fullest_stage, args.gpu_memory_gib, fits)
    return 0 if fits else 1


def _world(text: str) -> int:
    name, _, count = text.partition("=")
    if name != "world" or not count.isdecimal() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"{brief(text)}; set world=N, the number of GPUs")
    return int(count)


def _pricing(
    args: argparse.Namespace, config: TrainConfig, layout: Layout, batch: Batch
) -> Pricing:
    measured = config.plan.read_cost(layout)
    if measured is not None:
        return Pricing(measured, True, f"of the cost model {config.plan.cost_model}")
    sizes = config.model.to_sizes()
    typical, recompute = batch.typical_length, config.model.recompute
    return price_by_sizes(args, sizes, layout, typical, recompute=recompute)


def _payload(
    config: TrainConfig, batch: Batch, pricing: Pricing, found: Prediction
) -> dict[str, Any]:
    layout = found.plan.layout
    return {
        "name": config.name,
        "num_gpus": layout.world_size,
        "layout": asdict(layout),
        "num_samples": batch.lengths.size,
        "lengths": batch.source,
        "plan_digest": found.plan.digest(),
        "steps": found.steps.totals(),
        "logprob_pass": None if found.logprobs is None else found.logprobs.totals(),
        "num_logprob_passes": found.num_logprob_passes,
        "seconds": found.seconds,
        "tokens_per_gpu_second": found.tokens_per_gpu_second,
        "time_basis": pricing.basis,
        "memory_bytes": [asdict(stage) | {"total": stage.total} for stage in found.memory],
    }


def _print(config: TrainConfig, batch: Batch, pricing: Pricing, found: Prediction) -> None:
    layout, lengths = found.plan.layout, batch.lengths
    sizes = " ".join(f"{name}={getattr(layout, name)}" for name in _SIZES)
    print(f"{config.name}: {layout.world_size} GPUs, {sizes}")
    print(f"{lengths.size} samples, {lengths.sum()} tokens, the longest {lengths.max()}")
    print(batch.source)
    rows = [["", "passes", "steps", "M", "rows", "fill", "padding", "bubble", "seconds"]]
    rows.append(_cells("optimizer steps", 1, found.steps))
    if found.logprobs is not None:
        rows.append(_cells("log-probs", found.num_logprob_passes, found.logprobs))
    print_table(rows)
    speed = found.tokens_per_gpu_second
    print(f"{speed * layout.world_size:.4g} tokens/s, {speed:.4g} tokens/s/GPU")
    print(f"time {pricing.basis}; optimizer and data are not counted")
    parts = [field.name for field in fields(GpuMemory)][1:]
    table = [["GiB of a GPU, stage", *parts, "total"]]
    table += [[str(stage.stage), *_gib(stage, [*parts, "total"])] for stage in found.memory]
    print_table(table)


def _cells(name: str, num_passes: int, result: PlanReport) -> list[str]:
    return [
        name,
        str(num_passes),
        str(result.num_steps),
        result.microbatch_span,
        str(result.num_rows),
        "-" if result.fill is None else f"{result.fill:.1%}",
        f"{result.padding_fraction:.1%}",
        f"{result.bubble_fraction:.1%}",
        f"{num_passes * result.seconds:.4g}",
    ]


def _gib(stage: GpuMemory, parts: list[str]) -> list[str]:
    return [f"{getattr(stage, part) / GIB:.1f}" for part in parts]


def _print_fit(fullest: GpuMemory, limit_gib: float, fits: bool) -> None:
    total = f"stage {fullest.stage} takes {fullest.total / GIB:.1f} of {limit_gib:g} GiB"
    if fits:
        print(f"fits: {total}")
    else:
        print(
            f"does not fit: {total}; set more layout.tp or layout.pp, model.recompute=full, "
            "optim.distributed_optimizer=true, or less plan.max_tokens_per_gpu"
        )
