"""The cases with shared prefixes, as data."""

from __future__ import annotations

from megapack.layout import Layout
from megapack.policy import Policy
from tests.dist.rows.prefix_problem import PrefixCase

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
    "g1": PrefixCase(title="1 response per prompt", layout=_PP2, shape="g1", kinds=_TOKENS),
    "g2": PrefixCase(title="2 responses per prompt", layout=_PP2, shape="g2", kinds=_TOKENS),
    "g8": PrefixCase(title="8 responses per prompt", layout=_PP2, shape="g8", kinds=_TOKENS),
    "one-token": PrefixCase(
        title="prompts of one token", layout=_PP2, shape="one-token prompts", kinds=_TOKENS
    ),
    "no-response": PrefixCase(
        title="samples that are their prompt alone",
        layout=_PP2,
        shape="no responses",
        kinds=_TOKENS,
    ),
    "depth3": PrefixCase(title="trees of depth 4", layout=_PP2, shape="depth 3", kinds=_TOKENS),
    "cut": PrefixCase(
        title="a family cut in two by the budget", layout=_PP2, shape="cut in two", kinds=_TOKENS
    ),
    "equal": PrefixCase(title="equal samples", layout=_PP2, shape="equal samples", kinds=_TOKENS),
    "cp2_depth3": PrefixCase(
        title="trees of depth 3", layout=LAYOUTS["cp2"], shape="depth 3", kinds=_TOKENS
    ),
    "sft_all": PrefixCase(title="losses on prompts", layout=_PP2, kinds=("sft_all",)),
    "sft_all_cp2": PrefixCase(title="losses on prompts", layout=LAYOUTS["cp2"], kinds=("sft_all",)),
    "reward": PrefixCase(title="pairs", layout=_PP2, kinds=("reward",)),
    "reward_cp2": PrefixCase(title="pairs", layout=LAYOUTS["cp2"], kinds=("reward",)),
    "mtp": PrefixCase(
        title="multi-token prediction, 2 depths", layout=_PP2, model="mtp", kinds=("sft", "gspo")
    ),
    "mtp_cp2": PrefixCase(
        title="multi-token prediction, 2 depths",
        layout=LAYOUTS["cp2"],
        model="mtp",
        kinds=("sft", "gspo"),
    ),
    "mtp_pp2_vpp2_selective": PrefixCase(
        title="multi-token prediction, recompute selective",
        layout=_PP2_VPP2,
        model="mtp",
        recompute="selective",
        kinds=("sft", "gspo"),
    ),
    "untied": PrefixCase(
        title="untied, LayerNorm, GELU, wide heads, query norms",
        layout=_PP2,
        model="other",
        kinds=("sft", "grpo"),
    ),
    "mla": PrefixCase(
        title="multi-latent attention", layout=_PP2, model="mla", kinds=("sft", "grpo")
    ),
    "mla_cp2": PrefixCase(
        title="multi-latent attention", layout=LAYOUTS["cp2"], model="mla", kinds=("sft", "grpo")
    ),
    "frozen": PrefixCase(
        title="frozen `embedding.*`, `decoder.layers.[0-3].*`",
        layout=_PP2,
        kinds=("sft", "grpo"),
        frozen=("embedding.*", "decoder.layers.[0-3].*"),
    ),
    "selective": PrefixCase(
        title="recompute selective",
        layout=LAYOUTS["tp2_sp"],
        recompute="selective",
        kinds=("sft", "grpo"),
    ),
    "selective_cp2": PrefixCase(
        title="recompute selective",
        layout=LAYOUTS["cp2"],
        recompute="selective",
        kinds=("sft", "grpo"),
    ),
    "uniform": PrefixCase(
        title="uniform rows",
        layout=_PP2_VPP2,
        policy=Policy(row_shape="uniform"),
        kinds=("sft", "grpo"),
        expect={"dummy_rows": 1},
    ),
    "padding": PrefixCase(
        title="padding micro-batches, G=12",
        layout=Layout(pp=2, vpp=2, microbatch_group_size=12),
        shape="pairs",
        kinds=("grpo", "dpo"),
        expect={"padding_rows": 1},
    ),
    "cp2_pp2_vpp2": PrefixCase(title="all shapes", layout=Layout(cp=2, pp=2, vpp=2), kinds=_TOKENS),
    "moe": PrefixCase(
        title="4 experts, balance and z-loss", layout=Layout(), model="moe", kinds=("sft", "grpo")
    ),
    "moe_cp2": PrefixCase(
        title="4 experts, balance and z-loss",
        layout=LAYOUTS["cp2"],
        model="moe",
        kinds=("sft", "grpo"),
    ),
    "moe_tp2_sp": PrefixCase(
        title="4 experts, balance and z-loss",
        layout=LAYOUTS["tp2_sp"],
        model="moe",
        kinds=("sft", "grpo"),
    ),
    "moe_replay": PrefixCase(
        title="routes replayed",
        layout=LAYOUTS["dp2_ep2"],
        model="moe_replay",
        kinds=("sft", "grpo"),
    ),
    "moe_replay_pp2": PrefixCase(
        title="routes replayed, recompute full",
        layout=_PP2,
        model="moe_replay",
        recompute="full",
        kinds=("sft", "grpo"),
    ),
    "bf16": PrefixCase(title="bf16", layout=_PP2, model="bf16", kinds=("sft",)),
}
"""Shapes of samples and features of models."""

ALL_CASES = GRID | SPECIAL

# With and without recompute, and each way to divide a model that has code for branches: chunks,
# context, tensors, experts. The others of the grid differ in the number of stages, or divide
# nothing. The shape "mixed" has what the other shapes have, so of the special cases only those
# whose model or plan needs code for branches are here. Context parallelism with multi-token
# prediction and other objectives is among `wide_cases.CASES`.
CASES = (
    *("pp2_vpp2-full", "tp2_sp-none", "dp2_ep2-full"),
    *("moe_replay_pp2", "reward_cp2", "sft_all", "padding", "bf16"),
)
"""The cases of the tests. tools/exactness.py runs all."""
