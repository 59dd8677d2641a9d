"""SkyRL: token-based micro-batches of `worker_utils`, and `bin_packing.make_seq_packer`.

Token-based micro-batches are planned by megapack. With a layout configured, alignment counts
against the budget, micro-batches are ordered for the pipeline, and every M is one that the
interleaved schedule runs; SkyRL does not check that. Written for SkyRL's commit a956457 and for
0.4.0, whose batches have packed fields.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megapack.base.arrays import Ints
from megapack.errors import DataError
from megapack.hosts import patching
from megapack.hosts.shared import rank_rows
from megapack.hosts.shared.bins import with_heaviest_split
from megapack.hosts.shared.families import family_parts, real_tokens
from megapack.hosts.shared.images import image_tokens, patches_of
from megapack.hosts.shared.options import HostOptions, PlannerOptions

_OPTIONS = HostOptions(PlannerOptions())
configure = _OPTIONS.configure


def init_iterator(self: Any, data: Any, max_tokens_per_microbatch: int) -> None:
    """`TokenBasedBatchIterator.__init__`: micro-batches of at most so many real tokens.

    A larger sample is alone. Collective over all ranks if torch.distributed is initialized: all
    ranks construct it, and all get the same number of micro-batches or raise. SkyRL's own methods
    select the samples of each, append padding micro-batches, and put outputs back into order.

    Args:
        data: a TrainingInputBatch.
        max_tokens_per_microbatch: real tokens of a micro-batch, before CP.

    Raises:
        ScheduleError: on every rank, if one rank's data or settings cannot be used.
    """
    max_tokens = int(max_tokens_per_microbatch)
    options = _OPTIONS.current
    settings = repr((max_tokens, options))
    rank, need = rank_rows.agree_on_need(
        lambda: _RankRows(data, max_tokens, options), settings, None
    )
    layout = options.layout
    count = need.count if layout is None else layout.next_legal_count(need.count)
    rank_rows.log_budget("SkyRL", max_tokens, layout and layout.cp)
    rows = rank_rows.split_rows(rank.rows, count, rank.work)
    if rows is not rank.rows:
        rows = rank_rows.small_at_ends(rows, rank.work)
    self.data = data
    self._microbatches = rows
    self._num_padding_microbatches = max(count - len(rows), 0)
    self._max_tokens_per_microbatch = max_tokens
    self._token_counts = rank.lengths.tolist()


def make_seq_packer(*args: Any, **named: Any) -> Any:
    """SkyRL's own packer, which makes missing bins by splitting the heaviest ones.

    Raises:
        ValueError: SkyRL's own, on an unknown name or a number out of range.
    """
    own = patching.original("skyrl.train.dataset.bin_packing.make_seq_packer")
    return with_heaviest_split(own(*args, **named))


class _RankRows:
    """This rank's samples and their micro-batches."""

    def __init__(self, data: Any, max_tokens: int, options: PlannerOptions) -> None:
        self.lengths: Ints = np.array(data["attention_mask"].sum(dim=1).tolist(), dtype=np.int64)
        if not self.lengths.size:
            raise DataError("a rank has no samples; give every rank one or more")
        grids = data.get("image_grid_thw")
        patches = patches_of({"image_grid_thw": grid} for grid in (() if grids is None else grids))
        self.work = self.lengths + image_tokens(patches, self.lengths.size)
        parts = None
        if options.share_prefixes:
            token_ids = real_tokens(data["sequences"], data["attention_mask"])
            least = 1 if options.layout is None else options.layout.next_legal_count(1)
            parts = family_parts(
                token_ids, self.lengths, options.layout, max_tokens, num_rows=least
            )
        self.rows, count = rank_rows.plan_rank(
            self.lengths,
            max_tokens,
            layout=options.layout,
            cost=options.cost,
            colocate_ids=parts,
            patches=patches,
        )
        self.need = rank_rows.Need(count, self.lengths.size, int(self.lengths.max()))
