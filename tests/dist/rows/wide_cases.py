"""The cases with wide rows, as data."""

from __future__ import annotations

import functools

from megapack.policy import Policy
from tests.dist.rows.row_case import ENDS_ALONE, RowCase
from tests.dist.rows.row_problem import FROZEN

_TWO = ("sft", "grpo")
_AHEAD = ("sft", "gspo")
_OTHERS = ("dpo", "value", "reward")
_PLACES = tuple(f"dp{dp}{more}" for dp in (2, 4) for more in ("", "_pp2", "_pp2_vpp2", "_tp2_sp"))
_case = functools.partial(RowCase, shape="wide")
_sharing = functools.partial(_case, title="shared prefixes", shares=True)
_planned = functools.partial(
    _case,
    title="a plan of the planner",
    is_planned=True,
    policy=Policy(context_parallel="dynamic"),
)
_ALL = Policy(context_parallel="dynamic", backward="split", unreachable="pad")

GRID = {
    f"{place}-{recompute}": _case(place, recompute=recompute)
    for place in _PLACES
    for recompute in ("none", "full")
}
"""Layout times recompute, each with all objectives of tokens and of samples."""

SPECIAL = {
    "cp2": _case("dp2_cp2", title="cp 2 and 4"),
    "cp2_full": _case("dp2_cp2", title="cp 2 and 4", recompute="full"),
    "cp2_pp2_vpp2": _case("dp2_cp2_pp2_vpp2", title="cp 2 and 4"),
    "cp2_dp4": _case("dp4_cp2", title="cp 2, 4 and 8"),
    "tp2_sp_pp2": _case("dp2_tp2_sp_pp2", title="all slices at once"),
    "sft_all": _case("dp4", title="losses on prompts", kinds=("sft_all",)),
    "others": _case("dp4", title="pairs and values", kinds=_OTHERS),
    "others_pp2_vpp2": _case("dp2_pp2_vpp2", title="pairs and values", kinds=_OTHERS),
    "others_cp2": _case("dp2_cp2", title="pairs and values", kinds=_OTHERS),
    "planned_weights": _planned(
        "dp2_pp2_ep2",
        shape="shared",
        model="moe",
        policy=_ALL,
        kinds=_TWO,
        expect={"rows_2": 2, "gpus": [1, 2]},
    ),
    "untied": _case("dp2_pp2", model="other", kinds=_TWO),
    "selective": _case("dp2_tp2_sp", recompute="selective", kinds=_TWO),
    "frozen": _case("dp2_pp2", frozen=FROZEN, kinds=_TWO),
    "mla": _case("dp4", model="mla", kinds=_TWO),
    "mla_pp2_full": _case("dp2_pp2", model="mla", recompute="full", kinds=_TWO),
    "mla_cp2": _case("dp2_cp2", model="mla", kinds=_TWO),
    "window": _case("dp2_pp2", model="window", kinds=_TWO),
    "dsa": _case("dp4", model="dsa", kinds=_TWO),
    "mtp": _case("dp4", model="mtp", kinds=_AHEAD),
    "mtp_pp2_vpp2_selective": _case(
        "dp2_pp2_vpp2", model="mtp", recompute="selective", kinds=_AHEAD
    ),
    "mtp_cp2": _case("dp2_cp2", model="mtp", kinds=_AHEAD),
    "moe": _case(
        "dp2_ep2", model="moe", value_model="moe_value", kinds=("sft", "grpo", "gspo", "value")
    ),
    "moe_dp4_full": _case("dp4_ep2", model="moe", recompute="full", kinds=_TWO),
    "moe_dp4_pp2_vpp2": _case("dp4_pp2_vpp2_ep2", model="moe", kinds=_TWO),
    "moe_bias": _case("dp2_ep2", model="moe_bias", kinds=_TWO),
    "moe_bias_dp4_ep4": _case("dp4_ep4", model="moe_bias", kinds=_TWO),
    "moe_bias_cp2_full": _case("dp2_cp2_ep2", model="moe_bias", recompute="full", kinds=_TWO),
    "moe_bias_tp2_sp": _case("dp2_tp2_sp_ep2", model="moe_bias", kinds=_TWO),
    "moe_replay": _case("dp2_ep2", model="moe_replay", kinds=_TWO),
    "moe_replay_dp4_full": _case("dp4_ep2", model="moe_replay", recompute="full", kinds=_TWO),
    "prefixes": _sharing("dp4", kinds=("sft", "grpo", "gspo", *_OTHERS)),
    "prefixes_pp2_vpp2_full": _sharing("dp2_pp2_vpp2", recompute="full"),
    "prefixes_cp2": _sharing("dp2_cp2"),
    "prefixes_tp2_sp": _sharing("dp2_tp2_sp", kinds=_TWO),
    "prefixes_mla": _sharing("dp4", model="mla", kinds=_TWO),
    "prefixes_dsa_full": _sharing("dp4", model="dsa", recompute="full", kinds=_TWO),
    "prefixes_mtp_cp2": _sharing("dp2_cp2", model="mtp", kinds=_AHEAD),
    "prefixes_moe_bias": _sharing("dp2_ep2", model="moe_bias", kinds=_TWO),
    "prefixes_moe_bias_tp2_sp_full": _sharing(
        "dp2_tp2_sp_ep2", model="moe_bias", recompute="full", kinds=_TWO
    ),
    "prefixes_moe_replay": _sharing("dp4_ep2", model="moe_replay", kinds=_TWO),
    "planner": _planned("dp4"),
    "planner_pp2_vpp2": _planned("dp4_pp2_vpp2", kinds=_TWO),
    "planner_shapes": _planned(
        "dp4",
        title="a plan of the planner, two row lengths",
        kinds=_TWO,
        policy=Policy(context_parallel="dynamic", row_shapes=2),
    ),
    "planner_prefixes": _planned(
        "dp4",
        title="a plan of the planner, shared prefixes",
        shares=True,
        kinds=_TWO,
        expect={"shared_tokens": 1},
    ),
    "mla_ends_alone": _case("dp2_pp2_vpp2", model="mla", split=ENDS_ALONE, kinds=_TWO),
    "moe_ends_alone": _case("dp2_pp2_vpp2", model="moe", split=ENDS_ALONE, kinds=_TWO),
    "window_ends_alone": _case("dp2_pp2_vpp2", model="window", split=ENDS_ALONE, kinds=_TWO),
}
"""Features of models and plans."""

# All four objectives with code for wide rows (sequences, pairs, values, scores), each way to divide
# a model, widths 1, 2 and 4, and each kind of attention. Later cases of a job find ranks in
# different numbers of groups, as the stages of pp2 are.
TESTED = (
    *("dp2_pp2_vpp2-full", "others", "mla", "planned_weights", "mla_ends_alone"),
    *("prefixes_dsa_full", "prefixes_mtp_cp2", "prefixes_moe_bias_tp2_sp_full"),
)
"""The cases of the tests; tools/exactness.py runs all."""
