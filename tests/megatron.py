"""What the installed Megatron-Core has, for tests of it."""

from __future__ import annotations

import importlib.util

import pytest

needs_hybrid = pytest.mark.skipif(
    importlib.util.find_spec("megatron.core.models.hybrid") is None,
    reason="Megatron-Core has HybridModel since 0.18",
)
"""For tests of hybrid models."""
