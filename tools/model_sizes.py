"""Write docs/measured/model_sizes.md: parameters counted from config.json of published models.

    python tools/model_sizes.py

The configs are those of `tests/unit/job/config/published_configs.py` and `hybrid_configs.py`;
`tests/unit/cost/test_published_models.py` compares the counts with published ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megapack.cost.memory import MemoryModel  # noqa: E402
from megapack.job.config.model import ModelConfig  # noqa: E402
from megapack.layout import Layout  # noqa: E402
from tests.unit.job.config.hybrid_configs import HYBRID, LATENT  # noqa: E402
from tests.unit.job.config.published_configs import CONFIGS  # noqa: E402
from tools.pages.marks import table  # noqa: E402
from tools.pages.measured import versions, write  # noqa: E402

HYBRID_NAMES = {
    "qwen3_next": "Qwen3-Next-80B-A3B",
    "qwen3_5": "Qwen3.5-27B, text",
    "qwen3_5_moe": "Qwen3.5-35B-A3B, text",
    "nemotron_h": "Nemotron-3-Nano-30B-A3B",
}


def counts(config: dict[str, Any]) -> tuple[str, str]:
    """Billions of parameters, and of those that a token is multiplied by in layers."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = ModelConfig.from_hf(folder, dtype="bf16")
    memory = MemoryModel(sizes=model)
    total = memory.stage(Layout(), 0, live_tokens=0.0, row_tokens=0.0).parameters / 2
    # A window's keys are no weights, but their operations grow with tokens as those of weights do.
    flops = sum(
        (kind.layer_flops_per_token() - kind.layer_attention_tokens(kind.window or 0)) * count
        for kind, count in model.layer_kinds()
    )
    return f"{total / 1e9:,.2f}", f"{flops / 2e9:,.2f}"


def lines() -> list[str]:
    """The table, and the number of its models."""
    models = CONFIGS | LATENT | {name: HYBRID[key] for key, name in HYBRID_NAMES.items()}
    rows = [
        (name, f"`{config['model_type']}`", *counts(config))
        for name, config in sorted(models.items())
    ]
    heads = ["model", "`model_type`", "parameters, 1e9", "used by a token in layers, 1e9"]
    return [f"{len(rows)} models.", "", table(heads, rows)]


def main() -> int:
    path = write(
        "model_sizes",
        "Parameters of published models",
        "Parameters that megapack counts from `config.json` alone. Layers of multi-token "
        "prediction are not counted.",
        lines(),
        versions(),
    )
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
