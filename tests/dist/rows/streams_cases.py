"""The cases of models with hyper-connections: those of other models, which see one stream.

Megatron refuses to recompute whole layers of such a model, so these recompute none.
"""

from __future__ import annotations

from dataclasses import replace

from tests.dist.rows import prefix_cases, split_cases, wide_cases
from tests.dist.rows.row_case import RowCase

_NAMES = {
    prefix_cases: ("pp2_vpp2-none", "tp2_sp-none", "cp2-none", "depth3", "weights_later"),
    split_cases: (
        *("pp2_vpp2-none", "tp2_sp_pp2-none", "weights_later", "family_pp2_vpp2-none"),
        *("shared_pp2-none", "over_two", "over_two_cp2"),
    ),
    wide_cases: ("dp2_pp2-none", "tp2_sp_pp2"),
}

GRID: dict[str, RowCase] = {}
SPECIAL = {
    f"{module.__name__.rpartition('.')[2].removesuffix('_cases')}_{name}": replace(
        (module.GRID | module.SPECIAL)[name], model="streams", kinds=("sft", "grpo")
    )
    for module, names in _NAMES.items()
    for name in names
}

TESTED = tuple(SPECIAL)
"""The cases of the tests: all."""
