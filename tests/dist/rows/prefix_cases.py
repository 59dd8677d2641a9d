"""The cases with shared prefixes, as data."""

from __future__ import annotations

import functools
from typing import Any

from megapack.policy import Policy
from tests.dist.rows.row_case import ENDS_ALONE, RowCase
from tests.dist.rows.row_problem import CORRECTED, FROZEN, TAUGHT

_TOKENS = ("sft", "grpo", "gspo")
_TWO = ("sft", "grpo")
_AHEAD = ("sft", "gspo")
_PLACES = ("single", "pp2", "pp2_vpp2", "pp4", "dp2", "tp2_sp", "cp2", "dp2_ep2")
_EXPERTS: dict[str, Any] = {"dp2_ep2": {"model": "moe", "value_model": "moe_value"}}
_case = functools.partial(RowCase, shape="mixed", shares=True)
_all = functools.partial(_case, kinds=(*_TOKENS, "dpo", "value"))
_taught = functools.partial(_case, title="trees of prefixes", shape="depth 3", kinds=TAUGHT)
_turns = functools.partial(_case, title="turns of agents", shape="agents", is_planned=True)

GRID = {
    f"{place}-{recompute}": _all(place, recompute=recompute, **_EXPERTS.get(place, {}))
    for place in _PLACES
    for recompute in ("none", "full")
}
"""Layout times recompute, each with all objectives."""

SPECIAL = {
    "g1": _case("pp2", title="1 response per prompt", shape="g1"),
    "g2": _case("pp2", title="2 responses per prompt", shape="g2"),
    "g8": _case("pp2", title="8 responses per prompt", shape="g8"),
    "one-token": _case("pp2", title="prompts of one token", shape="one-token prompts"),
    "no-response": _case("pp2", title="samples that are their prompt alone", shape="no responses"),
    "depth3": _case("pp2", title="trees of depth 4", shape="depth 3"),
    "cut": _case("pp2", title="a family cut in two by the budget", shape="cut in two"),
    "equal": _case("pp2", title="equal samples", shape="equal samples"),
    "cp2_depth3": _case("cp2", title="trees of depth 3", shape="depth 3"),
    "agents_dp2_pp2": _turns("dp2_pp2", kinds=(*_TOKENS, "value")),
    "agents_cp2_full": _turns("cp2", recompute="full"),
    "agents_tp2_sp": _turns("tp2_sp", kinds=_TWO),
    "agents_mtp": _turns("cp2", model="mtp", kinds=_AHEAD),
    "agents_moe": _turns("dp2_ep2", model="moe", kinds=_TWO),
    "agents_moe_replay": _turns("pp2", model="moe_replay", kinds=_TWO),
    "agents_window": _turns("pp2", model="window", kinds=_TWO),
    "agents_dsa": _turns("pp2", model="dsa", kinds=_TWO),
    "teacher": _taught("pp2"),
    "teacher_pp2_vpp2_full": _taught("pp2_vpp2", recompute="full"),
    "teacher_tp2_sp": _taught("tp2_sp"),
    "teacher_cp2": _taught("cp2"),
    "corrected_cp2_pp2_vpp2": _case("cp2_pp2_vpp2", title="all shapes", kinds=CORRECTED),
    "sft_all": _case("pp2", title="losses on prompts", kinds=("sft_all",)),
    "sft_all_cp2": _case("cp2", title="losses on prompts", kinds=("sft_all",)),
    "reward": _case("pp2", title="pairs", kinds=("reward",)),
    "reward_cp2": _case("cp2", title="pairs", kinds=("reward",)),
    "mtp": _case("pp2", model="mtp", kinds=_AHEAD),
    "mtp_cp2": _case("cp2", model="mtp", kinds=_AHEAD),
    "mtp_pp2_vpp2_selective": _case("pp2_vpp2", model="mtp", recompute="selective", kinds=_AHEAD),
    "untied": _case("pp2", model="other", kinds=_TWO),
    "mla": _case("pp2", model="mla", kinds=_TWO),
    "mla_cp2": _case("cp2", model="mla", kinds=_TWO),
    "window": _case("pp2", model="window", recompute="full", kinds=_TWO),
    "window_cp2": _case("cp2", model="window", kinds=_TWO),
    "window_tp2_sp": _case("tp2_sp", model="window", kinds=_TWO),
    "no windows": _case("pp2", model="window", kinds=("sft",), mutation="no windows"),
    "no sinks": _case("pp2", model="window", kinds=("sft",), mutation="no sinks"),
    "dsa": _case("pp2", model="dsa", kinds=_TWO),
    "dsa_tp2_sp_selective": _case("tp2_sp", model="dsa", recompute="selective", kinds=_TWO),
    "dsa_cp2": _case("cp2", model="dsa", kinds=_TWO),
    "frozen": _case("pp2", frozen=FROZEN, kinds=_TWO),
    "selective": _case("tp2_sp", recompute="selective", kinds=_TWO),
    "selective_cp2": _case("cp2", recompute="selective", kinds=_TWO),
    "weights_later": _case("pp2", lag=2),
    "uniform": _case(
        "pp2_vpp2",
        title="uniform rows",
        policy=Policy(row_shape="uniform"),
        kinds=_TWO,
        expect={"dummy_rows": 1},
    ),
    "shapes": _case("pp2_vpp2", title="two row lengths", policy=Policy(row_shapes=2), kinds=_TWO),
    "padding": _case(
        "pp2_vpp2_g12",
        title="padding micro-batches, G=12",
        shape="pairs",
        kinds=("grpo", "dpo"),
        expect={"padding_rows": 1},
    ),
    "cp2_pp2_vpp2": _case("cp2_pp2_vpp2", title="all shapes"),
    "moe": _case("single", model="moe", kinds=_TWO),
    "moe_cp2": _case("cp2", model="moe", kinds=_TWO),
    "moe_tp2_sp": _case("tp2_sp", model="moe", kinds=_TWO),
    "moe_replay": _case("dp2_ep2", model="moe_replay", kinds=_TWO),
    "moe_replay_pp2": _case("pp2", model="moe_replay", recompute="full", kinds=_TWO),
    "bf16": _case("pp2", title="bf16", model="bf16", kinds=("sft",)),
    "mla_ends_alone": _case("pp2_vpp2", model="mla", split=ENDS_ALONE, kinds=_TWO),
    "moe_ends_alone": _case("pp2_vpp2", model="moe", split=ENDS_ALONE, kinds=_TWO),
    "window_ends_alone": _case("pp2_vpp2", model="window", split=ENDS_ALONE, kinds=_TWO),
}
"""Shapes of samples and features of models."""

# With and without recompute, and each way to divide a model that has code for branches: chunks,
# context, tensors, experts, with each objective. The others of the grid differ in the number of
# stages, or divide nothing. The shape "mixed" has what the other shapes have, so of the special
# cases only those whose model or plan needs code for branches are here. Context parallelism with
# multi-token prediction and other objectives is among those of `wide_cases`.
TESTED = (
    *("pp2_vpp2-full", "tp2_sp-none", "dp2_ep2-full", "cp2-none"),
    *("moe_replay_pp2", "reward_cp2", "sft_all", "padding", "bf16"),
    *("window_tp2_sp", "no windows", "no sinks", "dsa_cp2", "teacher", "mla_ends_alone", "mla_cp2"),
    *("corrected_cp2_pp2_vpp2", "agents_dp2_pp2"),
)
"""The cases of the tests. tools/exactness.py runs all."""
