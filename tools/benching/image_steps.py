"""Runs steps with images on the ranks of a CPU job: the tower in rows, and ahead of them.

Started by tools/bench_images.py, as a worker of `tests.dist.spawn`.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megapack.cost.model import CostModel
from megapack.dp_schedule import build_dp_schedule
from megapack.job.config.model import ModelConfig
from megapack.job.config.sections import PlanConfig
from megapack.job.gpt import build_model, build_vision, initialize_parallel
from megapack.job.hf import export_hf, load_hf_weights
from megapack.job.train.calibrator import Calibrator
from megapack.layout import Layout
from megapack.loss import SFT
from megapack.model.vision.features import FeatureTable, RowFeatures, RowImages
from megapack.model.vision.tower import VisionTower
from megapack.pipeline.simulator import simulate_planned
from megapack.plan.plan import Plan, StepPlan
from megapack.policy import Policy
from megapack.rows.packed import PackedRow
from megapack.samples import SampleBatch
from megapack.schedule.ahead import Ahead, Encoded, StepImages
from megapack.schedule.listeners import Kind, Listener, Listeners
from tests.dist.hf.hf_worker import read, show_gradients
from tests.dist.rows.row_case import layout_of
from tests.dist.setup import report_cases
from tests.dist.vision.vision_samples import END, IMAGE, START
from tools.bench_simulator import TimedAdapter
from tools.benching.image_traces import Sample, trace
from tools.benching.planner_images import ImageCase

Way = Literal["row", "ahead"]
WAYS: tuple[Way, ...] = ("row", "ahead")
LAYERS = 8
"""Of the toy's decoder. With two in a chunk, the first has all levels of DeepStack."""
_PATCH_NUMBERS = 3 * 2 * 4 * 4
# Of an image's sides; and so of all tokens.
_SHORTER = 2
_FEWER = _SHORTER**2
# Of a prompt with two images, which the template takes without its question.
_LEAST_TEXT = 14


@dataclass(frozen=True)
class Steps:
    """What is measured."""

    trace: str
    model: str
    """Whose seconds the toy's operations take."""
    prompts: int
    group: int
    """Samples of a prompt, which share its images."""
    budget: int
    """Tokens of a row, of the trace's."""
    slow: float
    """Seconds of an operation over those of the model on an H100."""
    rounds: int

    @property
    def samples(self) -> list[Sample]:
        """Those of the trace with a quarter of the tokens and patches, for which the toy's own work
        is short."""
        found = []
        for own in trace(self.trace, self.prompts, self.group):
            # Whole tokens, of 2 x 2 patches.
            grids = [tuple(max(2, 2 * round(side / 2 / _SHORTER)) for side in g) for g in own.grids]
            text = max(_LEAST_TEXT, own.text_tokens // _FEWER)
            response = max(1, own.response_tokens // _FEWER)
            found.append(Sample(own.keys, tuple(grids), text, response))
        return found

    def cost(self, layout: Layout) -> CostModel:
        """Seconds of the model on an H100, for samples of as many tokens as `samples` has."""
        full = ImageCase(self.trace, self.model, layout).cost
        per_token = ("per_token", "per_patch", "per_image_token")
        squares = ("per_token_sq", "per_patch_sq")
        more = {name: _FEWER * getattr(full, name) for name in per_token}
        more |= {name: _FEWER**2 * getattr(full, name) for name in squares}
        return replace(full, **more)


# --- The tower in the row ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowTower(RowFeatures):
    """The tower in the first chunk's forward of a row, so that its backward runs through it."""

    encode: functools.partial[Any]
    """Gives [levels, P, H]."""

    def put(self, level: int, hidden: Tensor) -> Tensor:
        values = self.table.values
        assert isinstance(values, dict)
        if not level:
            values.update(enumerate(self.encode().unbind()))
        # Only the graph needs them from here on.
        values_P1H = values.pop(level)[:, None]
        if level:
            return hidden.index_add(0, self.positions_P, values_P1H)
        return hidden.index_copy(0, self.positions_P, values_P1H)


class InRows(Ahead):
    """Encodes the images of each sample in its row on the first stage, as models of other
    frameworks do: nothing comes before the rows, and after them only the sum over ranks."""

    _module: VisionTower

    def _planned(self, step: StepPlan, batch: SampleBatch) -> StepImages:
        # Plans with images in rows name no GPU.
        images = tuple(image._replace(owner=0) for image in step.images)
        return super()._planned(replace(step, images=images), batch)

    def _own_images(self, images: StepImages) -> list[int]:
        return images.needs[self._own.dp_rank] if 0 in self._own.levels else []

    def encode(self, images: StepImages, listeners: Listeners, *, is_training: bool) -> Encoded:
        return Encoded(images, FeatureTable({}, is_training), {}, {}, [])

    def row(self, row: PackedRow, encoded: Encoded) -> RowImages | None:
        if row.features_T is None or row.rotary_T3 is None:
            return None
        (positions_P,) = (row.features_T >= 0).nonzero(as_tuple=True)
        ends = torch.tensor([ref.tokens for ref in row.images]).cumsum(0)
        starts = dict(zip([0, *ends.tolist()], row.images, strict=False))
        # Each use of an image begins at its first feature.
        index_P = row.features_T[positions_P]
        uses = [starts[i] for i in index_P.tolist() if i in starts]
        pixels = {encoded.images.refs[i].key: own for i, own in encoded.images.pixels.items()}
        encode = functools.partial(self._encoded_uses, uses, pixels)
        features = RowTower(FeatureTable({}, encoded.table.collects), positions_P, index_P, encode)
        return RowImages(row.rotary_T3, self._module.mrope, features)

    def _encoded_uses(self, uses: list[Any], pixels: dict[str, Tensor]) -> Tensor:
        found = self._module.encode(uses, [pixels[ref.key] for ref in uses])
        return torch.cat([*found], dim=1)

    def backward(self, encoded: Encoded, listeners: Listeners) -> None:
        self._reduce({})


class RowAdapter(TimedAdapter):
    """The tower in rows."""

    def __init__(self, chunks: list[Any], *, layout: Layout, vision: Any) -> None:
        super().__init__(chunks, layout=layout, vision=vision)
        self.runner.ahead = InRows(vision, chunks, layout, self._groups, self._device)


ADAPTERS = {"row": RowAdapter, "ahead": TimedAdapter}


# --- Seconds -------------------------------------------------------------------------------------


class Paced(Listener):
    """Lets each operation take the seconds that it is given, and asleep what its work leaves.

    Ranks share cores, where a stage that computes would slow down one that another GPU has.

    Attributes:
        late: seconds that operations took more, all together.
    """

    def __init__(self, seconds: dict[tuple[Kind, int, int], float]) -> None:
        self._seconds = seconds
        self._begun: dict[tuple[Kind, int, int], float] = {}
        self.late = 0.0

    def on_begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
        self._begun[kind, chunk, microbatch] = time.perf_counter()

    def on_end(self, kind: Kind, chunk: int, microbatch: int) -> None:
        key = kind, chunk, microbatch
        rest = self._begun.pop(key) + self._seconds.get(key, 0.0) - time.perf_counter()
        self.late += max(-rest, 0.0)
        time.sleep(max(rest, 0.0))


def slowed(cost: CostModel, factor: float) -> CostModel:
    """A cost model whose seconds are `factor` times as many."""
    names = ("fixed", "per_sample", "per_token", "per_token_sq")
    names += ("per_patch", "per_patch_sq", "per_image_token")
    return replace(cost, **{name: factor * getattr(cost, name) for name in names})


# --- The model and its samples -------------------------------------------------------------------


def write_model(folder: Path) -> None:
    """The toy of `job.data.toy_images` with more layers in its decoder."""
    import transformers

    from megapack.job.data.toy_images import write_image_model

    write_image_model(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.text_config.num_hidden_layers = LAYERS
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    transformers.Qwen3VLForConditionalGeneration(config).float().save_pretrained(folder)


def make_batch(samples: Sequence[Sample]) -> SampleBatch:
    """The samples with random tokens and pixels."""
    generator = torch.Generator().manual_seed(0)
    numbers: dict[str, int] = {}
    ids, masks, refs = [], [], []
    for sample in samples:
        own = torch.randint(0, 250, (sample.length,), generator=generator)
        for ref in sample.images:
            own[ref.offset - 1], own[ref.offset : ref.end], own[ref.end] = START, IMAGE, END
            numbers.setdefault(ref.key, len(numbers))
        ids.append(own)
        masks.append(torch.arange(sample.length) >= sample.length - sample.response_tokens)
        refs.append(
            [
                replace(ref, pixels=functools.partial(_pixels, ref.patches, numbers[ref.key]))
                for ref in sample.images
            ]
        )
    return SampleBatch(ids, {"response_mask": masks}, images=refs)


def _pixels(patches: int, seed: int) -> Tensor:
    return torch.randn((patches, _PATCH_NUMBERS), generator=torch.Generator().manual_seed(seed))


# --- A layout ------------------------------------------------------------------------------------


class Ranks:
    """The toy on a layout, and its steps both ways."""

    def __init__(self, steps: Steps, folder: Path, layout: Layout) -> None:
        self.steps, self.folder, self.layout = steps, folder, layout
        model = ModelConfig.from_hf(str(folder / "model"), vision="train")
        initialize_parallel(layout, seed=1)
        chunks = build_model(
            model,
            layout,
            vocab_size=model.vocab_size or 0,
            seed=1,
            distributed_optimizer=False,
        )
        tower = build_vision(model, distributed_optimizer=False)
        load_hf_weights([*chunks, tower], folder / "model", device=torch.device("cpu"))
        self.adapters = {way: ADAPTERS[way](chunks, layout=layout, vision=tower) for way in WAYS}
        self.start = steps.cost(layout)
        self.cost = slowed(self.start, steps.slow)
        self.batch = make_batch(steps.samples)
        self.plans = {way: self._plan(way) for way in WAYS}

    def _plan(self, way: Way) -> Plan:
        return build_dp_schedule(
            self.batch.lengths,
            layout=self.layout,
            max_tokens_per_gpu=self.steps.budget // _FEWER,
            cost=self.cost,
            policy=Policy(images=way),
            images=[self.batch.images(i) for i in range(len(self.batch))],
        )

    def step(self, way: Way) -> float:
        """Seconds of a step, on the slowest rank."""
        adapter = self.adapters[way]
        for module in adapter.modules:
            module.zero_grad_buffer()
        adapter.step(self.plans[way], self.batch, objective=SFT())
        return adapter.runner.seconds

    @contextmanager
    def paced(self, way: Way) -> Iterator[Paced]:
        """Within the block, operations take the seconds that they have in the simulator."""
        adapter, plan = self.adapters[way], self.plans[way]
        own = adapter.dp_rank, int(parallel_state.get_pipeline_model_parallel_rank())
        events = simulate_planned(plan, plan.steps[0], self.cost).events
        pace = Paced(
            {
                (event.kind, event.chunk, event.microbatch): event.end - event.start
                for event in events
                if (event.rank, event.stage) == own
            }
        )
        adapter.runner.listeners.append(pace)
        yield pace
        adapter.runner.listeners.remove(pace)

    def gradients(self, way: Way) -> dict[str, Tensor]:
        """Those of the last step, by the names of the folder's tensors."""
        modules = self.adapters[way].modules
        params = [param for module in modules for param in module.parameters()]
        weights = [param.detach().clone() for param in params]
        show_gradients(modules)
        out = [tempfile.mkdtemp(dir=self.folder)]
        dist.broadcast_object_list(out, src=0)
        export_hf(modules, Path(out[0]), like=self.folder / "model", device=torch.device("cpu"))
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(weight)
        dist.barrier()
        return read(Path(out[0]))

    def measured(self) -> dict[str, Any]:
        """Seconds of steps both ways, and what the simulator says of them.

        Its cost model is what a run's own calibration makes of the steps ahead. That begins with
        the seconds of an H100, which operations here take many times over.
        """
        adapter, steps = self.adapters["ahead"], self.steps
        calibrator = Calibrator(
            PlanConfig(max_tokens_per_gpu=1, calibrate="online", calibrate_interval=steps.rounds),
            adapter,
            self.layout,
            self.start,
            adapter.ranks,
            torch.device("cpu"),
        )
        seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
        late = 0.0
        for number in range(1, steps.rounds + 1):
            with self.paced("row") as pace:
                seconds["row"].append(self.step("row"))
            late += pace.late
            # The calibration's marks come after the pace, so that what is slept counts.
            with self.paced("ahead") as pace, calibrator.step(self.plans["ahead"].steps[0], number):
                seconds["ahead"].append(self.step("ahead"))
            late += pace.late
        every_late: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(every_late, late)
        plan = self.plans["ahead"]
        pairs = zip(seconds["row"], seconds["ahead"], strict=True)
        return {
            "seconds": {way: statistics.median(own) for way, own in seconds.items()},
            "ratio": statistics.median(row / ahead for row, ahead in pairs),
            "given": self.simulated(self.cost),
            "simulated": self.simulated(calibrator.cost),
            "late": max(every_late) / sum(map(sum, seconds.values())),
            "images": plan.counts.num_images,
            "uses": plan.counts.num_image_uses,
            "microbatches": plan.steps[0].num_microbatches,
        }

    def simulated(self, cost: CostModel) -> dict[Way, float]:
        """The simulator's seconds of a step each way."""
        return {
            way: simulate_planned(plan, plan.steps[0], cost).makespan
            for way, plan in self.plans.items()
        }


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm: of the tower, or of the decoder if that is more."""
    assert found.keys() == expected.keys()
    sums = {part: [0.0, 0.0] for part in (True, False)}
    for name, own in expected.items():
        part = sums["visual." in name]
        part[0] += float((found[name].double() - own).square().sum())
        part[1] += float(own.double().square().sum())
    return max(math.sqrt(off / norm) for off, norm in sums.values())


def run_layout(steps: Steps, folder: Path, name: str) -> dict[str, Any]:
    """Measure a layout; "single", which comes first, writes the model and its gradients."""
    if not (folder / "model").exists():
        write_model(folder / "model")
    ranks = Ranks(steps, folder, layout_of(name))
    if name == "single":
        ranks.step("ahead")
        torch.save(ranks.gradients("ahead"), folder / "single.pt")
        return {}
    gradients: dict[str, dict[str, Tensor]] = {}
    for way in WAYS:
        ranks.step(way)
        gradients[way] = ranks.gradients(way)
    gradients["single"] = torch.load(folder / "single.pt")
    return {
        "errors": {
            f"{way}, {other}": error(gradients[way], gradients[other])
            for way, other in (("row", "ahead"), ("row", "single"), ("ahead", "single"))
        },
        **ranks.measured(),
    }


def main(folder: str, out_dir: str, settings: str, *names: str) -> None:
    """Run layouts one after the other, and write what was found."""
    steps = Steps(**json.loads(settings))
    report_cases(out_dir, functools.partial(run_layout, steps, Path(folder)), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
