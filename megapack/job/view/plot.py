"""Pictures of steps: what the page shows of them, drawn by matplotlib into a file.

    timelines -> the page's steps and charts (page) -> png, svg or pdf

Needs matplotlib, which the functions import when they draw.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megapack.errors import ConfigError
from megapack.job.view.page import row_charts, step_data, typical_step
from megapack.job.view.timeline import Timeline
from megapack.outlook.stats import StepReport
from megapack.plan.facts import features_of
from megapack.plan.order import KINDS

# Okabe and Ito's colours, which colour-blind readers can distinguish too.
_COLOURS = {"forward": "#56b4e9", "backward": "#e69f00", "weight gradients": "#009e73"}
_NAMES = dict(zip(KINDS, _COLOURS, strict=True))
_PADDING = "#999999"
_WAITING = "#ececec"
_INK = "#1a1a1a"
_SHARED = "#cc0066"
_MAX_LABELS = 400
# Between the lanes of two ranks, in lanes.
_GAP = 0.6
_FONT = {"font.size": 9, "svg.hashsalt": "megapack", "svg.fonttype": "none"}


def draw_step(timeline: Timeline, report: StepReport, unit: str, suffix: str) -> bytes:
    """A figure of one step: its timeline, and below it the charts of its rows.

    Args:
        report: the numbers of the same step.
        unit: unit of the timeline's times.
        suffix: png, svg or pdf.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    step = typical_step([timeline])
    charts = row_charts(timeline.plan, [timeline.step])
    plan = timeline.plan
    title = (
        f"step {timeline.number} of plan {plan.digest()[:12]}: {plan.layout.label}, "
        f"M={report.microbatch_span}, bubble {report.bubble_fraction:.1%}"
    )
    lines = [title, *(feature.line(report) for feature in features_of(report))]
    with _drawing() as figure_of:
        heights = [max(1.2, _height(step)), 1.9]
        size = (11, sum(heights) + 1.1 + 0.2 * len(lines))
        figure = figure_of(figsize=size, layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=heights)
        axes = top.subplots()
        frames = _frames([timeline])
        _draw_timeline(axes, step, step["end"], frames)
        _legend(axes, [timeline], frames)
        _name_time(axes, step, unit)
        if "ranks" in step["label"]:
            axes.set_title(step["label"], fontsize=9, loc="left")
        for axes, chart in zip(bottom.subplots(1, len(charts)), charts, strict=True):
            _draw_histogram(axes, chart)
        figure.suptitle("\n".join(lines), fontsize=10)
        return _bytes(figure, suffix)


def draw_timelines(timelines: dict[str, Timeline], unit: str, suffix: str) -> bytes:
    """The slowest rank of each of several timelines, one below the other on a shared time axis.

    Args:
        timelines: by title.
        unit, suffix: see `draw_step`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    slowest = [int(np.argmax(timeline.rank_ends)) for timeline in timelines.values()]
    pairs = zip(timelines.values(), slowest, strict=True)
    steps = [step_data([timeline], [rank]) for timeline, rank in pairs]
    with _drawing() as figure_of:
        size = (11, sum(_height(step) + 0.25 for step in steps) + 0.5)
        figure = figure_of(figsize=size, layout="constrained")
        plots = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
        end = max(step["end"] for step in steps)
        drawn = list(timelines.values())
        frames = _frames(drawn)
        for axes, name, step in zip(plots, timelines, steps, strict=True):
            _draw_timeline(axes, step, end, frames)
            axes.set_title(name, fontsize=9, loc="left")
        _legend(plots[0], drawn, frames)
        _name_time(plots[-1], steps[-1], unit)
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


def _height(step: dict[str, Any]) -> float:
    """Inches of a step's timeline."""
    return float(sum(0.17 * track["stages"] + 0.3 for track in step["tracks"]))


def _bytes(figure: Any, suffix: str) -> bytes:
    # Leave the date out, so that equal plans give equal files.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, dpi=110, metadata=metadata)
    return buffer.getvalue()


def _frames(timelines: Sequence[Timeline]) -> dict[str, tuple[str, str]]:
    """What rows of these steps are framed for, by `RowFact.key`: legend and colour."""
    rows = (feature.row for feature in features_of(*(t.step.counts for t in timelines)))
    colours = {"dp_ranks": _SHARED}
    return {row.key: (row.legend, colours.get(row.key, _INK)) for row in rows if row and row.legend}


def _draw_timeline(
    axes: Any, step: dict[str, Any], end: float, frames: dict[str, tuple[str, str]]
) -> None:
    """A lane per stage, on a time axis up to `end`, which the figure's timelines share.

    Args:
        frames: see `_frames`.
    """
    from matplotlib.collections import LineCollection, PolyCollection

    boxes, colours, framed, frame_colours, labels = [], [], [], [], []
    # Begins of micro-batches that several ranks share, on the first stage, which a line joins.
    joins: dict[tuple[int, int, str], list[tuple[float, float]]] = {}
    ticks = {}
    top = 0.0
    for track in step["tracks"]:
        axes.add_patch(_rectangle(0, top, step["end"], track["stages"], facecolor=_WAITING))
        ticks[track["label"].partition(", ")[2]] = top + track["stages"] / 2
        for stage, chunk, microbatch, kind, start, stop in track["events"]:
            samples, _, _, facts = track["rows"][microbatch]
            low, high = top + stage + 0.06, top + stage + 0.94
            box = [(start, low), (stop, low), (stop, high), (start, high)]
            boxes.append(box)
            colours.append(_colour(KINDS[kind], chunk / max(1, track["chunks"] - 1), samples))
            for key in frames.keys() & facts.keys():
                framed.append(box)
                frame_colours.append(frames[key][1])
            if "dp_ranks" in facts and stage == chunk == 0:
                joins.setdefault((kind, microbatch, facts["dp_ranks"]), []).extend(
                    [(start, low), (start, high)]
                )
            # Only boxes that are wide enough have their number in them.
            if stop - start > 0.011 * end:
                labels.append(((start + stop) / 2, (low + high) / 2, str(microbatch)))
        top += track["stages"] + _GAP
    widths = 0.4 if len(boxes) < 2000 else 0.0
    axes.add_collection(
        PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=widths)
    )
    axes.add_collection(
        PolyCollection(framed, facecolors="none", edgecolors=frame_colours, linewidths=1)
    )
    axes.add_collection(LineCollection(list(joins.values()), colors=_SHARED, linewidths=1.6))
    for x, y, text in labels if len(labels) <= _MAX_LABELS else ():
        axes.text(x, y, text, ha="center", va="center", fontsize=6, color=_INK)
    axes.set_xlim(0, end)
    axes.set_ylim(top - _GAP, 0)
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)


def _name_time(axes: Any, step: dict[str, Any], unit: str) -> None:
    paler = "; paler: later chunks" if step["tracks"][0]["chunks"] > 1 else ""
    axes.set_xlabel(f"{unit}; stage 0 is the upmost of a rank{paler}")


def _rectangle(x: float, y: float, width: float, height: float, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **({"linewidth": 0} | style))


def _colour(kind: str, place: float, num_samples: int) -> Any:
    """Colour of an operation, paler for later chunks: `place` is from 0 to 1."""
    from matplotlib.colors import to_rgb

    if not num_samples:
        return to_rgb(_PADDING)
    rgb = np.array(to_rgb(_COLOURS[_NAMES[kind]]))
    return tuple(rgb + (1 - rgb) * 0.55 * place)


def _legend(axes: Any, timelines: Sequence[Timeline], frames: dict[str, tuple[str, str]]) -> None:
    """The colours of the operations that some of the timelines have, and the frames."""
    kinds = {event.kind for timeline in timelines for event in timeline.events}
    names = {_NAMES[kind]: _COLOURS[_NAMES[kind]] for kind in KINDS if kind in kinds}
    names |= {"padding": _PADDING, "waiting": _WAITING}
    patches = [_rectangle(0, 0, 1, 1, facecolor=colour) for colour in names.values()]
    for name, colour in frames.values():
        patches.append(_rectangle(0, 0, 1, 1, fill=False, edgecolor=colour, linewidth=1.5))
        names[name] = colour
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


def _draw_histogram(axes: Any, chart: dict[str, Any]) -> None:
    """A histogram of the page."""
    edges = np.linspace(chart["low"], chart["high"], len(chart["counts"]) + 1)
    axes.stairs(chart["counts"], edges, fill=True, color=_COLOURS["forward"])
    axes.set_title(chart["title"], fontsize=9, loc="left")
    axes.set_xlabel(chart["unit"])
    axes.set_ylabel(chart["what"])
    axes.spines[["top", "right"]].set_visible(False)
