"""What the installed Megatron-Core has, for tests of it."""

from __future__ import annotations

import importlib.util
import os

HAS_HYBRID = importlib.util.find_spec("megatron.core.models.hybrid") is not None
"""Whether it has HybridModel."""

HAS_STREAMS = importlib.util.find_spec("megatron.core.transformer.hyper_connection") is not None
"""Whether it has hyper-connections."""

MODEL_CLASS = os.environ.get("MEGAPACK_TEST_CLASS")
"""The class of the models of exactness and families in this run, gpt or hybrid, for those that do
not say it; None = what the product takes."""

NO_MUON = next(
    (
        f"Muon: {name} is absent"
        for name in ("megatron.core.optimizer.emerging_optimizers", "emerging_optimizers")
        if importlib.util.find_spec(name) is None
    ),
    "",
)
"""Why there is no Muon; "" if there is."""
