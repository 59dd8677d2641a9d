"""Options of the cost model: a model and a GPU's speed; a file; or an assumption."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megapack.commands.arguments import add_fields, given_fields, selected_steps
from megapack.commands.parser import Parser
from megapack.cost.assumed import GPU_NAMES, GpuSpeed, cost_from_sizes
from megapack.cost.model import FIXED_TOKENS, TOKENS_PER_SQUARE, CostModel, cost_in_tokens
from megapack.cost.stages import StageLayers
from megapack.errors import ConfigError
from megapack.layout import Layout
from megapack.plan.file import read_plan
from megapack.plan.plan import Plan

if TYPE_CHECKING:
    from megapack.job.config.sections import TrainConfig

_IN_TOKENS = (
    f"assumed: a micro-batch costs {FIXED_TOKENS} tokens more than it has, a squared token "
    f"1/{TOKENS_PER_SQUARE} of a token; give --model for seconds"
)


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
    """`add_costs`, and a GPU's speed behind --help-model."""
    add_costs(parser, one_layout=one_layout)
    what = "options for the speed of a GPU that a model is priced with"
    group = parser.add_topic("model", what, "speed of a GPU")
    group.add_argument("--gpu", choices=GPU_NAMES, help="kind of GPU (h100; an H200 is one too)")
    group.add_argument(
        "--measure", action="store_true", help="measure the speeds on this machine's GPU"
    )
    add_fields(group, GpuSpeed, skip=("is_measured",))


@dataclass(frozen=True)
class CostOptions:
    """What the options say of a model and of seconds."""

    cost_file: str | None
    config: TrainConfig | None
    """Of --config or --model; None if neither is given."""
    speed: dict[str, Any]
    """The given fields of `GpuSpeed`."""
    gpu: str | None = None
    """The kind of GPU; None: the config's."""

    def stage_layers(self, layout: Layout) -> StageLayers | None:
        """The config's split of the layers if it is for this pp and vpp; or None."""
        config = self.config
        if config is None or (config.layout.pp, config.layout.vpp) != (layout.pp, layout.vpp):
            return None
        return config.stage_layers

    def uneven_split(self, layout: Layout) -> StageLayers | None:
        """The same if it is uneven."""
        split = self.stage_layers(layout)
        return None if split is None or split.is_even else split

    def pricing(
        self,
        layout: Layout,
        mean_length: float,
        stage_layers: StageLayers | None = None,
        **options: Any,
    ) -> Pricing:
        """The cost model on a layout.

        Args:
            mean_length: length of a typical sample, the sum of squared lengths over their sum.
            stage_layers: layers of each chunk; None: see `stage_layers`.
            options: of the model in place of its own, such as recompute="none".

        Raises:
            ConfigError: an invalid cost model file.
        """
        if self.cost_file is not None:
            return _measured(self.cost_file, layout)
        config = self.config
        if config is None:
            return Pricing(cost_in_tokens(layout), False, _IN_TOKENS)
        assumed = config.assumed_speed
        if self.gpu is not None:
            assumed = GpuSpeed.of("cuda", config.model.dtype, self.gpu)
        speed = replace(assumed, **self.speed)
        sizes = config.model
        if config.objective.has_value_head:
            # Only seconds are priced by these sizes; `memory_model` knows the head itself.
            sizes = replace(sizes.with_value_head(), vocab_size=1)
        cost = cost_from_sizes(
            sizes,
            layout,
            speed,
            mean_length=mean_length,
            stage_layers=stage_layers or self.stage_layers(layout),
            **options,
        )
        recompute = options.get("recompute", config.model.recompute)
        cost = config.model.with_image_costs(cost, layout, speed, recompute)
        return Pricing(cost, True, speed.basis)


def read_costs(args: argparse.Namespace, *, has_images: bool = False) -> CostOptions:
    """The options of `add_costs` or `add_model`.

    Args:
        has_images: samples have images, which a model's tower encodes.

    Raises:
        ConfigError: an invalid config, or options that exclude each other.
    """
    if args.config is not None and args.model is not None:
        raise ConfigError("both --config and --model given; set one of them")
    if args.model is not None:
        config: TrainConfig | None = _config_of(args.model, "train" if has_images else "off")
    else:
        config = _read_config(args.config)
    if has_images and config is not None and config.model.vision == "off":
        raise ConfigError(
            f"samples have images and {args.config} has model.vision=off; set --model, or a config "
            "with model.vision=train or frozen"
        )
    speed, gpu = given_fields(args, GpuSpeed), getattr(args, "gpu", None)
    cost_file = getattr(args, "cost", None)
    given = [*speed, "gpu"] if gpu else [*speed]
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    if cost_file is not None and (config is not None or given):
        raise ConfigError(f"--cost and {flags or 'a model'} given; set one of them")
    if getattr(args, "measure", False):
        if config is None or gpu is not None:
            raise ConfigError("--measure measures a model's kernels; set --model, and leave --gpu")
        speed = _measured_speed(config) | speed
    if config is None and given:
        raise ConfigError(f"{flags} given without a model; set --model")
    return CostOptions(cost_file, config, speed, gpu)


def _measured_speed(config: TrainConfig) -> dict[str, Any]:
    """The fields of `GpuSpeed` for a model's kernels on this machine."""
    from megapack import cpu
    from megapack.base.known_warnings import quiet_known_warnings

    if config.device == "cuda" and not cpu.uses_cuda():
        raise ConfigError("--measure: this machine has no GPU; leave it out, or set --gpu")
    quiet_known_warnings()
    from megapack.model.speed import measured_speed

    return vars(measured_speed(config.model, dtype=config.model.dtype))


def _read_config(name: str | None) -> TrainConfig | None:
    if name is None:
        return None
    from megapack.config.load import load_config
    from megapack.config.shipped import find_config
    from megapack.job.config.sections import TrainConfig

    return load_config(find_config(name), [], TrainConfig)


def _config_of(model: str, vision: str) -> TrainConfig:
    """The config of a run of a model, which is trained in bf16 with a distributed optimizer."""
    from megapack.config.load import parse_config
    from megapack.config.shipped import shipped_models
    from megapack.job.config.hf_config import read_hf_config
    from megapack.job.config.sections import TrainConfig

    folder = model
    if "/" not in model and not os.path.exists(model):
        known = shipped_models()
        if model not in known:
            raise ConfigError(
                f"--model {model}: no such folder or file; megapack knows {', '.join(known)}"
            )
        folder = str(known[model])
    if vision != "off" and read_hf_config(folder).vision is None:
        raise ConfigError(
            f"samples have images, and --model {model} no tower that megapack trains; set a model "
            "that has, or leave the images out"
        )
    keys = (
        "{name: model, plan: {max_tokens_per_gpu: 1}, optim: {distributed_optimizer: true}, "
        f"model: {{dtype: bf16, vision: {json.dumps(vision)}, hf_path: {json.dumps(folder)}}}}}"
    )
    return parse_config(keys, [], TrainConfig, "--model")


def _measured(path: str, layout: Layout) -> Pricing:
    from megapack.config.cost_file import read_cost

    cost = read_cost(path, layout)
    if not (cost.fixed or cost.per_token or cost.per_token_sq or cost.per_sample):
        raise ConfigError(f"{path}: a micro-batch takes 0 seconds; set per_token")
    return Pricing(cost, True, f"of the cost model {path}")


def priced_plan(args: argparse.Namespace, path: str) -> tuple[Plan, range, Pricing]:
    """A plan, its steps that --step selects, and the cost model of the options for its samples."""
    plan = read_plan(path)
    numbers = selected_steps(plan, getattr(args, "step", None))
    return plan, numbers, plan_pricing(args, plan)


def plan_pricing(args: argparse.Namespace, plan: Plan) -> Pricing:
    """The cost model of the options for the samples of a plan."""
    microbatches = (mb for step in plan.steps for mb in step.microbatches)
    typical = sum(mb.tokens_sq for mb in microbatches) / max(1, plan.counts.held_tokens)
    costs = read_costs(args, has_images=plan.counts.num_images > 0)
    return costs.pricing(plan.layout, typical)
