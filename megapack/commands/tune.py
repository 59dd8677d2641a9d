"""Rank layouts, budgets and rules for a number of GPUs by predicted tokens per second and GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, get_args

from megapack.base.choices import Recompute
from megapack.commands.arguments import (
    add_json,
    add_lengths,
    add_memory_limit,
    add_policy,
    add_steps,
    integer,
    listed,
    print_json,
    read_memory_limit,
    read_policy,
    read_table,
)
from megapack.commands.costs import add_model, read_costs
from megapack.commands.parser import Parser
from megapack.commands.tables import Column, fact_columns, print_columns
from megapack.cost.memory import GIB
from megapack.cost.sizes import typical_length
from megapack.cost.stages import StageLayers
from megapack.errors import ConfigError, PlanError
from megapack.layout import Layout
from megapack.plan.facts import columns_named, features_of
from megapack.policy import Backward, ContextParallel, SplitSamples

if TYPE_CHECKING:
    from megapack.job.config.sections import TrainConfig
    from megapack.outlook.tune import Candidate, Trial, Tuning, Workload
    from megapack.outlook.tune_space import Space

EXAMPLE = "megapack tune lengths.csv --gpus 64 --model Qwen3-4B"
# Fields of `Space`: their option, what it is, its values (None: integers), and the default.
_TRIED: dict[str, tuple[str, str, Any, tuple[Any, ...] | None]] = {
    "tp": ("--tp", "tensor-parallel ranks (all that divide 8 GPUs)", None, None),
    "cp": ("--cp", "context-parallel ranks (more for longer samples)", None, None),
    "ep": ("--ep", "expert-parallel ranks (all that divide)", None, None),
    "etp": ("--etp", "tensor-parallel ranks of experts (all that divide)", None, None),
    "recompute": ("--recompute", "activations to recompute", Recompute, get_args(Recompute)),
    "pp": ("--pp", "pipeline stages (all that divide)", None, None),
    "vpp": ("--vpp", "model chunks per stage (all up to 8 that divide)", None, None),
    "budgets": (
        "--max-tokens-per-gpu",
        "budgets (the longest sample and doublings of it; for cut samples less)",
        *(None, None),
    ),
    "context_parallel": (
        *("--context-parallel", "rows over DP ranks", ContextParallel),
        ("fixed", "dynamic"),
    ),
    "split_samples": ("--split-samples", "pieces of samples", SplitSamples, ("off", "auto")),
    "backward": ("--backward", "weight gradients apart", Backward, ("joint", "split")),
}


def add_arguments(parser: Parser) -> None:
    """Add LENGTHS, the number of GPUs, what to try, and the model."""
    add_lengths(parser)
    parser.add_argument(
        "--gpus", type=integer, required=True, metavar="N", help="number of GPUs of the layouts"
    )
    parser.add_argument("--top", type=integer, default=10, metavar="N", help="lines to print (10)")
    parser.add_argument(
        "--all", action="store_true", help="every plan that fits, not only each layout's best"
    )
    add_json(parser)
    group = parser.add_argument_group("what to try: lists separated by commas")
    for field, (option, what, literal, default) in _TRIED.items():
        choices = get_args(literal)
        group.add_argument(
            option,
            # Not by its own name, which is the policy's.
            dest=f"tried_{field}",
            type=partial(listed, choices),
            default=default,
            metavar="CHOICE,..." if choices else "N,...",
            help=f"{what}: {', '.join(choices)} ({','.join(default or ())})" if choices else what,
        )
    group.add_argument(
        "--uneven",
        action="store_true",
        help="also try splits of the layers that balance the embedding and the head",
    )
    memory = parser.add_argument_group("memory")
    add_memory_limit(memory)
    add_steps(parser)
    add_policy(parser, skip=_TRIED)
    add_model(parser, one_layout=False)


def run(args: argparse.Namespace) -> int:
    """Sweep, rank and print; 1 if nothing fits."""
    table = read_table(args)
    costs = read_costs(args, has_images=table.images is not None)
    if costs.config is None:
        raise ConfigError(
            "tune needs a model; set --model to its folder or config.json, or --config"
        )
    memory = costs.config.memory_model()
    memory_bytes = read_memory_limit(args)
    if args.top < 1:
        raise ConfigError(f"--top={args.top}; set 1 or more")
    # The planner's compiler takes a third of a second to import: report bad input before.
    from megapack.outlook.tune import Candidate, Workload
    from megapack.outlook.tune_space import Space

    typical = typical_length(table.lengths)
    work = Workload(
        lengths=table.lengths,
        rollout_ids=table.rollout_ids,
        colocate_ids=table.colocate_ids,
        global_batch_size=args.global_batch_size,
        num_steps=args.num_steps,
        policy=read_policy(args),
        memory=memory,
        memory_bytes=memory_bytes,
        cost_of=lambda setup: (
            costs.pricing(setup.layout, typical, setup.stage_layers, recompute=setup.recompute).cost
        ),
        own=_own_trial(costs.config, args.gpus) if args.config is not None else None,
        prefixes=table.prefixes,
        images=table.images,
        adapter_ids=table.adapter_ids,
    )
    space = Space(
        num_gpus=args.gpus,
        uneven=args.uneven,
        given_split=costs.uneven_split,
        **{field: getattr(args, f"tried_{field}") for field in _TRIED},
    )
    split = StageLayers.even(memory.sizes.num_layers, pp=1)
    basis = costs.pricing(Layout(), typical, split).basis
    num_best = None if args.all else args.top
    tuning = _tuning(work, space, num_best)
    if not (tuning.ranked or memory.distributed_optimizer or memory.muon):
        # The default of a config, with which few models fit.
        work = replace(work, memory=replace(memory, distributed_optimizer=True))
        tuning = _tuning(work, space, num_best)
    shown = list((tuning.ranked if args.all else tuning.best_of_layouts)[: args.top])
    own, is_split = tuning.own, work.memory.distributed_optimizer
    if shown and isinstance(own, Candidate) and not any(one is own for one in shown):
        shown.append(own)
    if args.json:
        print_json(_payload(tuning, shown, basis) | {"distributed_optimizer": is_split})
        return 0 if shown else 1
    _print(tuning, shown, basis, args, int(table.lengths.max()))
    if isinstance(own, PlanError):
        print(f"the config's own layout has no legal plan: {own}")
    if is_split and not memory.distributed_optimizer:
        print("optim.distributed_optimizer=true: with false, as in the config, nothing fits")
    elif not (is_split or memory.muon):
        print("optim.distributed_optimizer=false, as in the config; true takes less memory")
    return 0 if shown else 1


def _own_trial(config: TrainConfig, num_gpus: int) -> Trial | None:
    """What a config sets; None if it does not fill the GPUs, or counts samples, not tokens."""
    from megapack.outlook.tune import Trial
    from megapack.outlook.tune_space import Kind, Setup

    try:
        layout = config.checked_layout(num_gpus)
    except ConfigError:
        return None
    policy, budget = config.row_plan.to_policy(), config.plan.max_tokens_per_gpu
    if budget is None:
        return None
    kind = Kind(policy.context_parallel, policy.split_samples, policy.backward)
    return Trial(Setup(layout, config.stage_layers, config.model.recompute), kind, budget, policy)


def _tuning(work: Workload, space: Space, num_best: int | None) -> Tuning:
    """Sweep, and say how far it is: to a terminal each second, to a log every ten."""
    from tqdm import tqdm

    from megapack.outlook.tune import tune

    often = {"delay": 1.0, "mininterval": 1.0 if sys.stderr.isatty() else 10.0, "miniters": 1}
    with tqdm(bar_format="{n} plans, {desc}; {elapsed}", leave=False, **often) as bar:

        def watch(num_tried: int, num_layouts: int) -> None:
            bar.desc = f"{num_tried} of at most {num_layouts} layouts"
            bar.update()

        return tune(work, space, num_best=num_best, watch=watch)


def _payload(tuning: Tuning, shown: Sequence[Candidate], basis: str) -> dict[str, Any]:
    return {
        "time_basis": basis,
        "num_layouts": tuning.num_layouts,
        "num_plans": tuning.num_plans,
        "num_fitting": len(tuning.ranked),
        "num_passed_over": tuning.num_passed_over,
        "least_memory_bytes": tuning.least_memory and tuning.least_memory.total,
        "refusal": tuning.refusal,
        "ranked": [
            {
                "tokens_per_gpu_second": candidate.tokens_per_gpu_second,
                "is_config": candidate is tuning.own,
                "layout": asdict(candidate.layout),
                "stage_layers": candidate.setup.stage_layers.num_layers,
                "recompute": candidate.setup.recompute,
                "max_tokens_per_gpu": candidate.max_tokens_per_gpu,
                "policy": candidate.policy.to_payload(),
                "forecast": candidate.report.totals(),
                "memory_bytes": asdict(candidate.memory) | {"total": candidate.memory.total},
            }
            for candidate in shown
        ],
    }


def _print(
    tuning: Tuning, shown: Sequence[Candidate], basis: str, args: argparse.Namespace, longest: int
) -> None:
    print(
        f"{tuning.num_layouts} layouts of {args.gpus} GPUs, {tuning.num_plans} plans, "
        f"{len(tuning.ranked)} within {args.gpu_memory_gib:g} GiB per GPU"
    )
    if tuning.num_passed_over:
        print(
            f"{tuning.num_passed_over} were not planned: their busiest stage alone is slower "
            f"than the first {args.top}"
        )
    if not tuning.num_plans and tuning.refusal is not None:
        print(f"nothing has a legal plan: {tuning.refusal}")
        return
    if not tuning.ranked:
        print(
            f"nothing fits: the least is {tuning.least_memory}; set more --gpus, leave out options "
            f"that limit what is tried, or the longest samples (up to {longest} tokens)"
        )
        return
    print_columns(_columns(shown, tuning.own, args.gpu_memory_gib * GIB), shown)
    for line in shown[0].report.lines():
        print(f"first, {line}")
    print(f"memory of the first: {shown[0].memory}")
    print(f"time {basis}")


def _columns(shown: Sequence[Candidate], own: Any, limit: float) -> list[Column]:
    """The columns of the table; some only if a candidate that is shown needs them."""
    report = attrgetter("report")
    shares = [f.share for f in features_of(*map(report, shown)) if f.share.form]
    has_etp = any(candidate.layout.etp > 1 for candidate in shown)
    is_uneven = not all(candidate.setup.stage_layers.is_even for candidate in shown)

    def mark(candidate: Candidate) -> str:
        is_too_large = candidate.memory.total > limit
        return ("the config's own" + ", too large" * is_too_large) * (candidate is own)

    def size(name: str, is_shown: bool = True) -> Column:
        return Column(name, lambda c: f"{getattr(c.layout, name)}", is_shown)

    return [
        *map(size, ("dp", "tp", "pp", "vpp", "cp", "ep")),
        size("etp", has_etp),
        Column("context", lambda c: c.policy.context_parallel),
        Column("backward", lambda c: c.policy.backward),
        Column("recompute", lambda c: c.setup.recompute),
        Column("budget", lambda c: f"{c.max_tokens_per_gpu}"),
        *fact_columns([*columns_named("M", "fill"), *shares], report),
        *fact_columns(columns_named("bubble", "seconds"), report),
        Column("GiB", lambda c: f"{c.memory.total / GIB:.1f}"),
        *fact_columns(columns_named("tokens/s/GPU"), report),
        Column("layers", lambda c: f"{c.setup.stage_layers}", is_uneven),
        Column("", mark, any(map(mark, shown))),
    ]
