"""Which versions of Megatron-Core are tested and what they do, for rooms that do not import it."""

from __future__ import annotations

# tools/test_versions.sh reads these lines.
TESTED_RELEASES = {
    "0.16.1": "3.11",
    "0.17.1": "3.12",
    "0.18.2": "3.12",
    "0.19.2": "3.12",
}
"""The releases that the tests run with, oldest first, and the Python of each."""

NEWEST_TESTED = "0.20.0"
"""The newest version that the tests have run with: main, which calls itself 0.20.0 before that is
released, as of 2026-08-22 (commit d98e8a6)."""


def newer_than_tested(version: str) -> str:
    """One line about a Megatron-Core that is newer than the tested ones; "" for all others.

    >>> newer_than_tested("0.19.2")
    ''
    """
    from packaging.version import Version

    if Version(Version(version).base_version) <= Version(NEWEST_TESTED):
        return ""
    return (
        f"megatron-core {version} is newer than tested: the tests have run with {NEWEST_TESTED} "
        "and older; before long runs, run `tools/test_versions.sh --sample --megatron FOLDER` in "
        "megapack's repository, with the sources of yours in FOLDER"
    )


def frees_while_sending(version: str) -> bool:
    """Whether interleaved stages free an output's memory while it is being sent.

    Read in 0.16.1, 0.17.1 (they free at once), 0.18.0, 0.18.2, 0.19.2 and main, 0.20.0 (they wait
    for the send).
    """
    from packaging.version import Version

    return Version(version).release < (0, 18)
