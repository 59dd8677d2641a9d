"""The cases with shared prefixes, as data."""

from __future__ import annotations

from dataclasses import replace

from megapack.layout import Layout
from megapack.policy import Policy
from tests.dist.prefix_problem import PrefixCase

LAYOUTS = {
    "single": Layout(),
    "pp2": Layout(pp=2),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "pp4": Layout(pp=4),
    "dp2": Layout(dp=2),
    "tp2_sp": Layout(tp=2, sequence_parallel=True),
    "cp2": Layout(cp=2),
    "dp2_ep2": Layout(dp=2, ep=2),
}
_EXPERTS = {"dp2_ep2": ("moe", "moe_value")}
_TOKENS = ("sft", "grpo", "gspo")
_PP2 = LAYOUTS["pp2"]
_PP2_VPP2 = LAYOUTS["pp2_vpp2"]

GRID: dict[str, PrefixCase] = {}
"""Layout times recompute, each with all objectives."""
for _place, _layout in LAYOUTS.items():
    for _recompute in ("none", "full"):
        _model, _value_model = _EXPERTS.get(_place, ("plain", "other"))
        GRID[f"{_place}-{_recompute}"] = PrefixCase(
            layout=_layout, recompute=_recompute, model=_model, value_model=_value_model
        )

SPECIAL: dict[str, PrefixCase] = {
    "g1": PrefixCase(layout=_PP2, shape="g1", kinds=_TOKENS),
    "g2": PrefixCase(layout=_PP2, shape="g2", kinds=_TOKENS),
    "g8": PrefixCase(layout=_PP2, shape="g8", kinds=_TOKENS),
    "one-token": PrefixCase(layout=_PP2, shape="one-token prompts", kinds=_TOKENS),
    "no-response": PrefixCase(layout=_PP2, shape="no responses", kinds=_TOKENS),
    "depth3": PrefixCase(layout=_PP2, shape="depth 3", kinds=_TOKENS),
    "cut": PrefixCase(layout=_PP2, shape="cut in two", kinds=_TOKENS),
    "equal": PrefixCase(layout=_PP2, shape="equal samples", kinds=_TOKENS),
    "cp2_depth3": PrefixCase(layout=LAYOUTS["cp2"], shape="depth 3", kinds=_TOKENS),
    "sft_all": PrefixCase(layout=_PP2, kinds=("sft_all",)),
    "sft_all_cp2": PrefixCase(layout=LAYOUTS["cp2"], kinds=("sft_all",)),
    "reward": PrefixCase(layout=_PP2, kinds=("reward",)),
    "reward_cp2": PrefixCase(layout=LAYOUTS["cp2"], kinds=("reward",)),
    "mtp": PrefixCase(layout=_PP2, model="mtp", kinds=_TOKENS),
    "mtp_cp2": PrefixCase(layout=LAYOUTS["cp2"], model="mtp", kinds=_TOKENS),
    "mtp_pp2_vpp2_recompute": PrefixCase(
        layout=_PP2_VPP2, model="mtp", recompute="full", kinds=_TOKENS
    ),
    "untied": PrefixCase(layout=_PP2, model="other", kinds=_TOKENS),
    "mla": PrefixCase(layout=_PP2, model="mla", kinds=_TOKENS),
    "mla_cp2": PrefixCase(layout=LAYOUTS["cp2"], model="mla", kinds=_TOKENS),
    "frozen": PrefixCase(
        layout=_PP2, kinds=_TOKENS, frozen=("embedding.*", "decoder.layers.[0-3].*")
    ),
    "selective": PrefixCase(layout=LAYOUTS["tp2_sp"], recompute="selective", kinds=_TOKENS),
    "selective_cp2": PrefixCase(layout=LAYOUTS["cp2"], recompute="selective", kinds=_TOKENS),
    "uniform": PrefixCase(layout=_PP2_VPP2, policy=Policy(row_shape="uniform"), kinds=_TOKENS),
    "padding": PrefixCase(
        layout=Layout(pp=2, vpp=2, microbatch_group_size=12), kinds=_TOKENS
    ),
    "cp2_pp2_vpp2": PrefixCase(layout=Layout(cp=2, pp=2, vpp=2), kinds=_TOKENS),
    "moe": PrefixCase(layout=Layout(), model="moe", kinds=_TOKENS),
    "moe_cp2": PrefixCase(layout=LAYOUTS["cp2"], model="moe", kinds=_TOKENS),
    "moe_tp2_sp": PrefixCase(layout=LAYOUTS["tp2_sp"], model="moe", kinds=_TOKENS),
    "moe_replay": PrefixCase(layout=LAYOUTS["dp2_ep2"], model="moe_replay", kinds=_TOKENS),
    "moe_replay_pp2": PrefixCase(
        layout=_PP2, model="moe_replay", recompute="full", kinds=_TOKENS
    ),
    "bf16": PrefixCase(layout=_PP2, model="bf16", kinds=_TOKENS),
}
"""Shapes of samples and features of models."""

ALL_CASES = GRID | SPECIAL
