"""Times packed rows of a config's model on this machine and fits a cost model to them.

    python tools/calibrate.py CONFIG [section.key=value ...] --out cost.yaml [--trace TRACE.csv]
        [--measured]

With tensor or context parallelism, start it with torchrun on tp * cp ranks. On 2, 4, ... times as
many, it also times long rows over 2, 4, ... data-parallel ranks (plan.context_parallel=dynamic).
With plan.backward=split it times input gradients and weight gradients apart.
All layers run on one pipeline stage; docs/maintainers/calibration.md explains how the seconds of
the layout's chunks follow. The training job reads the file with plan.cost_model=cost.yaml.
`--measured` writes docs/measured/calibration_fit.md, what the command prints of its fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import (
    CostModel,
    DataError,
    Layout,
    Measurement,
    MegapackError,
    MicroBatch,
    Plan,
    Policy,
    StepPlan,
    build_dp_schedule,
    cpu,
    launch,
)
from megapack.config import dump_yaml, find_config, load_config
from megapack.cost.calibration import Calibration, Origin
from megapack.errors import ConfigError
from megapack.job.config.sections import TrainConfig
from megapack.job.data.tokenizer import ByteTokenizer
from megapack.job.gpt import build_model, initialize_parallel
from megapack.job.train.trace import mark, seconds_between
from megapack.layout import block_ranks
from megapack.loss import SFT
from megapack.model import weight_gradients
from megapack.rows.packed import PackedRow
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from megapack.schedule.call import StepCall
from megapack.schedule.forward import PassContext
from megapack.schedule.runner import ScheduleRunner
from tools.bench_planner import machine
from tools.benching.calibration_rows import (
    fit_whole_model,
    grid,
    on_one_rank,
    on_one_stage,
    relative_errors,
    stage_weights,
    total_seconds,
    weight_errors,
    worth_sharing,
)
from tools.pages import measured
from tools.pages.marks import table

PACKAGES = ("torch", "megatron-core", "transformer-engine")
_WARM_UP_ROUNDS = 2


class RowSeconds(NamedTuple):
    """Seconds of one row."""

    forward: float
    backward: float
    weight: float
    """Of the backward's, those of the weight gradients; 0 if they were not put off."""


class RowRunner(ScheduleRunner):
    """Runs the rows of a step one after another and times each.

    Only forwards and backwards are timed, not packing, agreement, copies to the device or the
    reduction of gradients.
    """

    splits = False
    """Compute weight gradients after the rest of a backward."""
    seconds: Sequence[RowSeconds] = ()
    """Those of each row of the last step."""

    def run_schedule(self, call: StepCall, rows: list[PackedRow], context: PassContext) -> None:
        (chunk,) = self.chunks
        together = torch.zeros(1, device=self.device)
        placed = self.placed(call, rows)
        forward_row = self.forward_step(call, PassContext(schedule_pass=context.schedule_pass))
        later = self._weight_gradients
        marks = []
        with self.routing.following(context.schedule_pass), chunk.no_sync():
            for number, row in enumerate(placed):
                if self.layout.dp > 1:
                    # Ranks that share a row would wait in it for one that is still in another.
                    dist.all_reduce(together)
                begin = mark()
                hidden, loss_function = forward_row(iter([(number, row)]), chunk)
                assert loss_function is not None
                loss = loss_function(hidden)[0]
                middle = mark()
                if self.splits:
                    with later.deferring(0, number):
                        loss.backward()
                    put_off = mark()
                    later.run(0, number)
                else:
                    loss.backward()
                    later.finish_joint(0)
                    put_off = None
                marks.append((begin, middle, put_off, mark()))
        torch.cuda.synchronize()
        self.seconds = [
            RowSeconds(
                seconds_between(begin, middle),
                seconds_between(middle, end),
                0.0 if put_off is None else seconds_between(put_off, end),
            )
            for begin, middle, put_off, end in marks
        ]


class RowTimer(ScheduleAdapter):
    """A schedule adapter that times the rows of a step."""

    runner_class = RowRunner


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """A step to measure: a plan with one step, and its samples. Each DP rank has rows of the same
    lengths."""

    plan: Plan
    batch: SampleBatch

    def run(self, timer: RowTimer, *, splits: bool = False) -> Sequence[RowSeconds]:
        """Run the step once; the seconds of each row.

        Args:
            splits: compute weight gradients after the rest of a backward.
        """
        for chunk in timer.chunks:
            chunk.zero_grad_buffer()
        timer.runner.splits = splits
        timer.step(self.plan, self.batch, objective=SFT())
        return timer.runner.seconds


def measure(
    timer: RowTimer,
    steps: Sequence[TimedStep],
    rounds: int,
    *,
    splits: bool,
    is_over: Callable[[], bool] = lambda: False,
) -> list[list[Measurement]]:
    """Measurements of each step's rows: medians over the rounds, on the slowest rank.

    Each round runs every row once, so that a machine that slows down for a while slows down all
    rows. The first two rounds warm up and do not count.

    Args:
        splits: run every row once more in each round, with a split backward, for the seconds of
            its weight gradients. All other seconds are those of joint backwards.
        is_over: asked before each round that counts, after the first of them: no more rounds. All
            ranks get one answer.
    """
    kinds = (False, True) if splits else (False,)
    seconds: list[list[list[Sequence[RowSeconds]]]] = []
    for number in range(rounds + _WARM_UP_ROUNDS):
        if number > _WARM_UP_ROUNDS and is_over():
            break
        seconds.append([[step.run(timer, splits=kind) for kind in kinds] for step in steps])
    del seconds[:_WARM_UP_ROUNDS]
    measurements = []
    for step, of_rounds in zip(steps, zip(*seconds, strict=True), strict=True):
        medians = torch.tensor(np.median(of_rounds, axis=0), device=torch.cuda.current_device())
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        joint, split = medians[0].tolist(), medians[-1].tolist()
        measurements.append(
            [
                Measurement(
                    micro_batch.row_tokens,
                    micro_batch.tokens_sq,
                    len(micro_batch.samples),
                    forward,
                    backward,
                    micro_batch.width,
                    # A pause of the machine in all rounds of a row.
                    min(put_off.weight, backward) if splits else None,
                )
                for micro_batch, (forward, backward, _), put_off in zip(
                    step.plan.steps[0].ranks[0],
                    joint,
                    (RowSeconds(*row) for row in split),
                    strict=True,
                )
            ]
        )
    return measurements


@dataclasses.dataclass(frozen=True)
class Trace:
    """Lengths of a real run's samples."""

    lengths: list[int]
    """Tokens of each sample, prompt and response."""
    prompts: list[int]
    """Prompt tokens of each sample."""

    @classmethod
    def read(cls, path: Path, num_samples: int, longest: int) -> Trace:
        """Read the first samples of at most `longest` tokens from columns prompt and response."""
        try:
            pairs = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 1), dtype=np.int64)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: {error}; give a CSV of prompt and response lengths") from None
        pairs = np.atleast_2d(pairs)
        total = pairs.sum(axis=1)
        kept = pairs[(total > 1) & (total <= longest)][:num_samples]
        if not kept.size:
            raise DataError(f"{path}: no sample of 2 to {longest} tokens; set data.max_length")
        return cls(kept.sum(axis=1).tolist(), kept[:, 0].tolist())

    @property
    def prompt_share(self) -> float:
        """Prompt tokens over all tokens."""
        return sum(self.prompts) / sum(self.lengths)


class Job:
    """The config's model on one pipeline stage, and the steps to measure on it."""

    def __init__(self, config: TrainConfig) -> None:
        if config.plan.max_tokens_per_gpu is None:
            raise ConfigError("plan.max_tokens_per_gpu is null; set the budget to measure up to")
        sizes = dataclasses.replace(config.layout, dp=1)
        one_stage = dataclasses.replace(sizes, dp=None, pp=1, vpp=1, microbatch_group_size=None)
        self.config = config
        fp8 = config.model.fp8_rows
        self.layout = one_stage.to_layout(dist.get_world_size(), fp8)
        if self.layout.dp not in self.layout.widths:
            raise ConfigError(
                f"{dist.get_world_size()} ranks with tp * cp = {sizes.tp * sizes.cp}; start that "
                "many, or 2, 4, 8, ... times as many to measure rows over several data-parallel "
                "ranks"
            )
        # The layout of the training job, with one DP rank.
        self.target = sizes.to_layout(sizes.tp * sizes.pp * sizes.cp, fp8)
        self.budget = config.plan.max_tokens_per_gpu * self.layout.cp
        self.longest = config.data.max_length or config.model.max_position_embeddings
        self.vocab_size = config.model.vocab_size or ByteTokenizer().vocab_size
        self.splits_backward = config.plan.backward == "split"

    def timer(self, num_layers: int) -> RowTimer:
        """The model with this many layers, all on this stage."""
        chunks = build_model(
            dataclasses.replace(self.config.model, num_layers=num_layers),
            self.layout,
            vocab_size=self.vocab_size,
            seed=self.config.seed,
            distributed_optimizer=self.config.optim.distributed_optimizer,
            splits_backward=self.splits_backward,
        )
        if self.splits_backward:
            weight_gradients.check(chunks, get_model_config(chunks[0]))
        chunk_tokens = self.config.objective.logprob_chunk_tokens
        return RowTimer(
            chunks,
            layout=self.layout,
            logprob_chunk_tokens=chunk_tokens,
            # Megatron's schedules cannot run layers that put off weight gradients.
            executor="operations" if self.splits_backward else "megatron",
        )

    def batch(self, lengths: Sequence[int], prompts: Sequence[int]) -> SampleBatch:
        """Random tokens. The first `prompts` tokens of each sample do not count in the loss."""
        generator = torch.Generator().manual_seed(self.config.seed)
        tokens = [torch.randint(0, self.vocab_size, (n,), generator=generator) for n in lengths]
        return SampleBatch.from_prompt_response(
            [t[:p] for t, p in zip(tokens, prompts, strict=True)],
            [t[p:] for t, p in zip(tokens, prompts, strict=True)],
        )

    def grid(self, trace: Trace | None, widths: Sequence[int]) -> TimedStep:
        """The step that the model is fitted to, with the trace's share of prompt tokens.

        Args:
            widths: numbers of DP ranks; one rank has each row, and long rows are also shared.
        """
        prompt_share = 0.0 if trace is None else trace.prompt_share
        alignment = self.layout.over(self.layout.dp).row_alignment
        rows = grid(self.budget, self.longest, alignment)
        ranks: list[list[MicroBatch]] = [[] for _ in range(self.layout.dp)]
        lengths: list[int] = []
        for width in widths:
            for row in rows if width == 1 else worth_sharing(rows, self.budget):
                for first in range(0, self.layout.dp, width):
                    micro_batch = _micro_batch(row, len(lengths), block_ranks(first, width))
                    lengths += row
                    for rank in range(first, first + width):
                        ranks[rank].append(micro_batch)
        samples = tuple(range(len(lengths)))
        step = StepPlan(tuple(map(tuple, ranks)), len(ranks[0]), None, samples, ())
        plan = Plan(
            steps=(step,),
            layout=self.layout,
            policy=Policy(context_parallel="fixed" if max(widths) == 1 else "dynamic"),
            max_tokens_per_gpu=self.config.plan.max_tokens_per_gpu,
            micro_batch_size=None,
            num_samples=len(lengths),
            rollout_ids=None,
        )
        return TimedStep(plan, self.batch(lengths, [int(prompt_share * n) for n in lengths]))

    def planned(self, trace: Trace) -> TimedStep:
        """A trace's samples, packed by the config's policy; every DP rank has a copy of them.

        A row costs its tokens: no cost model is fitted yet.
        """
        plan = build_dp_schedule(
            trace.lengths,
            layout=dataclasses.replace(self.layout, dp=1, ep=1),
            max_tokens_per_gpu=self.config.plan.max_tokens_per_gpu,
            policy=self.config.plan.to_policy(),
        )
        dp = self.layout.dp
        num_samples = plan.num_samples
        (step,) = plan.steps
        ranks = tuple(
            tuple(
                dataclasses.replace(mb, samples=tuple(i + rank * num_samples for i in mb.samples))
                for mb in step.ranks[0]
            )
            for rank in range(dp)
        )
        everything = tuple(range(dp * num_samples))
        copies = dataclasses.replace(
            plan,
            steps=(dataclasses.replace(step, ranks=ranks, kept_rollouts=everything),),
            layout=self.layout,
            num_samples=dp * num_samples,
        )
        batch = self.batch(trace.lengths * dp, trace.prompts * dp)
        return TimedStep(copies, batch)


def _micro_batch(row: Sequence[int], first: int, dp_ranks: tuple[int, ...]) -> MicroBatch:
    tokens = sum(row)
    samples = tuple(range(first, first + len(row)))
    return MicroBatch(samples, tokens, tokens, sum(n * n for n in row), tokens, 0, dp_ranks)


def errors_line(forward: list[float], both: list[float]) -> str:
    """Mean and worst relative errors of rows, for the forward and for forward plus backward."""
    errors = {"forward": np.abs(forward), "forward + backward": np.abs(both)}
    parts = (f"{name} mean {e.mean():.1%}, worst {e.max():.1%}" for name, e in errors.items())
    return "; ".join(parts)


def calibrate(
    job: Job, trace: Trace | None, rounds: int, report: Callable[[str], None]
) -> Calibration:
    """Measure, fit, and report how well the fit predicts."""
    target = job.target
    timer = job.timer(job.config.model.num_layers)
    steps = [job.grid(trace, job.layout.widths)]
    steps += [] if trace is None else [job.planned(trace)]
    measured, *held_out = measure(timer, steps, rounds, splits=job.splits_backward)
    cost = fit_whole_model(measured, target)
    whole = on_one_stage(cost, target)
    alone = on_one_rank(measured)
    forward, both = relative_errors(whole, job.layout, alone)
    report(
        f"fitted to {len(alone)} rows of up to {job.budget} tokens: {errors_line(forward, both)}"
    )
    report(overhead_line(cost, job.layout, len(measured) - len(alone)))
    if job.splits_backward:
        report(f"weight_ratio {cost.weight_ratio:.3f}, {weight_line(whole, job.layout, alone)}")
    else:
        report(f"weight_ratio {cost.weight_ratio:g}, not measured: that needs plan.backward=split")
    for width in job.layout.widths[1:]:
        shared = [row for row in measured if row.width == width]
        errors = errors_line(*relative_errors(whole, job.layout, shared))
        report(f"{len(shared)} rows over {width} data-parallel ranks: {errors}")
    for rows in held_out:
        errors = errors_line(*relative_errors(whole, job.layout, rows))
        report(f"held out, {len(rows)} rows of {steps[1].plan.num_samples} samples: {errors}")
        if job.splits_backward:
            report(f"held out, {weight_line(whole, job.layout, rows)}")
    del timer  # free its model before the one for the stage weights is built
    if target.num_chunks > 1:
        try:
            weights = measured_weights(job, trace, alone, rounds)
        except DataError as error:
            report(f"no stage weights, chunks count as equal: {error}")
        else:
            report(f"stage weights: {', '.join(f'{weight:.3f}' for weight in weights)}")
            cost = dataclasses.replace(cost, stage_weights=weights)
    return Calibration(cost=cost, origin=origin(len(alone), max(map(abs, both))))


def overhead_line(cost: CostModel, layout: Layout, num_rows: int) -> str:
    """What a row over several data-parallel ranks costs, and how that is known."""
    if cost.cp_overhead != CostModel.cp_overhead:
        return (
            f"cp_overhead {cost.cp_overhead:.3f} and cp_fixed {1e6 * cost.cp_fixed:.0f} us per "
            f"chunk from {num_rows} rows over several ranks"
        )
    reason = "their seconds hardly depend on their tokens"
    if layout.dp == 1:
        reason = f"that needs {2 * layout.tp * layout.cp} ranks or more"
    return f"cp_overhead {cost.cp_overhead:g}, not measured: {reason}"


def weight_line(cost: CostModel, layout: Layout, rows: Sequence[Measurement]) -> str:
    """How much of backwards weight gradients are, and how well they are predicted."""
    errors = np.abs(weight_errors(cost, layout, rows))
    weight_s = sum(row.weight_seconds or 0.0 for row in rows)
    backward_s = sum(row.backward_seconds or 0.0 for row in rows)
    return (
        f"weight gradients are {weight_s / backward_s:.0%} of the backward: "
        f"mean {errors.mean():.1%}, worst {errors.max():.1%}"
    )


def measured_weights(
    job: Job, trace: Trace | None, measured: Sequence[Measurement], rounds: int
) -> tuple[float, ...]:
    """Stage weights of the target layout, from a second model with about one chunk's layers.

    Args:
        measured: the rows of one DP rank, on the first model.
    """
    split = job.config.stage_layers
    num_few = max(1, split.total // job.target.num_chunks)
    if num_few == split.total:
        raise DataError(f"a model of {num_few} layer cannot be measured with fewer")
    steps = [job.grid(trace, widths=(1,))]
    (few,) = measure(job.timer(num_few), steps, rounds, splits=False)
    return stage_weights(
        sum(map(total_seconds, measured)),
        sum(map(total_seconds, few)),
        num_few=num_few,
        stage_layers=split,
    )


def origin(num_rows: int, worst_fit_error: float) -> Origin:
    """Describe this command, this machine and today's date."""
    device = f"{machine()}, {torch.get_num_threads()} thread(s)"
    if cpu.uses_cuda():
        device = torch.cuda.get_device_name()
    return Origin(
        command=shlex.join(["tools/calibrate.py", *sys.argv[1:]]),
        date=datetime.date.today().isoformat(),
        device=device,
        versions=", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        num_rows=num_rows,
        worst_fit_error=worst_fit_error,
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def run(args: argparse.Namespace) -> None:
    """Measure, fit, and write the file on rank 0."""
    config = load_config(find_config(args.config), args.overrides, TrainConfig)
    launch.quiet_known_warnings()
    launch.start(config.device)
    job = Job(config)
    trace = Trace.read(args.trace, args.trace_samples, job.longest) if args.trace else None
    initialize_parallel(job.layout, config.seed)
    on_first_rank = dist.get_rank() == 0
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if on_first_rank:
            print(line)

    calibration = calibrate(job, trace, args.rounds, report)
    if on_first_rank:
        args.out.write_text(dump_yaml(calibration), encoding="utf-8")
        print(f"wrote {args.out}")
        if args.measured:
            _write_measured(lines, calibration.origin)


def _write_measured(lines: Sequence[str], of: Origin | None) -> None:
    assert of is not None
    what = (
        "What the tool printed of its fit: relative errors of a row's seconds, for rows that were "
        "fitted and for rows of other samples that were not."
    )
    rows = [tuple(line.rpartition(": ")[::2]) for line in lines]
    body = table(["rows, or what was fitted", "error, or value"], rows)
    title = "Error of a measured cost model"
    measured.write("calibration_fit", title, what, [body], f"{of.versions}, {of.device}")


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a YAML file, or the name of a config that megapack ships")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", type=Path, required=True, help="the YAML file to write")
    parser.add_argument(
        "--trace", type=Path, help="CSV of prompt and response lengths to check the fit on"
    )
    parser.add_argument("--trace-samples", type=int, default=256, help="samples of the trace used")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each row")
    parser.add_argument("--measured", action="store_true", help="write docs/measured as well")
    args = parser.parse_intermixed_args()
    if min(args.rounds, args.trace_samples) < 1:
        parser.error("--rounds and --trace-samples must be 1 or more")
    try:
        run(args)
    except MegapackError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    finally:
        launch.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
