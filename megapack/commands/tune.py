"""Rank layouts, budgets and rules for a number of GPUs by predicted tokens per second and GPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, get_args

from megapack.base.choices import Recompute
from megapack.commands.arguments import (
    add_json,
    add_lengths,
    add_memory_limit,
    add_policy,
    add_steps,
    integer,
    print_json,
    read_memory_limit,
    read_policy,
    read_table,
)
from megapack.commands.costs import CostOptions, add_model, read_costs
from megapack.commands.parser import Parser
from megapack.commands.tables import Column, fact_columns, print_columns
from megapack.cost.memory import GIB, MemoryModel
from megapack.cost.sizes import typical_length
from megapack.cost.stages import StageLayers
from megapack.errors import ConfigError, brief
from megapack.layout import CountRule, Layout
from megapack.plan.facts import columns_named, features_of
from megapack.policy import Backward, ContextParallel, SplitSamples

if TYPE_CHECKING:
    from megapack.outlook.tune import Candidate, Progress, Tuning

EXAMPLE = "megapack tune lengths.csv --gpus 64 --model Qwen3-4B --tp 1,2,4"
# Without a terminal, lines of progress are so many seconds apart.
_LINE_EVERY_S = 10.0
# What the shell says of a program that an interrupt ended.
_INTERRUPTED = 130


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
    for name, what, default in (
        ("tp", "tensor-parallel ranks", "1"),
        ("cp", "context-parallel ranks", "1"),
        ("ep", "expert-parallel ranks", "1"),
        ("etp", "tensor-parallel ranks of experts", "1"),
        ("pp", "pipeline stages", "all that divide"),
        ("vpp", "model chunks per stage", "all up to 8 that divide"),
    ):
        group.add_argument(
            f"--{name}",
            type=_integers,
            default=(1,) if default == "1" else None,
            metavar="N,...",
            help=f"{what} ({default})",
        )
    group.add_argument(
        "--uneven",
        action="store_true",
        help="also try splits of the layers that balance the embedding and the head",
    )
    group.add_argument(
        "--max-tokens-per-gpu",
        type=_integers,
        metavar="N,...",
        help="budgets (the longest sample and doublings of it; for cut samples less)",
    )
    for name, literal, what, tried in (
        ("count_rule", CountRule, "allowed M", ["legal"]),
        ("context_parallel", ContextParallel, "rows over DP ranks", ["fixed", "dynamic"]),
        ("split_samples", SplitSamples, "pieces of samples", ["off", "auto"]),
        ("backward", Backward, "weight gradients apart", ["joint", "split"]),
    ):
        group.add_argument(
            f"--{name.replace('_', '-')}",
            dest=f"{name}_choices",
            nargs="+",
            type=partial(_choices, get_args(literal)),
            default=[tried],
            metavar="CHOICE,...",
            help=f"{what}: {', '.join(get_args(literal))} ({','.join(tried)})",
        )
    _add_memory(parser)
    add_steps(parser)
    add_policy(parser, swept=True)
    add_model(parser, one_layout=False)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory (these change the values of --config)")
    add_memory_limit(group)
    group.add_argument(
        "--recompute", choices=get_args(Recompute), help="activations to recompute (none)"
    )
    group.add_argument(
        "--no-distributed-optimizer",
        action="store_true",
        help="each DP rank holds the whole optimizer state",
    )
    group.add_argument(
        "--tied-embeddings", action="store_true", help="the output matrix is the embedding's"
    )


def run(args: argparse.Namespace) -> int:
    """Sweep, rank and print; 1 if nothing fits, 130 after an interrupt."""
    table = read_table(args)
    costs = read_costs(args)
    memory = _memory_model(args, costs)
    memory_bytes = read_memory_limit(args)
    if args.top < 1:
        raise ConfigError(f"--top={args.top}; set 1 or more")
    # The planner's compiler takes a third of a second to import: report bad input before.
    from megapack.outlook.tune import Workload, tune
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
        cost_of=lambda layout, split: costs.pricing(layout, typical, split).cost,
        prefixes=table.prefixes,
    )
    space = Space(
        num_gpus=args.gpus,
        tp=args.tp,
        cp=args.cp,
        ep=args.ep,
        etp=args.etp,
        pp=args.pp,
        vpp=args.vpp,
        budgets=args.max_tokens_per_gpu,
        count_rules=_flat(args.count_rule_choices),
        context_parallel=_flat(args.context_parallel_choices),
        split_samples=_flat(args.split_samples_choices),
        backward=_flat(args.backward_choices),
        uneven=args.uneven,
        given_split=_given_split(costs),
        requires_split=bool(costs.split),
    )
    even = StageLayers.even(memory.sizes.num_layers, pp=1)
    basis = costs.pricing(Layout(), typical, even).basis
    with _ProgressBar() as bar:
        tuning = tune(work, space, num_whole=None if args.all else args.top, watch=bar.show)
    shown = (tuning.ranked if args.all else tuning.best_of_layouts)[: args.top]
    if args.json:
        print_json(_payload(tuning, shown, basis))
    else:
        _print(tuning, shown, basis, args, int(table.lengths.max()))
    if tuning.num_left:
        return _INTERRUPTED
    return 0 if tuning.ranked else 1


class _ProgressBar:
    """A bar with the best plan so far on a terminal, a line now and then elsewhere; on stderr."""

    def __enter__(self) -> Self:
        from tqdm import tqdm

        # disable=None: no bar where nobody looks.
        self._bar = tqdm(unit="plan", delay=1.0, leave=False, disable=None)
        self._next_line = time.monotonic() + _LINE_EVERY_S
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def show(self, progress: Progress) -> None:
        """Show the progress of a sweep, whose passes count from 1 each."""
        text = _best_text(progress.best)
        if not self._bar.disable:
            if progress.num_plans != self._bar.total:
                self._bar.reset(total=progress.num_plans)
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(progress.done - self._bar.n)
        elif time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            print(f"{progress.done} of {progress.num_plans} plans, {text}", file=sys.stderr)


def _best_text(best: Candidate | None) -> str:
    if best is None:
        return "nothing fits yet"
    return f"best so far {best.tokens_per_gpu_second:.0f} tokens/s/GPU: {best.layout.label}"


def _given_split(costs: CostOptions) -> Callable[[Layout], StageLayers] | None:
    """The split of the options or of --config, by layout; None if neither has one."""
    has_own = costs.config is not None and not costs.config.stage_layers.is_even
    return partial(_split_for, costs) if costs.split or has_own else None


def _split_for(costs: CostOptions, layout: Layout) -> StageLayers:
    split = costs.stage_layers(layout)
    if split is None:
        raise ConfigError(f"the split of --config is not for pp={layout.pp}, vpp={layout.vpp}")
    return split


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{brief(text)}; set integers separated by commas"
        ) from None


def _choices(choices: tuple[str, ...], text: str) -> list[str]:
    found = text.split(",")
    unknown = [part for part in found if part not in choices]
    if unknown:
        raise argparse.ArgumentTypeError(f"{brief(unknown[0])}; set some of {', '.join(choices)}")
    return found


def _flat(lists: Sequence[list[Any]]) -> tuple[Any, ...]:
    """Lists separated by commas, and these by spaces."""
    return tuple(one for found in lists for one in found)


def _memory_model(args: argparse.Namespace, costs: CostOptions) -> MemoryModel:
    if costs.sizes is None:
        raise ConfigError(
            "tune needs a model; set --model to its folder or config.json, or --config"
        )
    config = costs.config
    model = MemoryModel(sizes=costs.sizes) if config is None else config.memory_model()
    if args.tied_embeddings:
        model = replace(model, untied_embeddings=False)
    if args.recompute is not None:
        model = replace(model, recompute=args.recompute)
    if args.no_distributed_optimizer:
        model = replace(model, distributed_optimizer=False)
    return model


def _payload(tuning: Tuning, shown: Sequence[Candidate], basis: str) -> dict[str, Any]:
    return {
        "time_basis": basis,
        "num_layouts": tuning.num_layouts,
        "num_plans": tuning.num_plans,
        "num_fitting": tuning.num_fitting,
        "num_passed_over": tuning.num_passed_over,
        "num_left": tuning.num_left,
        "least_memory_bytes": tuning.least_memory.total,
        "refusal": tuning.refusal,
        "ranked": [
            {
                "tokens_per_gpu_second": candidate.tokens_per_gpu_second,
                "layout": asdict(candidate.layout),
                "stage_layers": candidate.stage_layers.num_layers,
                "max_tokens_per_gpu": candidate.max_tokens_per_gpu,
                "policy": candidate.policy.to_payload(),
                "share": candidate.share,
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
        f"{tuning.num_fitting} within {args.gpu_memory_gib:g} GiB per GPU"
    )
    if tuning.num_passed_over:
        print(
            f"{tuning.num_passed_over} more were not planned: the busiest stage of their layouts "
            f"is slower than the first {args.top}"
        )
    if tuning.num_left:
        print(f"interrupted, {tuning.num_left} plans before the end")
        if not tuning.ranked:
            return
    if not tuning.num_plans and tuning.refusal is not None:
        print(f"nothing has a legal plan: {tuning.refusal}")
        return
    if not tuning.ranked:
        print(
            f"nothing fits: the least is {tuning.least_memory}; set more --tp, --pp or --recompute "
            "full, --context-parallel dynamic, --split-samples auto, or leave out the longest "
            f"samples (up to {longest} tokens)"
        )
        return
    print_columns(_columns(shown), shown)
    parts = {candidate.share for candidate in shown} - {1}
    if parts:
        print(f"predicted by plans of a part of the samples and DP ranks, at least 1/{max(parts)}")
    for line in shown[0].report.lines():
        print(f"first, {line}")
    print(f"memory of the first: {shown[0].memory}")
    print(f"time {basis}")


def _columns(shown: Sequence[Candidate]) -> list[Column]:
    """The columns of the table; some only if a candidate that is shown needs them."""
    report = attrgetter("report")
    shares = [f.share for f in features_of(*map(report, shown)) if f.share.form]
    has_etp = any(candidate.layout.etp > 1 for candidate in shown)
    is_uneven = not all(candidate.stage_layers.is_even for candidate in shown)

    def size(name: str, is_shown: bool = True) -> Column:
        return Column(name, lambda c: f"{getattr(c.layout, name)}", is_shown)

    return [
        *map(size, ("dp", "tp", "pp", "vpp", "cp", "ep")),
        size("etp", has_etp),
        Column("context", lambda c: c.policy.context_parallel),
        Column("backward", lambda c: c.policy.backward),
        Column("budget", lambda c: f"{c.max_tokens_per_gpu}"),
        Column("rule", lambda c: c.policy.count_rule),
        *fact_columns([*columns_named("M", "fill"), *shares], report),
        *fact_columns(columns_named("bubble", "seconds"), report),
        Column("GiB", lambda c: f"{c.memory.total / GIB:.1f}"),
        *fact_columns(columns_named("tokens/s/GPU"), report),
        Column("layers", lambda c: f"{c.stage_layers}", is_uneven),
    ]
