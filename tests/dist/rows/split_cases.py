"""The cases with samples or families in pieces, as data."""

from __future__ import annotations

import functools
from dataclasses import replace

from megapack.policy import Policy
from tests.dist.rows.row_case import ENDS_ALONE, RowCase
from tests.dist.rows.row_problem import FROZEN, TAUGHT

_TWO = ("sft", "grpo")
_PLACES = {
    **{place: place for place in ("single", "pp2", "pp4")},
    "pp2_vpp2": "pp2_vpp2_g4",
    **{place: place for place in ("dp2_pp2", "tp2_sp_pp2", "cp2_pp2")},
}
_case = functools.partial(RowCase, shape="split")
_PLANNED = Policy(
    split_samples="auto", backward="split", unreachable="pad", max_live_tokens_per_gpu=400
)
_wide = functools.partial(_case, title="beside rows over several ranks", shape="joined")
_over = functools.partial(_case, title="over several ranks", shape="wide pieces")
_shared = functools.partial(_case, title="beside shared prefixes", shape="shared", shares=True)
_turns = functools.partial(_case, title="turns of agents", shape="agents", shares=True, kinds=_TWO)
_family = functools.partial(_case, title="families", shape="family", shares=True)

GRID = {
    f"{name}-{recompute}": _case(place, recompute=recompute)
    for name, place in _PLACES.items()
    for recompute in ("none", "full")
}
"""Layout times recompute, each with all objectives of tokens and of samples."""

MUTATED = {
    **{
        mutation: _case("pp2", kinds=("sft",), mutation=mutation)
        for mutation in ("no carried gradients", "no carried keys", "no losses of a piece")
    },
    **{
        f"family, {mutation}": _family("pp2", kinds=("sft",), mutation=mutation)
        for mutation in ("no carried gradients", "no carried keys")
    },
    "wide, no carried gradients": _wide("dp2_pp2", kinds=("sft",), mutation="no carried gradients"),
    "wide, no exchanged keys": _wide("dp2_pp2", kinds=("sft",), mutation="no exchanged keys"),
    **{
        f"over two, {mutation}": _over("dp2_pp2", kinds=("sft",), mutation=mutation)
        for mutation in ("no carried gradients", "no carried keys", "no exchanged keys")
    },
    **{
        f"dsa, {mutation}": _family("single", model="dsa", kinds=("sft",), mutation=mutation)
        for mutation in ("all keys are chosen", "shared tokens count once")
    },
}

FAMILIES = {
    f"family_{name}-{recompute}": _family(
        _PLACES[name], recompute=recompute, kinds=(*_TWO, "gspo", "dpo")
    )
    for name, recompute in [
        *[("single", "none"), ("pp2", "full"), ("pp2_vpp2", "none"), ("dp2_pp2", "full")],
        *[("tp2_sp_pp2", "none"), ("cp2_pp2", "full")],
    ]
} | {
    "family_sft_all": _family("pp2", title="families, losses on prompts", kinds=("sft_all",)),
    "family_value": _family("pp2", title="families, values", kinds=("value", "reward")),
    "family_selective": _family("pp2", recompute="selective", kinds=_TWO),
    "family_weights_later": _family("pp2", lag=2, kinds=_TWO),
    "family_mla_full": _family("pp2", model="mla", recompute="full", kinds=_TWO),
    "family_dsa_full": _family("pp2", model="dsa", recompute="full", kinds=_TWO),
    "family_moe": _family("pp2_tp2_sp_ep2", model="moe", kinds=_TWO),
    "family_moe_dp2": _family("dp2_pp2_ep2", model="moe", lag=1, kinds=_TWO),
    "family_moe_full": _family("pp2", model="moe", recompute="full", kinds=_TWO),
    "family_moe_replay_full": _family("cp2_ep2", model="moe_replay", recompute="full", kinds=_TWO),
}

SPECIAL = {
    **MUTATED,
    **FAMILIES,
    "agents_dp2_pp2": _turns("dp2_pp2"),
    "agents_cp2_pp2_full": _turns("cp2_pp2", recompute="full"),
    "agents_moe_full": _turns("pp2", model="moe", recompute="full"),
    "shared_pp2-none": _shared("pp2"),
    "shared_pp2_vpp2-full": _shared("pp2_vpp2_g4", recompute="full"),
    "shared_cp2_pp2-full": _shared("cp2_pp2", recompute="full"),
    "shared_moe": _shared("pp2", model="moe", kinds=_TWO),
    "shared_mla_full": _shared("pp2", model="mla", recompute="full", kinds=_TWO),
    "weights_later": _case("pp2", lag=2),
    "teacher": _shared("pp2", kinds=TAUGHT),
    "teacher_tp2_sp": _case("tp2_sp_pp2", kinds=TAUGHT),
    "teacher_cp2": _case("cp2_pp2", kinds=TAUGHT),
    "sft_all": _case("pp2", title="losses on prompts", kinds=("sft_all",)),
    "value": _case("pp2", title="values", kinds=("value",)),
    "value_cp2_full": _case("cp2_pp2", title="values", recompute="full", kinds=("value",)),
    "selective": _case("pp2", recompute="selective", kinds=_TWO),
    "untied": _case("pp2", model="other", kinds=_TWO),
    "frozen": _case("pp2", frozen=FROZEN, kinds=_TWO),
    "mla_full": _case("pp2", model="mla", recompute="full", kinds=_TWO),
    "mla_cp2": _case("cp2", model="mla", kinds=_TWO),
    "local_cp2": _case("cp2", model="local", kinds=("sft",)),
    "window_cp2_pp2": _case("cp2_pp2", model="window", kinds=_TWO),
    "window_pp2_vpp2_full": _case("pp2_vpp2_g4", model="window", recompute="full", kinds=_TWO),
    "family_window_full": _family("pp2", model="window", recompute="full", kinds=_TWO),
    "dsa_full": _case("pp2", model="dsa", recompute="full", kinds=_TWO),
    "dsa_cp2": _case("cp2", model="dsa", kinds=_TWO),
    "dsa_tp2_sp_later": _case("tp2_sp_pp2", model="dsa", lag=1, kinds=_TWO),
    "moe": _case("pp2_tp2_sp_ep2", model="moe"),
    "moe_full": _case("pp2", model="moe", recompute="full", kinds=_TWO),
    "moe_bias_cp2_selective": _case("cp2_ep2", model="moe_bias", recompute="selective", kinds=_TWO),
    "moe_replay_full": _case("cp2_ep2", model="moe_replay", recompute="full", kinds=_TWO),
    "wide": _wide("dp2_pp2"),
    "wide_later": _wide("dp2_pp2", lag=1),
    "wide_pp2_vpp2_later": _wide("dp2_pp2_vpp2_g4", lag=1),
    "wide_pp2_vpp2_full": _wide("dp2_pp2_vpp2_g4", recompute="full", lag=1),
    "wide_dp4_later_full": _wide("dp4", recompute="full", lag=1),
    "wide_cp2": _wide("dp2_cp2", lag=1),
    "wide_tp2_sp": _wide("dp2_tp2_sp", lag=1, kinds=_TWO),
    "wide_value": _wide("dp2_pp2", kinds=("value",)),
    "wide_mla": _wide("dp2_pp2", model="mla", lag=1, kinds=_TWO),
    "wide_moe": _wide("dp2_pp2_ep2", model="moe", lag=1, kinds=_TWO),
    "wide_moe_bias_dp4_full": _wide("dp4_ep2", model="moe_bias", recompute="full", kinds=_TWO),
    "over_two": _over("dp2_pp2"),
    "over_two_later_full": _over("dp2_pp2", recompute="full", lag=1),
    "over_two_pp2_vpp2_later": _over("dp2_pp2_vpp2_g4", lag=1),
    "over_two_of_dp4_later_full": _over("dp4", recompute="full", lag=1, expect={"orders": 3}),
    "over_two_cp2": _over("dp2_cp2", lag=1),
    "over_two_tp2_sp": _over("dp2_tp2_sp", lag=1, kinds=_TWO),
    "over_two_value": _over("dp2_pp2", kinds=("value",)),
    "over_two_mla": _over("dp2_pp2", model="mla", lag=1, kinds=_TWO),
    "over_two_window": _over("dp2_pp2", model="window", lag=1, kinds=_TWO),
    "over_two_dsa": _over("dp2_pp2", model="dsa", lag=1, kinds=_TWO),
    "over_two_moe": _over("dp2_pp2_ep2", model="moe", lag=1, kinds=_TWO),
    "over_two_moe_bias_of_dp4_full": _over(
        "dp4_ep2", model="moe_bias", recompute="full", kinds=_TWO
    ),
    "moe_dp2": _case("dp2_pp2_ep2", model="moe", kinds=_TWO),
    "moe_dp2_later": _case("dp2_pp2_ep2", model="moe", lag=1, kinds=_TWO),
    "moe_dp2_pp2_vpp2_later_full": _case(
        "dp2_pp2_vpp2_g4_ep2", model="moe", recompute="full", lag=1, kinds=_TWO
    ),
    "moe_bias_dp2_selective": _case(
        "dp2_pp2_ep2", model="moe_bias", recompute="selective", kinds=_TWO
    ),
    "moe_bias_dp2_tp2_later": _case("dp2_tp2_sp_ep4", model="moe_bias", lag=1, kinds=_TWO),
    "planned_moe_dp2": _case(
        "dp2_pp2_ep2",
        title="a plan of the planner",
        model="moe",
        is_planned=True,
        policy=_PLANNED,
        kinds=_TWO,
        expect={"pieces": [2, 2, 3]},
    ),
    "planned_shapes": _case(
        "dp2_pp2",
        title="a plan of the planner, three row lengths",
        is_planned=True,
        policy=replace(_PLANNED, row_shapes=3),
        kinds=_TWO,
    ),
    "moe_replay_dp2_full": _case("dp2_pp2_ep2", model="moe_replay", recompute="full", kinds=_TWO),
    "bf16": _case("pp2", title="bf16", model="bf16", kinds=("sft",)),
    "mla_ends_alone": _shared("pp2_vpp2_g4", model="mla", split=ENDS_ALONE, kinds=_TWO),
    "moe_ends_alone": _shared("pp2_vpp2_g4", model="moe", split=ENDS_ALONE, kinds=_TWO),
    "window_ends_alone": _shared("pp2_vpp2_g4", model="window", split=ENDS_ALONE, kinds=_TWO),
}

TESTED = (
    *("pp2_vpp2-none", "tp2_sp_pp2-none", "cp2_pp2-full", "value", "mla_full"),
    *("window_cp2_pp2", "teacher_cp2", *MUTATED),
    *("over_two_pp2_vpp2_later", "over_two_of_dp4_later_full"),
    *("shared_cp2_pp2-full", "shared_moe", "wide_pp2_vpp2_later", "wide_moe"),
    *("moe_bias_dp2_selective", "moe_replay_dp2_full", "planned_moe_dp2"),
    *("family_pp2_vpp2-none", "family_cp2_pp2-full", "family_moe_replay_full"),
    *("family_dsa_full", "mla_ends_alone", "agents_moe_full"),
)
"""The cases of the tests; tools/exactness.py runs all that are not mutated."""
