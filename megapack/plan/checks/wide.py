"""Invariant 9: rows over several DP ranks."""

from __future__ import annotations

from megapack.layout import block_ranks
from megapack.plan.checks.reading import Reading, broken


def check_wide_rows(read: Reading) -> None:
    """Raise PlanError if a row does not stand at one place of an aligned block of ranks."""
    policy, layout = read.plan.policy, read.plan.row_layout
    for where, step, rank, k, mb in read.rows:
        if not mb.dp_ranks:
            continue
        width = len(mb.dp_ranks)
        if policy.context_parallel != "dynamic":
            raise broken(9, f"{where} lies over {width} ranks, context_parallel='fixed'")
        if width > (policy.max_width or width):
            raise broken(9, f"{where} lies over {width} ranks, max_width={policy.max_width}")
        is_block = width in layout.widths and mb.dp_ranks == block_ranks(rank, width)
        if not is_block or mb.dp_ranks[-1] >= len(step.ranks):
            raise broken(
                9, f"{where} lies over the ranks {mb.dp_ranks}; these are no aligned block"
            )
        others = [r for r in mb.dp_ranks if step.ranks[r][k : k + 1] != (mb,)]
        if others:
            raise broken(
                9,
                f"{where} lies over the ranks {mb.dp_ranks}, and rank {others[0]} runs another row "
                "there",
            )
