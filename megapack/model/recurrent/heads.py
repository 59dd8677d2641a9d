"""Context parallelism of recurrent layers: each rank scans the whole row for a part of the heads.

Ranks that share a row hold zigzag slices of it (see `rows.slices`), and a scan needs all tokens in
order. Before it they exchange tokens for heads, and after it heads for tokens, by an all-to-all
each. A rank's part of a parameter gets gradients of its own heads only; data-parallel reduction
adds up those of all ranks, as context-parallel ranks count there.

Where there are fewer groups of heads than ranks (B and C of Mamba-2), several ranks have a copy of
one.

Shape suffixes: t tokens of this rank's slice, T tokens of the whole row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from megapack.errors import ConfigError
from megapack.model.attention.row import RowView
from megapack.model.recurrent.driven import prepare_stock


class Section(NamedTuple):
    """Consecutive channels, or elements of a parameter: heads or groups of `width` each."""

    heads: int
    width: int = 1

    @property
    def size(self) -> int:
        """Channels, or elements."""
        return self.heads * self.width

    def on_rank(self, ranks: int) -> Section:
        """What each of some ranks gets: a part of the heads, or a copy of one group."""
        return Section(max(1, self.heads // ranks), self.width)

    def divides(self, ranks: int) -> bool:
        """Whether each rank gets whole heads, or a copy of one group."""
        return self.heads % ranks == 0 or ranks % self.heads == 0

    def part(self, values: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
        """What a rank gets of this section's values."""
        if self.heads % ranks == 0:
            return values.chunk(ranks, dim=dim)[rank]
        return values.chunk(self.heads, dim=dim)[rank * self.heads // ranks]


def check_heads(chunks: Iterable[Any], ranks: Iterable[int]) -> None:
    """Check that the heads of recurrent layers divide over the ranks that share rows.

    Args:
        chunks: of this rank, without DDP.
        ranks: numbers of ranks that share a row.

    Raises:
        ConfigError: a layer has too few heads; the message names it.
    """
    shared = sorted({*ranks} - {1})
    # Steps whose rows each have one rank do not walk the modules.
    chunks = list(chunks) if shared else []
    prepare_stock(chunks)
    modules = (named for chunk in chunks for named in chunk.named_modules())
    layers = [(name, m) for name, m in modules if hasattr(m, "convolved")]
    for count in shared:
        for name, layer in layers:
            heads, *groups = (section.heads for section in (layer.heads, *layer.convolved))
            if heads % count or not all(own.divides(count) for own in layer.convolved):
                raise ConfigError(
                    f"rows lie over {count} ranks, and {name} ({type(layer).__name__}) has {heads} "
                    f"heads, in groups {groups}, on a tensor-parallel rank, which do not divide; "
                    "set a smaller cp or tp, or plan with Policy(context_parallel='fixed')"
                )


class HeadExchange:
    """The exchange between the ranks that share a row."""

    def __init__(self, row: RowView) -> None:
        self._row = row
        self.ranks = row.cp

    def own(self, section: Section) -> Section:
        """What this rank has of a section after the exchange."""
        return section.on_rank(self.ranks)

    def part(self, parameter: Tensor, sections: Sequence[Section]) -> Tensor:
        """This rank's part of a parameter, along its first dimension."""
        if self.ranks == 1:
            return parameter
        return _part(parameter, sections, self._row.cp_rank, self.ranks, 0)

    def whole_row(
        self, values: Sequence[Tensor], sections: Sequence[Sequence[Section]]
    ) -> list[Tensor]:
        """Of the whole row, the channels of this rank's heads: [t, D] -> [T, own channels] each.

        Args:
            sections: of each of the values.
        """
        if self.ranks == 1:
            return list(values)
        pairs = list(zip(values, sections, strict=True))
        parts = [
            torch.cat([_part(own, of, rank, self.ranks, 1) for own, of in pairs], dim=1)
            for rank in range(self.ranks)
        ]
        received = self._exchanged(torch.stack(parts)).flatten(0, 1)
        widths = [sum(sizes(map(self.own, of))) for of in sections]
        return list(received.index_select(0, self._row.whole_order_T).split(widths, dim=1))

    def by_head(self, values_TD: Tensor, sections: Sequence[Section]) -> list[Tensor]:
        """Values of the whole row in their sections: [T, own heads, width] each."""
        own = [self.own(section) for section in sections]
        parts = values_TD.split(sizes(own), dim=-1)
        return [part.unflatten(-1, section) for part, section in zip(parts, own, strict=True)]

    def own_slice(self, values_TD: Tensor) -> Tensor:
        """All heads of this rank's slice: [T, D / ranks] -> [t, D]."""
        if self.ranks == 1:
            return values_TD
        slices = values_TD.index_select(0, self._row.slice_order_T).unflatten(0, (self.ranks, -1))
        return self._exchanged(slices).transpose(0, 1).flatten(1)

    def _exchanged(self, sent: Tensor) -> Tensor:
        return all_to_all(self._row.cp_group, sent.contiguous())


def _part(values: Tensor, sections: Sequence[Section], rank: int, ranks: int, dim: int) -> Tensor:
    parts = zip(sections, values.split(sizes(sections), dim=dim), strict=True)
    return torch.cat([section.part(own, rank, ranks, dim) for section, own in parts], dim=dim)


def sizes(sections: Iterable[Section]) -> list[int]:
    """The channels of each section."""
    return [section.size for section in sections]
