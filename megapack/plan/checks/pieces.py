"""Invariant 10: samples and families in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megapack.plan.checks.reading import Reading, broken
from megapack.prefixes import Spans

if TYPE_CHECKING:
    from megapack.plan.plan import MicroBatch, Part


def check_pieces(read: Reading) -> None:
    """Raise PlanError if a sample is in pieces that no executor runs."""
    for where, step in read.steps:
        for rank, row in enumerate(step.ranks):
            is_off = read.plan.policy.split_samples == "off"
            if any(mb.pieces for mb in row) and (is_off or read.budget is None):
                reason = "split_samples='off'" if is_off else "no budget"
                raise broken(10, f"{where} rank {rank} has pieces of samples with {reason}")
            for chain in step.chains(rank):
                here = f"{where} rank {rank} micro-batches {chain.start} to {chain.stop - 1}"
                _check_chain(read, [row[k] for k in chain], here)
                group = step.group_size
                if group is not None and chain.start // group != (chain.stop - 1) // group:
                    raise broken(10, f"{here} are not in one group of G={group}")


def _check_chain(read: Reading, rows: list[MicroBatch], where: str) -> None:
    num_samples = read.lengths.size
    pieces: dict[int, list[tuple[int, int]]] = {}
    for mb in rows:
        if [part.sample for part in mb.pieces] != list(mb.samples[: len(mb.pieces)]):
            raise broken(10, f"{where} have pieces that are not the first of their row")
        for sample, begin, end in mb.pieces:
            if not 0 <= sample < num_samples:
                raise broken(10, f"{where} have pieces of sample {sample} of {num_samples}")
            pieces.setdefault(sample, []).append((begin, end))
    unit = read.plan.row_layout.over(rows[0].width).sample_alignment
    for sample, spans in pieces.items():
        _check_spans(int(read.lengths[sample]), sample, spans, unit, where)
    if len(pieces) > 1:
        _check_family(read, rows[0].pieces, max(map(len, pieces.values())), where)
    for sample in pieces:
        colocated = np.flatnonzero(read.set_of == read.set_of[sample]).tolist()
        if len(colocated) > 1 and not pieces.keys() >= set(colocated):
            raise broken(
                10, f"{where} split sample {sample}, one of {len(colocated)} in a colocated set"
            )
    over = {mb.dp_ranks for mb in rows}
    if len(over) > 1:
        raise broken(10, f"{where} are a chain, and lie over the DP ranks {sorted(over)}")


def _check_spans(
    length: int, sample: int, spans: list[tuple[int, int]], unit: int, where: str
) -> None:
    ends = [0, *(end for _, end in spans)]
    if [start for start, _ in spans] != ends[:-1] or ends[-1] != length:
        raise broken(
            10, f"{where} have the pieces {spans} of sample {sample}, which has {length} tokens"
        )
    if any(end % unit for end in ends[:-1]) or sorted(set(ends)) != ends:
        raise broken(10, f"{where}: pieces end at {ends[1:]}, not at multiples of {unit}")


def _check_family(read: Reading, first: tuple[Part, ...], most: int, where: str) -> None:
    """Check a chain of several samples.

    Args:
        first: the pieces of its first row, which begin all of the samples.
        most: pieces of a sample.
    """
    end = first[0].end
    if most > 2:
        raise broken(10, f"{where} have {most} pieces of a sample of a family, not 2")
    members = [part.sample for part in first]
    saved, _ = read.saved(members, 1, Spans.of(members, first))
    if any(part.end != end for part in first) or saved != (len(first) - 1) * end:
        raise broken(
            10,
            f"{where} begin with {len(first)} pieces that end at "
            f"{sorted({part.end for part in first})}, and share {saved} tokens instead of all",
        )
