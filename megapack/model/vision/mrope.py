"""Rotary lines of tokens whose positions have a frame, a row and a column.

Each pair of channels turns by one of the three positions. Qwen2-VL gives consecutive blocks of
pairs to frames, rows and columns; Qwen3-VL lets them alternate, so that each has slow and fast
pairs. For text, where the three positions are one, both are the usual embedding.

Shape suffixes: T tokens of this rank's row, S lines of the table, d angles (of each pair twice).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapack.errors import ConfigError


@dataclass(frozen=True)
class Mrope:
    """Which position turns which pair of channels."""

    sections: tuple[int, int, int]
    """Pairs that frames, rows and columns turn."""
    is_interleaved: bool
    """Whether they alternate: frame, row, column, frame, ..."""

    def axes(self, num_pairs: int) -> list[int]:
        """The position, 0 to 2, that turns each pair.

        Raises:
            ConfigError: the sections are not of these pairs.

        >>> Mrope((4, 2, 2), is_interleaved=False).axes(8)
        [0, 0, 0, 0, 1, 1, 2, 2]
        >>> Mrope((4, 2, 2), is_interleaved=True).axes(8)
        [0, 1, 2, 0, 1, 2, 0, 0]
        """
        alternating = [range(axis, 3 * self.sections[axis], 3) for axis in (1, 2)]
        lasts = [max(pairs, default=0) for pairs in alternating if self.is_interleaved]
        if sum(self.sections) != num_pairs or max(lasts, default=0) >= num_pairs:
            raise ConfigError(
                f"mrope_section={list(self.sections)} has {sum(self.sections)} pairs of channels, "
                f"the last of those that alternate is {max(lasts, default=0)}, and the rotary "
                f"embedding turns pairs 0 to {num_pairs - 1}; correct config.json"
            )
        if not self.is_interleaved:
            return [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        axes = [0] * num_pairs
        for axis, pairs in enumerate(alternating, start=1):
            for pair in pairs:
                axes[pair] = axis
        return axes

    def lines(self, table_Sd: Tensor, positions_T3: Tensor) -> Tensor:
        """The line of each token, [T, d].

        Args:
            table_Sd: the angles of each position, of [a, b] the line [a, b, a, b].
        """
        axes = self.axes(table_Sd.shape[1] // 2)
        index_Td = positions_T3[:, torch.tensor(axes * 2).to(positions_T3.device)]
        return table_Sd.gather(0, index_Td)
