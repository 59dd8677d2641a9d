"""Whether the installed package apex is NVIDIA's.

The package named apex on PyPI is another project, but Megatron-Core uses it as if it were NVIDIA's.
Only NVIDIA's has `amp_C` and `apex.normalization`, so these two are searched for. The search runs
none of the package's code and imports neither torch nor Megatron-Core.
"""

from __future__ import annotations

import importlib.util
import logging
from importlib.machinery import PathFinder
from typing import Literal

logger = logging.getLogger(__name__)

Apex = Literal["nvidia", "other", "none"]

OTHER_APEX = (
    "the installed package apex is not NVIDIA's, but Megatron-Core uses it as if it were: "
    "uninstall it (pip uninstall apex); NVIDIA's is built from its source"
)
"""The warning or fault to report when `find_apex` returns "other"."""


def find_apex() -> Apex:
    """Which package named apex is installed: NVIDIA's, another one, or none."""
    if importlib.util.find_spec("amp_C") is not None:
        return "nvidia"
    package = importlib.util.find_spec("apex")
    if package is None:
        return "none"
    folders = package.submodule_search_locations
    return "nvidia" if PathFinder.find_spec("apex.normalization", folders) else "other"


def warn_of_other_apex() -> None:
    """Log a warning if the installed apex is another project's.

    Call it before importing Megatron-Core: that import runs the package. With its local layer
    spec, Megatron-Core would then use norms that the package does not have.
    """
    if find_apex() == "other":
        logger.warning(OTHER_APEX)
