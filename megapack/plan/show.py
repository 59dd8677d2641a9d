"""Plans printed for people: a grid of micro-batches by DP rank, and how two plans differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import takewhile, zip_longest
from typing import Any

from megapack.errors import ConfigError, brief
from megapack.plan.facts import features_of, row_facts
from megapack.plan.microbatch import MicroBatch
from megapack.plan.plan import Plan, StepPlan

# Limits of what is printed, chosen by hand: a grid of 8 columns such as "10:17532" is 86 wide.
_MAX_RANKS = 8
_MAX_ROWS = 64
_MAX_STEPS = 32
_MAX_SAMPLES = 16
_MAX_OPERATIONS = 256
# Characters of a value that differs.
_MAX_EXCERPT = 60


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
    counts = step.counts
    group = "" if step.group_size is None else f" G={step.group_size}"
    num_dropped = counts.num_dropped_rollouts
    dropped = f", {num_dropped} rollouts dropped" if num_dropped else ""
    features = "".join(f"; {feature.line(counts)}" for feature in features_of(counts))
    return (
        f"step {number}: M={counts.microbatch_span}{group}, {counts.num_rows} rows, "
        f"{counts.num_padding_rows} padding, {counts.tokens} tokens in {counts.row_tokens} row "
        f"tokens{dropped}{features}"
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
    is_over = plan.capacity is not None and mb.padded_tokens > plan.capacity * mb.width
    return f"{len(mb.samples)}:{mb.row_tokens}{marks}{'!' * is_over}"


def _row_line(plan: Plan, k: int, mb: MicroBatch) -> str:
    if not mb.samples:
        return f"{k:>6}  . {mb.row_tokens} row tokens"
    samples = ",".join(map(str, mb.samples[:_MAX_SAMPLES]))
    more = len(mb.samples) - _MAX_SAMPLES
    facts = "".join(f"; {fact.text(mb)}" for fact in row_facts(mb))
    # A damaged plan is shown too.
    ids = plan.adapter_ids or ()
    own = [*dict.fromkeys(ids[i] for i in mb.samples if i < len(ids))]
    facts += f"; adapters {brief(own)}" if own else ""
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


def diff_plans(a: Plan, b: Plan) -> list[str]:
    """Where two plans differ, a line each, from the first difference of two long values on.

    For example "policy.search: 2048 -> 0", or "steps[0].ranks[1][3]: [[4],128,... -> [[5],120,...".
    """
    return [*_differences(json.loads(a.to_json()), json.loads(b.to_json()), "")]


def _differences(one: Any, other: Any, where: str) -> Iterator[str]:
    if one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            yield from _differences(one.get(key), other.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(one, list) and isinstance(other, list) and _is_nested([*one, *other]):
        for k, pair in enumerate(zip_longest(one, other)):
            yield from _differences(*pair, f"{where}[{k}]")
    else:
        texts = [json.dumps(value, separators=(",", ":")) for value in (one, other)]
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
        start = len([*equal])
        yield f"{where}: {' -> '.join(_excerpt(text, start) for text in texts)}"


def _is_nested(values: list[Any]) -> bool:
    """Whether a list holds steps, ranks, rows or lines of operations, and not numbers."""
    return all(isinstance(value, list | dict | str) for value in values)


def _excerpt(text: str, at: int) -> str:
    start = max(at - _MAX_EXCERPT // 2, 0) if len(text) > _MAX_EXCERPT else 0
    end = start + _MAX_EXCERPT
    return f"{'...' * (start > 0)}{text[start:end]}{'...' * (end < len(text))}"
