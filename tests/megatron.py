"""What the installed Megatron-Core has, for tests of it."""

from __future__ import annotations

import importlib.util

import pytest

HAS_HYBRID = importlib.util.find_spec("megatron.core.models.hybrid") is not None
"""Whether it has HybridModel."""
needs_hybrid = pytest.mark.skipif(not HAS_HYBRID, reason="Megatron-Core has HybridModel since 0.18")
"""For tests of hybrid models."""

NO_MUON = next(
    (
        f"Muon: {name} is absent"
        for name in ("megatron.core.optimizer.emerging_optimizers", "emerging_optimizers")
        if importlib.util.find_spec(name) is None
    ),
    "",
)
needs_muon = pytest.mark.skipif(bool(NO_MUON), reason=NO_MUON)
"""For tests of Muon."""
