"""What the installed Megatron-Core has, for tests of it."""

from __future__ import annotations

import importlib.util

import pytest

HAS_HYBRID = importlib.util.find_spec("megatron.core.models.hybrid") is not None
"""Whether it has HybridModel."""
needs_hybrid = pytest.mark.skipif(not HAS_HYBRID, reason="Megatron-Core has HybridModel since 0.18")
"""For tests of hybrid models."""
