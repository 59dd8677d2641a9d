"""A page about a plan or a run: one HTML file that needs no network.

    plan or run -> Page: its facts and the capped data of its charts -> page_html

It contains its style, script and numbers. `plot` draws the same steps and charts.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import CostModel
from megapack.job.view.records import RunRecords, number_or_none
from megapack.job.view.timeline import Timeline, last_batch, planned, traced, typical_ranks
from megapack.outlook.baselines import naive_plans
from megapack.outlook.stats import full_row, plan_report, row_fill
from megapack.pipeline.simulator import EVENT_KINDS
from megapack.plan.facts import FEATURES, features_of, row_facts
from megapack.plan.plan import Plan

# Limits of a page, chosen by hand; a full one stays below 2 MB (tests/unit/job/view/test_page.py).
_MAX_EVENTS = 20_000
_MAX_STEPS = 32
_MAX_RANKS = 8
# Lanes of one step: 8 ranks of 4 stages, planned and measured, are 64.
_MAX_LANES = 64
_MAX_POINTS = 2_000
_NUM_BINS = 40

Facts = list[tuple[str, str]]


@dataclass(kw_only=True)
class Page:
    """One page. Texts are not escaped; `page_html` does that."""

    title: str
    facts: Facts
    unit: str
    """Unit of the timelines' times."""
    notes: list[str] = field(default_factory=list)
    """What was left out, and what the times are based on."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Timelines, see `step_data`."""
    curves: list[dict[str, Any]] = field(default_factory=list)
    """Lines over steps: title, unit, x, and series of name and y."""
    histograms: list[dict[str, Any]] = field(default_factory=list)
    """Histograms: title, unit, what is counted, low and high edge, counts."""


def plan_page(plan: Plan, lengths: Ints | None, cost: CostModel, unit: str) -> Page:
    """A page about a plan, beside simple packing of the same samples.

    Args:
        lengths: real tokens of each sample, as they were planned; None leaves their histogram and
            simple packing out.
        cost: time of micro-batches, in `unit`.
    """
    page = Page(title=f"plan {plan.digest()[:12]}", facts=_plan_facts(plan), unit=unit)
    plans = {"planned": plan}
    if lengths is not None:
        plans["next-fit"] = naive_plans(plan, lengths)["next-fit"]
    reports = {source: plan_report(packed, cost=cost) for source, packed in plans.items()}
    ours = reports["planned"]
    numbers = list(range(ours.num_steps))
    times, idles = {}, {}
    for source, report in reports.items():
        time = f"{report.seconds:.4g} s" if unit == "s" else f"{report.seconds:.0f} {unit}"
        ratio = "" if report is ours else f", {report.seconds / ours.seconds:.2f} x planned"
        page.facts.append((f"time, {source}", f"{time}{ratio}"))
        page.facts.append((f"bubble, {source}", f"{report.bubble_fraction:.1%}"))
        times[source] = [step.seconds for step in report.steps]
        idles[source] = [100 * step.bubble_fraction for step in report.steps]
    if ours.num_steps > 1:
        page.curves.append(_curve("time of a step", unit, numbers, times))
        page.curves.append(_curve("bubble", "%", numbers, idles))
    groups = (
        [planned(packed, number, number, cost, source) for source, packed in plans.items()]
        for number in sorted(numbers, key=lambda number: -times["planned"][number])
    )
    _add_timelines(page, groups, len(numbers))
    page.histograms += _histograms(plan, lengths)
    return page


def run_page(records: RunRecords, cost: CostModel | None) -> Page:
    """A page about a run: timelines of its traced steps, or else the planned ones of its last
    batch.

    Args:
        cost: see `timeline.traced`.
    """
    plan = records.plan
    page = Page(title=f"run {records.name}", facts=_run_facts(records), unit="s")
    page.facts += [(f"last batch: {name}", value) for name, value in _plan_facts(plan)]
    charts: list[tuple[str, str, dict[str, str]]] = [
        ("step time", "s", {"predicted": "step_predicted_s", "measured": "step_measured_s"}),
        ("loss", "", {"loss": "loss"}),
        ("gradient norm", "", {"gradient norm": "grad_norm"}),
        ("tokens per second", "", {"tokens per second": "tokens_per_second"}),
        ("fill of rows", "", {"fill": "fill"}),
    ]
    for feature in FEATURES:
        share = feature.share
        if share.metric and any(_column(records, share.metric)):
            what = "of the tokens" if share.form else "number"
            charts.append((feature.name, "", {what: share.metric}))
    numbers = [line["step"] for line in records.metrics]
    for title, unit, keys in charts:
        series = {name: _column(records, key) for name, key in keys.items()}
        page.curves.append(_curve(title, unit, numbers, series))
    timelines = traced(records, cost)
    groups = [timelines[i : i + 2] for i in range(0, len(timelines), 2)]
    if not groups:
        groups = [[timeline] for timeline in last_batch(records, cost)]
        page.notes.append(
            "no step was traced: timelines are those planned for the last batch; "
            "train.trace_steps=2 shows measured ones beside"
        )
    _add_timelines(page, iter(groups), len(groups))
    page.histograms += _histograms(plan, records.lengths)
    return page


def page_html(page: Page) -> str:
    """The content of the HTML file. Text from plans and runs is data, which no browser parses."""
    parts = {
        "TITLE": html.escape(page.title),
        "STYLE": _resource("report.css"),
        "SCRIPT": _resource("report.js"),
        "DATA": _inline_json(asdict(page)),
    }
    # The template is split once, so that inserted text is not searched for markers.
    pieces = _resource("report.html").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _inline_json(value: Any) -> str:
    """JSON that cannot close the script element around it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    return (resources.files("megapack.job.view") / "web" / name).read_text(encoding="utf-8")


def _plan_facts(plan: Plan) -> Facts:
    counts = plan.counts
    num_microbatches = counts.num_rows + counts.num_padding_rows
    budget = f"{plan.max_tokens_per_gpu} tokens per GPU"
    if plan.max_tokens_per_gpu is None:
        budget = f"{plan.micro_batch_size} samples per micro-batch"
    return [
        ("layout", f"{plan.layout.label}, {plan.layout.world_size} GPUs"),
        ("budget", budget),
        ("samples", f"{plan.num_samples}"),
        ("optimizer steps", f"{counts.num_steps}"),
        ("M", counts.microbatch_span),
        ("micro-batches", f"{num_microbatches}, {counts.num_padding_rows} of them padding"),
        ("tokens", f"{counts.tokens}"),
        *((feature.name, feature.text(counts)) for feature in features_of(counts)),
        ("padding", f"{counts.padding_fraction:.2%} of row tokens"),
        ("dropped rollouts", f"{counts.num_dropped_rollouts}"),
    ]


def _run_facts(records: RunRecords) -> Facts:
    if not records.metrics:
        return [("steps", "0")]
    last = records.metrics[-1]
    measured = _column(records, "step_measured_s")
    errors = [
        abs(predicted / seconds - 1) if predicted is not None and seconds else None
        for predicted, seconds in zip(_column(records, "step_predicted_s"), measured, strict=True)
    ]
    medians = [
        ("median step", "{:.4g} s", measured),
        ("prediction off by", "{:.1%} in the median step", errors),
        ("tokens per second", "{:.0f} in the median step", _column(records, "tokens_per_second")),
    ]
    loss = number_or_none(last.get("loss"))
    shown = f"{last.get('loss')}" if loss is None else f"{loss:.5g}"
    facts = [("steps", f"{last['step']}"), ("last loss", shown)]
    for name, text, values in medians:
        if known := [value for value in values if value is not None]:
            facts.append((name, text.format(np.median(known))))
    return facts


def _column(records: RunRecords, key: str) -> list[float | None]:
    return [number_or_none(line.get(key)) for line in records.metrics]


def _curve(title: str, unit: str, x: list[int], series: dict[str, list[Any]]) -> dict[str, Any]:
    stride = -(-len(x) // _MAX_POINTS) or 1
    lines = [{"name": name, "y": y[::stride]} for name, y in series.items()]
    shown = title if stride == 1 else f"{title} (every {stride}th step)"
    return {"title": shown, "unit": unit, "x": x[::stride], "series": lines}


def _add_timelines(page: Page, groups: Iterator[list[Timeline]], num_groups: int) -> None:
    """Add as many steps as fit, in the order of `groups`, and a note about the others."""
    num_events = 0
    for group in groups:
        step = typical_step(group)
        num_events += sum(len(track["events"]) for track in step["tracks"])
        if page.steps and (num_events > _MAX_EVENTS or len(page.steps) == _MAX_STEPS):
            break
        page.steps.append(step)
    page.steps.sort(key=lambda step: int(step["number"]))
    if len(page.steps) < num_groups:
        page.notes.append(f"timelines of {len(page.steps)} of {num_groups} steps are shown")


def typical_step(group: Sequence[Timeline], most: int = _MAX_RANKS) -> dict[str, Any]:
    """What is drawn of a step: its number, label and end, and a track of each drawn rank in each
    timeline, such as the planned and the measured one.

    Args:
        most: so many tracks are drawn of a timeline, or fewer of several and of many operations:
            typical ranks if the step has more; 1 = the slowest.
    """
    layout = group[0].plan.layout
    per_rank = sum(len(timeline.events) for timeline in group) / layout.dp
    lanes = _MAX_LANES // (layout.pp * len(group))
    # Planned and measured, the same ranks are drawn; packed in another way, the slowest are others.
    ends = {id(timeline.step): timeline.rank_ends for timeline in group}
    most = max(1, min(most // len(ends), lanes, int(_MAX_EVENTS / per_rank)))
    tracks = [
        [_track(timeline, rank) for rank in typical_ranks(ends[id(timeline.step)], most)]
        for timeline in group
    ]
    label = f"step {group[0].number}"
    if most < layout.dp:
        label += f": {most} of {layout.dp} DP ranks, slowest first"
    return {
        "number": group[0].number,
        "label": label,
        "end": max(timeline.end for timeline in group),
        "tracks": list(itertools.chain(*zip(*tracks, strict=True))),
    }


def _track(timeline: Timeline, rank: int) -> dict[str, Any]:
    ends = timeline.rank_ends
    slowest = " (slowest)" if len(ends) > 1 and ends[rank] == max(ends) else ""
    return {
        "label": f"{timeline.source}, rank {rank}{slowest}",
        "source": timeline.source,
        "stages": timeline.plan.layout.pp,
        "chunks": timeline.plan.layout.vpp,
        "rows": [
            (
                len(mb.samples),
                mb.tokens,
                mb.row_tokens,
                {fact.key: fact.text(mb) for fact in row_facts(mb)},
            )
            for mb in timeline.step.ranks[rank]
        ],
        "events": [
            (
                e.stage,
                e.chunk,
                e.microbatch,
                EVENT_KINDS.index(e.kind),
                _short(e.start),
                _short(e.end),
            )
            for e in timeline.events
            if e.rank == rank
        ],
    }


def _short(value: float) -> float:
    """The value in seven digits; more would not be visible on a screen."""
    return float(f"{value:.7g}")


def _histograms(plan: Plan, lengths: Ints | None) -> list[dict[str, Any]]:
    """Sample lengths, if they are known, and the fill and the samples of rows."""
    rows = [mb for step in plan.steps for mb in step.microbatches if mb.samples]
    full, name = full_row(plan, plan.steps)
    fills = np.array([100 * row_fill(mb, full) for mb in rows])
    num_over = int((fills > 100).sum())
    over = f"; {num_over} rows over it, in the last bar" if num_over else ""
    fills = np.minimum(fills, 100.0)
    samples = np.array([float(len(mb.samples)) for mb in rows])
    charts = [
        _histogram(f"row fill: real tokens over {name}{over}", "%", "rows", fills, high=100.0),
        _histogram("samples per row", "samples", "rows", samples),
    ]
    if lengths is not None:
        charts.insert(0, _histogram("sample lengths", "tokens", "samples", lengths.astype(float)))
    return charts


def _histogram(
    title: str, unit: str, what: str, values: Floats, *, high: float | None = None
) -> dict[str, Any]:
    """A chart's bars; `high` is the end of its axis, the largest value by default."""
    low = 0.0
    high = float(values.max(initial=1.0)) if high is None else high
    bins = _NUM_BINS
    if unit == "samples" and high < _NUM_BINS:
        # One bar per number of samples, centred on it: 0 to 3 samples are 4 bars from -0.5 to 3.5.
        bins = int(high) + 1
        low = -0.5
        high += 0.5
    counts, _ = np.histogram(values, bins=bins, range=(low, high))
    sizes = {"low": low, "high": high, "counts": counts.tolist()}
    return {"title": title, "unit": unit, "what": what, **sizes}
