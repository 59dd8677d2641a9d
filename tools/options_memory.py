"""Write docs/measured/options_memory.md: what planning options keep of a token in a layer.

    python tools/options_memory.py

By the memory model, for shipped models in bf16 with Transformer Engine's kernels, without tensor
parallelism.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import Layout
from megapack.config.shipped import shipped_models
from megapack.cost.memory import MemoryModel
from megapack.job.config.model import ModelConfig
from tools.pages.marks import table
from tools.pages.measured import versions, write

MODELS = ("Llama-3.1-8B", "Qwen3-4B", "Qwen3-30B-A3B")
HEADER = (
    "model, recompute",
    "activations, forward to backward",
    "keys and values of a piece",
    "with their gradients",
    "waiting for weight gradients",
)


def main() -> None:
    rows = []
    for name in MODELS:
        sizes = replace(ModelConfig.from_hf(str(shipped_models()[name])), dtype="bf16")
        for recompute in ("none", "full"):
            saved = MemoryModel(sizes=replace(sizes, recompute=recompute)).saved(Layout())
            keys = saved.carried_token
            waiting = saved.held + saved.recomputed_layer
            sizes_kib = (saved.held, keys, 2 * keys, waiting)
            rows.append((f"{name}, {recompute}", *(f"{n / 1024:.0f} KiB" for n in sizes_kib)))
    what = (
        "Bytes of a token in one layer, by megapack's memory model: what a row keeps in an order,\n"
        "and what split samples and split backwards keep. bf16, without tensor parallelism."
    )
    title = "Planning options: memory of a token in a layer"
    print(
        write("options_memory", title, what, table(HEADER, rows).splitlines(), versions("megapack"))
    )


if __name__ == "__main__":
    main()
