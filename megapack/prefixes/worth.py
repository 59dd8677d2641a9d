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
# takes 0.96 of its time (docs/measured/prefix_steps.md).
_LEAST_PART = 32


def worthwhile(prefixes: SharedPrefixes, lengths: Ints, layout: Layout) -> SharedPrefixes:
    """Keep the prefixes that pay, in O(n).

    A branch of k samples saves k - 1 times its positions. If that is less than 1/32 of its samples'
    positions after it, the samples share only what the branch above them holds. Branches are
    judged from the root on, so those that continue a removed branch begin where it began. A sample
    that another begins with has no price: layers run both as one sequence.

    Args:
        prefixes: checked against the lengths.
        lengths: int64 [n], real tokens of each sample of the batch.

    Returns:
        Equal or fewer common tokens, without samples that share nothing.

    Eight samples of 1,000 tokens, of which two have 500 in common and all the first 4:

    >>> prefixes = SharedPrefixes(tuple(range(8)), (0, 500, *[4] * 6))
    >>> worthwhile(prefixes, np.full(8, 1000), Layout())
    SharedPrefixes(order=(0, 1), common=(0, 500), own_tokens=1)
    """
    order = np.array(prefixes.order, dtype=np.int64)
    common = np.array(prefixes.common, dtype=np.int64)
    shared = shared_positions(prefixes, lengths, layout)
    ends = np.concatenate([[0], np.cumsum(layout.aligned_sample_tokens(lengths[order]))])
    kept = _kept_positions(shared, ends, np.argsort(shared, kind="stable"))
    kept = np.where(shared >= common, shared, kept)
    common = np.where(kept == shared, common, kept + prefixes.own_tokens)
    common[kept == 0] = 0
    pays = SharedPrefixes(prefixes.order, tuple(common.tolist()), prefixes.own_tokens)
    return pays.trimmed()


@kernel
def _kept_positions(shared: Ints, ends: Ints, from_the_root: Ints) -> Ints:
    """Positions that each sample still shares with the one before it, if only branches that pay do.

    Args:
        shared: int64 [p], as in `PrefixTable`.
        ends: int64 [p + 1], aligned tokens of no sample, the first one, the first two, and so on.
        from_the_root: int64 [p], the samples by what they share.
    """
    size = shared.size
    # Samples k - 1 and k part at the end of a branch that begins with the sample left[k], and ends
    # before the sample right[k]: the nearest ones that share less with those before them.
    left = np.zeros(size, dtype=np.int64)
    right = np.full(size, size)
    waiting = np.empty(size, dtype=np.int64)
    num_waiting = 0
    for k in range(size):
        while num_waiting > 0 and shared[waiting[num_waiting - 1]] > shared[k]:
            num_waiting -= 1
            right[waiting[num_waiting]] = k
        if num_waiting > 0:
            before = waiting[num_waiting - 1]
            left[k] = before if shared[before] < shared[k] else left[before]
        waiting[num_waiting] = k
        num_waiting += 1
    kept = np.zeros(size, dtype=np.int64)
    for k in from_the_root:
        first, last, depth = left[k], right[k], shared[k]
        if depth == 0:
            continue
        above = first if last == size or shared[first] >= shared[last] else last
        saved = (last - first - 1) * (depth - kept[above])
        below = ends[last] - ends[first] - (last - first) * depth
        kept[k] = depth if saved >= -(-below // _LEAST_PART) else kept[above]
    return kept
