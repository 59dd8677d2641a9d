"""Whether the installed Megatron-Core has HybridModel."""

from __future__ import annotations

import importlib.metadata

import pytest


def without_hybrid() -> str:
    """Why hybrid models cannot run here; "" if they can."""
    version = importlib.metadata.version("megatron-core")
    major, minor = (int(part) for part in version.split(".")[:2])
    return "" if (major, minor) >= (0, 18) else f"Megatron-Core {version} has no HybridModel"


needs_hybrid = pytest.mark.skipif(bool(without_hybrid()), reason=without_hybrid())
