"""Timelines as Chrome trace events, which Perfetto and chrome://tracing open.

One process per source and DP rank, one thread per pipeline stage. Steps follow each other; the
planned and the measured timeline of a step begin together. Format: "Trace Event Format", Google,
2016.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from megapack.job.view.timeline import Timeline
from megapack.pipeline.simulator import Event
from megapack.plan.facts import row_facts

_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}


def chrome_trace(timelines: Sequence[Timeline], microseconds: float = 1e6) -> str:
    """The JSON of a trace file.

    Args:
        microseconds: microseconds in the timelines' unit of time.
    """
    sources = list(dict.fromkeys(timeline.source for timeline in timelines))
    events = [*_processes(timelines, sources), *_slices(timelines, sources, microseconds)]
    # One event per line: readable, and quick to search.
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _process(timeline: Timeline, rank: int, sources: list[str]) -> int:
    # Process 0 is the operating system, so ids begin at 1.
    return 1 + sources.index(timeline.source) * timeline.plan.layout.dp + rank


def _processes(timelines: Sequence[Timeline], sources: list[str]) -> Iterator[dict[str, Any]]:
    """Names of processes and threads, and their order on screen."""
    for timeline in {timeline.source: timeline for timeline in timelines}.values():
        for rank in range(timeline.plan.layout.dp):
            pid = _process(timeline, rank, sources)
            yield _meta(pid, 0, "process_name", {"name": f"{timeline.source}: DP rank {rank}"})
            yield _meta(pid, 0, "process_sort_index", {"sort_index": pid})
            for stage in range(timeline.plan.layout.pp):
                yield _meta(pid, stage, "thread_name", {"name": f"stage {stage}"})
                yield _meta(pid, stage, "thread_sort_index", {"sort_index": stage})


def _meta(pid: int, tid: int, name: str, args: dict[str, str | int]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _slices(
    timelines: Sequence[Timeline], sources: list[str], microseconds: float
) -> Iterator[dict[str, Any]]:
    begins = _begins(timelines)
    for timeline in timelines:
        begin = begins[timeline.number]
        for event in timeline.events:
            yield {
                "ph": "X",
                "pid": _process(timeline, event.rank, sources),
                "tid": event.stage,
                "name": f"{_NAMES[event.kind]} {event.microbatch}{_what(timeline, event)}",
                "cat": timeline.source,
                "ts": round((begin + event.start) * microseconds, 3),
                "dur": round((event.end - event.start) * microseconds, 3),
                "args": _args(timeline, event),
            }


def _what(timeline: Timeline, event: Event) -> str:
    """What pictures frame the micro-batch for, for its name: " (ranks 4-7)"."""
    mb = timeline.microbatch(event)
    return "".join(f" ({fact.text(mb)})" for fact in row_facts(mb) if fact.legend)


def _args(timeline: Timeline, event: Event) -> dict[str, int | str]:
    mb = timeline.microbatch(event)
    return {
        "step": timeline.number,
        "chunk": event.chunk,
        "microbatch": event.microbatch,
        "samples": len(mb.samples),
        "tokens": mb.tokens,
        "row_tokens": mb.row_tokens,
        **{fact.key: fact.value(mb) for fact in row_facts(mb)},
    }


def _begins(timelines: Sequence[Timeline]) -> dict[int, float]:
    """Start of each step; a step lasts as long as the longer of its timelines."""
    longest: dict[int, float] = {}
    for timeline in timelines:
        longest[timeline.number] = max(longest.get(timeline.number, 0.0), *timeline.rank_ends)
    ends = itertools.accumulate(longest.values(), initial=0.0)
    return dict(zip(longest, ends, strict=False))
