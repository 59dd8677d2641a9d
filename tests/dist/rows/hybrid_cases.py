"""The cases of hybrid models: those of other models, with layers that carry states.

Names are those of the other cases after the model's name, such as gated_delta_prefixes_pp2-none.
"""

from __future__ import annotations

from dataclasses import replace

from tests.dist.rows import prefix_cases, split_cases, wide_cases
from tests.dist.rows.row_case import RowCase

_ALL = {
    f"{group}_{name}": case
    for group, module in (
        ("prefixes", prefix_cases),
        ("split", split_cases),
        ("wide", wide_cases),
    )
    for name, case in (module.GRID | module.SPECIAL).items()
}
_DENSE = (
    *("prefixes_single-none", "prefixes_pp2_vpp2-full", "prefixes_tp2_sp-none"),
    *("prefixes_cp2-full", "prefixes_depth3", "prefixes_cp2_depth3", "prefixes_weights_later"),
    *("prefixes_one-token", "prefixes_selective", "prefixes_frozen", "prefixes_uniform"),
    *("split_single-none", "split_pp2_vpp2-full", "split_tp2_sp_pp2-none", "split_cp2_pp2-full"),
    *("split_weights_later", "split_selective", "split_frozen", "split_value"),
    *("split_family_pp2-full", "split_family_pp2_vpp2-none", "split_family_cp2_pp2-full"),
    *("split_shared_pp2_vpp2-full", "split_shared_cp2_pp2-full", "split_wide_pp2_vpp2_full"),
    *("split_wide_cp2", "split_wide_tp2_sp", "wide_dp2-none"),
    *("split_over_two_pp2_vpp2_later", "split_over_two_cp2", "split_over_two_of_dp4_later_full"),
    *("wide_dp4_pp2_vpp2-full", "wide_cp2", "wide_tp2_sp_pp2", "wide_prefixes_cp2"),
    *("wide_prefixes_pp2_vpp2_full", "wide_others", "wide_planner_pp2_vpp2"),
    *("prefixes_agents_dp2_pp2", "prefixes_agents_cp2_full", "split_agents_dp2_pp2"),
)
_EXPERTS = (
    *("prefixes_moe", "prefixes_moe_cp2", "prefixes_moe_tp2_sp", "split_moe", "split_moe_full"),
    *("split_family_moe", "split_family_moe_full", "split_moe_dp2_later", "split_wide_moe"),
    *("wide_moe_dp4_full", "wide_moe_dp4_pp2_vpp2"),
)


def _case(name: str, model: str) -> RowCase:
    return replace(_ALL[name], model=model, value_model="hybrid")


GRID: dict[str, RowCase] = {}
_MUTATED = {
    f"{mutation}, {where}": replace(
        _case(name, "hybrid"),
        kinds=("sft",),
        mutation=mutation,
        stock=mutation == "no driven layers",
    )
    for mutation, where, name in (
        ("no tails of paths", "prefixes", "prefixes_pp2_vpp2-none"),
        ("no states of paths", "prefixes", "prefixes_pp2_vpp2-none"),
        ("no gradients through states", "prefixes", "prefixes_pp2_vpp2-none"),
        ("no carried states", "split", "split_pp2-none"),
        ("no gradients of carried states", "split", "split_pp2-none"),
        ("no exchanged heads", "wide", "wide_dp2-none"),
        ("no driven layers", "prefixes", "prefixes_pp2_vpp2-none"),
    )
}
_STOCK = {
    f"stock_{name}": replace(_case(name, "hybrid"), kinds=("grpo",), stock=True)
    for name in (
        *(
            "prefixes_pp2_vpp2-full",
            "prefixes_depth3",
            "split_pp2-none",
            "split_shared_pp2_vpp2-full",
        ),
        *("wide_dp2-none", "wide_prefixes_pp2_vpp2_full", "split_wide_pp2_vpp2_full"),
    )
}
SPECIAL = {
    **{f"hybrid_{name}": _case(name, "hybrid") for name in _DENSE},
    **{
        f"{model}_{name}": _case(name, model)
        for model in ("gated_delta", "mamba")
        for name in _EXPERTS
    },
    **_STOCK,
    **_MUTATED,
}
"""Both kinds of recurrent layers, each with experts, and mistakes that must be seen."""

TESTED = (
    *("hybrid_prefixes_pp2_vpp2-full", "hybrid_split_cp2_pp2-full"),
    *(
        "hybrid_split_wide_pp2_vpp2_full",
        "hybrid_split_over_two_cp2",
        "gated_delta_split_family_moe",
        "mamba_prefixes_moe_cp2",
    ),
    *("stock_prefixes_pp2_vpp2-full", "stock_split_pp2-none", "stock_wide_dp2-none"),
    *_MUTATED,
)
"""The cases of the tests. tools/exactness.py runs all."""
