"""Cases of rows in FP8: recipes, layouts, the GPU that is rehearsed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from megapack.config.sections import ModelConfig
from megapack.layout import Layout

HOPPER = (9, 0)
BLACKWELL = (10, 0)

# Widths that two tensor-parallel ranks halve to multiples of 128, the largest of all recipes.
DENSE = ModelConfig(
    num_layers=2,
    hidden_size=128,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=64,
    ffn_hidden_size=256,
    init_std=0.05,
    dtype="bf16",
    attention="te",
)
MODELS = {
    "dense": DENSE,
    "experts": dataclasses.replace(
        DENSE,
        num_experts=4,
        moe_ffn_hidden_size=128,
        moe_balance_loss_coef=0.0,
        moe_z_loss_coef=0.0,
    ),
}
# (prompt, response) tokens; rows of 256 tokens hold several of these samples.
PAIRS = [(5, 60), (0, 33), (12, 100), (0, 1), (20, 17), (7, 0), (30, 90), (1, 9)]


@dataclass(frozen=True)
class Fp8Case:
    """A recipe on a layout."""

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
    layout: Layout = field(default_factory=Layout)
    capability: tuple[int, int] = HOPPER
    model: str = "dense"


TP2 = Layout(tp=2, sequence_parallel=True)
CASES = {
    "delayed_experts": Fp8Case("delayed", model="experts"),
    "tensorwise": Fp8Case("tensorwise"),
    "blockwise": Fp8Case("blockwise"),
    "mxfp8": Fp8Case("mxfp8", capability=BLACKWELL),
    "mxfp8_experts": Fp8Case("mxfp8", model="experts", capability=BLACKWELL),
    "delayed_blackwell": Fp8Case("delayed", capability=BLACKWELL),
    "delayed_tp2": Fp8Case("delayed", TP2),
    "delayed_dp2": Fp8Case("delayed", Layout(dp=2)),
    "tensorwise_cp2": Fp8Case("tensorwise", Layout(cp=2)),
    "blockwise_tp2": Fp8Case("blockwise", TP2),
    "mxfp8_tp2": Fp8Case("mxfp8", TP2, BLACKWELL),
}
