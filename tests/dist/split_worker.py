"""Runs cases with samples in pieces of one world size on this rank and writes their results.

torchrun --nproc-per-node 2 -m tests.dist.split_worker CASES_MODULE REFERENCE OUT CASE ...
"""

from __future__ import annotations

import sys

from tests.dist.row_worker import main
from tests.dist.wide_worker import WideRun


class SplitRun(WideRun):
    """A model of a case with samples in pieces, whose steps have orders."""

    executor = "operations"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:], SplitRun)
