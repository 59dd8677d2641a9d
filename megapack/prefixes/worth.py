"""Which prefixes pay: a tree is executed branch by branch, and each level has a price.

Its keys are gathered once for each branch below it, and attention runs more and shorter sequences.
So samples that begin with the same three tokens by chance, or by a chat template, should not become
a tree: they save three tokens and make all their other tokens pay.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Ints
from megapack.base.jit import kernel
from megapack.layout import Layout
from megapack.prefixes.shared import SharedPrefixes
from megapack.prefixes.table import shared_positions

# A branch is kept if it saves at least 1/32 of the positions below it. Eight answers of 1,000
# tokens keep 36 shared positions: 7 * 36 = 252, and 8,000 / 32 = 250. Chosen by hand: a second call
# reads and merges outputs of all tokens below. With 32 shared tokens before answers of 512, a step
# takes 0.96 of its time (docs/prefixes.md).
_LEAST_PART = 32


def worthwhile(prefixes: SharedPrefixes, aligned: Ints, layout: Layout) -> SharedPrefixes:
    """Keep the prefixes that pay, in O(n).

    A branch of k samples saves k - 1 times its positions. If that is less than 1/32 of its samples'
    positions after it, the samples share only what the branch above them holds. Branches are
    judged from the root on, so those that continue a removed branch begin where it began.

    Args:
        prefixes: checked against the lengths.
        aligned: int64 [n], padded tokens of each sample of the batch.

    Returns:
        Equal or fewer common tokens, without samples that share nothing.

    Eight samples of 1,000 tokens, of which two have 500 in common and all the first 4:

    >>> prefixes = SharedPrefixes(tuple(range(8)), (0, 500, *[4] * 6))
    >>> worthwhile(prefixes, np.full(8, 1000), Layout())
    SharedPrefixes(order=(0, 1), common=(0, 500), own_tokens=1)
    """
    order = np.array(prefixes.order, dtype=np.int64)
    common = np.array(prefixes.common, dtype=np.int64)
    shared = shared_positions(prefixes, layout)
    ends = np.concatenate([[0], np.cumsum(aligned[order])])
    kept = _kept_positions(shared, ends)
    common = np.where(kept == shared, common, kept + prefixes.own_tokens)
    common[kept == 0] = 0
    pays = SharedPrefixes(prefixes.order, tuple(common.tolist()), prefixes.own_tokens)
    return pays.trimmed()


@kernel
def _kept_positions(shared: Ints, ends: Ints) -> Ints:
    """Positions that each sample still shares with the one before it, if only branches that pay do.

    Args:
        shared: int64 [p], as in `PrefixTable`.
        ends: int64 [p + 1], aligned tokens of no sample, the first one, the first two, and so on.
    """
    size = shared.size
    # Branches in the order in which they end, so that a branch comes after those that continue it.
    depth = np.empty(size, dtype=np.int64)
    first = np.empty(size, dtype=np.int64)
    last = np.empty(size, dtype=np.int64)
    above = np.full(size, -1, dtype=np.int64)
    num_branches = 0
    # Samples k - 1 and k part at the end of the branch branch_of[k].
    branch_of = np.full(size, -1, dtype=np.int64)
    # Branches that have not ended: the first sample of each, its end, the last child that ended,
    # and the last k that parts there. Chains of k and of children are linked backwards.
    open_first = np.empty(size + 1, dtype=np.int64)
    open_depth = np.empty(size + 1, dtype=np.int64)
    open_child = np.empty(size + 1, dtype=np.int64)
    open_part = np.empty(size + 1, dtype=np.int64)
    child_before = np.full(size, -1, dtype=np.int64)
    part_before = np.full(size, -1, dtype=np.int64)
    num_open = 0
    for k in range(size + 1):
        here = shared[k] if k < size else 0
        begin = k - 1
        ended = -1
        while num_open > 0 and open_depth[num_open - 1] > here:
            num_open -= 1
            if ended >= 0:
                child_before[ended] = open_child[num_open]
                open_child[num_open] = ended
            ended = num_branches
            num_branches += 1
            depth[ended] = open_depth[num_open]
            first[ended] = open_first[num_open]
            last[ended] = k - 1
            begin = first[ended]
            child = open_child[num_open]
            while child >= 0:
                above[child] = ended
                child = child_before[child]
            part = open_part[num_open]
            while part >= 0:
                branch_of[part] = ended
                part = part_before[part]
        if k == size or here == 0:
            continue
        if num_open == 0 or open_depth[num_open - 1] < here:
            open_first[num_open] = begin
            open_depth[num_open] = here
            open_child[num_open] = -1
            open_part[num_open] = -1
            num_open += 1
        if ended >= 0:
            child_before[ended] = open_child[num_open - 1]
            open_child[num_open - 1] = ended
        part_before[k] = open_part[num_open - 1]
        open_part[num_open - 1] = k
    kept = np.zeros(size, dtype=np.int64)
    for branch in range(num_branches - 1, -1, -1):
        start = kept[above[branch]] if above[branch] >= 0 else 0
        num_samples = last[branch] - first[branch] + 1
        saved = (num_samples - 1) * (depth[branch] - start)
        below = ends[last[branch] + 1] - ends[first[branch]] - num_samples * depth[branch]
        kept[branch] = depth[branch] if saved >= -(-below // _LEAST_PART) else start
    out = np.zeros(size, dtype=np.int64)
    for k in range(size):
        if branch_of[k] >= 0:
            out[k] = kept[branch_of[k]]
    return out
