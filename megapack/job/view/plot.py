"""Pictures of steps: what the page shows of them, drawn by matplotlib into a file.

    timelines -> the page's steps (page) -> png, svg or pdf

Needs matplotlib, which the functions import when they draw.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megapack.errors import ConfigError
from megapack.pipeline.simulator import EVENT_KINDS
from megapack.plan import facts

# Okabe and Ito's colours, which colour-blind readers can distinguish too.
_COLOURS = {"forward": "#56b4e9", "backward": "#e69f00", "weight gradients": "#009e73"}
_COLOURS["images"] = "#cc79a7"
_NAMES = dict(zip(EVENT_KINDS, [*_COLOURS, "images"], strict=True))
# Of images ahead of all micro-batches.
_NO_ROW: Any = (1, 0, 0, {})
_PADDING = "#999999"
_IDLE = "#ececec"
_INK = "#1a1a1a"
_SHARED = "#cc0066"
_MAX_LABELS = 400
# Shares of the time axis that are about 3 and 6 pixels wide: narrower boxes have no lines between
# them, and no frame but its lower edge. Outlines would hide their colours.
_SEEN, _FRAMED = 0.0026, 0.0052
# Between the lanes of two ranks, in lanes.
_GAP = 0.6
_LEGEND: Any = {"loc": "lower right", "bbox_to_anchor": (1, 1), "frameon": False, "fontsize": 8}
_FONT = {"font.size": 9, "svg.hashsalt": "megapack", "svg.fonttype": "none"}


def draw_steps(
    steps: Mapping[str, dict[str, Any]], unit: str, suffix: str, heading: str = ""
) -> bytes:
    """Timelines of steps, one below the other on a shared time axis.

    Args:
        steps: what `page.typical_step` gives, by title.
        unit: unit of the timelines' times.
        suffix: png, svg or pdf.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed; pip install matplotlib") from None
    tracks = [track for step in steps.values() for track in step["tracks"]]
    with matplotlib.rc_context(_FONT):
        # Inches of lanes, of the space between ranks and steps, and of the axis and the heading.
        height = sum(0.17 * track["stages"] + 0.3 for track in tracks) + 0.25 * len(steps)
        size = (11, height + 0.5 + 0.2 * len(heading.splitlines()))
        figure = Figure(figsize=size, layout="constrained")
        plots = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
        end = max(step["end"] for step in steps.values())
        frames = _frames(tracks)
        for axes, (title, step) in zip(plots, steps.items(), strict=True):
            _draw_timeline(axes, step, end, frames)
            axes.set_title(title, fontsize=9, loc="left")
        _legend(plots[0], tracks, frames)
        paler = "; paler: later chunks" if tracks[-1]["chunks"] > 1 else ""
        plots[-1].ticklabel_format(axis="x", style="plain", useOffset=False)
        plots[-1].set_xlabel(
            f"time in {unit}; a rank's lanes are its stages, the first on top{paler}"
        )
        figure.suptitle(heading, fontsize=10)
        # Leave the date out, so that equal plans give equal files.
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=110, metadata=metadata)
        return buffer.getvalue()


def _frames(tracks: Sequence[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """What rows of these tracks are framed for, by `RowFact.key`: legend and colour."""
    had = {key for track in tracks for *_, own in track["rows"] for key in own}
    rows = [row for feature in facts.FEATURES if (row := feature.row) and row.key in had]
    return {r.key: (r.legend, _SHARED if r.key == "dp_ranks" else _INK) for r in rows if r.legend}


def _draw_timeline(
    axes: Any, step: dict[str, Any], end: float, frames: dict[str, tuple[str, str]]
) -> None:
    """A lane per stage, on a time axis up to `end`, which the figure's timelines share.

    Args:
        frames: see `_frames`.
    """
    from matplotlib.collections import LineCollection, PolyCollection

    # Of each box its corners, and the colours of its face and its edge, and the width of the edge.
    boxes, framed, labels = [], [], []
    # Begins of micro-batches that several ranks share, on the first stage, which a line joins.
    joins: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    ticks = {}
    top = 0.0
    for track in step["tracks"]:
        axes.barh(top, step["end"], track["stages"], align="edge", color=_IDLE)
        ticks[track["label"].partition(", ")[2].replace(" (", "\n(")] = top + track["stages"] / 2
        for stage, chunk, microbatch, kind, start, stop in track["events"]:
            samples, _, _, own = track["rows"][microbatch] if microbatch >= 0 else _NO_ROW
            low, high = top + stage + 0.06, top + stage + 0.94
            box = [(start, low), (stop, low), (stop, high), (start, high)]
            wide = (stop - start) / end
            face = _colour(EVENT_KINDS[kind], chunk / max(1, track["chunks"] - 1), samples)
            boxes.append((box, face, "white", 0.4 if wide > _SEEN else 0.0))
            for key in frames.keys() & own.keys():
                outline = box if wide > _FRAMED else box[2:]
                framed.append((outline, "none", frames[key][1], 1.0))
            if "dp_ranks" in own and stage == chunk == 0 and wide > _FRAMED:
                joins[kind, microbatch, own["dp_ranks"]] += [(start, low), (start, high)]
            # Only boxes that are wide enough have their number in them.
            if wide > 0.011 and microbatch >= 0:
                labels.append(((start + stop) / 2, (low + high) / 2, str(microbatch)))
        top += track["stages"] + _GAP
    corners, faces, edges, widths = zip(*boxes, *framed, strict=True)
    axes.add_collection(PolyCollection(corners, fc=faces, ec=edges, lw=widths))
    axes.add_collection(LineCollection(list(joins.values()), colors=_SHARED, linewidths=1.6))
    for x, y, text in labels if len(labels) <= _MAX_LABELS else ():
        axes.text(x, y, text, ha="center", va="center", fontsize=6, color=_INK)
    axes.set_xlim(0, end)
    axes.set_ylim(top - _GAP, 0)
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)


def _colour(kind: str, place: float, num_samples: int) -> Any:
    """Colour of an operation, paler for later chunks: `place` is from 0 to 1."""
    from matplotlib.colors import to_rgb

    if not num_samples:
        return to_rgb(_PADDING)
    rgb = np.array(to_rgb(_COLOURS[_NAMES[kind]]))
    return tuple(rgb + (1 - rgb) * 0.55 * place)


def _legend(
    axes: Any, tracks: Sequence[dict[str, Any]], frames: dict[str, tuple[str, str]]
) -> None:
    """The colours of the operations that some of the tracks have, and the frames."""
    from matplotlib.patches import Patch

    kinds = {kind for track in tracks for _, _, _, kind, _, _ in track["events"]}
    names = {(name := _NAMES[EVENT_KINDS[kind]]): _COLOURS[name] for kind in sorted(kinds)}
    if any(not row[0] for track in tracks for row in track["rows"]):
        names["padding"] = _PADDING
    names["idle"] = _IDLE
    patches = [Patch(color=colour, lw=0, label=name) for name, colour in names.items()]
    patches += [Patch(fill=False, ec=c, lw=1.5, label=name) for name, c in frames.values()]
    # Narrow, with room for a title beside six entries.
    axes.legend(handles=patches, ncols=9, columnspacing=1.1, handlelength=1.5, **_LEGEND)
