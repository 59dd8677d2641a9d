"""Errors of process groups that megapack makes in addition to Megatron's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from megapack.errors import ScheduleError


@contextlib.contextmanager
def connecting(ranks: Sequence[int], what: str, instead: str) -> Iterator[None]:
    """Within the block a group of ranks is made, or used for the first time.

    Args:
        what: the ranks, such as "the pipeline stages of ranks".
        instead: what to set to do without.

    Raises:
        ScheduleError: it cannot be; names the ranks.
    """
    try:
        yield
    except RuntimeError as error:
        raise ScheduleError(
            f"{what} {list(ranks)} cannot be connected: {error}; check the connection between "
            f"these ranks, or {instead}"
        ) from error
