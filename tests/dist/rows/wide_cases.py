"""The cases with wide rows, as data."""

from __future__ import annotations

import dataclasses

from megapack.layout import Layout
from tests.dist.rows.wide_problem import WideCase

_PLACES = {
    "": Layout(),
    "_pp2": Layout(pp=2),
    "_pp2_vpp2": Layout(pp=2, vpp=2),
    "_tp2_sp": Layout(tp=2, sequence_parallel=True),
}
LAYOUTS = {
    f"dp{dp}{place}": dataclasses.replace(layout, dp=dp)
    for dp in (2, 4)
    for place, layout in _PLACES.items()
}
_DP2 = LAYOUTS["dp2"]
_DP4 = LAYOUTS["dp4"]
_DP2_PP2 = LAYOUTS["dp2_pp2"]
_DP2_PP2_VPP2 = LAYOUTS["dp2_pp2_vpp2"]
_DP2_CP2 = Layout(dp=2, cp=2)
_DP4_CP2 = Layout(dp=4, cp=2)
_DP2_CP2_PP2_VPP2 = Layout(dp=2, cp=2, pp=2, vpp=2)
_DP4_PP2_VPP2 = LAYOUTS["dp4_pp2_vpp2"]
_TOKENS = ("sft", "grpo")
_OTHERS = ("dpo", "value", "reward")

GRID: dict[str, WideCase] = {
    f"{place}-{recompute}": WideCase(layout=layout, recompute=recompute)
    for place, layout in LAYOUTS.items()
    for recompute in ("none", "full")
}
"""Layout times recompute, each with all objectives of tokens and of samples."""

SPECIAL: dict[str, WideCase] = {
    "cp2": WideCase(title="cp 2 and 4", layout=_DP2_CP2),
    "cp2_full": WideCase(title="cp 2 and 4, recompute full", layout=_DP2_CP2, recompute="full"),
    "cp2_pp2_vpp2": WideCase(title="cp 2 and 4", layout=_DP2_CP2_PP2_VPP2),
    "cp2_dp4": WideCase(title="cp 2, 4 and 8", layout=_DP4_CP2),
    "tp2_sp_pp2": WideCase(
        title="all slices at once", layout=Layout(dp=2, tp=2, pp=2, sequence_parallel=True)
    ),
    "sft_all": WideCase(title="losses on prompts", layout=_DP4, kinds=("sft_all",)),
    "others": WideCase(title="pairs and values", layout=_DP4, kinds=_OTHERS),
    "others_pp2_vpp2": WideCase(title="pairs and values", layout=_DP2_PP2_VPP2, kinds=_OTHERS),
    "others_cp2": WideCase(title="pairs and values", layout=_DP2_CP2, kinds=_OTHERS),
    "untied": WideCase(
        title="untied, LayerNorm, GELU, wide heads, query norms",
        layout=_DP2_PP2,
        model="other",
        kinds=_TOKENS,
    ),
    "selective": WideCase(
        title="recompute selective",
        layout=LAYOUTS["dp2_tp2_sp"],
        recompute="selective",
        kinds=_TOKENS,
    ),
    "frozen": WideCase(
        title="frozen `embedding.*`, `decoder.layers.[0-3].*`",
        layout=_DP2_PP2,
        kinds=_TOKENS,
        frozen=("embedding.*", "decoder.layers.[0-3].*"),
    ),
    "mla": WideCase(title="multi-latent attention", layout=_DP4, model="mla", kinds=_TOKENS),
    "mla_pp2_full": WideCase(
        title="multi-latent attention, recompute full",
        layout=_DP2_PP2,
        model="mla",
        recompute="full",
        kinds=_TOKENS,
    ),
    "mla_cp2": WideCase(
        title="multi-latent attention", layout=_DP2_CP2, model="mla", kinds=_TOKENS
    ),
    "mtp": WideCase(
        title="multi-token prediction, 2 depths", layout=_DP4, model="mtp", kinds=("sft", "gspo")
    ),
    "mtp_pp2_vpp2_selective": WideCase(
        title="multi-token prediction, 2 depths, recompute selective",
        layout=_DP2_PP2_VPP2,
        model="mtp",
        recompute="selective",
        kinds=("sft", "gspo"),
    ),
    "mtp_cp2": WideCase(
        title="multi-token prediction, 2 depths",
        layout=_DP2_CP2,
        model="mtp",
        kinds=("sft", "gspo"),
    ),
    "moe": WideCase(
        title="4 experts, balance and z-loss",
        layout=Layout(dp=2, ep=2),
        model="moe",
        value_model="moe_value",
        kinds=("sft", "grpo", "gspo", "value"),
    ),
    "moe_dp4_full": WideCase(
        title="4 experts, balance and z-loss, recompute full",
        layout=Layout(dp=4, ep=2),
        model="moe",
        recompute="full",
        kinds=_TOKENS,
    ),
    "moe_dp4_pp2_vpp2": WideCase(
        title="4 experts, balance and z-loss",
        layout=Layout(dp=4, pp=2, vpp=2, ep=2),
        model="moe",
        kinds=_TOKENS,
    ),
    "moe_bias": WideCase(
        title="4 experts, sigmoid scores, expert bias, balance and z-loss",
        layout=Layout(dp=2, ep=2),
        model="moe_bias",
        kinds=_TOKENS,
    ),
    "moe_bias_dp4_ep4": WideCase(
        title="4 experts, sigmoid scores, expert bias, balance and z-loss",
        layout=Layout(dp=4, ep=4),
        model="moe_bias",
        kinds=_TOKENS,
    ),
    "moe_bias_cp2_full": WideCase(
        title="4 experts, sigmoid scores, expert bias, balance and z-loss, recompute full",
        layout=Layout(dp=2, cp=2, ep=2),
        model="moe_bias",
        recompute="full",
        kinds=_TOKENS,
    ),
    "moe_bias_tp2_sp": WideCase(
        title="4 experts, sigmoid scores, expert bias, balance and z-loss",
        layout=Layout(dp=2, tp=2, ep=2, sequence_parallel=True),
        model="moe_bias",
        kinds=_TOKENS,
    ),
    "moe_replay": WideCase(
        title="routes replayed", layout=Layout(dp=2, ep=2), model="moe_replay", kinds=_TOKENS
    ),
    "moe_replay_dp4_full": WideCase(
        title="routes replayed, recompute full",
        layout=Layout(dp=4, ep=2),
        model="moe_replay",
        recompute="full",
        kinds=_TOKENS,
    ),
    "prefixes": WideCase(
        title="shared prefixes",
        layout=_DP4,
        shares=True,
        kinds=("sft", "grpo", "gspo", "dpo", "value", "reward"),
    ),
    "prefixes_pp2_vpp2_full": WideCase(
        title="shared prefixes, recompute full",
        layout=_DP2_PP2_VPP2,
        shares=True,
        recompute="full",
    ),
    "prefixes_cp2": WideCase(title="shared prefixes", layout=_DP2_CP2, shares=True),
    "prefixes_tp2_sp": WideCase(
        title="shared prefixes", layout=LAYOUTS["dp2_tp2_sp"], shares=True, kinds=_TOKENS
    ),
    "prefixes_mla": WideCase(
        title="shared prefixes, multi-latent attention",
        layout=_DP4,
        model="mla",
        shares=True,
        kinds=_TOKENS,
    ),
    "prefixes_mtp_cp2": WideCase(
        title="shared prefixes, multi-token prediction, 2 depths",
        layout=_DP2_CP2,
        model="mtp",
        shares=True,
        kinds=("sft", "gspo"),
    ),
    "prefixes_moe_bias": WideCase(
        title="shared prefixes, 4 experts, expert bias, balance and z-loss",
        layout=Layout(dp=2, ep=2),
        model="moe_bias",
        shares=True,
        kinds=_TOKENS,
    ),
    "prefixes_moe_bias_tp2_sp_full": WideCase(
        title="shared prefixes, 4 experts, expert bias, balance and z-loss, recompute full",
        layout=Layout(dp=2, tp=2, ep=2, sequence_parallel=True),
        model="moe_bias",
        shares=True,
        recompute="full",
        kinds=_TOKENS,
    ),
    "prefixes_moe_replay": WideCase(
        title="shared prefixes, routes replayed",
        layout=Layout(dp=4, ep=2),
        model="moe_replay",
        shares=True,
        kinds=_TOKENS,
    ),
    "planner": WideCase(title="a plan of the planner", layout=_DP4, is_planned=True),
    "planner_pp2_vpp2": WideCase(
        title="a plan of the planner", layout=_DP4_PP2_VPP2, is_planned=True, kinds=_TOKENS
    ),
    "planner_prefixes": WideCase(
        title="a plan of the planner, shared prefixes",
        layout=_DP4,
        is_planned=True,
        shares=True,
        kinds=_TOKENS,
    ),
}
"""Features of models and plans."""

ALL_CASES = GRID | SPECIAL

# All four objectives with code for wide rows (sequences, pairs, values, scores), each way to divide
# a model, widths 1, 2 and 4, and each kind of attention. Later cases of a job find ranks in
# different numbers of groups, as the stages of pp2 are.
CASES = (
    *("dp2_pp2_vpp2-full", "others", "mla"),
    *("prefixes_mtp_cp2", "prefixes_moe_bias_tp2_sp_full"),
)
"""The cases of the tests; tools/exactness.py runs all."""
