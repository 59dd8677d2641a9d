"""Pictures of a step: the timelines of its pipelines, the fill of its rows, the load of its ranks.

Needs matplotlib, which the functions import when they draw.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megapack.errors import ConfigError
from megapack.job.view.timeline import Timeline, typical_ranks
from megapack.outlook.stats import StepReport, full_row, row_fill
from megapack.pipeline.simulator import Event
from megapack.plan.facts import RowFact, features_of, row_facts
from megapack.plan.microbatch import MicroBatch

# Okabe and Ito's colours, which colour-blind readers can distinguish too.
_FORWARD = "#56b4e9"
_BACKWARD = "#e69f00"
_WEIGHTS = "#009e73"
_COLOURS = {"F": _FORWARD, "B": _BACKWARD, "W": _WEIGHTS}
_PADDING = "#999999"
_WAITING = "#ececec"
_INK = "#1a1a1a"
_SHARED = "#cc0066"
# Frames of rows by `RowFact.key`; others are as those of pieces.
_FRAMES = {"dp_ranks": _SHARED, "piece": _INK}
# More ranks than _MAX_RANKS are shown as _NUM_TYPICAL: the slowest, the median and the fastest.
_MAX_RANKS = 8
_NUM_TYPICAL = 3
_MAX_LABELS = 400
_FONT = {"font.size": 9, "svg.hashsalt": "megapack", "svg.fonttype": "none"}


def draw_step(timeline: Timeline, report: StepReport, unit: str, suffix: str) -> bytes:
    """A figure of one step.

    Args:
        report: the numbers of the same step.
        unit: unit of the timeline's times.
        suffix: png, svg or pdf.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    with _drawing() as figure_of:
        ends = timeline.rank_ends
        ranks = typical_ranks(ends, _MAX_RANKS if len(ends) <= _MAX_RANKS else _NUM_TYPICAL)
        lanes = len(ranks) * timeline.plan.layout.pp
        heights = [max(1.2, 0.17 * lanes + 0.3 * len(ranks)), 1.9]
        figure = figure_of(figsize=(11, sum(heights) + 1.3), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=heights)
        axes = top.subplots()
        _draw_timeline(axes, timeline, ranks, max(ends))
        _legend(axes, [timeline])
        _name_time(axes, timeline, unit)
        if len(ranks) < len(ends):
            shown = f"{len(ranks)} of {len(ends)} DP ranks: the slowest, the median, the fastest"
            axes.set_title(shown, fontsize=9, loc="left")
        fill, load = bottom.subplots(1, 2)
        _draw_fill(fill, timeline)
        _draw_load(load, timeline, unit)
        figure.suptitle(_title(timeline, report), fontsize=10)
        return _bytes(figure, suffix)


def draw_timelines(timelines: dict[str, Timeline], unit: str, suffix: str) -> bytes:
    """The slowest rank of each of several timelines, one below the other on a shared time axis.

    Args:
        timelines: by title.
        unit, suffix: see `draw_step`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    with _drawing() as figure_of:
        lanes = sum(timeline.plan.layout.pp for timeline in timelines.values())
        size = (11, 0.17 * lanes + 0.55 * len(timelines) + 0.5)
        figure = figure_of(figsize=size, layout="constrained")
        plots = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
        end = max(max(timeline.rank_ends) for timeline in timelines.values())
        for axes, (name, timeline) in zip(plots, timelines.items(), strict=True):
            ends = timeline.rank_ends
            _draw_timeline(axes, timeline, [ends.index(max(ends))], end)
            axes.set_title(name, fontsize=9, loc="left")
        _legend(plots[0], list(timelines.values()))
        _name_time(plots[-1], timeline, unit)
        return _bytes(figure, suffix)


@contextlib.contextmanager
def _drawing() -> Iterator[Any]:
    """matplotlib's `Figure` under our settings, without a window or global state."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed; pip install matplotlib") from None
    with matplotlib.rc_context(_FONT):
        yield Figure


def _bytes(figure: Any, suffix: str) -> bytes:
    # Leave the date out, so that equal plans give equal files.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, dpi=110, metadata=metadata)
    return buffer.getvalue()


def _title(timeline: Timeline, report: StepReport) -> str:
    layout = timeline.plan.layout
    return (
        f"step {timeline.number} of plan {timeline.plan.digest()[:12]}: {layout.label}, "
        f"M={report.microbatch_span}, bubble {report.bubble_fraction:.1%}"
    )


def _draw_timeline(axes: Any, timeline: Timeline, ranks: Sequence[int], end: float) -> None:
    """A lane per stage, on a time axis up to `end`, which the figure's timelines share."""
    from matplotlib.collections import PolyCollection

    pp = timeline.plan.layout.pp
    own_end = max(timeline.rank_ends)
    lane_of = {rank: i * (pp + 0.6) for i, rank in enumerate(ranks)}
    events = [event for event in timeline.events if event.rank in lane_of]
    for lane in lane_of.values():
        axes.add_patch(_rectangle(0, lane, own_end, pp, facecolor=_WAITING))
    boxes = [
        _box(event.start, lane_of[event.rank] + event.stage, event.end - event.start)
        for event in events
    ]
    axes.add_collection(
        PolyCollection(
            boxes,
            facecolors=[_colour(timeline, event) for event in events],
            edgecolors="white",
            linewidths=0.4 if len(events) < 2000 else 0.0,
        )
    )
    _frame_rows(axes, timeline, events, lane_of)
    _join_shared(axes, timeline, events, lane_of)
    _label_boxes(axes, events, lane_of, end)
    axes.set_xlim(0, end)
    axes.set_ylim(len(ranks) * (pp + 0.6) - 0.6, 0)
    axes.set_yticks(
        [lane + pp / 2 for lane in lane_of.values()], [f"rank {rank}" for rank in lane_of]
    )
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)


def _name_time(axes: Any, timeline: Timeline, unit: str) -> None:
    paler = "; paler: later chunks" if timeline.plan.layout.vpp > 1 else ""
    axes.set_xlabel(f"{unit}; stage 0 is the upmost of a rank{paler}")


def _box(start: float, lane: float, width: float) -> list[tuple[float, float]]:
    end = start + width
    low = lane + 0.06
    high = lane + 0.94
    return [(start, low), (end, low), (end, high), (start, high)]


def _rectangle(x: float, y: float, width: float, height: float, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, linewidth=0, **style)


def _colour(timeline: Timeline, event: Any) -> Any:
    """Colour of the operation, paler for later chunks."""
    from matplotlib.colors import to_rgb

    if not timeline.microbatch(event).samples:
        return to_rgb(_PADDING)
    rgb = np.array(to_rgb(_COLOURS[event.kind]))
    share = 0.55 * event.chunk / max(1, timeline.plan.layout.vpp - 1)
    return tuple(rgb + (1 - rgb) * share)


def _join_shared(
    axes: Any, timeline: Timeline, events: Sequence[Event], lane_of: dict[int, float]
) -> None:
    """Join the begins of micro-batches that several ranks share on the first stage."""
    from matplotlib.collections import LineCollection

    joins: dict[tuple[str, int, tuple[int, ...]], list[tuple[float, float]]] = {}
    for event in events:
        ranks = timeline.microbatch(event).dp_ranks
        if ranks and event.stage == event.chunk == 0:
            corners = joins.setdefault((event.kind, event.microbatch, ranks), [])
            corners += [(event.start, lane_of[event.rank] + y) for y in (0.06, 0.94)]
    lines = [sorted(corners, key=lambda corner: corner[1]) for corners in joins.values()]
    axes.add_collection(LineCollection(lines, colors=_SHARED, linewidths=1.6))


def _frame_rows(
    axes: Any, timeline: Timeline, events: Sequence[Event], lane_of: dict[int, float]
) -> None:
    """Frame the micro-batches that have what the legend names."""
    from matplotlib.collections import PolyCollection

    boxes = []
    colours = []
    for event in events:
        for fact in row_facts(timeline.microbatch(event)):
            if fact.legend:
                lane = lane_of[event.rank] + event.stage
                boxes.append(_box(event.start, lane, event.end - event.start))
                colours.append(_frame_colour(fact))
    axes.add_collection(PolyCollection(boxes, facecolors="none", edgecolors=colours, linewidths=1))


def _frame_colour(fact: RowFact) -> str:
    return _FRAMES.get(fact.key, _INK)


def _label_boxes(axes: Any, events: Sequence[Any], lane_of: dict[int, float], end: float) -> None:
    """Write the micro-batch's number into boxes that are wide enough."""
    wide = [event for event in events if event.end - event.start > 0.011 * end]
    if len(wide) > _MAX_LABELS:
        return
    for event in wide:
        x = (event.start + event.end) / 2
        y = lane_of[event.rank] + event.stage + 0.5
        axes.text(x, y, str(event.microbatch), ha="center", va="center", fontsize=6, color=_INK)


def _legend(axes: Any, timelines: Sequence[Timeline]) -> None:
    """The colours, and the frames and operations that some of the timelines have."""
    names = {"forward": _FORWARD, "backward": _BACKWARD}
    if any(event.kind == "W" for timeline in timelines for event in timeline.events):
        names["weight gradients"] = _WEIGHTS
    names |= {"padding": _PADDING, "waiting": _WAITING}
    patches = [_rectangle(0, 0, 1, 1, facecolor=colour) for colour in names.values()]
    rows = (feature.row for feature in features_of(*(t.step.counts for t in timelines)))
    frames = {row.legend: _frame_colour(row) for row in rows if row is not None and row.legend}
    for colour in frames.values():
        patches.append(_rectangle(0, 0, 1, 1, fill=False))
        patches[-1].set(edgecolor=colour, linewidth=1.5)
    names |= frames
    axes.legend(
        patches,
        names,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(names),
        frameon=False,
        fontsize=8,
        # Room for a title beside six entries.
        columnspacing=1.1,
        handlelength=1.5,
    )


def _draw_fill(axes: Any, timeline: Timeline) -> None:
    """Real tokens that each row holds over the budget, or over the longest row without a budget.

    A row that shares prefixes has the share of its samples' tokens that it saves written on it. A
    row over several ranks has one frame around its cells, and so have the pieces of a sample.
    """
    ranks = timeline.step.ranks
    full, name = full_row(timeline.plan, [timeline.step])
    fill = np.full((len(ranks), max(map(len, ranks))), np.nan)
    for r, rank in enumerate(ranks):
        fill[r, : len(rank)] = [row_fill(mb, full) for mb in rank]
    image = axes.imshow(
        fill,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=0,
        vmax=1,
    )
    axes.set_title(f"row fill: real tokens over {name}", fontsize=9, loc="left")
    _frame_shared_cells(axes, ranks)
    _frame_chains(axes, timeline)
    saves = _label_saved(axes, ranks)
    axes.set_xlabel(f"micro-batch{'; number: tokens saved by shared prefixes' if saves else ''}")
    axes.set_ylabel("DP rank")
    _whole_ticks(axes.xaxis, axes.yaxis)
    axes.figure.colorbar(image, ax=axes, format="{x:.0%}")


def _frame_shared_cells(axes: Any, ranks: Sequence[Sequence[MicroBatch]]) -> None:
    """A frame around the cells of each row that several ranks share."""
    for r, rank in enumerate(ranks):
        for k, mb in enumerate(rank):
            if mb.dp_ranks and mb.dp_ranks[0] == r:
                frame = _rectangle(k - 0.5, r - 0.5, 1, mb.width, fill=False)
                frame.set(edgecolor=_SHARED, linewidth=1.5)
                axes.add_patch(frame)


def _frame_chains(axes: Any, timeline: Timeline) -> None:
    """A frame around the cells that hold the pieces of one sample."""
    for rank in range(len(timeline.step.ranks)):
        for chain in timeline.step.chains(rank):
            frame = _rectangle(chain.start - 0.5, rank - 0.5, len(chain), 1, fill=False)
            frame.set(edgecolor=_INK, linewidth=1.5)
            axes.add_patch(frame)


def _label_saved(axes: Any, ranks: Sequence[Sequence[MicroBatch]]) -> bool:
    """Write the saved share into the cells of rows that share; returns whether any row does."""
    cells = [(r, k, mb) for r, rank in enumerate(ranks) for k, mb in enumerate(rank)]
    sharing = [cell for cell in cells if cell[2].shared_tokens]
    if len(cells) <= _MAX_LABELS:
        for r, k, mb in sharing:
            text = f"{mb.shared_tokens / mb.tokens:.0%}"
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 0.5}
            axes.text(k, r, text, ha="center", va="center", fontsize=6, color=_INK, bbox=box)
    return bool(sharing) and len(cells) <= _MAX_LABELS


def _draw_load(axes: Any, timeline: Timeline, unit: str) -> None:
    """Work and waiting of each rank's busiest stage until the last rank is done."""
    ends = timeline.rank_ends
    work = timeline.stage_seconds
    ranks = np.arange(len(ends))
    width = 0.8 if len(ends) <= 32 else 1.0
    axes.bar(ranks, work, width, color=_FORWARD, label="work of the busiest stage")
    bubble = np.array(ends) - work
    axes.bar(ranks, bubble, width, bottom=work, color=_BACKWARD, label="bubble")
    idle = max(ends) - np.array(ends)
    axes.bar(ranks, idle, width, bottom=ends, color=_WAITING, label="until the slowest is done")
    axes.set_title("load of each DP rank", fontsize=9, loc="left")
    axes.set_xlabel("DP rank")
    axes.set_ylabel(unit)
    axes.set_ylim(0, max(ends) * 1.3)
    axes.legend(loc="upper center", ncols=3, fontsize=7, frameon=False, columnspacing=1.0)
    _whole_ticks(axes.xaxis)
    axes.spines[["top", "right"]].set_visible(False)


def _whole_ticks(*axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
