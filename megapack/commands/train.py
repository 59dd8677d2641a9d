"""Train a GPT on rollouts, as one rank of a job that torchrun or Slurm started.

With --dry-run world=N: predict the run instead, without GPUs.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from megapack.base.garbage import no_collections
from megapack.commands.arguments import (
    ListConfigs,
    add_fields,
    add_json,
    add_memory_limit,
    add_overrides,
    given_fields,
    print_json,
    read_memory_limit,
)
from megapack.commands.costs import Pricing
from megapack.commands.tables import Column, fact_columns, print_columns
from megapack.config.load import load_config
from megapack.config.shipped import find_config
from megapack.cost.assumed import GpuSpeed
from megapack.cost.memory import GIB, GpuMemory
from megapack.errors import ConfigError, brief
from megapack.job.config.sections import TrainConfig
from megapack.plan.facts import columns_named
from megapack.ranks.interrupt import Interrupt

if TYPE_CHECKING:
    from megapack.cost.model import CostModel
    from megapack.job.dry_run import Batch, Prediction
    from megapack.layout import Layout
    from megapack.outlook.stats import PlanReport

EXAMPLE = """megapack train qwen3_4b_dp4_tp2_gpu8 --dry-run world=8
torchrun --nproc-per-node 4 -m megapack train gpt_tiny_dp2_pp2_vpp2_cpu"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a config, the values to change in it, and the options of a dry run."""
    parser.add_argument(
        "config", metavar="CONFIG", help="a YAML file, or the name of a config that megapack ships"
    )
    add_overrides(parser)
    parser.add_argument(
        "--list", action=ListConfigs, nargs=0, help="list the configs that megapack ships"
    )
    group = parser.add_argument_group("dry run: plan, simulate, predict memory; needs no GPU")
    group.add_argument("--dry-run", type=_world, metavar="world=N", help="as if on N GPUs")
    add_memory_limit(group)
    add_json(group)
    add_fields(group, GpuSpeed, skip=("is_measured",))


def run(args: argparse.Namespace) -> int:
    """Train until all ranks are done, or predict the run."""
    config = load_config(find_config(args.config), args.overrides, TrainConfig)
    if args.dry_run is not None:
        return _run_dry(args, config)
    if args.json:
        raise ConfigError("--json is for dry runs; set --dry-run world=N")
    for key, absent in config.absent_models.items():
        raise ConfigError(f"{key}: {absent}")
    with Interrupt(saves=config.train.save_interval is not None) as interrupt:
        with no_collections():
            from megapack.base.apex import warn_of_other_apex
            from megapack.base.gpu_environment import set_missing_variables
            from megapack.base.known_warnings import quiet_known_warnings
            from megapack.base.te import refuse_broken_te

            if config.device == "cuda":
                set_missing_variables(tp=config.layout.tp, cp=config.layout.cp)
            quiet_known_warnings()
            warn_of_other_apex()
            refuse_broken_te()
            # torch and Megatron-Core take seconds to import.
            from megapack.job.train.job import train
        train(config, interrupt)
    return 0


def _run_dry(args: argparse.Namespace, config: TrainConfig) -> int:
    """Predict and print; 1 if a stage does not fit into the memory of a GPU."""
    limit = read_memory_limit(args)
    # The planner's compiler takes a third of a second to import.
    from megapack.job.dry_run import check_start, first_batch, predict

    layout = check_start(config, args.dry_run)
    batch = first_batch(config)
    pricing, critic_cost = _costs(args, config, layout)
    prediction = predict(config, layout, batch, pricing.cost, critic_cost)
    fits = prediction.fullest_stage.total <= limit
    if args.json:
        print_json(_payload(config, batch, pricing, prediction) | {"fits": fits})
    else:
        _print(config, batch, pricing, prediction)
        _print_fit(prediction.fullest_stage, args.gpu_memory_gib, fits)
    return 0 if fits else 1


def _world(text: str) -> int:
    count = text.removeprefix("world=")
    if not count.isdecimal() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"{brief(text)}; set world=N, the number of GPUs")
    return int(count)


def _costs(
    args: argparse.Namespace, config: TrainConfig, layout: Layout
) -> tuple[Pricing, CostModel | None]:
    """The run's cost model, and a critic's, which has no vocabulary head.

    Without a measured one they are of a GPU with the options' speed; beside a measured one a critic
    has none of its own.
    """
    if config.plan.cost_model is not None:
        return Pricing(config.cost_model(layout), True, config.cost_basis), None
    speed = replace(config.assumed_speed, **given_fields(args, GpuSpeed))
    critic = config.cost_from_sizes(layout, speed, value_head=True)
    return Pricing(config.cost_from_sizes(layout, speed), True, speed.basis), critic


def _payload(
    config: TrainConfig, batch: Batch, pricing: Pricing, prediction: Prediction
) -> dict[str, Any]:
    layout = prediction.plan.layout
    return {
        "name": config.name,
        "num_gpus": layout.world_size,
        "layout": asdict(layout),
        "stage_layers": config.stage_layers.num_layers,
        "num_samples": batch.lengths.size,
        "lengths": batch.source,
        "plan_digest": prediction.plan.digest(),
        "steps": prediction.steps.totals(),
        "logprob_pass": _totals(prediction.logprobs),
        "num_logprob_passes": prediction.num_logprob_passes,
        "critic_steps": _totals(prediction.critic_steps),
        "value_pass": _totals(prediction.values),
        "seconds": prediction.seconds,
        "tokens_per_gpu_second": prediction.tokens_per_gpu_second,
        "time_basis": pricing.basis,
        "memory_bytes": [asdict(stage) | {"total": stage.total} for stage in prediction.memory],
    }


def _totals(report: PlanReport | None) -> dict[str, Any] | None:
    return None if report is None else report.totals()


def _print(config: TrainConfig, batch: Batch, pricing: Pricing, prediction: Prediction) -> None:
    layout = prediction.plan.layout
    lengths = batch.lengths
    print(f"{config.name}: {layout.world_size} GPUs, {layout.label}")
    if not config.stage_layers.is_even:
        split = config.stage_layers.to_text(config.model.mtp_num_layers)
        print(f"layers of the {layout.num_chunks} chunks: {split}")
    print(f"{lengths.size} samples, {lengths.sum()} tokens, the longest {lengths.max()}")
    print(batch.source)
    for absent in config.absent_models.values():
        print(absent)
    passes = [
        ("optimizer steps", 1, prediction.steps),
        ("log-probs", prediction.num_logprob_passes, prediction.logprobs),
        ("critic's steps", 1, prediction.critic_steps),
        ("values", 1, prediction.values),
    ]
    facts = columns_named("steps", "M", "rows", "fill", "padding", "bubble")
    columns = [
        Column("", lambda item: item[0]),
        Column("passes", lambda item: f"{item[1]}"),
        *fact_columns(facts, lambda item: item[2]),
        Column("seconds", lambda item: f"{item[1] * item[2].seconds:.4g}"),
    ]
    print_columns(columns, [item for item in passes if item[2] is not None])
    for line in prediction.steps.lines():
        print(line)
    speed = prediction.tokens_per_gpu_second
    print(f"{speed * layout.world_size:.4g} tokens/s, {speed:.4g} tokens/s/GPU")
    print(f"time {pricing.basis}; optimizer and data are not counted")

    def part(name: str) -> Column:
        return Column(name, lambda stage: f"{getattr(stage, name) / GIB:.1f}")

    stage = Column("GiB of a GPU, stage", lambda stage: f"{stage.stage}")
    print_columns([stage, *map(part, [*prediction.memory[0].parts, "total"])], prediction.memory)


def _print_fit(fullest: GpuMemory, limit_gib: float, fits: bool) -> None:
    total = f"stage {fullest.stage} takes {fullest.total / GIB:.1f} of {limit_gib:g} GiB"
    if fits:
        print(f"fits: {total}")
    else:
        print(
            f"does not fit: {total}; set more layout.tp or layout.pp, model.recompute=full, "
            "optim.distributed_optimizer=true, or less plan.max_tokens_per_gpu"
        )
