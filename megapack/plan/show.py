"""Plans printed for people: a grid of micro-batches by DP rank, and how two plans differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from megapack.errors import ConfigError
from megapack.plan.facts import features_of, row_facts
from megapack.plan.microbatch import MicroBatch
from megapack.plan.plan import Plan, StepPlan
from megapack.prefixes import SharedPrefixes

# Limits of what is printed, chosen by hand: a grid of 8 columns such as "10:17532" is 86 wide.
_MAX_RANKS = 8
_MAX_ROWS = 64
_MAX_STEPS = 32
_MAX_SAMPLES = 16
_MAX_OPERATIONS = 256


def format_grid(plan: Plan, step: int | None = None, rank: int | None = None) -> str:
    """A plan's head, then a line per step, the grid of one step, or the rows of one rank.

    A cell reads `samples:row_tokens`, `.` is a padding micro-batch, `!` marks a row over the
    budget. A row over several ranks is in the cell of each, as `samples:row_tokens@4-7`. A row with
    the tokens 512 to 1024 of its first sample reads `samples:row_tokens[512:1024]`. With a rank,
    each stage's operations follow its rows, if the step has an order of its own. Ranks, rows,
    operations and steps beyond the limits are counted, not shown.

    Args:
        step: show this step's grid; None shows the grid only if the plan has a single step.
        rank: show the samples of this DP rank in the step, and its order.

    Raises:
        ConfigError: no such step or rank.
    """
    if step is None and len(plan.steps) == 1:
        step = 0
    if step is None and rank is not None:
        raise ConfigError(f"rank {rank} of a plan with {len(plan.steps)} steps; set --step too")
    lines = [_head(plan)]
    if step is None:
        lines += _limited([_step_line(k, step_plan) for k, step_plan in enumerate(plan.steps)])
        return "\n".join(lines)
    _check_range("step", step, len(plan.steps))
    shown = plan.steps[step]
    lines.append(_step_line(step, shown))
    if rank is None:
        lines += _grid(plan, shown)
    else:
        _check_range("rank", rank, len(shown.ranks))
        lines += [_row_line(plan, k, mb) for k, mb in enumerate(shown.ranks[rank])]
        lines += _order_lines(shown, rank)
    return "\n".join(lines)


def _head(plan: Plan) -> str:
    budget = f"{plan.max_tokens_per_gpu} tokens per GPU"
    if plan.max_tokens_per_gpu is None:
        budget = f"{plan.micro_batch_size} samples per micro-batch"
    return (
        f"plan {plan.digest()[:12]}: {plan.num_samples} samples in {len(plan.steps)} step(s), "
        f"{plan.layout.label}, {budget}"
    )


def _step_line(number: int, step: StepPlan) -> str:
    return f"step {number}: {_sizes(step)}"


def _sizes(step: StepPlan) -> str:
    counts = step.counts
    group = "" if step.group_size is None else f" G={step.group_size}"
    num_dropped = counts.num_dropped_rollouts
    dropped = f", {num_dropped} rollouts dropped" if num_dropped else ""
    features = "".join(f"; {feature.line(counts)}" for feature in features_of(counts))
    return (
        f"M={counts.microbatch_span}{group}, {counts.num_rows} rows, {counts.num_padding_rows} "
        f"padding, {counts.tokens} tokens in {counts.row_tokens} row tokens{dropped}{features}"
    )


def _grid(plan: Plan, step: StepPlan) -> Iterator[str]:
    ranks = step.ranks[:_MAX_RANKS]
    count = max(map(len, ranks), default=0)
    columns = [[f"rank {r}", *(_cell(plan, mb) for mb in rank)] for r, rank in enumerate(ranks)]
    widths = [max(map(len, column)) for column in columns]
    for k in range(min(count, _MAX_ROWS) + 1):
        cells = (column[k] if k < len(column) else "" for column in columns)
        name = "" if k == 0 else f"{k - 1}"
        padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"{name:>6}  {'  '.join(padded)}".rstrip()
    if count > _MAX_ROWS:
        yield f"   ... {count - _MAX_ROWS} more micro-batches; --rank R shows all of a rank"
    if len(step.ranks) > _MAX_RANKS:
        yield f"   ... {len(step.ranks) - _MAX_RANKS} more ranks; --rank R shows one"


def _cell(plan: Plan, mb: MicroBatch) -> str:
    if not mb.samples:
        return "."
    marks = "".join(fact.mark(mb) for fact in row_facts(mb))
    return f"{len(mb.samples)}:{mb.row_tokens}{marks}{_mark(plan, mb)}"


def _mark(plan: Plan, mb: MicroBatch) -> str:
    capacity = plan.capacity
    return "" if capacity is None or mb.padded_tokens <= capacity * mb.width else "!"


def _row_line(plan: Plan, k: int, mb: MicroBatch) -> str:
    if not mb.samples:
        return f"{k:>6}  . {mb.row_tokens} row tokens"
    samples = ",".join(map(str, mb.samples[:_MAX_SAMPLES]))
    more = len(mb.samples) - _MAX_SAMPLES
    facts = "".join(f"; {fact.text(mb)}" for fact in row_facts(mb))
    return (
        f"{k:>6}  {_cell(plan, mb)}, {mb.tokens} tokens: samples {samples}"
        f"{f' and {more} more' if more > 0 else ''}{facts}"
    )


def _order_lines(step: StepPlan, rank: int) -> Iterator[str]:
    """What each stage of a rank runs; nothing in Megatron's order."""
    for stage, line in enumerate(step.orders[rank] if step.orders else ()):
        operations = line.split()
        more = len(operations) - _MAX_OPERATIONS
        shown = " ".join(operations[:_MAX_OPERATIONS])
        yield f"stage {stage}: {shown}{f' and {more} more' if more > 0 else ''}"


def _limited(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_STEPS
    if more <= 0:
        return lines
    return [*lines[:_MAX_STEPS], f"... {more} more steps; --step S shows one"]


def _check_range(what: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise ConfigError(f"{what} {value} of {count}; set --{what} from 0 to {count - 1}")


Position = tuple[int, tuple[int, ...], tuple[tuple[int, int] | None, ...], tuple[int, ...]]
"""Step, DP ranks, pieces, micro-batches; a sample that is not split has one micro-batch."""


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """Differences of two plans; a pair holds the first plan's value, then the second's."""

    settings: dict[str, tuple[Any, Any]]
    """`layout.dp`, `policy.search`, `max_tokens_per_gpu` and so on."""
    steps: dict[int, tuple[str, str]]
    """Counts, G and sizes of each step that differs, by step number."""
    other_step: tuple[int, ...]
    """Samples that train in another step, or in only one of the plans."""
    other_rank: tuple[int, ...]
    """Samples of the same step on another DP rank, or on more or fewer ranks."""
    other_pieces: tuple[int, ...]
    """Samples of the same step and rank that are cut at other tokens."""
    other_microbatch: tuple[int, ...]
    """Samples of the same step and rank in another micro-batch."""
    orders: dict[int, str]
    """Where the orders of a step that is in both plans first differ, by step number."""
    digests: tuple[str, str]

    @property
    def equal(self) -> bool:
        """Whether nothing differs, the digests included."""
        return self.digests[0] == self.digests[1]


def diff_plans(a: Plan, b: Plan) -> PlanDiff:
    """Compare two plans: settings, steps, and the position of each sample."""
    positions_a = _positions(a)
    positions_b = _positions(b)
    moved: tuple[list[int], ...] = ([], [], [], [])
    for sample in sorted(positions_a.keys() | positions_b.keys()):
        first = positions_a.get(sample)
        second = positions_b.get(sample)
        if first != second:
            level = _first_difference(first, second) if first and second else 0
            moved[level].append(sample)
    steps = [
        tuple("absent" if step is None else _sizes(step) for step in pair)
        for pair in zip_longest(a.steps, b.steps)
    ]
    settings = {key: (own, _settings(b)[key]) for key, own in _settings(a).items()}
    return PlanDiff(
        settings={
            key: (_short(one), _short(other))
            for key, (one, other) in settings.items()
            if one != other
        },
        steps={k: (first, second) for k, (first, second) in enumerate(steps) if first != second},
        other_step=tuple(moved[0]),
        other_rank=tuple(moved[1]),
        other_pieces=tuple(moved[2]),
        other_microbatch=tuple(moved[3]),
        orders={
            k: _order_difference(*pair)
            for k, pair in enumerate(zip(a.steps, b.steps, strict=False))
            if pair[0].orders != pair[1].orders
        },
        digests=(a.digest(), b.digest()),
    )


def _first_difference(first: Position, second: Position) -> int:
    return next(level for level in range(4) if first[level] != second[level])


def _positions(plan: Plan) -> dict[int, Position]:
    positions: dict[int, Position] = {}
    for number, step in enumerate(plan.steps):
        for rank, row in enumerate(step.ranks):
            for k, mb in enumerate(row):
                ranks = mb.ranks(rank)
                for sample in mb.begun_samples:
                    positions[sample] = (number, ranks, (None,), (k,))
                for sample, begin, end in mb.pieces:
                    *_, pieces, rows = ((), ()) if begin == 0 else positions[sample]
                    positions[sample] = (number, ranks, (*pieces, (begin, end)), (*rows, k))
    return positions


def _order_difference(a: StepPlan, b: StepPlan) -> str:
    """The first operation that differs: "rank 0 stage 1 operation 5: 2F0 -> 2B0"."""
    if not (a.orders and b.orders):
        name = "Megatron's order"
        return f"{'own' if a.orders else name} -> {'own' if b.orders else name}"
    if len(a.orders) != len(b.orders):
        return f"{len(a.orders)} ranks -> {len(b.orders)} ranks"
    for rank, (stages, others) in enumerate(zip(a.orders, b.orders, strict=True)):
        for stage, (line, other) in enumerate(zip_longest(stages, others, fillvalue="")):
            pairs = zip_longest(line.split(), other.split(), fillvalue="nothing")
            for index, (first, second) in enumerate(pairs):
                if first != second:
                    return f"rank {rank} stage {stage} operation {index}: {first} -> {second}"
    return "equal operations"


def _settings(plan: Plan) -> dict[str, Any]:
    settings = {f"layout.{key}": value for key, value in asdict(plan.layout).items()}
    settings |= {f"policy.{key}": value for key, value in asdict(plan.policy).items()}
    for key in ("max_tokens_per_gpu", "micro_batch_size", "forward_only", "num_samples"):
        settings[key] = getattr(plan, key)
    ids = {"rollout_ids": plan.rollout_ids, "colocate_ids": plan.colocate_ids}
    return settings | ids | {"prefixes": plan.prefixes}


def _short(value: Any) -> Any:
    """What has an entry per sample as a number: different ids, or samples that share and tokens."""
    if isinstance(value, SharedPrefixes):
        return f"{len(value.order)} samples with {sum(value.common)} common tokens"
    return f"{len(set(value))} ids" if isinstance(value, tuple) else value
