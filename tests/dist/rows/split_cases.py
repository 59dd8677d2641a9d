"""The cases with samples in pieces, as data."""

from __future__ import annotations

from megapack.layout import Layout
from tests.dist.rows.split_problem import SplitCase

LAYOUTS = {
    "single": Layout(),
    "pp2": Layout(pp=2),
    "pp4": Layout(pp=4),
    "pp2_vpp2": Layout(pp=2, vpp=2, microbatch_group_size=4),
    "dp2_pp2": Layout(dp=2, pp=2),
    "tp2_sp_pp2": Layout(tp=2, pp=2, sequence_parallel=True),
    "cp2_pp2": Layout(cp=2, pp=2),
}
_PP2 = LAYOUTS["pp2"]
_TOKENS = ("sft", "grpo")

GRID: dict[str, SplitCase] = {
    f"{place}-{recompute}": SplitCase(layout=layout, recompute=recompute)
    for place, layout in LAYOUTS.items()
    for recompute in ("none", "full")
}
"""Layout times recompute, each with all objectives of tokens and of samples."""

SPECIAL: dict[str, SplitCase] = {
    **{
        f"shared_{place}-{recompute}": SplitCase(
            title="beside shared prefixes",
            layout=LAYOUTS[place],
            shape="shared",
            recompute=recompute,
        )
        for place, recompute in (("pp2", "none"), ("pp2_vpp2", "full"), ("cp2_pp2", "full"))
    },
    "shared_moe": SplitCase(
        title="beside shared prefixes, 4 experts, balance and z-loss",
        layout=_PP2,
        model="moe",
        shape="shared",
        kinds=_TOKENS,
    ),
    "shared_mla_full": SplitCase(
        title="beside shared prefixes, multi-latent attention, recompute full",
        layout=_PP2,
        model="mla",
        shape="shared",
        recompute="full",
        kinds=_TOKENS,
    ),
    "sft_all": SplitCase(title="losses on prompts", layout=_PP2, kinds=("sft_all",)),
    "value": SplitCase(title="values", layout=_PP2, kinds=("value",)),
    "value_cp2_full": SplitCase(
        title="values, recompute full",
        layout=LAYOUTS["cp2_pp2"],
        kinds=("value",),
        recompute="full",
    ),
    "selective": SplitCase(
        title="recompute selective", layout=_PP2, recompute="selective", kinds=_TOKENS
    ),
    "untied": SplitCase(
        title="untied, LayerNorm, GELU, wide heads, query norms",
        layout=_PP2,
        model="other",
        kinds=_TOKENS,
    ),
    "frozen": SplitCase(
        title="frozen `embedding.*`, `decoder.layers.[0-3].*`",
        layout=_PP2,
        kinds=_TOKENS,
        frozen=("embedding.*", "decoder.layers.[0-3].*"),
    ),
    "mla_full": SplitCase(
        title="multi-latent attention, recompute full",
        layout=_PP2,
        model="mla",
        recompute="full",
        kinds=_TOKENS,
    ),
    "mla_cp2": SplitCase(
        title="multi-latent attention", layout=Layout(cp=2), model="mla", kinds=_TOKENS
    ),
    "moe": SplitCase(
        title="4 experts, balance and z-loss",
        layout=Layout(pp=2, tp=2, ep=2, sequence_parallel=True),
        model="moe",
    ),
    "moe_full": SplitCase(
        title="4 experts, balance and z-loss, recompute full",
        layout=_PP2,
        model="moe",
        recompute="full",
        kinds=_TOKENS,
    ),
    "moe_bias_cp2_selective": SplitCase(
        title="4 experts, sigmoid scores, expert bias, balance and z-loss, recompute selective",
        layout=Layout(cp=2, ep=2),
        model="moe_bias",
        recompute="selective",
        kinds=_TOKENS,
    ),
    "moe_replay_full": SplitCase(
        title="routes replayed, recompute full",
        layout=Layout(cp=2, ep=2),
        model="moe_replay",
        recompute="full",
        kinds=_TOKENS,
    ),
    "bf16": SplitCase(title="bf16", layout=_PP2, model="bf16", kinds=("sft",)),
}

MUTATED = {
    mutation: SplitCase(layout=_PP2, kinds=("sft",), mutation=mutation)
    for mutation in ("no carried gradients", "no carried keys", "no losses of a piece")
}
"""Cases that do something wrong, which must be seen."""

ALL_CASES = {**GRID, **SPECIAL, **MUTATED}

CASES = (
    "single-none",
    "pp2-full",
    "pp2_vpp2-none",
    "dp2_pp2-full",
    "tp2_sp_pp2-none",
    "cp2_pp2-full",
    "value",
    "mla_full",
    "moe_full",
    "moe_replay_full",
    "shared_pp2_vpp2-full",
    "shared_cp2_pp2-full",
    "shared_moe",
    *MUTATED,
)
"""The cases that CI runs; `tools/exactness.py --split-samples '*'` runs all."""
