"""`Layout` agrees with Megatron's own generator of process groups about experts."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from megapack import ConfigError, Layout

pytestmark = pytest.mark.unit

ORDER = "tp-cp-ep-dp-pp"  # the default of initialize_model_parallel
SIZES = st.integers(1, 6)


def groups(layout: Layout, name: str) -> list[list[int]]:
    """Ranks of each group of attention: as Megatron makes them from a layout."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    return RankGenerator(**sizes, ep=1, order=ORDER).get_ranks(name)  # type: ignore[no-any-return]


def expert_groups(layout: Layout, name: str) -> list[list[int]]:
    """Ranks of each group of experts."""
    sizes = {"tp": layout.etp, "ep": layout.ep, "dp": layout.expert_dp, "pp": layout.pp}
    return RankGenerator(**sizes, cp=1, order=ORDER).get_ranks(name)  # type: ignore[no-any-return]


@given(dp=SIZES, tp=SIZES, cp=SIZES, pp=st.integers(1, 2), ep=SIZES, etp=SIZES)
def test_experts_span_dp_ranks_if_a_group_of_megatron_does(
    dp: int, tp: int, cp: int, pp: int, ep: int, etp: int
) -> None:
    if tp % etp or (dp * cp * tp) % (etp * ep):
        with pytest.raises(ConfigError, match=r"^[^\n]*set [^\n]*$"):
            Layout(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
        return
    layout = Layout(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    dp_ranks = [set(group) for group in groups(layout, "tp-cp")]
    exchanges = expert_groups(layout, "tp-ep")
    within = all(any(set(group) <= ranks for ranks in dp_ranks) for group in exchanges)
    assert layout.ep_spans_dp == (not within)
    assert all(len(group) == layout.expert_dp for group in expert_groups(layout, "dp"))
    assert sum(map(len, exchanges)) == layout.world_size
    # Pipelines must be the same for both, which Megatron asserts.
    assert groups(layout, "pp") == expert_groups(layout, "pp")


@given(dp=SIZES, tp=SIZES, cp=SIZES, ep=SIZES, etp=SIZES)
def test_a_payload_gives_the_same_layout(dp: int, tp: int, cp: int, ep: int, etp: int) -> None:
    assume(tp % etp == 0 and (dp * cp * tp) % (etp * ep) == 0)
    layout = Layout(dp=dp, tp=tp, cp=cp, ep=ep, etp=etp)
    assert Layout.from_payload(layout.to_payload()) == layout
