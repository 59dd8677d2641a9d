"""Whether the installed package apex is NVIDIA's.

The package of that name on PyPI is another project, and Megatron-Core takes it for NVIDIA's. Only
`amp_C` and `apex.normalization`, which NVIDIA's alone has, count here. None of the package's code
runs, and neither torch nor Megatron-Core is imported.
"""

from __future__ import annotations

import importlib.util
import logging
from importlib.machinery import PathFinder
from typing import Literal

logger = logging.getLogger(__name__)

Apex = Literal["nvidia", "other", "none"]

OTHER_APEX = (
    "the package apex that is installed is not NVIDIA's, and Megatron-Core takes it for that: "
    "uninstall it (pip uninstall apex); NVIDIA's is built from its source"
)
"""The warning or fault to report where `find_apex` finds "other"."""


def find_apex() -> Apex:
    """Whether NVIDIA's apex is installed, another package of that name, or neither."""
    if importlib.util.find_spec("amp_C") is not None:
        return "nvidia"
    package = importlib.util.find_spec("apex")
    if package is None:
        return "none"
    folders = package.submodule_search_locations
    return "nvidia" if PathFinder.find_spec("apex.normalization", folders) else "other"


def warn_of_other_apex() -> None:
    """Log a warning where apex is another project's.

    Call it before Megatron-Core is imported. That import runs the package, and with the stock
    local spec Megatron-Core builds norms that the package lacks.
    """
    if find_apex() == "other":
        logger.warning(OTHER_APEX)
