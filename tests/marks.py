"""Marks of tests that need a package which may be absent."""

from __future__ import annotations

import pytest

from tests.megatron import HAS_HYBRID, HAS_STREAMS, NO_MUON
from tests.te_python import VERSION, without_te

needs_te = pytest.mark.skipif(bool(without_te()), reason=without_te())
"""For tests whose jobs run with Transformer Engine's Python."""

KERNELS = [pytest.param("", id="local"), pytest.param(VERSION, id="te", marks=needs_te)]
"""Values of `run_job`'s `te` for tests that run on Megatron's local layers and on these."""

needs_hybrid = pytest.mark.skipif(not HAS_HYBRID, reason="Megatron-Core has HybridModel since 0.18")
"""For tests of hybrid models."""

needs_streams = pytest.mark.skipif(
    not HAS_STREAMS, reason="Megatron-Core up to 0.19 has no hyper-connections"
)
"""For tests of hyper-connections."""

needs_muon = pytest.mark.skipif(bool(NO_MUON), reason=NO_MUON)
"""For tests of Muon."""
