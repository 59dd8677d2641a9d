"""The tables of models with images: where they are encoded, and what that costs.

A step is 512 samples, prompt groups of 8 that share their images. Costs are from the models' sizes
on H100. "In rows" means that the model encodes a row's images on its first stage; "ahead" that each
different image is encoded once, on one of all GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megapack import CostModel, Layout, Plan, Policy, build_dp_schedule
from megapack.config.load import parse_config
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.memory import GIB
from megapack.cost.sizes import typical_length
from megapack.images import Images
from megapack.job.config.sections import TrainConfig
from megapack.outlook.baselines import first_fit_flops, kk_per_rank, next_fit, peer_plans
from megapack.outlook.stats import image_load, plan_report
from megapack.outlook.tune import Workload, tune
from megapack.outlook.tune_space import Setup, Space
from megapack.policy import ImagePlace
from megapack.prefixes import SharedPrefixes
from tools.benching.image_traces import TRACES, images, lengths, trace

PROMPTS, GROUP = 64, 8
BUDGET = 24576
CASES = (
    ("Qwen3-VL-8B", Layout(dp=4, tp=4)),
    ("Qwen3-VL-8B", Layout(dp=4, tp=2, pp=4)),
    ("Qwen3-VL-30B-A3B", Layout(dp=4, tp=4)),
    ("Qwen3-VL-30B-A3B", Layout(dp=4, tp=2, pp=4)),
    ("Qwen3-VL-30B-A3B", Layout(dp=4, pp=8)),
    ("Qwen3-VL-235B-A22B", Layout(dp=4, pp=8)),
    ("Qwen3.5-35B-A3B", Layout(dp=4, tp=2, pp=4)),
)
PEERS = {"Megatron-LM": next_fit, "verl": kk_per_rank, "slime": first_fit_flops}


def config_of(model: str) -> TrainConfig:
    """A run that trains a shipped model with its tower, in bf16."""
    keys = (
        "{name: images, plan: {max_tokens_per_gpu: 1}, optim: {distributed_optimizer: true}, "
        f"model: {{dtype: bf16, vision: train, hf_path: models/{model}}}}}"
    )
    return parse_config(keys, [], TrainConfig, model)


@dataclass(frozen=True)
class ImageCase:
    """A step of a trace on a model and a layout."""

    trace: str
    model: str
    layout: Layout

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array(lengths(trace(self.trace, PROMPTS, GROUP)))

    @cached_property
    def images(self) -> Sequence[Images]:
        return images(trace(self.trace, PROMPTS, GROUP))

    @cached_property
    def cost(self) -> CostModel:
        model, layout = config_of(self.model).model, self.layout
        typical = typical_length(self.lengths)
        split = None
        if model.num_layers % layout.num_chunks:
            split = model.balanced_stage_layers(layout, typical)
        speed = GpuSpeed.of("cuda", "bf16")
        cost = cost_from_sizes(model, layout, speed, mean_length=typical, stage_layers=split)
        return model.with_image_costs(cost, layout, speed, model.recompute)

    def plan(
        self, where: ImagePlace, cost: CostModel | None = None, *, shares: bool = False
    ) -> Plan:
        """The default policy's plan, with images ahead or in rows."""
        samples = trace(self.trace, PROMPTS, GROUP)
        prompts = [sample.length - sample.response_tokens for sample in samples]
        groups = [i // GROUP for i in range(len(samples))]
        return build_dp_schedule(
            self.lengths,
            layout=self.layout,
            max_tokens_per_gpu=BUDGET,
            cost=cost or self.cost,
            policy=Policy(images=where),
            images=self.images,
            prefixes=SharedPrefixes.from_groups(groups, prompts) if shares else None,
        )

    @cached_property
    def equal_work(self) -> float:
        """Seconds of the samples' own work, each different image once, spread over all GPUs."""
        found = plan_report(self.plan("ahead"), self.lengths, self.cost).equal_work_seconds
        assert found is not None
        return found

    def ratio(self, plan: Plan, cost: CostModel | None = None) -> float:
        """Time over equal work."""
        return plan_report(plan, None, cost or self.cost).seconds / self.equal_work

    def peers(self, cost: CostModel) -> Iterator[float]:
        """Other schedulers' rows, each at its best of five budgets, with images in rows."""
        plan = self.plan("ahead")
        for way in PEERS.values():
            plans = peer_plans(plan, self.lengths, self.cost, way)
            yield min(self.ratio(other, cost) for other in plans.values())


COLUMNS = (*PEERS, "by tokens", "by cost", "over TP", "ahead", "shared", "images' part")


def images_table() -> Iterator[str]:
    """Yield the table: a row per trace, model and layout."""
    yield f"| trace | model | layout | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 3) + "|"
    rows = []
    for model, layout in CASES:
        for name in TRACES:
            rows.append(list(_ratios(ImageCase(name, model, layout))))
            yield f"| {name} | {model} | {_label(layout)} | {_cells(rows[-1])} |"
    yield f"| mean | | | {_cells(np.exp(np.log(rows).mean(axis=0)).tolist())} |"


def _cells(values: Sequence[float]) -> str:
    *ratios, part = values
    return " | ".join([*(f"{ratio:.2f}" for ratio in ratios), f"{part:.1%}"])


def _label(layout: Layout) -> str:
    sizes = {name: getattr(layout, name) for name in ("dp", "tp", "pp")}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def _ratios(case: ImageCase) -> Iterator[float]:
    """The cells of `COLUMNS`."""
    cost, tp = case.cost, case.layout.tp
    yield from case.peers(cost)
    ahead, in_rows = case.plan("ahead"), case.plan("row")
    # Rows of a plan that knows nothing of images, which its rows then encode.
    pairs = zip(ahead.steps, in_rows.steps, strict=True)
    steps = tuple(replace(step, images=own.images) for step, own in pairs)
    yield case.ratio(replace(in_rows, steps=steps))
    yield case.ratio(in_rows)
    split = replace(cost, per_patch=cost.per_patch / tp, per_patch_sq=cost.per_patch_sq / tp)
    yield case.ratio(case.plan("row", split), split)
    yield case.ratio(ahead)
    yield case.ratio(case.plan("ahead", shares=True))
    report = plan_report(ahead, None, cost)
    yield report.image_seconds / report.seconds


def sent_table() -> Iterator[str]:
    """Yield the table of what is encoded, sent and held: a row per trace."""
    heads = ["encoded", "of uses", "most over mean", "sent", "held", "sent, shared", "held, shared"]
    yield f"| trace | {' | '.join(heads)} |"
    yield "|---" * (len(heads) + 1) + "|"
    for name in TRACES:
        case = ImageCase(name, "Qwen3-VL-8B", Layout(dp=4, tp=2, pp=4))
        tower = config_of(case.model).model.tower_sizes
        assert tower is not None
        cells: list[str] = []
        for shares in (False, True):
            plan = case.plan("ahead", shares=shares)
            tokens = image_load(plan).tokens
            for is_trained in (False, True):
                size = tower.feature_bytes(tokens, tower.num_levels, is_trained=is_trained)
                cells.append(f"{size / GIB:.2f}")
        counts = plan.counts
        most = counts.most_patches / (counts.image_patches / plan.layout.world_size)
        shown = [f"{counts.num_images}", f"{counts.num_image_uses}", f"{most:.2f}", *cells]
        yield f"| {name} | {' | '.join(shown)} |"


GPUS = {8: 64, 64: 512, 512: 1024}
"""Prompts of a step by the number of GPUs."""
LAYOUTS_TRACE = "charts"


def layouts_table() -> Iterator[str]:
    """Yield the table of the fastest layouts: a row per model."""
    yield f"| model | {' | '.join(f'{gpus} GPUs' for gpus in GPUS)} |"
    yield "|---" * (len(GPUS) + 1) + "|"
    for name in dict.fromkeys(model for model, _ in CASES):
        yield f"| {name} | {' | '.join(_fastest(name, *size) for size in GPUS.items())} |"


def _fastest(name: str, gpus: int, prompts: int) -> str:
    config = config_of(name)
    config = replace(config, model=replace(config.model, recompute="full"))
    model, speed = config.model, GpuSpeed.of("cuda", "bf16")
    samples = trace(LAYOUTS_TRACE, prompts, GROUP)
    sizes = np.array(lengths(samples))
    typical = typical_length(sizes)

    def cost_of(setup: Setup) -> CostModel:
        cost = cost_from_sizes(
            model, setup.layout, speed, mean_length=typical, stage_layers=setup.stage_layers
        )
        return model.with_image_costs(cost, setup.layout, speed, setup.recompute)

    found = tune(
        Workload(
            lengths=sizes,
            rollout_ids=None,
            colocate_ids=None,
            global_batch_size=None,
            num_steps=None,
            policy=Policy(search=512),
            memory=config.memory_model(),
            memory_bytes=76 * GIB,
            cost_of=cost_of,
            prefixes=SharedPrefixes.from_groups(
                [i // GROUP for i in range(len(samples))],
                [sample.length - sample.response_tokens for sample in samples],
            ),
            images=images(samples),
        ),
        Space(num_gpus=gpus, cp=(1,), pp=(1, 2, 4, 8), vpp=(1,), uneven=True, recompute=("full",)),
        num_best=1,
    )
    if not found.ranked:
        assert found.least_memory is not None
        return f"does not fit: {found.least_memory.total / GIB:.0f} GiB"
    best = found.ranked[0]
    layout = best.layout
    label = _label(layout) + (f" ep{layout.ep}" if layout.ep > 1 else "")
    part = best.report.image_seconds / best.report.seconds
    return (
        f"{label or 'one GPU'}: {best.memory.total / GIB:.0f} GiB, of it tower "
        f"{best.memory.tower / GIB:.1f}; {best.tokens_per_gpu_second:,.0f}; images {part:.1%}"
    )
