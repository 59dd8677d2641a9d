"""Options of the cost model: a model, or its sizes and a GPU's speed; a file; or an assumption."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megapack.base.choices import Recompute
from megapack.commands.arguments import add_fields, given_fields
from megapack.commands.parser import Parser
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.model import FIXED_TOKENS, CostModel, cost_in_tokens
from megapack.cost.sizes import ModelSizes
from megapack.cost.stages import LayerSplit, StageLayers
from megapack.errors import ConfigError
from megapack.layout import Layout
from megapack.plan.plan import Plan

if TYPE_CHECKING:
    from megapack.job.config.sections import TrainConfig
    from megapack.job.view.records import RunRecords

# The cost model without options, in tokens: docs/planner.md's for a 7B dense model. A sample of
# 49,152 tokens costs twice its tokens, and each micro-batch FIXED_TOKENS more.
_TOKENS_PER_SQUARE = 49152


@dataclass(frozen=True)
class Pricing:
    """A cost model and its basis."""

    cost: CostModel
    in_seconds: bool
    """False: the unit is the work of one token."""
    basis: str
    """Where the cost model comes from, one line to print."""


def in_unit(payload: dict[str, Any], pricing: Pricing) -> dict[str, Any]:
    """A payload of simulated times under keys that name their unit: seconds, or token_times."""
    if pricing.in_seconds:
        return payload
    return {key.replace("seconds", "token_times"): value for key, value in payload.items()}


def add_costs(parser: Parser, *, one_layout: bool = True) -> None:
    """Add --cost, --config and --model.

    Args:
        one_layout: the command uses one layout, so that a cost model measured on it can be given.
    """
    group = parser.add_argument_group("model (without one, time is counted in tokens)")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="a folder or config.json of Hugging Face, or a model that megapack knows: Qwen3-4B",
    )
    group.add_argument(
        "--config", metavar="CONFIG", help="a config of `megapack train`, or its name"
    )
    if one_layout:
        group.add_argument(
            "--cost", metavar="FILE", help="a cost model in YAML, measured on this layout"
        )


def add_model(parser: Parser, *, one_layout: bool = True) -> None:
    """`add_costs`, and sizes, a GPU's speed and layers of stages behind --help-model."""
    add_costs(parser, one_layout=one_layout)
    parser.add_topic("model", "options for a model's sizes, a GPU's speed and layers on stages")
    for title, cls in (
        ("sizes, in place of --model", ModelSizes),
        ("speed of a GPU", GpuSpeed),
        ("layers on pipeline stages (those of --config, or equally many)", LayerSplit),
    ):
        add_fields(parser.add_topic_group("model", title), cls)


@dataclass(frozen=True)
class CostOptions:
    """What the options say of a model and of seconds."""

    cost_file: str | None
    config: TrainConfig | None
    sizes: ModelSizes | None
    """Of --model, --config or the flags; None if none is given."""
    speed: dict[str, Any]
    """The given fields of `GpuSpeed`."""
    split: dict[str, Any]
    """The given fields of `LayerSplit`."""
    recompute: Recompute
    """--recompute if it is given, otherwise the value of --config."""

    def stage_layers(self, layout: Layout) -> StageLayers | None:
        """The split of the options, or else of --config if it is for this pp and vpp; or None.

        Raises:
            ConfigError: a split that does not add up.
        """
        config = self.config
        if self.split and self.sizes is not None:
            mtp = 0 if config is None else config.model.mtp_num_layers
            return LayerSplit(**self.split).stage_layers(
                self.sizes.num_layers, pp=layout.pp, vpp=layout.vpp, num_mtp_layers=mtp
            )
        if config is None or (config.layout.pp, config.layout.vpp) != (layout.pp, layout.vpp):
            return None
        return config.stage_layers

    def pricing(
        self, layout: Layout, mean_length: float, stage_layers: StageLayers | None = None
    ) -> Pricing:
        """The cost model on a layout.

        Args:
            mean_length: length of a typical sample, the sum of squared lengths over their sum.
            stage_layers: layers of each chunk; None: see `stage_layers`.

        Raises:
            ConfigError: an invalid cost model file, or a model without a GPU's speed.
        """
        if self.cost_file is not None:
            return _measured(self.cost_file, layout)
        if self.sizes is None:
            return _in_tokens(layout)
        config = self.config
        speed = replace(GpuSpeed() if config is None else config.assumed_speed, **self.speed)
        if speed.peak_tflops is None:
            raise ConfigError(
                "a model without a GPU's speed; set --peak-tflops, 989 for an H100 in bf16"
            )
        cost = cost_from_sizes(
            self.sizes,
            layout,
            speed,
            recompute=self.recompute,
            recompute_modules=("core_attn",) if config is None else config.model.recompute_modules,
            mean_length=mean_length,
            stage_layers=stage_layers or self.stage_layers(layout),
            frozen=() if config is None else config.model.freeze,
        )
        return Pricing(cost, True, speed.basis)


def read_costs(args: argparse.Namespace) -> CostOptions:
    """The options of `add_costs` or `add_model`.

    Raises:
        ConfigError: an invalid config, options that exclude each other, or missing sizes.
    """
    if args.config is not None and args.model is not None:
        raise ConfigError("both --config and --model given; set one of them")
    config = _read_config(args.config) if args.model is None else _config_of(args.model)
    sizes = _read_sizes(args, config)
    speed = given_fields(args, GpuSpeed)
    split = given_fields(args, LayerSplit)
    cost_file = getattr(args, "cost", None)
    if cost_file is not None and (sizes is not None or speed):
        raise ConfigError(f"--cost and {_flags(speed) or 'a model'} given; set one of them")
    if sizes is None and (speed or split):
        flags = _flags(speed | split)
        raise ConfigError(f"{flags} given without a model; set --model")
    recompute = getattr(args, "recompute", None)
    return CostOptions(
        cost_file,
        config,
        sizes,
        speed,
        split,
        recompute or ("none" if config is None else config.model.recompute),
    )


def _read_config(name: str | None) -> TrainConfig | None:
    if name is None:
        return None
    from megapack.config.load import load_config
    from megapack.config.shipped import find_config
    from megapack.job.config.sections import TrainConfig

    return load_config(find_config(name), [], TrainConfig)


def _config_of(model: str) -> TrainConfig:
    """The config of a run of a model, which is trained in bf16 with a distributed optimizer."""
    from megapack.config.load import parse_config
    from megapack.config.shipped import shipped_models
    from megapack.job.config.sections import TrainConfig

    folder = model
    if "/" not in model and not os.path.exists(model):
        known = shipped_models()
        if model not in known:
            raise ConfigError(
                f"--model {model}: no such folder or file; megapack knows {', '.join(known)}"
            )
        folder = str(known[model])
    keys = (
        "{name: model, plan: {max_tokens_per_gpu: 1}, optim: {distributed_optimizer: true}, "
        f"model: {{dtype: bf16, hf_path: {json.dumps(folder)}}}}}"
    )
    return parse_config(keys, [], TrainConfig, "--model")


def _read_sizes(args: argparse.Namespace, config: TrainConfig | None) -> ModelSizes | None:
    given = given_fields(args, ModelSizes)
    if config is not None:
        if given:
            name = "--config" if args.model is None else "--model"
            raise ConfigError(f"{name} and {_flags(given)} given; set {name} or the sizes")
        sizes = config.model.to_sizes()
        # Only seconds are priced by these sizes; `memory_model` knows the head itself.
        return replace(sizes, vocab_size=1) if config.objective.has_value_head else sizes
    if not given:
        return None
    needed = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if name not in given]
    if missing:
        raise ConfigError(f"{_flags(given)} given without {_flags(missing)}; set these too")
    return ModelSizes(**given)


def _flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _measured(path: str, layout: Layout) -> Pricing:
    from megapack.config.cost_file import read_cost

    cost = read_cost(path, layout)
    if not (cost.fixed or cost.per_token or cost.per_token_sq or cost.per_sample):
        raise ConfigError(f"{path}: a micro-batch takes 0 seconds; set per_token")
    return Pricing(cost, True, f"of the cost model {path}")


def _in_tokens(layout: Layout) -> Pricing:
    cost = cost_in_tokens(layout, per_token_sq=1 / _TOKENS_PER_SQUARE)
    basis = (
        f"assumed: a micro-batch costs {FIXED_TOKENS} tokens more than it has, a squared token "
        f"1/{_TOKENS_PER_SQUARE} of a token; give --model for seconds"
    )
    return Pricing(cost, False, basis)


def plan_pricing(args: argparse.Namespace, plan: Plan) -> Pricing:
    """The cost model for the samples of a plan."""
    microbatches = (mb for step in plan.steps for mb in step.microbatches)
    typical = sum(mb.tokens_sq for mb in microbatches) / max(1, plan.counts.held_tokens)
    return read_costs(args).pricing(plan.layout, typical)


def run_pricing(args: argparse.Namespace, records: RunRecords) -> Pricing:
    """`plan_pricing` for a run. Without options for seconds, the basis is the run's own."""
    pricing = plan_pricing(args, records.plan)
    if pricing.in_seconds:
        return pricing
    basis = (
        "of the run's cost model, scaled to the seconds that the run had measured before the step"
    )
    if records.traced and records.traced[0].is_calibrated:
        basis = "of the run's cost model"
    return replace(pricing, basis=basis)
