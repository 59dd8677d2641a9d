"""The executor that workers run cases with, which a tool may choose for all of its jobs."""

from __future__ import annotations

import os

from megapack.base.choices import ExecutorChoice

VARIABLE = "MEGAPACK_TEST_EXECUTOR"


def executor() -> ExecutorChoice:
    """The executor of this process's cases."""
    return "operations" if os.environ.get(VARIABLE) == "operations" else "auto"
