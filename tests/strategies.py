"""Random layouts, policies and cost models of property tests and fuzz targets.

`choose` takes one of several values: hypothesis draws it (`chooser`), or a fuzzer's bytes do. The
arguments of each function are the values to choose from; what stands there more often is chosen
more often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from megapack import (
    CostModel,
    Layout,
    MegapackError,
    Plan,
    Policy,
    build_dp_schedule,
)

Choose = Callable[[Sequence[Any]], Any]

POLICY: dict[str, Sequence[Any]] = {
    "count_rule": ("legal", "multiple"),
    "unreachable": ("pad", "drop", "error"),
    "oversize": ("alone", "alone", "error"),
    "row_shape": ("planned", "planned", "uniform"),
    "round_row_tokens": (None, None, None, 24),
    "row_shapes": (None, None, 1, 3),
    "balance": ("time",),
    "step_split": ("contiguous", "balanced"),
    "search": (0, 1, 40, 300),
    "group_size": ("fixed",),
    "max_live_tokens_per_gpu": (None, *range(200, 5001, 200)),
    "share_prefixes": ("auto", "auto", "off"),
    "context_parallel": ("fixed",) * 5 + ("dynamic",),
    "max_width": (None, None, 2),
    "split_samples": ("off",) * 5 + ("auto",),
    "least_piece": (None, None, 1, 40),
    "backward": ("joint",) * 5 + ("split",),
    "images": ("ahead",) * 5 + ("row",),
    "max_patches_per_gpu": (None,),
    "adapters": ("group", "group", "one"),
}
"""Every field of `Policy`."""
_COST: dict[str, Sequence[float]] = {
    "fixed": (0.0, 1.0, 100.0),
    "per_token": (0.0, 1.0),
    "per_token_sq": (0.0, 1e-2),
    "per_sample": (0.0, 3.0),
    "p2p": (0.0, 2.0),
    "backward_ratio": (0.5, 2.0),
}


def chooser(draw: st.DrawFn) -> Choose:
    """Choices that hypothesis draws."""
    return lambda values: draw(st.sampled_from(values))


def layout(
    choose: Choose,
    *,
    dp: Sequence[int] = range(1, 5),
    tp: Sequence[int] = (1, 2),
    pp: Sequence[int] = (1, 1, 2, 3, 4),
    vpp: Sequence[int] = (1, 2),
    cp: Sequence[int] = (1, 1, 2),
    fp8: Sequence[Any] = (False, False, True),
) -> Layout:
    """A layout with or without interleaved stages, and experts on one rank or on all of DP x CP."""
    stages = choose(pp)
    chunks = choose(vpp) if stages > 1 else 1
    ranks, slices = choose(dp), choose(cp)
    groups = (None, *range(stages, 2 * stages + 3)) if chunks > 1 else (None,)
    return Layout(
        dp=ranks,
        tp=choose(tp),
        pp=stages,
        vpp=chunks,
        cp=slices,
        ep=choose((1, 1, ranks * slices)),
        sequence_parallel=choose((False, True)),
        microbatch_group_size=choose(groups),
        fp8=choose(fp8),
    )


def policy(choose: Choose, **fields: Sequence[Any]) -> Policy:
    """A policy."""
    return Policy(**{name: choose(values) for name, values in (POLICY | fields).items()})


def cost(choose: Choose, **fields: Sequence[float]) -> CostModel | None:
    """A cost model, or None for the assumed one."""
    chosen = {name: choose(values) for name, values in (_COST | fields).items()}
    return choose((None, CostModel(**chosen)))  # type: ignore[no-any-return]


def long_and_short(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Mostly short samples, a few long ones, and sets of neighbours that stay together.

    Returns:
        lengths, and arguments of `build_dp_schedule` other than layout, policy and cost.
    """
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=40))
    lengths += draw(st.lists(st.integers(100, 900), max_size=4))
    size = draw(st.sampled_from([1, 1, 1, 2, 3]))
    return lengths, {
        "max_tokens_per_gpu": draw(st.integers(30, 600)),
        "colocate_ids": [i // size for i in range(len(lengths))] if size > 1 else None,
        "num_steps": draw(st.sampled_from([None, None, 2])),
        "forward_only": draw(st.sampled_from([False, False, False, True])),
    }


def planned(lengths: list[int], arguments: dict[str, Any]) -> Plan | None:
    """The plan; None if it is refused in one line."""
    try:
        return build_dp_schedule(lengths, **arguments)
    except MegapackError as error:
        if len(str(error).splitlines()) != 1:
            raise
        return None


def replanned(plan: Plan, lengths: list[int], arguments: dict[str, Any]) -> None:
    """Hold that a plan survives JSON, and that equal arguments give it again."""
    assert Plan.from_json(plan.to_json()) == plan
    again = planned(lengths, arguments)
    assert again is not None
    assert again.digest() == plan.digest()
