"""Process groups without processes."""

from __future__ import annotations


class RankOf:
    """A group as one of its ranks sees it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
