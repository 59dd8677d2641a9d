"""The layouts and features whose waits of the host are counted, as data."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

from megapack.base.choices import Executor, Kernel
from megapack.layout import Layout
from tests.dist import problem
from tests.megatron import HAS_HYBRID

Rows = Literal["plain", "shared", "pieces", "wide"]


MODELS = {name: model for name, (model, _) in problem.MODELS.items()} | {
    # Fused attention takes heads of multiples of 8 channels.
    "mla": dataclasses.replace(
        problem.MLA_MODEL, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16
    ),
    # Both kinds of recurrent layers in as many layers as the others have.
    "hybrid": dataclasses.replace(problem.HYBRID_MODEL, num_layers=4, hybrid_layer_pattern="GM*-"),
}


@dataclass(frozen=True, kw_only=True)
class WaitCase:
    """A layout, a feature and an attention kernel."""

    layout: Layout
    attention: Kernel = "te"
    """Fused kernels run in bf16, "sdpa" in fp32."""
    model: str = "plain"
    """The name of one of `MODELS`."""
    recompute: str = "none"
    value_head: bool = False
    rows: Rows = "plain"
    """What rows hold: whole samples, shared prefixes, pieces of samples, or slices of wide rows."""
    executor: Executor = "megatron"
    splits_backward: bool = False
    distributed_optimizer: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether layers have experts."""
        return self.model.startswith("moe")


LAYOUTS = {
    "single": Layout(),
    "tp2_sp": Layout(tp=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "cp2": Layout(cp=2),
    "dp2": Layout(dp=2),
    "dp2_ep2": Layout(dp=2, ep=2),
    "tp2_sp_etp2": Layout(tp=2, sequence_parallel=True, etp=2),
}
_ONE = LAYOUTS["single"]
_PP2 = LAYOUTS["pp2"]
_DP2 = LAYOUTS["dp2"]

_PLAIN = {
    name: WaitCase(layout=layout)
    for name, layout in LAYOUTS.items()
    if name not in ("dp2_ep2", "tp2_sp_etp2")
}
_FEATURES = {
    "dp2_sharded": WaitCase(layout=_DP2, distributed_optimizer=True),
    "moe": WaitCase(layout=_ONE, model="moe"),
    "moe_pp2": WaitCase(layout=_PP2, model="moe"),
    "moe_dp2_ep2": WaitCase(layout=LAYOUTS["dp2_ep2"], model="moe_bias"),
    "moe_tp2_sp_etp2": WaitCase(layout=LAYOUTS["tp2_sp_etp2"], model="moe"),
    "moe_replay": WaitCase(layout=_ONE, model="moe_replay"),
    "moe_replay_dp2_ep2": WaitCase(layout=LAYOUTS["dp2_ep2"], model="moe_replay"),
    "mla": WaitCase(layout=_ONE, model="mla"),
    "mla_tp2_sp": WaitCase(layout=LAYOUTS["tp2_sp"], model="mla"),
    "mla_cp2": WaitCase(layout=LAYOUTS["cp2"], model="mla"),
    "mtp": WaitCase(layout=_ONE, model="mtp"),
    "mtp_pp2": WaitCase(layout=_PP2, model="mtp"),
    "mtp_cp2": WaitCase(layout=LAYOUTS["cp2"], model="mtp"),
    "full": WaitCase(layout=_ONE, recompute="full"),
    "selective_pp2": WaitCase(layout=_PP2, recompute="selective"),
    "value": WaitCase(layout=_ONE, value_head=True),
    "value_pp2": WaitCase(layout=_PP2, value_head=True),
    "shared": WaitCase(layout=_ONE, rows="shared"),
    "shared_pp2_vpp2": WaitCase(layout=LAYOUTS["pp2_vpp2"], rows="shared"),
    "shared_cp2": WaitCase(layout=LAYOUTS["cp2"], rows="shared", attention="varlen"),
    "shared_mla": WaitCase(layout=_ONE, rows="shared", model="mla"),
    "pieces": WaitCase(layout=_ONE, rows="pieces", executor="operations"),
    "pieces_pp2": WaitCase(layout=_PP2, rows="pieces", executor="operations"),
    "pieces_cp2": WaitCase(
        layout=LAYOUTS["cp2"],
        rows="pieces",
        executor="operations",
        attention="varlen",
    ),
    "wide_dp2": WaitCase(layout=_DP2, rows="wide"),
    "operations_pp2": WaitCase(layout=_PP2, executor="operations"),
    "split_backward_pp2": WaitCase(layout=_PP2, executor="operations", splits_backward=True),
    "split_backward_moe_pp2": WaitCase(
        layout=_PP2,
        model="moe",
        executor="operations",
        splits_backward=True,
    ),
}
_TE = _PLAIN | _FEATURES
_hybrid = functools.partial(WaitCase, model="hybrid", attention="varlen")
_HYBRID = {
    "hybrid": _hybrid(layout=_ONE),
    "hybrid_pp2_full": _hybrid(layout=_PP2, recompute="full"),
    "hybrid_cp2": _hybrid(layout=LAYOUTS["cp2"]),
    "hybrid_shared": _hybrid(layout=_ONE, rows="shared"),
    "hybrid_shared_cp2": _hybrid(layout=LAYOUTS["cp2"], rows="shared"),
    "hybrid_pieces_pp2": _hybrid(
        layout=_PP2,
        rows="pieces",
        executor="operations",
    ),
    "hybrid_wide_dp2": _hybrid(layout=_DP2, rows="wide"),
}


def _with(kernel: Kernel, *names: str) -> dict[str, WaitCase]:
    return {f"{name}_{kernel}": dataclasses.replace(_TE[name], attention=kernel) for name in names}


_LOCAL = (
    *_PLAIN,
    *("moe", "mla", "mtp", "full", "shared", "pieces_pp2", "wide_dp2", "split_backward_pp2"),
)
ALL_CASES: dict[str, WaitCase] = {
    **_TE,
    **_with("varlen", *_LOCAL),
    **_with("sdpa", *_LOCAL),
    **(_HYBRID if HAS_HYBRID else {}),
}
"""All that the installed Megatron-Core has."""

CASES = (
    *("single", "moe", "cp2"),
    *("single_varlen", "shared_varlen", "pp2_vpp2_varlen"),
    *(("hybrid", "hybrid_shared", "hybrid_cp2") if HAS_HYBRID else ()),
)
"""The cases that CI runs."""
