"""Options of the cost model: a file, a model's sizes and a GPU's speed, or an assumption."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megapack.base.choices import Recompute, RecomputeModule
from megapack.commands.arguments import add_fields, given_fields
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.model import CostModel
from megapack.cost.sizes import ModelSizes
from megapack.cost.stages import LayerSplit, StageLayers
from megapack.errors import ConfigError
from megapack.layout import Layout
from megapack.plan.plan import Plan

if TYPE_CHECKING:
    from megapack.config.sections import TrainConfig
    from megapack.view.records import RunRecords

# The cost model without options, in tokens: docs/planner.md's for a 7B dense model. A sample of
# 49,152 tokens costs twice its tokens, and each micro-batch 256 tokens more.
_FIXED_TOKENS = 256
_TOKENS_PER_SQUARE = 49152


@dataclass(frozen=True)
class Pricing:
    """A cost model and its basis."""

    cost: CostModel
    in_seconds: bool
    """False: the unit is the work of one token."""
    basis: str
    """Where the cost model comes from, one line to print."""


def add_costs(parser: argparse.ArgumentParser, *, one_layout: bool = True) -> None:
    """Add --cost, --config, the model's sizes, and the GPU's speed.

    Args:
        one_layout: the command uses one layout, so that a cost model measured on it can be given.
    """
    group = parser.add_argument_group("seconds")
    if one_layout:
        group.add_argument(
            "--cost", metavar="FILE", help="a cost model in YAML, measured on this layout"
        )
    group.add_argument("--config", metavar="CONFIG", help="take sizes from its model section, or")
    add_fields(group, ModelSizes)
    add_fields(group, GpuSpeed)
    add_fields(
        parser.add_argument_group("layers on pipeline stages (of --config, or equally many)"),
        LayerSplit,
    )


def read_config(args: argparse.Namespace) -> TrainConfig | None:
    """The config of --config."""
    if args.config is None:
        return None
    from megapack.config.load import find_config, load_config
    from megapack.config.sections import TrainConfig

    return load_config(find_config(args.config), [], TrainConfig)


def read_sizes(args: argparse.Namespace) -> ModelSizes | None:
    """Sizes of --config or of the flags; None if neither is given.

    Raises:
        ConfigError: both are given, or some of the sizes are missing.
    """
    given = given_fields(args, ModelSizes)
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    config = read_config(args)
    if config is not None:
        if given:
            raise ConfigError(f"--config and {flags} given; set the config or the sizes")
        sizes = config.model.to_sizes()
        # Only seconds are priced by these sizes; `memory_model` knows the head itself.
        return replace(sizes, vocab_size=1) if config.objective.has_value_head else sizes
    if not given:
        return None
    needed = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
    missing = [f"--{name.replace('_', '-')}" for name in needed if name not in given]
    if missing:
        raise ConfigError(f"{flags} given without {', '.join(missing)}; set these too")
    return ModelSizes(**given)


def read_stage_layers(args: argparse.Namespace, layout: Layout) -> StageLayers | None:
    """The split of the options, or else of --config if it is for this pp and vpp; None: neither.

    Raises:
        ConfigError: options without a model, or a split that does not add up.
    """
    given = given_fields(args, LayerSplit)
    config = read_config(args)
    sizes = read_sizes(args)
    if given and sizes is None:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags} given without a model; set --config or its sizes")
    if sizes is None:
        return None
    if given:
        mtp = 0 if config is None else config.model.mtp_num_layers
        return LayerSplit(**given).stage_layers(
            sizes.num_layers, pp=layout.pp, vpp=layout.vpp, num_mtp_layers=mtp
        )
    if config is None or (config.layout.pp, config.layout.vpp) != (layout.pp, layout.vpp):
        return None
    return config.stage_layers


def read_pricing(
    args: argparse.Namespace,
    layout: Layout,
    mean_length: float,
    stage_layers: StageLayers | None = None,
) -> Pricing:
    """The cost model of the options.

    Args:
        mean_length: length of a typical sample, the sum of squared lengths over their sum.
        stage_layers: layers of each chunk; None: see `read_stage_layers`.

    Raises:
        ConfigError: options that exclude each other, or an invalid cost model file.
    """
    sizes = read_sizes(args)
    split = stage_layers or read_stage_layers(args, layout)
    if getattr(args, "cost", None) is not None:
        if sizes is not None or args.peak_tflops is not None:
            raise ConfigError("--cost and a model's sizes or --peak-tflops given; set one of them")
        from megapack.config.cost_file import read_cost

        cost = read_cost(args.cost, layout)
        if not (cost.fixed or cost.per_token or cost.per_token_sq or cost.per_sample):
            raise ConfigError(f"{args.cost}: a micro-batch takes 0 seconds; set per_token")
        return Pricing(cost, True, f"of the cost model {args.cost}")
    if sizes is not None:
        speed = GpuSpeed(**given_fields(args, GpuSpeed))
        if speed.peak_tflops is None:
            raise ConfigError(
                "a model without a GPU's speed; set --peak-tflops, 989 for an H100 in bf16"
            )
        cost = cost_from_sizes(
            sizes,
            layout,
            speed,
            recompute=_recompute(args),
            recompute_modules=_recompute_modules(args),
            mean_length=mean_length,
            stage_layers=split,
        )
        return Pricing(cost, True, speed.basis)
    if args.peak_tflops is not None:
        raise ConfigError(
            f"--peak-tflops={args.peak_tflops:g} without a model; set --config or its sizes"
        )
    cost = CostModel(
        fixed=_FIXED_TOKENS / layout.num_chunks,
        per_token=1.0,
        per_token_sq=1 / _TOKENS_PER_SQUARE,
    )
    basis = (
        f"assumed: a micro-batch costs {_FIXED_TOKENS} tokens more than it has, a squared token "
        f"1/{_TOKENS_PER_SQUARE} of a token; give --cost, or --config and --peak-tflops, for "
        "seconds"
    )
    return Pricing(cost, False, basis)


def plan_pricing(args: argparse.Namespace, plan: Plan) -> Pricing:
    """`read_pricing` for the samples of a plan."""
    microbatches = (mb for step in plan.steps for mb in step.microbatches)
    typical = sum(mb.tokens_sq for mb in microbatches) / max(1, plan.counts.held_tokens)
    return read_pricing(args, plan.layout, typical)


def run_pricing(args: argparse.Namespace, records: RunRecords) -> Pricing:
    """`plan_pricing` for a run. Without options for seconds, the basis is the run's own."""
    pricing = plan_pricing(args, records.plan)
    if pricing.in_seconds:
        return pricing
    basis = (
        "of the run's cost model, scaled to the seconds that the run had measured before the step"
    )
    are_calibrated = [step.is_calibrated for step in records.traced]
    if are_calibrated and are_calibrated[0]:
        basis = "of the run's cost model"
    elif any(are_calibrated):
        basis += ", and from the first fit on in the model's own seconds"
    return replace(pricing, basis=basis)


def _recompute(args: argparse.Namespace) -> Recompute:
    """--recompute if the command has it and it is given, otherwise the value of --config."""
    given: Recompute | None = getattr(args, "recompute", None)
    config = read_config(args)
    return given or ("none" if config is None else config.model.recompute)


def _recompute_modules(args: argparse.Namespace) -> Sequence[RecomputeModule]:
    """What selective recomputation recomputes: as in --config, by default attention."""
    config = read_config(args)
    return ("core_attn",) if config is None else config.model.recompute_modules
