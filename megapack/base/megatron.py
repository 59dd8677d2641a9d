"""What versions of Megatron-Core do, for rooms that do not import it."""

from __future__ import annotations

from packaging.version import Version


def frees_while_sending(version: str) -> bool:
    """Whether interleaved stages free an output's memory while it is being sent.

    Read in 0.16.1, 0.17.1 (they free at once), 0.18.0, 0.18.2 and 0.19.2 (they wait for the send).
    """
    return Version(version).release < (0, 18)
